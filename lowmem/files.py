"""Files that are on the disk when they are said to be, and known for what was written when they are read.

A file that was written and closed may still be in the page cache alone, a folder's list of names too: both are there
after a power cut only once they were fsynced. What the disk gives back years later may differ in a bit. So a folder
of files is written as

    entries = {name: write(folder / name, content), ...}       each hashed while it is written, then fsynced
    write_manifest(folder, entries)                            last: a folder without a manifest was never finished
    flush_path(folder)

and read through `checked`, which hashes what passes by, so that nothing is read twice. The hash is XXH3 of 128 bits
where xxhash is installed (4 GiB/s on one core, and often far more), else BLAKE2b (0.8 GiB/s); the manifest says which.

Left to itself the kernel begins to write late, and the disk idles while a file is filled; told after each piece to
begin, it writes the same bytes, fsync included, in a third of the time (tests/faults/saving.py measures it). What is on
the disk leaves the page cache: a save of 17 GiB does not push out of RAM what the machine needs.
"""

import hashlib
import json
import math
import os
import re
import shutil
import struct
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import closing, contextmanager, suppress
from functools import partial
from io import RawIOBase
from pathlib import Path

import torch

from lowmem.errors import InputError, LowmemError
from lowmem.units import MIB

try:
    from xxhash import xxh3_128
except ImportError:
    xxh3_128 = None

Fill = Callable[[memoryview], None]

MANIFEST = "manifest.json"
CHUNK_BYTES = 16 * MIB
_HASHES = {"blake2b": partial(hashlib.blake2b, digest_size=16), "xxh3_128": xxh3_128}
_HASH = "blake2b" if xxh3_128 is None else "xxh3_128"
_DTYPES = {
    torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16", torch.int16: "I16", torch.uint8: "U8"
}  # fmt: skip
_PLAIN_NAME = re.compile(r"[A-Za-z0-9_.-]+")


class Damaged(InputError):
    """A file is missing or not what was written; the message names it."""


class HashedFile:
    """A new file, hashed while it is written. `forget`: it is sent to the disk piece by piece and leaves the page
    cache, for what will not be read soon."""

    def __init__(self, path: Path, forget: bool = True):
        self._file = open(path, "xb", buffering=0)  # noqa: SIM115  (closed by finish or close)
        self._digest, self._size_bytes, self._forget = _HASHES[_HASH](), 0, forget

    def write(self, piece: bytes | memoryview) -> None:
        self._digest.update(piece)
        self._size_bytes += len(piece)
        _write_all(self._file, piece)
        if self._forget:
            begin_writing_out(self._file.fileno())

    def finish(self) -> dict:
        """Fsyncs and closes it; its entry for the manifest: {"bytes": size, "hash": hex}."""
        with self._file:
            os.fsync(self._file.fileno())
            if self._forget:
                begin_writing_out(self._file.fileno())  # nothing is left to write: the rest is forgotten
        return {"bytes": self._size_bytes, "hash": self._digest.hexdigest()}

    def close(self) -> None:
        self._file.close()


def write(path: Path, content: Iterable[bytes | memoryview]) -> dict:
    """Writes a new file, piece by piece, and fsyncs it; its entry for the manifest: {"bytes": size, "hash": hex}."""
    with closing(HashedFile(path)) as file:
        for piece in content:
            file.write(piece)
        return file.finish()


def write_at(path: Path, offset_bytes: int, content: bytes | memoryview) -> None:
    """Puts `content` into a file, which is made where there is none, from `offset_bytes` on; not yet fsynced."""
    with open(os.open(path, os.O_WRONLY | os.O_CREAT, 0o666), "wb", buffering=0) as file:
        file.seek(offset_bytes)
        _write_all(file, content)
        begin_writing_out(file.fileno())


def _write_all(file: RawIOBase, content: bytes | memoryview) -> None:
    rest = memoryview(content)
    while len(rest):
        rest = rest[file.write(rest) :]


def safetensors_header(
    tensors: dict[str, tuple[torch.dtype, Sequence[int]]], metadata: dict[str, str], separators: tuple[str, str]
) -> bytes:
    """How a .safetensors file begins that holds `tensors`, {name: (dtype, shape)}, in this order: the length of what
    follows (8 bytes, little-endian) and, in JSON with these separators, where each tensor lies behind it."""
    header: dict = {"__metadata__": metadata}
    end = 0
    for name, (dtype, shape) in tensors.items():
        start, end = end, end + math.prod(shape) * dtype.itemsize
        header[name] = {"dtype": _DTYPES[dtype], "shape": list(shape), "data_offsets": [start, end]}
    text = json.dumps(header, separators=separators, ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)  # the data starts at a multiple of 8
    return struct.pack("<Q", len(text)) + text


def begin_writing_out(descriptor: int) -> None:
    """Has the kernel send to the disk now what was written to this file, without waiting for it, and forget what is
    there already. Advice that need not be taken; an error of the disk is fsync's to report."""
    if hasattr(os, "posix_fadvise"):  # not on macOS
        with suppress(OSError):
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)


def write_manifest(folder: Path, entries: dict[str, dict]) -> None:
    """`entries`: {file name in `folder`: what `write` returned}."""
    content = {"hash": _HASH, "files": entries}
    write(folder / MANIFEST, [to_json(content | {"own": _HASHES[_HASH](to_json(content)).hexdigest()})])


def flush_path(path: Path) -> None:
    """Puts a file's content on the disk, or a folder's list of names: files made in it, renamed, removed."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def remove(path: Path) -> None:
    """A file, a link or a folder with all in it, if it is there and the disk lets it go."""
    with suppress(OSError):
        path.unlink()
    shutil.rmtree(path, ignore_errors=True)


def to_json(content: dict) -> bytes:
    return json.dumps(content, indent=1).encode() + b"\n"


def _not_read(path: Path, error: OSError) -> LowmemError:
    """A file that is not there, or no file, is damage; a disk or network that does not answer now is none."""
    kind = Damaged if isinstance(error, FileNotFoundError | NotADirectoryError | IsADirectoryError) else LowmemError
    return kind(f"{path} cannot be read: {error.strerror}")


class Manifest:
    """A folder's manifest. Raises Damaged where there is none that can be understood, InputError where the package that
    makes its hashes is missing."""

    def __init__(self, folder: Path):
        path = folder / MANIFEST
        try:
            content = json.loads(path.read_bytes())
            own = content.pop("own")
            self.hash, self.entries = content["hash"], content["files"]
            sound = self.hash in _HASHES and all(
                _PLAIN_NAME.fullmatch(name) and type(entry["bytes"]) is int and type(entry["hash"]) is str
                for name, entry in self.entries.items()
            )
        except OSError as error:
            raise _not_read(path, error) from None
        except (ValueError, RecursionError, KeyError, TypeError, AttributeError):
            sound = False
        if not sound:
            raise Damaged(f"{path} is not a manifest")
        if _HASHES[self.hash] is None:
            raise InputError(f"{folder} was hashed with xxhash, which is not installed here; pip install xxhash")
        if own != _HASHES[self.hash](to_json(content)).hexdigest():
            raise Damaged(f"{path} is damaged: its hash of itself is another")
        self.folder = folder

    @contextmanager
    def checked(self, name: str) -> Iterator[Fill]:
        """Gives a function that fills a buffer with the next bytes of file `name`. Raises Damaged if what was read by
        the end of the block is not all that was written."""
        path, entry, digest = self.folder / name, self.entries[name], _HASHES[self.hash]()
        try:
            with open(path, "rb", buffering=0) as file:
                size_bytes = os.fstat(file.fileno()).st_size
                if size_bytes != entry["bytes"]:
                    raise Damaged(f"{path} has {size_bytes} bytes and not the {entry['bytes']} that were written")

                def fill(buffer: memoryview) -> None:
                    while len(buffer):
                        count = file.readinto(buffer)
                        if not count:
                            raise Damaged(f"{path} ends early")
                        digest.update(buffer[:count])
                        buffer = buffer[count:]

                yield fill
        except OSError as error:
            raise _not_read(path, error) from None
        if digest.hexdigest() != entry["hash"]:
            raise Damaged(f"{path} is damaged: its bytes are not those that were written")

    def verify(self, name: str) -> None:
        """Reads file `name` to its end; raises Damaged as `checked` does."""
        size_bytes = self.entries[name]["bytes"]
        with self.checked(name) as fill:
            buffer = memoryview(bytearray(min(size_bytes, CHUNK_BYTES)))
            for start in range(0, size_bytes, CHUNK_BYTES):
                fill(buffer[: size_bytes - start])

    def read(self, name: str) -> bytes:
        """All of a small file."""
        with self.checked(name) as fill:  # a size that cannot be true has been refused before it is allocated
            content = bytearray(self.entries[name]["bytes"])
            fill(memoryview(content))
        return bytes(content)
