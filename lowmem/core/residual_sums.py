"""Computes residual additions of blocks by one kernel each, with the dropout before and the normalization after.

`fuse_sums` runs each kind of block once to find these operations. Later, `ResidualSums` replaces them by kernels.
Dropout masks differ from PyTorch's. No GPU has run this code yet.
"""

import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from unittest.mock import patch

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from lowmem.core.decoder import Decoder
from lowmem.core.dry_run import Trace, look_at_blocks
from lowmem.core.norms import Drops, Norm, arguments_of, dropped, normalized
from lowmem.core.operation_recorder import address_of

_ADDITIONS = {Tensor.add, torch.add}  # x + y calls Tensor.add
_VIEWS = {Tensor.view, Tensor.reshape}


@dataclass(frozen=True)
class Call:
    function: Callable  # F.dropout, `normalized`, or torch.add for a residual addition
    changed: bool = False  # True if ResidualSums replaces the call
    norm: str | None = None  # of an addition: name of the block's norm that the same kernel computes


class _StreamMode(TorchFunctionMode):
    """Calls `_call`, which subclasses define, in the place of each dropout, norm and residual addition inside `with`. A
    residual addition adds a branch to the stream: to `hidden`, the block's input, or to an earlier sum."""

    def __init__(self, hidden: Tensor):
        super().__init__()
        self._streams: dict[int, weakref.ref] = {}  # {id: tensor that is the stream}
        self._follow(hidden)

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if func is F.dropout or func is normalized:
            return self._call(func, args, kwargs)
        is_sum = func in _ADDITIONS and not kwargs and self._position_of_stream(args) is not None
        result = self._call(torch.add, args, kwargs) if is_sum else func(*args, **kwargs)
        if is_sum or (func in _VIEWS and self._is_stream(args[0])):
            self._follow(result)
        return result

    def _call(self, function: Callable, args: tuple, kwargs: dict) -> Tensor:
        raise NotImplementedError

    def _follow(self, tensor: Tensor) -> None:
        self._streams[id(tensor)] = weakref.ref(tensor)

    def _is_stream(self, tensor: object) -> bool:
        reference = self._streams.get(id(tensor))
        return reference is not None and reference() is tensor

    def _position_of_stream(self, summands: tuple) -> int | None:
        """Returns the position (0 or 1) of the stream among two `summands`; None if this is no residual addition."""
        positions = [position for position, each in enumerate(summands) if self._is_stream(each)]
        if len(summands) != 2 or len(positions) != 1:
            return None
        stream, branch = summands[positions[0]], summands[1 - positions[0]]
        # The sum must have the stream's shape and dtype.
        if not isinstance(branch, Tensor) or stream.shape != branch.shape:
            return None
        # Not torch.promote_types, which is an operation.
        keeps_dtype = branch.dtype is stream.dtype or (branch.dtype.itemsize == 2 and stream.dtype is torch.float32)
        return positions[0] if keeps_dtype else None


# Per element of an fp32 stream and a 16-bit branch, one kernel moves 12 bytes forward, and 16 backward. PyTorch's
# dropout and addition with the norm's own kernel move 21 and 33.
class ResidualSums(_StreamMode):
    """Replaces dropouts, norms and residual additions that `block` runs inside `with` by fused kernels. `calls`: these
    calls in their order, as found by `Watch`. After a call that differs from this list, replaces no more. On exit,
    raises RuntimeError if a dropout was postponed to an addition that did not follow."""

    def __init__(self, block: nn.Module, hidden: Tensor, calls: Sequence[Call]):
        super().__init__(hidden)
        self._block, self._calls = block, iter(calls)
        self._moved = sum(call.changed and call.function is F.dropout for call in calls)  # dropouts that sums compute
        self._seeds: Tensor | None = None  # a seed for each of these dropouts
        self._number = 0  # number of seeds used so far
        # Each entry holds the tensor whose id is its key, so that no other tensor gets this id.
        self._dropouts: dict[int, tuple[Tensor, float]] = {}  # {id of a branch: (branch, probability)}
        self._norms: dict[int, tuple[Tensor, Norm, Tensor]] = {}  # {id of a sum: (sum, its norm, the norm's output)}
        # {id of a stream: (stream, its alias that the norm's Function returned)}. Sums add to the alias. So backward
        # adds their gradients in the norm's kernel.
        self._outputs: dict[int, tuple[Tensor, Tensor]] = {}

    def __exit__(self, *exception):
        super().__exit__(*exception)
        if self._dropouts and exception[0] is None:
            raise RuntimeError(
                "a block ran otherwise than when it was loaded, perhaps because of a hook: no sum has read the output "
                "of a dropout"
            )

    def _call(self, function: Callable, args: tuple, kwargs: dict) -> Tensor:
        call = next(self._calls, None)
        if call is not None and call.function is not function:
            self._calls, call = iter(()), None
        if call is None or not call.changed:
            return function(*args, **kwargs)
        if function is F.dropout:
            x, p, _ = _dropout(*args, **kwargs)
            if p:
                self._dropouts[id(x)] = x, p
            return x
        return self._normalized(*args) if function is normalized else self._sum(call, args)

    def _normalized(self, x: Tensor, norm: Norm) -> Tensor:
        _, of_sum, y = self._norms.pop(id(x), (None, None, None))
        if of_sum is norm:
            return y
        _, stream = self._outputs.get(id(x), (None, x))
        stream, y = norm.of_sum(stream)
        self._outputs[id(x)] = x, stream
        return y

    def _sum(self, call: Call, args: tuple[Tensor, Tensor]) -> Tensor:
        position = self._position_of_stream(args)
        stream, branch = args[position], args[1 - position]
        _, stream = self._outputs.pop(id(stream), (None, stream))
        drops = self._drops(branch)
        if call.norm is None:
            return add_dropped(stream, branch, drops)
        norm = self._block.get_submodule(call.norm).forward
        total, y = norm.of_sum(stream, branch, drops)
        self._norms[id(total)] = total, norm, y
        return total

    def _drops(self, branch: Tensor) -> Drops | None:
        if id(branch) not in self._dropouts:
            return None
        if self._seeds is None:
            self._seeds = Drops.draw(self._moved, branch.device)
        self._number += 1
        return Drops(self._dropouts.pop(id(branch))[1], self._seeds, self._number - 1)


def add_dropped(x: Tensor, branch: Tensor, drops: Drops | None) -> Tensor:
    """Returns x + dropout(branch), in the dtype of `x`. With a dropout, the last dimension must be a multiple of 4."""
    return x + branch if drops is None else _AddDropped.apply(x, branch, drops)


class _AddDropped(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor, branch: Tensor, drops: Drops) -> Tensor:
        seeds, *ctx.drops = arguments_of(drops)
        ctx.save_for_backward(seeds)
        ctx.branch_dtype = branch.dtype
        return dropped(branch, x, x.dtype, seeds, *ctx.drops)

    @staticmethod
    @once_differentiable
    def backward(ctx, gradient: Tensor):
        # Draws the same mask again, from its seed.
        return gradient, dropped(gradient, None, ctx.branch_dtype, *ctx.saved_tensors, *ctx.drops), None


class BlockForward:
    """Serves as the forward of `block`: runs the block's old forward inside ResidualSums, which fuses its residual
    additions. `calls`: for ResidualSums. If `own_sums` is True, runs the old forward without ResidualSums."""

    def __init__(self, block: nn.Module, calls: Sequence[Call]):
        self._forward, self._block, self.calls = block.forward, block, calls
        self.own_sums = False

    def __call__(self, hidden: Tensor, *arguments, **keywords):
        if self.own_sums:
            return self._forward(hidden, *arguments, **keywords)
        with ResidualSums(self._block, hidden, self.calls):
            return self._forward(hidden, *arguments, **keywords)


def fuse_sums(decoder: Decoder, dtype: torch.dtype) -> None:
    """Replaces the forward of each block of `decoder` by a BlockForward, which fuses residual additions, if the block
    has some to fuse. Adds each BlockForward to `decoder.block_forwards`. `dtype`: the matrices' dtype."""
    for block, calls in zip(decoder.blocks, look_at_blocks(decoder, dtype, _calls_of), strict=True):
        if any(call.changed for call in calls or ()):
            block.forward = BlockForward(block, calls)
            decoder.block_forwards.append(block.forward)


def _calls_of(block: nn.Module, run: Callable[[], object]) -> list[Call]:
    forward = block.forward
    calls: list[Call] = []

    def watched(hidden: Tensor, *arguments, **keywords):
        with Watch(block, hidden) as watch:
            output = forward(hidden, *arguments, **keywords)
        calls.extend(watch.calls())
        return output

    with torch.no_grad(), patch.object(block, "forward", watched):
        run()
    return calls


@dataclass
class _Seen:
    function: Callable
    given: tuple
    versions: list[int | None]  # of each argument: the number of in-place writes before the call
    result: Tensor
    position: int | None  # of the residual stream among an addition's arguments
    changed: bool = False
    norm: str | None = None


class Watch(_StreamMode):
    """Notes the dropouts, normalizations and residual additions that `block` computes inside `with`. Then `calls()`
    returns them, and marks those that ResidualSums can replace."""

    def __init__(self, block: nn.Module, hidden: Tensor):
        super().__init__(hidden)
        self._block, self._trace = block, Trace()
        self._seen: list[_Seen] = []

    def __enter__(self):
        self._trace.__enter__()
        return super().__enter__()

    def __exit__(self, *exception):
        super().__exit__(*exception)
        self._trace.__exit__(*exception)

    def _call(self, function: Callable, args: tuple, kwargs: dict) -> Tensor:
        given = _dropout(*args, **kwargs) if function is F.dropout else args
        position = self._position_of_stream(args) if function is torch.add else None
        versions = [each._version if isinstance(each, Tensor) else None for each in given]
        # ResidualSums returns the input of a dropout that it moves. So operations that read it are counted, too.
        result = given[0] if function is F.dropout and not given[2] else function(*args, **kwargs)
        self._seen.append(_Seen(function, given, versions, result, position))
        return result

    def calls(self) -> list[Call]:
        sums = {id(call.result): call for call in self._seen if call.function is torch.add}
        reads = Counter(address for each in self._trace.operations for address in set(map(address_of, each.reads)))
        for call in self._seen:
            if call.function is F.dropout:
                self._join_dropout(call, sums.values(), reads[address_of(call.result)])
            elif call.function is normalized:
                self._join_norm(call, sums)
        return [Call(call.function, call.changed, call.norm) for call in self._seen]

    def _join_dropout(self, call: _Seen, sums: Iterable[_Seen], reads: int) -> None:
        readers = [each for each in sums if each.given[1 - each.position] is call.result]
        dropouts = [each for each in self._seen if each.function is F.dropout and each.result is call.result]
        read_once = len(readers) == len(dropouts) == reads == 1
        if read_once and not call.given[2] and call.result.shape[-1] % 4 == 0:  # Philox draws four numbers a call
            # The addition computes the dropout, too.
            call.changed = readers[0].changed = True

    def _join_norm(self, call: _Seen, sums: dict[int, _Seen]) -> None:
        x, norm = call.given
        name = next((name for name, each in self._block.named_modules() if each.forward is norm), None)
        readers = [each for each in sums.values() if each.given[each.position] is x]
        # An operation may write the tensor in between.
        if name is None or any(each.versions[each.position] != call.versions[0] for each in readers):
            return
        if (of_sum := sums.get(id(x))) and of_sum.norm is None and call.versions[0] == 0:
            # One kernel computes the norm and the residual addition before it.
            of_sum.norm = name
            call.changed = of_sum.changed = True
        elif readers:
            # As at the start of a block: later additions read the same tensor. The norm's kernel adds their gradients.
            for each in (call, *readers):
                each.changed = True


def _dropout(input: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> tuple[Tensor, float, bool]:  # noqa: A002
    return input, p if training else 0.0, inplace
