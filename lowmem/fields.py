"""Checks the value of one setting: its type, its range, and the spelling of texts and paths.

A shell does not replace `~` after `--out=`, and YAML and Python replace neither `~` nor `$NAME`. So the functions here
replace `~` and `~user`, and refuse `$NAME`.
"""

import os
import re
import sys
from types import NoneType, UnionType
from typing import Any, Union, get_args, get_origin

from lowmem.errors import InputError
from lowmem.units import MIB, format_size, parse_interval, parse_size

Specs = str | tuple[str, ...]  # the value of an option that may be given several times; given once, it is a str

SAVE_EVERY = "30min"
MOST_EPOCHS = 10**6
_RANGES = (  # (names of fields, a test of the value, the text of the refusal)
    (
        "batch steps micro_batch group segment_blocks target_tokens keep_last eval_every eval_batches log_every "
        "patience sample_every max_samples preview", lambda value: value >= 1, "is too small: it must be at least 1",
    ),
    ("seq", lambda value: value >= 2, "is too short: a sequence needs 2 tokens, to predict one from the other"),
    ("lr epochs adam_epsilon", lambda value: value > 0, "must be more than 0"),
    ("epochs", lambda value: value <= MOST_EPOCHS, f"is too large: it must be at most {MOST_EPOCHS:,}"),
    ("weight_decay clip_norm warmup_steps sample_temperature", lambda value: value >= 0, "must not be negative"),
    ("adam_beta1 adam_beta2", lambda value: 0 <= value < 1, "must be at least 0 and below 1"),
    ("seed", lambda value: 0 <= value < 2**32, f"must be a whole number from 0 to {2**32 - 1}"),
    ("eval_fraction", lambda value: 0 <= value < 1, "must be at least 0 and below 1; 0 holds nothing out"),
)  # fmt: skip
_PATHS = ("model", "data", "eval_data", "chat_template", "states_folder", "out", "resume")
_VARIABLE = re.compile(r"(?:^|/)\$\{?[A-Za-z_]")
_NOT_UTF8 = re.compile("[\ud800-\udfff]")


def option_name(name: str) -> str:
    """Returns the command-line option that sets the field `name`: --gpu-limit for gpu_limit_bytes."""
    return "--" + name.removesuffix("_bytes").replace("_", "-")


def each(specs: Specs | None) -> tuple[str, ...]:
    """Returns the values of an option that may be given several times, as a tuple; () for None."""
    return (specs,) if isinstance(specs, str) else specs or ()


def kind_of(hint: Any) -> tuple[Any, bool]:
    """Returns (type of the values, True if None is allowed) for a type annotation: (int, True) for int | None."""
    kinds = get_args(hint) if get_origin(hint) in (Union, UnionType) else (hint,)
    return kinds[0], NoneType in kinds


def may_be_several(hint: Any) -> bool:
    return tuple[str, ...] in get_args(hint)


def checked(name: str, hint: Any, value: object) -> Any:
    """Returns `value` for the field `name` of Settings, converted to the type `hint`. Sizes may be texts, such as
    "11GiB". Raises InputError for a wrong type, a value out of range, an empty text or a bad path."""
    value = _typed(name, hint, value)
    if isinstance(value, tuple):
        return tuple(_read(name, text) for text in value)
    if isinstance(value, str) and hint != int | str and not get_args(kind_of(hint)[0]):
        return _read(name, value)
    if value is None or isinstance(value, str | bool):
        return value
    if isinstance(value, int) and value >= 2**63:
        raise InputError(f"{option_name(name)} is too large: it must be below 2**63.")
    for names, allowed, words in _RANGES:
        if name in names.split() and not allowed(value):
            raise InputError(f"{option_name(name)} {value if isinstance(value, int) else f'{value:g}'} {words}.")
    if name.endswith("_bytes") and value < MIB:
        raise InputError(f"{option_name(name)} is {format_size(value)}: write a unit, as in 11GiB, or none.")
    return value


def _typed(name: str, hint: Any, value: object) -> Any:
    """Converts `value` to the type `hint` of the field `name`, or raises InputError. If the option may be given several
    times, a list of one text becomes a str, a longer one a tuple."""
    try:
        if hint == int | str:
            return parse_interval(SAVE_EVERY if value is None else str(value))
        if name.endswith("_bytes") and isinstance(value, str):
            return None if value.lower() == "none" else parse_size(value)
    except ValueError as error:
        raise InputError(f"{option_name(name)}: {error}.") from None
    if may_be_several(hint) and type(value) in (list, tuple) and value and all(type(spec) is str for spec in value):
        return tuple(value) if len(value) > 1 else value[0]
    kind, optional = kind_of(hint)
    choices = get_args(kind)
    if value is None and optional or type(value) is kind is not float or type(value) is str and value in choices:
        return value
    if kind is float and type(value) in (int, float) and abs(value) < sys.float_info.max:
        return float(value)  # neither nan nor inf, nor an int that is too large for a float
    wanted = {int: "a whole number", float: "a finite number", str: "text", bool: "true or false"}
    if may_be_several(hint):
        wanted[str] = "text, nor a list of texts"
    raise InputError(f"{option_name(name)}: {value!r} is not {wanted.get(kind) or ' or '.join(choices)}.")


def _read(name: str, text: str) -> str:
    return (read_path_option if name in _PATHS else read_text_option)(option_name(name), text)


def shown(text: str) -> str:
    """Returns `text` with characters that are not valid UTF-8 replaced, so that it can be printed."""
    return _NOT_UTF8.sub("\N{REPLACEMENT CHARACTER}", text)


def read_text_option(option: str, text: str) -> str:
    """Returns `text`, the value of the command-line option `option`. Raises InputError if the text is not valid UTF-8.
    Also raises InputError if it is blank or has null characters, unless the option is --sample-prompt."""
    if option != "--sample-prompt" and ("\0" in text or not text.strip()):
        raise InputError(f"{option} must not be empty.")
    # No file, tracker or tokenizer could take such text.
    if _NOT_UTF8.search(text):
        raise InputError(f"{option} {shown(text)}: this is not UTF-8; rename it, or type it in UTF-8.")
    return text


def read_path_option(option: str, path: str) -> str:
    """Returns `path` with a leading `~` or `~user` replaced by the home folder. Raises InputError for blank or
    non-UTF-8 text. Also raises it for an unknown user or a variable such as `$HOME`, unless a file has that name."""
    expanded = os.path.expanduser(read_text_option(option, path))
    if expanded.startswith("~") and not os.path.exists(expanded):
        user = path.split("/")[0]
        raise InputError(f"{option} {path}: there is no home folder {user}; write ./{path} if it is called so.")
    if _VARIABLE.search(path) and not os.path.exists(path):
        raise InputError(f"{option} {path}: variables are not replaced here; write the path, which may begin with ~.")
    return read_text_option(option, expanded)
