"""Cuts a decoder by the rules of tensor_parallel, and takes the layers of one stage."""

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from experiments.pipeline_parallel.stage import Layers
from experiments.pipeline_parallel.tasks import Embedding, Head
from experiments.tensor_parallel.layers import PlacedDropout
from experiments.tensor_parallel.sharding import Cut, Sharded


class RotaryBlock(nn.Module):
    """A block of Llama, [B, T, D] -> [B, T, D]. `rotary`, which has no weights, is shared with other blocks."""

    def __init__(self, block: nn.Module, rotary: nn.Module):
        super().__init__()
        self.block, self._rotary = block, (rotary,)

    def forward(self, x: Tensor) -> Tensor:
        positions = torch.arange(x.shape[1], device=x.device)[None]
        return self.block(x, position_ids=positions, position_embeddings=self._rotary[0](x, positions))


class SampledLayers(Layers):
    """Layers whose dropouts know the step and the samples. `first_samples`: of each micro-batch, in the whole batch."""

    def __init__(self, layers: list[nn.Module], first: int, seed: int, first_samples: list[int]):
        super().__init__(layers, first, seed)
        self.first_samples = first_samples
        self._dropouts = [module for module in self.modules() if isinstance(module, PlacedDropout)]

    def forward(self, x: Tensor, step: int, micro_batch: int) -> Tensor:
        for dropout in self._dropouts:
            dropout.step, dropout.first_sample = step, self.first_samples[micro_batch]
        return super().forward(x, step, micro_batch)


@dataclass
class Piece:
    """A stage's layers. `names`: of its parameters in the whole model, by those in the stage; `cuts`: as Sharded's;
    `tied`: the name in the stage of a tied embedding's copy, if another stage has one, too."""

    layers: SampledLayers
    names: dict[str, str]
    cuts: dict[str, Cut]
    tied: str | None


def piece_of(sharded: Sharded, sizes: list[int], stage: int, seed: int, first_samples: list[int]) -> Piece:
    """Returns the piece of stage `stage`. `sizes`: layers of each stage."""
    model = sharded.model
    body = model.base_model
    if model.config.model_type == "gpt2":
        layers = [Embedding(body.wte, body.wpe, body.drop), *body.h, Head(body.ln_f, model.lm_head)]
    else:
        blocks = [RotaryBlock(block, body.rotary_emb) for block in body.layers]
        layers = [Embedding(body.embed_tokens), *blocks, Head(body.norm, model.lm_head)]
    first = sum(sizes[:stage])
    # Cut from the whole model, so that dropouts have the same numbers in every mesh.
    own = SampledLayers(layers[first : first + sizes[stage]], first, seed, first_samples)
    whole_names = {id(parameter): name for name, parameter in model.named_parameters()}
    names = {name: whole_names[id(parameter)] for name, parameter in own.named_parameters()}
    is_tied = model.lm_head.weight is model.get_input_embeddings().weight
    shared = whole_names[id(model.lm_head.weight)] if is_tied and len(sizes) > 1 else None
    tied = next((name for name, whole in names.items() if whole == shared), None)
    return Piece(own, names, sharded.cuts, tied)
