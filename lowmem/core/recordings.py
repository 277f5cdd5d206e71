"""Records the PyTorch operations of a segment (blocks that are recomputed together), and repeats them without the
model's code (docs/recompute.md)."""

from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from itertools import chain

import torch
from torch import Tensor, nn
from torch.nn.modules import module as of_modules

from lowmem.core.dry_run import PLAIN, equal, is_ours
from lowmem.core.operation_recorder import OperationRecorder, Recording, address_of, geometry_of, holders_if_alone

RUNS_BEFORE = 1  # runs of a segment before it is recorded: in a short training, recording costs more than it saves
MOST_SHAPES = 4  # shapes of arguments whose recordings are kept, per segment and direction
_HOOKS = ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")
_HOOKS_OF_PARAMETERS = ("_backward_hooks", "_post_accumulate_grad_hooks")
_HOOKS_OF_ALL = tuple(f"_global_{kind}_hooks" for kind in ("forward_pre", "forward", "backward_pre", "backward"))


class Recordings:
    """Keeps the recorded operations of each segment (blocks that are recomputed together), for forward and for
    backward. Keeps one recording for each of the MOST_SHAPES shapes of arguments that were used most recently."""

    def __init__(self):
        # {name: {shape of arguments: number of runs, then a Recording; None if it cannot be repeated}}
        self._known: dict[Hashable, dict[tuple, int | Recording | None]] = {}
        self._state: list = []

    def run(
        self, name: Hashable, run: Callable[[], Tensor], arguments: Sequence, extras: Iterable[tuple[tuple, dict]],
        modules: Sequence[nn.Module],
    ) -> Tensor:  # fmt: skip
        """Returns the result of `run()`. If an earlier call with this `name`, equal shapes and equal plain values has
        recorded the operations, repeats them with the new `arguments` and `extras` instead. `name`: calls with equal
        names must run the same code. `arguments`: the values that `run` uses; the first must be a tensor. `extras`:
        (args, kwargs) of each block, without its input. `modules`: modules whose parameters and buffers `run` uses."""
        others = list(_leaves(extras))
        shape = _shape_of([*_tensors(arguments), *others])
        if shape is None or torch.is_autocast_enabled(arguments[0].device.type):
            return run()
        known = self._known.setdefault(name, {})
        known[shape] = found = known.pop(shape, 0)  # moved to the end: the newest
        if len(known) > MOST_SHAPES:
            del known[next(iter(known))]
        arguments = [*arguments, *_tensors(others)]
        if isinstance(found, Recording):
            return found(arguments)
        if found is None or found < RUNS_BEFORE:
            known[shape] = None if found is None else found + 1
            return run()
        if _hooked(modules):
            known[shape] = None
            return run()
        with OperationRecorder(arguments, modules, holders_if_alone()) as recorder:
            result = run()
        known[shape] = recorder.recording(result)
        return result

    def forget_if_changed(self, model: nn.Module) -> bool:
        """Drops all recordings if the modules, attributes or hooks of `model` have changed since the previous call.
        Returns True if they have changed, or if this is the first call."""
        before, self._state = self._state, list(_state_of(model))
        changed = not equal(before, self._state)
        if changed:
            self._known.clear()
        return changed


def _state_of(model: nn.Module) -> Iterator:
    yield from chain.from_iterable(getattr(of_modules, name).values() for name in _HOOKS_OF_ALL)
    for module in model.modules():
        for value in vars(module).values():
            yield from value.values() if isinstance(value, dict) else (value,)
    for parameter in model.parameters():
        for name in _HOOKS_OF_PARAMETERS:
            yield from (getattr(parameter, name) or {}).values()


def _hooked(modules: Iterable[nn.Module]) -> bool:
    if any(getattr(of_modules, name) for name in _HOOKS_OF_ALL):
        return True
    hooks = []
    for module in chain.from_iterable(module.modules() for module in modules):
        owners = [(module, _HOOKS), *((each, _HOOKS_OF_PARAMETERS) for each in module.parameters(recurse=False))]
        hooks += [hook for owner, names in owners for name in names for hook in (getattr(owner, name) or {}).values()]
    return not all(map(is_ours, hooks))


def _tensors(values: Iterable) -> Iterator[Tensor]:
    return (value for value in values if isinstance(value, Tensor))


def _leaves(extras: Iterable[tuple[tuple, dict]]) -> Iterator:
    for arguments, keywords in extras:
        yield from keywords
        for value in (*arguments, *keywords.values()):
            yield from _opened(value)


def _opened(value) -> Iterator:
    if type(value) is tuple:
        yield len(value)
        for one in value:
            yield from _opened(one)
    else:
        yield value


def _shape_of(arguments: Iterable) -> tuple | None:
    """Returns a key of `arguments`: a recording can be repeated with arguments whose key is equal. Returns None if an
    argument is neither a strided tensor nor a plain value, such as a number."""
    addresses: dict[int, int] = {}
    shape = []
    for value in arguments:
        if isinstance(value, Tensor) and value.layout is torch.strided:
            # Tensors that share memory get the same number.
            shape.append((addresses.setdefault(address_of(value), len(addresses)), *geometry_of(value)))
        elif type(value) in PLAIN:
            shape.append((type(value), value))
        else:
            return None
    return tuple(shape)
