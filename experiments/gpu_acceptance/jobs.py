"""Lists the jobs, in order of value. Extend JOBS."""

from dataclasses import dataclass, field

SILENT_SECONDS = 300.0  # for importing, trying kernels and planning, on a slow processor


@dataclass(frozen=True)
class Job:
    """A job. `target`: "module:function", called in a separate process as function(setting, **options). `seconds`: time
    limit until the function announces its planned seconds. `flops`: of work before or without that. `gpu_gib`,
    `ram_gib`: caps, which the function applies; None: no cap. `cards`: needed GPUs."""

    section: str
    name: str
    target: str
    seconds: float = SILENT_SECONDS
    gpu_gib: float | None = 11
    ram_gib: float | None = None
    options: dict = field(default_factory=dict)
    flops: float = 0.0
    cards: int = 1

    @property
    def full_name(self) -> str:
        return f"{self.section}/{self.name}"


_HERE = "experiments.gpu_acceptance"
_SMALL = (  # models of memory.py: up to 0.6 billion parameters
    *("gpt2", "gpt2-medium", "opt-350m", "bloom-560m", "codegen-350M-mono", "biogpt", "gpt-neo-125m", "pythia-410m"),
    "qwen3-0.6b",
)
_LARGE = ("gpt2-large", "gpt_bigcode-santacoder", "llama-1b", "opt-1.3b", "pythia-1.4b")
_PEER = {"model": "gpt2-large", "seq": 1024, "batch": 64, "steps": 20}
_PEER_FLOPS = 2 * 8 * 774e6 * 64 * 1024 * 20  # blocks computed again; twice, for the reference may have to be trained


def _training(name: str, *more: str, update_cost: bool = False) -> Job:
    size = name.split()[0]
    options = {"name": name, "script": f"train_gpt2_{size}.py", "more": list(more), "update_cost": update_cost}
    return Job("train", name, f"{_HERE}.training:run", ram_gib={"xl": 16}.get(size), options=options)


def _denominator(name: str, *models: str, gpu_gib: float | None = None, compiled: bool = True) -> Job:
    options = {"models": list(models), "compiled": compiled}
    return Job("denominator", name, f"{_HERE}.denominator:measure", gpu_gib=gpu_gib, options=options)


def _memory(name: str, models: tuple[str, ...], gpu_gib: float | None = 11) -> Job:
    function = name.split(",")[0]
    return Job("memory", name, f"{_HERE}.memory:{function}", gpu_gib=gpu_gib, options={"models": list(models)})


def _peer(name: str, seconds: float = SILENT_SECONDS) -> Job:
    options = {"peer": name} | _PEER
    return Job(
        "peers", f"gpt2-large {name}", "experiments.peers.train:measure", seconds, ram_gib=16, options=options,
        flops=_PEER_FLOPS,
    )  # fmt: skip


JOBS = (
    Job("correctness", "life", f"{_HERE}.life:check"),
    Job("correctness", "kernels", f"{_HERE}.kernels:check"),
    Job("correctness", "bitwise", f"{_HERE}.bitwise:check"),
    Job("correctness", "two cards", f"{_HERE}.two_cards:check", cards=2),
    _training("large exact", update_cost=True),
    _training("xl exact", update_cost=True),
    _denominator("large", "gpt2-large"),
    _denominator("xl", "gpt2-xl"),
    _training("xl 8-bit", "--optimizer", "adamw8bit"),
    _training("large 8-bit", "--optimizer", "adamw8bit"),
    _memory("lowmem, small", _SMALL),
    _memory("lowmem, large", _LARGE),
    Job("levers", "step", f"{_HERE}.levers:check", gpu_gib=None, options={"models": ["gpt2-large", "gpt2-xl"]}),
    Job("plans", "step", f"{_HERE}.plans:check", gpu_gib=None),  # caps are its subject
    _training("large no clip", "--clip-norm", "0"),
    _training("xl no clip", "--clip-norm", "0"),
    _denominator("capped", "gpt2-large", "gpt2-xl", gpu_gib=11, compiled=False),
    _denominator("capped, compiled", "gpt2-large", gpu_gib=11),
    _memory("plain", _SMALL + _LARGE, gpu_gib=None),
    _peer("plain"),  # the reference; another one trains it too, where this call has not
    _peer("lowmem"),
    _peer("hf_trainer_adamw_bnb_8bit"),
    _peer("hf_trainer_paged_adamw_8bit"),
    _peer("flashoptim"),
    _peer("torchao_cpu_offload"),
    _peer("fsdp2_cpu_offload"),
    _peer("deepspeed_zero2_offload", 2 * SILENT_SECONDS),  # its CPU optimizer is compiled first
    _peer("deepspeed_zero3_offload", 2 * SILENT_SECONDS),
    Job("unified memory", "gpt2-xl", "experiments.unified_memory.measure:check", gpu_gib=None),
    _training("large 8 sequences", "--batch", "8"),
    _training("xl 8 sequences", "--batch", "8"),
)
