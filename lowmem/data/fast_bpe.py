"""The ids of a byte-level BPE tokenizer by tiktoken, which finds them in a quarter of the time.

tiktoken knows a tokenizer by the pattern that cuts words and by its tokens in the order of their merges. Of Hugging
Face's tokenizers those are such that have no more to them (GPT-2, Llama 3, Qwen). What else one may have is looked for
and refused; then every token of the vocabulary, and some text, is encoded in both ways and compared.
"""

import json
import os
import re
import unicodedata
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise

import numpy as np
from tokenizers import Tokenizer

from lowmem.data.tokenizer import byte_characters

_GPT2_WORDS = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"  # ByteLevel's own pattern


class FastBPE:
    """`like` makes one; texts that it does not take have to be encoded by the tokenizer itself."""

    def __init__(self, words: str, ranks: dict[bytes, int], added: Iterable[str], composed: bool):
        import tiktoken

        self._encoding = tiktoken.Encoding("fast", pat_str=words, mergeable_ranks=ranks, special_tokens={})
        self._added = re.compile("|".join(map(re.escape, added)) or r"(?!)")
        self._composed = composed
        asked = os.environ.get("RAYON_NUM_THREADS", "")
        self._threads = (int(asked) if asked.isdecimal() else 0) or os.cpu_count() or 1

    @classmethod
    def like(cls, tokenizer: Tokenizer, texts: list[str]) -> "FastBPE | None":
        """One that gives the ids of `tokenizer`, tried with `texts`; None where there is none, or no tiktoken."""
        try:
            import tiktoken  # noqa: F401
        except ImportError:
            return None
        content = json.loads(tokenizer.to_str())
        words, ranks = _words(content["pre_tokenizer"]), _ranks(content)
        composed = (content["normalizer"] or {}).get("type")
        if words is None or ranks is None or composed not in (None, "NFC"):
            return None
        try:
            fast = cls(words, ranks, (token["content"] for token in content["added_tokens"]), composed is not None)
        except ValueError:  # a pattern that its regular expressions do not know
            return None
        texts = [text for text in (*texts, *_readable(ranks)) if fast.takes(text)]
        expected = tokenizer.encode_batch_fast(texts, add_special_tokens=False)
        found = zip(map(fast._ids, texts), expected, strict=True)
        return fast if all(ids is None or ids.tolist() == one.ids for ids, one in found) else None

    def takes(self, text: str) -> bool:
        """Whether its ids are those of the words in it: no added token is written out, and nothing is normalized."""
        return not self._added.search(text) and (not self._composed or unicodedata.is_normalized("NFC", text))

    def encode(self, texts: list[str]) -> list[np.ndarray | None]:
        """The ids of each text, int32 [tokens]; None for one that is too much for its regular expressions, as a million
        spaces in a row are. Each is encoded by one thread."""
        with ThreadPoolExecutor(self._threads) as threads:
            return list(threads.map(self._ids, texts))

    def _ids(self, text: str) -> np.ndarray | None:
        try:
            return self._encoding.encode_to_numpy(text, disallowed_special=()).astype(np.int32)
        except ValueError:
            return None


def _words(pre_tokenizer: dict | None) -> str | None:
    """The pattern of words, where cutting them out and writing their bytes as characters is all that is done."""
    steps = [] if pre_tokenizer is None else pre_tokenizer.get("pretokenizers", [pre_tokenizer])
    if not steps or steps[-1]["type"] != "ByteLevel" or steps[-1]["add_prefix_space"]:
        return None
    if len(steps) == 1 and steps[0]["use_regex"]:
        return _GPT2_WORDS
    split = steps[0]
    if len(steps) != 2 or steps[1]["use_regex"] or split["type"] != "Split":
        return None
    isolated = split["behavior"] == "Isolated" and not split["invert"]
    return split["pattern"].get("Regex") if isolated else None


def _ranks(content: dict) -> dict[bytes, int] | None:
    """The id of each token by its bytes, where their order is that of the merges, and merging is all that is done."""
    model = content["model"]
    more = ("dropout", "unk_token", "continuing_subword_prefix", "end_of_word_suffix", "byte_fallback")
    if model["type"] != "BPE" or any(model.get(name) for name in more):
        return None
    added = {token["content"] for token in content["added_tokens"]}
    ids = {token: number for token, number in model["vocab"].items() if token not in added}
    pairs = (pair.split(" ") if isinstance(pair, str) else pair for pair in model["merges"])
    merged = ["".join(pair) for pair in pairs]
    byte_of = {character: byte for byte, character in enumerate(byte_characters())}
    if (
        ids.keys() != byte_of.keys() | set(merged)
        or any(ids[one] > ids[other] for one, other in pairwise(merged))
        or not set().union(*ids.keys()) <= byte_of.keys()
    ):
        return None
    return {bytes(byte_of[character] for character in token): number for token, number in ids.items()}


def _readable(ranks: Iterable[bytes]) -> Iterable[str]:
    for token in ranks:
        try:
            yield token.decode()
        except UnicodeDecodeError:  # a part of a character
            continue
