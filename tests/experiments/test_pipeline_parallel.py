"""Pipelines: schedules are legal and cost what papers say, illegal ones are refused, and what runs is one process's
training, bit for bit. Most runs have their ranks in threads; a few have real processes.
"""

import json
import os
import queue
import random
import signal
import threading
from collections import Counter
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from experiments.harness import group
from experiments.harness.randomness import seed_of
from experiments.harness.rows import read
from experiments.pipeline_parallel import measure, reference, run, table, worker
from experiments.pipeline_parallel.checker import Checked, bubble_of, check, steady_bubble_of
from experiments.pipeline_parallel.runtime import Rank
from experiments.pipeline_parallel.schedules import (
    ASYNCHRONOUS,
    BACKWARD,
    FORWARD,
    INPUT_GRADIENT,
    RECEIVE_ACTIVATION,
    RECEIVE_GRADIENT,
    SCHEDULES,
    UPDATE,
    WEIGHT_GRADIENT,
    WITH_CHUNKS,
    Action,
    matching,
    needed,
    schedule,
    with_transfers,
)
from experiments.pipeline_parallel.tasks import Task, cut
from experiments.pipeline_parallel.worker import Actions, Job
from lowmem.errors import InputError

CPU = torch.device("cpu")


def checked(name: str, ranks: int, micro_batches: int, chunks: int = 1, change=lambda actions: None) -> Checked:
    actions = schedule(name, ranks, micro_batches, chunks)
    change(actions)
    return check(actions, ranks * chunks, micro_batches, micro_batches if name in ASYNCHRONOUS else 1)


# --- what schedules cost


@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 8])
@pytest.mark.parametrize("times", [1, 2, 5])
@pytest.mark.parametrize(
    "name, chunks", [(name, 1) for name in SCHEDULES] + [("gpipe", 2), ("interleaved", 2), ("interleaved", 3)]
)
def test_bubbles_are_those_of_the_papers(name, chunks, ranks, times):
    """Where a forward takes 1, a backward 2, each of its parts 1, and there are `times` x ranks micro-batches."""
    m = times * ranks
    found = checked(name, ranks, m, chunks)
    total = 3 * m if name == "zb-h1" else chunks * m  # of zb-h1 (p-1)(F+I-W) beside m(F+I+W)
    assert found.bubble == pytest.approx((ranks - 1) / (total + ranks - 1), abs=1e-12)
    assert found.in_order


@pytest.mark.parametrize("p", [1, 2, 4, 8])
def test_activations_in_flight_and_versions_of_weights_are_those_of_the_papers(p):
    m = 3 * p
    ranks = range(p)
    assert checked("gpipe", p, m).peak_in_flight == [m] * p
    assert checked("1f1b", p, m).peak_in_flight == [p - r for r in ranks]
    assert checked("zb-h1", p, m).peak_in_flight == [p] * p
    for v in (1, 2, 3):
        assert checked("interleaved", p, m, v).peak_in_flight == [2 * (p - r - 1) + (v - 1) * p + 1 for r in ranks]
    assert checked("pipedream", p, m).weight_versions == [p - r for r in ranks]
    assert checked("pipedream-vs", p, m).weight_versions == [p] * p
    assert checked("1f1b", p, m).weight_versions == [1] * p


@pytest.mark.quick(40)
@pytest.mark.parametrize("name", SCHEDULES)
@pytest.mark.parametrize("micro_batches", [1, 2, 3, 7, 50])
@pytest.mark.parametrize("ranks", [1, 2, 3, 5])
def test_every_number_of_micro_batches_makes_a_legal_schedule(name, ranks, micro_batches):
    for chunks in (1, 2) if name in WITH_CHUNKS else (1,):
        checked(name, ranks, micro_batches, chunks)


def test_sizes_that_a_schedule_does_not_have_are_refused():
    with pytest.raises(ValueError, match="1f1b has one stage per rank, and not 2 chunks; gpipe and interleaved have"):
        schedule("1f1b", 2, 4, 2)
    with pytest.raises(ValueError, match="at least 1"):
        schedule("1f1b", 2, 0)


# --- what the checker refuses


@pytest.mark.parametrize("change, said", [
    (lambda a: a[1].remove(Action(FORWARD, 1, 2)), "comes before forward of micro-batch 2"),
    (lambda a: a[1].remove(Action(RECEIVE_ACTIVATION, 1, 2)), "comes before receive activation"),
    (lambda a: a[0].remove(Action(BACKWARD, 0, 3)), "lacks a backward"),
    (lambda a: a[1].remove(Action(BACKWARD, 1, 3)), "send gradient of micro-batch 3, stage 1 comes before"),
    (lambda a: a[0].remove(Action(UPDATE, 0)), "stage 0 has 0 updates, and not 1"),
    (lambda a: a[0].insert(0, Action(UPDATE, 0)), "stage 0 has 2 updates"),
    (lambda a: a[0].append(Action(FORWARD, 0, 0)), "does this twice"),
    (lambda a: a[1].insert(3, a[1].pop(a[1].index(Action("send gradient", 1, 3)))), "before it is computed"),
    (lambda a: a[0].append(Action(FORWARD, 1, 0)), "rank 0 has no such action"),
    (lambda a: a[0].append(Action(FORWARD, 0, 4)), "no micro-batch 4"),
    (lambda a: a[0].insert(0, a[0].pop(a[0].index(Action(BACKWARD, 0, 0)))), "comes before"),
    (lambda a: a[0].append(a[0].pop(a[0].index(Action(BACKWARD, 0, 3)))), "when there are the gradients of .0, 1, 2."),
    (lambda a: a[1].append(a[1].pop(-2)), "send gradient of micro-batch 3, stage 1 comes after an update"),
])  # fmt: skip
def test_what_is_wrong_is_said(change, said):
    actions = schedule("1f1b", 2, 4)
    change(actions)
    with pytest.raises(ValueError, match=said):
        check(actions, 2, 4)


def moved(*moves):
    """A change: of each rank named an action comes before or behind another one."""

    def change(actions):
        for rank, action, behind, place in moves:
            actions[rank].remove(action)
            actions[rank].insert(actions[rank].index(place) + behind, action)

    return change


def renamed(named: int):
    """A change: an update takes another micro-batch's gradient than its own."""
    return lambda a: a[0].__setitem__(a[0].index(Action(UPDATE, 0, 1)), Action(UPDATE, 0, named))


@pytest.mark.parametrize("name, sizes, change, said", [
    *(("pipedream", (2, 4), renamed(named), r"comes when there are the gradients of \[1\]") for named in (0, 5, -1)),
    # An update that comes too late would use the gradients of two micro-batches at once.
    ("pipedream", (2, 8), moved((0, Action(UPDATE, 0, 6), True, Action(BACKWARD, 0, 7))), r"the gradients of \[6, 7\]"),
    # Ranks meet at the first update of a step, to clip and to add up what is tied. One has another chunk to do.
    ("gpipe", (2, 2, 2), moved((0, Action(UPDATE, 2), True, Action(BACKWARD, 2, 1))),
     "comes after an update, for which the ranks meet"),
    # Each rank is legal by itself; rank 0 wants a gradient before it sends what rank 1 needs for it.
    ("gpipe", (2, 2), moved((0, Action("send activation", 0, 1), True, Action(BACKWARD, 0, 1))), "a deadlock"),
    # Both ranks send before either has begun to receive: it ends only where sends return at once.
    ("1f1b", (2, 3), moved((0, Action(RECEIVE_GRADIENT, 0, 1), False, Action(BACKWARD, 0, 1)),
                           (1, Action(RECEIVE_ACTIVATION, 1, 1), False, Action(FORWARD, 1, 1))),
     "deadlock where sends wait"),
])  # fmt: skip
def test_what_is_wrong_in_other_schedules_is_said(name, sizes, change, said):
    with pytest.raises(ValueError, match=said):
        checked(name, *sizes, change=change)


def test_a_schedule_of_nothing_and_a_rank_that_sends_to_itself_are_refused():
    with pytest.raises(ValueError, match="there is no micro-batch"):
        check([[Action(UPDATE, 0)]], 1, 0)
    alone = schedule("1f1b", 1, 1)
    alone[0].insert(1, Action("send activation", 0, 0))
    with pytest.raises(ValueError, match="rank 0 has no such action"):
        check(alone, 1, 1)


def test_the_order_of_forwards_counts():
    """Batch norm's running statistics see it."""
    actions = schedule("gpipe", 1, 2)
    actions[0][:2] = reversed(actions[0][:2])
    assert not check(actions, 1, 2).in_order


def test_stages_that_lie_unevenly_are_refused():
    with pytest.raises(ValueError, match="3 stages do not lie evenly on 2 ranks"):
        check(schedule("1f1b", 2, 1), 3, 1)


def test_messages_that_come_in_another_order_are_refused():
    actions = schedule("gpipe", 2, 3)
    receives = [place for place, action in enumerate(actions[1]) if action.kind == RECEIVE_ACTIVATION]
    one, other = receives[:2]
    # Begun at once and in the wrong order: both are there before either is used.
    first, second = actions[1][one], actions[1][other]
    actions[1].remove(second)
    actions[1].insert(one, second)
    assert actions[1].index(second) < actions[1].index(first)
    with pytest.raises(ValueError, match="meets receive activation|what is sent is not what is received"):
        check(actions, 2, 3)


# --- running

WIDTH, ROWS = 6, 3


class Ends:
    """Transfers between threads: a queue for each kind and pair of ranks."""

    def __init__(self, rank: int, ranks: int, queues: dict):
        self.rank, self.ranks, self.queues = rank, ranks, queues
        self.begun: dict = {}  # of each queue the receives to come, in the order in which they were begun
        self.arrived: dict = {}

    def _queue(self, kind, source, to):
        return self.queues.setdefault((kind, source, to), queue.Queue())

    def _key(self, receive):
        source = (receive.stage + (-1 if receive.kind == RECEIVE_ACTIVATION else 1)) % self.ranks
        return receive.kind, source, self.rank

    def begin(self, receive, rows):
        self.begun.setdefault(self._key(receive), []).append(receive)

    def wait(self, receive):
        key = self._key(receive)
        while receive not in self.arrived:
            sent, tensor = self._queue(*key).get(timeout=20)
            expected = self.begun[key].pop(0)
            assert sent == expected
            self.arrived[expected] = tensor
        return self.arrived.pop(receive)

    def send(self, send, tensor):
        receive = matching(send)
        self._queue(receive.kind, self.rank, receive.stage % self.ranks).put((receive, tensor.clone()))

    def finish(self):
        pass


class Small(Job):
    """A task of a few products; its layers are the same in every rank, since they come of the seed."""

    def make_task(self):
        torch.manual_seed(self.seed)
        layers = [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.LayerNorm(WIDTH)) for _ in range(8)]
        generator = torch.Generator().manual_seed(1)
        samples = torch.randn((64, WIDTH), generator=generator)
        return Task(layers, samples, samples.roll(1, 0), lambda output, target: (output - target).square().sum())


def job(name: str, ranks: int, micro_batches: int, chunks: int = 1, steps: int = 2, **more) -> Small:
    sizes = tuple(cut([1.0] * 8, ranks * chunks))
    common = {"task": "small", "norm": "group", "seed": 0, "learning_rate": 1e-2, "clip_norm": None, "recompute": False}
    return Small(name, ranks, chunks, micro_batches, steps, micro_batches * ROWS - 1, **common | more, sizes=sizes)


def run_in_threads(job: Job, actions: list[list[Action]]) -> dict[str, torch.Tensor]:
    """Returns its weights, by their names in the whole model."""
    queues: dict = {}
    tasks = [job.make_task() for _ in range(job.ranks)]  # made here: threads share the random numbers
    ranks = [
        Rank(worker.stages_of(job, tasks[rank], rank, CPU), job.stages, Ends(rank, job.ranks, queues))
        for rank in range(job.ranks)
    ]
    failures = []

    def one(rank: int) -> None:
        try:
            for step in range(1 if job.asynchronous else job.steps):
                ranks[rank].run(actions[rank], job.micro_batches_of(tasks[rank], step, CPU), step)
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=one, args=(rank,), daemon=True) for rank in range(job.ranks)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=60)
        assert not thread.is_alive(), "a rank hangs"
    if failures:
        raise failures[0]
    weights = {number: worker.weights_of(stage) for rank in ranks for number, stage in rank._stages.items()}
    return run.in_the_whole(job, weights)


def assert_equal_to_one_process(job: Job, found: dict[str, torch.Tensor]) -> None:
    expected = reference.trained(job)[1]
    assert found.keys() == expected.keys()
    assert [name for name in expected if not torch.equal(found[name], expected[name])] == []


@pytest.mark.quick(20)
@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("name, ranks, chunks", [
    *((name, ranks, 1) for name in SCHEDULES for ranks in (1, 2, 4)), ("interleaved", 4, 2), ("gpipe", 2, 3),
])  # fmt: skip
def test_weights_are_those_of_one_process(name, ranks, chunks, recompute):
    """A batch that does not divide evenly, AdamW, two steps."""
    it = job(name, ranks, 5, chunks, recompute=recompute)
    count = 5 * (it.steps if it.asynchronous else 1)
    assert_equal_to_one_process(it, run_in_threads(it, schedule(name, ranks, count, chunks)))


def test_weights_are_not_those_of_another_delay():
    """PipeDream's recurrence is not the one with vertical sync, nor training without stale weights."""
    one = reference.asynchronous(job("pipedream", 4, 6))[1]
    for other in (job("pipedream-vs", 4, 6), job("pipedream", 1, 6)):
        weights = reference.asynchronous(other)[1]
        assert not any(torch.equal(one[name], weights[name]) for name in ("layers.0.0.weight", "layers.5.0.weight"))


def random_schedule(draw: random.Random, ranks: int, chunks: int, micro_batches: int) -> list[list[Action]]:
    """Any order in which inputs are there and each stage takes micro-batches in their order."""
    stages = ranks * chunks
    split = draw.random() < 0.5
    kinds = (FORWARD, INPUT_GRADIENT, WEIGHT_GRADIENT) if split else (FORWARD, BACKWARD)
    done: set[Action] = set()
    progress = Counter()
    computed: list[list[Action]] = [[] for _ in range(ranks)]
    while True:
        ready = []
        for stage in range(stages):
            for kind in kinds:
                action = Action(kind, stage, progress[kind, stage])
                if action.micro_batch == micro_batches:
                    continue
                before = [Action(FORWARD, stage, action.micro_batch)] * (kind in (BACKWARD, INPUT_GRADIENT))
                before += [Action(INPUT_GRADIENT, stage, action.micro_batch)] * (kind == WEIGHT_GRADIENT)
                for receive in needed(action, stages):
                    of_forward = receive.kind == RECEIVE_ACTIVATION
                    before.append(Action(kind, stage + (-1 if of_forward else 1), action.micro_batch))
                if done.issuperset(before):
                    ready.append(action)
        if not ready:
            break
        action = draw.choice(ready)
        done.add(action)
        progress[action.kind, action.stage] += 1
        computed[action.stage % ranks].append(action)
    for stage in range(stages):
        computed[stage % ranks].append(Action(UPDATE, stage))
    return with_transfers(computed, stages)


@settings(max_examples=25, deadline=None)
@given(st.integers(0, 10**9), st.integers(1, 4), st.integers(1, 2), st.integers(1, 6))
def test_any_legal_schedule_runs_and_leaves_the_same_bits(seed, ranks, chunks, micro_batches):
    actions = random_schedule(random.Random(seed), ranks, chunks, micro_batches)
    assert check(actions, ranks * chunks, micro_batches).in_order
    it = job("gpipe", ranks, micro_batches, chunks)
    assert_equal_to_one_process(it, run_in_threads(it, actions))


@settings(max_examples=60, deadline=None)
@given(st.sampled_from(list(SCHEDULES)), st.integers(0, 10**9), st.booleans())
def test_a_schedule_with_an_action_removed_or_swapped_is_refused_or_still_right(name, seed, remove):
    """Two actions that do not depend on each other may be swapped: then it has to run, and to be right."""
    draw = random.Random(seed)
    chunks = 2 if name in WITH_CHUNKS else 1
    it = job(name, 3, 4, chunks, steps=1)
    actions = schedule(name, 3, 4, chunks)
    of_rank = actions[draw.randrange(3)]
    place = draw.randrange(len(of_rank))
    if remove:
        del of_rank[place]
    else:
        other = draw.randrange(len(of_rank))
        of_rank[place], of_rank[other] = of_rank[other], of_rank[place]
    try:
        found = check(actions, it.stages, 4, 4 if it.asynchronous else 1)
    except ValueError:
        return
    assert not remove
    weights = run_in_threads(it, actions)
    if found.in_order:
        assert_equal_to_one_process(it, weights)


def test_random_numbers_depend_on_step_micro_batch_and_layer_alone():
    seeds = {seed_of(0, step, m, layer) for step in range(20) for m in range(20) for layer in range(20)}
    assert len(seeds) == 20**3 and all(0 <= seed < 2**63 for seed in seeds)


def test_stages_are_cut_where_they_cost_most_nearly_the_same():
    assert sorted(cut([1.0] * 10, 4)) == [2, 2, 3, 3]
    assert cut([5, 1, 1, 1, 1, 1], 2) == [1, 5]
    assert cut([1, 1, 1, 9, 1], 3) == [3, 1, 1]
    with pytest.raises(InputError, match="the model has 3 layers, which make no 4 stages"):
        cut([1, 1, 1], 4)


def test_a_list_in_an_array_is_the_list():
    for of_rank in schedule("pipedream-vs", 3, 5):
        assert list(Actions.of(of_rank)) == of_rank


# --- the command, with real processes


@pytest.mark.exhaustive
@pytest.mark.parametrize("options", [
    "--schedule zb-h1 --stages 2 --task gpt2 --clip 0.5 --batch 7",
    "--schedule interleaved --stages 2 --chunks 2 --norm batch --recompute", "--schedule pipedream-vs --stages 2",
])  # fmt: skip
def test_real_processes_leave_the_bits_of_one(options, tmp_path, capsys):
    """Tied embeddings, clipping, dropout; batch norm; stale weights."""
    words = [*options.split(), "--micro-batches", "3", "--steps", "2", "--compare", "--out", str(tmp_path)]
    torch.set_num_threads(2)  # as a machine has; the process beside must not use more than a stage's does
    try:
        assert run.main(words) == 0
    finally:
        torch.set_num_threads(1)
    report = json.loads((tmp_path / "report.json").read_text())
    assert report["weights_bitwise_equal"] is True and report["max_abs_loss_difference"] == 0.0
    assert len(report["peak_bytes_per_rank"]) == len(report["weight_versions"]) == 2
    assert 0 < report["bubble_measured"] < 1
    for name in ("timeline.png", "curves.png"):
        assert (tmp_path / name).read_bytes().startswith(b"\x89PNG")
    assert "bit for bit equal" in capsys.readouterr().out


@pytest.mark.exhaustive
def test_a_row_that_was_measured_is_in_its_table(tmp_path, monkeypatch, capsys):
    """A run for each kind of row; a killed command leaves nothing, and says so."""
    case = "--stages 2 --schedule pipedream --micro-batches 2 --steps 2"
    monkeypatch.setattr(measure, "CASES", {
        "equal": [f"{case} --compare"], "memory": ["--stages 2 --steps 1"], "bubble": [f"{case} --pad 0.02"],
        "killed": ["the command"],
    })  # fmt: skip
    rows = tmp_path / "rows.jsonl"
    assert measure.main(["--rows", str(rows)]) == 0
    said = capsys.readouterr().out
    assert "| pipedream | equal bits | 2, 1 | 2, 1 |" in said and "| the command |" in said
    bubble = next(row for row in read(rows) if row["section"] == "bubble")
    measured = bubble_of(table.timeline(bubble))
    assert measured == pytest.approx(bubble["bubble_measured"], abs=1e-2) and measured > bubble["bubble_planned"]


def test_the_rows_are_what_the_issue_wants():
    """Equal bits in all; 1F1B's memory flat within 2%; bubbles within 5% of planned where a forward takes a second."""
    rows = {section: table.newest(read(table.ROWS), section) for section in measure.CASES}
    assert {row["options"] for row in rows["equal"]} == set(measure.CASES["equal"])
    assert {row["section"] for row in read(table.ROWS)} == measure.CASES.keys()
    assert all(row["weights_bitwise_equal"] and row["max_abs_loss_difference"] == 0 for row in rows["equal"])
    flat = [row["peak_bytes_per_rank"] for row in rows["memory"] if row["schedule"] == "1f1b"]
    assert len(flat) == 4 and all(max(of_rank) <= 1.02 * min(of_rank) for of_rank in zip(*flat, strict=True))
    padded = [row for row in rows["bubble"] if "--pad 1 " in row["options"]]
    assert len(padded) == len(SCHEDULES)
    assert all(row["bubble_measured"] == pytest.approx(row["bubble_planned"], rel=0.05) for row in padded)
    assert all(row["seconds"] < 30 for row in rows["killed"])


def test_a_row_that_is_not_equal_is_not_called_so():
    (row,) = [
        row
        for row in read(table.ROWS)
        if row["options"].startswith("--stages 4 --schedule 1f1b --steps 30 --compare --task digits")
        and "norm" not in row["options"]
    ]
    assert row["weights_bitwise_equal"]
    off = row | {"weights_bitwise_equal": False, "max_abs_weight_difference": 1e-7, "max_abs_loss_difference": 0.0}
    assert "weights 1.0e-07, losses 0.0e+00 apart" in table.sections([off])


@pytest.mark.parametrize("name", [name for name in SCHEDULES if name != "gpipe"])
def test_no_rank_waits_in_steady_state(name):
    """Only the ends of a step have a bubble, and of an asynchronous schedule those of the whole run."""
    assert steady_bubble_of(checked(name, 4, 32).spans) == pytest.approx(0, abs=1e-12)
    assert steady_bubble_of(checked("gpipe", 4, 2).spans) is None


@pytest.mark.exhaustive
def test_a_process_that_is_killed_ends_all_and_is_named(tmp_path, monkeypatch, capsys):
    started = []
    monkeypatch.setattr(group, "_started", lambda *a, real=group._started: started.append(real(*a)) or started[-1])
    watch = group._watch

    def kill_one(processes, folder):
        threading.Timer(8.0, lambda: os.kill(processes[1].pid, signal.SIGKILL)).start()
        watch(processes, folder)

    monkeypatch.setattr(group, "_watch", kill_one)
    assert run.main(["--stages", "2", "--steps", "100000", "--out", str(tmp_path)]) == 1
    assert capsys.readouterr().err == "error: the process of rank 1 was ended by signal 9\n"
    assert all(process.exitcode is not None for process in started) and not (tmp_path / "report.json").exists()


@pytest.mark.exhaustive
def test_an_error_in_a_stage_is_said_once(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(
        run, "train", lambda job, checked, real=run.train: real(replace(job, task="no such task"), checked)
    )
    assert run.main(["--stages", "2", "--steps", "2", "--out", str(tmp_path)]) == 1
    assert capsys.readouterr().err.count("no such task") == 1


@pytest.mark.exhaustive
def test_a_stage_that_fails_while_others_wait_for_it_is_the_cause(tmp_path, monkeypatch, capsys):
    """The last stage lacks its last layer, so its first loss fails while its neighbour waits for a gradient."""
    train = run.train
    monkeypatch.setattr(run, "train", lambda job, checked: train(replace(job, sizes=(5, 4)), checked))
    assert run.main(["--stages", "2", "--steps", "2", "--out", str(tmp_path)]) == 1
    said = capsys.readouterr().err
    assert said.startswith("error: rank 1 failed: ") and said.count("\n") == 1


@pytest.mark.exhaustive
@pytest.mark.parametrize("task", ["gpt2", "digits"])
def test_a_training_that_diverges_is_no_success(task, tmp_path, capsys):
    """Seen to fail: exit code 0, and "weights bit for bit equal", since NaN is like NaN."""
    words = f"--stages 2 --steps 4 --micro-batches 2 --learning-rate 1e5 --task {task} --compare --out"
    assert run.main([*words.split(), str(tmp_path)]) == 1
    report = json.loads((tmp_path / "report.json").read_text())
    said = capsys.readouterr()
    assert said.err == f"error: {report['diverged']}\n" and "bit for bit" not in said.out
    assert report["diverged"].startswith("the training diverged: ") and report["losses"]["1f1b"][-1] is None


@pytest.mark.exhaustive
def test_a_row_of_a_training_that_diverged_says_so(tmp_path, monkeypatch, capsys):
    """Seen to fail: NaN ended the measurement in a traceback after the training."""
    words = "--stages 1 --steps 4 --learning-rate 1e5 --compare --task digits --schedule pipedream"
    monkeypatch.setattr(measure, "CASES", {"equal": [words]})
    assert measure.main(["--rows", str(tmp_path / "rows.jsonl")]) == 0
    assert "| diverged |" in capsys.readouterr().out


def test_a_plan_starts_no_process(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(run, "train", lambda *_: pytest.fail("a process"))
    assert run.main(["--schedule", "zb-h1", "--plan-only", "--out", str(tmp_path)]) == 0
    report = json.loads((tmp_path / "report.json").read_text())
    assert report["bubble_planned"] == pytest.approx(1 / 9) and report["bubble_measured"] is None
    assert (tmp_path / "timeline.png").exists() and not (tmp_path / "curves.png").exists()
    assert "11.1% planned" in capsys.readouterr().out
