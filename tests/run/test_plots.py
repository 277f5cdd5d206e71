"""The figures: they are drawn from whatever a run leaves behind, and show what it says.

What a person sees was looked at; a test sees what was handed to matplotlib.
"""

import math
import sys
from pathlib import Path

import pytest

from lowmem.units import GIB
from runs import python

pytest.importorskip("matplotlib")
from matplotlib.figure import Figure  # noqa: E402

from lowmem.run import plots  # noqa: E402
from lowmem.run.plots import draw_loss, draw_memory  # noqa: E402


@pytest.fixture
def axes(monkeypatch):
    """The axes of each figure that is saved while the test runs."""
    saved, save = [], Figure.savefig
    monkeypatch.setattr(
        Figure, "savefig", lambda figure, *args, **kw: (saved.extend(figure.axes), save(figure, *args, **kw))
    )
    return saved


def losses(*values: float) -> list[dict]:
    return [{"step": step, "loss": value} for step, value in enumerate(values, start=1)]


def lines(axes) -> dict[str, list[tuple[float, float]]]:
    return {line.get_label(): list(zip(*map(list, line.get_data()), strict=True)) for line in axes.get_lines()}


def is_png(path: Path) -> bool:
    return path.read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"


def test_loss_per_step_and_held_out_loss_where_there_was_one(tmp_path, axes):
    rows = losses(5.0, 4.0, 3.0)
    rows[1]["eval_loss"] = 4.5
    draw_loss(rows, tmp_path / "loss.png", eval_first=6.0)
    assert is_png(tmp_path / "loss.png")
    assert lines(axes[0]) == {"training": [(1, 5.0), (2, 4.0), (3, 3.0)], "held-out": [(0, 6.0), (2, 4.5)]}
    assert (axes[0].get_xlabel(), axes[0].get_ylabel()) == ("optimizer step", "loss (nats per token)")


def test_a_long_run_gets_a_running_median_which_a_spike_does_not_move(tmp_path, axes):
    values = [2.0] * 200
    values[100] = 50.0
    draw_loss(losses(*values), tmp_path / "loss.png")
    drawn = lines(axes[0])
    assert max(value for _, value in drawn["training"]) == 50.0
    assert {value for _, value in drawn["training, median of 25 steps"]} == {2.0}
    draw_loss(losses(*values[:99]), tmp_path / "loss.png")
    assert list(lines(axes[1])) == ["training"]


def test_a_loss_that_is_not_finite_breaks_the_line_and_is_marked(tmp_path, axes):
    draw_loss(losses(5.0, math.nan, math.inf, 4.0), tmp_path / "loss.png")
    drawn = lines(axes[0])
    assert [step for step, loss in drawn["training"] if math.isfinite(loss)] == [1, 4]
    assert [step for step, loss in drawn["training"] if math.isnan(loss)] == [2, 3]
    assert [step for step, _ in drawn["loss not finite (2 of 4 steps)"]] == [2, 3]
    assert axes[0].get_ylim()[0] > 3.5  # the marks do not stretch the axis of the losses


@pytest.mark.parametrize("rows", [[], losses(math.nan), losses(3.0)], ids=["no rows", "only nan", "one row"])
def test_short_and_broken_runs_are_drawn_too(tmp_path, rows):
    draw_loss(rows, tmp_path / "loss.png")
    assert is_png(tmp_path / "loss.png")


def test_a_run_without_a_finite_loss_says_so_in_its_figure(tmp_path, axes):
    draw_loss(losses(math.nan, math.nan), tmp_path / "loss.png")
    draw_loss(losses(math.nan, 3.0), tmp_path / "loss.png")
    assert [[text.get_text() for text in each.texts] for each in axes] == [["no finite loss"], []]


PLAN = {
    "breakdown": {"working_weights": 2 * GIB, "nothing": 0, "loss": GIB},
    "ram_breakdown": {"streamed_states": 4 * GIB, "process": 1 * GIB},
    "ram_phases": {"load": 3 * GIB, "train": 5 * GIB},
    "limits": {"gpu_bytes": 11 * GIB, "ram_bytes": None},
    "predicted": {"gpu_reserved_peak_bytes": int(3.25 * GIB)},
}
PLAN_ON_CPU = PLAN | {"predicted": {"gpu_reserved_peak_bytes": None}}
ON_CPU = {"gpu_allocated_peak_bytes": None, "gpu_reserved_peak_bytes": None, "ram_peak_bytes": int(5.5 * GIB)}
ON_GPU = ON_CPU | {"gpu_allocated_peak_bytes": 2 * GIB, "gpu_reserved_peak_bytes": int(2.5 * GIB)}


def bars(axes) -> list[tuple[int, float, float]]:
    """(row, left, width) of each bar, GiB."""
    return [(round(bar.get_y() + bar.get_height() / 2), bar.get_x(), bar.get_width()) for bar in axes.patches]


def test_predicted_bytes_are_stacked_by_name_beside_the_measured_peak_and_the_cap(tmp_path, axes):
    draw_memory(PLAN, ON_GPU, tmp_path / "memory.png")
    assert is_png(tmp_path / "memory.png")
    assert bars(axes[0]) == [(0, 0, 2), (0, 2, 1), (0, 3, 0.25), (1, 0, 2.5), (2, 0, 4), (2, 4, 1), (3, 0, 5.5)]
    labels = [label.get_text() for label in axes[0].get_yticklabels()]
    assert labels == ["GPU predicted", "GPU measured", "RAM predicted", "RAM measured"]
    (cap,) = axes[0].get_lines()  # RAM has none
    assert list(cap.get_xdata()) == [11, 11]
    assert axes[0].get_xlim()[1] > 11
    texts = {text.get_text() for text in axes[0].texts}
    assert texts == {"3.25 GiB", "2.50 GiB", "5.00 GiB", "5.50 GiB", "cap 11.0 GiB"}


def test_a_device_without_gpu_figures_has_bars_for_ram_alone(tmp_path, axes):
    draw_memory(PLAN_ON_CPU, ON_CPU, tmp_path / "memory.png")
    assert bars(axes[0]) == [(0, 0, 4), (0, 4, 1), (1, 0, 5.5)]


def test_each_name_has_one_colour_and_one_line_in_the_legend(tmp_path, axes):
    names = [f"part_{index}" for index in range(12)]
    plan = PLAN | {"predicted": {"gpu_reserved_peak_bytes": 12 * GIB}, "breakdown": dict.fromkeys(names, GIB)}
    plan |= {"ram_breakdown": {"part_0": GIB, "process": GIB}}
    draw_memory(plan, ON_GPU, tmp_path / "memory.png")
    handles, labels = axes[0].get_legend_handles_labels()
    assert sorted(labels) == sorted([*names, "process"])
    assert len({handle.patches[0].get_facecolor() for handle in handles}) == 13
    first_of = {
        row: bar.get_facecolor() for (row, left, _), bar in zip(bars(axes[0]), axes[0].patches, strict=True) if not left
    }
    assert first_of[0] == first_of[2]
    assert len(set(plots._colours(40))) == 40


def test_a_name_has_the_same_colour_in_each_picture_and_tiny_parts_are_one(tmp_path, axes):
    """Seen to fail: a colour depended on the parts before, and the legend had names of parts that nobody could see."""
    tiny = {f"part_{index}": GIB // 1000 for index in range(9)}
    for breakdown in ({"gradients": GIB, "live_blocks": 2 * GIB}, tiny | {"live_blocks": 3 * GIB}):
        plan = PLAN | {"breakdown": breakdown, "predicted": {"gpu_reserved_peak_bytes": sum(breakdown.values())}}
        draw_memory(plan, None, tmp_path / "memory.png")
    first, second = (dict(zip(*reversed(each.get_legend_handles_labels()), strict=True)) for each in axes[::2])
    assert list(second) == ["live_blocks", "others", "streamed_states", "process"]
    for name in ("live_blocks", "streamed_states", "process"):
        assert first[name].patches[0].get_facecolor() == second[name].patches[0].get_facecolor()
    assert second["others"].patches[0].get_width() == pytest.approx(9 / 1000, rel=1e-6)


def test_a_plan_that_was_not_run_has_its_timeline_and_no_measured_bars(tmp_path, axes):
    timeline = [(0.0, 1 * GIB, 2 * GIB), (0.5, 3 * GIB, 3 * GIB), (2.0, 2 * GIB, 3 * GIB)]
    draw_memory(PLAN, None, tmp_path / "memory.png", timeline)
    over_time, at_the_peak, by_phase = axes
    assert [bar.get_height() for bar in by_phase.patches] == [3, 5]
    assert lines(over_time)["allocated (predicted)"] == [(0.0, 1), (0.5, 3), (2.0, 2)]
    assert lines(over_time)["reserved (predicted)"] == [(0.0, 2), (0.5, 3), (2.0, 3)]
    assert lines(over_time)["cap"] == [(0, 11), (1, 11)]
    assert [label.get_text() for label in at_the_peak.get_yticklabels()] == ["GPU predicted", "RAM predicted"]
    draw_memory(PLAN, ON_GPU, tmp_path / "memory.png", timeline)
    assert lines(axes[3])["reserved, peak (measured)"] == [(0, 2.5), (1, 2.5)]


def test_each_phase_of_a_run_has_its_ram_predicted_beside_measured(tmp_path, axes):
    plan = PLAN | {"limits": {"gpu_bytes": None, "ram_bytes": 6 * GIB}}
    draw_memory(plan, ON_GPU, tmp_path / "memory.png", ram_phases={"load": 2 * GIB, "train": 4 * GIB, "export": GIB})
    assert is_png(tmp_path / "memory.png")
    by_phase = axes[1]
    assert [bar.get_height() for bar in by_phase.patches] == [3, 5, 2, 4, 1], "predicted first, then measured"
    assert [label.get_text() for label in by_phase.get_xticklabels()] == ["load", "train", "export"]
    assert lines(by_phase)["cap"] == [(0, 6), (1, 6)]


# A program that draws loss.png as a run does, with what `draw` says of it on stdout.
DRAWN = """
import sys
from pathlib import Path
from lowmem.run.plots import draw, draw_loss
path = Path(sys.argv[1])
print(draw(path, lambda: draw_loss([{"step": 1, "loss": 2.0}], path)))
"""


@pytest.mark.quick(1)
@pytest.mark.parametrize(
    "environment",
    [
        {"MPLBACKEND": "module://matplotlib_inline.backend_inline"},  # what a notebook sets for `!python ...`
        {"MPLBACKEND": "Qt4Agg"},
        {"MPLBACKEND": "garbage"},
        {"MPLBACKEND": ""},
        {"MPLCONFIGDIR": "/proc/nope"},
        {"MATPLOTLIBRC": "backend: TkAgg\ntext.usetex: True\nfont.family: Nonesuch\nfigure.dpi: 9"},
    ],
    ids=lambda environment: "=".join(*environment.items())[:40],
)
def test_a_picture_is_drawn_alike_whatever_the_environment_says(tmp_path, environment):
    rc = tmp_path / "matplotlibrc"
    if "MATPLOTLIBRC" in environment:
        rc.write_text(environment["MATPLOTLIBRC"])
        environment = {"MATPLOTLIBRC": str(rc)}
    run = python("-c", DRAWN, tmp_path / "loss.png", **environment)
    assert (run.returncode, run.stdout) == (0, "None\n"), run
    plots.draw_loss(losses(2.0), tmp_path / "here.png")
    assert (tmp_path / "loss.png").read_bytes() == (tmp_path / "here.png").read_bytes()


def test_a_picture_that_cannot_be_drawn_is_a_sentence(tmp_path, monkeypatch):
    def failing(error):
        raise error

    path = tmp_path / "loss.png"
    assert plots.draw(path, lambda: failing(RuntimeError("no latex\nmore"))) == "loss.png could not be drawn (no latex)"
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert plots.draw(path, lambda: failing(AssertionError)) == "matplotlib is not installed, so loss.png was not drawn"
    (tmp_path / "matplotlibrc").write_bytes(b"\xff: 1\n")  # which matplotlib cannot read, and so is not imported
    run = python("-c", DRAWN, path, cwd=tmp_path)
    assert run.returncode == 0 and run.stdout.startswith("loss.png could not be drawn ('utf-8' codec"), run
