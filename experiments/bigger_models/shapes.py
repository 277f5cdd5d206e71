"""The shapes of the models, by name, and slices of them: the same widths with fewer blocks.

    python -m experiments.bigger_models.shapes NAME DIR [--blocks N]

Writes a config.json into DIR, for any script's `--model DIR --init random`.
"""

import sys
from pathlib import Path

from experiments.harness.models import MODELS, Model
from experiments.harness.options import exit_code_of, parser_of, positive
from lowmem.errors import InputError

PYTHIA = Model(
    "pythia-2.8b", "EleutherAI/pythia-2.8b", "gpt_neox",
    {"hidden_size": 2560, "num_hidden_layers": 32, "num_attention_heads": 32, "intermediate_size": 10240,
     "vocab_size": 50304, "max_position_embeddings": 2048},
    2_775_208_960, "the hub",
)  # fmt: skip
T5 = Model(
    "t5-11b", "google-t5/t5-11b", "t5",
    {"d_model": 1024, "d_ff": 65536, "num_heads": 128, "d_kv": 128, "num_layers": 24, "num_decoder_layers": 24,
     "vocab_size": 32128},
    11_307_321_344, "the hub",
)  # fmt: skip
_SMALLER = (*(MODELS[name] for name in ("gpt2", "gpt2-medium", "gpt2-large", "gpt2-xl")), PYTHIA)
SHAPES = {model.name: model for model in (*_SMALLER, MODELS["gpt-j-6b"], MODELS["llama-7b"], T5)}  # by size


def main(arguments: list[str] | None = None) -> int:
    parser = parser_of("experiments.bigger_models.shapes", __doc__)
    parser.add_argument("name", choices=SHAPES, metavar="NAME", help=f"of {', '.join(SHAPES)}")
    parser.add_argument("folder", type=Path, metavar="DIR", help="made where it is not there")
    parser.add_argument("--blocks", type=positive, metavar="N", help="a slice with so many blocks (all of them)")
    options = parser.parse_args(arguments)
    return exit_code_of(lambda: write(options.name, options.folder, options.blocks))


def write(name: str, folder: Path, blocks: int | None) -> int:
    try:
        SHAPES[name].write(folder, blocks)
    except OSError as error:
        raise InputError(f"{folder} cannot be written: {error.strerror}") from error
    return 0


if __name__ == "__main__":
    sys.exit(main())
