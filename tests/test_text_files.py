"""Text that other people wrote: read over its quirks, or refused by name."""

import gzip

import pytest

from lowmem.errors import InputError
from lowmem.text_files import parse_json, read_json, read_text, text_lines


def test_byte_order_marks_are_skipped_at_the_start_and_where_files_were_joined(tmp_path):
    joined = tmp_path / "ab.jsonl"
    joined.write_bytes(b"\xef\xbb\xbf" + b'{"text": "a"}\n' + b"\xef\xbb\xbf" + '{"text": "b\ufeff"}\n'.encode())
    assert list(text_lines(joined)) == ['{"text": "a"}\n', '{"text": "b\ufeff"}\n']


@pytest.mark.parametrize("most", [1, 2, 3, 5, 7, 100])
def test_a_long_line_comes_in_parts_and_says_where_it_is_not_utf_8(tmp_path, most):
    text = "\ufeffa é🙂中\n" * 3 + "\ufeff\r\n" + "\ufeffé🙂"
    (path := tmp_path / "a.txt").write_bytes(text.encode())
    parts = list(text_lines(path, most))
    assert "".join(parts) == text.replace("\ufeff", "") and max(len(part.encode()) for part in parts) <= most + 3
    path.write_bytes(b"a\n" + "é🙂".encode() + b"ab\xff\n")
    with pytest.raises(InputError, match=r":2: not UTF-8 \(byte 0xff in column 9\)"):
        list(text_lines(path, most))
    path.write_bytes(b"a\n" + "é".encode() + "🙂".encode()[:3])  # cut off within a character
    with pytest.raises(InputError, match=r":2: not UTF-8 \(byte 0xf0 in column 3\)"):
        list(text_lines(path, most))


def test_json_after_a_byte_order_mark(tmp_path):
    config = tmp_path / "config.json"
    config.write_text('{"model_type": "gpt2"}', encoding="utf-8-sig")
    assert read_json(config) == {"model_type": "gpt2"}


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 9\n", "Git LFS pointer"),
        (gzip.compress(b"text"), "compressed with gzip"),
        (b"PK\x03\x04rest", "a zip archive"),
        (b"good\nbad \xff\n", ":2: not UTF-8 (byte 0xff in column 5)"),
    ],
)
def test_what_is_no_text_is_named(tmp_path, content, said):
    (path := tmp_path / "file.txt").write_bytes(content)
    with pytest.raises(InputError) as refused:
        read_text(path)
    assert said in str(refused.value) and str(path) in str(refused.value)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ('{"a": 1, "b": {"c": 1, "c": 2}}', "f:3: bad JSON: the key 'c' is given twice"),
        ("[" * 100_000, "f:3: bad JSON: nested too deeply"),
        ("9" * 5_000, "f:3: bad JSON: a number has too many digits"),
        ('{\n"a": }', "f:4: bad JSON: Expecting value in column 6, mend it"),
    ],
)
def test_json_that_python_cannot_hold_is_refused_with_its_line(text, said):
    with pytest.raises(InputError) as refused:
        parse_json(text, "f", 3, ", mend it")
    assert str(refused.value) == said
