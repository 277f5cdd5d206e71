"""Tests what plans say, what they take from a card and from the settings, and how they refuse. The models are small.

test_search.py tests which layout is chosen. test_simulated_step.py tests how much a layout takes. test_scripts.py plans
the real shapes with the scripts.
"""

import dataclasses
import json
import re
from contextlib import suppress
from itertools import product
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import GPT2Config, LlamaConfig

from lowmem.core.layout import Fate, Layout
from lowmem.cudasim.gpus import CARDS
from lowmem.cudasim.tape import Chunk
from lowmem.errors import InputError, PlanError
from lowmem.limits import CONTEXT_BYTES, OVERSHOOT_BYTES, ram_now_bytes
from lowmem.models.build import load_config
from lowmem.planning import cpu_plan, gpu_plan, planner, simulations
from lowmem.planning.answer import answer
from lowmem.planning.caps import MARGIN_BYTES, room_under, smallest_cap
from lowmem.planning.choices import choices_by_home, open_choices, step_case
from lowmem.planning.plan import Plan, kept_in_words
from lowmem.planning.planner import make_plan
from lowmem.planning.question import Question, card_for, precision_and_card
from lowmem.planning.ram import CUDA_PROCESS_BYTES, Process
from lowmem.planning.simulated_step import record_step
from lowmem.planning.simulations import Simulations
from lowmem.run import plan_command
from lowmem.settings import Settings
from lowmem.units import GIB, MIB, format_seconds, format_size, parse_size
from runs import ROOT, simulations_shared

CONFIG = GPT2Config(n_layer=4, n_embd=512, n_head=8, vocab_size=5_000, n_positions=256)
SMALL = Settings(model="small", init="random", seq=256, batch=8, gpu_limit_bytes=GIB)
ONLY_RAM = {"gpu_limit_bytes": None, "ram_limit_bytes": GIB}
PARAMETERS = (5_000 + 256) * 512 + 4 * (12 * 512**2 + 13 * 512) + 2 * 512


@pytest.fixture(scope="module", autouse=True)
def shared():
    with simulations_shared(gpu_plan, cpu_plan, planner):
        yield


def plan_for(
    device: str = "cuda", precision: str = "bf16", ram_free_bytes=None, card="rtx3090", config=CONFIG, **changed
) -> Plan:
    settings = dataclasses.replace(SMALL, **changed)
    chosen = CARDS[card] if device == "cuda" else None
    return make_plan(Question(settings, config, precision, chosen, ram_free_bytes))


def refused(*place: str, match: str | None = None, **changed) -> PlanError:
    with pytest.raises(PlanError, match=match) as caught:
        plan_for(*place, **changed)
    return caught.value


def caps_named(error: PlanError) -> dict[str, int]:
    smallest = str(error).split(" It fits with ")[0]
    named = dict(re.findall(r"--((?:gpu|ram)-limit) (\d+MiB)", smallest))
    return {name.replace("-", "_") + "_bytes": parse_size(size) for name, size in named.items()}


# --- what a plan says


def test_plan_json_says_what_was_planned_and_what_that_depends_on():
    plan = plan_for(ram_limit_bytes=16 * GIB)
    found = plan.to_dict()
    assert json.loads(json.dumps(found)) == found
    assert found["limits"] == {"gpu_bytes": GIB, "ram_bytes": 16 * GIB}
    assert (found["fits"], found["parameters"], found["tokens_per_step"]) == (True, PARAMETERS, 2_048)
    assert found["choice"]["states_on_gpu"] + found["choice"]["streamed_units"] == 6
    predicted = found["predicted"]
    assert sum(found["breakdown"].values()) == predicted["gpu_allocated_peak_bytes"]
    assert predicted["gpu_allocated_peak_bytes"] <= predicted["gpu_reserved_peak_bytes"] <= GIB
    assert predicted["ram_peak_bytes"] == sum(found["ram_breakdown"].values()) >= CUDA_PROCESS_BYTES
    assert predicted["step_seconds"] > 0
    assert found["depends_on"].keys() == {"card", "torch", "transformers"}
    assert (found["depends_on"]["card"], found["depends_on"]["torch"]) == ("rtx3090", torch.__version__)
    described = plan.describe()
    assert f"{PARAMETERS:,} parameters" in described and "cap 1.00 GiB" in described and "on rtx3090" in described


def test_the_plans_table_fits_80_columns_and_docs_plan_says_what_each_of_its_rows_is():
    section = (ROOT / "docs/plan.md").read_text(encoding="utf-8").split("## The table")[1].split("\n## ")[0]
    rows = re.findall(r"^\| (`.*?) \|", section, re.MULTILINE)
    explained = {name for row in rows for name in re.findall(r"`(.+?)`", row)}
    sources = "".join(path.read_text(encoding="utf-8") for path in (ROOT / "lowmem").rglob("*.py"))
    assert all(name in sources or name.replace(" ", "_") in sources for name in explained)
    plans = [
        plan_for(ram_limit_bytes=16 * GIB),
        plan_for(gpu_limit_bytes=310 * MIB),
        plan_for("cpu", "fp32", micro_batch=2),
        plan_for("cpu", "fp32", optimizer="sgd", recompute="on"),
    ]
    for plan in plans:
        lines = plan.describe().splitlines()
        assert max(map(len, lines)) <= 80
        rows = {name.replace("_", " ") for held in (plan.gpu_breakdown, *plan.ram.values()) for name in held}
        rows |= {found[1].strip() for line in lines if (found := re.match(r"  (?:GPU|RAM) ([a-z ]+)  ", line))}
        assert len(rows) > 5 and rows <= explained, rows - explained
    assert len(section.strip().splitlines()) <= 25


@pytest.mark.parametrize("option", [{"boundaries": "streamed", "group": 1}, {"gradients": "streamed", "group": 2}])
def test_the_cpu_has_a_plan_if_only_large_micro_batches_make_the_batch_one_group(option):
    """Seen to fail in a traceback: micro-batches of more than 4,096 tokens were left out before."""
    layout = plan_for("cpu", "fp32", batch=64, **option).layout
    assert (layout.group, layout.group * layout.micro_batch) == (option["group"], 64)


def test_what_is_recomputed_is_said_in_words():
    said = {
        Layout(1, kept=99): "nothing recomputed",
        Layout(1): "all 4 blocks recomputed",
        Layout(1, 1, 2, kept=1): "of 4 blocks 3 recomputed, 2 at a time, 1 recomputed but for their matrix products",
        Layout(1, kept=5): "of 4 blocks 3 recomputed but for their matrix products, 1 kept whole",
    }
    assert {layout: kept_in_words(layout, 4) for layout in said} == said


def test_the_timeline_covers_one_step_and_reaches_the_peak_which_leaves_a_margin_of_the_cap():
    plan = plan_for(gpu_limit_bytes=400 * MIB)
    seconds = [second for second, _, _ in plan.timeline]
    assert seconds == sorted(seconds) and 0 <= seconds[0] and seconds[-1] <= plan.step_seconds
    assert max(allocated for _, allocated, _ in plan.timeline) == plan.gpu_allocated_peak_bytes
    assert plan.gpu_allocated_peak_bytes <= 400 * MIB - MARGIN_BYTES and plan.gpu_reserved_peak_bytes <= 400 * MIB


def test_a_layout_that_completes_only_under_a_smaller_cap_asks_the_allocator_for_that(monkeypatch):
    """A run under the cap itself would run out of memory once, and a plan would say other bytes than its run takes."""
    words = GPT2Config(n_layer=2, n_embd=512, n_head=8, vocab_size=50_000, n_positions=256)
    fixed = {"config": words, "micro_batch": 1, "recompute": "on", "states": "streamed", "group": 1}
    roomy = plan_for(**fixed)
    limit = smallest_cap(roomy.gpu_reserved_peak_bytes)  # closer than the gradient of 100 MB
    assert roomy.allocator_bytes is None is plan_for(**fixed, gpu_limit_bytes=limit).allocator_bytes
    run, fails = Simulations.run, limit - OVERSHOOT_BYTES
    monkeypatch.setattr(gpu_plan, "Simulations", Simulations)  # nothing is shared
    monkeypatch.setattr(Simulations, "run", lambda *given: None if given[2] == fails else run(*given))
    plan = plan_for(**fixed, gpu_limit_bytes=limit)
    assert plan.gpu_reserved_peak_bytes <= plan.allocator_bytes < fails


def test_the_same_plan_is_made_every_time(monkeypatch):
    monkeypatch.setattr(gpu_plan, "Simulations", Simulations)  # nothing is shared
    question = {"gpu_limit_bytes": 400 * MIB, "micro_batch": 2}
    assert plan_for(**question) == plan_for(**question)


@pytest.mark.quick(1)
@pytest.mark.parametrize("changed", [{"optimizer": "sgd"}, {"optimizer": "adamw8bit"}, {"clip_norm": None}])
def test_other_optimizers_are_planned_too(changed):
    plan = plan_for(micro_batch=2, **changed)
    assert plan.to_dict()["choice"]["state_bits"] == {"sgd": 0, "adamw8bit": 8}.get(changed.get("optimizer"), 32)
    exact = plan_for(micro_batch=2)
    assert (plan.gpu_breakdown["resident_states"] < exact.gpu_breakdown["resident_states"]) == ("optimizer" in changed)


# --- what is chosen


@pytest.mark.parametrize(
    "typed",
    [
        {"micro_batch": 2}, {"group": 4}, {"segment_blocks": 3, "recompute": "on"}, {"recompute": "off"},
        {"recompute": "products"},
        {"states": "streamed"}, {"states": "resident"},
    ],
    ids=str,
)  # fmt: skip
def test_what_is_typed_is_what_is_planned(typed):
    plan = plan_for(**typed)
    found = dataclasses.asdict(plan.layout)
    found["recompute"] = "on" if plan.layout.recomputes(plan.blocks) else "off"
    found["states"] = {0: "streamed", 6: "resident"}.get(plan.layout.states_on_gpu)
    if typed == {"recompute": "products"}:
        typed = {"kept": plan.blocks}
    assert {name: found[name] for name in typed} == typed


@pytest.mark.parametrize("card", ["gtx1060-3gb", "rtx3060"])
def test_a_cap_is_at_most_the_cards_memory_without_cudas_context_and_a_higher_one_is_remarked_on(card):
    usable = CARDS[card].memory_bytes - CONTEXT_BYTES
    for limit, planned in ((None, usable), (GIB, GIB), (100 * GIB, usable)):
        plan = plan_for(card=card, precision="fp16", gpu_limit_bytes=limit, micro_batch=2)
        assert plan.gpu_limit_bytes == planned and plan.gpu_reserved_peak_bytes <= planned
        said = f"{card} has {format_size(usable)} for training, less than the 100 GiB of --gpu-limit"
        assert (said in answer(plan)) == (limit == 100 * GIB)


@pytest.mark.parametrize("device", ["cuda", "cpu"])
def test_a_16_bit_residual_stream_is_said_to_do_nothing_in_fp32(device):
    """Seen to fail: it was not said."""
    wanted = {"fp32": True, "bf16": False}
    for precision, said in wanted.items():
        lines = answer(plan_for(device, precision, residual="16bit", micro_batch=2))
        assert ("--residual 16bit does nothing here, because the computation is in fp32" in lines) == said
    assert not any("--residual" in line for line in answer(plan_for(device, "fp32", micro_batch=2)))


def test_a_folder_for_states_that_stays_empty_and_the_rate_of_no_disk_are_said_to_do_nothing(tmp_path):
    """Seen to fail: neither was said."""
    empty, rate = "--states-folder stays empty: no optimizer state has to go there", "--disk-rate does nothing without"
    for more, said in (
        ({}, []),
        ({"states_folder": str(tmp_path)}, [empty]),
        ({"states_folder": str(tmp_path), "states": "disk", "disk_rate_bytes": GIB}, []),
        ({"disk_rate_bytes": GIB}, [f"{rate} --states-folder"]),
    ):
        lines = answer(plan_for(micro_batch=2, **more))
        assert [line for line in lines if line.startswith((empty, rate))] == said


@pytest.mark.parametrize("device", ["cuda", "cpu"])
def test_a_rate_of_no_network_and_a_limit_of_no_gpu_are_said_to_do_nothing(device):
    """Seen to fail: neither was said."""
    lines = answer(plan_for(device, "fp32", micro_batch=2, network_rate_bytes=GIB, gpu_limit_bytes=2 * GIB))
    assert "--network-rate does nothing on one machine" in lines
    assert ("--gpu-limit does nothing on the CPU" in lines) == (device == "cpu")
    lines = answer(plan_for(device, "fp32", micro_batch=2, gpu_limit_bytes=Settings.gpu_limit_bytes))
    assert not any("does nothing" in line for line in lines)


def test_no_more_blocks_are_said_to_be_recomputed_together_than_are_recomputed():
    """Seen to fail: of 12 blocks 1 recomputed, 99 at a time."""
    assert kept_in_words(Layout(1, segment_blocks=99, kept=11), 12).startswith("of 12 blocks 1 recomputed, 11 ")
    assert kept_in_words(Layout(1, segment_blocks=99), 12) == "all 12 blocks recomputed, 12 at a time"
    assert kept_in_words(Layout(1, segment_blocks=4), 12) == "all 12 blocks recomputed, 4 at a time"


def test_more_ram_is_named_where_no_state_is_on_the_gpu():
    """Seen to fail: it was named only if states on the GPU took the place of RAM, or if everything ran twice."""
    caps = {"gpu_limit_bytes": 460 * MIB, "micro_batch": 1, "config": DEEP}
    roomy = plan_for(**caps, ram_limit_bytes=64 * GIB)
    assert roomy.faster_with_ram is None
    tight = plan_for(**caps, ram_limit_bytes=roomy.ram_bytes - 32 * MIB)
    assert not tight.layout.states_on_gpu and tight.layout.fate is not Fate.DROPPED
    assert tight.faster_with_ram == (roomy.ram_bytes, roomy.step_seconds) and roomy.step_seconds < tight.step_seconds


def test_faster_cards_take_less_time_and_older_ones_attention_without_flash():
    seconds = {card: plan_for(card=card, micro_batch=2).step_seconds for card in ("h200", "rtx3060")}
    assert seconds["h200"] < seconds["rtx3060"]
    turing = plan_for(card="t4", precision="fp16", micro_batch=2)
    assert turing.precision == "fp16" and turing.step_seconds > seconds["h200"]


def test_a_plan_without_a_card_is_for_the_smallest_one_with_bf16_and_that_much_memory():
    names = {limit: card_for(Settings(gpu_limit_bytes=limit)).name for limit in (GIB, 11 * GIB, 16 * GIB, 60 * GIB)}
    assert names == {GIB: "rtx3060", 11 * GIB: "rtx3060", 16 * GIB: "l4", 60 * GIB: "h100"}
    assert card_for(Settings(gpu_limit_bytes=500 * GIB)).name == "h200"


def test_the_precision_is_what_the_card_has():
    assert precision_and_card(Settings(plan_only=True)) == ("bf16", CARDS["rtx3060"])
    assert precision_and_card(Settings(plan_only=True, gpu="t4")) == ("fp16", CARDS["t4"])
    assert precision_and_card(Settings(plan_only=True, gpu="t4", precision="fp32")) == ("fp32", CARDS["t4"])
    assert precision_and_card(Settings(plan_only=True, device="cpu")) == ("fp32", None)
    with pytest.raises(InputError, match="t4 has no bf16"):
        precision_and_card(Settings(plan_only=True, gpu="t4", precision="bf16"))


def test_a_run_without_a_gpu_is_not_for_a_card(tmp_path, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert precision_and_card(Settings()) == ("fp32", None)
    with pytest.raises(InputError, match="--gpu t4: there is no GPU here to train on; add --plan-only"):
        precision_and_card(Settings(gpu="t4"))


def test_a_card_that_is_here_is_planned_for_and_an_unknown_one_as_the_one_most_like_it(monkeypatch):
    class Properties:
        name, total_memory, multi_processor_count = "NVIDIA A10M", 20 * GIB, 56

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (8, 6))
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: Properties)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "NVIDIA H200")
    assert card_for(Settings()).name == "h200"
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: Properties.name)
    card = card_for(Settings())
    assert card.name == "NVIDIA A10M (taken for a4500)"
    assert (card.multiprocessors, card.memory_bytes) == (56, 20 * GIB)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "NVIDIA GeForce RTX 4060 Ti")
    assert (card_for(Settings()).name, card_for(Settings()).memory_bytes) == ("rtx4060ti-16gb", 20 * GIB)
    for plan_only, usable in ((True, CARDS["h200"].memory_bytes), (False, 20 * GIB)):
        card = card_for(Settings(gpu="h200", plan_only=plan_only))
        assert (card.name, card.memory_bytes) == ("h200", usable)


# --- the CPU


def test_on_the_cpu_everything_is_in_ram_and_nothing_takes_a_gpu():
    plan = plan_for("cpu", "fp32", micro_batch=2)
    found = plan.to_dict()
    assert found["predicted"]["gpu_allocated_peak_bytes"] is found["predicted"]["step_seconds"] is None
    assert found["breakdown"] == plan.ram_breakdown and plan.layout.states_on_gpu == 6
    vectors = 256 * -(-13 * 512 // 256) * 4 + 1_024
    padded = PARAMETERS + 256
    assert PARAMETERS * 4 <= plan.ram_breakdown["working_weights"] <= 4 * (padded + vectors)
    assert PARAMETERS * 8 <= plan.ram_breakdown["resident_states"] <= 8 * (padded + vectors)


def test_the_micro_batch_on_the_cpu_does_not_depend_on_what_is_free_but_what_is_kept_does(monkeypatch):
    monkeypatch.setattr(planner, "ram_now_bytes", lambda: GIB)  # which otherwise moves between two plans
    roomy = plan_for("cpu", "fp32", ram_free_bytes=64 * GIB)
    activations = roomy.ram_bytes - plan_for("cpu", "fp32", recompute="on").ram_bytes
    tight = plan_for("cpu", "fp32", ram_free_bytes=4 * activations - MIB)  # a quarter of it is what they may take
    assert (roomy.layout.recomputes(roomy.blocks), tight.layout.recomputes(tight.blocks)) == (False, True)
    assert roomy.layout.micro_batch == tight.layout.micro_batch == 8


# --- what does not fit


@pytest.mark.parametrize("ram", [{}, {"ram_limit_bytes": CUDA_PROCESS_BYTES + 50 * MIB}], ids=["", "ram"])
def test_a_refusal_names_caps_that_do_fit_and_that_are_tight(ram):
    caps = ram | {"gpu_limit_bytes": 250 * MIB if ram else 100 * MIB, "micro_batch": 1}
    error = refused(**caps)
    assert error.exit_code == 3
    named = caps_named(error)
    plan = plan_for(**caps | named)
    assert plan.layout.fate is Fate.DROPPED and "forward and backward run twice" in plan.describe()
    refused(**caps | named | {"gpu_limit_bytes": named["gpu_limit_bytes"] - 64 * MIB})


@pytest.mark.parametrize("device", ["cuda", "cpu"])
def test_a_cap_of_ram_that_was_named_does_for_a_process_that_holds_a_little_more(device):
    """The same command, given again with that cap, is another process, and no two hold quite the same."""
    card, precision = (CARDS["rtx3090"], "bf16") if device == "cuda" else (None, "fp32")

    def plan(process_bytes: int, ram_limit_bytes: int) -> Plan:
        settings = dataclasses.replace(SMALL, ram_limit_bytes=ram_limit_bytes, states="streamed", micro_batch=1)
        return make_plan(Question(settings, CONFIG, precision, card, process=Process(process_bytes, process_bytes)))

    with pytest.raises(PlanError) as caught:
        plan(600 * MIB, MIB)
    named = caps_named(caught.value)["ram_limit_bytes"]
    assert plan(604 * MIB, named).ram_bytes <= named
    with pytest.raises(PlanError):
        plan(604 * MIB, named - 16 * MIB)


def test_a_cap_that_reading_the_data_has_passed_already_is_refused():
    settings = dataclasses.replace(SMALL, ram_limit_bytes=GIB, micro_batch=1)
    with pytest.raises(PlanError, match=r"reading the data has taken 3.00 GiB of RAM already.*--ram-limit 3072MiB"):
        make_plan(Question(settings, CONFIG, "fp32", None, process=Process(200 * MIB, 3 * GIB)))


def test_the_optimizer_is_never_changed_and_a_refusal_names_the_one_that_fits():
    needed = plan_for(states="streamed").ram_breakdown["streamed_states"]
    caps = {"states": "streamed", "micro_batch": 2, "ram_limit_bytes": CUDA_PROCESS_BYTES + needed * 3 // 4}
    assert "--optimizer adamw8bit (approximate moments)" in str(refused(**caps))
    assert plan_for(**caps, optimizer="adamw8bit").to_dict()["choice"]["state_bits"] == 8
    refused(**caps | {"ram_limit_bytes": CUDA_PROCESS_BYTES + needed // 8}, match=r"adamw8bit --ram-limit \d+MiB")


def test_an_optimizer_without_states_leaves_the_weights_that_are_drawn_their_room():
    """Seen to fail: bytes of weights in RAM counted as moments, which take no RAM while weights are drawn. The plan
    took 2 MiB more than the cap."""
    words = GPT2Config(n_layer=2, n_embd=256, n_head=4, vocab_size=40_000, n_positions=256)
    case = {"config": words, "weights": "streamed", "optimizer": "sgd", "seq": 64, "batch": 2, "micro_batch": 1}
    named = caps_named(refused("cuda", "fp32", **case, ram_limit_bytes=CUDA_PROCESS_BYTES))
    named |= caps_named(refused("cuda", "fp32", **case | named | {"ram_limit_bytes": CUDA_PROCESS_BYTES}))
    for more in (0, 1, 5, 20):
        caps = named | {"ram_limit_bytes": named["ram_limit_bytes"] + more * MIB}
        assert plan_for("cuda", "fp32", **case | caps).ram_bytes <= caps["ram_limit_bytes"], more


def test_every_way_out_that_a_refusal_names_is_planned_when_it_is_given():
    caps = {"gpu_limit_bytes": 300 * MIB, "ram_limit_bytes": CUDA_PROCESS_BYTES + 100 * MIB}
    ways_out = refused(**caps).ways_out
    ways = [way["options"].split() for way in ways_out]
    names = [" ".join(word for word in way if word.startswith("--")) for way in ways]
    assert names[0] == "--gpu-limit --ram-limit"
    assert names[1:] == ["--ram-limit", "--states-folder --ram-limit", "--optimizer"]
    fields = {"--states-folder": "states_folder", "--optimizer": "optimizer"}
    for way in ways[1:]:
        changed = {fields[name]: value for name, value in zip(way[::2], way[1::2], strict=True) if name in fields}
        limits = {"ram_limit_bytes": parse_size(way[way.index("--ram-limit") + 1])} if "--ram-limit" in way else {}
        plan = plan_for(**caps | changed | limits)
        assert plan.ram_bytes <= plan.settings.ram_limit_bytes
    assert json.loads(json.dumps(ways_out)) == ways_out


def test_a_refusal_on_a_cpu_names_what_fits_under_the_same_cap(monkeypatch):
    process = Process(200 * MIB, 0)

    def plan(**changed) -> Plan:
        return make_plan(Question(dataclasses.replace(SMALL, **changed), CONFIG, "fp32", None, process=process))

    least = plan(micro_batch=1).ram_bytes
    with pytest.raises(PlanError, match=r"It fits with --states-folder DIR \(.* of a fast disk\)") as caught:
        plan(micro_batch=1, ram_limit_bytes=least - 60 * MIB)
    assert [way["options"].split()[0] for way in caught.value.ways_out][:2] == ["--ram-limit", "--states-folder"]
    there = plan(micro_batch=1, ram_limit_bytes=least - 60 * MIB, states_folder="DIR")
    assert there.disk_state_bytes == caught.value.ways_out[1]["disk_bytes"]


@pytest.mark.parametrize(("given", "limit", "named"), [
    ({"recompute": "off"}, 300, "--recompute auto"),
    ({"states": "resident", "micro_batch": 8}, 300, "--states auto --micro-batch auto"),
    ({"recompute": "off", "micro_batch": 4}, 400, "--recompute auto"),
])  # fmt: skip
def test_a_refusal_names_the_options_that_keep_the_planner_from_a_layout_that_fits(given, limit, named):
    """Seen to fail: only a larger limit or shorter sequences were named."""
    options = [way["options"] for way in refused(gpu_limit_bytes=limit * MIB, **given).ways_out]
    assert options[1] == named
    left = {name for name in given if f"--{name.replace('_', '-')} auto" in named}
    plan_for(gpu_limit_bytes=limit * MIB, **{name: given[name] for name in given.keys() - left})


@pytest.mark.parametrize(("below", "named"), [
    (40, ["--micro-batch auto", "--states-folder DIR", "--optimizer adamw8bit", "--seq 64"]),
    (200, ["--micro-batch auto --states-folder DIR"]),
    (300, ["--micro-batch auto --states-folder DIR --optimizer adamw8bit --seq 64"]),
    (600, []),
])  # fmt: skip
def test_a_refusal_on_a_cpu_names_several_options_together_if_none_is_enough(below, named):
    """Seen to fail: only single options were tried, and none of the layout."""
    process, wide = Process(200 * MIB, 0), {"micro_batch": 8}

    def plan(**changed) -> Plan:
        return make_plan(Question(dataclasses.replace(SMALL, **changed), CONFIG, "fp32", None, process=process))

    limit = plan(**wide).ram_bytes - below * MIB
    with pytest.raises(PlanError) as caught:
        plan(**wide, ram_limit_bytes=limit)
    assert [way["options"] for way in caught.value.ways_out][1:] == named
    if below == 200:
        assert plan(ram_limit_bytes=limit, states_folder="DIR").ram_bytes <= limit


def test_a_refusal_in_json_has_the_keys_of_a_plan_and_the_ways_out(capsys):
    asked = ["--model", "gpt2", "--batch", "4", "--micro-batch", "1", "--gpu", "rtx3060", "--json"]
    assert plan_command.main([*asked, "--gpu-limit", "200MiB"]) == 3
    out, err = capsys.readouterr()
    found = json.loads(out)
    assert (found["fits"], found["tokens_per_step"], found["predicted"]) == (False, 4096, None)
    assert found["refusal"] in err
    assert plan_command.main([*asked, *found["ways_out"][0]["options"].split()]) == 0, "they can be typed as they are"


def test_shorter_sequences_are_a_way_out_where_the_gpu_is_too_small():
    caps = {"micro_batch": 8, "group": 1, "weights": "resident", "boundaries": "resident"}
    refused(**caps, gpu_limit_bytes=340 * MIB, match=r"It fits with --micro-batch auto, or with --seq 128\.$")
    assert plan_for(**caps, gpu_limit_bytes=340 * MIB, seq=128).gpu_reserved_peak_bytes <= 340 * MIB


def test_what_is_not_clipped_has_no_norm_to_wait_for():
    """Updates come during backward where the whole batch is one group, so nothing runs twice. Twice as much stays free,
    since a step that fails cannot be made again."""
    case = {"config": DEEP, "clip_norm": None, "micro_batch": 1}
    plan = plan_for(**case, **caps_named(refused(**case, gpu_limit_bytes=100 * MIB)))
    assert plan.layout.fate is Fate.APPLIED and plan.layout.group * plan.layout.micro_batch == 8
    assert plan.gpu_limit_bytes - plan.gpu_allocated_peak_bytes >= 2 * MARGIN_BYTES
    assert "blocks are updated during backward" in plan.describe()


@pytest.mark.quick(1)
@pytest.mark.parametrize("changed", [{"batch": 2}, {}, {"gpu_limit_bytes": 700 * MIB}])
def test_what_is_not_clipped_may_wait_for_the_next_forward_too(changed):
    """Updates wait if that is faster. No plan is slower than with clipping."""
    clipped, plan = plan_for(**changed), plan_for(clip_norm=None, **changed)
    assert plan.layout.fate is Fate.HELD and plan.step_seconds <= 1.01 * clipped.step_seconds


@pytest.mark.quick(1)
@pytest.mark.parametrize("limit", [360, 390, 410])
def test_what_is_not_clipped_is_no_slower_for_the_second_margin_of_updates_in_backward(limit):
    """Seen to fail: under 360 MiB updates in backward, next to two margins, were planned. They took twice as long as
    updates that wait, next to one."""
    clipped, plan = (plan_for(clip_norm=clip_norm, gpu_limit_bytes=limit * MIB) for clip_norm in (1.0, None))
    assert plan.step_seconds <= 1.01 * clipped.step_seconds
    assert plan.layout.fate is Fate.HELD and plan.gpu_limit_bytes - plan.gpu_allocated_peak_bytes >= MARGIN_BYTES


def test_what_is_not_clipped_is_planned_where_updates_that_wait_fit_next_to_one_margin():
    """Seen to fail: nothing fitted next to two margins, so it was refused."""
    caps = caps_named(refused(clip_norm=None, micro_batch=1, gpu_limit_bytes=100 * MIB))
    plan = plan_for(clip_norm=None, micro_batch=1, gpu_limit_bytes=caps["gpu_limit_bytes"] - 10 * MIB)
    assert plan.layout.fate is Fate.HELD


@pytest.mark.exhaustive
@pytest.mark.parametrize("clip_norm", [1.0, None])
def test_a_batch_of_many_micro_batches_is_refused_in_a_sentence(clip_norm):
    """Seen to fail with an IndexError: no micro-batch was left with which the whole batch would hold its gradients."""
    caps = {"seq": 32, "batch": 64, "micro_batch": 1, "gpu_limit_bytes": 66 * MIB}
    refused(clip_norm=clip_norm, **caps, match="the smallest that would do is")


def test_on_the_cpu_gradients_are_applied_in_backward_if_ram_is_short():
    free = plan_for("cpu", "fp32", clip_norm=None, micro_batch=1)
    assert free.layout.fate is Fate.HELD
    short = plan_for("cpu", "fp32", clip_norm=None, micro_batch=1, ram_limit_bytes=free.ram_bytes - MIB)
    assert short.layout.fate is Fate.APPLIED and short.ram_bytes < free.ram_bytes
    assert plan_for("cpu", "fp32", clip_norm=None, micro_batch=8).layout.fate is Fate.APPLIED, "one group anyway"


@pytest.mark.exhaustive
def test_where_the_loss_is_scaled_gradients_wait_without_clipping_too():
    """All of them have to be finite before the first update, and a GPU that does not hold them all will do."""
    caps = {"config": DEEP, "weights": "resident", "micro_batch": 1, "gpu_limit_bytes": 600 * MIB, "precision": "fp16"}
    clipped, plan = plan_for(**caps), plan_for(**caps, clip_norm=None)
    assert plan.layout.fate is Fate.SENT and plan.layout == clipped.layout
    assert plan_for(**caps, clip_norm=None, gradients="resident").layout.fate is Fate.DROPPED
    dataclasses.replace(SMALL, clip_norm=None, gradients="streamed", precision="fp16")  # is not refused


def test_gradients_that_the_gpu_does_not_hold_wait_in_ram_and_where_that_has_no_room_everything_runs_twice():
    caps = {"gpu_limit_bytes": 600 * MIB, "micro_batch": 1, "config": DEEP, "weights": "resident"}
    in_ram = plan_for(**caps)
    assert in_ram.layout.fate is Fate.SENT and in_ram.layout.fate is not Fate.DROPPED
    assert "gradients wait in RAM for their updates" in " ".join(in_ram.describe().split())
    streamed = in_ram.ram["train"]["streamed_gradients"]
    assert 0 < streamed <= 4 * in_ram.parameters and not in_ram.ram["load"].get("streamed_gradients")
    for more in ({"gradients": "resident"}, {"ram_limit_bytes": in_ram.ram_bytes - streamed // 2}):
        twice = plan_for(**caps | more)
        assert twice.layout.fate is Fate.DROPPED and "streamed_gradients" not in twice.ram["train"]
        assert 1.2 * in_ram.step_seconds < twice.step_seconds
        said = twice.faster_with_ram
        assert said == ((in_ram.ram_bytes, in_ram.step_seconds) if "ram_limit_bytes" in more else None)
    assert plan_for(**caps, gradients="streamed").layout == in_ram.layout


def test_states_that_have_to_be_resident_leave_no_gradients_to_ram():
    caps = {"config": DEEP, "micro_batch": 1, "weights": "resident", "states": "resident"}
    plan = plan_for(**caps, gpu_limit_bytes=1100 * MIB, ram_limit_bytes=8 * GIB)
    assert plan.layout.fate is Fate.DROPPED and plan.faster_with_ram is None and plan.layout.states_on_gpu == plan.units


@pytest.mark.exhaustive
def test_gradients_in_ram_leave_states_to_the_disk():
    caps = {"gpu_limit_bytes": 600 * MIB, "micro_batch": 1, "config": DEEP, "weights": "resident"}
    in_ram = plan_for(**caps)
    disk = {"states_folder": "/fast", "disk_rate_bytes": 100 * GIB, "ram_limit_bytes": in_ram.ram_bytes - 100 * MIB}
    plan = plan_for(**caps, **disk)
    assert plan.layout.fate is Fate.SENT and 0 < plan.layout.states_on_disk < plan.units
    twice = plan_for(**caps, **disk, gradients="resident")
    assert twice.layout.fate is Fate.DROPPED and not twice.layout.states_on_disk
    assert plan.step_seconds < twice.step_seconds


def test_on_the_cpu_gradients_that_are_streamed_are_copied_and_counted():
    plan = plan_for("cpu", "fp32", gradients="streamed")
    assert plan.layout.fate is Fate.SENT and plan.layout.group * plan.layout.micro_batch == 8
    blocks = 4 * plan.blocks * 12 * CONFIG.n_embd**2  # their matrices', in fp32
    assert blocks < plan.ram["train"]["streamed_gradients"] < 1.01 * blocks


@pytest.mark.exhaustive
def test_weights_are_streamed_where_that_spares_forward_and_backward_a_second_time():
    case = {"config": DEEP, "micro_batch": 1, "gradients": "resident"}
    assert plan_for(**case, gpu_limit_bytes=700 * MIB).layout.weights_on_gpu is None
    tight = case | {"gpu_limit_bytes": 600 * MIB}
    resident, free = plan_for(**tight, weights="resident"), plan_for(**tight)
    assert resident.layout.fate is Fate.DROPPED and free.layout.fate is not Fate.DROPPED
    assert free.layout.weights_on_gpu is not None
    assert 1.5 * free.step_seconds < resident.step_seconds


@pytest.mark.exhaustive
def test_weights_are_streamed_if_blocks_then_keep_their_matrix_products():
    model = "Qwen/Qwen3-1.7B"
    case = {"model": model, "config": load_config(model, "random"), "seq": 512, "batch": 32, "card": "rtx3060"}
    case |= {"gpu_limit_bytes": None, "ram_limit_bytes": 32 * GIB}
    resident, free = plan_for(**case, weights="resident"), plan_for(**case)
    assert resident.layout.fate is free.layout.fate is Fate.HELD
    assert resident.layout.kept < free.layout.kept == 28, "blocks"
    assert 1.05 * free.step_seconds < resident.step_seconds


def test_on_the_cpu_too_gradients_are_not_all_held_where_they_would_not_fit(monkeypatch):
    """Whether a plan is for what is free or for a cap, its micro-batch is the same: the bits do not depend on it."""
    monkeypatch.setattr(cpu_plan, "chooses_freed_memory", lambda: False)
    roomy = plan_for("cpu", "fp32", ram_free_bytes=64 * GIB, recompute="on")
    tight = plan_for("cpu", "fp32", ram_free_bytes=roomy.ram_bytes - PARAMETERS - ram_now_bytes(), recompute="on")
    assert (roomy.layout.fate, tight.layout.fate) == (Fate.HELD, Fate.DROPPED)
    assert tight.layout.micro_batch == roomy.layout.micro_batch


def test_on_the_cpu_freed_memory_is_kept_if_that_takes_at_most_a_quarter_of_the_free_ram(monkeypatch):
    """A run also has that RAM under a cap, twice."""
    monkeypatch.setattr(planner, "ram_now_bytes", lambda: GIB)  # which otherwise moves between two plans

    def plan(free: int, chooses: bool = True, **changed) -> Plan:
        monkeypatch.setattr(cpu_plan, "chooses_freed_memory", lambda: chooses)
        case = {"batch": 32, "micro_batch": 32, "recompute": "on"}
        return plan_for("cpu", "fp32", ram_free_bytes=free, **case, **changed)

    keeping, other = plan(64 * GIB), plan(64 * GIB, chooses=False)  # another C library, or the user's own options
    assert keeping.keeps_freed_memory and not other.keeps_freed_memory and keeping.layout == other.layout
    assert keeping.ram_phases["save"] == keeping.ram_phases["train"]
    more = keeping.ram_bytes - other.ram_bytes
    assert more > 4 * PARAMETERS, "as much as all gradients"
    assert not plan(4 * more - 64 * MIB).keeps_freed_memory
    assert plan(4 * more + 64 * MIB).keeps_freed_memory
    assert not plan(64 * GIB, ram_limit_bytes=keeping.ram_bytes + more // 2).keeps_freed_memory, "a rule of thumb"
    assert plan(64 * GIB, ram_limit_bytes=keeping.ram_bytes + 2 * more).keeps_freed_memory


@given(room=st.integers(min_value=0, max_value=2**38), margins=st.sampled_from((1, 2)))
def test_the_smallest_cap_for_a_room_leaves_that_room_and_one_byte_less_does_not(room, margins):
    cap = smallest_cap(room, margins)
    assert room_under(cap, margins) >= room > room_under(cap - 1, margins)
    assert cap - room_under(cap, margins) == pytest.approx(margins * max(MARGIN_BYTES, cap * 0.005), abs=1)


def test_what_a_plan_says_is_of_a_run_from_its_first_step_on(monkeypatch):
    """Of what is chosen, all groups of the first step are simulated: here with 1 GiB more than a search has seen."""

    def record(*arguments, whole_first_step: bool = False, **keywords):
        recording = record_step(*arguments, whole_first_step=whole_first_step, **keywords)
        if whole_first_step:
            recording.tape.chunks.append(Chunk([(10**9, GIB, "more")], 0, 0, 0.0))
        return recording

    without = plan_for(gpu_limit_bytes=None, micro_batch=4)
    monkeypatch.setattr(simulations, "record_step", record)
    monkeypatch.setattr(gpu_plan, "Simulations", Simulations)  # nothing is shared
    plan = plan_for(gpu_limit_bytes=None, micro_batch=4)
    assert plan.layout == without.layout
    assert plan.gpu_reserved_peak_bytes > max(GIB, without.gpu_reserved_peak_bytes)


def test_a_machine_with_too_little_memory_is_refused_like_a_cap():
    refused("cpu", "fp32", ram_free_bytes=64 * MIB, match="64.0 MiB are free here")
    refused("cpu", "fp32", ram_free_bytes=4 * GIB, ram_limit_bytes=400 * MIB, match="400 MiB of RAM")
    assert plan_for("cpu", "fp32", ram_free_bytes=64 * GIB).to_dict()["limits"]["ram_bytes"] is None


def test_a_plan_for_a_gpu_that_is_here_keeps_to_the_ram_that_is_free_and_the_micro_batch_does_not_follow_it():
    process = Process(GIB, GIB)
    settings = dataclasses.replace(SMALL, gpu_limit_bytes=600 * MIB, weights="resident")

    def plan(free_bytes: int) -> Plan:
        return make_plan(Question(settings, DEEP, "bf16", CARDS["rtx3090"], free_bytes, process=process))

    roomy = plan(64 * GIB)
    assert roomy.layout.fate is Fate.SENT and roomy.faster_with_ram is None
    tight = plan(roomy.ram_bytes - GIB - 100 * MIB)
    assert tight.ram_bytes <= roomy.ram_bytes - 100 * MIB and tight.layout.fate is not Fate.SENT
    assert tight.layout.micro_batch == roomy.layout.micro_batch and tight.settings == settings
    assert tight.smaller_layouts  # seen to fail: a plan for less free RAM had none
    assert tight.faster_with_ram == (roomy.ram_bytes, roomy.step_seconds) and roomy.step_seconds < tight.step_seconds
    faster = f"Faster: {format_seconds(roomy.step_seconds)} a step with {format_size(roomy.ram_bytes)} of RAM"
    assert faster in str(tight).splitlines()
    assert tight.to_dict()["faster_with_ram"]["ram_bytes"] == roomy.ram_bytes
    with pytest.raises(PlanError, match="64.0 MiB are free here"):
        plan(64 * MIB)


# --- python -m lowmem.plan


LLAMA = {
    **{"num_hidden_layers": 4, "hidden_size": 256, "intermediate_size": 688, "num_attention_heads": 8},
    **{"num_key_value_heads": 2, "vocab_size": 1_000, "max_position_embeddings": 2_048},
}


def in_json(capsys, *options: str) -> dict:
    assert plan_command.main([*options, "--json"]) == 0
    out, err = capsys.readouterr()
    assert err == ""
    return json.loads(out)


@pytest.mark.parametrize("kind", ["folder", "config.json"])
@pytest.mark.parametrize("tied", [True, False])
def test_any_decoder_is_planned_from_a_folder_or_its_config_alone(tmp_path, capsys, kind, tied):
    LlamaConfig(**LLAMA, tie_word_embeddings=tied).save_pretrained(tmp_path)
    model = tmp_path if kind == "folder" else tmp_path / "config.json"
    found = in_json(capsys, "--model", str(model), "--seq", "256", "--batch", "8", "--gpu-limit", "2G")
    attention = 256 * 256 * 2 + 2 * 256 * 64
    block = attention + 3 * 256 * 688 + 2 * 256
    assert found["parameters"] == 4 * block + 256 + (1 if tied else 2) * 1_000 * 256
    assert (found["tokens_per_step"], found["limits"]["gpu_bytes"]) == (8 * 256, 2 * GIB)


def test_without_json_it_answers_in_a_line_and_verbose_adds_the_table(tmp_path, capsys):
    GPT2Config(n_layer=2, n_embd=64, n_head=2).save_pretrained(tmp_path)
    assert plan_command.main(["--model", str(tmp_path), "--steps", "300"]) == 0
    out, err = capsys.readouterr()
    size = r"[\d.]+ [MG]iB"
    assert re.fullmatch(
        rf"Fits: {size} of 11.0 GiB GPU, {size} RAM, about .* s a step on rtx3060, .* for 300 steps, {size} of disk\n"
        "No GPU is here.*\n",
        out,
    )
    assert err == ""
    assert plan_command.main(["--model", str(tmp_path), "--steps", "300", "--verbose"]) == 0
    said, _ = capsys.readouterr()
    assert said.startswith(out) and "GPU working weights" in said and "tokens/s" in said


def test_the_answer_says_hours_if_the_steps_are_known_and_names_the_ways_to_be_faster():
    plan = plan_for(ram_limit_bytes=16 * GIB, gpu_limit_bytes=310 * MIB)
    first, *ways = str(plan).splitlines()
    assert re.search(r"^Fits: .* of 310 MiB GPU, .* of 16.0 GiB RAM, .* for a million tokens, .* of disk$", first)
    assumed = "No GPU is here, so rtx3090 is assumed: --gpu CARD names yours, --device cpu plans for this CPU"
    assert ways == [assumed, "Faster: with a higher --gpu-limit; rtx3090 has 23.2 GiB"]
    assert assumed not in answer(dataclasses.replace(plan, settings=dataclasses.replace(plan.settings, gpu="rtx3090")))
    known = dataclasses.replace(plan, steps=300, step_seconds=40.0, faster_with_ram=(17 * GIB, 30.0))
    first, *ways = str(known).splitlines()
    assert "about 40 s a step on rtx3090, 3 h 20 min for 300 steps, " in first
    assert ways[1] == "Faster: 30 s a step with --ram-limit 17GiB"
    (resumed,) = answer(known, done=210)
    assert "1 h for the 90 steps left" in resumed
    assert known.to_dict()["steps"] == 300 and plan.to_dict()["steps"] is None


def test_the_answer_for_a_cpu_has_no_figures_of_a_gpu():
    (line,) = answer(plan_for("cpu", "fp32", micro_batch=2, steps=7, gpu_limit_bytes=None))
    assert re.fullmatch(r"Fits: .*B RAM, 7 steps \(their time is not predicted on the CPU\), .* of disk", line)


def test_an_answer_breaks_between_words_on_a_terminal(monkeypatch):
    plan = plan_for(ram_limit_bytes=16 * GIB, gpu_limit_bytes=310 * MIB)
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    monkeypatch.setenv("COLUMNS", "40")
    broken = str(plan)
    assert max(map(len, broken.splitlines())) <= 40
    assert " ".join(broken.split()) == " ".join(answer(plan))


@pytest.mark.quick(3)
@pytest.mark.parametrize(
    ("options", "code", "said"),
    [
        (["--model", "gpt2", "--batch", "4", "--micro-batch", "1", "--gpu-limit", "200MiB"], 3, "--gpu-limit "),
        (["--model", "gpt2-xl", "--seq", "1"], 2, "--seq 1 is too short"),
        (["--model", "/nowhere/config.json"], 2, "/nowhere/config.json"),
        (["--model", "gpt2", "--seq", "4096"], 2, "1024 positions"),
        (["--model", "gpt2", "--ram-limit", "1"], 2, "--ram-limit is 1 byte"),
        (["--model", "/nowhere/config.json", "--gpu", "voodoo"], 2, "--gpu voodoo"),  # before the model is looked for
        (["--model", "gpt2", "--gpu", "RTX 3080 D"], 2, "did you mean one of rtx3080"),
        ([], 2, "--model is needed"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_what_is_impossible_is_refused_in_one_sentence(capsys, monkeypatch, options, code, said):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    assert plan_command.main(options) == code
    out, err = capsys.readouterr()
    assert out == "" and err.count("\n") == 1 and err.startswith("lowmem.plan: ") and said in err, err


def test_states_that_take_less_than_the_staging_ring_are_kept_and_nothing_inexact_is_chosen(tmp_path, capsys):
    """A small model with a large vocabulary fits with everything resident, but not with everything streamed."""
    GPT2Config(n_layer=3, n_embd=256, n_head=4, vocab_size=20_000, n_positions=128).save_pretrained(tmp_path)
    found = in_json(capsys, "--model", str(tmp_path), "--seq", "128", "--batch", "8", "--gpu-limit", "340MiB")
    assert (found["choice"]["state_bits"], found["choice"]["streamed_units"]) == (32, 0)


def test_batches_that_are_no_power_of_two_are_cut_into_any_parts_of_one_size():
    assert plan_for(batch=7).layout.micro_batch == 7
    small = SimpleNamespace(units=6, blocks=4)
    for batch, parts in {64: (1, 2, 4, 8, 16, 32, 64), 63: (1, 3, 7, 9, 21, 63)}.items():
        assert open_choices(dataclasses.replace(SMALL, batch=batch), small).micro_batches == parts


def test_a_card_that_is_too_small_is_said_to_be_and_no_cap_beyond_it_is_named():
    tiny = dataclasses.replace(CARDS["t4"], memory_bytes=CONTEXT_BYTES + 100 * MIB)
    said = "small at 8 x 256 tokens does not fit in the 100 MiB of t4.* A larger GPU needs (.* MiB), with"
    with pytest.raises(PlanError, match=said) as caught:
        make_plan(Question(dataclasses.replace(SMALL, gpu="t4"), CONFIG, "fp16", tiny))
    cap = parse_size(re.search(said, str(caught.value))[1])
    assert plan_for(precision="fp16", card="t4", gpu_limit_bytes=cap).gpu_reserved_peak_bytes <= cap


# --- configs and options that cannot be


GPT2 = {"model_type": "gpt2", "n_layer": 2, "n_embd": 64, "n_head": 4, "vocab_size": 100}
SMALL_LLAMA = LLAMA | {"model_type": "llama", "num_hidden_layers": 2}


def test_without_a_cap_of_gpu_memory_only_ram_is_short():
    """8-bit moments are no way out if all moments are on the GPU."""
    error = refused(match="in 1.00 GiB of RAM; the smallest that would do is --ram-limit [0-9]*MiB.( |$)", **ONLY_RAM)
    (way,) = error.ways_out
    option, size = way["options"].split()
    assert option == "--ram-limit" and way["gpu_bytes"] <= CARDS["rtx3090"].memory_bytes - CONTEXT_BYTES
    assert plan_for(**ONLY_RAM | {"ram_limit_bytes": parse_size(size)})


def test_whatever_settings_allow_has_a_layout():
    homes = ("auto", "resident", "streamed")
    fields = {
        "states": (*homes, "disk"), "weights": homes, "boundaries": homes, "gradients": homes,
        "recompute": ("auto", "products", "off"), "clip_norm": (1.0, None), "group": (None, 2, 8),
        "micro_batch": (None, 1, 4), "states_folder": (None, "/states"),
    }  # fmt: skip
    tried = 0
    for values in product(*fields.values()):
        with suppress(InputError):
            settings = dataclasses.replace(SMALL, **dict(zip(fields, values, strict=True)))
            simulations = SimpleNamespace(units=6, blocks=4, base=step_case(settings, "bf16"))
            assert choices_by_home(settings, simulations) and cpu_plan._layouts(settings, simulations), settings
            tried += 1
    assert tried > 1_000


@pytest.mark.parametrize(
    ("config", "said"),
    [
        ({}, "names no model_type"),
        (GPT2 | {"vocab_size": 0}, "vocab_size is 0"),
        (GPT2 | {"n_head": 0}, "n_head is 0"),
        (GPT2 | {"n_layer": -1}, "n_layer is -1"),
        (GPT2 | {"n_head": 3}, "must be divisible"),
        (SMALL_LLAMA | {"num_attention_heads": 5}, "not a multiple"),
        (SMALL_LLAMA | {"num_key_value_heads": 3}, "cannot be simulated"),
        (SMALL_LLAMA | {"quantization_config": {"quant_method": "gptq", "bits": 4}}, "quantised (gptq)"),
        (GPT2 | {"model_type": "ctrl", "n_embd": 32, "dff": 32, "n_positions": 9999}, "its buffers"),
        ({"model_type": "bert", "num_hidden_layers": 2, "max_position_embeddings": 1024}, "attends to later tokens"),
        ({"model_type": "xlnet", "d_model": 64, "n_layer": 2, "n_head": 4}, "XLNetLMHeadModel cannot be taken apart"),
        ({"model_type": "mpt", "d_model": 64, "n_layers": 2, "n_heads": 4, "max_seq_len": 512}, "512 positions"),
        ({"model_type": "musicgen"}, "not a valid musicgen config"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_config_that_cannot_be_trained_is_refused_in_a_sentence(tmp_path, capsys, config, said):
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert plan_command.main(["--model", str(tmp_path), "--batch", "4"]) == 2
    out, err = capsys.readouterr()
    assert out == "" and said in err and err.count("\n") == 1, err


def test_a_model_that_could_not_be_compared_is_planned_and_that_is_said(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("lowmem.models.compatibility._MOST_PARAMETERS", 1000)
    (tmp_path / "config.json").write_text(json.dumps(GPT2))
    assert plan_command.main(["--model", str(tmp_path), "--batch", "4"]) == 0
    assert "Not compared with the whole model (a copy with 2 narrow blocks still has" in capsys.readouterr().out
    found = in_json(capsys, "--model", str(tmp_path), "--batch", "4")
    assert "still has" in found["not_compared_with_the_whole_model"]


# --- states on a disk

DEEP = GPT2Config(n_layer=24, n_embd=512, n_head=8, vocab_size=5_000, n_positions=256)  # more states than buffers


@pytest.mark.exhaustive
def test_where_ram_has_no_room_for_states_as_few_as_may_be_are_on_the_disk():
    roomy = plan_for(config=DEEP, states="streamed", micro_batch=2)
    states = roomy.ram_breakdown["streamed_states"]
    tight = {"states": "streamed", "micro_batch": 2, "ram_limit_bytes": CUDA_PROCESS_BYTES + states * 3 // 4}
    refused(config=DEEP, **tight)
    plan = plan_for(config=DEEP, **tight, states_folder="/fast")
    assert plan.ram_bytes <= tight["ram_limit_bytes"]
    assert 0 < plan.layout.states_on_disk < plan.units and plan.disk["states"] == plan.disk_state_bytes > 0
    assert plan.ram_breakdown["streamed_states"] + plan.disk_state_bytes == states
    assert plan.gpu_reserved_peak_bytes == roomy.gpu_reserved_peak_bytes
    assert plan.layout == dataclasses.replace(roomy.layout, states_on_disk=plan.layout.states_on_disk)
    a_unit = plan.disk_state_bytes // plan.layout.states_on_disk
    room = tight["ram_limit_bytes"] - plan.ram_bytes
    assert room < 2 * a_unit, "another unit would have had room"
    assert "units on the disk of /fast" in " ".join(plan.describe().split())
    assert "in /fast: states" in plan.describe() and max(map(len, plan.describe().splitlines())) <= 80


@pytest.mark.exhaustive
def test_a_slower_disk_takes_longer():
    case = {"states": "disk", "states_folder": "/fast", "micro_batch": 2, "gpu_limit_bytes": 2 * GIB}
    plans = [plan_for(config=DEEP, **case, disk_rate_bytes=rate) for rate in (2**28, 2**30, 2**44)]
    assert plans[0].layout.states_on_disk == plans[0].units and plans[0].layout.states_on_gpu == 0
    slow, middle, fast = (plan.step_seconds for plan in plans)
    moved = 2 * plans[0].disk_state_bytes
    assert slow >= 0.999 * moved / 2**28 and slow > 2 * middle and middle > fast
    assert plans[0].waiting_seconds > 0.5 * slow
    in_ram = plan_for(config=DEEP, states="streamed", micro_batch=2).step_seconds
    assert fast > in_ram, "the host copies to and from the page cache"


@pytest.mark.quick(1)
@pytest.mark.parametrize("typed", [{"micro_batch": 2}, {}], ids=str)
def test_if_a_disk_takes_all_the_time_the_plan_that_computes_least_is_chosen(typed):
    disk = {"states": "disk", "states_folder": "/fast", "disk_rate_bytes": 2**28}
    plan = plan_for(config=DEEP, gpu_limit_bytes=2 * GIB, **disk, **typed)
    assert plan.layout.fate is Fate.HELD and plan.layout.states_on_disk == plan.units


@pytest.mark.exhaustive
def test_with_weights_in_ram_and_states_on_a_disk_gradients_may_be_held():
    case = {"config": DEEP, "weights": "streamed", "gpu_limit_bytes": 2 * GIB, "micro_batch": 2}
    less = plan_for(**case).ram_bytes - 300 * MIB
    plan = plan_for(**case, states_folder="/fast", ram_limit_bytes=less)
    assert plan.disk_state_bytes and plan.layout.weights_on_gpu is not None and plan.layout.fate is Fate.HELD


def test_no_state_is_on_a_disk_if_ram_has_room_for_all():
    """Also if everything runs twice, for which a disk may be used instead."""
    case = {"config": DEEP, "boundaries": "streamed", "gradients": "resident", "states_folder": "/fast"}
    plan = plan_for(**case)
    assert plan.layout.fate is Fate.DROPPED
    assert not plan.layout.states_on_disk and plan.faster_with_ram is None


@pytest.mark.exhaustive
def test_a_folder_that_is_not_needed_changes_no_plan():
    for device, precision in (("cuda", "bf16"), ("cpu", "fp32")):
        plan, other = (plan_for(device, precision, config=DEEP, states_folder=folder) for folder in (None, "/fast"))
        assert plan.layout == other.layout and other.disk_state_bytes == 0 and "/fast" not in other.describe()
        assert "states" not in other.disk


@pytest.mark.exhaustive
def test_a_refusal_with_a_folder_names_caps_that_do_fit_with_it():
    case = {"config": DEEP, "micro_batch": 1, "states_folder": "/fast"}
    named = caps_named(refused(**case, ram_limit_bytes=CUDA_PROCESS_BYTES + MIB))
    assert named["ram_limit_bytes"] < CUDA_PROCESS_BYTES + 250 * MIB
    assert plan_for(**case, **named).ram_bytes <= named["ram_limit_bytes"]


def test_on_the_cpu_some_states_are_on_the_disk_if_weights_are_streamed():
    """Seen to fail with a ValueError: the other units' states were to stay resident without their weights."""
    case = {"config": DEEP, "weights": "streamed", "micro_batch": 2, "states_folder": "/fast"}
    roomy, least = (plan_for("cpu", "fp32", **case, **more) for more in ({}, {"states": "disk"}))
    cap = (roomy.ram_bytes + least.ram_bytes) // 2
    plan = plan_for("cpu", "fp32", **case, ram_limit_bytes=cap)
    assert plan.ram_bytes <= cap and 0 < plan.layout.states_on_disk < plan.units
    assert plan.layout.weights_on_gpu == 1 and plan.layout.states_on_gpu == 0


def test_on_the_cpu_too_states_are_on_the_disk_where_ram_has_no_room_or_is_not_free():
    roomy = plan_for("cpu", "fp32", config=DEEP, recompute="on", micro_batch=2)
    states = roomy.ram_breakdown["resident_states"]
    case = {"recompute": "on", "micro_batch": 2, "states_folder": "/fast", "group": 1}
    cap = roomy.ram_bytes - states // 3
    capped = plan_for("cpu", "fp32", config=DEEP, ram_limit_bytes=cap, **case)
    here = plan_for("cpu", "fp32", config=DEEP, ram_free_bytes=cap - ram_now_bytes(), **case)
    for plan in (capped, here):
        assert plan.ram_bytes <= cap and 0 < plan.layout.states_on_disk < plan.units
        assert plan.layout.micro_batch == roomy.layout.micro_batch
        assert plan.layout.units_on_disk(plan.units) == list(range(plan.layout.states_on_gpu, plan.units))
    everything = plan_for("cpu", "fp32", config=DEEP, **case | {"states": "disk"})
    assert everything.layout.states_on_disk == everything.units
    assert everything.disk_state_bytes > 0.99 * states


@pytest.mark.exhaustive
def test_if_only_a_disk_meets_the_cap_free_ram_chooses_no_micro_batch_either():
    def plan(ram_free_bytes=None, **changed) -> Plan:
        settings = dataclasses.replace(SMALL, recompute="on", states_folder="/fast", **changed)
        return make_plan(Question(settings, DEEP, "fp32", None, ram_free_bytes, process=Process(GIB, 0)))

    cap = plan(states="disk").ram_bytes
    roomy, smallest = plan(ram_limit_bytes=cap), plan(ram_limit_bytes=cap, micro_batch=1)
    assert roomy.layout.states_on_disk and roomy.layout.micro_batch > 1
    for free in range(smallest.ram_bytes - GIB, cap - GIB, (cap - smallest.ram_bytes) // 3):
        try:
            assert plan(free, ram_limit_bytes=cap).layout.micro_batch == roomy.layout.micro_batch
        except PlanError as refused:
            assert "free" in str(refused)


def test_if_ram_has_no_room_for_the_inputs_of_short_segments_longer_ones_are_chosen():
    case = {"config": DEEP, "boundaries": "streamed", "states": "disk", "states_folder": "/fast", "micro_batch": 2}
    fastest_plan = plan_for(**case)
    tighter = plan_for(**case, ram_limit_bytes=fastest_plan.ram_bytes - MIB)
    assert tighter.layout.segment_blocks > fastest_plan.layout.segment_blocks
    assert tighter.layout.boundaries_in_ram and tighter.layout.states_on_disk == tighter.units


@pytest.mark.exhaustive
def test_the_plan_with_the_fastest_disk_traffic_is_chosen():
    """Gradients that are sent to RAM save a second pass, but take the room of states, which go to the disk."""
    case = {"config": DEEP, "gpu_limit_bytes": 600 * MIB, "micro_batch": 1, "weights": "resident", "gradients": "auto"}
    dropped = plan_for(**case | {"gradients": "resident"})
    caps = {"states_folder": "/fast", "ram_limit_bytes": dropped.ram_bytes - 100 * MIB}
    slow, fast = (plan_for(**case, **caps, disk_rate_bytes=rate) for rate in (2**28, 2**37))
    assert (slow.layout.fate, fast.layout.fate) == (Fate.DROPPED, Fate.SENT)
    assert 0 < slow.disk_state_bytes < fast.disk_state_bytes
