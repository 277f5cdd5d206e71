"""Rows that are not full: how a batch of them is cut into micro-batches, and that no layout changes a bit of it."""

import itertools
import random

import pytest
import torch

from lowmem.core.batch import WIDTH_MULTIPLE, Batch, micro_batch_shapes
from lowmem.core.layout import Layout
from reference import make_batch
from tests.core.test_step import PLAIN, train

SEQ = 64


def ragged_batch(seed: int, lengths: list[int], seq: int = SEQ) -> Batch:
    """Random tokens, padded with token 0 behind `lengths` positions; of the real positions most have a label."""
    batch = make_batch(seed, len(lengths), seq)
    real = torch.arange(seq) < torch.tensor(lengths)[:, None]
    labels = batch.labels.masked_fill(~real, -100)
    labels[:, 0] = batch.labels[:, 0]
    labels[0, 1:3] = -100
    return Batch(batch.input_ids * real, labels, lengths=torch.tensor(lengths))


def taken(shapes: list[tuple[int, int]], least: int) -> float:
    return sum(max(rows * width, least) + least / 16 for rows, width in shapes)


def every_cut(count: int):
    """All ways to cut `count` rows, in their order, into micro-batches: the rows of each."""
    for cuts in itertools.product([False, True], repeat=count - 1):
        ends = [index + 1 for index, cut in enumerate(cuts) if cut] + [count]
        yield [end - start for start, end in zip([0, *ends], ends, strict=False)]


@pytest.mark.parametrize("least", [1, 64, 300])
@pytest.mark.parametrize("size", [1, 2, 5])
def test_no_other_cut_takes_less(size, least):
    drawn = random.Random(size)
    for _ in range(40):
        lengths = sorted((drawn.randint(1, drawn.choice([5, 40, SEQ])) for _ in range(9)), reverse=True)
        best = float("inf")
        for rows in every_cut(len(lengths)):
            firsts = [sum(rows[:index]) for index in range(len(rows))]
            widths = [min(-(-lengths[first] // WIDTH_MULTIPLE) * WIDTH_MULTIPLE, SEQ) for first in firsts]
            shapes = list(zip(rows, widths, strict=True))
            if all(count * width <= size * SEQ for count, width in shapes):
                best = min(best, taken(shapes, least))
        found = micro_batch_shapes(lengths, SEQ, size, least)
        assert taken(found, least) == best and sum(rows for rows, _ in found) == len(lengths)
        assert all(rows * width <= size * SEQ for rows, width in found)


@pytest.mark.parametrize(
    ("lengths", "size", "least", "expected"),
    [
        ([64] * 6, 2, 1, [(2, 64)] * 3),  # full rows: as if no lengths were known
        ([64], 4, 64, [(1, 64)]),
        ([1] * 100, 1, 64, [(8, 8)] * 12 + [(4, 8)]),
        ([60, 60, 8, 8], 2, 16, [(2, 64), (2, 8)]),
        ([60, 60, 8, 8], 4, 256, [(4, 64)]),  # what is left of the first costs nothing
        ([20, 20, 20], 1, 64, [(2, 24), (1, 24)]),
        ([63, 62, 61], 1, 64, [(1, 64)] * 3),
        ([24, 8], 1, 1, [(1, 24), (1, 8)]),
    ],
)
def test_what_is_cut(lengths, size, least, expected):
    shapes = micro_batch_shapes(lengths, SEQ, size, least)
    assert sorted(shapes, reverse=True) == sorted(expected, reverse=True)


def test_a_width_is_no_more_than_the_rows_have():
    assert micro_batch_shapes([9, 9], 9, 2) == [(2, 9)]
    assert micro_batch_shapes([3], 3, 1) == [(1, 3)]


@pytest.mark.parametrize("size", [1, 2, 4])
def test_every_real_position_is_in_one_micro_batch_and_none_is_larger_than_planned(size):
    lengths = [3, 64, 17, 17, 1, 40, 8, 9]
    batch = ragged_batch(0, lengths)
    rows = torch.arange(8 * SEQ).view(8, SEQ)
    batch = Batch(batch.input_ids, batch.labels, rows, rows.int(), batch.lengths)
    parts = batch.micro_batches(size)
    assert all(part.labels.numel() <= size * SEQ and part.lengths is None for part in parts)
    widths = [part.labels.shape[1] for part in parts]
    assert widths == sorted(widths, reverse=True)
    where = torch.cat([part.position_ids.flatten() for part in parts])
    assert len(set(where.tolist())) == len(where)
    assert {row * SEQ + position for row, length in enumerate(lengths) for position in range(length)} <= set(
        where.tolist()
    )
    for name in ("input_ids", "labels", "document_ids"):
        flat = torch.cat([getattr(part, name).flatten() for part in parts])
        assert torch.equal(flat, getattr(batch, name).flatten()[where])
    assert sum(int((part.labels != -100).sum()) for part in parts) == batch.trained_tokens


@pytest.mark.parametrize(("positions", "layout", "expected"), [
    ([128, 128, 128, 128, 128], Layout(2, group=2), [2, 2, 1]), ([128, 120, 64, 64, 8, 8], Layout(2, group=2), [2, 4]),
    ([128, 120, 64, 64, 8, 8], Layout(2, group=1), [1, 1, 2, 2]), ([128, 120, 64, 64, 8, 8], Layout(2, group=8), [6]),
    ([64], Layout(1), [1]),
])  # fmt: skip
def test_a_group_takes_what_fits_into_as_many_full_micro_batches(positions, layout, expected):
    groups = layout.groups(positions, SEQ)
    assert [group.stop - group.start for group in groups] == expected
    assert [index for group in groups for index in range(len(positions))[group]] == list(range(len(positions)))


@pytest.mark.quick(1)
@pytest.mark.parametrize(("family", "precision"), [("gpt2", "fp32"), ("gpt2", "fp16"), ("llama", "bf16")])
def test_placement_and_order_change_no_bit_of_ragged_batches(family, precision):
    """Dropout is on: a mask belongs to its micro-batch, whatever the order in which these run."""
    lengths = [[3, 64, 17, 40], [64, 64, 2, 1], [9, 9, 9, 9], [1, 1, 1, 1], [33, 50, 60, 20]]
    batches = [ragged_batch(seed, of_batch) for seed, of_batch in enumerate(lengths)]
    kind = {"family": family, "precision": precision, "micro_batch": 1}
    plain = train(batches, **kind, **PLAIN)
    assert min(plain.norms) > 0.5, "clipping must bite"
    for case in (
        {"group": 4, "segment_blocks": 3, "states_on_gpu": 0},
        {"group": 2, "kept": 99, "states_on_gpu": 2},
        {"group": 1, "kept": 5},
        {"group": 4, "fate": "dropped", "segment_blocks": 2},
    ):
        assert train(batches, **kind, **case).differences(plain) == [], case
    unclipped = kind | {"clip_norm": None}
    plain = train(batches, **unclipped, **PLAIN)
    for fate in ("held",) if precision == "fp16" else ("held", "applied"):
        assert train(batches, **unclipped, group=4, fate=fate).differences(plain) == [], fate
