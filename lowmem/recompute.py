"""What a segment of blocks saves for its backward, and what it computes again.

With recompute a segment saves its input (the boundary) and nothing else, and runs a second time before its backward
(Chen et al., arXiv:1604.06174); without, it keeps its graph. Both run the same kernels on the same numbers, so the bits
are equal as long as dropout draws the same masks: each block seeds its device's generator with a number made of (run,
optimizer step, micro-batch, block) before it runs. Nothing of the generator is saved or restored, and no order of
execution, no segment length and no group size can change a mask.

Bytes per token and segment: 4 D for an fp32 boundary, 2 D in 16 bit; kept whole, a GPT-2 block saves about 17 D x 2.
"""

import hashlib
import struct
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from transformers.activations import NewGELUActivation

from lowmem.blocks import Decoder, Extra


def fuse_gelu(model: nn.Module) -> None:
    """Puts torch's own tanh-GELU in the place of transformers' composition of it (`gelu_new`): the same function, one
    kernel and one saved tensor of the MLP's inner width where there were eight and four. It differs by rounding."""
    for module in model.modules():
        for name, child in module.named_children():
            if isinstance(child, NewGELUActivation):
                setattr(module, name, nn.GELU(approximate="tanh"))


@dataclass(frozen=True)
class Dropout:
    """Names the dropout masks of one micro-batch of one optimizer step."""

    seed: int
    step: int
    micro_batch: int

    def begin(self, layer: int, device: torch.device) -> None:
        """Seeds `device`'s generator for `layer` (-1: the embeddings; the number of blocks: the final norm)."""
        text = struct.pack("<4q", self.seed, self.step, self.micro_batch, layer)
        number = int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little") >> 1
        if device.type == "cuda":
            torch.cuda.manual_seed(number)
        else:
            torch.default_generator.manual_seed(number)


@dataclass
class Saved:
    """A segment's boundary [B, T, D] and, where it is not recomputed, its output with the graph behind it."""

    boundary: Tensor
    output: Tensor | None


def forward(
    decoder: Decoder, segment: range, hidden: Tensor, extras: Sequence[Extra], dropout: Dropout, recompute: bool
) -> tuple[Tensor, Saved]:
    """Blocks `segment` on `hidden` [B, T, D]: their output, detached, and what `backward` needs."""
    if recompute:
        with torch.no_grad():
            return _run(decoder, segment, hidden, extras, dropout), Saved(hidden, None)
    boundary = hidden.detach().requires_grad_()
    output = _run(decoder, segment, boundary, extras, dropout)
    return output.detach(), Saved(boundary, output)


def backward(
    decoder: Decoder, segment: range, saved: Saved, extras: Sequence[Extra], dropout: Dropout, gradient: Tensor
) -> Tensor:
    """From the gradient for the segment's output to that for its boundary, both [B, T, D]; parameters' gradients go
    where their hooks take them. `saved` is spent."""
    boundary, output = saved.boundary, saved.output
    if output is None:
        boundary = boundary.detach().requires_grad_()
        output = _run(decoder, segment, boundary, extras, dropout)
    saved.output = None
    output.backward(gradient)
    return boundary.grad


def _run(decoder: Decoder, segment: range, hidden: Tensor, extras: Sequence[Extra], dropout: Dropout) -> Tensor:
    for index in segment:
        dropout.begin(index, hidden.device)
        hidden = decoder.block(index, hidden, extras[index])
    return hidden
