"""Starts and watches the processes of one process group of `torch.distributed`. All end as soon as one fails.

Under torchrun, which watches its processes itself, a process calls only `begin`.
"""

import contextlib
import json
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from multiprocessing import Process, get_context, parent_process
from pathlib import Path

import torch
import torch.distributed as dist

from lowmem.errors import LowmemError, first_line

THREADS = 1  # of a process; another number may cut sums into other parts
TIMEOUT = timedelta(minutes=10)
POLL_SECONDS = 0.1
GRACE_SECONDS = 3.0  # until a process that failed has said why, and its neighbours have noticed
FAILED = "failed-{}.json"
IMPORTED = (__name__, "lowmem.models.build")  # by the server, for all processes

Work = Callable[[Path, int], None]  # of a process; takes the processes' folder and its rank


class ProcessFailed(LowmemError):
    """One of the processes ended early."""


class PeerError(LowmemError):
    """Another process is gone, or does not answer."""


@contextlib.contextmanager
def peer_errors() -> Iterator[None]:
    try:
        yield
    except RuntimeError as error:
        raise PeerError(f"another process is gone, or does not answer ({first_line(error)})") from error


def run(work: Work, folder: Path, ranks: int) -> None:
    """Calls `work(folder, rank)` in a process for each rank, and waits for all. The processes write their output into
    `folder`. If one fails, ends all and raises ProcessFailed with the first cause."""
    processes: list[Process] = []
    before = signal.signal(signal.SIGTERM, _interrupt)  # so that callers tidy up, as after Ctrl-C
    try:
        for rank in range(ranks):
            processes.append(_started(work, folder, rank))
        _watch(processes, folder)
    finally:
        signal.signal(signal.SIGTERM, before)
        for process in processes:
            process.kill()
            process.join()


def _started(work: Work, folder: Path, rank: int) -> Process:
    # The server has imported PyTorch and transformers, so processes begin at once.
    context = get_context("forkserver")
    context.set_forkserver_preload(list(IMPORTED))
    process = context.Process(target=_member, args=(work, folder, rank, dict(os.environ)))
    process.start()
    return process


def _member(work: Work, folder: Path, rank: int, environment: dict[str, str]) -> None:
    with open(folder / f"output-{rank}", "wb") as output:
        for descriptor in (1, 2):
            os.dup2(output.fileno(), descriptor)
    os.environ.update(environment)  # the server's is older
    threading.Thread(target=_end_with_parent, daemon=True).start()
    try:
        work(folder, rank)
    except Exception as error:
        failure = {
            "time": time.time(),
            "of_another": isinstance(error, PeerError),
            "error": f"{type(error).__name__}: {first_line(error)}",
        }
        partial = folder / f"{FAILED.format(rank)}.partial"
        partial.write_text(json.dumps(failure))
        partial.rename(folder / FAILED.format(rank))
        sys.exit(1)


def _end_with_parent() -> None:
    parent_process().join()
    os._exit(1)


def is_one_of_torchruns() -> bool:
    return "RANK" in os.environ and "WORLD_SIZE" in os.environ


def begin(folder: Path | None, rank: int, ranks: int) -> torch.device:
    """Joins the process group (NCCL on GPUs, else gloo) with one CPU thread, and returns this process's device.
    `folder`: shared by all, for their rendezvous; None: torchrun's environment variables tell rank and address."""
    torch.set_num_threads(THREADS)
    device = device_of(rank, ranks)
    where = {"init_method": f"file://{folder / 'rendezvous'}", "rank": rank, "world_size": ranks} if folder else {}
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo", timeout=TIMEOUT, **where)
    return device


@contextlib.contextmanager
def threads_of_a_process() -> Iterator[None]:
    """Inside `with`, PyTorch uses as many CPU threads as in a process of a group, and so computes the same bits."""
    before = torch.get_num_threads()
    torch.set_num_threads(THREADS)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def new(ranks: list[int]) -> dist.ProcessGroup:
    """Returns a group of the processes `ranks`. All processes must call this, also those outside of the group."""
    return dist.new_group(ranks, timeout=TIMEOUT)


def device_of(rank: int, ranks: int) -> torch.device:
    """Selects and returns this process's own GPU. Returns the CPU if this machine has fewer GPUs than processes."""
    local, here = int(os.environ.get("LOCAL_RANK", rank)), int(os.environ.get("LOCAL_WORLD_SIZE", ranks))
    if not torch.cuda.is_available() or torch.cuda.device_count() < here:
        return torch.device("cpu")
    device = torch.device("cuda", local)
    torch.cuda.set_device(device)
    return device


def _interrupt(*_) -> None:
    raise KeyboardInterrupt


def _watch(processes: list[Process], folder: Path) -> None:
    while True:
        codes = [process.exitcode for process in processes]
        if all(code == 0 for code in codes):
            return
        if any(codes):
            raise ProcessFailed(_cause(processes, folder))
        time.sleep(POLL_SECONDS)


def _cause(processes: list[Process], folder: Path) -> str:
    deadline = time.monotonic() + GRACE_SECONDS
    while time.monotonic() < deadline and any(process.is_alive() for process in processes):
        time.sleep(POLL_SECONDS)
    failures, ended = [], []
    for rank, process in enumerate(processes):
        path = folder / FAILED.format(rank)
        if path.exists():
            failures.append(json.loads(path.read_text()) | {"rank": rank})
        elif process.exitcode is not None and process.exitcode < 0:
            ended.append(f"the process of rank {rank} was ended by signal {-process.exitcode}")
        elif process.exitcode:
            output = (folder / f"output-{rank}").read_text(errors="replace").strip().splitlines() or ["no output"]
            ended.append(f"the process of rank {rank} ended with exit code {process.exitcode}: {output[-1]}")
    # A process that lost its neighbour (`of_another`) fails too, but is not the cause.
    first = min(failures, key=lambda failure: (failure["of_another"], failure["time"]), default=None)
    if ended and (first is None or first["of_another"]):
        return ended[0]
    return f"rank {first['rank']} failed: {first['error']}"
