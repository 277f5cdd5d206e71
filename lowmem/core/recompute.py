"""What a segment of blocks saves for its backward, and what it computes again: one of three policies.

    INPUT      its input (the boundary) alone; it runs a second time before its backward (arXiv:1604.06174)
    PRODUCTS   beside that what its matrix products and its attention return; the rest runs again (products.py)
    ALL        its graph; nothing runs again

All of them run the same kernels on the same numbers, so the bits are equal as long as dropout draws the same masks:
each block seeds its device's generator with a number made of (run, optimizer step, micro-batch, block) before it runs.
No order of execution, no segment length and no group size can change a mask.

When a segment runs again, its last matrix product is skipped if nothing that backward needs depends on its output, as
in every block that ends in a residual sum. Which product that is becomes known when a segment of its kind runs again
for the first time (`SkippableProducts`); every later run checks that autograd saves nothing that was computed from it,
and runs the segment once more, with the product, if it does.

Bytes per token of a GPT-2 block of width D in 16 bit: 4 D for an fp32 boundary, 2 D for one in 16 bit; PRODUCTS keeps
18 D beside it, ALL about 34 D.
"""

import hashlib
import struct
from collections.abc import Hashable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from lowmem.core.decoder import Decoder, Extra
from lowmem.core.products import Kept, ProductRecorder, ProductReplayer

INPUT, PRODUCTS, ALL = "input", "products", "all"
# Per segment, or kind of segment: the number of the product that may be left out; None where every one is needed.
SkippableProducts = dict[Hashable, int | None]


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


@dataclass(frozen=True)
class Segment:
    """Consecutive blocks that run together, and what they save: INPUT, PRODUCTS or ALL."""

    blocks: range
    keep: str


@dataclass
class SavedSegment:
    """A segment's boundary [B, T, D]; with PRODUCTS what those returned; with ALL its output with the graph behind.
    `in_ram`: whether the boundary is not on the device for now (segment_windows.py)."""

    boundary: Tensor
    products: list[Kept | None] | None = None
    output: Tensor | None = None
    in_ram: bool = False


def forward(
    decoder: Decoder, segment: Segment, hidden: Tensor, extras: Sequence[Extra], dropout: Dropout,
    last_is_needed: bool = False,
) -> tuple[Tensor, SavedSegment]:  # fmt: skip
    """The blocks of `segment` on `hidden` [B, T, D]: their output, detached, and what `backward` needs.
    `last_is_needed`: whether it has been learnt that the last product's output has to be kept, too."""
    if segment.keep == INPUT:
        with torch.no_grad():
            return _run(decoder, segment.blocks, hidden, extras, dropout), SavedSegment(hidden)
    boundary = hidden.detach().requires_grad_()
    if segment.keep == ALL:
        output = _run(decoder, segment.blocks, boundary, extras, dropout)
        return output.detach(), SavedSegment(boundary, output=output)
    with ProductRecorder() as recorder:  # with a graph, though it is dropped: attention returns more where there is one
        output = _run(decoder, segment.blocks, boundary, extras, dropout).detach()
    if recorder.last_matrix_product is not None and not last_is_needed:
        recorder.kept[recorder.last_matrix_product] = None
    return output, SavedSegment(hidden, products=recorder.kept)


def backward(
    decoder: Decoder, segment: Segment, saved: SavedSegment, extras: Sequence[Extra], dropout: Dropout,
    gradient: Tensor, skippable: SkippableProducts, kind: Hashable,
) -> Tensor:  # fmt: skip
    """From the gradient for the segment's output to that for its boundary, both [B, T, D]; parameters' gradients go
    where their hooks take them. `saved` is spent but for the boundary. `skippable`, kept from call to call, has at
    `kind` what was learnt of segments like this one."""
    boundary, output, products = saved.boundary, saved.output, saved.products
    saved.output = saved.products = None  # spent, even if memory runs out: a second call runs the segment again
    if output is None:
        boundary = boundary.detach().requires_grad_()
        output = _run_again(decoder, segment, products, boundary, extras, dropout, skippable, kind)
    del products
    output.backward(gradient)
    return boundary.grad


def _run_again(
    decoder: Decoder, segment: Segment, products: list[Kept | None] | None, boundary: Tensor, extras: Sequence[Extra],
    dropout: Dropout, skippable: SkippableProducts, kind: Hashable,
) -> Tensor:  # fmt: skip
    if products is not None or skippable.get(kind, 0) is not None:  # else no product is handed out, left out or learnt
        with ProductReplayer(products, skippable.get(kind)) as replayer:
            output = _run(decoder, segment.blocks, boundary, extras, dropout)
        skippable.setdefault(kind, replayer.last_matrix_product)
        if not replayer.missed:
            return output
        skippable[kind] = None
        del output
        if products is not None:
            products.clear()  # what was kept may have been changed in place by now, and would lie beside all of it
    return _run(decoder, segment.blocks, boundary, extras, dropout)


def _run(decoder: Decoder, segment: range, hidden: Tensor, extras: Sequence[Extra], dropout: Dropout) -> Tensor:
    for index in segment:
        dropout.begin(index, hidden.device)
        hidden = decoder.block(index, hidden, extras[index])
    return hidden
