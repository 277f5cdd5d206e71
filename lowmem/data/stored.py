"""Stores arrays in files: a data set takes disk space, and RAM only for the part being read. Memory-mapped files would
count as resident memory of this process."""

import errno
import os
import shutil
import weakref
from collections.abc import Iterable, Iterator
from pathlib import Path

import numpy as np

from lowmem.errors import LowmemError, PlanError
from lowmem.files import CHUNK_BYTES, HashedFile
from lowmem.units import MIB, format_size

_NEARLY_ALL = 1.02  # bytes of all texts / bytes read so far; below it, the held-out share is being copied
_MARGIN_BYTES = 2 * MIB  # stay free for the file system and a manifest


class StoredArray:
    """Represents entries `start` to `stop` - 1 (None: to the end) of a file of numbers. Slicing reads from the disk
    into a numpy array."""

    def __init__(self, path: Path, dtype: np.dtype, start: int = 0, stop: int | None = None):
        self.path, self.dtype, self.start = path, np.dtype(dtype), start
        self._descriptor = os.open(path, os.O_RDONLY)  # stays valid if the file is moved or removed
        weakref.finalize(self, os.close, self._descriptor)
        self.stop = os.fstat(self._descriptor).st_size // self.dtype.itemsize if stop is None else stop

    def __len__(self) -> int:
        return self.stop - self.start

    def __getitem__(self, chosen: slice) -> np.ndarray:
        start, stop, _ = chosen.indices(len(self))
        size = self.dtype.itemsize
        offset, end = (self.start + start) * size, (self.start + stop) * size
        firsts = range(offset, end, CHUNK_BYTES)  # one read gives at most 2 GiB
        content = b"".join(os.pread(self._descriptor, min(CHUNK_BYTES, end - first), first) for first in firsts)
        if len(content) != max(end - offset, 0):
            raise LowmemError(f"{self.path} was cut off while it was in use; start the run again")
        return np.frombuffer(content, self.dtype)

    def chunks(self) -> Iterator[np.ndarray]:
        """Yields the whole array in parts of at most CHUNK_BYTES."""
        count = CHUNK_BYTES // self.dtype.itemsize
        for start in range(0, len(self), count):
            yield self[start : start + count]

    def part(self, start: int, stop: int) -> "StoredArray":
        return StoredArray(self.path, self.dtype, self.start + start, self.start + stop)


class ArrayFolder:
    """Writes arrays into a folder, each into a new file. Raises PlanError before the disk is full. The message
    estimates the disk space that all arrays need."""

    def __init__(self, path: Path):
        self.path = path
        self.entries: dict[str, dict] = {}
        # The size of all texts, 0 if unknown; each token is written twice if held-out documents are split off.
        self.source_bytes, self.times_written = 0, 1
        self._written_bytes = self._read_bytes = self._written_of_read_bytes = 0

    def count_read(self, size_bytes: int) -> None:
        """Counts `size_bytes` of text as read, before its tokens are written; PlanError's estimate needs it."""
        self._read_bytes += size_bytes
        self._written_of_read_bytes = self._written_bytes

    def take_room(self, size_bytes: int) -> None:
        """Counts `size_bytes` as written, before writing. Raises PlanError if the disk has no room for them."""
        self._written_bytes += size_bytes
        if shutil.disk_usage(self.path).free < size_bytes + _MARGIN_BYTES:
            raise self.too_small()

    def too_small(self) -> PlanError:
        left = self.source_bytes / max(self._read_bytes, 1)
        once = self._written_bytes * left if left > _NEARLY_ALL else self._written_of_read_bytes
        needed_bytes = max(once * self.times_written, self._written_bytes) + _MARGIN_BYTES
        about = "about" if self.source_bytes else "more than"
        return PlanError(
            f"{self.path.parent} is on a disk with room for {format_size(shutil.disk_usage(self.path).free)} more, and "
            f"the tokens of the data need {about} {format_size(round(needed_bytes))} in all: free some room, or give "
            "another --out"
        )

    def write(self, chunks: Iterable[np.ndarray], dtype: np.dtype) -> StoredArray:
        """Writes one-dimensional arrays one after another into a new file, converted to `dtype`."""
        writer = ArrayWriter(self, dtype)
        for chunk in chunks:
            writer.append(chunk)
        return writer.finish()


class ArrayWriter:
    """Writes one array piece by piece into a new file of `folder`."""

    def __init__(self, folder: ArrayFolder, dtype: np.dtype):
        self._folder, self._dtype = folder, np.dtype(dtype)
        self._name = f"{len(folder.entries)}.{self._dtype.name}"
        folder.entries[self._name] = {}
        self._file = HashedFile(folder.path / self._name, forget=False)  # it is read again soon
        self._waiting: list[np.ndarray] = []
        self._waiting_bytes = 0

    def append(self, values: np.ndarray) -> None:
        self._waiting.append(np.asarray(values).astype(self._dtype))
        self._waiting_bytes += self._waiting[-1].nbytes
        if self._waiting_bytes >= MIB:
            self._flush()

    def finish(self) -> StoredArray:
        self._flush()
        self._folder.entries[self._name] = self._file.finish()
        return StoredArray(self._folder.path / self._name, self._dtype)

    def _flush(self) -> None:
        if self._waiting:
            piece = np.concatenate(self._waiting).view(np.uint8).data
            self._folder.take_room(len(piece))
            try:
                self._file.write(piece)
            except OSError as error:
                if error.errno not in (errno.ENOSPC, errno.EDQUOT):  # a quota, or another program's files
                    raise
                raise self._folder.too_small() from None
        self._waiting, self._waiting_bytes = [], 0
