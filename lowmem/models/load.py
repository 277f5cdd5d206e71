"""Hugging Face weights, one tensor at a time (the way out is in export.py).

`from_pretrained` puts a whole fp32 model into RAM (XL: 5.8 GiB) before a trainer has placed its first byte, and often
a second copy while converting. Here the model is built without storage, its weights pass by as a stream, and whoever
consumes the stream puts each tensor where it belongs (split into halves, on the GPU, ...) before the next one is read:

    model = build_model(load_config("gpt2-xl", "pretrained"))    shapes on `meta`, buffers real: about a second, no RAM
    for name, values in read_weights(model, "gpt2-xl"): ...      fp32; RAM: some MiB
    for name, tensor in random_weights(model.config, seed): ...  fp32; RAM: one module's tensors

A tensor of more than 1 MiB comes as runs of its elements, in their order, one after the other.

weight_files.py finds the files, entries.py the tensors in them, names.py the parameter of each tensor.

Limits: Files are fp32, fp16, bf16 or fp64, which is rounded; quantised ones are refused. So are .bin files from before
torch 1.6, which are not zipped, and weights that transformers merges or splits on load (experts of some mixtures). A
flipped bit inside a tensor cannot be seen: neither format has checksums.
"""

from collections.abc import Callable, Iterator

import torch
from torch import Tensor, nn
from transformers import PretrainedConfig, PreTrainedModel
from transformers.initialization import guard_torch_init_functions

from lowmem.errors import InputError
from lowmem.models.build import build_model, model_folder, model_from_config, parameters_placed
from lowmem.models.entries import Entry, entries_of, exact_empty, read_runs, same_values
from lowmem.models.names import match
from lowmem.models.weight_files import usual_weight_files, weight_files


def read_weights(
    model: PreTrainedModel, source: str, say: Callable[[str], None] = lambda sentence: None
) -> Iterator[tuple[str, Tensor]]:
    """Yields every name of `model.named_parameters()` with its fp32 CPU tensor, in the order of the files; one of more
    than RUN_ELEMENTS elements as flat runs, the name with each.

    `source` is a folder or a hub name. Everything is compared with the model's names and shapes before this function
    returns (names.py); InputError lists what is missing, unexpected or of another shape. `say` gets sentences on names
    and values that are changed. The stream raises InputError at a value that is not finite. RAM: one run, 1 MiB, and
    the previous run while the caller's loop holds it. A transposed tensor of a .bin file comes whole.
    """
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
            if values.numel() and not all(bound.isfinite() for bound in values.aminmax()):  # takes no room
                beyond = " or numbers that fp32 cannot hold" if entry.dtype is torch.float64 else ""
                raise InputError(
                    f"{entry.path}: {name} has values that are NaN or infinite{beyond}, so it cannot be trained from; "
                    "take an earlier checkpoint, or download the file again"
                )
            yield name, values
            del values


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
