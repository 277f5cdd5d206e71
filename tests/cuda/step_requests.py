"""Compares a run's requests to the allocator, from its workspaces to the end of its second step, with its plan's.

    python -m stand_in --gpu CARD -- -m tests.cuda.step_requests

Prints one JSON object for each case: the requests that differ, in order. Sizes up to LEFT_OUT_BYTES are left out
(random numbers' states, and temporaries of sorting).
"""

import difflib
import json
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from itertools import groupby, product
from operator import itemgetter
from pathlib import Path

import torch
from transformers import GPT2Config, GPTJConfig, GPTNeoConfig, LlamaConfig, T5Config

from lowmem import device as devices
from lowmem.core.homes import DiskStates
from lowmem.core.kernels import Kernels, fused
from lowmem.core.layout import Fate, Layout
from lowmem.core.optimizers import OPTIMIZERS, Hyperparameters
from lowmem.core.parameters import Store
from lowmem.core.precision import WORKING_DTYPES, LossScale
from lowmem.core.step import TrainingStep
from lowmem.cudasim.gpus import card_of_name_reported
from lowmem.cudasim.tape import FREED
from lowmem.models.build import make_decoder
from lowmem.planning.simulated_step import StepCase, batch_of_zeros, gpu_target, record_step
from tests.cuda.digest_recording import Event, events_of

LEFT_OUT_BYTES = 1024
MODELS = {
    "gpt2": GPT2Config(
        vocab_size=5000, n_embd=256, n_head=4, n_layer=3, n_positions=256, bos_token_id=0, eos_token_id=0
    ),
    "llama": LlamaConfig(
        vocab_size=5000, hidden_size=256, num_attention_heads=4, num_hidden_layers=3, intermediate_size=640,
        tie_word_embeddings=True,
    ),
    "gpt_neo": GPTNeoConfig(  # which makes tensors of Python's numbers in each block
        vocab_size=5000, hidden_size=256, num_heads=4, num_layers=3, max_position_embeddings=256, intermediate_size=640,
        attention_types=[[["global", "local", "global"], 1]], bos_token_id=0, eos_token_id=0,
    ),
    "gptj": GPTJConfig(  # which moves a buffer when it runs
        vocab_size=5000, n_embd=256, n_head=4, n_layer=3, rotary_dim=32, n_positions=256, bos_token_id=0, eos_token_id=0
    ),
    "t5": T5Config(
        vocab_size=5000, d_model=256, d_kv=64, d_ff=640, num_layers=2, num_decoder_layers=2, num_heads=4,
        feed_forward_proj="gated-gelu", decoder_start_token_id=0,
    ),
}  # fmt: skip
SEQ, BATCH = 256, 4
PAIR = 48, 16  # tokens of a source and of a target: more than 3,072 pairs of positions would be sorted (temporaries.py)
LENGTHS = (30, 250, 9, 100)
LEFT_OUT = [kernels for kernels in fused.TRIALS if kernels != Kernels.ALL]
CASES = {  # the layout, and what else differs from a plain step
    "kept": (Layout(2, kept=99, states_on_gpu=1), {}),
    "recomputed": (Layout(2, 1, 2), {}),
    "products kept": (Layout(2, kept=4, states_on_gpu=9), {}),
    "updated in backward": (Layout(2, 2, fate=Fate.APPLIED), {"clip_norm": None}),
    "not clipped, deferred": (Layout(2, 2), {"clip_norm": None}),
    "two passes": (Layout(2, 2, fate=Fate.DROPPED), {}),
    "weights streamed": (Layout(2, 1, 2, weights_on_gpu=1), {}),
    "weights streamed, two passes": (Layout(2, 2, fate=Fate.DROPPED, weights_on_gpu=2), {}),
    "boundaries in RAM": (Layout(2, 2, boundaries_in_ram=True), {}),
    "boundaries and weights in RAM": (Layout(2, 2, fate=Fate.DROPPED, weights_on_gpu=1, boundaries_in_ram=True), {}),
    "gradients in RAM": (Layout(2, 2, fate=Fate.SENT, states_on_gpu=1), {}),
    "all in RAM": (Layout(2, 2, fate=Fate.SENT, weights_on_gpu=1, boundaries_in_ram=True), {}),
    "states on a disk": (Layout(2, 1, states_on_disk=3, states_on_gpu=1), {}),
    "many lengths": (Layout(2, 1), {"lengths": LENGTHS}),
    "many lengths, packed": (Layout(2, 2, kept=99), {"lengths": LENGTHS, "document_mask": True}),
}


def requested(case: StepCase, decoder, device: torch.device) -> list[Event]:
    """Returns ("alloc" or "free", bytes) of a run, in order."""
    torch.cuda.memory._record_memory_history(context=None)
    devices.take_workspaces(device)
    layout = case.layout
    on_disk = DiskStates(Path(tempfile.gettempdir())).tensor
    store = Store(decoder, device, case.dtype, case.optimizer, layout, disk_tensor=on_disk)
    step = TrainingStep(
        decoder, store, Hyperparameters(weight_decay=0.01), clip_norm=case.clip_norm, seed=0,
        loss_scale=LossScale(enabled=case.dtype is torch.float16),
    )  # fmt: skip
    full = batch_of_zeros(case, case.batch)
    step.evaluate(batch_of_zeros(case, case.layout.micro_batch))
    ragged = full if case.lengths is None else replace(full, lengths=torch.tensor(case.lengths))
    before = [full] * (3 if layout.states_on_disk else 1)  # as the simulation has it
    for number, batch in enumerate((*before, ragged)):
        step(batch, number, 1e-4)
    step.flush()
    events = events_of(torch.cuda.memory._snapshot())
    torch.cuda.memory._record_memory_history(enabled=None)
    return events


def simulated(case: StepCase, decoder, device: torch.device) -> list[Event]:
    """Returns the same of a plan for this machine's card."""
    sizes: dict[int, int] = {}
    events = []
    target = gpu_target(card_of_name_reported(torch.cuda.get_device_name(device)), decoder.fused_kernels)
    for storage, size, _ in record_step(decoder, case, target, {}, whole_first_step=True).tape:
        if size == FREED:
            events.append(("free", sizes.pop(storage)))
        else:
            sizes[storage] = size
            events.append(("alloc", size))
    return events


def differences(found: list[Event], planned: list[Event]) -> list[str]:
    return list(difflib.unified_diff(_lines(found), _lines(planned), "run", "plan", n=2, lineterm=""))


def _lines(events: list[Event]) -> list[str]:
    large = [event for event in events if event[1] > LEFT_OUT_BYTES]
    # Frees that follow one another are sorted, since a function's variables may end in any order.
    runs = (sorted(run) if action == "free" else run for action, run in groupby(large, key=itemgetter(0)))
    return [f"{action} {size}" for run in runs for action, size in run]


def kinds(precisions: list[str]) -> Iterator[tuple[str, str, str, Kernels]]:
    """Yields each (family, precision, name of a case, fused kernels) that is compared."""
    with_kernels = [(Kernels.ALL, precision) for precision in precisions]
    for family, name, (kernels, precision) in product(MODELS, CASES, [*with_kernels, (Kernels.NONE, precisions[-1])]):
        layout, more = CASES[name]
        # Scaled gradients wait until all of them are known to be finite. Pairs have no lengths.
        if not (layout.fate is Fate.APPLIED and precision == "fp16") and not (family == "t5" and "lengths" in more):
            yield family, precision, name, kernels
    for family, name, left_out in product(("gpt2", "llama"), ("kept", "recomputed", "products kept"), LEFT_OUT):
        yield family, precisions[-1], name, Kernels.ALL & ~left_out


def main() -> None:
    device = torch.device("cuda", 0)
    devices.make_deterministic(device)
    precisions = ["fp16", *(["bf16"] if torch.cuda.get_device_capability(device) >= (8, 0) else [])]
    assert fused.running(device) == Kernels.ALL
    for family, precision, name, kernels in kinds(precisions):
        layout, more = CASES[name]
        if family == "t5":
            more = more | {"target_tokens": PAIR[1]}
        seq = SEQ if family != "t5" else sum(PAIR)
        case = StepCase(seq, BATCH, layout, WORKING_DTYPES[precision], OPTIMIZERS["adamw"], **more)
        torch._C._cuda_clearCublasWorkspaces()
        devices.collect_garbage()  # else the case before is freed at some moment of this one's record
        found = requested(case, make_decoder(MODELS[family], precision, "fp32", kernels), device)
        planned = simulated(case, make_decoder(MODELS[family], precision, "fp32", kernels), device)
        row = {"case": f"{family}, {precision}, {name}", "kernels": kernels.names, "requests": len(found)}
        print(json.dumps(row | {"differences": differences(found, planned)}))


if __name__ == "__main__":
    devices.set_environment()
    main()
