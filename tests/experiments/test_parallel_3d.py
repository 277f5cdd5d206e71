"""Meshes of processes train as one process does, hold and send what theory says, and faults are seen."""

import json
from dataclasses import replace

import pytest
import torch

from experiments.harness.rows import read
from experiments.parallel_3d import comparison, measure, run, table, worker
from experiments.parallel_3d.comparison import too_far, whole_weights
from experiments.parallel_3d.mesh import Mesh
from experiments.parallel_3d.theory import expected
from experiments.parallel_3d.worker import Job
from lowmem.models.build import build_model
from tests import mesh

CPU = torch.device("cpu")


def job(words: str) -> Job:
    return run.planned(run.parser().parse_args(f"--steps 3 --batch 8 --micro-batches 2 --seq 16 {words}".split()))


def alone(job: Job) -> list:
    """Trains a mesh of one process in this one."""
    return [worker.work(job, 0, CPU)]


def report_of(job: Job, told: list) -> dict:
    return run.report_of(job, told, compare=True)


# --- the mesh


@pytest.mark.parametrize("sizes", [(2, 2, 2), (4, 1, 2), (1, 3, 4), (8, 1, 1)])
def test_every_process_has_a_place_of_its_own(sizes):
    whole = Mesh(*sizes)
    places = [whole.place(number) for number in range(whole.processes)]
    assert len(set(places)) == whole.processes
    assert [whole.process(*place) for place in places] == list(range(whole.processes))
    for groups, axis in (
        (whole.pipelines(), "stage"),
        (whole.data_groups(), "replica"),
        (whole.tensor_groups(), "part"),
    ):
        assert sorted(number for of_group in groups for number in of_group) == list(range(whole.processes))
        for of_group in groups:  # only that axis changes, in order
            others = {places[number]._replace(**{axis: 0}) for number in of_group}
            assert len(others) == 1 and [getattr(places[n], axis) for n in of_group] == list(range(len(of_group)))


def test_samples_of_replicas_and_micro_batches_make_the_batch():
    uneven = job("--dp 2 --batch 11 --micro-batches 3")
    parts = [list(samples) for replica in range(2) for samples in uneven.samples_of(replica)]
    assert sum(parts, []) == list(range(11)) and {len(part) for part in parts} == {1, 2}


# --- theory


@pytest.mark.quick(4)
@pytest.mark.parametrize("model, tied", [("gpt2", True), ("llama", False)])
@pytest.mark.parametrize("stages", [1, 2, 4, 8])
def test_theory_knows_the_parameters_of_the_whole_model(model, tied, stages):
    """By transformers' own count; a tied embedding is in both ends of a pipeline."""
    asked = job(f"--model {model} --pp {stages} --tp 1 --dp 1")
    config = asked.kind.config
    whole = 8 * sum(map(torch.numel, build_model(config).parameters()))
    held = sum(expected(asked, asked.mesh.place(number)).parameters for number in range(stages))
    assert held == whole + (8 * config.vocab_size * config.hidden_size if tied and stages > 1 else 0)


def test_theory_divides_what_is_sent():
    """A pipeline of two sends the hidden states of its replica's tokens once forward and once backward."""
    asked = job("--model llama --pp 2 --tp 2 --dp 2")
    hidden = 8 / 2 * 16 * 64 * 8
    first, last = (expected(asked, asked.mesh.place(number)).sent for number in (0, 7))
    assert first["pipeline"] == last["pipeline"] == hidden
    assert first["tensor"] == (4 * 3 + 1) * hidden and last["clipping"] == 2 * 3 / 4 * 8
    assert expected(replace(asked, clip_norm=None), asked.mesh.place(0)).sent["clipping"] == 0


# --- equality


@pytest.mark.quick(1)
@pytest.mark.parametrize("words", [
    "--model gpt2 --pp 2 --tp 2 --dp 2", "--model llama --pp 2 --tp 2 --dp 2 --schedule gpipe --dropout 0.1",
    "--model gpt2 --pp 4 --tp 1 --dp 2 --dropout 0.1 --batch 9 --schedule zb-h1",
    "--model gpt2 --pp 1 --tp 4 --dp 2 --clip 0", "--model gpt2 --pp 8 --tp 1 --dp 1",
    "--model llama --pp 1 --tp 1 --dp 8 --batch 17 --dropout 0.1",
    "--model llama --pp 4 --tp 2 --dp 1 --schedule zb-h1", "--model gpt2 --pp 2 --tp 3 --dp 1",
])  # fmt: skip
def test_a_mesh_trains_as_one_process(words):
    """Dropout, uneven micro-batches, heads and a vocabulary that the parts do not divide. All that is held and sent is
    what theory says, where parts and replicas divide it."""
    asked = job(f"{words} --clip 0.05" if "--clip" not in words else words)
    report = report_of(asked, mesh.trained(asked))
    assert report["loss_distance"] < 1e-12 and report["weight_distance"] < 1e-12 and not too_far(report)
    assert report["copies_differ"] == [] and report["diverged"] is None
    divides = asked.batch % asked.dp == 0 and asked.kind.config.num_attention_heads % asked.ranks == 0
    assert report["off_theory_bytes"] == 0 or not divides


@pytest.mark.quick(3)
@pytest.mark.parametrize("fault", mesh.FAULTS)
def test_a_fault_is_seen(fault):
    """Seen as weights that differ from one process's, far beyond rounding."""
    axes = {"the replicas": "--pp 1 --tp 1 --dp 2", "what is whole": "--pp 1 --tp 2 --dp 1"}
    words = next((found for begin, found in axes.items() if fault.startswith(begin)), "--pp 2 --tp 1 --dp 1")
    asked = job(f"--model gpt2 {words} --clip 0.05")
    report = report_of(asked, mesh.trained(asked, fault))
    assert "weight" in too_far(report) and report["weight_distance"] > 1000 * comparison.LARGEST


# --- what is said


def test_one_process_is_the_ordinary_model_in_fp32(tmp_path, capsys, monkeypatch):
    """A mesh of one; then a learning rate that is too large by a thousandth."""
    monkeypatch.setattr(run, "train", alone)
    words = f"--pp 1 --tp 1 --dp 1 --dtype fp32 --compare --seq 16 --steps 2 --out {tmp_path}".split()
    assert run.main(words) == 0
    report = json.loads((tmp_path / "report.json").read_text())
    assert 0 < report["weight_distance"] <= report["allowed"]["weight"] and report["mesh"] == [1, 1, 1]
    capsys.readouterr()
    monkeypatch.setattr(run, "train", lambda job: alone(replace(job, learning_rate=1.001 * job.learning_rate)))
    assert run.main([*words, "--dtype", "fp64"]) == 1
    assert "TOO FAR" in capsys.readouterr().out


def test_a_training_that_diverges_is_exit_code_1(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(run, "train", alone)
    words = f"--pp 1 --tp 1 --dp 1 --seq 16 --learning-rate 1000 --out {tmp_path}"
    assert run.main(words.split()) == 1
    assert "the training diverged" in capsys.readouterr().err


@pytest.mark.exhaustive
def test_copies_that_differ_are_named(tmp_path, capsys, monkeypatch):
    told = mesh.trained(job("--pp 1 --tp 1 --dp 2"))
    told[1].weights["transformer.ln_f.bias"][3] += 1e-15
    weights, differ = whole_weights(told)
    assert differ == ["transformer.ln_f.bias"]
    told[1].weights["transformer.ln_f.bias"][3] = torch.nan
    assert whole_weights(told)[1] == ["transformer.ln_f.bias"]
    monkeypatch.setattr(run, "train", lambda job: told)
    words = f"--pp 1 --tp 1 --dp 2 --steps 3 --batch 8 --micro-batches 2 --seq 16 --out {tmp_path}"
    assert run.main(words.split()) == 1 and "DIFFER: transformer.ln_f.bias" in capsys.readouterr().out


@pytest.mark.exhaustive
def test_the_command_starts_its_processes(tmp_path, capsys):
    words = f"--pp 2 --tp 2 --dp 1 --steps 2 --batch 4 --micro-batches 2 --seq 16 --compare --out {tmp_path}"
    assert run.main(words.split()) == 0
    assert "off theory by 0 bytes" in capsys.readouterr().out
    assert (tmp_path / "report.json").exists() and (tmp_path / "curves.png").exists()


# --- rows


def test_rows_are_of_every_case():
    found = {(row["section"], row["options"]) for row in read(table.ROWS)}
    assert found >= {(section, words) for section, cases in measure.CASES.items() for words in cases}
