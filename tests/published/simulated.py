"""Simulates the seconds and the peak memory of a plain PyTorch training step, on tensors without data."""

from collections.abc import Callable, Iterator
from dataclasses import replace

from torch import nn

from experiments.memory_estimation.estimate import plain_target
from lowmem.cudasim.gpus import Card
from lowmem.cudasim.peak import modes_in_backward
from lowmem.cudasim.recorder import Recorder
from lowmem.cudasim.tape import Tape
from lowmem.planning.simulated_step import Target

STEPS = 2  # the first one has no gradients and no optimizer states to begin with


def simulate(card: Card, model: nn.Module, step: Callable[[], Iterator[None] | None], host_share: float = 1.0) -> float:
    """Returns the seconds of the last of `STEPS` calls of `step`, which trains `model` on the meta device. The host
    waits for the GPU before and after it. An operation takes the host `host_share` of the clock's time."""
    target = plain_target(card)
    host_seconds = tuple(host_share * seconds for seconds in target.device_model.host_seconds)
    return record(replace(target, device_model=replace(target.device_model, host_seconds=host_seconds)), model, step)[0]


def record(target: Target, model: nn.Module, step: Callable[[], Iterator[None] | None]) -> tuple[float, Tape]:
    """Returns the step's seconds on `target`, and the tape of all calls."""
    recorder = Recorder(target.device_model, lambda frame: "step")
    with recorder, target.device_model.functions(), modes_in_backward(target.device_model.functions):
        for tensor in (*model.parameters(), *model.buffers()):
            recorder.note(tensor)
        for _ in range(STEPS):
            clock = recorder.clock
            began = clock.host = clock.gpu = max(clock.host, clock.gpu)
            for _ in step() or ():  # where a step yields, the host waits for the GPU
                clock.host = max(clock.host, clock.gpu)
        seconds = max(clock.host, clock.gpu) - began
    return seconds, recorder.tape
