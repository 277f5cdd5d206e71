"""Loads the model's own tokenizer, or a byte-level one for training from random weights.

Tokenizers are looked up in the hub's cache, then on the hub; with `--init random` the hub is not asked.
"""

import json
import logging
import re
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from json import JSONDecodeError
from pathlib import Path
from unittest.mock import patch

from tokenizers import Tokenizer, __version__, decoders, models, pre_tokenizers
from transformers import AutoTokenizer, PreTrainedTokenizerBase, PreTrainedTokenizerFast
from transformers.convert_slow_tokenizer import bytes_to_unicode

from lowmem import hub
from lowmem.config_switches import without_switches
from lowmem.errors import InputError, first_line
from lowmem.text_files import read_json, readable_folder, refuse_disguised

END_OF_TEXT = "<|endoftext|>"
BYTE_LEVEL_IDS = 257
BYTE_LEVEL = "the tokenizer is the byte-level one: a token is a byte (256, and one for the end of a text)"
_VOCABULARIES = ("tokenizer.json", "vocab*", "*.model", "*.tiktoken", "tekken.json", "tokenization_*.py")
_BESIDE_THEM = (
    *("tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "merges.txt"),
    *("*.jinja", "additional_chat_templates/*.jinja"),
)
_PACKAGE = re.compile(  # how transformers and Python say which package is missing
    r"You need to install (\S+) to use|[Rr]equires the (\S+) library|No module named '([\w.]+)'"
    r"|pip install (?:-U )?([\w-]+)"
)
_NOT_EXTRACTED = re.compile(r"Could not extract .* due to\s+(.*)\. Falling back", re.DOTALL)
_MODULES = {"protobuf": "google.protobuf", "mistral-common": "mistral_common"}  # if the names differ


def load_tokenizer(model: str, init: str, vocabulary_size: int) -> PreTrainedTokenizerBase:
    """Returns the tokenizer of `model`, a folder or a hub name. If it has none and `init` is "random", returns a
    byte-level one. `vocabulary_size`: number of ids that the model embeds. Raises InputError if there is no tokenizer,
    or if it has no end-of-text token among these ids."""
    folder, names = Path(model), hub.names_of(model)
    try:
        for name in names:
            tokenizer, error = _from_pretrained(name, local_files_only=True)
            if tokenizer is not None or _files(hub.cached_folder(name), *_VOCABULARIES):
                break
    except OSError as error:  # a file in the folder cannot be read
        raise InputError(f"{error.filename}: {error.strerror}, so the tokenizer cannot be read") from None
    if tokenizer is None and not folder.is_dir() and init != "random" and not hub.why_unreachable():
        tokenizer, error = _from_pretrained(names[0], local_files_only=False)
    if tokenizer is None and _files(hub.local_folder(model), *_VOCABULARIES):
        where = f"in the folder {model}" if folder.is_dir() else f"of {model}"
        raise InputError(f"the tokenizer {where} cannot be read: {_reason(model, error)}")
    if tokenizer is None and init == "random":
        tokenizer = byte_level_tokenizer()
    if tokenizer is None and folder.is_dir():
        raise InputError(
            f"the folder {model} holds no tokenizer; copy the model's tokenizer files (tokenizer.json, "
            f"tokenizer_config.json) there, or train from scratch with --init random"
        )
    if tokenizer is None:
        raise InputError(
            f"the tokenizer of {model} is neither in the cache nor to be had from the hub "
            f"({hub.why_unreachable() or first_line(error)}); check the name and the network (a gated model needs "
            "`hf auth login`), or give a local folder"
        )
    if not tokenizer.eos_token or tokenizer.eos_token_id is None:  # the first LLaMA's was "", which has no id
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


@contextmanager
def tokenizer_blamed(model: str) -> Iterator[None]:
    """Turns errors of the package tokenizers in the `with` block into InputError, which names `model`."""
    try:
        yield
    except BaseException as error:
        # The package raises the type Exception itself, or Rust panics.
        if type(error) is not Exception and type(error).__name__ != "PanicException":
            raise
        raise InputError(
            f"the tokenizer of {model} cannot read the data: {first_line(error)}; its tokenizer.json, or the class in "
            "its tokenizer_config.json, is not the model's own"
        ) from error


def byte_level_tokenizer() -> PreTrainedTokenizerFast:
    """Returns a tokenizer that encodes any text exactly: id b is the byte b, id 256 is <|endoftext|>. Texts have 3 to 4
    times as many tokens as with GPT-2's vocabulary."""
    # Byte-level tokenizers write each byte as a printable character, by GPT-2's table.
    vocabulary = {character: byte for byte, character in bytes_to_unicode().items()}
    backend = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    # byte_level is saved in tokenizer_config.json, so a tokenizer that was saved and loaded again is recognised.
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        eos_token=END_OF_TEXT,
        bos_token=END_OF_TEXT,
        clean_up_tokenization_spaces=False,
        byte_level=True,
    )


def is_byte_level(tokenizer: PreTrainedTokenizerBase) -> bool:
    return bool(tokenizer.init_kwargs.get("byte_level")) and len(tokenizer) == BYTE_LEVEL_IDS


def _from_pretrained(
    model: str, local_files_only: bool
) -> tuple[PreTrainedTokenizerBase, None] | tuple[None, Exception]:
    source = folder = Path(model)
    if folder.is_dir():
        for path in _files(folder, *_VOCABULARIES, *_BESIDE_THEM):
            refuse_disguised(path, b"")
        fields = read_json(config) if (config := folder / "config.json").is_file() else None
        readable = without_switches(fields) if isinstance(fields, dict) else fields
        # transformers also reads the model's config, and refuses some of its fields.
        source = readable_folder(folder, {} if readable == fields else {config.name: json.dumps(readable).encode()})
    with _held_back() as records:
        try:
            tokenizer = AutoTokenizer.from_pretrained(
                str(source), local_files_only=local_files_only, trust_remote_code=False
            )
            ordinary = tokenizer.get_vocab().keys() - tokenizer.all_special_tokens
            reads = bool(tokenizer("a", add_special_tokens=False)["input_ids"])
        except Exception as error:  # a missing or broken file raises anything, down to a bare Exception
            # transformers tries several readers, raises the last one's error and logs the others.
            found = (_NOT_EXTRACTED.search(record.getMessage()) for record in records)
            return None, next((ValueError(match[1]) for match in found if match), error)
    for record in records:
        logging.getLogger(record.name).handle(record)
    tokenizer.name_or_path = model
    # Without a vocabulary, transformers makes a GPT2Tokenizer that gives no ids, or a T5Tokenizer that gives <unk>.
    if len(ordinary) < 2 or not reads:
        return None, ValueError(f"a {type(tokenizer).__name__} with an empty vocabulary is all that its files give")
    return tokenizer, None


@contextmanager
def _held_back() -> Iterator[list[logging.LogRecord]]:
    """Yields a list that collects transformers' log records in the `with` block, instead of printing them."""
    records, handler = [], logging.Handler()
    handler.emit = records.append
    with patch.object(logging.getLogger("transformers"), "handlers", [handler]):
        yield records


def _files(folder: Path | None, *patterns: str) -> list[Path]:
    if folder is None:
        return []
    return [path for pattern in patterns for path in sorted(folder.glob(pattern)) if path.is_file()]


def _reason(model: str, error: Exception) -> str:
    folder = hub.local_folder(model)
    said = first_line(error).split(". ")[0][:300]
    if package := _missing_package(folder, str(error)):
        return f"it needs the package {package}, which is not installed here ({said}); pip install {package}"
    if isinstance(error, JSONDecodeError):
        broken = [path.name for path in _files(folder, "*.json") if not _is_json(path)]
        return f"{', '.join(broken) or 'a file'} is not JSON ({said}); copy the files there again, complete"
    if "trust_remote_code" in str(error):
        return (
            "it needs Python code from its repository, which is not run here; give a folder with a tokenizer.json, "
            "which a fast tokenizer's save_pretrained writes"
        )
    if type(error) is Exception:  # the package tokenizers has no other
        return (
            f"{said} (tokenizers {__version__}); its tokenizer.json is damaged or of a newer version: "
            "pip install --upgrade transformers tokenizers"
        )
    if not (folder / "tokenizer.json").is_file():
        named = ", ".join(path.name for path in _files(folder, *_VOCABULARIES))
        return f"{said}; its vocabulary is only in {named}: copy the model's tokenizer.json there"
    return f"{said} ({type(error).__name__})"


def _missing_package(folder: Path, said: str) -> str | None:
    """Returns a missing package that `folder` needs or that the error text `said` names; None if there is none."""
    named = [next(filter(None, groups)).split(".")[0].lower() for groups in _PACKAGE.findall(said)]
    if not (folder / "tokenizer.json").is_file():  # the error is often that of another reader, tried in vain
        for path in _files(folder, "*.model"):
            named += ["sentencepiece" if path.read_bytes()[:1] == b"\n" else "tiktoken"]  # protobuf's first field
        named += ["tiktoken"] * bool(_files(folder, "*.tiktoken"))
        named += ["mistral-common"] * (folder / "tekken.json").is_file()
    return next((name for name in named if not _is_installed(_MODULES.get(name, name))), None)


def _is_installed(module: str) -> bool:
    try:
        return find_spec(module) is not None
    except ModuleNotFoundError:  # the package that contains it is missing
        return False


def _is_json(path: Path) -> bool:
    try:
        read_json(path)
    except InputError:
        return False
    return True
