"""Weights, boundaries and gradients in RAM: few are on the device at once. That no bit changes: test_step.py."""

import math
from dataclasses import replace

import pytest
import torch
from test_step import BATCH, PLAIN, make_batches, train

from experiments.harness.trainings import make_step
from lowmem.core import parameters
from lowmem.core.layout import Layout
from lowmem.core.segment_windows import LEAVING, WEIGHT_SLOTS, BoundaryWindow, WeightWindow
from lowmem.core.transfers import Lane, Transfers
from reference import tiny_model
from runs import at_call, interrupt

WEIGHTS = {"states_on_gpu": 0, "weights_on_gpu": 1}
BOUNDARIES = {"boundaries_in_ram": True, "states_on_gpu": 0, "micro_batch": 1}
GRADIENTS = {"fate": "sent", "states_on_gpu": 0, "micro_batch": 1, "group": BATCH}


# --- weights ---


def test_evaluations_between_steps_see_the_last_update_and_change_nothing():
    batches = make_batches(4)
    losses: dict[bool, list] = {True: [], False: []}

    def outcome(streamed: bool):
        note = lambda step, index: losses[streamed].append(step.evaluate(batches[-index]))  # noqa: E731
        return train(batches, before_step=note, **(WEIGHTS if streamed else {}))

    assert outcome(True).differences(outcome(False)) == [] and losses[True] == losses[False]


def test_the_model_itself_computes_with_streamed_weights():
    """As where a text is written, or pieces are compared with the whole."""
    step, _ = make_step(tiny_model("gpt2", 0.0, 0), **WEIGHTS)
    ids = make_batches(1)[0].input_ids
    with torch.no_grad():
        assert torch.equal(step._decoder.model(ids).logits, tiny_model("gpt2", 0.0, 0)(ids).logits)
        assert torch.equal(step._decoder.logits(ids), tiny_model("gpt2", 0.0, 0)(ids).logits)


def test_weights_that_are_not_there_are_no_numbers():
    step, store = make_step(tiny_model("gpt2", 0.0, 0), segment_blocks=2, **WEIGHTS)
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
    copy = Transfers.copy

    def noting(transfers, lane, pairs, *after):
        if lane is Lane.WEIGHTS_IN:
            fetched.append(pairs[0][1].data_ptr())
        copy(transfers, lane, pairs, *after)

    monkeypatch.setattr(Transfers, "copy", noting)
    step, store = make_step(tiny_model("gpt2", 0.1, 0), micro_batch=1, group=2, segment_blocks=1, **WEIGHTS)
    step(make_batches(1)[0], 0, 1e-3)
    block_of = {part.working.data_ptr(): part.unit - 1 for part in store.parts if part.weights_streamed}
    blocks = [block_of[address] for address in fetched]
    up = [0, 1, 2, 3]
    # of 4 blocks two are still there when the backward begins, and when the next group does
    assert blocks == [*up, *[1, 0], *[2, 3], *[1, 0]]


def test_a_decoder_that_trains_anew_has_forgotten_the_weights_before():
    """As where a planner tries one layout after the other."""
    step, _ = make_step(tiny_model("gpt2", 0.0, 0), segment_blocks=4, **WEIGHTS)
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

    assert train(batches, before_step=relayout, **WEIGHTS).differences(train(batches, **PLAIN)) == []


def test_slots_are_made_anew_for_segments_of_another_length_alone():
    step, store = make_step(tiny_model("gpt2", 0.0, 0), **WEIGHTS)
    weights: WeightWindow = step._weights
    part = next(part for part in store.parts if part.weights_streamed)
    sizes = lambda: [slot.tensors["weights"].numel() for slot in weights._window.slots]  # noqa: E731
    assert sizes() == [part.working.numel()] * WEIGHT_SLOTS
    before = weights._window.slots
    weights.fit([range(1)])
    assert weights._window.slots is before
    weights.bring(range(1))
    for length in (2, 3, 1):
        weights.fit([range(length)])
        assert sizes() == [length * part.working.numel()] * WEIGHT_SLOTS
    assert all(p.isnan().all() for p in step._decoder.blocks[0].parameters() if p.dim() > 1)


# --- boundaries ---


def test_every_boundary_comes_back_as_it_left(monkeypatch):
    left, back = {}, []
    leave, bring = BoundaryWindow.leave, BoundaryWindow.bring

    def noting_leave(boundaries, segment, saved):
        left[id(saved)] = saved.boundary.clone()
        leave(boundaries, segment, saved)
        assert saved.in_ram and saved.boundary.untyped_storage().data_ptr() == boundaries._buffer.data_ptr()

    def noting_bring(boundaries, saved, index):
        bring(boundaries, saved, index)
        here = saved[index][-1]
        assert not here.in_ram and torch.equal(here.boundary, left.pop(id(here)))
        back.append(len(boundaries._coming))

    monkeypatch.setattr(BoundaryWindow, "leave", noting_leave)
    monkeypatch.setattr(BoundaryWindow, "bring", noting_bring)
    step, _ = make_step(tiny_model("gpt2", 0.1, 0), group=2, segment_blocks=1, **BOUNDARIES)
    step(make_batches(1)[0], 0, 1e-3)
    assert not left
    assert back == ([1] * 7 + [0]) * (BATCH // 2), "one is on its way, but for the last of a group"


def test_at_most_a_few_are_on_the_device():
    step, _ = make_step(tiny_model("gpt2", 0.1, 0), group=BATCH, segment_blocks=1, **BOUNDARIES)
    most = {"leaving": 0, "coming": 0}

    def watching(lane, pairs, *after):
        window = step.boundaries._window
        if lane is Lane.RAM_OUT:
            most["leaving"] = max(most["leaving"], len(window.sent))
        elif lane is Lane.BOUNDARIES_IN:
            assert not window.sent
            most["coming"] = max(most["coming"], len(step.boundaries._coming) + 1)
        copy(lane, pairs, *after)

    copy, step.transfers.copy = step.transfers.copy, watching
    step(make_batches(1)[0], 0, 1e-3)
    assert most == {"leaving": LEAVING, "coming": 1}


def test_the_buffer_is_made_once_and_holds_a_group():
    step, _ = make_step(tiny_model("gpt2", 0.1, 0), group=2, segment_blocks=2, **BOUNDARIES)
    batches = make_batches(2)
    step(batches[0], 0, 1e-3)
    buffer = step.boundaries._buffer
    width = step._decoder.model.config.n_embd
    elements = 2 * 2 * batches[0].input_ids.shape[1] * width  # micro-batches x segments x a boundary's
    assert elements <= buffer.numel() <= elements + 4 * 256 and step.boundaries.buffer_bytes == 4 * buffer.numel()
    step(batches[1], 1, 1e-3)
    assert step.boundaries._buffer is buffer


# --- gradients ---


def test_a_step_whose_gradients_are_not_finite_is_skipped_and_leaves_none_in_ram():
    batches = make_batches(2)
    step, store = make_step(tiny_model("gpt2", 0.0, 0), **GRADIENTS)
    before = dict(store.masters())
    update = step.operations.segment_backward
    step.operations.segment_backward = lambda *arguments: update(*arguments) * math.inf
    assert not step(batches[0], 0, 1e-3).updated
    assert not any(part.has_gradient for part in store.parts)
    step.operations.segment_backward = update
    step.flush()
    assert all(torch.equal(value, before[name]) for name, value in store.masters())
    fresh, _ = make_step(tiny_model("gpt2", 0.0, 0), **GRADIENTS)
    assert step(batches[1], 1, 1e-3) == fresh(batches[1], 1, 1e-3)


def test_on_the_device_are_gradients_of_two_segments():
    step, store = make_step(tiny_model("gpt2", 0.0, 0), segment_blocks=1, **GRADIENTS)
    most = []

    def watching(lane, pairs, *after):
        if lane is Lane.RAM_OUT:
            here = {part.unit for part in store.parts if part.gradient is not None} - {0}
            most.append((here, len(step._gradient_window._window.sent)))
            home = pairs[0][0].data_ptr()
            assert home in {part.gradient_home.data_ptr() for part in store.parts if part.unit in here}
        copy(lane, pairs, *after)

    copy, step.transfers.copy = step.transfers.copy, watching
    step(make_batches(1)[0], 0, 1e-3)
    assert all(len(units) == 1 for units, _ in most) and max(leaving for _, leaving in most) == 2
    assert {unit for units, _ in most for unit in units} == {part.unit for part in store.parts} - {0}
    assert {part.unit for part in store.parts if part.gradient is not None} == {0}
    in_ram = sum(part.gradient_home.nbytes for part in store.parts if part.gradient_home is not None)
    assert in_ram == sum(4 * part.working.numel() for part in store.parts if part.unit)


@pytest.mark.parametrize(
    ("case", "call", "in_flight"),
    [
        (BOUNDARIES | {"group": 2}, 3, lambda step: step.boundaries._coming),
        (GRADIENTS, BATCH + 3, lambda step: step._gradient_window._window.sent),
    ],
    ids=["boundaries", "gradients"],
)
def test_an_attempt_that_fails_leaves_nothing_in_flight(monkeypatch, case, call, in_flight):
    step, _ = make_step(tiny_model("gpt2", 0.0, 0), segment_blocks=1, **case)
    batch = make_batches(1)[0]
    at_call(monkeypatch, step.operations, "segment_backward", interrupt, call)
    with pytest.raises(KeyboardInterrupt):
        step(batch, 0, 1e-3)
    assert in_flight(step)
    interrupted = step(batch, 0, 1e-3)
    fresh, _ = make_step(tiny_model("gpt2", 0.0, 0), segment_blocks=1, **case)
    assert interrupted == fresh(batch, 0, 1e-3) and not in_flight(step)


def test_what_waits_in_ram_is_page_locked(monkeypatch):
    locked = []
    monkeypatch.setattr(parameters, "page_lock", lambda tensor: locked.append(tensor.data_ptr()) or True)
    _, store = make_step(tiny_model("gpt2", 0.0, 0), **GRADIENTS)
    store.device = torch.device("cuda")
    assert store.page_lock()
    assert {part.gradient_home.data_ptr() for part in store.parts if part.unit} <= set(locked)
