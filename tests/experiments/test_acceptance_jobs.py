"""Made-up jobs of the acceptance command, in separate processes as the real ones. They show how a job or a case ends,
that the others go on, the time limits, and the rows.
"""

import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest

from experiments.gpu_acceptance import __main__ as program
from experiments.gpu_acceptance.__main__ import run_jobs
from experiments.gpu_acceptance.jobs import JOBS, Job
from experiments.harness import progress, rows

ROOT = Path(__file__).resolve().parents[2]
MACHINE = {"names": {"cpu": "a CPU"}, "versions": {"python": "3"}}
MADE_UP = """
    import os, time
    from experiments.harness import child, progress
    from experiments.harness.child import Result

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

    def cases(setting):
        progress.FLOOR_SECONDS, child.DRY_RUN_SECONDS = 3.0, 0.0
        good = Result({"count": 1}, {"holds": True})
        works = {
            "first": lambda: good, "raises": lambda: 1 / 0, "killed": lambda: killed(setting),
            "hangs": lambda: time.sleep(600), "wrong": lambda: Result({"count": 2}, {"holds": False}),
            "last": lambda: good,
        }
        found = {name: setting.attempt(name, work) for name, work in works.items()}
        return Result({"counts": [result.values.get("count") for result in found.values()]},
                      {name: result.held for name, result in found.items()})

    def dies_before_any_case(setting):
        setting.attempt("first", lambda: Result({}, {}))
        raise ValueError("between cases")

    def long_by_its_plan(setting):
        progress.FLOOR_SECONDS, child.DRY_RUN_SECONDS = 0.0, 0.0
        setting.expect(20.0)
        time.sleep(8)
        return Result({}, {})

    def longer_than_there_is_time(setting):
        setting.expect(1e6)
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


def names(found: list[dict]) -> list[str]:
    return [row["name"] for row in found]


def test_what_ends_one_job_does_not_end_the_next(tmp_path, made_up, capfd):
    jobs = [job("raises"), job("killed"), job("hangs", seconds=2), job("wrong"), job("good", count=3)]
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


@pytest.mark.exhaustive
def test_a_case_that_fails_hangs_or_is_killed_does_not_hide_those_after_it(tmp_path, made_up):
    good, found = run(tmp_path, job("cases"), job("dies_before_any_case"))
    assert not good
    parts = ["first", "raises", "killed", "hangs", "wrong", "last"]
    assert names(found) == [
        *(f"cases: {part}" for part in parts),
        "cases",
        "dies_before_any_case: first",
        "dies_before_any_case",
    ]
    rows_of = {row["name"]: row for row in found}
    assert "ZeroDivisionError" in rows_of["cases: raises"]["error"] and "SIGKILL" in rows_of["cases: killed"]["error"]
    assert "its time was over" in rows_of["cases: hangs"]["error"], "by the case's limit: the job's is a minute"
    assert rows_of["cases"]["values"] == {"counts": [1, None, None, None, 2, 1]}
    held = rows_of["cases"]["checks"]
    assert [name for name, holds in held.items() if holds] == ["first", "last"] and not rows_of["cases"]["ok"]
    assert "between cases" in rows_of["dies_before_any_case"]["error"], "begun once more, it would end so for ever"


@pytest.mark.exhaustive
def test_a_jobs_plan_decides_how_long_it_may_take(tmp_path, made_up):
    good, found = run(tmp_path, job("long_by_its_plan", seconds=5))
    assert good, found
    good, found = run(tmp_path, job("longer_than_there_is_time"))
    assert not good and found[-1]["error"].startswith("skipped: out of time: by its plan it may take 3000")


def test_limits_follow_from_planned_seconds_and_the_cards_rate():
    assert progress.time_limit(0) == progress.FLOOR_SECONDS
    assert progress.time_limit(100) == progress.FLOOR_SECONDS + 100 * progress.FACTOR
    rates = {name: progress.flops_per_second(f"NVIDIA {name}") for name in ("GeForce RTX 3060", "H200", "GeForce 9999")}
    assert rates["H200"] > 20 * rates["GeForce RTX 3060"] == 20 * rates["GeForce 9999"]
    peer = next(job for job in JOBS if job.section == "peers")
    assert peer.flops / rates["GeForce RTX 3060"] > 2 * 250, "20 steps of Large take that long there"


def test_only_what_is_missing_bad_or_of_other_sources_runs_again(tmp_path, made_up, monkeypatch):
    wrong, good = job("wrong"), job("good")
    run(tmp_path, wrong, good)
    assert names(run(tmp_path, wrong, good)[1])[3:] == ["wrong"]
    assert names(run(tmp_path, good, again=True)[1])[4:] == ["good: part", "good"]
    monkeypatch.setattr(rows, "sources", lambda target: "changed")
    assert names(run(tmp_path, good)[1])[6:] == ["good: part", "good"]


def test_jobs_for_which_no_time_is_left_say_so(tmp_path, made_up):
    good, found = run(tmp_path, job("good"), seconds=1)
    assert not good
    assert [row["error"] for row in found] == ["skipped: out of time"]


@pytest.mark.quick(1)
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGKILL])
def test_a_signal_ends_the_job_too_and_the_rows_stay(tmp_path, made_up, number):
    program = f"""
        import sys
        from experiments.gpu_acceptance import __main__ as command
        from experiments.gpu_acceptance.jobs import Job
        command.JOBS = tuple(Job("section", name, "made_up:" + name, 60) for name in ("good", "hangs"))
        command.machine_here = lambda: {MACHINE}
        command.tempfile.tempdir = {str(tmp_path)!r}
        sys.exit(command.main(["--dry-run", "--out", {str(tmp_path)!r}]))
    """
    process = subprocess.Popen([sys.executable, "-c", textwrap.dedent(program)], cwd=ROOT)
    pid = int(wait_for(lambda: "".join(path.read_text() for path in tmp_path.glob("*/pid"))))
    process.send_signal(number)
    assert process.wait(timeout=20) == (-signal.SIGKILL if number == signal.SIGKILL else 1)
    wait_for(lambda: not running(pid))
    assert names(rows.read(tmp_path / "rows.jsonl")) == ["good: part", "good"]
    assert names(run(tmp_path, job("good"), job("wrong"))[1]) == ["good: part", "good", "wrong"], "what is missing"


def test_a_half_line_is_left_out_and_not_added_to(tmp_path):
    path = tmp_path / "rows.jsonl"
    rows.append(path, {"a": 1})
    with open(path, "a") as file:
        file.write('{"b": ')
    rows.append(path, {"c": 3})
    assert rows.read(path) == [{"a": 1}, {"c": 3}]


def test_without_a_gpu_it_says_so_and_without_sense_too(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(program, "machine_here", lambda: MACHINE)
    monkeypatch.setattr(program.signal, "signal", lambda *_: None)
    assert program.main(["--out", str(tmp_path), "--only", "train"]) == 2
    said = capsys.readouterr().err
    assert said.count("\n") == 1 and "no GPU" in said and list(tmp_path.iterdir()) == []
    for wrong in (["--only", "trian"], ["--minutes", "0"]):
        with pytest.raises(SystemExit, match="2"):
            program.main(wrong)


def test_on_the_stand_in_it_measures_nothing_and_wants_values(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("STAND_IN_LIBRARIES", "somewhere")
    monkeypatch.setenv("STAND_IN_VALUES", "")
    for wrong, why in (([], "no speed to measure"), (["--dry-run"], "--values")):
        assert program.main([*wrong, "--out", str(tmp_path)]) == 2
        said = capsys.readouterr().err
        assert said.count("\n") == 1 and why in said and list(tmp_path.iterdir()) == []


def test_rows_of_the_stand_in_and_others_never_meet_in_a_file(tmp_path, made_up, monkeypatch, capsys):
    monkeypatch.setattr(program, "machine_here", lambda: {"names": {"cpu": "a CPU", "cuda": "a GPU"}, "versions": {}})
    monkeypatch.setattr(program.signal, "signal", lambda *_: None)
    monkeypatch.setattr(program, "JOBS", (job("good"),))
    on_cpu, on_gpu = ["--dry-run", "--out", str(tmp_path)], ["--out", str(tmp_path)]
    assert program.main(on_cpu) == 0
    kinds = [(row["dry_run"], row["stand_in"]) for row in rows.read(tmp_path / "rows.jsonl")]
    assert kinds == [(True, False)] * 2
    assert program.main(on_gpu) == 2 and "another kind of run" in capsys.readouterr().err
    for name, value in {"LIBRARIES": "somewhere", "VALUES": "1", "GPU": "rtx3060", "ORDER": "issue"}.items():
        monkeypatch.setenv(f"STAND_IN_{name}", value)
    assert program.main(on_cpu) == 2 and "another kind of run" in capsys.readouterr().err
    assert len(rows.read(tmp_path / "rows.jsonl")) == 2
    assert program.main(["--dry-run", "--out", str(tmp_path / "stand_in")]) == 0
    for row in rows.read(tmp_path / "stand_in" / "rows.jsonl"):
        assert row["dry_run"] and row["stand_in"] and row["device"] == "a GPU"
        assert row["command"].startswith("python3 -m stand_in --gpu rtx3060 --order issue --values -- -m experiments.")
    monkeypatch.setattr(program, "RESULTS", tmp_path / "results")
    assert program.main(["--dry-run", "--out", str(tmp_path / "results")]) == 2
    assert "measured on a GPU" in capsys.readouterr().err and not (tmp_path / "results").exists()


def wait_for(condition, seconds: float = 40):
    """Returns the first true value of `condition()`."""
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
