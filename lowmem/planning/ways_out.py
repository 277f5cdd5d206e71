"""Finds settings with which training fits after all: more RAM, states on a disk, an 8-bit optimizer, shorter
sequences, or a layout that the planner chooses.

Each change is tried with the layouts that take the least memory. The search for a plan tries these layouts, too. So
there is a plan for each setting that an error message names.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace

from lowmem.core.layout import Layout
from lowmem.core.optimizers import OPTIMIZERS
from lowmem.fields import option_name
from lowmem.planning.choices import choices_by_home
from lowmem.planning.columns import within
from lowmem.planning.fastest import least_gpu, least_ram
from lowmem.planning.search import Room
from lowmem.planning.simulations import Simulations
from lowmem.settings import Settings
from lowmem.units import format_option, format_size

_SHORTEST = 32  # tokens of the shortest sequences that are tried
# fields of Settings that the planner chooses, unless the user does; only the last one changes bits
_LAYOUT_OPTIONS = "recompute states weights boundaries gradients segment_blocks group micro_batch".split()


@dataclass(frozen=True)
class WayOut:
    """Holds command-line options with which training fits, and the bytes of RAM and disk that it then takes."""

    changes: str  # the options other than --ram-limit
    ram_bytes: int
    ram_limit: int | None = None  # the RAM cap to be given; None if the present one is enough
    disk_bytes: int = 0

    @property
    def options(self) -> str:
        ram = "" if self.ram_limit is None else f"--ram-limit {format_option(self.ram_limit)}"
        return f"{self.changes} {ram}".strip()

    def to_dict(self) -> dict:
        """Returns the options and their bytes as an entry of the list `ways_out` in plan.json."""
        return {"options": self.options, "ram_bytes": self.ram_bytes, "disk_bytes": self.disk_bytes}

    def __str__(self) -> str:
        disk = [f"about {format_size(self.disk_bytes)} of a fast disk"] if self.disk_bytes else []
        remarks = disk + ["approximate moments"] * ("8bit" in self.changes)
        return f"{self.options} ({', '.join(remarks)})" if remarks else self.options


def in_a_sentence(found: list[WayOut]) -> str:
    """Returns a sentence that names the options in `found`, or "" if there are none."""
    return f" It fits with {', or with '.join(map(str, found))}." if found else ""


def left_to_the_planner(settings: Settings) -> dict[str, dict]:
    """Returns {options in words: changes of `settings`}. Each leaves a part of the layout (way to compute a step) to
    the planner: first one option that the user gave, such as `--recompute off`, then several, and last all of them. The
    micro-batch changes bits, so it comes late."""
    given = [name for name in _LAYOUT_OPTIONS if getattr(settings, name) != getattr(Settings, name)]
    exact = [name for name in given if name != "micro_batch"]
    several = [*([name] for name in exact), exact, given[len(exact) :], given]
    return {
        " ".join(f"{option_name(name)} auto" for name in names): {name: getattr(Settings, name) for name in names}
        for names in several
        if names
    }


@dataclass(frozen=True)
class WaysOut:
    """Looks for options with which training fits on a GPU. `room`: the limits of GPU memory and RAM, under which no
    layout fits. `ram_bytes(simulations, size)`: returns the RAM that all processes of the run on this machine take, if
    each stores `size` bytes of tensors there for copies to the GPU."""

    settings: Settings
    simulations: Simulations
    room: Room
    ram_bytes: Callable[[Simulations, int], int]

    def found(self) -> list[WayOut]:
        """Returns options with which training fits under the given cap of GPU memory, perhaps with a higher RAM cap."""
        by_home = choices_by_home(self.settings, self.simulations)
        exact = least_ram(by_home, self.simulations, self.room.gpu)
        if exact is None:
            smallest = least_gpu(by_home, self.simulations)
            found = [self._shorter(smallest, None)]
        else:
            peak = self.simulations.allocated_bytes(exact)
            found = [self._shorter(exact, peak)]
            if self.room.ram is not None:
                found = [
                    self._way("", self.simulations, exact, peak),
                    self._on_disk(exact, peak),
                    self._in_8_bits(exact, peak),
                    *found,
                ]
        return [way for way in (self._left_to_the_planner(), *found) if way is not None]

    def _left_to_the_planner(self) -> WayOut | None:
        ways = left_to_the_planner(self.settings).items()
        # If nothing fits with all of them, nothing fits with some.
        if not ways or self._changed(*list(ways)[-1]) is None:
            return None
        return next(way for options, changes in ways if (way := self._changed(options, changes)) is not None)

    def _changed(self, options: str, changes: dict) -> WayOut | None:
        """Returns the WayOut that names `options`, or None if no layout fits with these `changes` of the settings."""
        by_home = choices_by_home(replace(self.settings, **changes), self.simulations)
        layout = least_ram(by_home, self.simulations, self.room.gpu)
        if layout is None or not within(self.simulations.record(layout).streamed_bytes, self.room.ram):
            return None
        return self._way(options, self.simulations, layout, None)

    def _way(self, changes: str, simulations: Simulations, layout: Layout, peak: int | None) -> WayOut | None:
        """Returns the WayOut that names the options `changes`, or None if `layout` does not fit into GPU memory with
        them. `simulations`: of the step with these options. `peak`: `layout` fits if it allocates at most so many
        bytes; None: if its step completes in the allocator's model."""
        allocated = simulations.allocated_bytes(layout)
        if not (simulations.fits(layout, self.room.gpu) if peak is None else allocated <= peak):
            return None
        simulated = simulations.record(layout)
        ram_bytes = self.ram_bytes(simulations, simulated.streamed_bytes)
        ram_limit = None if within(simulated.streamed_bytes, self.room.ram) else ram_bytes
        return WayOut(changes, ram_bytes, ram_limit, sum(simulated.disk_bytes))

    def _on_disk(self, layout: Layout, peak: int) -> WayOut | None:
        settings, units = self.settings, self.simulations.units
        given = settings.states_folder is not None or settings.states == "resident"
        if given or layout.states_on_gpu == units or self.simulations.base.mesh.count > 1:  # ranks have no disk
            return None
        on_disk = replace(layout, states_on_disk=units)
        return self._way("--states-folder DIR", self.simulations, on_disk, peak)

    def _in_8_bits(self, layout: Layout, peak: int) -> WayOut | None:
        if self.settings.optimizer != "adamw" or layout.states_on_gpu == self.simulations.units:
            return None
        simulations = self.simulations.changed(optimizer=OPTIMIZERS["adamw8bit"])
        return self._way("--optimizer adamw8bit", simulations, layout, peak)

    def _shorter(self, layout: Layout, peak: int | None) -> WayOut | None:
        lengths = [length for n in range(1, 16) if (length := self.settings.seq >> n) >= _SHORTEST]
        if not lengths or self.settings.target_tokens is not None:
            return None
        if self._with_seq(lengths[-1], layout, peak) is None:
            return None
        # the longest sequences that fit
        return next(way for seq in lengths if (way := self._with_seq(seq, layout, peak)) is not None)

    def _with_seq(self, seq: int, layout: Layout, peak: int | None) -> WayOut | None:
        simulations = self.simulations.changed(seq=seq)
        if not within(simulations.record(layout).streamed_bytes, self.room.ram):
            return None
        return self._way(f"--seq {seq}", simulations, layout, peak)
