"""The model's own tokenizer; for weights from scratch without one, the 256 bytes of UTF-8.

A model trained from random weights (`--init random`) needs no vocabulary from anywhere: every text is a sequence of
bytes, so 256 byte ids and one end-of-text id say everything, losslessly, in any language. What it costs is length,
about 3 to 4 tokens where GPT-2's vocabulary takes one. It is a real fast tokenizer (byte-level BPE without a single
merge), so it is exported with the model and loads with `AutoTokenizer.from_pretrained`.

Nothing here waits long for a network: the cache comes first, `--init random` asks nothing else, and the hub is tried
only when it answers.
"""

import re
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoTokenizer, PreTrainedTokenizerBase, PreTrainedTokenizerFast

from lowmem import hub
from lowmem.data.sources import PIECE_CHARACTERS
from lowmem.errors import InputError

END_OF_TEXT = "<|endoftext|>"
BYTE_LEVEL_IDS = 257
# The Rust tokenizer keeps about 150 bytes per token until a call returns, so a call gets only so many characters, long
# texts in pieces; each piece is encoded by one thread.
BATCH_CHARACTERS = 2**21
_THREADS_PIECE_CHARACTERS = 2**16
_LINE_END = re.compile(r"(?<=\S\n)(?=\S)")  # not within a run of spaces and line ends, which may be one token
_PROBE = "".join(f"{before}\n{after}" for before in "a1.)é中\u0301🙂" for after in "b2(#'ü文🙂")  # around a line end
_TOKENIZER_FILES = ("tokenizer*", "vocab*", "merges.txt", "*.model", "*.tiktoken", "tekken.json")


def load_tokenizer(model: str, init: str, vocabulary_size: int) -> PreTrainedTokenizerBase:
    """The tokenizer of `model` (a folder or a hub name), or a byte-level one (`is_byte_level` tells).

    `init` "random": a folder's own tokenizer, or the cached one of a hub name, or else byte-level; never the network.
    `init` "pretrained": the folder's, the cached or the hub's. `vocabulary_size` is the number of ids that the model
    embeds. Raises InputError where there is no tokenizer, it has no end-of-text token, or the model has too few ids.
    """
    folder = Path(model)
    has_files = folder.is_dir() and any(any(folder.glob(pattern)) for pattern in _TOKENIZER_FILES)
    tokenizer = _from_pretrained(model, local_files_only=True)
    if tokenizer is None and has_files:
        raise InputError(f"the tokenizer in the folder {model} cannot be read; copy its files there again, complete")
    if tokenizer is None and init == "random":
        tokenizer = byte_level_tokenizer()
    if tokenizer is None and folder.is_dir():
        raise InputError(
            f"the folder {model} holds no tokenizer; copy the model's tokenizer files (tokenizer.json, "
            f"tokenizer_config.json) there, or train from scratch with --init random"
        )
    if tokenizer is None and hub.is_reachable():
        tokenizer = _from_pretrained(model, local_files_only=False)
    if tokenizer is None:
        raise InputError(
            f"the tokenizer of {model} is neither in the cache nor to be had from the hub; check the "
            f"name and the network (a gated model needs `hf auth login`), or give a local folder"
        )

    if tokenizer.eos_token_id is None:
        raise InputError(
            f"the tokenizer of {model} has no end-of-text token, which ends every document here; set "
            f"eos_token in its tokenizer_config.json"
        )
    if tokenizer.eos_token_id >= vocabulary_size or (is_byte_level(tokenizer) and vocabulary_size < BYTE_LEVEL_IDS):
        raise InputError(
            f"the tokenizer of {model} needs id {tokenizer.eos_token_id} for the end of a text, but the "
            f"model has {vocabulary_size} ids (vocab_size in its config.json)"
        )
    return tokenizer


def byte_level_tokenizer() -> PreTrainedTokenizerFast:
    """257 ids: id b is the byte b, id 256 is <|endoftext|>. Encodes and decodes any UTF-8 text without loss."""
    vocabulary = {character: byte for byte, character in enumerate(_byte_characters())}
    backend = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    # byte_level is kept in tokenizer_config.json, so a tokenizer that was saved and loaded again is still recognised.
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        eos_token=END_OF_TEXT,
        bos_token=END_OF_TEXT,
        clean_up_tokenization_spaces=False,
        byte_level=True,
    )


def is_byte_level(tokenizer: PreTrainedTokenizerBase) -> bool:
    """Whether this is the byte-level stand-in and not a tokenizer that came with a model."""
    return bool(tokenizer.init_kwargs.get("byte_level")) and len(tokenizer) == BYTE_LEVEL_IDS


def encode(tokenizer: PreTrainedTokenizerBase, texts: list[str]) -> list[np.ndarray]:
    """The ids of each text, int32 [tokens], without added special tokens; special tokens written out in a text (an
    <|endoftext|> between two books) become their ids, as everywhere in Hugging Face's tokenizers.

    Long texts are encoded in pieces cut at line ends, by all processors (RAYON_NUM_THREADS says how many). For
    tokenizers that never join a line end with the next line's first word (the byte-level ones: GPT-2, Llama 3, Qwen)
    the ids are the same; what others get is cut every 2**20 characters only.
    """
    if is_byte_level(tokenizer):
        return [_encode_bytes(text) for text in texts]  # the same ids, 30 times faster
    backend = _plain_backend(tokenizer)
    size = _THREADS_PIECE_CHARACTERS if backend is not None and _cuts_freely(backend) else PIECE_CHARACTERS
    pieces = [(index, piece) for index, text in enumerate(texts) for piece in _pieces(text, size)]
    encoded: list[list[np.ndarray]] = [[np.empty(0, np.int32)] for _ in texts]
    start = 0
    while start < len(pieces):
        end, characters = start, 0
        while end < len(pieces) and characters < BATCH_CHARACTERS:
            characters += len(pieces[end][1])
            end += 1
        ids = _encode_batch(tokenizer, backend, [piece for _, piece in pieces[start:end]])
        for (index, _), piece_ids in zip(pieces[start:end], ids, strict=True):
            encoded[index].append(piece_ids)
        start = end
    return [np.concatenate(parts) for parts in encoded]


def _encode_batch(
    tokenizer: PreTrainedTokenizerBase, backend: Tokenizer | None, texts: list[str]
) -> Iterator[np.ndarray]:
    if backend is None:
        ids = tokenizer(
            texts, add_special_tokens=False, return_attention_mask=False, return_token_type_ids=False, verbose=False
        )["input_ids"]
        yield from (np.asarray(one, np.int32) for one in ids)
        return
    for one in backend.encode_batch_fast(texts, add_special_tokens=False):
        yield np.asarray(one.ids, np.int32)  # one list of Python's numbers at a time


def _plain_backend(tokenizer: PreTrainedTokenizerBase) -> Tokenizer | None:
    """The Rust tokenizer behind `tokenizer`, where calling that does nothing more than to call this; it need not be
    asked for what is not used here (offsets, masks), which takes half of the time."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    ids = tokenizer([_PROBE], add_special_tokens=False)["input_ids"]  # which sets the backend's truncation, too
    same = isinstance(backend, Tokenizer) and backend.encode_batch_fast([_PROBE], add_special_tokens=False)[0].ids
    return backend if same == ids[0] else None


def _cuts_freely(backend: Tokenizer) -> bool:
    """Whether a text of every kind of neighbours of a line end has the same ids when it is cut at the line ends."""
    lines = [backend.encode(line, add_special_tokens=False).ids for line in _PROBE.splitlines(keepends=True)]
    return [token for line in lines for token in line] == backend.encode(_PROBE, add_special_tokens=False).ids


def _from_pretrained(model: str, local_files_only: bool) -> PreTrainedTokenizerBase | None:
    try:
        tokenizer = AutoTokenizer.from_pretrained(model, local_files_only=local_files_only)
    except Exception:  # what a missing or broken file raises depends on the model type, down to a bare Exception
        return None
    # A folder with a GPT-2 config.json and no vocabulary gives a GPT2Tokenizer that turns every text into nothing.
    return tokenizer if tokenizer("a", add_special_tokens=False)["input_ids"] else None


def _encode_bytes(text: str) -> np.ndarray:
    parts = [np.frombuffer(part.encode(), np.uint8).astype(np.int32) for part in text.split(END_OF_TEXT)]
    end_of_text = np.array([BYTE_LEVEL_IDS - 1], np.int32)
    return np.concatenate([parts[0], *(piece for part in parts[1:] for piece in (end_of_text, part))])


def _pieces(text: str, characters: int) -> Iterator[str]:
    start = 0
    while cut := _LINE_END.search(text, start + characters):
        yield text[start : cut.start()]
        start = cut.start()
    yield text[start:]


def _byte_characters() -> list[str]:
    """The printable character by which byte-level tokenizers write each byte: itself where it is visible, else the next
    free one from U+0100 on (GPT-2's table)."""
    visible = {*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)}
    hidden = [byte for byte in range(256) if byte not in visible]
    return [chr(byte) if byte in visible else chr(256 + hidden.index(byte)) for byte in range(256)]
