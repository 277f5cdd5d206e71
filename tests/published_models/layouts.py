"""Small tokenizers with the files of published ones.

A backend has a small vocabulary and the family's parts (normalizer, pre-tokenizer, decoder). A layout names the files
and the content of tokenizer_config.json.
"""

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

from tests.data.tokenizer_kinds import LLAMA3_SPLIT, LLAMA_2, bpe

CORPUS = ["the cat sat on the mat and said hello to the dog . yes no maybe answer question user assistant"] * 20
SPECIAL = 16  # ids of special tokens at the front of a small vocabulary
SENTENCE_PIECE = b"\n begins the message of its models, which nothing here reads: sentencepiece is not installed"
HUGE = 1000000000000000019884624838656
GPT2_SPLIT = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
QWEN_SPLIT = LLAMA3_SPLIT.replace(r"\p{N}{1,3}", r"\p{N}")
GPT4O_SPLIT = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?|"
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?|"
    r"\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
BLOOM_SPLIT = r" ?[^(\s|[.,!?…。，、।۔،])]+"


def byte_level(prefix: bool = False, regex: bool = True, trim: bool = True):
    return pre_tokenizers.ByteLevel(add_prefix_space=prefix, use_regex=regex, trim_offsets=trim)


def split(pattern: str, *before) -> pre_tokenizers.PreTokenizer:
    parts = [*before, pre_tokenizers.Split(Regex(pattern), "isolated", False), byte_level(regex=False)]
    return pre_tokenizers.Sequence(parts)


def byte_bpe(special: list[str], size: int = 320, pre=None, last: bool = False, normalizer=None) -> Tokenizer:
    """GPT-2's kind: `special` are its first ids, or its last."""
    backend = bpe([] if last else special, size, normalizer, pre or byte_level(), byte_level=True, corpus=CORPUS)
    if last:
        backend.add_special_tokens(special)
    return backend


def llama_bpe(
    special: tuple[str, ...] = ("<unk>", "<s>", "</s>"), scheme: str | None = None, added: tuple[str, ...] = (),
    bos: str | None = "<s>", eos: str | None = None, normalizer=None,
) -> Tokenizer:  # fmt: skip
    """SentencePiece's kind: byte fallback, and a space before each text, as a normalizer or as Metaspace's `scheme`."""
    words = None if scheme else normalizer or LLAMA_2
    metaspace = pre_tokenizers.Metaspace("▁", prepend_scheme=scheme, split=False) if scheme else None
    backend = bpe(special, 360, words, metaspace, corpus=CORPUS)
    strip = [decoders.Strip(" ", 1, 0)] if normalizer is None and scheme != "never" else []
    backend.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), *strip])
    backend.add_special_tokens(list(added))
    ends(backend, bos, eos)
    return backend


def ends(backend: Tokenizer, bos: str | None, eos: str | None) -> Tokenizer:
    """`backend`, writing these tokens around a text."""
    if bos or eos:
        one, two = ([*([bos] * bool(bos)), f"${part}", *([eos] * bool(eos))] for part in "AB")
        named = [(token, backend.token_to_id(token)) for token in dict.fromkeys(filter(None, (bos, eos)))]
        pair = [*one, *(part.replace("$B", "$B:1") for part in two)]
        backend.post_processor = processors.TemplateProcessing(single=one, pair=pair, special_tokens=named)
    return backend


def unigram(special: list[str], extra: list[str] = ()) -> Tokenizer:
    """T5's and XGLM's kind."""
    backend = Tokenizer(models.Unigram())
    backend.pre_tokenizer = pre_tokenizers.Metaspace("▁", "always")
    backend.decoder = decoders.Metaspace("▁", "always")
    trainer = trainers.UnigramTrainer(
        vocab_size=120, special_tokens=special, unk_token="<unk>", show_progress=False,
        initial_alphabet=[chr(number) for number in range(33, 127)],
    )  # fmt: skip
    backend.train_from_iterator(CORPUS, trainer)
    backend.add_special_tokens(list(extra))
    return backend


def word_piece() -> Tokenizer:
    """BERT's kind."""
    backend = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    backend.normalizer = normalizers.BertNormalizer(lowercase=True)
    backend.pre_tokenizer, backend.decoder = pre_tokenizers.BertPreTokenizer(), decoders.WordPiece()
    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    backend.train_from_iterator(CORPUS, trainers.WordPieceTrainer(vocab_size=120, special_tokens=special))
    return ends(backend, "[CLS]", "[SEP]")


def tiktoken(backend: Tokenizer) -> str:
    """Returns a tiktoken file of the byte-level `backend`: one token in base64 and its rank a line."""
    from base64 import b64encode

    from transformers.convert_slow_tokenizer import bytes_to_unicode

    byte_of = {character: byte for byte, character in bytes_to_unicode().items()}
    tokens = json.loads(backend.to_str())["model"]["vocab"]
    pieces = sorted((number, token) for token, number in tokens.items())
    raw = [bytes(byte_of[character] for character in token) for _, token in pieces]
    return "".join(f"{b64encode(token).decode()} {rank}\n" for rank, token in enumerate(raw))


def tekken(backend: Tokenizer) -> str:
    """Mistral's tekken.json of the byte-level `backend`."""
    lines = tiktoken(backend).splitlines()
    vocabulary = [{"rank": rank, "token_bytes": line.split()[0], "token_str": None} for rank, line in enumerate(lines)]
    special = [
        {"rank": rank, "token_str": text, "is_control": True} for rank, text in enumerate(("<unk>", "<s>", "</s>"))
    ]
    config = {
        "pattern": GPT4O_SPLIT, "num_vocab_tokens": len(vocabulary), "default_vocab_size": len(vocabulary) + 3,
        "default_num_special_tokens": 3, "version": "v3",
    }  # fmt: skip
    return json.dumps({"config": config, "vocab": vocabulary, "special_tokens": special})


@dataclass(frozen=True)
class Layout:
    """The files of one tokenizer. `hub`: the row of configs.jsonl that the model beside it is of."""

    name: str
    hub: str
    backend: Callable[[], Tokenizer]
    files: tuple[str, ...] = ("tokenizer.json",)
    config: dict | None = field(default_factory=dict)  # of tokenizer_config.json; None: there is none
    special_map: dict | None = None  # of special_tokens_map.json
    added: dict | None = None  # of added_tokens.json
    extra: dict[str, str] = field(default_factory=dict)  # {file: text}
    edit: dict = field(default_factory=dict)  # of tokenizer.json's top level
    decoder: dict[str, dict] | None = None  # {token: what added_tokens_decoder says of it beyond the usual}
    tiktoken: bool = False  # tokenizer.model is such a file, not SentencePiece's

    def write(self, folder: Path, model: dict) -> None:
        backend = self.backend()
        for name in self.files:
            self._write_file(folder, name, backend)
        config = None if self.config is None else dict(self.config)
        if self.decoder is not None:
            config["added_tokens_decoder"] = {
                str(backend.token_to_id(token)): described(token) | more for token, more in self.decoder.items()
            }
        texts = {"tokenizer_config.json": config, "special_tokens_map.json": self.special_map}
        texts["added_tokens.json"] = self.added
        for name, content in texts.items():
            if content is not None:
                (folder / name).write_text(json.dumps(content, indent=2, ensure_ascii=False), encoding="utf-8")
        for name, text in self.extra.items():
            (folder / name).parent.mkdir(exist_ok=True)
            (folder / name).write_text(text, encoding="utf-8")
        self._name_ids(folder, model, backend, (config or {}) | (self.special_map or {}))

    def _write_file(self, folder: Path, name: str, backend: Tokenizer) -> None:
        if name == "tokenizer.json":
            content = json.loads(backend.to_str()) | self.edit
            (folder / name).write_text(json.dumps(content, indent=2, ensure_ascii=False), encoding="utf-8")
        elif name in ("vocab.json", "vocab.txt"):  # and merges.txt, where there are merges
            backend.model.save(str(folder))
        elif name == "tekken.json":
            (folder / name).write_text(tekken(backend), encoding="utf-8")
        elif name == "qwen.tiktoken" or self.tiktoken:
            (folder / name).write_text(tiktoken(backend), encoding="utf-8")
        else:
            (folder / name).write_bytes(SENTENCE_PIECE)

    @staticmethod
    def _name_ids(folder: Path, model: dict, backend: Tokenizer, said: dict) -> None:
        """The model's config has the ids of the tokens that the tokenizer's files name."""
        for name in ("bos", "eos", "pad"):
            token = said.get(f"{name}_token")
            token = token["content"] if isinstance(token, dict) else token
            number = None if token is None else backend.token_to_id(token)
            if number is not None and model.get(f"{name}_token_id") is not None:
                model[f"{name}_token_id"] = number
        (folder / "config.json").write_text(json.dumps(model, indent=2), encoding="utf-8")


def described(token: str) -> dict:
    """Returns a special token in tokenizer_config.json."""
    flags = {"lstrip": False, "normalized": False, "rstrip": False, "single_word": False, "special": True}
    return {"content": token, **flags}


def added_token(token: str, normalized: bool = True) -> dict:
    """Returns the same as transformers 4.2 to 4.30 wrote it."""
    said = described(token) | {"normalized": normalized, "__type": "AddedToken"}
    del said["special"]
    return said


def plain(folder: Path, config: dict) -> None:
    """tokenizer.json and tokenizer_config.json, with the special ids of `config`; for cases that are not about it."""
    backend = byte_bpe([f"<|special_{number}|>" for number in range(SPECIAL)])
    backend.save(str(folder / "tokenizer.json"))
    said = {"tokenizer_class": "PreTrainedTokenizerFast", "model_max_length": 2048}
    for name in ("bos", "eos", "pad"):
        number = config.get(f"{name}_token_id")
        number = number[0] if isinstance(number, list) else number
        if number is None and name == "eos":
            number = 9
        if number is not None:
            said[f"{name}_token"] = f"<|special_{number}|>"
    (folder / "tokenizer_config.json").write_text(json.dumps(said, indent=2), encoding="utf-8")
