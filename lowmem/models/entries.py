"""Finds the tensors in files of weights (.safetensors or zipped .bin), and reads their values by offset.

The files are not memory-mapped, because a mapping would count as RAM until it is closed.
"""

import json
import math
import re
import struct
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from lowmem.core.homes import host_tensor
from lowmem.core.precision import CHUNK_ELEMENTS
from lowmem.errors import InputError, some_of
from lowmem.text_files import ZIP, refuse_disguised

_FLOATS = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
# Trainers' keys for a model's state_dict in their checkpoints.
_NESTED = ("model", "state_dict", "model_state_dict", "module", "model_state", "weights", "params", "net", "network")


@dataclass(frozen=True)
class Entry:
    """Locates one tensor in a file of weights."""

    path: Path
    offset_bytes: int
    dtype: torch.dtype | None  # None unless it is fp64, fp32, fp16 or bf16
    stored: str  # the file's name for the dtype
    shape: tuple[int, ...]
    stride: tuple[int, ...] | None = None  # in elements; None if it is contiguous, as in every .safetensors file

    @property
    def elements(self) -> int:
        """Returns the number of stored elements from the tensor's first to its last, including gaps."""
        if self.stride is None or 0 in self.shape:
            return math.prod(self.shape)
        return 1 + sum((size - 1) * step for size, step in zip(self.shape, self.stride, strict=True))


def entries_of(path: Path) -> tuple[dict[str, Entry], list[str]]:
    """Returns {name: entry} of the tensors in a file, in the order of their bytes, and the keys of nested dictionaries
    that lead to them, such as ["model"]. Raises InputError if the file cannot be read."""
    entries, keys = (_safetensors_entries(path), []) if path.suffix == ".safetensors" else _bin_entries(path)
    return dict(sorted(entries.items(), key=lambda pair: pair[1].offset_bytes)), keys


def _safetensors_entries(path: Path) -> dict[str, Entry]:
    try:
        with safe_open(path, framework="pt"):  # checks the header and the length of the data
            pass
    except OSError as error:
        raise InputError(f"{path} cannot be read: {error.strerror or error}") from None
    except SafetensorError as error:
        refuse_disguised(path, b"")
        raise InputError(f"{path} is truncated or corrupt ({error}); download or copy it again") from None
    with path.open("rb") as file:
        header_bytes = int.from_bytes(file.read(8), "little")
        header = json.loads(file.read(header_bytes))
    header.pop("__metadata__", None)
    return {
        name: Entry(
            path, 8 + header_bytes + item["data_offsets"][0], _FLOATS.get(item["dtype"]), item["dtype"],
            tuple(item["shape"]),
        )
        for name, item in header.items()
    }  # fmt: skip


def _bin_entries(path: Path) -> tuple[dict[str, Entry], list[str]]:
    try:
        with FakeTensorMode():  # reads the pickle but no data, and notes each storage's offset in the file
            content = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # pickle, zip and torch each have their own
        if found := re.search(r"Unsupported (?:global: GLOBAL|class) ([\w.]+)", str(error)):
            raise InputError(
                f"{path} holds a Python object ({found[1]}), which is not read, since it may run code; load it where "
                "you trust it, and save only its state_dict, as pytorch_model.bin"
            ) from None
        reason = (str(error).strip().rpartition("WeightsUnpickler error: ")[2] or type(error).__name__).splitlines()[0]
        refuse_disguised(path, ZIP)
        raise InputError(f"{path} is truncated, corrupt or no state_dict ({reason[:200]}); download it again") from None
    content, keys = _state_dict(path, content)
    members = _stored_members(path)
    tensors = ((str(name), value) for name, value in content.items() if isinstance(value, Tensor))
    return {name: _bin_entry(path, name, tensor, members) for name, tensor in tensors}, keys


def _stored_members(path: Path) -> dict[int, int]:
    """Returns {offset: size}, in bytes, for the content of each uncompressed member of a zip file; {} if `path` is no
    zip file."""
    if not zipfile.is_zipfile(path):  # a file from before torch 1.6
        return {}
    with zipfile.ZipFile(path) as archive, path.open("rb") as file:
        members = {}
        for member in archive.infolist():
            file.seek(member.header_offset + 26)
            begin = member.header_offset + 30 + sum(struct.unpack("<2H", file.read(4)))  # after name and extra field
            if member.compress_type == zipfile.ZIP_STORED:
                members[begin] = member.file_size
        return members


def _bin_entry(path: Path, name: str, tensor: Tensor, members: dict[int, int]) -> Entry:
    """Returns the Entry of `tensor`, which torch.load made from a .bin file without reading its values. `members`:
    {offset: size}, in bytes, of the file's uncompressed members. Raises InputError if the values cannot be read by
    offset."""
    if tensor.is_neg() or tensor.is_conj():
        raise InputError(f"{path}: {name} is stored as a view with a flag; save tensor.resolve_neg().resolve_conj()")
    if tensor.layout is not torch.strided:
        kind = str(tensor.layout).removeprefix("torch.")
        raise InputError(f"{path}: {name} is stored as {kind}; save it dense (tensor.to_dense())")
    storage_offset_bytes = tensor.untyped_storage()._checkpoint_offset
    if storage_offset_bytes is None:
        raise InputError(
            f"{path} was written before torch 1.6 and cannot be read piece by piece; load it once with "
            "AutoModelForCausalLM.from_pretrained, save it with save_pretrained, and give that folder"
        )
    stored_bytes = tensor.untyped_storage().nbytes()
    # PyTorch computes the offset as if torch.save had written the file.
    if stored_bytes and members.get(storage_offset_bytes) != stored_bytes:
        raise InputError(f"{path} was packed by another program than PyTorch; unpack it, and save it with torch.save")
    offset_bytes = storage_offset_bytes + tensor.storage_offset() * tensor.element_size()
    dtype, stored = tensor.dtype if tensor.dtype in _FLOATS.values() else None, str(tensor.dtype).removeprefix("torch.")
    stride = None if tensor.is_contiguous() else tensor.stride()
    return Entry(path, offset_bytes, dtype, stored, tuple(tensor.shape), stride)


def _state_dict(path: Path, content: object) -> tuple[dict, list[str]]:
    """Returns the innermost dictionary of tensors in a file's `content`, and the keys that lead to it."""
    keys = []
    while isinstance(content, dict):
        inner = [key for key in _NESTED if isinstance(content.get(key), dict) and _holds_tensors(content[key])]
        if len(inner) > 1:
            raise InputError(f"{path} holds several dictionaries of weights ({', '.join(inner)}); save the right one")
        if not inner:
            break
        keys += inner
        content = content[inner[0]]
    if not isinstance(content, dict) or not any(isinstance(value, Tensor) for value in content.values()):
        held = some_of(map(str, content)) if isinstance(content, dict) else type(content).__name__
        raise InputError(f"{path} is no state_dict: it holds {held or 'nothing'}; save only the model's state_dict")
    return content, keys


def _holds_tensors(content: object) -> bool:
    inner = content.values() if isinstance(content, dict) else ()
    return isinstance(content, Tensor) or any(map(_holds_tensors, inner))


def chunks(entry: Entry) -> Iterator[Tensor]:
    """Yields the elements of a stored tensor in the file's dtype, as flat chunks [n]. Each chunk overwrites the one
    before. Raises InputError if the file ends too early."""
    staging = host_tensor(min(CHUNK_ELEMENTS, entry.elements), entry.dtype)  # malloc would keep blocks of up to 32 MiB
    with entry.path.open("rb") as file:
        file.seek(entry.offset_bytes)
        for start in range(0, entry.elements, CHUNK_ELEMENTS):
            chunk = staging[: entry.elements - start]
            if file.readinto(chunk.view(torch.uint8).numpy()) != chunk.nbytes:
                raise InputError(f"{entry.path} ends in the middle of a tensor; download or copy it again")
            yield chunk


def read_runs(entry: Entry) -> Iterator[Tensor]:
    """Yields a stored tensor in fp32: whole, or in flat chunks if it is contiguous and has more than CHUNK_ELEMENTS
    elements."""
    if entry.elements > CHUNK_ELEMENTS and entry.stride is None:
        for chunk in chunks(entry):
            yield chunk.to(torch.float32, copy=True)
        return
    flat = host_tensor(entry.elements, torch.float32)
    for start, chunk in zip(range(0, entry.elements, CHUNK_ELEMENTS), chunks(entry), strict=True):
        flat[start : start + len(chunk)] = chunk
    yield flat.view(entry.shape) if entry.stride is None else flat.as_strided(entry.shape, entry.stride)


def same_values(one: Entry, other: Entry) -> bool:
    """Returns True if two stored tensors have the same dtype, shape, stride and values. Ignores values of unreadable
    dtypes."""
    if (one.path, one.offset_bytes) == (other.path, other.offset_bytes):
        return True
    alike = (one.stored, one.shape, one.stride) == (other.stored, other.shape, other.stride)
    pairs = () if one.dtype is None else zip(chunks(one), chunks(other), strict=True)
    return alike and all(torch.equal(mine, theirs) for mine, theirs in pairs)
