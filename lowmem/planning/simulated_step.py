"""Simulates the training step on tensors without data, and predicts its allocations and its time on a GPU.

The CUDA context is not simulated, nor are saving and export, which take less GPU memory than training.
"""

import math
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from lowmem.core import optimizers
from lowmem.core.batch import LEAST_POSITIONS, Batch, Work
from lowmem.core.decoder import Decoder
from lowmem.core.final_gradients import FinalGradients
from lowmem.core.kernels import Kernels, fused, operators  # noqa: F401  operators defines torch.ops.lowmem
from lowmem.core.layout import Fate, Layout
from lowmem.core.operations import Operations
from lowmem.core.optimizers import Hyperparameters, Optimizer, UpdateFunction
from lowmem.core.parameters import WORKING, Store
from lowmem.core.precision import LossScale
from lowmem.core.ranks import Ranks
from lowmem.core.segment_windows import BoundaryWindow, WeightWindow
from lowmem.core.step import TrainingStep
from lowmem.core.window import StateWindow
from lowmem.cudasim.device_model import DeviceModel, gpu_model, register_product
from lowmem.cudasim.gpus import Card
from lowmem.cudasim.recorder import Recorder
from lowmem.cudasim.tape import Tape
from lowmem.planning import simulated_ranks
from lowmem.planning.replay import META, ReplayedOperations
from lowmem.planning.simulated_ranks import ALONE, Mesh, SimulatedRanks
from lowmem.planning.simulated_transfers import SimulatedTransfers

# Names of storages that these functions allocate, or functions that they call, outside of replayed operations.
_NAMES = {
    Batch.to.__code__: "batch",
    StateWindow.fit.__code__: "staging_ring",
    WeightWindow.fit.__code__: "weight_slots",
    BoundaryWindow._fetch.__code__: "boundaries",
    FinalGradients.finish.__code__: "update",
    **simulated_ranks.NAMES,
}
HOST_SECONDS_PER_PYTHON_BACKWARD = 27e-6  # in both passes of layers.py's product, measured on an x86_64 CPU
register_product(torch.ops.lowmem.add_product, first_factor=1, host_seconds=HOST_SECONDS_PER_PYTHON_BACKWARD)


@dataclass(frozen=True)
class Target:
    """Describes the device that a step is simulated for. Rates are bytes per second."""

    device_model: DeviceModel  # memory and time of its operators
    update: UpdateFunction = optimizers.update  # updates weights
    fused_kernels: Kernels = Kernels.NONE  # lowmem's own kernels that the model uses there
    copies: float | None = None  # in each direction of the bus, if both are busy; None: no copies
    link: float | None = None  # from other cards; None if they send through RAM
    disk: float = math.inf  # of reading and writing together
    least_positions: int = LEAST_POSITIONS["cuda"]  # a micro-batch with fewer positions takes no less time


class CpuAttention(TorchFunctionMode):
    """Makes scaled_dot_product_attention on meta tensors call PyTorch's operator for the CPU, if that supports the
    call."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        if func is F.scaled_dot_product_attention:
            return _attention_on_the_cpu(*args, **(kwargs or {}))
        return func(*args, **(kwargs or {}))


def _attention_on_the_cpu(query, key, value, attn_mask=None, dropout_p=0.0, is_causal=False, **more) -> Tensor:
    same_heads = query.shape[1] == key.shape[1] == value.shape[1] or more.get("enable_gqa", False)
    if dropout_p > 0 or not same_heads or query.shape[-1] != value.shape[-1]:  # DeepSeek's values are narrower
        return F.scaled_dot_product_attention(query, key, value, attn_mask, dropout_p, is_causal, **more)
    if attn_mask is not None and attn_mask.dtype is torch.bool:
        attn_mask = torch.zeros_like(attn_mask, dtype=query.dtype).masked_fill_(attn_mask.logical_not(), -torch.inf)
    fused = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    return fused(query, key, value, 0.0, is_causal, attn_mask=attn_mask, scale=more.get("scale"))[0]


def gpu_target(card: Card, fused_kernels: Kernels | None = None, disk_bytes_per_second: float = math.inf) -> Target:
    """Returns the Target (simulated device) for a GPU of the kind `card`. `fused_kernels`: lowmem's kernels that run
    there; None: those expected to run. `disk_bytes_per_second`: of the disk for optimizer states."""
    if fused_kernels is None:
        fused_kernels = fused.expected(card.capability)
    return Target(
        gpu_model(card), fused.update if Kernels.PRODUCTS in fused_kernels else optimizers.update, fused_kernels,
        card.copy_bytes_per_second, card.link_bytes_per_second, disk_bytes_per_second,
    )  # fmt: skip


def cpu_target() -> Target:
    """Returns the Target (simulated device) for training on the CPU. Its operations take no simulated time."""
    return Target(DeviceModel(CpuAttention), optimizers.update_in_slices, least_positions=LEAST_POSITIONS["cpu"])


class _ReplayedStep(TrainingStep):
    def _group(self, work: Work, gradients: FinalGradients) -> tuple[list[Tensor], list[Tensor]]:
        run = partial(super()._group, work, gradients)
        fetches = self._weights.fetches_any_of(range(len(self._decoder.blocks)))
        copies = self._updates.waiting or fetches or self.layout.boundaries_in_ram
        if gradients.fate is not Fate.HELD or copies:  # then groups differ
            return run()
        return self.operations.group(run, *(each.input_ids.shape for each in work.micro_batches), *self.segments)


@dataclass(frozen=True)
class StepCase:
    """Describes a training step to be simulated."""

    seq: int  # tokens of a sequence
    batch: int  # sequences of one rank
    layout: Layout  # how the step is cut, what is recomputed, and where tensors are stored
    dtype: torch.dtype  # of the matrices that compute
    optimizer: Optimizer
    clip_norm: float | None = 1.0
    document_mask: bool = False
    lengths: tuple[int, ...] | None = None  # tokens of each row in the timed step (Batch.lengths); None: rows are full
    target_tokens: int | None = None  # how many of `seq` positions are a target's, for an encoder-decoder
    mesh: Mesh = ALONE  # the ranks that train together

    @property
    def needs_all_gradients(self) -> bool:
        """Returns True if updates wait for all gradients, for their norm or to check that all are finite (fp16)."""
        return self.clip_norm is not None or self.dtype is torch.float16


@dataclass(frozen=True)
class SimulatedStep:
    """Holds the results of simulated training steps. The last of them stands for all later steps of a run."""

    tape: Tape  # allocations and frees of all steps, in order
    began: float  # when the last step began, on the simulated clock
    seconds: float  # of the last step
    waiting_seconds: float  # in which the GPU waits for copies or other ranks
    in_ram: dict[str, int]  # {name: bytes} of all that is in RAM and copied to the GPU when needed
    state_bytes: tuple[int, ...]  # of the optimizer, by unit, wherever stored
    disk_bytes: tuple[int, ...]  # of states on a disk, by unit
    weight_bytes: int  # of all weights that compute, without the low halves of master weights
    sent_bytes: int = 0  # to other ranks, in a step

    @property
    def streamed_bytes(self) -> int:
        return sum(self.in_ram.values())

    @property
    def computing_seconds(self) -> float:
        return self.seconds - self.waiting_seconds

    @property
    def checkpoint_bytes(self) -> int:
        return self.weight_bytes + sum(self.state_bytes)


def record_step(
    decoder: Decoder, case: StepCase, target: Target, known: dict | None = None, *, whole_first_step: bool = False,
) -> SimulatedStep:  # fmt: skip
    """Simulates an evaluation and one or more training steps of `case`. `known`: a cache of recordings for one decoder,
    sequence length, dtype and target. `whole_first_step`: True to simulate all micro-batches of the first step, too, so
    that reserved bytes are exact. Makes the decoder's parameters meta tensors. Raises ValueError if the decoder was
    made for other kernels than the target's."""
    if decoder.fused_kernels != target.fused_kernels:
        raise ValueError("the decoder is not made for the target's kernels (make_decoder)")
    outcomes = None if known is None else known.setdefault("outcomes", {})
    recorder = Recorder(target.device_model, lambda frame: _NAMES.get(frame.f_code), outcomes)
    ranks = None
    if case.mesh.count > 1:
        rates = None if target.copies is None else case.mesh.rates(target.copies, target.link)
        ranks = SimulatedRanks(case.mesh, recorder, rates)
    # Making a store is thousands of operations. They are not recorded; the tensors that they leave are noted below.
    store = Store(
        decoder, META, case.dtype, case.optimizer, case.layout, _never_touched, _never_touched, ranks or Ranks()
    )
    with recorder:
        recorder.take_workspaces()  # as a run does (device.py)
        _note_tensors(decoder, store, recorder)
        operations = ReplayedOperations(Operations(decoder, store, target.update), recorder, known)
        copies = None
        if target.copies is not None:
            copies = SimulatedTransfers(
                recorder.clock, target.copies, target.copies, host_buffer=store.host_buffer,
                concurrent=Kernels.PRODUCTS in target.fused_kernels and case.optimizer.any_stream,
                disk_bytes_per_second=target.disk,
            )  # fmt: skip
        step = _ReplayedStep(
            decoder, store, Hyperparameters(weight_decay=0.01), clip_norm=case.clip_norm, seed=0,
            loss_scale=LossScale(enabled=case.dtype is torch.float16), operations=operations, transfers=copies,
        )  # fmt: skip
        step.least_positions = target.least_positions
        layout = case.layout
        step.evaluate(batch_of_zeros(case, layout.micro_batch))  # as a run does before its first step
        # The next step applies the updates of this first one, as all later steps do. To save time, the first has one
        # micro-batch, or is left out if steps apply their own updates. Then reserved bytes may be off by a page or two.
        if layout.fate in (Fate.HELD, Fate.SENT) or whole_first_step:
            whole = whole_first_step or case.lengths is not None  # full rows take more memory than those of `lengths`
            step(batch_of_zeros(case, case.batch if whole else layout.micro_batch), 0, 1e-4)
        batch = batch_of_zeros(case, case.batch)
        if case.lengths is not None:
            batch = replace(batch_of_zeros(case, len(case.lengths)), lengths=torch.tensor(case.lengths))
        # With a disk, two more steps run first: late writes of one delay the next, so the third is like all later ones.
        for _ in range(2 if layout.states_on_disk and copies is not None else 0):
            step(batch, 1, 1e-4)
        waits = [each for each in (copies, ranks) if each is not None]
        began, waited = recorder.clock.host, sum(each.exposed_seconds for each in waits)
        sent_before = 0 if ranks is None else ranks.sent_bytes
        step(batch, 1, 1e-4)
        sent_bytes = 0 if ranks is None else ranks.sent_bytes - sent_before
        seconds = recorder.clock.host - began
        waiting = sum(each.exposed_seconds for each in waits) - waited
        if whole_first_step:  # otherwise the updates of the first step stand for those of the second
            step.flush()
    return SimulatedStep(recorder.tape, began, seconds, waiting, *_sizes(store, step), sent_bytes)


def _note_tensors(decoder: Decoder, store: Store, recorder: Recorder) -> None:
    for buffer in decoder.model.buffers():
        recorder.note(buffer, "buffers")
    for part in store.parts:
        recorder.note(part.absent if part.weights_streamed else part.working, "working_weights")
        for tensor in part.state.values() if not part.streamed else ():
            recorder.note(tensor, "resident_states")


def _sizes(store: Store, step: TrainingStep) -> tuple[dict, tuple, tuple, int]:
    units = 1 + max(part.unit for part in store.parts)
    states, on_disk = [0] * units, [0] * units
    for piece in store.pieces:
        sizes = {name: tensor.nbytes for name, tensor in piece.state.items() if name != WORKING}
        states[piece.part.unit] += sum(sizes.values())
        on_disk[piece.part.unit] += sum(sizes[name] for name in piece.on_disk)
    in_ram = {
        "streamed_states": sum(states[store.layout.states_on_gpu :]) - sum(on_disk),
        "streamed_weights": sum(part.working.nbytes for part in store.parts if part.weights_streamed),
        "streamed_boundaries": step.boundaries.buffer_bytes,
        "streamed_gradients": sum(part.gradient_home.nbytes for part in store.parts if part.gradient_home is not None),
        "disk_buffers": step.state_window.buffer_bytes,
    }
    return in_ram, tuple(states), tuple(on_disk), sum(part.working.nbytes for part in store.parts)


def batch_of_zeros(case: StepCase, rows: int) -> Batch:
    """Returns a batch of `rows` rows of zeros, with the same tensors as real batches."""
    zeros = partial(torch.zeros, dtype=torch.int64)
    input_ids = zeros((rows, case.seq))
    if case.target_tokens is not None:
        mask = torch.ones((rows, case.seq - case.target_tokens), dtype=torch.bool)
        return Batch(input_ids, zeros((rows, case.target_tokens)), source_mask=mask)
    packed = (zeros((rows, case.seq)), zeros((rows, case.seq)).int()) if case.document_mask else (None, None)
    return Batch(input_ids, zeros((rows, case.seq)), *packed)


def _never_touched(entries: int, dtype: torch.dtype) -> Tensor:
    # All entries share the memory of one number; `host_tensor` would allocate RAM for each.
    return torch.zeros(1, dtype=dtype).expand(entries)
