"""Code to train on and held-out code, a tokenizer of it, and beginnings that a model continues."""

import ast
import json
import random
import warnings
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

from transformers import PreTrainedTokenizerFast

from experiments.code_generation.scoring import line_parses
from lowmem.data.records import Reading, Record, stable_hash
from lowmem.data.sources import open_source
from lowmem.errors import InputError

HELD_OUT_EVERY = 20
TEXT = "text"
END_OF_TEXT = "<|endoftext|>"
LEAST_LINES = 6  # of a function whose beginning is continued
MOST_PER_DOCUMENT = 8


def split(spec: str, train_bytes: int, held_out_bytes: int) -> tuple[list[str], list[str]]:
    """Splits a --data spec into documents to train on and held-out ones, each at most about so many bytes. Raises
    InputError if either would be empty."""
    source = open_source(spec, Reading(text=TEXT, in_part=True))  # what is large is streamed
    if source.evaluation is not None:
        train = _until(_documents(source.train), train_bytes)
        held_out = _until(_documents(source.evaluation), held_out_bytes)
    else:
        train, held_out = [], []
        # By a hash of the content, whatever order or machine it is read on.
        for text in _until(_documents(source.train), train_bytes + held_out_bytes):
            (train if stable_hash(text) % HELD_OUT_EVERY else held_out).append(text)
        held_out = list(_until(held_out, held_out_bytes))
    train = list(train)
    if not train or not held_out:
        raise InputError(f"{source.name} has too few documents: one in {HELD_OUT_EVERY} is held out")
    known = set(train)
    return train, [text for text in held_out if text not in known]


def _documents(records: Iterable[Record]) -> Iterator[str]:
    """Yields whole texts; a record may have a piece of one."""
    pieces: list[str] = []
    for record in records:
        if TEXT not in record.columns:
            raise InputError(f"{record.where} has no column {TEXT!r}, which is to hold code")
        pieces.append(record.columns[TEXT])
        if not record.goes_on:
            if text := "".join(pieces).replace("\r\n", "\n"):
                yield text
            pieces = []


def _until(texts: Iterable[str], most_bytes: int) -> Iterator[str]:
    left = most_bytes
    for text in texts:
        if left <= 0:
            return
        left -= len(text.encode())
        yield text


def write_documents(path: Path, texts: Iterable[str]) -> None:
    path.write_text("".join(json.dumps({TEXT: text}) + "\n" for text in texts), encoding="utf-8")


def train_tokenizer(texts: Iterable[str], vocabulary_size: int) -> PreTrainedTokenizerFast:
    """Trains byte pairs, as GPT-2's, on `texts`: GPT-2's own vocabulary splits the indentation of code."""
    from tokenizers import ByteLevelBPETokenizer

    found = ByteLevelBPETokenizer()
    found.train_from_iterator(texts, vocabulary_size, special_tokens=[END_OF_TEXT], show_progress=False)
    return PreTrainedTokenizerFast(
        tokenizer_object=found._tokenizer, eos_token=END_OF_TEXT, bos_token=END_OF_TEXT,
        clean_up_tokenization_spaces=False,
    )  # fmt: skip


@dataclass(frozen=True)
class Beginning:
    """A cut function. `before`: the document up to it; `begun`: its first lines; `rest`: its others, the first of which
    parses by itself. All are whole lines."""

    before: str
    begun: str
    rest: str

    @property
    def next_line(self) -> str:
        return self.rest.splitlines()[0]


def beginnings(texts: Iterable[str], count: int, seed: int) -> list[Beginning]:
    """Returns functions and methods of held-out documents, each cut once at random, behind its first statement."""
    draw, found = random.Random(seed), []
    for text in sorted(texts, key=stable_hash):
        functions = [function for function in _functions(text) if function.cuts]
        for function in draw.sample(functions, min(MOST_PER_DOCUMENT, len(functions))):
            cut = draw.choice(function.cuts)
            lines = function.lines
            begun, rest = "".join(lines[function.first : cut]), "".join(lines[cut : function.last])
            found.append(Beginning("".join(lines[: function.first]), begun, rest))
    draw.shuffle(found)
    return list(islice(found, count))


@dataclass(frozen=True)
class _Function:
    """Lines `first` to `last` of a document; it may be cut before each of `cuts`."""

    lines: list[str]
    first: int
    last: int
    cuts: list[int]


def _functions(text: str) -> Iterator[_Function]:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of what the document's author wrote
            tree = ast.parse(text)
    except (SyntaxError, ValueError, RecursionError):
        return
    lines = text.splitlines(keepends=True)
    if len(lines) != len(text.split("\n")) - text.endswith("\n"):
        return  # other characters that end lines than ast's
    classes = [node for node in tree.body if isinstance(node, ast.ClassDef)]
    for node in (node for owner in (tree, *classes) for node in owner.body):
        if not isinstance(node, ast.FunctionDef) or node.end_lineno - node.lineno < LEAST_LINES:
            continue
        statements = [inner.lineno - 1 for inner in ast.walk(node) if isinstance(inner, ast.stmt) and inner is not node]
        cuts = sorted({line for line in statements if line > node.body[0].lineno - 1 and line_parses(lines[line])})
        first = min([node.lineno, *(decorator.lineno for decorator in node.decorator_list)]) - 1
        yield _Function(lines, first, node.end_lineno, cuts)
