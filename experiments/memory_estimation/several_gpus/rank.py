"""Predicts the memory that each of several GPUs needs for the usual PyTorch training of a decoder.

Rank 0 of a *fake* process group is recorded in one process, on FakeTensors: one to two seconds per recording.
"""

import gc
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor
from torch.overrides import TorchFunctionMode
from transformers import PretrainedConfig, masking_utils

from experiments.memory_estimation.several_gpus.more_blocks import BLOCKS, Operation, Placed, numbered, stretched
from experiments.memory_estimation.several_gpus.recipe import owners_of, place, prepare
from experiments.memory_estimation.several_gpus.tensor_parallel import keep_share
from lowmem.core.decoder import Decoder
from lowmem.cudasim.allocator import CachingAllocator
from lowmem.cudasim.device_model import DeviceModel
from lowmem.cudasim.recorder import Recorder
from lowmem.cudasim.tape import FREED, Chunk, Tape, under_cap
from lowmem.errors import InputError, LowmemError, first_line
from lowmem.models.build import build_model
from lowmem.planning.replay import kind_of
from lowmem.planning.simulated_step import Target

METHODS = ("ddp", "fsdp2", "tp", "dp+tp")
PLAIN = Target(DeviceModel())  # no particular device: no temporaries, no time
_MARK = -2  # stands for a size on the tape, where another block begins
_SHAPES_ONLY = "shapes only"  # DTensor's fake tensors, which take no memory in real runs either
_NAMES = {  # for storages that are born in functions of these names, or in their callees
    "place": "parameters",
    "_init_sharded_param": "parameters",
    "_propagate_tensor_meta_non_cached": _SHAPES_ONLY,
    "_bucketed": "gradient_buckets",
    "_init_group": "optimizer_states",
    "foreach_all_gather": "gathered",
    "alloc_all_gather_outputs": "unsharded_parameters",
    "init_all_gather_outputs": "unsharded_parameters",
    "foreach_reduce": "reduced_gradients",
    "_forward": "activations",
    "_backward": "backward",
}
_CUDA_IN_FP32 = {  # of autocast's list, what decoders call and the CPU's list lacks
    "pow", "__pow__", "__rpow__", "softmax", "layer_norm", "rms_norm", "rsqrt", "exp", "log", "sum", "cumsum", "prod",
}  # fmt: skip


@dataclass(frozen=True)
class RankPeak:
    """The memory of rank 0, the fullest. `persistent_bytes`: between two steps. `at_peak`: bytes by name at the
    allocated peak. `seconds`: of the recorded step, with one or two micro-batches; 0 without a clock.
    `micro_batch_seconds`: of each further one."""

    method: str
    ranks: int
    tensor_ranks: int
    micro_batch: int
    allocated_peak_bytes: int
    reserved_peak_bytes: int
    persistent_bytes: int
    at_peak: dict[str, int]
    seconds: float
    micro_batch_seconds: float


@dataclass(frozen=True)
class Recording:
    """A recorded step. `micro_batch_seconds`: of each micro-batch after the first. `placed`: the operations with their
    blocks."""

    operations: list[Operation]
    seconds: float
    micro_batch_seconds: float
    placed: list[Placed]


class _StreamRecorder(Recorder):
    """Also records the stream and the block of a new storage; `resize_` ends a storage and begins another."""

    def __init__(self, device_model: DeviceModel):
        super().__init__(device_model, lambda frame: _NAMES.get(frame.f_code.co_name))
        self.streams = defaultdict(int)  # a workspace is not born
        self.blocks: dict[int, int | None] = {}  # of storages that are made outside of the blocks, for one
        self._forgotten: set[int] = set()
        self._indices = {torch.cpu.current_stream(): 0}

    def mark(self, block: int | None) -> None:
        """Assigns later operations to `block`. None: to no block, or to the blocks whose storages they free."""
        self._settle()
        self._operations.append((0 if block is None else 1 + block, _MARK, ""))

    def belongs(self, tensor: Tensor, block: int | None) -> None:
        self.blocks[self.number_of(tensor._local_tensor if isinstance(tensor, DTensor) else tensor)] = block

    def forget_dead(self) -> None:
        """Leaves out every storage that was made and freed until now."""
        self._forgotten = set(range(self._count)) - set(self._numbers.values())

    def placed(self) -> list[Placed]:
        # Storages that are freed together are sorted: autocast's cache is emptied in the order of addresses.
        placed: list[Placed] = []
        no_memory = set(self._forgotten)
        section, block, freed = 0, None, []

        def sort_freed() -> None:
            placed.extend(sorted(freed, key=lambda one: one.operation.storage))
            freed.clear()

        for storage, size, name in self.tape:
            if size == _MARK:
                sort_freed()
                section, block = section + 1, storage - 1 if storage else None
                continue
            if name == _SHAPES_ONLY:
                no_memory.add(storage)
            if storage in no_memory:
                continue
            owner = self.blocks.get(storage) if block is None else block
            one = Placed(Operation(self.streams[storage], storage, size, name), section, owner)
            if size == FREED:
                freed.append(one)
            else:
                sort_freed()
                self.blocks.setdefault(storage, block)
                placed.append(one)
        sort_freed()
        return placed

    def _born(self, size: int, name: str) -> int:
        number = super()._born(size, name)
        self.streams[number] = self._indices.setdefault(torch.cpu.current_stream(), len(self._indices))
        return number

    @contextmanager
    def resizes_watched(self) -> Iterator[None]:
        resize = torch.UntypedStorage.resize_

        def watched(storage: torch.UntypedStorage, size: int):
            result = resize(storage, size)
            if storage._cdata in self._numbers:
                self._freed(self._numbers[storage._cdata])
                self._numbers[storage._cdata] = self._born(size, self._name())
            return result

        torch.UntypedStorage.resize_ = watched
        try:
            yield
        finally:
            del torch.UntypedStorage.resize_  # it is inherited


class _CudaAutocast(TorchFunctionMode):
    """Imitates CUDA's autocast on the CPU: fp32 for functions that CUDA computes in fp32, and bf16 for attention."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        if torch.is_autocast_enabled("cpu"):
            if func.__name__ in _CUDA_IN_FP32:
                args = [a.float() if isinstance(a, Tensor) and a.dtype is torch.bfloat16 else a for a in args]
            elif func is nn.functional.scaled_dot_product_attention:
                args = [a.bfloat16() if isinstance(a, Tensor) and a.dtype is torch.float32 else a for a in args]
        return func(*args, **(kwargs or {}))


def peak_of(
    recording: Recording, method: str, ranks: int, micro_batch: int, limit_bytes: int | None = None,
    expandable_segments: bool = True,
) -> RankPeak:  # fmt: skip
    """Returns the peaks of the recorded rank. Raises SimulatedOutOfMemory if the run does not complete under
    `limit_bytes`."""
    allocator = CachingAllocator(expandable_segments=expandable_segments, limit_bytes=limit_bytes)
    handles: dict[int, int] = {}
    sizes: dict[int, int] = {}
    for stream, storage, size, _ in recording.operations:
        if size == FREED:
            allocator.free(handles.pop(storage))
            del sizes[storage]
        else:
            handles[storage] = allocator.allocate(size, stream)
            sizes[storage] = size
    memory = under_cap(Tape([Chunk([operation[1:] for operation in recording.operations], 0, 0, 0.0)]))
    return RankPeak(
        method, ranks, tensor_ranks(method, ranks), micro_batch, memory.allocated_peak_bytes,
        allocator.peak_reserved_bytes, sum(sizes.values()), memory.at_peak, recording.seconds,
        recording.micro_batch_seconds,
    )  # fmt: skip


def tensor_ranks(method: str, ranks: int) -> int:
    """Returns how many ranks share each product. Raises InputError if the method cannot run on so many GPUs."""
    if method not in METHODS:
        raise InputError(f"there is no method {method!r}; choose one of {', '.join(METHODS)}")
    if ranks < 1 or (method in ("tp", "dp+tp") and ranks < 2):
        raise InputError(f"{method} cannot run on {ranks} GPU(s)")
    if method == "dp+tp" and (ranks < 4 or ranks % 2):
        raise InputError(f"dp+tp needs an even number of GPUs, 4 at least, and not {ranks}")
    # Two in dp+tp: its sums over ranks are not hidden, so as few as can be.
    return {"tp": ranks, "dp+tp": 2}.get(method, 1)


def record(
    config: PretrainedConfig, method: str, ranks: int, micro_batch: int, seq: int, target: Target = PLAIN,
    accumulation: int = 1,
) -> Recording:  # fmt: skip
    """Records one of `ranks` GPUs that trains `config`'s model by `method`, in two steps.

    A data-parallel rank has `accumulation` micro-batches of `micro_batch` sequences of `seq` tokens per step; two stand
    for more. Raises InputError if the method cannot divide the model, and LowmemError inside another process group.
    """
    case = config, method, ranks, micro_batch, seq, target, accumulation
    blocks = Decoder(build_model(config)).blocks
    # If blocks are alike, four and five blocks are recorded, and the rest follows.
    if len(blocks) > BLOCKS + 1 and len({kind_of(block) for block in blocks}) == 1:
        short, longer = record_blocks(*case, BLOCKS), record_blocks(*case, BLOCKS + 1)
        if stretched(short.placed, BLOCKS + 1) == longer.operations:
            more = len(blocks) - BLOCKS
            return Recording(
                stretched(short.placed, len(blocks)),
                short.seconds + more * (longer.seconds - short.seconds),
                short.micro_batch_seconds + more * (longer.micro_batch_seconds - short.micro_batch_seconds),
                [],
            )
    return record_blocks(*case, len(blocks))


def record_blocks(config, method: str, ranks: int, micro_batch: int, seq: int, target: Target, accumulation: int,
                  blocks: int) -> Recording:  # fmt: skip
    """Returns a recording of the model with only its first `blocks` blocks."""
    shared_by = tensor_ranks(method, ranks)
    model = build_model(config)
    decoder = Decoder(model)
    del decoder.blocks[blocks:]
    if shared_by > 1:
        keep_share(decoder, shared_by)
    recorder = _StreamRecorder(target.device_model)
    turns: list[float] = []  # when the first block's began: forward, backward, forward, ...

    def now() -> float:
        return max(recorder.clock.host, recorder.clock.gpu)

    def mark(block: int | None) -> None:
        recorder.mark(block)
        if block == 0:
            turns.append(now())

    collecting = gc.isenabled()
    gc.disable()  # it would end storages at arbitrary points of the record
    try:
        with (
            _fake_ranks(ranks // shared_by, shared_by) as mesh, _masks_as_on_tensors_with_data(), FakeTensorMode(),
            recorder, recorder.resizes_watched(), _functions(target),
        ):  # fmt: skip
            place(model)
            for parameter, block in owners_of(decoder):
                recorder.belongs(parameter, block)
            del parameter  # it would keep the last one whole
            step, optimizer = prepare(decoder, method, mesh, micro_batch, seq, lambda: _functions(target), mark)
            recorder.forget_dead()  # whole parameters that were sharded
            step(1)
            began = now()
            step(min(accumulation, 2))
            seconds = now() - began
            for parameter, block in owners_of(decoder):
                for state in optimizer.state[parameter].values():
                    recorder.belongs(state, block)
            placed = recorder.placed()
    except RuntimeError as error:
        if shared_by == 1:
            raise
        raise InputError(f"{decoder.architecture} cannot be tensor-parallel: {first_line(error)}") from error
    finally:
        if collecting:
            gc.enable()
    more = turns[-2] - turns[-4] if accumulation > 1 else 0.0  # from one forward to the next
    return Recording(numbered([one.operation for one in placed]), seconds, more, placed)


@contextmanager
def _functions(target: Target) -> Iterator[None]:
    with target.device_model.functions(), nullcontext() if target is PLAIN else _CudaAutocast():
        yield


@contextmanager
def _fake_ranks(data_ranks: int, tensor_ranks: int) -> Iterator[DeviceMesh]:
    """Yields rank 0's data-parallel ranks, in a process group whose communication does nothing."""
    from torch.testing._internal.distributed.fake_pg import FakeStore  # registers the backend "fake"

    if dist.is_initialized():
        raise LowmemError("a plan for several GPUs cannot be made inside a process group: make it in another process")
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=data_ranks * tensor_ranks)
    try:
        yield init_device_mesh("cpu", (data_ranks, tensor_ranks), mesh_dim_names=("data", "tensor"))["data"]
    finally:
        dist.destroy_process_group()


@contextmanager
def _masks_as_on_tensors_with_data() -> Iterator[None]:
    # transformers cannot read the positions here, and would expect packed sequences.
    guess = masking_utils.find_packed_sequence_indices
    masking_utils.find_packed_sequence_indices = lambda position_ids: None
    try:
        yield
    finally:
        masking_utils.find_packed_sequence_indices = guess
