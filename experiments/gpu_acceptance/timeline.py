"""Records or simulates the copies and computations of one step, and draws both.

Lanes: the compute stream without updates, copies to the card, copies from it. A copy is *hidden* while the compute
stream is busy. Recordings have gaps of microseconds between kernels, and simulations have none.
"""

from bisect import bisect_right
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from operator import itemgetter
from pathlib import Path
from unittest.mock import patch

import torch
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

from experiments.harness import pictures
from lowmem.core.decoder import Decoder
from lowmem.core.transfers import Lane
from lowmem.planning import simulated_step
from lowmem.planning.simulated_step import StepCase, Target
from lowmem.planning.simulated_transfers import ENGINES, SimulatedTransfers
from lowmem.units import GIB

COMPUTE, IN, OUT = "compute", "copies in", "copies out"
LANES = (COMPUTE, IN, OUT)
UPDATES = ("_adamw", "_sgd", "_join_all", "_split_all")  # triton_kernels.py's
NAME_CHARACTERS = 200  # of a kernel: templates' arguments take thousands
PARTS = 1000  # of a stretch of time in a picture, for a step has a hundred thousand kernels
Stretch = tuple[float, float]  # from and to, in seconds


@dataclass(frozen=True)
class Timeline:
    """One step. `lanes`: {lane: sorted stretches that do not touch}. `streamed_bytes`: copied each way. `kernels`:
    {name: (seconds, calls)}."""

    title: str
    seconds: float
    streamed_bytes: int
    lanes: dict[str, list[Stretch]] = field(repr=False)
    kernels: dict[str, tuple[float, int]] = field(repr=False, default_factory=dict)

    def figures(self) -> dict[str, float | int | None]:
        """Returns a row's fields. `copying_seconds` count once if both directions are busy."""
        copying = joined(self.lanes[IN] + self.lanes[OUT])
        seconds = _length(copying)
        hidden = _length(common(copying, self.lanes[COMPUTE]))
        return {
            "step_seconds": self.seconds,
            "compute_busy_seconds": _length(self.lanes[COMPUTE]),
            "copies_in_seconds": _length(self.lanes[IN]),
            "copies_out_seconds": _length(self.lanes[OUT]),
            "copying_seconds": seconds,
            "not_hidden_seconds": seconds - hidden,
            "hidden_share": hidden / seconds if seconds else None,
            "streamed_gib_each_way": self.streamed_bytes / GIB,
        }


def recorded(work: Callable[[], object], device: torch.device, streamed_bytes: int) -> Timeline:
    """Records a step by the profiler. The CPU has no copies: every operation computes."""
    kind = ProfilerActivity.CUDA if device.type == "cuda" else ProfilerActivity.CPU
    with profile(activities=[kind]) as profiler:
        work()
    events = profiler.profiler.kineto_results.events()
    wanted = DeviceType.CUDA if device.type == "cuda" else DeviceType.CPU
    return timeline_of((event for event in events if event.device_type() == wanted), streamed_bytes)


def timeline_of(events: Iterable, streamed_bytes: int) -> Timeline:
    """Returns the timeline of one device's profiler events, with name(), start_ns(), duration_ns()."""
    lanes: dict[str, list[Stretch]] = {lane: [] for lane in LANES}
    kernels: dict[str, tuple[float, int]] = {}
    for event in events:
        name, start = event.name(), event.start_ns()
        if name.endswith(" Sync") or name == "Stream Wait Event":  # reported where that is switched on: no work
            continue
        seconds, calls = kernels.get(name, (0.0, 0))
        kernels[name] = seconds + event.duration_ns() / 1e9, calls + 1
        if name in UPDATES:  # beside which a copy is not hidden
            continue
        lane = IN if name.startswith("Memcpy HtoD") else OUT if name.startswith("Memcpy DtoH") else COMPUTE
        lanes[lane].append((start, start + event.duration_ns()))
    everything = [stretch for lane in lanes.values() for stretch in lane]
    if not everything:
        return Timeline("recorded", 0.0, streamed_bytes, lanes)
    begin, end = min(start for start, _ in everything), max(end for _, end in everything)
    in_seconds = {
        lane: joined([((start - begin) / 1e9, (end - begin) / 1e9) for start, end in stretches])
        for lane, stretches in lanes.items()
    }
    return Timeline("recorded", (end - begin) / 1e9, streamed_bytes, in_seconds, kernels)


class _WatchedTransfers(SimulatedTransfers):
    """Also remembers when it copied, and when the compute stream waited."""

    def __init__(self, *arguments, **keywords):
        super().__init__(*arguments, **keywords)
        self.stretches: dict[str, list[Stretch]] = {lane: [] for lane in LANES}  # of COMPUTE: when it waits

    def copy(self, lane, *arguments):
        engine = ENGINES[lane]
        before = self.busy_seconds[engine]
        end = super().copy(lane, *arguments)
        self.stretches[f"copies {engine}"].append((end - (self.busy_seconds[engine] - before), end))
        return end

    def wait(self, lane, *events):
        before = self.exposed_seconds
        super().wait(lane, *events)
        if lane is not Lane.HOST:
            self.stretches[COMPUTE].append((self._clock.gpu - (self.exposed_seconds - before), self._clock.gpu))


def simulated(decoder: Decoder, case: StepCase, target: Target) -> Timeline:
    """Simulates the second step, which makes the first one's update. `decoder`: without weights. `target`: of a GPU."""
    made = []

    def watched(*arguments, **keywords) -> _WatchedTransfers:
        made.append(_WatchedTransfers(*arguments, **keywords))
        return made[-1]

    with patch.object(simulated_step, "SimulatedTransfers", watched):
        recording = simulated_step.record_step(decoder, case, target, {})
    stretches = made[0].stretches
    window = [(recording.began, recording.began + recording.seconds)]
    lanes = {lane: common(joined(stretches[lane]), window) for lane in LANES}
    ends = [recording.began, *(time for stretch in lanes[COMPUTE] for time in stretch), window[0][1]]
    lanes[COMPUTE] = joined(list(zip(ends[::2], ends[1::2], strict=True)))
    lanes = {
        lane: [(start - recording.began, end - recording.began) for start, end in found]
        for lane, found in lanes.items()
    }
    return Timeline("simulated", recording.seconds, recording.streamed_bytes, lanes)


def joined(stretches: Iterable[Stretch]) -> list[Stretch]:
    """Sorts stretches of time, joins those that touch or overlap, and drops empty ones."""
    found: list[list[float]] = []
    for start, end in sorted(stretch for stretch in stretches if stretch[1] > stretch[0]):
        if found and start <= found[-1][1]:
            found[-1][1] = max(found[-1][1], end)
        else:
            found.append([start, end])
    return [(start, end) for start, end in found]


def common(left: Sequence[Stretch], right: Sequence[Stretch]) -> list[Stretch]:
    """Returns the times that both lists cover. Each list is sorted, without overlaps."""
    found, i, j = [], 0, 0
    while i < len(left) and j < len(right):
        start, end = max(left[i][0], right[j][0]), min(left[i][1], right[j][1])
        if start < end:
            found.append((start, end))
        if left[i][1] <= right[j][1]:
            i += 1
        else:
            j += 1
    return found


def busy_shares(stretches: Sequence[Stretch], start: float, end: float, parts: int = PARTS) -> list[float]:
    """Returns the covered share, 0 to 1, of each of `parts` equal parts from `start` to `end`; all 0 if no time is
    between them."""
    if end <= start:
        return [0.0] * parts
    starts = [begin for begin, _ in stretches]
    before = [0.0, *accumulate(stop - begin for begin, stop in stretches)]  # covered until each one's begin

    def covered(time: float) -> float:
        index = bisect_right(starts, time) - 1
        return before[index] + min(time, stretches[index][1]) - starts[index] if index >= 0 else 0.0

    width = (end - start) / parts
    marks = [covered(start + width * part) for part in range(parts + 1)]
    return [min((later - earlier) / width, 1.0) for earlier, later in zip(marks, marks[1:], strict=False)]


def _length(stretches: Iterable[Stretch]) -> float:
    return sum(end - start for start, end in stretches)


def content(timeline: Timeline) -> dict:
    """Returns the input of `draw`, for a JSON file: title, figures, `kernels` [name, seconds, calls], the longest
    first, and `panels`: from and to in seconds, and each lane's busy shares."""
    copies = joined(timeline.lanes[IN] + timeline.lanes[OUT])
    windows = {"the whole step": (0.0, timeline.seconds)}
    if copies:
        windows["while states are copied"] = (copies[0][0], copies[-1][1])
    panels = {
        name: {
            "seconds": window,
            "busy": {lane: [round(share, 3) for share in busy_shares(timeline.lanes[lane], *window)] for lane in LANES},
        }
        for name, window in windows.items()
    }
    kernels = sorted(([name[:NAME_CHARACTERS], *taken] for name, taken in timeline.kernels.items()), key=itemgetter(1))
    return {"title": timeline.title, "figures": timeline.figures(), "kernels": kernels[::-1], "panels": panels}


def draw(contents: Sequence[dict], title: str, path: Path) -> None:
    """Draws a PNG: a row for each timeline's `content`, a column for each panel. Raises ImportError without
    matplotlib."""
    figure = pictures.figure(12, 0.8 + 2.2 * len(contents))
    figure.suptitle(title, fontsize=11)
    grid = figure.subplots(len(contents), 2, squeeze=False)
    for found, row in zip(contents, grid, strict=True):
        for axes in row[len(found["panels"]) :]:
            axes.set_visible(False)
        for axes, (name, panel) in zip(row, found["panels"].items(), strict=False):
            _draw_panel(axes, panel)
            axes.set_xlabel(f"{name}, milliseconds", fontsize=8)
        row[0].set_title(f"{found['title']}: {_in_words(found['figures'])}", fontsize=9, loc="left")
        row[0].set_yticks([lane + 0.4 for lane in range(len(LANES))], LANES, fontsize=8)
    pictures.save(figure, path)


def _draw_panel(axes, panel: dict) -> None:
    start, end = (1e3 * seconds for seconds in panel["seconds"])
    for row, (lane, colour) in enumerate(zip(LANES, ("C0", "C1", "C2"), strict=True)):
        shares = panel["busy"][lane]
        times = [start + (end - start) * part / len(shares) for part in range(len(shares) + 1)]
        heights = [row + 0.8 - 0.8 * share for share in [*shares, shares[-1]]]
        axes.fill_between(times, heights, row + 0.8, step="post", color=colour, linewidth=0)
        axes.axhline(row + 0.8, color="0.6", linewidth=0.5)
    axes.set_yticks([])
    axes.set_ylim(len(LANES), -0.2)
    if end > start:
        axes.set_xlim(start, end)
    axes.tick_params(axis="x", labelsize=8)
    pictures.frameless(axes)


def _in_words(figures: dict) -> str:
    if figures["hidden_share"] is None:
        return f"{figures['step_seconds']:.3g} s, nothing copied"
    return (
        f"{figures['step_seconds']:.3g} s; {figures['streamed_gib_each_way']:.3g} GiB each way in "
        f"{figures['copying_seconds']:.3g} s, {figures['hidden_share']:.0%} of that hidden behind compute"
    )
