"""Computes the sums of a block's residual stream in one kernel, with the dropout before and the norm after each sum.

A block computes x + dropout(attention(norm(x))), and the same with its MLP. Per element of an fp32 stream and a 16-bit
branch, dropout, sum and norm move 21 bytes in PyTorch's operators and the kernel of norms.py. In one kernel they move
12. Backward moves 16 bytes instead of 33: the norm's kernel adds the gradient that comes past it, and also writes the
gradient of the branch.

The block's own code runs. `fuse_sums` watches it once, on tensors without data, and notes which additions belong to the
residual stream. `ResidualSums`, a mode of torch, replaces these later. It computes a dropout's output only in the
addition that reads it, so the masks are other ones than PyTorch's. Backward draws the same mask again from its seed.
No GPU has run this code yet.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from unittest.mock import patch

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from lowmem.core.decoder import AnswerYes, Decoder, kind_of
from lowmem.core.dry_run import dry_run
from lowmem.core.norms import Norm, new_seed, normalized
from lowmem.core.recorder import address_of

_ADDITIONS = {Tensor.add, torch.add}  # x + y calls the first
_VIEWS = {Tensor.view, Tensor.reshape}


@dataclass(frozen=True)
class Call:
    """Describes a call that a block makes. `function`: F.dropout, `normalized`, torch.add for any addition of two
    tensors, or Tensor.view for any view. `changed`: True if ResidualSums makes the call in another way. For a sum of
    the residual stream, `stream` is the stream's position among the two arguments, and `norm` the name of the block's
    norm that reads the sum, or None."""

    function: Callable
    changed: bool = False
    stream: int = 0
    norm: str | None = None


class ResidualSums(TorchFunctionMode):
    """Replaces the calls of `block`, inside `with`, as `calls` say. If the block makes other calls, all that follow run
    as they are."""

    def __init__(self, block: nn.Module, calls: Sequence[Call]):
        super().__init__()
        self._block, self._calls = block, iter(calls)
        self._dropouts: dict[int, tuple[Tensor, float]] = {}  # by id of a branch; the tensor keeps it
        self._norms: dict[int, tuple[Tensor, Norm, Tensor]] = {}  # by id of a sum: the sum, its norm, and the result
        self._streams: dict[int, tuple[Tensor, Tensor]] = {}  # by id: what later sums add to instead

    def __exit__(self, *exception):
        super().__exit__(*exception)
        if self._dropouts and exception[0] is None:
            raise RuntimeError("a block ran otherwise than when it was loaded: no sum has read a dropout's output")

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        function = _noted(func, args)
        call = next(self._calls, None) if function else None
        if call is not None and call.function is not function:
            self._calls, call = iter(()), None
        if call is None or not call.changed:
            return func(*args, **kwargs)
        if function is F.dropout:
            x, p, _ = _dropout(*args, **kwargs)
            self._dropouts[id(x)] = x, p
            return x
        return self._normalized(*args) if function is normalized else self._sum(call, args)

    def _normalized(self, x: Tensor, norm: Norm) -> Tensor:
        _, of_sum, y = self._norms.pop(id(x), (None, None, None))
        if of_sum is norm:
            return y
        _, stream = self._streams.get(id(x), (None, x))
        stream, y = norm.of_sum(stream)
        self._streams[id(x)] = x, stream  # so that backward adds the gradients of later sums in this norm's kernel
        return y

    def _sum(self, call: Call, args: tuple[Tensor, Tensor]) -> Tensor:
        stream, branch = args[call.stream], args[1 - call.stream]
        if _position_of_stream(args, {id(stream)}) is None:
            return stream + branch  # another sum than was seen
        _, stream = self._streams.pop(id(stream), (None, stream))
        _, p = self._dropouts.pop(id(branch), (None, 0.0))
        if call.norm is None:
            return add_dropped(stream, branch, p)
        norm = self._block.get_submodule(call.norm).forward
        total, y = norm.of_sum(stream, branch, p)
        self._norms[id(total)] = total, norm, y
        return total


def add_dropped(x: Tensor, branch: Tensor, p: float) -> Tensor:
    """Returns x + dropout(branch), in the dtype of `x`. Both have one shape [..., D]; 4 divides D if `p` > 0."""
    return _AddDropped.apply(x, branch, new_seed(branch), p) if p else x + branch


class _AddDropped(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor, branch: Tensor, seed: Tensor, p: float) -> Tensor:
        ctx.save_for_backward(seed)
        ctx.p, ctx.branch_dtype = p, branch.dtype
        return _dropped(branch, x, seed, p, x.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx, gradient: Tensor):
        (seed,) = ctx.saved_tensors
        return gradient, _dropped(gradient, None, seed, ctx.p, ctx.branch_dtype), None, None


def _dropped(x: Tensor, added: Tensor | None, seed: Tensor, p: float, dtype: torch.dtype) -> Tensor:
    x = x.contiguous()
    y = x.new_empty(x.shape, dtype=dtype)  # not empty_like: a recording may leave out `drop` (products.py)
    torch.ops.lowmem.drop(x, None if added is None else added.contiguous(), y, seed, p)
    return y


def fuse_sums(decoder: Decoder, dtype: torch.dtype) -> None:
    """Makes the blocks of `decoder` compute their sums with ResidualSums, if it can change any of their calls. `dtype`:
    the matrices' dtype."""
    known: dict[tuple, list[Call]] = {}  # by kind of block
    for index, block in enumerate(decoder.blocks):
        if (kind := kind_of(block)) not in known:
            known[kind] = dry_run(decoder.model, dtype, partial(_calls_of, decoder, index)) or []
        if any(call.changed for call in known[kind]):
            block.forward = _Forward(block, known[kind])


def make_own_sums(blocks: Iterable[nn.Module]) -> None:
    """Undoes `fuse_sums`."""
    for block in blocks:
        if isinstance(block.forward, _Forward):
            block.forward = block.forward.own


class _Forward:
    """Takes the place of the forward of `block`, which is `own`."""

    def __init__(self, block: nn.Module, calls: Sequence[Call]):
        self.own, self._block, self.calls = block.forward, block, calls

    def __call__(self, *arguments, **keywords):
        with ResidualSums(self._block, self.calls):
            return self.own(*arguments, **keywords)


def _calls_of(decoder: Decoder, index: int) -> list[Call]:
    block = decoder.blocks[index]
    forward = block.forward

    def watched(hidden: Tensor, *arguments, **keywords):
        nonlocal calls
        with _Watch(block, hidden) as watch:
            output = forward(hidden, *arguments, **keywords)
        calls = watch.calls()
        return output

    calls: list[Call] = []
    with torch.no_grad(), AnswerYes(), patch.object(block, "forward", watched):
        hidden, extras = decoder.embed(*decoder.example(decoder.head_weight.shape[0]))
        decoder.block(index, hidden, extras[index])
    return calls


@dataclass
class _Seen:
    """Describes a call while a block is watched: its arguments, how often they had been written in place (`versions`),
    and its result. Other fields as in Call; `stream` is None unless the call is a sum of the residual stream."""

    function: Callable
    given: tuple
    versions: list[int | None]
    result: Tensor
    changed: bool = False
    stream: int | None = None
    norm: str | None = None


class _Watch(TorchFunctionMode):
    """Notes the calls of `F.dropout`, `normalized`, additions and views that `block` makes inside `with` for its input
    `hidden`, with their arguments and results."""

    def __init__(self, block: nn.Module, hidden: Tensor):
        super().__init__()
        self._block, self._hidden, self._reads = block, hidden, _Reads()
        self._seen: list[_Seen] = []

    def __enter__(self):
        self._reads.__enter__()
        return super().__enter__()

    def __exit__(self, *exception):
        super().__exit__(*exception)
        self._reads.__exit__(*exception)

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs, function = kwargs or {}, _noted(func, args)
        given = _dropout(*args, **kwargs) if function is F.dropout else (None, None) if kwargs else args
        versions = [each._version if isinstance(each, Tensor) else None for each in given]
        # A dropout that is moved returns its input, so operations that read this are counted, too.
        result = given[0] if function is F.dropout and not given[2] else func(*args, **kwargs)
        if function:
            self._seen.append(_Seen(function, given, versions, result))
        return result

    def calls(self) -> list[Call]:
        """Returns the calls so far, and how ResidualSums changes them."""
        streams, sums = {id(self._hidden)}, {}
        for call in self._seen:
            if call.function is torch.add:
                call.stream = _position_of_stream(call.given, streams)
            if call.stream is not None:
                sums[id(call.result)] = call
            if call.stream is not None or (call.function is Tensor.view and id(call.given[0]) in streams):
                streams.add(id(call.result))
        for call in self._seen:
            if call.function is F.dropout:
                self._join_dropout(call, list(sums.values()))
            elif call.function is normalized:
                self._join_norm(call, sums)
        return [Call(call.function, call.changed, call.stream or 0, call.norm) for call in self._seen]

    def _join_dropout(self, call: "_Seen", sums: Sequence["_Seen"]) -> None:
        """Moves a dropout into the sum that reads its output, if nothing else does."""
        readers = [each for each in sums if each.given[1 - each.stream] is call.result]
        dropouts = [each for each in self._seen if each.function is F.dropout and each.result is call.result]
        read_once = len(readers) == len(dropouts) == 1 == self._reads.counts[address_of(call.result)]
        if read_once and not call.given[2] and call.result.shape[-1] % 4 == 0:  # one call of Philox: four numbers
            call.changed = readers[0].changed = True

    def _join_norm(self, call: "_Seen", sums: dict[int, "_Seen"]) -> None:
        """Moves a norm into the sum that it reads, or joins it to later sums that read the same tensor. `sums`: by id
        of their results. No operation may write the tensor in between."""
        x, norm = call.given
        name = next((name for name, each in self._block.named_modules() if each.forward is norm), None)
        readers = [each for each in sums.values() if each.given[each.stream] is x]
        if name is None or any(each.versions[each.stream] != call.versions[0] for each in readers):
            return
        if (of_sum := sums.get(id(x))) and of_sum.norm is None and call.versions[0] == 0:
            of_sum.norm = name
            call.changed = of_sum.changed = True
        elif readers:
            for each in (call, *readers):
                each.changed = True


class _Reads(TorchDispatchMode):
    """Counts how often operations read each storage, by its address. Views do not read."""

    def __init__(self):
        super().__init__()
        self.counts: Counter[int] = Counter()
        self._tensors: list[Tensor] = []  # else other storages would get their addresses

    def __torch_dispatch__(self, operation, types, args=(), kwargs=None):
        if not operation.is_view:
            tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
            self.counts.update({address_of(tensor) for tensor in tensors})
            self._tensors += tensors
        return operation(*args, **(kwargs or {}))


def _noted(func: Callable, args: tuple) -> Callable | None:
    """Returns `F.dropout`, `normalized`, torch.add for any addition of two tensors, or Tensor.view for any view; None
    for other functions."""
    if func in _VIEWS:
        return Tensor.view
    if func in _ADDITIONS and len(args) == 2 and all(isinstance(one, Tensor) for one in args):
        return torch.add
    return func if func is F.dropout or func is normalized else None


def _dropout(x: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> tuple[Tensor, float, bool]:
    """Returns the input of a call of `F.dropout`, its probability, and whether it changes the input."""
    return x, p if training else 0.0, inplace


def _position_of_stream(summands: tuple, streams: set[int]) -> int | None:
    """Returns the position of the residual stream among two `summands`. `streams`: ids of the tensors that it has been.
    Returns None if neither or both belong to it, or if the sum has another shape or dtype."""
    positions = [position for position, each in enumerate(summands) if id(each) in streams]
    if len(positions) != 1:
        return None
    stream, branch = summands[positions[0]], summands[1 - positions[0]]
    same = stream.shape == branch.shape and torch.promote_types(stream.dtype, branch.dtype) == stream.dtype
    return positions[0] if same else None
