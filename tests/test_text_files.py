"""Text that other people wrote: read over its quirks, or refused by name."""

import gzip

import pytest

from lowmem.errors import InputError
from lowmem.text_files import parse_json, parse_yaml, read_text, readable_folder, text_lines


def test_byte_order_marks_are_skipped_at_the_start_and_where_files_were_joined(tmp_path):
    joined = tmp_path / "ab.jsonl"
    joined.write_bytes(b"\xef\xbb\xbf" * 2 + b'{"text": "a"}\n' + b"\xef\xbb\xbf" + '{"text": "b\ufeff"}\n'.encode())
    assert list(text_lines(joined)) == ['{"text": "a"}\n', '{"text": "b\ufeff"}\n']


@pytest.mark.parametrize("most", [1, 2, 3, 5, 7, 100])
def test_a_long_line_comes_in_parts_and_says_where_it_is_not_utf_8(tmp_path, most):
    text = "\ufeffa é🙂中\n" * 3 + "\ufeff\r\n" + "\ufeff\ufeffé🙂"
    (path := tmp_path / "a.txt").write_bytes(text.encode())
    parts = list(text_lines(path, most))
    assert "".join(parts) == text.replace("\ufeff", "") and max(len(part.encode()) for part in parts) <= most + 3
    path.write_bytes(b"a\n" + "é🙂".encode() + b"ab\xff\n")
    with pytest.raises(InputError, match=r":2: not UTF-8 \(byte 0xff in column 9\)"):
        list(text_lines(path, most))
    path.write_bytes(b"a\n" + "é".encode() + "🙂".encode()[:3])  # cut off within a character
    with pytest.raises(InputError, match=r":2: not UTF-8 \(byte 0xf0 in column 3\)"):
        list(text_lines(path, most))


@pytest.mark.parametrize(("content", "said"), [
    (b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 9\n", "Git LFS pointer"),
    (gzip.compress(b"text", mtime=0), "compressed with gzip"), (b"PK\x03\x04rest", "a zip archive"),
    (rb"{\rtf1\ansi text}", "an RTF document"), (b"\x7fELF\x02\x01\x01text", "a program"),
    (b"a.txt".ljust(257, b"\0") + b"ustar  \0", "a tar archive"),
    ("text".encode("utf-16-le"), "has zero bytes in its first four: it is binary, or UTF-16"),
    (b"good\nbad \xff\n", ":2: not UTF-8 (byte 0xff in column 5)"),
])  # fmt: skip
def test_what_is_no_text_is_named(tmp_path, content, said):
    (path := tmp_path / "file.txt").write_bytes(content)
    with pytest.raises(InputError) as refused:
        read_text(path)
    assert said in str(refused.value) and str(path) in str(refused.value)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ('{"a": 1,\n"b": {"c": "\\"c:{",\n"c": 2}}', "f:5: bad JSON: the key 'c' is given twice"),
        ('[{"a": 1}, {"a": 2, "\\u0061": 3}]', "f:3: bad JSON: the key 'a' is given twice"),
        ("[" * 100_000, "f:3: bad JSON: nested too deeply"),
        ("[\n" + "9" * 5_000, "f:4: bad JSON: a number has too many digits"),
        ('{\n"a": }', "f:4: bad JSON: Expecting value in column 6, mend it"),
        ('{"a": "b', "f:3: bad JSON: Unterminated string in column 7, mend it"),
        ('{"a": "\t"}', "f:3: bad JSON: Invalid control character in column 8, mend it"),
    ],
)
def test_json_that_python_cannot_hold_is_refused_with_its_line(text, said):
    with pytest.raises(InputError) as refused:
        parse_json(text, "f", 3, ", mend it")
    assert str(refused.value) == said


WRONG_TAGS = ("int five", "bool maybe", "timestamp now")


def test_plain_values_of_yaml_stay_as_they_were_typed():
    text = "a: &a {x: yes, y: 010}\nb: &b {<<: *a, y: 1:30}\nc: *b\nd: [~, null, 'null', 2026-01-01, .inf, ]"
    a, b = {"x": "yes", "y": "010"}, {"x": "yes", "y": "1:30"}
    assert parse_yaml(text, "f") == {"a": a, "b": b, "c": b, "d": [None, None, "null", "2026-01-01", ".inf"]}


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("a: 1\nb: {c: 1,\n  c: 2}", "f:3: not valid YAML: the key 'c' is given twice"),
        ("a: 1\n---\na: 2", "f:2: not valid YAML: a second document begins here; keep one"),
        ("[" * 1_000, "f:1: not valid YAML: nested too deeply"),
        *((f"a: !!{value}", "f:1: not valid YAML: a value is not what its tag says") for value in WRONG_TAGS),
        ("a: \x07", "f:1: not valid YAML: special characters are not allowed"),
        ("a: b: c", "f:1: not valid YAML: mapping values are not allowed here"),
    ],
)
def test_bad_yaml_is_refused_with_its_line(text, said):
    with pytest.raises(InputError) as refused:
        parse_yaml(text, "f")
    assert str(refused.value) == said


def test_a_folder_for_libraries_that_know_no_byte_order_marks(tmp_path):
    (tmp_path / "plain.json").write_text("{}")
    assert readable_folder(tmp_path) == tmp_path
    (tmp_path / "marked.json").write_text("[]", encoding="utf-8-sig")
    (tmp_path / "templates").mkdir()
    readable = readable_folder(tmp_path)
    assert {path.name: path.is_symlink() for path in readable.iterdir()} == {
        "plain.json": True, "templates": True, "marked.json": False
    }  # fmt: skip
    assert (readable / "marked.json").read_bytes() == b"[]" and (tmp_path / "marked.json").read_bytes()[:1] == b"\xef"
