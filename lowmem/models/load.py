"""Hugging Face weights, one tensor at a time (the way out is in export.py).

`from_pretrained` puts a whole fp32 model into RAM (XL: 5.8 GiB) before a trainer has placed its first byte, and often
a second copy while converting. Here the model is built without storage, its weights pass by as a stream, and whoever
consumes the stream puts each tensor where it belongs (split into halves, on the GPU, ...) before the next one is read:

    model = build_model(load_config("gpt2-xl", "pretrained"))    shapes on `meta`, buffers real: about a second, no RAM
    for name, values in read_weights(model, "gpt2-xl"): ...      fp32; RAM: some MiB
    for name, tensor in random_weights(model.config, seed): ...  fp32; RAM: one module's tensors

A tensor of more than 1 MiB comes as runs of its elements, in their order, one after the other.

Both kinds of file (.safetensors and zipped .bin) are only a list of (name, dtype, shape, offset) followed by raw bytes.
So the lists of all files are read first and compared with the model; then the bytes are read by offset. Mapping the
files instead would be shorter, but every page touched counts as memory of this process until the map is closed.

Limits: fp32, fp16 and bf16 files, no quantised ones; .bin files from before torch 1.6 are not zipped and are refused;
weights that transformers merges or splits on load (experts of some mixtures) are refused, its renamings are followed.
A flipped bit inside a tensor cannot be seen: neither format has checksums.
"""

import json
import math
import mmap
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from transformers import PretrainedConfig, PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import WeightConverter, WeightRenaming, rename_source_key
from transformers.initialization import guard_torch_init_functions

from lowmem.core.encoder_decoder import is_encoder_decoder
from lowmem.core.precision import RUN_ELEMENTS
from lowmem.errors import InputError, first_line
from lowmem.models.build import build_model, first_few, model_folder, model_from_config, parameters_placed, weight_files

_SAFETENSORS_DTYPES = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
# Masks, rotary tables and the like that older versions of transformers stored beside the weights.
_OLD_BUFFERS = re.compile(
    r"(^|\.)((attn|attention|crossattention)\.(bias|masked_bias|causal_mask|scale_attn|embed_positions)"
    r"|rotary_emb\.\w+|position_ids|decoder\.version)$"
)


@dataclass(frozen=True)
class _Entry:
    """Where one tensor lies in a file; `dtype` is None where it is none that can be trained."""

    path: Path
    offset_bytes: int
    dtype: torch.dtype | None
    shape: tuple[int, ...]
    stride: tuple[int, ...]  # in elements; safetensors are always contiguous, .bin files need not be

    @property
    def is_contiguous(self) -> bool:
        return self.stride == _strides(self.shape)

    @property
    def elements(self) -> int:
        """Elements from the first to the last, whatever the stride."""
        if 0 in self.shape:
            return 0
        return 1 + sum((size - 1) * step for size, step in zip(self.shape, self.stride, strict=True))


def read_weights(model: PreTrainedModel, source: str) -> Iterator[tuple[str, Tensor]]:
    """Yields every name of `model.named_parameters()` with its fp32 CPU tensor, in the order of the files; one of more
    than RUN_ELEMENTS elements as flat runs, the name with each.

    `source` is a folder or a hub name. Names may lack the base model's prefix, be older ones that transformers renames,
    and hold a tied weight under either or both of its names. Everything is compared with the model's names and shapes
    before this function returns; InputError lists what is missing, unexpected or of another shape. RAM: one run,
    1 MiB, and the previous run for as long as the caller's loop still holds it; a tensor of a .bin file whose elements
    lie there in another order (a transposed one) comes whole.
    """
    entries: dict[str, _Entry] = {}
    for path in weight_files(model_folder(source, "weights")):
        entries |= _safetensors_entries(path) if path.suffix == ".safetensors" else _bin_entries(path)
    return _stream(_match(model, entries, source))


def _stream(matched: dict[str, _Entry]) -> Iterator[tuple[str, Tensor]]:
    for name, entry in matched.items():
        if entry.elements <= RUN_ELEMENTS or not entry.is_contiguous:
            yield name, _read(entry)
            continue
        for chunk in _chunks(entry):
            yield name, chunk.to(torch.float32, copy=True)


def _safetensors_entries(path: Path) -> dict[str, _Entry]:
    try:
        with safe_open(path, framework="pt"):  # checks the header, and that the data have the length that it promises
            pass
    except (SafetensorError, OSError) as error:
        raise InputError(f"{path} is truncated or corrupt ({error}); download or copy it again") from None
    with path.open("rb") as file:
        header_bytes = int.from_bytes(file.read(8), "little")
        header = json.loads(file.read(header_bytes))
    header.pop("__metadata__", None)
    entries = {}
    for name, item in sorted(header.items(), key=lambda pair: pair[1]["data_offsets"]):
        shape = tuple(item["shape"])
        offset_bytes = 8 + header_bytes + item["data_offsets"][0]
        entries[name] = _Entry(path, offset_bytes, _SAFETENSORS_DTYPES.get(item["dtype"]), shape, _strides(shape))
    return entries


def _strides(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Of a tensor whose elements lie one after the other."""
    return tuple(math.prod(shape[axis + 1 :]) for axis in range(len(shape)))


def _bin_entries(path: Path) -> dict[str, _Entry]:
    try:
        with FakeTensorMode():  # reads the pickle but no data, and notes where in the file each storage lies
            tensors = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # pickle, zip and torch each have their own
        reason = first_line(error)[:200]
        raise InputError(f"{path} is truncated, corrupt or no state_dict ({reason}); download it again") from None
    entries = {}
    for name, tensor in tensors.items():
        if not isinstance(tensor, Tensor):
            continue
        storage_offset_bytes = tensor.untyped_storage()._checkpoint_offset
        if storage_offset_bytes is None:
            raise InputError(
                f"{path} was written before torch 1.6 and cannot be read piece by piece; load it once with "
                "AutoModelForCausalLM.from_pretrained, save it with save_pretrained, and give that folder"
            )
        offset_bytes = storage_offset_bytes + tensor.storage_offset() * tensor.element_size()
        dtype = tensor.dtype if tensor.dtype in _SAFETENSORS_DTYPES.values() else None
        entries[name] = _Entry(path, offset_bytes, dtype, tuple(tensor.shape), tensor.stride())
    return dict(sorted(entries.items(), key=lambda pair: pair[1].offset_bytes))


def _match(model: PreTrainedModel, entries: dict[str, _Entry], source: str) -> dict[str, _Entry]:
    """{parameter name: entry} in the order of `entries`, complete; InputError says what does not fit."""
    parameters = dict(model.named_parameters())
    own_name = {id(parameter): name for name, parameter in parameters.items()}
    aliases = {name: own_name[id(p)] for name, p in model.named_parameters(remove_duplicate=False)}
    transforms = get_model_conversion_mapping(model)
    renamings = [transform for transform in transforms if isinstance(transform, WeightRenaming)]
    converters = [transform for transform in transforms if isinstance(transform, WeightConverter)]

    # T5's files on the hub have a table that no model uses. Of decoders such patterns are wider than what is of no use.
    ignored = model._keys_to_ignore_on_load_unexpected or () if is_encoder_decoder(model.config) else ()
    target, unexpected, converted = {}, [], []
    for name in sorted(entries):  # some renamings want the names sorted
        renamed, conversion = rename_source_key(name, renamings, converters)
        own = aliases.get(renamed) or aliases.get(f"{model.base_model_prefix}.{renamed}")
        if conversion is not None:
            converted.append(name)
        elif own:
            target[name] = own
        elif not _OLD_BUFFERS.search(name) and not any(re.search(key, name) for key in ignored):
            unexpected.append(name)

    matched: dict[str, _Entry] = {}
    wrong, duplicates = [], []
    for name, entry in entries.items():
        if name not in target:
            continue
        shape = tuple(parameters[target[name]].shape)
        if entry.shape != shape:
            wrong.append(f"{name}: {list(entry.shape)} in the file, {list(shape)} in the config")
        elif entry.dtype is None:
            wrong.append(f"{name}: neither fp32, fp16 nor bf16 (quantised?)")
        elif target[name] in matched:
            duplicates.append((name, entry, matched[target[name]]))
        matched.setdefault(target[name], entry)
    missing = [name for name in parameters if name not in matched]

    problems = (("missing", missing), ("unexpected", unexpected), ("unfit", wrong), ("merged or split", converted))
    said = [f"{len(names)} {problem} ({first_few(names)})" for problem, names in problems if names]
    if said:
        advice = "use the config.json that came with the weights, or --init random"
        if converted:
            advice = "transformers converts these weights on load, which reading them one by one cannot do"
        raise InputError(f"the weights in {source} do not fit the model: {'; '.join(said)}; {advice}")
    for name, entry, other in duplicates:
        if not _same_values(entry, other):
            advice = 'set "tie_word_embeddings": false in config.json if they are meant to differ'
            if is_encoder_decoder(model.config):  # transformers 5 ties it whatever the config says
                advice = "a T5 with a head of its own (version 1.1, FLAN) cannot be trained here"
            raise InputError(f"{entry.path}: {name} differs from the weight that the config ties it to; {advice}")
    return matched


def exact_empty(shape: Iterable[int], dtype: torch.dtype) -> Tensor:
    """Zeros in a mapping of their own, which ends with the tensor: malloc would keep freed pieces of up to 32 MiB."""
    shape = tuple(shape)
    if 0 in shape:
        return torch.empty(shape, dtype=dtype)
    memory = mmap.mmap(-1, math.prod(shape) * dtype.itemsize, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    return torch.frombuffer(memory, dtype=dtype).view(shape)


def _chunks(entry: _Entry) -> Iterator[Tensor]:
    """The entry's elements [n] in the file's dtype, a run at a time, always in the same memory."""
    staging = exact_empty([min(RUN_ELEMENTS, entry.elements)], entry.dtype)
    with entry.path.open("rb") as file:
        file.seek(entry.offset_bytes)
        for start in range(0, entry.elements, RUN_ELEMENTS):
            chunk = staging[: entry.elements - start]
            if file.readinto(chunk.view(torch.uint8).numpy()) != chunk.nbytes:
                raise InputError(f"{entry.path} ends in the middle of a tensor; download or copy it again")
            yield chunk


def _read(entry: _Entry) -> Tensor:
    """The tensor in fp32; from fp16 and bf16 that is exact."""
    flat = exact_empty([entry.elements], torch.float32)
    start = 0
    for chunk in _chunks(entry):
        flat[start : start + len(chunk)] = chunk
        start += len(chunk)
    return flat.as_strided(entry.shape, entry.stride)


def _same_values(one: _Entry, other: _Entry) -> bool:
    if (one.path, one.offset_bytes) == (other.path, other.offset_bytes):
        return True
    pairs = zip(_chunks(one), _chunks(other), strict=False)
    return (one.dtype, one.stride) == (other.dtype, other.stride) and all(torch.equal(a, b) for a, b in pairs)


def random_weights(config: PretrainedConfig, seed: int) -> Iterator[tuple[str, Tensor]]:
    """Yields every parameter's name and fp32 CPU tensor, drawn by the architecture's own `_init_weights` under `seed`.

    transformers initialises a model module by module, and so does this, with one module's parameters in memory at a
    time. Which parameters a module's turn writes is seen beforehand, on meta; one that several write (GPT-2 draws
    `c_proj` as a layer and again, smaller, as part of a block) lives from the first of these turns to the last. A tied
    weight is drawn once, where transformers draws the one that stays. RAM: the largest of these (XL: the embedding,
    307 MiB), and the previous tensor for as long as the caller's loop still holds it. The global generator is left as
    it was, and may be used between two tensors.

    The distribution is transformers', the numbers are not: it draws most weights twice, first in their constructors.
    Where a parameter has its constructor's value because no turn writes it (OpenAI GPT, Data2VecText), or a turn does
    not run on meta, the whole model is built when this is called: 4 bytes of RAM per parameter, falling from then on.
    """
    model = build_model(config)
    homes = _untie(model)
    order = list(_turns(model, model))
    with torch.random.fork_rng(devices=[]):
        written = _written(order, homes)
    if written is None:
        return _give_away(_whole(config, seed))
    return _draw(order, homes, written, seed)


Home = tuple[nn.Module, str]  # a module, and what a parameter of it is called there


def _untie(model: PreTrainedModel) -> dict[str, Home]:
    """Where each parameter of `model` lies; what is tied to one gets another in its place, which stays on meta."""
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    for tied in model.all_tied_weights_keys:  # not the name of the weight that stays
        module, _, leaf = tied.rpartition(".")
        setattr(model.get_submodule(module), leaf, nn.Parameter(torch.empty_like(model.get_parameter(tied))))
    return {
        names[id(parameter)]: (module, leaf)
        for module in model.modules()
        for leaf, parameter in module.named_parameters(recurse=False)
        if id(parameter) in names
    }


def _turns(module: nn.Module, model: PreTrainedModel) -> Iterator[tuple[PreTrainedModel, nn.Module]]:
    """Each module after those it holds, and the innermost model around it, which initialises it."""
    for child in module.children():
        yield from _turns(child, child if isinstance(child, PreTrainedModel) else model)
    yield model, module


def _written(order: list[tuple[PreTrainedModel, nn.Module]], homes: dict[str, Home]) -> dict[str, range] | None:
    """From which turn to which a parameter is written, found on meta; None where that cannot be told of all."""
    parameters = {name: getattr(*home) for name, home in homes.items()}
    written: dict[str, range] = {}
    versions = {name: parameter._version for name, parameter in parameters.items()}
    for turn, (model, module) in enumerate(order):
        try:
            _initialise(model, module)
        except RuntimeError:  # it reads a number
            return None
        for name, parameter in parameters.items():
            if parameter._version != versions[name]:
                versions[name] = parameter._version
                written[name] = range(written.get(name, range(turn, turn)).start, turn + 1)
    return written if len(written) == len(parameters) else None


@torch.no_grad()
@guard_torch_init_functions()
def _initialise(model: PreTrainedModel, module: nn.Module) -> None:
    model._init_weights(module)


def _draw(
    order: list[tuple[PreTrainedModel, nn.Module]], homes: dict[str, Home], written: dict[str, range], seed: int
) -> Iterator[tuple[str, Tensor]]:
    generator = torch.Generator().manual_seed(seed).get_state()
    for turn, (model, module) in enumerate(order):
        for name in [name for name, turns in written.items() if turns.start == turn]:
            owner, leaf = homes[name]
            setattr(owner, leaf, nn.Parameter(exact_empty(getattr(owner, leaf).shape, torch.float32)))
        with torch.random.fork_rng(devices=[]):
            torch.set_rng_state(generator)
            _initialise(model, module)
            generator = torch.get_rng_state()
        for name in [name for name, turns in written.items() if turns.stop == turn + 1]:
            owner, leaf = homes[name]
            tensor = getattr(owner, leaf).data
            setattr(owner, leaf, nn.Parameter(tensor.to("meta")))
            yield name, tensor
            del tensor


def _whole(config: PretrainedConfig, seed: int) -> PreTrainedModel:
    """As transformers builds it; each parameter in memory of its own."""
    on_its_own = parameters_placed(lambda tensor: exact_empty(tensor.shape, torch.float32).copy_(tensor))
    with torch.random.fork_rng(devices=[]), on_its_own:
        torch.default_generator.manual_seed(seed)  # torch.manual_seed would seed the GPUs too
        return model_from_config(config)


def _give_away(model: PreTrainedModel) -> Iterator[tuple[str, Tensor]]:
    for name, parameter in model.named_parameters():
        tensor, parameter.data = parameter.data, torch.empty(0)
        yield name, tensor
        del tensor
