"""Finds the files of weights in a model's folder. Nothing here imports PyTorch."""

import re
from pathlib import Path

from lowmem.errors import InputError, some_of
from lowmem.text_files import read_json, refuse_pointer

_SHARD = re.compile(r"(.+)-(\d+)-of-(\d+)(\.safetensors|\.bin)")
_ENDS = (".safetensors", ".bin", ".pt", ".pth", ".ckpt")
_NO_WEIGHTS = re.compile(  # files of trainers, and weights under the names of other programs
    r"(adapter_|consolidated|lit_model|optim|scheduler|scaler|rng_state|random_states|training_args|trainer_state"
    r"|.*(optim|train|trainer|training)_states?\.|dataloader|tokenizer)"
)


def weight_files(folder: Path) -> list[Path]:
    """Returns the files of weights in `folder`: those with usual names, else numbered shards, else the only possible
    file. Raises InputError if there is none, if shards are missing, or if several files are possible."""
    files = usual_weight_files(folder) or _unusual_weight_files(folder)
    for path in files:
        refuse_pointer(path)
    return files


def usual_weight_files(folder: Path) -> list[Path]:
    """Returns the files of weights with names that transformers looks for; [] if there are none. Raises InputError if a
    shard is missing."""
    for name in ("model.safetensors", "pytorch_model.bin"):
        single, index = folder / name, folder / f"{name}.index.json"
        if single.is_file():
            return [single]
        if index.is_file():
            content = read_json(index)
            try:
                paths = [folder / name for name in sorted(set(content["weight_map"].values()))]
            except (KeyError, AttributeError, TypeError):
                raise InputError(f"{index} has no weight_map of tensors to files; download it again") from None
            return _complete(folder, paths)
    return []


def _complete(folder: Path, paths: list[Path]) -> list[Path]:
    if missing := [path.name for path in paths if not path.is_file()]:
        raise InputError(
            f"{folder} lacks {len(missing)} of {len(paths)} weight files ({some_of(missing)}): download again"
        )
    return paths


def _unusual_weight_files(folder: Path) -> list[Path]:
    candidates = [
        path
        for path in sorted(folder.iterdir(), key=lambda path: (path.suffix != ".safetensors", path))
        if path.suffix in _ENDS and not _NO_WEIGHTS.match(path.name) and path.is_file()
    ]
    for match in filter(None, (_SHARD.fullmatch(path.name) for path in candidates)):
        name, number, count, end = match.groups()
        numbers = range(1, int(count) + 1)
        return _complete(folder, [folder / f"{name}-{i:0{len(number)}d}-of-{count}{end}" for i in numbers])
    candidates = [path for path in candidates if path.suffix == ".safetensors"] or candidates
    if len(candidates) > 1:
        raise InputError(
            f"{folder} holds several files that could be the weights ({some_of(path.name for path in candidates)}); "
            "rename the right one to model.safetensors or pytorch_model.bin, by its kind"
        )
    if not candidates:
        raise InputError(
            f"{folder} holds no model.safetensors and no pytorch_model.bin, whole or in shards; copy the weights there"
        )
    return candidates
