"""Stores weights, gradients and optimizer states in flat tensors. Each unit (the embeddings, one block, or the final
norm) has two parts: its matrices, and its vectors."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from lowmem.core.decoder import Decoder, Unit
from lowmem.core.homes import drop_pages, host_tensor, page_lock
from lowmem.core.layout import Fate, Layout
from lowmem.core.optimizers import BLOCK, Optimizer, State, cut_state, state_layout
from lowmem.core.precision import CHUNK_ELEMENTS, chunks, join, split
from lowmem.core.ranks import Ranks
from lowmem.core.transfers import MakeTensor
from lowmem.errors import InputError
from lowmem.units import round_up

PIECE = 2**22  # most elements of a piece, which bounds the GPU memory for copies of states
WORKING, GRADIENT = "working", "gradient"


@dataclass(frozen=True)
class Placement:
    """Says where a part (such as a block's matrices) stores its tensors, by functions that allocate zeros there."""

    device: MakeTensor  # on the device
    weights: MakeTensor  # `device` itself, or in RAM
    states: MakeTensor  # `device` itself, or in RAM or on a disk
    gradients: MakeTensor | None = None  # in RAM, where gradients wait for their updates; None: they stay on the device
    on_disk: bool = False  # True: `states` allocates on a disk


@dataclass
class Piece:
    """Describes a range of parameters that one update changes: elements `start` to `stop` - 1 of `part`. A part has the
    matrices or the vectors of a unit, such as a block."""

    part: "Part"
    start: int
    stop: int
    # Both are {name: tensor}. An update copies tensors that are in RAM or on a disk to the device.
    state: State  # of the optimizer, and the weights (WORKING) if they are in RAM; copied back after the update
    fetched_only: State  # the RAM in which the gradient (GRADIENT) may wait, or {}; not copied back

    def __post_init__(self):
        # `streamed`: the optimizer's state is not on the device. `decay`: weight decay applies. `on_disk`: names of
        # tensors.
        self.streamed, self.decay = self.part.streamed, self.part.is_matrices
        self.on_disk = tuple(self.part.state) if self.part.on_disk else ()
        self.homes = self.state | self.fetched_only


class Part:
    """Holds the matrices or the vectors of a unit, such as a block. They are in flat tensors: weights `working` [n],
    the optimizer's `state` {name: tensor}, and fp32 `gradient` or None. If ranks shard matrices, n is the size of this
    rank's share."""

    def __init__(
        self, unit: tuple[int, Unit], is_matrices: bool, dtype: torch.dtype, optimizer: Optimizer, homes: Placement,
        ranks: Ranks,
    ):  # fmt: skip
        self.unit, self.is_matrices, self.optimizer, self._device = unit[0], is_matrices, optimizer, homes.device
        self.name = f"{unit[1].name} {'matrices' if is_matrices else 'vectors'}"
        self.streamed, self.on_disk = homes.states is not homes.device, homes.on_disk
        # `version` changes when an update or a checkpoint changes the weights.
        self.weights_streamed, self.version = homes.weights is not homes.device, 0
        self.ranks = ranks if is_matrices else Ranks()  # each rank stores all vectors
        self.weights_elsewhere = self.weights_streamed or self.ranks.sharing > 1
        # One NaN: the value of all parameters while their weights are not on the device, so that a use shows at once.
        self.absent = homes.device(1, dtype).fill_(torch.nan) if self.weights_elsewhere else None
        self.gradient: Tensor | None = None  # fp32 [n]; n for each rank that shares the model, until it is summed
        self.gradient_in_ram = False  # True while the gradient waits in `gradient_home`
        self._places: dict[str, tuple[int, torch.Size]] = {}
        size = 0
        for name, parameter in unit[1].parameters.items():
            if (parameter.dim() >= 2) == is_matrices:
                self._places[name] = size, parameter.shape
                size += round_up(parameter.numel(), BLOCK)  # so that no two parameters share a scale of 8-bit states
        self.elements, size = size, self.ranks.share(size)
        self.working = homes.weights(size, dtype)
        self.state = {name: homes.states(*entry) for name, entry in state_layout(optimizer, size, dtype).items()}
        # [n] fp32: RAM in which the gradient may wait for its update; None if it never does
        self.gradient_home = None if homes.gradients is None else homes.gradients(size, torch.float32)
        self.pieces = self._cut()

    def _cut(self) -> list[Piece]:
        size = self.working.numel()
        weights = {WORKING: self.working} if self.weights_streamed else {}
        fetched_only = {} if self.gradient_home is None else {GRADIENT: self.gradient_home}
        states = cut_state(self.optimizer, self.state | weights, size, PIECE)
        gradients = cut_state(self.optimizer, fetched_only, size, PIECE)
        return [
            Piece(self, start, min(start + PIECE, size), *tensors)
            for start, *tensors in zip(range(0, size, PIECE), states, gradients, strict=True)
        ]

    def move_state(self, host_tensor: MakeTensor) -> None:
        """Moves the optimizer's state into RAM, which `host_tensor` allocates; nothing if an allocation fails."""
        state = {key: host_tensor(tensor.numel(), tensor.dtype) for key, tensor in self.state.items()}
        for key, tensor in self.state.items():
            state[key].copy_(tensor)
        self.state, self.streamed = state, True
        for piece, moved in zip(self.pieces, self._cut(), strict=True):
            vars(piece).update(vars(moved))

    def view(self, flat: Tensor, name: str) -> Tensor:
        """Returns parameter `name` as a view of `flat`, a tensor with all elements of the part."""
        start, shape = self._places[name]
        return flat[start : start + shape.numel()].view(shape)

    def placeholder(self, name: str) -> Tensor:
        """Returns a tensor for the model's parameter `name`: a view of the weights. If these are on this device only
        while they are used, returns a tensor of the parameter's shape that holds only NaNs."""
        if self.weights_elsewhere:
            return self.absent.expand(self._places[name][1])
        return self.view(self.working, name)

    def gradient_of(self, name: str) -> Tensor:
        """Returns the fp32 gradient accumulator of parameter `name`, a view of `gradient`. If `gradient` is None, first
        allocates zeros for all parameters of the part."""
        if self.gradient is None:
            self.gradient = self._device(self.working.numel() * self.ranks.sharing, torch.float32)
        return self.view(self.gradient, name)

    @property
    def has_gradient(self) -> bool:
        """Returns True if a gradient is on the device or waits in RAM."""
        return self.gradient is not None or self.gradient_in_ram

    def drop_gradient(self) -> None:
        self.gradient, self.gradient_in_ram = None, False

    def write(self, name: str, master: Tensor, start: int = 0) -> None:
        """Copies fp32 weights into parameter `name`, from its element `start` on. Skips elements that other ranks
        store."""
        start += self._places[name][0] - self.ranks.place * self.working.numel()
        for chunk in chunks(master):
            first, stop = max(start, 0), min(start + chunk.numel(), self.working.numel())
            if first < stop:
                high, low = split(chunk[first - start : stop - start].to(torch.float32), self.working.dtype)
                self.working[first:stop].copy_(high)
                if low is not None:
                    home = self.state["low"][first:stop]
                    home.copy_(low)
                    drop_pages(home)
            start += chunk.numel()

    def master_chunks(self, name: str) -> Iterator[Tensor]:
        """Yields the fp32 weights of parameter `name` as consecutive flat CPU tensors of at most CHUNK_ELEMENTS
        elements."""
        halves = [self.working, self.state["low"]] if "low" in self.state else [self.working]
        start, shape = self._places[name]
        end = start + shape.numel()
        for first in range(start, end, CHUNK_ELEMENTS):
            pieces = [self.ranks.range_of(half, first, min(first + CHUNK_ELEMENTS, end)) for half in halves]
            high, *low = (piece.to("cpu", copy=True) for piece in pieces)
            drop_pages(pieces[-1])
            yield join(high, *low)

    def master(self, name: str) -> Tensor:
        return torch.cat(list(self.master_chunks(name))).view(self._places[name][1])

    def names(self) -> list[str]:
        return list(self._places)

    @property
    def places(self) -> dict[str, list[int]]:
        """Returns {parameter: [first element, *shape]}, counted in the whole part, not in this rank's share."""
        return {name: [start, *shape] for name, (start, shape) in self._places.items()}


class Store:
    """Holds all weights, gradients and optimizer states of a decoder, whose parameters become views of the weights. If
    RAM or other ranks store a parameter's weights, it holds only NaNs until they are copied to the device."""

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
        """Allocates weights and optimizer states on `device` or where `layout` says, and RAM if gradients wait there.
        `dtype`: dtype of the matrices; vectors are fp32. `host_tensor`, `disk_tensor`: allocate zeros in RAM and on a
        disk. Raises ValueError if the layout has states on a disk and `disk_tensor` is None."""
        self.ranks = ranks
        self.device, self.layout, self.optimizer, self._host_tensor = device, layout, optimizer, host_tensor
        self.states_on_gpu = min(layout.states_on_gpu, len(decoder.units))
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
        def device(entries: int, dtype: torch.dtype) -> Tensor:
            return torch.zeros(entries, dtype=dtype, device=self.device)

        layout, ram = self.layout, self._host_tensor
        on_gpu = units - 1 if layout.weights_on_gpu is None else max(layout.weights_on_gpu, 1)
        weights_in_ram, on_disk = range(on_gpu, units - 1), layout.units_on_disk(units)
        placements = {}
        for unit in range(units):
            # Copies of the first units' states would overlap least: forward needs their updates first, and their
            # gradients are final last. For the same reason the embeddings' gradients never wait in RAM.
            states = device if unit < layout.states_on_gpu else ram
            gradients = ram if layout.fate is Fate.SENT and unit >= max(layout.states_on_gpu, 1) else None
            of_matrices = (disk, gradients, True) if unit in on_disk else (states, gradients)
            placements[unit, True] = Placement(device, ram if unit in weights_in_ram else device, *of_matrices)
            placements[unit, False] = Placement(device, device, states, gradients)
        return placements

    def page_lock(self) -> bool:
        """Page-locks all tensors in RAM that are copied to or from a GPU. Returns False if CUDA refuses one of them."""
        if self.device.type != "cuda":
            return True
        # To be called after loading: page-locked tensors take all their RAM at once, and loading needs some of it.
        tensors = [part.working for part in self.parts if part.weights_streamed]
        tensors += [part.gradient_home for part in self.parts if part.gradient_home is not None]
        for part in self.parts:
            tensors += part.state.values() if part.streamed and not part.on_disk else ()
        return all([page_lock(tensor) for tensor in tensors])

    def host_buffer(self, entries: int, dtype: torch.dtype) -> Tensor:
        """Returns a new flat tensor of `entries` zeros in RAM, page-locked if possible."""
        buffer = self._host_tensor(entries, dtype)
        if self.device.type == "cuda":
            page_lock(buffer)
        return buffer

    def state_bytes(self, units: range) -> int:
        return sum(state.nbytes for part in self.parts if part.unit in units for state in part.state.values())

    def move_states_to_ram(self, states_on_gpu: int) -> bool:
        """Moves optimizer states from the device into RAM, except those of the first `states_on_gpu` units (embeddings,
        blocks, final norm). Returns False if CUDA refuses to page-lock them. No copy or update may be under way."""
        for part in self.parts:
            if part.unit >= states_on_gpu and not part.streamed:
                part.move_state(self._host_tensor)
        self.states_on_gpu = min(states_on_gpu, self.states_on_gpu)
        return self.page_lock()

    def part_of(self, name: str) -> Part:
        return self._part_of[name]

    def write(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        """Copies (name, fp32 tensor) pairs into the parameters. Several pairs with one name have consecutive ranges of
        that parameter's elements."""
        written: dict[str, int] = {}
        for name, values in weights:
            self._part_of[name].write(name, values, written.get(name, 0))
            written[name] = written.get(name, 0) + values.numel()
            del values  # so that `weights` may free it before the next

    def clear(self) -> None:
        """Sets all weights and optimizer states to zero."""
        for part in self.parts:
            for tensor in (part.working, *(state for piece in part.pieces for state in piece.state.values())):
                tensor.zero_()
                drop_pages(tensor)

    def names(self) -> list[str]:
        return [name for part in self.parts for name in part.names()]

    def masters(self) -> Iterator[tuple[str, Tensor]]:
        """Yields (name, fp32 weights) of every parameter, in the order of `names`. Large parameters come as several
        flat tensors."""
        for name, part in self._part_of.items():
            for chunk in part.master_chunks(name):
                shape = part._places[name][1]
                yield name, chunk.view(shape) if chunk.numel() == shape.numel() else chunk
