"""Streams the weights of a model as fp32 tensors: from files, or initialized randomly. The caller moves each tensor to
its place before the next is read; `from_pretrained` puts a whole model into RAM, often twice.

Refuses quantised files, .bin files from before torch 1.6, and weights that transformers merges or splits. Checksums are
not checked (.safetensors has none), so a flipped bit goes unnoticed.
"""

from collections.abc import Callable, Iterator

import torch
from torch import Tensor, nn
from transformers import PretrainedConfig, PreTrainedModel
from transformers.initialization import guard_torch_init_functions

from lowmem.core.homes import host_tensor
from lowmem.errors import InputError
from lowmem.models.build import build_model, model_folder, model_from_config, parameters_placed
from lowmem.models.entries import Entry, entries_of, read_runs, same_values
from lowmem.models.names import match
from lowmem.models.weight_files import usual_weight_files, weight_files


def read_weights(
    model: PreTrainedModel, source: str, say: Callable[[str], None] = lambda sentence: None
) -> Iterator[tuple[str, Tensor]]:
    """Yields (name, fp32 CPU tensor) for all parameters of `model`, in the order of the files. A contiguous tensor of
    more than CHUNK_ELEMENTS elements comes as several flat chunks. `source`: a folder or a hub name. Calls `say` with a
    sentence on each change of names or values. Raises InputError at once if names or shapes do not fit, and during
    iteration if a value is not finite."""
    folder = model_folder(source, "weights")
    entries: dict[str, Entry] = {}
    files = weight_files(folder)
    if not usual_weight_files(folder):
        say(f"the weights are read from {', '.join(path.name for path in files)} in {source}")
    for path in files:
        found, keys = entries_of(path)
        if keys:
            say(f"the weights are those under {'.'.join(keys)} in {path}")
        for name in found.keys() & entries.keys():
            if not same_values(found[name], entries[name]):
                raise InputError(f"{name} is in {entries[name].path} and {path}, with different values; remove one")
        entries |= found
    matched, remarks = match(model, entries, source)
    for remark in remarks:
        say(remark)
    return _stream(matched)


def _stream(matched: dict[str, Entry]) -> Iterator[tuple[str, Tensor]]:
    for name, entry in matched.items():
        for values in read_runs(entry):
            if values.numel() and not all(bound.isfinite() for bound in values.aminmax()):  # allocates next to nothing
                beyond = " or numbers that fp32 cannot hold" if entry.dtype is torch.float64 else ""
                raise InputError(
                    f"{entry.path}: {name} has values that are NaN or infinite{beyond}, so it cannot be trained from; "
                    "take an earlier checkpoint, or download the file again"
                )
            yield name, values
            del values


def random_weights(config: PretrainedConfig, seed: int) -> Iterator[tuple[str, Tensor]]:
    """Yields (name, fp32 CPU tensor) for all parameters, initialized by the architecture's `_init_weights`. The numbers
    differ from transformers', which draws most weights twice."""
    # A trial on meta tensors finds the modules that write each parameter. So only parameters in progress need storage.
    # If the trial fails (OpenAI GPT), the whole model is built in RAM.
    model = build_model(config)
    owners = _untie(model)
    turns = list(_turns(model, model))
    parameters = {name: getattr(*owner) for name, owner in owners.items()}
    versions = {name: parameter._version for name, parameter in parameters.items()}
    written: dict[str, range] = {}  # indices in `turns`; GPT-2 initializes `c_proj` as a layer, and with its block
    with torch.random.fork_rng(devices=[]):
        for number, turn in enumerate(turns):
            try:
                _initialize(*turn)
            except RuntimeError:  # it reads a parameter's value
                return _from_whole(config, seed)
            for name, parameter in parameters.items():
                if parameter._version != versions[name]:
                    versions[name] = parameter._version
                    written[name] = range(written.get(name, range(number, number)).start, number + 1)
    if len(written) < len(parameters):  # the constructor sets the others
        return _from_whole(config, seed)
    return _by_turns(turns, owners, written, seed)


Owner = tuple[nn.Module, str]  # a module, and its name for a parameter
Turn = tuple[PreTrainedModel, nn.Module]  # (the innermost model around a module, which initializes it; the module)


def _untie(model: PreTrainedModel) -> dict[str, Owner]:
    """Gives each tied name of `model` a separate parameter on `meta`. Returns {name: (module, attribute)} of all
    parameters, without the tied names."""
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    for tied in model.all_tied_weights_keys:  # without the name of the weight that stays
        module, _, leaf = tied.rpartition(".")
        setattr(model.get_submodule(module), leaf, nn.Parameter(torch.empty_like(model.get_parameter(tied))))
    return {
        names[id(parameter)]: (module, leaf)
        for module in model.modules()
        for leaf, parameter in module.named_parameters(recurse=False)
        if id(parameter) in names
    }


def _turns(module: nn.Module, model: PreTrainedModel) -> Iterator[Turn]:
    """Yields a Turn, one call of `_init_weights`, for `module` and for each of its submodules, children first."""
    for child in module.children():
        yield from _turns(child, child if isinstance(child, PreTrainedModel) else model)
    yield model, module


@torch.no_grad()
@guard_torch_init_functions()
def _initialize(model: PreTrainedModel, module: nn.Module) -> None:
    model._init_weights(module)


def _by_turns(
    turns: list[Turn], owners: dict[str, Owner], written: dict[str, range], seed: int
) -> Iterator[tuple[str, Tensor]]:
    """Initializes modules by `turns` (each is one call of `_init_weights`), in order. Yields (name, tensor) of each
    parameter after the last turn that writes it. Allocates it just before the first. `owners`: {parameter: (its module,
    its name there)}. `written`: {parameter: range of indices in `turns`, from the first to the last that writes it}."""
    generator = torch.Generator().manual_seed(seed).get_state()
    for number, turn in enumerate(turns):
        for name in [name for name, range_ in written.items() if range_.start == number]:
            owner, leaf = owners[name]
            shape = getattr(owner, leaf).shape
            setattr(owner, leaf, nn.Parameter(host_tensor(shape.numel(), torch.float32).view(shape)))
        with torch.random.fork_rng(devices=[]):
            torch.set_rng_state(generator)
            _initialize(*turn)
            generator = torch.get_rng_state()
        for name in [name for name, range_ in written.items() if range_.stop == number + 1]:
            owner, leaf = owners[name]
            tensor = getattr(owner, leaf).data
            setattr(owner, leaf, nn.Parameter(tensor.to("meta")))
            yield name, tensor
            del tensor


def _from_whole(config: PretrainedConfig, seed: int) -> Iterator[tuple[str, Tensor]]:
    """Builds the whole random model in RAM, and yields its parameters, which the caller can free one by one."""
    on_its_own = parameters_placed(
        lambda tensor: host_tensor(tensor.numel(), torch.float32).view(tensor.shape).copy_(tensor)
    )
    with torch.random.fork_rng(devices=[]), on_its_own:
        torch.default_generator.manual_seed(seed)  # torch.manual_seed would seed the GPUs too
        model = model_from_config(config)
    for name, parameter in model.named_parameters():
        tensor, parameter.data = parameter.data, torch.empty(0)
        yield name, tensor
        del tensor
