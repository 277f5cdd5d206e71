"""What is run, in order of value: the table to extend."""

from dataclasses import dataclass, field


@dataclass(frozen=True)
class Job:
    """`target`: "module:function", called in a process of its own as function(setting, **options) (child.py);
    `seconds`: its time limit; the caps, in GiB (None: no cap), are the function's to apply and the row's to state."""

    section: str
    name: str
    target: str
    seconds: float
    gpu_gib: float | None = 11
    ram_gib: float | None = None
    options: dict = field(default_factory=dict)

    @property
    def full_name(self) -> str:
        return f"{self.section}/{self.name}"


_HERE = "experiments.gpu_acceptance"
_SMALL = (  # models of memory.py: up to 0.6 billion parameters
    *("gpt2", "gpt2-medium", "opt-350m", "bloom-560m", "codegen-350M-mono", "biogpt", "gpt-neo-125m", "pythia-410m"),
    "qwen3-0.6b",
)
_LARGE = ("gpt2-large", "gpt_bigcode-santacoder", "llama-1b", "opt-1.3b", "pythia-1.4b")


def _training(name: str, seconds: float, *more: str, update_cost: bool = False) -> Job:
    size = name.split()[0]
    options = {"name": name, "script": f"train_gpt2_{size}.py", "more": list(more), "update_cost": update_cost}
    return Job("train", name, f"{_HERE}.training:run", seconds, ram_gib={"xl": 16}.get(size), options=options)


def _denominator(name: str, seconds: float, *models: str, gpu_gib: float | None = None, compiled: bool = True) -> Job:
    options = {"models": list(models), "compiled": compiled}
    return Job("denominator", name, f"{_HERE}.denominator:measure", seconds, gpu_gib, options=options)


def _memory(name: str, seconds: float, models: tuple[str, ...], gpu_gib: float | None = 11) -> Job:
    function = name.split(",")[0]
    return Job("memory", name, f"{_HERE}.memory:{function}", seconds, gpu_gib, options={"models": list(models)})


def _peer(name: str, seconds: float) -> Job:
    options = {"peer": name, "model": "gpt2-large", "seq": 1024, "batch": 64, "steps": 20}
    return Job("peers", f"gpt2-large {name}", "experiments.peers.train:measure", seconds, ram_gib=16, options=options)


# Time limits are about twice what a job should take on an H200. What it should take for all but the
# peers: 25 minutes.
JOBS = (
    Job("correctness", "kernels", f"{_HERE}.kernels:check", 90),
    Job("correctness", "bitwise", f"{_HERE}.bitwise:check", 120),
    _training("large exact", 180, update_cost=True),
    _training("xl exact", 240, update_cost=True),
    _denominator("large", 240, "gpt2-large"),
    _denominator("xl", 300, "gpt2-xl"),
    _training("xl 8-bit", 200, "--optimizer", "adamw8bit"),
    _training("large 8-bit", 150, "--optimizer", "adamw8bit"),
    _memory("lowmem, small", 200, _SMALL),
    _memory("lowmem, large", 200, _LARGE),
    Job("plans", "step", f"{_HERE}.plans:check", 200, gpu_gib=None),  # caps are its subject
    _training("large no clip", 150, "--clip-norm", "0"),
    _training("xl no clip", 200, "--clip-norm", "0"),
    _denominator("capped", 60, "gpt2-large", "gpt2-xl", gpu_gib=11, compiled=False),
    _denominator("capped, compiled", 240, "gpt2-large", gpu_gib=11),
    _memory("plain", 150, _SMALL + _LARGE, gpu_gib=None),
    _peer("plain", 200),  # the reference; another one trains it too, where this call has not
    _peer("lowmem", 250),
    _peer("hf_trainer_adamw_bnb_8bit", 200),
    _peer("hf_trainer_paged_adamw_8bit", 200),
    _peer("flashoptim", 150),
    _peer("torchao_cpu_offload", 200),
    _peer("fsdp2_cpu_offload", 300),
    _peer("deepspeed_zero2_offload", 400),  # its CPU optimizer is compiled first
    _peer("deepspeed_zero3_offload", 400),
    _training("large 8 sequences", 120, "--batch", "8"),
    _training("xl 8 sequences", 180, "--batch", "8"),
)
