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
JOBS = (
    Job("correctness", "kernels", f"{_HERE}.kernels:check", 90),
    Job("correctness", "bitwise", f"{_HERE}.bitwise:check", 120),
    Job("plans", "step", f"{_HERE}.plans:check", 200, gpu_gib=None),  # caps are its subject
    Job("train", "large", f"{_HERE}.training:run", 120, options={"script": "train_gpt2_large.py"}),
    Job("train", "xl", f"{_HERE}.training:run", 180, ram_gib=16, options={"script": "train_gpt2_xl.py"}),
    Job("denominator", "capped", f"{_HERE}.denominator:measure", 90),
    Job("denominator", "uncapped", f"{_HERE}.denominator:measure", 90, gpu_gib=None),
    Job("train", "xl without a RAM cap", f"{_HERE}.training:run", 180, options={"script": "train_gpt2_xl.py"}),
)
