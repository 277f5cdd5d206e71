"""One stage of a pipeline: its layers, weights and gradients, and the graphs of micro-batches in flight.

A backward may be cut in two, with the same bits: gradients of the input and of modules' outputs, then of the weights.
"""

from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn
from torch.func import functional_call

from experiments.harness.randomness import seed_of


class Layers(nn.Module):
    """Layers `first`, `first` + 1, ... of a model, with random numbers that depend on step, micro-batch and layer."""

    def __init__(self, layers: Iterable[nn.Module], first: int, seed: int):
        super().__init__()
        self.layers = nn.ModuleList(layers)
        self.first, self.seed = first, seed

    def forward(self, x: Tensor, step: int, micro_batch: int) -> Tensor:
        for place, layer in enumerate(self.layers):
            torch.manual_seed(seed_of(self.seed, step, micro_batch, self.first + place))
            x = layer(x)
        return x


@dataclass
class _InFlight:
    """A micro-batch between forward and backward. `graph` is None if forward kept only its input."""

    x: Tensor
    version: int
    step: int
    graph: Tensor | None = None
    parameters: list[Tensor] = field(default_factory=list)
    outputs: list[tuple[Tensor, list[Tensor]]] = field(default_factory=list)  # of modules, with their own parameters
    gradients: list[Tensor | None] = field(default_factory=list)  # of these outputs


class Stage:
    """A stage with its optimizer, made by `optimizer_of(parameters)`. `recompute`: forward keeps only its input, and
    backward repeats it. `stashing`: weights are updated while micro-batches are in flight."""

    def __init__(
        self,
        layers: Layers,
        optimizer_of: Callable[[list[nn.Parameter]], torch.optim.Optimizer],
        recompute: bool = False,
        stashing: bool = False,
    ):
        self.layers, self.recompute, self.stashing = layers, recompute, stashing
        self.names = [name for name, _ in layers.named_parameters()]
        self.parameters = list(layers.parameters())
        self.optimizer = optimizer_of(self.parameters) if self.parameters else None
        self.gradients: list[Tensor | None] = [None] * len(self.parameters)
        self.updates = 0
        self.versions: dict[int, list[Tensor]] = {0: self._published()}
        self.most_versions = 1  # that were held at once
        self._begun_at = 0  # updates, when the actions began whose versions are counted from 0
        self._still_named: Counter[int] = Counter()  # by version, the forwards to come
        self._in_flight: dict[int, _InFlight] = {}
        self._owners = [module for module in layers.modules() if any(True for _ in module.parameters(recurse=False))]

    def begin(self, named: Counter[int]) -> None:
        """Prepares for a schedule. `named`: how many forwards will use each version of the weights."""
        self._begun_at = self.updates
        self._still_named = Counter({self.updates + version: count for version, count in named.items()})

    def forward(
        self, micro_batch: int, x: Tensor, step: int, version: int, loss_of=None, split: bool = False
    ) -> Tensor:
        """Returns the stage's output, or with `loss_of` the loss; without a graph."""
        version += self._begun_at
        held = _InFlight(x, version, step)
        if self.recompute:
            with torch.no_grad():
                output = self._run(held, micro_batch, loss_of)
        else:
            output = held.graph = self._graph(held, micro_batch, loss_of, split)
        self._in_flight[micro_batch] = held
        self._still_named[version] -= 1
        self._forget()
        return output.detach()

    def backward(self, micro_batch: int, gradient: Tensor | None, loss_of=None) -> Tensor | None:
        """Returns the gradient of the input, None of the first stage, and adds those of the weights to their sums."""
        held = self._ready(micro_batch, loss_of, split=False)
        del self._in_flight[micro_batch]
        wanted = [held.x] * held.x.requires_grad + held.parameters
        found = list(torch.autograd.grad(held.graph, wanted, gradient, allow_unused=True))
        of_input = found.pop(0) if held.x.requires_grad else None
        self._add(dict(enumerate(found)))
        return of_input

    def input_gradient(self, micro_batch: int, gradient: Tensor | None, loss_of=None) -> Tensor | None:
        """Returns the gradient of the input, and keeps those of the modules' outputs for `weight_gradient`."""
        held = self._ready(micro_batch, loss_of, split=True)
        wanted = [held.x] * held.x.requires_grad + [output for output, _ in held.outputs]
        found = list(torch.autograd.grad(held.graph, wanted, gradient, retain_graph=True, allow_unused=True))
        of_input = found.pop(0) if held.x.requires_grad else None
        held.gradients = found
        return of_input

    def weight_gradient(self, micro_batch: int) -> None:
        """Adds the gradients of the weights to their sums."""
        held = self._in_flight.pop(micro_batch)
        place_of = {id(parameter): place for place, parameter in enumerate(held.parameters)}
        sums: dict[int, Tensor] = {}
        for (output, owned), gradient in zip(held.outputs, held.gradients, strict=True):
            if gradient is None:
                continue
            # autograd goes no further back than to the weights, so no product is computed twice.
            found = torch.autograd.grad(output, owned, gradient, retain_graph=True, allow_unused=True)
            for parameter, one in zip(owned, found, strict=True):
                if one is not None:
                    place = place_of[id(parameter)]
                    sums[place] = sums[place] + one if place in sums else one
        self._add(sums)

    def update(self) -> None:
        """Updates the weights by the summed gradients, as a new version."""
        for parameter, gradient in zip(self.parameters, self.gradients, strict=True):
            parameter.grad = gradient
        if self.optimizer is not None:
            self.optimizer.step()
            self.optimizer.zero_grad(set_to_none=True)
        self.gradients = [None] * len(self.parameters)
        previous = self.updates
        self.updates += 1
        # Stashed weights are copied: graphs in flight keep those that they were made with.
        self.versions[self.updates] = self._published() if self.stashing else self.versions.pop(previous)
        self._forget()

    def _forget(self) -> None:
        """Drops versions that no forward will use; graphs hold their own."""
        for version in [version for version in self.versions if version != self.updates]:
            if not self._still_named[version]:
                del self.versions[version]
        held = self.versions.keys() | {held.version for held in self._in_flight.values()}
        self.most_versions = max(self.most_versions, len(held))

    def _published(self) -> list[Tensor]:
        if not self.stashing:
            return self.parameters
        return [parameter.detach().clone().requires_grad_() for parameter in self.parameters]

    def _ready(self, micro_batch: int, loss_of, split: bool) -> _InFlight:
        held = self._in_flight[micro_batch]
        if held.graph is None:
            held.graph = self._graph(held, micro_batch, loss_of, split, again=True)
        return held

    def _graph(self, held: _InFlight, micro_batch: int, loss_of, split: bool, again: bool = False) -> Tensor:
        if self.layers.first:  # nobody asks for the gradient of a sample
            held.x.requires_grad_()
        hooks = []
        if split:
            for module in self._owners:
                hooks.append(module.register_forward_hook(lambda module, _, output: self._keep(held, module, output)))
        try:
            return self._run(held, micro_batch, loss_of, again)
        finally:
            for hook in hooks:
                hook.remove()

    def _keep(self, held: _InFlight, module: nn.Module, output: Tensor) -> None:
        held.outputs.append((output, list(module.parameters(recurse=False))))

    def _run(self, held: _InFlight, micro_batch: int, loss_of, again: bool = False) -> Tensor:
        """Runs the layers. `again`: running statistics, as of batch norm, have counted this micro-batch already."""
        if not again:
            held.parameters = self.versions[held.version]
        state = dict(zip(self.names, held.parameters, strict=True))
        if again:
            state |= {name: buffer.clone() for name, buffer in self.layers.named_buffers()}
        output = functional_call(self.layers, state, (held.x, held.step, micro_batch))
        return output if loss_of is None else loss_of(output)

    def _add(self, found: dict[int, Tensor | None]) -> None:
        for place, gradient in found.items():
            if gradient is not None:
                known = self.gradients[place]
                self.gradients[place] = gradient if known is None else known.add_(gradient)
