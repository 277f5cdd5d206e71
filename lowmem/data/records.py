"""A row of data and its source, as every reader gives them (sources.py)."""

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Record:
    """One row or file. `where`: its place, for errors. `whole_file` records may be empty (an `__init__.py`), rows may
    not. `goes_on`: the next record holds the next piece of this text, and is `begun`. `unread`: the row's columns that
    are not read, because no format uses them."""

    where: str
    columns: dict[str, Any]
    whole_file: bool = False
    goes_on: bool = False
    begun: bool = False
    unread: tuple[str, ...] = ()


@dataclass(frozen=True)
class Source:
    """`evaluation`: the publisher's held-out split, called `held_out`, if there is one. A `streamed` source is read no
    further than needed. `lenient`: blank rows are skipped, because the user cannot mend them. `content`: the files of
    the source, or the hub client's name of this version; empty for a stream. `spec`: the typed text without the
    `weight`, which says how often each row is in an epoch. `remark`: stands behind the name in the line that describes
    the data."""

    name: str
    train: Iterable[Record]
    evaluation: Iterable[Record] | None = None
    streamed: bool = False
    lenient: bool = False
    content: tuple[Path | str, ...] = ()
    spec: str = ""
    weight: float = 1.0
    remark: str = ""
    held_out: str = ""


class StableHash:
    """64 bits of a text that are the same in every process, version and machine; the text may come in pieces."""

    def __init__(self, text: str = ""):
        self._digest = hashlib.blake2b(text.encode(), digest_size=8)

    def update(self, text: str) -> None:
        self._digest.update(text.encode())

    def value(self) -> int:
        return int.from_bytes(self._digest.digest(), "little")
