"""Stores working weights, gradients and optimizer states in flat tensors.

Each unit of the decoder (the embeddings, one block, or the final norm) has two parts. One has the unit's matrices in
the working dtype, with weight decay. The other has the unit's vectors (normalization weights and biases) in fp32,
without weight decay. The model's parameters are views of their part's working weights, so an update is a few operations
on long vectors. Each parameter starts at a multiple of BLOCK elements, so that no two parameters share a scale of 8-bit
states. A part is updated in pieces of at most PIECE elements, which bounds the GPU memory for copies of states
(window.py).

Bytes per parameter: 2 working (4 in fp32), 4 for the fp32 gradient while there is one, and the optimizer's state
(optimizers.py). Each kind of number is stored on the GPU, in RAM or on a disk, as chosen for each part.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from lowmem.core.decoder import Decoder, Unit
from lowmem.core.homes import drop_pages, host_tensor, page_lock
from lowmem.core.layout import Fate, Layout
from lowmem.core.optimizers import BLOCK, Optimizer, State, cut_state, state_layout
from lowmem.core.precision import RUN_ELEMENTS, join, runs, split
from lowmem.core.ranks import Ranks
from lowmem.core.transfers import MakeTensor
from lowmem.errors import InputError
from lowmem.units import round_up

PIECE = 2**22
WORKING, GRADIENT = "working", "gradient"


@dataclass(frozen=True)
class Placement:
    """Says where the weights, states and gradients of one part (a unit's matrices or vectors) are stored. Each field
    but `on_disk` is a function (entries, dtype) that returns a tensor of zeros.

    `device` allocates on the device. `weights` and `states` allocate the weights and the optimizer states. Each of
    these two is `device` itself if its tensors are stored on the device. `gradients` allocates RAM in which gradients
    wait for their updates; None if gradients stay on the device. `on_disk`: True if the states are on a disk.
    """

    device: MakeTensor
    weights: MakeTensor
    states: MakeTensor
    gradients: MakeTensor | None = None
    on_disk: bool = False


@dataclass
class Piece:
    """Holds the elements `start` to `stop` - 1 of one part (a unit's matrices or vectors), which are updated together.

    `state`: {name: tensor} of the optimizer's state, and of the weights (key WORKING) if they are in RAM. An update
    copies these tensors to the device and back. `fetched_only`: {GRADIENT: the gradient's tensor in RAM} if the
    gradient may wait in RAM, else {}. An update copies this tensor to the device only. `homes`: `state` and
    `fetched_only` in one dict. `on_disk`: names of the tensors on a disk. `streamed`: True if the optimizer's state is
    not stored on the device. `decay`: True if weight decay applies.
    """

    part: "Part"
    start: int
    stop: int
    state: State
    fetched_only: State

    def __post_init__(self):
        self.streamed, self.decay = self.part.streamed, self.part.is_matrices
        self.on_disk = tuple(self.part.state) if self.part.on_disk else ()
        self.homes = self.state | self.fetched_only


class Part:
    """Holds the matrices or the vectors of one unit (such as a block). These are weights `working` [n], optimizer's
    `state` {name: [entries]}, and `gradient` [n] fp32 or None.

    `unit`: number of the unit; 0 is the embeddings. `version`: a number that changes when an update or a checkpoint
    changes the weights. `gradient_home` [n] fp32: RAM in which the gradient may wait for its update; None if it never
    does. `gradient_in_ram`: True while the gradient waits there. `elements`: number of elements of all parameters, with
    padding. If the model is sharded over several `ranks`, n is the size of this rank's share. Then `gradient` has n
    elements for each of these ranks, until it is summed over the ranks.
    """

    def __init__(
        self, unit: tuple[int, Unit], is_matrices: bool, dtype: torch.dtype, optimizer: Optimizer, homes: Placement,
        ranks: Ranks,
    ):  # fmt: skip
        self.unit, self.is_matrices, self.optimizer, self._device = unit[0], is_matrices, optimizer, homes.device
        self.name = f"{unit[1].name} {'matrices' if is_matrices else 'vectors'}"
        self.streamed, self.on_disk = homes.states is not homes.device, homes.on_disk
        self.weights_streamed, self.version = homes.weights is not homes.device, 0
        self.ranks = ranks if is_matrices else Ranks()
        self.weights_elsewhere = self.weights_streamed or self.ranks.sharing > 1
        # One NaN: the value of all parameters while their weights are not on the device.
        self.absent = homes.device(1, dtype).fill_(torch.nan) if self.weights_elsewhere else None
        self.gradient: Tensor | None = None
        self.gradient_in_ram = False
        self._places: dict[str, tuple[int, torch.Size]] = {}
        size = 0
        for name, parameter in unit[1].parameters.items():
            if (parameter.dim() >= 2) == is_matrices:
                self._places[name] = size, parameter.shape
                size += round_up(parameter.numel(), BLOCK)
        self.elements, size = size, self.ranks.share(size)
        self.working = homes.weights(size, dtype)
        self.state = {name: homes.states(*entry) for name, entry in state_layout(optimizer, size, dtype).items()}
        self.gradient_home = None if homes.gradients is None else homes.gradients(size, torch.float32)
        self.pieces = self._cut()

    def _cut(self) -> list[Piece]:
        """Returns the pieces (ranges of elements that are updated at once). Each piece has views of the tensors that
        store its elements."""
        size = self.working.numel()
        weights = {WORKING: self.working} if self.weights_streamed else {}
        fetched_only = {} if self.gradient_home is None else {GRADIENT: self.gradient_home}
        states = cut_state(self.optimizer, self.state | weights, size, PIECE)
        gradients = cut_state(self.optimizer, fetched_only, size, PIECE)
        return [
            Piece(self, start, min(start + PIECE, size), *tensors)
            for start, *tensors in zip(range(0, size, PIECE), states, gradients, strict=True)
        ]

    def stream(self, host_tensor: MakeTensor) -> None:
        """Moves the optimizer's state from the device into tensors that `host_tensor` allocates. If an allocation
        fails, moves nothing."""
        state = {key: host_tensor(tensor.numel(), tensor.dtype) for key, tensor in self.state.items()}
        for key, tensor in self.state.items():
            state[key].copy_(tensor)
        self.state, self.streamed = state, True
        for piece, moved in zip(self.pieces, self._cut(), strict=True):
            vars(piece).update(vars(moved))

    def view(self, flat: Tensor, name: str) -> Tensor:
        """Returns a view of the elements of parameter `name`, in the parameter's shape. `flat`: a flat tensor [n] of
        this part."""
        start, shape = self._places[name]
        return flat[start : start + shape.numel()].view(shape)

    def placeholder(self, name: str) -> Tensor:
        """Returns a tensor for the model's parameter `name`, in the parameter's shape. Its values are the weights, or
        NaN if this device does not always store all weights of this part."""
        if self.weights_elsewhere:
            return self.absent.expand(self._places[name][1])
        return self.view(self.working, name)

    def gradient_of(self, name: str) -> Tensor:
        """Returns the fp32 gradient accumulator of parameter `name`, in the parameter's shape. The first call allocates
        zeros for all parameters of this part (a unit's matrices or vectors)."""
        if self.gradient is None:
            self.gradient = self._device(self.working.numel() * self.ranks.sharing, torch.float32)
        return self.view(self.gradient, name)

    @property
    def has_gradient(self) -> bool:
        """Returns True if this part has a gradient, on the device or in RAM."""
        return self.gradient is not None or self.gradient_in_ram

    def drop_gradient(self) -> None:
        self.gradient, self.gradient_in_ram = None, False

    def write(self, name: str, master: Tensor, start: int = 0) -> None:
        """Copies `master`, fp32 weights, into parameter `name` from the parameter's element `start` on. Skips elements
        that other ranks store. If the working weights have 16 bits, splits each number into a working and a low half
        (precision.py)."""
        start += self._places[name][0] - self.ranks.place * self.working.numel()
        for run in runs(master):
            first, stop = max(start, 0), min(start + run.numel(), self.working.numel())
            if first < stop:
                high, low = split(run[first - start : stop - start].to(torch.float32), self.working.dtype)
                self.working[first:stop].copy_(high)
                if low is not None:
                    home = self.state["low"][first:stop]
                    home.copy_(low)
                    drop_pages(home)
            start += run.numel()

    def master_runs(self, name: str) -> Iterator[Tensor]:
        """Yields the fp32 weights of parameter `name`, as consecutive flat tensors of at most RUN_ELEMENTS elements.
        These tensors are copies on the CPU."""
        halves = [self.working, self.state["low"]] if "low" in self.state else [self.working]
        start, shape = self._places[name]
        end = start + shape.numel()
        for first in range(start, end, RUN_ELEMENTS):
            pieces = [self.ranks.range_of(half, first, min(first + RUN_ELEMENTS, end)) for half in halves]
            high, *low = (piece.to("cpu", copy=True) for piece in pieces)
            drop_pages(pieces[-1])
            yield join(high, *low)

    def master(self, name: str) -> Tensor:
        """Returns the fp32 weights of parameter `name`, as a new tensor on the CPU."""
        return torch.cat(list(self.master_runs(name))).view(self._places[name][1])

    def names(self) -> list[str]:
        return list(self._places)

    @property
    def places(self) -> dict[str, list[int]]:
        """Returns {name: [first element, *shape]} of all parameters. An element's index counts in the flat tensor that
        all ranks' shares make together."""
        return {name: [start, *shape] for name, (start, shape) in self._places.items()}


class Store:
    """Holds all weights, gradients and optimizer states of a decoder, in parts (a unit's matrices or vectors). The
    constructor allocates these tensors, and makes the decoder's parameters views of the weights.

    A unit is the embeddings, one block or the final norm. If only some units' states are on the device, these are the
    first units. Copies of their states would overlap least with computation: the next forward pass needs the first
    units' updates first, and backward finishes the first units' gradients last. For the same reason the embeddings'
    gradients never wait in RAM. The embeddings, the last unit and all vectors always have their weights on the device.
    """

    def __init__(
        self,
        decoder: Decoder,
        device: torch.device,
        dtype: torch.dtype,
        optimizer: Optimizer,
        layout: Layout,
        host_tensor: MakeTensor = host_tensor,
        disk_tensor: MakeTensor | None = None,
        ranks: Ranks = Ranks(),  # noqa: B008  it does nothing
    ):
        """Allocates all tensors on `device`, or where `layout` says. `dtype`: the matrices' working dtype.
        `host_tensor`, `disk_tensor`: functions that allocate in RAM and on a disk. `ranks`: the processes that train
        this model together; by default, this process alone. Raises ValueError if `layout` has states on a disk and
        `disk_tensor` is None."""
        self.ranks = ranks
        self.device, self.layout, self.optimizer, self._host_tensor = device, layout, optimizer, host_tensor
        self.states_on_gpu = min(layout.states_on_gpu, len(decoder.units))
        self.parameter_count = sum(p.numel() for p in decoder.model.parameters())
        if disk_tensor is None and layout.units_on_disk(len(decoder.units)):
            raise ValueError("the layout has states on a disk, and there is nothing to make them with")
        holders: dict[int, list[tuple[nn.Module, str]]] = {}  # a tied weight has several holders
        for module in decoder.model.modules():
            for name, parameter in module._parameters.items():
                holders.setdefault(id(parameter), []).append((module, name))
            for name, buffer in module._buffers.items():
                module._buffers[name] = None if buffer is None else buffer.to(device)
        self.parts: list[Part] = []
        for (unit, is_matrices), homes in self._placements(len(decoder.units), disk_tensor).items():
            parameters = decoder.units[unit].parameters
            kind = dtype if is_matrices else torch.float32
            part = Part((unit, decoder.units[unit]), is_matrices, kind, optimizer, homes, ranks)
            for name in part.names():
                before, parameters[name] = parameters[name], nn.Parameter(part.placeholder(name))
                for module, place in holders[id(before)]:
                    module._parameters[place] = parameters[name]
            self.parts += [part] if part.pieces else []
        self.pieces = [piece for part in self.parts for piece in part.pieces]
        self._part_of = {name: part for part in self.parts for name in part.names()}

    def __reduce__(self):  # for copies and pickles: their parameters would not be views
        raise InputError("a loaded model cannot be copied or pickled: save it with model.save, or with lowmem.export")

    def _placements(self, units: int, disk: MakeTensor | None) -> dict[tuple[int, bool], Placement]:
        """Returns {(a unit's number, True for its matrices or False for its vectors): Placement}. A unit is mostly a
        block. `units`: number of units. `disk` allocates on the disk; it may be None if the layout has no states
        there."""

        def device(entries: int, dtype: torch.dtype) -> Tensor:
            return torch.zeros(entries, dtype=dtype, device=self.device)

        layout, ram = self.layout, self._host_tensor
        on_gpu = units - 1 if layout.weights_on_gpu is None else max(layout.weights_on_gpu, 1)
        weights_in_ram, on_disk = range(on_gpu, units - 1), layout.units_on_disk(units)
        placements = {}
        for unit in range(units):
            states = device if unit < layout.states_on_gpu else ram
            gradients = ram if layout.fate is Fate.SENT and unit >= max(layout.states_on_gpu, 1) else None
            of_matrices = (disk, gradients, True) if unit in on_disk else (states, gradients)
            placements[unit, True] = Placement(device, ram if unit in weights_in_ram else device, *of_matrices)
            placements[unit, False] = Placement(device, device, states, gradients)
        return placements

    def page_lock(self) -> bool:
        """Page-locks all tensors that are copied between RAM and a GPU. Returns True if all could be locked. Must be
        called after the weights are loaded: page-locked tensors take all their RAM at once, and loading needs some of
        that RAM."""
        if self.device.type != "cuda":
            return True
        tensors = [part.working for part in self.parts if part.weights_streamed]
        tensors += [part.gradient_home for part in self.parts if part.gradient_home is not None]
        for part in self.parts:
            tensors += part.state.values() if part.streamed and not part.on_disk else ()
        return all([page_lock(tensor) for tensor in tensors])

    def host_buffer(self, entries: int, dtype: torch.dtype) -> Tensor:
        """Returns a new tensor [entries] in RAM, page-locked if there is a GPU and CUDA does not refuse."""
        buffer = self._host_tensor(entries, dtype)
        if self.device.type == "cuda":
            page_lock(buffer)
        return buffer

    @property
    def gradient_bytes(self) -> int:
        """Returns the number of bytes of RAM that are reserved for gradients."""
        return sum(part.gradient_home.nbytes for part in self.parts if part.gradient_home is not None)

    def state_bytes(self, units: range) -> int:
        """Returns the size in bytes of the optimizer states of the units (such as blocks) whose numbers are in
        `units`."""
        return sum(state.nbytes for part in self.parts if part.unit in units for state in part.state.values())

    def stream(self, states_on_gpu: int) -> bool:
        """Moves optimizer states into RAM, all but those of the first `states_on_gpu` units (such as blocks). Returns
        False if CUDA refuses to page-lock some tensors in RAM. No copy and no update may be under way."""
        for part in self.parts:
            if part.unit >= states_on_gpu and not part.streamed:
                part.stream(self._host_tensor)
        self.states_on_gpu = min(states_on_gpu, self.states_on_gpu)
        return self.page_lock()

    def part_of(self, name: str) -> Part:
        """Returns the part (a unit's matrices or vectors) that holds parameter `name`."""
        return self._part_of[name]

    def write(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        """Copies every (name, fp32 tensor) of `weights` to where that parameter is stored. A parameter may come whole
        or as consecutive ranges of its elements (load.py). `weights` may free a tensor when it is asked for the
        next."""
        written: dict[str, int] = {}
        for name, values in weights:
            self._part_of[name].write(name, values, written.get(name, 0))
            written[name] = written.get(name, 0) + values.numel()
            del values

    def clear(self) -> None:
        """Sets all weights and optimizer states to zero, as after allocation."""
        for part in self.parts:
            for tensor in (part.working, *(state for piece in part.pieces for state in piece.state.values())):
                tensor.zero_()
                drop_pages(tensor)

    def names(self) -> list[str]:
        """Returns the names of all parameters, in the order in which they are stored."""
        return [name for part in self.parts for name in part.names()]

    def masters(self) -> Iterator[tuple[str, Tensor]]:
        """Yields the name and the fp32 weights of every parameter, in the order of `names`. A parameter of more than
        RUN_ELEMENTS elements comes as several flat tensors, each with the parameter's name."""
        for name, part in self._part_of.items():
            for run in part.master_runs(name):
                shape = part._places[name][1]
                yield name, run.view(shape) if run.numel() == shape.numel() else run
