"""What was tokenized is found again by who goes on from a run, and only while it is what would be read again."""

import errno
import re
from contextlib import closing
from types import SimpleNamespace

import numpy as np
import pytest

from lowmem.data import documents, prepared, sources, tables
from lowmem.data.documents import TOKENIZING_BYTES
from lowmem.data.formats import DEFAULT_CHAT_TEMPLATE
from lowmem.data.records import Reading
from lowmem.data.stored import ArrayFolder
from lowmem.data.tokenizer import byte_level_tokenizer
from lowmem.errors import InputError, PlanError
from runs import failing, python
from tests.data.loading import CONVERSATION, load, write_rows, write_texts
from tests.data.test_long_text import small_windows


def prepare(folder, spec, tokenizer=None, **options):
    return load(spec, tokenizer, folder=folder, **{"pack": "sorted", "eval_fraction": 0.2} | options)


@pytest.fixture
def no_tokenizing(monkeypatch):
    """Makes tokenizing an error after its call."""
    return lambda: monkeypatch.setattr(documents, "Encoder", lambda *_: pytest.fail("it was tokenized again"))


def rows(path, count=40):
    return write_rows(path, [{"prompt": f"{n}?", "completion": f"the square of it is {n**2}"} for n in range(count)])


def book(path):
    path.write_text("".join(f"line {n}, of which there are many\n" for n in range(60)))
    return path


def texts(path):
    return write_texts(path, *(f"text {n} " * (n % 7 + 1) for n in range(40)))


def the_same(one, other) -> bool:
    pairs = zip((one.train, *one.evaluations), (other.train, *other.evaluations), strict=True)
    return (one.fingerprint, one.description) == (other.fingerprint, other.description) and all(
        ours.batch(step).labels.equal(theirs.batch(step).labels) and ours.where(step) == theirs.where(step)
        for ours, theirs in pairs
        for step in range(2)
    )


@pytest.mark.parametrize(("write", "name"), [(rows, "a.jsonl"), (texts, "a.jsonl"), (book, "a.txt")])
def test_who_goes_on_tokenizes_nothing_and_has_the_same_batches(tmp_path, no_tokenizing, write, name):
    spec = write(tmp_path / name)
    with closing(prepare(tmp_path / "out", spec)) as first:
        assert not (tmp_path / "out/data").exists()
        first.keep()
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["data"]
    assert the_same(first, prepare(None, spec))  # files without a name
    no_tokenizing()
    assert the_same(first, prepare(tmp_path / "out", spec))


def test_several_texts_come_back_and_with_other_weights_too(tmp_path, no_tokenizing):
    specs = [rows(tmp_path / "a.jsonl"), texts(tmp_path / "b.jsonl"), book(tmp_path / "c.txt")]
    held_out = {"eval_data": (str(texts(tmp_path / "d.jsonl")), str(specs[0]))}
    prepare(tmp_path / "out", specs).keep()
    prepare(tmp_path / "other", specs, **held_out).keep()
    fresh = prepare(None, specs), prepare(None, specs, **held_out), prepare(None, [specs[0], f"{specs[1]}=2", specs[2]])
    no_tokenizing()
    assert the_same(fresh[0], prepare(tmp_path / "out", specs))
    assert the_same(fresh[1], prepare(tmp_path / "other", specs, **held_out))
    assert the_same(fresh[2], prepare(tmp_path / "out", [specs[0], f"{specs[1]}=2", specs[2]]))


def test_what_follows_from_something_else_is_tokenized_again(tmp_path):
    spec = rows(tmp_path / "a.jsonl")
    prepare(tmp_path / "out", spec).keep()
    assert prepare(tmp_path / "out", spec, train_on="all").train.batch(0).labels[0, 0] >= 0
    assert prepare(tmp_path / "out", spec, seq=8).train.parts[0].seq == 8
    rows(spec, 50)
    changed = prepare(tmp_path / "out", spec)
    assert len(changed.train.parts[0].documents.lengths) + len(changed.evaluations[0].parts[0].documents.lengths) == 50
    changed.keep()
    kept = next((tmp_path / "out/data").glob("*.uint16"))
    kept.write_bytes(kept.read_bytes()[::-1])  # damaged
    assert the_same(prepare(None, spec), prepare(tmp_path / "out", spec))


def test_the_chat_template_that_the_data_were_written_with_comes_back(tmp_path, no_tokenizing):
    path = write_rows(tmp_path / "a.jsonl", [{"messages": CONVERSATION[:2]}] * 4)
    prepare(tmp_path / "out", path, seq=64).keep()
    no_tokenizing()
    tokenizer = byte_level_tokenizer()
    prepare(tmp_path / "out", path, tokenizer, seq=64)
    assert tokenizer.chat_template == DEFAULT_CHAT_TEMPLATE


def test_data_that_are_refused_leave_nothing(tmp_path, monkeypatch):
    (tmp_path / "a.jsonl").write_text('{"text": "fine"}\n{"text": 7}\n')
    with pytest.raises(InputError, match="a.jsonl:2"):
        prepare(tmp_path / "out", tmp_path / "a.jsonl")
    (tmp_path / "a.jsonl").write_text('{"text": "short"}\n')
    with pytest.raises(InputError, match="do not fill one row"):
        prepare(tmp_path / "out", tmp_path / "a.jsonl")
    assert list((tmp_path / "out").iterdir()) == []
    text = book(tmp_path / "a.txt")
    prepare(tmp_path / "out", text).close()
    assert list((tmp_path / "out").iterdir()) == []

    def refused(file, *arguments, **keywords):
        if str(file) == str(text):
            raise PermissionError(errno.EACCES, "Permission denied", str(file))
        return open(file, *arguments, **keywords)

    monkeypatch.setattr(prepared, "open", refused, raising=False)  # for root every file can be read
    with pytest.raises(InputError, match=r"a.txt: cannot be read \(Permission denied\)"):
        prepare(tmp_path / "out", text)


@pytest.mark.parametrize("line_end", ["\n", "\r\n", ""])
def test_a_long_text_is_read_in_pieces_and_is_one_document_all_the_same(tmp_path, monkeypatch, line_end):
    text = "".join(f"{'  ' * (n % 3)}line {n} é🙂{line_end}" + line_end * (n % 4 == 0) for n in range(200))
    for name in ("a.txt", "b.py"):
        (tmp_path / name).write_text(text + "<|endoftext|>", newline="")
    whole = prepare(None, tmp_path)
    monkeypatch.setattr(tables, "PIECE_CHARACTERS", 50)
    small_windows(monkeypatch, 64, 32)
    pieces = [record.columns["text"] for record in sources.open_source(str(tmp_path), Reading()).train]
    assert len(pieces) > 50 and max(map(len, pieces)) < 100 and "".join(pieces) == 2 * (text + "<|endoftext|>")
    assert the_same(whole, prepare(None, tmp_path))


@pytest.mark.exhaustive
def test_tokenizing_takes_no_more_ram_than_is_stated(tmp_path, gpt2_tokenizer):
    """12 MB in one text of each shape, tokenized in a separate process."""
    gpt2_tokenizer.save_pretrained(tmp_path / "model")
    library = "".join(record.columns["text"] for record in sources.open_source("python-stdlib", Reading()).train)
    random = np.random.default_rng(0)
    shapes = {
        "lines": library[:12_000_000],
        "one line": " ".join(library.split())[:4_000_000],
        "no spaces": "".join(map(chr, random.integers(0x4E00, 0x9FA5, 1_500_000))),
    }
    for name, text in shapes.items():
        (tmp_path / f"{name}.txt").write_text(text)
    program = """
import sys
from transformers import AutoTokenizer
from lowmem.data.dataset import load_data
from lowmem.limits import reset_ram_peak, ram_now_bytes, ram_peak_bytes
from lowmem.settings import Settings
tokenizer = AutoTokenizer.from_pretrained(sys.argv[1])
for path in sys.argv[2:]:
    before = ram_now_bytes()
    reset_ram_peak()
    data = load_data(Settings(data=path, seq=128), tokenizer, 50257)
    print(ram_peak_bytes() - before, len(data.train.parts[0].documents.tokens))
"""
    done = python("-c", program, tmp_path / "model", *(tmp_path / f"{name}.txt" for name in shapes))
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert len(lines) == len(shapes)
    for line, name in zip(lines, shapes, strict=True):
        grown, tokens = map(int, line.split())
        assert grown < TOKENIZING_BYTES and tokens > 1_000_000, name


def test_an_array_in_a_file_is_read_by_slices(tmp_path):
    array = ArrayFolder(tmp_path).write(iter([np.arange(5), np.arange(5, 9)]), np.uint16)
    assert array[:].tolist() == list(range(9)) and array[3:5].tolist() == [3, 4] and array[9:].tolist() == []
    part = array.part(2, 7)
    assert (len(part), part[1:3].tolist(), part[4:99].tolist()) == (5, [3, 4], [6])


@pytest.mark.quick(4)
@pytest.mark.parametrize(("option", "needed_mib"), [({}, 32), ({"eval_data": "b.txt"}, 16), ({"eval_fraction": 0}, 16)])
@pytest.mark.parametrize("free_after_mib", [0, 3, 6])
def test_a_disk_that_is_too_small_for_the_tokens_is_refused_before_it_is_full(
    tmp_path, monkeypatch, option, needed_mib, free_after_mib
):
    """8 MiB of text are 16 MiB of tokens, and as many again where a share is held out."""
    (tmp_path / "a.txt").write_text("0123456 8\n" * (8 * 2**20 // 10))
    (tmp_path / "b.txt").write_text("some more text " * 20)
    room = (free_after_mib + 2) * 2**20  # 2 stay free

    def usage(path):
        written = sum(file.stat().st_size for file in path.rglob("*") if file.is_file())
        return SimpleNamespace(free=room - written)

    monkeypatch.setattr("lowmem.data.stored.shutil.disk_usage", usage)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(PlanError, match="the tokens of the data need about") as error:
        prepare(tmp_path / "run", tmp_path / "a.txt", **option)
    said = float(re.search(r"about ([0-9.]+) MiB in all", str(error.value))[1])
    assert error.value.exit_code == 3 and not list((tmp_path / "run").rglob("*"))
    if free_after_mib:
        assert said == pytest.approx(needed_mib, rel=0.3)


def test_a_quota_is_a_disk_that_is_too_small(tmp_path, monkeypatch):
    monkeypatch.setattr("lowmem.data.stored.HashedFile.write", failing(errno.EDQUOT))
    with pytest.raises(PlanError, match="the tokens of the data need about"):
        prepare(tmp_path / "run", book(tmp_path / "a.txt"))
