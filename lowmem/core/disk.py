"""Optimizer states that lie on a disk, for models whose states RAM does not hold.

`DiskStates` is one file without a name: the disk has its room back however the process ends. Each tensor is a shared
mapping of a part of it. The room is taken when the tensor is made, so that a full disk is a sentence then, and not a
signal at some page in the third hour.

For their update states are read and written as parts of a file: the kernel reads ahead what comes next (`read_ahead`)
and writes back while other work goes on, and no page counts towards the process. What uses the mapping itself, as
loading, saving and export do, gives its pages up afterwards (`let_go`). What the page cache keeps of the file is the
system's, which takes it back when it needs it.

To a GPU they pass through `DiskBuffers`, page-locked memory of the size of the staging ring's slots: what CUDA copies
from pageable memory it copies before the call returns.
"""

import mmap
import os
from collections.abc import Callable
from pathlib import Path
from weakref import WeakValueDictionary

import torch
from torch import Tensor

from lowmem.core.states_folder import open_states_file
from lowmem.errors import LowmemError

MEMORY_FILE_SYSTEMS = ("tmpfs", "ramfs")


class _Mapping(mmap.mmap):
    """Of `file`, from the byte `offset` on."""

    file: "DiskStates"
    offset: int


_mappings: WeakValueDictionary[int, _Mapping] = WeakValueDictionary()  # by address


class DiskStates:
    """Tensors in a file under `folder`, which is made if need be. InputError where that cannot be written."""

    def __init__(self, folder: Path):
        self._file = open_states_file(folder)
        self.folder, self._end = folder, 0

    def tensor(self, entries: int, dtype: torch.dtype) -> Tensor:
        """Zeros [entries] of `dtype`; LowmemError where the disk has no room for them."""
        size_bytes = entries * dtype.itemsize
        room = -(-max(size_bytes, 1) // mmap.ALLOCATIONGRANULARITY) * mmap.ALLOCATIONGRANULARITY
        try:
            self._take_room(room)
            mapping = _Mapping(self.number, room, flags=mmap.MAP_SHARED, offset=self._end)
        except OSError as error:
            raise LowmemError(
                f"states cannot be kept in --states-folder {self.folder}: {error.strerror}; free some room there, or "
                "give another folder"
            ) from None
        mapping.file, mapping.offset = self, self._end
        self._end += room
        memory = torch.frombuffer(mapping, dtype=torch.uint8)
        _mappings[memory.data_ptr()] = mapping
        return memory[:size_bytes].view(dtype)

    @property
    def number(self) -> int:
        """The file's descriptor."""
        return self._file.fileno()

    def _take_room(self, size_bytes: int) -> None:
        if hasattr(os, "posix_fallocate"):
            os.posix_fallocate(self.number, self._end, size_bytes)
        else:  # macOS, where a full disk is not found out here
            os.ftruncate(self.number, self._end + size_bytes)


def read(home: Tensor, tensor: Tensor) -> None:
    """Copies `home`, of a DiskStates or not, to `tensor` [n], in RAM."""
    if not _transfer(home, tensor, lambda number, content, offset: os.preadv(number, [content], offset)):
        tensor.copy_(home)


def write(tensor: Tensor, home: Tensor) -> None:
    """Copies `tensor` [n], in RAM, to `home`, of a DiskStates or not."""
    if not _transfer(home, tensor, os.pwrite):
        home.copy_(tensor)


def read_ahead(home: Tensor) -> None:
    """Lets the kernel begin to read `home`; the call does not wait for it."""
    place = _place(home)
    if place is not None and hasattr(os, "posix_fadvise"):
        mapping, start = place
        os.posix_fadvise(mapping.file.number, mapping.offset + start, home.nbytes, os.POSIX_FADV_WILLNEED)


def let_go(tensor: Tensor) -> None:
    """The pages of what `tensor` is a part of leave the process's resident set: those around it, too, since the kernel
    maps some of these beside what is touched. What they hold stays. Not of a DiskStates, nothing."""
    place = _place(tensor)
    if place is not None:
        place[0].madvise(mmap.MADV_DONTNEED)


def in_memory(folder: Path) -> str | None:
    """The name of the file system that `folder` is in, where that keeps its files in RAM; else, or where nobody knows,
    None."""
    try:
        lines = Path("/proc/self/mounts").read_text().splitlines()
    except OSError:
        return None
    folder = folder.resolve()
    found: tuple[int, str] = (-1, "")
    for line in lines:
        _, place, kind, *_ = line.split(" ")
        mounted = Path(place.replace("\\040", " "))
        if mounted == folder or mounted in folder.parents:
            found = max(found, (len(mounted.parts), kind))
    return found[1] if found[1] in MEMORY_FILE_SYSTEMS else None


class DiskBuffers:
    """Page-locked memory, by slot, through which states pass between a disk and a GPU."""

    def __init__(self, host_tensor: Callable[[int, torch.dtype], Tensor]):
        """`host_tensor(entries, dtype)` makes page-locked memory."""
        self._host_tensor = host_tensor
        self._buffers: dict[int, dict[str, Tensor]] = {}
        self._owed: dict[int, dict[str, Tensor]] = {}  # where what is in the buffers belongs, and is not yet

    def fill(self, slot: int, homes: dict[str, Tensor]) -> dict[str, Tensor]:
        """The slot's buffers, with what is in `homes`; no copy from them or to them may be under way."""
        self.settle(slot)
        buffers = self._of_size(slot, homes)
        for name, home in homes.items():
            read(home, buffers[name])
        return buffers

    def owe(self, slot: int, homes: dict[str, Tensor]) -> dict[str, Tensor]:
        """The slot's buffers, to be filled with what belongs into `homes` and gets there when the slot is settled."""
        self._owed[slot] = homes
        return self._of_size(slot, homes)

    def settle(self, slot: int) -> None:
        """Writes what the slot's buffers hold to where it belongs. All copies to them have arrived."""
        homes = self._owed.pop(slot, {})
        for name, buffer in self._of_size(slot, homes).items():
            write(buffer, homes[name])

    def settle_all(self) -> None:
        for slot in list(self._owed):
            self.settle(slot)

    def _of_size(self, slot: int, homes: dict[str, Tensor]) -> dict[str, Tensor]:
        buffers = self._buffers.setdefault(slot, {})
        for name, home in homes.items():
            if name not in buffers or buffers[name].numel() < home.numel():
                buffers[name] = self._host_tensor(home.numel(), home.dtype)
        return {name: buffers[name][: home.numel()] for name, home in homes.items()}


def _place(tensor: Tensor) -> tuple[_Mapping, int] | None:
    """The mapping that `tensor` is in, and from which byte of it on; None where it is in none."""
    address = tensor.untyped_storage().data_ptr()
    mapping = _mappings.get(address) if address else None
    return None if mapping is None else (mapping, tensor.data_ptr() - address)


def _transfer(home: Tensor, tensor: Tensor, move: Callable[..., int]) -> bool:
    """Moves all bytes of `tensor` from or to the file of `home`, `move(descriptor, bytes, offset)` some of them; False
    where that is in no file."""
    place = _place(home)
    if place is None:
        return False
    mapping, start = place
    content, done = memoryview(tensor.view(torch.uint8).numpy()), 0
    while done < len(content):
        try:
            moved = move(mapping.file.number, content[done:], mapping.offset + start + done)
        except OSError as error:
            moved, reason = 0, error.strerror
        else:
            reason = "the file is shorter than it was"
        if moved == 0:
            raise LowmemError(
                f"the disk of --states-folder {mapping.file.folder} failed: {reason}; the same command goes on from "
                "the newest checkpoint"
            ) from None
        done += moved
    return True
