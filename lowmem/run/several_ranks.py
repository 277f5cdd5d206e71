"""Contains the parts of a training run that differ if several ranks (torchrun's processes) train together. Rank 0
plans, tokenizes, saves, exports, and writes and prints everything."""

import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from lowmem.core.ranks import Ranks
from lowmem.data.dataset import Data
from lowmem.errors import InputError, PlanError
from lowmem.planning.plan import Plan
from lowmem.planning.planner import make_plan
from lowmem.planning.question import Question
from lowmem.planning.simulated_ranks import Mesh
from lowmem.run.metrics import recorded


class QuietLog:
    """Replaces RunLog on all ranks except rank 0. Keeps rows of metrics.jsonl in `rows`, and writes nothing."""

    def __init__(self, folder: Path):
        self.rows: list[dict] = []
        self._folder = folder

    def resume(self, state: dict) -> None:
        self.rows, _ = recorded(state, self._folder)

    def step(self, row: dict) -> None:
        self.rows.append(row)

    def say(self, *_) -> None:
        pass

    start = sample = end_bar = pictures = close = say


def of_one_rank(question: Question, mesh: Mesh, on_this_machine: int, micro_batch: int | None = None) -> Question:
    """Returns the planner's input for one rank (process), with its share of the batch and of the RAM cap. `mesh`: how
    ranks share the model. `on_this_machine`: number of ranks that share the RAM cap. `micro_batch`: the checkpoint's,
    used if the settings give none. Raises InputError for settings that several ranks do not support."""
    settings, limit = question.settings, question.settings.ram_limit_bytes
    # A resumed run has the same bits only with the same size, and a new plan might choose another.
    micro_batch = settings.micro_batch or micro_batch
    if mesh.count == 1:
        if micro_batch is not None and settings.batch % micro_batch:
            micro_batch = None  # made for another batch; comparing identities will report that
        return replace(question, settings=replace(settings, micro_batch=micro_batch))
    refused = {
        "encoder-decoders": question.config.is_encoder_decoder,
        "--weights streamed": settings.weights == "streamed",
        "--states disk and --states-folder": settings.states == "disk" or settings.states_folder is not None,
        "--group": settings.group is not None,
    }
    if any(refused.values()):
        said = ", ".join(what for what, is_asked in refused.items() if is_asked)
        raise InputError(f"{said}: not with several processes of torchrun; run it in one process")
    size = micro_batch or 1
    rows = math.ceil(settings.batch / (size * mesh.count)) * size
    share = {"batch": rows, "micro_batch": micro_batch, "ram_limit_bytes": limit and limit // on_this_machine}
    settings = replace(settings, weights="resident", **share)
    return replace(question, settings=settings, mesh=mesh, ranks_here=on_this_machine)


def plan_for(question: Question, gpus: int, machines: int = 1) -> Plan:
    """Returns the plan for one of torchrun's processes. There are `gpus` processes on each of `machines` machines.
    Raises InputError if a number is below 1, and PlanError if training does not fit under the memory caps."""
    for option, number in {"--gpus": gpus, "--machines": machines}.items():
        if not isinstance(number, int) or number < 1:
            raise InputError(f"{option} {number!r}: give a whole number, at least 1.")
    return plan_of_ranks(question, meshes(gpus * machines, machines), gpus, make_plan)


def meshes(count: int, machines: int, alike: bool = True, sharing: int | None = None) -> list[Mesh]:
    """Returns the ways (meshes) in which `count` ranks (processes) may shard a model, in the order to try. If `alike`
    (all machines have equally many ranks), sharding inside each machine comes first; then over all. `sharing`: number
    of ranks that shared a model before a resume, or None. If a mesh has this number, only that mesh is returned."""
    possible = [Mesh(count, machines=machines)]
    # Sharding over all machines sends more over the network, so it comes second.
    if machines > 1 and alike and count > machines:  # with one rank each, both send as much
        possible.insert(0, Mesh(count // machines, machines, machines))
    # The bits depend on the number of ranks that share a model.
    return [mesh for mesh in possible if mesh.sharing == sharing] or possible


def plan_of_ranks(
    question: Question, possible: list[Mesh], on_this_machine: int, make: Callable, micro_batch: int | None = None
) -> Plan:
    """Returns one rank's plan for the first of the `possible` meshes (ways to shard a model) that fits. Its `settings`
    have the undivided batch and RAM limit. `on_this_machine`: number of ranks that share this limit. `make`: makes a
    Plan from a Question. `micro_batch`: the checkpoint's, or None. Raises PlanError, which names one rank's GPU memory
    and a machine's RAM, if no mesh fits."""
    for mesh in possible:
        mesh = replace(mesh, network=question.settings.network_rate_bytes)
        try:
            plan = make(of_one_rank(question, mesh, on_this_machine, micro_batch))
            break
        except PlanError as error:
            if mesh.sharing == possible[-1].sharing or not error.ways_out:  # no way out: the caps are enough
                raise
    if mesh.count == 1:
        return plan
    whole = {name: getattr(question.settings, name) for name in ("batch", "micro_batch", "weights", "ram_limit_bytes")}
    return replace(
        plan, settings=replace(plan.settings, **whole), checkpoint_bytes=plan.checkpoint_bytes * mesh.sharing,
        faster_with_ram=None,  # this names one rank's RAM, as if it were --ram-limit
    )  # fmt: skip


def shared_data(load: Callable[[], Data], ranks: Ranks) -> Data:
    """Returns the data that `load` loads. With several ranks, rank 0 stores the tokens in the run folder, and all ranks
    load them from there."""

    def load_and_keep() -> None:
        data = load()
        data.keep()
        data.close()

    if ranks.count > 1:
        ranks.on_first(load_and_keep)
    return load()
