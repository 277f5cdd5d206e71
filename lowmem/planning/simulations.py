"""Layouts of one decoder's step, each simulated once: its seconds, what it allocates, the smallest cap that it fits.

None of these depends on a cap, so that they can be asked for in any order.
"""

from collections.abc import Callable
from dataclasses import replace

from lowmem.core.decoder import Decoder
from lowmem.core.layout import Schedule
from lowmem.simulate.allocator import ROUNDING, SimulatedOutOfMemory
from lowmem.simulate.step import Memory, Recording, StepCase, Target, record_step, under_cap
from lowmem.units import MIB

_PRECISION = 1 / 256  # of a smallest cap


class Simulations:
    """Recordings of one decoder for one target, made once each; layouts differ from `base` in schedule and in how many
    of the `units` are resident."""

    def __init__(self, make_decoder: Callable[[], Decoder], base: StepCase, target: Target):
        self.base = base
        self._target, self._known = target, {}
        self._decoder = make_decoder()
        self.units, self.blocks = len(self._decoder.units), len(self._decoder.blocks)
        sizes = [parameter.numel() for parameter in self._decoder.model.parameters()]
        self.parameters, self.largest_parameter = sum(sizes), max(sizes)
        self._recordings: dict[tuple[Schedule, int], Recording] = {}
        self._peaks: dict[tuple[Schedule, int], int] = {}
        self._runs: dict[tuple[Schedule, int], _Runs] = {}

    def record(self, schedule: Schedule, resident_units: int) -> tuple[StepCase, Recording]:
        """The recording of a layout; blocks that are made alike are run once."""
        case = replace(self.base, schedule=schedule, resident_units=resident_units)
        layout = schedule, resident_units
        if layout not in self._recordings:
            self._recordings[layout] = record_step(self._decoder, case, self._target, self._known, alike=True)
        return case, self._recordings[layout]

    def record_run(self, case: StepCase) -> Recording:
        """The recording of a layout with a first step of all its groups, as a run has it, which takes longer."""
        return record_step(self._decoder, case, self._target, self._known, alike=True, whole_first_step=True)

    def schedule(
        self,
        micro_batch: int,
        group: int,
        segment_blocks: int,
        kept: int,
        norm_first: bool = False,
        first_group: int = 0,
    ) -> Schedule:
        """`kept`: see search.py."""
        if kept == 2 * self.blocks:
            return Schedule(micro_batch, group, 1, recompute=False, norm_first=norm_first, first_group=first_group)
        whole = max(kept - self.blocks, 0)
        products = min(kept, self.blocks) - whole
        segment_blocks = segment_blocks if products + whole < self.blocks else 1  # none is recomputed from its input
        return Schedule(micro_batch, group, segment_blocks, True, products, whole, norm_first, first_group=first_group)

    def allocated_bytes(self, schedule: Schedule, resident_units: int) -> int:
        """The peak of what is allocated, before the allocator has its say."""
        layout = schedule, resident_units
        if layout not in self._peaks:
            self._peaks[layout] = self.record(*layout)[1].tape.peak_bytes(ROUNDING)
        return self._peaks[layout]

    def runs(self, schedule: Schedule, resident_units: int) -> "_Runs":
        """The layout's simulated runs under caps."""
        layout = schedule, resident_units
        if layout not in self._runs:
            self._runs[layout] = _Runs(self.record(*layout)[1], self.allocated_bytes(*layout))
        return self._runs[layout]


class _Runs:
    """Simulated runs of one layout, of which the smallest cap is looked for: bisection between what is allocated and
    what a run without a cap reserves, which no cap above it changes. It stops when a question is answered; the caps
    that are tried do not depend on the questions, and so the answers agree.

    Under a cap between the two the run gives cached memory back to the driver. Holes in it need not shrink as the cap
    grows, so a run may complete under one cap and not under the next; but a layout that completes under a cap can
    be run under that one. (The allocator looks at the cap before it maps whole pages, so that a little less than is
    allocated may do; nobody calls that a cap.)"""

    def __init__(self, recording: Recording, allocated_bytes: int):
        self._recording, self._low = recording, allocated_bytes
        self._high: int | None = None  # under which the run has completed
        self.memory: Memory | None = None  # of that run

    def smallest_cap_bytes(self) -> int:
        """In whole MiB, to a few thousandths."""
        while not self._settled():
            self._try_one_more()
        return -(-self._high // MIB) * MIB

    def fits(self, limit_bytes: int | None) -> bool:
        """Whether the smallest cap is within the limit."""
        if limit_bytes is None:
            limit_bytes = 2**62
        while True:
            if self._low > limit_bytes:
                return False
            if self._high is not None and -(-self._high // MIB) * MIB <= limit_bytes:
                return True
            if self._settled():
                return False
            self._try_one_more()

    def _settled(self) -> bool:
        return self._high is not None and self._high - self._low <= self._low * _PRECISION

    def _try_one_more(self) -> None:
        cap = None if self._high is None else (self._low + self._high) // 2
        try:
            self.memory = under_cap(self._recording.tape, cap)
            self._high = self.memory.reserved_peak_bytes if cap is None else cap
        except SimulatedOutOfMemory:
            self._low = cap


def smallest_cap_bytes(simulations: Simulations, schedule: Schedule, resident: int) -> int:
    """The smallest cap under which the layout's run completes, in whole MiB and to a few thousandths."""
    return simulations.runs(schedule, resident).smallest_cap_bytes()
