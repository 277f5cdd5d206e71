"""The first signal is a request to stop, the second one is in a hurry, the third is the end; each is answered at once.

Seen to fail: with the old handlers not restored at the end, with the answer left to Python's handler, with every
hang-up counted.
"""

import os
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from lowmem.core.ranks import Ranks
from lowmem.run.signals import StopRequest, interrupt_ends_at_once
from runs import ROOT

BOTH = (signal.SIGTERM, signal.SIGINT)
ALL = (*BOTH, signal.SIGHUP)


@pytest.fixture(autouse=True)
def handlers_unchanged():
    hang_up = signal.signal(signal.SIGHUP, signal.SIG_DFL)  # under nohup it is ignored
    before = [signal.getsignal(number) for number in ALL]
    yield
    assert [signal.getsignal(number) for number in ALL] == before
    signal.signal(signal.SIGHUP, hang_up)


def in_a_child(work) -> int:
    """The exit status of a forked process that does `work`: -n if signal n ended it."""
    child = os.fork()
    if child == 0:
        work()
        os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def send(stop: StopRequest, number: int) -> None:
    """Sends a signal and waits until it is counted."""
    before = stop.requests
    os.kill(os.getpid(), number)
    while stop.requests == before:
        time.sleep(0.001)


@pytest.mark.parametrize("number", ALL)
def test_the_first_signal_is_counted_by_name_and_answered_and_nothing_else_happens(number, capfd):
    with StopRequest() as stop:
        assert not stop.requested and stop.name is None
        stop.now("step 12, about 35 s, then saving", "drops this step")
        send(stop, number)
        assert stop.requested and not stop.urgent and stop.name == signal.Signals(number).name
    assert stop.requested
    again = {signal.SIGINT: "Ctrl-C again", signal.SIGHUP: "SIGTERM"}.get(number, "SIGTERM again")
    assert capfd.readouterr().err == (
        f"{stop.name}: finishing step 12, about 35 s, then saving; {again} drops this step\n"
    )


@pytest.mark.parametrize("first", BOTH)
@pytest.mark.parametrize("second", BOTH)
def test_a_second_signal_is_urgent_and_a_third_ends_the_process_at_once(first, second):
    def work():
        with StopRequest() as stop:
            stop.now("a step", "drops it")
            send(stop, first)
            send(stop, second)
            if not stop.urgent or stop.name != first.name:
                os._exit(1)
            os.kill(os.getpid(), second)
            time.sleep(60)

    started = time.monotonic()
    assert in_a_child(work) == 128 + second
    assert time.monotonic() - started < 30


@pytest.mark.parametrize("number", BOTH)
def test_before_the_first_step_the_second_signal_ends_the_process(number):
    def work():
        with StopRequest() as stop:
            send(stop, number)
            os.kill(os.getpid(), number)
            time.sleep(60)

    assert in_a_child(work) == 128 + number


def test_hang_ups_count_once_and_output_to_a_terminal_that_went_away_is_no_error():
    def work():
        terminal, end = os.openpty()
        os.dup2(end, 1)
        os.dup2(end, 2)
        with StopRequest() as stop:
            stop.now("a step", "drops it")
            os.close(terminal)
            os.close(end)
            send(stop, signal.SIGHUP)
            for _ in range(3):
                os.kill(os.getpid(), signal.SIGHUP)
                time.sleep(0.05)
            os.write(1, b"still here")
            os.write(2, b"still here")
            os._exit(10 + stop.requests)

    assert in_a_child(work) == 11


@pytest.mark.parametrize("number", [signal.SIGHUP, signal.SIGINT])
def test_a_signal_that_is_ignored_stays_ignored(number):
    """As nohup starts programs, and a script those in its background."""
    before = signal.signal(number, signal.SIG_IGN)
    try:
        with interrupt_ends_at_once():
            os.kill(os.getpid(), number)
        with StopRequest() as stop:
            os.kill(os.getpid(), number)
            send(stop, signal.SIGTERM)
        assert stop.name == "SIGTERM" and stop.requests == 1
        assert signal.getsignal(number) is signal.SIG_IGN
    finally:
        signal.signal(number, before)


@pytest.mark.parametrize(
    ("command", "imported"),
    [("train", "lowmem.settings"), ("plan", "lowmem.run.plan_command"), ("report", "lowmem.run.report_command")],
)
def test_an_interrupt_while_a_command_is_imported_ends_it_without_a_traceback(command, imported):
    work = f"""
import os, runpy, signal, sys

class Interrupted:
    def find_spec(name, *_):
        if name == {imported!r}:
            sys.meta_path.remove(Interrupted)
            os.kill(os.getpid(), signal.SIGINT)

sys.meta_path.insert(0, Interrupted)
sys.argv = ["lowmem", {command!r}, "--help"]
runpy.run_module("lowmem", run_name="__main__")
"""
    ended = subprocess.run([sys.executable, "-c", work], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert (ended.returncode, ended.stdout, ended.stderr) == (-signal.SIGINT, "", "")


def test_the_answer_does_not_wait_for_a_main_thread_that_is_busy():
    """It computes in C without a pause, as one that waits for a GPU does."""
    work = """
import hashlib
from lowmem.run.signals import StopRequest

with StopRequest():
    print("busy", flush=True)
    while True:
        hashlib.pbkdf2_hmac("sha256", b"", b"", 20_000_000)  # some ten seconds; it lets other threads run
"""
    with subprocess.Popen(
        [sys.executable, "-c", work], cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout.readline() == "busy\n"
        time.sleep(0.2)
        process.send_signal(signal.SIGINT)
        said = process.stderr.readline()
        alive = process.poll() is None
        process.kill()
    assert alive and said.startswith("SIGINT: finishing the preparation; Ctrl-C again ends the run at once")


def test_what_was_there_before_is_there_again_after_an_error():
    def handler(number, frame):
        pass

    before = signal.signal(signal.SIGTERM, handler), signal.signal(signal.SIGINT, signal.SIG_IGN)
    with pytest.raises(KeyError), StopRequest() as stop:
        send(stop, signal.SIGTERM)
        raise KeyError
    found = signal.signal(signal.SIGTERM, before[0]), signal.signal(signal.SIGINT, before[1])
    assert found == (handler, signal.SIG_IGN)


def test_the_exit_code_is_the_run_s_own_if_the_signals_come_after_its_end():
    def work():
        with StopRequest(ends_process=True):
            pass
        for number in ALL:
            os.kill(os.getpid(), number)

    assert in_a_child(work) == 0


def test_it_works_in_the_main_thread_only():
    with ThreadPoolExecutor() as threads, pytest.raises(ValueError):
        threads.submit(StopRequest().__enter__).result()


class Two(Ranks):
    """Two ranks, of which the other has got `others` signals."""

    count, others = 2, 0

    def most(self, number: int) -> int:
        return max(number, self.others)


def test_ranks_stop_together():
    ranks = Two()
    with StopRequest() as stop:
        stop.agree(ranks)
        send(stop, signal.SIGTERM)
        assert not stop.requested, "until they agree"
        stop.agree(ranks)
        assert stop.requested
    with StopRequest() as stop:
        ranks.others = 1
        stop.agree(ranks)
        assert stop.requested and stop.name is None
