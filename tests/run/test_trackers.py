"""Trackers may fail, and no run ends by that.

The wandb package writes the runs that are read here. Each has its own process, because wandb starts another one, which
ends only when Python exits.
"""

import json
import math
import os
import pty
import re
import socket
import struct
import subprocess
import sys
import threading
from importlib.util import find_spec
from pathlib import Path
from unittest.mock import MagicMock

import psutil
import pytest

from logs import PLAN, logged, row, started
from lowmem.errors import InputError
from lowmem.run import trackers
from lowmem.run.metrics import read_metrics
from lowmem.run.plots import draw_loss
from lowmem.settings import Settings
from lowmem.units import GIB
from runs import ROOT, assert_same_run, last_line

CHARTS = ("training and held-out loss", "RAM in GiB", "ms per step", "tokens per second")


def run_with_wandb(
    folder: Path, mode: str | None, environment: dict[str, str], in_the_middle: str = "", first_step: int = 0, **options
) -> subprocess.CompletedProcess:
    """The rest of three steps in a process of their own. `in_the_middle`: code before the second."""
    pytest.importorskip("wandb")
    folder.mkdir(exist_ok=True)
    program = (
        "from pathlib import Path\n"
        "from lowmem.run.log import RunLog\n"
        "from lowmem.settings import Settings\n"
        f"log = RunLog(Path({str(folder)!r}), Settings(wandb={mode!r}, seq=32))\n"
        f"log.start({first_step}, 3, {PLAN!r}, dict(eval_loss=6.0))\n"
        f"if {first_step} < 1:\n"
        f"    log.step({row(1)!r})\n"
        f"{in_the_middle}\n"
        f"log.step({row(2)!r})\n"
        f"log.step({row(3, eval_loss=2.0)!r})\n"
        "log.close()\n"
    )
    home = {"HOME": str(folder), "NETRC": str(folder / "netrc"), "WANDB_HTTP_TIMEOUT": "1"}  # no key of the user's
    return subprocess.run(
        [sys.executable, "-c", program],
        **{"cwd": ROOT, "env": os.environ | home | environment, "capture_output": True, "text": True, "timeout": 100}
        | options,
    )


def wandb_records(path: Path, kind: str) -> list:
    """The records of this kind in a .wandb file: after 7 bytes of header, LevelDB's log format, blocks of 32 KiB whose
    entries are crc32, length, part (1 whole, 2 first, 3 middle, 4 last), bytes."""
    from wandb.proto.wandb_internal_pb2 import Record

    content, position, parts, records = path.read_bytes(), 7, b"", []
    while position + 7 <= len(content):
        left = 2**15 - position % 2**15
        if left < 7:
            position += left
            continue
        _, length, part = struct.unpack("<IHB", content[position : position + 7])
        parts += content[position + 7 : position + 7 + length]
        position += 7 + length
        if part in (1, 4):
            records.append(Record.FromString(parts))
            parts = b""
    return [getattr(record, kind) for record in records if record.WhichOneof("record_type") == kind]


def items(pairs) -> dict:
    return {"/".join(pair.nested_key) or pair.key: json.loads(pair.value_json) for pair in pairs}


def test_the_wandb_package_writes_a_run_with_our_names_and_values(tmp_path):
    folder = tmp_path / "fine-tune"
    result = run_with_wandb(folder, "offline", {})
    assert result.returncode == 0
    (path,) = folder.glob("wandb/offline-run-*/*.wandb")
    place = path.parent
    said = [line for line in result.stderr.splitlines() if "wandb" in line]
    assert said == [f"wandb: offline, in {place}", "wandb: to upload this run:", f"  wandb sync {place}"]
    assert all(line in (folder / "log.txt").read_text() for line in said)
    (run,) = wandb_records(path, "run")
    assert (run.project, run.display_name) == ("lowmem", "fine-tune")
    config = items(run.config.update)
    assert config["seq"] == 32 and config["optimizer"] == "adamw"
    assert (config["plan/fits"], config["plan/choice/micro_batch"]) == (True, 2)
    assert (config["plan/predicted/ram_peak_bytes"], config["plan/limits/gpu_bytes"]) == (5 * GIB, 11 * GIB)

    metrics = wandb_records(path, "metric")
    assert any(metric.glob_name == "*" and metric.step_metric == "train/global_step" for metric in metrics)

    history = [items(logged.item) for logged in wandb_records(path, "history")]
    ours = [{name: value for name, value in logged.items() if not name.startswith("_")} for logged in history]
    together = ours.pop()
    first = {
        **{"train/global_step": 1, "train/epoch": 0.1, "train/loss": 4.9, "train/grad_norm": 0.5},
        **{"train/learning_rate": 1e-3, "train/num_input_tokens_seen": 100},
        **{"perf/tokens_per_second": 2000.0, "perf/computed_tokens_per_second": 2000.0},
        **{"perf/step_ms": 1000.0, "perf/step_ms_predicted": 2000.0},
        **{"memory/ram_peak_gib": 3.0, "memory/ram_predicted_gib": 5.0, "memory/ram_cap_gib": 6.0},
    }
    changed = {"train/global_step": 3, "train/epoch": 0.3, "train/loss": 4.7, "train/num_input_tokens_seen": 300}
    assert ours[0] == {"train/global_step": 0, "eval/loss": 6.0, "eval/perplexity": math.exp(6.0)}
    assert ours[1] == first
    assert ours[3] == first | changed | {"eval/loss": 2.0, "eval/perplexity": math.exp(2.0)}
    assert len(ours) == 4

    assert together.pop("train/global_step") == 3
    tables = {}
    for title in CHARTS:
        shown = together[f"Custom Chart Tables/charts/{title}_table/path"]
        tables[title] = json.loads((path.parent / "files" / shown).read_text())["data"]
    losses = [[step, "train/loss", 5 - step / 10] for step in (1, 2, 3)]
    assert tables["training and held-out loss"] == [*losses, [3, "eval/loss", 2.0]]
    names = {f"memory/ram_{name}_gib" for name in ("peak", "predicted", "cap")}
    assert {name for _, name, _ in tables["RAM in GiB"]} == names


def failures(capsys) -> list[str]:
    """What was said of wandb that failed."""
    return [line for line in capsys.readouterr().err.splitlines() if line.startswith("wandb ")]


def survived(folder: Path, result: subprocess.CompletedProcess, reason: str) -> bool:
    """Every row was kept and one sentence on wandb's failure said, with no traceback."""
    said = re.findall(r"^wandb (?!sync).*", result.stderr, re.MULTILINE)
    return (
        result.returncode == 0
        and len(read_metrics(folder / "metrics.jsonl")) == 3
        and len(said) == 1
        and reason in said[0]
        and "Traceback" not in result.stderr
    )


def test_wandb_without_a_key_asks_for_none_even_on_a_terminal(tmp_path):
    outer, inner = pty.openpty()
    result = run_with_wandb(tmp_path, "online", {}, stdin=inner)
    os.close(outer)
    os.close(inner)
    assert survived(tmp_path, result, "could not start (not logged in: set WANDB_API_KEY"), result.stderr


def test_wandb_that_cannot_be_reached_is_given_up(tmp_path):
    with socket.socket() as nobody_listens:
        nobody_listens.bind(("127.0.0.1", 0))
        address = f"http://127.0.0.1:{nobody_listens.getsockname()[1]}"
        result = run_with_wandb(tmp_path, "online", {"WANDB_BASE_URL": address, "WANDB_API_KEY": "a" * 40})
    assert survived(tmp_path, result, "could not start (Failed to authenticate"), result.stderr


FIND_WANDBS_PROCESS = (
    "import psutil, time\n"
    "(core,) = [child for child in psutil.Process().children(recursive=True) if 'wandb-core' in child.name()]\n"
    "print(core.pid, flush=True)\n"
)


def test_wandb_whose_process_is_killed_in_the_middle_is_given_up(tmp_path):
    kill = "core.kill()\ncore.wait()\ntime.sleep(0.5)\n"  # until wandb's thread has seen the broken connection
    result = run_with_wandb(tmp_path, "offline", {}, in_the_middle=FIND_WANDBS_PROCESS + kill)
    assert survived(tmp_path, result, "failed ("), result.stderr


def test_wandb_whose_process_no_longer_answers_does_not_hold_up_the_end_nor_pythons_exit(tmp_path):
    freeze = (
        "core.suspend()\n"
        "from lowmem.run import trackers\n"
        "trackers._LIMIT_SECONDS = trackers._WANDB_TEARDOWN_SECONDS = 1\n"
    )
    result = run_with_wandb(tmp_path, "offline", {}, in_the_middle=FIND_WANDBS_PROCESS + freeze, timeout=60)
    assert survived(tmp_path, result, "(no answer in 1 s)"), result.stderr
    assert not psutil.pid_exists(int(result.stdout))


def test_without_the_package_wandb_is_refused_in_a_sentence(tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "wandb", None)
    logged(tmp_path, row(1), wandb="offline")
    (said,) = failures(capsys)
    assert said.startswith("wandb could not start (") and said in (tmp_path / "log.txt").read_text()


@pytest.fixture
def guest(monkeypatch) -> MagicMock:
    """Stands in for the package wandb, and for the run that it begins."""
    module = MagicMock(id="an-id", offline=True, sync_dir="a folder/offline-run", url="https://wandb.example/a/run")
    module.init.return_value = module
    module.Settings = dict
    module.plot.line_series = lambda *given, split_table: given
    monkeypatch.setitem(sys.modules, "wandb", module)
    return module


def begun(guest: MagicMock) -> list[dict]:
    return [call.kwargs for call in guest.init.call_args_list]


def told(guest: MagicMock) -> list[dict]:
    return [call.args[0] for call in guest.log.call_args_list]


def test_where_a_run_is_and_how_to_upload_it_is_said(tmp_path, capsys, guest):
    started(tmp_path, wandb="offline", report_to="tensorboard" if find_spec("tensorboard") else None).close()
    said = capsys.readouterr().err.splitlines()
    assert [line for line in said if "wandb" in line] == [
        *("wandb: offline, in 'a folder/offline-run'", "wandb: to upload this run:"),
        "  wandb sync 'a folder/offline-run'",
    ]
    if find_spec("tensorboard"):
        assert f"tensorboard: tensorboard --logdir {tmp_path} shows this run" in said
    guest.offline = False
    started(tmp_path, wandb="online").close()
    assert capsys.readouterr().err == "wandb: https://wandb.example/a/run\n"


def test_values_that_belong_together_are_in_one_chart(tmp_path, guest):
    rows = [row(step) for step in range(1, 1300)]
    rows[0] |= {"eval_first": 6.0, "grad_norm": math.nan, "loss": math.nan}
    rows[6] |= {"eval_losses": {"a": 1.0, "b": 3.0}, "eval_loss": 2.0, "step_ms": None}  # a time that was lost
    on_gpu = PLAN["predicted"] | {"gpu_allocated_peak_bytes": 9 * GIB, "gpu_reserved_peak_bytes": 10 * GIB}
    shown = trackers.lines_together(rows, trackers.planned(PLAN | {"predicted": on_gpu}))
    losses = shown["training and held-out loss"]
    assert (losses["eval/loss"], losses["eval/loss of b"]) == ([(0, 6.0), (7, 2.0)], [(7, 3.0)])
    assert 400 < len(losses["train/loss"]) <= 501 and losses["train/loss"][0] == (4, rows[3]["loss"])
    assert shown["GPU memory in GiB"].keys() == {
        "memory/gpu_allocated_predicted_gib", "memory/gpu_reserved_predicted_gib", "memory/gpu_cap_gib"
    }  # fmt: skip
    assert shown["RAM in GiB"].keys() == {"memory/ram_peak_gib", "memory/ram_predicted_gib", "memory/ram_cap_gib"}
    assert shown["ms per step"].keys() == {"perf/step_ms", "perf/step_ms_predicted"}

    logged(tmp_path, row(1), row(2), wandb="offline", last_step=2)
    (drawn,) = [logged for logged in told(guest) if any(name.startswith("charts/") for name in logged)]
    assert drawn["charts/training and held-out loss"] == (
        [(1, 2)], [(4.9, 4.8)], ["train/loss"], "training and held-out loss", "optimizer step",
    )  # fmt: skip


def test_what_the_environment_says_holds_where_nothing_was_typed_and_waiting_is_bounded(tmp_path, monkeypatch, guest):
    started(tmp_path).close()
    assert begun(guest) == [], "disabled"
    started(tmp_path, wandb="online").close()
    started(tmp_path, wandb="offline", first_step=1).close()
    started(tmp_path, wandb="offline").close()
    environment = {"MODE": "offline", "PROJECT": "theirs", "NAME": "from-environment", "DIR": "/elsewhere"}
    for name, value in (environment | {"RUN_ID": "their-id", "RESUME": "must"}).items():
        monkeypatch.setenv(f"WANDB_{name}", value)
    started(tmp_path, first_step=1).close()
    started(tmp_path, wandb="online", run_name="typed").close()
    how = [[given[name] for name in ("mode", "project", "name", "dir", "id", "resume")] for given in begun(guest)]
    folder = str(tmp_path)
    assert how == [
        ["online", "lowmem", tmp_path.name, folder, None, "allow"],
        ["offline", "lowmem", tmp_path.name, folder, "an-id", "allow"],
        ["offline", "lowmem", tmp_path.name, folder, None, "allow"],  # a new run in a folder of another
        ["offline", "theirs", "from-environment", "/elsewhere", "their-id", "must"],
        ["online", "theirs", "typed", "/elsewhere", "their-id", "must"],
    ]
    settings = begun(guest)[0]["settings"]
    assert 0 < settings["init_timeout"] <= 30 and 0 < settings["finish_timeout"] <= 30
    assert guest.finish.call_count == guest.teardown.call_count == 5  # here and within a limit, not when Python exits


def test_wandb_that_does_not_answer_or_calls_exit_is_left_alone(tmp_path, monkeypatch, capsys, guest):
    monkeypatch.setattr(trackers, "_LIMIT_SECONDS", 0.1)
    monkeypatch.setattr(trackers, "_WANDB_TEARDOWN_SECONDS", 0.1)
    forever = threading.Event().wait
    guest.teardown = forever
    guest.log = lambda values: forever()
    logged(tmp_path, row(1), row(2), wandb="offline")
    guest.init = lambda **arguments: sys.exit(3)
    started(tmp_path, wandb="offline").close()
    assert [line.split(";")[0] for line in failures(capsys)] == [
        *("wandb failed (no answer in 0.1 s)", "wandb could not start (SystemExit: 3)")
    ]


def test_wandb_that_raises_in_the_middle_is_left_alone_from_then_on(tmp_path, capsys, guest):
    log = started(tmp_path, wandb="offline")
    log.step(row(1))
    guest.log.side_effect = RuntimeError("disk full\nand more of it")
    log.step(row(2))
    guest.log.side_effect = None
    log.step(row(3))
    log.close()
    assert len(told(guest)) == 2 and not guest.finish.called
    assert failures(capsys) == ["wandb failed (disk full); the run goes on without it, its rows are in metrics.jsonl"]
    assert len(read_metrics(tmp_path / "metrics.jsonl")) == 3


def test_tokens_seen_go_on_where_a_resumed_run_left_off(tmp_path, guest):
    logged(tmp_path, row(1), row(2))
    logged(tmp_path, row(2, tokens=7), first_step=1, wandb="offline")
    assert told(guest)[0]["train/num_input_tokens_seen"] == 107


def test_gpu_peaks_go_to_wandb_in_gib_and_a_loss_too_large_for_its_perplexity_is_infinite():
    values = trackers.charts(
        row(1, gpu_allocated_peak_bytes=10 * GIB, gpu_reserved_peak_bytes=11 * GIB, eval_loss=1e4), 100
    )
    assert (values["memory/gpu_allocated_peak_gib"], values["memory/gpu_reserved_peak_gib"]) == (10.0, 11.0)
    assert values["eval/perplexity"] == math.inf
    assert math.isnan(trackers.charts(row(1, eval_loss=math.nan), 1)["eval/loss"])
    values = trackers.charts(row(1, eval_loss=2.0, eval_losses={"a.txt": 1.0, "b/c.txt": 3.0}), 1)
    assert (values["eval/loss of a.txt"], values["eval/loss of b/c.txt"]) == (1.0, 3.0)


@pytest.mark.exhaustive
def test_samples_and_pictures_are_in_wandbs_run_and_one_that_goes_on_has_its_id(tmp_path):
    shown = (
        "from lowmem.run.plots import draw_loss\n"
        f"picture = Path({str(tmp_path / 'loss.png')!r})\n"
        "draw_loss(log.rows, picture)\n"
        "log.sample(0, 'sample: before', last=False)\n"
        "log.sample(1, 'sample: after', last=False)\n"
        "log.pictures([picture])\n"
    )
    result = run_with_wandb(tmp_path, "offline", {}, in_the_middle=shown)
    assert result.returncode == 0 and "wandb sync" in result.stderr, result.stderr
    (path,) = tmp_path.glob("wandb/offline-run-*/*.wandb")
    assert run_with_wandb(tmp_path, "offline", {}, first_step=1).returncode == 0
    (other,) = set(tmp_path.glob("wandb/offline-run-*/*.wandb")) - {path}
    ids = [run.run_id for file in (path, other) for run in wandb_records(file, "run")]
    assert ids == [(tmp_path / "wandb-run-id").read_text().strip()] * 2, "a run that goes on has the same id"
    history = [items(logged.item) for logged in wandb_records(path, "history")]
    shown = {name: value for logged in history for name, value in logged.items()}  # of each the last
    assert json.loads((path.parent / "files" / shown["samples/path"]).read_text())["data"] == [
        [0, "sample: before"],
        [1, "sample: after"],
    ]
    picture = path.parent / "files" / shown["pictures/loss/path"]
    assert picture.read_bytes() == (tmp_path / "loss.png").read_bytes()


# --- what is reported to


@pytest.mark.parametrize(("typed", "environment", "mode"), [
    ({}, None, "disabled"), ({}, "offline", "offline"), ({}, " OFFLINE", "offline"), ({}, "Disabled", "disabled"),
    ({"report_to": "wandb"}, None, "online"), ({"report_to": "all"}, "offline", "offline"),
    ({"report_to": "wandb", "wandb": "offline"}, "disabled", "offline"),
    ({"report_to": "tensorboard"}, "online", "disabled"), ({"report_to": "none"}, "online", "disabled"),
    ({"report_to": "none", "wandb": "offline"}, None, "offline"),
])  # fmt: skip
def test_wandbs_mode_is_what_was_typed_or_the_environment_says(monkeypatch, typed, environment, mode):
    if environment is not None:
        monkeypatch.setenv("WANDB_MODE", environment)
    assert trackers.wandb_mode(Settings(**typed)) == mode
    monkeypatch.setenv("WANDB_DISABLED", "true")  # what Hugging Face's Trainer reads
    assert trackers.wandb_mode(Settings(**typed)) == (mode if typed else "disabled")


@pytest.mark.parametrize(("typed", "environment", "said"), [
    ({"run_name": "mine"}, None, "--run-name does nothing: it names a run in wandb, which is off"),
    ({"run_name": "mine"}, "offline", ""), ({}, None, ""), ({"wandb": "disabled", "report_to": "all"}, "disabled", ""),
    ({"report_to": "wandb"}, "disabled", "wandb is off, because the variable WANDB_MODE says so"),
])  # fmt: skip
def test_a_name_or_a_tracker_without_effect_is_said(tmp_path, monkeypatch, guest, capsys, typed, environment, said):
    """Seen to fail: neither was said."""
    if environment is not None:
        monkeypatch.setenv("WANDB_MODE", environment)
    started(tmp_path, **typed).close()
    lines = [line for line in capsys.readouterr().err.splitlines() if "is off" in line]
    assert len(lines) == bool(said) and said in "".join(lines)


def test_a_mode_that_wandb_has_not_is_refused(monkeypatch):
    monkeypatch.setenv("WANDB_MODE", "ofline")
    with pytest.raises(InputError, match="the variable WANDB_MODE is 'ofline': it may be online, offline, disabled"):
        trackers.wandb_mode(Settings())


def test_plans_for_a_gpu_draw_its_lines_and_those_for_the_cpu_none_of_a_gpu():
    on_gpu = PLAN["predicted"] | {"gpu_allocated_peak_bytes": 9 * GIB, "gpu_reserved_peak_bytes": 10 * GIB}
    lines = trackers.planned(PLAN | {"predicted": on_gpu})
    assert lines.pop("memory/gpu_allocated_predicted_gib") == 9.0
    assert (lines.pop("memory/gpu_reserved_predicted_gib"), lines.pop("memory/gpu_cap_gib")) == (10.0, 11.0)
    assert lines == trackers.planned(PLAN)
    none = {"gpu_bytes": None, "ram_bytes": None}
    unknown = dict.fromkeys(PLAN["predicted"])
    assert trackers.planned({"limits": none, "predicted": unknown}) == {}


# --- TensorBoard


@pytest.fixture
def tensorboard():
    return pytest.importorskip("tensorboard")


def read_events(folder: Path):
    """What TensorBoard makes of a folder of event files."""
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    return accumulator.EventAccumulator(str(folder / "tensorboard"), size_guidance={"images": 0}).Reload()


def scalars(events) -> dict[str, list[tuple[int, float]]]:
    names = events.Tags()["scalars"]
    return {name: [(event.step, pytest.approx(event.value)) for event in events.Scalars(name)] for name in names}


def test_tensorboard_shows_what_wandb_does_under_the_same_names(tmp_path, tensorboard):
    log = started(tmp_path, report_to="tensorboard", eval_first=6.0)
    log.step(row(1))
    shown = scalars(read_events(tmp_path))  # while the run goes on
    assert shown.pop("eval/loss") == [(0, 6.0)] and shown.pop("eval/perplexity") == [(0, math.exp(6.0))]
    expected = trackers.charts(row(1), 100) | trackers.planned(PLAN)
    assert shown == {name: [(1, value)] for name, value in expected.items()}

    log.step(row(2, eval_loss=2.0))
    log.sample(2, "sample: *not* Markdown\n  <b>", last=True)
    draw_loss(log.rows, tmp_path / "loss.png")
    log.pictures([tmp_path / "loss.png"])
    log.close()
    events = read_events(tmp_path)
    assert scalars(events)["eval/loss"] == [(0, 6.0), (2, 2.0)]
    assert scalars(events)["train/num_input_tokens_seen"] == [(1, 100), (2, 200)]
    (text,) = events.Tensors("samples/text_summary")
    assert (text.step, text.tensor_proto.string_val[0].decode()) == (2, "    sample: *not* Markdown\n      <b>")
    (picture,) = events.Images("pictures/loss")
    assert (picture.step, picture.width, picture.height) == (2, 960, 540)
    layout = pytest.importorskip("tensorboard.plugins.custom_scalar.layout_pb2").Layout()
    layout.ParseFromString(events.Tensors("custom_scalars__config__")[0].tensor_proto.string_val[0])
    charts = {chart.title: list(chart.multiline.tag) for category in layout.category for chart in category.chart}
    together = {
        title: {name for name in scalars(events) if any(re.fullmatch(tag, name) for tag in tags)}
        for title, tags in charts.items()
    }
    assert together["training and held-out loss"] == {"train/loss", "eval/loss"}
    assert together["RAM in GiB"] == {"memory/ram_peak_gib", "memory/ram_predicted_gib", "memory/ram_cap_gib"}


def test_a_run_that_goes_on_purges_what_it_computes_again_and_a_new_one_everything(tmp_path, tensorboard):
    logged(tmp_path, *map(row, (1, 2, 3)), report_to="tensorboard", eval_first=6.0)
    logged(tmp_path, row(2, loss=9.0), report_to="tensorboard", first_step=1)
    shown = scalars(read_events(tmp_path))
    assert shown["train/loss"] == [(1, 4.9), (2, 9.0)] and shown["eval/loss"] == [(0, 6.0)]
    started(tmp_path, report_to="tensorboard").close()
    assert not any(scalars(read_events(tmp_path)).values())


def test_without_the_package_tensorboard_is_refused_before_anything_is_written(train, tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    assert train(tmp_path / "out", "--report-to", "tensorboard") == 2
    assert "pip install tensorboard" in last_line(capsys)
    assert not (tmp_path / "out").exists()


def test_tensorboard_that_fails_is_left_alone(tmp_path, capsys, tensorboard):
    (tmp_path / "tensorboard").write_text("in the way")
    logged(tmp_path, row(1), report_to="tensorboard")
    said = [line for line in capsys.readouterr().err.splitlines() if "tensorboard" in line]
    assert len(said) == 1 and said[0].startswith("tensorboard could not start (")
    assert len(read_metrics(tmp_path / "metrics.jsonl")) == 1


@pytest.mark.exhaustive
def test_a_whole_run_with_every_tracker_has_the_same_bits(train, finished, tmp_path, monkeypatch, tensorboard):
    monkeypatch.setenv("WANDB_MODE", "offline")
    out = tmp_path / "out"
    assert train(out, "--report-to", "all", "--sample-prompt", "one") == 0
    assert_same_run(finished, out)
    events = read_events(out)
    assert {event.step for event in events.Scalars("eval/loss")} == {0, 3}
    assert [event.step for event in events.Tensors("samples/text_summary")] == [0, 3]
    assert {"pictures/loss", "pictures/memory"} == set(events.Tags()["images"])
    assert (out / "wandb-run-id").exists() or not find_spec("wandb")
