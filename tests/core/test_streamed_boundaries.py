"""Boundaries that wait in RAM: no bit of the result changes, and of the device they take a few at a time."""

import pytest
import torch
from test_step import BATCH, PLAIN, make_batches, train

from lowmem.core.offload import _SynchronousCopies
from lowmem.core.streamed_boundaries import LEAVING, StreamedBoundaries
from reference import tiny_model
from steps import make_step

IN_RAM = {"boundaries_in_ram": True, "states_on_gpu": 0, "micro_batch": 1}


@pytest.mark.parametrize(
    ("family", "precision"), [("gpt2", "fp32"), ("gpt2", "bf16"), ("gpt2", "fp16"), ("llama", "bf16")]
)
def test_boundaries_in_ram_change_no_bit(family, precision):
    """Clipped in two passes and with held gradients, unclipped with updates in the backward, with weights in RAM, too.
    What every boundary was is checked where it comes back."""
    batches = make_batches(4)
    for clip_norm in (0.5, None):
        kind = {"family": family, "precision": precision, "clip_norm": clip_norm, "micro_batch": 1}
        plain = train(batches, **kind, **PLAIN)
        for case in (
            {"group": 1},
            {"group": 2, "segment_blocks": 3},
            {"group": BATCH, "segment_blocks": 2, "fate": "held" if clip_norm is None else "dropped"},
            {"group": BATCH, "kept": 2, "segment_blocks": 2, "weights_on_gpu": 1},
            {"group": 2, "kept": 5},
            {"group": 1, "segment_blocks": 4},
        ):
            assert train(batches, **kind | IN_RAM | case).differences(plain) == [], case


def test_every_boundary_comes_back_as_it_left(monkeypatch):
    left, back = {}, []
    leave, bring = StreamedBoundaries.leave, StreamedBoundaries.bring

    def noting_leave(boundaries, segment, saved):
        left[id(saved)] = saved.boundary.clone()
        leave(boundaries, segment, saved)
        assert saved.in_ram and saved.boundary.untyped_storage().data_ptr() == boundaries._buffer.data_ptr()

    def noting_bring(boundaries, saved, following):
        bring(boundaries, saved, following)
        assert not saved.in_ram and torch.equal(saved.boundary, left.pop(id(saved)))
        back.append(len(boundaries._coming))

    monkeypatch.setattr(StreamedBoundaries, "leave", noting_leave)
    monkeypatch.setattr(StreamedBoundaries, "bring", noting_bring)
    step, _ = make_step(tiny_model("gpt2", 0.1, 0), group=2, segment_blocks=1, **IN_RAM)
    step(make_batches(1)[0], 0, 1e-3)
    assert not left
    assert back == ([1] * 7 + [0]) * (BATCH // 2), "one is on its way, but for the last of a group"


def test_at_most_a_few_are_on_the_device():
    step, _ = make_step(tiny_model("gpt2", 0.1, 0), group=BATCH, segment_blocks=1, **IN_RAM)
    most = {"leaving": 0, "coming": 0}

    class Watching(_SynchronousCopies):
        def leave(self, slot, tensor, home):
            most["leaving"] = max(most["leaving"], len(step._boundaries._leaving) + 1)
            super().leave(slot, tensor, home)

        def come_back(self, slot, home, tensor):
            assert not step._boundaries._leaving
            most["coming"] = max(most["coming"], len(step._boundaries._coming) + 1)
            super().come_back(slot, home, tensor)

    step.ring.copies = Watching()
    step(make_batches(1)[0], 0, 1e-3)
    assert most == {"leaving": LEAVING, "coming": 1}


def test_the_buffer_is_made_once_and_holds_a_group():
    step, _ = make_step(tiny_model("gpt2", 0.1, 0), group=2, segment_blocks=2, **IN_RAM)
    batches = make_batches(2)
    step(batches[0], 0, 1e-3)
    buffer = step._boundaries._buffer
    width = step._decoder.model.config.n_embd
    elements = 2 * 2 * batches[0].input_ids.shape[1] * width  # micro-batches x segments x a boundary's
    assert elements <= buffer.numel() <= elements + 4 * 256 and step.boundary_bytes == 4 * buffer.numel()
    step(batches[1], 1, 1e-3)
    assert step._boundaries._buffer is buffer


def test_an_attempt_that_fails_leaves_nothing_in_flight():
    step, _ = make_step(tiny_model("gpt2", 0.0, 0), group=2, segment_blocks=1, **IN_RAM)
    batch = make_batches(1)[0]
    calls = []

    def fail(*arguments):
        calls.append(arguments)
        if len(calls) == 3:
            raise KeyboardInterrupt
        return backward(*arguments)

    backward = step.operations.segment_backward
    step.operations.segment_backward = fail
    with pytest.raises(KeyboardInterrupt):
        step(batch, 0, 1e-3)
    assert step._boundaries._coming
    interrupted = step(batch, 0, 1e-3)
    fresh, _ = make_step(tiny_model("gpt2", 0.0, 0), group=2, segment_blocks=1, **IN_RAM)
    assert interrupted == fresh(batch, 0, 1e-3) and not step._boundaries._coming
