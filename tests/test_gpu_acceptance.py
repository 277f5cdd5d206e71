"""The command that is to use a GPU's few minutes well: it must not fail there for a reason that could be seen here.

The whole of it runs once on the CPU with tiny shapes (the suite's one slow test beside the demo). What ends a job, and
what must not end the others, is tried with jobs made for it, each in its own process as the real ones are.
"""

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

from experiments.gpu_acceptance import rows
from experiments.gpu_acceptance.__main__ import run_jobs
from experiments.gpu_acceptance.jobs import JOBS, Job

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
