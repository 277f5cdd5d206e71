"""The update kernels, run on the CPU by Triton's interpreter, and compiled for cards that are not here."""

import dataclasses
import importlib
import re
import sys
from contextlib import contextmanager

import pytest
import torch
from test_step import PLAIN, make_batches, train

import lowmem
from lowmem import adam, fused
from lowmem.adam import Hyperparameters, get_optimizer, state_layout
from lowmem.cards import CARDS
from lowmem.precision import join, split
from lowmem.replay import _traffic_of_8_bit
from lowmem.simulate import gpu_target
from lowmem.trace import Recorder

triton = pytest.importorskip("triton")
CPU = torch.device("cpu")
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
N = 3 * 1024 + 7  # the last program has fewer


@contextmanager
def imported_anew(interpret: str):
    """lowmem.kernels; what Triton does with a kernel is decided when that is defined."""

    def forget():
        sys.modules.pop("lowmem.kernels", None)
        vars(lowmem).pop("kernels", None)

    forget()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRITON_INTERPRET", interpret)
        yield importlib.import_module("lowmem.kernels")
    forget()


@pytest.fixture
def interpreted():
    with imported_anew("1") as kernels:
        yield kernels


@pytest.fixture
def compiled():
    with imported_anew("0") as kernels:
        yield kernels


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_halves_are_split_and_joined_bit_for_bit_as_by_precision_py(interpreted, dtype):
    bits = torch.randint(-(2**31), 2**31, (50_000,), generator=torch.Generator().manual_seed(0)).to(torch.int32)
    master = bits.view(torch.float32)
    if dtype is torch.float16:
        master = master[master.abs() < 65520]
    working, low = split(master, dtype)
    high_found, low_found = torch.empty_like(working), torch.empty_like(low)
    interpreted.split(high_found, low_found, master)
    joined = torch.empty_like(master)
    interpreted.join(working, low, joined)
    assert torch.equal(high_found.view(torch.int16), working.view(torch.int16))
    assert torch.equal(low_found, low)
    assert torch.equal(joined.view(torch.int32), join(working, low).view(torch.int32))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", ["adamw", "adamw8bit", "sgd"])
def test_an_update_is_within_a_few_units_of_the_last_place_of_the_eager_lines(interpreted, name, dtype):
    """The eager lines fuse products and sums where the CPU's kernels do, the interpreter never: a unit in each moment,
    and what a moment's unit makes of a step."""
    size = 2**16 + 256
    ulps = fused.largest_ulps(CPU, name, dtype, size=size)
    moments = {name: value for name, value in ulps.items() if name != "weight"}
    assert ulps["weight"] <= fused.MOST_ULPS and all(value <= 1 for value in moments.values())


@pytest.mark.parametrize("name", ["adamw", "sgd"])
def test_the_comparison_sees_a_wrong_rule(name):
    def late(optimizer, working, state, gradient, hyper, decay):
        wrong = Hyperparameters(hyper.learning_rate * (1 + 1e-4), hyper.weight_decay, hyper.update + 1)
        adam.update(optimizer, working, state, gradient, wrong, decay)

    assert fused.largest_ulps(CPU, name, torch.bfloat16, rule=late)["weight"] > fused.MOST_ULPS


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", ["adamw", "sgd"])
def test_pieces_updated_on_their_own_are_the_whole_bit_for_bit(interpreted, name, dtype):
    optimizer, cut = get_optimizer(name), 1280

    def fresh():
        torch.manual_seed(0)
        working, low = split(torch.randn(N), dtype)
        state = {key: torch.zeros(n, dtype=kind) for key, (n, kind) in state_layout(optimizer, N, dtype).items()}
        if low is not None:
            state["low"].copy_(low)
        return working, state, torch.randn(N)

    hyper = Hyperparameters(1e-3, 0.1, 1, 0.5)
    working, state, gradient = fresh()
    fused.update(optimizer, working, state, gradient, hyper, True)
    pieces, states, gradient = fresh()
    for start, stop in ((0, cut), (cut, N)):
        part = adam.slice_state(optimizer, states, start, stop)
        fused.update(optimizer, pieces[start:stop], part, gradient[start:stop], hyper, True)
    assert torch.equal(working, pieces)
    assert all(torch.equal(state[key], states[key]) for key in state)


@pytest.mark.parametrize(("precision", "optimizer"), [("bf16", "adamw"), ("fp16", "sgd"), ("bf16", "adamw8bit")])
def test_with_kernels_too_placement_and_schedule_change_no_bit(interpreted, precision, optimizer):
    batches = make_batches(2)
    kind = {"precision": precision, "optimizer": optimizer, "update": fused.update}
    plain = train(batches, **kind, **PLAIN)
    assert train(batches, **kind, resident_units=2, group=2, segment_blocks=2).differences(plain) == []


def test_a_run_with_kernels_stays_with_one_without(interpreted):
    batches = make_batches(2)
    fast, slow = (train(batches, precision="bf16", update=update) for update in (fused.update, None))
    assert fast.losses == pytest.approx(slow.losses, rel=1e-5)
    for name, weight in slow.weights.items():  # three steps of 3e-3, and what the first one's rounding does to the next
        assert (fast.weights[name] - weight).abs().max() < 1e-4, name


def simulated_update(name: str, update, size: int) -> tuple[int, float]:
    """Peak bytes of one update on a card, the weights', the state's and the gradient's included, and its seconds."""
    optimizer = get_optimizer(name)
    if name == "adamw8bit":
        optimizer = dataclasses.replace(optimizer, rule=_traffic_of_8_bit)
    layout = state_layout(optimizer, size, torch.bfloat16).items()
    recorder = Recorder(gpu_target(CARDS["rtx3090"]).machine)
    with torch.device("meta"), recorder:
        working, gradient = torch.empty(size, dtype=torch.bfloat16), torch.empty(size)
        state = {key: torch.empty(entries, dtype=dtype) for key, (entries, dtype) in layout}
        began = recorder.clock.host
        update(optimizer, working, state, gradient, Hyperparameters(1e-3, 0.1, 1), True)
    return recorder.tape.peak_bytes(), recorder.clock.gpu - began


@pytest.mark.parametrize(("name", "temporaries"), [("adamw", 0), ("sgd", 0), ("adamw8bit", 4)])
def test_a_simulated_update_takes_no_temporaries_but_the_masters_of_8_bit_states(name, temporaries):
    size = 2**20
    states = sum(
        entries * dtype.itemsize for entries, dtype in state_layout(get_optimizer(name), size, torch.bfloat16).values()
    )
    fast, slow = (simulated_update(name, rule, size)[0] for rule in (fused.update, adam.update))
    there = 6 * size + states
    assert fast == there + temporaries * size
    assert slow >= there + 8 * size


def test_a_simulated_update_takes_the_time_of_reading_and_writing_every_number_once():
    card, size = CARDS["rtx3090"], 2**26
    at_memory_speed = 28 * size / (card.memory_bytes_per_second * card.memory_share)
    assert simulated_update("adamw", fused.update, size)[1] == pytest.approx(at_memory_speed, rel=0.01)
    assert simulated_update("adamw", adam.update, size)[1] > 4 * at_memory_speed


@pytest.mark.parametrize("capability", [75, 80, 86, 90])
@pytest.mark.parametrize("kind", [0, 1, 2], ids=["fp32", "bf16", "fp16"])
def test_the_kernel_compiles_for_cards_and_reads_16_bytes_at_a_time_without_spilling(compiled, capability, kind):
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    kernel = compiled._adamw
    weights = "*i16" if kind else "*fp32"
    special = {"working_at": weights, "low_at": weights, "n": "i32", "KIND": "constexpr", "BLOCK": "constexpr"}
    signature = {name: special.get(name, "*fp32" if name.endswith("_at") else "fp32") for name in kernel.arg_names}
    aligned = {(place,): [["tt.divisibility", 16]] for place, name in enumerate(kernel.arg_names)
               if name.endswith("_at") or name == "n"}  # fmt: skip
    source = ASTSource(kernel, signature, {"KIND": kind, "BLOCK": compiled.BLOCK}, aligned)
    ptx = triton.compile(source, target=GPUTarget("cuda", capability, 32), options={"num_warps": 4}).asm["ptx"]
    accesses = re.findall(r"(?:ld|st)\.(global|local)(\S*)", ptx)
    assert accesses and all(space == "global" and ".v4.b32" in width for space, width in accesses), accesses


def test_without_a_gpu_the_kernels_are_expected_of_turing_and_later():
    assert fused.expected((7, 5)) and fused.expected((9, 0))
    assert not fused.expected((6, 1)) and not fused.expected((7, 0))


def test_where_triton_does_not_compile_the_reason_is_a_sentence(compiled, monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
    assert "Triton does not compile here" in fused.why_not.__wrapped__(CPU)  # for this "card", which is none


def test_kernels_that_agree_are_used_and_halves_that_differ_are_found(interpreted, monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
    assert fused.why_not.__wrapped__(CPU) is None
    monkeypatch.setattr(interpreted, "join", lambda working, low, master: master.copy_(working))
    assert fused.why_not.__wrapped__(CPU) == "a kernel splits or joins weights otherwise"


def test_8_bit_updates_stay_on_the_stream_that_computes():
    assert fused.may_run_beside(fused.update, get_optimizer("adamw"))
    assert not fused.may_run_beside(fused.update, get_optimizer("adamw8bit"))
    assert not fused.may_run_beside(None, get_optimizer("adamw"))


def test_a_kernel_that_computes_something_else_is_not_used(monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
    monkeypatch.setattr(fused, "halves_agree", lambda *_: True)
    monkeypatch.setattr(fused, "largest_ulps", lambda *_, **__: {"weight": 100.0})
    assert fused.why_not.__wrapped__(CPU) == "a kernel is 100 units of the last place off"
