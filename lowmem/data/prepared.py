"""Stores the tokens of a training run's data in the run's folder, so that a resumed run need not tokenize again.

A key, the hash of everything that decides the tokens, says if they still fit. A streamed data set has no files to hash,
so a resumed run trains on the tokens that are stored.
"""

import hashlib
import json
import shutil
import tempfile
from collections.abc import Callable
from dataclasses import fields
from importlib.metadata import version
from pathlib import Path
from typing import NamedTuple

import numpy as np
from transformers import PreTrainedTokenizerBase

from lowmem import text_files
from lowmem.data.documents import Documents
from lowmem.data.records import Source
from lowmem.data.stored import ArrayFolder, StoredArray
from lowmem.data.tokenizer import is_byte_level
from lowmem.errors import InputError, LowmemError
from lowmem.files import CHUNK_BYTES, Manifest, flush_path, to_json, write, write_manifest
from lowmem.settings import TOKENS, Settings, marked

FOLDER, _CONTENT = "data", "data.json"


class Part(NamedTuple):
    """Holds the training and held-out documents of one data set, as Documents or as Rows. `train` is None for
    --eval-data, `evaluation` for --data if --eval-data is given. `held_out` describes the held-out documents."""

    train: Documents | None
    evaluation: Documents | None
    held_out: str


class Preparation:
    """Finds or makes the tokenized documents of a training run, in the run folder `folder`; None: in temporary files.
    `key`: the hash of everything that decides the tokens (content_key)."""

    def __init__(self, folder: Path | None, key: str):
        self._folder, self._key = None if folder is None else (folder / FOLDER).resolve(), key
        self._arrays: ArrayFolder | None = None  # in the partial folder

    def find(self, tokenizer: PreTrainedTokenizerBase) -> list[Part] | None:
        """Returns the documents of each data set, as an earlier start has stored them. Sets the stored chat template in
        `tokenizer`. Returns None if documents are missing or damaged, or if data, settings or code have changed
        since."""
        if self._folder is None:
            return None
        try:
            manifest = Manifest(self._folder)
            content = json.loads(manifest.read(_CONTENT))
            if content["key"] != self._key:
                return None
            for name in manifest.entries:
                manifest.verify(name)
            parts = [
                Part(*(_documents(self._folder, part[name]) for name in ("train", "evaluation")), part["held_out"])
                for part in content["parts"]
            ]
        except (LowmemError, OSError, ValueError, KeyError, TypeError):  # missing or damaged
            return None
        tokenizer.chat_template = content["chat_template"]
        return parts

    def make(self, prepare: Callable[[ArrayFolder], list[Part]]) -> list[Part]:
        """Returns the result of `prepare`, which gets a new folder for token files."""
        if self._folder is None:
            with tempfile.TemporaryDirectory() as place:  # open files outlive their names
                return prepare(ArrayFolder(Path(place)))
        # Next to `data`, or next to the folder that `data` links to.
        partial = self._folder.with_name(f".{self._folder.name}-partial")
        try:
            shutil.rmtree(partial, ignore_errors=True)
            partial.mkdir(parents=True)
            self._arrays = ArrayFolder(partial)
            return prepare(self._arrays)
        except BaseException:
            self.close()
            raise

    def keep(self, parts: list[Part], tokenizer: PreTrainedTokenizerBase) -> None:
        """Moves the token files of `parts` into the run folder, unless `find` has found them there."""
        if self._arrays is None:
            return
        partial, folder = self._arrays.path, self._folder
        used: set[str] = set()
        stored = [Part(self._stored(train, used), self._stored(other, used), said) for train, other, said in parts]
        content = {
            "key": self._key,
            "chat_template": tokenizer.chat_template,
            "parts": [part._asdict() for part in stored],
        }
        entries = {name: entry for name, entry in self._arrays.entries.items() if name in used}
        for name in self._arrays.entries.keys() - used:
            (partial / name).unlink()
        entries[_CONTENT] = write(partial / _CONTENT, [to_json(content)])
        write_manifest(partial, entries)
        flush_path(partial)
        # A kill from here to the rename loses the stored tokens; the next start makes them again.
        shutil.rmtree(folder, ignore_errors=True)
        partial.rename(folder)
        self._arrays = None

    def _stored(self, documents: Documents | None, used: set[str]) -> dict | None:
        """Stores the arrays of `documents` in files, and adds the files' names to `used`. Returns the fields of
        `documents` for data.json, with a file and a range in place of each array; None for None."""
        if documents is None:
            return None
        content = {item.name: getattr(documents, item.name) for item in fields(documents)}
        for name, value in content.items():
            if isinstance(value, np.ndarray):
                value = self._arrays.write([value.reshape(-1)], value.dtype)
            if isinstance(value, StoredArray):
                used.add(value.path.name)
                place = {"file": value.path.name, "dtype": value.dtype.name}
                content[name] = place | {"start": value.start, "stop": value.stop}
        return content

    def close(self) -> None:
        if self._arrays is not None:
            shutil.rmtree(self._arrays.path, ignore_errors=True)
            self._arrays = None


def content_key(
    settings: Settings, tokenizer: PreTrainedTokenizerBase, vocabulary_size: int, rows_limit: int,
    sources: list[Source], evaluated: list[Source],
) -> str:  # fmt: skip
    """Returns a hash of everything that decides the tokens: files, settings, tokenizer, and the code of lowmem/data.
    `rows_limit`: number of rows that training needs of a streamed data set. `sources`: the data sets of --data.
    `evaluated`: the data sets of --eval-data. Raises InputError for an unreadable file."""
    digest = hashlib.blake2b(digest_size=16)
    code = [*sorted(Path(__file__).parent.glob("*.py")), Path(text_files.__file__)]
    for part in (*code, *(part for source in (*sources, *evaluated) for part in (source.name, *source.content))):
        digest.update(f"\0{part}\0".encode())
        if isinstance(part, Path):
            try:
                with open(part, "rb", buffering=0) as file:
                    while piece := file.read(CHUNK_BYTES):
                        digest.update(piece)
            except OSError as error:
                raise InputError(f"{part}: cannot be read ({error.strerror or error})") from error
    backend = getattr(tokenizer, "backend_tokenizer", None)
    asked = {
        "settings": marked(settings, TOKENS),
        "evaluated": len(evaluated),
        "rows_limit": rows_limit if any(source.streamed for source in sources) else None,
        "vocabulary_size": vocabulary_size,
        "tokenizer": "bytes" if is_byte_level(tokenizer) else backend and backend.to_str(),
        "vocabulary": None if backend else sorted(tokenizer.get_vocab().items()),
        "special_tokens": tokenizer.special_tokens_map,
        "chat_template": tokenizer.chat_template,
        "versions": [version("transformers"), version("tokenizers")],
    }
    digest.update(json.dumps(asked, sort_keys=True, default=str).encode())
    return digest.hexdigest()


def _documents(folder: Path, content: dict | None) -> Documents | None:
    if content is None:
        return None
    values = dict(content)
    for name, place in content.items():
        if isinstance(place, dict):
            stored = StoredArray(folder / place["file"], place["dtype"], place["start"], place["stop"])
            values[name] = stored if name in ("tokens", "trained") else stored[:]
    values["places"] = values["places"].reshape(-1, 2)
    return Documents(**values | {"files": tuple(values["files"]), "notes": tuple(values["notes"])})
