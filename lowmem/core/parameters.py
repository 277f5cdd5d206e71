"""Where every number lies: flat tensors of working weights, gradients and optimizer states.

Each unit of the decoder is stored in two parts: its matrices, in the working dtype, which decay; and its vectors (norms
and biases, 0.05% of GPT-2), in fp32, which do not. The model's parameters become views into their part's working
weights, so an update is a few operations on long vectors and a few copies, whatever the number of parameters. Each
parameter starts at a multiple of BLOCK elements, so that 8-bit states of one never share a scale with another's. A part
is updated in pieces of at most PIECE elements, which bounds the staging ring.

Bytes per parameter: 2 working (4 in fp32) on the device; 4 for the fp32 gradient while there is one, there or, until
its update, in RAM (streamed_gradients.py); the optimizer's state (optimizers.py) on the device, in RAM or, of matrices,
on a disk (disk.py). Where even the working weights are more than the device has room for, the matrices of most blocks
lie in RAM, too: for forward and backward they pass through the device (streamed_weights.py), and to be updated they
come with their state."""

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from lowmem.core.decoder import Decoder
from lowmem.core.disk import let_go
from lowmem.core.layout import Fate, Layout
from lowmem.core.offload import State, host_tensor, page_lock
from lowmem.core.optimizers import BLOCK, Optimizer, slice_state, state_layout
from lowmem.core.precision import RUN_ELEMENTS, join, runs, split

PIECE = 2**22
WORKING, GRADIENT = "working", "gradient"


@dataclass
class Piece:
    """A run of one part's elements that is updated at once. `state` holds the weights, too, as WORKING, where they come
    to the device with it. `on_disk`: what of it is neither on the device nor in RAM, by name. `fetched_only`: what
    comes to the device with the state and is not written back: the gradient, as GRADIENT, where it waits in RAM."""

    part: "Part"
    start: int
    stop: int
    decay: bool
    state: State
    streamed: bool
    on_disk: tuple[str, ...] = ()
    fetched_only: State = field(default_factory=dict)


class Part:
    """One unit's matrices or vectors: `working` [n], `state` {name: [entries]}, `gradient` [n] fp32 or None.

    `name` is unique in the store; `unit` counts the decoder's units from 0 (the embedding). Where `weights_streamed`,
    `working` lies in RAM like a streamed state; `updates` counts what was made of it since. `gradient_home` [n] fp32:
    where in RAM the gradient may wait for its update; it does so while `gradient_left`.
    """

    def __init__(
        self,
        name: str,
        unit: int,
        parameters: dict[str, nn.Parameter],
        device: torch.device,
        dtype: torch.dtype,
        optimizer: Optimizer,
        *,
        decay: bool,
        streamed: bool,
        weights_streamed: bool,
        gradient_in_ram: bool,
        host_tensor: Callable[[int, torch.dtype], Tensor],
        disk_tensor: Callable[[int, torch.dtype], Tensor] | None,
    ):
        """`disk_tensor`: what makes the tensors of the state where that is on a disk."""
        self.name, self.unit, self.device = name, unit, device
        self.weights_streamed, self.on_disk, self.updates = weights_streamed, disk_tensor is not None, 0
        # One number for all: what a parameter is while its weights are not on the device.
        self.absent = torch.full((), torch.nan, dtype=dtype, device=device) if weights_streamed else None
        self._optimizer = optimizer
        self.gradient: Tensor | None = None
        self.gradient_left = False
        self._places: dict[str, tuple[int, torch.Size]] = {}
        end = 0
        for parameter_name, parameter in parameters.items():
            self._places[parameter_name] = (end, parameter.shape)
            end += math.ceil(parameter.numel() / BLOCK) * BLOCK
        self.streamed = streamed
        self.working = host_tensor(end, dtype) if weights_streamed else torch.zeros(end, dtype=dtype, device=device)
        self.state: State = {}
        for key, (entries, kind) in state_layout(optimizer, end, dtype).items():
            if streamed:
                self.state[key] = (disk_tensor or host_tensor)(entries, kind)
            else:
                self.state[key] = torch.zeros(entries, dtype=kind, device=device)
        self.gradient_home = host_tensor(end, torch.float32) if gradient_in_ram else None
        bounds = [(start, min(start + PIECE, end)) for start in range(0, end, PIECE)]
        on_disk = tuple(self.state) if self.on_disk else ()
        self.pieces = [
            Piece(
                self, start, stop, decay, self._state_of(start, stop), streamed, on_disk,
                {} if self.gradient_home is None else {GRADIENT: self.gradient_home[start:stop]},
            )
            for start, stop in bounds
        ]  # fmt: skip

    def _state_of(self, start: int, stop: int) -> State:
        state = slice_state(self._optimizer, self.state, start, stop)
        return state | {WORKING: self.working[start:stop]} if self.weights_streamed else state

    def stream(self, host_tensor: Callable[[int, torch.dtype], Tensor]) -> None:
        """Moves the state from the device to where `host_tensor` puts it; all of it or, where that fails, nothing."""
        state = {key: host_tensor(tensor.numel(), tensor.dtype) for key, tensor in self.state.items()}
        for key, tensor in self.state.items():
            state[key].copy_(tensor)
        self.state, self.streamed = state, True
        for piece in self.pieces:
            piece.state = self._state_of(piece.start, piece.stop)
            piece.streamed = True

    def view(self, flat: Tensor, name: str) -> Tensor:
        """The elements of parameter `name` in `flat` [n], in the parameter's shape."""
        start, shape = self._places[name]
        return flat[start : start + shape.numel()].view(shape)

    def placeholder(self, name: str) -> Tensor:
        """What parameter `name` is while nobody has brought it to the device: its weights, or numbers that are none."""
        if not self.weights_streamed:
            return self.view(self.working, name)
        return self.absent.expand(self._places[name][1])

    def gradient_of(self, name: str) -> Tensor:
        """The fp32 accumulator of parameter `name`; the part's accumulators come into being with the first call."""
        if self.gradient is None:
            self.gradient = torch.zeros(self.working.numel(), dtype=torch.float32, device=self.device)
        return self.view(self.gradient, name)

    @property
    def has_gradient(self) -> bool:
        """Whether there is a gradient, on the device or in RAM."""
        return self.gradient is not None or self.gradient_left

    def drop_gradient(self) -> None:
        """There is no gradient any more."""
        self.gradient, self.gradient_left = None, False

    def write(self, name: str, master: Tensor, start: int = 0) -> None:
        """Sets parameter `name` to the fp32 tensor `master`, or its elements from `start` on to those of `master`,
        wherever that lies; a run at a time."""
        for run in runs(master):
            high, low = split(run.to(torch.float32), self.working.dtype)
            stop = start + run.numel()
            self._flat(self.working, name)[start:stop].copy_(high)
            if low is not None:
                home = self._flat(self.state["low"], name)[start:stop]
                home.copy_(low)
                let_go(home)
            start = stop

    def master_runs(self, name: str) -> Iterator[Tensor]:
        """Parameter `name` in fp32, in its order, as new flat tensors of at most RUN_ELEMENTS elements on the CPU."""
        halves = [self.working, self.state["low"]] if "low" in self.state else [self.working]
        for pieces in zip(*(self._flat(half, name).split(RUN_ELEMENTS) for half in halves), strict=True):
            high, *low = (piece.to("cpu", copy=True) for piece in pieces)
            let_go(pieces[-1])
            yield join(high, *low)

    def master(self, name: str) -> Tensor:
        """Parameter `name` in fp32, as a new tensor on the CPU."""
        return torch.cat(list(self.master_runs(name))).view(self._places[name][1])

    def _flat(self, flat: Tensor, name: str) -> Tensor:
        return self.view(flat, name).view(-1)

    def names(self) -> list[str]:
        return list(self._places)


class Store:
    """All parts of a decoder; making it gives the decoder's parameters (on the meta device until then) their storage.

    `layout` says what lies where. The first `states_on_gpu` of the decoder's units keep their state on the device:
    they are needed first in the forward pass and their gradients are final last, so streaming them would overlap least.
    The rest is streamed, and lies where `host_tensor` puts it, or `disk_tensor` that of the matrices of units on a
    disk. The first `weights_on_gpu` units (None: all) and the last one keep their working weights on the device, too;
    of the others, whose states are streamed then, the matrices are in RAM. With Fate.SENT the gradients of
    units whose states are streamed have room there, too (final_gradients.py); the embeddings' are final when no time is
    left for that."""

    def __init__(
        self,
        decoder: Decoder,
        device: torch.device,
        dtype: torch.dtype,
        optimizer: Optimizer,
        layout: Layout,
        host_tensor: Callable[[int, torch.dtype], Tensor] = host_tensor,
        disk_tensor: Callable[[int, torch.dtype], Tensor] | None = None,
    ):
        """ValueError where `layout` has states on a disk and there is no `disk_tensor`."""
        last = len(decoder.units) - 1
        weights_streamed = range(last if layout.weights_on_gpu is None else max(layout.weights_on_gpu, 1), last)
        on_disk = layout.units_on_disk(len(decoder.units))
        if on_disk and disk_tensor is None:
            raise ValueError("the layout has states on a disk, and there is nothing to make them with")
        self.layout = layout
        self.parameter_count = sum(p.numel() for p in decoder.model.parameters())
        self.states_on_gpu, self._host_tensor = min(layout.states_on_gpu, len(decoder.units)), host_tensor
        holders: dict[int, list[tuple[nn.Module, str]]] = {}  # a tied weight has several
        for module in decoder.model.modules():
            for name, parameter in module._parameters.items():
                holders.setdefault(id(parameter), []).append((module, name))
        self.parts: list[Part] = []
        for index, unit in enumerate(decoder.units):
            for kind, chosen in (
                ("matrices", {name: p for name, p in unit.parameters.items() if p.dim() >= 2}),
                ("vectors", {name: p for name, p in unit.parameters.items() if p.dim() < 2}),
            ):
                if not chosen:
                    continue
                part = Part(
                    f"{unit.name} {kind}",
                    index,
                    chosen,
                    device,
                    dtype if kind == "matrices" else torch.float32,
                    optimizer,
                    decay=kind == "matrices",
                    streamed=index >= layout.states_on_gpu,
                    weights_streamed=kind == "matrices" and index in weights_streamed,
                    gradient_in_ram=layout.fate is Fate.SENT and index >= max(layout.states_on_gpu, 1),
                    host_tensor=host_tensor,
                    disk_tensor=disk_tensor if kind == "matrices" and index in on_disk else None,
                )
                self.parts.append(part)
                for name, parameter in chosen.items():
                    unit.parameters[name] = nn.Parameter(part.placeholder(name))
                    for module, place in holders[id(parameter)]:
                        module._parameters[place] = unit.parameters[name]
        self.pieces = [piece for part in self.parts for piece in part.pieces]
        self.device = device
        self._part_of = {name: part for part in self.parts for name in part.names()}
        for module in decoder.model.modules():
            for name, buffer in module.named_buffers(recurse=False):
                module._buffers[name] = buffer.to(device)

    def page_lock(self) -> bool:
        """Page-locks what is streamed to a GPU, and says whether all of it could be. To be called when the weights are
        in place: locking makes every page resident, and until then loading needs the room."""
        if self.device.type != "cuda":
            return True
        in_ram = (part for part in self.parts if part.streamed and not part.on_disk)
        tensors = [tensor for part in in_ram for tensor in part.state.values()]
        tensors += [part.working for part in self.parts if part.weights_streamed]
        tensors += [part.gradient_home for part in self.parts if part.gradient_home is not None]
        return all([page_lock(tensor) for tensor in tensors])

    def host_buffer(self, entries: int, dtype: torch.dtype) -> Tensor:
        """Room [entries] where streamed states lie, page-locked if there is a GPU and that can be."""
        buffer = self._host_tensor(entries, dtype)
        if self.device.type == "cuda":
            page_lock(buffer)
        return buffer

    @property
    def gradient_bytes(self) -> int:
        """Of RAM for gradients."""
        return sum(part.gradient_home.nbytes for part in self.parts if part.gradient_home is not None)

    def state_bytes(self, units: range) -> int:
        """Of the optimizer's states of these units."""
        parts = (part for part in self.parts if part.unit in units)
        return sum(tensor.nbytes for part in parts for tensor in part.state.values())

    def stream(self, states_on_gpu: int) -> bool:
        """Moves the states of all units from the `states_on_gpu`-th on into RAM, and says whether they are
        page-locked. No copy and no update may be in flight."""
        for part in self.parts:
            if part.unit >= states_on_gpu and not part.streamed:
                part.stream(self._host_tensor)
        self.states_on_gpu = min(states_on_gpu, self.states_on_gpu)
        return self.page_lock()

    def part_of(self, name: str) -> Part:
        """The part that holds parameter `name`."""
        return self._part_of[name]

    def write(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        """Takes every (name, fp32 tensor) into its place. A parameter may come whole or as runs of its elements, one
        after the other (load.py); each tensor may be freed once the next is asked for."""
        written: dict[str, int] = {}
        for name, values in weights:
            self._part_of[name].write(name, values, written.get(name, 0))
            written[name] = written.get(name, 0) + values.numel()
            del values

    def clear(self) -> None:
        """Weights and states are zeros again, as when they were made."""
        for part in self.parts:
            part.working.zero_()
            for piece in part.pieces:
                for tensor in piece.state.values():
                    tensor.zero_()
                    let_go(tensor)

    def names(self) -> list[str]:
        """Of all parameters, part by part."""
        return [name for part in self.parts for name in part.names()]

    def masters(self) -> Iterator[tuple[str, Tensor]]:
        """Every parameter's name and fp32 tensor, in the order of `names`; one of more than RUN_ELEMENTS elements as
        flat runs, the name with each."""
        for name in self.names():
            part = self._part_of[name]
            whole = part.view(part.working, name)
            for run in part.master_runs(name):
                yield name, run.view(whole.shape) if run.numel() == whole.numel() else run
