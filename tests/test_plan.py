"""The first planner: sums worked out by hand, its choices, and the caps that it names when it refuses.

Nothing here is simulated or measured; one test holds the arithmetic to the bytes that a store really takes.
"""

import dataclasses
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from transformers import GPT2Config, LlamaConfig

from lowmem import plan as plan_module
from lowmem.adam import OPTIMIZERS
from lowmem.blocks import Decoder
from lowmem.errors import InputError, PlanError
from lowmem.models import build_model, load_config
from lowmem.plan import MIB, Plan, Shape, make_plan
from lowmem.precision import WORKING_DTYPES
from lowmem.settings import Settings
from lowmem.store import Store
from lowmem.units import GIB, parse_size

ROOT = Path(__file__).resolve().parent.parent


def shape_of(name: str) -> Shape:
    return Shape.of(name, Decoder(build_model(load_config(name, "random"))))


@pytest.fixture(scope="module")
def large() -> Shape:
    return shape_of("gpt2-large")


@pytest.fixture(scope="module")
def xl() -> Shape:
    return shape_of("gpt2-xl")


def planned(shape: Shape, device: str = "cuda", precision: str = "bf16", ram_free_bytes=None, **changed) -> Plan:
    return make_plan(shape, dataclasses.replace(Settings(), **changed), device, precision, ram_free_bytes)


def caps_named(error: PlanError) -> dict[str, int]:
    named = dict(re.findall(r"--((?:gpu|ram)-limit) (\d+MiB)", str(error)))
    return {name.replace("-", "_") + "_bytes": parse_size(size) for name, size in named.items()}


# --- the arithmetic

BLOCK = 19_677_440  # GPT-2-Large: 12 D^2 + 13 D for D = 1,280
EMBEDDING = (50_257 + 1_024) * 1_280


def test_the_shape_of_large_is_what_its_paper_says(large):
    assert large.parameters == 774_030_080 == EMBEDDING + 36 * BLOCK + 2 * 1_280
    assert large.unit_parameters == (EMBEDDING, *[BLOCK] * 36, 2 * 1_280)
    assert (large.width, large.inner_width, large.vocabulary) == (1_280, 5_120, 50_257)


def test_the_bytes_of_large_on_the_gpu_are_those_worked_out_by_hand(large):
    plan = planned(large)
    assert (plan.schedule.micro_batch, plan.schedule.group, plan.schedule.segment_blocks) == (4, 1, 1)
    assert plan.schedule.recompute and plan.precision == "bf16"
    blocks_resident = plan.resident_units - 1
    assert plan.gpu_breakdown == {
        "working_weights": 2 * 774_030_080,
        "gradients": 4 * 774_030_080,
        "boundaries": 4 * (4 * 1_024) * 1_280 * 37,
        "gradients_of_the_first_input": 4 * (64 * 1_024) * 1_280,
        "live_blocks": 4_096 * (2 * (9 * 1_280 + 4 * 5_120) + 16 * 1_280),
        "loss": 512 * 50_257 * 6,
        "resident_states": 10 * (EMBEDDING + blocks_resident * BLOCK),  # low 2, m 4, v 4
        "staging_ring": 10 * 3 * 2**22,
        "workspaces": 2 * 33 * MIB,
        "reserve": 256 * MIB,
    }
    assert plan.ram_breakdown == {
        "streamed_states": 10 * (774_030_080 - EMBEDDING - blocks_resident * BLOCK),
        "process": 2 * GIB,
    }
    assert plan.gpu_bytes == sum(plan.gpu_breakdown.values()) <= 11 * GIB
    assert plan.gpu_bytes + 10 * BLOCK > 11 * GIB  # not one more block's states would fit


def test_on_the_cpu_everything_is_in_ram_and_nothing_is_streamed(large):
    plan = planned(large, "cpu", "fp32", seq=128, batch=2, micro_batch=1)
    assert plan.gpu_breakdown == {} and plan.gpu_bytes is None
    assert plan.resident_units == 38
    assert plan.ram_breakdown == {
        "working_weights": 4 * 774_030_080,
        "gradients": 4 * 774_030_080,
        "boundaries": 4 * 128 * 1_280 * 37,
        "gradients_of_the_first_input": 4 * 2 * 128 * 1_280,
        "live_blocks": 128 * (4 * (9 * 1_280 + 4 * 5_120) + 16 * 1_280),
        "loss": 128 * 50_257 * 4,
        "resident_states": 8 * 774_030_080,  # m and v: the working weights are the masters
        "staging_ring": 0,
        "streamed_states": 0,
        "process": 640 * MIB,
    }


def test_xl_fits_under_both_of_its_caps(xl):
    plan = planned(xl, ram_limit_bytes=16 * GIB)
    assert xl.parameters == 1_557_611_200
    assert plan.fits and plan.gpu_bytes <= 11 * GIB and plan.ram_bytes <= 16 * GIB
    assert 0 < plan.resident_units < len(xl.unit_parameters)  # 14.5 GiB of states and the process are more than 16 GiB


@pytest.mark.parametrize(
    ("optimizer", "precision", "state_bytes"),
    [("adamw", "bf16", 10), ("adamw", "fp16", 10), ("adamw", "fp32", 8), ("adamw8bit", "bf16", 4), ("sgd", "bf16", 2)],
)
def test_states_take_what_the_optimizer_keeps(large, optimizer, precision, state_bytes):
    plan = planned(large, "cpu", precision, optimizer=optimizer)
    scales = 8 * 774_030_080 / 256 if optimizer == "adamw8bit" else 0
    assert plan.ram_breakdown["resident_states"] == pytest.approx(state_bytes * 774_030_080 + scales, abs=8)
    bits = {"adamw": 32, "adamw8bit": 8, "sgd": 0}[optimizer]
    assert plan.to_dict()["choice"]["state_bits"] == bits


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_planned_weights_and_states_are_those_that_a_store_takes(optimizer, precision):
    """But for the padding of each parameter to 256."""
    decoder = Decoder(build_model(load_config("gpt2-demo", "random")))
    parameters = list(decoder.model.parameters())
    plan = planned(Shape.of("demo", decoder), "cpu", precision, optimizer=optimizer)
    store = Store(decoder, torch.device("cpu"), WORKING_DTYPES[precision], OPTIMIZERS[optimizer], plan.resident_units)
    states = sum(tensor.nbytes for part in store.parts for tensor in part.state.values())
    working = sum(part.working.nbytes for part in store.parts)
    vectors = sum(p.numel() for p in parameters if p.dim() < 2)  # fp32 always: 2 bytes more, and no low half
    padding = 256 * len(parameters)
    found = plan.ram_breakdown
    assert abs(working - found["working_weights"]) <= 4 * (vectors + padding)
    assert abs(states - found["resident_states"]) <= 10 * (vectors + padding)
    assert store.parameter_count == plan.shape.parameters


def test_more_blocks_per_segment_trade_boundaries_for_live_blocks(large):
    one, four = (planned(large, segment_blocks=count, micro_batch=4) for count in (1, 4))
    assert four.gpu_breakdown["boundaries"] * 37 == one.gpu_breakdown["boundaries"] * 10
    assert four.gpu_breakdown["live_blocks"] == 4 * one.gpu_breakdown["live_blocks"]
    kept = planned(large, recompute="off", micro_batch=1)
    assert kept.gpu_breakdown["live_blocks"] == 36 * one.gpu_breakdown["live_blocks"] // 4


def test_a_16_bit_residual_stream_halves_what_it_saves(large):
    fp32, half = planned(large), planned(large, residual="16bit")
    for name in ("boundaries", "gradients_of_the_first_input"):
        assert 2 * half.gpu_breakdown[name] == fp32.gpu_breakdown[name]


# --- the choice


def test_what_was_typed_is_honoured(large):
    typed = {"micro_batch": 2, "group": 4, "segment_blocks": 3, "recompute": "on", "states": "streamed"}
    choice = planned(large, **typed).to_dict()["choice"]
    assert (choice["micro_batch"], choice["group"], choice["segment_blocks"]) == (2, 4, 3)
    assert choice["recompute"] is True
    assert (choice["resident_units"], choice["streamed_units"]) == (0, 38)
    assert planned(large, recompute="off", micro_batch=1, states="streamed").schedule.recompute is False


@pytest.mark.parametrize("device", ["cuda", "cpu"])
def test_states_are_where_they_were_asked_to_be(large, device):
    resident = planned(large, device, states="resident", gpu_limit_bytes=None)
    assert resident.resident_units == 38 and resident.to_dict()["choice"]["streamed_units"] == 0
    streamed = planned(large, device, states="streamed")
    assert streamed.resident_units == 0
    assert streamed.ram_breakdown["streamed_states"] == 10 * large.parameters
    assert resident.ram_breakdown.get("streamed_states") == 0


def test_states_that_must_be_resident_and_do_not_fit_are_refused(large):
    with pytest.raises(PlanError):
        planned(large, states="resident")


def test_with_more_room_more_states_stay_on_the_gpu(large):
    counts = [planned(large, gpu_limit_bytes=size * GIB, micro_batch=1).resident_units for size in (6, 8, 10, 11, 24)]
    assert counts == sorted(counts) and counts[0] < counts[2] and counts[-1] == 38
    assert planned(large, gpu_limit_bytes=None).resident_units == 38


@pytest.mark.parametrize(("batch", "seq", "expected"), [(64, 1024, 4), (6, 1024, 2), (7, 1024, 1), (64, 512, 8)])
def test_the_micro_batch_divides_the_batch_and_holds_at_most_4096_tokens(large, batch, seq, expected):
    assert planned(large, batch=batch, seq=seq, gpu_limit_bytes=40 * GIB).schedule.micro_batch == expected


def test_a_group_that_was_typed_divides_the_number_of_micro_batches(large):
    for group in (1, 4, 16, 64):
        schedule = planned(large, group=group, gpu_limit_bytes=80 * GIB).schedule
        assert 64 // schedule.micro_batch % group == 0


def test_a_smaller_micro_batch_is_taken_where_the_larger_does_not_fit(large):
    sizes = [
        planned(large, gpu_limit_bytes=limit * MIB, states="streamed").schedule.micro_batch for limit in (5650, 6250)
    ]
    assert sizes[0] < sizes[1]


@pytest.mark.parametrize(("free_gib", "recompute"), [(64, False), (15, True)])
def test_on_this_machines_cpu_activations_are_kept_where_there_is_room(large, free_gib, recompute):
    plan = planned(large, "cpu", "fp32", ram_free_bytes=free_gib * GIB, seq=128, batch=8)
    assert plan.schedule.recompute is recompute


# --- what does not fit


@pytest.mark.parametrize("gpu_gib", [1, 3, 5])
@pytest.mark.parametrize("ram_gib", [None, 1, 4, 12])
@pytest.mark.parametrize("name", ["large", "xl"])
def test_a_refusal_names_caps_that_do_fit_and_that_are_tight(request, name, gpu_gib, ram_gib):
    shape = request.getfixturevalue(name)
    ram_limit = None if ram_gib is None else ram_gib * GIB
    with pytest.raises(PlanError) as caught:
        planned(shape, gpu_limit_bytes=gpu_gib * GIB, ram_limit_bytes=ram_limit)
    assert caught.value.exit_code == 3 and f"{gpu_gib}.00 GiB of GPU memory" in str(caught.value)
    caps = caps_named(caught.value)
    plan = planned(shape, **caps)
    assert (
        plan.fits and plan.gpu_bytes > caps["gpu_limit_bytes"] - MIB and plan.ram_bytes > caps["ram_limit_bytes"] - MIB
    )
    with pytest.raises(PlanError):
        planned(shape, **caps | {"gpu_limit_bytes": caps["gpu_limit_bytes"] - MIB})


def test_where_only_ram_is_short_the_cap_named_is_the_smallest_that_would_do_beside_the_gpus(xl):
    with pytest.raises(PlanError) as caught:
        planned(xl, ram_limit_bytes=15 * GIB)
    ram_limit = caps_named(caught.value)["ram_limit_bytes"]
    assert planned(xl, ram_limit_bytes=ram_limit).fits
    with pytest.raises(PlanError):
        planned(xl, ram_limit_bytes=ram_limit - 64 * MIB)


def test_a_machine_with_too_little_memory_is_refused_like_a_cap(large):
    with pytest.raises(PlanError, match="4.00 GiB are free here"):
        planned(large, "cpu", "fp32", ram_free_bytes=4 * GIB)
    with pytest.raises(PlanError, match="3.00 GiB of RAM"):
        planned(large, "cpu", "fp32", ram_free_bytes=4 * GIB, ram_limit_bytes=3 * GIB)
    plan = planned(large, "cpu", "fp32", ram_free_bytes=64 * GIB, seq=128, batch=2)
    assert plan.to_dict()["limits"]["ram_bytes"] is None  # what the machine has is no cap that the user set


def test_plan_json_says_what_was_planned(large):
    plan = planned(large, ram_limit_bytes=16 * GIB)
    found = plan.to_dict()
    assert json.loads(json.dumps(found)) == found
    assert found["limits"] == {"gpu_bytes": 11 * GIB, "ram_bytes": 16 * GIB}
    assert (found["fits"], found["parameters"], found["tokens_per_step"]) == (True, 774_030_080, 65_536)
    assert found["choice"]["resident_units"] + found["choice"]["streamed_units"] == 38
    assert found["predicted"] == {
        "gpu_allocated_peak_bytes": plan.gpu_bytes,
        "gpu_reserved_peak_bytes": plan.gpu_bytes,
        "ram_peak_bytes": plan.ram_bytes,
        "step_seconds": None,
    }
    described = plan.describe()
    assert "774,030,080 parameters" in described and "micro-batches of 4" in described and "cap 11.0 GiB" in described


# --- python -m lowmem.plan


def test_as_a_command_it_prints_plan_json_alone_and_needs_no_network(tmp_path):
    environment = {"HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path), "PATH": "", "PYTHONDONTWRITEBYTECODE": "1"}
    command = [sys.executable, "-m", "lowmem.plan", "--model", "gpt2-xl", "--ram-limit", "16GiB", "--json"]
    result = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=120)
    assert (result.returncode, result.stderr) == (0, "")
    found = json.loads(result.stdout)
    assert (found["parameters"], found["fits"], found["model"]) == (1_557_611_200, True, "gpt2-xl")
    assert list(tmp_path.iterdir()) == []


LLAMA = {
    **{"num_hidden_layers": 4, "hidden_size": 256, "intermediate_size": 688, "num_attention_heads": 8},
    **{"num_key_value_heads": 2, "vocab_size": 1_000, "max_position_embeddings": 2_048},
}


def in_json(capsys, *options: str) -> dict:
    assert plan_module.main([*options, "--json"]) == 0
    out, err = capsys.readouterr()
    assert err == ""
    return json.loads(out)


@pytest.mark.parametrize("kind", ["folder", "config.json"])
@pytest.mark.parametrize("tied", [True, False])
def test_any_decoder_is_planned_from_a_folder_or_its_config_alone(tmp_path, capsys, kind, tied):
    LlamaConfig(**LLAMA, tie_word_embeddings=tied).save_pretrained(tmp_path)
    model = tmp_path if kind == "folder" else tmp_path / "config.json"
    found = in_json(capsys, "--model", str(model), "--seq", "256", "--batch", "8", "--gpu-limit", "2G")
    attention = 256 * 256 * 2 + 2 * 256 * 64
    block = attention + 3 * 256 * 688 + 2 * 256
    assert found["parameters"] == 4 * block + 256 + (1 if tied else 2) * 1_000 * 256
    assert (found["tokens_per_step"], found["limits"]["gpu_bytes"]) == (8 * 256, 2 * GIB)
    assert found["breakdown"]["boundaries"] == 4 * found["choice"]["micro_batch"] * 256 * 256 * 5


def test_without_json_it_prints_a_table(tmp_path, capsys):
    GPT2Config(n_layer=2, n_embd=64, n_head=2).save_pretrained(tmp_path)
    assert plan_module.main(["--model", str(tmp_path)]) == 0
    out, err = capsys.readouterr()
    assert "GPU working weights" in out and out.rstrip().endswith("fits (by arithmetic)") and err == ""


@pytest.mark.parametrize(
    ("options", "code", "said"),
    [
        (["--model", "gpt2-xl", "--gpu-limit", "2GiB"], 3, "--gpu-limit "),
        (["--model", "gpt2-xl", "--gpu-limit", "11GB"], 2, "not a size"),
        (["--model", "gpt2-xl", "--gpu-limit", "0"], 2, "not a size"),
        (["--model", "gpt2-xl", "--seq", "1"], 2, "--seq 1 is too short"),
        (["--model", "gpt2-xl", "--batch", "-1"], 2, "--batch -1 is too small"),
        (["--model", "/nowhere/config.json"], 2, "/nowhere/config.json"),
        (["--model", "gpt2", "--seq", "4096"], 2, "1024 positions"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_what_is_impossible_is_refused_in_one_sentence(capsys, monkeypatch, options, code, said):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    assert plan_module.main(options) == code
    out, err = capsys.readouterr()
    assert out == "" and err.count("\n") == 1 and err.startswith("lowmem.plan: ") and said in err, err


@pytest.mark.parametrize("options", [[], ["--model", "gpt2", "--sequence", "8"], ["--model", "gpt2", "--seq", "many"]])
def test_options_that_are_none_exit_with_2(capsys, options):
    with pytest.raises(SystemExit) as stopped:
        plan_module.main(options)
    assert stopped.value.code == 2


def test_a_script_plans_no_sequence_longer_than_the_models_positions(tmp_path):
    from lowmem.train import main

    settings = Settings(model="gpt2-large", init="random", out=str(tmp_path / "out"))
    assert main(settings, ["--plan-only", "--seq", "4096"]) == 2


def test_settings_that_cannot_be_are_refused_before_a_plan_is_made():
    with pytest.raises(InputError):
        Settings(batch=64, micro_batch=3)
    with pytest.raises(InputError):
        Settings(batch=64, micro_batch=4, group=3)
