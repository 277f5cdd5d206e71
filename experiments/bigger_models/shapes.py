"""The shapes of the models, by name, and slices of them: the same widths with fewer blocks.

Of a shape everything but the weights is known without a network: `write` makes a folder with its config.json, which
every script takes as `--model DIR` with `--init random`. Tests hold `parameters` to the models that these configs make.

    python -m experiments.bigger_models.shapes NAME DIR [--blocks N]
"""

import argparse
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from experiments.harness.options import at_least
from lowmem.errors import InputError

if TYPE_CHECKING:
    from transformers import PretrainedConfig


@dataclass(frozen=True)
class Shape:
    """`hub`: the model's name on the Hugging Face hub; `kind`: its model type in transformers; `fields`: those of its
    config.json that say how large it is; `blocks`: those of them that count blocks."""

    name: str
    hub: str
    kind: str
    parameters: int
    fields: Mapping[str, Any]
    blocks: tuple[str, ...]

    def config(self, blocks: int | None = None) -> "PretrainedConfig":
        """Returns the config of the model, or of a slice with `blocks` blocks (an encoder-decoder: of each kind).
        InputError if the model has fewer."""
        from transformers import CONFIG_MAPPING  # takes seconds to import

        fields = dict(self.fields)
        if blocks is not None:
            most = min(fields[name] for name in self.blocks)
            if not 1 <= blocks <= most:
                raise InputError(f"{self.name} has {most} blocks, and a slice of it 1 to {most}, not {blocks}")
            fields |= {name: blocks for name in self.blocks}
        return CONFIG_MAPPING[self.kind](**fields)

    def write(self, folder: Path, blocks: int | None = None) -> Path:
        """Makes `folder` with the config.json of the model or of a slice; returns it."""
        config = self.config(blocks)
        folder.mkdir(parents=True, exist_ok=True)
        config.save_pretrained(folder)
        return folder


def _gpt2(name: str, blocks: int, width: int, heads: int, parameters: int) -> Shape:
    fields = {"n_layer": blocks, "n_embd": width, "n_head": heads}
    return Shape(name, f"openai-community/{name}", "gpt2", parameters, fields, ("n_layer",))


# From the smallest to the largest. The configs are those of the hub as far as they bear on sizes.
SHAPES = {
    shape.name: shape
    for shape in (
        _gpt2("gpt2", 12, 768, 12, 124_439_808),
        _gpt2("gpt2-medium", 24, 1024, 16, 354_823_168),
        _gpt2("gpt2-large", 36, 1280, 20, 774_030_080),
        _gpt2("gpt2-xl", 48, 1600, 25, 1_557_611_200),
        Shape(
            "pythia-2.8b", "EleutherAI/pythia-2.8b", "gpt_neox", 2_775_208_960,
            {"hidden_size": 2560, "num_hidden_layers": 32, "num_attention_heads": 32, "intermediate_size": 10240,
             "vocab_size": 50304, "max_position_embeddings": 2048},
            ("num_hidden_layers",),
        ),
        Shape(
            "gpt-j-6b", "EleutherAI/gpt-j-6b", "gptj", 6_050_882_784,
            {"n_embd": 4096, "n_layer": 28, "n_head": 16, "rotary_dim": 64, "vocab_size": 50400, "n_positions": 2048,
             "tie_word_embeddings": False},
            ("n_layer",),
        ),
        Shape(
            "llama-7b", "huggyllama/llama-7b", "llama", 6_738_415_616,
            {"hidden_size": 4096, "num_hidden_layers": 32, "num_attention_heads": 32, "intermediate_size": 11008,
             "vocab_size": 32000, "max_position_embeddings": 2048, "tie_word_embeddings": False},
            ("num_hidden_layers",),
        ),
        Shape(
            "t5-11b", "google-t5/t5-11b", "t5", 11_307_321_344,
            {"d_model": 1024, "d_ff": 65536, "num_heads": 128, "d_kv": 128, "num_layers": 24, "num_decoder_layers": 24,
             "vocab_size": 32128},
            ("num_layers", "num_decoder_layers"),
        ),
    )
}  # fmt: skip


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m experiments.bigger_models.shapes",
        allow_abbrev=False,
        description="Write a shape's config.json.",
    )
    parser.add_argument("name", choices=SHAPES, metavar="NAME", help=f"of {', '.join(SHAPES)}")
    parser.add_argument("folder", type=Path, metavar="DIR", help="made where it is not there")
    parser.add_argument(
        "--blocks", type=at_least(int, 1), metavar="N", help="a slice with so many blocks (all of them)"
    )
    options = parser.parse_args(arguments)
    try:
        SHAPES[options.name].write(options.folder, options.blocks)
    except (InputError, OSError) as error:
        print(f"shapes: {error}", file=sys.stderr)
        return InputError.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main())
