"""Writes files so that they survive a power cut, and detects changed bytes when the files are read.

To write a folder: `write` each file, then `write_manifest`, then `flush_path`. A folder without a manifest is
unfinished. To read a file: `Manifest.checked`, which compares size and hash.
"""

import hashlib
import json
import math
import os
import shutil
import struct
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import closing, contextmanager, suppress
from functools import partial
from pathlib import Path

import torch
from xxhash import xxh3_128

from lowmem.errors import InputError, LowmemError
from lowmem.units import MIB

Fill = Callable[[memoryview], None]

MANIFEST = "manifest.json"
CHUNK_BYTES = 16 * MIB
_HASH = "xxh3_128"
_HASHES = {_HASH: xxh3_128, "blake2b": partial(hashlib.blake2b, digest_size=16)}  # blake2b: in older checkpoints
_DTYPES = {
    torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16", torch.int16: "I16", torch.uint8: "U8"
}  # fmt: skip


class Damaged(InputError):
    """Is raised for a file that is missing, or has other bytes than were written."""


class HashedFile:
    """Writes a new file and hashes its bytes. `forget`: starts writing each chunk to the disk at once, and drops
    written pages from the page cache."""

    def __init__(self, path: Path, forget: bool = True):
        self._file = open(path, "xb", buffering=0)  # noqa: SIM115  (closed by finish or close)
        self._digest, self._size_bytes, self._forget = _HASHES[_HASH](), 0, forget

    def write(self, piece: bytes | memoryview) -> None:
        self._digest.update(piece)
        self._size_bytes += len(piece)
        rest = memoryview(piece)
        while len(rest):
            rest = rest[self._file.write(rest) :]
        if self._forget:
            start_writeback(self._file.fileno())

    def finish(self) -> dict:
        """Fsyncs and closes the file. Returns its entry for the manifest: {"bytes": size, "hash": hex}."""
        with self._file:
            os.fsync(self._file.fileno())
            if self._forget:
                start_writeback(self._file.fileno())  # all pages are on the disk now, so the cache can drop them
        return {"bytes": self._size_bytes, "hash": self._digest.hexdigest()}

    def close(self) -> None:
        self._file.close()


def write(path: Path, content: Iterable[bytes | memoryview]) -> dict:
    """Writes `content` to a new file and fsyncs it. Returns its manifest entry, {"bytes": size, "hash": hex}."""
    with closing(HashedFile(path)) as file:
        for piece in content:
            file.write(piece)
        return file.finish()


def write_at(path: Path, offset_bytes: int, content: bytes | memoryview) -> None:
    """Writes `content` into a file, from byte `offset_bytes` on. Creates the file if needed, and does not fsync."""
    with open(os.open(path, os.O_WRONLY | os.O_CREAT, 0o666), "wb") as file:
        file.seek(offset_bytes)
        file.write(content)
        file.flush()
        start_writeback(file.fileno())


def safetensors_header(
    tensors: dict[str, tuple[torch.dtype, Sequence[int]]], metadata: dict[str, str], separators: tuple[str, str]
) -> bytes:
    """Returns the first bytes of a .safetensors file: the header's length (8 bytes, little-endian) and the JSON header.
    `tensors`: {name: (dtype, shape)}, in the order of their data. `separators`: an argument of json.dumps."""
    header: dict = {"__metadata__": metadata}
    end = 0
    for name, (dtype, shape) in tensors.items():
        start, end = end, end + math.prod(shape) * dtype.itemsize
        header[name] = {"dtype": _DTYPES[dtype], "shape": list(shape), "data_offsets": [start, end]}
    text = json.dumps(header, separators=separators, ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)  # the data starts at a multiple of 8
    return struct.pack("<Q", len(text)) + text


def start_writeback(descriptor: int) -> None:
    """Advises the kernel to write a file's pages to the disk, and to drop written ones from the page cache. Does not
    wait; a later fsync reports disk errors."""
    # After each chunk, this makes writing and fsync take a third of the time (tests/faults/saving.py). A save of 17 GiB
    # then pushes no other data out of the page cache.
    with suppress(AttributeError, OSError):  # macOS has no such call
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)


def write_manifest(folder: Path, entries: dict[str, dict]) -> None:
    """Writes the manifest of `folder`: `entries`, {file name: result of `write`}, with a checksum of the manifest."""
    content = {"hash": _HASH, "files": entries}
    write(folder / MANIFEST, [to_json(content | {"own": _HASHES[_HASH](to_json(content)).hexdigest()})])


def flush_path(path: Path) -> None:
    """Fsyncs a file or a folder. Files created, renamed or removed in the folder then stay so after a power cut."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def remove(path: Path) -> None:
    """Removes the file, link or whole folder `path`. Raises no error if it cannot be removed, or does not exist."""
    with suppress(OSError):
        path.unlink()
    shutil.rmtree(path, ignore_errors=True)


def to_json(content: dict) -> bytes:
    return json.dumps(content, indent=1).encode() + b"\n"


def _not_read(path: Path, error: OSError) -> LowmemError:
    kind = Damaged if isinstance(error, FileNotFoundError | NotADirectoryError | IsADirectoryError) else LowmemError
    return kind(f"{path} cannot be read: {error.strerror}")


class Manifest:
    """Reads a folder's manifest, and the files that it lists. Raises Damaged if the manifest is missing or changed, and
    LowmemError if it cannot be read."""

    def __init__(self, folder: Path):
        path = folder / MANIFEST
        try:
            content = json.loads(path.read_bytes())
            own = content.pop("own")
            self.folder, self.hash, self.entries = folder, content["hash"], content["files"]
            intact = own == _HASHES[self.hash](to_json(content)).hexdigest()
        except OSError as error:
            raise _not_read(path, error) from None
        except (ValueError, RecursionError, KeyError, TypeError, AttributeError):
            raise Damaged(f"{path} is not a manifest") from None
        if not intact:
            raise Damaged(f"{path} is damaged: its checksum does not match")

    @contextmanager
    def checked(self, name: str) -> Iterator[Fill]:
        """Yields a function that fills a buffer with the next bytes of the file `name`. The `with` block must read the
        whole file. Raises Damaged if the size or, at the block's end, the hash is wrong. Raises LowmemError if the disk
        fails."""
        path, entry, digest = self.folder / name, self.entries[name], _HASHES[self.hash]()
        try:
            with open(path, "rb") as file:
                size_bytes = os.fstat(file.fileno()).st_size
                if size_bytes != entry["bytes"]:
                    raise Damaged(f"{path} has {size_bytes} bytes instead of the {entry['bytes']} that were written")

                def fill(buffer: memoryview) -> None:
                    if file.readinto(buffer) < len(buffer):
                        raise Damaged(f"{path} ends early")
                    digest.update(buffer)

                yield fill
        except OSError as error:
            raise _not_read(path, error) from None
        if digest.hexdigest() != entry["hash"]:
            raise Damaged(f"{path} is damaged: its bytes have changed since they were written")

    @staticmethod
    def skip(fill: Fill, size_bytes: int) -> None:
        """Reads and hashes the next `size_bytes` bytes of a file, and drops them. `fill`: the function that `checked`
        yields for this file."""
        buffer = memoryview(bytearray(min(size_bytes, CHUNK_BYTES)))
        for start in range(0, size_bytes, CHUNK_BYTES):
            fill(buffer[: size_bytes - start])

    def verify(self, name: str) -> None:
        """Reads the whole file `name`, and raises Damaged if its bytes have changed."""
        with self.checked(name) as fill:
            self.skip(fill, self.entries[name]["bytes"])

    def read(self, name: str) -> bytes:
        """Returns all bytes of a small file, or raises Damaged if they have changed."""
        with self.checked(name) as fill:  # it has compared the file's size with the manifest's
            content = bytearray(self.entries[name]["bytes"])
            fill(memoryview(content))
        return bytes(content)
