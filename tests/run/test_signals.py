"""A signal is a request to stop, noted and nothing else; a second one is the end.

Seen to fail: with the default action not restored by the first signal, with the old handlers not restored at the end.
"""

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from lowmem.run.signals import StopRequest

BOTH = (signal.SIGTERM, signal.SIGINT)


@pytest.fixture(autouse=True)
def handlers_unchanged():
    before = [signal.getsignal(number) for number in BOTH]
    yield
    assert [signal.getsignal(number) for number in BOTH] == before


def in_a_child(work) -> int:
    """The exit status of a forked process that does `work`: -n if signal n ended it."""
    child = os.fork()
    if child == 0:
        work()
        os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


@pytest.mark.parametrize("number", BOTH)
def test_the_first_signal_is_noted_by_name_and_nothing_else_happens(number):
    with StopRequest() as stop:
        assert not stop.requested and stop.name is None
        os.kill(os.getpid(), number)
        assert stop.requested and stop.name == signal.Signals(number).name
    assert stop.requested


@pytest.mark.parametrize("first", BOTH)
@pytest.mark.parametrize("second", BOTH)
def test_a_second_signal_ends_the_process_at_once(first, second):
    def work():
        with StopRequest():
            os.kill(os.getpid(), first)
            os.kill(os.getpid(), second)
            time.sleep(60)

    started = time.monotonic()
    assert in_a_child(work) == -second
    assert time.monotonic() - started < 30


def test_signals_that_come_while_python_is_away_count_as_one():
    def work():
        with StopRequest() as stop:
            signal.pthread_sigmask(signal.SIG_BLOCK, BOTH)
            os.kill(os.getpid(), signal.SIGTERM)
            os.kill(os.getpid(), signal.SIGINT)
            signal.pthread_sigmask(signal.SIG_UNBLOCK, BOTH)
            os._exit(10 + stop.requested)

    assert in_a_child(work) == 11


@pytest.mark.parametrize("error", [False, True])
def test_what_was_there_before_is_there_again_after(error):
    def handler(number, frame):
        pass

    before = signal.signal(signal.SIGTERM, handler), signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        with StopRequest() as stop:
            os.kill(os.getpid(), signal.SIGINT)
            assert stop.requested
            if error:
                raise KeyError
    except KeyError:
        pass
    finally:
        found = signal.signal(signal.SIGTERM, before[0]), signal.signal(signal.SIGINT, before[1])
    assert found == (handler, signal.SIG_IGN)


def test_it_works_in_the_main_thread_only():
    problems = []

    def enter():
        try:
            with StopRequest():
                pass
        except ValueError as problem:
            problems.append(problem)

    thread = threading.Thread(target=enter)
    thread.start()
    thread.join()
    assert len(problems) == 1


LOOP = """
import sys, time
from lowmem.run.signals import StopRequest

with StopRequest() as stop:
    for step in range(1000):
        for micro_batch in range(4):
            print(step, micro_batch, flush=True)
            time.sleep(0.01)
        if stop.requested:
            print("saved after", step, stop.name, flush=True)
            sys.exit(75)
"""


@pytest.mark.parametrize("number", BOTH)
def test_a_signal_within_a_step_ends_the_run_at_its_end(number):
    with subprocess.Popen(
        [sys.executable, "-c", LOOP], cwd=Path(__file__).resolve().parents[2], stdout=subprocess.PIPE, text=True
    ) as process:
        while process.stdout.readline() != "2 1\n":
            pass
        process.send_signal(number)
        rest = process.stdout.read().splitlines()
    assert process.returncode == 75
    *micro_batches, saved = rest
    assert micro_batches[-1].split()[1] == "3"
    assert saved == f"saved after {micro_batches[-1].split()[0]} {number.name}"
