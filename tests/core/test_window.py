"""The window of states: on the CPU for real, and CUDA transfers against streams that run in any order that is allowed.

The second part needs no GPU. A stand-in for `torch.cuda` queues every copy on its stream and runs the queues in random
order; only events hold a queue back. Sooner or later, it breaks every order that the events do not enforce.
"""

import contextlib
import gc
import random
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from lowmem.core import transfers
from lowmem.core.deferred_updates import Updates
from lowmem.core.homes import host_tensor, page_lock
from lowmem.core.optimizers import Hyperparameters
from lowmem.core.transfers import CudaTransfers, Lane, Transfers
from lowmem.core.window import AHEAD, Slot, StateWindow
from lowmem.cudasim.recorder import Recorder

CPU = torch.device("cpu")


@dataclass
class Piece:
    state: dict[str, torch.Tensor]
    streamed: bool
    on_disk: tuple[str, ...] = ()

    @property
    def homes(self) -> dict[str, torch.Tensor]:
        return self.state


def make_pieces(sizes: list[int], resident: tuple[int, ...] = ()) -> list[Piece]:
    """Piece i holds i+1 everywhere; two tensors of different types and lengths, as an optimizer's states are."""
    return [
        Piece(
            {"m": torch.full((size,), float(index + 1)), "low": torch.full((2 * size,), index + 1, dtype=torch.int16)},
            streamed=index not in resident,
        )
        for index, size in enumerate(sizes)
    ]


class RecordedTransfers(Transfers):
    """Copies at once, and writes down the order: ("fetch", slot), ("wait", slot), ("write", slot)."""

    def __init__(self):
        self.events: list[tuple[str, int]] = []
        self._slots: dict[int, int] = {}  # by address, numbered as they are seen

    def copy(self, lane, pairs, *after):
        super().copy(lane, pairs, *after)
        address = pairs[0][lane is Lane.STATES_OUT].data_ptr()
        slot = self._slots.setdefault(address, len(self._slots))
        self.events.append(("write" if lane is Lane.STATES_OUT else "fetch", slot))
        return slot

    def wait(self, lane, *events):
        if lane is Lane.UPDATES:
            self.events += [("wait", event) for event in events]


def window_of(pieces: list[Piece], device: torch.device = CPU) -> StateWindow:
    return StateWindow(Transfers(), device, pieces)


def recorded(pieces: list[Piece]) -> tuple[StateWindow, RecordedTransfers]:
    made = RecordedTransfers()
    return StateWindow(made, CPU, pieces), made


def pass_over(window: StateWindow, pieces: list[Piece]):
    """Each piece with its state, which is given back when the next one is asked for."""
    window.begin(pieces)
    for piece in pieces:
        yield piece, window.take(piece)
        window.give_back(piece)


# --- the window ---


@pytest.mark.parametrize("resident", [(), (0,), (0, 1, 2), (1, 3, 4, 6), (6,), tuple(range(7))])
@pytest.mark.parametrize("sizes", [[4] * 7, [1, 5, 2, 7, 3, 7, 1]])
def test_every_piece_comes_in_order_with_its_own_state_and_changes_are_kept(sizes, resident):
    pieces = make_pieces(sizes, resident)
    window = window_of(pieces)
    for number in range(3):  # pass after pass over the same slots
        seen = []
        for piece, state in pass_over(window, pieces):
            index = len(seen)
            seen.append(piece)
            assert state.keys() == {"m", "low"}
            assert state["m"].tolist() == [index + 1 + 10 * number] * sizes[index]
            assert state["low"].tolist() == [index + 1 + number] * 2 * sizes[index]
            state["m"] += 10
            state["low"] += 1
        assert [id(piece) for piece in seen] == [id(piece) for piece in pieces]
    window.synchronize()
    for index, piece in enumerate(pieces):
        assert piece.state["m"].tolist() == [index + 31] * sizes[index]
        assert piece.state["low"].tolist() == [index + 4] * 2 * sizes[index]


def test_pieces_may_differ_in_what_they_keep():
    """Vectors are fp32 and have no low halves; matrices have."""
    pieces = make_pieces([4, 6, 2, 5, 3])
    for piece in pieces[::2]:
        del piece.state["low"]
    window = window_of(pieces)
    for _ in range(2):
        for piece, state in pass_over(window, pieces):
            assert state.keys() == piece.state.keys()
            for tensor in state.values():
                tensor += 1
    assert [piece.state["m"].unique().tolist() for piece in pieces] == [[3], [4], [5], [6], [7]]
    assert [piece.state["low"].unique().tolist() for piece in pieces[1::2]] == [[4], [6]]


def test_a_resident_piece_is_handed_out_as_it_is_and_a_streamed_one_from_a_slot():
    pieces = make_pieces([4, 4], resident=(0,))
    for piece, state in pass_over(window_of(pieces), pieces):
        same = [state[name].data_ptr() == piece.state[name].data_ptr() for name in state]
        assert same == [not piece.streamed] * 2


def test_at_most_ahead_plus_1_pieces_are_on_the_way_and_a_slot_is_written_back_before_it_is_filled_again():
    pieces = make_pieces([3] * 8, resident=(2,))
    window, copies = recorded(pieces)
    in_flight: set[int] = set()
    most = 0
    for _ in pass_over(window, pieces):
        pass
    for kind, slot in copies.events:
        if kind == "fetch":
            assert slot not in in_flight
            in_flight.add(slot)
        elif kind == "wait":
            assert slot in in_flight
        else:
            in_flight.remove(slot)
        most = max(most, len(in_flight))
    assert most == AHEAD + 1 and not in_flight
    assert sum(kind == "fetch" for kind, _ in copies.events) == 7


def test_two_pieces_are_fetched_ahead_before_the_first_is_handed_out():
    pieces = make_pieces([3] * 5)
    window, copies = recorded(pieces)
    states = pass_over(window, pieces)
    next(states)
    assert copies.events == [("fetch", 0), ("fetch", 1), ("fetch", 2), ("wait", 0)]
    next(states)
    assert copies.events[4:] == [("write", 0), ("fetch", 0), ("wait", 1)]


def test_streamed_pieces_are_fetched_while_resident_ones_are_in_use():
    pieces = make_pieces([3] * 5, resident=(0, 1))
    window, copies = recorded(pieces)
    next(pass_over(window, pieces))
    assert copies.events == [("fetch", 0), ("fetch", 1), ("fetch", 2)]


def test_stopping_early_leaves_the_rest_untouched():
    pieces = make_pieces([3, 4, 5, 6, 7])
    window = window_of(pieces)
    states = pass_over(window, pieces)
    for _ in range(3):  # asking for the third piece is what keeps the second
        _, state = next(states)
        state["m"].fill_(-1)
    states.close()
    assert [piece.state["m"][0].item() for piece in pieces] == [-1, -1, 3, 4, 5]
    assert [state["m"][0].item() for _, state in pass_over(window, pieces)] == [-1, -1, 3, 4, 5]


def window_bytes(pieces: list[Piece]) -> int:
    """What a window for them allocates."""
    with Recorder() as recorder:
        window_of(pieces, torch.device("meta"))
        return recorder.tape.peak_bytes()


def test_slots_hold_the_largest_streamed_piece_and_nothing_more():
    assert window_bytes(make_pieces([3, 9, 100, 5], resident=(2,))) == (AHEAD + 1) * (9 * 4 + 18 * 2)


@pytest.mark.parametrize("pieces", [[], make_pieces([5, 6], resident=(0, 1))])
def test_without_streamed_pieces_there_are_no_slots(pieces):
    assert window_bytes(pieces) == 0
    assert [piece for piece, _ in pass_over(window_of(pieces), pieces)] == pieces


def test_pieces_without_any_state_pass_too():
    """SGD over fp32 weights keeps nothing."""
    pieces = [Piece({}, streamed=True) for _ in range(5)]
    assert [state for _, state in pass_over(window_of(pieces), pieces)] == [{}] * 5


# --- buffers in RAM ---


@pytest.mark.parametrize("dtype", [torch.float32, torch.int16, torch.uint8])
@pytest.mark.parametrize("entries", [0, 1, 4096, 12_345])
def test_a_host_tensor_is_zero_and_of_exactly_the_size_asked_for(entries, dtype):
    tensor = host_tensor(entries, dtype)
    assert tensor.shape == (entries,) and tensor.dtype is dtype and tensor.device == CPU
    assert tensor.count_nonzero() == 0
    assert tensor.untyped_storage().nbytes() == max(entries * dtype.itemsize, 1)


def test_a_host_tensor_keeps_its_memory_alive_and_its_own():
    tensors = [host_tensor(1000, torch.int16) for _ in range(3)]
    for index, tensor in enumerate(tensors):
        tensor.fill_(index + 1)
    view = tensors[1][500:]
    del tensors[1]
    gc.collect()
    assert view.tolist() == [2] * 500
    assert [tensor.unique().tolist() for tensor in tensors] == [[1], [3]]
    assert all(tensor.data_ptr() % 4096 == 0 for tensor in tensors)  # what registration with CUDA wants


def mapping_flags(address: int) -> list[str]:
    """The kernel's flags of the mapping that begins at `address`; "dc" is: not copied on fork."""
    within = False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if line.startswith("VmFlags:"):
            if within:
                return line.split()[1:]
        elif "-" in line.split()[0]:
            first, _, last = line.split()[0].partition("-")
            within = int(first, 16) <= address < int(last, 16)
    raise AssertionError(f"nothing is mapped at {address:#x}")


@pytest.mark.parametrize(("answer", "expected"), [(0, True), (1, False)])
def test_a_page_lock_is_given_back_with_the_memory_and_a_refusal_leaves_a_usable_tensor(monkeypatch, answer, expected):
    asked, given_back = [], []

    class Runtime:
        @staticmethod
        def cudaHostRegister(address, size_bytes, flags):
            asked.append((address, size_bytes, flags))
            return answer

        cudaHostUnregister = given_back.append

    monkeypatch.setattr(torch.cuda, "cudart", Runtime)
    tensor = host_tensor(1000, torch.float32)
    checks = []

    def next_kernel(*_, device):
        checks.append(device)
        raise RuntimeError("CUDA error: out of memory")

    monkeypatch.setattr(torch, "zeros", next_kernel)
    address = tensor.data_ptr()
    assert page_lock(tensor) is expected
    assert asked == [(address, 4000, 0)]
    assert ("dc" in mapping_flags(address)) is expected, "a forked process must not share what CUDA writes to"
    assert checks == ([] if expected else ["cuda"]), "a refusal must not be left for an innocent kernel to report"
    assert tensor.fill_(2.0).sum() == 2000
    view = tensor[10:]
    del tensor
    gc.collect()
    assert given_back == [] and view.sum() == 1980
    del view
    gc.collect()
    assert given_back == ([address] if expected else [])


# --- the CUDA transfers, on streams of our own ---


class Event:
    def __init__(self, stream: "Stream"):
        self.recorded = stream, stream.issued  # this many operations of the stream must be done


class Stream:
    """A queue of operations; each is (what it waits for: stream and number of its operations, what it does)."""

    def __init__(self, device=None):
        self.queue: list = []
        self.issued = 0
        self.done = 0
        streams.append(self)

    def enqueue(self, action, needs=None):
        self.queue.append((needs, action))
        self.issued += 1

    def record_event(self):
        return Event(self)

    def wait_event(self, event):
        self.enqueue(lambda: None, event.recorded)

    def ready(self) -> bool:
        return bool(self.queue) and (self.queue[0][0] is None or self.queue[0][0][0].done >= self.queue[0][0][1])

    def run_one(self):
        _, action = self.queue.pop(0)
        action()
        self.done += 1

    def synchronize(self):
        while self.queue:
            run_one_of([stream for stream in streams if stream.ready()])


class Cell:
    """A tensor whose copies are queued on the current stream; one number stands for its elements."""

    def __init__(self, value=None):
        self.value = value

    def numel(self):
        return 1

    def __getitem__(self, _):
        return self

    def copy_(self, other, non_blocking=False):
        assert non_blocking

        def action():
            self.value = other.value

        current[-1].enqueue(action)


streams: list[Stream] = []
current: list[Stream] = []
chance = random.Random()


def run_one_of(ready: list[Stream]) -> None:
    assert ready, "every stream waits for another"
    chance.choice(ready).run_one()


def drain_some() -> None:
    """Between two calls of the host the device may have done nothing, something or everything."""
    for _ in range(chance.choice([0, 0, 1, 3, 10, 100])):
        ready = [stream for stream in streams if stream.ready()]
        if not ready:
            return
        run_one_of(ready)


class FakeCuda:
    Stream = Stream

    @staticmethod
    def current_stream(device=None):
        return current[-1]

    @staticmethod
    @contextlib.contextmanager
    def stream(stream):
        current.append(stream)
        yield
        current.pop()


def update_on_fake_device(seed: int, passes: int, kind=CudaTransfers, beside: bool = False) -> list[list]:
    """`passes` passes over 8 streamed pieces; every update appends its pass number. Returns what lies in RAM."""
    chance.seed(seed)
    streams.clear()
    current[:] = [Stream()]
    pieces = [Piece({"m": Cell([index])}, streamed=True) for index in range(8)]
    lanes = kind(CPU, beside, host_tensor)
    window = StateWindow(lanes, CPU, [])
    window._window.slots = [Slot({"m": Cell()}) for _ in range(AHEAD + 1)]
    for number in range(passes):
        for index, (_, state) in enumerate(pass_over(window, pieces)):

            def action(cell=state["m"], mark=(index, number)):
                cell.value = [*cell.value, mark]

            with lanes.updating():
                current[-1].enqueue(action)
            drain_some()
    window.synchronize()
    return [piece.state["m"].value for piece in pieces]


@pytest.fixture
def fake_cuda(monkeypatch):
    monkeypatch.setattr(transfers.torch, "cuda", FakeCuda)


def test_cuda_transfers_give_every_update_its_state_in_whatever_order_streams_run(fake_cuda):
    expected = [[index, *((index, number) for number in range(3))] for index in range(8)]
    for seed in range(100):
        assert update_on_fake_device(seed, passes=3, beside=seed % 2 == 0) == expected


class NoWaitForWriteBack(CudaTransfers):
    def copy(self, lane, pairs, *after):
        return super().copy(lane, pairs, *(() if lane is Lane.STATES_IN else after))


class NoWaitForFetch(CudaTransfers):
    def wait(self, lane, *events):
        super().wait(lane, *(() if lane is Lane.UPDATES else events))


class NoWaitForUpdate(CudaTransfers):
    def mark(self, lane):
        return None if lane is Lane.UPDATES else super().mark(lane)


@pytest.mark.parametrize("broken", [NoWaitForWriteBack, NoWaitForFetch, NoWaitForUpdate])
def test_without_any_one_of_its_waits_the_fake_device_finds_the_race(fake_cuda, broken):
    """The test above can fail: each wait in turn is left out."""
    expected = update_on_fake_device(0, passes=3)
    wrong = 0
    for seed in range(100):
        try:
            wrong += update_on_fake_device(seed, passes=3, kind=broken) != expected
        except TypeError:  # an update of a slot that nothing was fetched into yet
            wrong += 1
    assert wrong > 0


@dataclass
class Part:
    """A unit with one parameter, of one piece."""

    unit: int
    gradient: Cell | None = None
    pieces: list = field(default_factory=list)
    updates: int = 0

    @property
    def has_gradient(self) -> bool:
        return self.gradient is not None

    def drop_gradient(self) -> None:
        self.gradient = None


def train_on_fake_device(seed: int, downwards: bool, kind=CudaTransfers) -> tuple[list, list]:
    """Three steps of four units, whose gradient in step n is 10**n. What the forward passes read of the weights, and
    what the weights are in the end. A gradient's memory is used for something else once its unit is updated."""
    chance.seed(seed)
    streams.clear()
    current[:] = [Stream()]
    units, read = 4, []
    weights, gradients = [Cell(0) for _ in range(units)], [Cell(0) for _ in range(units)]
    parts = [Part(unit) for unit in range(units)]
    pieces = [Piece({"m": Cell([])}, streamed=unit != 1) for unit in range(units)]
    for part, piece in zip(parts, pieces, strict=True):
        piece.part, part.pieces = part, [piece]

    def compute(cell: Cell, value) -> None:
        current[-1].enqueue(lambda: setattr(cell, "value", value))

    def update(piece, state, hyper) -> None:
        weight, gradient = weights[piece.part.unit], piece.part.gradient
        current[-1].enqueue(lambda: setattr(weight, "value", weight.value + gradient.value))

    store = SimpleNamespace(device=CPU, pieces=[], parts=parts)
    lanes = kind(CPU, concurrent=True, host_buffer=host_tensor)
    updates = Updates(store, units, Hyperparameters(0.0, 0.0, update=0), lanes, SimpleNamespace(update=update))
    store.pieces, updates.states._window.slots = pieces, [Slot({"m": Cell()}) for _ in range(AHEAD + 1)]
    for number in range(3):
        if downwards:
            updates.begin(1.0, 1.0, downwards=True)
        for unit in reversed(range(units)):
            parts[unit].gradient = gradients[unit]
            compute(gradients[unit], 10**number)
            drain_some()
            if downwards:
                updates.run(units - unit)
                compute(gradients[unit], -1)
        if not downwards:
            updates.begin(1.0, 1.0, downwards=False)
        for unit in range(units):
            updates.run(unit + 1 if not downwards else units)
            current[-1].enqueue(lambda unit=unit: read.append(weights[unit].value))
            if not downwards:
                compute(gradients[unit], -1)
            drain_some()
    updates.flush()
    current[-1].synchronize()
    return read, [weight.value for weight in weights]


@pytest.mark.parametrize("downwards", [False, True])
def test_updates_beside_what_computes_are_there_when_a_weight_is_read(fake_cuda, downwards):
    expected = [1] * 4 + [11] * 4 + [111] * 4, [111] * 4
    for seed in range(100):
        assert train_on_fake_device(seed, downwards) == expected


class NoWaitForGradients(CudaTransfers):
    def mark(self, lane):
        return None if lane is Lane.COMPUTE else super().mark(lane)


class NoHold(CudaTransfers):
    def wait(self, lane, *events):
        super().wait(lane, *(() if lane is Lane.COMPUTE else events))


@pytest.mark.parametrize("downwards", [False, True])
@pytest.mark.parametrize("broken", [NoWaitForGradients, NoHold])
def test_without_either_of_these_waits_a_weight_is_read_too_early_or_updated_too_early(fake_cuda, broken, downwards):
    expected = train_on_fake_device(0, downwards)
    assert any(train_on_fake_device(seed, downwards, broken) != expected for seed in range(100))
