"""A model and an optimizer whose step makes the allocator's requests of a recorded program, in the same order.

The program is public (CS336's second assignment, see recordings.json). Only the tensors and their lifetimes matter: if
a name is used twice (`x`, `mixed`), the first tensor must not outlive that line. Shape suffixes: B sequences, T tokens
of each, D width, H heads, K width of a head, V vocabulary.
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

VOCABULARY = 10_000


@dataclass(frozen=True)
class Size:
    """The decoder's size, and the device of its weights."""

    layers: int
    width: int
    heads: int
    inner_width: int
    device: str = "cuda"

    def weight(self, *shape: int) -> nn.Parameter:
        """Returns a weight of this shape, not initialized."""
        return nn.Parameter(torch.empty(*shape, device=self.device))


MEDIUM = Size(24, 1024, 16, 4096)  # the recorded one of the assignment's sizes


class Linear(nn.Module):
    def __init__(self, inputs: int, outputs: int, size: Size):
        super().__init__()
        self.weight = size.weight(outputs, inputs)

    def forward(self, x: Tensor) -> Tensor:
        return torch.einsum("...i,oi->...o", x, self.weight)


class Embedding(nn.Module):
    def __init__(self, size: Size):
        super().__init__()
        self.weight = size.weight(VOCABULARY, size.width)

    def forward(self, ids_BT: Tensor) -> Tensor:
        return self.weight[ids_BT, :]


class RMSNorm(nn.Module):
    """Root mean square normalisation, computed in fp32."""

    def __init__(self, size: Size):
        super().__init__()
        self.weight = size.weight(size.width)

    def forward(self, x: Tensor) -> Tensor:
        came_as = x.dtype
        x = x.to(torch.float32)
        scale = torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-5)
        x = x * scale
        return (self.weight * x).to(came_as)


class Rotary(nn.Module):
    """Rotary position embedding. The tables of cosines and sines are made on the CPU and copied: one allocation."""

    def __init__(self, context: int, size: Size):
        super().__init__()
        half = size.width // size.heads // 2
        angles = torch.outer(torch.arange(context), 10_000.0 ** -(torch.arange(half) / half))
        self.register_buffer("table", torch.stack((angles.cos(), angles.sin())).to(size.device), persistent=False)

    def forward(self, x_BHTK: Tensor) -> Tensor:
        even, odd = x_BHTK.unflatten(-1, (-1, 2)).movedim(-1, 0).unbind(0)
        cosine, sine = self.table[:, : x_BHTK.size(-2), :].unbind(0)
        first = cosine * even - sine * odd
        second = sine * even + cosine * odd
        return torch.concat((first, second), dim=-1)


def softmax(x: Tensor) -> Tensor:
    shifted = x - torch.max(x, dim=-1, keepdim=True)[0]
    powers = torch.exp(shifted)
    return powers / torch.sum(powers, dim=-1, keepdim=True)


def attend(q_BHTK: Tensor, k_BHTK: Tensor, v_BHTK: Tensor, mask: Tensor) -> Tensor:
    scores_BHTT = torch.einsum("...qk,...sk->...qs", q_BHTK, k_BHTK) / math.sqrt(k_BHTK.shape[-1])
    scores_BHTT = torch.where(mask, scores_BHTT, float("-inf"))
    weights_BHTT = softmax(scores_BHTT)
    return torch.einsum("...qs,...sk->...qk", weights_BHTT, v_BHTK)


class Attention(nn.Module):
    def __init__(self, rotary: Rotary, size: Size):
        super().__init__()
        self.query, self.key, self.value, self.output = (Linear(size.width, size.width, size) for _ in range(4))
        self.rotary, self.heads = rotary, size.heads

    def forward(self, x_BTD: Tensor) -> Tensor:
        tokens = x_BTD.size(1)
        q, k, v = self.query(x_BTD), self.key(x_BTD), self.value(x_BTD)
        q, k, v = (y.unflatten(-1, (self.heads, -1)).transpose(1, 2) for y in (q, k, v))
        q = self.rotary(q)
        k = self.rotary(k)
        positions = torch.arange(tokens, device=x_BTD.device)
        mask = (positions[:, None] >= positions[None, :])[None]
        mixed = attend(q, k, v, mask)
        mixed = mixed.transpose(1, 2).reshape(x_BTD.shape)
        return self.output(mixed)


class MLP(nn.Module):
    """SwiGLU, with the SiLU as a separate product."""

    def __init__(self, size: Size):
        super().__init__()
        self.gate, self.down, self.up = (
            Linear(size.width, size.inner_width, size),
            Linear(size.inner_width, size.width, size),
            Linear(size.width, size.inner_width, size),
        )

    def forward(self, x_BTD: Tensor) -> Tensor:
        return self.down(silu(self.gate(x_BTD)) * self.up(x_BTD))


def silu(x: Tensor) -> Tensor:
    return x * torch.sigmoid(x)


class Block(nn.Module):
    def __init__(self, rotary: Rotary, size: Size):
        super().__init__()
        self.attention, self.mlp = Attention(rotary, size), MLP(size)
        self.before_attention, self.before_mlp = RMSNorm(size), RMSNorm(size)

    def forward(self, x_BTD: Tensor) -> Tensor:
        from_attention = self.attention(self.before_attention(x_BTD))
        middle = x_BTD + from_attention
        from_mlp = self.mlp(self.before_mlp(middle))
        result = middle + from_mlp
        return result


class Model(nn.Module):
    """The decoder, made in the order in which the recorded program moves its parameters to the GPU."""

    def __init__(self, context: int, size: Size = MEDIUM):
        super().__init__()
        self.embedding = Embedding(size)
        self.rotary = Rotary(context, size)
        self.blocks = nn.ModuleList(Block(self.rotary, size) for _ in range(size.layers))
        self.norm = RMSNorm(size)
        self.head = Linear(size.width, VOCABULARY, size)

    def forward(self, ids_BT: Tensor) -> Tensor:
        embedded = self.embedding(ids_BT)
        x = embedded  # the embeddings stay until the forward ends, since their first name does
        for block in self.blocks:
            x = block(x)
        x = self.norm(x)
        logits_BTV = self.head(x)
        return logits_BTV


def log_softmax(x: Tensor) -> Tensor:
    largest = torch.max(x, dim=-1, keepdim=True)[0]
    x = x - largest
    return x - torch.log(torch.sum(torch.exp(x), dim=-1, keepdim=True))


def cross_entropy(logits_BTV: Tensor, targets_BT: Tensor) -> Tensor:
    negative = -log_softmax(logits_BTV)
    return torch.mean(torch.gather(negative, -1, targets_BT.unsqueeze(-1)))


class AdamW(torch.optim.Optimizer):
    """The textbook's update, every operation out of place: the new moments exist beside the old ones."""

    def __init__(self, parameters: Iterable[nn.Parameter]):
        super().__init__(parameters, {"lr": 1e-3, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.01})

    def step(self) -> None:
        for group in self.param_groups:
            beta1, beta2 = group["betas"]
            for parameter in group["params"]:
                gradient = parameter.grad.data
                state = self.state[parameter]
                number = state.get("number", 1)
                rate = group["lr"] * math.sqrt(1 - beta2**number) / (1 - beta1**number)
                parameter.data -= group["lr"] * group["weight_decay"] * parameter.data
                # `get` evaluates its default even where it is not needed, so zeros come and go in every step.
                old_m = state.get("m", torch.zeros_like(gradient))
                old_v = state.get("v", torch.zeros_like(gradient))
                m = beta1 * old_m + ((1 - beta1) * gradient)
                v = beta2 * old_v + ((1 - beta2) * torch.square(gradient))
                parameter.data -= rate * m / (torch.sqrt(v) + group["eps"])
                state["m"] = m
                state["v"] = v
                state["number"] = number + 1
