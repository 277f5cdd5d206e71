"""Sums of the residual stream in one kernel: which calls of blocks it replaces, gradients, dropout, bits, memory."""

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from experiments.harness import trainings
from experiments.harness.trainings import make_step
from families import ENCODER_DECODERS, FAMILIES, MORE_FAMILIES, POST_NORM, with_dropout
from lowmem.core.decoder import Decoder
from lowmem.core.kernels import Kernels
from lowmem.core.layers import cast_explicitly
from lowmem.core.norms import Drops, Rule, normalize_sum, normalized
from lowmem.core.recompute import Dropout
from lowmem.core.residual_sums import ResidualSums, Watch, add_dropped
from lowmem.models.build import make_decoder
from reference import tiny_model
from tests.core import test_fused
from tests.core.test_products import Counting
from tests.core.test_step import PLAIN, make_batches
from tests.stream_order.arrangements import with_plain_kernels

pytest.importorskip("triton")
interpreted, compiled = test_fused.interpreted_layers, test_fused.compiled_layers

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
ALL = FAMILIES | MORE_FAMILIES | POST_NORM | ENCODER_DECODERS


def changes(family: str, residual: str = "fp32", dropout: float = 0.1) -> set[str]:
    """The changed calls of each block: D dropout, N norm, S a sum with its norm, A a sum without."""
    decoder = make_decoder(with_dropout(ALL[family](), dropout), "bf16", residual, Kernels.ALL)
    return {letters(getattr(block.forward, "calls", ())) for block in decoder.blocks}


def letters(calls) -> str:
    names = {F.dropout: "D", normalized: "N", torch.add: "A"}
    return "".join("S" if call.norm else names[call.function] for call in calls if call.changed)


@pytest.mark.quick(1)
@pytest.mark.parametrize("residual", ["fp32", "16bit"])
def test_the_calls_that_are_changed_are_the_blocks_sums_with_their_dropouts_and_norms(residual):
    expected = {
        "gpt2": "NDSNDA", "opt": "NDANDA", "bloom": "NDSNDA", "llama": "NSN", "qwen2": "NSN", "qwen3": "NSN",
        "gemma": "NSN", "gemma3_text": "NSN", "mistral": "NSN", "mixtral": "NSN", "phi3": "NDSNDA",
        "gpt_neox": "NNA",  # attention and MLP are added first, in 16 bit
        "phi": "NA", "falcon": "NA", "cohere": "NA", "olmo2": "",  # which normalizes branches, not the stream
    }  # fmt: skip
    assert {family: changes(family, residual) for family in expected} == {f: {c} for f, c in expected.items()}


def test_a_t5_block_is_changed_too():
    assert changes("t5") == {"NDSNDA", "NDSNDSNDA"}, "an encoder's, and a decoder's"


def values_for(decoder: Decoder, kind: torch.dtype = BF16) -> None:
    """Gives the parameters of `decoder` random values on the CPU; `kind`: the matrices' dtype."""
    generator, made = torch.Generator().manual_seed(0), {}
    for module in decoder.model.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None:
                if id(parameter) not in made:
                    values = torch.randn(parameter.shape, generator=generator).mul_(0.3)
                    made[id(parameter)] = nn.Parameter(values.to(kind if parameter.dim() >= 2 else FP32))
                module._parameters[name] = made[id(parameter)]


def outcome(decoder: Decoder, index: int, hidden: Tensor, extras: list) -> list[Tensor]:
    """The output of a block with dropout masks of one seed, and all gradients."""
    Dropout(0, 0, 0).begin(index, hidden.device)
    leaf = hidden.detach().requires_grad_()
    output = decoder.block(index, leaf, extras[index])
    parameters = [p for p in decoder.blocks[index].parameters() if p.requires_grad]
    gradient = torch.randn(output.shape, generator=torch.Generator().manual_seed(1)).to(output.dtype)
    return [output, *torch.autograd.grad(output, [leaf, *parameters], gradient, allow_unused=True)]


TWO_NORMS = {"gpt_neox", "falcon"}  # whose gradients are added in another order


@pytest.mark.quick(2)
@pytest.mark.parametrize("family", ALL)
def test_without_dropout_a_block_has_the_bits_of_its_own_sums_and_norms(interpreted, family):
    decoder = make_decoder(with_dropout(ALL[family](), 0.0), "bf16", "fp32", Kernels.ALL)
    values_for(decoder)
    with torch.no_grad():
        hidden, extras = decoder.embed(*decoder.example(decoder.head_weight.shape[0]))
    for index in (0, len(decoder.blocks) - 1):
        joined = outcome(decoder, index, hidden, extras)
        for forward in decoder.block_forwards:
            forward.own_sums = True
        apart = outcome(decoder, index, hidden, extras)
        for one, other in zip(joined, apart, strict=True):
            if family in TWO_NORMS and one is not None:
                assert (one - other).abs().max() <= 2**-7 * other.abs().max()
            else:
                assert (one is other is None) or torch.equal(one, other)


@pytest.mark.quick(1)
@pytest.mark.parametrize("family", ["gpt2", "gpt_neox", "phi3", "t5"])
def test_a_second_run_of_a_block_has_the_same_masks_and_another_seed_others(interpreted, family):
    decoder = make_decoder(with_dropout(ALL[family](), 0.3), "bf16", "fp32", Kernels.ALL)
    values_for(decoder)
    with torch.no_grad():
        hidden, extras = decoder.embed(*decoder.example(decoder.head_weight.shape[0]))
    first, second = (outcome(decoder, 0, hidden, extras) for _ in range(2))
    with torch.no_grad():
        Dropout(0, 0, 0).begin(0, hidden.device)
        without_a_graph = decoder.block(0, hidden, extras[0])
        other = decoder.block(0, hidden, extras[0])
    assert all(torch.equal(one, again) for one, again in zip(first, second, strict=True))
    assert torch.equal(first[0], without_a_graph) and not torch.equal(first[0], other)


def drops_for(p: float) -> Drops | None:
    return Drops(p, Drops.draw(1, torch.device("cpu"))) if p else None


KINDS = [(FP32, BF16), (FP32, FP16), (BF16, BF16), (FP32, FP32)]  # of the stream and the branch
UNITS = {FP32: 2**-22, BF16: 2**-8, FP16: 2**-11}  # of one rounding
RULES = {"LayerNorm": Rule(1e-5, 0.0, True), "RMSNorm": Rule(1e-6, 1.0, False)}


@pytest.mark.quick(4)
@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("p", [0.0, 0.25, 1.0])
@pytest.mark.parametrize("kinds", KINDS, ids=str)
def test_a_sum_and_its_norm_are_those_of_fp64_within_a_rounding_for_the_same_mask(interpreted, kinds, p, rule):
    generator = torch.Generator().manual_seed(5)
    rule, shape, narrow = RULES[rule], (2, 5, 24), kinds[1]
    x, branch = (torch.randn(shape, generator=generator).to(kind).requires_grad_() for kind in kinds)
    vectors = [torch.randn(24, generator=generator).requires_grad_() for _ in range(1 + rule.centered)]
    gradients = [torch.randn(5, 2, 24, generator=generator).to(kind).transpose(0, 1) for kind in kinds]
    total, y = normalize_sum(x, branch, drops_for(p), vectors[0], vectors[1] if rule.centered else None, rule, narrow)
    torch.autograd.backward((total, y), gradients)

    exact = [each.detach().double().requires_grad_() for each in (x, branch, *vectors)]
    mask = (branch.grad != 0).double() * (1 / (1 - p) if p < 1 else 0.0)
    true_total = exact[0] + mask * exact[1]
    rounded = true_total + (total.double() - true_total).detach()  # which the kernel normalizes
    true_y = rule(rounded, exact[2], exact[3] if rule.centered else None)
    torch.autograd.backward((rounded, true_y), [gradient.double() for gradient in gradients])
    close(total, true_total, UNITS[kinds[0]])
    close(y, true_y, UNITS[narrow])
    close(x.grad, exact[0].grad, UNITS[kinds[0]])
    close(branch.grad, exact[1].grad, UNITS[narrow])
    for vector, truth in zip(vectors, exact[2:], strict=True):
        close(vector.grad, truth.grad, UNITS[FP32])


@pytest.mark.parametrize("p", [0.25, 1.0])
@pytest.mark.parametrize("kinds", KINDS, ids=str)
def test_a_sum_without_a_norm_is_that_of_fp64_within_a_rounding_for_the_same_mask(interpreted, kinds, p):
    generator = torch.Generator().manual_seed(6)
    x, branch = (torch.randn(3, 5, 24, generator=generator).to(kind).requires_grad_() for kind in kinds)
    gradient = torch.randn(3, 5, 24, generator=generator).to(kinds[0])
    total = add_dropped(x, branch, drops_for(p))
    total.backward(gradient)
    mask = (branch.grad != 0).double() * (1 / (1 - p) if p < 1 else 0.0)
    close(total, x.double() + mask * branch.double(), UNITS[kinds[0]])
    close(branch.grad, mask * gradient.double(), UNITS[kinds[1]])
    assert torch.equal(x.grad, gradient)


def close(found: Tensor, truth: Tensor, unit: float) -> None:
    """Within a rounding of each number, and sums in fp32."""
    assert ((found - truth).abs() <= 1.01 * unit * truth.abs() + 1e-6 * truth.abs().max()).all()


@pytest.mark.quick(2)
@pytest.mark.parametrize("columns", [4, 24, 1280])
def test_dropout_leaves_out_a_share_p_of_the_numbers_independently(interpreted, columns):
    p, x = 0.2, torch.zeros(4000 // columns + 40, columns)
    ones = torch.ones_like(x)
    torch.manual_seed(0)
    first, second = (add_dropped(x, ones, drops_for(p)) for _ in range(2))
    total, _ = normalize_sum(x, ones, drops_for(p), torch.ones(columns), None, Rule(1e-5, 0.0, False), FP32)
    for each in (first, second, total):
        n = each.numel()
        assert set(each.unique().tolist()) == {0.0, 1.25}
        assert abs((each == 0).float().mean() - p) < 4 * (p * (1 - p) / n) ** 0.5, "four standard deviations"
        for other in (each[:, 1:] - each[:, :-1], each[1:] - each[:-1], *([each - first] if each is not first else [])):
            alike = (other == 0).float().mean()
            assert abs(alike - (p**2 + (1 - p) ** 2)) < 0.05 + 4 / other.numel() ** 0.5, (
                "of neighbours, and of two masks"
            )


def test_a_seed_gives_one_mask_to_both_kernels(interpreted):
    x, ones = torch.zeros(37, 100), torch.ones(37, 100)
    seeds = torch.tensor([5, 2**62 + 12345])
    y, total = torch.empty_like(x), torch.empty_like(x)
    torch.ops.lowmem.drop(ones, x, y, seeds, 1, 0.4)
    torch.ops.lowmem.normalize(
        x, torch.ones(100), None, torch.empty_like(x), None, 1e-5, 0.0, False, ones, total, seeds, 1, 0.4
    )
    assert torch.equal(y, total)


class Sometimes(nn.Module):
    """A block whose dropout is not read by the sum if `other` is set."""

    def __init__(self):
        super().__init__()
        self.dropout, self.other = nn.Dropout(0.5), False

    def forward(self, x):
        branch = self.dropout(x.to(BF16))
        return x + (branch * 2 if self.other else branch)


def test_a_block_that_runs_otherwise_than_it_was_watched_is_an_error_if_a_dropout_is_lost(interpreted):
    block = Sometimes()
    x = torch.ones(1, 2, 8)
    with Watch(block, x) as watch:
        block(x)
    calls = watch.calls()
    assert [call.changed for call in calls] == [True, True]
    with ResidualSums(block, x, calls):
        assert set(block(x).unique().tolist()) == {1.0, 3.0}
    block.other = True
    with pytest.raises(RuntimeError, match="ran otherwise"), ResidualSums(block, x, calls):
        block(x)
    with ResidualSums(block, x, calls[1:]):  # another first call: all run as they are
        assert set(block(x).unique().tolist()) <= {1.0, 5.0}


def test_a_dropout_that_anything_else_reads_or_that_changes_its_input_is_not_moved():
    for forward in (
        lambda x, y: (x + (d := F.dropout(y, 0.5))) * d.sum(),
        lambda x, y: x + F.dropout(y, 0.5, True, True),
        lambda x, y: x + torch.sigmoid(F.dropout(y, 0.5)),
        lambda x, y: x.double() + F.dropout(y, 0.5),
        lambda x, y: x[..., :6] + F.dropout(y[..., :6], 0.5),
    ):
        block = nn.Module()
        block.forward = lambda x, forward=forward: forward(x, x.to(BF16))
        x = torch.ones(1, 2, 8)
        with Watch(block, x) as watch:
            block.forward(x)
        assert not any(call.changed for call in watch.calls())


def fused_step(own_sums: bool):
    step, store = make_step(tiny_model("gpt2", dropout=0.1), precision="bf16", fused_kernels=Kernels.ALL, **PLAIN)
    for forward in step._decoder.block_forwards:
        forward.own_sums = own_sums
    return step, store


def test_a_model_that_a_user_has_changed_makes_its_own_sums():
    """A hook on a dropout sees the dropout's output, and what it returns is added."""
    found = []
    with with_plain_kernels():
        for own_sums in (False, True):
            step, store = fused_step(own_sums)
            step._decoder.blocks[0].mlp.dropout.register_forward_hook(lambda module, given, output: 2 * output)
            found.append(trainings.train(step, store, make_batches(2), [1e-3] * 2))
    assert found[0].differences(found[1]) == []


def test_a_block_that_runs_again_leaves_out_its_last_sum():
    """Two micro-batches; each sum once forward and once backward."""
    with with_plain_kernels():
        step, store = fused_step(own_sums=False)
        with Counting() as counting:
            trainings.train(step, store, make_batches(1), [1e-3])
    assert counting.operations[torch.ops.lowmem.drop.default] == 2 * 2 * len(step._decoder.blocks)


@pytest.mark.parametrize("written", ["sum", "input", None])
def test_a_norm_is_not_joined_to_a_sum_if_the_tensor_is_written_in_between(written):
    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.second = nn.LayerNorm(8), nn.LayerNorm(8)

        def forward(self, x):
            y = self.first(x).to(BF16)
            if written == "input":
                x += 1
            total = x + y
            if written == "sum":
                total += 1
            return total + self.second(total).to(BF16)

    block = Block().to("meta")
    cast_explicitly(block, FP32, Kernels.ALL)
    x = torch.ones(1, 2, 8, device="meta")
    with Watch(block, x) as watch:
        block(x)
    assert letters(watch.calls()) == {"sum": "NANA", "input": "SN", None: "NSN"}[written]


@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma3_text", "mixtral", "phi3"])
def test_sums_are_fused_with_a_mask_and_at_other_lengths_too(family):
    """With a mask, transformers repeats keys for grouped queries, which takes more operations."""
    config = ALL[family]()
    config.sliding_window = 16
    decoder = make_decoder(config, "bf16", "fp32", Kernels.ALL)
    values_for(decoder)
    ids = torch.arange(48).view(2, 24) % 97
    for documents in (None, torch.arange(48).view(2, 24) // 7):
        with torch.no_grad(), with_plain_kernels():
            hidden, extras = decoder.embed(ids, None, documents)
            with Counting() as counting:
                decoder.block(0, hidden, extras[0])
        assert counting.operations[torch.ops.aten.add.Tensor] == 1, "the last sum, which has no dropout"


@pytest.mark.parametrize("module", ["mlp", "attn", "mlp.dropout"])
def test_an_evaluation_and_a_call_see_what_a_users_hook_returns(module):
    losses = []
    with with_plain_kernels():
        for own_sums in (False, True):
            step, _ = fused_step(own_sums)
            block = step._decoder.blocks[0]
            block.get_submodule(module).register_forward_hook(lambda _, given, output: twice(output))
            losses.append(step.evaluate(make_batches(1)[0]))
    assert losses[0] == losses[1]


def twice(output):
    return 2 * output if isinstance(output, Tensor) else (2 * output[0], *output[1:])


def test_a_sum_whose_norm_nobody_reads_has_a_gradient(interpreted):
    x, branch = torch.randn(3, 8, requires_grad=True), torch.randn(3, 8).to(BF16).requires_grad_()
    weight = torch.ones(8, requires_grad=True)
    total, _ = normalize_sum(x, branch, None, weight, None, Rule(1e-5, 0.0, False), BF16)
    total.backward(gradient := torch.randn(3, 8))
    assert torch.equal(x.grad, gradient) and torch.equal(branch.grad, gradient.to(BF16)) and not weight.grad.any()


@pytest.mark.quick(4)
@pytest.mark.parametrize("forward", [True, False], ids=["forward", "backward"])
@test_fused.on_all_cards
def test_a_sum_without_a_norm_compiles_for_cards_and_moves_16_bytes_at_a_time(compiled, capability, kind, forward):
    narrow = ("x_at",) if forward else ("y_at",)
    types = {name: f"*{kind}" for name in narrow} | {"seeds_at": "*i64", "number": "i32", "n": "i32"}
    constants = {"ADDS": forward, "BLOCK": compiled.BLOCK}
    accesses = test_fused.accesses_of(compiled._drop, types, constants, "n", capability, 4)
    others = [access for access in accesses if "v4" not in access[1] and access[0] != "bar.sync"]
    assert others == [("ld.global", ".b64")], "the seed"
