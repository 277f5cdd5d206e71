"""Working weights in RAM: no bit of the result changes, and blocks whose weights are not there cannot compute."""

from dataclasses import replace

import pytest
import torch
from test_step import BATCH, PLAIN, make_batches, train

from lowmem.core.layout import Layout
from lowmem.core.offload import _SynchronousCopies
from lowmem.core.streamed_weights import SLOTS, StreamedWeights
from reference import tiny_model
from steps import make_step

STREAMED = {"states_on_gpu": 0, "weights_on_gpu": 1}


@pytest.mark.parametrize(
    ("family", "precision", "optimizer"),
    [("gpt2", "fp32", "adamw"), ("gpt2", "bf16", "adamw"), ("gpt2", "fp16", "adamw"), ("llama", "bf16", "adamw"),
     ("gpt2", "bf16", "adamw8bit"), ("mixtral", "bf16", "sgd")],
)  # fmt: skip
def test_streamed_weights_change_no_bit(family, precision, optimizer):
    """Deferred updates and, in two passes, updates in the backward; few blocks and all of them."""
    batches = make_batches(4)
    kind = {"family": family, "precision": precision, "optimizer": optimizer, "micro_batch": 1}
    plain = train(batches, **kind, **PLAIN)
    assert min(plain.norms) > 0.5, "clipping must bite"
    for case in (
        {"group": 1, "segment_blocks": 1},
        {"group": 2, "segment_blocks": 3},
        {"group": BATCH, "segment_blocks": 2, "fate": "dropped"},
        {"group": 2, "kept": 2, "segment_blocks": 2, "weights_on_gpu": 3, "states_on_gpu": 2},
        {"group": BATCH, "segment_blocks": 1, "weights_on_gpu": 4, "states_on_gpu": 4, "defer": False},
        {"group": 1, "segment_blocks": 4},
    ):
        outcome = train(batches, **kind, **STREAMED | case)
        assert outcome.differences(plain) == [], case


def test_updates_in_the_backward_are_seen_by_the_next_forward():
    """Without clipping; both slots hold weights of before the update then."""
    batches = make_batches(6)
    kind = {"clip_norm": None, "micro_batch": 1}
    plain = train(batches, **kind, **PLAIN)
    for segment_blocks in (1, 2, 4):
        outcome = train(batches, **kind, **STREAMED, group=BATCH, segment_blocks=segment_blocks)
        assert outcome.differences(plain) == []


def test_evaluations_between_steps_see_the_last_update_and_change_nothing():
    batches = make_batches(4)
    losses: dict[bool, list] = {True: [], False: []}

    def outcome(streamed: bool):
        note = lambda step, index: losses[streamed].append(step.evaluate(batches[-index]))  # noqa: E731
        return train(batches, before_step=note, **(STREAMED if streamed else {}))

    assert outcome(True).differences(outcome(False)) == [] and losses[True] == losses[False]


def test_the_model_itself_computes_with_streamed_weights():
    """As where a text is written, or pieces are compared with the whole."""
    step, _ = make_step(tiny_model("gpt2", 0.0, 0), **STREAMED)
    ids = make_batches(1)[0].input_ids
    with torch.no_grad():
        assert torch.equal(step._decoder.model(ids).logits, tiny_model("gpt2", 0.0, 0)(ids).logits)
        assert torch.equal(step._decoder.logits(ids), tiny_model("gpt2", 0.0, 0)(ids).logits)


def test_weights_that_are_not_there_are_no_numbers():
    step, store = make_step(tiny_model("gpt2", 0.0, 0), segment_blocks=2, **STREAMED)
    decoder = step._decoder
    matrices = [[p for p in block.parameters() if p.dim() > 1] for block in decoder.blocks]
    assert all(p.isnan().all() for several in matrices for p in several)
    step._weights.bring(range(1, 3), range(3, 4))
    assert all(p.isfinite().all() for several in matrices[1:3] for p in several)
    assert all(p.isnan().all() for several in (matrices[0], matrices[3]) for p in several)
    there = {p.untyped_storage().data_ptr() for p in matrices[1]}
    step._weights.bring(range(3, 4))
    assert all(p.isnan().all() for several in matrices[:3] for p in several)
    assert not there & {p.untyped_storage().data_ptr() for p in matrices[3]}, "the other slot, while those computed"
    assert all(p.isfinite().all() for p in decoder.units[0].parameters.values())


def test_a_segment_is_fetched_once_for_its_forward_and_once_for_its_backward(monkeypatch):
    """For all micro-batches of a group; what computes last in the forward is first in the backward, and stays."""
    fetched = []
    fetch = _SynchronousCopies.fetch_weights
    monkeypatch.setattr(
        _SynchronousCopies, "fetch_weights",
        lambda copies, slot, home, weights: (fetched.append(tuple(home)), fetch(copies, slot, home, weights)),
    )  # fmt: skip
    step, _ = make_step(tiny_model("gpt2", 0.1, 0), micro_batch=1, group=2, segment_blocks=1, **STREAMED)
    step(make_batches(1)[0], 0, 1e-3)
    blocks = [int(names[0].split()[1]) for names in fetched]
    up = [0, 1, 2, 3]
    # of 4 blocks two are still there when the backward begins, and when the next group does
    assert blocks == [*up, *[1, 0], *[2, 3], *[1, 0]]


def test_a_decoder_that_trains_anew_has_forgotten_the_weights_before():
    """As where a planner tries one layout after the other."""
    step, _ = make_step(tiny_model("gpt2", 0.0, 0), segment_blocks=4, **STREAMED)
    decoder, called = step._decoder, []
    decoder.before_blocks([1], called.append)
    step._weights.bring(range(4))
    decoder.model(make_batches(1)[0].input_ids)
    assert called == [1] and step._weights._bound[0] == range(4)


def test_what_cannot_be_is_refused():
    for wrong in ({"kept": 5}, {"kept": 99}, {"states_on_gpu": 3}):
        with pytest.raises(ValueError, match="weights"):
            Layout(1, weights_on_gpu=2, **wrong).segments(4)
    assert Layout(1, weights_on_gpu=0, states_on_gpu=1).weights_on_gpu == 0, "unit 0 stays in any case"


def test_segments_of_another_length_change_no_bit():
    """As where memory runs out."""
    batches = make_batches(4)

    def relayout(step, index):
        step.change_layout(replace(step.layout, segment_blocks=(1, 3, 2, 4)[index]))

    assert train(batches, before_step=relayout, **STREAMED).differences(train(batches, **PLAIN)) == []


def test_slots_are_made_anew_for_segments_of_another_length_alone():
    step, store = make_step(tiny_model("gpt2", 0.0, 0), **STREAMED)
    weights: StreamedWeights = step._weights
    part = next(part for part in store.parts if part.weights_streamed)
    assert [slot.numel() for slot in weights._slots] == [part.working.numel()] * SLOTS
    before = weights._slots
    weights.fit([range(1)])
    assert weights._slots is before
    weights.bring(range(1))
    for length in (2, 3, 1):
        weights.fit([range(length)])
        assert weights._slots[0].numel() == length * part.working.numel()
    assert all(p.isnan().all() for p in step._decoder.blocks[0].parameters() if p.dim() > 1)
