"""Speeds up the simulation of a training step: executes each operation once per shape, and replays its allocations
later.

A replay appends the recorded allocations and frees to the tape, which lists those of the whole step, and returns new
tensors without data. A test compares this tape, entry by entry, with that of a step that executes every operation.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from unittest.mock import patch

import torch
from torch import Tensor
from torch.utils._mode_utils import no_dispatch
from torch.utils._pytree import TreeSpec, tree_flatten, tree_unflatten

from lowmem.core.batch import Batch
from lowmem.core.decoder import Extra, kind_of
from lowmem.core.operations import Operations
from lowmem.core.optimizers import Hyperparameters, State
from lowmem.core.parameters import Part, Piece
from lowmem.core.recompute import ALL, INPUT, Dropout, SavedSegment, Segment
from lowmem.cudasim.recorder import Recorder, Region

META = torch.device("meta")


@dataclass(frozen=True)
class _Place:
    storage: int  # its number in the recording of the call; -1 - n: the storage of argument n
    size: int  # bytes of the storage
    offset: int
    shape: torch.Size
    stride: tuple[int, ...]
    dtype: torch.dtype


@dataclass(frozen=True)
class _Known:
    region: Region  # its allocations
    leaves: list  # of its result, with a _Place for each tensor that is new or views an argument
    structure: TreeSpec  # the containers in its result
    result: object  # if it has no such tensor


class ReplayedOperations:
    """Replaces `operations` (parts of a training step, such as a segment's forward) in a simulation. Executes each one
    once per shape, and later replays its recording. `known`: a cache of recordings; None executes all operations."""

    def __init__(self, operations: Operations, recorder: Recorder, known: dict[tuple, _Known] | None):
        self._operations, self._recorder, self._known = operations, recorder, known
        decoder = operations.decoder
        self._tables: list[Tensor] = []
        # Forward passes that wait for their backward, by the id of their SavedSegment. The value is the Region of an
        # executed pass, and the number of the first storage of a replayed one.
        self._forwards: dict[int, Region | int] = {}
        self._parts: list[list[Part]] = [[] for _ in decoder.units]
        for part in operations.store.parts:
            self._parts[part.unit].append(part)
        # Embeddings and head may add to the gradients of these parts.
        self._ends = self._parts[0] + self._parts[-1]
        # {id of the extras that `embed` returned: shape of its token ids}
        self._shapes: dict[int, torch.Size] = {}
        # {shape of token ids: for each block, the index of its extra among the distinct ones}
        self._turns: dict[torch.Size, list[int]] = {} if known is None else known.setdefault("turns", {})
        self._kinds = list(range(len(decoder.blocks)))  # a number for each block; blocks that are alike have the same
        if known is not None:
            if "kinds" not in known:
                kinds = [kind_of(block) for block in decoder.blocks]
                known["kinds"] = [kinds.index(kind) for kind in kinds]
            self._kinds = known["kinds"]
        operations.recordings = None  # this class replays instead

    def begin(self) -> None:
        """Does nothing: Operations.begin looks for changes of the model, and a simulation makes none."""

    def group(self, run: Callable, *key):
        """Returns the result of `run`, which makes forward and backward of a group of micro-batches. `key`: decides its
        allocations and times. If an earlier call had the same `key`, replays these instead of calling `run`."""
        return self._once(("group", *key), "group", run, self._operations.store.parts)

    def embed(self, micro_batch: Batch, dropout: Dropout):
        def run():
            hidden, extras = self._operations.embed(micro_batch, dropout)
            self._turns[shape], distinct = _without_repetitions(extras)
            return hidden, distinct

        shape = micro_batch.input_ids.shape
        hidden, distinct = self._once(("embed", shape), "embeddings", run, arguments=_tensors_of(micro_batch))
        extras = [distinct[turn] for turn in self._turns[shape]]
        self._shapes[id(extras)] = shape
        return hidden, extras

    def head(self, hidden: Tensor, labels: Tensor, dropout: Dropout, scale: float):
        call = partial(self._operations.head, hidden, labels, dropout, scale)
        return self._once(("head", hidden.shape, labels.shape), "head", call, self._ends)

    def embed_backward(self, micro_batch: Batch, dropout: Dropout, gradient: Tensor):
        call = partial(self._operations.embed_backward, micro_batch, dropout, gradient)
        return self._once(("embed_backward", gradient.shape), "embeddings", call, self._ends)

    def evaluate(self, micro_batch: Batch) -> Tensor:
        def block(index: int, hidden: Tensor, extra: Extra) -> Tensor:
            key = "evaluated block", self._kinds[index], hidden.shape
            return self._once(key, "evaluation", partial(run_block, index, hidden, extra))

        def run() -> Tensor:
            with patch.object(decoder, "block", block):
                return self._operations.evaluate(micro_batch)

        decoder = self._operations.decoder
        run_block, key = decoder.block, ("evaluate", micro_batch.input_ids.shape)
        return self._once(key, "evaluation", run, arguments=_tensors_of(micro_batch))

    def norms(self, part: Part) -> Tensor:
        key = "norms", part.working.numel()  # parts of one size are cut into equal pieces
        return self._once(key, "update", lambda: self._operations.norms(part))

    def update(self, piece: Piece, state: State, hyperparameters: Hyperparameters) -> None:
        operations = self._operations
        optimizer = operations.optimizer
        key = ("update", optimizer.name, piece.stop - piece.start, piece.part.working.dtype)
        if optimizer.name == "adamw8bit":  # its package need not be installed for a plan
            operations.optimizer = replace(optimizer, rule=_traffic_of_8_bit)
            if not self._tables:  # 256 numbers for each moment, which the first update makes and keeps
                self._tables = [torch.empty(256, device=META) for _ in range(2)]
        self._once(key, "update", lambda: operations.update(piece, state, hyperparameters))
        operations.optimizer = optimizer

    def segment_forward(self, segment: Segment, hidden: Tensor, extras: Sequence[Extra], dropout: Dropout):
        self._rehearse(segment, hidden, extras, dropout)
        run, key = self._operations.segment_forward, (*self._kind(segment, extras), hidden.shape)
        if segment.keep == INPUT:
            forward = lambda: run(segment, hidden, extras, dropout)[0]  # noqa: E731
            return self._once(("forward", *key), "live_blocks", forward, renamed="boundaries"), SavedSegment(hidden)
        # Only a replayed backward can follow a replayed forward. So backward must have been recorded, both with new
        # accumulators of gradients and with existing ones.
        count = len(self._parts_of(segment))
        if self._known is not None and all(("backward", *key, (new,) * count) in self._known for new in (True, False)):
            known = self._known["graph", *key]
            base = self._recorder.replay(known.region)
            output = self._results(known, base, held=segment.keep == ALL)  # the graph of ALL holds it
            with self._recorder.paused():
                saved = SavedSegment(hidden.detach())
            self._forwards[id(saved)] = base
            return output, saved
        with self._recorder.region("live_blocks") as region, self._recorder.device_model.functions():
            output, saved = run(segment, hidden, extras, dropout)
        self._recorder.rename(output, "boundaries")
        self._remember(("graph", *key), region, output)
        self._forwards[id(saved)] = region
        return output, saved

    def segment_backward(
        self, segment: Segment, saved: SavedSegment, extras: Sequence[Extra], dropout: Dropout, gradient: Tensor
    ) -> Tensor:
        return self._once(
            ("backward", *self._kind(segment, extras), gradient.shape), "live_blocks",
            partial(self._operations.segment_backward, segment, saved, extras, dropout, gradient),
            self._parts_of(segment), forward=self._forwards.pop(id(saved), None),
            renamed="boundary_gradients",
        )  # fmt: skip

    def _rehearse(self, segment: Segment, hidden: Tensor, extras: Sequence[Extra], dropout: Dropout) -> None:
        """Records forward and backward of `segment` (consecutive blocks), so that the step can replay both. The step's
        tape (list of allocations) stays unchanged. Does nothing if such a segment has been recorded."""
        key = ("rehearsed", *self._kind(segment, extras), hidden.shape)
        if self._known is None or key in self._known:
            return
        self._known[key] = None
        parts = self._parts_of(segment)
        gradients = [part.gradient for part in parts]

        def run() -> None:
            output, saved = self.segment_forward(segment, hidden, extras, dropout)
            gradient = torch.empty_like(output)
            del output  # as in the step, where only the graph has it by now
            self.segment_backward(segment, saved, extras, dropout, gradient)

        with self._recorder.off_the_tape():
            for part in parts:
                part.gradient = None
            run()  # makes the accumulators
            run()  # adds to them
            for part, gradient in zip(parts, gradients, strict=True):
                part.gradient = gradient

    def _kind(self, segment: Segment, extras: Sequence[Extra]) -> tuple:
        kinds = tuple(self._kinds[index] for index in segment.blocks)
        # Segments with equal keys make equal allocations. Extras come from token ids, so the shape of these is enough.
        return segment.keep, kinds, self._shapes[id(extras)]

    def _parts_of(self, segment: Segment) -> list[Part]:
        return [part for index in segment.blocks for part in self._parts[index + 1]]  # unit 0 is the embedding

    def _once(
        self, key: tuple, name: str, call: Callable, parts: Sequence[Part] = (), *, renamed: str | None = None,
        arguments: Sequence[Tensor] = (), forward: Region | int | None = None,
    ):  # fmt: skip
        """Returns the result of `call`. Its allocations depend on `key`, and on the `parts` that have no gradient.
        If an earlier call agrees in both, replays its recording, and returns new tensors without data. On the tape
        (list of allocations), new storages are named `name`, and the result's storage `renamed`. `parts`: weights to
        whose gradients `call` adds. `arguments`: input tensors whose storage the result may share. `forward`: None,
        unless `call` is a backward pass that frees the graph of a forward pass. If that forward was replayed, the
        number of its first storage. If it was executed, its Region; then this backward is executed, too."""
        # A call that must make accumulators of gradients is recorded by itself.
        key = (*key, tuple(part.gradient is None for part in parts))
        new = [part for part in parts if part.gradient is None]
        if self._known is not None and key in self._known and not isinstance(forward, Region):
            known = self._known[key]
            results, gradients = self._results(known, self._recorder.replay(known.region, forward or 0), arguments)
            for part, gradient in zip(new, gradients, strict=True):
                part.gradient = gradient
            return results
        with self._recorder.region(name, forward) as region, self._recorder.device_model.functions():
            results = call()
        if renamed is not None:
            self._recorder.rename(results, renamed)
        gradients = [part.gradient for part in new]
        for gradient in gradients:
            if gradient is not None:
                self._recorder.rename(gradient, "gradients")
        self._remember(key, region, (results, gradients), arguments)
        return results

    def _remember(self, key: tuple, region: Region, results, arguments: Sequence[Tensor] = ()) -> None:
        if self._known is None:
            return
        leaves, structure = tree_flatten(results)
        numbers = [self._recorder.number_of(tensor) for tensor in arguments]

        def place(leaf):
            number = self._recorder.number_of(leaf) if isinstance(leaf, Tensor) else None
            born_here = number is not None and number >= region.base
            if not born_here and number not in numbers:
                return leaf  # no tensor, or one that is always there: a buffer
            size, storage = leaf.untyped_storage().nbytes(), number - region.base
            if not born_here:
                storage = -1 - numbers.index(number)
            return _Place(storage, size, leaf.storage_offset(), leaf.shape, leaf.stride(), leaf.dtype)

        leaves = list(map(place, leaves))
        constant = None if any(type(leaf) is _Place for leaf in leaves) else results
        self._known[key] = _Known(region, leaves, structure, constant)

    def _results(self, known: _Known, base: int, arguments: Sequence[Tensor] = (), *, held: bool = False):
        """Returns the results of the replayed call `known`, as new tensors without data. `base`: number of the replay's
        first storage on the tape (list of allocations). `arguments`: input tensors whose storage a result may share.
        `held`: whether autograd holds the results until backward; then the replay of backward records their frees."""
        if known.result is not None:
            return known.result
        storages: dict[int, torch.UntypedStorage] = {}

        def tensor(place: _Place) -> Tensor:
            if place.storage < 0:
                storage = arguments[-1 - place.storage].untyped_storage()
            elif (storage := storages.get(place.storage)) is None:
                storage = self._recorder.stand_in(place.size, base + place.storage, held=held)
                storages[place.storage] = storage
            empty = torch.empty(0, dtype=place.dtype, device=META)
            return empty.set_(storage, place.offset, place.shape, place.stride)

        with no_dispatch():  # nothing of this is recorded, and going through the recorder takes most of the time
            leaves = [tensor(leaf) if type(leaf) is _Place else leaf for leaf in known.leaves]
        return tree_unflatten(leaves, known.structure)


def _without_repetitions(extras: Sequence[Extra]) -> tuple[list[int], list[Extra]]:
    """Returns, for each block, the index of its arguments in a second list, which holds equal ones once."""
    distinct: dict[tuple, int] = {}
    first: list[Extra] = []
    turns = []
    for extra in extras:
        leaves, structure = tree_flatten(extra)
        turns.append(distinct.setdefault((structure, *map(id, leaves)), len(first)))
        if turns[-1] == len(first):
            first.append(extra)
    return turns, first


def _tensors_of(micro_batch: Batch) -> list[Tensor]:
    return [tensor for tensor in vars(micro_batch).values() if tensor is not None]


def _traffic_of_8_bit(master: Tensor, state: State, gradient: Tensor, hyper: Hyperparameters, *_) -> None:
    """Replaces bitsandbytes' 8-bit update in a simulation. Reads and writes as many bytes as the update and the scaling
    of its gradient do, and allocates nothing."""
    master.add_(gradient.mul_(hyper.gradient_scale))
    state["m"].bitwise_not_()
    state["v"].bitwise_not_()
