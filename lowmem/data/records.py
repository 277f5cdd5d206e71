"""Defines Reading (how data are read), Record (a row and its place) and Source (all rows of one data set)."""

import hashlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lowmem.settings import Settings


@dataclass(frozen=True)
class Reading:
    """Says how a data set is read: the names of its columns, its split, and if some of its rows are enough."""

    text: str = "text"
    prompt: str = "prompt"
    completion: str = "completion"
    messages: str = "messages"
    split: str | None = None  # the split to train on; None: "train" or a name like it, else the first
    in_part: bool = False  # --steps or --max-samples: not all rows need be read

    @classmethod
    def of(cls, settings: Settings, held_out: bool = False) -> "Reading":
        """Makes the Reading of --data, or of --eval-data if `held_out`, which ignores --split and --max-samples."""
        names = settings.text_field, settings.prompt_field, settings.completion_field, settings.messages_field
        split, most_rows = (None, None) if held_out else (settings.split, settings.max_samples)
        return cls(*names, split, settings.steps is not None or most_rows is not None)

    @property
    def columns(self) -> tuple[str, ...]:
        return self.text, self.prompt, self.completion, self.messages

    @property
    def named(self) -> dict[str, str]:
        """Returns {option: column} of the columns that the user has named."""
        options = ("--text-field", "--prompt-field", "--completion-field", "--messages-field")
        pairs = zip(options, self.columns, Reading().columns, strict=True)
        return {option: column for option, column, usual in pairs if column != usual}


@dataclass(frozen=True)
class Record:
    """Holds one row of a table, or the text (or a piece of the text) of a file."""

    where: str  # for error messages, such as "a.jsonl:17"
    columns: dict[str, Any]  # None for a column that was not read because no format uses it
    may_be_blank: bool = False  # True: a row without text is skipped; False: it is an error
    goes_on: bool = False  # the next record continues this text
    begun: bool = False  # this record continues the text of the record before
    named: bool = True  # False: a text without columns, whose column has the name that the user asks for


@dataclass(frozen=True)
class Source:
    """Holds the rows of one data set that --data or --eval-data names."""

    name: str
    train: Iterable[Record]
    evaluation: Iterable[Record] | None = None  # the publisher's held-out split
    content: tuple[Path | str, ...] = ()  # files, or the hub client's hashes of the splits; empty for a stream
    spec: str = ""  # the value of --data or --eval-data, without its weight
    weight: float = 1.0  # how often an epoch reads each row
    remark: str = ""  # follows the name in the description of the data
    held_out: str = ""  # the name of the split `evaluation`
    splits: tuple[str, ...] = ()  # the names of all splits, if the publisher made some

    @property
    def streamed(self) -> bool:
        return not self.content


def first_rows(records: Iterable[Record], most: int | None) -> Iterator[Record]:
    """Yields the first `most` records, or all if None. Pieces of one text count as one record."""
    count = 0
    for record in records:
        count += not record.begun
        if most is not None and count > most:
            return
        yield record


def stable_hash(text: str) -> int:
    """Returns a 64-bit hash of `text` that is the same on every machine."""
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little")
