"""CS336's decoder as github.com/philharmonic77/cs336-assignment1 builds it, whose operations differ a little.

Rotations check their positions, for which the host waits for the GPU four times in each block. They look up a row of
cosines for each position. Norms divide. AdamW works in place. Shape suffixes: B sequences, T tokens of each, D width, H
heads, K width of a head, V vocabulary.
"""

import math
from collections.abc import Iterable

import torch
from torch import Tensor, nn

from tests.cuda.recorded_model import Attention, Model, RMSNorm, Size, softmax


class DividingNorm(RMSNorm):
    def forward(self, x: Tensor) -> Tensor:
        came_as = x.dtype
        x = x.to(torch.float32)
        root = torch.sqrt(torch.mean(x**2, dim=-1, keepdim=True) + 1e-5)
        return (x / root * self.weight).to(came_as)


class CheckedRotary(nn.Module):
    """Rotary embedding that checks `positions_T` of the tokens, which the model sets before its blocks run."""

    positions_T: Tensor

    def __init__(self, context: int, size: Size):
        super().__init__()
        self.context = context
        half = size.width // size.heads // 2
        for name in ("cosines", "sines"):
            self.register_buffer(name, torch.empty(context, half, device=size.device), persistent=False)

    def forward(self, x_BHTK: Tensor) -> Tensor:
        assert (self.positions_T.max() < self.context).item()
        assert (self.positions_T.min() >= 0).item()
        cosine_TK, sine_TK = self.cosines[self.positions_T], self.sines[self.positions_T]
        even, odd = x_BHTK[..., 0::2], x_BHTK[..., 1::2]
        first = cosine_TK * even - sine_TK * odd
        second = sine_TK * even + cosine_TK * odd
        turned_BHTK = torch.empty_like(x_BHTK)
        turned_BHTK[..., 0::2] = first
        turned_BHTK[..., 1::2] = second
        return turned_BHTK


class CheckedAttention(Attention):
    def forward(self, x_BTD: Tensor) -> Tensor:
        tokens, device = x_BTD.size(1), x_BTD.device
        q, k, v = self.query(x_BTD), self.key(x_BTD), self.value(x_BTD)
        q, k, v = (y.unflatten(-1, (self.heads, -1)).transpose(1, 2) for y in (q, k, v))
        q = self.rotary(q)
        k = self.rotary(k)
        mask_TT = torch.arange(tokens, device=device) <= torch.arange(tokens, device=device)[:, None]
        scores_BHTT = torch.einsum("...qk,...sk->...qs", q, k) / math.sqrt(k.shape[-1])
        weights_BHTT = softmax(scores_BHTT.masked_fill(~mask_TT, float("-inf")))
        mixed = torch.einsum("...qs,...sk->...qk", weights_BHTT, v)
        return self.output(mixed.transpose(1, 2).reshape(x_BTD.shape))


class CheckedModel(Model):
    def __init__(self, context: int, size: Size):
        super().__init__(context, size)
        self.rotary = CheckedRotary(context, size)
        for block in self.blocks:
            block.attention = CheckedAttention(self.rotary, size)
            block.before_attention, block.before_mlp = DividingNorm(size), DividingNorm(size)
        self.norm = DividingNorm(size)

    def forward(self, ids_BT: Tensor) -> Tensor:
        self.rotary.positions_T = torch.arange(ids_BT.size(1), device=ids_BT.device)
        return super().forward(ids_BT)


def cross_entropy_of_logits(logits_BTV: Tensor, targets_BT: Tensor) -> Tensor:
    largest = logits_BTV.max(dim=-1, keepdim=True).values
    normalizer = largest + torch.log(torch.sum(torch.exp(logits_BTV - largest), dim=-1, keepdim=True))
    return (normalizer - torch.gather(logits_BTV, -1, targets_BT.unsqueeze(-1))).mean()


class InPlaceAdamW(torch.optim.Optimizer):
    def __init__(self, parameters: Iterable[nn.Parameter]):
        super().__init__(parameters, {})

    @torch.no_grad()
    def step(self) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                state, gradient = self.state[parameter], parameter.grad.data
                if not state:
                    state["m"], state["v"] = torch.zeros_like(parameter), torch.zeros_like(parameter)
                state["m"].mul_(0.9).add_(gradient, alpha=0.1)
                state["v"].mul_(0.999).addcmul_(gradient, gradient, value=0.001)
                parameter.addcdiv_(state["m"], state["v"].sqrt().add_(1e-8), value=-3e-4)
                parameter.mul_(1.0)
