"""Checks the card's results, piece by piece: equal bits if they are promised, else the error is measured.

Pieces: fp32 in two halves, updates, the loss, a matrix's gradient, page-locked memory, the allocator. Also measures
speeds.
"""

import itertools
import statistics
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from threading import Event

import torch
from torch import Tensor
from torch.nn import functional as F

from experiments.gpu_acceptance import element_wise
from experiments.harness.child import Result, Setting
from experiments.harness.comparison import worst
from experiments.harness.countdown import in_background
from experiments.harness.measured import capped_device, kernels_of, precisions, sixteen_bit
from lowmem import device as devices
from lowmem.core import optimizers
from lowmem.core.homes import host_tensor, page_lock
from lowmem.core.kernels import Kernels, fused
from lowmem.core.loss import linear_cross_entropy
from lowmem.core.optimizers import Hyperparameters, get_optimizer, state_layout
from lowmem.core.precision import WORKING_DTYPES, join, split
from lowmem.core.transfers import Lane, transfers_for
from lowmem.errors import first_line
from lowmem.limits import ram_peak_bytes
from lowmem.units import GIB, MIB

LEAST_SHARE_OF_BANDWIDTH = 0.8
MOST_LOSS_ERROR = {"fp32": 1e-5, "bf16": 2e-3, "fp16": 2e-3}  # relative
MOST_GRADIENT_ERROR = {"fp32": 1e-4, "bf16": 2e-2, "fp16": 1e-2}  # norm of the difference / norm


def check(setting: Setting) -> Result:
    device = capped_device(setting)
    devices.make_deterministic(device)
    cases: dict[str, Callable[[], Result]] = {}
    size = 2**14 if setting.dry_run else 2**24
    torch.zeros(1, device=device)
    ram_bytes = ram_peak_bytes()
    half = WORKING_DTYPES[sixteen_bit(device)]
    for name, dtype in precisions(device).items():
        if name != "fp32":
            cases[f"split and join, {name}"] = partial(_split_and_join, device, dtype, size)
    rules = {"eager": optimizers.update}
    if device.type == "cuda":
        cases["fused kernels"] = partial(_fused_kernels, device)
        rules |= {"fused": fused.update}
    for (kind, rule), (name, dtype), optimizer in itertools.product(
        rules.items(), precisions(device).items(), ("adamw", "sgd")
    ):
        cases[f"{optimizer}, {name}, {kind}"] = partial(_update, device, optimizer, dtype, rule, size)
    cases["update speed"] = partial(_update_speed, device, size if setting.dry_run else 2**26, half, setting.dry_run)
    shape = (96, 32, 1013) if setting.dry_run else (2048, 1280, 50257)
    for name, kind in itertools.product(precisions(device), rules):
        if kind != "fused" or name != "fp32":  # which is line by line in either case
            cases[f"chunked loss, {name}, {kind}"] = partial(_loss, device, name, shape, kind == "fused")
    if "fused" in rules:
        cases["fused speed"] = partial(_fused_speed, device, shape, half, setting.dry_run)
        cases["element-wise speed"] = partial(element_wise.speeds, setting, device, half)
    cases["host memory"] = partial(host_memory, device, (4 if setting.dry_run else 256) * MIB, not setting.stand_in)
    if device.type == "cuda":
        fits_bytes = 256 * MIB if setting.dry_run else setting.gpu_limit_bytes - 2 * GIB
        cases["allocator"] = partial(allocator, device, setting.gpu_limit_bytes, fits_bytes)
    done: dict[str, bool] = {}
    for name, work in cases.items():
        needs_kernels = device.type == "cuda" and name.endswith((", fused", " speed"))
        if not needs_kernels or Kernels.PRODUCTS in kernels_of(device):
            done[name] = setting.attempt(name, work).held
    return Result({"parts": len(done), "ram_bytes_with_device_started": ram_bytes}, done)


def _fused_kernels(device: torch.device) -> Result:
    failures = {" and ".join(kernels.names): reason for kernels, reason in fused.failures(device).items()}
    return Result({"failures": failures}, {"compile and agree": not failures})


def _split_and_join(device: torch.device, dtype: torch.dtype, size: int) -> Result:
    return Result({"patterns": size}, split_and_join(device, dtype, size))


def _update(device: torch.device, optimizer: str, dtype: torch.dtype, rule: Callable, size: int) -> Result:
    # The CPU's formula is the same, but a product and a sum may be fused.
    ulps = fused.largest_ulps(device, optimizer, dtype, rule, size)
    return Result(ulps, {f"at most {fused.MOST_ULPS} ulp": worst(ulps.values()) <= fused.MOST_ULPS})


def _update_speed(device: torch.device, size: int, dtype: torch.dtype, dry_run: bool) -> Result:
    speed = update_speed(device, size, dtype)
    fast = dry_run or speed["fused_share_of_copy_bandwidth"] >= LEAST_SHARE_OF_BANDWIDTH
    return Result(speed, {f"at least {LEAST_SHARE_OF_BANDWIDTH:.0%} of copy bandwidth": fast})


def _loss(device: torch.device, precision: str, shape: tuple[int, int, int], fused: bool) -> Result:
    errors = loss_errors(device, WORKING_DTYPES[precision], *shape, fused)
    checks = {
        "loss": errors["loss"] <= MOST_LOSS_ERROR[precision],
        "gradients": worst((errors["hidden"], errors["weight"])) <= MOST_GRADIENT_ERROR[precision],
    }
    return Result(errors, checks)


def _fused_speed(device: torch.device, shape: tuple[int, int, int], dtype: torch.dtype, dry_run: bool) -> Result:
    values = fused_speed(device, *shape, dtype)
    faster = {f"the {name} is faster": values[f"{name}_share"] < 1 for name in ("loss", "gradient")}
    return Result(values, {} if dry_run else faster)


def split_and_join(device: torch.device, dtype: torch.dtype, size: int) -> dict[str, bool]:
    """Splits and joins `size` random fp32 bit patterns. Returns {check: whether it holds}."""
    generator = torch.Generator().manual_seed(0)
    master = torch.randint(-(2**31), 2**31, (size,), generator=generator, dtype=torch.int64).to(torch.int32)
    master = master.view(torch.float32)
    # Only numbers with a finite fp16 neighbour can be split (core/precision.py).
    if dtype is torch.float16:
        master = master[master.abs() < 65520]
    working, low = split(master, dtype)
    working_there, low_there = split(master.to(device), dtype)
    back = join(working_there, low_there).cpu()
    exact = master if dtype is torch.bfloat16 else join(working, low)  # fp16 rounds below its normal range
    return {
        "split as on the CPU": _same_bits(working, working_there.cpu()) and torch.equal(low, low_there.cpu()),
        "join as on the CPU": _same_bits(exact, back),
    }


def update_speed(device: torch.device, size: int, dtype: torch.dtype) -> dict[str, float]:
    """Returns nanoseconds per parameter of AdamW's update with weights of `dtype`, eager and fused; GiB/s of a copy on
    the device, and the fused update's share of that bandwidth."""
    optimizer = get_optimizer("adamw")
    hyper = Hyperparameters(learning_rate=1e-3, weight_decay=0.01, update=1)
    working, gradient = torch.zeros(size, dtype=dtype, device=device), torch.zeros(size, device=device)
    layout = state_layout(optimizer, size, dtype).items()
    state = {name: torch.zeros(entries, dtype=dtype, device=device) for name, (entries, dtype) in layout}
    target = torch.empty_like(gradient)
    rules = {"fused": fused.update if device.type == "cuda" else optimizers.update, "eager": optimizers.update}
    calls = {"copy": lambda: target.copy_(gradient)} | {
        name: lambda rule=rule: rule(optimizer, working, state, gradient, hyper, True) for name, rule in rules.items()
    }
    seconds = {name: _seconds(call, device) for name, call in calls.items()}
    moved = 2 * (working.nbytes + sum(tensor.nbytes for tensor in state.values())) + gradient.nbytes
    copied_per_second = 2 * gradient.nbytes / seconds["copy"]
    return {f"{name}_ns_per_parameter": 1e9 * seconds[name] / size for name in rules} | {
        "copy_gib_per_second": copied_per_second / GIB,
        "fused_share_of_copy_bandwidth": moved / seconds["fused"] / copied_per_second,
    }


def _seconds(call, device: torch.device) -> float:
    times = []
    for _ in range(6):  # the first warms up
        _synchronize(device)
        started = time.perf_counter()
        call()
        _synchronize(device)
        times.append(time.perf_counter() - started)
    return statistics.median(times[1:])


def fused_speed(device: torch.device, tokens: int, width: int, vocabulary: int, dtype: torch.dtype) -> dict[str, float]:
    """Returns milliseconds in `dtype`, eager and fused, and their ratio: of the loss with its gradients, and of the
    gradient of an MLP's first matrix, added to its accumulator."""
    hidden, weight, left, right = (
        torch.randn(*shape, device=device).to(dtype)
        for shape in ((tokens, width), (vocabulary, width), (tokens, width), (tokens, 4 * width))
    )
    left = left.T  # as an MLP's input in its first matrix's gradient
    labels = torch.zeros(tokens, dtype=torch.int64, device=device)
    of_weight, of_matrix = torch.zeros(weight.shape, device=device), torch.zeros(width, 4 * width, device=device)

    def loss(fused: bool) -> float:
        call = partial(linear_cross_entropy, hidden, weight, labels, weight_gradient=of_weight, fused=fused)
        return _seconds(call, device)

    add_product = partial(torch.ops.lowmem.add_product, of_matrix, left, right)
    seconds = {
        "loss": (loss(False), loss(True)),
        "gradient": (_seconds(lambda: of_matrix.add_(left @ right), device), _seconds(add_product, device)),
    }
    values = {}
    for name, (lines, one) in seconds.items():
        values |= {f"{name}_eager_ms": 1e3 * lines, f"{name}_fused_ms": 1e3 * one, f"{name}_share": one / lines}
    return values


def loss_errors(
    device: torch.device, dtype: torch.dtype, tokens: int, width: int, vocabulary: int, fused: bool
) -> dict[str, float]:
    """Returns the relative errors of the loss and, in norm, of both gradients, against plain fp32 on the same
    operands."""
    generator = torch.Generator().manual_seed(2)
    hidden = torch.randn(tokens, width, generator=generator).to(dtype)
    weight = torch.randn(vocabulary, width, generator=generator).mul_(0.05).to(dtype)
    labels = torch.randint(0, vocabulary, (tokens,), generator=generator)
    labels[::7] = -100
    accumulator = torch.zeros(vocabulary, width, device=device)
    loss, hidden_gradient = linear_cross_entropy(
        hidden.to(device),
        weight.to(device),
        labels.to(device),
        scale=1024.0,
        weight_gradient=accumulator,
        fused=fused,
    )  # the scale keeps fp16's gradients out of its subnormals, as LossScale does
    plain = [tensor.float().requires_grad_() for tensor in (hidden, weight)]
    truth = F.cross_entropy(F.linear(*plain), labels, reduction="sum")
    truth.backward()
    return {
        "loss": abs(loss.item() - truth.item()) / truth.item(),
        "hidden": _distance(hidden_gradient.float().cpu() / 1024, plain[0].grad),
        "weight": _distance(accumulator.cpu() / 1024, plain[1].grad),
    }


def host_memory(device: torch.device, size_bytes: int, timed: bool = True) -> Result:
    """Copies `size_bytes` to memory like that of streamed states, and back. Returns GiB/s in, out, and both ways at
    once: page-locked, page-locked with a busy CPU, pageable. `timed` False leaves the speeds out."""
    entries = size_bytes // 4
    homes = [host_tensor(entries, torch.float32) for _ in range(2)]
    locked = device.type == "cuda" and all([page_lock(home) for home in homes])
    truth = homes[0].uniform_(generator=torch.Generator().manual_seed(3)).clone()
    arrived, leaving = torch.empty(entries, device=device), truth.to(device, copy=True)
    values: dict = {"size_bytes": size_bytes}
    transfers = transfers_for(device, False, host_tensor)

    def copy(ways: dict[Lane, tuple[Tensor, Tensor]]) -> None:
        for lane, pair in ways.items():
            transfers.copy(lane, [pair])

    for name, (source, target), busy in (
        ("registered", homes, False), ("registered_busy", homes, True), ("pageable", (truth, truth.clone()), False),
    ):  # fmt: skip
        one_way = {"in": {Lane.STATES_IN: (arrived, source)}, "out": {Lane.STATES_OUT: (target, leaving)}}
        with _busy_cpu(entries) if busy else nullcontext():
            for way, ways in (one_way | {"both": one_way["in"] | one_way["out"]}).items():
                speed = len(ways) * size_bytes / GIB / _seconds(partial(copy, ways), device)
                values[f"{name}_{way}_gib_per_second"] = speed if timed else "left out"
        if name == "registered":
            checks = {"arrives whole": torch.equal(target, truth) and torch.equal(arrived.cpu(), truth)}
    if device.type == "cuda":
        checks["page-locked"] = locked
        values["stale_error_after_refusal"] = _stale_error(homes[0])
    return Result(values, checks)


def _busy_cpu(entries: int) -> AbstractContextManager:
    source, target = torch.ones(entries), torch.ones(entries)

    def work(over: Event) -> None:
        while not over.is_set():
            target.copy_(source)

    return in_background(work)


def allocator(device: torch.device, gpu_limit_bytes: int, fits_bytes: int) -> Result:
    """Checks that `gpu_limit_bytes` holds to the byte and that segments grow. Allocates `fits_bytes` under the cap."""
    kept = torch.zeros(64 * MIB, dtype=torch.uint8, device=device)
    growing = all(segment["is_expandable"] for segment in torch.cuda.memory_snapshot())
    try:
        torch.empty(gpu_limit_bytes, dtype=torch.uint8, device=device)
        refused = False
    except torch.OutOfMemoryError:
        refused = True
    fits = torch.empty(fits_bytes, dtype=torch.uint8, device=device)
    values = {"reserved_bytes": torch.cuda.memory_reserved(device), "kept_bytes": kept.numel() + fits.numel()}
    return Result(values, {"more than the cap is refused": refused, "expandable segments": growing})


def _stale_error(registered: Tensor) -> str | None:
    """Returns the error of the first kernel after CUDA refused to register memory, or None."""
    # It is registered already, so CUDA refuses.
    torch.cuda.cudart().cudaHostRegister(registered.data_ptr(), registered.nbytes, 0)
    try:
        torch.zeros(1, device="cuda").add_(1).item()
    except RuntimeError as error:
        return first_line(error)
    return None


def _same_bits(a: Tensor, b: Tensor) -> bool:
    kind = {2: torch.int16, 4: torch.int32}[a.itemsize]
    return torch.equal(a.view(kind), b.view(kind))


def _distance(found: Tensor, truth: Tensor) -> float:
    return ((found - truth).norm() / truth.norm()).item()


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
