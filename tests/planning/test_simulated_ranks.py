"""The simulated step of one of several ranks: its memory, what it sends, and the plan for several cards."""

import json
import math
from dataclasses import replace
from functools import partial

import pytest
from transformers import GPT2Config

import lowmem
from lowmem.core.layout import Layout
from lowmem.core.optimizers import OPTIMIZERS
from lowmem.core.parameters import Store
from lowmem.core.precision import WORKING_DTYPES
from lowmem.core.shares import Among, GatheredWeights, Shares
from lowmem.cudasim.gpus import CARDS
from lowmem.models.build import make_decoder
from lowmem.planning import gpu_plan, planner
from lowmem.planning.choices import choices_by_home
from lowmem.planning.fastest import fastest_layout
from lowmem.planning.replay import META
from lowmem.planning.search import Room
from lowmem.planning.simulated_ranks import Mesh
from lowmem.planning.simulated_step import StepCase, gpu_target, record_step
from lowmem.planning.simulations import Simulations
from lowmem.run import plan_command
from lowmem.settings import Settings
from runs import simulations_shared

SMALL = {"n_layer": 3, "n_embd": 128, "n_head": 4, "n_positions": 64, "vocab_size": 97}
CONFIG = GPT2Config(**SMALL, bos_token_id=0, eos_token_id=0)
TARGET = gpu_target(CARDS["rtx3090"])
ADAMW, BF16 = OPTIMIZERS["adamw"], WORKING_DTYPES["bf16"]


@pytest.fixture(scope="module", autouse=True)
def shared():
    with simulations_shared(gpu_plan, planner):
        yield


def decoder():
    return make_decoder(CONFIG, "bf16", "fp32", TARGET.fused_kernels)


def recorded(ranks: int, **layout):
    case = StepCase(64, 2, Layout(1, **layout), BF16, ADAMW, mesh=Mesh(ranks))
    return record_step(decoder(), case, TARGET)


@pytest.mark.quick(1)
@pytest.mark.parametrize("ranks", [2, 4])
def test_a_rank_sends_each_blocks_weights_twice_and_its_gradients_once(ranks):
    store = Store(decoder(), META, BF16, ADAMW, Layout(1), ranks=Shares(ranks, 0))
    last, sent = max(part.unit for part in store.parts), 0
    for part in store.parts:
        gathers = 0 if not part.is_matrices else 1 if part.unit in (0, last) else 2
        sent += part.working.numel() * (4 + gathers * BF16.itemsize)
    assert recorded(ranks).sent_bytes == sent * (ranks - 1)
    assert recorded(1).sent_bytes == 0
    blocks = [part for part in store.parts if part.is_matrices and 0 < part.unit < last]
    sent -= sum(part.working.nbytes for part in blocks[-2:])
    assert recorded(ranks, gathered=2).sent_bytes == sent * (ranks - 1)


def test_numbers_of_a_rank_are_a_share_of_one_processs():
    one, two = recorded(1, states_on_gpu=5), recorded(2, states_on_gpu=5)
    assert sum(two.state_bytes) == pytest.approx(sum(one.state_bytes) / 2, rel=0.05)
    assert two.weight_bytes == pytest.approx(one.weight_bytes / 2, rel=0.05)


def test_a_recording_from_replays_is_that_of_executing_everything():
    simulations = Simulations(decoder, StepCase(64, 2, Layout(1), BF16, ADAMW, mesh=Mesh(2)), TARGET)
    for layout in (Layout(1), Layout(1, kept=2), Layout(2, states_on_gpu=5)):
        replayed = simulations.record(layout)
        executed = record_step(decoder(), replace(simulations.base, layout=layout), TARGET)
        assert [size for _, size, _ in replayed.tape] == [size for _, size, _ in executed.tape]
        assert replayed.sent_bytes == executed.sent_bytes


def test_a_machines_ram_bounds_what_many_cards_send():
    rates = [Mesh(ranks).rates(25e9, None)[Among.SHARES] for ranks in (2, 4, 8)]
    assert rates == [10e9, 5e9, 2.5e9] and Mesh(2).rates(1e9, None)[Among.SHARES] == 1e9


def test_what_leaves_a_machine_takes_the_network():
    """Between machines go the sums of a share, there and back; if they store one model, also all that is gathered."""
    assert Mesh(2).rates(25e9, None) == {Among.SHARES: 10e9, Among.REPLICAS: 10e9}
    assert Mesh(8, 4, 4, 1e9).rates(25e9, 300e9) == {Among.SHARES: 300e9, Among.REPLICAS: 1e9 / 8}
    assert Mesh(32, 1, 4, 1e9).rates(25e9, 300e9) == {Among.SHARES: 1e9 / 8, Among.REPLICAS: 1e9 / 8}
    assert Mesh(2, 2, 2, 1e12).rates(1e9, None) == {Among.SHARES: 1e9, Among.REPLICAS: 1e9}, "the bus is in the way"


@pytest.mark.quick(1)
@pytest.mark.parametrize("machines", [2, 3])
def test_machines_send_their_sums_to_each_other_and_that_takes_time(machines):
    case = StepCase(64, 2, Layout(1), BF16, ADAMW, mesh=Mesh(2))
    one = record_step(decoder(), case, TARGET)
    fast, slow = (Mesh(2, machines, machines, network) for network in (1e15, 1e6))
    several = record_step(decoder(), replace(case, mesh=fast), TARGET)
    store = Store(decoder(), META, BF16, ADAMW, Layout(1), ranks=Shares(2, 0))
    sizes = {True: 0, False: 0}
    for part in store.parts:
        sizes[part.is_matrices] += 4 * part.working.numel()
    between = (machines - 1) * (2 * sizes[True] / machines + sizes[False])
    assert several.sent_bytes - one.sent_bytes == pytest.approx(between, rel=1e-3)
    assert (several.state_bytes, several.weight_bytes) == (one.state_bytes, one.weight_bytes)
    seconds = record_step(decoder(), replace(case, mesh=slow), TARGET).seconds
    assert seconds > between / (1e6 / 2) > several.seconds


def test_weights_stay_gathered_if_that_saves_time():
    case, slow = StepCase(64, 2, Layout(1), BF16, ADAMW, mesh=Mesh(2)), replace(TARGET, link=1e6)
    for target, gathered in ((slow, 3), (replace(TARGET, link=math.inf), 0)):
        simulations = Simulations(decoder, case, target)
        every = choices_by_home(Settings(seq=64, batch=2, weights="resident"), simulations)
        found = fastest_layout(every, simulations, Room(None, None))
        assert found.layout.gathered == gathered


class FakeUnit:
    taken = is_here = False

    def start(self) -> None:
        self.taken = True

    def wait(self) -> None:
        self.is_here = True

    def let_go(self) -> None:
        self.taken = self.is_here = False


def test_an_evaluation_leaves_two_blocks_gathered_also_of_those_that_stay():
    units = {number: FakeUnit() for number in range(-1, 5)}
    weights = GatheredWeights(units, range(4), range(1, 4))

    def taken() -> list[int]:
        return [number for number in range(4) if units[number].taken]

    for block in range(4):
        weights._called(block)
        assert taken() == [block, block + 1][: 4 - block]
    weights.bring(range(1), range(1, 2))
    weights.bring(range(1, 2), range(2, 3))
    assert taken() == [1, 2, 3], "block 0 does not stay, and 3 was there"


def test_cards_with_nvlink_do_not_wait_for_ram():
    linked, case = gpu_target(CARDS["h100"]), StepCase(64, 2, Layout(1, states_on_gpu=5), BF16, ADAMW, mesh=Mesh(8))
    assert linked.link == 0.8 * 450e9 and gpu_target(CARDS["h100-pcie"]).link is None
    slow = replace(linked, copies=1e7)  # else a model as small as this waits for the host
    seconds = [record_step(decoder(), case, target).seconds for target in (linked, slow, replace(slow, link=None))]
    assert seconds[0] == seconds[1] < seconds[2]


def test_the_plan_for_several_cards_is_one_cards(tmp_path, capsys):
    """Seen to fail: --gpus gave advice on other methods, and the plan under torchrun held the whole model."""
    CONFIG.save_pretrained(tmp_path)
    options = ["--model", str(tmp_path), "--seq", "64", "--batch", "8", "--gpu", "rtx3090"]

    def plan(*more: str) -> dict:
        assert plan_command.main([*options, *more, "--json"]) == 0
        return json.loads(capsys.readouterr().out)

    one, two = plan(), plan("--gpus", "2")
    assert (one["ranks"], two["ranks"]) == (1, 2) and one["tokens_per_step"] == two["tokens_per_step"] == 512
    assert two["breakdown"]["resident_states"] == pytest.approx(one["breakdown"]["resident_states"] / 2, rel=0.05)
    assert two["sent_bytes"] > 0 and two["disk"]["checkpoints"] == pytest.approx(one["disk"]["checkpoints"], rel=0.05)
    settings = lowmem.Settings(model=str(tmp_path), init="random", seq=64, batch=8, gpu="rtx3090", plan_only=True)
    found = lowmem.plan(settings, gpus=2)
    assert (found.ranks, found.sent_bytes, found.settings.batch) == (2, two["sent_bytes"], 8)
    assert plan_command.main([*options, "--gpus", "2"]) == 0
    assert capsys.readouterr().out.startswith("Fits on each of 2 cards: ")
    four = plan("--gpus", "2", "--machines", "2")
    assert plan_command.main([*options, "--gpus", "2", "--machines", "2"]) == 0
    assert capsys.readouterr().out.startswith("Fits on each of 2 x 2 cards: ")
    assert (four["ranks"], four["ranks_that_share_a_model"]) == (4, 2)
    assert four["breakdown"]["resident_states"] == two["breakdown"]["resident_states"]
    assert plan_command.main([*options, "--gpus", "2", "--machines", "0"]) == 2
    assert "--machines 0: give a whole number, at least 1" in capsys.readouterr().err
    refused = partial(plan_command.main, [*options, "--gpus", "0"])
    assert refused() == 2 and "--gpus 0: give a whole number, at least 1" in capsys.readouterr().err
    assert plan_command.main([*options, "--gpus", "2", "--gpu-limit", "1MiB"]) == 3
    assert f"{tmp_path} at 4 x 64 tokens in each of 2 processes does not fit in" in capsys.readouterr().err
    for ranks, on_disk in (("1", True), ("2", False)):
        short = [*options, "--json", "--states", "streamed", "--gpus", ranks, "--ram-limit"]
        assert plan_command.main([*short, "300MiB"]) == 3
        out, err = capsys.readouterr()
        assert ("--states-folder" in err) == on_disk and "300 MiB of RAM" in err
    enough = next(way["options"] for way in json.loads(out)["ways_out"] if way["options"].startswith("--ram-limit"))
    assert plan_command.main([*short, enough.split()[1]]) == 0, "the cap is of both processes"
