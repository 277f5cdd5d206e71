"""Layers of which each rank has a part."""

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import AttentionInterface
from transformers.masking_utils import AttentionMaskInterface

from experiments.harness.randomness import seed_of
from experiments.tensor_parallel.collectives import FORWARD, Ranks

ATTENTION = "lowmem_tensor_parallel"
Product = Callable[[Tensor, Tensor], Tensor]  # of input and weight


def conv1d_product(x: Tensor, weight: Tensor) -> Tensor:
    """Computes transformers' Conv1D, whose weight is [in, out]."""
    return x @ weight


class ColumnParallel(nn.Module):
    """Computes a rank's part of the outputs: x [.., in], the same on all ranks, -> [.., part of out]. Weight and bias
    have only this rank's outputs."""

    def __init__(self, product: Product, weight: nn.Parameter, bias: nn.Parameter | None):
        super().__init__()
        self.product, self.weight, self.bias = product, weight, bias

    def forward(self, x: Tensor) -> Tensor:
        return _biased(self.product(x, self.weight), self.bias)


class RowParallel(ColumnParallel):
    """Computes outputs from a rank's part of the inputs: x [.., part of in] -> [.., out]. `leave` sums over the ranks.
    All ranks have the bias, which is added to the sum."""

    def __init__(self, product: Product, weight: nn.Parameter, bias: nn.Parameter | None, leave: Callable):
        super().__init__(product, weight, bias)
        self.leave = leave

    def forward(self, x: Tensor) -> Tensor:
        return _biased(self.leave(self.product(x, self.weight)), self.bias)


def _biased(y: Tensor, bias: Tensor | None) -> Tensor:
    if bias is None:
        return y
    return y + (bias[:, None, None] if y.dim() == 4 else bias)  # channels of an image come second


class VocabularyParallelEmbedding(nn.Module):
    """Looks up ids [B, T] -> [B, T, D] in rows of an embedding from `first` on. Other ranks' ids give zeros; `leave`
    sums over the ranks."""

    def __init__(self, weight: nn.Parameter, first: int, leave: Callable):
        super().__init__()
        self.weight, self.first, self.leave = weight, first, leave

    def forward(self, ids: Tensor) -> Tensor:
        own = ids - self.first
        is_others = (own < 0) | (own >= len(self.weight))
        return self.leave(F.embedding(own.masked_fill(is_others, 0), self.weight).masked_fill(is_others[..., None], 0))


class _VocabularyCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx, logits: Tensor, targets: Tensor, first: int, vocabulary: int, ranks: Ranks) -> Tensor:
        key = (ranks.place, FORWARD)
        logits = logits.clone()
        logits[:, max(0, vocabulary - first) :] = -torch.inf  # what only fills up the last ranks' parts
        largest = ranks.all_reduce(logits.max(1).values, key, torch.distributed.ReduceOp.MAX)
        own = targets - first
        is_own = (own >= 0) & (own < logits.shape[1])
        row = torch.arange(len(own), device=own.device)
        exponentials = logits.sub_(largest[:, None])
        target = exponentials[row, own.clamp(0, logits.shape[1] - 1)].where(is_own, 0)
        exponentials.exp_()
        total, target = ranks.all_reduce(torch.stack((exponentials.sum(1), target)), key)
        ctx.save_for_backward(exponentials.div_(total[:, None]), own, is_own)
        return total.log() - target

    @staticmethod
    def backward(ctx, gradient: Tensor):
        probabilities, own, is_own = ctx.saved_tensors
        found = probabilities.clone()
        found[torch.arange(len(own), device=own.device)[is_own], own[is_own]] -= 1
        return found * gradient[:, None], None, None, None, None


def vocabulary_cross_entropy(logits: Tensor, targets: Tensor, first: int, vocabulary: int, ranks: Ranks) -> Tensor:
    """Returns the mean cross-entropy over N predictions, the same on all ranks. `logits` [N, part of the vocabulary],
    from `first` on; `targets` int64 [N]; `vocabulary`: its true size, behind which logits count for nothing."""
    return _VocabularyCrossEntropy.apply(logits, targets, first, vocabulary, ranks).mean()


class FeatureParallelLayerNorm(nn.Module):
    """Computes layer norm over D features [.., D], of which each rank has a part."""

    def __init__(self, weight: nn.Parameter, bias: nn.Parameter, features: int, eps: float, ranks: Ranks):
        super().__init__()
        self.weight, self.bias, self.features, self.eps, self.ranks = weight, bias, features, eps, ranks

    def forward(self, x: Tensor) -> Tensor:
        # One sum after the other, since E[x^2] - E[x]^2 would lose digits.
        centred = x - self.ranks.reduce_both_ways(x.sum(-1, keepdim=True)) / self.features
        variance = self.ranks.reduce_both_ways(centred.square().sum(-1, keepdim=True)) / self.features
        return centred * (variance + self.eps).rsqrt() * self.weight + self.bias


class PlacedDropout(nn.Module):
    """Drops the same on any number of ranks, which take their parts of the whole tensor's mask. A mask depends on seed,
    step, layer number and sample number; `step` and `first_sample` have to be set before each call. `place` maps the
    local length along `dim` to its start in the whole, and the whole length."""

    def __init__(self, p: float, number: int, seed: int, dim: int = 0, place: Callable | None = None):
        super().__init__()
        self.p, self.number, self.seed, self.step, self.first_sample = p, number, seed, 0, 0
        self.dim, self.place = dim, place or (lambda length: (0, length))

    def forward(self, x: Tensor) -> Tensor:
        if not self.training or not self.p:
            return x
        shape, own = list(x.shape), x.shape[self.dim]
        begin, shape[self.dim] = self.place(own)
        mask = torch.empty([len(x), *shape[1:]], device=x.device)
        for sample, of_sample in enumerate(mask, self.first_sample):
            seed = seed_of(self.seed, self.step, self.number, sample)
            of_sample.uniform_(generator=torch.Generator(x.device).manual_seed(seed))
        return x * (mask >= self.p).narrow(self.dim, begin, own) / (1 - self.p)


def _causal_attention(module, query, key, value, attention_mask, scaling=None, **_) -> tuple[Tensor, None]:
    """Computes causal attention of this rank's heads: [B, heads, T, head] each -> [B, T, heads, head]."""
    drop = getattr(module, "attn_dropout", None)
    if drop is None or not drop.p or not module.training:
        grouped = {"enable_gqa": True} if key.shape[1] != query.shape[1] else {}
        output = F.scaled_dot_product_attention(query, key, value, is_causal=True, scale=scaling, **grouped)
        return output.transpose(1, 2).contiguous(), None
    times = query.shape[1] // key.shape[1]
    key, value = (tensor.repeat_interleave(times, 1) for tensor in (key, value))
    scores = query @ key.transpose(-1, -2) * scaling
    length = query.shape[2]
    later = torch.ones((length, length), dtype=torch.bool, device=query.device).triu(1)
    weights = drop(scores.masked_fill(later, -torch.inf).softmax(-1))
    return (weights @ value).transpose(1, 2).contiguous(), None


AttentionInterface.register(ATTENTION, _causal_attention)
# transformers' own mask would have the length of the rank's part of the sequence.
AttentionMaskInterface.register(ATTENTION, lambda *_, **__: None)
