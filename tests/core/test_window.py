"""The window of states, and buffers in RAM. Orders of streams: tests/stream_order."""

import gc
from dataclasses import dataclass

import pytest
import torch

from lowmem.core.homes import host_tensor, page_lock
from lowmem.core.transfers import Lane, Transfers
from lowmem.core.window import AHEAD, StateWindow
from lowmem.cudasim.recorder import Recorder
from runs import mapping_of

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
    assert ("dc" in mapping_of(address)["VmFlags"].split()) is expected, (
        "a forked process must not share what CUDA writes to"
    )
    assert checks == ([] if expected else ["cuda"]), "a refusal must not be left for an innocent kernel to report"
    assert tensor.fill_(2.0).sum() == 2000
    view = tensor[10:]
    del tensor
    gc.collect()
    assert given_back == [] and view.sum() == 1980
    del view
    gc.collect()
    assert given_back == ([address] if expected else [])
