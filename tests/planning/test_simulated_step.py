"""The simulated step against the real one on the CPU, replays against running everything, tapes against caps.

What the CPU allocates can be checked without a GPU: the profiler notes every allocation and every end of one. Real runs
are in fp32, because 16-bit products on the CPU take scratch memory inside oneDNN that is none of ours.
"""

from dataclasses import replace

import pytest
import torch

from experiments.harness.at_peak import tape_of_cpu
from families import ENCODER_DECODERS, FAMILIES, MORE_FAMILIES, with_dropout
from lowmem.core import optimizers
from lowmem.core.decoder import Decoder
from lowmem.core.kernels import Kernels, fused
from lowmem.core.layout import Fate, Layout
from lowmem.core.optimizers import OPTIMIZERS, Hyperparameters
from lowmem.core.parameters import Store
from lowmem.core.precision import WORKING_DTYPES, LossScale
from lowmem.core.step import TrainingStep
from lowmem.cudasim.allocator import SimulatedOutOfMemory
from lowmem.cudasim.device_model import DeviceModel
from lowmem.cudasim.outcomes import is_view
from lowmem.cudasim.recorder import Recorder
from lowmem.cudasim.tape import FREED, Chunk, Tape, most_bytes, named_at_peak, under_cap
from lowmem.models.build import load_config, make_decoder
from lowmem.planning.simulated_step import SimulatedStep, StepCase, Target, batch_of_zeros, cpu_target, record_step
from lowmem.units import KIB, MIB
from tests.core.test_decoder import HONOUR_DOCUMENT_MASK

CPU = torch.device("cpu")
SEQ, BATCH = 32, 4
SETTINGS = {  # the layout, dropout, a mask where the family has one
    "accumulation, recomputed block by block": (Layout(1, states_on_gpu=99), 0.0, False),
    "one group of two, nothing recomputed, dropout": (Layout(2, 2, 2, kept=99, states_on_gpu=99), 0.1, False),
    "segments of two blocks, documents masked": (Layout(2, 1, 2, states_on_gpu=99), 0.0, True),
    "products kept, of the last block all, dropout": (Layout(2, 2, kept=4, states_on_gpu=99), 0.1, False),
    "weights of two blocks streamed, dropout": (Layout(2, 1, 1, states_on_gpu=1, weights_on_gpu=2), 0.1, False),
    "gradients in RAM": (Layout(1, 4, 2, fate=Fate.SENT, states_on_gpu=2), 0.1, True),
    "boundaries in RAM": (Layout(1, 4, 1, fate=Fate.DROPPED, boundaries_in_ram=True), 0.1, False),
}
EVERY_POLICY = Layout(2, kept=4, states_on_gpu=99)  # for three blocks
RESIDENT = Layout(2, states_on_gpu=99)


def config_of(family: str, dropout: float):
    return with_dropout((FAMILIES | MORE_FAMILIES | ENCODER_DECODERS)[family](), dropout)


def target_of(family: str) -> int | None:
    """How many of SEQ positions are a target's."""
    return 12 if family in ENCODER_DECODERS else None


def decoder_of(config, dtype: torch.dtype = torch.float32, fused_kernels: Kernels = Kernels.NONE) -> Decoder:
    precision = next(name for name, kind in WORKING_DTYPES.items() if kind is dtype)
    return make_decoder(config, precision, "fp32", fused_kernels)


def of_demo(
    layout: Layout, device_model: DeviceModel | None = None, *, batch: int = 4, dtype: torch.dtype = torch.bfloat16,
    optimizer: str = "adamw", clip_norm: float | None = 1.0, known: dict | None = None, **keywords,
) -> SimulatedStep:  # fmt: skip
    """The recorded step of the demo's model."""
    decoder = decoder_of(load_config("gpt2-demo", "random"), dtype)
    case = StepCase(256, batch, layout, dtype, OPTIMIZERS[optimizer], clip_norm)
    return record_step(decoder, case, Target(device_model or DeviceModel()), {} if known is None else known, **keywords)


def really_allocated(config, case: StepCase) -> int:
    """The peak of what the profiler saw the CPU allocate, from building the model to the end of the second update."""

    def train() -> None:
        decoder = decoder_of(config)
        store = Store(decoder, CPU, case.dtype, case.optimizer, case.layout)
        step = TrainingStep(
            decoder, store, Hyperparameters(weight_decay=0.01), clip_norm=1.0, seed=0,
            loss_scale=LossScale(enabled=False),
        )  # fmt: skip
        batch = batch_of_zeros(case, case.batch)
        for number in range(2):
            step(batch, number, 1e-4)
        step.flush()

    return tape_of_cpu(train)[0].peak_bytes()


def assert_simulated_as_allocated(config, case: StepCase) -> None:
    simulated = record_step(decoder_of(config), case, cpu_target(), known={}).tape.peak_bytes()
    # The worst seen is 0.003%: numbers that Python hands to an operation are tensors of 8 bytes for a moment.
    assert simulated == pytest.approx(really_allocated(config, case), rel=5e-5)


@pytest.mark.quick(2)
@pytest.mark.parametrize("setting", SETTINGS)
@pytest.mark.parametrize("family", ["gpt2", "llama", "gpt_neo", "opt_projected", "t5"])
def test_the_simulated_peak_is_what_the_profiler_sees_on_the_cpu(family, setting):
    layout, dropout, masked = SETTINGS[setting]
    masked = masked and family in HONOUR_DOCUMENT_MASK
    case = StepCase(
        SEQ, BATCH, layout, torch.float32, OPTIMIZERS["adamw"], document_mask=masked, target_tokens=target_of(family)
    )
    assert_simulated_as_allocated(config_of(family, dropout), case)


@pytest.mark.quick(2)
@pytest.mark.parametrize("family", FAMILIES | MORE_FAMILIES | ENCODER_DECODERS)
def test_so_it_is_for_every_family_in_one_step_with_every_policy(family):
    case = StepCase(SEQ, BATCH, EVERY_POLICY, torch.float32, OPTIMIZERS["adamw"], target_tokens=target_of(family))
    assert_simulated_as_allocated(config_of(family, 0.0), case)


# --- replays


def in_order_of_birth(tape: Tape) -> list:
    """The tape with storages numbered as they come, and frees that follow one another sorted: their order is that of
    C++ containers, and differs from run to run."""
    numbers, ordered, freed = {}, [], []
    for storage, size, name in tape:
        if size == FREED:
            freed.append(numbers[storage])
            continue
        ordered += [*sorted(freed), (numbers.setdefault(storage, len(numbers)), size, name)]
        freed = []
    return ordered + sorted(freed)


REPLAYED = [
    Layout(1, 1, 1, states_on_gpu=2), Layout(1, 4, 2, states_on_gpu=99), Layout(1, 2, 2, kept=99),
    Layout(1, 1, 3, kept=99, states_on_gpu=99), Layout(2, 1, 2, states_on_gpu=1),
    Layout(1, 2, 1, kept=4, states_on_gpu=2), Layout(1, 2, 2, kept=1, weights_on_gpu=1),
    Layout(1, 4, 1, kept=1, boundaries_in_ram=True),
]  # fmt: skip
KINDS = [(torch.float32, Kernels.NONE), (torch.bfloat16, Kernels.NONE), (torch.bfloat16, Kernels.ALL)]


@pytest.mark.quick(1)
@pytest.mark.parametrize(
    ("family", "dtype", "fused_kernels", "layout"),
    [  # every family, every type and every layout with each of the others once
        (family, *KINDS[(row + column) % len(KINDS)], layout)
        for row, family in enumerate(["gpt2", "llama", "gpt_neo", "t5"])
        for column, layout in enumerate(REPLAYED)
    ],
)
def test_replaying_leaves_the_tape_that_running_everything_leaves(family, dtype, fused_kernels, layout):
    """Seen to fail: an update that allocates nothing took the frees after its first run off the tape."""
    config = config_of(family, 0.1)
    device_model = DeviceModel(seconds=seconds_by_size, host_seconds=(1e-5, 6e-6))
    update = fused.update if fused_kernels else optimizers.update
    target = Target(device_model, update=update, fused_kernels=fused_kernels, copies=1e9)
    masked = family == "llama"
    case = StepCase(SEQ, 8, layout, dtype, OPTIMIZERS["adamw"], document_mask=masked, target_tokens=target_of(family))
    everything = record_step(decoder_of(config, dtype, fused_kernels), case, target)
    known: dict = {}
    for _ in range(2):  # the second time, nothing at all is run
        replayed = record_step(decoder_of(config, dtype, fused_kernels), case, target, known)
        assert in_order_of_birth(replayed.tape) == in_order_of_birth(everything.tape)
        assert replayed.seconds == pytest.approx(everything.seconds, rel=1e-9)
        assert replayed.streamed_bytes == everything.streamed_bytes


@pytest.mark.parametrize(
    ("layout", "copies"),
    [
        (Layout(1, 2, 2, kept=1, weights_on_gpu=1), 1e7), (Layout(1, 1, 1, weights_on_gpu=2), 1e7),
        (Layout(1, 4, 1, boundaries_in_ram=True, states_on_gpu=99), 1e6),
    ],
)  # fmt: skip
def test_a_replay_waits_for_the_copies_of_every_group(layout, copies):
    """Six blocks over a slow bus. Groups that were replayed whole would copy nothing."""
    config = config_of("gpt2", 0.1)
    config.n_layer = 6
    device_model = DeviceModel(seconds=seconds_by_size, host_seconds=(1e-5, 6e-6))
    target, case = Target(device_model, copies=copies), StepCase(SEQ, 8, layout, torch.bfloat16, OPTIMIZERS["adamw"])
    everything = record_step(decoder_of(config, torch.bfloat16), case, target)
    assert everything.waiting_seconds > 0.1 * everything.seconds
    known: dict = {}
    for _ in range(2):
        replayed = record_step(decoder_of(config, torch.bfloat16), case, target, known)
        assert replayed.seconds == pytest.approx(everything.seconds, rel=1e-9)


def seconds_by_size(func, args, kwargs, result) -> float:
    """Some time for everything that makes a tensor, so that the clocks have something to add up. Views take none."""
    return 1e-9 * result.numel() if isinstance(result, torch.Tensor) and not is_view(func) else 0.0


def test_many_micro_batches_cost_little_more_than_two():
    """Only the first ones are run: the operations that are dispatched do not grow with the batch."""
    counted = []

    def counting(func, args, kwargs, result):
        counted[-1] += 1
        return 0.0

    for batch in (4, 32):
        counted.append(0)
        case = StepCase(SEQ, batch, Layout(micro_batch=1, states_on_gpu=99), torch.float32, OPTIMIZERS["adamw"])
        record_step(decoder_of(config_of("gpt2", 0.0)), case, Target(DeviceModel(seconds=counting)), known={})
    assert counted[1] < 1.2 * counted[0] + 28 * 20  # what is left: a micro-batch's copy to the device, and views


# --- what the tape says


def test_the_most_of_one_name_need_not_be_at_the_peak():
    operations = [(0, 5, "a"), (1, 2, "b"), (0, FREED, ""), (2, 4, "b"), (1, FREED, ""), (3, 9, "a")]
    tape = Tape([Chunk(operations, 0, 0, 0.0)])
    assert (most_bytes(tape, "a"), most_bytes(tape, "b"), most_bytes(tape, "c")) == (9, 6, 0)
    assert (most_bytes(tape, "a", 9), most_bytes(tape, "b", 3)) == (5, 2)
    assert named_at_peak(tape) == {"a": 9, "b": 4}


def test_the_persistent_parts_of_a_step_are_named_and_have_the_sizes_worked_out_by_hand():
    recording = of_demo(Layout(2, states_on_gpu=2))
    memory = under_cap(recording.tape)
    D, L, embedding = 128, 4, 257 * 128 + 128 + 256 * 128  # every parameter begins at a multiple of 256 numbers
    block = 12 * D * D
    vectors = 256 * (4 + 2 + 1 + 2 + 1)  # two norms of two; biases of 3 D, D, 4 D, D
    final = 256 * 2
    matrices = embedding + L * block
    assert memory.at_peak["working_weights"] == 2 * matrices + 4 * (L * vectors + final)
    assert memory.at_peak["gradients"] == 4 * (matrices + L * vectors + final)
    assert recording.streamed_bytes == 10 * (L - 1) * block + 8 * ((L - 1) * vectors + final)
    assert memory.at_peak["resident_states"] == 10 * (embedding + block) + 8 * vectors
    assert sum(memory.at_peak.values()) == memory.allocated_peak_bytes


def test_it_fits_where_the_capped_run_completes_and_nowhere_else(monkeypatch):
    tape = of_demo(RESIDENT).tape
    free = under_cap(tape)
    assert under_cap(tape, free.reserved_peak_bytes) == free
    with pytest.raises(SimulatedOutOfMemory):
        under_cap(tape, free.allocated_peak_bytes - KIB)
    default = under_cap(tape, expandable_segments=False)
    assert default.reserved_peak_bytes >= default.allocated_peak_bytes >= free.allocated_peak_bytes
    assert sum(default.at_peak.values()) == default.allocated_peak_bytes
    monkeypatch.setenv("PYTORCH_ALLOC_CONF", "expandable_segments:False")
    monkeypatch.delenv("PYTORCH_CUDA_ALLOC_CONF", raising=False)
    assert under_cap(tape) == default != free
    assert max(allocated for _, allocated, _ in free.timeline) == free.allocated_peak_bytes
    seconds = [second for second, _, _ in free.timeline]
    assert seconds == sorted(seconds)


def test_every_thread_takes_a_workspace_once_and_keeps_it():
    device_model = DeviceModel(workspace_bytes=(2 * MIB, MIB))
    known: dict = {}
    for _ in range(2):  # replayed, too
        operations = list(of_demo(RESIDENT, device_model, known=known).tape)
        sizes = {storage: size for storage, size, name in operations if name == "workspaces"}
        taken = list(sizes)
        assert list(sizes.values()) == [2 * MIB, MIB, 2 * MIB]  # only forward takes the second
        assert not any(size == FREED and storage in taken for storage, size, _ in operations)


@pytest.mark.parametrize("clip_norm", [1.0, None])
def test_both_workspaces_are_there_before_the_weights(clip_norm):
    """Also where one step is recorded, whose first backward comes after its first forward and head."""
    device_model = DeviceModel(workspace_bytes=(MIB,))
    layout = replace(RESIDENT, group=2, fate="held" if clip_norm else "applied")
    operations = list(of_demo(layout, device_model, clip_norm=clip_norm).tape)
    assert [name for _, _, name in operations[:3]] == ["workspaces", "workspaces", "working_weights"]


def test_updates_that_await_a_look_at_scaled_gradients_are_simulated_with_the_next_forward():
    """fp16 has a scaled loss, and so without clipping the updates of clipping, also with the batch in one group."""
    clipped, unclipped = (of_demo(Layout(2, group=2), dtype=torch.float16, clip_norm=norm) for norm in (1.0, None))
    assert in_order_of_birth(unclipped.tape) == in_order_of_birth(clipped.tape)


@pytest.mark.parametrize(
    ("group", "clip_norm", "micro_batches"), [(1, 1.0, (1, 4)), (4, 1.0, (1, 4)), (4, None, (0, 4))]
)
def test_a_first_step_is_as_long_as_a_runs_where_that_is_asked_for(group, clip_norm, micro_batches):
    """Each micro-batch brings ids and labels of 2 x 256 x 8 bytes; an evaluation, which comes first, has one."""
    layout = Layout(2, group, fate="held" if clip_norm else "applied")
    for whole, first in zip((False, True), micro_batches, strict=True):
        tape = of_demo(layout, batch=8, clip_norm=clip_norm, whole_first_step=whole).tape
        brought = sum(size == 2 * 256 * 8 and name == "batch" for _, size, name in tape)
        assert brought == 2 * (1 + first + 4)


@pytest.mark.parametrize(("optimizer", "tables"), [("adamw", 0), ("adamw8bit", 2)])
def test_moments_of_8_bits_have_a_table_each_for_good_from_the_first_update_on(optimizer, tables):
    operations = list(of_demo(Layout(2), optimizer=optimizer).tape)
    freed = {storage for storage, size, _ in operations if size == FREED}
    first_gradient = [name for _, _, name in operations].index("gradients")
    after = operations[first_gradient:]
    others = [storage for storage, size, name in after if size == KIB and name == "other" and storage not in freed]
    assert len(others) == tables


SUMS = {  # of a tensor, whose gradient is the sum of two; nobody else holds the first, or the caller, or a view's base
    "added in place": lambda y: y.sin() * y.cos(),
    "a sum of its own": lambda y: y + y.sin(),
    "a sum of its own beside a view": lambda y: y.sin() * (y.view(2, -1) * 3).flatten(),
}


@pytest.mark.parametrize("function", SUMS.values(), ids=list(SUMS))
def test_gradients_that_meet_are_added_in_place_where_autograd_does_that(function):
    """It never does so under a dispatch mode, which the record is made in. The profiler needs none."""

    def backward(device: torch.device) -> None:
        x = torch.zeros(MIB, device=device, requires_grad=True)
        result = function(x * 2)
        result.backward(torch.empty_like(result))

    with Recorder() as recorder:
        backward(torch.device("meta"))
        births = [size for _, size, _ in recorder.tape if size != FREED]
    seen = [size for _, size, _ in tape_of_cpu(lambda: backward(CPU))[0] if size != FREED]
    assert births == [size for size in seen if size > KIB]  # numbers that Python hands to an operation are small


def test_temporaries_end_last_born_first_and_results_come_in_the_order_that_the_device_says():
    dropout = torch.ops.aten.native_dropout.default
    temporaries = {dropout: (3, 5)}
    device_model = DeviceModel(
        hidden_bytes=lambda func, *_: temporaries.get(func, ()),
        allocated=lambda func, args, kwargs, results: results[::-1] if func is dropout else results,
    )
    with Recorder(device_model) as recorder:
        given = torch.empty(8, device="meta")
        results = dropout(given, 0.1, True)
        operations = [(storage, size) for storage, size, _ in recorder.tape]
    (mask, _), (output, _), (first, _), (second, _) = operations[1:5]
    assert operations[1:] == [(mask, 8), (output, 32), (first, 3), (second, 5), (second, FREED), (first, FREED)]
    assert given.numel() == results[0].numel()  # all alive until here


def test_an_operation_with_known_shapes_is_not_run_again_if_its_results_are_new_tensors(monkeypatch):
    """Seen to fail: each was run again, and a plan took a quarter longer."""

    def program() -> None:
        given = torch.zeros(6, 4, device="meta")
        values, indices = given.t().sort()  # two results, with strides
        product = values @ torch.zeros(6, 3, device="meta", dtype=torch.float32)
        part = torch.zeros(8, device="meta").split(4)[1] + indices.sum(1)
        product.add_(1).view(-1)[:3].copy_(part[:3])

    run, tapes, outcomes = [], [], {}
    real = DeviceModel.run
    monkeypatch.setattr(DeviceModel, "run", lambda self, func, *given: run.append(func) or real(self, func, *given))
    for known in (None, outcomes, outcomes):
        run.clear()
        with Recorder(outcomes=known) as recorder:
            program()
            tapes.append([*recorder.tape])
    assert tapes[0] == tapes[1] == tapes[2] and len(tapes[0]) > 12
    aten = torch.ops.aten
    assert set(run) == {
        aten.t.default, aten.split.Tensor, aten.add_.Tensor, aten.view.default, aten.slice.Tensor, aten.copy_.default
    }, "views, and what changes a tensor"  # fmt: skip


def test_a_known_operation_makes_tensors_of_the_default_dtype_of_today():
    """Seen to fail: a model that was made in bf16 after one in fp32 took the bytes of fp32."""
    bytes_of, outcomes = [], {}
    for dtype in (torch.float32, torch.bfloat16):
        before = torch.get_default_dtype()
        torch.set_default_dtype(dtype)
        try:
            with Recorder(outcomes=outcomes) as recorder:
                made = torch.empty(64, device="meta"), torch.ones(32, dtype=torch.int64, device="meta").sqrt()
                bytes_of.append((recorder.tape.peak_bytes(), *(tensor.dtype for tensor in made)))
        finally:
            torch.set_default_dtype(before)
    assert bytes_of == [(256 + 256 + 128, *[torch.float32] * 2), (128 + 256 + 64, *[torch.bfloat16] * 2)]
