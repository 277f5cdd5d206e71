"""A mesh of processes that begin at once: forked from a server that has imported PyTorch and the experiment.

For many small trainings, where eight imports of PyTorch would take most of the time. The command starts its processes
as the other experiments do (harness/group.py), which says more of a failure.
"""

import multiprocessing
import tempfile
from collections.abc import Callable
from multiprocessing import connection
from pathlib import Path

from experiments.harness import parallel
from experiments.harness.group import ProcessFailed
from experiments.parallel_3d.run import WORK
from experiments.parallel_3d.worker import Job, Told


def train(job: Job, prepare: Callable[[], None] | None = None) -> list[Told]:
    """Trains in new processes, each of which calls `prepare` first. ProcessFailed if one ends early; then all are
    ended."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([__name__])
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        parallel.write_task(folder, WORK, job, job.mesh.processes)
        processes = [
            context.Process(target=_member, args=(folder, rank, prepare)) for rank in range(job.mesh.processes)
        ]
        try:
            for process in processes:
                process.start()
            _wait(processes)
            return parallel.read_told(folder)
        finally:
            for process in processes:
                if process.is_alive():
                    process.kill()


def _wait(processes: list[multiprocessing.Process]) -> None:
    running = {process.sentinel: rank for rank, process in enumerate(processes)}
    while running:
        for sentinel in connection.wait(list(running)):
            rank = running.pop(sentinel)
            processes[rank].join()
            if code := processes[rank].exitcode:
                raise ProcessFailed(f"the process of rank {rank} ended with exit code {code}")


def _member(folder: Path, rank: int, prepare: Callable[[], None] | None) -> None:
    if prepare is not None:
        prepare()
    parallel.take_part(folder, rank)
