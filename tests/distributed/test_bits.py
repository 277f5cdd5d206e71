"""Several ranks train bit for bit as one process does that sums in as many parts."""

import json
import sys
from pathlib import Path

import pytest
import torch

from experiments.harness import group

sys.path.insert(0, str(Path(__file__).parent))
from cases import BLOCKS, CASES, LEARNING_RATE  # noqa: E402
from in_parts import train_in_parts  # noqa: E402
from worker import work  # noqa: E402

from lowmem.core import parameters  # noqa: E402
from lowmem.core.shares import Shares  # noqa: E402


@pytest.fixture(scope="module")
def trained(request, tmp_path_factory):
    """Results by number of ranks, of ranks that store a model together, and case. Each pair of numbers trains once, all
    cases that are asked for."""
    done = {}
    asked = [item.callspec.params for item in request.session.items if item.fspath == request.fspath]

    def results(ranks: int, sharing: int | None = None) -> dict:
        if (ranks, sharing) not in done:
            folder = tmp_path_factory.mktemp("ranks")
            of_these = (params for params in asked if params.get("ranks", 2) == ranks)
            cases = sorted({params["name"] for params in of_these if params.get("sharing") == sharing})
            told = {"ranks": ranks, "sharing": sharing or ranks, "cases": cases}
            (folder / "asked.json").write_text(json.dumps(told))
            group.run(work, folder, ranks)
            done[ranks, sharing] = torch.load(folder / "results.pt", map_location="cpu")
        return done[ranks, sharing]

    return results


RANKS = [(ranks, None, name) for ranks in (2, 4) for name in CASES]
MACHINES = [(4, 2, name) for name in ("bf16", "kept", "a rank has no micro-batch", "no clipping, applied")]


@pytest.mark.quick(3)
@pytest.mark.parametrize("ranks, sharing, name", [*RANKS, *MACHINES, (6, 2, "states and gradients in RAM")])
def test_ranks_train_as_one_process_that_sums_in_as_many_parts(trained, monkeypatch, ranks, sharing, name):
    monkeypatch.setattr(parameters, "PIECE", 4096)
    found = trained(ranks, sharing)[name]
    step, store = CASES[name].step()
    losses, norms = train_in_parts(step, store, CASES[name].batches(), ranks, sharing or ranks)
    assert found["losses"] == losses and len(losses) == CASES[name].steps
    assert found["norms"] == norms
    if CASES[name].settings.get("clip_norm", 0) is not None:
        assert max(norms) > 2 * step._clip_norm, "clipping bites"
    for part in store.parts:
        for key, tensor in {"working": part.working, **part.state}.items():
            there = found["tensors"][f"{part.name} {key}"]
            assert torch.equal(there[: tensor.numel()].cpu(), tensor.cpu()), f"{part.name} {key}"
            assert not there[tensor.numel() :].any() or "scale" in key, "padding stays zero"
    for parameter in store.names():
        assert torch.equal(found["masters"][parameter], store.part_of(parameter).master(parameter))


def flat(weights: dict[str, torch.Tensor]) -> torch.Tensor:
    return torch.cat([weights[name].flatten() for name in sorted(weights)])


@pytest.mark.quick(1)
@pytest.mark.parametrize("name", ["untied", "fp32"])
def test_losses_are_those_of_one_process_but_for_rounding(trained, name):
    step, store = CASES[name].step()
    batches, before = CASES[name].batches(), flat(dict(store.masters()))
    losses = [step(batch, number, LEARNING_RATE).loss for number, batch in enumerate(batches)]
    found = trained(2)[name]
    assert found["losses"] == pytest.approx(losses, rel=1e-6)
    step.flush()
    after = flat(dict(store.masters()))
    assert (flat(found["masters"]) - after).norm() < 1e-4 * (after - before).norm(), "of the distance trained"
    loss, tokens = step.evaluate(batches[0])
    assert found["evaluated"][0] == pytest.approx(loss, rel=1e-6) and found["evaluated"][1] == tokens


COUNTED = ["bf16, 4 steps", "sixteen micro-batches a rank", "untied", "kept", "one block kept"]


@pytest.mark.parametrize("name", [*COUNTED, "four micro-batches a rank"])
def test_a_unit_is_gathered_twice_and_reduced_once_in_a_step(trained, name):
    calls = trained(2)[name]["calls"]
    ends = 1 + (CASES[name].family == "llama")  # the embeddings, and the untied head with the last norm
    gathers = 2 * BLOCKS - CASES[name].settings.get("gathered", 0) + ends
    assert calls.pop("_allgather_base_") == gathers + 1, "all vectors once"
    assert calls.pop("allgather_") == 2, "the loss and the norm"
    assert calls.keys() == {"alltoall_base_"}


@pytest.mark.quick(4)
@pytest.mark.parametrize("name", COUNTED)
@pytest.mark.parametrize("ranks", [2, 4])
def test_bytes_sent_are_those_of_weights_and_gradients_for_any_number_of_micro_batches(trained, name, ranks):
    case, (_, store) = CASES[name], CASES[name].step()
    ends, sent = (0, max(part.unit for part in store.parts)), 2 * 8  # the loss and the norm, in fp64
    ends = (*ends, *range(ends[1] - case.settings.get("gathered", 0), ends[1]))  # and blocks that stay
    for part in store.parts:
        share = Shares(ranks, 0).share(part.elements) if part.is_matrices else part.elements
        gathers = 0 if not part.is_matrices else 1 if part.unit in ends else 2
        sent += share * (4 + gathers * part.working.itemsize)
    assert trained(ranks)[name]["sent_bytes"] == sent * (ranks - 1)
