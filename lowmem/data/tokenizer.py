"""The model's own tokenizer; for weights from scratch without one, the 256 bytes of UTF-8.

A model trained from random weights (`--init random`) needs no vocabulary from anywhere: every text is a sequence of
bytes, so 256 byte ids and one end-of-text id say everything, losslessly, in any language. What it costs is length,
about 3 to 4 tokens where GPT-2's vocabulary takes one. It is a real fast tokenizer (byte-level BPE without a single
merge), so it is exported with the model and loads with `AutoTokenizer.from_pretrained`.

Nothing here waits long for a network: the cache comes first, `--init random` asks nothing else, and the hub is tried
only when it answers.
"""

from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoTokenizer, PreTrainedTokenizerBase, PreTrainedTokenizerFast

from lowmem import hub
from lowmem.errors import InputError

END_OF_TEXT = "<|endoftext|>"
BYTE_LEVEL_IDS = 257
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
    vocabulary = {character: byte for byte, character in enumerate(byte_characters())}
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


def _from_pretrained(model: str, local_files_only: bool) -> PreTrainedTokenizerBase | None:
    try:
        tokenizer = AutoTokenizer.from_pretrained(model, local_files_only=local_files_only)
    except Exception:  # what a missing or broken file raises depends on the model type, down to a bare Exception
        return None
    # A folder with a GPT-2 config.json and no vocabulary gives a GPT2Tokenizer that turns every text into nothing.
    return tokenizer if tokenizer("a", add_special_tokens=False)["input_ids"] else None


def byte_characters() -> list[str]:
    """The printable character by which byte-level tokenizers write each byte: itself where it is visible, else the next
    free one from U+0100 on (GPT-2's table)."""
    visible = {*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)}
    hidden = [byte for byte in range(256) if byte not in visible]
    return [chr(byte) if byte in visible else chr(256 + hidden.index(byte)) for byte in range(256)]
