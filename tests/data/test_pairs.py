"""Rows of a source and a target, with padding that is masked by position."""

import json

import pytest
import torch

from lowmem.data.pairs import PairBatches
from lowmem.errors import InputError
from tests.data import loading

SOURCE, TARGET, START, END = 12, 6, 7, 256


@pytest.fixture
def load(tmp_path):
    """Loads some content for sources of 12 and targets of 6 bytes."""

    def loaded(content: str, name: str, **more):
        path = tmp_path / name
        path.write_text(content)
        options = {"seq": SOURCE + TARGET, "target_tokens": TARGET, "batch": 4, "eval_fraction": 0.01} | more
        data = loading.load(path, decoder_start=START, **options)
        assert isinstance(data.train, PairBatches)
        return data

    return loaded


def pairs_of(batch) -> set[tuple[bytes, bytes]]:
    """Returns each row's source and its target by its labels, without padding."""
    found = set()
    width = batch.source_mask.shape[1]
    for ids, mask, labels in zip(batch.input_ids, batch.source_mask, batch.labels, strict=True):
        real = labels != -100
        count = int(real.nonzero().max()) + 1
        given = ids[width : width + count]
        assert given[0] == START and torch.equal(given[1:][real[: count - 1]], labels[: count - 1][real[: count - 1]])
        found.add((bytes(ids[:width][mask].clamp(max=255).tolist()), bytes(labels[:count].clamp(0, 255).tolist())))
    return found


def test_text_is_cut_into_sources_and_what_follows_them(load):
    text = "".join(f"line {number:04d}\n" for number in range(100))
    train = load(text, "a.txt").train
    batch = train.batch(0)
    assert batch.input_ids.shape == (4, SOURCE + TARGET) and batch.labels.shape == (4, TARGET)
    assert batch.source_mask.all() and batch.lengths is None and batch.position_ids is None
    for source, target in pairs_of(batch):
        assert len(source) == SOURCE and len(target) == TARGET
        assert (source + target).decode() in text
    _, trained = train.row(train.parts[0], 0)
    assert trained.tolist() == [False] * SOURCE + [True] * TARGET
    assert train.typical_lengths() is None
    assert "a source of at most 12 tokens and a target of at most 6" in train.remarks[0]


def test_an_example_is_its_prompt_with_an_end_and_its_completion_with_an_end(load):
    rows = [("ab", "xyz"), ("abcdefgh", "x"), ("a" * 16, "yyyyy"), ("a" * 40, "v"), ("b", "z" * 9), ("", "d")]
    content = "".join(json.dumps({"prompt": prompt, "completion": answer}) + "\n" for prompt, answer in rows)
    data = load(content, "a.jsonl")
    batches = [data.train.batch(step) for step in range(6)] + [
        held_out.batch(step) for held_out in data.evaluations for step in range(len(held_out))
    ]
    end = b"\xff"
    assert set().union(*map(pairs_of, batches)) == {
        (b"ab" + end, b"xyz" + end),
        (b"abcdefgh" + end, b"x" + end),
        (b"a" * 11 + end, b"yyyyy" + end),  # a source is truncated, its target is whole
        (b"a" * 11 + end, b"v" + end),  # also if only the prompt is longer than a row
        (b"b" + end, b"z" * 6),  # a target is truncated
        (end, b"d" + end),
    }
    assert "3 cut off at 12 tokens of source or 6 of target" in data.description and "dropped" not in data.description
    for batch in batches:
        assert batch.source_mask.shape[1] in (8, SOURCE) and batch.labels.shape[1] == TARGET
        assert not batch.source_mask.all(), "rows of several lengths"


def test_turns_between_answers_are_in_the_target_and_not_trained(load, tmp_path):
    turns = [("user", "q"), ("assistant", "ab"), ("user", "r"), ("assistant", "c")]
    messages = [{"role": role, "content": content} for role, content in turns]
    (tmp_path / "bare.jinja").write_text("{% for m in messages %}{{ m['content'] }}{% endfor %}")
    content = "".join(json.dumps({"messages": messages, "id": n}) + "\n" for n in range(8))
    batch = load(content, "chat.jsonl", chat_template=str(tmp_path / "bare.jinja")).train.batch(0)
    assert batch.input_ids[0].tolist() == [*b"q", END, *6 * [END], START, *b"abrc", END]
    assert batch.source_mask[0].tolist() == [True, True, *6 * [False]]
    assert [token for token in batch.labels[0].tolist() if token != -100] == [*b"abc", END]


def test_to_train_on_everything_is_refused_since_the_source_would_be_empty(load):
    with pytest.raises(InputError, match="--train-on all: an encoder-decoder trains on its targets"):
        load(json.dumps({"prompt": "abc", "completion": "xyz"}) + "\n", "a.jsonl", train_on="all")
