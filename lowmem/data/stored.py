"""Arrays that lie in files: a data set takes disk, and of RAM only what is being read.

Tokens are read in rows of some KiB from anywhere in the file, so the system's own cache serves them, which it shrinks
when memory is wanted for more; a mapping of the file would count as this process's resident set, page by page.
"""

import os
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from lowmem.errors import LowmemError
from lowmem.files import CHUNK_BYTES, HashedFile
from lowmem.units import MIB


class StoredArray:
    """Entries `start` to `stop` (all, if None) of a file of numbers; a slice of it is read as a numpy array."""

    def __init__(self, path: Path, dtype: np.dtype, start: int = 0, stop: int | None = None):
        self.path, self.dtype, self.start = path, np.dtype(dtype), start
        self._file = open(path, "rb", buffering=0)  # noqa: SIM115  (open as long as it is used, wherever it is moved)
        self.stop = os.fstat(self._file.fileno()).st_size // self.dtype.itemsize if stop is None else stop

    def __len__(self) -> int:
        return self.stop - self.start

    def __getitem__(self, chosen: slice) -> np.ndarray:
        start, stop, _ = chosen.indices(len(self))
        parts = [self._read(first, min(first + self._chunk, stop)) for first in range(start, stop, self._chunk)]
        return np.concatenate(parts) if parts else np.empty(0, self.dtype)

    def chunks(self) -> Iterator[np.ndarray]:
        """All of it, at most CHUNK_BYTES at a time."""
        for start in range(0, len(self), self._chunk):
            yield self[start : start + self._chunk]

    def part(self, start: int, stop: int) -> "StoredArray":
        """Entries `start` to `stop` of this array, in the same file."""
        return StoredArray(self.path, self.dtype, self.start + start, self.start + stop)

    @property
    def _chunk(self) -> int:
        return CHUNK_BYTES // self.dtype.itemsize

    def _read(self, start: int, stop: int) -> np.ndarray:
        wanted, offset_bytes = (stop - start) * self.dtype.itemsize, (self.start + start) * self.dtype.itemsize
        content = os.pread(self._file.fileno(), wanted, offset_bytes)
        if len(content) != wanted:
            raise LowmemError(f"{self.path} was cut off while it was in use; start the run again")
        return np.frombuffer(content, self.dtype)


class ArrayFolder:
    """A folder into which arrays are written one after another. `entries`: each finished file's, for a manifest."""

    def __init__(self, path: Path):
        self.path = path
        self.entries: dict[str, dict] = {}

    def write(self, chunks: Iterator[np.ndarray], dtype: np.dtype) -> StoredArray:
        """A new file with all of `chunks` [n], which have that dtype."""
        writer = self.writer(dtype)
        for chunk in chunks:
            writer.append(chunk)
        return writer.finish()

    def writer(self, dtype: np.dtype) -> "ArrayWriter":
        """A new file, to be filled."""
        name = f"{len(self.entries)}.{np.dtype(dtype).name}"
        self.entries[name] = {}
        return ArrayWriter(self, name, dtype)


class ArrayWriter:
    """One file of an ArrayFolder while it is filled."""

    def __init__(self, folder: ArrayFolder, name: str, dtype: np.dtype):
        self._folder, self._name, self.dtype = folder, name, np.dtype(dtype)
        self._file = HashedFile(folder.path / name, forget=False)  # it is read again soon
        self._waiting: list[np.ndarray] = []
        self._waiting_bytes = 0

    def append(self, values: np.ndarray) -> None:
        """Entries in any dtype that this one can hold; short ones are gathered before they are written."""
        self._waiting.append(np.asarray(values).astype(self.dtype))
        self._waiting_bytes += self._waiting[-1].nbytes
        if self._waiting_bytes >= MIB:
            self._flush()

    def finish(self) -> StoredArray:
        self._flush()
        self._folder.entries[self._name] = self._file.finish()
        return StoredArray(self._folder.path / self._name, self.dtype)

    def _flush(self) -> None:
        if self._waiting:
            self._file.write(np.concatenate(self._waiting).view(np.uint8).data)
        self._waiting, self._waiting_bytes = [], 0
