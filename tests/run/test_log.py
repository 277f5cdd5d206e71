"""The output of a run: rows that survive a kill, a bar or lines, and a report."""

import errno
import io
import json
import math
import re
import sys
from contextlib import nullcontext
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch

from logs import PLAN, logged, row, started
from lowmem import terminal
from lowmem.core.batch import Batch
from lowmem.core.step import StepResult
from lowmem.errors import LowmemError
from lowmem.run.log import RunLog
from lowmem.run.main import main
from lowmem.run.metrics import read_metrics, step_row, write_json
from lowmem.settings import Settings
from lowmem.units import GIB
from runs import failing, interrupt

# --- answers


def test_an_answer_that_a_full_disk_does_not_take_is_an_error_and_a_closed_pipe_is_none(monkeypatch):
    lost: list[int] = []
    monkeypatch.setattr(terminal.os, "dup2", lambda _, stream: lost.append(stream))
    for number, streams in ((errno.ENOSPC, [1]), (errno.EPIPE, [1, 2])):
        lost.clear()
        monkeypatch.setattr(sys, "stdout", Mock(flush=failing(number)))
        with pytest.raises(LowmemError, match="could not be written: No space") if streams == [1] else nullcontext():
            with terminal.output(needed=True):
                print("answer")
        assert lost == streams


# --- files


def test_a_row_is_in_the_file_as_soon_as_its_step_is_done(tmp_path):
    log = started(tmp_path)
    for step in (1, 2, 3):
        log.step(row(step))
        assert (tmp_path / "metrics.jsonl").read_text().count("\n") == step  # while the file is open
    assert read_metrics(tmp_path / "metrics.jsonl") == log.rows == [row(1), row(2), row(3)]
    log.close()


def test_a_resumed_run_drops_the_rows_that_it_computes_again_and_half_a_line(tmp_path):
    killed = started(tmp_path)
    for step in (1, 2, 3, 4):
        killed.step(row(step))
    with open(tmp_path / "metrics.jsonl", "a") as file:
        file.write('{"step": 5, "epo')
    log = started(tmp_path, first_step=2)
    assert [kept["step"] for kept in log.rows] == [1, 2]
    log.step(row(3, loss=9.0))
    log.close()
    assert read_metrics(tmp_path / "metrics.jsonl") == [row(1), row(2), row(3, loss=9.0)]


def test_a_kill_while_a_run_resumes_loses_no_row(tmp_path, monkeypatch):
    logged(tmp_path, row(1))

    with monkeypatch.context() as patch:
        patch.setattr(Path, "replace", interrupt)
        with pytest.raises(KeyboardInterrupt):
            started(tmp_path, first_step=1)
    assert read_metrics(tmp_path / "metrics.jsonl") == [row(1)]


def test_what_follows_bytes_that_are_no_row_is_left_out(tmp_path):
    path = tmp_path / "metrics.jsonl"
    assert read_metrics(path) == []
    path.write_bytes(json.dumps(row(1)).encode() + b"\n\0\0\xff\n" + json.dumps(row(2)).encode() + b"\n")
    assert read_metrics(path) == [row(1)]


def strict(text: str) -> dict:
    def refuse(constant: str):
        raise AssertionError(f"{constant} is not JSON")

    return json.loads(text, parse_constant=refuse)


def test_a_loss_that_is_not_finite_is_null_for_other_programs_and_nan_for_ours(tmp_path):
    logged(tmp_path, row(1, loss=math.nan, grad_norm=math.inf))
    written = strict((tmp_path / "metrics.jsonl").read_text())
    assert (written["loss"], written["grad_norm"], written["gpu_reserved_peak_bytes"]) == (None, None, None)
    (read,) = read_metrics(tmp_path / "metrics.jsonl")
    assert math.isnan(read["loss"]) and math.isnan(read["grad_norm"]) and read["gpu_reserved_peak_bytes"] is None

    write_json(tmp_path / "report.json", {"loss": {"last": math.nan}, "list": [-math.inf, 1.5, None]})
    assert strict((tmp_path / "report.json").read_text()) == {"loss": {"last": None}, "list": [None, 1.5, None]}


def test_a_run_that_is_refused_leaves_no_file_and_one_that_starts_keeps_what_was_said(tmp_path, capsys):
    log = RunLog(tmp_path, Settings())
    log.say("before")
    assert list(tmp_path.iterdir()) == []
    log.close()
    log.start(0, 1, PLAN)
    log.say("after")
    log.close()
    assert (tmp_path / "log.txt").read_text() == "before\nafter\n"
    assert capsys.readouterr().err == "before\nafter\n"
    log.close()


# --- progress


def test_without_a_terminal_the_first_step_every_nth_and_the_last_get_a_line(tmp_path, capsys):
    logged(tmp_path, *map(row, range(1, 9)), last_step=8, log_every=3)
    output = capsys.readouterr()
    assert re.findall(r"^step (\d+)/8 ", output.err, re.MULTILINE) == ["1", "3", "6", "8"]
    assert "\r" not in output.err and output.out == ""


def test_a_line_names_loss_speed_peaks_and_time_left(tmp_path, capsys):
    logged(tmp_path, row(1, gpu_reserved_peak_bytes=11 * GIB, eval_loss=4.25), last_step=3601)
    line = "step 1/3601  loss 4.9000  lr 1e-3  norm 0.5  2,000 tokens/s  GPU 11.0 GiB  RAM 3.00 GiB (60% of the plan)"
    said = f"{line}  1:00:00 left\nstep 1: held-out loss 4.2500\n"
    assert capsys.readouterr().err == (tmp_path / "log.txt").read_text() == said


@pytest.mark.parametrize(("steps", "lines"), [(40, 40), (150, 31), (10_000, 51)])
def test_piped_output_thins_out_and_keeps_every_evaluation_and_sample(tmp_path, capsys, steps, lines):
    log = started(tmp_path, last_step=steps)
    for step in range(1, steps + 1):
        log.step(row(step, eval_loss=3.0) if step == 33 else row(step))
        if step == 34:
            log.sample(step, "sample: a text", last=False)
    log.close()
    said = capsys.readouterr().err
    assert said == (tmp_path / "log.txt").read_text()
    assert len(re.findall(r"^step \d+/", said, re.MULTILINE)) == lines
    assert "\nstep 33: held-out loss 3.0000\n" in said and "\nstep 34, sample: a text\n" in said


def test_a_full_disk_costs_a_sample_and_not_the_run(tmp_path, capsys, monkeypatch):
    """Seen to fail: the error ended training, without a save."""
    log = started(tmp_path, last_step=2)

    with monkeypatch.context() as patch:
        patch.setattr("lowmem.run.log.replace_file", failing(errno.ENOSPC))
        log.sample(1, "sample: one", last=False)
    log.sample(2, "sample: two", last=False)
    log.close()
    assert "warning: samples.jsonl cannot be written: No space left on device" in capsys.readouterr().err
    assert (tmp_path / "samples.jsonl").read_text().count("sample: ") == 2


@pytest.mark.parametrize(
    ("trained", "said"),
    [(2000.0, "2,000 tokens/s"), (1980.0, "1,980 tokens/s"), (1979.0, "1,979 trained of 2,000 tokens/s")],
)
def test_a_line_tells_trained_tokens_from_computed_ones_where_they_differ(tmp_path, capsys, trained, said):
    logged(tmp_path, row(1, tokens_per_second=trained), last_step=1)
    assert f"  {said}  " in capsys.readouterr().err


def test_a_row_counts_labels_as_trained_and_every_position_as_computed():
    batch = Batch(torch.zeros(2, 4, dtype=torch.int64), torch.tensor([[-100, -100, 5, 6], [-100, 7, -100, -100]]))
    made = step_row(1, 0.1, batch, 1e-3, 0.5, StepResult(2.0, 1.0, True, 8), {"ram_peak_bytes": 1, "x": 2})
    assert (made["tokens"], made["tokens_per_second"], made["computed_tokens_per_second"]) == (3, 6.0, 16.0)
    assert (made["ram_peak_bytes"], made["x"]) == (1, 2), "all peaks are there"


def test_time_left_is_counted_by_the_median_step_of_this_run(tmp_path, capsys):
    """Not by the slow first step, nor by the steps of the run before, as if all 100 had been done since the start."""
    log = started(tmp_path, first_step=100, last_step=113, log_every=1)
    for step, milliseconds in ((101, 60_000.0), (102, 1000.0), (103, 1000.0)):
        log.step(row(step, step_ms=milliseconds))
    log.close()
    assert capsys.readouterr().err.splitlines()[-1].endswith(" 0:10 left")


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True

    def screen(self) -> list[str]:
        """What a person sees: a carriage return overwrites its line."""
        return [re.sub(r".*\r", "", line).rstrip() for line in re.sub(r"\r *(?=\r|$)", "", self.getvalue()).split("\n")]


def test_a_terminal_keeps_evaluations_and_samples_above_one_bar_that_stays_before_the_end(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "stderr", Terminal())
    log = started(tmp_path, last_step=2, eval_first=6.0)
    log.step(row(1, eval_loss=4.0, loss=2.654, learning_rate=9.874e-4))
    log.sample(1, "sample: a text", last=False)
    assert "1/2 50% loss 2.65 lr 9.87e-4 norm 0.5 2,000 tok/s 0:01 left" in sys.stderr.getvalue()
    log.step(row(2))
    log.end_bar()
    log.say("done")
    log.close()
    assert [line for line in sys.stderr.screen() if line] == [
        *("before training: held-out loss 6.0000", "step 1: held-out loss 4.0000", "step 1, sample: a text"),
        *("2/2 100% loss 4.80 lr 1e-3 norm 0.5 2,000 tok/s 0:00 left", "done"),
    ]
    assert "step 2/2  loss 4.8000  lr 1e-3" in (tmp_path / "log.txt").read_text()


def test_the_bar_of_a_long_run_fits_into_80_columns(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "stderr", Terminal())
    log = started(tmp_path, first_step=99_998, last_step=100_000)
    large = {"loss": 10.654, "learning_rate": 9.87e-10, "grad_norm": 123.4, "tokens_per_second": 123_456.0}
    log.step(row(99_999, step_ms=2e8, **large))
    log.close()
    (bar,) = (line for line in sys.stderr.screen() if "99999" in line)
    assert bar == "99999/100000 100% loss 10.65 lr 9.87e-10 norm 123 123,456 tok/s 55:33:20 left"
    assert len(bar) <= 80


def test_a_terminal_gets_lines_that_end_between_words_and_log_txt_the_sentence(tmp_path, monkeypatch):
    monkeypatch.setenv("COLUMNS", "40")
    monkeypatch.setattr(sys, "stderr", Terminal())
    monkeypatch.setattr("lowmem.run.log.has_room_for_a_bar", lambda: False)  # as with docker run -t
    log, sentence = started(tmp_path), "a sentence of more than forty columns, which a terminal would cut"
    log.say(f"{sentence}\n  a table's row    1 MiB")
    log.step(row(1))
    log.close()
    assert max(map(len, sys.stderr.getvalue().splitlines())) <= 40
    shown = ["a sentence of more than forty columns,", "  which a terminal would cut", "  a table's row    1 MiB"]
    assert "\n".join(shown) in sys.stderr.getvalue()
    assert sentence in (tmp_path / "log.txt").read_text()
    assert main(Settings(), ["--seqq", "5"]) == 2
    *_, begins, goes_on = sys.stderr.getvalue().splitlines()
    assert goes_on.startswith("  ") and len(begins) <= 40 and len(goes_on) <= 40
