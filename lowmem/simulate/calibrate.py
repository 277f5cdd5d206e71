"""The card that is here, timed for a moment, so that the plan's seconds are this machine's.

gpus.py knows a card by its datasheet and by what others reached. Where there is a GPU, `measure_card` times large
products, a copy on the card and one over the bus: the rates of the roofline, without a share to assume. What a block of
a model makes of these rates (tiles that do not fit, small kernels, attention) is assumed still; so `measured_card` runs
one block of the model in question forward and backward, has the same block simulated, and scales all rates of the card
by one factor until both take equally long.

    factor = predicted seconds / measured seconds      again with the scaled card: a kernel's start does not scale

Only seconds come from here. Which layout is chosen is the table's to say (plan.py): a stopwatch never decides that.

Cost: about a second, the embeddings and one block on the card, and that block's activations of `TOKENS` tokens; the
caller gives that memory back (device.forget_allocations). Left out: the host's time, which stays assumed (the card is
kept busy while the block is launched, so that it never waits for the host), the update, and other blocks where a model
has several kinds.

The same functions run on the CPU, in tests.
"""

import statistics
import time
from collections.abc import Callable
from dataclasses import replace

import torch
from torch import nn

from lowmem.core.decoder import Decoder
from lowmem.core.offload import host_tensor, page_lock
from lowmem.device import make_deterministic
from lowmem.simulate.gpus import Card, Rate
from lowmem.simulate.recorder import Recorder
from lowmem.simulate.replay import META
from lowmem.simulate.step import Target, gpu_target
from lowmem.units import GIB

TOKENS = 4096  # of the block that is timed: enough to fill large cards
_PRODUCT_SIDE = 4096
_COPY_BYTES = GIB // 4
_WARM_UP, _REPEATS = 2, 10
_HEAD_START_CYCLES = 10**7  # of the GPU, 5 to 10 ms: what launching a block takes the host, and more
_ROUNDS = 3  # of scaling; each leaves a tenth of the difference or less


def measured_card(decoder: Callable[[], Decoder], seq: int, dtype: torch.dtype, device: torch.device) -> Card:
    """The card that is here, whose rates make the simulation of a block of this model take what it took.

    `decoder`: makes one without weights, in the precision of the run; `dtype`: of its working matrices. A model that
    cannot be simulated gets the card as it was measured: the plan, which comes next, says by name what is missing.
    """
    card = measure_card(device)
    micro_batch = max(1, TOKENS // seq)
    try:
        predicted = predicted_block_seconds(decoder(), seq, micro_batch, dtype, gpu_target(card))
    except Exception:
        return card
    make_deterministic(device)  # as the run will be
    measured = block_seconds(decoder(), seq, micro_batch, dtype, device)
    for _ in range(_ROUNDS):
        card = _scaled(card, predicted / measured)
        predicted = predicted_block_seconds(decoder(), seq, micro_batch, dtype, gpu_target(card))
    return card


def _scaled(card: Card, factor: float) -> Card:
    rates = {precision: Rate(rate.peak * factor, rate.share) for precision, rate in card.rates.items()}
    return replace(card, rates=rates, memory_bytes_per_second=card.memory_bytes_per_second * factor)


def block_seconds(decoder: Decoder, seq: int, micro_batch: int, dtype: torch.dtype, device: torch.device) -> float:
    """Of the first block forward and backward on `micro_batch` sequences, with random weights."""
    return _median_seconds(_first_block(decoder, seq, micro_batch, dtype, device), device)


def predicted_block_seconds(decoder: Decoder, seq: int, micro_batch: int, dtype: torch.dtype, target: Target) -> float:
    """The same, simulated: seconds of the GPU alone, as if the host were infinitely fast."""
    recorder = Recorder(replace(target.machine, host_seconds=(0.0, 0.0), more_host_seconds={}))
    with recorder, target.functions():
        run = _first_block(decoder, seq, micro_batch, dtype, META)
        began = recorder.clock.gpu
        run()
        return recorder.clock.gpu - began


def _first_block(
    decoder: Decoder, seq: int, micro_batch: int, dtype: torch.dtype, device: torch.device
) -> Callable[[], object]:
    """Puts the embeddings and the first block on `device`; what it returns runs that block forward and backward."""
    placed = {}
    for parameter in (parameter for unit in decoder.units[:2] for parameter in unit.parameters.values()):
        kind = dtype if parameter.dim() >= 2 else torch.float32  # as in the store
        tensor = torch.empty(parameter.shape, dtype=kind, device=device)
        placed[parameter] = nn.Parameter(tensor.normal_(0, 0.02))  # zeros would run faster
    for module in decoder.model.modules():
        for name, parameter in module.named_parameters(recurse=False):
            module._parameters[name] = placed.get(parameter, parameter)
        for name, buffer in module.named_buffers(recurse=False):
            module._buffers[name] = buffer.to(device)
    with torch.no_grad():
        hidden, extras = decoder.embed(torch.zeros((micro_batch, seq), dtype=torch.int64, device=device))
    hidden.requires_grad_()
    gradient = torch.randn_like(hidden)
    inputs = [hidden, *decoder.blocks[0].parameters()]
    return lambda: torch.autograd.grad(decoder.block(0, hidden, extras[0]), inputs, gradient)


def measure_card(device: torch.device) -> Card:
    """Products of 4,096, a copy of 256 MiB on the card and one to it. The card's rates are what was reached, so their
    shares are 1. Where memory cannot be page-locked, the bus is as slow as the copies of the run will be."""
    properties = torch.cuda.get_device_properties(device)
    rates = {}
    for precision, dtype in (("bf16", torch.bfloat16), ("fp16", torch.float16), ("fp32", torch.float32)):
        if precision == "bf16" and properties.major < 8:
            continue
        left, right = torch.randn(2, _PRODUCT_SIDE, _PRODUCT_SIDE, device=device, dtype=dtype)
        seconds = _median_seconds(lambda a=left, b=right: a @ b, device)
        rates[precision] = Rate(2 * _PRODUCT_SIDE**3 / seconds, 1.0)
    there, back = torch.zeros(2, _COPY_BYTES, dtype=torch.uint8, device=device)
    home = host_tensor(_COPY_BYTES, torch.uint8)
    if device.type == "cuda":
        page_lock(home)
    return Card(
        name=properties.name,
        memory_bytes=properties.total_memory,
        capability=(properties.major, properties.minor),
        multiprocessors=properties.multi_processor_count,
        rates=rates,
        memory_bytes_per_second=2 * _COPY_BYTES / _median_seconds(lambda: back.copy_(there), device),
        bus_bytes_per_second=_COPY_BYTES / _median_seconds(lambda: there.copy_(home, non_blocking=True), device),
        reported_names=(properties.name.removeprefix("NVIDIA "),),
        source="measured here",
        memory_share=1.0,
    )


def _median_seconds(work: Callable[[], object], device: torch.device) -> float:
    """Of `_REPEATS` runs, after two that warm up."""
    return statistics.median([_seconds(work, device) for _ in range(_WARM_UP + _REPEATS)][_WARM_UP:])


def _seconds(work: Callable[[], object], device: torch.device) -> float:
    """On a GPU, from the first kernel's start to the last one's end, all of them launched while the card slept."""
    if device.type != "cuda":
        started = time.perf_counter()
        work()
        return time.perf_counter() - started
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    torch.cuda._sleep(_HEAD_START_CYCLES)
    start.record()
    work()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) / 1000
