"""An embedding's gradient added by the rows of its tokens: the bits of the dense one, and no dense one is made."""

from contextlib import nullcontext

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoModelForCausalLM

from experiments.harness.trainings import PLAIN, Outcome, make_step, train
from families import FAMILIES, MORE_FAMILIES
from lowmem.core import operations
from lowmem.core.lookups import SparseLookups, register_add_rows
from reference import VOCABULARY, make_batch

WORDS, WIDTH = 50, 8
IDS = torch.tensor([[3, 3, 0, 49, 3], [7, 0, 49, 3, 11]])


def gradients(dtype: torch.dtype, ids: Tensor, sparse: bool, **options) -> tuple[Tensor, Tensor | None]:
    """What was added to the accumulator, and what autograd left in `grad`."""
    torch.manual_seed(0)
    table = nn.Parameter(torch.randn(WORDS, WIDTH).to(dtype))
    accumulator, gradient = torch.randn(WORDS, WIDTH), torch.randn(*ids.shape, WIDTH)
    register_add_rows(table, lambda ids, rows: accumulator.index_add_(0, ids, rows.float()))
    with SparseLookups() if sparse else nullcontext():
        looked_up = F.embedding(ids, table, **options)
    assert torch.equal(looked_up, table[ids])
    (looked_up.float() * gradient).sum().backward()
    return accumulator, table.grad


@pytest.mark.parametrize("options", [{}, {"padding_idx": 3}, {"padding_idx": -1}], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_rows_have_the_bits_of_the_dense_gradient(dtype, options):
    found, left = gradients(dtype, IDS, sparse=True, **options)
    before, dense = gradients(dtype, IDS, sparse=False, **options)
    assert left is None and torch.equal(found, before.add_(dense))


@pytest.mark.parametrize("options", [{"scale_grad_by_freq": True}, {"max_norm": 100.0}], ids=str)
def test_other_lookups_stay_as_they_are(options):
    before, dense = gradients(torch.float32, IDS, sparse=False, **options)
    found, left = gradients(torch.float32, IDS, sparse=True, **options)
    assert torch.equal(left, dense) and torch.equal(found, before)


def test_a_hook_of_a_user_gets_the_whole_gradient():
    """Seen to fail: it got None, and what it returned was ignored."""
    table, seen = nn.Parameter(torch.randn(WORDS, WIDTH)), []
    register_add_rows(table, lambda *_: seen.append("rows"))
    table.register_hook(lambda gradient: seen.append(gradient.shape))
    with SparseLookups():
        F.embedding(IDS, table).sum().backward()
    assert seen == [table.shape]


def test_no_token_has_no_gradient():
    found, _ = gradients(torch.float32, IDS[:, :0], sparse=True)
    assert torch.equal(found, gradients(torch.float32, IDS[:, :0], sparse=False)[0])


@pytest.mark.parametrize("mode", ["default", "warn", "error"])
def test_whether_algorithms_must_be_deterministic_stays_as_it_was(mode):
    before = torch.get_deterministic_debug_mode()
    try:
        torch.set_deterministic_debug_mode(mode)
        set_to = torch.get_deterministic_debug_mode()
        sums = torch.zeros(WORDS, WIDTH)
        torch.ops.lowmem.add_rows(sums, IDS[0, :3], torch.eye(3, WIDTH))
        assert torch.get_deterministic_debug_mode() == set_to and sums.sum() == 3
    finally:
        torch.set_deterministic_debug_mode(before)


def test_a_table_with_fewer_rows_than_ids_has_a_dense_gradient():
    ids = torch.arange(WORDS).repeat(2)
    assert gradients(torch.float32, ids, sparse=True)[1] is not None


class _Widest(TorchDispatchMode):
    """Notes the most rows of a lookup's gradient."""

    rows = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **kwargs or {})
        if function is torch.ops.aten.embedding_dense_backward.default:
            self.rows = max(self.rows, len(result))
        return result


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("family", ["gpt2", "opt", "gemma"])  # OPT has an id for padding, Gemma scales its lookups
def test_a_step_makes_no_gradient_of_the_whole_vocabulary_and_trains_the_same_bits(family, precision, monkeypatch):
    config = (FAMILIES | MORE_FAMILIES)[family]()

    def outcome() -> tuple[Outcome, int]:
        torch.manual_seed(0)
        step, store = make_step(AutoModelForCausalLM.from_config(config), micro_batch=1, precision=precision, **PLAIN)
        with _Widest() as widest:
            return train(step, store, [make_batch(seed, rows=2, seq=16) for seed in range(2)]), widest.rows

    found, rows = outcome()
    monkeypatch.setattr(operations, "SparseLookups", nullcontext)
    expected, all_rows = outcome()
    assert found.differences(expected) == []
    assert rows < all_rows == VOCABULARY
