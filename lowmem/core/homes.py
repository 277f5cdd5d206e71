"""Allocates tensors outside the GPU's memory: in RAM, and on a disk.

A tensor in RAM is a memory mapping of exactly the size asked for, and CUDA can page-lock it. PyTorch's page-locked
allocator rounds sizes up to powers of two: 2.25 GiB take 4 GiB.

A tensor on a disk is a shared mapping of a range of a temporary file. The file is unlinked, so its space is free again
however the process ends. Updates read and write the file by system calls (`copy`), not through the mapping. So no page
of the mapping counts as memory of the process. The operating system reads ahead and writes while other work goes on.
Loading, saving and export use the mapping, and drop its pages afterwards.
"""

import mmap
import os
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from weakref import WeakValueDictionary

import torch
from torch import Tensor

from lowmem.core.states_folder import open_states_file
from lowmem.errors import LowmemError
from lowmem.units import round_up


class _Mapping(mmap.mmap):
    """Maps the memory of one tensor. If `file` is None, this is anonymous memory in RAM. Otherwise this is a mapping of
    that file from byte `offset` on. `locked_address`: address that is page-locked with CUDA; None if the memory is
    not."""

    file: "DiskStates | None" = None
    offset = 0
    locked_address: int | None = None

    def __del__(self):  # an address that stays registered cannot be registered again
        if self.locked_address is not None:
            torch.cuda.cudart().cudaHostUnregister(self.locked_address)


_mappings: WeakValueDictionary[int, _Mapping] = WeakValueDictionary()  # by address


def host_tensor(entries: int, dtype: torch.dtype) -> Tensor:
    """Returns a new tensor [entries] of zeros in RAM."""
    size_bytes = max(entries * dtype.itemsize, 1)
    return _tensor(_Mapping(-1, size_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS), entries, dtype)


def page_lock(tensor: Tensor) -> bool:
    """Page-locks a tensor that `host_tensor` made, by registering its memory with CUDA. This makes all its pages
    resident. Returns False if CUDA refuses (a limit on locked memory). Then copies of this tensor run at about half the
    speed, and do not overlap with other work."""
    mapping = _mappings[tensor.data_ptr()]
    if mapping.locked_address is not None:
        return True
    if int(torch.cuda.cudart().cudaHostRegister(tensor.data_ptr(), tensor.nbytes, 0)) == 0:
        mapping.locked_address = tensor.data_ptr()
        # When a process forks, Linux copies page-locked pages at once, which doubles the RAM. Older versions share the
        # pages. Then the first write gives the CPU a copy, and the GPU goes on with the old page.
        mapping.madvise(mmap.MADV_DONTFORK)
        return True
    with suppress(RuntimeError):  # the next kernel launch raises the refusal's error: this launch takes it
        torch.zeros(1, device="cuda")
    return False


class DiskStates:
    """Makes tensors for optimizer states on a disk, all in one unlinked temporary file in `folder`. Creates the folder
    if it does not exist. Raises InputError if no file can be created there."""

    def __init__(self, folder: Path):
        self._file = open_states_file(folder)
        self.folder, self.number, self._end = folder, self._file.fileno(), 0

    def tensor(self, entries: int, dtype: torch.dtype) -> Tensor:
        """Returns a new memory-mapped tensor [entries] of zeros on the disk. Reserves the disk space now, because a
        disk that fills up later would kill the process with a signal. Raises LowmemError if the disk has too little
        space."""
        size = round_up(max(entries * dtype.itemsize, 1), mmap.ALLOCATIONGRANULARITY)
        try:
            if hasattr(os, "posix_fallocate"):
                os.posix_fallocate(self.number, self._end, size)
            else:  # macOS, where a full disk is not found out here
                os.ftruncate(self.number, self._end + size)
            mapping = _Mapping(self.number, size, flags=mmap.MAP_SHARED, offset=self._end)
        except OSError as error:
            raise LowmemError(
                f"states cannot be kept in --states-folder {self.folder}: {error.strerror}; free some room there, or "
                "give another folder"
            ) from None
        mapping.file, mapping.offset = self, self._end
        self._end += size
        return _tensor(mapping, entries, dtype)


def copy(destination: Tensor, source: Tensor) -> None:
    """Copies all bytes of the flat tensor `source` to the flat tensor `destination`. At most one of these may be on a
    disk. Raises LowmemError if the disk fails."""
    for home, other, move in ((source, destination, _pread), (destination, source, os.pwrite)):
        mapping, start = _place(home)
        if mapping is not None:
            _move(mapping, start, memoryview(other.view(torch.uint8).numpy()), move)
            return
    destination.copy_(source)


def read_ahead(home: Tensor) -> None:
    """Asks the operating system to read the tensor `home` from the disk into the page cache. Does not wait. Does
    nothing for a tensor in RAM."""
    mapping, start = _place(home)
    if mapping is not None and hasattr(os, "posix_fadvise"):
        os.posix_fadvise(mapping.file.number, mapping.offset + start, home.nbytes, os.POSIX_FADV_WILLNEED)


def drop_pages(tensor: Tensor) -> None:
    """Removes the pages of a memory-mapped tensor on a disk from the process's resident set; the content stays. Does so
    for the tensor's whole mapping, because the operating system also maps pages near those that are touched. Does
    nothing for other tensors."""
    mapping, _ = _place(tensor)
    if mapping is not None:
        mapping.madvise(mmap.MADV_DONTNEED)


def _tensor(mapping: _Mapping, entries: int, dtype: torch.dtype) -> Tensor:
    """Returns a tensor of the first `entries` elements in `mapping`, a memory mapping. The mapping lives as long as the
    tensor and the tensor's views."""
    memory = torch.frombuffer(mapping, dtype=torch.uint8)
    _mappings[memory.data_ptr()] = mapping
    return memory[: entries * dtype.itemsize].view(dtype)


def _place(tensor: Tensor) -> tuple[_Mapping | None, int]:
    """Returns the mapping of a tensor that is on a disk, and the offset in bytes of the tensor in the mapping. Returns
    (None, 0) for other tensors."""
    address = tensor.untyped_storage().data_ptr()
    mapping = _mappings.get(address) if address else None
    return (None, 0) if mapping is None or mapping.file is None else (mapping, tensor.data_ptr() - address)


def _pread(number: int, content: memoryview, offset: int) -> int:
    return os.preadv(number, [content], offset)


def _move(mapping: _Mapping, start: int, content: memoryview, move: Callable[[int, memoryview, int], int]) -> None:
    """Reads or writes all of `content` in the file of `mapping`, from byte `start` of the mapping on. `move`: the
    system call, which may transfer only some of the bytes each time. Raises LowmemError if this call fails."""
    done = 0
    while done < len(content):
        reason = "the file is shorter than it was"
        try:
            moved = move(mapping.file.number, content[done:], mapping.offset + start + done)
        except OSError as error:
            moved, reason = 0, error.strerror
        if moved == 0:
            raise LowmemError(
                f"the disk of --states-folder {mapping.file.folder} failed: {reason}; the same command goes on from "
                "the newest checkpoint"
            ) from None
        done += moved
