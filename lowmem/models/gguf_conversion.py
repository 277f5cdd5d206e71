"""python -m lowmem.models.gguf_conversion FILE FOLDER: converts a GGUF file to an ordinary Hugging Face model
folder."""

import functools
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import gguf
import torch
import transformers
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, GgufConfig, PreTrainedModel

from lowmem.errors import InputError, LowmemError, first_line, some_of
from lowmem.models.build import load_config
from lowmem.models.export import export_model
from lowmem.units import format_size

_ADVICE = "give the folder or hub name of the model that the file was made from"
_FREQUENCIES = ("rope_freqs.", "rope_factors_")  # tensors of Llama 3.1 and of models with long contexts


def convert(path: Path, folder: Path) -> Iterator[str]:
    """Converts the GGUF file `path` to the folder `folder`, and yields sentences for the user. RAM holds the fp32
    weights once."""
    with gguf_blamed(path):
        reader = gguf.GGUFReader(path)
        yield from _remarks(reader, path, folder)
    config = load_config(str(path), "pretrained")
    with gguf_blamed(path):
        tokenizer = AutoTokenizer.from_pretrained(str(path.parent), gguf_file=path.name)
        model, found = AutoModelForCausalLM.from_pretrained(
            str(path.parent), gguf_file=path.name, config=config, dtype=torch.float32, output_loading_info=True,
            quantization_config=GgufConfig(dequantize=True),
        )  # fmt: skip
    if lost := [*found["missing_keys"], *(name for name, *_ in found["mismatched_keys"])]:
        raise InputError(
            f"{path}: transformers {transformers.__version__} finds no weights for {len(lost)} of its parameters "
            f"({some_of(sorted(lost))}); {_ADVICE}"
        )
    yield from _lost(reader, path, model)
    for name, parameter in model.named_parameters():
        if not all(bound.isfinite() for bound in parameter.detach().aminmax()):
            raise InputError(f"{path}: {name} has values that are NaN or infinite; download the file again")
    readme = f"# {path.stem}\n\nThe weights of the GGUF file {path.name}, converted to fp32.\n"
    yield from export_model(
        folder, config, model.named_parameters(), tokenizer=tokenizer, readme=readme,
        generation_config=model.generation_config,
    )  # fmt: skip


@contextmanager
def gguf_blamed(path: Path) -> Iterator[None]:
    """Turns errors of reading the GGUF file `path` in the `with` block into InputError, except ImportError and
    MemoryError."""
    try:
        yield
    except (InputError, ImportError, MemoryError):
        raise
    except Exception as error:  # each part of the file is refused in its own way
        reason = first_line(error)[:300]
        raise InputError(
            f"{path} cannot be read by transformers {transformers.__version__} ({reason}): it is cut off, damaged or "
            f"of an unknown architecture; {_ADVICE}"
        ) from error


def read_config_fields(path: Path) -> dict:
    with gguf_blamed(path):
        return AutoConfig.from_pretrained(str(path.parent), gguf_file=path.name).to_dict()


def _remarks(reader: "gguf.GGUFReader", path: Path, folder: Path) -> Iterator[str]:
    if (count := reader.get_field("split.count")) is not None and count.contents() > 1:
        raise InputError(
            f"{path} is one of {count.contents()} files; merge them first: llama-gguf-split --merge FIRST.gguf NEW.gguf"
        )
    sizes, elements = Counter(), 0
    for tensor in reader.tensors:
        sizes[tensor.tensor_type.name] += int(tensor.n_bytes)
        elements += int(tensor.n_elements)
    bits = 8 * sum(sizes.values()) / max(elements, 1)
    kinds = ", ".join(kind for kind, _ in sizes.most_common())
    lost = "" if sizes.keys() <= {"F32", "F16", "BF16"} else "; the precision that was lost by quantisation stays lost"
    yield (
        f"{path.name}: {elements:,} weights of {bits:.1f} bits each ({kinds}) are converted to fp32, once, in {folder} "
        f"({format_size(4 * elements)}){lost}"
    )


def _lost(reader: "gguf.GGUFReader", path: Path, model: PreTrainedModel) -> Iterator[str]:
    """Yields a warning if transformers ignores RoPE frequencies in the file. Raises InputError if the file has more
    weights than the model."""
    version = transformers.__version__
    frequencies = [tensor.name for tensor in reader.tensors if tensor.name.startswith(_FREQUENCIES)]
    scaling = reader.get_field(f"{reader.get_field('general.architecture').contents()}.rope.scaling.type")
    is_scaled = scaling is not None and scaling.contents() != "none"
    rope = getattr(model.config, "rope_parameters", None) or {}
    if frequencies or (is_scaled and rope.get("rope_type", "default") == "default"):
        yield (
            f"warning: transformers {version} does not read the rotary frequencies in {path.name}, so the model "
            "computes with unscaled ones; the original model keeps them"
        )
    there = sum(int(tensor.n_elements) for tensor in reader.tensors if tensor.name not in frequencies)
    placed = sum(parameter.numel() for parameter in model.parameters())
    if there > placed:
        raise InputError(
            f"{path}: transformers {version} has no place for {there - placed:,} of its weights in "
            f"{type(model).__name__}; {_ADVICE}"
        )


def main(path: Path, folder: Path) -> int:
    # transformers parses the header four times, and makes the table of names for each module: 20 s instead of 8.
    gguf.GGUFReader = functools.cache(gguf.GGUFReader)
    gguf.get_tensor_name_map = functools.cache(gguf.get_tensor_name_map)
    torch.set_grad_enabled(False)
    try:
        for sentence in convert(path, folder):
            print(sentence, flush=True)
    except LowmemError as error:
        print(error, file=sys.stderr)
        return error.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), Path(sys.argv[2])))
