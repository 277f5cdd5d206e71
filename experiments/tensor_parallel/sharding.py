"""Turns a model into one rank's part, by a list of rules; divides weights, and joins them again.

A rule replaces the modules of a name by a divided layer. Attention and an MLP are pairs of divided layers, between
which ranks send nothing: hidden states `enter` a pair, and `leave` it after its last layer. With sequence parallelism,
each rank has a part of the sequence between pairs.
"""

import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import partial

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F
from transformers.pytorch_utils import Conv1D

from experiments.harness.group import peer_errors
from experiments.tensor_parallel import layers
from experiments.tensor_parallel.collectives import BACKWARD, Ranks

CPU = torch.device("cpu")
SEQUENCE = 1  # dimension of hidden states [B, T, D]
CHANNELS = 1  # dimension of images [B, C, H, W]


@dataclass(frozen=True)
class Cut:
    """The indices of a tensor along `dim`, `size` long, that each rank has: `indices` int64 by rank. Indices from
    `size` on stand for zeros that fill the last parts."""

    dim: int
    size: int
    indices: tuple[Tensor, ...]

    def take(self, whole: Tensor, rank: int) -> Tensor:
        """Returns a copy of a rank's part."""
        indices = self.indices[rank]
        found = whole.index_select(self.dim, indices.clamp(max=self.size - 1))
        found.index_fill_(self.dim, (indices >= self.size).nonzero()[:, 0], 0)
        return found

    def put(self, whole: Tensor, part: Tensor, rank: int) -> None:
        exists = (self.indices[rank] < self.size).nonzero()[:, 0]
        whole.index_copy_(self.dim, self.indices[rank][exists], part.index_select(self.dim, exists))

    def along(self, dim: int) -> "Cut":
        return Cut(dim, self.size, self.indices)


def evenly(size: int, ranks: int, block: int = 1, blocks: int = 1) -> Cut:
    """Cuts dimension 0 of `blocks` concatenated tensors of `size` (GPT-2's Q, K and V): each rank gets a stretch of
    each, in whole units of `block`. The first ranks may get one unit more."""
    units = np.array_split(np.arange(size).reshape(-1, block), ranks)
    return Cut(
        0,
        size * blocks,
        tuple(torch.cat([torch.tensor(own.reshape(-1) + n * size) for n in range(blocks)]) for own in units),
    )


def padded(size: int, ranks: int) -> Cut:
    """Cuts dimension 0 into equal stretches. The last may exceed the size (a vocabulary's rows)."""
    each = -(-size // ranks)
    return Cut(0, size, tuple(torch.arange(rank * each, (rank + 1) * each) for rank in range(ranks)))


@dataclass
class Sharded:
    """A rank's part of `model`. `cuts`: of cut parameters and buffers, by name. `partial`: parameters whose gradients
    have to be summed over the ranks. `dropouts` have to be told the step."""

    model: nn.Module
    ranks: Ranks
    cuts: dict[str, Cut] = field(default_factory=dict)
    partial: list[str] = field(default_factory=list)
    dropouts: list[layers.PlacedDropout] = field(default_factory=list)

    def shapes(self) -> dict[str, tuple[int, ...]]:
        found = {}
        for name, tensor in self.tensors().items():
            shape = list(tensor.shape)
            if name in self.cuts:
                shape[self.cuts[name].dim] = self.cuts[name].size
            found[name] = tuple(shape)
        return found

    def tensors(self) -> dict[str, Tensor]:
        """Returns parameters, each once, and the buffers that are state."""
        parameters = dict(self.model.named_parameters())
        tied = self.model.state_dict().keys() - parameters.keys()
        buffers = {name: buffer for name, buffer in self.model.named_buffers() if name in tied}
        return parameters | buffers

    @torch.no_grad()
    def load(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        """Copies this rank's part of each whole weight. A weight may come as several flat runs."""
        tensors, shapes = self.tensors(), self.shapes()
        run: list[Tensor] = []
        for name, tensor in weights:
            run.append(tensor.reshape(-1))
            if sum(map(len, run)) < np.prod(shapes[name]):
                continue
            whole = torch.cat(run).view(shapes[name]) if len(run) > 1 else tensor.view(shapes[name])
            run = []
            tensors[name].copy_(self.cuts[name].take(whole, self.ranks.rank) if name in self.cuts else whole)

    def gathered(self, tensors: dict[str, Tensor]) -> Iterable[tuple[str, Tensor | None]]:
        """Yields names and whole tensors, copies on the CPU of rank 0; None on others. `tensors`: as `tensors()`, or
        the gradients of these."""
        for name, tensor in tensors.items():
            part = tensor.detach().cpu().clone()
            if name not in self.cuts or self.ranks.count == 1:
                yield name, part if self.ranks.rank == 0 else None
                continue
            parts = [None] * self.ranks.count if self.ranks.rank == 0 else None
            with peer_errors():
                dist.gather_object(part, parts)
            if parts is None:
                yield name, None
                continue
            whole = torch.empty(self.shapes()[name], dtype=part.dtype)
            for rank, one in enumerate(parts):
                self.cuts[name].put(whole, one, rank)
            yield name, whole

    @torch.no_grad()
    def complete_gradients(self) -> None:
        """Sums the gradients of `partial` over the ranks; has to be called after each backward."""
        gradients = [self.model.get_parameter(name).grad for name in self.partial]
        if gradients and self.ranks.count > 1:
            flat = torch.cat([gradient.reshape(-1) for gradient in gradients])
            self.ranks.all_reduce(flat, ("gradients", BACKWARD))
            for gradient, part in zip(gradients, flat.split([g.numel() for g in gradients]), strict=True):
                gradient.copy_(part.view_as(gradient))

    @torch.no_grad()
    def clip_gradients(self, most: float) -> Tensor:
        """Clips the gradients to `most` by their norm over all ranks, and returns the norm. Every weight counts
        once."""
        cut = torch.zeros((), dtype=torch.float64, device=next(self.model.parameters()).device)
        whole = cut.clone()
        for name, parameter in self.model.named_parameters():  # a tied weight comes once
            square = parameter.grad.double().square().sum()
            if name in self.cuts:
                cut += square
            else:
                whole += square
        norm = (self.ranks.all_reduce(cut, ("clipping", BACKWARD)) + whole).sqrt()
        scale = (most / (norm + 1e-6)).clamp(max=1.0)
        for parameter in self.model.parameters():
            parameter.grad.mul_(scale.to(parameter.dtype))
        return norm


class Sharder:
    """The tools of rules. A rule gets a module and its name, and returns its replacement, or None to keep it.
    Parameters may be on `meta`; those that a rank keeps are made empty."""

    def __init__(
        self, model: nn.Module, ranks: Ranks, *, sequence_parallel: bool = False, dropout: float = 0.0, seed: int = 0,
        dtype: torch.dtype = torch.float32, device: torch.device = CPU,
    ):  # fmt: skip
        self.ranks, self.sequence_parallel, self.dropout, self.seed = ranks, sequence_parallel, dropout, seed
        self.dtype, self.device = dtype, device
        self.sharded = Sharded(model, ranks)
        self._made: dict[int, tuple[Tensor, nn.Parameter]] = {}  # by id of a whole parameter: tied ones stay one

    def apply(self, rules: dict[str, Callable | tuple[Callable, ...]]) -> Sharded:
        """Applies rules by names in which * stands for numbers, and returns the result. Every other layer stays
        whole."""
        model = self.sharded.model
        for pattern, of_pattern in rules.items():
            matches = re.compile(re.escape(pattern).replace(r"\*", r"\d+")).fullmatch
            names = [name for name, _ in model.named_modules() if matches(name)]
            if not names:
                raise ValueError(f"the model has no {pattern}")
            for name in names:
                for rule in of_pattern if isinstance(of_pattern, tuple) else (of_pattern,):
                    if (other := rule(model.get_submodule(name), name)) is not None:
                        model.set_submodule(name, other)
        made = {id(parameter) for _, parameter in self._made.values()}
        for _, module in list(model.named_modules()):
            for leaf, parameter in list(module.named_parameters(recurse=False)):
                if id(parameter) not in made:
                    setattr(module, leaf, self.whole(parameter))
            for leaf, buffer in list(module.named_buffers(recurse=False)):
                setattr(module, leaf, torch.zeros_like(buffer, device=CPU) if buffer.is_meta else buffer)
        # Norms, dropouts and biases see only a part of the sequence.
        if self.sequence_parallel:
            self.sharded.partial += [name for name, _ in model.named_parameters() if name not in self.sharded.cuts]
        model.to(self.device)
        return self.sharded

    # --- into a parallel region, and out of it

    def enter(self, x: Tensor) -> Tensor:
        return self.ranks.gather(x, dim=SEQUENCE) if self.sequence_parallel else self.ranks.copy_in(x)

    def leave(self, x: Tensor) -> Tensor:
        return self.ranks.reduce_scatter(x, dim=SEQUENCE) if self.sequence_parallel else self.ranks.reduce(x)

    # --- rules

    def block(self, module: nn.Module, name: str) -> None:
        """Counts collectives under the block's name."""
        module.register_forward_pre_hook(lambda *_: setattr(self.ranks, "place", name))
        module.register_forward_hook(lambda *_: setattr(self.ranks, "place", ""))

    def enters(self, module: nn.Module, name: str) -> None:
        """Makes the module's input enter the parallel region of its layers."""

        def entered(_, args: tuple, kwargs: dict):
            if args:
                return (self.enter(args[0]), *args[1:]), kwargs
            return args, kwargs | {"hidden_states": self.enter(kwargs["hidden_states"])}

        module.register_forward_pre_hook(entered, with_kwargs=True)

    def head_follows(self, module: nn.Module, name: str) -> None:
        """Makes the module's output enter the parallel region of the head."""
        module.register_forward_hook(lambda module, args, output: self.enter(output))

    def gathers_channels(self, module: nn.Module, name: str) -> None:
        module.register_forward_hook(lambda module, args, output: self.ranks.gather_replicated(output, dim=CHANNELS))

    def own_positions(self, module: nn.Module, name: str) -> None:
        """Selects this rank's part of the embedded positions [1, T, D]."""
        if self.sequence_parallel:
            module.register_forward_hook(
                lambda module, args, output: output.chunk(self.ranks.count, SEQUENCE)[self.ranks.rank]
            )

    def column(self, cut: Cut) -> Callable:
        """Returns a rule that divides a layer's outputs."""

        def rule(module: nn.Module, name: str) -> nn.Module:
            product, out, _ = _product(module)
            bias = None if module.bias is None else self.part(module.bias, f"{name}.bias", cut)
            return layers.ColumnParallel(product, self.part(module.weight, f"{name}.weight", cut.along(out)), bias)

        return rule

    def row(self, cut: Cut) -> Callable:
        """Returns a rule that divides a layer's inputs."""

        def rule(module: nn.Module, name: str) -> nn.Module:
            product, _, into = _product(module)
            weight = self.part(module.weight, f"{name}.weight", cut.along(into))
            bias = None if module.bias is None else self.whole(module.bias)
            return layers.RowParallel(product, weight, bias, self.leave)

        return rule

    def vocabulary(self, module: nn.Embedding, name: str) -> nn.Module:
        cut = padded(module.num_embeddings, self.ranks.count)
        weight = self.part(module.weight, f"{name}.weight", cut)
        return layers.VocabularyParallelEmbedding(weight, int(cut.indices[self.ranks.rank][0]), self.leave)

    def head(self, module: nn.Linear, name: str) -> nn.Module:
        """Divides a head's words: [.., D] -> logits of this rank's part of the vocabulary."""
        return self.column(padded(module.out_features, self.ranks.count))(module, name)

    def layer_norm(self, cut: Cut) -> Callable:
        def rule(module: nn.LayerNorm, name: str) -> nn.Module:
            weight, bias = (self.part(getattr(module, leaf), f"{name}.{leaf}", cut) for leaf in ("weight", "bias"))
            return layers.FeatureParallelLayerNorm(weight, bias, cut.size, module.eps, self.ranks)

        return rule

    def batch_norm(self, cut: Cut) -> Callable:
        def rule(module: nn.Module, name: str) -> nn.Module:
            # Each feature is normalized by itself.
            own = type(module)(len(cut.indices[self.ranks.rank]), module.eps, module.momentum, dtype=self.dtype)
            for leaf in ("weight", "bias"):
                setattr(own, leaf, self.part(getattr(module, leaf), f"{name}.{leaf}", cut))
            self.sharded.cuts |= {f"{name}.running_mean": cut, f"{name}.running_var": cut}
            return own

        return rule

    def drop(self, dim: int = 0, cut: Cut | None = None) -> Callable:
        """Returns a rule for dropout of tensors cut along `dim`; without a cut, of hidden states between pairs."""

        def rule(module: nn.Module, name: str) -> nn.Module:
            place, along = None, dim
            if cut is not None:
                place = lambda length: (int(cut.indices[self.ranks.rank][0]), cut.size)  # noqa: E731
            elif self.sequence_parallel:
                place, along = lambda length: (self.ranks.rank * length, self.ranks.count * length), SEQUENCE
            found = layers.PlacedDropout(self.dropout, len(self.sharded.dropouts), self.seed, along, place)
            self.sharded.dropouts.append(found)
            return found

        return rule

    # --- parameters

    def part(self, whole: nn.Parameter, name: str, cut: Cut) -> nn.Parameter:
        """Returns this rank's part of a parameter, empty."""
        self.sharded.cuts[name] = cut
        shape = list(whole.shape)
        shape[cut.dim] = len(cut.indices[self.ranks.rank])
        return self._parameter(whole, shape)

    def whole(self, whole: nn.Parameter) -> nn.Parameter:
        return self._parameter(whole, whole.shape)

    def _parameter(self, whole: nn.Parameter, shape) -> nn.Parameter:
        if id(whole) not in self._made:  # the whole one is kept with it, so that no other gets its id
            self._made[id(whole)] = whole, nn.Parameter(torch.empty(shape, dtype=self.dtype))
        return self._made[id(whole)][1]


def _product(module: nn.Module) -> tuple[layers.Product, int, int]:
    """Returns a linear layer's function of its weight, and the weight's dimensions of outputs and inputs."""
    if isinstance(module, nn.Linear):
        return F.linear, 0, 1
    if isinstance(module, nn.Conv2d):
        return partial(F.conv2d, stride=module.stride, padding=module.padding), 0, 1
    if isinstance(module, Conv1D):
        return layers.conv1d_product, 1, 0
    raise ValueError(f"{type(module).__name__} is no linear layer")
