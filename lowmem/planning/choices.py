"""Lists the layouts of a training step that the settings allow, in the order in which the search tries them."""

from collections.abc import Iterator, Sequence, Set
from dataclasses import dataclass, replace
from itertools import product

from lowmem.core.layout import Fate, Layout
from lowmem.core.optimizers import OPTIMIZERS
from lowmem.core.precision import WORKING_DTYPES
from lowmem.planning.simulated_ranks import ALONE, Mesh
from lowmem.planning.simulated_step import StepCase
from lowmem.planning.simulations import Simulations
from lowmem.settings import Settings

FEW_SEQUENCES = 4  # the largest micro-batch if gradients are sent or dropped: more would not fit next to the inputs
FEW_MICRO_BATCHES = 16  # the most in a group of the whole batch with held gradients: more save too many inputs
SEGMENTS, SEGMENTS_OF_A_BATCH = (1, 2, 3, 4), (1, 2, 4, 6, 8)  # blocks; the second list if the batch is one group


@dataclass(frozen=True)
class Choices:
    """Describes a set of layouts (ways to compute a step): `base` with each combination of the listed values. Ranges
    have steps of 1."""

    base: Layout
    micro_batches: Sequence[int]  # sequences in a micro-batch; in ascending order, like all values below
    groups: Sequence[int] | None  # micro-batches that pass each block together; None: any number
    segments: Sequence[int]  # consecutive blocks that are recomputed together
    kept: range  # Layout.kept, how much blocks save for backward: 0 (inputs of segments) to 2 x blocks (whole graphs)
    units_on_gpu: range  # how many units (such as blocks) have states on the GPU, or weights if `base` has those in RAM
    whole_batch: bool = False  # whether the whole batch must be one group
    units_on_disk: range | None = None  # how many units may have states on a disk; None: as many as in `base`

    def groups_of(self, batch: int, micro_batch: int) -> list[int]:
        """Returns the group sizes to try, in ascending order; [] if none is possible. A group size is how many
        micro-batches pass each block together. `batch` and `micro_batch` are in sequences."""
        count = batch // micro_batch
        if self.groups is not None:
            return [size for size in self.groups if size == count or not self.whole_batch and count % size == 0]
        if self.whole_batch or count == 1:
            return [count]
        sizes = [1]
        while larger := [size for size in range(2 * sizes[-1], count) if count % size == 0]:
            sizes.append(larger[0])
        return sizes

    def layout(self, micro_batch: int, group: int, segment: int, kept: int, units_on_gpu: int) -> Layout:
        home = "states_on_gpu" if self.base.weights_on_gpu is None else "weights_on_gpu"
        return replace(
            self.base, micro_batch=micro_batch, group=group, segment_blocks=segment, kept=kept, **{home: units_on_gpu}
        )


ByHome = Sequence[Sequence[Choices]]  # a list of Choices for each home of weights, inputs and states (choices_by_home)


def only(number: int) -> range:
    return range(number, number + 1)


def step_case(settings: Settings, precision: str, mesh: Mesh = ALONE) -> StepCase:
    """Returns the training step to simulate, in `precision` (such as "bf16"). Its layout is a placeholder, which each
    simulation replaces."""
    return StepCase(
        settings.seq, settings.batch, Layout(settings.micro_batch or 1), WORKING_DTYPES[precision],
        OPTIMIZERS[settings.optimizer], settings.clip_norm, settings.masks_documents,
        target_tokens=settings.target_tokens, mesh=mesh,
    )  # fmt: skip


def choices_by_home(settings: Settings, simulations: Simulations) -> ByHome:
    """Returns the layouts that the settings allow, as lists of Choices (sets of layouts), in the order to try them.
    Each list is for one combination of places: weights on the GPU or in RAM, inputs of blocks on the GPU or in RAM,
    optimizer states with or without a disk. The Choices in a list differ in what happens to gradients after they are
    summed (Fate). They also differ in whether all micro-batches pass each block together. With several ranks, blocks
    may also keep gathered weights."""
    in_ram = {"auto": (False, True), "resident": (False,), "streamed": (True,)}
    keeps_everything = settings.recompute == "off"
    weights = (False,) if settings.states == "resident" or keeps_everything else in_ram[settings.weights]
    inputs = (False,) if keeps_everything else in_ram[settings.boundaries]
    units = simulations.units
    disk = (None,) if settings.states_folder is None else (None, range(units + 1))
    disk = (only(units),) if settings.states == "disk" else disk
    by_home = []
    # All on the GPU, weights in RAM, block inputs in RAM, both; then the same with states on a disk, if allowed.
    for home in product(disk, inputs, weights):
        of_home = list(_fates(settings, _with_home(settings, simulations, *home), simulations.base))
        if simulations.base.mesh.count > 1:
            # numbers of blocks that keep their gathered weights; the others gather twice
            counts = (0, simulations.blocks)
            of_home = [replace(each, base=replace(each.base, gathered=n)) for each in of_home for n in counts]
        if of_home:
            by_home.append(of_home)
    return by_home


def with_fates(by_home: ByHome, fates: Set[Fate]) -> ByHome:
    """Returns a copy of the lists `by_home` with only those Choices (sets of layouts) whose Fate is in `fates`. A Fate
    is what happens to gradients after they are summed. Leaves out lists that would be empty."""
    chosen = ([choices for choices in of_home if choices.base.fate in fates] for of_home in by_home)
    return [of_home for of_home in chosen if of_home]


def _with_home(
    settings: Settings, simulations: Simulations, disk: range | None, inputs_in_ram: bool, weights_in_ram: bool
) -> Choices:
    choices = replace(open_choices(settings, simulations), units_on_disk=disk)
    base = Layout(1, boundaries_in_ram=inputs_in_ram, weights_on_gpu=1 if weights_in_ram else None)
    kept = choices.kept
    if weights_in_ram:
        kept = range(kept.start, min(kept.stop, simulations.blocks + 1))  # a kept graph holds its block's weights
        choices = replace(choices, units_on_gpu=range(1, simulations.units - 1))
    if inputs_in_ram:  # kept tensors would be on the GPU, and take more memory than inputs
        kept = kept[:1]
    return replace(choices, base=base, kept=kept)


def open_choices(settings: Settings, simulations: Simulations) -> Choices:
    """Returns the set of layouts that the settings allow if weights, block inputs and gradients are on the GPU."""
    units, blocks = simulations.units, simulations.blocks
    kept = {"auto": range(2 * blocks + 1), "on": only(0), "products": only(blocks), "off": only(2 * blocks)}
    units_on_gpu = {"auto": range(units + 1), "resident": only(units)}
    micro_batches = [size for size in range(1, settings.batch + 1) if settings.batch % size == 0]
    if settings.micro_batch is not None:
        micro_batches = [settings.micro_batch]
    if settings.group is not None:
        micro_batches = [size for size in micro_batches if (settings.batch // size) % settings.group == 0]
    return Choices(
        Layout(1),
        tuple(micro_batches),
        groups=None if settings.group is None else (settings.group,),
        segments=SEGMENTS if settings.segment_blocks is None else (settings.segment_blocks,),
        kept=kept[settings.recompute],
        units_on_gpu=units_on_gpu.get(settings.states, only(0)),
    )


def _fates(settings: Settings, choices: Choices, case: StepCase) -> Iterator[Choices]:
    """Yields a copy of `choices` for each allowed Fate (what happens to gradients after they are summed). For HELD
    (they stay on the GPU), yields up to two: with groups (micro-batches that pass each block together) of any allowed
    size, and with the whole batch as one group."""
    inputs_in_ram, needs_all = choices.base.boundaries_in_ram, case.needs_all_gradients
    held = not inputs_in_ram and not (needs_all and settings.gradients == "streamed")
    # HELD: gradients stay on the GPU until the update. Several ranks always make one group of the whole batch.
    if held and case.mesh.count == 1:
        yield choices
    segments = SEGMENTS_OF_A_BATCH if settings.segment_blocks is None else choices.segments
    whole = replace(choices, segments=segments, whole_batch=True)
    possible = tuple(size for size in choices.micro_batches if whole.groups_of(settings.batch, size))
    whole = replace(whole, micro_batches=possible)
    if not whole.micro_batches:
        return
    if held:
        held_sizes = tuple(size for size in possible if settings.batch // size <= FEW_MICRO_BATCHES)
        if held_sizes:
            yield replace(whole, micro_batches=held_sizes)
    # No update waits for the gradient norm, so backward can update each block at once.
    if not needs_all:
        yield replace(whole, base=replace(whole.base, fate=Fate.APPLIED))
        return
    smallest, *larger = whole.micro_batches
    whole = replace(whole, micro_batches=(smallest, *(size for size in larger if size <= FEW_SEQUENCES)))
    if settings.gradients != "resident" and settings.states != "resident":
        # gradients wait in RAM
        sent = replace(whole.base, fate=Fate.SENT)
        units_on_gpu = choices.units_on_gpu if sent.weights_on_gpu is not None else only(0)
        yield replace(whole, base=sent, units_on_gpu=units_on_gpu)
    if settings.gradients != "streamed":
        # gradients are freed, but for their norm, and a second pass computes them again
        yield replace(whole, base=replace(whole.base, fate=Fate.DROPPED))
