"""Connects the processes that torchrun starts. Imports PyTorch only if there are several processes."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta

from lowmem.errors import InputError, LowmemError, first_line

_NUMBERS = "WORLD_SIZE", "RANK", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_PORT"
_TIMEOUT = timedelta(hours=2)  # rank 0 plans, tokenizes or exports while the others wait


def launched_rank() -> int:
    """Returns this process's rank; 0 without torchrun."""
    return _variable("RANK", 0)


def first_rank_here() -> int:
    """Returns the lowest rank on this machine; 0 without torchrun."""
    return launched_rank() - _variable("LOCAL_RANK", 0)


def local_ranks() -> int:
    """Returns the number of torchrun's processes on this machine; 1 without torchrun."""
    return _variable("LOCAL_WORLD_SIZE", 1)


@contextmanager
def joined(device: str) -> Iterator:
    """Connects this process to torchrun's other processes, and yields a Ranks, by which they communicate; without
    torchrun, a Ranks for one process. Each process has its own GPU, unless `device` is "cpu" or PyTorch finds none.
    Must be called before CUDA starts. Raises InputError for environment variables that torchrun would not set, and for
    fewer GPUs than processes. Raises LowmemError if the processes cannot connect."""
    from lowmem.core.ranks import Ranks

    if os.environ.get("WORLD_SIZE", "") in ("", "1"):
        yield Ranks()
        return
    _check_variables()
    import torch
    import torch.distributed as dist

    from lowmem.distributed.collectives import SeveralRanks

    on_gpu = device != "cpu" and torch.cuda.is_available()
    if on_gpu:
        if torch.cuda.device_count() < local_ranks():
            raise InputError(
                f"torchrun has started {local_ranks()} processes here, and there are {torch.cuda.device_count()} GPUs: "
                "give as many with --nproc-per-node, or --device cpu"
            )
        torch.cuda.set_device(_variable("LOCAL_RANK", 0))
    # gloo sends tensors in RAM, such as a loss and the shares that rank 0 saves. Builds for Windows have no NCCL.
    nccl = on_gpu and dist.is_nccl_available()
    try:
        dist.init_process_group("cpu:gloo,cuda:nccl" if nccl else "gloo", timeout=_TIMEOUT)
    except (RuntimeError, ValueError) as error:
        address = f"{os.environ.get('MASTER_ADDR')}:{os.environ['MASTER_PORT']}"
        raise LowmemError(f"the ranks do not find one another at {address} ({first_line(error)})") from None
    ranks = SeveralRanks("cuda" if on_gpu else "cpu", _variable("LOCAL_RANK", 0), local_ranks())
    yield ranks
    dist.destroy_process_group()  # not after an error: others may wait in a collective


def _check_variables() -> None:
    given = {name: os.environ.get(name) for name in (*_NUMBERS, "MASTER_ADDR")}
    for name, value in given.items():
        if value is None or (name in _NUMBERS and not value.isdecimal()):
            said = "not set" if value is None else f"{value!r}, not a number"
            raise InputError(f"WORLD_SIZE is set and {name} is {said}: start with torchrun, or unset WORLD_SIZE")
    if not _variable("RANK", 0) < _variable("WORLD_SIZE", 0) or _variable("MASTER_PORT", 0) >= 2**16:
        said = " ".join(f"{name}={value}" for name, value in given.items())
        raise InputError(f"{said} do not fit together: start with torchrun, or unset WORLD_SIZE")


def _variable(name: str, otherwise: int) -> int:
    value = os.environ.get(name, "")
    return int(value) if value.isdecimal() else otherwise  # `joined` refuses other values
