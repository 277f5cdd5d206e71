"""The command that is to use a GPU's few minutes well: it must not fail there for a reason that could be seen here.

The whole of it runs once on the CPU with tiny shapes (the suite's one slow test beside the demo). What ends a job, and
what must not end the others, is tried with jobs made for it, each in its own process as the real ones are.
"""

import dataclasses
import json
import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest
import torch

from experiments.gpu_acceptance import layouts, plans, rows
from experiments.gpu_acceptance.__main__ import run_jobs
from experiments.gpu_acceptance.at_peak import differences, live_at_peak, tape_of_history
from experiments.gpu_acceptance.child import Setting
from experiments.gpu_acceptance.jobs import JOBS, Job
from lowmem.simulate import cpu_target, under_cap
from lowmem.units import MIB

ROOT = Path(__file__).resolve().parent.parent
MACHINE = {"names": {"cpu": "a CPU"}, "versions": {"python": "3"}}
MADE_UP = """
    import os, time
    from experiments.gpu_acceptance.child import Result

    def good(setting, count=1):
        setting.record("part", {"count": count, "bad": float("nan")}, {"holds": True})
        return Result({"count": count}, {"holds": True})

    def wrong(setting):
        return Result({}, {"holds": True, "two is three": False})

    def raises(setting):
        setting.record("part", {}, {})
        raise ValueError("what went wrong")

    def killed(setting):
        os.kill(os.getpid(), 9)

    def hangs(setting):
        (setting.scratch.parent / "pid").write_text(str(os.getpid()))
        time.sleep(600)
"""


@pytest.fixture
def made_up(tmp_path, monkeypatch) -> None:
    """The functions above, where the processes of jobs find them as module `made_up`."""
    (tmp_path / "made_up.py").write_text(textwrap.dedent(MADE_UP))
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))


def job(function: str, seconds: float = 60, **options) -> Job:
    return Job("section", function, f"made_up:{function}", seconds, options=options)


def run(tmp_path: Path, *jobs: Job, seconds: float = 120, again: bool = False) -> tuple[bool, list[dict]]:
    scratch = tmp_path / f"scratch{time.monotonic_ns()}"
    scratch.mkdir()
    path = tmp_path / "rows.jsonl"
    good = run_jobs(jobs, path, scratch, MACHINE, "cpu", time.monotonic() + seconds, again=again)
    return good, rows.read(path)


def command(*arguments: str, **keywords) -> subprocess.CompletedProcess:
    line = [sys.executable, "-m", "experiments.gpu_acceptance", *arguments]
    return subprocess.run(line, cwd=ROOT, capture_output=True, text=True, timeout=240, **keywords)


def names(found: list[dict]) -> list[str]:
    return [row["name"] for row in found]


def test_the_dry_run_runs_every_section_and_a_second_call_has_nothing_to_do(tmp_path):
    first = command("--dry-run", "--out", str(tmp_path))
    assert first.returncode == 0, first.stdout + first.stderr
    text = (tmp_path / "rows.jsonl").read_text()
    found = [json.loads(line) for line in text.splitlines()]
    assert len(first.stdout.splitlines()) == len(found), "a line per row"
    for row in found:
        assert tuple(row) == rows.KEYS
        assert row["ok"] and row["dry_run"] and row["error"] is None, row
        assert row["versions"]["torch"] and row["seconds"] >= 0 and row["date"].endswith("+00:00")
    assert {(job.section, job.name) for job in JOBS} <= {(row["section"], row["name"]) for row in found}

    large = next(row for row in found if row["name"] == "large")
    assert large["command"] == "python3 -m experiments.gpu_acceptance --only train/large --dry-run"
    assert large["caps"] == {"gpu_bytes": 11 * 2**30, "ram_bytes": None}
    assert large["values"]["sequences_per_second"] > 0 and large["checks"]["the loss falls"]
    assert "train_gpt2_large.py" in large["values"]["script"]
    assert set(os.listdir(tmp_path)) == {"rows.jsonl"}

    peaks = [row["values"] for row in found if row["name"].startswith("step: tiny")]
    assert len(peaks) == 3, "two layouts, and the first one again"
    for values in peaks:
        assert abs(values["allocated_error"]) < 0.002 and values["measured_step_seconds"] > 0
    diagnosed = [values for values in peaks if "at_measured_peak" in values]
    assert len(diagnosed) == 1 and diagnosed[0]["at_simulated_peak"][0][3] == "resident_states"
    assert diagnosed[0]["replayed_reserved_bytes"] == diagnosed[0]["measured_reserved_peak_bytes"]
    cap = next(row["values"] for row in found if row["name"].startswith("step: smallest cap"))
    assert cap["trials"] >= 1 and cap["measured_fails_bytes"] < cap["measured_completes_bytes"]
    chosen = next(row["values"] for row in found if row["name"] == "step")
    assert chosen["completed"] == chosen["choices"] == 3 and chosen["seconds_over_fastest"] >= 1

    second = command("--dry-run", "--out", str(tmp_path))
    assert second.returncode == 0 and second.stdout.count("there ") == len(JOBS)
    assert (tmp_path / "rows.jsonl").read_text() == text


def test_what_ends_one_job_does_not_end_the_next(tmp_path, made_up, capfd):
    jobs = [job("raises"), job("killed"), job("hangs", seconds=6), job("wrong"), job("good", count=3)]
    good, found = run(tmp_path, *jobs)
    assert not good
    assert names(found) == ["raises: part", "raises", "killed", "hangs", "wrong", "good: part", "good"]
    last = {row["name"]: row for row in found}
    assert "exit code 1: ValueError: what went wrong" in last["raises"]["error"]
    assert "Traceback" in last["raises"]["output"]
    assert "SIGKILL" in last["killed"]["error"] and "time was over" in last["hangs"]["error"]
    assert last["wrong"]["error"] is None and not last["wrong"]["ok"]
    assert last["good"]["ok"] and last["good"]["values"] == {"count": 3}
    assert last["good: part"]["values"]["bad"] is None, "JSON has no NaN"
    printed = capfd.readouterr().out.splitlines()
    assert [line.split()[0] for line in printed] == ["ok", *["FAILED"] * 4, "ok", "ok"]
    assert "not so: two is three" in printed[4]


def test_only_what_is_missing_bad_or_of_other_sources_runs_again(tmp_path, made_up, monkeypatch):
    wrong, good = job("wrong"), job("good")
    run(tmp_path, wrong, good)
    assert names(run(tmp_path, wrong, good)[1])[3:] == ["wrong"]
    assert names(run(tmp_path, good, again=True)[1])[4:] == ["good: part", "good"]
    monkeypatch.setattr(rows, "sources", lambda: "changed")
    assert names(run(tmp_path, good)[1])[6:] == ["good: part", "good"]


def test_jobs_for_which_no_time_is_left_say_so(tmp_path, made_up):
    good, found = run(tmp_path, job("good"), seconds=1)
    assert not good
    assert [row["error"] for row in found] == ["skipped: out of time"]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGKILL])
def test_a_signal_ends_the_job_too_and_the_rows_stay(tmp_path, made_up, number):
    program = f"""
        import sys
        from experiments.gpu_acceptance import __main__ as command
        from experiments.gpu_acceptance.jobs import Job
        command.JOBS = tuple(Job("section", name, "made_up:" + name, 60) for name in ("good", "hangs"))
        command.probe = lambda: {MACHINE}
        command.tempfile.tempdir = {str(tmp_path)!r}
        sys.exit(command.main(["--dry-run", "--out", {str(tmp_path)!r}]))
    """
    process = subprocess.Popen([sys.executable, "-c", textwrap.dedent(program)], cwd=ROOT)
    pid = int(wait_for(lambda: "".join(path.read_text() for path in tmp_path.glob("*/pid"))))
    process.send_signal(number)
    assert process.wait(timeout=20) == (-signal.SIGKILL if number == signal.SIGKILL else 1)
    wait_for(lambda: not running(pid))
    assert names(rows.read(tmp_path / "rows.jsonl")) == ["good: part", "good"]


def test_a_half_line_is_left_out_and_not_added_to(tmp_path):
    path = tmp_path / "rows.jsonl"
    rows.append(path, {"a": 1})
    with open(path, "a") as file:
        file.write('{"b": ')
    rows.append(path, {"c": 3})
    assert rows.read(path) == [{"a": 1}, {"c": 3}]


def test_without_a_gpu_it_says_so_and_without_sense_too(tmp_path):
    if torch.cuda.is_available():
        pytest.skip("there is a GPU here")
    missing = command("--out", str(tmp_path), "--only", "train")
    assert missing.returncode == 2 and missing.stderr.count("\n") == 1 and "no GPU" in missing.stderr
    assert list(tmp_path.iterdir()) == []
    assert command("--only", "trian").returncode == 2
    assert command("--minutes", "0").returncode == 2


# --- plans: what the dry run cannot show, for there everything holds


@pytest.fixture
def recorded(tmp_path) -> tuple[Setting, list[tuple[str, dict, dict]]]:
    """A setting that is no dry run, on the CPU, and the rows that are recorded with it."""
    found = []

    def record(detail: str, values: dict, checks: dict[str, bool]) -> bool:
        found.append((detail, values, checks))
        return all(checks.values())

    return Setting("cpu", False, None, None, tmp_path, record), found


@pytest.mark.parametrize(
    ("allocated", "reserved", "missed"),
    [
        (0.01, 0.03, []),
        (-0.005, -0.005, []),
        (0.011, 0.0, ["allocated within 1%"]),
        (0.0, 0.031, ["reserved within 3%"]),
        (-0.006, 0.0, ["not more than 0.5% below"]),
        (0.0, -0.006, ["not more than 0.5% below"]),
        (-0.02, -0.04, ["allocated within 1%", "reserved within 3%", "not more than 0.5% below"]),
    ],
)
def test_the_bars_are_those_of_the_issue(allocated, reserved, missed):
    assert [name for name, met in plans.bars(allocated, reserved).items() if not met] == missed


def test_a_prediction_that_is_off_fails_and_says_what_lay_in_memory(recorded, monkeypatch):
    setting, found = recorded
    really = plans.measure

    def measure(layout, device, *arguments, **keywords):
        """2% more than there is."""
        measured = really(layout, device, *arguments, **keywords)
        return dataclasses.replace(measured, allocated_peak_bytes=int(measured.allocated_peak_bytes * 1.02))

    monkeypatch.setattr(plans, "measure", measure)
    monkeypatch.setattr(plans, "GRID", layouts.DRY_GRID[1:])
    monkeypatch.setattr(plans, "CAPPED", ())
    result = plans.check_peaks(setting, torch.device("cpu"), cpu_target())
    name, values, checks = found[0]
    assert values["allocated_error"] == pytest.approx(1 / 1.02 - 1, abs=1e-3)
    assert not checks["allocated within 1%"] and not checks["not more than 0.5% below"]
    assert values["at_measured_peak"] and values["at_simulated_peak"]
    assert not result.checks[name] and not result.checks["median of allocated within 0.5%"]
    assert result.values["lowest_error"] == values["allocated_error"]


@pytest.mark.parametrize(
    ("real_mib", "missed"),
    [
        (0, []),
        (-60, []),
        (-70, ["nothing that runs is refused beyond the margin"]),
        (70, ["what a plan calls fitting completes", "nothing that fails is called fitting within the margin"]),
    ],
)
def test_the_smallest_cap_is_found_and_compared(recorded, monkeypatch, real_mib, missed):
    """The simulation says 1,000 MiB; really it is that and `real_mib`."""
    setting, found = recorded
    real = (1000 + real_mib) * MIB

    def measure(layout, device, limit_bytes=None, **_):
        taken = plans.Measured(real - 100 * MIB, real + 30 * MIB, 1.0, 2, 0, None)
        return taken if limit_bytes is None or limit_bytes >= real else None

    monkeypatch.setattr(plans, "measure", measure)
    monkeypatch.setattr(plans, "smallest_cap_bytes", lambda *_: 1000 * MIB)
    held = plans.smallest_cap(setting, layouts.DRY_GRID[0], torch.device("cpu"), cpu_target())
    _, values, checks = found[0]
    assert values["measured_fails_bytes"] < real <= values["measured_completes_bytes"]
    assert values["measured_completes_bytes"] - values["measured_fails_bytes"] <= plans.RESOLUTION_BYTES
    assert values["difference_bytes"] == 1000 * MIB - values["measured_completes_bytes"]
    assert [name for name, holds in checks.items() if not holds] == missed and held == (not missed)


def test_on_a_gpu_the_allocator_is_emptied_and_capped_and_running_out_is_an_answer(monkeypatch):
    """With torch.cuda imitated, as far as that goes: which calls are made, in which order."""
    calls = []
    for name, result in {
        "synchronize": None, "empty_cache": None, "reset_peak_memory_stats": None, "memory_reserved": 7,
        "set_per_process_memory_fraction": None, "mem_get_info": (80 * MIB, 100 * MIB), "max_memory_allocated": 30,
        "max_memory_reserved": 40,
    }.items():  # fmt: skip
        monkeypatch.setattr(
            torch.cuda, name, lambda *a, name=name, result=result: (calls.append((name, *a)), result)[1]
        )
    monkeypatch.setattr(torch._C, "_cuda_clearCublasWorkspaces", lambda: calls.append(("clear",)), raising=False)
    monkeypatch.setattr(torch.cuda.memory, "_record_memory_history", lambda *a, **_: calls.append(("history", *a)))
    entry = {"action": "alloc", "addr": 1, "size": 30, "frames": []}
    monkeypatch.setattr(torch.cuda.memory, "_snapshot", lambda: {"device_traces": [[entry]]})
    monkeypatch.setattr(plans, "_run", lambda *_: (0.5, 3))
    device = torch.device("cuda", 0)

    measured = plans.measure(layouts.GRID[0], device, 50 * MIB, history=True)
    assert measured.tape.peak_bytes() == 30
    assert dataclasses.replace(measured, tape=None) == plans.Measured(30, 40, 0.5, 3, 7, None)
    names = [name for name, *_ in calls]
    assert names[:4] == ["clear", "empty_cache", "reset_peak_memory_stats", "memory_reserved"]
    fractions = [fraction for name, fraction, *_ in (c for c in calls if c[0].startswith("set_per")) if name]
    assert fractions == [1.0, 0.5], "an earlier cap is lifted"
    assert [call for call in calls if call[0] == "history"] == [("history", "all"), ("history", None)]

    def runs_out(*_):
        raise torch.OutOfMemoryError("CUDA out of memory")

    calls.clear()
    monkeypatch.setattr(plans, "_run", runs_out)
    assert plans.measure(layouts.GRID[0], device, 50 * MIB, history=True) is None
    assert ("synchronize", device) in calls and calls[-1] == ("history", None)


def test_a_history_is_read_as_torch_documents_it():
    def entry(action, address, size, *frames):
        return {"action": action, "addr": address, "size": size, "stream": 0, "frames": list(frames)}

    inside = {"filename": f"{Path(torch.__file__).parent}/nn/functional.py", "name": "linear", "line": 1}
    block = {"filename": "/project/lowmem/blocks.py", "name": "block", "line": 7}
    entries = [
        entry("segment_map", 0, 20 * MIB),
        entry("alloc", 10, 1000, inside, block),
        entry("alloc", 20, 3 * MIB),
        entry("free_requested", 10, 1000),
        entry("free_completed", 10, 1000),
        entry("alloc", 10, 2 * MIB, block),
        entry("free_requested", 99, 512),  # of before
        entry("free_requested", 20, 3 * MIB),
        entry("alloc", 30, 2 * MIB),  # while 20 waits for another stream, which does not count as allocated
    ]
    tape = tape_of_history(entries)
    assert live_at_peak(tape) == {(3 * MIB, "no Python frame"): 1, (2 * MIB, "block (blocks.py:7)"): 1}
    assert under_cap(tape).allocated_peak_bytes == 5 * MIB

    found = differences(tape, tape_of_history(entries[:5]))  # as if what follows had not been foreseen
    assert found["sizes_that_differ"] == [[2 * MIB, 1, 0], [1024, 0, 1]]
    assert found["at_measured_peak"][0] == [3 * MIB, 1, 3 * MIB, "no Python frame"]
    assert found["replayed_reserved_bytes"] == 20 * MIB + 2 * MIB


def test_the_grid_has_every_kind_of_layout():
    for grid in (layouts.GRID, layouts.DRY_GRID):
        assert len({layout.name for layout in grid}) == len(grid)
        assert all(layout.batch % (layout.micro_batch * layout.group) == 0 for layout in grid)
    for field, values in {
        "precision": {"bf16", "fp16", "fp32"}, "micro_batch": {1, 4}, "group": {1, 2}, "segment": {1, 3},
        "product_blocks": {0, 2, layouts.ALL}, "whole_blocks": {0, 2},
        "recompute": {True, False}, "states": {"resident", "streamed", "mixed"}, "optimizer": {"adamw", "sgd"},
        "document_mask": {True, False}, "residual": {"fp32", "16bit"},
    }.items():  # fmt: skip
        assert {getattr(layout, field) for layout in layouts.GRID} == values


def wait_for(condition, seconds: float = 40):
    """The first true value of `condition()`."""
    deadline = time.monotonic() + seconds
    while not (value := condition()):
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.05)
    return value


def running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except OSError:
        return False
