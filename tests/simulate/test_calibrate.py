"""The card that is here, timed: what is asked of the clock, and that one block's time scales the simulation's rates.

Everything runs on CPU tensors; torch.cuda is imitated where a test says so.
"""

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from reference import tiny_config

from lowmem.models.build import make_decoder
from lowmem.simulate import calibrate
from lowmem.simulate.calibrate import block_seconds, measure_card, measured_card, predicted_block_seconds
from lowmem.simulate.gpus import CARDS, Rate
from lowmem.simulate.step import gpu_target

CPU = torch.device("cpu")
SEQ = 32


def decoder(family: str = "llama"):
    return make_decoder(tiny_config(family), "fp32", "fp32")


@pytest.mark.parametrize(("major", "precisions"), [(7, {"fp16", "fp32"}), (12, {"bf16", "fp16", "fp32"})])
def test_a_cards_rates_are_the_medians_of_what_it_was_timed_at(monkeypatch, major, precisions):
    turns = [1.0, 1.0] + [0.002, 0.004] * 4 + [0.002] * 2  # the first two warm up; six of 2 ms, four of 4
    asked = []

    def seconds(work, device):
        work()
        asked.append(device)
        return turns[(len(asked) - 1) % len(turns)]

    properties = SimpleNamespace(
        name="NVIDIA GeForce RTX 5090", major=major, minor=0, total_memory=2**35, multi_processor_count=170
    )
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    monkeypatch.setattr(calibrate, "_seconds", seconds)
    monkeypatch.setattr(calibrate, "_PRODUCT_SIDE", 16)
    monkeypatch.setattr(calibrate, "_COPY_BYTES", 4096)
    card = measure_card(CPU)
    assert card.rates == {precision: Rate(2 * 16**3 / 0.002, 1.0) for precision in precisions}
    assert card.memory_bytes_per_second * card.memory_share == pytest.approx(2 * 4096 / 0.002)
    assert card.bus_bytes_per_second == pytest.approx(4096 / 0.002)
    assert (card.name, card.capability, card.multiprocessors) == ("NVIDIA GeForce RTX 5090", (major, 0), 170)
    assert card.memory_bytes == 2**35


def test_on_a_gpu_work_is_launched_while_the_card_sleeps_between_two_events(monkeypatch):
    done = []

    class Event:
        def __init__(self, enable_timing):
            assert enable_timing

        def record(self):
            done.append("record")

        def synchronize(self):
            done.append("synchronize")

        def elapsed_time(self, end):
            return 5.0

    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "_sleep", lambda cycles: done.append("sleep"), raising=False)
    assert calibrate._seconds(lambda: done.append("work"), torch.device("cuda")) == 0.005
    assert done == ["sleep", "record", "work", "record", "synchronize"]


@pytest.mark.parametrize("family", ["gpt2", "llama"])
def test_a_block_is_timed_forward_and_backward_and_leaves_the_rest_of_the_model_alone(family):
    model = decoder(family)
    tied = model.tied
    assert 0 < block_seconds(model, SEQ, 2, torch.float32, CPU) < 1
    placed = {name for name, parameter in model.model.named_parameters() if not parameter.is_meta}
    assert tied == (model.head_weight is model.model.get_input_embeddings().weight)
    assert placed == {name for unit in model.units[:2] for name in unit.parameters}
    assert all(parameter.grad is None for parameter in model.model.parameters())


def test_a_blocks_prediction_is_that_of_its_operations_on_the_card():
    """Three times the products of the forward pass are the least that forward and backward can be; twice as many
    sequences take more, on twice as fast a card they take less."""
    target = gpu_target(CARDS["t4"])
    blocks = list(decoder().blocks[0].parameters())
    tokens = 64 * SEQ
    flops = 6 * tokens * sum(parameter.numel() for parameter in blocks if parameter.dim() == 2)
    seconds = predicted_block_seconds(decoder(), SEQ, 64, torch.float32, target)
    assert seconds > flops / CARDS["t4"].sustained_flops(torch.float32)
    assert predicted_block_seconds(decoder(), SEQ, 128, torch.float32, target) > seconds
    fast = gpu_target(calibrate._scaled(CARDS["t4"], 2.0))
    assert seconds / 2 < predicted_block_seconds(decoder(), SEQ, 64, torch.float32, fast) < seconds


@pytest.mark.parametrize("factor", [0.5, 3.0])
def test_the_measured_card_makes_the_prediction_what_was_measured(monkeypatch, factor):
    there = replace(calibrate._scaled(CARDS["t4"], 0.03), name="here")  # so that little work takes it long
    expected = factor * predicted_block_seconds(decoder(), SEQ, 4, torch.float32, gpu_target(there))
    ran = []

    def seconds(work, device):
        ran.append(work())
        return expected

    monkeypatch.setattr(calibrate, "TOKENS", 4 * SEQ)
    monkeypatch.setattr(calibrate, "measure_card", lambda device: there)
    monkeypatch.setattr(calibrate, "_seconds", seconds)
    card = measured_card(decoder, SEQ, torch.float32, CPU)
    again = predicted_block_seconds(decoder(), SEQ, 4, torch.float32, gpu_target(card))
    assert again == pytest.approx(expected, rel=0.005) and ran
    factors = {card.rates[precision].peak / rate.peak for precision, rate in there.rates.items()}
    factors.add(card.memory_bytes_per_second / there.memory_bytes_per_second)
    assert max(factors) == pytest.approx(min(factors))
    assert (card.bus_bytes_per_second, card.memory_bytes) == (there.bus_bytes_per_second, there.memory_bytes)


def test_a_model_that_cannot_be_simulated_leaves_the_card_as_it_was_measured(monkeypatch):
    """And gives no traceback: the plan refuses it by name."""

    def refuses(*_):
        raise RuntimeError("no meta kernel")

    monkeypatch.setattr(calibrate, "measure_card", lambda device: CARDS["t4"])
    monkeypatch.setattr(calibrate, "predicted_block_seconds", refuses)
    assert measured_card(decoder, SEQ, torch.float32, CPU) is CARDS["t4"]
