"""A plan in a process of its own: what comes back is what would have been made here, and nothing of it stays here."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from lowmem.errors import InputError, LowmemError, PlanError
from lowmem.limits import ram_now_bytes
from lowmem.planning.process import process_aside
from lowmem.units import MIB

ROOT = Path(__file__).resolve().parents[2]


def refuse(exit_code: int):
    raise PlanError("nothing fits") if exit_code == PlanError.exit_code else InputError("unknown")


def mistake():
    raise ZeroDivisionError("of ours")


def where_and_how() -> tuple[int, str | None, int]:
    return os.getpid(), os.environ.get("CUDA_VISIBLE_DEVICES"), torch.get_num_threads()


def take(size: int) -> int:
    kept.append(bytearray(b"1") * size)
    return ram_now_bytes()


def end(how: int) -> None:
    os.kill(os.getpid(), how)
    time.sleep(60)


kept: list = []


def test_the_call_is_made_in_another_process_which_sees_no_gpu_and_starts_no_threads():
    before = os.environ.get("CUDA_VISIBLE_DEVICES")
    with process_aside() as aside:
        process, gpus, threads = aside(where_and_how)
    assert process != os.getpid() and (gpus, threads) == ("", 1)
    assert os.environ.get("CUDA_VISIBLE_DEVICES") == before


TOKENIZES_AND_FORKS = """
import os
from lowmem.data.encoder import Encoder
from lowmem.data.tokenizer import byte_level_tokenizer
from lowmem.device import set_environment
from lowmem.planning.process import process_aside

set_environment()
before = len(os.listdir("/proc/self/task"))
Encoder(byte_level_tokenizer())(["as many words as there are"] * 1000)
print(len(os.listdir("/proc/self/task")) - before)
with process_aside() as aside:
    aside(os.getpid)
print(os.environ.get("TOKENIZERS_PARALLELISM"))
"""


@pytest.mark.parametrize(("wanted", "threads"), [(None, 2), ("false", 0)])
def test_texts_are_tokenized_on_all_processors_and_a_later_fork_says_nothing(wanted, threads):
    environment = {name: text for name, text in os.environ.items() if name != "TOKENIZERS_PARALLELISM"}
    environment |= {"RAYON_NUM_THREADS": "2", "PYTHONPATH": str(ROOT)} | (
        {"TOKENIZERS_PARALLELISM": wanted} if wanted else {}
    )
    command = [sys.executable, "-c", TOKENIZES_AND_FORKS]
    run = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    assert (run.stdout, run.stderr) == (f"{threads}\n{wanted}\n", "")


def test_what_it_takes_is_not_taken_here():
    before = ram_now_bytes()
    with process_aside() as aside:
        assert aside(take, 256 * MIB) > 256 * MIB
        assert ram_now_bytes() < before + 32 * MIB
    assert kept == []


@pytest.mark.parametrize("error", [PlanError, InputError])
def test_an_error_comes_back_as_itself_with_its_exit_code(error):
    with process_aside() as aside, pytest.raises(error) as caught:
        aside(refuse, error.exit_code)
    assert caught.value.exit_code == error.exit_code and not hasattr(caught.value, "__notes__")


def test_a_mistake_comes_back_with_its_traceback():
    with process_aside() as aside, pytest.raises(ZeroDivisionError) as caught:
        aside(mistake)
    assert "in mistake" in caught.value.__notes__[0]


def test_where_the_process_is_killed_it_is_said_in_a_sentence():
    with process_aside() as aside, pytest.raises(LowmemError, match=r"exit code -9\), by the system if RAM ran out"):
        aside(end, signal.SIGKILL)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_for_the_whole_job_leaves_the_plan_to_be_made(number):
    with process_aside() as aside:
        assert aside(_after, number) == "made"


def _after(number: int) -> str:
    os.kill(os.getpid(), number)
    return "made"


def test_with_cuda_initialised_there_is_no_fork(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    with process_aside() as aside:
        assert aside(os.getpid) == os.getpid()


def test_threads_that_end_meanwhile_are_no_error(monkeypatch):
    """While their names are read, to find those of autograd, with which no fork is safe."""
    read = Path.read_text
    ended = []

    def gone(path, *arguments, **keywords):
        if path.name == "comm" and not ended:
            ended.append(path)
            raise ProcessLookupError(3, "No such process")
        return read(path, *arguments, **keywords)

    monkeypatch.setattr(Path, "read_text", gone)
    with process_aside() as aside:
        assert aside(os.getpid) != os.getpid()
    assert ended


def test_it_is_gone_when_nothing_was_asked_of_it_and_when_the_process_that_made_it_is(tmp_path):
    """In a script without a guard, whose process is killed while the other one works."""
    script = tmp_path / "script.py"
    script.write_text(
        "import os, sys, time\n"
        "from multiprocessing import active_children\n"
        "from lowmem.planning.process import process_aside\n"
        "with process_aside():\n    pass\n"
        "assert not active_children()\n"
        "with process_aside() as aside:\n"
        "    print(active_children()[0].pid, flush=True)\n"
        "    aside(time.sleep, 600)\n"
    )
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    with subprocess.Popen([sys.executable, str(script)], stdout=subprocess.PIPE, text=True, env=environment) as process:
        child = int(process.stdout.readline())
        process.kill()
        process.wait()
        for _ in range(600):
            if not Path(f"/proc/{child}").exists() or " Z " in Path(f"/proc/{child}/stat").read_text():
                break
            time.sleep(0.05)
        else:
            os.kill(child, signal.SIGKILL)
            pytest.fail("it outlived the process that made it")
