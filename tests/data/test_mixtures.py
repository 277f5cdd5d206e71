"""Several texts in one run: how often each row comes, what a mixed batch is, what is held out of what."""

import os
import sysconfig
from collections import Counter
from pathlib import Path

import numpy as np
import pytest

from lowmem.data.records import Reading
from lowmem.data.sources import is_on_hub, open_source
from lowmem.errors import InputError
from tests.data import loading
from tests.data.loading import END, write_rows, write_texts


def load(*specs, **options):
    return loading.load(specs, **{"seq": 8, "batch": 3, "pack": "sorted"} | options)


def texts(path, letter, count):
    """Writes rows of eight tokens each: a00000.$"""
    return write_texts(path, *(f"{letter}{n:05d}." for n in range(count)), ".")


def answers(path, count):
    return write_rows(path, [{"prompt": "p", "completion": f"{n:03d}"} for n in range(count)])


def rows_of(batches, steps) -> list[tuple]:
    return [tuple(row.tolist()) for step in steps for row in batches.batch(step).input_ids]


def counted(batches, epoch: int) -> Counter:
    """Returns how often each text begins a row of that epoch."""
    first = epoch * batches.rows
    steps = range(first // batches.batch_rows, -(-(first + batches.rows) // batches.batch_rows))
    rows = rows_of(batches, steps)[first - steps[0] * batches.batch_rows :][: batches.rows]
    return Counter(bytes(row[:6]).decode() for row in rows)


@pytest.mark.parametrize("weight", [0.5, 0.3, 1, 1.7, 2])
def test_each_row_comes_as_often_as_its_weight_says(tmp_path, weight):
    specs = texts(tmp_path / "a.jsonl", "a", 10), f"{texts(tmp_path / 'b.jsonl', 'b', 20)}={weight}"
    train = load(*specs).train
    of_b = round(20 * weight)
    assert train.rows == 10 + of_b and train.steps_per_epoch == train.rows / 3
    found = Counter()
    for epoch in range(10):
        once = counted(train, epoch)
        assert [count for text, count in once.items() if text[0] == "a"] == [1] * 10
        assert sum(count for text, count in once.items() if text[0] == "b") == of_b
        # Where a pass through all rows ends within an epoch, a row of it may come again soon in the next pass.
        most = weight if weight in (1, 2) else np.ceil(weight) + 1
        assert max(count for text, count in once.items() if text[0] == "b") <= most
        found += once
    assert {count for text, count in found.items() if text[0] == "b"} == {round(10 * weight)}


def test_one_text_has_the_order_that_it_has_always_had(tmp_path):
    train = load(texts(tmp_path / "a.jsonl", "a", 12), seed=7).train
    for epoch in range(2):
        generator = np.random.RandomState(np.random.MT19937(np.random.SeedSequence([7, epoch])))
        expected = [f"a{n:05d}" for n in generator.permutation(12)]
        assert [bytes(row[:6]).decode() for row in rows_of(train, range(4 * epoch, 4 * epoch + 4))] == expected


def test_half_of_a_text_is_another_half_in_the_next_epoch_and_another_with_another_seed(tmp_path):
    spec = f"{texts(tmp_path / 'a.jsonl', 'a', 40)}=0.5"
    halves = [set(counted(load(spec).train, epoch)) for epoch in range(4)]
    assert halves[0].isdisjoint(halves[1]) and halves[2].isdisjoint(halves[3]) and halves[0] not in halves[2:]
    assert halves[0] != set(counted(load(spec, seed=5).train, 0))
    in_order = sorted(halves[0])
    assert in_order != [f"a{n:05d}" for n in range(20)]


@pytest.mark.parametrize("document_mask", [False, True])
def test_text_and_examples_share_batches(tmp_path, document_mask):
    specs = texts(tmp_path / "a.jsonl", "a", 5), answers(tmp_path / "b.jsonl", 5)
    train = load(*specs, document_mask=document_mask, batch=10).train
    batch, epoch = train.batch(0), train._order(0)
    assert batch.input_ids.shape == (10, 8) and sorted(epoch) == list(range(10))
    for index, row in enumerate(epoch):
        ids, labels = batch.input_ids[index].tolist(), batch.labels[index].tolist()
        if row < 5:
            assert bytes(ids[:7]) == b"a%05d." % row and ids[7] == END
            assert labels[:6] == ids[1:7] and labels[6] == END
            assert labels[7] == (-100 if document_mask else ids[0] if row < 4 else ord("."))
        else:
            assert ids == [*b"p%03d" % (row - 5), *[END] * 4] and labels == [*ids[1:4], END, -100, -100, -100, -100]
        if document_mask:
            assert batch.position_ids[index].tolist() == list(range(8)) and not batch.document_ids[index].any()
    assert document_mask or batch.position_ids is None


def test_a_mixture_says_where_its_texts_are_and_what_it_is_made_of(tmp_path):
    specs = texts(tmp_path / "a.jsonl", "a", 5), f"{answers(tmp_path / 'b.jsonl', 5)}=3"
    data = load(*specs, batch=20)
    assert set(data.train.where(0)) >= {f"{tmp_path}/b.jsonl:{n}" for n in range(1, 6)}
    last = data.description.splitlines()[-1]
    assert last == f"an epoch has 20 rows: 5 of {specs[0]} (25.0%), 15 of {specs[1][:-2]} (75.0%)"
    assert data.fingerprint != load(specs[0], specs[1][:-2], batch=20).fingerprint


def test_what_one_text_holds_out_another_does_not_train_on(tmp_path):
    for name in "ab":
        texts(tmp_path / f"{name}.jsonl", "a", 50 if name == "a" else 150)
    data = load(tmp_path / "a.jsonl", tmp_path / "b.jsonl", eval_fraction=0.1)
    trained, held_out = (
        {bytes(text) for part in parts for text in bytes(tokens_of(part)).split(b".") if len(text) == 6}
        for parts in (data.train.parts, [batches.parts[0] for batches in data.evaluations])
    )
    assert len(data.evaluations) == 2 and trained.isdisjoint(held_out) and len(trained | held_out) == 150
    assert "left out, because other --data hold them out" in data.description


def tokens_of(part) -> list[int]:
    return [token for token in part.documents.tokens[:].tolist() if token != END]


def test_each_held_out_text_is_read_by_itself(tmp_path):
    names = [texts(tmp_path / "c.jsonl", "c", 4), answers(tmp_path / "d.jsonl", 2)]
    data = load(texts(tmp_path / "a.jsonl", "a", 9), eval_data=names)
    assert "rows; evaluated on" in data.description
    assert [batches.parts[0].name for batches in data.evaluations] == [str(name) for name in names]
    assert [batches.rows for batches in data.evaluations] == [4, 2]
    assert bytes(data.evaluations[0].batch(0).input_ids[0].tolist()[:6]) == b"c00000"


def test_a_name_with_an_equals_sign_may_be_a_folder(tmp_path):
    (tmp_path / "year=2024").mkdir()
    texts(tmp_path / "year=2024" / "a.jsonl", "a", 3)
    assert open_source(str(tmp_path / "year=2024"), Reading()).weight == 1
    source = open_source(f"{tmp_path / 'year=2024'}=.25", Reading())
    assert (source.weight, source.spec) == (0.25, str(tmp_path / "year=2024"))
    assert open_source("python-stdlib=2", Reading()).weight == 2
    assert is_on_hub("org/name:config=2") and is_on_hub("wikitext=0.5") and not is_on_hub("python-stdlib=2")


@pytest.mark.parametrize(
    ("weight", "said"),
    [(weight, "a.jsonl={}: a weight must be more than 0 and at most 1000") for weight in ("0", "-1", "1001", "0.0")]
    + [(text, "'{}' is no weight for .*a.jsonl; write a number such as 2") for text in ("", "two", "1e-1", "1,5")],
)
def test_a_weight_that_is_none_is_refused(tmp_path, weight, said):
    with pytest.raises(InputError, match=said.format(weight)):
        load(f"{texts(tmp_path / 'a.jsonl', 'a', 3)}={weight}")


def test_what_else_is_refused_names_the_text(tmp_path):
    path, short = texts(tmp_path / "a.jsonl", "a", 3), tmp_path / "b.txt"
    short.write_text("short")
    with pytest.raises(InputError, match="b.txt: its 6 tokens do not fill one row"):
        load(path, short)
    with pytest.raises(InputError, match="a.jsonl: held-out texts have no weight; each is read once"):
        load(path, eval_data=[f"{path}=2"])
    for nowhere in ("nowhere.txt=x", "=2"):
        with pytest.raises(InputError, match=f"{nowhere}: no such file"):
            load(path, nowhere)


def test_the_held_out_end_of_a_long_document_is_not_trained_on_when_another_text_holds_out_a_short_one(tmp_path):
    """The first text loses a document that the second holds out, after it has been cut itself."""
    long = "".join(f"{number:05d} " for number in range(2000))
    short = [f"short {number}" for number in range(300)]
    others = write_texts(tmp_path / "short.jsonl", *short)
    held_out = load(others, eval_fraction=0.02).evaluations[0].parts[0].documents
    first = bytes(held_out.tokens[: held_out.lengths[0] - 1].astype(np.uint8)).decode()
    data = load(write_texts(tmp_path / "long.jsonl", long, first), others, eval_fraction=0.02)
    trained, evaluated = (batches.parts[0].documents for batches in (data.train, data.evaluations[0]))
    for documents in (trained, evaluated):
        assert documents.lengths.sum() == len(documents.tokens)
    (tail,) = evaluated.lengths[:1]
    assert trained.lengths.tolist() == [len(long) + 1 - tail] and 100 < tail < 400
    assert bytes(trained.tokens[:].astype(np.uint8)).decode() == long[: len(trained.tokens)]


def test_one_book_given_twice_is_refused_for_what_it_is(tmp_path):
    (tmp_path / "book.txt").write_text("".join(f"{number:05d} " for number in range(2000)))
    with pytest.raises(InputError, match=r"book\.txt: all of its documents are held out of other --data; give each"):
        load(tmp_path / "book.txt", tmp_path / "book.txt", eval_fraction=0.02)


def test_a_file_is_held_out_by_its_content_however_it_was_found(tmp_path):
    """In a folder, by a pattern, or among others."""
    for number in range(60):
        (tmp_path / f"{number:02d}.txt").write_text(f"file {number:04d} and what is in it")
    data = load(tmp_path, tmp_path / "*.txt", tmp_path / "0*.txt", eval_fraction=0.1)
    trained = {int(key) for part in data.train.parts for key in part.documents.keys}
    held_out = {int(key) for batches in data.evaluations for key in batches.parts[0].documents.keys}
    assert len(held_out) >= 6 and trained.isdisjoint(held_out) and len(trained | held_out) == 60


def test_a_file_name_that_is_no_text_is_a_sentence(tmp_path):
    (tmp_path / "folder").mkdir()
    with open(os.fsencode(tmp_path / "folder") + b"/caf\xe9.txt", "w") as file:
        file.write("text")
    with pytest.raises(InputError, match="caf\ufffd.txt: this file's name is not UTF-8; rename it"):
        load(tmp_path / "folder")


def test_a_text_given_twice_is_evaluated_once(tmp_path):
    a, b = texts(tmp_path / "a.jsonl", "a", 50), texts(tmp_path / "b.jsonl", "b", 50)
    data = load(a, a, b, eval_fraction=0.1)
    assert [batches.parts[0].name for batches in data.evaluations] == [str(a), str(b)]
    assert [part.name for part in data.train.parts] == [str(a), str(a), str(b)]
    with pytest.raises(InputError, match=r"--eval-data .*a\.jsonl is given twice"):
        load(b, eval_data=(a, a))


def test_a_text_of_the_library_is_held_out_wherever_it_is_found(tmp_path):
    for name in ("abc.py", "argparse.py", "ast.py", "bdb.py", "calendar.py", "cmd.py", "csv.py", "dis.py"):
        (tmp_path / name).write_bytes((Path(sysconfig.get_path("stdlib")) / name).read_bytes())
    data = load("python-stdlib", tmp_path, eval_fraction=0.3)
    trained = {int(key) for part in data.train.parts for key in part.documents.keys}
    held_out = {int(key) for batches in data.evaluations for key in batches.parts[0].documents.keys}
    assert trained.isdisjoint(held_out) and len(held_out) > 30


def test_training_on_what_is_evaluated_is_said(tmp_path):
    a, b = texts(tmp_path / "a.jsonl", "a", 50), texts(tmp_path / "b.jsonl", "a", 30)
    said = load(a, eval_data=(b,)).description
    assert "31 of its documents are trained on although --eval-data has them, too" in said
