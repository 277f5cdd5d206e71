"""Layouts of one decoder's step, each simulated once: its seconds, what it allocates, the smallest cap that it fits.

None of these depends on a cap, so that they can be asked for in any order.
"""

from collections.abc import Callable
from dataclasses import replace

from lowmem.core.decoder import Decoder
from lowmem.core.layout import Layout
from lowmem.cudasim.allocator import ROUNDING, SimulatedOutOfMemory
from lowmem.cudasim.tape import Memory, under_cap
from lowmem.planning.simulated_step import Recording, StepCase, Target, record_step
from lowmem.units import MIB

_PRECISION = 1 / 256  # of a smallest cap


class Simulations:
    """Recordings of one decoder for one target, made once each: of steps that differ from `base` in their layouts."""

    def __init__(self, make_decoder: Callable[[], Decoder], base: StepCase, target: Target):
        self.base = base
        self._target, self._known = target, {}
        self._decoder = make_decoder()
        self.units, self.blocks = len(self._decoder.units), len(self._decoder.blocks)
        sizes = [parameter.numel() for parameter in self._decoder.model.parameters()]
        self.parameters, self.largest_parameter = sum(sizes), max(sizes)
        self._recordings: dict[Layout, Recording] = {}
        self._peaks: dict[Layout, int] = {}
        self._runs: dict[Layout, _Runs] = {}

    def case(self, layout: Layout) -> StepCase:
        """`base`, laid out so."""
        return replace(self.base, layout=layout)

    def record(self, layout: Layout) -> Recording:
        """The recording of a layout; blocks that are made alike are run once."""
        if layout not in self._recordings:
            case = self.case(layout)
            self._recordings[layout] = record_step(self._decoder, case, self._target, self._known, alike=True)
        return self._recordings[layout]

    def record_run(self, layout: Layout) -> Recording:
        """The recording of a layout with a first step of all its groups, as a run has it, which takes longer."""
        return record_step(
            self._decoder, self.case(layout), self._target, self._known, alike=True, whole_first_step=True
        )

    def keeping(self, layout: Layout, kept: int) -> Layout:
        """`layout` with so much kept for backward; `kept`: see search.py."""
        if kept >= self.blocks:  # none is recomputed from its input
            layout = replace(layout, segment_blocks=1)
        return replace(layout, kept=kept)

    def allocated_bytes(self, layout: Layout) -> int:
        """The peak of what is allocated, before the allocator has its say."""
        if layout not in self._peaks:
            self._peaks[layout] = self.record(layout).tape.peak_bytes(ROUNDING)
        return self._peaks[layout]

    def runs(self, layout: Layout) -> "_Runs":
        """The layout's simulated runs under caps."""
        if layout not in self._runs:
            self._runs[layout] = _Runs(self.record(layout), self.allocated_bytes(layout))
        return self._runs[layout]

    def smallest_cap_bytes(self, layout: Layout) -> int:
        """The smallest cap under which the layout's run completes, in whole MiB and to a few thousandths."""
        return self.runs(layout).smallest_cap_bytes()


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
