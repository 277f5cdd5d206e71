"""The place of each tensor in a file of weights, and its values, read from there.

Both kinds of file (.safetensors and zipped .bin) are only a list of (name, dtype, shape, offset) followed by raw bytes.
So the lists of all files are read first and compared with the model; then the bytes are read by offset. Mapping the
files instead would be shorter, but every page touched counts as memory of this process until the map is closed.
"""

import json
import math
import mmap
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from lowmem.core.precision import RUN_ELEMENTS
from lowmem.errors import InputError, first_few
from lowmem.text_files import ZIP, refuse_disguised

_FLOATS = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
# Trainers' keys for a model's state_dict in their checkpoints.
_NESTED = ("model", "state_dict", "model_state_dict", "module", "model_state", "weights", "params", "net", "network")


@dataclass(frozen=True)
class Entry:
    """The place of one tensor in a file; `dtype` is None if it cannot be trained in that dtype."""

    path: Path
    offset_bytes: int
    dtype: torch.dtype | None
    stored: str  # the dtype as the file calls it
    shape: tuple[int, ...]
    stride: tuple[int, ...]  # in elements; safetensors are always contiguous, .bin files need not be

    @property
    def is_contiguous(self) -> bool:
        return self.stride == _strides(self.shape)

    @property
    def elements(self) -> int:
        """Elements from the first to the last, whatever the stride."""
        if 0 in self.shape:
            return 0
        return 1 + sum((size - 1) * step for size, step in zip(self.shape, self.stride, strict=True))


def entries_of(path: Path) -> tuple[dict[str, Entry], list[str]]:
    """{name: entry} of a file of weights, in the order of its bytes; the keys under which they were in it."""
    return (_safetensors_entries(path), []) if path.suffix == ".safetensors" else _bin_entries(path)


def _safetensors_entries(path: Path) -> dict[str, Entry]:
    try:
        with safe_open(path, framework="pt"):  # checks the header, and that the data have the length that it promises
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
    entries = {}
    for name, item in sorted(header.items(), key=lambda pair: pair[1]["data_offsets"]):
        shape, stored = tuple(item["shape"]), item["dtype"]
        offset_bytes = 8 + header_bytes + item["data_offsets"][0]
        entries[name] = Entry(path, offset_bytes, _FLOATS.get(stored), stored, shape, _strides(shape))
    return entries


def _strides(shape: tuple[int, ...]) -> tuple[int, ...]:
    """The strides of a contiguous tensor."""
    return tuple(math.prod(shape[axis + 1 :]) for axis in range(len(shape)))


def _bin_entries(path: Path) -> tuple[dict[str, Entry], list[str]]:
    try:
        with FakeTensorMode():  # reads the pickle but no data, and notes where in the file each storage lies
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
    tensors, keys = _state_dict(path, content)
    entries = {}
    for name, tensor in tensors.items():
        if not isinstance(tensor, Tensor):
            continue
        if tensor.layout is not torch.strided:
            kind = str(tensor.layout).removeprefix("torch.")
            raise InputError(f"{path}: {name} is stored as {kind}; save it dense (tensor.to_dense())")
        storage_offset_bytes = tensor.untyped_storage()._checkpoint_offset
        if storage_offset_bytes is None:
            raise InputError(
                f"{path} was written before torch 1.6 and cannot be read piece by piece; load it once with "
                "AutoModelForCausalLM.from_pretrained, save it with save_pretrained, and give that folder"
            )
        offset_bytes = storage_offset_bytes + tensor.storage_offset() * tensor.element_size()
        dtype = tensor.dtype if tensor.dtype in _FLOATS.values() else None
        stored = str(tensor.dtype).removeprefix("torch.")
        entries[str(name)] = Entry(path, offset_bytes, dtype, stored, tuple(tensor.shape), tensor.stride())
    return dict(sorted(entries.items(), key=lambda pair: pair[1].offset_bytes)), keys


def _state_dict(path: Path, content: object) -> tuple[dict, list[str]]:
    """The dictionary of tensors in the `content` of a file, and the keys under which it was."""
    keys = []
    while isinstance(content, dict):
        inner = [key for key in _NESTED if isinstance(content.get(key), dict) and _holds_tensors(content[key])]
        if len(inner) > 1:
            raise InputError(
                f"{path} holds several dictionaries of weights ({', '.join(inner)}); save the right one alone"
            )
        if not inner:
            break
        keys += inner
        content = content[inner[0]]
    if not isinstance(content, dict) or not any(isinstance(value, Tensor) for value in content.values()):
        held = first_few(map(str, content)) if isinstance(content, dict) else type(content).__name__
        raise InputError(f"{path} is no state_dict: it holds {held or 'nothing'}; save the model's state_dict alone")
    return content, keys


def _holds_tensors(content: dict) -> bool:
    return any(
        isinstance(value, Tensor) or (isinstance(value, dict) and _holds_tensors(value)) for value in content.values()
    )


def exact_empty(shape: Iterable[int], dtype: torch.dtype) -> Tensor:
    """Zeros in a memory mapping that is freed with the tensor: malloc would keep freed pieces of up to 32 MiB."""
    shape = tuple(shape)
    if 0 in shape:
        return torch.empty(shape, dtype=dtype)
    memory = mmap.mmap(-1, math.prod(shape) * dtype.itemsize, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    return torch.frombuffer(memory, dtype=dtype).view(shape)


def chunks(entry: Entry) -> Iterator[Tensor]:
    """The entry's elements [n] in the file's dtype, a run at a time, always in the same memory."""
    staging = exact_empty([min(RUN_ELEMENTS, entry.elements)], entry.dtype)
    with entry.path.open("rb") as file:
        file.seek(entry.offset_bytes)
        for start in range(0, entry.elements, RUN_ELEMENTS):
            chunk = staging[: entry.elements - start]
            if file.readinto(chunk.view(torch.uint8).numpy()) != chunk.nbytes:
                raise InputError(f"{entry.path} ends in the middle of a tensor; download or copy it again")
            yield chunk


def read_runs(entry: Entry) -> Iterator[Tensor]:
    """Yields the tensor in fp32; fp64 is rounded. A contiguous tensor of more than RUN_ELEMENTS elements comes as flat
    runs, any other one whole."""
    if entry.elements > RUN_ELEMENTS and entry.is_contiguous:
        for chunk in chunks(entry):
            yield chunk.to(torch.float32, copy=True)
        return
    flat = exact_empty([entry.elements], torch.float32)
    start = 0
    for chunk in chunks(entry):
        flat[start : start + len(chunk)] = chunk
        start += len(chunk)
    yield flat.as_strided(entry.shape, entry.stride)


def same_values(one: Entry, other: Entry) -> bool:
    """True if two tensors are equal, or cannot be trained and have one dtype and shape."""
    if (one.path, one.offset_bytes) == (other.path, other.offset_bytes):
        return True
    if one.dtype is None:
        return (one.stored, one.shape) == (other.stored, other.shape)
    pairs = zip(chunks(one), chunks(other), strict=False)
    alike = (one.dtype, one.shape, one.stride) == (other.dtype, other.shape, other.stride)
    return alike and all(torch.equal(a, b) for a, b in pairs)
