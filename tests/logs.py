"""The log of a run that trains nothing: what the tests of rows and those of trackers share."""

from pathlib import Path

from lowmem.run.log import RunLog
from lowmem.settings import Settings
from lowmem.units import GIB

NO_GPU = {"gpu_allocated_peak_bytes": None, "gpu_reserved_peak_bytes": None}
PLAN = {
    "fits": True,
    "choice": {"micro_batch": 2},
    "limits": {"gpu_bytes": 11 * GIB, "ram_bytes": 6 * GIB},
    "predicted": NO_GPU | {"ram_peak_bytes": 5 * GIB, "step_seconds": 2.0},
}


def row(step: int, **changed) -> dict:
    return {
        **{"step": step, "epoch": step / 10, "loss": 5.0 - step / 10, "learning_rate": 1e-3, "grad_norm": 0.5},
        **{"tokens": 100, "tokens_per_second": 2000.0, "computed_tokens_per_second": 2000.0, "step_ms": 1000.0},
        **{**NO_GPU, "ram_peak_bytes": 3 * GIB},
        **changed,
    }


def started(
    folder: Path, first_step: int = 0, last_step: int = 10, eval_first: float | None = None, **settings
) -> RunLog:
    log = RunLog(folder, Settings(**settings))
    if first_step:
        log.resume({"step": first_step, "metrics": None})
    log.start(first_step, last_step, PLAN, None if eval_first is None else {"eval_loss": eval_first})
    return log


def logged(folder: Path, *rows: dict, **how) -> RunLog:
    """The log of these steps, from its start (`how`: as in `started`) to its close."""
    log = started(folder, **how)
    for each in rows:
        log.step(each)
    log.close()
    return log
