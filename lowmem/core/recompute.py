"""Runs a segment (consecutive blocks) forward and backward, with activation checkpointing (docs/recompute.md)."""

import hashlib
import struct
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass

import torch
from torch import Tensor

from lowmem.core.decoder import Decoder, Extra
from lowmem.core.operation_recorder import called_again
from lowmem.core.products import ProductRecorder, ProductReplayer, SavedProduct, product_skipped

# Forward saves a segment's input; with PRODUCTS also the outputs of matmuls and attention; with ALL the autograd graph.
INPUT, PRODUCTS, ALL = "input", "products", "all"


@dataclass(frozen=True)
class Dropout:
    """Seeds the dropout masks of one micro-batch in one optimizer step."""

    seed: int
    step: int
    micro_batch: int

    def begin(self, layer: int, device: torch.device) -> None:
        """Seeds the random generator of `device`; must be called before `layer` runs. `layer`: a block's number, -1 for
        the embeddings, or the number of blocks for the final norm."""
        text = struct.pack("<4q", self.seed, self.step, self.micro_batch, layer)
        number = int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little") >> 1
        if device.type == "cuda":
            torch.cuda.manual_seed(number)
        else:
            torch.default_generator.manual_seed(number)


@dataclass(frozen=True)
class Segment:
    blocks: range  # consecutive; they run and are recomputed together
    keep: str  # INPUT, PRODUCTS or ALL


@dataclass
class SavedSegment:
    boundary: Tensor  # the segment's input [B, T, D]
    products: list[SavedProduct | None] | None = None  # recorded outputs, if `keep` is PRODUCTS
    output: Tensor | None = None  # the segment's output with its graph, if `keep` is ALL
    in_ram: bool = False  # True if the boundary is not on the device now (segment_windows.py)


def forward(
    decoder: Decoder, segment: Segment, hidden: Tensor, extras: Sequence[Extra], dropout: Dropout
) -> tuple[Tensor, SavedSegment]:
    """Returns the segment's output [B, T, D], without a graph, and the tensors that `backward` needs. `extras[i]`:
    arguments of block i other than its input."""
    if segment.keep == INPUT:
        with torch.no_grad():
            return _run(decoder, segment.blocks, hidden, extras, dropout), SavedSegment(hidden)
    boundary = hidden.detach().requires_grad_()
    if segment.keep == ALL:
        output = _run(decoder, segment.blocks, boundary, extras, dropout)
        return output.detach(), SavedSegment(boundary, output=output)
    last = decoder.skippable_layers[segment.blocks[-1]]
    with ProductRecorder() as recorder, nullcontext() if last is None else recorder.without(last):
        # With autograd on, attention also returns the tensors that its backward needs. `detach` drops the graph.
        output = _run(decoder, segment.blocks, boundary, extras, dropout).detach()
    return output, SavedSegment(hidden, products=recorder.products)


def backward(
    decoder: Decoder, segment: Segment, saved: SavedSegment, extras: Sequence[Extra], dropout: Dropout, gradient: Tensor
) -> Tensor:
    """Runs the segment backward, and first forward again unless `saved` has its graph. `gradient` [B, T, D]: the
    gradient for the segment's output. Returns the gradient for the segment's input. Hooks add the parameters' gradients
    to accumulators. Drops all of `saved` but the segment's input."""
    boundary, output, products = saved.boundary, saved.output, saved.products
    saved.output = saved.products = None  # even if memory runs out: a second call runs the segment again
    if output is None:
        boundary = boundary.detach().requires_grad_()
        last = decoder.skippable_layers[segment.blocks[-1]]
        with (
            nullcontext() if products is None else ProductReplayer(products),
            nullcontext() if last is None else product_skipped(last),
        ):
            output = _run(decoder, segment.blocks, boundary, extras, dropout)
    del products
    output.backward(gradient)
    return boundary.grad


def _run(decoder: Decoder, segment: range, hidden: Tensor, extras: Sequence[Extra], dropout: Dropout) -> Tensor:
    for index in segment:
        # A block that runs again draws the same masks, whatever has run in between.
        called_again(Dropout.begin, dropout, index, hidden.device)
        hidden = decoder.block(index, hidden, extras[index])
    return hidden
