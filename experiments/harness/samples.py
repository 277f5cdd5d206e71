"""Samples that need no network: scikit-learn's digits, and the source text of Python's standard library."""

import sysconfig
from itertools import chain
from pathlib import Path

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from lowmem.data.tokenizer import is_byte_level
from lowmem.errors import InputError

TEST_EVERY = 6


def digits() -> tuple[Tensor, Tensor]:
    """Returns 1,797 images, fp32 [N, 1, 8, 8] from -1 to 1, and their digits, int64 [N]. Raises InputError without
    scikit-learn."""
    try:
        from sklearn.datasets import load_digits
    except ImportError as error:
        raise InputError("the digits come with scikit-learn; install it with: pip install scikit-learn") from error
    data = load_digits()
    return torch.tensor(data.images, dtype=torch.float32)[:, None] / 8 - 1, torch.tensor(data.target, dtype=torch.int64)


def source_bytes(length: int) -> Tensor:
    """Returns the text of the standard library's top-level source files as bytes, uint8 [N, length]."""
    text = b"".join(path.read_bytes() for path in _source_files())
    rows = len(text) // length
    return torch.frombuffer(bytearray(text[: rows * length]), dtype=torch.uint8).view(rows, length)


def source_tokens(length: int, tokenizer: PreTrainedTokenizerBase) -> Tensor:
    """Returns the text of the standard library's top-level source files as ids of `tokenizer`, int64 [N, length]."""
    if is_byte_level(tokenizer):
        return source_bytes(length).long()
    files = [path.read_text(encoding="utf-8") for path in _source_files()]
    ids = torch.tensor(list(chain.from_iterable(tokenizer(files, verbose=False)["input_ids"])))
    return ids[: len(ids) // length * length].view(-1, length)


def _source_files() -> list[Path]:
    return sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))


def parted(inputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Returns (training inputs, training targets, test inputs, test targets): every sixth sample is for testing."""
    tested = torch.arange(len(inputs)) % TEST_EVERY == TEST_EVERY - 1
    return inputs[~tested], targets[~tested], inputs[tested], targets[tested]


def chosen(samples: int, size: int, step: int, seed: int) -> Tensor:
    """Draws `size` of `samples` indices for a step, with replacement: int64 [size], equal in every process."""
    generator = torch.Generator().manual_seed(seed * 1_000_003 + step)
    return torch.randint(0, samples, (size,), generator=generator)
