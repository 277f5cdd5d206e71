"""What the tests of data share: rows in files, and what load_data makes of them."""

import json
from pathlib import Path

import pytest

from lowmem.data.dataset import Data, load_data
from lowmem.data.tokenizer import byte_level_tokenizer
from lowmem.settings import Settings

END = 256
CONVERSATION = [
    {"role": "user", "content": "Hi"},
    {"role": "assistant", "content": "Hello"},
    {"role": "user", "content": "Bye"},
    {"role": "assistant", "content": "See you"},
]
POINTER = "version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 9\n"


def load(spec, tokenizer=None, vocabulary_size=257, folder=None, decoder_start=None, **options) -> Data:
    """load_data of one path or several, with nothing held out and examples padded in their order."""
    chosen = {"seq": 16, "batch": 2, "pack": "padded", "eval_fraction": 0, "data": spec} | options
    for name in ("data", "eval_data"):
        specs = chosen.get(name)
        chosen[name] = specs and (tuple(map(str, specs)) if isinstance(specs, list | tuple) else str(specs))
    return load_data(Settings(**chosen), tokenizer or byte_level_tokenizer(), vocabulary_size, folder, decoder_start)


def write_texts(path: Path, *texts: str) -> Path:
    return write_rows(path, [{"text": text} for text in texts])


def write_rows(path: Path, rows) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def write_table(path: Path, rows) -> Path:
    """Writes a Parquet file of rows or of Arrow's table, if pyarrow is installed."""
    pyarrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    parquet.write_table(pyarrow.Table.from_pylist(rows) if isinstance(rows, list) else rows, path)
    return path


def in_order(path, tokenizer=None, **options):
    """Batches of the rows of a file, in their order."""
    return load(path, tokenizer, eval_data=str(path), **options).evaluations[0]


def tokens_of(batches) -> list[int]:
    """Returns the tokens of the first text of some batches, end to end."""
    return batches.parts[0].documents.tokens[:].tolist()


def shown(batch, row) -> list[tuple[str, str]]:
    """Returns (input, label) characters of one row: '$' is end-of-text, '' is not trained."""
    character = {END: "$", -100: ""}
    return [
        (character.get(token, chr(token)), character.get(label, chr(max(label, 0))))
        for token, label in zip(batch.input_ids[row].tolist(), batch.labels[row].tolist(), strict=True)
    ]


def trained_text(batch, row=0) -> str:
    return "".join(label for _, label in shown(batch, row))
