"""The contract as a user meets it: both scripts, their options, exit codes, and the run folder afterwards.

Most runs call the scripts' `main` in this process, which returns the exit code. Tests of memory, of all of stderr and
of a machine without network run `python train_gpt2_large.py`. faults/ has what goes wrong.
"""

import json
import math
import re
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file
from torch.nn import functional as F
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig

import train_gpt2_large
from lowmem.data.dataset import load_data
from lowmem.data.tokenizer import load_tokenizer
from lowmem.models.build import load_config
from lowmem.models.load import random_weights
from lowmem.run.cli import parse_arguments
from lowmem.run.main import main
from lowmem.run.metrics import read_metrics
from lowmem.settings import Settings
from lowmem.units import GIB, MIB
from runs import (
    CLOCK,
    SCRIPTS,
    SMALL,
    assert_same_run,
    content,
    last_line,
    loss_rows,
    measured_run,
    stopped_in_step,
    stored,
    weights,
    write_rows,
)

PARAMETERS = {"large": 774_030_080, "xl": 1_557_611_200}
ROW = {
    *("step", "epoch", "loss", "learning_rate", "grad_norm", "tokens", "tokens_per_second", "step_ms"),
    "computed_tokens_per_second",
    *("gpu_allocated_peak_bytes", "gpu_reserved_peak_bytes", "ram_peak_bytes"),
}
PLAN = {"fits", "model", "parameters", "tokens_per_step", "limits", "choice", "predicted", "breakdown"}
CHOICE = {"micro_batch", "group", "segment_blocks", "recompute", "state_bits", "precision"}
PREDICTED = {"gpu_allocated_peak_bytes", "gpu_reserved_peak_bytes", "ram_peak_bytes", "step_seconds"}


# --- a run folder


def test_a_run_leaves_every_file_that_the_contract_names(finished):
    names = {str(path.relative_to(finished)) for path in finished.rglob("*")}
    assert names >= {
        *("settings.json", "plan.json", "metrics.jsonl", "report.json", "log.txt", "loss.png", "memory.png"),
        "report.html",
        *("checkpoints/step-00000003/manifest.json", "checkpoints/step-00000003/state.json"),
        *("model/config.json", "model/generation_config.json", "model/model.safetensors", "model/README.md"),
        *("model/tokenizer.json", "model/tokenizer_config.json"),
    }
    assert not [name for name in names if "tmp" in name or "partial" in name or "previous" in name]
    for picture in ("loss.png", "memory.png"):
        assert (finished / picture).read_bytes().startswith(b"\x89PNG")


def test_settings_json_is_what_was_typed_over_the_defaults(finished, text):
    typed = parse_arguments([*SMALL, "--data", str(text), "--out", str(finished)], train_gpt2_large.SETTINGS)
    assert Settings(**stored(finished / "settings.json")) == typed


def test_plan_json_has_the_contracts_keys(finished):
    plan = stored(finished / "plan.json")
    assert plan.keys() >= PLAN and plan["choice"].keys() >= CHOICE
    assert plan["limits"].keys() == {"gpu_bytes", "ram_bytes"} and plan["predicted"].keys() == PREDICTED
    assert (plan["fits"], plan["model"], plan["tokens_per_step"]) == (True, "gpt2-demo", 4 * 32)
    assert plan["predicted"]["gpu_allocated_peak_bytes"] is plan["predicted"]["gpu_reserved_peak_bytes"] is None
    assert sum(plan["breakdown"].values()) == plan["predicted"]["ram_peak_bytes"]
    assert plan["choice"]["micro_batch"] == 2 and plan["choice"]["precision"] == "fp32"


def test_metrics_has_a_row_per_step_with_the_contracts_keys(finished):
    rows = read_metrics(finished / "metrics.jsonl")
    assert [row["step"] for row in rows] == [1, 2, 3]
    for row in rows:
        assert row.keys() - {"eval_first", "eval_loss"} == ROW
        assert all(math.isfinite(row[key]) and row[key] > 0 for key in ("loss", "grad_norm", *CLOCK))
        assert row["tokens"] == 4 * 32
        assert row["tokens_per_second"] == pytest.approx(row["tokens"] / (row["step_ms"] / 1000))
        assert row["computed_tokens_per_second"] == row["tokens_per_second"]  # packed: every position has a label
        assert row["gpu_allocated_peak_bytes"] is row["gpu_reserved_peak_bytes"] is None
    assert ["eval_loss" in row for row in rows] == [False, False, True]
    assert rows[0]["eval_first"] == stored(finished / "report.json")["loss"]["eval_first"]
    assert rows[2]["epoch"] == pytest.approx(3 * rows[0]["epoch"])
    # a warm-up of 3% of 3 steps is one; the cosine then starts at its top
    assert [row["learning_rate"] for row in rows] == pytest.approx([1e-3, 1e-3, 5e-4])


def test_report_json_has_the_contracts_keys_and_what_was_measured(finished):
    report, rows = stored(finished / "report.json"), read_metrics(finished / "metrics.jsonl")
    assert report.keys() == {
        *("plan", "measured", "loss", "steps", "device", "versions"), *("out_of_memory", "ram_phases", "summary")
    }  # fmt: skip
    assert list(report)[0] == "summary" and list(report["summary"]) == [
        *("model", "device", "duration", "steps", "tokens", "training loss", "held-out loss", "GPU memory", "RAM"),
        "versions",
    ]
    assert report["out_of_memory"] == []
    assert report["plan"] == stored(finished / "plan.json")
    measured = report["measured"]
    assert measured.keys() == PREDICTED | {"sequences_per_second"}
    assert measured["gpu_allocated_peak_bytes"] is measured["gpu_reserved_peak_bytes"] is None
    assert measured["ram_peak_bytes"] >= rows[-1]["ram_peak_bytes"] - MIB  # the mark falls a little now and then
    assert measured["step_seconds"] == pytest.approx(sum(row["step_ms"] for row in rows[1:]) / 2000)
    assert measured["sequences_per_second"] == pytest.approx(4 / measured["step_seconds"])
    loss = report["loss"]
    assert (loss["first"], loss["last"], loss["eval_last"]) == (rows[0]["loss"], rows[2]["loss"], rows[2]["eval_loss"])
    assert loss["eval_last"] < loss["eval_first"] < 6
    assert report["steps"] == 3 and "CPU" in report["device"]
    assert report["versions"]["torch"] == torch.__version__


def held_out_loss(model, text: Path) -> float:
    """Of the rows that the runs here evaluate on, by transformers' model and the plain cross-entropy."""
    settings = Settings(data=str(text), seq=32, batch=4, steps=3, warmup_steps=0)
    data = load_data(settings, load_tokenizer("gpt2-demo", "random", 257), 257)
    batch = data.evaluations[0].batch(0)
    with torch.no_grad():
        logits = model(batch.input_ids).logits
    return F.cross_entropy(logits.flatten(0, 1).double(), batch.labels.flatten()).item()


def test_the_exported_model_loads_with_transformers_and_has_the_reported_held_out_loss(finished, text):
    model = AutoModelForCausalLM.from_pretrained(finished / "model").eval()
    assert all(parameter.dtype is torch.float32 for parameter in model.parameters())
    assert model.lm_head.weight is model.transformer.wte.weight
    expected = stored(finished / "report.json")["loss"]["eval_last"]
    assert held_out_loss(model, text) == pytest.approx(expected, abs=1e-5)


def test_the_exported_model_is_bitwise_what_the_last_checkpoint_holds(finished):
    exported = load_file(finished / "model/model.safetensors")
    found = {}
    for path in (finished / "checkpoints/step-00000003").glob("*.safetensors"):
        with safe_open(path, framework="pt") as file:
            flat = file.get_tensor("working")  # --precision auto is fp32 on the CPU: the master weights themselves
            for name, (start, *shape) in json.loads(file.metadata()["parameters"]).items():
                found[name] = flat[start : start + math.prod(shape)].view(shape)
    assert found.keys() == exported.keys()
    assert all(torch.equal(found[name], exported[name]) for name in found)


def test_every_parameter_was_trained(finished):
    trained = load_file(finished / "model/model.safetensors")
    before = dict(random_weights(load_config("gpt2-demo", "random"), seed=0))
    assert before.keys() == trained.keys()
    assert sum(tensor.numel() for tensor in before.values()) == stored(finished / "plan.json")["parameters"]
    for name, tensor in before.items():
        changed = (tensor != trained[name]).float().mean().item()
        assert changed > 0.999, (name, changed)  # a gradient may be exactly 0 by chance


def test_the_exported_tokenizer_encodes_and_decodes(finished):
    tokenizer = AutoTokenizer.from_pretrained(finished / "model")
    written = "Grüße, 世界!\n\tdef f(x): return x**2"
    assert tokenizer.decode(tokenizer(written)["input_ids"]) == written
    assert GenerationConfig.from_pretrained(finished / "model").eos_token_id == tokenizer.eos_token_id == 256


def test_the_exported_model_is_a_model_to_start_from(finished, text, tmp_path):
    out = tmp_path / "out"
    options = ["--model", str(finished / "model"), "--init", "pretrained", "--lr", "1e-5", "--data", str(text)]
    assert main(train_gpt2_large.SETTINGS, [*SMALL, *options, "--out", str(out)]) == 0
    before, after = stored(finished / "report.json")["loss"], stored(out / "report.json")["loss"]
    assert after["eval_first"] == before["eval_last"]
    assert "random" not in (out / "log.txt").read_text()


@pytest.mark.exhaustive
def test_the_default_data_are_the_standard_librarys_sources(tmp_path):
    assert main(train_gpt2_large.SETTINGS, [*SMALL, "--steps", "1", "--out", str(tmp_path / "out")]) == 0
    said = (tmp_path / "out/log.txt").read_text()
    assert "Python's standard library: " in said and "held out for evaluation" in said
    assert "a token is a byte" in said and "weights are random" in said


# --- the same bits


def test_the_same_command_gives_bitwise_the_same_weights_and_loss_rows(finished, train, tmp_path):
    assert train(tmp_path / "again") == 0
    assert_same_run(finished, tmp_path / "again")


@pytest.mark.quick(1)
@pytest.mark.parametrize(
    "placement",
    [
        ["--recompute", "on"],
        ["--recompute", "on", "--segment-blocks", "3", "--group", "2"],
        ["--states", "streamed", "--recompute", "off"],
    ],
    ids=" ".join,
)
def test_where_tensors_lie_and_when_blocks_run_changes_no_bit(finished, train, tmp_path, placement):
    assert train(tmp_path / "out", *placement) == 0
    assert_same_run(finished, tmp_path / "out")


def test_another_seed_is_another_run(finished, train, tmp_path):
    assert train(tmp_path / "out", "--seed", "1", "--steps", "1") == 0
    assert loss_rows(tmp_path / "out")[0]["loss"] != loss_rows(finished)[0]["loss"]


# --- options that change what is trained


def test_on_a_fixed_batch_the_loss_falls(train, tmp_path):
    assert train(tmp_path / "out", "--fixed-batch", "--steps", "15") == 0
    losses = [row["loss"] for row in loss_rows(tmp_path / "out")]
    assert losses[-1] < losses[0] - 2
    assert loss_rows(tmp_path / "out")[4]["epoch"] == 5


@pytest.mark.quick(1)
@pytest.mark.parametrize(
    ("optimizer", "precision", "state_bits"),
    [
        *[("adamw", "bf16", 32), ("adamw", "fp16", 32), ("adamw8bit", "fp32", 8), ("adamw8bit", "bf16", 8)],
        ("sgd", "fp32", 0),
    ],
)
def test_every_optimizer_and_precision_trains_and_resumes_bitwise(
    train, tmp_path, monkeypatch, optimizer, precision, state_bits
):
    if optimizer == "adamw8bit":
        pytest.importorskip("bitsandbytes")
    options = ["--optimizer", optimizer, "--precision", precision, "--steps", "2"]
    options += ["--lr", "0.1"] if optimizer == "sgd" else []
    assert train(tmp_path / "whole", *options) == 0
    loss = stored(tmp_path / "whole/report.json")["loss"]
    assert loss["eval_last"] < loss["eval_first"]
    choice = stored(tmp_path / "whole/plan.json")["choice"]
    assert (choice["optimizer"], choice["precision"], choice["state_bits"]) == (optimizer, precision, state_bits)

    with stopped_in_step():
        assert train(tmp_path / "parts", *options) == 75
    assert train(tmp_path / "parts", *options) == 0
    assert_same_run(tmp_path / "whole", tmp_path / "parts")


def test_a_jsonl_of_texts_is_packed(train, tmp_path):
    data = write_rows(tmp_path / "texts.jsonl", [{"text": f"Text {number} of many. " * 4} for number in range(40)])
    assert train(tmp_path / "out", "--data", data) == 0
    assert {row["tokens"] for row in loss_rows(tmp_path / "out")} == {4 * 32}


def test_a_jsonl_of_prompts_and_completions_trains_the_completions_alone(train, tmp_path):
    pairs = [{"prompt": f"{number} + 1 =", "completion": f" {number + 1}"} for number in range(10, 60)]
    data = write_rows(tmp_path / "pairs.jsonl", pairs)
    assert train(tmp_path / "out", "--data", data) == 0
    assert {row["tokens"] for row in loss_rows(tmp_path / "out")} == {4 * len(" 11<")}  # and the end of the text
    assert train(tmp_path / "all", "--data", data, "--train-on", "all") == 0
    assert {row["tokens"] for row in loss_rows(tmp_path / "all")} == {4 * len("0 + 1 = 11<")}


def test_several_texts_are_mixed_and_several_are_held_out(train, tmp_path):
    """The loss of all is the mean over their tokens, of which the second text has more."""
    answers = write_rows(
        tmp_path / "pairs.jsonl", [{"prompt": f"{n} + 1 =", "completion": f" {n + 1}"} for n in range(60)]
    )
    for name, times in (("short", 40), ("long", 200)):
        (tmp_path / f"{name}.txt").write_text("Quite another text. " * times)
    held_out = [str(tmp_path / f"{name}.txt") for name in ("short", "long")]
    mixed = ("--data", str(tmp_path / "long.txt"), "--data", f"{answers}=2", "--data", answers)
    evaluated = [word for name in held_out for word in ("--eval-data", name)]
    assert train(tmp_path / "out", *mixed, *evaluated, "--eval-batches", "99", "--eval-every", "1") == 0
    text = (tmp_path / "out/log.txt").read_text()
    assert "before training: held-out " in text and "an epoch has " in text
    settings = Settings(seq=32, batch=4, data=held_out, eval_data=held_out)
    data = load_data(settings, load_tokenizer("gpt2-demo", "random", 257), 257)
    tokens = [sum(rows.batch(n).trained_tokens for n in range(len(rows))) for rows in data.evaluations]
    for row in loss_rows(tmp_path / "out"):
        assert list(row["eval_losses"]) == held_out
        mean = sum(loss * count for loss, count in zip(row["eval_losses"].values(), tokens, strict=True)) / sum(tokens)
        assert row["eval_loss"] == pytest.approx(mean, rel=1e-12) and len(set(row["eval_losses"].values())) == 2


def test_with_a_document_mask_attention_stops_at_a_documents_end(train, tmp_path):
    data = write_rows(tmp_path / "texts.jsonl", [{"text": f"Text {number}. "} for number in range(200)])
    for mask in ("on", "off"):
        assert train(tmp_path / mask, "--data", data, "--document-mask", mask) == 0
    masked, open_ = loss_rows(tmp_path / "on"), loss_rows(tmp_path / "off")
    assert masked[0]["loss"] != open_[0]["loss"]
    assert masked[0]["tokens"] < open_[0]["tokens"]  # no document's end predicts the next document


def test_where_nothing_can_be_held_out_the_figures_are_null(train, tmp_path):
    data = write_rows(tmp_path / "one.jsonl", [{"text": "a text of little more than 32 bytes"}])
    assert train(tmp_path / "out", "--data", data, "--eval-every", "1") == 0
    loss = stored(tmp_path / "out/report.json")["loss"]
    assert loss["eval_first"] is loss["eval_last"] is None and loss["last"] < loss["first"]
    log = (tmp_path / "out/log.txt").read_text()
    assert "nothing held out" in log and "nothing is held out, so --eval-every does nothing" in log


def test_evaluations_and_checkpoints_come_as_often_as_asked_for(finished, train, tmp_path):
    out = tmp_path / "out"
    assert train(out, "--eval-every", "1", "--save-every", "1", "--keep-last", "2") == 0
    assert all("eval_loss" in row for row in loss_rows(out))
    assert sorted(path.name for path in (out / "checkpoints").iterdir()) == ["step-00000002", "step-00000003"]
    assert weights(out) == weights(finished)  # looking changes nothing


def test_an_export_in_16_bit_is_the_fp32_weights_rounded_and_checkpoints_are_as_ever(finished, train, tmp_path):
    assert train(tmp_path / "out", "--export-dtype", "bfloat16") == 0
    exact = load_file(finished / "model/model.safetensors")
    rounded = load_file(tmp_path / "out/model/model.safetensors")
    assert exact.keys() == rounded.keys()
    assert all(torch.equal(rounded[name], weight.bfloat16()) for name, weight in exact.items())
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "out/model", dtype="auto").dtype is torch.bfloat16
    disk = [stored(out / "plan.json")["disk"] for out in (finished, tmp_path / "out")]
    assert disk[0]["export"] == 2 * disk[1]["export"] and disk[0]["checkpoints"] == disk[1]["checkpoints"]
    (one, other) = (content(out / "checkpoints/step-00000003") for out in (finished, tmp_path / "out"))
    assert one == other


@pytest.mark.quick(1)
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_a_prompt_is_continued_before_and_after_and_changes_nothing(finished, train, tmp_path, precision):
    assert train(tmp_path / "out", "--sample-prompt", "one 1: the", "--precision", precision) == 0
    said = (tmp_path / "out/log.txt").read_text()
    assert said.count("sample: one 1: the") == 3  # before training, and at the end beside what it was then
    if precision == "fp32":
        assert_same_run(finished, tmp_path / "out")


@pytest.mark.quick(1)
@pytest.mark.parametrize("prompt", ["", "x" * 230, "x" * 300], ids=["empty", "no room to go on", "too long"])
def test_a_prompt_that_cannot_be_continued_costs_no_run(train, tmp_path, prompt):
    code = train(tmp_path / "out", "--sample-prompt", prompt)
    assert code == 2 and not (tmp_path / "out").exists() or code == 0 and (tmp_path / "out/model").exists()


# --- planning


@pytest.mark.exhaustive
@pytest.mark.timeout(1200)  # XL's plan takes a minute of one quiet processor, and several of a busy one
@pytest.mark.parametrize("script", SCRIPTS)
def test_plan_only_needs_neither_gpu_nor_weights_nor_network(tmp_path, script):
    out = tmp_path / "out"
    code, said, errors, peak_bytes, _ = measured_run(
        [f"train_gpt2_{script}.py", "--plan-only", "--out", str(out)],
        {"HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path / "home"), "CUDA_VISIBLE_DEVICES": ""},
    )
    assert (code, errors) == (0, f"memory over a step, by name and by phase: {out / 'memory.png'}\n")
    assert peak_bytes < 3 * GIB
    assert sorted(path.name for path in out.iterdir()) == ["memory.png", "plan.json"]
    assert not (tmp_path / "home").exists()

    plan = stored(out / "plan.json")
    assert plan.keys() >= PLAN and plan["choice"].keys() >= CHOICE and plan["predicted"].keys() == PREDICTED
    assert plan["parameters"] == PARAMETERS[script]
    assert (plan["fits"], plan["tokens_per_step"]) == (True, 64 * 1024)
    assert plan["limits"] == {"gpu_bytes": 11 * GIB, "ram_bytes": 16 * GIB if script == "xl" else None}
    assert 0 < plan["predicted"]["gpu_allocated_peak_bytes"] <= plan["predicted"]["gpu_reserved_peak_bytes"] <= 11 * GIB
    assert 0 < plan["predicted"]["ram_peak_bytes"] <= 16 * GIB
    assert sum(plan["breakdown"].values()) == plan["predicted"]["gpu_allocated_peak_bytes"]
    assert said.startswith("Fits: ") and " of 11.0 GiB GPU, " in said and " s a step on " in said


@pytest.mark.exhaustive
def test_a_cap_too_small_for_xl_names_one_that_does_fit_and_a_little_less_does_not(tmp_path, capsys):
    def planned(gpu_mib: int) -> int:
        limits = ["--gpu-limit", f"{gpu_mib}MiB", "--ram-limit", "17GiB", "--micro-batch", "1", "--group", "1"]
        return main(SCRIPTS["xl"].SETTINGS, ["--plan-only", "--out", str(tmp_path / "out"), *limits])

    assert planned(2048) == 3
    sentence = last_line(capsys)
    gpu_mib, ram_mib = map(int, re.search(r"--gpu-limit (\d+)MiB with --ram-limit (\d+)MiB", sentence).groups())
    assert ram_mib <= 17 * 1024 and not (tmp_path / "out").exists()
    assert planned(gpu_mib - 64) == 3
    assert planned(gpu_mib) == 0


def test_a_ram_cap_too_small_for_the_cpu_is_refused_before_anything_is_done(train, tmp_path, capsys):
    assert train(tmp_path / "out", "--ram-limit", "300MiB") == 3
    sentence = last_line(capsys)
    assert "300 MiB of RAM" in sentence
    least_mib = int(re.search(r"--ram-limit (\d+)MiB", sentence)[1])
    named = f"{least_mib + 64}MiB"  # this process has grown by planning
    assert not (tmp_path / "out").exists()
    assert train(tmp_path / "out", "--ram-limit", named, "--plan-only") == 0


def test_plan_only_overrules_nothing_and_trains_nothing(train, tmp_path):
    out = tmp_path / "out"
    assert train(out, "--plan-only", "--recompute", "on", "--segment-blocks", "2") == 0
    assert sorted(path.name for path in out.iterdir()) == ["memory.png", "plan.json"]
    choice = stored(out / "plan.json")["choice"]
    assert (choice["micro_batch"], choice["recompute"], choice["segment_blocks"]) == (2, True, 2)


def test_planning_leaves_a_runs_own_plan_alone(train, tmp_path, capsys):
    assert train(tmp_path / "out") == 0
    before = (tmp_path / "out/plan.json").read_bytes()
    assert train(tmp_path / "out", "--plan-only", "--gpu-limit", "20GiB") == 0
    assert (tmp_path / "out/plan.json").read_bytes() == before
    assert "stays as it is" in last_line(capsys)
