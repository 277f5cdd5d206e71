"""Reads the values of options that are texts or paths.

A shell does not replace `~` after `--out=`, and YAML and Python replace neither `~` nor `$NAME`. So the functions here
replace `~` and `~user`, and refuse `$NAME`.
"""

import os
import re

from lowmem.errors import InputError

_VARIABLE = re.compile(r"(?:^|/)\$\{?[A-Za-z_]")
_NOT_UTF8 = re.compile("[\ud800-\udfff]")


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
