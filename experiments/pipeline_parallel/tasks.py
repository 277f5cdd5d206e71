"""The tasks to train: a model as a list of layers, batches of real data, and the loss of a micro-batch.

digits    8 x 8 images of scikit-learn's bundled digits, by convolutions
cifar10   32 x 32 colour images from a folder, or through `datasets`, by the same convolutions
gpt2      a small GPT-2 (stock blocks, dropout 0.1) on the bytes of Python's standard library
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from experiments.harness import cifar10, samples
from lowmem.errors import InputError

CONVOLUTIONS = 9  # with the classifier ten layers
CHANNELS = 16
MOST_TESTED = 2000
GROUP, BATCH = "group", "batch"
SEQ, WIDTH, HEADS, BLOCKS, BYTES = 64, 64, 4, 8, 256


@dataclass(frozen=True)
class Task:
    """A model and its data. `layers`: of the whole model. `tied`: names in the first and the last layer of a shared
    parameter. `inputs` and `targets` [N, ..] are for training, `tests` for testing. `loss_of(output, target)` sums over
    predictions, of which a sample has `predictions`."""

    layers: list[nn.Module]
    inputs: Tensor
    targets: Tensor
    loss_of: Callable[[Tensor, Tensor], Tensor]
    predictions: int = 1
    tied: tuple[str, str] | None = None
    tests: tuple[Tensor, Tensor] | None = None

    def chosen(self, number: int, size: int, seed: int) -> Tensor:
        """Returns the indices of `size` samples for step `number`, int64 [size], the same in every process."""
        return samples.chosen(len(self.inputs), size, number, seed)


def make_task(name: str, seed: int, norm: str = GROUP, tied: bool = True, data: str | None = None) -> Task:
    """Returns one of TASKS. `norm`: of the convolutions; `tied`: GPT-2's embeddings are tied; `data`: a folder with
    CIFAR-10. Raises InputError if its data are not available."""
    # Every process makes the whole model, so that no weight depends on the cuts.
    torch.manual_seed(seed)
    return TASKS[name](norm, tied, data)


def _digits(norm: str, tied: bool, data: str | None) -> Task:
    inputs, targets, *tests = samples.parted(*samples.digits())
    return _classifier(inputs, targets, tuple(tests), norm)


def _cifar10(norm: str, tied: bool, data: str | None) -> Task:
    return _classifier(*cifar10.read(data, train=True), cifar10.read(data, train=False), norm)


def _classifier(images: Tensor, labels: Tensor, tests: tuple[Tensor, Tensor], norm: str) -> Task:
    channels = [images.shape[1]] + [CHANNELS] * CONVOLUTIONS
    normed = {GROUP: lambda: nn.GroupNorm(4, CHANNELS), BATCH: lambda: nn.BatchNorm2d(CHANNELS)}[norm]
    layers: list[nn.Module] = [
        nn.Sequential(nn.Conv2d(before, after, 3, padding=1, stride=1 + (place % 4 == 3)), normed(), nn.ReLU())
        for place, (before, after) in enumerate(zip(channels, channels[1:], strict=False))
    ]
    layers.append(nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Dropout(0.1), nn.Linear(CHANNELS, 10)))
    return Task(
        layers, images, labels, lambda output, target: F.cross_entropy(output, target, reduction="sum"), tests=tests
    )


class Embedding(nn.Module):
    """Ids [B, T] -> [B, T, D], with positions `wpe` and dropout `drop` if the model has them."""

    def __init__(self, wte: nn.Module, wpe: nn.Module | None = None, drop: nn.Module | None = None):
        super().__init__()
        self.wte, self.wpe, self.drop = wte, wpe, drop

    def forward(self, ids: Tensor) -> Tensor:
        x = self.wte(ids.long())
        if self.wpe is not None:
            x = x + self.wpe(torch.arange(ids.shape[1], device=ids.device))
        return x if self.drop is None else self.drop(x)


class Head(nn.Module):
    """[B, T, D] -> logits [B, T, V]"""

    def __init__(self, norm: nn.Module, lm_head: nn.Module):
        super().__init__()
        self.norm, self.lm_head = norm, lm_head

    def forward(self, x: Tensor) -> Tensor:
        return self.lm_head(self.norm(x))


def _gpt2(norm: str, tied: bool, data: str | None) -> Task:
    from transformers import AutoModelForCausalLM, GPT2Config

    config = GPT2Config(n_layer=BLOCKS, n_embd=WIDTH, n_head=HEADS, n_positions=SEQ, vocab_size=BYTES,
                        bos_token_id=None, eos_token_id=None)  # fmt: skip
    model = AutoModelForCausalLM.from_config(config).train().float()
    body = model.transformer
    model.lm_head.weight = nn.Parameter(body.wte.weight.detach().clone())  # updated as the embedding's is
    layers = [Embedding(body.wte, body.wpe, body.drop), *body.h, Head(body.ln_f, model.lm_head)]
    tokens = samples.source_bytes(SEQ + 1)
    inputs, targets, *tests = samples.parted(tokens[:, :-1], tokens[:, 1:])
    return Task(
        layers, inputs, targets,
        lambda output, target: F.cross_entropy(output.flatten(0, 1), target.flatten().long(), reduction="sum"),
        SEQ, ("wte.weight", "lm_head.weight") if tied else None, tuple(tests),
    )  # fmt: skip


TASKS: dict[str, Callable[[str, bool, str | None], Task]] = {"digits": _digits, "cifar10": _cifar10, "gpt2": _gpt2}
LAYERS = {"digits": CONVOLUTIONS + 1, "cifar10": CONVOLUTIONS + 1, "gpt2": BLOCKS + 2}  # so many, known without data


def accuracy(task: Task, layers: nn.Module) -> float:
    """Returns the share of right predictions of `layers` (the whole model) on the first MOST_TESTED test samples."""
    layers.eval()
    inputs, targets = (tensor[:MOST_TESTED] for tensor in task.tests)
    with torch.no_grad():
        found = layers(inputs, 0, 0).argmax(dim=-1)
    return float((found == targets).double().mean())


def cut(costs: Sequence[float], stages: int) -> list[int]:
    """Returns the number of layers of each stage so that the most expensive stage is as cheap as possible; among equal
    cuts, the one with the least sum of squares."""
    count = len(costs)
    if stages > count:
        raise InputError(f"the model has {count} layers, which make no {stages} stages")
    # best[k][n]: of the first n layers in k stages, the most expensive one, the squares, the sizes
    best = {(0, 0): (0.0, 0.0, [])}
    for k in range(1, stages + 1):
        for n in range(k, count + 1):
            best[k, n] = min(
                (max(most, cost), squares + cost**2, [*sizes, n - before])
                for before in range(k - 1, n)
                if (k - 1, before) in best
                for most, squares, sizes in [best[k - 1, before]]
                for cost in [sum(costs[before:n])]
            )
    return best[stages, count][2]
