"""Simulates one training step in different layouts (ways to compute it), and caches the results. They do not depend on
the user's memory caps, so the search may ask for them in any order."""

import math
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from functools import cached_property

from lowmem.core.decoder import Decoder
from lowmem.core.layout import Layout
from lowmem.cudasim.allocator import ROUNDING, SimulatedOutOfMemory
from lowmem.cudasim.tape import Memory, most_bytes, under_cap
from lowmem.planning.simulated_ranks import STREAMS
from lowmem.planning.simulated_step import SimulatedStep, StepCase, Target, record_step
from lowmem.units import MIB, round_up

_PRECISION = 1 / 256  # of a smallest cap


class Simulations:
    """Simulates one decoder's training step on one device, in different layouts, and caches the results. `base`
    describes the step. Methods that get a layout simulate the step with that layout."""

    def __init__(self, make_decoder: Callable[[], Decoder], base: StepCase, target: Target):
        self.base, self.target = base, target
        self._make_decoder, self._decoder = make_decoder, make_decoder()
        self.units, self.blocks = len(self._decoder.units), len(self._decoder.blocks)
        self.weight_bytes = [  # of each unit's matrices; weights that are vectors stay whole on the GPU
            base.dtype.itemsize * sum(p.numel() for p in unit.parameters.values() if p.dim() > 1) // base.mesh.sharing
            for unit in self._decoder.units
        ]
        sizes = [parameter.numel() for parameter in self._decoder.model.parameters()]
        self.parameters, self.largest_parameter = sum(sizes), max(sizes)
        self._known: dict = {}
        self._steps: dict[tuple[Layout, bool], SimulatedStep] = {}
        self._peaks: dict[Layout, int] = {}
        self._summaries: dict = {}  # of replayed regions, for `Tape.peak_bytes`
        self._runs: dict[Layout, dict[float, Memory | None]] = {}  # by layout, then by cap

    def changed(self, **fields) -> "Simulations":
        """Returns a new Simulations, with an empty cache, for the step `self.base` with `fields` replaced."""
        return Simulations(self._make_decoder, replace(self.base, **fields), self.target)

    def case(self, layout: Layout) -> StepCase:
        return replace(self.base, layout=layout)

    def largest_drawn_bytes(self, init: str) -> int:
        """Returns the bytes of the largest fp32 tensor that RAM holds whole while the initial weights are made. `init`:
        "random" or "pretrained"."""
        # Random weights are drawn in fp32. Pretrained ones are read in small pieces.
        return 4 * self.largest_parameter if init == "random" else 0

    def record(self, layout: Layout, whole_first_step: bool = False) -> SimulatedStep:
        """Returns the simulated step for `layout`. With `whole_first_step`, reserved bytes are exact (record_step), and
        the simulation takes twice as long."""
        key = layout, whole_first_step
        if key not in self._steps:
            self._steps[key] = record_step(
                self._decoder, self.case(layout), self.target, self._known, whole_first_step=whole_first_step
            )
        return self._steps[key]

    @property
    def state_bytes(self) -> tuple[int, ...]:
        return self.record(self.base.layout).state_bytes

    def bytes_on_disk(self, layout: Layout) -> int:
        """Returns the bytes of RAM that `layout` saves by having optimizer states on a disk, less those of buffers."""
        everything = self.record(replace(self.base.layout, states_on_disk=self.units))
        sizes = everything.disk_bytes
        # less the buffers through which these states are copied
        return sum(sizes[unit] for unit in layout.units_on_disk(self.units)) - everything.in_ram["disk_buffers"]

    @cached_property
    def input_bytes(self) -> int:
        """Returns a lower bound for the bytes of the input that one block saves for one sequence."""
        saved = most_bytes(self.record(self.base.layout).tape, "boundaries")
        return saved // (self.blocks * self.rows_at_once(self.base.layout))

    def rows_at_once(self, layout: Layout) -> int:
        """Returns the number of sequences that pass a block before the next block runs."""
        return self.base.batch if self.base.mesh.count > 1 else layout.group * layout.micro_batch

    @cached_property
    def slots_bytes(self) -> int:
        """Returns the bytes of the buffers on the GPU (slots) into which optimizer states are copied from RAM."""
        streamed = self.base.layout
        resident = replace(streamed, states_on_gpu=self.units)
        return self.allocated_bytes(streamed) + sum(self.state_bytes) - self.allocated_bytes(resident)

    def allocated_bytes(self, layout: Layout) -> int:
        """Returns the peak of the bytes that tensors take on the GPU, without memory that the caching allocator
        wastes."""
        if layout not in self._peaks:
            self._peaks[layout] = self.record(layout).tape.peak_bytes(ROUNDING, self._summaries)
        return self._peaks[layout]

    def run(self, layout: Layout, limit_bytes: int | None) -> Memory | None:
        """Returns the memory figures of a step in the model of PyTorch's caching allocator, which may reserve
        `limit_bytes` (None: no limit). Returns None if memory runs out."""
        known, limit = self._runs.setdefault(layout, {}), math.inf if limit_bytes is None else limit_bytes
        if limit not in known:
            # Under all caps of at least `wanted_peak_bytes`, memory use is the same.
            same = (run for cap, run in known.items() if run is not None and run.wanted_peak_bytes <= min(cap, limit))
            known[limit] = next(same, None)
            if known[limit] is None:
                with suppress(SimulatedOutOfMemory):
                    tape = self.record(layout, whole_first_step=True).tape
                    streams = STREAMS if self.base.mesh.count > 1 else None
                    known[limit] = under_cap(tape, limit_bytes, streams=streams)
        return known[limit]

    def memory_under(self, layout: Layout, widest: int, *smaller: int) -> tuple[Memory, int]:
        """Returns the memory figures of a step under a memory cap, and this cap in bytes. Tries `widest`, `smaller`,
        and caps between them in steps of 8 MiB, and takes the largest under which the step completes. If it completes
        under none, takes the cap that `smallest_cap_bytes` finds."""
        # A step may complete only under a smaller cap, because the allocator then frees its cache at another time.
        caps = {widest, *smaller, *range(widest, min(smaller, default=widest), -8 * MIB)}
        suffice = (cap for cap in sorted(caps, reverse=True) if self.run(layout, cap) is not None)
        cap = next(suffice, None) or self.smallest_cap_bytes(layout)
        return self.run(layout, cap), cap

    def completes(self, layout: Layout, limit_bytes: int | None) -> bool:
        """Returns True if a step does not run out of memory in the model of PyTorch's caching allocator. `limit_bytes`:
        the cap of reserved memory; None: no cap."""
        if limit_bytes is None or self.allocated_bytes(layout) > limit_bytes:
            return limit_bytes is None
        return self.run(layout, limit_bytes) is not None

    def fits(self, layout: Layout, limit_bytes: int | None) -> bool:
        """Returns True if a simulated step does not run out of memory under the cap `limit_bytes` (None: no cap). Also
        returns True if this is so under a smaller cap; the allocator then frees its cache at another time."""
        if self.completes(layout, limit_bytes):
            return True
        if self.allocated_bytes(layout) > limit_bytes:
            return False
        free = self.run(layout, None)
        # Training sets a slightly larger cap, so reserving `limit_bytes` without one is enough.
        return free.reserved_peak_bytes <= limit_bytes or self.smallest_cap_bytes(layout) <= limit_bytes

    def smallest_cap_bytes(self, layout: Layout) -> int:
        """Returns the smallest memory cap that bisection finds to suffice for a step, rounded up to whole MiB."""
        low, high = self.allocated_bytes(layout), self.run(layout, None).reserved_peak_bytes
        # This may miss the smallest cap, because a step may complete under one cap and fail under a larger one.
        while high - low > low * _PRECISION:
            middle = (low + high) // 2
            if self.run(layout, middle) is None:
                low = middle
            else:
                high = middle
        cap = round_up(high, MIB)
        while self.run(layout, cap) is None:  # the rounded cap may fail although a smaller one did not
            cap += MIB
        return cap
