"""Selects the settings that decide the data of a training run."""

from dataclasses import dataclass, fields

from lowmem.settings import Settings, each


@dataclass(frozen=True)
class DataSettings:
    """Holds those fields of `Settings` that decide the data. lowmem/settings.py explains each of them."""

    data: tuple[str, ...]
    eval_data: tuple[str, ...]
    eval_fraction: float
    text_field: str
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
