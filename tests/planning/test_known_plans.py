"""A plan that was made before is the plan that would be made; what it follows from is part of the question.

Seen to fail: with a setting not marked PLAN, with the process's growth not added.
"""

import dataclasses

import pytest
from transformers import GPT2Config

from lowmem.cudasim.gpus import CARDS
from lowmem.planning.known_plans import Question
from lowmem.planning.planner import make_plan
from lowmem.planning.ram import Process
from lowmem.settings import PLAN, Settings, marked
from lowmem.units import GIB, MIB

CONFIG = GPT2Config(n_layer=2, n_embd=256, n_head=4, vocab_size=500, n_positions=64)
SETTINGS = Settings(model="small", init="random", seq=64, batch=4, gpu_limit_bytes=GIB, ram_limit_bytes=4 * GIB)
SHOWN = {"keep_last", "save_every", "export_dtype"}  # in what a plan says, not in what it follows from


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.setenv("LOWMEM_PLANS", str(tmp_path))
    return tmp_path


def question(*, process: Process | None = None, free: int | None = None, config=CONFIG, card="rtx3090", **changed):
    settings = dataclasses.replace(SETTINGS, **changed)
    return Question(settings, config, "cuda", "bf16", CARDS[card], free, True, process)


def never(*_):
    raise AssertionError("asked anew")


def test_the_same_question_is_answered_from_a_file_with_the_same_plan(folder):
    made = question().answer(make_plan)
    assert len(list(folder.iterdir())) == 1
    known = question(data="else", steps=7, keep_last=1).answer(never)
    assert known.settings.keep_last == 1 and known.card is CARDS["rtx3090"]
    assert dataclasses.replace(known, settings=made.settings) == made
    assert known.to_dict()["disk"]["checkpoints"] * 2 == made.to_dict()["disk"]["checkpoints"]


@pytest.mark.parametrize(
    "other",
    [
        *({"seq": 32}, {"batch": 8}, {"optimizer": "sgd"}, {"gpu_limit_bytes": 2 * GIB}, {"clip_norm": None}),
        *({"card": "a100"}, {"config": GPT2Config(**CONFIG.to_dict() | {"n_layer": 3})}),
    ],
    ids=str,
)
def test_another_question_is_asked(other):
    question().answer(make_plan)
    with pytest.raises(AssertionError, match="asked anew"):
        question(**other).answer(never)


def test_every_setting_that_planning_reads_is_part_of_the_question():
    read = set()

    class Watched(Settings):
        def __getattribute__(self, name):
            read.add(name)
            return super().__getattribute__(name)

    settings = Watched(**dataclasses.asdict(SETTINGS))
    read.clear()
    make_plan(settings, CONFIG, "cuda", "bf16", CARDS["rtx3090"], None, True, Process(GIB, GIB))
    assert {"seq", "batch", "model"} <= read
    assert read & {item.name for item in dataclasses.fields(Settings)} <= {*marked(Settings(), PLAN)} | SHOWN


def test_a_plan_for_the_ram_that_was_free_counts_until_there_is_room_for_the_faster_one():
    process = Process(GIB, GIB)

    def tight(*arguments):
        plan = make_plan(*arguments)
        return dataclasses.replace(plan, faster_with_ram=(plan.ram_bytes + 500 * MIB, plan.step_seconds / 2))

    def asked(more_mib: int):
        return question(process=process, free=made.ram_bytes - GIB + more_mib * MIB)

    made = question(process=process, free=64 * GIB).answer(tight)
    assert asked(499).answer(never) == made == asked(0).answer(never)
    for more_mib in (-1, 500):
        with pytest.raises(AssertionError, match="asked anew"):
            asked(more_mib).answer(never)


def test_what_the_process_holds_now_is_in_the_plan():
    made = question(process=Process(GIB, GIB + MIB)).answer(make_plan)
    known = question(process=Process(GIB + 100 * MIB, GIB + 200 * MIB)).answer(never)
    assert known.ram_phases["prepare"] == GIB + 200 * MIB
    for phase in ("load", "train", "export"):
        assert known.ram_phases[phase] == made.ram_phases[phase] + 100 * MIB
    assert known.layout == made.layout and known.timeline == made.timeline


def test_a_plan_that_no_longer_fits_is_made_anew():
    question(process=Process(GIB, GIB), free=8 * GIB).answer(make_plan)
    question(process=Process(GIB, GIB), free=8 * GIB).answer(never)
    for held, free in ((5 * GIB, 8 * GIB), (GIB, MIB)):
        with pytest.raises(AssertionError, match="asked anew"):
            question(process=Process(held, held), free=free).answer(never)


def test_files_that_are_damaged_or_cannot_be_written_cost_a_plan_and_nothing_else(folder, monkeypatch):
    made = question().answer(make_plan)
    (path,) = folder.iterdir()
    for content in (b"", b"[]", b"{}", path.read_bytes()[:-200], b"\xff"):
        path.write_bytes(content)
        assert question().answer(make_plan) == made
    monkeypatch.setenv("LOWMEM_PLANS", "/dev/null/no/folder")
    assert question().answer(make_plan) == made
    monkeypatch.setenv("LOWMEM_PLANS", "off")
    assert question().answer(lambda *_: made) is made


def test_plans_for_the_cpu_are_not_kept(folder):
    Question(SETTINGS, CONFIG, "cpu", "fp32", None, process=Process(GIB, GIB)).answer(make_plan)
    assert list(folder.iterdir()) == []
