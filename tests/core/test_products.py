"""What is kept is handed out again bit for bit; what is left out is not needed, or is computed after all."""

from collections import Counter
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import AutoModelForCausalLM, FalconConfig

from families import FAMILIES, POST_NORM
from lowmem.core import products, recompute
from lowmem.core.decoder import Decoder
from lowmem.core.products import ProductRecorder, ProductReplayer, is_kept
from lowmem.core.recompute import ALL, INPUT, PRODUCTS, Dropout, LastProduct, Segment, backward, forward
from reference import VOCABULARY, tiny_model
from tests.core.test_recompute import assert_same

aten = torch.ops.aten
NAME = Dropout(1, 2, 3)
BLOCK = range(1, 2)


class Counting(TorchDispatchMode):
    """Counts the operations that are really run."""

    def __init__(self):
        super().__init__()
        self.operations = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.operations[func] += 1
        return func(*args, **(kwargs or {}))


def products_run_again(family: str, keep: str, monkeypatch) -> set[int]:
    """Products computed in a block's later runs, once it has been learnt which can be left out."""
    decoder, lessons = Decoder(tiny_model(family).train()), {}
    with torch.no_grad():
        hidden, extras = decoder.embed(torch.arange(24).view(2, 12) % VOCABULARY)
    counts = []
    again = recompute._run_again

    def counted(*arguments):
        with Counting() as counting:
            output = again(*arguments)
        counts.append(sum(n for operation, n in counting.operations.items() if operation in set_of_products))
        return output

    set_of_products = {aten.mm.default, aten.addmm.default, aten._scaled_dot_product_flash_attention_for_cpu.default}
    monkeypatch.setattr(recompute, "_run_again", counted)
    for _ in range(4):
        output, saved = forward(decoder, Segment(BLOCK, keep), hidden, extras, NAME, lessons.get(BLOCK, 0) is None)
        backward(decoder, Segment(BLOCK, keep), saved, extras, NAME, torch.ones_like(output), lessons, BLOCK)
    return set(counts[1:])


def test_a_second_run_computes_all_products_but_the_last_or_none(monkeypatch):
    assert products_run_again("gpt2", INPUT, monkeypatch) == {4}  # qkv, attention, projection, the MLP's first
    assert products_run_again("gpt2", PRODUCTS, monkeypatch) == {0}
    assert products_run_again("llama", INPUT, monkeypatch) == {7}
    assert products_run_again("llama", PRODUCTS, monkeypatch) == {0}


class Branches(torch.nn.Module):
    """Adds to its input a product of it, which one layer makes in one call or in two."""

    def __init__(self, calls: int):
        super().__init__()
        self.layer, self.calls = torch.nn.Linear(4, 4), calls

    def forward(self, x: Tensor) -> Tensor:
        y = x
        for _ in range(self.calls):
            y = self.layer(torch.tanh(y))
        return x + y


@pytest.mark.parametrize("calls", [1, 2])
def test_from_the_third_run_on_only_the_layer_that_skips_its_product_is_watched(calls, monkeypatch):
    """If the layer makes other products, too, the whole block is watched each time."""
    block = Branches(calls)
    decoder = SimpleNamespace(blocks=[block], block=lambda index, hidden, extra: block(hidden))
    watched, tanhs = [], []
    dispatch = ProductReplayer.__torch_dispatch__

    def counted(self, func, *others):
        watched.append(func)
        return dispatch(self, func, *others)

    monkeypatch.setattr(ProductReplayer, "__torch_dispatch__", counted)
    lessons, gradients = {}, []
    for _ in range(4):
        block.zero_grad()
        hidden = torch.linspace(-1, 1, 8).view(1, 2, 4)
        segment = Segment(range(1), INPUT)
        _, saved = forward(decoder, segment, hidden, [None], NAME)
        found = backward(decoder, segment, saved, [None], NAME, torch.ones(1, 2, 4), lessons, 0)
        tanhs.append(watched.count(aten.tanh.default))
        watched.clear()
        gradients.append({"boundary": found} | {name: p.grad.clone() for name, p in block.named_parameters()})
    for other in gradients[1:]:
        assert_same(other, gradients[0])
    assert lessons == {0: LastProduct(calls - 1, "layer" if calls == 1 else None, tried=calls == 1)}
    assert tanhs == ([1, 1, 0, 0] if calls == 1 else [2, 2, 2, 2])


class Experts(torch.nn.Module):
    """Makes as many products as its input says, and one that backward needs."""

    def __init__(self):
        super().__init__()
        self.experts = torch.nn.ModuleList(torch.nn.Linear(4, 4) for _ in range(3))
        self.last = torch.nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        y = x
        for expert in self.experts[: int(x[0, 0, 0])]:
            y = y + torch.tanh(expert(y))
        return x + torch.tanh(self.last(y))


def test_a_product_that_a_run_did_not_come_to_has_not_been_tried():
    block = Experts()
    decoder = SimpleNamespace(blocks=[block], block=lambda index, hidden, extra: block(hidden))
    lessons = {}
    for experts in (3, 2, 2, 3):
        hidden = torch.full((1, 2, 4), float(experts))
        found = []
        for learnt in (lessons, {0: None}):
            block.zero_grad()
            _, saved = forward(decoder, Segment(range(1), INPUT), hidden, [None], NAME)
            boundary = backward(decoder, Segment(range(1), INPUT), saved, [None], NAME, torch.ones(1, 2, 4), learnt, 0)
            found.append({"boundary": boundary, "last": block.last.weight.grad.clone()})
        assert_same(*found)


def kept_bytes(keep: str) -> int:
    decoder = Decoder(tiny_model("gpt2").train())
    with torch.no_grad():
        hidden, extras = decoder.embed(torch.arange(24).view(2, 12) % VOCABULARY)
    _, saved = forward(decoder, Segment(BLOCK, keep), hidden, extras, NAME)
    leaves = [t for kept in saved.products if kept is not None for t in tree_leaves(kept.result)]
    return sum(t.untyped_storage().nbytes() for t in leaves if isinstance(t, Tensor))


def test_what_a_gpt2_block_keeps_of_its_products_is_ten_times_its_width_and_the_softmax_sums():
    tokens, width, heads = 24, 48, 4
    assert kept_bytes(PRODUCTS) == 4 * tokens * ((3 + 1 + 1 + 4) * width + heads)


class Storages(TorchDispatchMode):
    """Counts the memory that operations have made and that somebody still holds, C++ included."""

    def __init__(self):
        super().__init__()
        self._made: dict[int, StorageWeakRef] = {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        given = {t.untyped_storage()._cdata for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor)}
        result = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if isinstance(tensor, Tensor) and tensor.untyped_storage()._cdata not in given:
                reference = StorageWeakRef(tensor.untyped_storage())
                self._made[reference.cdata] = reference
        return result

    def alive(self) -> int:
        return sum(not reference.expired() for reference in self._made.values())


NEED_THEIR_LAST_PRODUCT = {"opt_projected": FAMILIES["opt_projected"], **POST_NORM}


@pytest.mark.parametrize("keep", [INPUT, PRODUCTS])
@pytest.mark.parametrize("family", NEED_THEIR_LAST_PRODUCT)
def test_a_last_product_that_is_needed_is_computed_after_all_and_no_graph_stays(family, keep):
    """Their blocks end in a norm, which saves its input for backward, and some norms an output of their own, too."""
    torch.manual_seed(0)
    decoder = Decoder(AutoModelForCausalLM.from_config(NEED_THEIR_LAST_PRODUCT[family]()).train())
    with torch.no_grad():
        hidden, extras = decoder.embed(torch.arange(24).view(2, 12) % VOCABULARY)

    def gradients(keep: str) -> dict[str, Tensor]:
        lessons, segment = {}, Segment(BLOCK, keep)
        for _ in range(3):
            decoder.model.zero_grad()
            output, saved = forward(decoder, segment, hidden, extras, NAME, lessons.get(BLOCK, 0) is None)
            weight = torch.linspace(-1, 1, output.numel()).view_as(output)
            with Storages() as storages:
                boundary = backward(decoder, segment, saved, extras, NAME, weight, lessons, BLOCK)
            results = {"boundary": boundary} | {n: p.grad for n, p in decoder.blocks[1].named_parameters()}
            assert storages.alive() == len({t.untyped_storage()._cdata for t in results.values()})
        assert lessons == ({} if keep == ALL else {BLOCK: None})
        return {name: gradient.clone() for name, gradient in results.items()}

    assert_same(gradients(keep), gradients(ALL))


def second_run(function, x: Tensor, unneeded: int | None = None) -> tuple[Tensor, Tensor, ProductReplayer]:
    """(first output, second output, the mode of the second run); the generator's state is the same before both."""
    torch.manual_seed(7)
    with ProductRecorder() as recorder:
        first = function(x)
    torch.manual_seed(7)
    with ProductReplayer(recorder.kept, unneeded) as replayer:
        second = function(x)
    return first, second, replayer


def test_what_is_drawn_after_a_kept_operation_that_draws_is_the_same_again(monkeypatch):
    """As attention with dropout on a GPU: it is not run again, and what comes after it must not get its numbers."""
    monkeypatch.setattr(products, "is_kept", lambda operation, args: args[1:2] == (0.25,))
    x = torch.ones(100, requires_grad=True)
    function = lambda x: torch.native_dropout(torch.native_dropout(x, 0.25, True)[0], 0.5, True)[0]  # noqa: E731
    first, second, _ = second_run(function, x)
    assert torch.equal(first, second) and 0 < first.count_nonzero() < 100


@pytest.mark.parametrize(
    "function",
    [
        lambda x: (x[0] @ x[0].T).add_(1.0).exp(),
        lambda x: (x @ x[0].T).add_(1.0).exp(),  # what comes out of these is a view of what the operation returned
        lambda x: torch.nn.functional.linear(x, x[0]).mul_(2.0).exp(),
        lambda x: (x @ x.mT @ x).view(-1).add_(1.0).exp(),
    ],
)
def test_a_kept_output_that_was_changed_in_place_is_computed_anew(function):
    x = torch.linspace(-1, 1, 24).view(2, 3, 4).requires_grad_()
    first, second, _ = second_run(function, x)
    assert torch.equal(first, second)


def test_blocks_that_add_in_place_change_no_bit_in_segments_of_two():
    """Falcon adds its attention into the MLP's output, which is a product."""
    config = FalconConfig(
        vocab_size=VOCABULARY, hidden_size=48, num_hidden_layers=4, num_attention_heads=4, multi_query=False,
        alibi=False, new_decoder_architecture=False, parallel_attn=True, bos_token_id=0, eos_token_id=0,
    )  # fmt: skip
    torch.manual_seed(0)
    decoder = Decoder(AutoModelForCausalLM.from_config(config).train())
    with torch.no_grad():
        hidden, extras = decoder.embed(torch.arange(24).view(2, 12) % VOCABULARY)
    found = []
    for keep in (ALL, PRODUCTS):
        decoder.model.zero_grad()
        segment = Segment(range(0, 2), keep)
        output, saved = forward(decoder, segment, hidden, extras, NAME)
        backward(decoder, segment, saved, extras, NAME, torch.ones_like(output), {}, 0)
        found.append({name: p.grad.clone() for name, p in decoder.model.named_parameters() if p.grad is not None})
    assert_same(*found)


@pytest.mark.parametrize(("function", "missed"), [
    (lambda x: x + x @ x, False), (lambda x: x + torch.native_dropout(x @ x, 0.5, True)[0], False),
    (lambda x: x + torch.nn.functional.dropout(x @ x, 0.5), False),
    (lambda x: x + 3 * (x @ x).view(8, 2).view(4, 4), False), (lambda x: x + (x @ x).exp(), True),
    (lambda x: x * (x @ x), True), (lambda x: torch.nn.functional.layer_norm(x + x @ x, [4]), True),
    (lambda x: (x @ x) @ x, True), (lambda x: x if (x @ x).sum() > 0 else -x, True),
])  # fmt: skip
def test_a_product_that_backward_needs_is_found_out(function, missed):
    x = torch.linspace(-1, 1, 16).view(4, 4).requires_grad_()
    _, output, replayer = second_run(function, x, unneeded=0)
    assert replayer.missed == missed
    if not missed:
        torch.manual_seed(7)
        (expected,) = torch.autograd.grad(function(x).sum(), x)
        (gradient,) = torch.autograd.grad(output.sum(), x)
        assert torch.equal(gradient, expected)


def test_queries_times_keys_are_recomputed_and_what_they_weigh_is_kept():
    long, head = torch.empty(2, 64, 8), torch.empty(2, 8, 64)
    assert not is_kept(aten.bmm.default, (long, head))
    assert is_kept(aten.bmm.default, (torch.empty(2, 64, 64), long))
