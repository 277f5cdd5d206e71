"""Which method, with which micro-batch, on cards of which size; and how that is told."""

import json
from functools import partial

import pytest

from experiments.memory_estimation.several_gpus import methods
from experiments.memory_estimation.several_gpus.methods import advise, describe, to_dict
from experiments.memory_estimation.several_gpus.rank import METHODS, peak_of, record
from lowmem.cudasim.allocator import SimulatedOutOfMemory
from lowmem.cudasim.gpus import CARDS
from lowmem.errors import InputError
from lowmem.limits import CONTEXT_BYTES
from lowmem.planning.simulated_step import gpu_target
from lowmem.units import GIB, MIB
from tests.experiments import test_rank
from tests.experiments.test_rank import rank_peak

T = 64


gpt2 = partial(test_rank.gpt2, **test_rank.DROPOUT)


@pytest.mark.exhaustive
def test_advice_is_the_largest_micro_batch_that_completes():
    limit_bytes = rank_peak(gpt2(), "ddp", 4, 2, T, accumulation=2).reserved_peak_bytes
    rows, sentence = advise(gpt2(), 4, CONTEXT_BYTES + limit_bytes, T, 32)
    assert [row.method for row in rows] == list(METHODS)
    assert any(row.accumulation > 1 for row in rows)
    for row in rows:
        data_ranks = 4 // row.peak.tensor_ranks
        assert row.accumulation * row.peak.micro_batch * data_ranks == 32
        assert row.peak.reserved_peak_bytes <= limit_bytes
        if row.accumulation > 1:
            larger = record(gpt2(), row.method, 4, 2 * row.peak.micro_batch, T, accumulation=row.accumulation // 2)
            with pytest.raises(SimulatedOutOfMemory):
                peak_of(larger, row.method, 4, 2 * row.peak.micro_batch, limit_bytes)
    best = min(rows, key=lambda row: row.accumulation)
    assert sentence.startswith(f"Take {best.method} ")


def test_heads_that_the_cards_do_not_divide_rule_out_tensor_parallelism_alone():
    rows, sentence = advise(gpt2(n_embd=125, n_head=25), 4, GIB + CONTEXT_BYTES, T, 4)
    reasons = {row.method: row.refusal for row in rows}
    assert reasons["ddp"] == reasons["fsdp2"] == ""
    assert "25 attention heads cannot be divided among 4 GPUs" in reasons["tp"]
    assert "25 attention heads cannot be divided among 2 GPUs" in reasons["dp+tp"]
    assert sentence.startswith(("Take ddp", "Take fsdp2"))
    lines = describe(rows, sentence).splitlines()
    assert any(line.startswith("tp ") and "25 attention heads" in line for line in lines)
    assert lines[-1] == sentence


def test_a_row_says_that_not_even_one_sequence_fits():
    rows, sentence = advise(gpt2(n_inner=100), 3, CONTEXT_BYTES + 2 * MIB, T, 3)
    assert [row.peak for row in rows] == [None] * 4
    assert "not even one sequence fits" in rows[0].refusal and "heads" in rows[2].refusal
    assert sentence.startswith("No method can train this on 3 GPUs")


def test_a_batch_that_the_ranks_do_not_divide_is_refused_by_row():
    rows, _ = advise(gpt2(), 4, CONTEXT_BYTES + 100 * MIB, T, 6)
    assert "a batch of 6 cannot be divided among 4" in rows[0].refusal
    assert rows[2].peak.micro_batch == 2 and rows[2].accumulation == 3  # tp: every rank sees the whole batch


@pytest.mark.parametrize("wrong", [{"ranks": 0}, {"batch": 0}, {"seq": -1}, {"card_bytes": CONTEXT_BYTES}])
def test_figures_that_make_no_sense_are_refused(wrong):
    with pytest.raises(InputError):
        advise(gpt2(), **{"ranks": 2, "batch": 2, "seq": T, "card_bytes": GIB, **wrong})


@pytest.mark.exhaustive
def test_seconds_decide_on_a_card_and_are_told():
    card = CARDS["rtx3090"]
    rows, sentence = advise(gpt2(), 2, card.memory_bytes, T, 4, gpu_target(card))
    possible = [row for row in rows if row.peak]
    best = min(possible, key=lambda row: row.step_seconds)
    assert sentence.startswith(f"Take {best.method} ") and best.step_seconds > 0
    table = describe(rows, sentence)
    assert f"{best.step_seconds:.3g}" in table and "dp+tp needs an even number of GPUs" in table
    told = json.loads(json.dumps(to_dict(rows, sentence)))
    assert told["advice"] == sentence and [row["method"] for row in told["methods"]] == list(METHODS)
    first, last = told["methods"][0], told["methods"][-1]
    assert first["allocated_peak_bytes"] == rows[0].peak.allocated_peak_bytes == sum(first["at_peak"].values())
    assert first["possible"] and first["refusal"] is None
    assert not last["possible"] and last["allocated_peak_bytes"] is None and last["step_seconds"] is None


def test_communication_by_hand():
    config = gpt2()
    parameters = sum(p.numel() for p in methods.build_model(config).parameters())
    target = methods.Target(methods.PLAIN.device_model, copies=1e9)

    def seconds(method: str, ranks: int, accumulation: int) -> float:
        peak = rank_peak(config, method, ranks, 2, T)  # which takes no time itself
        return methods._step_seconds(config, peak, accumulation, T, target)

    assert seconds("ddp", 4, 3) == pytest.approx(2 * 4 * parameters * 3 / 4 / 1e9)  # once per step
    assert seconds("fsdp2", 4, 3) == pytest.approx(3 * 8 * parameters * 3 / 4 / 1e9)  # for each micro-batch
    hidden = 8 * parameters * 0 / 1e9
    activation = 2 * T * 128 * 2
    assert seconds("tp", 4, 1) == pytest.approx(hidden + 2 * 3 / 4 * activation * (6 * 2 + 2) / 1e9)
