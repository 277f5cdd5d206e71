"""Learning curves of the parallel experiments: their data, their rows and their pictures."""

import json
import pickle

import numpy as np
import pytest
import torch
from PIL import Image

from experiments.harness import cifar10, samples
from experiments.harness import rows as row_file
from experiments.harness.curves import Learned, draw_learned
from experiments.pipeline_parallel import curves, run, tasks
from experiments.pipeline_parallel import table as pipeline_table
from experiments.pipeline_parallel.stage import Layers
from experiments.tensor_parallel import curves as tensor_curves
from experiments.tensor_parallel import run as tensor_run
from experiments.tensor_parallel import table as tensor_table
from experiments.tensor_parallel import worker as tensor_worker
from lowmem.errors import InputError

PNG = b"\x89PNG"


# --- CIFAR-10 from a folder


def archive(folder, rows: int = 3):
    """A small cifar-10-batches-py, with two batches for training."""
    place = folder / cifar10.ARCHIVE
    place.mkdir(parents=True)
    random = np.random.default_rng(0)
    for name in ("data_batch_1", "data_batch_2", "test_batch"):
        data = random.integers(0, 256, (rows, 3 * 32 * 32), dtype=np.uint8)
        batch = {b"data": data, b"labels": list(range(rows)), b"filenames": [b"a.png"] * rows}
        (place / name).write_bytes(pickle.dumps(batch, protocol=2))
    return place


def test_the_archive_is_read_from_its_folder_or_the_one_around_it(tmp_path):
    place = archive(tmp_path)
    images, labels = cifar10.read(str(tmp_path), train=True)
    assert images.shape == (6, 3, 32, 32) and labels.tolist() == [0, 1, 2, 0, 1, 2]
    assert images.dtype == torch.float32 and -1 <= images.min() < -0.9 and 0.9 < images.max() <= 1
    first = pickle.loads((place / "data_batch_1").read_bytes())[b"data"][0]
    assert float(images[0, 1, 2, 3]) == pytest.approx(first[1024 + 2 * 32 + 3] / 127.5 - 1)
    assert len(cifar10.read(str(place), train=False)[0]) == 3


def test_images_in_folders_by_class_are_read(tmp_path):
    for part, count in (("train", 2), ("test", 1)):
        for name in ("bird", "cat"):
            (tmp_path / part / name).mkdir(parents=True)
            for number in range(count):
                colour = (255, 0, number) if name == "cat" else (0, 0, 255)
                Image.new("RGB", (32, 32), colour).save(tmp_path / part / name / f"{number}.png")
    images, labels = cifar10.read(str(tmp_path), train=True)
    assert labels.tolist() == [0, 0, 1, 1] and images[2, :, 0, 0].tolist() == [1, -1, -1]
    assert cifar10.read(str(tmp_path), train=False)[1].tolist() == [0, 1]
    Image.new("RGB", (30, 32)).save(tmp_path / "test" / "cat" / "1.png")
    with pytest.raises(InputError, match="30 x 32 pixels, and not 32 x 32"):
        cifar10.read(str(tmp_path), train=False)


def test_a_folder_that_is_no_cifar10_is_refused_and_a_pickle_runs_nothing(tmp_path):
    with pytest.raises(InputError, match="has neither data_batch_1"):
        cifar10.read(str(tmp_path), train=True)
    place = archive(tmp_path)

    class Runs:
        def __reduce__(self):
            return open, (str(tmp_path / "made"), "w")

    for content in (b"no pickle", pickle.dumps(Runs()), pickle.dumps({b"data": np.zeros((1, 5), np.uint8)})):
        (place / "test_batch").write_bytes(content)
        with pytest.raises(InputError, match="test_batch is no batch of CIFAR-10"):
            cifar10.read(str(tmp_path), train=False)
    assert not (tmp_path / "made").exists()
    batch = {b"data": np.zeros((1, 3072), np.uint8), b"labels": [10]}
    (place / "test_batch").write_bytes(pickle.dumps(batch))
    with pytest.raises(InputError, match="a label from 0 to 9"):
        cifar10.read(str(tmp_path), train=False)


def test_a_pipeline_trains_on_a_folder(tmp_path):
    archive(tmp_path)
    words = ["--task", "cifar10", "--data", str(tmp_path), "--stages", "1", "--steps", "2", "--batch", "4"]
    job, _ = run.planned(run.parser().parse_args([*words, "--micro-batches", "2", "--balance", "layers"]))
    losses, weights = curves._trained(job, None)
    assert len(losses) == 2 and 0 <= run.accuracy_of(job, weights) <= 1
    assert run.main(["--data", str(tmp_path), "--out", str(tmp_path / "out")]) == 2


# --- the pipeline


def test_a_plan_needs_no_data(tmp_path, monkeypatch):
    """Seen to fail: `--task cifar10 --plan-only` asked the hub for CIFAR-10."""
    monkeypatch.setattr(run, "make_task", lambda *_, **__: pytest.fail("data"))
    for task in tasks.TASKS:
        assert run.main(["--task", task, "--plan-only", "--out", str(tmp_path)]) == 0
        report = json.loads((tmp_path / "report.json").read_text())
        assert sum(report["layers_per_stage"]) == tasks.LAYERS[task] and report["test_accuracy"] is None
    monkeypatch.undo()
    for task in ("digits", "gpt2"):
        assert len(tasks.make_task(task, 0).layers) == tasks.LAYERS[task]


def test_a_folder_keeps_no_picture_of_an_older_run(tmp_path):
    for name in run.FILES:
        (tmp_path / name).write_text("older")
    assert run.main(["--plan-only", "--out", str(tmp_path)]) == 0
    assert not (tmp_path / "curves.png").exists() and (tmp_path / "timeline.png").read_bytes().startswith(PNG)


@pytest.mark.exhaustive
def test_the_defaults_learn():
    """Seen to fail: 30 steps at 1e-3 ended at a loss of 1.90, where chance is 2.30. Here the first 60 steps."""
    words = ["--stages", "1", "--steps", "60", "--balance", "layers"]
    job, _ = run.planned(run.parser().parse_args(words))
    losses, weights = curves._trained(job, None)
    assert losses[-1] < 1.2 and run.accuracy_of(job, weights) > 0.6
    assert (job.batch, job.learning_rate) == (64, 3e-3)
    untrained = Layers(job.make_task().layers, 0, 0).state_dict()
    assert run.accuracy_of(job, untrained) < 0.3


def test_no_sample_is_both_trained_and_tested():
    inputs, targets, test_inputs, test_targets = samples.parted(torch.arange(13), torch.arange(13))
    assert sorted([*inputs.tolist(), *test_inputs.tolist()]) == list(range(13)) and test_inputs.tolist() == [5, 11]
    assert torch.equal(inputs, targets) and torch.equal(test_inputs, test_targets)


def test_every_schedule_and_one_process_are_in_one_picture(tmp_path, monkeypatch, capsys):
    """PipeDream is in its own. The processes are those of other tests."""
    trained = []

    def one(job, checked):
        trained.append(checked and job.schedule)
        return [2.0, 1.0], {}

    monkeypatch.setattr(curves, "_trained", one)
    monkeypatch.setattr(run, "accuracy_of", lambda job, weights: 0.5)
    (tmp_path / "stale-digits.png").write_text("older")
    assert curves.main(["--steps", "2", "--out", str(tmp_path)]) == 0
    assert trained == ["gpipe", "1f1b", "zb-h1", "interleaved", None, "pipedream", "pipedream-vs", None]
    rows = row_file.read(tmp_path / curves.NAME)
    assert [row["name"] for row in rows if row["picture"] == "learning"][-1] == "one process"
    assert {row["learning_rate"] for row in rows if row["picture"] == "stale"} == {1e-3}
    for path in curves.pictures(tmp_path, "digits"):
        assert path.read_bytes().startswith(PNG)
    said = capsys.readouterr()
    assert "gpipe: loss 2.00 to 1.00, test accuracy 50.0%" in said.out and "8 of 8" in said.err


@pytest.mark.exhaustive
def test_ranks_of_a_pipeline_learn_as_one_process(tmp_path):
    monkeypatched = {"learning": ("1f1b", curves.ONE)}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(curves, "SCHEDULES", monkeypatched)
        assert curves.main(["--steps", "2", "--stages", "2", "--out", str(tmp_path)]) == 0
    piped, alone = row_file.read(tmp_path / curves.NAME)
    assert piped["losses"] == alone["losses"] and piped["test_accuracy"] == alone["test_accuracy"]


# --- tensor parallelism


@pytest.mark.exhaustive
def test_ranks_and_one_process_are_in_one_picture(tmp_path, monkeypatch, capsys):
    def trained(job, name):
        alone = tensor_worker.reference(job)
        return alone.losses, alone.weights

    monkeypatch.setattr(tensor_curves, "_trained", trained)
    (tmp_path / tensor_curves.PICTURE).write_text("older")
    words = ["--model", "mlp", "gpt2", "--steps", "2", "--out", str(tmp_path)]
    assert tensor_curves.main(words) == 0
    rows = row_file.read(tmp_path / tensor_curves.NAME)
    names = [(row["model"], row["name"]) for row in rows]
    assert names == [("mlp", "2 ranks"), ("mlp", "one process"), ("gpt2", "2 ranks"), ("gpt2", "one process")]
    assert (tmp_path / tensor_curves.PICTURE).read_bytes().startswith(PNG)
    assert all(0 <= row["test_accuracy"] < 0.6 for row in rows)


def test_a_model_that_learned_is_more_often_right():
    words = "--model mlp --ranks 1 --steps {} --batch 32"
    found = []
    for steps in (1, 60):
        job = tensor_run.planned(tensor_run.parser().parse_args(words.format(steps).split()))
        job = tensor_curves.replace(job, keep=True)
        found.append(tensor_curves.accuracy(job, tensor_worker.reference(job).weights))
    assert found[0] < 0.5 < 0.8 < found[1]


def test_resnet_trains_at_a_rate_that_learns_unless_it_is_compared():
    rates = [
        tensor_run.planned(tensor_run.parser().parse_args(["--model", "resnet", "--ranks", "1", *more])).learning_rate
        for more in ([], ["--compare"], ["--learning-rate", "0.5"])
    ]
    assert rates == [tensor_run.RESNET_LEARNING_RATE, tensor_run.RESNET_COMPARED_LEARNING_RATE, 0.5]
    assert rates[0] > 100 * rates[1]


# --- what was measured


def test_a_picture_has_a_row_for_each_title(tmp_path):
    draw_learned({"one": {"a": Learned([2.0, 1.0], 0.5)}, "two": {"b": Learned([2.0], 0.0)}}, tmp_path / "x.png")
    assert (tmp_path / "x.png").read_bytes().startswith(PNG)


@pytest.mark.parametrize("table, made", [(pipeline_table, curves), (tensor_table, tensor_curves)])
def test_the_committed_curves_fall_and_are_in_the_readme(table, made):
    rows = row_file.read(made.RESULTS / made.NAME)
    assert rows
    for row in rows:
        assert row["losses"][-1] < row["losses"][0] and f"{row['test_accuracy']:.1%}" in table.learned(rows)
