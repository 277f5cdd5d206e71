"""Computes the cross-entropy of a linear head, and its gradients, without materializing all logits at once.

One chunk of tokens at a time goes through the head (as in Liger-Kernel and Apple's CCE, arXiv:2411.09009). Logits and
their gradients are in the weights' dtype, the softmax is in fp32.
"""

import torch
from torch import Tensor

from lowmem.core.kernels import operators  # noqa: F401  defines torch.ops.lowmem
from lowmem.core.logits import LogitFunction
from lowmem.units import round_up

IGNORED = -100
# Bytes per logit of a chunk: 2 if fused. Otherwise 2, and 4 for an fp32 copy, in 16 bit; 4 in fp32; 8 with a soft cap.
CHUNK_TOKENS = 512
FUSED_CHUNK_TOKENS = 1024  # each chunk reads and writes the accumulator, which dominates for fewer tokens
# The weight's gradient is added in bands of so many words: there is no second tensor [V, D].
_BAND_WORDS = 8192
# cuBLAS runs slow kernels if a row is not a multiple of 16 bytes. An H200 took six times as long for GPT-2's 50,257
# words as for 50,256.
_ALIGNED_WORDS = 8


@torch.no_grad()
def linear_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    *,
    bias: Tensor | None = None,
    scale: float = 1.0,
    function: LogitFunction = LogitFunction(),  # noqa: B008  it is frozen
    weight_gradient: Tensor | None = None,
    bias_gradient: Tensor | None = None,
    chunk_tokens: int | None = None,
    fused: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """Returns the cross-entropy loss of the linear head in fp32, summed over all tokens whose label is not -100, and
    the gradient for `hidden`. Without a `weight_gradient`, computes no gradient, and the second result is None.

    `hidden` [N, D] and `weight` [V, D] have one dtype, `labels` [N] are int64, `bias` [V] is fp32. `scale` multiplies
    gradients, not the loss. `function` is applied to the logits before the softmax. Adds gradients to `weight_gradient`
    [V, D] and `bias_gradient` [V], both fp32. `fused`: True to compute the loss by one kernel after the head's matmul,
    for 16-bit weights. `chunk_tokens`: None for 512, or 1,024 if `fused`.
    """
    differentiate = weight_gradient is not None
    wanted = scale if differentiate else None
    chunk_tokens = chunk_tokens or (FUSED_CHUNK_TOKENS if fused else CHUNK_TOKENS)
    hidden_gradient = torch.empty_like(hidden) if differentiate else None
    loss = torch.zeros((), dtype=torch.float32, device=hidden.device)
    rows = min(chunk_tokens, hidden.shape[0])
    buffer = hidden.new_empty(rows, round_up(weight.shape[0], 16)) if fused else None
    if buffer is not None:
        # In tests, the CPU computes a GPU's products. oneDNN's for AMX reads past the end of a row of odd length.
        buffer[:, weight.shape[0] :].zero_()
    for start in range(0, hidden.shape[0], chunk_tokens):
        chunk = hidden[start : start + chunk_tokens]
        targets = labels[start : start + chunk_tokens]
        if fused:
            losses, gradient = _in_one_kernel(chunk, weight, bias, targets, wanted, function, buffer)
        else:
            losses, gradient = _line_by_line(chunk, weight, bias, targets, wanted, function)
        loss += losses.sum()
        if not differentiate:
            continue
        if bias_gradient is not None:
            bias_gradient += gradient.sum(dim=0, dtype=torch.float32)
        if fused:
            _multiply_back(gradient, weight, chunk, hidden_gradient[start : start + chunk_tokens], weight_gradient)
            continue
        gradient = gradient.to(weight.dtype)
        torch.mm(gradient, weight, out=hidden_gradient[start : start + chunk_tokens])
        for word in range(0, weight.shape[0], _BAND_WORDS):
            band = weight_gradient[word : word + _BAND_WORDS]
            if weight.dtype is torch.float32:
                band.addmm_(gradient[:, word : word + _BAND_WORDS].T, chunk)
            else:
                band += gradient[:, word : word + _BAND_WORDS].T @ chunk
        del gradient
    return loss, hidden_gradient


def _line_by_line(
    chunk: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor, scale: float | None, function: LogitFunction
) -> tuple[Tensor, Tensor | None]:
    """Computes the loss with PyTorch's separate operators. Returns the losses [C] of one chunk, and `scale` times the
    gradient for its logits, [C, V] fp32. The gradient is None if `scale` is None."""
    counted = targets != IGNORED
    targets = targets.clamp(min=0)[:, None]
    logits = torch.nn.functional.linear(chunk, weight).float()  # [C, V] fp32; in place from here on
    if bias is not None:
        logits += bias
    slope = None  # derivative of a cap, without its factors
    if function.inner is not None:
        logits.mul_(function.inner).tanh_()
        slope = None if scale is None else logits.square().neg_().add_(1)
    if function.outer != 1:
        logits *= function.outer
    maximum = logits.amax(dim=1, keepdim=True)
    target_logit = logits.gather(1, targets)
    exponentials = logits.sub_(maximum).exp_()
    total = exponentials.sum(dim=1, keepdim=True)
    losses = torch.where(counted, (total.log() + maximum - target_logit)[:, 0], 0.0)
    if scale is None:
        return losses, None
    factor = counted.to(torch.float32)[:, None] * (scale * function.outer * (function.inner or 1))
    gradient = exponentials.mul_(factor / total)
    places = torch.arange(len(chunk), device=chunk.device) * len(weight) + targets[:, 0]  # all different, so not sorted
    torch.ops.lowmem.add_rows(gradient.view(-1), places, -factor[:, 0])
    return losses, gradient if slope is None else gradient.mul_(slope)


def _in_one_kernel(
    chunk: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    targets: Tensor,
    scale: float | None,
    function: LogitFunction,
    buffer: Tensor,
) -> tuple[Tensor, Tensor | None]:
    """Computes the loss with one kernel after the head's matmul. Returns the losses [C] of one chunk, and `scale` times
    the gradient for its logits, [C, V]. The gradient is a view of `buffer`; if `scale` is None, it must not be used."""
    logits = buffer[: chunk.shape[0], : weight.shape[0]]
    for words in _aligned(weight.shape[0]):
        torch.mm(chunk, weight[words].T, out=logits[:, words])
    losses = torch.empty(chunk.shape[0], dtype=torch.float32, device=chunk.device)
    torch.ops.lowmem.cross_entropy(logits, bias, targets, losses, scale, function.outer, function.inner)
    return losses, logits


def _multiply_back(
    gradient: Tensor, weight: Tensor, chunk: Tensor, hidden_gradient: Tensor, weight_gradient: Tensor
) -> None:
    """Runs the head's matmul backward for one chunk. `gradient` [C, V]: the gradient for its logits. Overwrites
    `hidden_gradient` [C, D], and adds to `weight_gradient` [V, D] fp32."""
    most, *others = _aligned(weight.shape[0])
    for words in others:  # before the rest, so that the large sum is rounded once
        torch.mm(gradient[:, words], weight[words], out=hidden_gradient)
        torch.ops.lowmem.add_product(weight_gradient[words], gradient[:, words].T, chunk)
    hidden_gradient.addmm_(gradient[:, most], weight[most], beta=len(others))
    torch.ops.lowmem.add_product(weight_gradient[most], gradient[:, most].T, chunk)


def _aligned(words: int) -> list[slice]:
    whole = words - words % _ALIGNED_WORDS
    return [part for part in (slice(0, whole), slice(whole, words)) if part.start < part.stop]
