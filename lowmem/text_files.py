"""Reads text, JSON and YAML that other people wrote: config.json, tokenizers, templates, settings, rows of data.

Skips byte-order marks. Refuses text that is not UTF-8, files of another kind than their names say, and repeated keys.
"""

import codecs
import json
import re
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from lowmem.errors import InputError

PARQUET, ZIP = b"PAR1", b"PK\x03\x04"  # how these files begin; torch.save writes a zip archive
_KINDS = {  # {first bytes of a file: (its kind, advice)}
    b"\x1f\x8b": ("compressed with gzip", "unpack it with gunzip"),
    b"BZh": ("compressed with bzip2", "unpack it with bunzip2"),
    b"\xfd7zXZ\0": ("compressed with xz", "unpack it with unxz"),
    b"\x28\xb5\x2f\xfd": ("compressed with zstd", "unpack it with unzstd"),
    b"\x04\x22\x4d\x18": ("compressed with lz4", "unpack it with unlz4"),
    b"]\0\0": ("compressed with lzma", "unpack it with unlzma"),
    b"\x1f\x9d": ("compressed with compress", "unpack it with uncompress"),
    ZIP: ("a zip archive", "unpack it with unzip"),
    b"PK\x05\x06": ("an empty zip archive", "give the file that should be in it"),
    b"Rar!\x1a\x07": ("a RAR archive", "unpack it with unrar"),
    b"7z\xbc\xaf\x27\x1c": ("a 7z archive", "unpack it with 7z"),
    PARQUET: ("a Parquet file", "rename it to .parquet"),
    b"ARROW1": ("an Arrow file", "write its rows as Parquet or JSON lines"),
    b"%PDF-": ("a PDF", "extract its text first"),
    b"SQLite format 3\0": ("an SQLite database", "export the table that holds the text, as .csv"),
    b"{\\rtf": ("an RTF document", "save it as plain text"),
    b"\xd0\xcf\x11\xe0": ("an Office document", "save it as plain text"),
    b"\x7fELF": ("a program", "give text"),
    b"\x89PNG": ("a picture", "give text"),
    b"\xff\xd8\xff": ("a picture", "give text"),
}


def refuse_pointer(path: Path) -> bytes:
    """Returns the first 512 bytes of the file `path`. Raises InputError if the file is a Git LFS pointer."""
    with path.open("rb") as file:
        start = file.read(512)  # enough to recognize a file's kind: the header of a tar archive
    if start.startswith(b"version https://git-lfs.github.com/spec/"):
        raise InputError(f"{path} is a Git LFS pointer, not the file itself; run `git lfs pull` in its repository")
    return start


def refuse_disguised(path: Path, binary: bytes | None = None) -> None:
    """Raises InputError if the file is a Git LFS pointer, or if its first bytes show another kind than the expected
    one. `binary`: the first bytes of the expected kind; b"" if these vary; None for text."""
    start = refuse_pointer(path)
    for magic, (kind, advice) in _KINDS.items():
        if start.startswith(magic) and magic != binary:
            raise InputError(f"{path} is {kind}; {advice}")
    if start[257:].startswith(b"ustar"):
        raise InputError(f"{path} is a tar archive; unpack it with tar -xf")
    if binary is None and b"\0" in start[:4]:
        raise InputError(f"{path} has zero bytes in its first four: it is binary, or UTF-16; give text, saved as UTF-8")


def text_lines(path: Path, most_bytes: int = -1) -> Iterator[str]:
    """Yields the file's lines with their line ends. A line of more than `most_bytes` (-1: no limit) comes in several
    parts. Raises InputError for a file that is not UTF-8 text."""
    refuse_disguised(path)
    decoder = codecs.getincrementaldecoder("utf-8")()
    number, column, at_start = 1, 0, True  # of the next byte
    with path.open("rb") as file:
        while part := file.readline(most_bytes):
            ended = part.endswith(b"\n") or not file.peek(1)
            begun = len(decoder.getstate()[0])  # bytes of a character that the last part cut in two
            try:
                text = decoder.decode(part, final=ended)
            except UnicodeDecodeError as error:
                raise InputError(
                    f"{path}:{number}: not UTF-8 (byte {error.object[error.start]:#04x} in column "
                    f"{column - begun + error.start + 1}); save the file as UTF-8"
                ) from None
            if at_start:
                # `cat a b` puts a byte-order mark at the beginning of a line, too.
                text = text.lstrip("\ufeff")
            if text:
                yield text
            number, column = (number + 1, 0) if ended else (number, column + len(part))
            at_start = ended or (at_start and not text)


def read_text(path: Path) -> str:
    """Returns the text of the whole file. Raises InputError if it is not UTF-8 text."""
    return "".join(text_lines(path))


def read_json(path: Path) -> Any:
    """Returns the value in a JSON file. Raises InputError, which names the line, for bad JSON."""
    return parse_json(read_text(path), str(path))


def parse_json(text: str, source: str, first_line: int = 1, advice: str = "") -> Any:
    """Returns the value of the JSON `text`. Raises InputError for bad JSON; the message names `source` and the line,
    counted from `first_line`. For a syntax error, the message ends with `advice`."""
    try:
        return json.loads(text, object_pairs_hook=_object)
    except json.JSONDecodeError as error:
        where = f"{source}:{first_line + error.lineno - 1}"
        what = error.msg.removesuffix(" at").removesuffix(" starting")  # a position follows in Python's own text
        raise InputError(f"{where}: bad JSON: {what} in column {error.colno}{advice}") from None
    except KeyError:
        key, line = _given_twice(text)
        raise InputError(f"{source}:{first_line + line}: bad JSON: the key {key!r} is given twice") from None
    except RecursionError:
        raise InputError(f"{source}:{first_line}: bad JSON: nested too deeply") from None
    except ValueError:  # Python reads no whole number of more than 4,300 digits
        number = re.search(rf"[0-9]{{{sys.get_int_max_str_digits() + 1}}}", text)
        line = first_line + text.count("\n", 0, number.start() if number else 0)
        raise InputError(f"{source}:{line}: bad JSON: a number has too many digits") from None


def readable_folder(folder: Path, instead: dict[str, bytes] | None = None) -> Path:
    """Returns a folder with the files of `folder`, without byte-order marks. `instead`: {name: content} of files to
    replace or add. If anything changes, it is a temporary folder, with links to the unchanged files."""
    written = {}
    for path in folder.iterdir():
        if path.suffix in (".json", ".txt", ".jinja") and path.is_file():
            with path.open("rb") as file:
                if file.read(len(codecs.BOM_UTF8)) == codecs.BOM_UTF8:
                    written[path.name] = file.read()
    written |= instead or {}
    if not written:
        return folder
    _copies.append(tempfile.TemporaryDirectory(prefix="lowmem-"))
    copy = Path(_copies[-1].name)
    for path in folder.absolute().iterdir():
        if path.name not in written:
            (copy / path.name).symlink_to(path)
    for name, content in written.items():
        (copy / name).write_bytes(content)
    return copy


_copies: list[tempfile.TemporaryDirectory] = []  # each is removed when the process ends


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    values = dict(pairs)
    # Python's json would silently take the last of two equal keys.
    if len(values) < len(pairs):
        raise KeyError("given twice")
    return values


def _given_twice(text: str) -> tuple[str, int]:
    """Returns the first key that an object in this JSON has twice, and the number of line ends before it."""
    objects: list[set[str]] = []
    last = ""
    for token in re.finditer(r'"(?:[^"\\]|\\.)*"|[{}:]', text):
        match token[0]:
            case "{":
                objects.append(set())
            case "}":
                objects.pop()
            case ":" if (key := json.loads(last)) in objects[-1]:
                return key, text.count("\n", 0, token.start())
            case ":":
                objects[-1].add(key)
            case _:
                last = token[0]
    raise AssertionError("no key is given twice")


def parse_yaml(text: str, source: str) -> Any:
    """Returns the value of the YAML `text`: mappings, lists, None and texts. An unquoted `yes`, `010` or `1:30` stays
    text. Raises InputError, which names `source` and the line, for invalid YAML."""
    import yaml

    class Loader(yaml.SafeLoader):
        yaml_implicit_resolvers = {
            character: [(tag, pattern) for tag, pattern in resolvers if tag.rpartition(":")[2] in ("null", "merge")]
            for character, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
        }

        def compose_mapping_node(self, anchor: str | None) -> yaml.MappingNode:
            node, seen = super().compose_mapping_node(anchor), set()
            for key in (key for key, _ in node.value if isinstance(key, yaml.ScalarNode)):
                if key.value in seen:
                    raise yaml.MarkedYAMLError(
                        problem=f"the key {key.value!r} is given twice", problem_mark=key.start_mark
                    )
                seen.add(key.value)
            return node

    try:
        return yaml.load(text, Loader)
    except (yaml.YAMLError, RecursionError, ValueError, KeyError, AttributeError) as error:
        # A ReaderError, for a control character, has a position. Bad tags (`!!bool maybe`) raise the last three.
        mark, position = getattr(error, "problem_mark", None), getattr(error, "position", 0)
        line = mark.line if mark else text.count("\n", 0, position)
        problem = getattr(error, "problem", None) or getattr(error, "reason", "a value is not what its tag says")
        if isinstance(error, RecursionError):
            problem = "nested too deeply"
        elif "single document" in str(getattr(error, "context", "")):
            problem = "a second document begins here; keep one"
        raise InputError(f"{source}:{line + 1}: not valid YAML: {problem}") from None
