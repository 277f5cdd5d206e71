"""Text files and JSON that other people wrote: config.json, tokenizers, templates, settings, rows of data.

Everything that a user hands over as text is read here, so that each of these is treated the same way everywhere:

- a byte-order mark, at the beginning or where `cat a b` put one at the beginning of a line, is skipped;
- text that is not UTF-8 is refused with its line and column;
- a file that is not what its name says (a Git LFS pointer, a compressed file) is refused by its real kind;
- JSON with the same key twice in one object, with a number too long for Python, or nested too deeply is refused.
"""

import codecs
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from lowmem.errors import InputError

_LFS_POINTER = b"version https://git-lfs.github.com/spec/"
_KINDS = {  # by their first bytes: what the file is, and what to do with it
    b"\x1f\x8b": ("compressed with gzip", "unpack it with gunzip"),
    b"BZh": ("compressed with bzip2", "unpack it with bunzip2"),
    b"\xfd7zXZ\0": ("compressed with xz", "unpack it with unxz"),
    b"\x28\xb5\x2f\xfd": ("compressed with zstd", "unpack it with unzstd"),
    b"PK\x03\x04": ("a zip archive", "unpack it with unzip"),
    b"7z\xbc\xaf\x27\x1c": ("a 7z archive", "unpack it with 7z"),
    b"PAR1": ("a Parquet file", "rename it to .parquet"),
    b"%PDF-": ("a PDF", "extract its text first"),
    b"SQLite format 3\0": ("an SQLite database", "export the table that holds the text, as .csv"),
}


def refuse_disguised(path: Path) -> None:
    """InputError if `path` is a Git LFS pointer, or a compressed or binary file under a text file's name."""
    with path.open("rb") as file:
        start = file.read(64)
    if start.startswith(_LFS_POINTER):
        raise InputError(f"{path} is a Git LFS pointer, not the file itself; run `git lfs pull` in its repository")
    for magic, (kind, advice) in _KINDS.items():
        if start.startswith(magic):
            raise InputError(f"{path} is {kind}, whatever its name says; {advice}")


def text_lines(path: Path, most_bytes: int = -1) -> Iterator[str]:
    """The file's lines with their ends, one at a time; a line of more than `most_bytes` comes in several parts.
    InputError as the module says; OSError if it cannot be read."""
    refuse_disguised(path)
    decoder = codecs.getincrementaldecoder("utf-8")()
    number, column, at_start = 1, 0, True  # of the next byte
    with path.open("rb") as file:
        while part := file.readline(most_bytes):
            ended = part.endswith(b"\n") or not file.peek(1)
            begun = len(decoder.getstate()[0])  # bytes of a character that the last part cut in two
            try:
                text = decoder.decode(part, final=ended)
            except UnicodeDecodeError as error:
                raise InputError(
                    f"{path}:{number}: not UTF-8 (byte {error.object[error.start]:#04x} in column "
                    f"{column - begun + error.start + 1}); save the file as UTF-8"
                ) from None
            if text:
                yield text.removeprefix("\ufeff") if at_start else text
            number, column = (number + 1, 0) if ended else (number, column + len(part))
            at_start = ended or (at_start and not text)


def read_text(path: Path) -> str:
    """The whole file, read as `text_lines` reads it."""
    return "".join(text_lines(path))


def read_json(path: Path) -> Any:
    """The value in a JSON file. InputError with the line where it stops being JSON; OSError if it cannot be read."""
    return parse_json(read_text(path), str(path))


def parse_json(text: str, source: str, first_line: int = 1, advice: str = "") -> Any:
    """The value in `text`, which begins at line `first_line` of `source`. InputError, `advice` after it."""
    try:
        return json.loads(text, object_pairs_hook=_object)
    except json.JSONDecodeError as error:
        where = f"{source}:{first_line + error.lineno - 1}"
        raise InputError(f"{where}: bad JSON: {error.msg} in column {error.colno}{advice}") from None
    except _GivenTwice as error:
        raise InputError(f"{source}:{first_line}: bad JSON: the key {error.args[0]!r} is given twice") from None
    except RecursionError:
        raise InputError(f"{source}:{first_line}: bad JSON: nested too deeply") from None
    except ValueError:  # Python reads no whole number of more than 4,300 digits
        raise InputError(f"{source}:{first_line}: bad JSON: a number has too many digits") from None


class _GivenTwice(Exception):
    """A key that an object has twice."""


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """The object of `pairs`; the last value would win in silence if a key were allowed twice."""
    values = dict(pairs)
    if len(values) < len(pairs):
        names = [name for name, _ in pairs]
        raise _GivenTwice(next(name for name in names if names.count(name) > 1))
    return values
