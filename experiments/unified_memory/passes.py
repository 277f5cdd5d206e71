"""Passes of a model, and their seconds, memory, and digests of results."""

import argparse
import time
from collections.abc import Callable

import torch
import xxhash
from torch import Tensor, nn
from torch.nn import functional as F

from experiments.harness import rows as row_file
from experiments.unified_memory.shapes import hooked


@torch.no_grad()
def forward(model: nn.Module, inputs: Tensor, options: argparse.Namespace) -> Tensor:
    """Returns logits of the last token [1, V]."""
    return model(inputs, use_cache=False, logits_to_keep=1).logits[:, -1]


def forward_and_backward(model: nn.Module, inputs: Tensor, options: argparse.Namespace) -> Tensor:
    """Returns the mean loss [1], and accumulates gradients."""
    logits = model(inputs, use_cache=False).logits
    loss = F.cross_entropy(logits[0, :-1].float(), inputs[0, 1:])
    loss.backward()
    return loss.detach()[None]


@torch.no_grad()
def generate(model: nn.Module, inputs: Tensor, options: argparse.Namespace) -> Tensor:
    """Returns the likeliest next tokens, int64 [1, N]."""
    cache, found, next_inputs = None, [], inputs
    for _ in range(options.generate):
        output = model(next_inputs, past_key_values=cache, use_cache=True, logits_to_keep=1)
        cache, next_inputs = output.past_key_values, output.logits[:, -1:].argmax(-1)
        found.append(next_inputs)
    return torch.cat(found, 1)


def timed(work, times: int, device: torch.device) -> tuple[list[float], Tensor]:
    """Returns the seconds of each call, and the last result."""
    seconds = []
    for _ in range(times):
        began = time.perf_counter()
        result = work()
        if device.type == "cuda":
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - began)
    return seconds, result


def used_over_a_pass(
    model: nn.Module, one_pass: Callable[[], Tensor], accesses: int, device: torch.device
) -> list[int]:
    """Returns the card's bytes in use at each access of a pass, by CUDA's count; [] on the CPU."""
    found: list[int] = []
    if device.type == "cpu":
        return found

    def look(*_) -> None:
        torch.cuda.synchronize()
        free, total = torch.cuda.mem_get_info()
        found.append(total - free)

    hooks = []
    for forwards, backwards in hooked(model):  # behind the hooks that move
        hooks.append(forwards.register_forward_pre_hook(look))
        if accesses > len(hooked(model)):
            hooks.append(backwards.register_full_backward_pre_hook(look))
    one_pass()
    for hook in hooks:
        hook.remove()
    return found[:accesses]


def memory_of(device: torch.device) -> dict[str, int]:
    if device.type == "cpu":
        return {}
    free, total = torch.cuda.mem_get_info()
    return {
        "peak_allocated_bytes": torch.cuda.max_memory_allocated(),
        "peak_reserved_bytes": torch.cuda.max_memory_reserved(),
        "physical_used_bytes": total - free,
    } | {key: count for key, count in row_file.card_counts().items() if "managed" in key or "prefetched" in key}


def digest(tensors: list[Tensor]) -> str:
    found = xxhash.xxh64()
    for tensor in tensors:
        found.update(tensor.cpu().contiguous().view(torch.uint8).numpy())
    return found.hexdigest()
