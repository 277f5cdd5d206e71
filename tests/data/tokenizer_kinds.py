"""Small tokenizers of the kinds that models have, trained on a few lines."""

import functools
import json
import re
from collections.abc import Callable

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
from transformers import ByT5Tokenizer, PreTrainedTokenizer, PreTrainedTokenizerFast

from lowmem.data.tokenizer import byte_level_tokenizer

CORPUS = [
    "the cat sat on the mat and said hello to the dog. Yes! no?\n\n### Response:\nyes, the dog's 1234 cats\r\n",
    "<|user|> question : answer\n    def f(x):\n        return x ** 2 - 10\n\n\n   été naïve 中文字 中文 🙂 aaaa",
    "Human: who are you?   Assistant: I'm a model\tof [language]; {'a': 1, \"b\": 22}, 333,444 -- end aaaaaaaa bb",
] * 10
BOS, EOS = "<s>", "</s>"
SIZE = 676
SPECIAL = ["<unk>", BOS, EOS, "<|user|>", "<|assistant|>", "<|end|>"]
LLAMA3_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|"
    r"\s+(?!\S)|\s+"
)
O200K_WORDS = r"[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
DIGITS_FROM_THE_RIGHT = r"(?=(\d{3})+(?!\d))"


def bpe(
    special: list[str], size: int, normalizer=None, pre_tokenizer=None, byte_level: bool = False, corpus=CORPUS, **more
) -> Tokenizer:
    """BPE of `size` tokens. Bytes are written as letters if it is `byte_level`, otherwise as tokens such as <0x0A>."""
    backend = Tokenizer(models.BPE(unk_token=None if byte_level else "<unk>"))
    if normalizer:
        backend.normalizer = normalizer
    if pre_tokenizer:
        backend.pre_tokenizer = pre_tokenizer
    trainer = trainers.BpeTrainer(
        vocab_size=size,
        special_tokens=[*special, *([] if byte_level else [f"<0x{byte:02X}>" for byte in range(256)])],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet() if byte_level else [],
        show_progress=False,
    )
    backend.train_from_iterator(corpus, trainer)
    content = json.loads(backend.to_str())
    content["added_tokens"] = [token for token in content["added_tokens"] if token["content"] in special]
    content["model"] |= {"byte_fallback": not byte_level, "fuse_unk": not byte_level, **more}
    backend = Tokenizer.from_str(json.dumps(content))
    if byte_level:
        backend.decoder = decoders.ByteLevel()
    return backend


def _byte_level(words: str | None = None, normalizer=None, prefix: bool = False, **more) -> Tokenizer:
    steps = [pre_tokenizers.Split(Regex(words), "isolated")] if words else []
    steps += [pre_tokenizers.ByteLevel(add_prefix_space=prefix, use_regex=words is None)]
    return bpe(SPECIAL, SIZE, normalizer, pre_tokenizers.Sequence(steps), byte_level=True, **more)


def _metaspace(scheme: str, split: bool = True) -> Tokenizer:
    return bpe(SPECIAL, SIZE, None, pre_tokenizers.Metaspace("▁", prepend_scheme=scheme, split=split))


def _unigram(normalizer, scheme: str = "always", split: bool = True) -> Tokenizer:
    backend = Tokenizer(models.Unigram())
    backend.normalizer = normalizer
    backend.pre_tokenizer = pre_tokenizers.Metaspace("▁", prepend_scheme=scheme, split=split)
    trainer = trainers.UnigramTrainer(vocab_size=200, special_tokens=SPECIAL, unk_token="<unk>", show_progress=False)
    backend.train_from_iterator(CORPUS, trainer)
    return backend


def _word_piece() -> Tokenizer:
    backend = Tokenizer(models.WordPiece(unk_token="<unk>", max_input_chars_per_word=20))
    backend.normalizer = normalizers.BertNormalizer()
    backend.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    backend.train_from_iterator(
        CORPUS, trainers.WordPieceTrainer(vocab_size=300, special_tokens=SPECIAL, show_progress=False)
    )
    backend.decoder = decoders.WordPiece()
    return backend


SPACES = normalizers.Replace(" ", "▁")
LLAMA_2 = normalizers.Sequence([normalizers.Prepend("▁"), SPACES])
T5 = normalizers.Sequence([normalizers.NFKC(), normalizers.Replace(Regex(" {2,}"), " ")])
UNCASED = normalizers.Sequence([normalizers.NFKD(), normalizers.StripAccents(), normalizers.Lowercase()])
KINDS: dict[str, Callable[[], Tokenizer]] = {
    "gpt2": _byte_level, "prefix space": lambda: _byte_level(prefix=True),
    "qwen": lambda: _byte_level(LLAMA3_SPLIT.replace("{1,3}", ""), normalizers.NFC()),
    "llama3": lambda: _byte_level(LLAMA3_SPLIT, ignore_merges=True), "o200k": lambda: _byte_level(O200K_WORDS),
    "superbpe": lambda: _byte_level(DIGITS_FROM_THE_RIGHT), "llama2": lambda: bpe(SPECIAL, SIZE, LLAMA_2),
    "metaspace always": lambda: _metaspace("always"), "metaspace first": lambda: _metaspace("first"),
    "metaspace never": lambda: _metaspace("never"),
    "metaspace first, not split": lambda: _metaspace("first", split=False),
    "gemma": lambda: bpe(SPECIAL, SIZE, SPACES, pre_tokenizers.Split(" ", "merged_with_previous")),
    "t5": lambda: _unigram(T5), "xlnet": lambda: _unigram(UNCASED),
    "unigram, not split": lambda: _unigram(normalizers.NFKC(), "first", split=False), "wordpiece": _word_piece,
}  # fmt: skip


class Words(PreTrainedTokenizer):
    """Written in Python, with a space before each text, as SentencePiece writes it."""

    def __init__(self):
        self.ids = {}
        super().__init__(eos_token="</s>", unk_token="<unk>")

    vocab_size = property(lambda self: len(self.ids))

    def get_vocab(self):
        return self.ids | self._added_tokens_encoder

    def _tokenize(self, text):
        return re.findall("▁?[^▁]{1,3}|▁", "▁" + text.replace(" ", "▁"))

    def _convert_token_to_id(self, token):
        return self.ids.setdefault(token, 10 + len(self.ids))

    def _convert_id_to_token(self, index):
        return {number: token for token, number in self.ids.items()}.get(index, "<unk>")


OTHERS = {"bytes": byte_level_tokenizer, "python": ByT5Tokenizer, "python, prefix space": Words}


@functools.cache
def of_kind(kind: str, begins: bool = False, ends: bool = False):
    return OTHERS[kind]() if kind in OTHERS else tokenizer(kind, begins, ends)


def tokenizer(kind: str, begins: bool = False, ends: bool = False):
    """Returns a tokenizer of that kind, which puts BOS before and EOS behind a text if it `begins` and `ends` it."""
    backend = KINDS[kind]()
    if begins or ends:
        special = [(token, backend.token_to_id(token)) for token in (BOS, EOS)]
        single = " ".join([BOS] * begins + ["$A"] + [EOS] * ends)
        template_processing = processors.TemplateProcessing(single=single, special_tokens=special)
        byte_level = [processors.ByteLevel(trim_offsets=True)] if "ByteLevel" in str(backend.pre_tokenizer) else []
        backend.post_processor = processors.Sequence([*byte_level, template_processing])
    backend.add_special_tokens([AddedToken("<|strip|>", lstrip=True, rstrip=True, special=True)])
    backend.add_tokens([AddedToken("<|word|>", single_word=True, normalized=True)])
    return PreTrainedTokenizerFast(tokenizer_object=backend, bos_token=BOS, eos_token=EOS, unk_token="<unk>")
