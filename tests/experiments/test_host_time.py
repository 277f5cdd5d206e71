"""The experiment on the host's time: the clock counts what the cases do, and README.md says what the rows say.

The timing itself is for the stand-in. No test asserts a duration.
"""

import pytest
import torch

from experiments.harness import rows as row_file
from experiments.host_time import run, table
from experiments.host_time.cases import CALLS, META, operator_cases, product_case, step_case, update_case
from lowmem.core import optimizers
from lowmem.core.kernels import Kernels, fused
from lowmem.cudasim.gpus import CARDS
from lowmem.cudasim.recorder import Recorder
from lowmem.planning.simulated_step import gpu_target

CPU = torch.device("cpu")


@pytest.fixture(params=[Kernels.NONE, Kernels.ALL], ids=["plain", "fused"])
def target(request):
    return run.without_gpu_time(gpu_target(CARDS["rtx3060"], request.param))


def test_the_gpu_takes_no_time(target):
    with target.device_model.functions(), Recorder(target.device_model) as recorder:
        product_case(target.fused_kernels).make(META)()()
    assert recorder.clock.host > 0 and recorder.clock.gpu == 0
    assert target.copies is None


@pytest.mark.parametrize("case", operator_cases(), ids=lambda case: case.name)
def test_an_operator_counts_once(case, target):
    forward, backward = target.device_model.host_seconds
    seconds, operations = run.clock_of(case, target)
    if "backward" in case.name:  # the operator's own, and the view of what it saved
        assert (seconds, operations) == (pytest.approx(2 * backward), pytest.approx(2))
    else:
        assert (seconds, operations) == (pytest.approx(forward), pytest.approx(1))


def test_the_fused_product_and_update_count_as_operators_of_this_project(target):
    more = sum(target.device_model.more_host_seconds.values())
    forward, backward = target.device_model.host_seconds
    seconds, operations = run.clock_of(product_case(target.fused_kernels), target)
    assert operations >= 4  # one forward, and backward of input, weight and bias
    upper = operations * forward + (more if target.fused_kernels else 0)
    lower = operations * backward + (more if target.fused_kernels else 0)
    assert lower < seconds < upper

    rule = fused.update if target.fused_kernels else optimizers.update
    seconds, operations = run.clock_of(update_case(rule, "any"), target)
    assert seconds == pytest.approx(operations * forward)
    assert operations == pytest.approx(1) if target.fused_kernels else operations > 20


PLAIN = product_case(Kernels.NONE), update_case(optimizers.update, "eager")


@pytest.mark.parametrize("case", [*operator_cases(), *PLAIN], ids=lambda case: case.name)
def test_a_case_runs_on_a_device_and_makes_its_row(case):
    times = run.in_rounds([case], CPU, rounds=2)
    assert set(times) == {case.name, "python loop", "cpu additions"} and len(times[case.name]) == 2
    row = run.row_of(case, times[case.name], 10e-6, 1)
    assert case.calls == CALLS
    assert 0 < row["least_processor_us"] <= row["processor_us"] and 0 < row["least_wall_us"] <= row["wall_us"]
    assert row["clock_us"] == pytest.approx(10)
    by_hand = run.row_of(case, [run.Times(processor=2e-3, wall=5e-3), run.Times(processor=1e-3, wall=7e-3)], 10e-6, 1)
    assert by_hand["least_processor_us"] == pytest.approx(1e3 / CALLS)
    assert by_hand["least_wall_us"] == pytest.approx(5e3 / CALLS)


@pytest.mark.exhaustive
def test_a_step_counts_more_operations_with_more_blocks():
    target = run.without_gpu_time(gpu_target(CARDS["rtx3060"], Kernels.ALL))
    (first, _), (second, _), (third, operations) = (
        run.clock_of(step_case("gpt2", blocks, Kernels.ALL), target) for blocks in (1, 2, 3)
    )
    assert second - first == pytest.approx(third - second) and 0 < first < second
    assert operations == round(operations) > 100


def test_it_runs_on_the_stand_in_only(monkeypatch, tmp_path, capsys):
    monkeypatch.delenv("STAND_IN_CARD", raising=False)
    assert run.main(["--out", str(tmp_path / "rows.jsonl")]) == 2
    assert "stand-in" in capsys.readouterr().err and not list(tmp_path.iterdir())


def test_all_rows_are_the_stand_ins():
    rows = row_file.read(table.RESULTS)
    assert rows and all(row["stand_in"] is True for row in rows)


def test_the_newest_row_of_a_case_counts():
    row = row_file.read(table.RESULTS)[-1]
    found = table.table([row | {"operations": 123456}, row | {"operations": 4}])
    assert "123,456" not in found and found.count(row["name"]) == 1


def test_a_further_block_is_the_difference_of_two_steps():
    def step(blocks: int, fused: str = "") -> dict:
        times = dict.fromkeys(("least_processor_us", "processor_us", "least_wall_us", "wall_us", "clock_us"), 10.0)
        name = f"step, gpt2, {blocks} blocks{fused}"
        return {key: value * blocks + 5 for key, value in times.items()} | {"name": name, "operations": 7.0 * blocks}

    found = table.further_blocks({row["name"]: row for row in (step(2), step(5), step(4, ", fused"))})
    assert [row["name"] for row in found] == ["a further block of gpt2"]  # of the fused there is one step only
    assert found[0]["least_processor_us"] == found[0]["clock_us"] == 10 and found[0]["operations"] == 7
