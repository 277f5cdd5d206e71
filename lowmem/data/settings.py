"""The settings of a run's data."""

from dataclasses import dataclass, fields

from lowmem.settings import Settings, each


@dataclass(frozen=True)
class DataSettings:
    """The fields of `Settings` (lowmem/settings.py explains them) that decide the data."""

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
        """Returns these fields of a run's settings."""
        values = {item.name: getattr(settings, item.name) for item in fields(cls)}
        return cls(**values | {name: each(values[name]) for name in ("data", "eval_data")})
