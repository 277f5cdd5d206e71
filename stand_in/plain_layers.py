"""Computes the layers' Triton kernels in plain PyTorch, a hundred times as fast as Triton's interpreter."""

import torch
from torch import Tensor


def normalize(
    x: Tensor, weight: Tensor, bias: Tensor | None, y: Tensor, statistics: Tensor | None, epsilon: float, offset: float,
    centered: bool, branch: Tensor | None = None, total: Tensor | None = None, seeds: Tensor | None = None,
    number: int = 0, p: float = 0.0,
) -> None:  # fmt: skip
    if branch is not None:
        x = x + (branch if seeds is None else _dropped(branch, seeds[number], p))
        x = total.copy_(x.view(total.shape)).view(x.shape)
    x = x.float()
    mean = x.mean(-1, keepdim=True) if centered else torch.zeros(1)
    factor = torch.rsqrt((x - mean).square().mean(-1, keepdim=True) + epsilon)
    y.copy_((x - mean) * factor * (weight + offset) + (0.0 if bias is None else bias))
    if statistics is not None:
        statistics.copy_(torch.stack((factor.flatten(), mean.flatten())[: len(statistics)]))


def normalize_backward(
    gradient: Tensor, x: Tensor, weight: Tensor, statistics: Tensor, x_gradient: Tensor, partial_sums: Tensor,
    offset: float, other_gradient: Tensor | None = None, branch_gradient: Tensor | None = None,
    seeds: Tensor | None = None, number: int = 0, p: float = 0.0,
) -> None:  # fmt: skip
    gradient, factor = gradient.float().view(-1, x.shape[-1]), statistics[0][:, None]
    centered = len(statistics) == 2
    x = (x.float().view(gradient.shape) - (statistics[1][:, None] if centered else 0.0)) * factor
    partial_sums.zero_()
    for total, of_rows in zip(partial_sums, (gradient * x, gradient), strict=False):
        total[0] = of_rows.sum(0)
    gradient = gradient * (weight + offset)
    result = gradient - x * (gradient * x).mean(1, keepdim=True)
    result = ((result - gradient.mean(1, keepdim=True) if centered else result) * factor).view(x_gradient.shape)
    if other_gradient is not None:
        result += other_gradient
    x_gradient.copy_(result)
    if branch_gradient is not None:
        branch_gradient.copy_(result if seeds is None else _dropped(result, seeds[number], p))


def drop(x: Tensor, added: Tensor | None, y: Tensor, seeds: Tensor, number: int, p: float) -> None:
    dropped = _dropped(x, seeds[number], p)
    y.copy_(dropped if added is None else added + dropped)


def _dropped(x: Tensor, seed: Tensor, p: float) -> Tensor:
    """Returns fp32 dropout of `x`, with other masks than the kernel's."""
    numbers = torch.rand(x.shape, generator=torch.Generator().manual_seed(seed.item()))
    return torch.where(numbers >= p, x.float() * (1 / (1 - p) if p < 1 else 0.0), 0.0)


def gated(gate: Tensor, up: Tensor | None, linear: float, cubic: float, erf: bool) -> Tensor:
    return (gate * _share(gate.float(), linear, cubic, erf) * (1.0 if up is None else up)).to(gate.dtype)


def gated_backward(
    gradient: Tensor, gate: Tensor, up: Tensor | None, y: Tensor, of_up: Tensor | None, partial_sums: Tensor | None,
    linear: float, cubic: float, erf: bool,
) -> None:  # fmt: skip
    y.copy_(gated(gate, up, linear, cubic, erf).view(y.shape))
    given, gate = gradient.float(), gate.float()
    share = _share(gate, linear, cubic, erf)
    slope = share + gate * share * (1 - share) * (linear + 3 * cubic * gate * gate)
    if erf:
        slope = share + gate * torch.exp(-gate * gate / 2) / (2 * torch.pi) ** 0.5
    of_gate = given * slope * (1.0 if up is None else up)
    gradient.copy_(of_gate)
    if up is not None:
        of_up.copy_(given * gate * share)
    if partial_sums is not None:
        partial_sums.zero_()[:1] = of_gate.flatten(0, -2).sum(0)


def _share(gate: Tensor, linear: float, cubic: float, erf: bool) -> Tensor:
    """Returns activation(gate) / gate, of GELU if `erf`, else of gate * sigmoid(linear * gate + cubic * gate**3)."""
    return (1 + torch.erf(gate * 0.5**0.5)) / 2 if erf else torch.sigmoid(gate * (linear + cubic * gate * gate))


def rotate(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, new_q: Tensor, new_k: Tensor, backward: bool) -> None:
    half = cos.shape[-1] // 2
    cos, sin = cos.float().unsqueeze(1), sin.float().unsqueeze(1)
    if backward:
        sin = -sin.roll(half, -1)
    for x, new in ((q, new_q), (k, new_k)):
        new.copy_(x)  # numbers that are not rotated
        first, second = x[..., : 2 * half].float().chunk(2, -1)
        new[..., : 2 * half].copy_(torch.cat((first, second), -1) * cos + torch.cat((-second, first), -1) * sin)
