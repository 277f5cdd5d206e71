"""The memory experiment: its models are the published ones, its plain step is the real one, its table is its rows.

Without a GPU these are checked: parameter counts, the tape of the ordinary training step against the profiler on the
CPU, and README.md against the committed rows.
"""

import json
import shutil
import tempfile
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from transformers import BloomConfig, GPT2Config, LlamaConfig, OPTConfig

from experiments.harness import whole_runs
from experiments.harness.at_peak import tape_of_cpu
from experiments.harness.models import MODELS, Model
from experiments.memory_estimation import estimate, measure, pictures, published, ram, rows, run, table
from experiments.memory_estimation.plain import record_plain
from experiments.memory_estimation.several_gpus import rank
from lowmem.cudasim import autocast
from lowmem.cudasim.device_model import DeviceModel
from lowmem.cudasim.gpus import CARDS
from lowmem.cudasim.tape import under_cap
from lowmem.errors import InputError
from lowmem.models.build import build_model
from lowmem.planning.simulated_step import Target, cpu_target
from lowmem.units import GIB, MIB
from runs import simulations_shared

CPU = torch.device("cpu")
SEQ, BATCH = 32, 2
A100 = CARDS["a100"]
TINY = {
    "gpt2": lambda: GPT2Config(n_layer=2, n_embd=64, n_head=4, n_positions=64, vocab_size=512),
    "opt": lambda: OPTConfig(
        num_hidden_layers=2, hidden_size=64, ffn_dim=128, num_attention_heads=4, word_embed_proj_dim=64,
        vocab_size=512, max_position_embeddings=64, dropout=0.0,
    ),
    "bloom": lambda: BloomConfig(n_layer=2, hidden_size=64, n_head=4, vocab_size=512),
    "llama": lambda: LlamaConfig(
        num_hidden_layers=2, hidden_size=64, num_attention_heads=4, num_key_value_heads=2, intermediate_size=128,
        vocab_size=512, max_position_embeddings=64,
    ),
}  # fmt: skip


@pytest.fixture
def tiny(monkeypatch):
    """The table with one small model, a GPT-2, in it."""
    small = {"n_layer": 2, "n_embd": 64, "n_head": 4, "n_positions": 64, "vocab_size": 512, "resid_pdrop": 0.0}
    model = Model("tiny", "nobody/tiny", "gpt2", small, None, "made up")
    for module in (run, table, pictures, measure, published):
        monkeypatch.setattr(module, "MODELS", {"tiny": model})
    return model


# --- the models


@pytest.mark.parametrize("name", MODELS)
def test_a_model_has_as_many_parameters_as_others_say(name):
    model = MODELS[name]
    count = sum(parameter.numel() for parameter in build_model(model.config()).parameters())
    assert model.parameters in (None, count)


# --- the plain step


def really_allocated(config) -> int:
    """Returns the peak of what the profiler saw the CPU allocate in two ordinary steps, the building of the model left
    out."""
    return tape_of_cpu(lambda: measure.run_plain(config, SEQ, BATCH, "fp32", CPU))[0].peak_bytes()


@pytest.mark.quick(1)
@pytest.mark.parametrize("family", TINY)
def test_the_tape_of_the_ordinary_step_is_what_the_profiler_sees_on_the_cpu(family):
    simulated = record_plain(TINY[family](), SEQ, BATCH, "fp32", cpu_target()).peak_bytes()
    assert simulated == pytest.approx(really_allocated(TINY[family]()), rel=1e-3)


def test_the_first_step_is_not_the_peak():
    """Its optimizer states are not there yet: a tape of one step would be too small."""
    tape = record_plain(TINY["gpt2"](), SEQ, BATCH, "fp32", cpu_target())
    at_peak = under_cap(tape).at_peak
    weights = sum(parameter.nbytes for parameter in build_model(TINY["gpt2"]()).parameters())
    assert at_peak["optimizer_states"] >= 2 * weights
    assert at_peak["weights"] == weights


def test_llmems_recipe_keeps_14_bytes_per_parameter_and_a_boundary_per_block():
    config = TINY["llama"]()
    config._attn_implementation = "eager"
    at_peak = under_cap(record_plain(config, SEQ, BATCH, "llmem", Target(DeviceModel()))).at_peak
    count = sum(parameter.numel() for parameter in build_model(config).parameters())
    assert (at_peak["weights"], at_peak["master_weights"], at_peak["optimizer_states"]) == (
        2 * count, 4 * count, 8 * count,
    )  # fmt: skip
    assert "gradients" not in at_peak


# --- autocast


def test_what_several_gpus_correct_of_the_cpus_autocast_is_of_these_rules():
    in_fp32 = {name.split(".")[0] for name in (*autocast.IN_FP32, *autocast.RESULT_IN_FP32)}
    assert {name.strip("_").replace("rpow", "pow") for name in rank._CUDA_IN_FP32} <= in_fp32


def test_under_autocast_activations_shrink_and_weights_do_not():
    target = estimate.plain_target(A100)
    at_peak = {
        recipe: under_cap(record_plain(TINY["llama"](), 64, 32, recipe, target)).at_peak for recipe in ("fp32", "bf16")
    }
    assert at_peak["bf16"]["forward"] < 0.8 * at_peak["fp32"]["forward"]
    assert at_peak["bf16"]["weights"] == at_peak["fp32"]["weights"]


# --- rows under a cap


@pytest.mark.exhaustive
def test_plain_rows_double_until_one_does_not_fit():
    found = list(estimate.plain_rows(TINY["llama"](), 64, "fp32", A100, 60 * MIB))
    assert [row["batch"] for row in found] == [2**power for power in range(len(found))]
    assert [row["fits"] for row in found] == [True] * (len(found) - 1) + [False]
    assert len(found) > 2
    assert all(row["reserved_peak_bytes"] <= 60 * MIB for row in found[:-1])
    assert all(row["allocated_peak_bytes"] <= row["reserved_peak_bytes"] for row in found)


@pytest.fixture
def shared():
    with simulations_shared(estimate):
        yield


@pytest.mark.exhaustive
def test_a_row_of_lowmems_is_the_planners_choice_or_the_smallest_cap(shared):
    roomy = estimate.lowmem_row(TINY["llama"](), 64, 4, 16 * GIB, A100)
    assert roomy["fits"] and roomy["allocated_peak_bytes"] <= roomy["reserved_peak_bytes"]
    assert roomy["choice"]["states_on_gpu"] == roomy["choice"]["units"]
    assert roomy["choice"]["streamed_bytes"] == 0
    none = estimate.lowmem_row(TINY["llama"](), 64, 4, 1 * MIB, A100)
    assert not none["fits"] and none["smallest_cap_bytes"] > 1 * MIB
    small = estimate.lowmem_row(TINY["llama"](), 64, 4, none["smallest_cap_bytes"], A100)
    assert small["fits"] and small["reserved_peak_bytes"] <= none["smallest_cap_bytes"]
    assert "cap" in table._sizes(none)


def test_no_plan_of_lowmems_reserves_more_than_its_cap():
    """Four rows once did, by up to 12 MiB: segments grow beyond the allocator's cap."""
    planned = [
        row for row in rows.read(run.RESULTS / rows.NAME)
        if row["kind"] == "predicted" and row["method"] == "lowmem" and row.get("fits")
    ]  # fmt: skip
    assert len(planned) > 50
    over = [row["model"] for row in planned if row["reserved_peak_bytes"] > row["limit_bytes"]]
    assert over == []


def test_what_lowmem_cannot_train_is_refused_with_the_reason(tiny, monkeypatch):
    def refuse(*_):
        raise InputError("SomethingForCausalLM: the head is odd")

    monkeypatch.setattr(run, "lowmem_row", refuse)
    (row,) = run._lowmem("tiny", 32, A100, GIB)
    assert row["refused"] == "SomethingForCausalLM: the head is odd"
    assert "refused: SomethingForCausalLM" in table._smallest_and_largest([row])[0]


# --- what others published


@pytest.mark.parametrize("name", published.LLMEM)
def test_llmems_published_errors_are_those_it_states(name):
    assert 0.0035 <= abs(published.LLMEM[name].error) <= 0.0165  # "0.4% to 1.6%"


def test_the_batch_that_llmems_formula_gives_is_one_that_can_be():
    assert published.llmem_batch("opt-125m") == pytest.approx(89, abs=1)


def test_accelerates_answer_is_four_times_the_weights_in_fp32():
    pytest.importorskip("accelerate")
    answer = published.accelerate_answer(MODELS["gpt2"].config())
    assert answer["float32"]["total_size"] == 4 * MODELS["gpt2"].parameters
    assert answer["float32"]["training_with_adam"] == 16 * MODELS["gpt2"].parameters


# --- the program


@pytest.mark.exhaustive
def test_the_program_writes_rows_a_report_and_a_picture(tiny, shared, tmp_path, monkeypatch, capsys):
    # Another process would not have the test's patches.
    monkeypatch.setattr(run, "ProcessPoolExecutor", lambda *_, **__: nullcontext(SimpleNamespace(map=map)))
    arguments = ["--seq", "32", "128", "--limit", "90MiB", "--out", str(tmp_path), "--methods"]
    assert run.main([*arguments, "fp32", "lowmem"]) == 0
    arguments.append("fp32")
    assert run.main(arguments) == 0  # replaces the rows of the first call, but lowmem's
    found = rows.read(tmp_path / "rows.jsonl")
    cases = [(row["method"], row.get("seq")) for row in found]
    assert len(set(map(rows.key, found))) == len(found)
    assert {("fp32", 32), ("lowmem", 32), ("accelerate", None)} <= set(cases)
    assert not any(seq == 128 for _, seq in cases)  # more than the model has positions
    assert all(f"--out {tmp_path.name}" in row["command"] and row["versions"]["torch"] for row in found)
    report = json.loads((tmp_path / "report.json").read_text())
    assert report["predicted_rows"] == len(found)
    assert report["rows"] == "rows.jsonl"
    assert (tmp_path / "memory.png").stat().st_size > 5000
    assert "tiny" in table.tables(found)
    assert "fp32" in capsys.readouterr().out


def test_a_run_replaces_the_rows_of_its_cases_and_no_others(tmp_path):
    def row(kind, model, batch, **more):
        case = {"model": model, "method": "fp32", "seq": 512, "limit_bytes": GIB, "card": "t4"}
        return case | {"kind": kind, "batch": batch} | more

    path = tmp_path / "rows.jsonl"
    old = [row("predicted", "gpt2", 1), row("predicted", "gpt2", 2), row("predicted", "opt-125m", 1)]
    rows.replace(path, [*old, row("measured", "gpt2", 1, run=1), row("measured", "gpt2", 2, run=1)])
    rows.replace(path, [row("predicted", "gpt2", 1, run=2), row("measured", "gpt2", 1, run=2)])
    left = {(r["kind"], r["model"], r["batch"], r.get("run")) for r in rows.read(path)}
    assert left == {
        ("predicted", "gpt2", 1, 2), ("predicted", "opt-125m", 1, None),
        ("measured", "gpt2", 1, 2), ("measured", "gpt2", 2, 1),
    }  # fmt: skip


def test_a_broken_line_of_the_rows_is_named(tmp_path):
    (tmp_path / "rows.jsonl").write_text('{"kind": "predicted"}\n{"kind"\n')
    with pytest.raises(InputError, match=r"rows\.jsonl:2"):
        rows.read(tmp_path / "rows.jsonl")


@pytest.mark.parametrize("method", ["fp32", "bf16", "lowmem"])
def test_the_measuring_process_runs_a_case(tiny, method, monkeypatch):
    """On the CPU; the lines for CUDA have never run."""
    monkeypatch.setattr(measure, "STEPS", 2)
    layout = {"micro_batch": 1, "group": 2, "segment_blocks": 2, "states_on_gpu": 1}
    choice = layout if method == "lowmem" else None
    case = {"model": "tiny", "method": method, "seq": 16, "batch": 2, "limit_bytes": GIB, "choice": choice}
    assert measure.run_case(case, CPU) == {"fits": True}


def test_measured_rows_meet_their_predictions_with_signed_errors():
    case = {"model": "gpt2", "method": "fp32", "seq": 512, "batch": 1, "limit_bytes": GIB, "card": "h200"}
    said = case | {"kind": "predicted", "fits": True, "allocated_peak_bytes": 990, "reserved_peak_bytes": 1100}
    was = case | {"kind": "measured", "fits": True, "allocated_peak_bytes": 1000, "reserved_peak_bytes": 1000}
    wrong = [said | {"batch": 2}, case | {"kind": "measured", "batch": 2, "fits": False}]
    found = table.summary([said, was, *wrong])
    assert found["signed_errors"]["allocated"]["median"] == pytest.approx(-0.01)
    assert found["ran_out_of_memory_against_the_prediction"] == 1
    assert found["fitted_against_the_prediction"] == 0
    text = table._measured_table([said, was, *wrong])
    assert "-1.00%" in text and "+10.00%" in text and "out of memory" in text


def test_a_run_on_the_cpu_leaves_a_row_of_its_report_and_nothing_else(finished, tmp_path, monkeypatch, capsys):
    exit_codes = [0, 3]

    def run_script(command, **_):
        out = Path(command[-1])
        (out / "checkpoints").mkdir()
        shutil.copy(finished / "report.json", out)
        return SimpleNamespace(returncode=exit_codes.pop(0), stderr="progress\ntrain_gpt2_xl.py: RAM is short\n")

    monkeypatch.setattr(whole_runs, "subprocess", SimpleNamespace(run=run_script, PIPE=None))  # not git's
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "temporary"))
    (tmp_path / "temporary").mkdir()
    assert ram.main(["--models", "gpt2", "gpt2-xl", "--out", str(tmp_path)]) == 1
    assert "gpt2-xl ended with exit code 3: train_gpt2_xl.py: RAM is short" in capsys.readouterr().err
    (row,) = rows.read(tmp_path / ram.NAME)  # written before the second model began
    report = json.loads((finished / "report.json").read_text())
    assert row["predicted_ram_peak_bytes"] == report["plan"]["predicted"]["ram_peak_bytes"]
    assert row["ram_peak_bytes"] == report["measured"]["ram_peak_bytes"]
    assert row["command"].startswith("python train_gpt2_large.py --model gpt2 --init random --seq 64")
    signed = f"{row['predicted_ram_peak_bytes'] / row['ram_peak_bytes'] - 1:+.1%}"
    assert f"{row['parameters']:,}" in table.tables([row]) and signed in table.tables([row])
    assert not list((tmp_path / "temporary").iterdir())


def test_a_disk_that_is_too_small_for_a_run_is_named_beforehand(monkeypatch, capsys):
    monkeypatch.setattr(whole_runs.shutil, "disk_usage", lambda _: SimpleNamespace(free=GIB))
    monkeypatch.setattr(whole_runs, "subprocess", None)
    assert ram.main(["--models", "gpt2-xl"]) == 1
    assert "24.2 GiB" in capsys.readouterr().err


def test_every_model_has_committed_rows():
    assert {row["model"] for row in table.committed_rows() if row["kind"] == "predicted"} == set(MODELS)
