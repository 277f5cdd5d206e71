"""One peer's training, as the process that starts it and the process that does it know it. Imports nothing slow."""

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
    """`settings` are a run's, with the model that was asked for; `micro_batch` in sequences, None if the peer chooses;
    `cache` holds the folders of weights, `scratch` is for whatever the peer writes."""

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
        """The folder of the weights that the uncapped reference ends with."""
        return self._folder / "reference"

    @property
    def no_reference(self) -> Path:
        """A file that is there if the reference was tried and does not fit on the card."""
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
        """The row's fields that identify the case."""
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
