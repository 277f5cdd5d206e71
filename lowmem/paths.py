"""Texts and paths of options as people write them, wherever they come from: typed, read from a file, given in code.

A shell replaces `~` and `$NAME` at the start of a word; behind `--out=`, in a YAML file and in Python nobody does.
`~` and `~user` are then the home folder. `$NAME` is refused: a folder of that name is never meant.
"""

import os
import re

from lowmem.errors import InputError

_VARIABLE = re.compile(r"(?:^|/)\$\{?[A-Za-z_]")
_NOT_UTF8 = re.compile("[\ud800-\udfff]")


def shown(text: str) -> str:
    """`text` for a sentence or a file: what is not UTF-8 in it is replaced."""
    return _NOT_UTF8.sub("\N{REPLACEMENT CHARACTER}", text)


def read_text_option(option: str, text: str) -> str:
    """`text`. InputError if it is not UTF-8: no file, tracker or tokenizer could take it."""
    if _NOT_UTF8.search(text):
        raise InputError(f"{option} {shown(text)}: this is not UTF-8; rename it, or type it in UTF-8.")
    return text


def read_path_option(option: str, path: str) -> str:
    """`path` with the home folder in the place of a leading `~`. InputError for a home that is not known, for a
    variable that no shell has replaced, and as above."""
    expanded = os.path.expanduser(read_text_option(option, path))
    if expanded.startswith("~") and not os.path.exists(expanded):
        user = path.split("/")[0]
        raise InputError(f"{option} {path}: there is no home folder {user}; write ./{path} if it is called so.")
    if _VARIABLE.search(path) and not os.path.exists(path):
        raise InputError(f"{option} {path}: variables are not replaced here; write the path, which may begin with ~.")
    return read_text_option(option, expanded)
