"""A rank that trains CASES: `work`, started by experiments/harness/group.py.

With "stored" in asked.json, loads that checkpoint or, if it is null, makes a step; then saves a checkpoint in FOLDER.
With "agreement", leaves FOLDER/agreed-RANK.json: the findings of a rank if something is true of one alone. Otherwise
rank 0 leaves FOLDER/results.pt: {case: losses, norms, tensors of the store by name, calls of collectives and
bytes sent in a step}.
"""

import json
import sys
import time
from collections import Counter
from itertools import count
from pathlib import Path

import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parent.parent)]
from cases import CASES, DEVICE, LEARNING_RATE  # noqa: E402

from lowmem.core import parameters, shares  # noqa: E402
from lowmem.core.step import StepAbandoned  # noqa: E402
from lowmem.distributed import collectives  # noqa: E402
from lowmem.files import Damaged  # noqa: E402
from lowmem.run.checkpoint import load_checkpoint, save_checkpoint  # noqa: E402


class Calls(TorchDispatchMode):
    """Counts the collectives of its block, by name, and the bytes that a rank sends in them."""

    def __init__(self):
        super().__init__()
        self.counts: Counter[str] = Counter()
        self.sent_bytes = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.namespace in ("c10d", "_c10d_functional"):
            name, own = func._schema.name.split("::")[1], args[1][0] if isinstance(args[1], list) else args[1]
            self.counts[name] += 1
            others = dist.get_world_size() - 1
            self.sent_bytes += own.nbytes * others // (others + 1 if name.startswith("alltoall") else 1)
        return func(*args, **(kwargs or {}))


def work(folder: Path, rank: int) -> None:
    asked = json.loads((folder / "asked.json").read_text())
    where = {"init_method": f"file://{folder / 'rendezvous'}", "rank": rank, "world_size": asked["ranks"]}
    torch.set_num_threads(1)
    if DEVICE.type == "cuda":
        torch.cuda.set_device(rank)
    dist.init_process_group("gloo", **where)
    parameters.PIECE, shares.SLICE = 4096, 1000  # several of each in a share
    if "stored" in asked:
        saved_again(CASES[asked["cases"][0]], folder, asked["stored"], ranks_of(asked))
    elif "agreement" in asked:
        agreed(CASES[asked["cases"][0]], folder, ranks_of(asked))
    else:
        results = {name: trained(CASES[name], ranks_of(asked)) for name in asked["cases"]}
        if rank == 0:
            torch.save(results, folder / "results.pt")
    dist.barrier()
    (folder / f"through-{rank}").touch()
    while len([*folder.glob("through-*")]) < asked["ranks"]:  # a rank that ends earlier makes gloo abort the others
        time.sleep(0.01)
    dist.destroy_process_group()


def ranks_of(asked: dict) -> collectives.SeveralRanks:
    ranks = collectives.SeveralRanks(DEVICE.type)
    if asked.get("sharing", ranks.count) < ranks.count:
        ranks.share_among(asked["sharing"])
    return ranks


def trained(case, ranks: collectives.SeveralRanks) -> dict:
    step, store = case.step(ranks)
    rows = []
    for number, batch in enumerate(case.batches()):
        with Calls() as calls:
            rows.append(step(batch, number, LEARNING_RATE))
    evaluated = step.evaluate(case.batches()[0])
    return {
        "losses": [row.loss for row in rows],
        "norms": [row.grad_norm for row in rows],
        "evaluated": evaluated,
        "tensors": ranks.on_first(lambda: whole(store)),
        "masters": ranks.on_first(lambda: {name: store.part_of(name).master(name) for name in store.names()}),
        "calls": dict(calls.counts),
        "sent_bytes": calls.sent_bytes,
    }


def saved_again(case, folder: Path, checkpoint: str | None, ranks=None) -> None:
    """Saves what is in `checkpoint` or, without one, what a step has trained."""
    step, store = case.step(ranks)
    if checkpoint is None:
        step(case.batches()[0], 0, LEARNING_RATE)
        step.flush()
    else:
        load_checkpoint(Path(checkpoint), store, {})
    state = dict.fromkeys(("updates", "loss_scale", "skipped", "eval_first", "recoveries"))
    store.ranks.on_first(lambda: save_checkpoint(folder, store, {"step": 1} | state, keep_last=1))


def agreed(case, folder: Path, ranks: collectives.SeveralRanks) -> None:
    """An error of rank 1 alone, values that are equal and not, and a step that all give up at each place of it."""
    found = {"all": ranks.on_all(lambda: ranks.rank)}

    def fails_on_rank_1() -> None:
        if ranks.rank == 1:
            raise Damaged("the file of rank 1")

    try:
        ranks.on_all(fails_on_rank_1)
    except Damaged as error:
        found |= {"error": str(error), "said_by": error.said_by}
    found |= {"same": ranks.agree_on({"a": [1, 2.5]}), "own": ranks.agree_on(ranks.rank)}
    expected, different = after_a_step(case, *case.step(ranks)), []
    for places in count():
        step, store = case.step(ranks)
        left = iter(range(places))
        step.abandoned = lambda left=left: next(left, None) is None
        try:
            step(case.batches()[0], 0, LEARNING_RATE)
            break
        except StepAbandoned:
            step.abandoned = None
        if not all(map(torch.equal, after_a_step(case, step, store), expected)):
            different.append(places)
    found |= {"different": different, "places": places}
    (folder / f"agreed-{ranks.rank}.json").write_text(json.dumps(found))


def after_a_step(case, step, store) -> list[torch.Tensor]:
    step(case.batches()[0], 0, LEARNING_RATE)
    step.flush()
    return [tensor.clone() for part in store.parts for tensor in (part.working, *part.state.values())]


def whole(store) -> dict[str, torch.Tensor]:
    """All numbers of the store, of all ranks, by name."""
    return {
        f"{part.name} {key}": part.ranks.range_of(tensor, 0, tensor.numel() * part.ranks.sharing).clone()
        for part in store.parts
        for key, tensor in {"working": part.working, **part.state}.items()
    }
