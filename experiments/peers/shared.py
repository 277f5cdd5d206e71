"""Shared by all peers: the initial weights, the batches, and the distance of the weights from the reference.

Clipping, weight decay and batches are lowmem's; the learning rate is constant.
"""

import math
import os
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

import torch
from safetensors import safe_open
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, PreTrainedModel

from experiments.peers.case import Case
from lowmem.core.batch import Batch
from lowmem.data.batches import Batches
from lowmem.data.dataset import load_data
from lowmem.data.tokenizer import load_tokenizer
from lowmem.models.build import build_model, load_config
from lowmem.models.export import export_model
from lowmem.models.load import random_weights, read_weights
from lowmem.settings import Settings


def write_initial(case: Case) -> None:
    """Makes `case.initial` if it is missing: weights in fp32, config without dropout, tokenizer."""
    if case.initial.exists():
        return
    model, init = case.settings.model, case.settings.init
    config = load_config(model, init)
    # No two systems draw the same masks of dropout.
    for name, value in config.to_dict().items():
        if "drop" in name and isinstance(value, int | float):
            setattr(config, name, 0.0)
    random = init == "random"
    weights = random_weights(config, case.settings.seed) if random else read_weights(build_model(config), model)
    tokenizer = load_tokenizer(model, init, config.vocab_size)
    export_model(
        case.initial, config, weights, tokenizer=tokenizer,
        readme=f"The weights that all peers begin with: {model}, {init}, without dropout.\n",
    )  # fmt: skip


def write_reference(case: Case, master: Callable[[str], Tensor]) -> None:
    config = load_config(str(case.initial), "pretrained")
    names = [name for name, _ in build_model(config).named_parameters()]
    export_model(
        case.reference, config, ((name, master(name)) for name in names), tokenizer=None,
        readme=f"The reference after {case.settings.steps} steps: {asdict(case.settings)}\n",
    )  # fmt: skip


def saved_weights(folder: Path) -> Callable[[str], Tensor]:
    """Returns a function that reads a folder's tensors by name, one at a time. The files must have the parameters' own
    names."""
    files = {}
    for path in folder.glob("*.safetensors"):
        with safe_open(path, framework="pt") as file:
            files |= dict.fromkeys(file.keys(), path)

    def read(name: str) -> Tensor:
        with safe_open(files[name], framework="pt") as file:
            return file.get_tensor(name)

    return read


def distance(case: Case, master: Callable[[str], Tensor]) -> float:
    """Returns ||w - reference|| / ||reference - initial|| over all parameters: 0 for the reference's weights, 1 for the
    initial ones. Takes four times the largest parameter in RAM."""
    before, reference = saved_weights(case.initial), saved_weights(case.reference)
    off = moved = 0.0
    for name, _ in build_model(load_config(str(case.initial), "pretrained")).named_parameters():
        wanted = reference(name)
        off += _square(master(name) - wanted)
        moved += _square(wanted - before(name))
    return math.sqrt(off / moved)


def _square(difference: Tensor) -> float:
    return torch.linalg.vector_norm(difference, dtype=torch.float64).item() ** 2


def batches(case: Case) -> Batches:
    """Returns the training's batches; `.batch(step)` counts steps from 0."""
    config = load_config(str(case.initial), "pretrained")
    tokenizer = load_tokenizer(str(case.initial), "pretrained", config.vocab_size)
    return load_data(case.from_folder, tokenizer, config.vocab_size).train


def load_model(case: Case, dtype: torch.dtype = torch.float32) -> PreTrainedModel:
    """Loads the initial weights on the CPU, ready to train."""
    model = AutoModelForCausalLM.from_pretrained(case.initial, dtype=dtype, attn_implementation="sdpa")
    model.config.use_cache = False
    return model.train()


def groups(model: nn.Module, settings: Settings) -> list[dict]:
    """Returns parameter groups for an optimizer: matrices decay, vectors do not."""
    matrices, vectors = [], []
    for parameter in model.parameters():
        shape = getattr(parameter, "ds_shape", parameter.shape)  # DeepSpeed's stage 3 leaves nothing of the second
        (matrices if len(shape) >= 2 else vectors).append(parameter)
    return [{"params": matrices, "weight_decay": settings.weight_decay}, {"params": vectors, "weight_decay": 0.0}]


def inputs(batch: Batch, device: torch.device) -> dict[str, Tensor]:
    batch = batch.to(device)
    return {"input_ids": batch.input_ids, "labels": batch.labels, "shift_labels": batch.labels}  # shifted already


def single_process(device: torch.device, folder: Path) -> None:
    """Starts a process group of this process alone, over a file in `folder`."""
    os.environ.update(RANK="0", WORLD_SIZE="1", LOCAL_RANK="0", MASTER_ADDR="127.0.0.1", MASTER_PORT="0")  # DeepSpeed's
    if not torch.distributed.is_initialized():
        backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"  # offloaded gradients are clipped by gloo
        # A file, for another process could hold a port.
        store = f"file://{folder.resolve()}/process_group"
        torch.distributed.init_process_group(backend, init_method=store, rank=0, world_size=1)


def wait_for(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
