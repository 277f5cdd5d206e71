"""The fused operators, run on the CPU by Triton's interpreter, and compiled for cards that are not here."""

import copy
import dataclasses
import importlib
import itertools
import math
import os
import re
import subprocess
import sys
import tempfile
from contextlib import contextmanager, nullcontext
from functools import partial
from unittest.mock import Mock

import pytest
import torch
from torch import nn
from transformers.pytorch_utils import Conv1D

import lowmem.core.kernels
from experiments.harness.trainings import make_step
from lowmem.core import optimizers
from lowmem.core import step as core_step
from lowmem.core.kernels import Kernels, fused
from lowmem.core.layers import cast_explicitly, register_add_product
from lowmem.core.loss import linear_cross_entropy
from lowmem.core.optimizers import Hyperparameters, get_optimizer, state_layout
from lowmem.core.precision import join, split
from lowmem.cudasim.gpus import CARDS
from lowmem.cudasim.recorder import Recorder
from lowmem.models.build import make_decoder
from lowmem.planning.replay import _traffic_of_8_bit
from lowmem.planning.simulated_step import gpu_target, record_step
from reference import tiny_config, tiny_model
from stand_in.interpreted import language_interpreted
from tests.core.test_loss import CAPPED, PLAINLY, SCALED, chunked, errors, operands
from tests.core.test_loss import plain as plain_loss
from tests.core.test_products import Counting
from tests.core.test_step import PLAIN, make_batches, train
from tests.stream_order.arrangements import with_plain_kernels

triton = pytest.importorskip("triton")

CPU = torch.device("cpu")
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
N = 3 * 1024 + 7  # the last program has fewer


KERNELS = ("triton_kernels", "layer_kernels")


@contextmanager
def imported_anew(interpret: str):
    """The modules of KERNELS in lowmem.core.kernels; what Triton does with a kernel is decided when it is defined."""

    def forget():
        for name in KERNELS:
            sys.modules.pop(f"lowmem.core.kernels.{name}", None)
            vars(lowmem.core.kernels).pop(name, None)

    forget()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRITON_INTERPRET", interpret)
        with language_interpreted() if interpret == "1" else nullcontext():
            yield [importlib.import_module(f"lowmem.core.kernels.{name}") for name in KERNELS]
    forget()


def kernels_for(interpret: str, place: int):
    """A fixture: one of KERNELS."""

    @pytest.fixture
    def kernels():
        with imported_anew(interpret) as modules:
            yield modules[place]

    return kernels


interpreted, interpreted_layers = kernels_for("1", 0), kernels_for("1", 1)
compiled, compiled_layers = kernels_for("0", 0), kernels_for("0", 1)


@pytest.mark.quick(1)
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


@pytest.mark.quick(3)
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
        optimizers.update(optimizer, working, state, gradient, wrong, decay)

    assert fused.largest_ulps(CPU, name, torch.bfloat16, rule=late)["weight"] > fused.MOST_ULPS


@pytest.mark.quick(2)
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
    cuts = pieces.split(cut), optimizers.cut_state(optimizer, states, N, cut), gradient.split(cut)
    for piece, part, of_piece in zip(*cuts, strict=True):
        fused.update(optimizer, piece, part, of_piece, hyper, True)
    assert torch.equal(working, pieces)
    assert all(torch.equal(state[key], states[key]) for key in state)


@pytest.mark.quick(1)
@pytest.mark.parametrize(
    ("family", "precision", "optimizer", "arrangement"),
    [
        ("gpt2", "bf16", "adamw", {"states_on_gpu": 2, "group": 2, "segment_blocks": 2}),
        ("gpt2", "fp16", "sgd", {"group": 1, "segment_blocks": 2, "kept": 99}),
        ("llama", "bf16", "adamw8bit", {"states_on_gpu": 0, "kept": 5}),
    ],
)
def test_with_kernels_too_placement_and_schedule_change_no_bit(interpreted, family, precision, optimizer, arrangement):
    batches = make_batches(2, batch=2, seq=6)
    kind = {"family": family, "precision": precision, "optimizer": optimizer, "micro_batch": 1}
    kind["fused_kernels"] = Kernels.ALL
    plain = train(batches, **kind, **PLAIN)
    assert train(batches, **kind, **arrangement).differences(plain) == []


LEFT_OUT = [kernels for kernels in fused.TRIALS if kernels != Kernels.ALL]


@pytest.mark.quick(1)
@pytest.mark.parametrize("family", ["gpt2", "llama"])
def test_a_step_with_kernels_runs_them_for_every_matrix_loss_and_update(interpreted, family):
    """Two micro-batches, one of them at a time; four products a block for GPT-2, seven for Llama."""
    batches, kind = make_batches(1, batch=2, seq=8), {"family": family, "precision": "bf16", "micro_batch": 1}
    with Counting() as counting:
        outcome = train(batches, **kind, fused_kernels=Kernels.ALL, **PLAIN)
    blocks, ours = len(outcome.step.segments), torch.ops.lowmem
    products = {"gpt2": 4, "llama": 7}[family] * blocks
    assert counting.operations[ours.cross_entropy.default] == 2
    assert counting.operations[ours.add_product.default] == 2 * (products + 2), (
        "and the head, in two: 8 does not divide 97 words"
    )
    rotations = counting.operations[ours.rotate.default]
    expected = {"gpt2": 0, "llama": 7 * blocks + 3}[family]
    assert rotations == expected, "forward, again, backward; once for norms; in one block for three others (build.py)"
    assert counting.operations[ours.adamw.default] >= 2 * blocks
    with Counting() as counting:
        train(batches, **kind, **PLAIN)
    assert {function for function in counting.operations if function.namespace == "lowmem"} == {ours.add_rows.default}


def test_a_step_without_some_kernels_runs_only_the_others():
    ours = {
        Kernels.SUMS: {"drop"}, Kernels.NORMS: {"normalize", "normalize_backward"},
        Kernels.ACTIVATIONS: {"gated", "gated_backward"}, Kernels.ROTARY: {"rotate"},
    }  # fmt: skip
    for left_out in (Kernels.NONE, *LEFT_OUT):
        ran = set()
        for family in ("gpt2", "llama"):
            with with_plain_kernels(), Counting() as counting:
                train(make_batches(1), family=family, precision="bf16", fused_kernels=Kernels.ALL & ~left_out, **PLAIN)
            ran |= {
                function._overloadpacket.__name__ for function in counting.operations if function.namespace == "lowmem"
            }
        for kernel, operators in ours.items():
            assert operators <= ran if kernel not in left_out else not operators & ran, (left_out, kernel)


@pytest.mark.exhaustive
@pytest.mark.parametrize("family", ["gpt2", "llama"])
def test_a_run_with_kernels_stays_as_near_to_fp32_as_one_without(interpreted, family):
    """By the gradients of all parameters, as the first moments after a step: ||kernels - fp32|| is 0.90 to 1.03 times
    ||without - fp32|| for each of four seeds, GPT-2 and Llama. (Losses and norms of a few steps are few numbers: their
    distances differ by a factor of two from seed to seed.) Without dropout, whose masks the kernels draw themselves.
    Also without some kernels."""
    batches = make_batches(1)

    def moments(**kind):
        states = train(batches, family=family, dropout=0.0, **kind).states
        return torch.cat([tensor for name, tensor in states.items() if name.endswith(" m")])

    truth = moments()
    without, *distances = (
        (moments(precision="bf16", fused_kernels=kernels) - truth).norm()
        for kernels in (Kernels.NONE, Kernels.ALL, *(Kernels.ALL & ~each for each in LEFT_OUT))
    )
    assert all(0 < distance <= 1.1 * without < 0.02 * truth.norm() for distance in distances)


LOSSES = [(False, PLAINLY), (True, PLAINLY), (False, CAPPED), (True, CAPPED), (False, SCALED)]


@pytest.mark.quick(3)
@pytest.mark.parametrize(
    ("words", "chunk", "with_bias", "function", "dtype"),
    [  # both types by turns
        (*size, *loss, DTYPES[1 + (row + column) % 2])
        for row, size in enumerate([(97, 37), (97, 16), (4096, 37), (8200, 20)])
        for column, loss in enumerate(LOSSES)
    ],
)
def test_the_loss_in_one_kernel_is_no_further_from_the_truth_than_line_by_line(
    interpreted, words, chunk, with_bias, function, dtype
):
    hidden, weight, labels, bias = operands(0, V=words, dtype=dtype)
    bias = bias if with_bias else None
    truth = plain_loss(hidden, weight, labels, bias, 0.37, torch.float64, function)
    how = {"chunk_tokens": chunk, "function": function}
    one, lines = (
        errors(chunked(hidden, weight, labels, bias, 0.37, fused=fused, **how), truth) for fused in (True, False)
    )
    for name, error in one.items():  # a bias is summed of gradients that are rounded, as in autocast
        assert error <= (4 if name == "bias" else 1.1) * lines[name] + 1e-6, (name, error, lines[name])
    loss, nothing = linear_cross_entropy(hidden, weight, labels, bias=bias, fused=True, **how)
    assert nothing is None
    assert loss == chunked(hidden, weight, labels, bias, 0.37, fused=True, **how).loss


def test_what_lies_behind_the_logits_in_their_rows_counts_for_nothing(interpreted):
    logits = torch.randn(3, 97).to(torch.bfloat16)
    found = []
    for behind in (0.0, torch.inf, torch.nan):
        room = torch.full((3, 112), behind, dtype=torch.bfloat16)
        room[:, :97] = logits
        losses = torch.empty(3)
        torch.ops.lowmem.cross_entropy(room[:, :97], None, torch.tensor([96, -100, 0]), losses, 1.0)
        found.append((losses, room[:, :97]))
    assert all(torch.equal(a, b) for other in found[1:] for a, b in zip(found[0], other, strict=True))
    assert found[0][0][1] == 0 and found[0][1][1].count_nonzero() == 0, "an ignored token"


@pytest.mark.parametrize("dtype", DTYPES[1:])
@pytest.mark.parametrize("transposed", [False, True], ids=["conv1d", "linear"])
def test_a_fused_product_gives_autograds_gradients_or_adds_the_weights_to_its_accumulator(transposed, dtype):
    torch.manual_seed(0)
    module = nn.Linear(24, 40) if transposed else Conv1D(40, 24)
    nn.init.normal_(module.bias)
    module.weight.data = module.weight.data.to(dtype)
    fused_too = copy.deepcopy(module)
    cast_explicitly(nn.Sequential(module), torch.float32)
    cast_explicitly(nn.Sequential(fused_too), torch.float32, Kernels.ALL)
    x, gradient = torch.randn(2, 5, 24), torch.randn(2, 5, 40).to(dtype)

    def gradients(module):
        leaf = x.clone().requires_grad_()
        output = module(leaf)
        return output.detach(), *torch.autograd.grad(output, [leaf, module.bias, module.weight], gradient)

    plain, (*fused, of_weight) = gradients(module), gradients(fused_too)
    exact_sum = gradient.double().sum((0, 1))
    assert all(torch.equal(a, b) for a, b in zip((*plain[:2], plain[3]), (*fused[:2], of_weight), strict=True))
    assert (fused[2] - exact_sum).abs().max() < 1e-5, "a bias's gradient is fp32"
    assert (plain[2] - exact_sum).abs().max() > 1e-4, "which autograd's is not"

    fused_too(x).add_(1).sum().backward()  # as some models do
    fused_too.zero_grad()
    accumulator = torch.ones(module.weight.shape)
    register_add_product(fused_too.weight, lambda *factors: torch.ops.lowmem.add_product(accumulator, *factors))
    fused_too(x).backward(gradient)
    assert fused_too.weight.grad is None and torch.equal(fused_too.bias.grad, fused[2])
    left, right = x.flatten(0, 1).to(dtype).double(), gradient.flatten(0, 1).double()
    exact = (right.T @ left if transposed else left.T @ right) + 1
    assert (accumulator - exact).abs().max() < 1e-5, "in fp32"
    assert (plain[3].double() + 1 - exact).abs().max() > 1e-4, "which autograd's is not"


def simulated_update(name: str, update, size: int) -> tuple[int, float]:
    """Peak bytes of one update on a card, the weights', the state's and the gradient's included, and its seconds."""
    optimizer = get_optimizer(name)
    if name == "adamw8bit":
        optimizer = dataclasses.replace(optimizer, rule=_traffic_of_8_bit)
    layout = state_layout(optimizer, size, torch.bfloat16).items()
    recorder = Recorder(gpu_target(CARDS["rtx3090"]).device_model)
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
    fast, slow = (simulated_update(name, rule, size)[0] for rule in (fused.update, optimizers.update))
    there = 6 * size + states
    assert fast == there + temporaries * size
    assert slow >= there + 8 * size


def test_a_simulated_update_takes_the_time_of_reading_and_writing_every_number_once():
    card, size = CARDS["rtx3090"], 2**26
    at_memory_speed = 28 * size / card.sustained_bytes_per_second
    assert simulated_update("adamw", fused.update, size)[1] == pytest.approx(at_memory_speed, rel=0.01)
    assert simulated_update("adamw", optimizers.update, size)[1] > 4 * at_memory_speed


CAPABILITIES = 75, 120, 80, 86, 89, 90, 100  # the oldest and the newest first, which `make test` runs
on_all_cards = pytest.mark.parametrize(
    ("capability", "kind"), [(card, "bf16" if card >= 80 else "fp16") for card in CAPABILITIES]
)


@pytest.mark.quick(8)
@pytest.mark.parametrize("name", ["_adamw", "_sgd", "_join_all", "_split_all"])
@pytest.mark.parametrize("capability", CAPABILITIES)
@pytest.mark.parametrize("kind", [2, 1, 0])
def test_the_kernel_compiles_for_cards_and_reads_16_bytes_at_a_time_without_spilling(compiled, name, capability, kind):
    weights, constants = "*i16" if kind else "*fp32", {"KIND": kind, "BLOCK": compiled.BLOCK}
    types = {"working_at": weights, "low_at": weights, "n": "i32"}
    accesses = accesses_of(getattr(compiled, name), types, constants, "n", capability, warps=4)
    accesses = [access for access in accesses if access[0] != "bar.sync"]
    assert accesses and all("global" in what and ".v4.b32" in width for what, width in accesses), accesses


@pytest.mark.quick(4)
@pytest.mark.parametrize("capped", [False, True])
@on_all_cards
def test_the_loss_compiles_for_cards_and_reads_logits_16_bytes_at_a_time_without_spilling(
    compiled, capability, kind, capped
):
    types = {
        "logits_at": f"*{kind}", "bias_at": f"*{kind}", "labels_at": "*i64", "losses_at": "*fp32", "scale": "fp32",
        "outer": "fp32", "inner": "fp32", "words": "i32", "stride": "i32",
    }  # fmt: skip
    constants = {"HAS_BIAS": False, "CAPPED": capped, "DIFFERENTIATE": True, "BLOCK": compiled.WORDS}
    assert list(types | constants) == compiled._cross_entropy.arg_names
    accesses = accesses_of(compiled._cross_entropy, types, constants, "stride", capability, warps=8)
    assert not any("local" in what for what, _ in accesses)
    wide = [what for what, width in accesses if ".v4.b32" in width]
    assert len(wide) >= 3 * compiled.WORDS // (8 * 32) // 8, "both readings and the writing, 8 numbers at once"
    narrow = [place for place, (what, width) in enumerate(accesses) if "global" in what and ".v4.b32" not in width]
    assert len(narrow) <= 3, "the label, its logit and the loss"
    first_overwritten = next(n for n, (what, width) in enumerate(accesses) if what == "st.global" and ".v4" in width)
    between = [what for what, _ in accesses[narrow[-2] : first_overwritten]]
    assert "bar.sync" in between, "the target's logit is read before any thread overwrites it"


def accesses_of(
    kernel, types: dict, constants: dict, aligned: str | list[str], capability: int, warps: int
) -> list[tuple[str, str]]:
    """(instruction, width) of what touches memory, and of barriers, in the compiled kernel, which spills nothing. An
    argument without a type is fp32 or points to it. Pointers and what `aligned` names are multiples of 16."""
    from triton.backends.compiler import GPUTarget
    from triton.backends.nvidia.compiler import get_ptxas, sm_arch_from_capability
    from triton.compiler import ASTSource

    types = {name: "*fp32" if name.endswith("_at") else "fp32" for name in kernel.arg_names} | types
    aligned = [aligned] if isinstance(aligned, str) else aligned
    multiples = {(place,): [["tt.divisibility", 16]] for place, name in enumerate(kernel.arg_names)
                 if name.endswith("_at") or name in aligned}  # fmt: skip
    source = ASTSource(kernel, types | dict.fromkeys(constants, "constexpr"), constants, multiples)
    target = GPUTarget("cuda", capability, 32)
    ptx = triton.compile(source, target=target, options={"num_warps": warps}).asm["ptx"]
    with tempfile.NamedTemporaryFile("w", suffix=".ptx") as file:
        file.write(ptx)
        file.flush()
        card = f"--gpu-name={sm_arch_from_capability(capability)}"
        assembler = [get_ptxas(capability).path, "-v", card, file.name, "-o", os.devnull]
        said = subprocess.run(assembler, capture_output=True, text=True, check=True).stderr
    assert re.findall(r"(\d+) bytes spill", said) == ["0", "0"], said
    return re.findall(r"(ld\.global|st\.global|ld\.local|st\.local|bar\.sync)(\S*)", ptx)


def test_without_a_gpu_the_kernels_are_expected_of_turing_and_later():
    assert fused.expected((7, 5)) == fused.expected((9, 0)) == Kernels.ALL
    assert fused.expected((6, 1)) == fused.expected((7, 0)) == Kernels.NONE


def test_where_triton_does_not_compile_the_reason_is_a_sentence(compiled, monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
    failures = fused.failures.__wrapped__(CPU)  # for this "card", which is none
    assert failures.keys() == {Kernels.ALL} and "they do not run here" in failures[Kernels.ALL]


@pytest.fixture
def one_size(monkeypatch):
    """What is tried before a run is tried on a card, and in one size: the interpreter has no kernel for each, and takes
    milliseconds for each row of a norm."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
    monkeypatch.setattr(fused, "SIZES", (97,))
    monkeypatch.setattr(fused, "norm_error", partial(fused.norm_error, rows=16))


@pytest.mark.quick(1)
@pytest.mark.parametrize(("name", "wrong", "left_out", "said"), [
    ("join", lambda real, *given: (given[2].copy_(given[0]), None)[1], Kernels.ALL,
     "a kernel splits or joins weights otherwise"),
    ("cross_entropy", lambda real, *given: real(*given[:4], given[4] and 1.1 * given[4], *given[5:]), Kernels.ALL,
     r"the loss or a gradient of it is 0\.1.*"),
    ("normalize_backward", lambda real, *given: real(*given[:6], given[6] + 0.1, *given[7:]),  # the offset
     Kernels.NORMS | Kernels.SUMS, r"a norm or a gradient of it is 0\..*"),
    ("drop", lambda real, x, added, y, seeds, *others: real(x, added, y, seeds + (added is None), *others),
     Kernels.SUMS, r"a sum, its norm or a gradient of them is 0\..*"),
    ("gated_backward", lambda real, *given: real(*given[:-2], given[-2] + 0.1, given[-1]),  # the cubic term
     Kernels.ACTIVATIONS, r"an MLP's activation or a gradient of it is 0\..*"),
    ("rotate", lambda real, q, k, cos, sin, *others: real(q, k, cos, 1.1 * sin, *others),
     Kernels.ROTARY, r"a rotary embedding or a gradient of it is 0\..*"),
])  # fmt: skip
def test_what_is_computed_otherwise_is_found_and_only_its_kernels_are_left_out(
    one_size, monkeypatch, name, wrong, left_out, said
):
    with imported_anew("1") as modules:
        (module,) = [module for module in modules if hasattr(module, name)]
        monkeypatch.setattr(module, name, partial(wrong, getattr(module, name)))
        failures = fused.failures.__wrapped__(CPU)
    assert failures.keys() == {left_out}
    assert re.fullmatch(said, failures[left_out])


def test_kernels_that_agree_are_used_and_the_loss_is_tried_in_every_variant_that_models_want_of_it(
    interpreted, one_size, monkeypatch
):
    real, variants = interpreted.cross_entropy, set()

    def noting(logits, bias, labels, losses, scale, outer=1.0, inner=None):
        variants.add((logits.dtype, bias is not None, scale is not None, inner is not None))
        real(logits, bias, labels, losses, scale, outer, inner)

    monkeypatch.setattr(interpreted, "cross_entropy", noting)
    assert fused.failures.__wrapped__(CPU) == {}
    kinds = itertools.product(DTYPES[1:], (False, True), (False, True), (False, True))
    assert variants == {kind for kind in kinds if not (kind[1] and kind[3])}, "a bias or a cap"


def test_a_step_is_not_simulated_for_kernels_that_its_decoder_does_not_run():
    decoder, case = make_decoder(tiny_config("gpt2"), "bf16", "fp32"), None
    with pytest.raises(ValueError, match="not made for the target's kernels"):
        record_step(decoder, case, gpu_target(CARDS["rtx3090"]))


def test_only_our_kernels_update_beside_what_computes(interpreted, monkeypatch):
    beside = []
    transfers_for = core_step.transfers_for
    monkeypatch.setattr(core_step, "transfers_for", lambda *given: beside.append(given[1]) or transfers_for(*given))
    for fused_kernels, optimizer in ((Kernels.ALL, "adamw"), (Kernels.ALL, "adamw8bit"), (Kernels.NONE, "adamw")):
        make_step(tiny_model("gpt2"), precision="bf16", fused_kernels=fused_kernels, optimizer=optimizer)
    assert beside == [True, False, False]


ERRORS = {  # {function of fused.py: kernels that are left out if it finds an error}
    "largest_ulps": Kernels.ALL,
    "loss_error": Kernels.ALL,
    "norm_error": Kernels.NORMS | Kernels.SUMS,
    "activation_error": Kernels.ACTIVATIONS,
    "rotary_error": Kernels.ROTARY,
}


@pytest.fixture
def failures(monkeypatch):
    """Returns a function that returns which kernels fail, and why, if comparisons find `errors`."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
    monkeypatch.setattr(fused, "halves_agree", lambda *_: True)

    def failing(**errors: list[float | Exception]) -> dict[Kernels, str]:
        for name in ERRORS:
            each = itertools.chain(errors.get(name, []), itertools.repeat(0.0))
            if name == "largest_ulps":
                each = (error if isinstance(error, Exception) else {"weight": 0.0, "m": error} for error in each)
            monkeypatch.setattr(fused, name, Mock(side_effect=each))
        return fused.failures.__wrapped__(CPU)

    return failing


@pytest.mark.parametrize("name", ERRORS)
def test_kernels_that_compute_something_else_write_nan_or_do_not_compile_are_left_out(failures, name):
    """Seen to fail: max() passes over a NaN that is not the first number."""
    assert failures() == {}
    for values, said in (([100.0], "is 100 "), ([0.0, math.nan], "nan"), ([OSError("no ptxas")], "OSError: no ptxas")):
        found = failures(**{name: values})
        assert found.keys() == {ERRORS[name]} and said in found[ERRORS[name]]


def test_a_sum_that_fails_does_not_cost_the_norms_and_several_kernels_fail_independently(failures, monkeypatch):
    norms = len(DTYPES[1:]) * len(fused.KINDS_OF_NORMS)
    found = failures(norm_error=[0.0] * norms + [1.0], rotary_error=[1.0])
    assert found.keys() == {Kernels.SUMS, Kernels.ROTARY}
    monkeypatch.setattr(fused, "failures", lambda device: found)
    assert fused.running(CPU) == Kernels.PRODUCTS | Kernels.NORMS | Kernels.ACTIVATIONS
    assert fused.running(CPU).names == ["products", "norms", "activations"]
