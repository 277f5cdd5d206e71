"""The contract as a user meets it: both scripts, their options, exit codes, and what stands in a run folder afterwards.

Most runs call the scripts' own `main` in this process, which returns the exit code; what only a process of its own can
show (signals, memory, stderr as a whole, a machine without a network) runs `python train_gpt2_large.py`. The model is
that of --demo, at three steps of 4 x 32 tokens.
"""

import errno
import json
import math
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file
from torch.nn import functional as F
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig

import lowmem.budget
import lowmem.plan
import lowmem.step
import lowmem.train
import train_gpt2_large
import train_gpt2_xl
from lowmem.cli import parse_arguments
from lowmem.data import load_data
from lowmem.log import RunLog, read_metrics
from lowmem.models import load_config
from lowmem.resume import lock_run
from lowmem.settings import Settings
from lowmem.step import Step
from lowmem.tokenizer import load_tokenizer
from lowmem.train import main
from lowmem.units import GIB, MIB
from lowmem.weights import random_weights

ROOT = Path(__file__).resolve().parent.parent
SCRIPTS = {"large": train_gpt2_large, "xl": train_gpt2_xl}
PARAMETERS = {"large": 774_030_080, "xl": 1_557_611_200}
SMALL = (
    *("--demo", "--steps", "3", "--seq", "32", "--batch", "4", "--micro-batch", "2", "--eval-batches", "1"),
    *("--device", "cpu"),
)
CLOCK = ("step_ms", "tokens_per_second", "ram_peak_bytes")  # of a row: what may differ between equal runs
ROW = {
    *("step", "epoch", "loss", "learning_rate", "grad_norm", "tokens", "tokens_per_second", "step_ms"),
    *("gpu_allocated_peak_bytes", "gpu_reserved_peak_bytes", "ram_peak_bytes"),
}
PLAN = {"fits", "model", "parameters", "tokens_per_step", "limits", "choice", "predicted", "breakdown"}
CHOICE = {"micro_batch", "group", "segment_blocks", "recompute", "state_bits", "precision"}
PREDICTED = {"gpu_allocated_peak_bytes", "gpu_reserved_peak_bytes", "ram_peak_bytes", "step_seconds"}


@pytest.fixture(scope="module")
def text(tmp_path_factory) -> Path:
    """Two short files of text: enough to hold one out."""
    folder = tmp_path_factory.mktemp("text")
    for name in ("one", "two"):
        lines = [f"{name} {number}: the square of it is {number**2}.\n" for number in range(150)]
        (folder / f"{name}.txt").write_text("".join(lines))
    return folder


@pytest.fixture(scope="module")
def train(text):
    """Runs the Large script on `text`; returns its exit code."""

    def run(out: Path, *options: str) -> int:
        return main(train_gpt2_large.SETTINGS, [*SMALL, "--data", str(text), "--out", str(out), *options])

    return run


@pytest.fixture(scope="module")
def finished(tmp_path_factory, train) -> Path:
    """The folder of a run that ended as it should."""
    out = tmp_path_factory.mktemp("runs") / "finished"
    assert train(out) == 0
    return out


def stored(path: Path) -> dict:
    return json.loads(path.read_text())


def loss_rows(out: Path) -> list[dict]:
    return [{key: row[key] for key in row if key not in CLOCK} for row in read_metrics(out / "metrics.jsonl")]


def weights(out: Path) -> bytes:
    return (out / "model/model.safetensors").read_bytes()


def assert_same_run(one: Path, other: Path) -> None:
    assert loss_rows(one) == loss_rows(other)
    assert weights(one) == weights(other)
    newest = max(path.name for path in (one / "checkpoints").iterdir())
    assert content(one / "checkpoints" / newest) == content(other / "checkpoints" / newest)  # m, v, loss scale, ...


def content(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def last_line(capsys) -> str:
    """What a failed run says: the last line on stderr, with no traceback before it."""
    errors = capsys.readouterr().err
    assert "Traceback" not in errors
    return errors.splitlines()[-1]


# --- a run folder


def test_a_run_leaves_every_file_that_the_contract_names(finished):
    names = {str(path.relative_to(finished)) for path in finished.rglob("*")}
    assert names >= {
        *("settings.json", "plan.json", "metrics.jsonl", "report.json", "log.txt", "loss.png", "memory.png"),
        *(
            "checkpoints/step-00000003",
            "checkpoints/step-00000003/manifest.json",
            "checkpoints/step-00000003/state.json",
        ),
        *("model/config.json", "model/generation_config.json", "model/model.safetensors", "model/README.md"),
        *("model/tokenizer.json", "model/tokenizer_config.json"),
    }
    assert not [name for name in names if "tmp" in name or "partial" in name or "previous" in name]
    for picture in ("loss.png", "memory.png"):
        assert (finished / picture).read_bytes().startswith(b"\x89PNG")


def test_settings_json_is_what_was_typed_over_the_defaults(finished, text):
    typed = parse_arguments([*SMALL, "--data", str(text), "--out", str(finished)], train_gpt2_large.SETTINGS)
    assert Settings.from_json((finished / "settings.json").read_text()) == typed


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
        assert row.keys() - {"eval_loss"} == ROW
        assert all(math.isfinite(row[key]) and row[key] > 0 for key in ("loss", "grad_norm", *CLOCK))
        assert row["tokens"] == 4 * 32
        assert row["tokens_per_second"] == pytest.approx(row["tokens"] / (row["step_ms"] / 1000))
        assert row["gpu_allocated_peak_bytes"] is row["gpu_reserved_peak_bytes"] is None
    assert ["eval_loss" in row for row in rows] == [False, False, True]
    assert rows[2]["epoch"] == pytest.approx(3 * rows[0]["epoch"])
    # a warm-up of 3% of 3 steps is one; the cosine then starts at its top
    assert [row["learning_rate"] for row in rows] == pytest.approx([1e-3, 1e-3, 5e-4])


def test_report_json_has_the_contracts_keys_and_what_was_measured(finished):
    report, rows = stored(finished / "report.json"), read_metrics(finished / "metrics.jsonl")
    assert report.keys() == {"plan", "measured", "loss", "steps", "device", "versions"}
    assert report["plan"] == stored(finished / "plan.json")
    measured = report["measured"]
    assert measured.keys() == PREDICTED | {"sequences_per_second"}
    assert measured["gpu_allocated_peak_bytes"] is measured["gpu_reserved_peak_bytes"] is None
    assert measured["ram_peak_bytes"] >= rows[-1]["ram_peak_bytes"]
    assert measured["step_seconds"] == pytest.approx(sum(row["step_ms"] for row in rows[1:]) / 2000)
    assert measured["sequences_per_second"] == pytest.approx(4 / measured["step_seconds"])
    loss = report["loss"]
    assert (loss["first"], loss["last"], loss["eval_last"]) == (rows[0]["loss"], rows[2]["loss"], rows[2]["eval_loss"])
    assert loss["eval_last"] < loss["eval_first"] < 6
    assert report["steps"] == 3 and "CPU" in report["device"]
    assert report["versions"]["torch"] == torch.__version__


def held_out_loss(model, text: Path) -> float:
    """Of the rows that the runs here evaluate on, by transformers' model and the plain cross-entropy."""
    data = load_data(
        spec=str(text), eval_spec=None, eval_fraction=0.01, text_field="text", train_on="completion",
        tokenizer=load_tokenizer("gpt2-demo", "random", 257), seq=32, batch=4, steps=3, seed=0, document_mask=False,
        fixed_batch=False, vocabulary_size=257, max_positions=256,
    )  # fmt: skip
    batch = data.evaluation.batch(0)
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


def test_the_default_data_are_the_standard_librarys_sources(tmp_path):
    assert main(train_gpt2_large.SETTINGS, [*SMALL, "--steps", "1", "--out", str(tmp_path / "out")]) == 0
    said = (tmp_path / "out/log.txt").read_text()
    assert "Python's standard library: " in said and "held out: " in said
    assert "a token is a byte" in said and "weights are random" in said


# --- the same bits


def test_the_same_command_gives_bitwise_the_same_weights_and_loss_rows(finished, train, tmp_path):
    assert train(tmp_path / "again") == 0
    assert_same_run(finished, tmp_path / "again")


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


def test_settings_json_given_back_as_config_is_the_same_run(finished, tmp_path):
    options = ["--config", str(finished / "settings.json"), "--out", str(tmp_path / "out")]
    assert main(train_gpt2_xl.SETTINGS, options) == 0  # nothing is left to the script's own defaults
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


@pytest.mark.parametrize(
    ("optimizer", "precision", "state_bits"),
    [
        ("adamw", "bf16", 32),
        ("adamw", "fp16", 32),
        ("adamw8bit", "fp32", 8),
        ("adamw8bit", "bf16", 8),
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

    with monkeypatch.context() as patch:
        stop_in(patch, Step, "__call__")
        assert train(tmp_path / "parts", *options) == 75
    assert train(tmp_path / "parts", *options) == 0
    assert_same_run(tmp_path / "whole", tmp_path / "parts")


def jsonl(path: Path, rows: list[dict]) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def test_a_jsonl_of_texts_is_packed(train, tmp_path):
    data = jsonl(tmp_path / "texts.jsonl", [{"text": f"Text {number} of many. " * 4} for number in range(40)])
    assert train(tmp_path / "out", "--data", data) == 0
    assert {row["tokens"] for row in loss_rows(tmp_path / "out")} == {4 * 32}


def test_a_jsonl_of_prompts_and_completions_trains_the_completions_alone(train, tmp_path):
    pairs = [{"prompt": f"{number} + 1 =", "completion": f" {number + 1}"} for number in range(10, 60)]
    data = jsonl(tmp_path / "pairs.jsonl", pairs)
    assert train(tmp_path / "out", "--data", data) == 0
    assert {row["tokens"] for row in loss_rows(tmp_path / "out")} == {4 * len(" 11<")}  # and the end of the text
    assert train(tmp_path / "all", "--data", data, "--train-on", "all") == 0
    assert {row["tokens"] for row in loss_rows(tmp_path / "all")} == {4 * len("0 + 1 = 11<")}


def test_what_is_held_out_can_be_named(train, tmp_path):
    (tmp_path / "held-out.txt").write_text("Quite another text. " * 10)
    assert train(tmp_path / "out", "--eval-data", str(tmp_path / "held-out.txt")) == 0
    assert "evaluated on " in (tmp_path / "out/log.txt").read_text()


def test_with_a_document_mask_attention_stops_at_a_documents_end(train, tmp_path):
    data = jsonl(tmp_path / "texts.jsonl", [{"text": f"Text {number}. "} for number in range(200)])
    for mask in ("on", "off"):
        assert train(tmp_path / mask, "--data", data, "--document-mask", mask) == 0
    masked, open_ = loss_rows(tmp_path / "on"), loss_rows(tmp_path / "off")
    assert masked[0]["loss"] != open_[0]["loss"]
    assert masked[0]["tokens"] < open_[0]["tokens"]  # no document's end predicts the next document


def test_where_nothing_can_be_held_out_the_figures_are_null(train, tmp_path):
    data = jsonl(tmp_path / "one.jsonl", [{"text": "a text of little more than 32 bytes"}])
    assert train(tmp_path / "out", "--data", data) == 0
    loss = stored(tmp_path / "out/report.json")["loss"]
    assert loss["eval_first"] is loss["eval_last"] is None and loss["last"] < loss["first"]
    assert "nothing held out" in (tmp_path / "out/log.txt").read_text()


def test_evaluations_and_checkpoints_come_as_often_as_asked_for(finished, train, tmp_path):
    out = tmp_path / "out"
    assert train(out, "--eval-every", "1", "--save-every", "1", "--keep-last", "2") == 0
    assert all("eval_loss" in row for row in loss_rows(out))
    assert sorted(path.name for path in (out / "checkpoints").iterdir()) == ["step-00000002", "step-00000003"]
    assert weights(out) == weights(finished)  # looking changes nothing


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_a_prompt_is_continued_at_the_end_and_changes_nothing(finished, train, tmp_path, precision):
    assert train(tmp_path / "out", "--sample-prompt", "one 1: the", "--precision", precision) == 0
    assert "sample: one 1: the" in (tmp_path / "out/log.txt").read_text()
    if precision == "fp32":
        assert_same_run(finished, tmp_path / "out")


@pytest.mark.parametrize("prompt", ["", "x" * 230, "x" * 300], ids=["empty", "no room to go on", "too long"])
def test_a_prompt_that_cannot_be_continued_costs_no_run(train, tmp_path, prompt):
    code = train(tmp_path / "out", "--sample-prompt", prompt)
    assert code == 2 and not (tmp_path / "out").exists() or code == 0 and (tmp_path / "out/model").exists()


# --- planning


def measured_run(arguments: list[str], environment: dict[str, str]) -> tuple[int, str, str, int, float]:
    """Exit code, stdout, stderr, peak RSS in bytes and seconds of a Python process in the repository."""
    started = time.monotonic()
    process = subprocess.Popen(
        [sys.executable, *arguments], cwd=ROOT, env=os.environ | environment, stdout=subprocess.PIPE,
        stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    with process:
        out, err = process.stdout.read(), process.stderr.read()
        _, status, usage = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
    return process.returncode, out, err, usage.ru_maxrss * 1024, time.monotonic() - started


@pytest.mark.parametrize("script", SCRIPTS)
def test_plan_only_needs_neither_gpu_nor_weights_nor_network(tmp_path, script):
    out = tmp_path / "out"
    code, said, errors, peak_bytes, seconds = measured_run(
        [f"train_gpt2_{script}.py", "--plan-only", "--out", str(out)],
        {"HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path / "home"), "CUDA_VISIBLE_DEVICES": ""},
    )
    assert (code, errors) == (0, "")
    assert peak_bytes < 3 * GIB and seconds < 60
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
    assert f"{PARAMETERS[script]:,} parameters, all trained" in said and "fits" in said


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


# --- what is refused


def test_a_cap_that_is_exceeded_ends_the_run_with_exit_4_and_both_figures(train, tmp_path, capsys, monkeypatch):
    peaks = iter(range(1, 100))
    monkeypatch.setattr(lowmem.budget, "ram_peak_bytes", lambda: next(peaks) * GIB)
    assert train(tmp_path / "out", "--ram-limit", "2GiB") == 4
    assert re.search(r": step 2: RAM reached [\d.]+ GiB, [\d.]+ GiB over the cap of 2.00 GiB$", last_line(capsys))
    assert [row["step"] for row in loss_rows(tmp_path / "out")] == [1, 2]
    assert not (tmp_path / "out/model").exists()


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--step", "3"], "--steps"),  # no abbreviations
        (["--micro-bach", "3"], "did you mean --micro-batch"),
        (["--steps", "3", "--epochs", "1"], "give one of them"),
        (["--lr", "1e-4", "--learning_rate", "1e-3"], "set the same thing"),
        (["--batch", "4", "--micro-batch", "3"], "cannot be cut into micro-batches of 3"),
        (["--batch_size", "4"], "--batch"),
        (["--steps", "-3"], "at least 1"),
        (["--batch", "0"], "at least 1"),
        (["--lr", "nan"], "--lr"),
        (["--gpu-limit", "11GB"], "not a size"),
        (["--ram-limit", "plenty"], "not a size"),
        (["--precision", "int3"], "not one of"),
        (["--out"], "needs a value"),
        (["wikitext"], "Unexpected argument"),
        (["--config", "/nowhere/settings.json"], "cannot be read"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
@pytest.mark.parametrize("script", SCRIPTS)
def test_a_bad_option_is_answered_in_one_sentence_and_nothing_is_written(
    tmp_path, capsys, monkeypatch, script, options, said
):
    monkeypatch.chdir(tmp_path)
    assert main(SCRIPTS[script].SETTINGS, options) == 2
    out, err = capsys.readouterr()
    assert (out, err.count("\n")) == ("", 1) and said in err, err
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--data", "nowhere.txt"], "nowhere.txt: no such file"),
        (["--data", "empty.txt"], "empty.txt: the file is empty"),
        (["--data", "broken.jsonl"], "broken.jsonl:2: bad JSON"),
        (["--data", "short.txt"], "do not fill one row of 32"),
        (["--data", "latin.txt"], "latin.txt:1: not UTF-8"),
        (["--eval-data", "empty.txt"], "empty.txt: the file is empty"),
        (["--seq", "257"], "256 positions"),
        (["--model", "nowhere/model"], "nowhere/model"),
        (["--model", "short.txt"], "short.txt cannot be read as a config.json"),
        (["--resume", "nowhere"], "there is no such folder"),
        pytest.param(
            ["--device", "cuda"],
            "finds no CUDA device",
            marks=pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device"),
        ),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_bad_input_is_answered_in_one_sentence_and_nothing_is_written(
    train, tmp_path, capsys, monkeypatch, options, said
):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)  # read when it was imported
    (tmp_path / "empty.txt").touch()
    (tmp_path / "short.txt").write_text("short")
    (tmp_path / "latin.txt").write_bytes("Grüße".encode("latin-1"))
    (tmp_path / "broken.jsonl").write_text('{"text": "whole"}\n{"text": "hal')
    before = content(tmp_path)
    assert train(tmp_path / "out", *options) == 2
    assert said in last_line(capsys)
    assert not (tmp_path / "out").exists() and content(tmp_path) == before


@pytest.mark.parametrize("options", [[], ["--plan-only"]], ids=" ".join)
def test_an_out_that_cannot_be_a_folder_is_refused(train, tmp_path, capsys, options):
    (tmp_path / "out").write_text("a file")
    assert train(tmp_path / "out", *options) == 2
    assert "cannot be written" in last_line(capsys)
    assert (tmp_path / "out").read_text() == "a file"


def test_two_runs_do_not_share_a_folder(train, tmp_path, capsys):
    with lock_run(tmp_path / "out"):
        assert train(tmp_path / "out") == 2
        assert "another run is writing to" in last_line(capsys)
        assert [path.name for path in (tmp_path / "out").iterdir()] == [".lock"]


def test_without_network_and_cache_pretrained_weights_are_refused_quickly_in_one_sentence(tmp_path):
    code, said, errors, _, seconds = measured_run(
        ["train_gpt2_large.py", "--out", str(tmp_path / "out"), "--steps", "1", "--device", "cpu"],
        {"HF_ENDPOINT": "http://127.0.0.1:9", "HF_HOME": str(tmp_path / "home"), "HF_HUB_OFFLINE": "0"},
    )
    assert code == 2 and seconds < 60 and "Traceback" not in errors
    sentence = errors.splitlines()[-1]
    assert sentence.startswith("train_gpt2_large.py: ") and "gpt2-large" in sentence and "local folder" in sentence
    assert not (tmp_path / "out").exists()


def test_a_misspelt_option_in_a_real_process(tmp_path):
    code, said, errors, _, _ = measured_run(
        ["train_gpt2_xl.py", "--gpu-limt", "11GiB", "--out", str(tmp_path / "x")], {}
    )
    assert (code, said) == (2, "")
    assert errors == "train_gpt2_xl.py: Unknown option --gpu-limt: did you mean --gpu-limit?\n"
    assert not (tmp_path / "x").exists()


@pytest.mark.parametrize("script", SCRIPTS)
def test_help_exits_with_0(capsys, script):
    with pytest.raises(SystemExit) as stopped:
        main(SCRIPTS[script].SETTINGS, ["--help"])
    assert stopped.value.code == 0
    assert "--gpu-limit" in capsys.readouterr().out


# --- stopped and going on


def simulated() -> bool:
    """Whether this is the plan's simulation of a step and not a step."""
    return bool(_get_current_dispatch_mode_stack())


def stop_in(patch: pytest.MonkeyPatch, owner: object, name: str, call: int = 1, number: int = signal.SIGTERM) -> None:
    """The process gets the signal at the beginning of the `call`-th call of owner.name."""
    real, calls = getattr(owner, name), iter(range(1, 1000))

    def stopping(*arguments, **keywords):
        if not simulated() and next(calls) == call:
            os.kill(os.getpid(), number)
        return real(*arguments, **keywords)

    patch.setattr(owner, name, stopping)


@pytest.mark.parametrize(
    ("owner", "name", "call", "number", "done"),
    [
        (lowmem.train, "load_data", 1, signal.SIGTERM, 0),
        (Step, "evaluate", 1, signal.SIGINT, 0),  # before the first step
        (Step, "__call__", 2, signal.SIGTERM, 2),
        (
            lowmem.step,
            "linear_cross_entropy",
            6,
            signal.SIGINT,
            2,
        ),  # 2 in the evaluation, 2 per step: in mid-accumulation
        (lowmem.train, "save_checkpoint", 1, signal.SIGTERM, 2),
        (Step, "evaluate", 3, signal.SIGINT, 2),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_signal_at_any_moment_is_answered_at_the_end_of_the_step_and_costs_no_bit(
    finished, train, tmp_path, capsys, monkeypatch, owner, name, call, number, done
):
    options = ["--save-every", "2", *(["--eval-every", "1"] if call == 3 else [])]
    with monkeypatch.context() as patch:
        stop_in(patch, owner, name, call, number)
        code = train(tmp_path / "out", *options)
    sentence = last_line(capsys)
    rows = loss_rows(tmp_path / "out")
    assert (code, len(rows)) == (75, done)
    assert f"stopped by {signal.Signals(number).name} after step {done}" in sentence
    assert not (tmp_path / "out/model").exists()
    assert train(tmp_path / "out", *options) == 0
    assert f"{done} of 3 steps are done" in capsys.readouterr().err
    assert weights(tmp_path / "out") == weights(finished)
    assert [row["loss"] for row in loss_rows(tmp_path / "out")] == [row["loss"] for row in loss_rows(finished)]


def test_a_process_that_is_told_to_stop_saves_and_the_same_command_goes_on_bitwise(text, train, tmp_path):
    """With wandb beside it, offline, which starts processes and catches signals of its own."""
    options = ["--steps", "60", "--out", str(tmp_path / "out")]
    command = [sys.executable, "train_gpt2_large.py", *SMALL, "--data", str(text), *options]
    offline = {"env": os.environ | {"WANDB_MODE": "offline", "WANDB_SILENT": "true"}, "cwd": ROOT, "text": True}
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, **offline) as process:
        for line in process.stderr:
            if line.startswith("step 4/"):
                process.terminate()
                break
        errors = process.stderr.read()
    assert process.returncode == 75, errors
    assert "stopped by SIGTERM after step" in errors.splitlines()[-1] and "Traceback" not in errors
    assert not (tmp_path / "out/model").exists()

    result = subprocess.run(command, capture_output=True, **offline)
    assert result.returncode == 0, result.stderr
    assert re.search(r"going on from .*: \d+ of 60 steps are done", result.stderr)
    assert train(tmp_path / "whole", "--steps", "60") == 0
    assert_same_run(tmp_path / "whole", tmp_path / "out")

    readme = (tmp_path / "out/model/README.md").read_text()
    assert f"\n\n    {shlex.join(command[1:])}\n\n" in readme
    assert "859,008 parameters" in readme and "after 60 steps" in readme
    wandb_runs = list((tmp_path / "out").glob("wandb/offline-run-*/*.wandb"))
    assert len(wandb_runs) == 2 or "wandb could not start" in errors  # the package is optional


def test_the_same_command_after_the_end_computes_nothing_anew(finished, train, tmp_path, capsys):
    out = tmp_path / "out"
    assert train(out) == 0
    before = content(out)
    capsys.readouterr()
    assert train(out) == 0
    after = content(out)
    assert "3 of 3 steps are done" in capsys.readouterr().err
    same = [name for name in before if name.startswith(("metrics", "checkpoints", "model/model", "loss.png", "plan"))]
    assert len(same) > 10 and all(before[name] == after[name] for name in same)
    assert stored(out / "report.json")["loss"] == json.loads(before["report.json"])["loss"]


def test_resume_never_starts_anew(finished, train, tmp_path):
    out = tmp_path / "out"
    assert train(out, "--steps", "1") == 0
    assert train(out, "--resume", "never") == 0
    assert_same_run(finished, out)
    assert "not used, and replaced by what this run will save: step-00000001" in (out / "log.txt").read_text()


@pytest.mark.parametrize(
    ("options", "difference"),
    [
        (["--batch", "8", "--micro-batch", "2"], "--batch 4 -> 8"),
        (["--seq", "16"], "--seq 32 -> 16"),
        (["--steps", "5"], "--steps 3 -> 5"),
        (["--lr", "1e-4"], "--lr 0.001 -> 0.0001"),
        (["--schedule", "linear"], "--schedule cosine -> linear"),
        (["--optimizer", "sgd"], "--optimizer adamw -> sgd"),
        (["--precision", "bf16"], "--precision fp32 -> bf16"),
        (["--micro-batch", "4"], "--micro-batch 2 -> 4"),
        (["--data", "python-stdlib"], "data or tokenizer "),
    ],
    ids=" ".join,
)
def test_what_would_change_the_bits_is_refused_on_resume_and_the_difference_shown(
    finished, train, capsys, options, difference
):
    before = content(finished)
    assert train(finished, *options) == 2
    assert difference in last_line(capsys)
    assert content(finished) == before


def test_a_run_can_go_on_in_another_folder(finished, train, tmp_path):
    assert train(tmp_path / "first", "--save-every", "2") == 0
    start = tmp_path / "first/checkpoints/step-00000002"
    assert train(tmp_path / "second", "--resume", str(start)) == 0
    assert weights(tmp_path / "second") == weights(finished)
    assert loss_rows(tmp_path / "second") == loss_rows(finished)[2:]


def test_a_finished_run_whose_rows_are_elsewhere_is_finished_again(finished, train, tmp_path):
    assert train(tmp_path / "out", "--resume", str(finished)) == 0
    assert weights(tmp_path / "out") == weights(finished)
    loss = stored(tmp_path / "out/report.json")["loss"]
    assert loss["first"] is loss["last"] is None


# --- losses that are not numbers


def spoil(patch: pytest.MonkeyPatch, micro_batches: range) -> None:
    """The training loss, and its gradient, of these micro-batches (counted from 0 over the run) are NaN."""
    real, calls = lowmem.step.linear_cross_entropy, iter(range(1000))

    def spoilt(*arguments, **keywords):
        loss, gradient = real(*arguments, **keywords)
        if simulated() or keywords.get("weight_gradient") is None or next(calls) not in micro_batches:
            return loss, gradient
        return loss * math.nan, gradient * math.nan

    patch.setattr(lowmem.step, "linear_cross_entropy", spoilt)


def test_ten_steps_in_a_row_without_a_finite_gradient_stop_the_run_with_the_weights_intact(
    train, tmp_path, capsys, monkeypatch
):
    spoil(monkeypatch, range(2 * 2, 1000))  # from the third step on
    out = tmp_path / "out"
    assert train(out, "--steps", "30", "--save-every", "1", "--keep-last", "30") == 1
    assert "10 steps in a row had no finite gradient; stopped at step 12" in last_line(capsys)
    assert [row["step"] for row in read_metrics(out / "metrics.jsonl") if math.isnan(row["loss"])] == list(range(3, 13))
    assert "step 3: the gradient's norm is nan, so no update was made" in (out / "log.txt").read_text()
    good, last = (content(out / f"checkpoints/step-{step:08d}") for step in (2, 11))
    states = [name for name in good if name.endswith(".safetensors")]
    assert states and all(good[name] == last[name] for name in states)


def test_one_bad_step_is_skipped_and_the_schedule_waits_for_it(train, tmp_path, monkeypatch):
    spoil(monkeypatch, range(2, 3))  # the first micro-batch of the second step
    assert train(tmp_path / "out", "--steps", "4") == 0
    rows = read_metrics(tmp_path / "out/metrics.jsonl")
    assert [math.isnan(row["loss"]) for row in rows] == [False, True, False, False]
    assert rows[2]["learning_rate"] == rows[1]["learning_rate"] > rows[3]["learning_rate"]
    assert rows[3]["loss"] < rows[0]["loss"]
    for tensor in load_file(tmp_path / "out/model/model.safetensors").values():
        assert tensor.isfinite().all()


# --- the machine around a run


def test_on_a_busier_machine_a_run_still_goes_on(train, tmp_path, monkeypatch):
    options = ["--micro-batch", "auto", "--batch", "64", "--steps", "2"]
    with monkeypatch.context() as patch:
        stop_in(patch, Step, "__call__")
        assert train(tmp_path / "out", *options) == 75
    plan = stored(tmp_path / "out/plan.json")
    assert plan["choice"]["micro_batch"] == 64 and not plan["choice"]["recompute"]
    monkeypatch.setattr(lowmem.plan, "TRAINING_BYTES", 0)
    free_bytes = sum(plan["breakdown"].values()) - plan["breakdown"]["process"] - MIB
    monkeypatch.setattr(lowmem.train, "ram_available_bytes", lambda: (free_bytes, "the machine's free memory"))
    assert train(tmp_path / "out", *options) == 0
    after = stored(tmp_path / "out/plan.json")["choice"]
    assert after["micro_batch"] == 64 and after["recompute"], "free memory may change what is kept, not the result"


def test_a_disk_that_is_full_when_a_row_is_written_is_said_in_a_sentence(train, tmp_path, capsys, monkeypatch):
    def full(*_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(RunLog, "step", full)
    assert train(tmp_path / "out") == 1
    assert "No space left on device" in last_line(capsys)


def test_a_run_that_gave_up_does_not_end_well_when_it_is_started_again(train, tmp_path, capsys):
    options = ["--lr", "1e30", "--schedule", "constant", "--steps", "14"]
    for _ in range(2):
        assert train(tmp_path / "out", *options) == 1
        assert "10 steps in a row had no finite gradient; stopped at step" in last_line(capsys)
        assert not (tmp_path / "out/model").exists() and not (tmp_path / "out/report.json").exists()


def test_a_run_whose_last_loss_is_nan_exports_nothing(train, tmp_path, capsys):
    for _ in range(2):
        assert train(tmp_path / "out", "--lr", "1e30", "--schedule", "constant", "--steps", "4") == 1
        assert "nothing was exported" in last_line(capsys)
        assert not (tmp_path / "out/model").exists()


def test_planning_leaves_a_runs_own_plan_alone(train, tmp_path, capsys):
    assert train(tmp_path / "out") == 0
    before = (tmp_path / "out/plan.json").read_bytes()
    assert train(tmp_path / "out", "--plan-only", "--gpu-limit", "20GiB") == 0
    assert (tmp_path / "out/plan.json").read_bytes() == before
    assert "left alone" in last_line(capsys)


@pytest.mark.parametrize(
    "config",
    [
        {"model_type": "gpt2", "n_layer": 0},
        {"model_type": ["gpt2"]},
        {"model_type": "llama", "vocab_size": 100, "pad_token_id": 100, "num_hidden_layers": 1, "hidden_size": 64},
    ],
    ids=lambda config: str(config["model_type"]),
)
def test_a_config_that_makes_no_model_is_refused_in_a_sentence(train, tmp_path, capsys, config):
    path = tmp_path / "config.json"
    path.write_text(json.dumps(config))
    assert train(tmp_path / "out", "--model", str(path), "--init", "random", "--plan-only") == 2
    assert "Traceback" not in last_line(capsys) and not (tmp_path / "out").exists()
