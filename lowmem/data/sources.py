"""Where documents come from: the standard library, local files and folders, the hub. Nothing here knows about tokens.

Every source is a stream of records, each a dictionary of columns and the place it was read from (`file:line`), so that
whatever is wrong with it later can be said where it is wrong. One record is in memory at a time (of a long text, a
piece; a `.json` list, one file): the size of a data set costs time and disk, not RAM.

| spec | what is read |
|---|---|
| `python-stdlib` | the `.py` files of this interpreter's own library: real text that is always there, 12 MB |
| a file, a folder, a pattern such as `texts/*.jsonl` | `.txt` `.md` `.py`: a document each; others: a record per row |
| `wikitext` | Salesforce/wikitext, wikitext-2-raw-v1 (Parquet), its lines joined to articles again |
| `codeparrot` | codeparrot/codeparrot-clean-train and -valid (gzipped JSON lines, 50 GB), streamed |
| `org/name[:config]` | any hub data set that `datasets` can load without running a script; over 1 GiB it is streamed |

`=2` behind any of them (`chat.jsonl=2`) is its weight among others: how often each of its rows is in an epoch.

Of tables, `.jsonl` has an object on each line, `.csv` names its columns in its first line, `.parquet` knows them; a
`.json` file is a list of objects, an object with one such list in it ({"data": [...]}), one object, or JSON lines.
"""

import csv
import glob
import hashlib
import itertools
import json
import os
import re
import sysconfig
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from lowmem import hub
from lowmem.errors import InputError, first_line
from lowmem.run_folder import without_runs
from lowmem.text_files import text_lines

STRUCTURED_COLUMNS = (
    *("messages", "conversations", "system", "tools", "prompt", "completion"),
    *("instruction", "input", "output", "context", "response"),
)
STREAM_ABOVE_BYTES = 2**30
MOST_WEIGHT = 1000
PIECE_CHARACTERS = 2**20  # of a text file that are in memory at once
_DOCUMENT_SUFFIXES = (".txt", ".md", ".py")
_TABLE_SUFFIXES = (".jsonl", ".json", ".csv", ".parquet")
_KNOWN_SUFFIXES = _DOCUMENT_SUFFIXES + _TABLE_SUFFIXES
_NOT_LIBRARY = {"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"}
_MOST_NAMED = 3  # of the folders that are left out
_STDLIB = "python-stdlib"
_NAMES = (_STDLIB, "wikitext", "codeparrot")
_VALIDATION_SPLITS = ("validation", "valid", "dev", "test")
_HUB_NAME = re.compile(r"[\w.-]+/[\w.-]+(:[\w.-]+)?")
_NUMBER = re.compile(r"-?[0-9]+(\.[0-9]*)?|-?\.[0-9]+")
_ARTICLE_TITLE = re.compile(r" = [^=].*[^=] = \n?")


@dataclass(frozen=True)
class Record:
    """One row or file. `where` is said in errors; `whole_file` records may be empty (an `__init__.py`), rows may not.
    The text of one that `goes_on` has its next piece in the next record, and that one is `begun`."""

    where: str
    columns: dict[str, Any]
    whole_file: bool = False
    goes_on: bool = False
    begun: bool = False


@dataclass(frozen=True)
class Source:
    """`evaluation` is the publisher's own held-out split, where there is one; a `streamed` source is read no further
    than needed; blank rows are `lenient`ly skipped where the user cannot mend them. `content`: the files that it is
    read from, or what the hub's client calls this version of it; empty for a stream, of which nothing is known.
    `spec`: what was typed for it, without its `weight`: how often each of its rows is in an epoch. `remark`: what the
    line that describes the data says behind the name."""

    name: str
    train: Iterable[Record]
    evaluation: Iterable[Record] | None = None
    streamed: bool = False
    lenient: bool = False
    content: tuple[Path | str, ...] = ()
    spec: str = ""
    weight: float = 1.0
    remark: str = ""


def open_source(spec: str, text_field: str, steps: int | None, out: Path | None = None) -> Source:
    """The records behind a `--data` spec; `steps` None means that all of it will be read; `out`: the run's own
    folder, which is no data. Raises InputError."""
    spec, weight = _split_weight(spec)
    in_the_way = Path(spec).is_dir() and (spec in _NAMES or _HUB_NAME.fullmatch(spec) is not None)
    try:
        source = _open(spec, text_field, steps, out)
    except InputError as error:
        if not in_the_way:
            raise
        raise InputError(f"{error}; rename this folder if the hub's {spec} is meant, which it hides") from None
    remark = source.remark
    if in_the_way and spec in _NAMES:
        remark += " (not the folder here, which is ./python-stdlib)" if spec == _STDLIB else " (the folder here)"
    return replace(source, spec=spec, weight=weight, remark=remark)


def _open(spec: str, text_field: str, steps: int | None, out: Path | None) -> Source:
    if spec == _STDLIB:
        files = _library_files()
        records = _standard_library(files, text_field)
        return Source("Python's standard library", records, lenient=True, content=tuple(files.values()))
    if Path(spec).exists():
        return _local(Path(spec), text_field, out)
    if glob.has_magic(spec):
        return _matching(spec, text_field, out)
    if spec == "wikitext":
        source = _hub("Salesforce/wikitext", "wikitext-2-raw-v1", "text", steps)
        train, evaluation = (rows and _articles(rows, text_field) for rows in (source.train, source.evaluation))
        return replace(source, name="WikiText-2, lines joined to articles", train=train, evaluation=evaluation)
    if spec == "codeparrot":
        names = (f"codeparrot/codeparrot-clean-{split}" for split in ("train", "valid"))
        source, held_out = (_hub(name, None, "content", steps, streamed=True) for name in names)
        train, evaluation = (_renamed(rows, "content", text_field) for rows in (source.train, held_out.train))
        return replace(source, train=train, evaluation=evaluation)
    if is_on_hub(spec):
        path, _, config = spec.partition(":")
        return _hub(path, config or None, text_field, steps)
    path, equals, typed = spec.rpartition("=")
    if equals and Path(path).exists():
        raise InputError(f"{spec}: {typed!r} is no weight for {path}; write a number such as 2 or 0.5")
    raise InputError(
        f"{spec}: no such file or folder, and not a known name; use python-stdlib, wikitext, "
        f"codeparrot, a hub data set as org/name[:config], or a file or folder that exists"
    )


class StableHash:
    """64 bits of a text that are the same in every process, version and machine; the text may come in pieces."""

    def __init__(self, text: str = ""):
        self._digest = hashlib.blake2b(text.encode(), digest_size=8)

    def update(self, text: str) -> None:
        self._digest.update(text.encode())

    def value(self) -> int:
        return int.from_bytes(self._digest.digest(), "little")


def _split_weight(spec: str) -> tuple[str, float]:
    """`spec` without the weight behind its last "=", and that. A path with such a name is a path (year=2024)."""
    name, _, typed = spec.rpartition("=")
    if not name or Path(spec).exists() or not _NUMBER.fullmatch(typed):
        return spec, 1.0
    weight = float(typed)
    if not 0 < weight <= MOST_WEIGHT:
        raise InputError(f"{spec}: a weight must be more than 0 and at most {MOST_WEIGHT}")
    return name, weight


def is_on_hub(spec: str) -> bool:
    """Whether the records behind `spec` are looked for on the hub, by their name."""
    spec, _ = _split_weight(spec)
    if spec == _STDLIB or Path(spec).exists():
        return False
    a_file = Path(spec).suffix in _KNOWN_SUFFIXES
    return spec in ("wikitext", "codeparrot") or (bool(_HUB_NAME.fullmatch(spec)) and not a_file)


def _library_files() -> dict[str, Path]:
    """The standard library's sources by name; not folder by folder, so that neighbours differ."""
    root = Path(sysconfig.get_paths()["stdlib"])
    names = []
    for folder, subfolders, files in os.walk(root):
        subfolders[:] = [name for name in subfolders if name not in _NOT_LIBRARY]  # site-packages can be large
        names += [(Path(folder) / name).relative_to(root).as_posix() for name in files if name.endswith(".py")]
    return {name: root / name for name in sorted(names, key=lambda name: (StableHash(name).value(), name))}


def _standard_library(files: dict[str, Path], text_field: str) -> Iterator[Record]:
    for name, path in files.items():
        try:
            text = path.read_bytes().decode()
        except (OSError, UnicodeDecodeError):  # a few sources say that they are in Latin-1
            continue
        yield Record(name, {text_field: text}, whole_file=True)


def _local(path: Path, text_field: str, out: Path | None) -> Source:
    if path.is_file():
        if path.suffix.lower() not in _KNOWN_SUFFIXES:
            raise InputError(
                f"{path}: files of kind {path.suffix or '(none)'} are not read; convert it to one of "
                f"{' '.join(_KNOWN_SUFFIXES)}"
            )
        _refuse_odd_names([path])
        if path.stat().st_size == 0:
            raise InputError(f"{path}: the file is empty")
        return Source(str(path), _read_file(path, text_field), content=(path,))
    files = sorted(
        file
        for file in path.rglob("*")
        if file.is_file()
        and not any(part.startswith(".") or part == "__pycache__" for part in file.relative_to(path).parts)
    )
    return _files(str(path), "the folder holds", files, text_field, path, out)


def _matching(pattern: str, text_field: str, out: Path | None) -> Source:
    files = [Path(name) for name in sorted(glob.glob(pattern, recursive=True))]
    fixed = itertools.takewhile(lambda part: not glob.has_magic(part), Path(pattern).parts)
    files = [file for file in files if file.is_file()]
    return _files(pattern, "the pattern finds", files, text_field, Path(*fixed), out)


def _files(name: str, found: str, files: list[Path], text_field: str, root: Path, out: Path | None) -> Source:
    """The records of all files below `root` that can be read, in their order, but for those that runs wrote."""
    files, runs = without_runs(files, root, out)
    readable = [file for file in files if file.suffix.lower() in _KNOWN_SUFFIXES]
    others = sorted({file.suffix or file.name for file in files} - {file.suffix for file in readable})
    _refuse_odd_names(readable)
    named = [str(path) for path in runs[:_MOST_NAMED]]
    named += [f"{len(runs) - _MOST_NAMED} more"] if len(runs) > _MOST_NAMED else []
    remark = f" (written by runs and left out: {', '.join(named)})" if runs else ""
    if not readable:
        raise InputError(f"{name}: {found} no file of the kinds {' '.join(_KNOWN_SUFFIXES)}{remark}")
    return Source(
        f"{name}, {len(readable)} files" + (f" ({', '.join(others)} left out)" if others else ""),
        (record for file in readable for record in _read_file(file, text_field, whole=True)),
        content=tuple(readable),
        remark=remark,
    )


def _refuse_odd_names(files: list[Path]) -> None:
    for file in files:
        if "\ufffd" in (shown := os.fsencode(file).decode(errors="replace")):
            raise InputError(f"{shown}: this file's name is not UTF-8; rename it")


def _read_file(path: Path, text_field: str, whole: bool = False) -> Iterator[Record]:
    """`whole`: whether a file of text may be empty, as one of many may."""
    suffix = path.suffix.lower()
    try:
        if suffix in _DOCUMENT_SUFFIXES:
            piece, begun = "", False
            for following in _pieces(text_lines(path, PIECE_CHARACTERS)):
                if piece:
                    yield Record(str(path), {text_field: piece}, whole, goes_on=True, begun=begun)
                    begun = True
                piece = following
            yield Record(str(path), {text_field: piece}, whole, begun=begun)
        elif suffix == ".csv":
            yield from _csv_rows(path)
        elif suffix == ".parquet":
            yield from _parquet_rows(path, text_field)
        elif suffix == ".json" and not _begins_with_a_row(path):
            yield from _json_whole(path, text_field)
        else:
            yield from _json_lines(path)
    except OSError as error:
        raise InputError(f"{path}: cannot be read ({error.strerror or error})") from error


def _lines(path: Path) -> Iterator[str]:
    """Decoded lines with their ends, one at a time; a byte order mark is dropped."""
    with path.open("rb") as file:
        for number, line in enumerate(file, 1):
            try:
                yield line.decode("utf-8-sig" if number == 1 else "utf-8")
            except UnicodeDecodeError as error:
                raise InputError(
                    f"{path}:{number}: not UTF-8 (byte {line[error.start]:#04x} in column "
                    f"{error.start + 1}); save the file as UTF-8"
                ) from error


def _pieces(lines: Iterable[str]) -> Iterator[str]:
    """A text's `lines` in pieces of PIECE_CHARACTERS or more."""
    piece, characters = [], 0
    for line in lines:
        if characters >= PIECE_CHARACTERS:
            yield "".join(piece)
            piece, characters = [], 0
        piece.append(line)
        characters += len(line)
    if piece:
        yield "".join(piece)


def _begins_with_a_row(path: Path) -> bool:
    """Whether the file's first line is a whole JSON object and others follow: JSON lines, whatever its name says."""
    lines = (line for line in _lines(path) if line.strip())
    try:
        return isinstance(json.loads(next(lines, "{}")), dict) and next(lines, None) is not None
    except (json.JSONDecodeError, RecursionError):
        return False


def _json_lines(path: Path) -> Iterator[Record]:
    for number, line in enumerate(_lines(path), 1):
        if line.strip():
            yield _json_record(f"{path}:{number}", _parse_json(line.rstrip(), path, number))


def _json_whole(path: Path, text_field: str) -> Iterator[Record]:
    """A file that is a list of rows, an object with exactly one list of rows in it, or one row."""
    value = _parse_json("".join(_lines(path)), path, 1)
    if isinstance(value, dict) and not value.keys() & {text_field, *STRUCTURED_COLUMNS}:
        lists = [item for item in value.values() if isinstance(item, list) and item and isinstance(item[0], dict)]
        value = lists[0] if len(lists) == 1 else value
    if isinstance(value, dict):
        yield _json_record(f"{path}:1", value)
        return
    for number, item in enumerate(value, 1):
        yield _json_record(f"{path}: item {number}", item)


def _parse_json(text: str, path: Path, first_line: int) -> Any:
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        raise InputError(
            f"{path}:{first_line + error.lineno - 1}: bad JSON: {error.msg} in column {error.colno}; a "
            f".jsonl file has one object on each line, a .json file may be one list of them"
        ) from error
    except RecursionError as error:
        raise InputError(f"{path}:{first_line}: bad JSON: nested too deeply") from error


def _json_record(where: str, value: Any) -> Record:
    if not isinstance(value, dict):
        raise InputError(f'{where}: a row must be a JSON object such as {{"text": "..."}}, not {type(value).__name__}')
    return Record(where, value)


def _csv_rows(path: Path) -> Iterator[Record]:
    csv.field_size_limit(2**31 - 1)  # the default of 128 KiB is less than a long document
    reader = csv.DictReader(_lines(path), strict=True)
    try:
        for row in reader:
            if None in row or None in row.values():
                raise InputError(
                    f"{path}:{reader.line_num}: the row does not have the {len(reader.fieldnames or ())} "
                    f"fields that the first line names; quote fields that contain commas"
                )
            yield Record(f"{path}:{reader.line_num}", row)
    except csv.Error as error:
        raise InputError(f"{path}:{reader.reader.line_num}: bad CSV: {error}") from error


def _parquet_rows(path: Path, text_field: str) -> Iterator[Record]:
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError as error:
        raise InputError(f"{path}: reading Parquet needs pyarrow ({first_line(error)}): pip install pyarrow") from error
    try:
        with pyarrow.parquet.ParquetFile(path) as file:
            columns = _wanted(file.schema_arrow.names, text_field)
            number = 0
            for rows in file.iter_batches(batch_size=256, columns=columns):
                for row in rows.to_pylist():
                    number += 1
                    yield Record(f"{path}: row {number}", row)
    except pyarrow.ArrowException as error:
        raise InputError(f"{path}: not a Parquet file that can be read ({first_line(error).rstrip('.')})") from error
    except UnicodeDecodeError as error:
        raise InputError(f"{path}: not UTF-8 within 256 rows of row {number + 1}; write the file again") from error


def _hub(path: str, config: str | None, text_field: str, steps: int | None, streamed: bool = False) -> Source:
    spec = f"{path}:{config}" if config else path
    try:
        import datasets
    except ImportError as error:
        raise InputError(
            f"{spec} is on the hub and needs the package datasets ({first_line(error)}): pip install datasets, or use "
            "python-stdlib or a local file"
        ) from error
    if streamed and steps is None:
        raise InputError(f"{spec} is too large to be read to its end; give --steps instead of --epochs")
    try:
        if not hub.is_reachable():
            datasets.config.HF_HUB_OFFLINE = True  # the cache at once, instead of 25 seconds of retries before it
        if not streamed and steps is not None:
            streamed = (datasets.load_dataset_builder(path, config).info.dataset_size or 0) > STREAM_ABOVE_BYTES
        splits = datasets.load_dataset(path, config, streaming=streamed)
    except Exception as error:  # datasets, the hub's client and its transport each have their own family of errors
        raise _hub_error(spec, error) from error
    train = "train" if "train" in splits else next(iter(splits))
    held_out = next((name for name in _VALIDATION_SPLITS if name in splits and name != train), None)
    return Source(
        spec,
        _hub_rows(spec, train, splits[train], text_field),
        held_out and _hub_rows(spec, held_out, splits[held_out], text_field),
        streamed,
        lenient=True,
        content=tuple(
            str(getattr(splits[name], "_fingerprint", name)) for name in (train, held_out) if name and not streamed
        ),
    )


def _hub_rows(spec: str, split: str, rows: Any, text_field: str) -> Iterator[Record]:
    if rows.column_names is not None:  # streams do not always know them
        rows = rows.select_columns(_wanted(rows.column_names, text_field))
    try:
        for number, row in enumerate(rows, 1):
            yield Record(f"{spec}, {split} row {number}", row)
    except Exception as error:  # as above: a stream meets the network here
        raise _hub_error(spec, error) from error


def _hub_error(spec: str, error: Exception) -> InputError:
    if "scripts are no longer supported" in str(error):
        return InputError(
            f"{spec} is a data set with a loading script, which the package datasets no longer runs; use "
            f"a copy of it in Parquet or JSON"
        )
    if "Config name is missing" in str(error):
        return InputError(
            f"{spec} has several configurations; name one as {spec}:CONFIG ({first_line(error).rstrip('.')})"
        )
    return InputError(
        f"{spec} is neither in the cache nor to be had from the hub ({first_line(error).rstrip('.')}); check the "
        f"name and the network (a gated data set needs `hf auth login`), or use python-stdlib or a local "
        f"file"
    )


def _articles(rows: Iterable[Record], text_field: str) -> Iterator[Record]:
    """WikiText's rows are lines; an article begins at a line ` = Title = `."""
    lines: list[str] = []
    where = ""
    for row in rows:
        if _ARTICLE_TITLE.fullmatch(row.columns["text"]) and lines:
            yield Record(where, {text_field: "".join(lines)})
            lines = []
        where = where if lines else row.where
        lines.append(row.columns["text"])
    if lines:
        yield Record(where, {text_field: "".join(lines)})


def _renamed(rows: Iterable[Record], column: str, text_field: str) -> Iterator[Record]:
    return (Record(row.where, {text_field: row.columns[column]}) for row in rows)


def _wanted(names: list[str], text_field: str) -> list[str]:
    """The columns that could be trained on, or all where there are none (for the error that lists them)."""
    return [name for name in names if name == text_field or name in STRUCTURED_COLUMNS] or names
