"""Places a model's weights while it runs: all on the GPU, in managed memory, or on the host and copied."""

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from experiments.unified_memory import library
from experiments.unified_memory.schedule import Schedule
from experiments.unified_memory.shapes import Pieces, hooked
from lowmem.core.homes import host_tensor, page_lock

RESIDENT, MANAGED, EXPLICIT = "resident", "managed", "explicit"
MOST_MOVES = 10_000  # that are noted


@dataclass(frozen=True)
class Move:
    """A requested move, "fetch" or "evict", of a piece before an access, on stream number `stream`."""

    access: int
    kind: str
    piece: int
    size_bytes: int
    stream: int


class Placement:
    """All weights, and with `backward` their gradients, in one stretch of the device's memory, in the order of the
    pieces (an embedding or a block, for example). Subclasses move pieces before each access of `schedule`; this class
    moves none."""

    def __init__(self, model: nn.Module, pieces: Pieces, dtype: torch.dtype, device: torch.device, backward: bool):
        self.moves: list[Move] = []  # what was asked for first, in order
        self._number = self._fetches = 0  # of the access that comes next, over all passes; so far
        self.model, self.pieces, self.device = model, pieces, device
        sizes = pieces.sizes * (2 if backward else 1)
        begins = [sum(sizes[:number]) for number in range(len(sizes))]
        self.memory = self._memory(sum(sizes))
        self.parts = [self.memory[begin : begin + size] for begin, size in zip(begins, sizes, strict=True)]
        modules = dict(model.named_modules())
        for number, names in enumerate(pieces.names):
            for name in names:
                whole = model.get_parameter(name)
                parameter = nn.Parameter(self._view(number, name, whole.shape, dtype), requires_grad=backward)
                if backward:
                    parameter.grad = self._view(len(pieces.sizes) + number, name, whole.shape, dtype).zero_()
                for module in modules.values():  # a tied weight has several names
                    for leaf, other in list(module.named_parameters(recurse=False)):
                        if other is whole:
                            setattr(module, leaf, parameter)
        for module in modules.values():
            for leaf, buffer in list(module.named_buffers(recurse=False)):
                setattr(module, leaf, buffer.to(device))

    @torch.no_grad()
    def load(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        """Loads whole tensors, or flat runs of them, by name."""
        written: dict[str, int] = {}
        for name, run in weights:
            flat, begin = self.model.get_parameter(name).view(-1), written.get(name, 0)
            flat[begin : begin + run.numel()].copy_(run.view(-1))
            written[name] = begin + run.numel()

    def begin(self) -> None:
        """Moves the kept pieces to the GPU."""

    def _memory(self, size_bytes: int) -> Tensor:
        return torch.empty(size_bytes, dtype=torch.uint8, device=self.device)

    def _due(self, place: int) -> None:
        if place != self._number % len(self.schedule.accesses):
            raise RuntimeError(f"access {place} came where {self._number % len(self.schedule.accesses)} was due")

    def _note(self, kind: str, piece: int, stream: int) -> None:
        self._fetches += kind == "fetch"
        if len(self.moves) < MOST_MOVES:
            self.moves.append(Move(self._number, kind, piece, self.parts[piece].nbytes, stream))

    def _view(self, piece: int, name: str, shape: torch.Size, dtype: torch.dtype) -> Tensor:
        begin = self.pieces.begins[name]
        view = self.parts[piece][begin : begin + shape.numel() * dtype.itemsize].view(dtype).view(shape)
        return view.data  # which autograd takes for no view: an update of one gradient is none of all weights


class ManagedPlacement(Placement):
    """Weights in managed memory, whose pages prefer the host and are mapped by the GPU. `prefetch`: pieces come before
    their access; else by page faults, without any advice. `driven`: the driver moves pages, without a schedule."""

    def __init__(self, *args, schedule: Schedule, prefetch: bool, streams: int = 1, driven: bool = False):
        self.schedule, self.prefetch, self.driven = schedule, prefetch, driven
        super().__init__(*args)
        self._inward = [torch.cuda.Stream() for _ in range(streams)]
        self._outward = torch.cuda.Stream()
        self._fetched: dict[int, torch.cuda.Event] = {}
        last = len(self.pieces.forward) - 1
        for number, (forward, backward) in enumerate(hooked(self.model)):
            forward.register_forward_pre_hook(lambda *_, number=number: self._access(number))
            if len(schedule.accesses) > len(self.pieces.forward):
                place = 2 * last + 1 - number
                backward.register_full_backward_pre_hook(lambda *_, place=place: self._access(place))

    def begin(self) -> None:
        torch.cuda.synchronize()
        for part in self.parts:
            if not self.prefetch:
                library.advise(part, library.PREFERRED_LOCATION + 1)
                library.advise(part, library.ACCESSED_BY + 1, torch.cuda.current_device())
            library.prefetch(part, library.HOST, self._outward)
        self._outward.synchronize()
        for piece in sorted(self.schedule.kept) if not self.driven else ():
            self._fetch(piece)
        torch.cuda.synchronize()

    def _memory(self, size_bytes: int) -> Tensor:
        memory = library.managed_tensor(size_bytes)
        library.advise(memory, library.PREFERRED_LOCATION)  # so that loading fills no more of the GPU than the limit
        library.advise(memory, library.ACCESSED_BY, torch.cuda.current_device())
        return memory

    def _access(self, place: int) -> None:
        self._due(place)
        # Pieces leave before others come: the driver evicts none by itself, and the GPU reads those on the host.
        leaving, coming = self.schedule.before(self._number) if not self.driven else ([], [])
        computing = torch.cuda.current_stream()
        if leaving:
            self._outward.wait_event(computing.record_event())
            for piece in leaving:
                library.prefetch(self.parts[piece], library.HOST, self._outward)
                self._note("evict", piece, len(self._inward))
            gone = self._outward.record_event()
            for stream in self._inward:
                stream.wait_event(gone)
        if self.prefetch:
            for piece in coming:
                self._fetch(piece)
            for piece in self.schedule.accesses[place]:
                if piece in self._fetched:
                    computing.wait_event(self._fetched.pop(piece))
        elif leaving:
            computing.wait_event(gone)  # or faults would bring in what there is no room for
        self._number += 1

    def _fetch(self, piece: int) -> None:
        turn = self._fetches % len(self._inward)
        library.prefetch(self.parts[piece], torch.cuda.current_device(), self._inward[turn])
        self._fetched[piece] = self._inward[turn].record_event()
        self._note("fetch", piece, turn)


class ExplicitPlacement(Placement):
    """Weights on the host, page-locked if possible. Kept pieces have a place on the GPU, the others are copied into
    slots. Only for forwards: autograd would find other weights in a slot."""

    def __init__(self, *args, schedule: Schedule):
        self.schedule = schedule
        super().__init__(*args)
        self._free = [torch.empty(size, dtype=torch.uint8, device="cuda") for size in schedule.slots]
        self._slots: dict[int, Tensor] = {}
        self._copying = torch.cuda.Stream()
        self._copied: dict[int, torch.cuda.Event] = {}
        for number, (module, _) in enumerate(hooked(self.model)):
            module.register_forward_pre_hook(lambda *_, number=number: self._access(number))

    def begin(self) -> None:
        for piece in self.schedule.kept:
            self._slots[piece] = torch.empty_like(self.parts[piece], device="cuda")
            self._copy(piece)
        torch.cuda.synchronize()

    def _memory(self, size_bytes: int) -> Tensor:
        memory = host_tensor(size_bytes, torch.uint8)  # PyTorch's own would round up to a power of two
        page_lock(memory)
        return memory

    def _access(self, place: int) -> None:
        self._due(place)
        leaving, coming = self.schedule.before(self._number)
        self._copying.wait_event(torch.cuda.current_stream().record_event())
        self._free += [self._slots.pop(piece) for piece in leaving]
        for piece in coming:
            fitting = next(slot for slot in self._free if slot.nbytes == self.parts[piece].nbytes)
            self._free = [slot for slot in self._free if slot is not fitting]
            self._slots[piece] = fitting
            self._copy(piece)
        for piece in self.schedule.accesses[place]:
            torch.cuda.current_stream().wait_event(self._copied[piece])
        self._number += 1

    def _copy(self, piece: int) -> None:
        slot, part = self._slots[piece], self.parts[piece]
        with torch.cuda.stream(self._copying):
            slot[: part.nbytes].copy_(part, non_blocking=True)
            self._copied[piece] = self._copying.record_event()
        self._note("fetch", piece, 0)
        for name in self.pieces.names[piece]:
            parameter = self.model.get_parameter(name)
            begin = self.pieces.begins[name]
            parameter.data = slot[begin : begin + parameter.nbytes].view(parameter.dtype).view(parameter.shape)
