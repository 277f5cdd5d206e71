"""The command that is to use a GPU's few minutes well: it must not fail there for a reason that could be seen here.

Every section runs on the CPU with tiny shapes, in this process, by the function that a job's process calls; one job
goes the whole way, command and process. What ends a job, and what must not end the others, is in
test_acceptance_jobs.py.
"""

import dataclasses
import importlib
import json
import os
import time
from collections.abc import Collection
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from experiments.gpu_acceptance import __main__ as program
from experiments.gpu_acceptance import (
    bitwise,
    denominator,
    element_wise,
    layouts,
    life,
    memory,
    overlap,
    plans,
    timeline,
    training,
)
from experiments.gpu_acceptance.jobs import JOBS, Job
from experiments.harness import child, measured, rows
from experiments.harness.at_peak import differences, live_at_peak, tape_of_history
from experiments.harness.child import Setting
from lowmem.core.kernels import Kernels
from lowmem.cudasim import roofline
from lowmem.cudasim.gpus import CARDS
from lowmem.cudasim.tape import under_cap
from lowmem.models.build import build_model
from lowmem.planning.simulated_step import cpu_target, gpu_target
from lowmem.run.cli import parse_arguments
from lowmem.units import GIB, MIB
from runs import python

MACHINE = {"names": {"cpu": "a CPU"}, "versions": {"python": "3"}}


# --- every section, with tiny shapes


IN_THE_DRY_RUN = (  # one job for each function and for each kind of it; two cards: tests/cuda/test_ranks.py
    *("correctness/life", "correctness/kernels", "correctness/bitwise", "plans/step", "levers/step"),
    *("train/large exact", "train/xl 8-bit"),
    *("denominator/large", "memory/lowmem, small", "memory/plain", "peers/gpt2-large lowmem"),
    "unified memory/gpt2-xl",
)


@pytest.fixture(scope="module")
def kernels_rows(tmp_path_factory) -> Path:
    """The folder of rows of the job "correctness/kernels", which takes a hundredth of the time of all."""
    folder = tmp_path_factory.mktemp("dry_run")
    run_here(["correctness/kernels"], folder)
    return folder


@pytest.fixture(scope="module")
def dry_run(kernels_rows) -> tuple[Path, list[dict]]:
    """The folder of rows that all these jobs leave, and the rows."""
    run_here(set(IN_THE_DRY_RUN) - {"correctness/kernels"}, kernels_rows)
    return kernels_rows, rows.read(kernels_rows / "rows.jsonl")


def run_here(names: Collection[str], folder: Path) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.nn.Module, "compile", lambda *_, **__: None)  # what Dynamo costs is seconds
        for job in JOBS:
            if job.full_name in names:
                assert in_this_process(job, folder) == 0, rows.read(folder / "rows.jsonl")[-1]


def in_this_process(job: Job, folder: Path) -> int:
    """Runs a dry `job` as its own process would; returns the exit code."""
    shared = {"commit": None, "device": "a CPU", "versions": MACHINE["versions"], "dry_run": True, "stand_in": False}
    scratch = folder / "scratch" / str(time.monotonic_ns())
    scratch.mkdir(parents=True)
    return child.run(program.task_of(job, folder / "rows.jsonl", scratch, shared | program.of_job(job, True), "cpu"))


@pytest.mark.exhaustive
def test_every_section_leaves_valid_rows(dry_run):
    folder, found = dry_run
    assert {name.split("/")[0] for name in IN_THE_DRY_RUN} == {job.section for job in JOBS}
    for row in found:
        assert tuple(row) == rows.KEYS
        assert row["ok"] and row["dry_run"] and row["error"] is None, row
        assert row["seconds"] >= 0 and row["date"].endswith("+00:00")
    assert {row["section"] + "/" + row["name"] for row in found} >= set(IN_THE_DRY_RUN)


@pytest.mark.exhaustive
def test_a_training_row_has_speed_and_peaks_beside_the_plans(dry_run):
    folder, found = dry_run
    row = next(row for row in found if row["name"] == "large exact")
    assert row["command"] == "python3 -m experiments.gpu_acceptance --only 'train/large exact' --dry-run"
    assert row["caps"] == {"gpu_bytes": 11 * GIB, "ram_bytes": None}
    values = row["values"]
    assert values["sequences_per_second"] > 0 and row["checks"]["the loss falls"]
    assert values["ram_peak_bytes_error"] == values["predicted_ram_peak_bytes"] / values["ram_peak_bytes"] - 1
    assert values["choice"]["state_bits"] == 32 and "train_gpt2_large.py" in values["script"]
    first, whole = [row["values"] for row in found if row["name"] == "large exact: run"]
    assert len(whole["losses"]) == 2 and whole["report"]["plan"]["choice"] == values["choice"]
    assert [part["complete"] for part in (first, whole)] == [False, True]
    assert all((part["steps"], part["of_steps"]) == (2, 2) for part in (first, whole))
    assert first["step_seconds"] == first["step_ms"][1] / 1000 and first["ram_peak_bytes"] <= whole["ram_peak_bytes"]
    ends = {"model/model.safetensors", "checkpoints/step-00000002/state.json"}
    assert all(list(folder.glob(f"scratch/*/run/{end}")) for end in ends), "saved and exported, as by a user"
    eight = next(row for row in found if row["name"] == "xl 8-bit")
    assert eight["values"]["choice"]["state_bits"] == 8 and eight["checks"]["ram_peak_bytes under the cap"]


@pytest.mark.exhaustive
def test_a_runs_life_is_compared_bit_for_bit_and_its_verdict_is_a_row(dry_run):
    _, found = dry_run
    last = next(row for row in found if row["name"] == "life")
    assert last["checks"] == {"undisturbed": True, "killed": True, "out of memory": True}
    cases = {row["name"].split(": ")[1]: row for row in found if row["name"].startswith("life: ")}
    assert cases["undisturbed"]["checks"]["and is what was trained"]
    assert (
        cases["killed"]["values"]["checkpoints_before"] == ["step-00000002"] and cases["killed"]["checks"]["was killed"]
    )
    assert len(cases["out of memory"]["values"]["measures"]) == life.TIMES_OUT_OF_MEMORY
    assert all(cases[name]["checks"]["every bit equal"] for name in ("killed", "out of memory"))


def test_runs_that_differ_in_a_bit_or_are_not_there_are_found(tmp_path):
    for name, byte in (("one", b"1"), ("same", b"1"), ("other", b"2")):
        (tmp_path / name / "model").mkdir(parents=True)
        (tmp_path / name / "model/model.safetensors").write_bytes(byte)
        (tmp_path / name / "metrics.jsonl").write_text('{"step": 1, "loss": 2.5, "step_ms": ' + f"{ord(byte)}}}\n")
    assert life.differences(tmp_path / "one", tmp_path / "same") == []
    assert life.differences(tmp_path / "one", tmp_path / "other") == ["model/model.safetensors"]
    (tmp_path / "same/metrics.jsonl").write_text('{"step": 1, "loss": 2.6}\n')
    assert life.differences(tmp_path / "one", tmp_path / "same") == ["row 1"]
    assert life.differences(tmp_path / "one", tmp_path / "none") == ["model/model.safetensors", "row 1"]
    assert life.differences(tmp_path / "none", tmp_path / "none") == ["there is nothing to compare"]


@pytest.mark.exhaustive
def test_the_updates_cost_and_a_timeline_lie_beside_the_rows(dry_run):
    folder, found = dry_run
    values = next(row["values"] for row in found if row["name"] == "large exact: update")
    measured = values["step_seconds_with_update"] / values["step_seconds_without_update"] - 1
    assert values["update_adds"] == measured and values["streamed_bytes"] == 8 * 862_976  # m and v of a padded demo
    recorded = next(row["values"] for row in found if row["name"] == "large exact: timeline")
    assert recorded["recorded"]["compute_busy_seconds"] > 0
    (written,) = json.loads((folder / recorded["file"]).read_text())
    assert max(written["panels"]["the whole step"]["busy"]["compute"]) == 1
    assert (folder / recorded["picture"]).read_bytes().startswith(b"\x89PNG")


def test_copies_are_timed_in_both_directions_with_an_idle_and_a_busy_cpu(kernels_rows):
    found = rows.read(kernels_rows / "rows.jsonl")
    values = next(row["values"] for row in found if row["name"] == "kernels: host memory")
    for name in ("registered", "registered_busy", "pageable"):
        assert all(values[f"{name}_{way}_gib_per_second"] > 0 for way in ("in", "out", "both"))


@pytest.mark.parametrize(("name", "bytes_per_number"), [
    ("normalize", 6), ("normalize_backward", 10), ("gated", 6), ("gated_backward", 12), ("drop", 10), ("rotate", 4),
    ("cross_entropy", 4), ("adamw", 28),
])  # fmt: skip
def test_a_large_element_wise_kernel_is_predicted_at_the_speed_of_memory(name, bytes_per_number):
    operator = getattr(torch.ops.lowmem, name).default
    arguments = element_wise.arguments_of(name, size := element_wise.SIZES[-1], torch.bfloat16, torch.device("meta"))
    card, result = CARDS["rtx3060"], operator(*arguments)
    seconds = roofline.operation_seconds(card, operator, arguments, {}, result)
    speed = card.sustained_bytes_per_second
    assert seconds == pytest.approx(bytes_per_number * size / speed, rel=0.04)


@pytest.mark.exhaustive
def test_plans_rows_compare_peaks_caps_and_choices(dry_run):
    _, found = dry_run
    peaks = [row["values"] for row in found if row["name"].startswith("step: tiny")]
    assert len(peaks) == 3, "two layouts, and the first one again"
    for values in peaks:
        assert abs(values["allocated_error"]) < 0.002 and values["measured_step_seconds"] > 0
    diagnosed = [values for values in peaks if "at_measured_peak" in values]
    assert len(diagnosed) == 1 and diagnosed[0]["at_simulated_peak"][0][3] == "resident_states"
    assert diagnosed[0]["replayed_reserved_bytes"] == diagnosed[0]["measured_reserved_peak_bytes"]
    cap = next(row["values"] for row in found if row["name"].startswith("step: smallest cap"))
    assert cap["trials"] >= 1 and cap["measured_fails_bytes"] < cap["measured_completes_bytes"]
    chosen = next(row["values"] for row in found if (row["section"], row["name"]) == ("plans", "step"))
    assert chosen["completed"] == chosen["choices"] == 3 and chosen["seconds_over_fastest"] >= 1


@pytest.mark.exhaustive
def test_denominator_and_memory_rows_say_what_tables_need(dry_run):
    _, found = dry_run
    best = next(row["values"] for row in found if row["section"] == "denominator" and row["name"] == "large")
    searched = [row["values"] for row in found if row["name"].startswith("large: gpt2-large, eager")]
    assert [values["micro_batch"] for values in searched] == [1, 2]
    assert best["gpt2-large, eager"]["sequences_per_second"] == max(v["sequences_per_second"] for v in searched)
    assert best["gpt2-large, compiled"]["micro_batch"] == best["gpt2-large, eager"]["micro_batch"]
    for name in ("lowmem, small", "plain"):
        models = [row["values"] for row in found if row["name"].startswith(f"{name}: ")]
        assert [values["model"] for values in models] == list(memory.TINY)
        for values in models:
            predicted, measured = (values[f"{kind}_allocated_peak_bytes"] for kind in ("predicted", "measured"))
            assert values["allocated_error"] == predicted / measured - 1
            assert sum(values["predicted_at_peak"].values()) == predicted
        summed = next(row["values"] for row in found if row["name"] == name)
        assert summed["models"] == 2 and summed["lowest_error"] <= summed["highest_error"]


@pytest.mark.exhaustive
def test_the_command_runs_a_job_in_its_own_process(tmp_path):
    words = ("--dry-run", "--out", str(tmp_path), "--only", "correctness/kernels")
    done = python("-m", "experiments.gpu_acceptance", *words)
    assert done.returncode == 0, done.stdout + done.stderr
    found = rows.read(tmp_path / "rows.jsonl")
    assert len(done.stdout.splitlines()) == len(found), "a line per row"
    assert found[-1]["name"] == "kernels" and found[-1]["ok"] and found[-1]["versions"]["torch"]
    assert os.listdir(tmp_path) == ["rows.jsonl"]


def test_the_jobs_can_be_called_as_they_stand():
    assert len({job.full_name for job in JOBS}) == len(JOBS)
    for job in JOBS:
        assert callable(child.named(job.target)) and job.seconds <= 600
    for job in (job for job in JOBS if job.section == "train"):
        script = importlib.import_module(job.options["script"].removesuffix(".py"))
        settings = parse_arguments([*training.FULL, *training.ALWAYS, *job.options["more"]], script.SETTINGS)
        assert settings.model == f"gpt2-{job.name.split()[0]}" and settings.steps == 4
        assert (settings.optimizer == "adamw8bit") == ("8-bit" in job.name)
        assert (settings.clip_norm is None) == ("no clip" in job.name)
        assert (job.ram_gib == 16) == job.name.startswith("xl")


def test_what_this_machine_lacks_is_a_row_and_no_crash(tmp_path, monkeypatch):
    monkeypatch.setattr(training, "find_spec", lambda name: None)
    job = next(job for job in JOBS if job.name == "large 8-bit")
    assert in_this_process(job, tmp_path) == child.A_CHECK_FAILED
    (row,) = rows.read(tmp_path / "rows.jsonl")
    assert row["error"] == "bitsandbytes is not installed" and not row["ok"] and row["output"] is None


# --- plans: what the dry run cannot show, for there everything holds


@pytest.fixture
def recorded(tmp_path) -> tuple[Setting, list[tuple[str, dict, dict]]]:
    """A setting that is no dry run, on the CPU, and the rows that are recorded with it."""
    found = []

    def record(detail: str, values: dict, checks: dict[str, bool]) -> bool:
        found.append((detail, values, checks))
        return all(checks.values())

    return Setting("cpu", False, None, None, tmp_path, record), found


@pytest.mark.parametrize(("allocated", "reserved", "missed"), [
    (0.01, 0.03, []), (-0.005, -0.005, []), (0.011, 0.0, ["allocated within 1%"]), (0.0, 0.031, ["reserved within 3%"]),
    (-0.006, 0.0, ["not more than 0.5% below"]), (0.0, -0.006, ["not more than 0.5% below"]),
    (-0.02, -0.04, ["allocated within 1%", "reserved within 3%", "not more than 0.5% below"]),
])  # fmt: skip
def test_the_bars_are_those_of_the_issue(allocated, reserved, missed):
    assert [name for name, met in plans.bars(allocated, reserved).items() if not met] == missed


@pytest.mark.exhaustive
def test_a_prediction_that_is_off_fails_and_says_what_lay_in_memory(recorded, monkeypatch):
    setting, found = recorded
    really = plans.measure

    def measure(*arguments, **keywords):
        """2% more than there is."""
        found = really(*arguments, **keywords)
        return dataclasses.replace(found, allocated_peak_bytes=int(found.allocated_peak_bytes * 1.02))

    monkeypatch.setattr(plans, "measure", measure)
    monkeypatch.setattr(plans, "GRID", layouts.DRY_GRID[1:])
    monkeypatch.setattr(plans, "CAPPED", ())
    result = plans.check_peaks(setting, torch.device("cpu"), cpu_target())
    name, values, checks = found[0]
    assert values["allocated_error"] == pytest.approx(1 / 1.02 - 1, abs=1e-3)
    assert not checks["allocated within 1%"] and not checks["not more than 0.5% below"]
    assert values["at_measured_peak"] and values["at_simulated_peak"]
    assert not result.checks[name] and not result.checks["median of allocated within 0.5%"]
    assert result.values["lowest_error"] == values["allocated_error"]


@pytest.mark.parametrize(("real_mib", "missed"), [
    (0, []), (-60, []), (-70, ["nothing that runs is refused beyond the margin"]),
    (70, ["what a plan calls fitting completes", "nothing that fails is called fitting within the margin"]),
])  # fmt: skip
def test_the_smallest_cap_is_found_and_compared(recorded, monkeypatch, real_mib, missed):
    """The simulation says 1,000 MiB; really it is that and `real_mib`."""
    setting, _ = recorded
    real = (1000 + real_mib) * MIB

    def measure(layout, device, target, limit_bytes=None, **_):
        taken = measured.Measured(real - 100 * MIB, real + 30 * MIB, measured.Ran(1.0, 2))
        return taken if limit_bytes is None or limit_bytes >= real else None

    monkeypatch.setattr(plans, "measure", measure)
    monkeypatch.setattr(plans.Simulations, "smallest_cap_bytes", lambda *_: 1000 * MIB)
    result = plans.smallest_cap(setting, layouts.DRY_GRID[0], torch.device("cpu"), cpu_target())
    values, checks = result.values, result.checks
    assert values["measured_fails_bytes"] < real <= values["measured_completes_bytes"]
    assert values["measured_completes_bytes"] - values["measured_fails_bytes"] <= plans.RESOLUTION_BYTES
    assert values["difference_bytes"] == 1000 * MIB - values["measured_completes_bytes"]
    assert [name for name, holds in checks.items() if not holds] == missed


def test_a_history_is_read_as_torch_documents_it():
    def entry(action, address, size, *frames):
        return {"action": action, "addr": address, "size": size, "stream": 0, "frames": list(frames)}

    inside = {"filename": f"{Path(torch.__file__).parent}/nn/functional.py", "name": "linear", "line": 1}
    block = {"filename": "/project/lowmem/core/decoder.py", "name": "block", "line": 7}
    entries = [
        entry("segment_map", 0, 20 * MIB),
        entry("alloc", 10, 1000, inside, block),
        entry("alloc", 20, 3 * MIB),
        entry("free_requested", 10, 1000),
        entry("free_completed", 10, 1000),
        entry("alloc", 10, 2 * MIB, block),
        entry("free_requested", 99, 512),  # of before
        entry("free_requested", 20, 3 * MIB),
        entry("alloc", 30, 2 * MIB),  # while 20 waits for another stream, which does not count as allocated
    ]
    tape = tape_of_history(entries)
    assert live_at_peak(tape) == {(3 * MIB, "no Python frame"): 1, (2 * MIB, "block (decoder.py:7)"): 1}
    assert under_cap(tape).allocated_peak_bytes == 5 * MIB

    found = differences(tape, tape_of_history(entries[:5]))  # as if what follows had not been foreseen
    assert found["sizes_that_differ"] == [[2 * MIB, 1, 0], [1024, 0, 1]]
    assert found["at_measured_peak"][0] == [3 * MIB, 1, 3 * MIB, "no Python frame"]
    assert found["replayed_reserved_bytes"] == 20 * MIB + 2 * MIB


# --- limits and precisions


def test_a_run_announces_its_planned_seconds_before_its_steps_and_before_its_end(recorded, monkeypatch):
    setting, found = recorded
    planned = []
    monkeypatch.setattr(Setting, "expect", lambda self, seconds: planned.append(seconds))
    settings, log = SimpleNamespace(steps=4, batch=64), SimpleNamespace(rows=[])
    predicted = dict.fromkeys((*training.PEAKS, "step_seconds"), 40.0)
    plan = SimpleNamespace(
        step_seconds=40.0, parameters=1_557_611_200,
        to_dict=lambda: {"predicted": predicted, "choice": {}, "tokens_per_step": 65536},
    )  # fmt: skip
    watched = training._Watched(setting, {}, {"gpu": None, "ram": None})
    question = SimpleNamespace(settings=settings)
    budget = SimpleNamespace(device=torch.device("cpu"))
    watched.kept |= {"plan": plan, "question": question, "log": log, "budget": budget}
    watched.planned()
    write = watched.step(lambda log, row: log.rows.append(row))
    for number in range(1, 5):
        row = {"step": number, "loss": 5.0 - number, "step_ms": 40_000.0} | dict.fromkeys(training.PEAKS, number)
        write(log, row)
        assert len(found) == (number >= 2), "the row is there after the second step, and only then"
    steps, end = planned
    assert steps > 3 * 40 and end > 3 * 40 + 28e9 / training.DISK_BYTES_PER_SECOND
    detail, values, checks = found[0]
    assert detail == "run" and (values["complete"], values["steps"], values["of_steps"]) == (False, 2, 4)
    assert values["step_seconds"] == 40 and values["ram_peak_bytes"] == 2 and checks == {"the loss falls": True}
    values, checks = watched.outcome(1, setting.scratch)
    assert not values["complete"] and values["steps"] == 4 and checks["exit code 0"] is False, "ended before its report"


@pytest.mark.parametrize(("capability", "half"), [((7, 5), "fp16"), ((8, 0), "bf16"), ((8, 6), "bf16")])
def test_bf16_is_left_out_where_a_card_has_none(monkeypatch, capability, half):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    device = torch.device("cuda", 0)
    assert measured.sixteen_bit(device) == half
    assert ("bf16" in measured.precisions(device)) == (half == "bf16") and "fp16" in measured.precisions(device)
    precisions = {precision for precision, *_ in bitwise.arrangements(device, few=False)}
    assert precisions == {half, "fp16"}
    grid = plans.on_card(layouts.GRID, device)
    assert {layout.precision for layout in grid} == {half, "fp16", "fp32"} and len(grid) == len(layouts.GRID)


# --- what the update adds, and where copies lie


def event(name: str, start: int, duration: int) -> SimpleNamespace:
    """Imitates the profiler's events of a card."""
    return SimpleNamespace(name=lambda: name, start_ns=lambda: start, duration_ns=lambda: duration)


def test_a_cards_events_become_lanes_and_what_is_hidden_is_counted():
    events = [
        event("Memcpy HtoD (Pinned -> Device)", 1_000, 4_000),
        event("Memcpy HtoD (Pinned -> Device)", 5_000, 1_000),
        event("Memcpy DtoH (Device -> Pinned)", 4_000, 4_000),
        event("void adamw_kernel", 3_000, 2_000),
        event("Memset (Device)", 9_000, 1_000),
        event("Memcpy DtoD (Device -> Device)", 10_000, 1_000),
        event("Stream Wait Event", 1_000, 9_000),
    ]
    found = timeline.timeline_of(events, streamed_bytes=3 * GIB)
    assert found.lanes["copies in"] == [(0.0, 5e-6)]
    assert found.lanes["compute"] == [(2e-6, 4e-6), (8e-6, 10e-6)]
    figures = found.figures()
    assert figures["step_seconds"] == pytest.approx(10e-6) and figures["streamed_gib_each_way"] == 3
    assert figures["copying_seconds"] == pytest.approx(7e-6)  # 1 to 8, in and out at once for a while
    assert figures["not_hidden_seconds"] == pytest.approx(5e-6) and figures["hidden_share"] == pytest.approx(2 / 7)
    shares = timeline.busy_shares(found.lanes["compute"], 0.0, 10e-6, parts=5)
    assert shares == pytest.approx([0, 1, 0, 0, 1])
    empty = timeline.timeline_of([], 0)
    assert empty.figures()["hidden_share"] is None


def test_a_simulated_timeline_waits_as_long_as_the_plan_says(tmp_path):
    card = dataclasses.replace(CARDS["rtx3060"], bus_bytes_per_second=2e8)  # so slow that copies cannot hide
    target, layout = gpu_target(card), dataclasses.replace(layouts.DRY_GRID[0], states="streamed")
    step = plans.Simulated.of(layout, target).step
    found = timeline.simulated(layout.decoder(target.fused_kernels), layout.case(4), target)
    assert found.seconds == step.seconds and found.streamed_bytes == step.streamed_bytes
    figures = found.figures()
    assert figures["step_seconds"] - figures["compute_busy_seconds"] == pytest.approx(step.waiting_seconds)
    assert 0 < step.waiting_seconds < figures["copying_seconds"] and 0 < figures["hidden_share"] < 1
    assert figures["copies_in_seconds"] == pytest.approx(found.streamed_bytes / card.copy_bytes_per_second)
    contents = [timeline.content(found), timeline.content(timeline.timeline_of([event("kernel", 0, 9)], 0))]
    assert [len(content["panels"]) for content in contents] == [2, 1]
    twice = [event("long", 0, 5_000), *(event("short", start, 2_000) for start in (5_000, 7_000))]
    more = timeline.timeline_of([*twice, event("Stream Wait Event", 0, 90_000)], 0)  # a wait is no work
    kernels = timeline.content(more)["kernels"]
    assert [(name, calls) for name, _, calls in kernels] == [("long", 1), ("short", 2)]
    assert kernels[1][1] == pytest.approx(4e-6)
    timeline.draw(contents, "two steps", tmp_path / "picture.png")
    assert (tmp_path / "picture.png").stat().st_size > 10_000


def test_a_step_without_its_update_copies_nothing_changes_nothing_and_drops_its_gradients():
    layout = dataclasses.replace(layouts.DRY_GRID[0], states="streamed")
    decoder = layout.decoder(Kernels.NONE)
    case = layout.case(len(decoder.units))
    step = measured.random_step(decoder, case, torch.device("cpu"))
    store = step.store
    before = [part.working.clone() for part in store.parts]
    with overlap._update_left_out(step):
        results = [step(layout.tokens(), 0, 1e-3) for _ in range(3)]
        step.flush()
    assert len({result.grad_norm for result in results}) == 1, "the same weights, and no gradient of the step before"
    assert all(torch.equal(part.working, old) for part, old in zip(store.parts, before, strict=True))
    trained = overlap.Trained(None, None, store, step, layout.tokens())
    values, _ = overlap.update_cost(trained, pairs=1)
    assert not torch.equal(store.parts[0].working, before[0]), "and those as trained do update"
    assert values["streamed_bytes"] == 8 * sum(part.working.numel() for part in store.parts)


# --- denominator and memory: what the dry run cannot show


@pytest.mark.quick(2)
@pytest.mark.parametrize(("speeds", "tried", "best"), [
    ([1.0, 1.9, 3.5, 5.0, 6.0, 6.5], 6, 32), ([1.0, 3.0, 2.9, 2.8, 9.0], 4, 2), ([1.0, 3.0, 2.9, 3.1, 3.0, 2.9], 6, 8),
    ([1.0, 2.0, None], 3, 2), ([None], 1, None),
])  # fmt: skip
def test_the_search_for_a_micro_batch_ends_with_memory_or_falling_speed(recorded, monkeypatch, speeds, tried, best):
    setting, found = recorded

    def timed(setting, device, model, micro_batch):
        speed = speeds[micro_batch.bit_length() - 1]
        if speed is None:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return {"micro_batch": micro_batch, "sequences_per_second": speed}

    monkeypatch.setattr(denominator, "_stock_model", lambda *_: object())
    monkeypatch.setattr(denominator, "_timed", timed)
    result = denominator._search(setting, torch.device("cpu"), "gpt2-large")
    assert (result and result["micro_batch"]) == best
    assert [values["fits"] for _, values, _ in found] == [speed is not None for speed in speeds[:tried]]


def test_a_model_that_does_not_compile_says_why_and_its_eager_rows_stay(recorded, monkeypatch):
    def fails(*_, **__):
        raise RuntimeError("Failed to find C compiler.\nPlease specify via CC")

    monkeypatch.setattr(torch.nn.Module, "compile", fails)
    setting, found = recorded
    setting = dataclasses.replace(setting, dry_run=True)
    result = denominator.measure(setting, ["gpt2-large"])
    assert result.values["gpt2-large, compiled"]["error"] == "RuntimeError: Failed to find C compiler."
    assert result.checks == {"gpt2-large: compiles": False}
    assert [checks for _, _, checks in found] == [{}, {}, {"compiles": False}]


def test_every_model_of_the_memory_jobs_has_a_config_without_a_network(monkeypatch):
    monkeypatch.setattr(memory, "load_config", None)
    names = {name for job in JOBS if job.section == "memory" for name in job.options["models"]}
    parameters = {"pythia-410m": 405_334_016, "pythia-1.4b": 1_414_647_808, "qwen3-0.6b": 596_049_920}
    assert names >= set(parameters) == set(memory.MORE)
    for name in names:
        config = memory._config(name)
        if name in parameters:  # tests/experiments/test_memory_estimation.py counts the others
            assert sum(p.numel() for p in build_model(config).parameters()) == parameters[name]


@pytest.mark.exhaustive
def test_a_model_without_a_plan_and_one_that_runs_out_of_memory_are_rows(recorded, monkeypatch):
    setting, found = recorded
    setting = dataclasses.replace(setting, dry_run=True, gpu_limit_bytes=64 * MIB)  # less than CUDA's workspaces
    assert memory.lowmem(setting, []).values["models"] == 0
    assert "does not fit" in found[0][1]["not_measured"] and found[0][2] == {}
    monkeypatch.setattr(memory, "measure", lambda *_: None)
    (setting.scratch / "other").mkdir()
    memory.plain(dataclasses.replace(setting, scratch=setting.scratch / "other"), [])
    assert found[2][1]["completes"] is False and "measured_allocated_peak_bytes" not in found[2][1]
