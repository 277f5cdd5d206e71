"""The process of one attempt: one peer, one micro-batch size. Started by train.py, never by hand.

    python -m experiments.peers.attempt '{case}' FILE        the outcome goes into the file, as JSON

The process ends when its standard input closes, so that nothing stays on the GPU.
"""

import json
import os
import statistics
import sys
import threading
from importlib import metadata
from pathlib import Path

import transformers

from experiments.harness.child import end_with_parent
from experiments.peers.case import Case
from experiments.peers.catalogue import PEERS
from experiments.peers.memory import Memory
from experiments.peers.shared import distance, write_initial, write_reference
from experiments.peers.trainings import TRAININGS, Trained
from lowmem import device as devices
from lowmem.errors import CapExceeded, PlanError, first_line
from lowmem.limits import Budget

REFERENCE = "plain"


def main() -> int:
    threading.Thread(target=end_with_parent, daemon=True).start()
    outcome = attempt(Case.from_json(sys.argv[1]))
    Path(sys.argv[2]).write_text(json.dumps(outcome))
    return 0


def attempt(case: Case) -> dict:
    """Trains, and returns a row's values. `gpu_fits`, `ram_fits`: whether the training stayed under its caps. `why`:
    the reason if it did not run. Saves the reference's weights if there are none."""
    transformers.logging.set_verbosity_error()
    devices.set_environment()
    Budget(case.device, case.settings.gpu_limit_bytes, None).apply()
    write_initial(case)
    why, trained = None, None
    with Memory(case.device) as memory:
        try:
            trained = TRAININGS[case.peer](case)
        except (RuntimeError, MemoryError, PlanError, CapExceeded) as error:
            why = _does_not_fit(error)
            if why is None:
                raise
    measured = memory.values()
    fits = {
        "gpu_fits": why is None and _gpu_fits(case, measured),
        "ram_fits": why is None and _under(measured["ram_peak_bytes"], case.settings.ram_limit_bytes),
        "why": why,
    }
    around = {
        "packages": {name: metadata.version(name) for name in PEERS[case.peer].packages},
        "load_average": os.getloadavg()[0],
    }
    return ({} if trained is None else _results(case, trained)) | fits | measured | case.identity | around


def _results(case: Case, trained: Trained) -> dict:
    if case.peer == REFERENCE and not case.reference.exists():
        write_reference(case, trained.master)
    return {
        "sequences_per_second": case.settings.batch / statistics.median(trained.step_seconds[1:]),
        "distance": distance(case, trained.master) if case.reference.exists() else None,
        "last_loss": trained.losses[-1],
        "losses": trained.losses,
        "step_seconds": trained.step_seconds,
        "settings": trained.settings,
    }


def _gpu_fits(case: Case, measured: dict) -> bool:
    if measured["gpu_reserved_peak_bytes"] is None:
        return True
    # Managed memory counts: on a card of the cap's size it would not all be there.
    used_bytes = measured["gpu_reserved_peak_bytes"] + measured["gpu_managed_bytes"]
    return _under(used_bytes, case.settings.gpu_limit_bytes)


def _under(used_bytes: int, limit_bytes: int | None) -> bool:
    return limit_bytes is None or used_bytes <= limit_bytes


def _does_not_fit(error: Exception) -> str | None:
    """Returns the sentence for memory that was too small; None for any other error."""
    sentence = first_line(error)
    if not isinstance(error, RuntimeError):
        return sentence
    # of the GPU and of page-locked memory; of RAM
    return sentence if "out of memory" in sentence or "DefaultCPUAllocator" in sentence else None


if __name__ == "__main__":
    sys.exit(main())
