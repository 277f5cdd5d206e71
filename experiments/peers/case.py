"""One peer's training, for the process that starts it and for the process that does it. Imports nothing slow."""

import hashlib
import json
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from lowmem.settings import Settings

if TYPE_CHECKING:
    import torch

# What decides the weights that a training begins and ends with; all else only decides how it gets there.
_OF_THE_WEIGHTS = (
    "model",
    "init",
    "data",
    "seq",
    "batch",
    "steps",
    "lr",
    "weight_decay",
    "clip_norm",
    "seed",
    "device",
)


@dataclass(frozen=True)
class Case:
    """A peer's training. `settings`: with the requested model. `micro_batch`: in sequences; None: the peer chooses.
    `cache`: of weights. `scratch`: for the peer's files."""

    peer: str
    settings: Settings
    micro_batch: int | None
    cache: Path
    scratch: Path

    @property
    def device(self) -> "torch.device":
        import torch

        return torch.device(self.settings.device)

    @property
    def initial(self) -> Path:
        return self._folder / "initial"

    @property
    def reference(self) -> Path:
        """The folder of the final weights of the uncapped reference."""
        return self._folder / "reference"

    @property
    def no_reference(self) -> Path:
        """A file that exists if the reference does not fit on the card."""
        return self._folder / "no_reference"

    @property
    def _folder(self) -> Path:
        key = repr([getattr(self.settings, name) for name in _OF_THE_WEIGHTS])
        digest = hashlib.blake2b(key.encode(), digest_size=6).hexdigest()
        return self.cache / f"{Path(self.settings.model).name}-{digest}"

    @property
    def from_folder(self) -> Settings:
        """The settings of a run that begins with `initial`."""
        return replace(self.settings, model=str(self.initial), init="pretrained")

    @property
    def identity(self) -> dict:
        names = ("model", "init", "seq", "batch", "steps", "lr", "clip_norm")
        of_the_run = {name: getattr(self.settings, name) for name in names}
        return {"peer": self.peer} | of_the_run | {"micro_batch": self.micro_batch}

    def to_json(self) -> str:
        return json.dumps(asdict(self) | {"cache": str(self.cache), "scratch": str(self.scratch)})

    @staticmethod
    def from_json(text: str) -> "Case":
        fields = json.loads(text)
        fields["settings"] = Settings(**fields["settings"])
        return Case(**fields | {name: Path(fields[name]) for name in ("cache", "scratch")})
