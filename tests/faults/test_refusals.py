"""Bad usage and bad input: one sentence, exit code 2 (3 or 4 for caps), and nothing written."""

import json
import re
import shutil

import pytest
import torch

import lowmem.limits
import lowmem.run.prepare
from lowmem.run.folder import lock_run
from lowmem.run.main import main
from lowmem.units import GIB
from runs import SCRIPTS, content, last_line, loss_rows, measured_run, python

# --- options


def test_a_cap_that_is_exceeded_ends_the_run_with_exit_4_and_both_figures(train, tmp_path, capsys, monkeypatch):
    metrics = tmp_path / "out/metrics.jsonl"
    trained = lambda: metrics.exists() and metrics.stat().st_size > 0  # noqa: E731
    monkeypatch.setattr(lowmem.limits, "ram_peak_bytes", lambda: (3 if trained() else 1) * GIB)
    assert train(tmp_path / "out", "--ram-limit", "2GiB") == 4
    assert re.search(r": step 1: RAM reached 3.00 GiB, 1.00 GiB over the cap of 2.00 GiB$", last_line(capsys))
    assert [row["step"] for row in loss_rows(tmp_path / "out")] == [1]
    assert not (tmp_path / "out/model").exists()


@pytest.mark.parametrize(("options", "said"), [
    (["--micro-bach", "3"], "did you mean --micro-batch"), (["--steps", "3", "--epochs", "1"], "give one of them"),
    (["--lr", "nan"], "--lr"), (["wikitext"], "Unexpected argument"),
    (["--config", "/nowhere/settings.json"], "cannot be read"),
])  # fmt: skip
@pytest.mark.parametrize("script", SCRIPTS)
def test_a_bad_option_is_answered_in_one_sentence_and_nothing_is_written(
    tmp_path, capsys, monkeypatch, script, options, said
):
    """test_settings.py has every other sentence."""
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
    assert train(tmp_path / "runs/out", *options) == 2
    assert said in last_line(capsys)
    assert not (tmp_path / "runs").exists() and content(tmp_path) == before


def test_weights_that_do_not_fit_the_config_are_listed_before_anything_is_allocated(
    finished, train, tmp_path, capsys, monkeypatch
):
    monkeypatch.setattr(lowmem.run.prepare, "Store", lambda *_: pytest.fail("something was allocated"))
    model = tmp_path / "model"
    shutil.copytree(finished / "model", model)
    fields = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps(fields | {"n_layer": 5, "vocab_size": 300}))
    assert train(tmp_path / "out", "--model", str(model), "--init", "pretrained") == 2
    sentence = last_line(capsys)
    assert "12 missing (transformer.h.4." in sentence
    assert "transformer.wte.weight: [257, 128] in the file, [300, 128] in the config" in sentence
    assert not (tmp_path / "out").exists()


def test_bad_data_are_refused_before_a_plan_is_made_and_a_folder_stays_as_it_was(train, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(lowmem.run.prepare, "make_plan", lambda *_: pytest.fail("a plan was made"))
    (tmp_path / "broken.jsonl").write_text('{"text": "whole"}\n{"text": "hal')
    (tmp_path / "out").mkdir()
    (tmp_path / "out/notes").touch()
    assert train(tmp_path / "out", "--data", str(tmp_path / "broken.jsonl")) == 2
    assert "broken.jsonl:2: bad JSON" in last_line(capsys)
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["notes"]


def test_a_second_run_in_a_folder_is_refused_before_its_data_are_read(train, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(lowmem.run.prepare, "load_data", lambda *_: pytest.fail("data were read"))
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


@pytest.mark.parametrize("program", ["train_gpt2_large.py", "train_gpt2_xl.py", "-m lowmem", "-m lowmem.plan"])
def test_help_exits_with_0_and_fits_80_columns(program):
    run = python(*program.split(), "--help", COLUMNS="80")
    assert run.returncode == 0 and max(map(len, run.stdout.splitlines())) <= 80
    assert program == "-m lowmem" or "--gpu-limit" in run.stdout


@pytest.mark.parametrize(
    "config",
    [
        {"model_type": "gpt2", "n_layer": 0},
        {"model_type": "gpt2", "n_layer": 10**9},
        {"model_type": "gpt2", "attribute_map": {"vocab_size": "foo"}},
        {"model_type": ["gpt2"]},
        {"model_type": "llama", "vocab_size": 100, "num_hidden_layers": 1, "hidden_size": 64, "num_attention_heads": 5},
    ],
    ids=lambda config: str(config["model_type"]),
)
def test_a_config_that_makes_no_model_is_refused_in_a_sentence(train, tmp_path, capsys, config):
    path = tmp_path / "config.json"
    path.write_text(json.dumps(config))
    assert train(tmp_path / "out", "--model", str(path), "--init", "random", "--plan-only") == 2
    assert "Traceback" not in last_line(capsys) and not (tmp_path / "out").exists()
