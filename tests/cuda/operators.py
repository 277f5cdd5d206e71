"""Runs every operator of lowmem/cudasim/temporaries.py on a card, and compares its allocations with that table.

    python -m stand_in --gpu a100 -- -m tests.cuda.operators [--workspaces] [--families gpt2 llama ...]

Each case prints a row of JSON: the operator, its arguments, the bytes of its temporaries by PyTorch's caching allocator
and by the table, and a sentence if a result differs from that on meta. Four kinds of cases:

- workspaces: of a thread's first matrix product (`--workspaces`: nothing else).
- operators (calls.py): the table's, over shapes and dtypes, with and without deterministic algorithms.
- functions (calls.py): with backward, both peaks and the saved bytes.
- steps: every distinct operation of simulated steps of small decoders of many families.
"""

import argparse
import itertools
import json
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace

import torch

from lowmem.core.kernels import Kernels
from lowmem.core.layout import Layout
from lowmem.core.optimizers import OPTIMIZERS
from lowmem.core.precision import WORKING_DTYPES
from lowmem.cudasim.cuda_ops import workspace_bytes
from lowmem.cudasim.gpus import CARDS
from lowmem.cudasim.temporaries import Gpu
from lowmem.device import make_deterministic, set_environment
from lowmem.models.build import make_decoder
from lowmem.planning.simulated_step import StepCase, gpu_target, record_step
from tests.cuda import calls
from tests.cuda.allocations import VERSION, Call, measure, peaks_on, peaks_simulated, record_of
from tests.families import config, with_dropout

LLAMA = {
    **{"vocab_size": 32000, "num_hidden_layers": 2, "hidden_size": 1024, "intermediate_size": 2816},
    **{"num_attention_heads": 16, "num_key_value_heads": 4},
}
LAYERS = {"num_hidden_layers": 2, "hidden_size": 1024, "num_attention_heads": 8}
OLD = {"n_layer": 2, "n_embd": 1024, "n_head": 16, "n_positions": 2048}
FAMILIES: dict[str, Callable] = {  # two blocks of each, as wide as a small published one
    "gpt2": config("gpt2", OLD, n_embd=768, n_head=12),
    "bloom": config("bloom", vocab_size=50880, n_layer=2, hidden_size=1024, n_head=16),
    "llama": config("llama", LLAMA),
    "gptj": config("gptj", OLD, n_head=4, rotary_dim=64),
    "opt": config("opt", num_hidden_layers=2, hidden_size=768, ffn_dim=3072, num_attention_heads=12),
    "gpt_neo": config(
        "gpt_neo", num_layers=2, hidden_size=768, num_heads=12, attention_types=[[["global", "local"], 1]]
    ),
    "gpt_neox": config("gpt_neox", LAYERS, intermediate_size=4096),
    "phi": config("phi", num_hidden_layers=2),
    "qwen3": config("qwen3", LLAMA, vocab_size=151936, head_dim=128, num_key_value_heads=8),
    "gpt_bigcode": config("gpt_bigcode", OLD),
    "codegen": config("codegen", OLD, rotary_dim=32),
    "biogpt": config("biogpt", num_hidden_layers=2),
    "falcon": config("falcon", LAYERS, alibi=True, multi_query=False),
    "stablelm": config("stablelm", LLAMA, num_key_value_heads=16),
    "gemma2": config("gemma2", LLAMA, head_dim=128),
    "mpt": config("mpt", n_layers=2, d_model=1024, n_heads=16, vocab_size=50368),
}


def steps(gpu: Gpu, family: str) -> Iterator[Call]:
    """Yields the distinct operations of simulated steps of `family`: 16-bit products with both residual streams, and
    fp32; with dropout, and with documents masked."""
    seen: dict[tuple, Call] = {}

    def watch(func: Callable, args: tuple, kwargs: dict, result) -> tuple:
        if func.namespace == "aten":  # our own kernels are launched by Triton; add_product is among the operators
            call = record_of(gpu, func, args, kwargs, result)
            seen.setdefault(call.key, call)
        return ()

    half = "bf16" if gpu.capability >= (8, 0) else "fp16"
    for precision, residual, kernels, (seq, micro_batch, masked) in (
        (half, "fp32", Kernels.ALL, (1024, 4, False)),
        (half, "16bit", Kernels.NONE, (1000, 3, True)),
        ("fp32", "fp32", Kernels.NONE, (1000, 3, False)),
    ):
        model = with_dropout(FAMILIES[family](), 0.0 if masked else 0.1)
        card = replace(CARDS["a100"], capability=gpu.capability, multiprocessors=gpu.multiprocessors)
        target = gpu_target(card, kernels)
        target = replace(target, device_model=replace(target.device_model, hidden_bytes=watch))
        layout = Layout(micro_batch, states_on_gpu=1)
        case = StepCase(
            seq, 2 * micro_batch, layout, WORKING_DTYPES.get(precision, torch.float32), OPTIMIZERS["adamw"],
            document_mask=masked,
        )  # fmt: skip
        record_step(make_decoder(model, precision, residual, kernels), case, target, {})
    yield from seen.values()


def rows(gpu: Gpu, families: list[str]) -> Iterator[dict]:
    device = torch.device("cuda")
    for deterministic in (True, False):
        mode = replace(gpu, deterministic=deterministic)
        with deterministic_algorithms(deterministic):
            chosen = calls.operators if deterministic else calls.whose_sums_have_an_order
            distinct = {call.key: call for call in chosen(mode)}
            for call in distinct.values():
                yield row_of("operator", call, device) | {"deterministic": deterministic}
    for name, function, tensors in calls.functions(gpu):
        there, here = peaks_on(device, function, *tensors), peaks_simulated(gpu, function, *tensors)
        yield {"kind": "function", "operator": name, "measured": there, "simulated": here, "difference": ""}
    for family in families:
        for call in steps(gpu, family):
            yield row_of("step", call, device) | {"family": family}


def workspaces(gpu: Gpu) -> Iterator[dict]:
    """Measures workspaces. It has to run first: a thread takes its workspace once."""
    device = torch.device("cuda")
    x = torch.ones(8, 8, device=device, requires_grad=True)
    bias = torch.ones(8, device=device)
    config = os.environ["CUBLAS_WORKSPACE_CONFIG"]
    sizes = workspace_bytes(gpu.capability, config, VERSION)
    results = [torch.empty_like(x), torch.empty_like(x)]
    before = torch.cuda.memory_allocated(device)
    with torch.no_grad():
        torch.mm(x, x, out=results[0])
        torch.addmm(bias, x, x, out=results[1])
    forward = torch.cuda.memory_allocated(device) - before
    torch.mm(x, x).sum().backward()
    x.grad = None
    backward = torch.cuda.memory_allocated(device) - before - forward
    for name, taken, said in (("forward", forward, sum(sizes)), ("backward", backward, sizes[0])):
        yield {
            "kind": "workspace", "operator": f"first product {name}", "measured": [taken], "simulated": [said],
            "difference": "",
        }  # fmt: skip


def row_of(kind: str, call: Call, device: torch.device) -> dict:
    taken, difference = measure(call, device)
    return {
        "kind": kind, "operator": str(call.func), "case": call.case, "measured": [taken],
        "simulated": [call.temporaries], "difference": difference,
    }  # fmt: skip


@contextmanager
def deterministic_algorithms(on: bool) -> Iterator[None]:
    was = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(on)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(was)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--families", nargs="*", choices=FAMILIES, default=list(FAMILIES))
    parser.add_argument("--workspaces", action="store_true")
    options = parser.parse_args(arguments)
    set_environment()
    device = torch.device("cuda")
    make_deterministic(device)
    properties = torch.cuda.get_device_properties(device)
    gpu = Gpu((properties.major, properties.minor), properties.multi_processor_count)
    here = properties.max_threads_per_multi_processor, properties.shared_memory_per_multiprocessor
    if (*here, properties.shared_memory_per_block_optin, gpu.multiprocessor.blocks) != gpu.multiprocessor:
        raise AssertionError(f"the device's multiprocessors are not those of lowmem/cudasim/gpus.py: {here}")
    with deterministic_algorithms(False):  # which refuses products where the workspaces are not set
        found = list(workspaces(gpu))
    for row in itertools.chain(found, () if options.workspaces else rows(gpu, options.families)):
        print(json.dumps(row))
    return 0


if __name__ == "__main__":
    sys.exit(main())
