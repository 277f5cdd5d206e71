"""The shapes of models as data, so that their configs need no network."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from transformers import CONFIG_MAPPING, PretrainedConfig

from lowmem.errors import InputError
from lowmem.models.build import GPT2_SHAPES

BLOCKS = ("n_layer", "num_hidden_layers", "num_layers", "num_decoder_layers")  # fields that count blocks


@dataclass(frozen=True)
class Model:
    """Describes a model's shape. `hub`: name on the Hugging Face hub. `kind`: type in transformers. `fields`: entries
    of config.json that affect memory and are not the default. `parameters`: as published. `source`: of the config."""

    name: str
    hub: str
    kind: str
    fields: Mapping[str, Any]
    parameters: int | None
    source: str

    def config(self, blocks: int | None = None) -> PretrainedConfig:
        """Returns the config of the model, or of a slice that has only `blocks` blocks. A slice of an encoder-decoder
        has `blocks` in the encoder and as many in the decoder. Raises InputError if the model has fewer."""
        if blocks is None:
            return CONFIG_MAPPING[self.kind](**self.fields)
        counts = [name for name in BLOCKS if name in self.fields]
        most = min(self.fields[name] for name in counts)
        if not 1 <= blocks <= most:
            raise InputError(f"{self.name} has {most} blocks, and a slice of it 1 to {most}, not {blocks}")
        return CONFIG_MAPPING[self.kind](**self.fields | dict.fromkeys(counts, blocks))

    def write(self, folder: Path, blocks: int | None = None) -> Path:
        """Writes config.json into `folder`: the model's, or that of a slice with `blocks` blocks. Returns `folder`."""
        config = self.config(blocks)
        folder.mkdir(parents=True, exist_ok=True)
        config.save_pretrained(folder)
        return folder


def _opt(name: str, width: int, layers: int, heads: int, parameters: int, source: str, **more) -> Model:
    sizes = {"hidden_size": width, "num_hidden_layers": layers, "num_attention_heads": heads, "ffn_dim": 4 * width}
    return Model(name, f"facebook/{name}", "opt", sizes | {"word_embed_proj_dim": width} | more, parameters, source)


def _bloom(name: str, width: int, parameters: int) -> Model:
    fields = {"hidden_size": width, "n_layer": 24, "n_head": 16, "vocab_size": 250880}
    source = "config.json of fine-tuned copies on the hub"
    return Model(name, f"bigscience/{name}", "bloom", fields, parameters, source)


def _codegen(name: str, width: int, layers: int, heads: int, rotary: int, source: str) -> Model:
    fields = {"n_embd": width, "n_layer": layers, "n_head": heads, "rotary_dim": rotary, "vocab_size": 51200}
    return Model(name, f"Salesforce/{name}", "codegen", fields, None, source)


def _neo(name: str, width: int, layers: int, heads: int, parameters: int) -> Model:
    fields = {
        "hidden_size": width, "num_layers": layers, "num_heads": heads,
        "attention_types": [[["global", "local"], layers // 2]],
    }  # fmt: skip
    return Model(name, f"EleutherAI/{name}", "gpt_neo", fields, parameters, "config.json of fine-tuned copies")


def _gpt2(name: str, parameters: int) -> Model:
    layers, width, heads = GPT2_SHAPES[name]
    fields = {"n_layer": layers, "n_embd": width, "n_head": heads}
    return Model(name, f"openai-community/{name}", "gpt2", fields, parameters, "lowmem.models.build.GPT2_SHAPES")


# Sources were read as stored copies. A "fine-tuned copy" is another's upload that names this model as its origin.
MODELS = {
    model.name: model
    for model in (
        _opt("opt-125m", 768, 12, 12, 125_239_296, "the defaults of OPTConfig with BERT-base's sizes; not seen itself"),
        _opt(
            "opt-350m", 1024, 24, 16, 331_196_416, "config.json on the hub (pull request 8)",
            word_embed_proj_dim=512, do_layer_norm_before=False,
        ),
        _opt("opt-1.3b", 2048, 24, 32, 1_315_758_080, "config.json on the hub"),
        _bloom("bloom-560m", 1024, 559_214_592),
        _bloom("bloom-1b1", 1536, 1_065_314_304),
        _codegen("codegen-350M-mono", 1024, 20, 16, 32, "config.json on the hub"),
        _codegen("codegen-2B-mono", 2560, 32, 32, 64, "config.json of a fine-tuned copy"),
        Model(
            "biogpt", "microsoft/biogpt", "biogpt",
            {"hidden_size": 1024, "num_hidden_layers": 24, "num_attention_heads": 16, "intermediate_size": 4096,
             "vocab_size": 42384, "max_position_embeddings": 1024},
            346_763_264, "config.json on the hub (pull request 3)",
        ),
        Model(
            "gpt_bigcode-santacoder", "bigcode/gpt_bigcode-santacoder", "gpt_bigcode",
            {"n_embd": 2048, "n_layer": 24, "n_head": 16, "n_inner": 8192, "n_positions": 2048, "vocab_size": 49280,
             "multi_query": True, "bos_token_id": 49152, "eos_token_id": 49152},
            None, "config.json on the hub (pull request 5)",
        ),
        _neo("gpt-neo-125m", 768, 12, 12, 125_198_592),
        _neo("gpt-neo-1.3B", 2048, 24, 16, 1_315_575_808),
        _gpt2("gpt2", 124_439_808),
        _gpt2("gpt2-medium", 354_823_168),
        _gpt2("gpt2-large", 774_030_080),
        _gpt2("gpt2-xl", 1_557_611_200),
        Model(
            "gpt-j-6b", "EleutherAI/gpt-j-6b", "gptj",
            {"n_embd": 4096, "n_layer": 28, "n_head": 16, "rotary_dim": 64, "vocab_size": 50400},
            6_050_882_784, "config.json of fine-tuned copies; the model's card counts 6,053,381,344",
        ),
        Model(
            "llama-1b", "meta-llama/Llama-3.2-1B", "llama",
            {"hidden_size": 2048, "num_hidden_layers": 16, "num_attention_heads": 32, "num_key_value_heads": 8,
             "intermediate_size": 8192, "vocab_size": 128256, "max_position_embeddings": 131072,
             "tie_word_embeddings": True},
            1_235_814_400, "config.json of a copy; without its rope_scaling, which changes no shape",
        ),
        Model(
            "llama-7b", "huggyllama/llama-7b", "llama",
            {"hidden_size": 4096, "num_hidden_layers": 32, "num_attention_heads": 32, "intermediate_size": 11008,
             "vocab_size": 32000, "max_position_embeddings": 2048, "tie_word_embeddings": False},
            6_738_415_616, "config.json of a copy",
        ),
        Model(
            "pythia-12b", "EleutherAI/pythia-12b", "gpt_neox",
            {"hidden_size": 5120, "num_hidden_layers": 36, "num_attention_heads": 40, "intermediate_size": 20480,
             "vocab_size": 50688, "max_position_embeddings": 2048},
            11_846_072_320, "config.json of fine-tuned copies",
        ),
    )
}  # fmt: skip
