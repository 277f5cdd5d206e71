"""Prints the first examples of the data as the model gets them (--preview N), and which tokens are trained on. Reads no
weights, and writes nothing."""

import itertools
import textwrap
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace

import numpy as np
from transformers import PreTrainedTokenizerBase

from lowmem.core.encoder_decoder import decoder_start
from lowmem.data.dataset import load_data
from lowmem.data.tokenizer import BYTE_LEVEL, is_byte_level, load_tokenizer, tokenizer_blamed
from lowmem.models.build import load_config, settings_for
from lowmem.settings import Settings
from lowmem.terminal import output

_MOST_CHARACTERS = 600  # shown of each run of tokens
_LABELS = {True: "trained", False: "not trained"}


def show_preview(settings: Settings) -> None:
    """Prints the first `settings.preview` examples of each --data, in the data's order. No example is held out."""
    config = load_config(settings.model, settings.init)
    settings = replace(settings_for(settings, config), eval_data=None, eval_fraction=0)
    tokenizer = load_tokenizer(settings.model, settings.init, config.vocab_size)
    with tokenizer_blamed(settings.model):
        data = load_data(settings, tokenizer, config.vocab_size, None, decoder_start(config))
    with closing(data), output(needed=True):
        if is_byte_level(tokenizer):
            print(BYTE_LEVEL)
        for number, part in enumerate(data.train.parts):
            packed = f"plain text, in rows of {part.seq:,} tokens and the label of the last"
            print(*([""] if number else []), f"{part.name}: {part.documents.description or packed}", sep="\n")
            for row in range(min(settings.preview, part.count)):
                where = ", ".join(part.where(row))
                print("", *_example(where, *data.train.row(part, row), tokenizer), sep="\n")


def _example(where: str, tokens: np.ndarray, trained: np.ndarray, tokenizer: PreTrainedTokenizerBase) -> Iterator[str]:
    """Yields lines about the example at `where`, split into trained and other tokens. `trained`: bool [tokens]."""
    yield f"{where}: {len(tokens):,} tokens, {int(trained.sum()):,} of them trained on"
    start = 0
    for is_trained, run in itertools.groupby(trained.tolist()):
        stop = start + len(list(run))
        text = tokenizer.decode(tokens[start:stop])
        if len(text) > _MOST_CHARACTERS:
            text = f"{text[:_MOST_CHARACTERS]} ... ({len(text) - _MOST_CHARACTERS:,} more characters)"
        label = f"{_LABELS[is_trained]:>11} {stop - start:>5} | "
        yield from _beside(label, text)
        start = stop


def _beside(label: str, text: str) -> Iterator[str]:
    shown = "".join(c if c.isprintable() or c == "\n" else repr(c)[1:-1] for c in text)
    margin = " " * (len(label) - 2) + "| "
    for line in shown.split("\n"):
        for piece in textwrap.wrap(line, 80 - len(label), drop_whitespace=False) or [""]:
            yield label + piece
            label = margin
