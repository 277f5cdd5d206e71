"""Memory that runs out at any operation of a step costs no bit until micro-batches have to be smaller.

The tests raise an OutOfMemoryError at one of PyTorch's operations, on the CPU. In an update, operations that allocate
nothing are left out. tests/cuda shows that the real allocator gives the memory back.
"""

import copy
import dataclasses
import gc
import weakref
from collections.abc import Callable, Sequence

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoModelForCausalLM

import lowmem.core.operations
from experiments.harness.trainings import make_step
from lowmem.core.deferred_updates import UpdateInterrupted, Updates
from lowmem.core.layout import Layout
from lowmem.core.parameters import Store
from lowmem.core.precision import LossScale
from lowmem.core.step import EVALUATION, STEP, UPDATES, TrainingStep
from lowmem.core.window import StateWindow
from lowmem.run.recovery import OutOfRoom, Recovery, with_micro_batch
from reference import make_batch, tiny_config
from runs import at_call, interrupt, run_out

BLOCKS, SEQ, BATCH = 3, 8, 4
UNITS = BLOCKS + 2
SAMPLES = 5  # of the operations of a step
RATE = 1e-2

DEFERRED = {"segment_blocks": 2}
GROUPS = {"group": 2, "micro_batch": 1, "kept": 4, "states_on_gpu": 3}
APPLIED = {"clip_norm": None, "fate": "applied", "group": 2}
IN_BACKWARD = APPLIED | {"segment_blocks": 2, "states_on_gpu": 2}
IN_BACKWARD_KEPT = APPLIED | {"kept": 4, "states_on_gpu": 99}
WEIGHTS = {"weights_on_gpu": 2, "states_on_gpu": 1, "group": 2, "micro_batch": 1}
TWICE = {"fate": "dropped", "group": 4, "micro_batch": 1, "segment_blocks": 2, "states_on_gpu": 1}
ARRANGEMENTS = {
    "streamed, deferred": DEFERRED, "streamed, not deferred": {"defer": False},
    "groups, some blocks kept, half resident": GROUPS,
    "nothing recomputed, resident": {"kept": 2 * BLOCKS, "states_on_gpu": 99}, "in backward": IN_BACKWARD,
    "in backward, some blocks kept": IN_BACKWARD_KEPT,
    "in backward, nothing recomputed": IN_BACKWARD | {"kept": 2 * BLOCKS, "segment_blocks": 1},
    "forward and backward twice": TWICE, "weights streamed": WEIGHTS | {"kept": 1},
    "weights streamed, in backward": WEIGHTS | APPLIED | {"group": 4, "segment_blocks": 2},
    "boundaries in RAM, in backward": IN_BACKWARD | {"boundaries_in_ram": True},
    "gradients in RAM": TWICE | {"fate": "sent"}, "bf16": DEFERRED | {"precision": "bf16", "states_on_gpu": 2},
    "bf16, in backward": IN_BACKWARD | {"precision": "bf16"},
    "fp16, SGD": DEFERRED | {"precision": "fp16", "optimizer": "sgd"},
    "bf16, 8-bit moments": DEFERRED | {"precision": "bf16", "optimizer": "adamw8bit"},
}  # fmt: skip


class RunsOut(TorchDispatchMode):
    """Fails at the given operations, each counted from the failure before; `phases`: the step's state at each
    failure."""

    def __init__(self, step: TrainingStep | None, *numbers: int):
        super().__init__()
        self.step, self.numbers, self.count, self.phases = step, list(numbers), 0, []
        self.in_update = self.in_relief = False

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        schema = function._schema
        allocates_nothing = schema.is_mutable or any(returned.alias_info for returned in schema.returns)
        if self.in_relief or (self.in_update and allocates_nothing):
            return function(*args, **kwargs or {})
        self.count += 1
        if self.numbers and self.count == self.numbers[0]:
            self.numbers.pop(0)
            self.count = 0
            self.phases.append((self.in_update, self.step._updates.waiting, self.step.halfway))
            run_out()
        return function(*args, **kwargs or {})

    def __enter__(self):
        self._patch = pytest.MonkeyPatch()
        self._watch(Updates, "_update_next", "in_update")
        self._watch(TrainingStep, "change_layout", "in_relief")
        return super().__enter__()

    def _watch(self, owner: type, name: str, flag: str) -> None:
        real = getattr(owner, name)

        def watched(*arguments):
            setattr(self, flag, True)
            try:
                return real(*arguments)
            finally:
                setattr(self, flag, False)

        self._patch.setattr(owner, name, watched)

    def __exit__(self, *exception):
        self._patch.undo()
        return super().__exit__(*exception)


@dataclasses.dataclass
class Training:
    step: TrainingStep
    store: Store
    recovery: Recovery
    said: list[str]

    def bits(self) -> list[bytes]:
        self.step.flush()
        return [
            tensor.view(torch.uint8).numpy().tobytes()
            for part in self.store.parts
            for tensor in (part.working, *part.state.values())
        ]

    @property
    def names(self) -> list[str]:
        return [measure["measure"] for measure in self.recovery.measures]


def make_training(
    *, clip_norm=0.5, states_on_gpu=0, precision="fp32",
    ram_refuses: Callable[[int, int], str | None] = lambda moving, moved: None, smaller: Sequence[dict] = (), **kind,
) -> Training:  # fmt: skip
    """`smaller`: changes of the layout in those that the plan has in reserve."""
    config = tiny_config("gpt2", dropout=0.1)
    config.n_layer = BLOCKS
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="sdpa")
    step, store = make_step(
        model, precision=precision, states_on_gpu=states_on_gpu, clip_norm=clip_norm,
        loss_scale=LossScale(precision == "fp16", scale=1024.0), **kind,
    )  # fmt: skip
    said = []
    layouts = [dataclasses.replace(step.layout, **change) for change in smaller]
    return Training(step, store, Recovery(step, layouts, said.append, ram_refuses), said)


def train_on(training: Training, numbers: Sequence[int], *failures: int) -> tuple[list, RunsOut]:
    """Trains these steps; memory runs out in the first. Returns their results, and the mode that failed."""
    mode, results = RunsOut(training.step, *failures), []
    for number in numbers:
        training.recovery.number = number + 1
        batch = make_batch(number, BATCH, SEQ)
        with mode:
            results.append(training.step(batch, number, RATE))
    return results, mode


def undisturbed(case: dict, steps: int = 4) -> tuple[str, list[bytes], int]:
    """Returns results, bits, and the number of operations of step 2 that may run out of memory."""
    training = make_training(**case)
    results, _ = train_on(training, range(2))
    second, mode = train_on(training, [2])
    results += second + train_on(training, range(3, steps))[0]
    return repr(results), training.bits(), mode.count


def disturbed(case: dict, *failures: int) -> tuple[Training, str, RunsOut]:
    """Trains as `undisturbed` does, with memory that runs out in step 2."""
    training = make_training(**case)
    results, _ = train_on(training, range(2))
    second, mode = train_on(training, [2], *failures)
    results += second + train_on(training, [3])[0]
    return training, repr(results), mode


# --- at any operation


@pytest.mark.quick(2)
@pytest.mark.parametrize("name", ARRANGEMENTS)
def test_memory_that_runs_out_at_any_operation_of_a_step_costs_no_bit(name):
    """The step's own forward and backward, and the update of the one before, which waits in its forward pass. Once a
    step has updated something, it cannot be made again: the run ends."""
    case = ARRANGEMENTS[name]
    expected, bits, count = undisturbed(case)
    phases, ended = set(), 0
    last = range(count - 2, count + 1)
    for number in (*range(1, count - 2, 1 + count // SAMPLES), *last):
        try:
            training, results, mode = disturbed(case, number)
        except OutOfRoom as error:
            assert "some weights are new and some old by now, so they are not saved" in str(error)
            ended += 1
            continue
        assert training.names == ["cache"] and not mode.numbers, number
        assert results == expected, number
        assert training.bits() == bits, number
        phases |= set(mode.phases)
    assert (False, False, False) in phases, "forward or backward, when nothing waits"
    assert bool(ended) == ("in backward" in name or "twice" in name), "when updates have begun"
    if not ended and case.get("defer", True):
        assert any(waiting for _, waiting, _ in phases), "when the step before waits for its updates"


@pytest.mark.quick(1)
@pytest.mark.parametrize("name", ARRANGEMENTS)
def test_memory_that_runs_out_within_updates_costs_no_bit(name):
    """At the operations of a whole step's updates, which `flush` makes."""
    case = ARRANGEMENTS[name] | {"clip_norm": 0.5, "defer": True}
    case |= {"fate": "held"} if case.get("fate") == "applied" else {}
    expected = make_training(**case)
    train_on(expected, range(2))
    with RunsOut(expected.step) as mode:
        expected.step.flush()
    resident = expected.store.states_on_gpu
    more = [1, 1][: min(resident, 2)]  # the states of half of the units go, then the rest
    for number in range(1, mode.count + 1, 1 + mode.count // SAMPLES):
        training = make_training(**case, smaller=[{"states_on_gpu": resident // 2}])
        train_on(training, range(2))
        with RunsOut(training.step, number, *more) as failing:
            training.step.flush()
        assert not failing.numbers and training.names == ["cache", "states", "states"][: 1 + len(more)]
        assert training.store.states_on_gpu == 0
        assert training.bits() == expected.bits(), number


# --- the measures, one after the other


@pytest.mark.quick(1)
@pytest.mark.parametrize("name", [name for name in ARRANGEMENTS if "backward" not in name])
def test_every_measure_but_the_last_costs_no_bit(name):
    """Memory runs out in attempt after attempt, until only the micro-batch can be smaller, or nothing."""
    case = ARRANGEMENTS[name]
    planned = make_training(**case).step.layout
    reserve = [{"states_on_gpu": planned.states_on_gpu // 2}, {"states_on_gpu": 0, "kept": planned.kept // 2}]
    case |= {"smaller": [*reserve, reserve[-1] | {"segment_blocks": 3}]}
    expected, bits, count = undisturbed(case)
    known: list[str] = []
    for failures in range(1, 9):
        numbers = [1 + (37 + 211 * index) % (count // 4) for index in range(failures)]
        try:
            training, results, mode = disturbed(case, *numbers)
        except OutOfRoom as error:
            assert case.get("micro_batch") == 1 and "even for single sequences, with every block" in str(error)
            break
        if "micro_batch" in training.names:
            break
        assert results == expected and training.bits() == bits, training.names
        assert training.names[:-1] == known and not mode.numbers
        known, smallest = training.names, training.step.layout
    assert known[0] == "cache" and set(known[1:]) <= {"layout"}
    assert (smallest.kept, smallest.states_on_gpu, smallest.segment_blocks) == (0, 0, 3)


def test_smaller_micro_batches_are_the_last_measure_and_the_run_is_one_that_had_them():
    training, results, _ = disturbed({}, 100, 200)
    assert training.names == ["cache", "micro_batch"]
    assert "with micro-batches of 1 instead of 2 and the same batch, which changes roundings" in training.said[-1]

    expected = make_training()
    before, _ = train_on(expected, range(2))
    expected.step.change_layout(with_micro_batch(expected.step.layout, 1))
    assert repr(before + train_on(expected, [2, 3])[0]) == results
    assert expected.bits() == training.bits()


# --- the order of measures


def test_the_plans_layouts_are_taken_in_turn_but_for_those_with_other_homes():
    kept = {"kept": 4, "states_on_gpu": 3}
    fewer = {"kept": 4, "states_on_gpu": 2}
    training = make_training(**kept, smaller=[fewer, fewer | {"weights_on_gpu": 2}, {"kept": 2, "states_on_gpu": 2}])
    taken = []
    for _ in range(5):
        training.recovery(STEP, "full")
        taken.append(training.step.layout)
    assert training.names == ["cache", "layout", "layout", "layout", "micro_batch"]
    assert [(layout.kept, layout.states_on_gpu) for layout in taken] == [(4, 3), (4, 2), (2, 2), (0, 0), (0, 0)]
    assert taken[-1].micro_batch == 1
    with pytest.raises(OutOfRoom, match="even for single sequences"):
        training.recovery(STEP, "full")


def test_a_run_that_goes_on_has_what_is_left_of_them():
    case = {"kept": 4, "states_on_gpu": 3, "smaller": [{"kept": 3, "states_on_gpu": 2}, {"kept": 1}]}
    training, resumed = make_training(**case), make_training(**case)
    for _ in range(2):
        training.recovery(STEP, "full")
    measures = copy.deepcopy(training.recovery.measures)
    for measure in measures:  # as before Layout had this field
        del measure["layout"]["gathered"], measure["planned"]["gathered"]
    resumed.recovery.resume(measures)
    assert resumed.step.layout == training.step.layout
    resumed.recovery(STEP, "full")
    training.recovery(STEP, "full")
    assert resumed.recovery.measures[-1]["layout"] == training.recovery.measures[-1]["layout"]


def test_a_run_that_goes_on_with_smaller_micro_batches_gets_no_larger_ones():
    case = {"kept": 4, "states_on_gpu": 3, "smaller": [{"kept": 3, "states_on_gpu": 2}, {"kept": 1}]}
    training = make_training(**case)
    while training.step.layout.micro_batch > 1:
        training.recovery(STEP, "full")
    for other in (case, case | {"kept": 5}):  # the same plan, and another one
        resumed = make_training(**other)
        resumed.recovery.resume(training.recovery.measures)
        assert resumed.step.layout.micro_batch == 1
        with pytest.raises(OutOfRoom):
            for _ in range(9):
                resumed.recovery(STEP, "full")
                assert resumed.step.layout.micro_batch == 1
        assert resumed.recovery.measures[: len(training.recovery.measures)] == training.recovery.measures


def test_measures_that_made_a_step_possible_stay_if_its_evaluation_finds_no_room():
    training = make_training()
    while training.step.layout.micro_batch > 1:
        training.recovery(STEP, "full")
    helped = list(training.recovery.measures)
    with pytest.raises(OutOfRoom):
        for _ in range(9):
            training.recovery(EVALUATION, "full")
    assert training.recovery.measures == helped


def test_a_group_keeps_its_sequences_where_smaller_micro_batches_would_cut_it():
    for layout, group in (
        (Layout(2, group=4, fate="sent"), 8),
        (Layout(8, group=1, fate="sent"), 2),
        (Layout(2, group=2), 4),
        (Layout(4, group=1), 1),
        (Layout(4, group=1, fate="applied"), 2),
    ):
        halved = layout.micro_batch // 2 if layout.micro_batch < 8 else 4
        assert with_micro_batch(layout, halved).group == group, layout


def test_waiting_updates_and_evaluations_only_take_states_from_the_device():
    for where, names in ((UPDATES, ["states"]), (EVALUATION, ["states", "evaluation_rows"])):
        training = make_training(kept=4, states_on_gpu=3)
        with pytest.raises(OutOfRoom):
            for _ in range(6):
                training.recovery.number += 1
                training.recovery(where, "full")
        layout = training.step.layout
        assert [name for name in training.names if name != "cache"] == names
        assert (layout.kept, layout.states_on_gpu) == (4, 0)


# --- states and RAM


def test_states_stay_where_ram_has_no_room_for_them_and_that_is_said():
    asked = []

    def refuses(moving: int, moved: int) -> str | None:
        asked.append((moving, moved))
        return "RAM would be at 17.0 GiB of the 16.0 GiB of --ram-limit"

    training, _, _ = disturbed({"states_on_gpu": 3, "ram_refuses": refuses}, 100, 100)
    assert training.store.states_on_gpu == 3 and training.names == ["cache", "micro_batch"]
    each = [training.store.state_bytes(range(unit, 3)) for unit in range(3)]
    assert asked == [(size, size) for size in each]
    assert "states stay on the GPU: RAM would be at 17.0 GiB" in training.said[1]


def test_fewer_states_go_where_ram_has_room_for_those_alone():
    case = {"states_on_gpu": 4, "smaller": [{"states_on_gpu": 2}]}
    expected, bits, _ = undisturbed(case)
    one = make_training(**case).store.state_bytes(range(3, 4))
    refuses = lambda moving, moved: "too much" if moving > one else None  # noqa: E731
    training, results, _ = disturbed(case | {"ram_refuses": refuses}, 100, 100, 100)
    assert training.names == ["cache", "layout", "layout"] and training.store.states_on_gpu == 2
    assert results == expected and training.bits() == bits


def test_a_staging_ring_that_finds_no_room_makes_more_states_go(monkeypatch):
    case = {"states_on_gpu": 99, "smaller": [{"states_on_gpu": UNITS - 1}, {"states_on_gpu": UNITS - 3}]}
    expected, bits, _ = undisturbed(case)
    at_call(monkeypatch, StateWindow, "fit", run_out, 2)  # the first is that of a new training
    training, results, _ = disturbed(case, 100, 100)
    assert training.names == ["cache", "layout"] and training.store.states_on_gpu == UNITS - 3
    assert results == expected and training.bits() == bits


@pytest.mark.parametrize("states_on_gpu", [1, 99])
def test_a_staging_ring_without_slots_is_made_before_it_is_used(states_on_gpu, monkeypatch):
    """Memory runs out in its allocation, when RAM has taken the states already and takes no more."""
    answers = iter([None])
    training = make_training(
        states_on_gpu=states_on_gpu, ram_refuses=lambda moving, moved: next(answers, "RAM is full")
    )
    train_on(training, range(2))
    fit, calls = StateWindow.fit, []

    def failing(window, pieces):
        calls.append(len(calls))
        with monkeypatch.context() as patch:
            if len(calls) == 1:
                window._window.sizes = {}  # as if they had been too small
                patch.setattr(torch, "empty", run_out)
            fit(window, pieces)

    with monkeypatch.context() as patch:
        patch.setattr(StateWindow, "fit", failing)
        results, _ = train_on(training, [2], 100, 100)
    assert training.names == ["cache", "micro_batch"] and len(calls) == 2 and training.step.state_window.fits
    assert results[0].updated and training.bits()


# --- nothing is left


def test_updates_that_are_half_made_in_backward_are_not_saved():
    training = make_training(**IN_BACKWARD)
    train_on(training, range(2))
    count = undisturbed(IN_BACKWARD)[2]
    with pytest.raises(OutOfRoom, match="some weights are new and some old by now, so they are not saved") as raised:
        train_on(training, [2], count * 3 // 4)
    assert training.step.halfway and raised.value.exit_code == 4 and not training.names


def test_a_step_that_cannot_be_made_is_left_as_if_it_had_not_been_begun():
    training = make_training()
    train_on(training, range(2))
    with pytest.raises(OutOfRoom, match="even for single sequences"):
        train_on(training, [2], *[900] * 9)
    assert not training.step.halfway
    expected = make_training()
    train_on(expected, range(2))
    assert training.bits() == expected.bits()


# --- what a failed attempt leaves


def test_a_gradient_that_did_not_reach_its_accumulator_counts_for_nothing(monkeypatch):
    """The accumulator's own allocation fails in the hook, when the parameter has its .grad already."""
    expected, bits, _ = undisturbed({})
    training = make_training()
    with monkeypatch.context() as patch:
        at_call(patch, training.store.parts[2], "gradient_of", run_out, 20)
        results, _ = train_on(training, range(4))
    assert training.names == ["cache"] and repr(results) == expected and training.bits() == bits


def test_an_update_that_was_ended_in_the_middle_is_not_made_again(monkeypatch):
    """By Ctrl-C in a user's own loop, for example: some moments have the gradient, and some do not."""
    training = make_training()
    train_on(training, [0])
    with monkeypatch.context() as patch:
        at_call(patch, training.step.operations, "update", interrupt, 3)
        with pytest.raises(KeyboardInterrupt):
            training.step.flush()
    for again in (training.step.flush, lambda: train_on(training, [1])):
        with pytest.raises(UpdateInterrupted, match="load the weights again"):
            again()


def test_the_failed_attempts_tensors_are_gone_when_room_is_made(monkeypatch):
    training = make_training()
    alive, seen = [], []
    real = lowmem.core.operations.linear_cross_entropy

    def failing(hidden, *arguments, **keywords):
        alive.append(weakref.ref(hidden))
        if len(alive) == 2:
            run_out()
        return real(hidden, *arguments, **keywords)

    monkeypatch.setattr(lowmem.core.operations, "linear_cross_entropy", failing)
    training.step.make_room = lambda where, reason: seen.extend(reference() is None for reference in alive)
    gc.disable()  # no collection by chance: they must be free at once
    try:
        train_on(training, [0])
    finally:
        gc.enable()
    assert seen == [True, True]


def test_without_anyone_to_make_room_the_error_comes_through():
    training = make_training()
    training.step.make_room = None
    with pytest.raises(torch.OutOfMemoryError):
        train_on(training, [0], 100)
