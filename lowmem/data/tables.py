"""Reads rows of local files: text, JSON, JSON lines, CSV and Parquet. docs/data.md shows how each is written."""

import csv
import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from lowmem.data.records import Reading, Record
from lowmem.errors import InputError, first_line
from lowmem.text_files import PARQUET, parse_json, read_text, refuse_disguised, text_lines

STRUCTURED_COLUMNS = (
    *("messages", "conversations", "system", "tools", "prompt", "completion"),
    *("instruction", "input", "output", "context", "response"),
)
SYSTEM_COLUMNS = ("system", "system_prompt", "system_message", "system_instruction")
LABEL_COLUMNS = ("label", "kto_tag")  # true for a preferred answer, false for one to avoid
_KNOWN_COLUMNS = {*STRUCTURED_COLUMNS, *SYSTEM_COLUMNS, *LABEL_COLUMNS, "functions", "history"}
PIECE_CHARACTERS = 2**20  # of a text file that are in memory at once
TABLE_SUFFIXES = (".parquet", ".jsonl", ".json", ".csv")
KNOWN_SUFFIXES = (".txt", ".md", ".py", *TABLE_SUFFIXES)
_JSON_ADVICE = "; a .jsonl file has one object on each line, a .json file may be one list of them"


def used_columns(names: Iterable[str], reading: Reading) -> list[str]:
    """Returns those of a table's columns `names` that training may need. Either they have usual names, such as
    "instruction", or `reading` (options such as --text-field) names them."""
    return [name for name in names if name in reading.columns or name in _KNOWN_COLUMNS]


def read_file(path: Path, reading: Reading, may_be_blank: bool = False) -> Iterator[Record]:
    """Yields the rows of a file, in the format that its suffix tells. `reading`: names of the columns. `may_be_blank`:
    a text file may be empty. Raises InputError if the file cannot be read."""
    try:
        match path.suffix.lower():
            case ".csv":
                yield from _csv_rows(path)
            case ".parquet":
                yield from _parquet_rows(path, reading)
            case ".json" if not _begins_with_a_row(path):
                yield from _json_file(path, reading)
            case ".json" | ".jsonl":
                yield from _json_lines(path)
            case _:
                yield from _pieces_of_text(path, reading, may_be_blank)
    except OSError as error:
        raise InputError(f"{path}: cannot be read ({error.strerror or error})") from error


def _pieces_of_text(path: Path, reading: Reading, may_be_blank: bool) -> Iterator[Record]:
    """Yields the text of a file in pieces of about PIECE_CHARACTERS, in the column that `reading` names for text. An
    empty file gives one empty piece. `may_be_blank`: False if a file without text is an error."""
    lines, characters, begun = [], 0, False
    for line in text_lines(path, PIECE_CHARACTERS):
        if characters >= PIECE_CHARACTERS:
            yield Record(
                str(path), {reading.text: "".join(lines)}, may_be_blank, goes_on=True, begun=begun, named=False
            )
            lines, characters, begun = [], 0, True
        lines.append(line)
        characters += len(line)
    yield Record(str(path), {reading.text: "".join(lines)}, may_be_blank, begun=begun, named=False)


def _begins_with_a_row(path: Path) -> bool:
    """Returns True if a .json file contains JSON lines: a whole object in its first line, and other lines."""
    lines = (line for line in text_lines(path) if line.strip())
    try:
        return isinstance(parse_json(next(lines, "{}"), str(path)), dict) and next(lines, None) is not None
    except InputError:
        return False


def _json_lines(path: Path) -> Iterator[Record]:
    for number, line in enumerate(text_lines(path), 1):
        if line.strip():
            yield _json_record(f"{path}:{number}", parse_json(line.rstrip(), str(path), number, _JSON_ADVICE))


def _json_file(path: Path, reading: Reading) -> Iterator[Record]:
    """Yields the rows of a JSON file: a list of rows, an object with exactly one list of rows, or one row. An object
    with a column that `reading` or STRUCTURED_COLUMNS names is one row."""
    value = parse_json(read_text(path), str(path), advice=_JSON_ADVICE)
    if isinstance(value, dict) and not value.keys() & {*reading.columns, *STRUCTURED_COLUMNS}:
        lists = [item for item in value.values() if isinstance(item, list) and item and isinstance(item[0], dict)]
        value = lists[0] if len(lists) == 1 else value
    if not isinstance(value, list):
        yield _json_record(f"{path}:1", value)
        return
    for number, item in enumerate(value, 1):
        yield _json_record(f"{path}: item {number}", item)


def _json_record(where: str, value: Any) -> Record:
    if not isinstance(value, dict):
        raise InputError(f'{where}: a row must be a JSON object such as {{"text": "..."}}, not {type(value).__name__}')
    return Record(where, value)


def _csv_rows(path: Path) -> Iterator[Record]:
    csv.field_size_limit(2**31 - 1)  # the default of 128 KiB is less than a long document
    first = re.sub('"[^"]*"', "", next(text_lines(path), ""))  # a quoted name may hold any mark
    delimiter = next((mark for mark in ",;\t" if mark in first), ",")  # spreadsheets of some languages write semicolons
    reader = csv.DictReader(text_lines(path), strict=True, delimiter=delimiter)
    try:
        _refuse_twice(reader.fieldnames or (), f"{path}:1")
        for row in reader:
            if None in row or None in row.values():
                raise InputError(
                    f"{path}:{reader.line_num}: the row does not have the {len(reader.fieldnames or ())} "
                    f"fields that the first line names; quote fields that contain {delimiter!r}"
                )
            yield Record(f"{path}:{reader.line_num}", row)
    except csv.Error as error:
        old = "new-line character" in str(error)
        said = "a carriage return alone; quote that field, or save the file with other line ends" if old else error
        raise InputError(f"{path}:{reader.reader.line_num}: bad CSV: {said}") from error


def _refuse_twice(names: Iterable[str], where: str) -> None:
    names = [name for name in names if name]  # spreadsheets write empty columns without a name
    for name in names:
        if names.count(name) > 1:
            raise InputError(f"{where}: the column {name} is given twice; remove or rename one of them")


def without_nulls(value: Any) -> Any:
    """Returns an Arrow value without the null entries of objects: Arrow writes null for keys that an object lacks."""
    if isinstance(value, dict):
        return {key: without_nulls(item) for key, item in value.items() if item is not None}
    return list(map(without_nulls, value)) if isinstance(value, list) else value


def _parquet_rows(path: Path, reading: Reading) -> Iterator[Record]:
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError as error:
        raise InputError(f"{path}: reading Parquet needs pyarrow ({first_line(error)}): pip install pyarrow") from error
    refuse_disguised(path, PARQUET)
    number = 0
    try:
        with pyarrow.parquet.ParquetFile(path) as file:
            names = file.schema_arrow.names
            _refuse_twice(names, str(path))
            for rows in file.iter_batches(batch_size=256, columns=used_columns(names, reading)):
                for row in rows.to_pylist():
                    number += 1
                    yield Record(f"{path}: row {number}", dict.fromkeys(names) | without_nulls(row))
    except pyarrow.ArrowException as error:
        raise InputError(f"{path}: not a Parquet file that can be read ({first_line(error).rstrip('.')})") from error
    except UnicodeDecodeError as error:
        raise InputError(f"{path}: not UTF-8 within 256 rows of row {number + 1}; write the file again") from error
    except (ValueError, OverflowError) as error:  # a date of the year 10000
        raise InputError(
            f"{path}: Python cannot hold a value within 256 rows of row {number + 1} ({first_line(error).rstrip('.')})"
        ) from error
