"""Allocates tensors outside the GPU's memory: in RAM, and in a file on a disk."""

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
    file: "DiskStates | None" = None  # None: anonymous memory in RAM
    offset = 0  # of the mapping in `file`, in bytes
    locked_address: int | None = None  # page-locked with CUDA; None if the memory is not

    def __del__(self):  # an address that stays registered cannot be registered again
        if self.locked_address is not None:
            torch.cuda.cudart().cudaHostUnregister(self.locked_address)


_mappings: WeakValueDictionary[int, _Mapping] = WeakValueDictionary()  # by address


def host_tensor(entries: int, dtype: torch.dtype) -> Tensor:
    """Returns a new flat tensor of `entries` zeros in RAM."""
    size_bytes = max(entries * dtype.itemsize, 1)
    # A mapping has exactly the size asked for. PyTorch's page-locked allocator rounds up to powers of two: 2.25 GiB
    # take 4 GiB.
    return _tensor(_Mapping(-1, size_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS), entries, dtype)


def page_lock(tensor: Tensor) -> bool:
    """Page-locks a tensor from `host_tensor`. Returns False if CUDA refuses; then copies take twice as long, and
    overlap with no other work."""
    mapping = _mappings[tensor.data_ptr()]
    if mapping.locked_address is not None:
        return True
    if int(torch.cuda.cudart().cudaHostRegister(tensor.data_ptr(), tensor.nbytes, 0)) == 0:
        mapping.locked_address = tensor.data_ptr()
        # When a process forks, Linux copies page-locked pages at once, which doubles the RAM. Older versions share the
        # pages. Then the first write gives the CPU a copy, and the GPU goes on with the old page.
        mapping.madvise(mmap.MADV_DONTFORK)
        return True
    # CUDA refused: there is a limit on locked memory.
    with suppress(RuntimeError):  # the next kernel launch raises the refusal's error: this launch takes it
        torch.zeros(1, device="cuda")
    return False


class DiskStates:
    """Makes tensors for optimizer states in a file in `folder`. Raises InputError if no file can be created there."""

    def __init__(self, folder: Path):
        self._file = open_states_file(folder)  # unlinked: its space is free again however the process ends
        self.folder, self.number, self._end = folder, self._file.fileno(), 0

    def tensor(self, entries: int, dtype: torch.dtype) -> Tensor:
        """Returns a new memory-mapped flat tensor of `entries` zeros. Raises LowmemError if the disk has too little
        space."""
        size = round_up(max(entries * dtype.itemsize, 1), mmap.ALLOCATIONGRANULARITY)
        try:
            # Reserves the space now: a disk that fills up later would kill the process with a signal.
            if hasattr(os, "posix_fallocate"):
                os.posix_fallocate(self.number, self._end, size)
            else:  # macOS, where a full disk is not found out here
                os.ftruncate(self.number, self._end + size)
            # Loading, saving and export use the mapping, and drop its pages afterwards.
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
    """Copies the bytes of a flat tensor to another; at most one may be on a disk. Raises LowmemError if the disk
    fails."""
    # By system calls: pages of a mapping would count as memory of the process. The operating system reads ahead, and
    # writes while other work goes on.
    for home, other, move in ((source, destination, _pread), (destination, source, os.pwrite)):
        mapping, start = _place(home)
        if mapping is not None:
            _move(mapping, start, memoryview(other.view(torch.uint8).numpy()), move)
            return
    destination.copy_(source)


def read_ahead(home: Tensor) -> None:
    """Asks the operating system to read the tensor `home` into its cache. Does nothing if `home` is not on a disk."""
    mapping, start = _place(home)
    if mapping is not None and hasattr(os, "posix_fadvise"):
        os.posix_fadvise(mapping.file.number, mapping.offset + start, home.nbytes, os.POSIX_FADV_WILLNEED)


def drop_pages(tensor: Tensor) -> None:
    """Removes the pages of a tensor on a disk from the process's resident set. Does nothing for other tensors."""
    mapping, _ = _place(tensor)
    if mapping is not None:
        # The file keeps the content. The whole mapping, because the operating system also maps pages near those that
        # are touched.
        mapping.madvise(mmap.MADV_DONTNEED)


def _tensor(mapping: _Mapping, entries: int, dtype: torch.dtype) -> Tensor:
    # The mapping lives as long as this tensor and its views.
    memory = torch.frombuffer(mapping, dtype=torch.uint8)
    _mappings[memory.data_ptr()] = mapping
    return memory[: entries * dtype.itemsize].view(dtype)


def _place(tensor: Tensor) -> tuple[_Mapping | None, int]:
    """Returns the mapping of a tensor on a disk, and the tensor's offset in bytes there; else (None, 0)."""
    address = tensor.untyped_storage().data_ptr()
    mapping = _mappings.get(address) if address else None
    return (None, 0) if mapping is None or mapping.file is None else (mapping, tensor.data_ptr() - address)


def _pread(number: int, content: memoryview, offset: int) -> int:
    return os.preadv(number, [content], offset)


def _move(mapping: _Mapping, start: int, content: memoryview, move: Callable[[int, memoryview, int], int]) -> None:
    done = 0
    while done < len(content):
        reason = "the file is shorter than it was"
        try:
            # A system call may transfer only some of the bytes.
            moved = move(mapping.file.number, content[done:], mapping.offset + start + done)
        except OSError as error:
            moved, reason = 0, error.strerror
        if moved == 0:
            raise LowmemError(
                f"the disk of --states-folder {mapping.file.folder} failed: {reason}; the same command goes on from "
                "the newest checkpoint"
            ) from None
        done += moved
