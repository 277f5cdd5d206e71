"""Reads data sets of the Hugging Face hub with the package `datasets`: by name, or as `save_to_disk` wrote them."""

import re
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from lowmem import hub
from lowmem.data.records import Reading, Record, Source
from lowmem.data.tables import used_columns, without_nulls
from lowmem.errors import InputError, first_line
from lowmem.text_files import read_json, refuse_pointer

STREAM_ABOVE_BYTES = 2**30
_SPLIT_WORDS = {  # words in names of splits and files; if a name has words of several kinds, the first kind counts
    "validation": {"validation", "valid", "dev", "val"},
    "test": {"test", "testing", "eval", "evaluation"},
    "train": {"train", "training"},
}
_WORD_ENDS = re.compile(r"[-._ 0-9]+")
_ARTICLE_TITLE = re.compile(r" = [^=].*[^=] = \n?")


def split_of(name: str) -> str | None:
    """Returns the kind of split that a name such as `train_sft` shows: "validation", "test", "train" or None."""
    words = set(_WORD_ENDS.split(name.lower()))
    return next((split for split, known in _SPLIT_WORDS.items() if words & known), None)


def choose_splits(names: Sequence[str], wanted: str | None = None) -> tuple[str, str | None, str]:
    """Returns (split to train on, split to hold out or None, remark for the log). Trains on `wanted`, else on "train",
    else on the first training split by `split_of`, else on the first split. Holds out a validation split, else a test
    split. Raises InputError if `wanted` is not in `names`."""
    if wanted is not None and wanted not in names:
        part = " A part of a split is not named here: give --max-samples for its first rows." if "[" in wanted else ""
        raise InputError(f"--split {wanted}: there is no such split; there are {', '.join(names)}.{part}")
    train = "train" if "train" in names else next((name for name in names if split_of(name) == "train"), names[0])
    train = wanted or train
    others = [name for name in names if name != train]
    same = [name for name in others if _WORD_ENDS.split(name)[1:] == _WORD_ENDS.split(train)[1:]]  # test_sft, train_sft
    kinds = ("validation", "test")
    held_out = next((name for kind in kinds for name in (*same, *others) if split_of(name) == kind), None)
    unused = [name for name in others if name != held_out]
    said = [f"split {train}"] * (train != "train") + [f"splits not used: {', '.join(unused)}"] * bool(unused)
    return train, held_out, f" ({'; '.join(said)})" if said else ""


def hub_source(path: str, config: str | None, reading: Reading, streamed: bool = False) -> Source:
    """Opens the hub's data set `path` with its configuration `config` (None: the default). Streams it if `streamed`, or
    if it is larger than STREAM_ABOVE_BYTES and training needs only some of its rows. Raises InputError if it cannot be
    loaded, or if `streamed` and training needs all rows. `reading`: column names, the split, and if all rows are
    needed."""
    spec = f"{path}:{config}" if config else path
    datasets = _datasets(spec)
    if streamed and not reading.in_part:
        raise InputError(
            f"{spec} is too large to be read to its end; give --steps or --max-samples, not --epochs alone"
        )
    try:
        if hub.why_unreachable():
            datasets.config.HF_HUB_OFFLINE = True  # saves 25 seconds of retries
        if not streamed and reading.in_part:
            streamed = (datasets.load_dataset_builder(path, config).info.dataset_size or 0) > STREAM_ABOVE_BYTES
        splits = datasets.load_dataset(path, config, streaming=streamed)
    except Exception as error:  # datasets, the hub's client and its transport each have their own errors
        raise _hub_error(spec, error) from error
    train, held_out, remark = choose_splits(list(splits), reading.split)
    names = [name for name in (train, held_out) if name]
    rows = [_rows(spec, name, splits[name], reading) for name in names]
    content = () if streamed else tuple(str(getattr(splits[name], "_fingerprint", name)) for name in names)
    return Source(spec, *rows, content=content, remark=remark, held_out=held_out or "", splits=tuple(splits))


def saved_to_disk(path: Path, reading: Reading) -> Source | None:
    """Opens a data set that `save_to_disk` wrote into the folder `path`. Returns None for any other folder. `reading`:
    names of its columns, and the split to train on."""
    train, held_out, remark, names = "", None, "", ()
    if (path / "dataset_dict.json").is_file():
        names = tuple(_names_of_splits(path / "dataset_dict.json"))
        train, held_out, remark = choose_splits(names, reading.split)
    elif not (path / "dataset_info.json").is_file() or not (path / "state.json").is_file():
        return None

    def rows(split: str) -> Iterator[Record]:
        for file in filter(Path.is_file, (path / split).glob("*")):
            refuse_pointer(file)
        try:
            found = _datasets(str(path)).load_from_disk(str(path / split))
        except Exception as error:
            raise InputError(f"{path / split}: datasets cannot read it ({first_line(error).rstrip('.')})") from error
        yield from _rows(str(path), split, found, reading)

    evaluation = None if held_out is None else rows(held_out)
    files = tuple(sorted(path.rglob("*.arrow")))
    return Source(str(path), rows(train), evaluation, files, remark=remark, held_out=held_out or "", splits=names)


def _datasets(spec: str) -> Any:
    try:
        import datasets
    except ImportError as error:
        raise InputError(
            f"{spec} is read by the package datasets ({first_line(error)}): pip install datasets, or use python-stdlib "
            f"or a local file of another kind"
        ) from error
    return datasets


def _names_of_splits(file: Path) -> list[str]:
    content = read_json(file)
    names = content.get("splits") if isinstance(content, dict) else None
    if not isinstance(names, list) or not names or not all(isinstance(name, str) for name in names):
        raise InputError(f"{file}: it must name the splits that save_to_disk wrote; write the data set again")
    return names


def _rows(spec: str, split: str, rows: Any, reading: Reading) -> Iterator[Record]:
    place, number = f"{spec}, {split} row" if split else f"{spec}: row", 0
    names = rows.column_names or ()  # streams do not always know them
    if names:
        columns = used_columns(names, reading)
        if not columns:
            yield Record(f"{place} 1", dict.fromkeys(names))
            return
        rows = rows.select_columns(columns)
    try:
        for number, row in enumerate(rows, 1):
            yield Record(f"{place} {number}", dict.fromkeys(names or row) | without_nulls(row), may_be_blank=True)
    except (ValueError, OverflowError) as error:  # a date of the year 10000
        raise InputError(f"{place} {number + 1}: cannot be read ({first_line(error).rstrip('.')})") from error
    except Exception as error:  # a stream meets the network here
        raise _hub_error(spec, error) from error


def _hub_error(spec: str, error: Exception) -> InputError:
    if "scripts are no longer supported" in str(error):
        return InputError(
            f"{spec} is a data set with a loading script, which the package datasets no longer runs; use "
            f"a copy of it in Parquet or JSON"
        )
    said = first_line(error).rstrip(".")
    if "Config name is missing" in str(error):
        return InputError(f"{spec} has several configurations; name one as {spec}:CONFIG ({said})")
    return InputError(
        f"{spec} is neither in the cache nor to be had from the hub ({said}); check the name and the network (a gated "
        f"data set needs `hf auth login`), or use python-stdlib or a local file"
    )


def joined_articles(rows: Iterable[Record], text_field: str) -> Iterator[Record]:
    """Joins WikiText's rows (single lines) into one record per article, with its text in the column `text_field`."""
    lines: list[str] = []
    where = ""
    for row in rows:
        if _ARTICLE_TITLE.fullmatch(row.columns["text"]) and lines:
            yield Record(where, {text_field: "".join(lines)}, may_be_blank=True, named=False)
            lines = []
        where = where if lines else row.where
        lines.append(row.columns["text"])
    if lines:
        yield Record(where, {text_field: "".join(lines)}, may_be_blank=True, named=False)
