"""Finds the training and held-out files of a data set that was downloaded from the Hugging Face hub.

The data set's card (README.md) names the files of each split; otherwise names of files show the splits (docs/data.md).
"""

import glob
import re
from collections import Counter
from pathlib import Path
from typing import Any, NamedTuple

from lowmem.data.hub_data import choose_splits, split_of
from lowmem.data.tables import KNOWN_SUFFIXES, TABLE_SUFFIXES
from lowmem.errors import InputError
from lowmem.text_files import parse_yaml, read_text

_CARD = "README.md"
_OF_DATA_SETS = {  # keys in cards of data sets
    *("license", "configs", "dataset_info", "task_categories", "task_ids", "size_categories", "pretty_name", "viewer"),
    *("annotations_creators", "language_creators", "multilinguality", "source_datasets", "paperswithcode_id"),
}
_OF_OTHERS = {"sdk", "library_name", "pipeline_tag", "base_model"}  # keys in cards of apps and models
_SHARD = re.compile(r"data/([\w.]+)-[0-9]{5}-of-[0-9]{5}.*")
_PACKED = (".gz", ".zst", ".xz", ".bz2", ".zip")

Splits = dict[str, list[Path]]


class SplitFiles(NamedTuple):
    """Lists the files of a data set's training split, and of its held-out split called `name`."""

    train: list[Path]
    held_out: list[Path]
    name: str
    remark: str  # for the description of the data
    splits: tuple[str, ...]  # the names of all splits


def find_split_files(folder: Path, files: list[Path], config: str | None, split: str | None) -> SplitFiles | None:
    """Finds the training and held-out files of the data set in `folder`, among `files`. `config`, `split`: names of a
    configuration and a training split that the user gave, or None. Returns None if nothing shows that `folder` is a
    data set. Raises InputError if the configuration, the split or its files are missing or unreadable."""
    card = _card(folder)
    name, chosen = _configuration(folder, card, config)
    if "data_dir" in chosen:
        files = [file for file in files if folder / str(chosen["data_dir"]) in file.parents]
    files = [file for file in files if file.name != _CARD]
    if chosen.get("data_files"):
        splits = _splits_of_card(folder, files, name, chosen["data_files"], split)
    else:
        files = _of_one_kind(files)
        splits = _splits_by_name(folder, files)
        if card is None and split not in splits and not _tell_splits(splits, files):
            return None
    if not splits and not files:
        raise InputError(
            f"{folder}: it has the card of a data set and no file of the kinds .txt {' '.join(TABLE_SUFFIXES)}; "
            f"download it complete (scripts that load data are not run)"
        )
    splits = splits or {"train": files}
    train, held_out, remark = choose_splits(list(splits), split)
    for file in splits[train]:
        if file.suffix.lower() not in KNOWN_SUFFIXES:
            raise InputError(f"{file}: files of kind {file.suffix or '(none)'} are not read; unpack or convert it")
    readable = [file for file in splits.get(held_out, ()) if file.suffix.lower() in KNOWN_SUFFIXES]
    remark = f"{name and f' (configuration {name})'}{remark}"
    return SplitFiles(splits[train], readable, held_out or "", remark, (*splits,))


def _card(folder: Path) -> dict[str, Any] | None:
    try:
        text = read_text(folder / _CARD).replace("\r\n", "\n")
        before, _, rest = text.partition("---\n")
        card = None if before else parse_yaml(rest.partition("\n---")[0], _CARD)
    except (OSError, InputError):
        return None
    is_card = isinstance(card, dict) and card.keys() & _OF_DATA_SETS and not card.keys() & _OF_OTHERS
    return card if is_card else None


def _configuration(folder: Path, card: dict[str, Any] | None, asked: str | None) -> tuple[str, dict[str, Any]]:
    """Returns (name, content) of the card's configuration `asked`. For None: of the default one, or ("", content) if
    the card has at most one. Raises InputError if there is no such configuration."""
    items = (card or {}).get("configs")
    items = [item for item in items if isinstance(item, dict)] if isinstance(items, list) else []
    configs = {str(item.get("config_name")): item for item in items}
    names, first = ", ".join(configs), next(iter(configs), "")
    if asked is not None:
        if asked not in configs:
            instead = f"it has {names}" if configs else f"if {folder}/{asked} is a folder, give that"
            raise InputError(f"{folder}: its card names no configuration {asked}; {instead}")
        return asked, configs[asked]
    if len(configs) <= 1:
        return "", items[0] if items else {}
    for name, item in configs.items():
        if name == "default" or str(item.get("default")).lower() == "true":
            return name, item
    raise InputError(f"{folder} has {len(configs)} configurations ({names}); name one as {folder}:{first}")


def _splits_of_card(folder: Path, files: list[Path], config: str, data_files: Any, split: str | None) -> Splits:
    """Returns {split: files} as the card's `data_files` say, without splits that were not downloaded. `split`: the one
    to train on, None for the usual one; raises InputError if it is missing."""
    patterns: dict[str, list[str]] = {}
    for item in data_files if isinstance(data_files, list) else [data_files]:
        named, paths = (item.get("split"), item.get("path")) if isinstance(item, dict) else ("train", item)
        patterns.setdefault(str(named), []).extend(map(str, paths if isinstance(paths, list) else [paths]))
    by_name = {file.relative_to(folder).as_posix(): file for file in files}
    splits: Splits = {}
    for named, names in patterns.items():
        names = [f"{name.rstrip('/')}/**" if (folder / name).is_dir() else name for name in names]
        found = {name for pattern in names for name in glob.glob(pattern, root_dir=folder, recursive=True)}
        splits[named] = [by_name[name] for name in sorted(found) if name in by_name]
    train, _, _ = choose_splits(list(splits), split)
    if not splits[train]:
        raise InputError(
            f"{folder / _CARD}: it names {', '.join(patterns[train])} for the split {train}"
            f"{config and f' of {config}'}, and there is no such file; download the data set complete"
        )
    return {named: found for named, found in splits.items() if found}


def _of_one_kind(files: list[Path]) -> list[Path]:
    counted = Counter(map(_kind, files))
    most = max(TABLE_SUFFIXES, key=lambda kind: counted[kind])
    return [file for file in files if _kind(file) == (most if counted[most] else ".txt")]


def _kind(file: Path) -> str:
    name = file.name.lower()
    return Path(name.removesuffix(Path(name).suffix) if name.endswith(_PACKED) else name).suffix


def _splits_by_name(folder: Path, files: list[Path]) -> Splits:
    """Returns {split: files}. Reads splits from the names of shards, such as data/train-00000-of-00002.parquet. If
    there are none, reads splits from words in the names of folders, or else in the names of files."""
    for split_in in (
        lambda name: (match := _SHARD.fullmatch(name.as_posix())) and match[1],
        lambda name: split_of(" ".join(name.parent.parts)),
        lambda name: split_of(name.name),
    ):
        splits: Splits = {}
        for file in files:
            if split := split_in(file.relative_to(folder)):
                splits.setdefault(split, []).append(file)
        if splits:
            return splits
    return {}


def _tell_splits(splits: Splits, files: list[Path]) -> bool:
    """Returns True if `splits`, read from the names of `files`, show a data set of the hub: they are of several kinds,
    "train" among them. If the files are .txt files, each must also be in a split."""
    kinds = {split_of(split) for split in splits}
    all_told = sum(map(len, splits.values())) == len(files)
    return "train" in kinds and len(kinds) > 1 and (all_told or _kind(files[0]) != ".txt")
