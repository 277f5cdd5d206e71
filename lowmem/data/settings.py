"""Selects the settings that decide the data of a training run."""

from dataclasses import dataclass, fields

from lowmem.data.records import Reading
from lowmem.fields import each
from lowmem.settings import Settings


@dataclass(frozen=True)
class DataSettings:
    """Holds those fields of `Settings` that decide the data. lowmem/settings.py explains each of them."""

    data: tuple[str, ...]
    eval_data: tuple[str, ...]
    eval_fraction: float
    split: str | None
    max_samples: int | None
    text_field: str
    prompt_field: str
    completion_field: str
    messages_field: str
    train_on: str
    chat_template: str | None
    seq: int
    target_tokens: int | None
    document_mask: bool
    pack: str
    batch: int
    steps: int | None
    fixed_batch: bool
    seed: int

    @classmethod
    def of(cls, settings: Settings) -> "DataSettings":
        """Copies these fields from the settings of a training run."""
        values = {item.name: getattr(settings, item.name) for item in fields(cls)}
        return cls(**values | {name: each(values[name]) for name in ("data", "eval_data")})

    def reading(self, held_out: bool = False) -> Reading:
        """Returns how a text is read: one of --data, or one that is `held_out`."""
        names = self.text_field, self.prompt_field, self.completion_field, self.messages_field
        return Reading(*names, *((None, None) if held_out else (self.split, self.max_samples)), self.steps)
