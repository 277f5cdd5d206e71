"""The training step on tensors without data: what it allocates, what a GPU makes of that, and how long it takes.

`record_step` runs the very `Step` that trains, with its store, on meta tensors (trace.py), two optimizer steps long:
the first has no update to apply, the second applies the first one's while it runs forward, as all later ones do. A
segment of blocks runs once per shape and is replayed for every other micro-batch. `under_cap` gives the tape to the
model of CUDA's allocator: it fits if, and only if, that run completes.

What CUDA does otherwise than the generic kernels is a table of its own (cuda_ops.py). Not simulated: the CUDA context,
which is outside the allocator's cap; evaluation, saving and export, which take less than training.
"""

import gc
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import TreeSpec, tree_flatten, tree_leaves, tree_unflatten

from lowmem import adam
from lowmem.adam import CPU_SLICE, Optimizer
from lowmem.allocator import CachingAllocator
from lowmem.blocks import Decoder, Extra
from lowmem.cards import HOST_SECONDS_PER_BACKWARD_OPERATION, HOST_SECONDS_PER_OPERATION, Card, operation_seconds
from lowmem.clock import SimulatedCopies
from lowmem.cuda_ops import (
    PRODUCTS,
    CudaFunctions,
    Gpu,
    blas_workspace_bytes,
    blaslt_workspace_bytes,
    hidden_bytes,
)
from lowmem.data import Batch
from lowmem.precision import LossScale
from lowmem.recompute import Dropout, Saved
from lowmem.step import Schedule, Step
from lowmem.store import Part, Piece, Store
from lowmem.streaming import Ring, State
from lowmem.trace import FREED, Machine, Recorder, Region, Tape

META = torch.device("meta")
_NAMES = {  # of what is born in these functions, or in what they call, outside of the parts that are replayed
    Batch.to.__code__: "batch",
    Ring.__init__.__code__: "staging_ring",
    Step._norm.__code__: "update",
}


@dataclass(frozen=True)
class Target:
    """What the step is simulated for. `machine`: what it adds to the operations; `functions`: a mode that puts its own
    functions in the place of the generic ones; bytes per second of copies to and from it, None where states are not
    streamed over a bus."""

    machine: Machine
    functions: Callable[[], object] = nullcontext
    copies_in: float | None = None
    copies_out: float | None = None


class CpuAttention(TorchFunctionMode):
    """On the CPU attention without dropout is an operator of its own; meta tensors would take the composite one."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        if func is F.scaled_dot_product_attention:
            return _attention_on_the_cpu(*args, **(kwargs or {}))
        return func(*args, **(kwargs or {}))


def _attention_on_the_cpu(query, key, value, attn_mask=None, dropout_p=0.0, is_causal=False, **more) -> Tensor:
    if dropout_p > 0:
        return F.scaled_dot_product_attention(query, key, value, attn_mask, dropout_p, is_causal, **more)
    if attn_mask is not None and attn_mask.dtype is torch.bool:
        attn_mask = torch.zeros_like(attn_mask, dtype=query.dtype).masked_fill_(attn_mask.logical_not(), -torch.inf)
    fused = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    return fused(query, key, value, 0.0, is_causal, attn_mask=attn_mask, scale=more.get("scale"))[0]


def gpu_target(card: Card) -> Target:
    """A GPU of this kind, running as device.py sets it up."""
    version = tuple(int(number) for number in torch.__version__.split(".")[:2])
    workspace = blas_workspace_bytes(card.capability, os.environ.get("CUBLAS_WORKSPACE_CONFIG"), version)
    gpu = Gpu(card.capability, card.multiprocessors)
    machine = Machine(
        hidden_bytes=lambda *operation: hidden_bytes(*operation, gpu),
        products=PRODUCTS,
        workspace_bytes=workspace + blaslt_workspace_bytes(version),
        seconds=lambda *operation: operation_seconds(card, *operation),
        host_seconds=(HOST_SECONDS_PER_OPERATION, HOST_SECONDS_PER_BACKWARD_OPERATION),
    )
    return Target(
        machine, lambda: CudaFunctions(card.capability), card.copy_bytes_per_second, card.copy_bytes_per_second
    )


def cpu_target() -> Target:
    """The CPU: no rewriting but attention's, no copies."""
    return Target(Machine(), CpuAttention)


@dataclass(frozen=True)
class StepCase:
    """One way to lay out a step, on a decoder whose precision is set already. `dtype`: of the working matrices."""

    seq: int
    batch: int
    schedule: Schedule
    dtype: torch.dtype
    optimizer: Optimizer
    resident_units: int
    clip_norm: float | None = 1.0
    document_mask: bool = False


@dataclass(frozen=True)
class Recording:
    """`seconds`: of a step in the long run, the second one, which `began` then; `waiting_seconds`: what of it the GPU
    waits for copies; `state_bytes`: of the optimizer, by unit; `streamed_bytes`: what of that lies in RAM."""

    tape: Tape
    began: float
    seconds: float
    waiting_seconds: float
    state_bytes: tuple[int, ...]
    streamed_bytes: int


@dataclass(frozen=True)
class Memory:
    """What a tape takes of a GPU. `at_peak`: bytes by name at the peak of what is allocated, which they add up to;
    `timeline`: (seconds, allocated, reserved), the most of every stretch of the tape."""

    allocated_peak_bytes: int
    reserved_peak_bytes: int
    at_peak: dict[str, int]
    timeline: list[tuple[float, int, int]]


def record_step(
    decoder: Decoder, case: StepCase, target: Target, known: dict | None = None, *, alike: bool = False
) -> Recording:
    """Two steps of `case` on `decoder`, whose parameters become meta tensors of the store's. `known`, a dict
    that is kept between calls with the same decoder, sequence length, dtype and target, saves running again what has
    been run; with None everything is run. `alike`: blocks that are made alike are run once for all of them."""
    recorder = Recorder(target.machine, lambda frame: _NAMES.get(frame.f_code))
    with _no_collection(), recorder, target.functions():
        store = Store(decoder, META, case.dtype, case.optimizer, case.resident_units, host_tensor=_never_touched)
        for part in store.parts:
            recorder.rename(part.working, "working_weights")
            for tensor in part.state.values() if not part.streamed else ():
                recorder.rename(tensor, "resident_states")
        for buffer in decoder.model.buffers():
            recorder.note(buffer, "buffers")
        step = _SimulatedStep(
            decoder, store, case.optimizer, case.schedule, clip_norm=case.clip_norm, weight_decay=0.01, seed=0,
            loss_scale=LossScale(enabled=case.dtype is torch.float16), recorder=recorder, known=known, alike=alike,
            update_at_once=None if target.copies_in else CPU_SLICE,
        )  # fmt: skip
        copies = None
        if target.copies_in is not None and target.copies_out is not None:
            copies = step.ring.copies = SimulatedCopies(recorder.clock, target.copies_in, target.copies_out)
        groups = case.schedule.micro_batch * case.schedule.group
        step(_batch(case, min(case.batch, 2 * groups)), 0, 1e-4)  # leaves what a step leaves behind, in less time
        batch = _batch(case, case.batch)
        began, waited = recorder.clock.host, copies.exposed_seconds if copies else 0.0
        step(batch, 1, 1e-4)
        seconds = recorder.clock.host - began
        waiting = copies.exposed_seconds - waited if copies else 0.0
        step.flush()
    state_bytes = [0] * len(decoder.units)
    for part in store.parts:
        state_bytes[part.unit] += sum(tensor.nbytes for tensor in part.state.values())
    return Recording(
        recorder.tape, began, seconds, waiting, tuple(state_bytes), sum(state_bytes[case.resident_units :])
    )


def under_cap(tape: Tape, limit_bytes: int | None = None, *, expandable_segments: bool = True) -> Memory:
    """What `tape` takes of a GPU whose allocator is capped; SimulatedOutOfMemory where it does not complete."""
    allocator = CachingAllocator(expandable_segments=expandable_segments, limit_bytes=limit_bytes)
    allocate, free = allocator.allocate, allocator.free
    handles: dict[int, int] = {}
    peak = reserved_peak = peak_chunk = 0
    timeline = []
    for index, chunk in enumerate(tape.chunks):
        allocator.reset_peaks()
        base, before_base = chunk.base, chunk.earlier_base - 1
        for storage, size, _ in chunk.operations:
            number = base + storage if storage >= 0 else before_base - storage
            if size == FREED:
                free(handles.pop(number))
            else:
                handles[number] = allocate(size)
        if allocator.peak_allocated_bytes > peak:
            peak, peak_chunk = allocator.peak_allocated_bytes, index
        reserved_peak = max(reserved_peak, allocator.peak_reserved_bytes)
        timeline.append((chunk.seconds, allocator.peak_allocated_bytes, allocator.peak_reserved_bytes))
    return Memory(peak, reserved_peak, _by_name(tape, peak_chunk, peak), timeline)


def named_at_peak(tape: Tape) -> dict[str, int]:
    """Bytes by name, largest first, at the tape's peak; sizes as asked for."""
    return _by_name(tape, len(tape.chunks), tape.peak_bytes())


def _by_name(tape: Tape, peak_chunk: int, peak_bytes: int) -> dict[str, int]:
    """Bytes by name, largest first, at the tape's peak; what blocks are larger than tensors is "rounding"."""
    live: dict[int, tuple[int, str]] = {}
    by_name: dict[str, int] = {}
    now = most = 0
    for storage, size, name in Tape(tape.chunks[: peak_chunk + 1]):
        if size == FREED:
            size, name = live.pop(storage)
            size = -size
        else:
            live[storage] = (size, name)
        by_name[name] = by_name.get(name, 0) + size
        now += size
        if now > most:
            most, at_peak = now, dict(by_name)
    at_peak["rounding"] = peak_bytes - most
    return {name: size for name, size in sorted(at_peak.items(), key=lambda item: -item[1]) if size}


_PLACES = ("layer_idx", "layer_id", "layer_number")  # attributes that count a model's blocks


class _StandIn(int):
    """In the place of a segment's output with its graph: the first storage of the forward that was replayed."""


@dataclass(frozen=True)
class _Place:
    """A tensor without its storage: the number of that in its region, or else which argument's storage it shares."""

    storage: int | None
    argument: int | None
    size: int
    offset: int
    shape: torch.Size
    stride: tuple[int, ...]
    dtype: torch.dtype


@dataclass(frozen=True)
class _Known:
    """Something that was run: its region, and what came out of it, flattened, with a _Place for every tensor."""

    region: Region
    results: list
    structure: TreeSpec


class _SimulatedStep(Step):
    """Runs each part of the step once per shape, replays it from then on; with `known` None, runs it every time."""

    def __init__(
        self,
        *arguments,
        recorder: Recorder,
        known: dict[tuple, _Known] | None,
        alike: bool,
        update_at_once: int | None,
        **keywords,
    ):
        super().__init__(*arguments, **keywords)
        self._recorder, self._known, self._update_at_once = recorder, known, update_at_once
        self._forwards: dict[int, Region] = {}  # segments that wait for their backward, by their Saved
        self._parts: list[list[Part]] = [[] for _ in self._decoder.units]
        for part in self._store.parts:
            self._parts[part.unit].append(part)
        self._ends = self._parts[0] + self._parts[-1]  # what embeddings and head may add to
        kinds = [kind_of(block) if alike else index for index, block in enumerate(self._decoder.blocks)]
        self._kinds = [kinds.index(kind) for kind in kinds]

    def _group(self, micro_batches: Sequence[Batch], dropouts: Sequence[Dropout], scale: float):
        run = super()._group
        if self._updated < len(self._decoder.units):  # updates wait in the ring, whose state is not the recorder's
            return run(micro_batches, dropouts, scale)
        shape, schedule = micro_batches[0].input_ids.shape, self.schedule
        key = ("group", len(dropouts), shape, schedule.segment_blocks, schedule.recompute)
        arguments = [t for micro_batch in micro_batches for t in vars(micro_batch).values() if t is not None]
        return self._once(
            key, "group", lambda: run(micro_batches, dropouts, scale), self._store.parts, arguments=arguments
        )

    def _embed(self, micro_batch: Batch, dropout: Dropout):
        key = ("embed", micro_batch.input_ids.shape)
        return self._once(key, "embeddings", lambda: super(_SimulatedStep, self)._embed(micro_batch, dropout),
                          arguments=[t for t in vars(micro_batch).values() if t is not None])  # fmt: skip

    def _head(self, hidden: Tensor, labels: Tensor, dropout: Dropout, scale: float):
        run = super()._head
        return self._once(("head", hidden.shape), "head", lambda: run(hidden, labels, dropout, scale), self._ends)

    def _embed_backward(self, micro_batch: Batch, dropout: Dropout, gradient: Tensor):
        run, key = super()._embed_backward, ("embed_backward", gradient.shape)
        return self._once(key, "embeddings", lambda: run(micro_batch, dropout, gradient), self._ends)

    def _norm_of(self, piece: Piece) -> Tensor:
        run = super()._norm_of
        return self._once(("norm", piece.stop - piece.start), "update", lambda: run(piece))

    def _update(self, piece: Piece, state: State) -> None:
        optimizer, part, place = self._optimizer, piece.part, slice(piece.start, piece.stop)
        if optimizer.name == "adamw8bit":  # bitsandbytes allocates nothing, and need not be installed for a plan
            optimizer = replace(optimizer, rule=lambda *_: None)
        at_once, hyper = self._update_at_once, self._hyper
        key = ("update", optimizer.name, piece.stop - piece.start, part.working.dtype)
        self._once(
            key,
            "update",
            lambda: adam.update(
                optimizer, part.working[place], state, part.gradient[place], hyper, piece.decay, at_once
            ),
        )

    def _segment_forward(self, segment: range, hidden: Tensor, extras: Sequence[Extra], dropout: Dropout):
        run, key = super()._segment_forward, (*self._kind_of(segment, extras), hidden.shape)
        if self.schedule.recompute:
            run_forward = lambda: run(segment, hidden, extras, dropout)[0]  # noqa: E731
            return self._once(("forward", *key), "live_blocks", run_forward, renamed="boundaries"), Saved(hidden, None)
        # A graph that was replayed can only be followed by a backward that is: both kinds have to be known.
        count = len(self._parts_of(segment))
        if self._known is not None and all(("backward", *key, (new,) * count) in self._known for new in (True, False)):
            known = self._known["graph", *key]
            base = self._recorder.replay(known.region)
            output = self._results(known, base, held=True)
            with self._recorder.paused():
                return output, Saved(hidden.detach(), _StandIn(base))
        with self._recorder.region("live_blocks") as region:
            output, saved = run(segment, hidden, extras, dropout)
        self._recorder.rename(output, "boundaries")
        self._remember(("graph", *key), region, output)
        self._forwards[id(saved)] = region
        return output, saved

    def _segment_backward(
        self, segment: range, saved: Saved, extras: Sequence[Extra], dropout: Dropout, gradient: Tensor
    ) -> Tensor:
        run = super()._segment_backward
        kind = "recompute" if self.schedule.recompute else "backward"
        replayed = saved.output if isinstance(saved.output, _StandIn) else None
        key = (kind, *self._kind_of(segment, extras), gradient.shape)
        return self._once(
            key, "live_blocks", lambda: run(segment, saved, extras, dropout, gradient),
            self._parts_of(segment), forward=self._forwards.pop(id(saved), replayed),
            renamed="boundary_gradients" if segment.start else "gradients_of_the_first_input",
        )  # fmt: skip

    def _kind_of(self, segment: range, extras: Sequence[Extra]) -> tuple:
        """What two segments must share to allocate alike: blocks of a kind, called with arguments of a shape."""
        leaves = tree_leaves([extras[index] for index in segment])
        shapes = tuple(leaf.shape if isinstance(leaf, Tensor) else type(leaf) for leaf in leaves)
        return tuple(self._kinds[index] for index in segment), segment.start == 0, shapes

    def _parts_of(self, segment: range) -> list[Part]:
        return [part for index in segment for part in self._parts[index + 1]]  # unit 0 is the embedding

    def _once(
        self, key: tuple, name: str, call: Callable, parts: Sequence[Part] = (), *, renamed: str | None = None,
        arguments: Sequence[Tensor] = (), forward: Region | _StandIn | None = None,
    ):  # fmt: skip
        """What `call` returns, from running it or from replaying an earlier run of the same `key`.

        Its storages are called `name`, the tensor it returns `renamed`. `parts`: those whose accumulators it makes if
        they are not there yet, which makes another key of it. `arguments`: tensors that it may hand through;
        `forward`: the forward whose graph it spends, as a region where that ran, as a number where it was replayed.
        """
        key = (*key, tuple(part.gradient is None for part in parts))
        new = [part for part in parts if part.gradient is None]
        if self._known is not None and key in self._known and not isinstance(forward, Region):
            known = self._known[key]
            results, gradients = self._results(known, self._recorder.replay(known.region, forward or 0), arguments)
            for part, gradient in zip(new, gradients, strict=True):
                part.gradient = gradient
            return results
        with self._recorder.region(name, forward) as region:
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
            size = leaf.untyped_storage().nbytes()
            own, argument = (number - region.base, None) if born_here else (None, numbers.index(number))
            return _Place(own, argument, size, leaf.storage_offset(), leaf.shape, leaf.stride(), leaf.dtype)

        self._known[key] = _Known(region, list(map(place, leaves)), structure)

    def _results(self, known: _Known, base: int, arguments: Sequence[Tensor] = (), *, held: bool = False):
        """What came out of a call, for the replay of it whose storages are numbered from `base`."""
        storages: dict[int, torch.UntypedStorage] = {}

        def tensor(place):
            if not isinstance(place, _Place):
                return place
            if place.storage is None:
                storage = arguments[place.argument].untyped_storage()
            elif (storage := storages.get(place.storage)) is None:
                storage = self._recorder.stand_in(place.size, base + place.storage, held=held)
                storages[place.storage] = storage
            empty = torch.empty(0, dtype=place.dtype, device=META)
            return empty.set_(storage, place.offset, place.shape, place.stride)

        with self._recorder.paused():
            return tree_unflatten([tensor(place) for place in known.results], known.structure)


def kind_of(block: nn.Module) -> tuple:
    """What a block is made of, but for its place in the model: blocks of a kind are taken to allocate alike."""
    return tuple(
        (
            name,
            type(module),
            tuple((key, tensor.shape, tensor.dtype) for key, tensor in module.named_parameters(recurse=False)),
            tuple(
                (key, value)
                for key, value in sorted(vars(module).items())
                if isinstance(value, bool | int | float | str | None) and key not in _PLACES
            ),
        )
        for name, module in block.named_modules()
    )


def _batch(case: StepCase, rows: int) -> Batch:
    """A batch as data.py makes it, of zeros."""
    zeros = torch.zeros((rows, case.seq), dtype=torch.int64)
    packed = (zeros, zeros.int()) if case.document_mask else (None, None)
    return Batch(zeros, zeros, *packed)


def _never_touched(entries: int, dtype: torch.dtype) -> Tensor:
    """In the place of `host_tensor`: the size of it, and no memory."""
    return torch.zeros(1, dtype=dtype).expand(entries)


@contextmanager
def _no_collection() -> Iterator[None]:
    """Keeps Python's cycle collector from ending a storage's life at an arbitrary point of the record."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()
