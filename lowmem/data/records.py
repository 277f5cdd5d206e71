"""A row of data and its source, as every reader gives them (sources.py)."""

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Record:
    """One row or file. `where` is said in errors; `whole_file` records may be empty (an `__init__.py`), rows may not.
    The text of one that `goes_on` has its next piece in the next record, and that one is `begun`. `unread`: columns of
    the row that are not read, since nothing is made of them."""

    where: str
    columns: dict[str, Any]
    whole_file: bool = False
    goes_on: bool = False
    begun: bool = False
    unread: tuple[str, ...] = ()


@dataclass(frozen=True)
class Source:
    """`evaluation` is the publisher's own held-out split, called `held_out`, where there is one; a `streamed` source is
    read no further than needed; blank rows are `lenient`ly skipped where the user cannot mend them. `content`: the
    files that it is read from, or what the hub's client calls this version of it; empty for a stream, of which nothing
    is known. `spec`: what was typed for it, without its `weight`: how often each of its rows is in an epoch. `remark`:
    what the line that describes the data says behind the name."""

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
