"""Runs a segment of blocks forward and backward, and saves as little in between as asked (docs/recompute.md).

    INPUT      saves its input (the boundary); runs again before its backward
    PRODUCTS   saves the outputs of matrix products and attention, too; the rest runs again (products.py)
    ALL        saves its graph; nothing runs again

What runs again gives the same bits, because every block first seeds its device's generator by (run's seed, step,
micro-batch, block).
"""

import hashlib
import struct
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor, nn

from lowmem.core.decoder import Decoder, Extra
from lowmem.core.products import Kept, ProductRecorder, ProductReplayer, product_skipped
from lowmem.core.recorder import repeated

INPUT, PRODUCTS, ALL = "input", "products", "all"


@dataclass(frozen=True)
class LastProduct:
    """Describes a segment's last matrix product if backward, as far as is known, does not need the product's values."""

    number: int  # its place among the segment's products
    layer: str | None  # name of the module in the last block that makes this product and no other; None if none does
    tried: bool = False  # whether a run without the product's values has shown that nothing needs them


# {segment, or kind of segment: its last product; None if backward needs it}.
SkippableProducts = dict[Hashable, LastProduct | None]


@dataclass(frozen=True)
class Dropout:
    """Seeds the dropout masks of one micro-batch of one optimizer step."""

    seed: int
    step: int
    micro_batch: int

    def begin(self, layer: int, device: torch.device) -> None:
        """Seeds the random generator of `device` before `layer` runs. `layer` is a block's number; -1 means the
        embeddings, the number of blocks means the final norm."""
        text = struct.pack("<4q", self.seed, self.step, self.micro_batch, layer)
        number = int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little") >> 1
        if device.type == "cuda":
            torch.cuda.manual_seed(number)
        else:
            torch.default_generator.manual_seed(number)


@dataclass(frozen=True)
class Segment:
    """Holds a range of consecutive blocks that run together, and which of their tensors are saved for backward."""

    blocks: range
    keep: str  # INPUT, PRODUCTS or ALL


@dataclass
class SavedSegment:
    """Holds the tensors that a segment (blocks that are recomputed together) has saved for its backward."""

    boundary: Tensor  # [B, T, D]
    products: list[Kept | None] | None = None
    output: Tensor | None = None  # with its graph
    in_ram: bool = False  # the boundary is not on the device now (segment_windows.py)


def forward(
    decoder: Decoder, segment: Segment, hidden: Tensor, extras: Sequence[Extra], dropout: Dropout,
    last_is_needed: bool = False,
) -> tuple[Tensor, SavedSegment]:  # fmt: skip
    """Runs the blocks of `segment` on `hidden` [B, T, D]. Returns their output, detached, and the tensors that
    `backward` needs. `last_is_needed`: whether backward needs the last matrix product too, so that it is saved."""
    if segment.keep == INPUT:
        with torch.no_grad():
            return _run(decoder, segment.blocks, hidden, extras, dropout), SavedSegment(hidden)
    boundary = hidden.detach().requires_grad_()
    if segment.keep == ALL:
        output = _run(decoder, segment.blocks, boundary, extras, dropout)
        return output.detach(), SavedSegment(boundary, output=output)
    with ProductRecorder() as recorder:  # attention returns more with a graph, which is dropped
        output = _run(decoder, segment.blocks, boundary, extras, dropout).detach()
    if recorder.last_matrix_product is not None and not last_is_needed:
        recorder.kept[recorder.last_matrix_product] = None
    return output, SavedSegment(hidden, products=recorder.kept)


def backward(
    decoder: Decoder, segment: Segment, saved: SavedSegment, extras: Sequence[Extra], dropout: Dropout,
    gradient: Tensor, skippable: SkippableProducts, kind: Hashable,
) -> Tensor:  # fmt: skip
    """Computes the gradient [B, T, D] for the segment's input. `gradient` [B, T, D] is the gradient for the segment's
    output. Hooks add up the parameters' gradients. Frees all of `saved` but the segment's input. Notes in
    `skippable[kind]` which product need not be computed again."""
    boundary, output, products = saved.boundary, saved.output, saved.products
    saved.output = saved.products = None  # even if memory runs out: a second call runs the segment again
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
    known = kind in skippable
    last, block = skippable.get(kind), decoder.blocks[segment.blocks[-1]]
    run = partial(_run, decoder, segment.blocks, boundary, extras, dropout)
    if products is None and known:
        if last is None:
            return run()
        if last.tried and last.layer is not None:
            with product_skipped(block.get_submodule(last.layer)):
                return run()
    with ProductReplayer(products, None if last is None else last.number) as replayer:
        output = run()
    if not known:
        skippable[kind] = _last_product(replayer, block)
    elif last is not None and last.layer is not None and replayer.skipped is block.get_submodule(last.layer):
        skippable[kind] = replace(last, tried=True)
    if not replayer.missed:
        return output
    skippable[kind] = None
    del output
    if products is not None:
        products.clear()  # they may have been changed in place by now, and would take memory twice
    return run()


def _last_product(replayer: ProductReplayer, block: nn.Module) -> LastProduct | None:
    """Describes the last matrix product of the segment that has run inside `replayer`; `block` is the segment's last
    block. Returns None if another kept operation, such as attention, came after that product."""
    if replayer.last_matrix_product is None:
        return None
    layer = replayer.layers[-1]
    name = next((name for name, module in block.named_modules() if module is layer), None)
    alone = replayer.layers.count(layer) == 1
    return LastProduct(replayer.last_matrix_product, name if alone else None)


def _run(decoder: Decoder, segment: range, hidden: Tensor, extras: Sequence[Extra], dropout: Dropout) -> Tensor:
    for index in segment:
        repeated(Dropout.begin, dropout, index, hidden.device)
        hidden = decoder.block(index, hidden, extras[index])
    return hidden
