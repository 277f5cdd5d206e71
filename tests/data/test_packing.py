"""Examples of many lengths: padded, sorted or packed, a batch has the same examples and the same gradients."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch

from experiments.harness.trainings import make_step
from lowmem.core.loss import IGNORED
from lowmem.data.batches import PACKED, PADDED, SORTED, Batches, Rows
from reference import VOCABULARY, tiny_model
from tests.data.loading import load, write_rows

SEQ, END = 64, 0
LENGTHS = [1, 64, 2, 17, 17, 40, 8, 9, 33, 5, 1, 24]  # inputs, so one token less than the example has


def examples(lengths, seed: int = 0) -> Rows:
    """Rows of random tokens. All but the first half of each is trained, always with its end."""
    drawn = np.random.default_rng(seed)
    sizes = np.array(lengths) + 1
    trained = np.concatenate([np.arange(size) >= min(size // 2, size - 1) for size in sizes])
    tokens = drawn.integers(1, VOCABULARY, sizes.sum())
    documents = SimpleNamespace(tokens=tokens, lengths=sizes, trained=trained, packed=False)
    return Rows("examples", documents, SEQ)


def text(rows: int, seed: int = 0) -> Rows:
    """Packed documents of 7 to 29 tokens, each with its end-of-text."""
    drawn = np.random.default_rng(seed)
    lengths = drawn.integers(7, 30, rows * SEQ // 7)
    tokens = np.concatenate([[*drawn.integers(1, VOCABULARY, length - 1), END] for length in lengths])
    documents = SimpleNamespace(tokens=tokens[: rows * SEQ + 1], lengths=lengths, trained=None, packed=True)
    return Rows("text", documents, SEQ)


def contents(batch) -> list[tuple]:
    """Returns every document of a batch with a trained token: its inputs and labels up to the last of those."""
    found = []
    documents = torch.zeros_like(batch.labels) if batch.document_ids is None else batch.document_ids
    for ids, labels, numbers in zip(batch.input_ids, batch.labels, documents, strict=True):
        for number in numbers.unique():
            its_labels = labels[numbers == number]
            trained = (its_labels != IGNORED).nonzero()
            if len(trained):
                stop = int(trained[-1]) + 1
                found.append((tuple(ids[numbers == number][:stop].tolist()), tuple(its_labels[:stop].tolist())))
    return sorted(found)


@pytest.mark.parametrize("parts", [[examples(LENGTHS)], [examples(LENGTHS), text(3)]], ids=["examples", "and text"])
@pytest.mark.parametrize("document_mask", [False, True])
def test_the_three_have_the_same_examples_at_every_step(parts, document_mask):
    made = [Batches(parts, 5, 7, END, document_mask, pack=pack) for pack in (PADDED, SORTED, PACKED)]
    for step in range(7):
        padded, by_length, packed = (batches.batch(step) for batches in made)
        assert contents(padded) == contents(by_length)
        if document_mask or len(parts) == 1:  # without a mask a row of text is one document for `contents`, too
            assert contents(packed) == contents(padded)
        assert packed.trained_tokens == padded.trained_tokens


def test_packed_rows_are_filled_and_every_example_stays_by_itself():
    batch = Batches([examples(LENGTHS)], len(LENGTHS), 1, END, pack=PACKED).batch(0)
    assert batch.input_ids.shape == (4, SEQ)  # 221 positions: 64 + 40 + 24 + 33 + 17 + ... in the fewest rows
    assert sorted(batch.lengths.tolist(), reverse=True) == [64, 64, 64, 29]
    sizes = []
    for positions, numbers in zip(batch.position_ids, batch.document_ids, strict=True):
        assert all(torch.equal(positions[numbers == n], torch.arange((numbers == n).sum())) for n in numbers.unique())
        assert (numbers.diff() >= 0).all()
        sizes += [int((numbers == number).sum()) for number in numbers.unique()]
    padding = 4 * SEQ - sum(LENGTHS)
    assert sum(sizes) == sum(LENGTHS) + padding and len(sizes) == len(LENGTHS)


def test_a_batch_of_full_rows_of_text_is_the_same_whatever_pack_says():
    for document_mask in (False, True):
        made = [Batches([text(9)], 4, 3, END, document_mask, pack=pack) for pack in (PADDED, SORTED, PACKED)]
        for step in range(4):
            padded, *others = (batches.batch(step) for batches in made)
            for other in others:
                assert other.lengths is None
                for name in ("input_ids", "labels", "position_ids", "document_ids"):
                    mine, theirs = getattr(padded, name), getattr(other, name)
                    assert mine is theirs is None or torch.equal(mine, theirs)


@pytest.mark.quick(8)
@pytest.mark.parametrize("pack", [PADDED, SORTED, PACKED])
@pytest.mark.parametrize("family", ["gpt2", "llama"])
@pytest.mark.parametrize("lengths", [LENGTHS, [64] * 4, [1, 1, 1], [20]], ids=["many", "full", "one token", "one row"])
def test_loss_and_gradients_are_those_of_each_example_by_itself(family, lengths, pack):
    """Compares with plain autograd in fp32, one example at a time. Each gradient differs by at most 3e-7 of the norm of
    all (fp32 rounds to 6e-8). Allowed are 1e-5 of its own norm, and 1e-7 of the norm of all. The second is for
    gradients that are pure rounding: of the keys' biases, and of the queries if rows have one token."""
    model = tiny_model(family)
    batches = Batches([examples(lengths)], len(lengths), 1, END, pack=pack)
    alone = [Batches([examples(lengths)], 1, None, END, pack=PADDED).batch(row) for row in range(len(lengths))]
    tokens = sum(batch.trained_tokens for batch in alone)
    loss = 0.0
    for batch in alone:
        logits = model(input_ids=batch.input_ids, use_cache=False).logits
        part = torch.nn.functional.cross_entropy(logits[0], batch.labels[0], reduction="sum") / tokens
        part.backward()
        loss += part.item()
    truth = {name: parameter.grad.clone() for name, parameter in model.named_parameters()}
    model.zero_grad()

    step, store = make_step(model, clip_norm=1e9, micro_batch=2, segment_blocks=2)
    result = step(batches.batch(0), 0, 1e-3)
    assert result.loss == pytest.approx(loss, rel=1e-6)
    scale = torch.stack([gradient.norm() for gradient in truth.values()]).norm()
    assert result.grad_norm == pytest.approx(float(scale), rel=1e-5)
    for name, expected in truth.items():
        distance = (store.part_of(name).gradient_of(name) - expected).norm()
        assert distance <= 1e-5 * expected.norm() + 1e-7 * scale, (name, float(distance / expected.norm()))


def test_a_batch_like_the_others_has_as_many_tokens_as_they_have_on_average():
    rows = examples(np.random.default_rng(1).integers(1, SEQ + 1, 2000))
    batches = Batches([rows], 16, 0, END)
    lengths = batches.typical_lengths()
    assert lengths == sorted(lengths, reverse=True) and len(lengths) == 16
    average = np.mean([int(batches.batch(step).lengths.sum()) for step in range(125)])
    assert sum(lengths) == pytest.approx(average, rel=0.02)
    packed = Batches([rows], 16, 0, END, pack=PACKED).typical_lengths()
    assert sum(packed) == sum(lengths) and SEQ >= packed[0] and len(packed) < 12
    assert packed == sorted(packed, reverse=True)
    mixed = Batches([rows, text(4000)], 16, 0, END).typical_lengths()
    assert sum(length == SEQ for length in mixed) == pytest.approx(16 * 2 / 3, abs=1)
    assert Batches([rows], 16, 0, END, pack=PADDED).typical_lengths() is None
    assert Batches([text(9)], 4, 0, END).typical_lengths() is None
    half = examples(np.sort(rows.sizes))  # by length, of which an epoch has every other row, not the first ones
    half = Batches([Rows("half", half.documents, SEQ, 0.5)], 16, 0, END).typical_lengths()
    assert sum(half) == pytest.approx(sum(lengths), rel=0.02)
    for pack in (SORTED, PACKED):  # a fixed batch of full rows
        mixture = Batches([text(400), examples([3])], 1, 0, END, fixed=True, pack=pack)
        assert mixture.batch(0).lengths is None and mixture.typical_lengths() is None
    fixed = Batches([rows], 16, 0, END, fixed=True)
    assert fixed.typical_lengths() == sorted(fixed.batch(3).lengths.tolist(), reverse=True)


@pytest.mark.parametrize("pack", [PADDED, SORTED, PACKED])
def test_a_run_reads_its_examples_as_its_settings_say(tmp_path, pack):
    path = write_rows(tmp_path / "a.jsonl", [{"prompt": "q", "completion": "a" * n} for n in range(1, 40)])
    data = load(path, seq=SEQ, batch=8, pack=pack, eval_fraction=0.01)
    assert data.train.pack == pack and all(held_out.pack == pack for held_out in data.evaluations)
    assert (data.train.batch(0).lengths is None) == (pack == PADDED)
