"""What is kept is handed out again bit for bit; what is left out is not needed."""

from collections import Counter
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import AutoModelForCausalLM, FalconConfig, MegatronBertConfig, PretrainedConfig

from families import ENCODER_DECODERS, FAMILIES, MORE_FAMILIES, POST_NORM
from lowmem.core import products
from lowmem.core.decoder import Decoder
from lowmem.core.kernels import Kernels
from lowmem.core.products import (
    ProductRecorder,
    ProductReplayer,
    _skippable_layer,
    is_saved,
    product_skipped,
    skippable_layers,
)
from lowmem.core.recompute import ALL, INPUT, PRODUCTS, Dropout, Segment, backward, forward
from lowmem.models.build import make_decoder
from reference import VOCABULARY, model_of, tiny_config
from tests.core.test_recompute import assert_same

aten = torch.ops.aten
NAME = Dropout(1, 2, 3)
BLOCK = range(1, 2)
NEED_THEIR_LAST_PRODUCT = {"opt_projected": FAMILIES["opt_projected"], **POST_NORM}


class Counting(TorchDispatchMode):
    """Counts the operations that are really run."""

    def __init__(self):
        super().__init__()
        self.operations = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.operations[func] += 1
        return func(*args, **(kwargs or {}))


def made(config: PretrainedConfig) -> Decoder:
    decoder = Decoder(model_of(config).train())
    decoder.skippable_layers = skippable_layers(decoder, torch.float32)
    return decoder


def products_run_again(family: str, keep: str) -> int:
    """How many products a block computes when it runs again: the last calls of its backward's first half."""
    decoder, segment = made(tiny_config(family)), Segment(BLOCK, keep)
    with torch.no_grad():
        hidden, extras = decoder.embed(torch.arange(24).view(2, 12) % VOCABULARY)
    output, saved = forward(decoder, segment, hidden, extras, NAME)
    with pytest.MonkeyPatch.context() as patched, Counting() as counting:
        patched.setattr(Tensor, "backward", lambda *_: None)
        backward(decoder, segment, saved, extras, NAME, torch.ones_like(output))
    return sum(count for operation, count in counting.operations.items() if operation in PRODUCTS_OF_BLOCKS)


PRODUCTS_OF_BLOCKS = {aten.mm.default, aten.addmm.default, aten._scaled_dot_product_flash_attention_for_cpu.default}


def test_a_second_run_computes_all_products_but_the_last_or_none():
    assert products_run_again("gpt2", INPUT) == 4  # qkv, attention, projection, the MLP's first
    assert products_run_again("gpt2", PRODUCTS) == 0
    assert products_run_again("llama", INPUT) == 7
    assert products_run_again("llama", PRODUCTS) == 0


ALL_FAMILIES = FAMILIES | MORE_FAMILIES | ENCODER_DECODERS
EXPERTS_ALONE = {"mixtral", "olmoe"}  # the last product is one of all experts together


@pytest.mark.quick(28)
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("family", ALL_FAMILIES)
def test_a_layer_is_found_in_each_block_but_where_a_norm_comes_last(family, precision):
    kernels = Kernels.ALL if precision == "bf16" else Kernels.NONE
    found = make_decoder(ALL_FAMILIES[family](), precision, "fp32", kernels).skippable_layers
    without = [family in NEED_THEIR_LAST_PRODUCT or family in EXPERTS_ALONE] * len(found)
    if (family, precision) == ("deepseek_v2", "fp32"):
        without[1:] = [True] * len(found[1:])  # transformers' experts run without data in bf16 alone
    assert [layer is None for layer in found] == without


@pytest.mark.parametrize("keep", [INPUT, PRODUCTS])
def test_a_layer_that_is_called_more_often_in_a_longer_sequence_skips_all_its_products(keep):
    """BERT's decoders may cut a sequence into chunks. The model is looked at with one."""
    config = MegatronBertConfig(
        vocab_size=VOCABULARY, hidden_size=48, num_hidden_layers=2, num_attention_heads=4, intermediate_size=48,
        chunk_size_feed_forward=8, is_decoder=True,
    )  # fmt: skip
    decoder = made(config)
    assert None not in decoder.skippable_layers
    with torch.no_grad():
        hidden, extras = decoder.embed(torch.arange(48).view(2, 24) % VOCABULARY)
    found = []
    for kept in (ALL, keep):
        decoder.model.zero_grad()
        output, saved = forward(decoder, Segment(BLOCK, kept), hidden, extras, NAME)
        boundary = backward(decoder, Segment(BLOCK, kept), saved, extras, NAME, torch.ones_like(output))
        found.append({"boundary": boundary} | {n: p.grad.clone() for n, p in decoder.blocks[1].named_parameters()})
    assert_same(*found)


class Branches(torch.nn.Module):
    """Returns its input plus the product of a layer, which is made in one call or in two."""

    def __init__(self, calls: int):
        super().__init__()
        self.layer, self.calls = torch.nn.Linear(4, 4), calls

    def forward(self, x: Tensor) -> Tensor:
        y = x
        for _ in range(self.calls):
            y = self.layer(torch.tanh(y))
        return x + y


class Experts(torch.nn.Module):
    """Makes as many products as its input says."""

    def __init__(self):
        super().__init__()
        self.experts = torch.nn.ModuleList(torch.nn.Linear(4, 4) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        for expert in self.experts[: int(x[0, 0, 0])]:
            x = x + expert(x)
        return x


class Read(torch.nn.Module):
    """Has Python read a product's values."""

    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return x if self.layer(x).sum().item() > 0 else -x


@pytest.mark.parametrize(
    ("block", "name"), [(Branches(1), "layer"), (Branches(2), None), (Experts(), None), (Read(), None)]
)
def test_only_a_layer_with_one_product_in_each_run_is_found(block, name):
    blocks = torch.nn.ModuleList([block])
    decoder = SimpleNamespace(
        model=blocks, blocks=blocks, block=lambda index, hidden, extra: block(hidden), example=lambda words: (),
        embed=lambda: (torch.empty(1, 2, 4, device="meta"), [None]), head_weight=torch.empty(8, 4),
    )  # fmt: skip
    assert skippable_layers(decoder, torch.float32) == [name and block.get_submodule(name)]


def kept_bytes(keep: str) -> int:
    decoder = made(tiny_config("gpt2"))
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


@pytest.mark.parametrize("keep", [INPUT, PRODUCTS])
@pytest.mark.parametrize("family", NEED_THEIR_LAST_PRODUCT)
def test_a_last_product_that_is_needed_is_computed_again_and_no_graph_stays(family, keep):
    """Their blocks end in a norm, which saves its input for backward, and some norms an output of their own, too."""
    decoder = made(NEED_THEIR_LAST_PRODUCT[family]())
    with torch.no_grad():
        hidden, extras = decoder.embed(torch.arange(24).view(2, 12) % VOCABULARY)

    def gradients(keep: str) -> dict[str, Tensor]:
        segment = Segment(BLOCK, keep)
        output, saved = forward(decoder, segment, hidden, extras, NAME)
        weight = torch.linspace(-1, 1, output.numel()).view_as(output)
        decoder.model.zero_grad()
        with Storages() as storages:
            boundary = backward(decoder, segment, saved, extras, NAME, weight)
        results = {"boundary": boundary} | {n: p.grad for n, p in decoder.blocks[1].named_parameters()}
        assert storages.alive() == len({t.untyped_storage()._cdata for t in results.values()})
        return {name: gradient.clone() for name, gradient in results.items()}

    assert_same(gradients(keep), gradients(ALL))


def second_run(function, x: Tensor) -> tuple[Tensor, Tensor]:
    """(first output, second output); the generator's state is the same before both."""
    torch.manual_seed(7)
    with ProductRecorder() as recorder:
        first = function(x)
    torch.manual_seed(7)
    with ProductReplayer(recorder.products):
        second = function(x)
    return first, second


def test_what_is_drawn_after_a_kept_operation_that_draws_is_the_same_again(monkeypatch):
    """As attention with dropout on a GPU: it is not run again, and what comes after it must not get its numbers."""
    monkeypatch.setattr(products, "is_saved", lambda operation, args: args[1:2] == (0.25,))
    x = torch.ones(100, requires_grad=True)
    function = lambda x: torch.native_dropout(torch.native_dropout(x, 0.25, True)[0], 0.5, True)[0]  # noqa: E731
    first, second = second_run(function, x)
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
    first, second = second_run(function, x)
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
        backward(decoder, segment, saved, extras, NAME, torch.ones_like(output))
        found.append({name: p.grad.clone() for name, p in decoder.model.named_parameters() if p.grad is not None})
    assert_same(*found)


class Between(torch.nn.Module):
    """Adds to its input what `then` makes of a product of it."""

    def __init__(self, then):
        super().__init__()
        self.layer, self.then = torch.nn.Linear(4, 4, bias=False), then

    def forward(self, x: Tensor) -> Tensor:
        return self.then(x, self.layer(x))


@pytest.mark.parametrize(("then", "needed"), [
    (lambda x, y: x + y, False),
    (lambda x, y: x + torch.nn.functional.dropout(y, 0.5), False),
    (lambda x, y: x + 3 * y.view(8, 2).view(4, 4), False), (lambda x, y: x + y.exp(), True),
    (lambda x, y: x * y, True), (lambda x, y: torch.nn.functional.layer_norm(x + y, [4]), True),
    (lambda x, y: y.clone().mul_(2).exp() + x, True), (lambda x, y: x + x.mul(y.detach()), True),
])  # fmt: skip
def test_a_product_that_backward_needs_is_found_out(then, needed):
    block, x = Between(then), torch.linspace(-1, 1, 16).view(4, 4).requires_grad_()
    assert _skippable_layer(block, lambda: block(x)) == (None if needed else "layer")
    if not needed:
        torch.manual_seed(7)
        (expected,) = torch.autograd.grad(block(x).sum(), x)
        torch.manual_seed(7)
        with Counting() as counting, product_skipped(block.layer):
            output = block(x)
        assert not counting.operations.keys() & {aten.mm.default, aten.add.Tensor, aten.mul.Tensor}, (
            "the sum is left out, too"
        )
        (gradient,) = torch.autograd.grad(output.sum(), x)
        assert torch.equal(gradient, expected)


def test_attention_after_the_last_product_leaves_no_layer_to_skip():
    block = Between(lambda x, y: x + torch.nn.functional.scaled_dot_product_attention(x[None], x[None], y[None])[0])
    assert _skippable_layer(block, lambda: block(torch.ones(4, 4).requires_grad_())) is None


def test_queries_times_keys_are_recomputed_and_what_they_weigh_is_kept():
    long, head = torch.empty(2, 64, 8), torch.empty(2, 8, 64)
    assert not is_saved(aten.bmm.default, (long, head))
    assert is_saved(aten.bmm.default, (torch.empty(2, 64, 64), long))
