"""Recomputing a segment gives the bits of having kept it, dropout included, since masks have names and no order."""

import copy
import itertools

import pytest
import torch
from torch import Tensor

from lowmem.core.decoder import Decoder
from lowmem.core.layers import fuse_gelu
from lowmem.core.products import skippable_layers
from lowmem.core.recompute import ALL, INPUT, PRODUCTS, Dropout, Segment, backward, forward
from reference import VOCABULARY, tiny_model

CPU = torch.device("cpu")
INPUT_IDS = torch.arange(24).view(2, 12) * 7 % VOCABULARY


def run(family: str, dropout: float, segment_blocks: int, keep: str, name: Dropout, **config) -> dict[str, Tensor]:
    """Forward and backward through all blocks in segments: output, the boundary's gradient, every parameter's."""
    model = tiny_model(family, dropout, **config).train()
    decoder = Decoder(model)
    decoder.skippable_layers = skippable_layers(decoder, torch.float32)
    assert None not in decoder.skippable_layers
    with torch.no_grad():
        name.begin(-1, CPU)
        hidden, extras = decoder.embed(INPUT_IDS)
    segments = [Segment(range(start, min(start + segment_blocks, 4)), keep) for start in range(0, 4, segment_blocks)]
    saved = []
    for segment in segments:
        before = hidden
        hidden, kept = forward(decoder, segment, before, extras, name)
        assert not hidden.requires_grad
        assert (kept.output is None) == (kept.boundary is before) == (keep != ALL)
        assert (kept.products is None) == (keep != PRODUCTS)
        saved.append(kept)
    results = {"output": hidden}
    gradient = torch.linspace(-1, 1, hidden.numel()).view_as(hidden)
    for segment in reversed(segments):
        torch.rand(3)  # whatever else the run draws from the generator in between must not matter
        kept = saved.pop()
        gradient = backward(decoder, segment, kept, extras, name, gradient)
        assert kept.output is kept.products is None
    results["boundary"] = gradient
    return results | {key: p.grad for key, p in model.named_parameters() if p.grad is not None}


def assert_same(first: dict[str, Tensor], second: dict[str, Tensor]) -> None:
    assert first.keys() == second.keys()
    assert [key for key in first if not torch.equal(first[key], second[key])] == []


@pytest.mark.parametrize("dropout", [0.0, 0.1])
@pytest.mark.parametrize("family", ["gpt2", "llama"])
def test_recompute_changes_no_bit_of_output_boundary_gradient_and_parameter_gradients(family, dropout):
    name = Dropout(seed=1, step=2, micro_batch=3)
    kept = run(family, dropout, 1, ALL, name)
    assert len(kept) == 2 + (4 * 12 if family == "gpt2" else 4 * 9)
    assert all(tensor.count_nonzero() > 0 for tensor in kept.values())
    assert_same(run(family, dropout, 4, ALL, name), kept)
    for keep, segment_blocks in itertools.product((INPUT, PRODUCTS), (1, 3, 4)):
        assert_same(run(family, dropout, segment_blocks, keep, name), kept)


@pytest.mark.parametrize("family", ["gpt2", "llama"])
def test_in_segments_gradients_are_those_of_plain_autograd(family):
    """Nothing of lowmem but the pieces, without dropout: one graph over all blocks."""
    decoder = Decoder(tiny_model(family).train())
    with torch.no_grad():
        boundary, extras = decoder.embed(INPUT_IDS)
    boundary.requires_grad_()
    hidden = boundary
    for index, extra in enumerate(extras):
        hidden = decoder.block(index, hidden, extra)
    hidden.backward(torch.linspace(-1, 1, hidden.numel()).view_as(hidden))
    plain = {key: p.grad for key, p in decoder.model.named_parameters() if p.grad is not None}
    plain |= {"output": hidden.detach(), "boundary": boundary.grad}
    assert_same(run(family, 0.0, 2, INPUT, Dropout(0, 0, 0)), plain)


def test_every_layer_has_masks_of_its_own():
    """One block's weights under another block's number: only the masks can differ."""
    decoder = Decoder(tiny_model("gpt2", 0.1).train())
    decoder.blocks[1].load_state_dict(decoder.blocks[0].state_dict())
    name = Dropout(1, 2, 3)
    with torch.no_grad():
        hidden, extras = decoder.embed(INPUT_IDS)
        first, second = (forward(decoder, Segment(range(i, i + 1), INPUT), hidden, extras, name)[0] for i in (0, 1))
        decoder.model.eval()
        quiet = [forward(decoder, Segment(range(i, i + 1), INPUT), hidden, extras, name)[0] for i in (0, 1)]
    assert torch.equal(*quiet)
    assert not torch.equal(first, second)


def test_the_numbers_that_name_a_mask_are_not_mixed_up():
    """Every (seed, step, micro-batch, layer) of small numbers draws other numbers; layer -1 is the embeddings."""
    streams = set()
    for seed, step, micro_batch, layer in itertools.product(range(3), range(3), range(3), range(-1, 3)):
        Dropout(seed, step, micro_batch).begin(layer, CPU)
        streams.add(tuple(torch.rand(4).tolist()))
    assert len(streams) == 3 * 3 * 3 * 4
    Dropout(2**62, 10**9, 10**6).begin(10**4, CPU)  # numbers may be large


def test_the_fused_gelu_is_the_same_function_and_saves_less():
    """Largest difference measured in fp32: 2.4e-7, an ulp of the largest output."""
    model = tiny_model("gpt2")
    fused = copy.deepcopy(model)
    fuse_gelu(fused)
    x = torch.linspace(-6, 6, 4801).requires_grad_()
    saved = {}
    for name, block in (("stock", model.transformer.h[0]), ("fused", fused.transformer.h[0])):
        kept = []
        with torch.autograd.graph.saved_tensors_hooks(lambda t, kept=kept: kept.append(t.data_ptr()) or t, lambda t: t):
            y = block.mlp.act(x)
        (gradient,) = torch.autograd.grad(y.sum(), x)
        saved[name] = (len(set(kept)), y, gradient)
    assert torch.allclose(saved["stock"][1], saved["fused"][1], rtol=0, atol=1e-6)
    assert torch.allclose(saved["stock"][2], saved["fused"][2], rtol=0, atol=1e-5)
    assert saved["fused"][0] == 1 < saved["stock"][0]
