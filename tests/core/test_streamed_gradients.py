"""Gradients that wait in RAM: no bit of the result changes, and of the device they take those of two segments."""

import math

import pytest
import torch
from test_step import BATCH, PLAIN, make_batches, train

from lowmem.core import parameters
from lowmem.core.layout import Fate, Layout
from lowmem.core.offload import _SynchronousCopies
from reference import tiny_model
from steps import make_step

IN_RAM = {"fate": "sent", "states_on_gpu": 0, "micro_batch": 1, "group": BATCH}


@pytest.mark.parametrize(
    ("family", "precision", "optimizer"),
    [("gpt2", "fp32", "adamw"), ("gpt2", "bf16", "adamw"), ("gpt2", "fp16", "sgd"), ("llama", "bf16", "adamw")],
)
def test_gradients_in_ram_change_no_bit(family, precision, optimizer):
    batches = make_batches(4)
    kind = {"family": family, "precision": precision, "optimizer": optimizer, "micro_batch": 1}
    plain = train(batches, **kind, **PLAIN)
    for case in (
        {},
        {"segment_blocks": 3, "kept": 1},
        {"states_on_gpu": 2, "segment_blocks": 2},
        {"weights_on_gpu": 1, "boundaries_in_ram": True},
        {"states_on_disk": 3, "defer": False},
        {"kept": 99},
    ):
        assert train(batches, **kind | IN_RAM | case).differences(plain) == [], case


def test_a_step_whose_gradients_are_not_finite_is_skipped_and_leaves_none_in_ram():
    batches = make_batches(2)
    step, store = make_step(tiny_model("gpt2", 0.0, 0), **IN_RAM)
    before = dict(store.masters())
    update = step.operations.segment_backward
    step.operations.segment_backward = lambda *arguments: update(*arguments) * math.inf
    assert not step(batches[0], 0, 1e-3).updated
    assert not any(part.has_gradient for part in store.parts)
    step.operations.segment_backward = update
    step.flush()
    assert all(torch.equal(value, before[name]) for name, value in store.masters())
    fresh, _ = make_step(tiny_model("gpt2", 0.0, 0), **IN_RAM)
    assert step(batches[1], 1, 1e-3) == fresh(batches[1], 1, 1e-3)


def test_on_the_device_are_gradients_of_two_segments():
    step, store = make_step(tiny_model("gpt2", 0.0, 0), segment_blocks=1, **IN_RAM)
    most = []

    class Watching(_SynchronousCopies):
        def leave(self, slot, tensor, home):
            here = {part.unit for part in store.parts if part.gradient is not None}
            most.append((here - {0}, len(step._gradients._leaving)))
            assert home.data_ptr() in {part.gradient_home.data_ptr() for part in store.parts if part.unit in here - {0}}
            super().leave(slot, tensor, home)

    step.ring.copies = Watching()
    step(make_batches(1)[0], 0, 1e-3)
    assert all(len(units) == 1 for units, _ in most) and max(leaving for _, leaving in most) == 1
    assert {unit for units, _ in most for unit in units} == {part.unit for part in store.parts} - {0}
    assert {part.unit for part in store.parts if part.gradient is not None} == {0}
    assert store.gradient_bytes == sum(4 * part.working.numel() for part in store.parts if part.unit)


def test_an_attempt_that_fails_leaves_nothing_in_flight():
    step, store = make_step(tiny_model("gpt2", 0.0, 0), segment_blocks=1, **IN_RAM)
    batch = make_batches(1)[0]
    backward, calls = step.operations.segment_backward, []

    def fail(*arguments):
        calls.append(arguments)
        if len(calls) == BATCH + 3:
            raise KeyboardInterrupt
        return backward(*arguments)

    step.operations.segment_backward = fail
    with pytest.raises(KeyboardInterrupt):
        step(batch, 0, 1e-3)
    assert step._gradients._leaving
    interrupted = step(batch, 0, 1e-3)
    fresh, _ = make_step(tiny_model("gpt2", 0.0, 0), segment_blocks=1, **IN_RAM)
    assert interrupted == fresh(batch, 0, 1e-3) and not step._gradients._leaving


def test_several_groups_are_refused():
    with pytest.raises(ValueError, match="only if the whole batch is one group"):
        Layout(1, fate=Fate.SENT).fate_in(2, needs_all_gradients=True)


def test_what_waits_in_ram_is_page_locked(monkeypatch):
    locked = []
    monkeypatch.setattr(parameters, "page_lock", lambda tensor: locked.append(tensor.data_ptr()) or True)
    _, store = make_step(tiny_model("gpt2", 0.0, 0), **IN_RAM)
    store.device = torch.device("cuda")
    assert store.page_lock()
    assert {part.gradient_home.data_ptr() for part in store.parts if part.unit} <= set(locked)
