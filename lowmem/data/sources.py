"""Opens the data set that `--data SPEC[=WEIGHT]` names: files, a data set of the hub, or Python's own code
(docs/data.md). Every data set yields its rows one at a time."""

import glob
import itertools
import os
import re
import sysconfig
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from lowmem.data.downloaded import find_split_files
from lowmem.data.hub_data import hub_source, joined_articles, saved_to_disk
from lowmem.data.records import Reading, Record, Source, stable_hash
from lowmem.data.tables import KNOWN_SUFFIXES, TABLE_SUFFIXES, read_file
from lowmem.errors import InputError
from lowmem.fields import shown
from lowmem.run_folder import is_of_a_run, is_run, without_runs
from lowmem.text_files import refuse_disguised, refuse_pointer
from lowmem.units import counted

MOST_WEIGHT = 1000
_NOT_LIBRARY = {"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"}
_MOST_NAMED = 3  # folders that are left out
_STDLIB = "python-stdlib"
_NAMES = (_STDLIB, "wikitext", "codeparrot")
_README = "readme.md"
_ABOUT_DATA = {"dataset_info.json", "dataset_infos.json", "dataset_dict.json"}  # these files have no rows
_HUB_NAME = re.compile(r"[\w.-]+/[\w.-]+(:[\w.-]+)?")
_NUMBER = re.compile(r"-?[0-9]+(\.[0-9]*)?|-?\.[0-9]+")


def open_source(spec: str, reading: Reading, out: Path | None = None) -> Source:
    """Opens the data set that a --data spec names, without files that training runs wrote. `reading`: its columns, and
    the split. `out`: the output folder of the present run, or None. Raises InputError if the data set is missing or
    cannot be read."""
    spec, weight = split_weight(spec)
    hides_hub = Path(spec).is_dir() and (spec in _NAMES or _HUB_NAME.fullmatch(spec) is not None)
    try:
        source = _open(spec, reading, out)
    except InputError as error:
        if not hides_hub:
            raise
        raise InputError(f"{error}; this folder hides the hub's {spec}: rename it if you mean that") from None
    remark = source.remark
    if hides_hub and spec in _NAMES:
        remark += " (not the folder here, which is ./python-stdlib)" if spec == _STDLIB else " (the folder here)"
    return replace(source, spec=spec, weight=weight, remark=remark)


def _open(spec: str, reading: Reading, out: Path | None) -> Source:
    if spec == _STDLIB:
        files = _library_files()
        return Source("Python's standard library", _library(files, reading), content=tuple(files.values()))
    if Path(spec).exists():
        return _local(Path(spec), reading, out)
    if folder := _folder_of_config(spec):
        return _local(folder, reading, out, spec.rpartition(":")[2])
    if glob.has_magic(spec):
        return _matching(spec, reading, out)
    if spec == "wikitext":
        source = hub_source("Salesforce/wikitext", "wikitext-2-raw-v1", replace(reading, text="text"))
        train, evaluation = (rows and joined_articles(rows, reading.text) for rows in (source.train, source.evaluation))
        return replace(source, name="WikiText-2, lines joined to articles", train=train, evaluation=evaluation)
    if spec == "codeparrot":
        names = (f"codeparrot/codeparrot-clean-{split}" for split in ("train", "valid"))
        source, held_out = (hub_source(name, None, replace(reading, text="content"), streamed=True) for name in names)
        train, evaluation = (
            (replace(row, columns={reading.text: row.columns["content"]}, named=False) for row in rows)
            for rows in (source.train, held_out.train)
        )
        return replace(source, train=train, evaluation=evaluation)
    if is_on_hub(spec):
        path, _, config = spec.partition(":")
        return hub_source(path, config or None, reading)
    path, _, typed = spec.rpartition("=")
    if path and Path(path).exists():
        raise InputError(f"{spec}: {typed!r} is no weight for {path}; write a number such as 2 or 0.5")
    raise InputError(
        f"{spec}: no such file or folder, and not a known name; use python-stdlib, wikitext, "
        f"codeparrot, a hub data set as org/name[:config], or a file or folder that exists"
    )


def split_weight(spec: str) -> tuple[str, float]:
    """Splits SPEC=WEIGHT into (name, weight), with weight 1 by default. An existing file's name, such as year=2024, is
    not split. Raises InputError unless the weight is above 0 and at most MOST_WEIGHT."""
    name, _, typed = spec.rpartition("=")
    if not name or Path(spec).exists() or not _NUMBER.fullmatch(typed):
        return spec, 1.0
    weight = float(typed)
    if not 0 < weight <= MOST_WEIGHT:
        raise InputError(f"{spec}: a weight must be more than 0 and at most {MOST_WEIGHT}")
    return name, weight


def is_on_hub(spec: str) -> bool:
    spec, _ = split_weight(spec)
    if spec == _STDLIB or Path(spec).exists() or _folder_of_config(spec):
        return False
    a_file = Path(spec).suffix in KNOWN_SUFFIXES
    return spec in ("wikitext", "codeparrot") or (bool(_HUB_NAME.fullmatch(spec)) and not a_file)


def _library_files() -> dict[str, Path]:
    """Returns {name: path} of the standard library's Python files, sorted by a hash, which mixes their folders."""
    root = Path(sysconfig.get_paths()["stdlib"])
    names = []
    for folder, subfolders, files in os.walk(root):
        subfolders[:] = [name for name in subfolders if name not in _NOT_LIBRARY]  # site-packages can be large
        names += [(Path(folder) / name).relative_to(root).as_posix() for name in files if name.endswith(".py")]
    return {name: root / name for name in sorted(names, key=lambda name: (stable_hash(name), name))}


def _library(files: dict[str, Path], reading: Reading) -> Iterator[Record]:
    for name, path in files.items():
        try:
            text = path.read_bytes().decode()
        except (OSError, UnicodeDecodeError):  # a few sources are in Latin-1
            continue
        yield Record(name, {reading.text: text}, may_be_blank=True, named=False)


def _folder_of_config(spec: str) -> Path | None:
    folder, colon, _ = spec.rpartition(":")
    return Path(folder) if colon and folder and Path(folder).is_dir() else None


def _local(path: Path, reading: Reading, out: Path | None, config: str | None = None) -> Source:
    if path.is_file():
        return _one_file(path, reading)
    if not path.is_dir():  # a pipe, as <(zcat a.gz) is
        raise InputError(f"{path}: this is neither a file nor a folder; write the text into a file first")
    if (path / "snapshots").is_dir() and (path / "refs" / "main").is_file():  # a data set in the hub client's cache
        path = path / "snapshots" / (path / "refs" / "main").read_text().strip()
    if saved := saved_to_disk(path, reading):
        return saved
    files = sorted(
        file
        for file in path.rglob("*")
        if file.is_file()
        and not any(part.startswith(".") or part == "__pycache__" for part in file.relative_to(path).parts)
    )
    files, remark = _without_runs(files, path, out)
    own = any(file.suffix.lower() in KNOWN_SUFFIXES for file in files)  # texts next to a run's files
    written = is_of_a_run(path.resolve(), None if out is None else out.resolve())
    if written and not (own and (is_run(path) or out is not None and path.samefile(out))):
        raise InputError(f"{path}: a run or a model is in this folder, and its files are no data; give your texts")
    found = find_split_files(path, files, config, reading.split)
    if found is None:
        return _files(str(path), "the folder holds", files, reading, remark)
    source = _files(str(path), "the folder holds", found.train, reading, found.remark + remark, files)
    train, evaluation = (
        (replace(row, may_be_blank=True) for row in rows)  # the publisher's rows, which the user did not write
        for rows in (source.train, _rows(found.held_out, reading))
    )
    content = (*found.train, *found.held_out)
    evaluation = evaluation if found.held_out else None
    return replace(
        source, train=train, evaluation=evaluation, content=content, held_out=found.name, splits=found.splits
    )


def _one_file(path: Path, reading: Reading) -> Source:
    _refuse_odd_names([path])
    if path.suffix.lower() not in KNOWN_SUFFIXES:
        _refuse_arrow([path])
        refuse_disguised(path)
        raise InputError(
            f"{path}: files of kind {path.suffix or '(none)'} are not read; convert it to one of "
            f"{' '.join(KNOWN_SUFFIXES)}"
        )
    if path.stat().st_size == 0:
        raise InputError(f"{path}: the file is empty")
    return Source(str(path), read_file(path, reading), content=(path,))


def _matching(pattern: str, reading: Reading, out: Path | None) -> Source:
    files = [Path(name) for name in sorted(glob.glob(pattern, recursive=True))]
    fixed = itertools.takewhile(lambda part: not glob.has_magic(part), Path(pattern).parts)
    files, remark = _without_runs([file for file in files if file.is_file()], Path(*fixed), out)
    return _files(pattern, "the pattern finds", files, reading, remark)


def _without_runs(files: list[Path], root: Path, out: Path | None) -> tuple[list[Path], str]:
    """Returns `files`, all below `root`, without those that training runs wrote, and a remark that names what was left
    out. `out`: the output folder of the present run, which is left out, too; or None."""
    files, runs = without_runs(files, root, out)
    named = [str(path) for path in runs[:_MOST_NAMED]]
    named += [f"{len(runs) - _MOST_NAMED} more"] if len(runs) > _MOST_NAMED else []
    return files, f" (runs and models left out: {', '.join(named)})" if runs else ""


def _files(
    name: str, found: str, files: list[Path], reading: Reading, remark: str, in_folder: list[Path] | None = None
) -> Source:  # fmt: skip
    """Makes a Source of all readable `files`. `found`: words for an error, such as "the folder holds". `reading`: names
    of the columns. `in_folder`: all files in the folder, for a remark on unread kinds; None: `files`."""
    readable = [file for file in files if file.suffix.lower() in KNOWN_SUFFIXES and file.name not in _ABOUT_DATA]
    readable = [file for file in readable if file.name != "state.json" or not any(file.parent.glob("*.arrow"))]
    about = {_README} if any(file.suffix.lower() in TABLE_SUFFIXES for file in readable) else set()  # about the tables
    readable = [file for file in readable if file.name.lower() not in about]
    kinds = {file.name if file.name.lower() in about else file.suffix or file.name for file in in_folder or files}
    others = sorted(kinds - {file.suffix for file in readable})
    _refuse_odd_names(readable)
    if not readable:
        _refuse_arrow(in_folder or files)
        raise InputError(f"{name}: {found} no file of the kinds {' '.join(KNOWN_SUFFIXES)}{remark}")
    said = f"{name}, {counted(len(readable), 'files')}" + (f" ({', '.join(others)} left out)" if others else "")
    return Source(said, _rows(readable, reading), content=tuple(readable), remark=remark)


def _rows(files: list[Path], reading: Reading) -> Iterator[Record]:
    return (record for file in files for record in read_file(file, reading, may_be_blank=True))


def _refuse_arrow(files: list[Path]) -> None:
    for file in files:
        if file.suffix == ".arrow":
            refuse_pointer(file)
            raise InputError(
                f"{file}: .arrow files are read only as the folder that save_to_disk wrote, with its state.json; give "
                f"that folder, or write the data set with to_parquet or to_json"
            )


def _refuse_odd_names(files: list[Path]) -> None:
    for file in files:
        if (name := shown(str(file))) != str(file):
            raise InputError(f"{name}: this file's name is not UTF-8; rename it")
