"""The peers beside lowmem: the harness must be right before anybody reads its table.

The peers that need only pinned packages run tiny trainings in fp32 on the CPU, in this process. One runs in a separate
process, as for a user. What the harness does with peers that do not fit, fail or are missing is tried with attempts
made up.
"""

import json
import math
import os
import statistics
import time
from dataclasses import replace
from pathlib import Path
from unittest.mock import patch

import pytest
import torch

from experiments.harness import rows
from experiments.harness.child import Setting, Unavailable
from experiments.peers import catalogue, memory, published, run, table, train, update
from experiments.peers.attempt import attempt
from experiments.peers.case import Case
from experiments.peers.catalogue import PEERS
from experiments.peers.shared import distance, saved_weights
from experiments.peers.trainings import TRAININGS
from experiments.peers.updates import CANDIDATES, random_gradients
from lowmem.errors import LowmemError
from lowmem.units import GIB, MIB
from tests.published.table import MOST_APART

SAME = 1e-4  # of the way that training went: fp32 against fp32, sums in another order. The worst seen is 9e-6
MACHINE = {"names": {"cpu": "the CPU"}, "versions": {"python": "3"}}


@pytest.fixture(scope="module", autouse=True)
def alone():
    """Process groups and what they are told by end with this file."""
    with patch.dict(os.environ):
        yield
        if torch.distributed.is_initialized():
            torch.distributed.destroy_process_group()


@pytest.fixture(scope="module")
def setting(tmp_path_factory) -> Setting:
    return Setting("cpu", False, None, 16 * GIB, tmp_path_factory.mktemp("scratch"), lambda *_: True)


@pytest.fixture(scope="module")
def reference(setting, text, tmp_path_factory) -> tuple[Case, dict]:
    """The reference's case, with its weights saved, and its values."""
    settings = train.training_settings(
        setting, model="gpt2-demo", init="random", data=str(text), seq=32, batch=4, steps=3
    )
    cache = tmp_path_factory.mktemp("cache")
    case = Case("plain", settings, 2, cache, setting.scratch)
    return case, attempt(case)


def trained(reference: tuple[Case, dict], peer: str, tmp_path: Path) -> dict:
    case, _ = reference
    return attempt(replace(case, peer=peer, scratch=tmp_path, micro_batch=None if peer == "lowmem" else 2))


def test_every_peer_of_the_table_has_a_training():
    assert list(PEERS) == list(TRAININGS)


def test_the_reference_is_where_it_is_and_its_row_is_whole(reference):
    case, values = reference
    assert values["distance"] == 0.0
    assert len(values["losses"]) == len(values["step_seconds"]) == 3 and values["losses"][-1] < values["losses"][0]
    assert values["sequences_per_second"] > 0 and values["gpu_fits"] and values["ram_fits"] and values["why"] is None
    assert values["ram_peak_bytes"] > 100 * MIB and values["gpu_reserved_peak_bytes"] is None
    assert (values["peer"], values["micro_batch"], values["batch"]) == ("plain", 2, 4)
    json.dumps(values, allow_nan=False)
    config = json.loads((case.initial / "config.json").read_text())
    assert {config[name] for name in ("resid_pdrop", "embd_pdrop", "attn_pdrop")} == {0.0}


@pytest.mark.parametrize("peer", ["lowmem", "fsdp2_cpu_offload"])
def test_exact_peers_end_with_the_references_weights(reference, peer, tmp_path):
    values = trained(reference, peer, tmp_path)
    assert values["distance"] < SAME
    assert values["losses"] == pytest.approx(reference[1]["losses"], rel=1e-6)


@pytest.mark.parametrize("peer", ["hf_trainer_adamw_bnb_8bit", "hf_trainer_paged_adamw_8bit"])
def test_the_trainer_sees_the_same_batches_and_its_8_bit_moments_cost_some_distance(reference, peer, tmp_path):
    for package in PEERS[peer].packages:
        pytest.importorskip(package)
    values = trained(reference, peer, tmp_path)
    assert values["losses"] == pytest.approx(reference[1]["losses"], rel=1e-3)
    assert SAME < values["distance"] < 0.3


@pytest.mark.parametrize("way", [0.0, 0.5, 1.0])
def test_the_distance_is_0_at_the_reference_and_1_where_training_began(reference, way):
    case, _ = reference
    first, last = saved_weights(case.initial), saved_weights(case.reference)
    assert distance(case, lambda name: torch.lerp(last(name), first(name), way)) == pytest.approx(way, abs=1e-6)


def test_other_batches_have_another_folder_of_weights_and_another_cap_has_not(reference):
    case, _ = reference
    assert replace(case, settings=replace(case.settings, ram_limit_bytes=GIB), peer="lowmem").initial == case.initial
    assert replace(case, settings=replace(case.settings, steps=4)).initial != case.initial
    assert Case.from_json(case.to_json()) == case


def test_ram_is_watched_while_it_is_in_use(monkeypatch):
    monkeypatch.setattr(memory, "ram_peak_bytes", lambda: 0)
    before = memory.ram_now_bytes()
    with memory.Memory(torch.device("cpu")) as watched:
        block = torch.ones(16 * MIB)
        time.sleep(5 * memory.LOOK_SECONDS)
        del block
    assert watched.values()["ram_peak_bytes"] > before + 60 * MIB


def test_plans_are_as_fast_as_llmq_measured_within_the_bounds_of_tests_published():
    shares = [row["tokens_per_second"] / row["measured_tokens_per_second"] for row in published.ROWS.committed()]
    assert len(shares) == len(published.CASES) and abs(statistics.median(shares) - 1) <= 0.2
    assert 1 / MOST_APART <= min(shares) <= max(shares) <= MOST_APART


# What is measured under the caps: attempts made up.


@pytest.fixture
def attempts(monkeypatch):
    """Every case that was attempted, in order; one fits with at most 2 sequences. References are saved."""
    seen: list[Case] = []

    def made_up(case: Case) -> dict:
        seen.append(case)
        if case.peer == "plain":
            case.reference.mkdir(parents=True, exist_ok=True)
        fits = case.settings.gpu_limit_bytes is None or case.micro_batch in (None, 1, 2)
        return case.identity | {"gpu_fits": fits, "ram_fits": True, "why": None if fits else "CUDA out of memory"}

    monkeypatch.setattr(train, "_attempt", made_up)
    monkeypatch.setattr(catalogue.Peer, "check", lambda *_: None)
    return seen


def test_the_largest_micro_batch_that_fits_is_taken_and_the_reference_is_made_once(attempts, tmp_path):
    details = []
    (tmp_path / "job").mkdir()
    capped = Setting("cuda", False, GIB, GIB, tmp_path / "job", lambda *row: bool(details.append(row)))
    result = train.measure(capped, "flashoptim", batch=12, steps=5)
    assert [(case.peer, case.micro_batch) for case in attempts] == [
        ("plain", 4), ("flashoptim", 4), ("flashoptim", 2),
    ]  # fmt: skip
    assert attempts[0].settings.gpu_limit_bytes is None and attempts[1].settings.gpu_limit_bytes == GIB
    assert len({case.scratch for case in attempts}) == 3
    assert [detail for detail, *_ in details] == ["the reference", "flashoptim, micro-batch 4"]
    assert result.values["micro_batch"] == 2 and all(result.checks.values())

    assert train.measure(capped, "lowmem", batch=12, steps=5).checks == {"fits under both caps": True}
    assert [(case.peer, case.micro_batch) for case in attempts[3:]] == [("lowmem", None)]


@pytest.mark.parametrize("losses, holds", [([2.0, 1.0], True), ([2.0, math.nan], False), ([2.0, 9.0, 9.0], False)])
def test_a_training_that_diverges_fails(losses, holds):
    assert train._checks({"peer": "flashoptim", "losses": losses}) == {"the training does not diverge": holds}


def test_what_fits_with_no_micro_batch_is_a_result_for_a_peer_and_a_failure_for_lowmem(attempts, tmp_path, monkeypatch):
    def nothing_fits(case: Case) -> dict:
        attempts.append(case)
        return case.identity | {"gpu_fits": False, "ram_fits": False}

    monkeypatch.setattr(train, "_attempt", nothing_fits)
    (tmp_path / "job").mkdir()
    capped = Setting("cuda", False, GIB, GIB, tmp_path / "job", lambda *_: True)
    for peer, holds in (("flashoptim", True), ("lowmem", False)):
        result = train.measure(capped, peer)
        assert not result.values["gpu_fits"] and all(result.checks.values()) is holds
    tried = [(case.peer, case.micro_batch) for case in attempts]
    assert tried == [(peer, size) for peer in ("plain", "flashoptim") for size in (8, 4, 2, 1)] + [("lowmem", None)]


@pytest.mark.parametrize(
    ("ends", "expected"),
    [
        ("kill -9 $$", "killed by the system"),
        ("echo 'ValueError: no such thing' >&2; exit 1", "ValueError: no such thing"),
    ],
)
def test_how_an_attempts_process_ends_is_told(reference, tmp_path, monkeypatch, ends, expected, capfd):
    stub = tmp_path / "python"
    stub.write_text(f"#!/bin/sh\n{ends}\n")
    stub.chmod(0o755)
    monkeypatch.setattr(train.sys, "executable", str(stub))
    case = replace(reference[0], scratch=tmp_path)
    if "kill" in ends:
        values = train._attempt(case)
        assert expected in values["why"] and not values["ram_fits"]
    else:
        with pytest.raises(LowmemError, match=expected):
            train._attempt(case)


# The command, its rows and tables.


@pytest.mark.exhaustive
def test_a_peer_that_is_missing_has_a_row_and_does_not_stop_the_next(text, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(run, "machine_here", lambda: MACHINE)
    monkeypatch.setattr(run, "DATA", str(text))
    monkeypatch.setitem(PEERS, "lowmem", replace(PEERS["lowmem"], packages=("no_such_package",)))
    monkeypatch.setattr(run, "peers_named", lambda names: [PEERS[name] for name in sorted(names)])
    shape = ["--model", "gpt2-demo", "--seq", "32", "--batch", "2", "--steps", "2", "--device", "cpu"]
    code = run.main([*shape, "--peer", "plain", "lowmem", "--out", str(tmp_path)])
    found = rows.read(tmp_path / "rows.jsonl")
    assert code == 1 and [row["name"] for row in found] == ["gpt2-demo lowmem", "gpt2-demo plain"]
    assert all(tuple(row) == rows.KEYS for row in found)
    assert not found[0]["ok"] and found[0]["error"] == "not installed: pip install no_such_package"
    assert found[1]["ok"] and found[1]["values"]["distance"] == 0.0  # by a process of its own
    assert found[1]["caps"] == {"gpu_bytes": None, "ram_bytes": 16 * GIB}
    assert "| plain | the reference, no caps | 2 |" in capsys.readouterr().out


def test_a_peer_says_what_it_lacks():
    with pytest.raises(Unavailable, match="needs a GPU"):
        replace(PEERS["flashoptim"], packages=()).check("cpu")
    with pytest.raises(Unavailable, match="pip install no_such_package"):
        replace(PEERS["flashoptim"], packages=("no_such_package", "torch")).check("cuda")


def row(peer: str, error: str | None = None, **values) -> dict:
    common = {"section": "peers", "caps": {"gpu_bytes": 11 * GIB, "ram_bytes": None}, "command": "", "commit": None}
    common |= {"sources": "", "device": "a card", "versions": {}, "dry_run": False, "stand_in": False}
    whole = {"peer": peer, "seq": 8, "batch": 2, "steps": 3, "gpu_fits": True, "ram_fits": True, "why": None} | values
    return rows.make_row(common, f"gpt2-xl {peer}", 1.0, values={} if error else whole, error=error)


def test_the_table_shows_the_newest_row_of_each_peer_and_says_what_is_missing():
    found = [
        row("lowmem", sequences_per_second=1.0),
        row("lowmem", sequences_per_second=2.5, distance=0.00123, gpu_reserved_peak_bytes=GIB, gpu_managed_bytes=0),
        row("flashoptim", error="not installed: pip install flashoptim"),
        row("plain", micro_batch=8),
        row("fsdp2_cpu_offload", ram_fits=False, micro_batch=4),
        row("torchao_cpu_offload", gpu_fits=False, ram_fits=False, why="CUDA out of memory"),
        row("hf_trainer_adamw_bnb_8bit") | {"name": "gpt2-xl hf_trainer_adamw_bnb_8bit: micro-batch 8"},
        row("deepspeed_zero2_offload") | {"dry_run": True},
        row("deepspeed_zero3_offload") | {"stand_in": True},
    ]
    lines = table.table(found).splitlines()
    assert "gpt2-xl on a card, 2 x 8 tokens, 3 steps; caps: GPU 11 GiB, RAM no cap" in lines
    assert sum("sequences/s" in line for line in lines) == 1, "details and dry runs have no table"
    assert "| lowmem | yes | its plan's | 2.5 | 1.00 | 0.00 |  |  | 0.0012 |" in lines
    first = {name: next(line for line in lines if line.startswith(f"| {name} |")).split(" | ")[1] for name in PEERS}
    assert first["flashoptim"] == "not installed: pip install flashoptim"
    assert first["plain"] == "the reference, no caps" and first["fsdp2_cpu_offload"] == "no: RAM over the cap"
    assert first["torchao_cpu_offload"] == "no: CUDA out of memory"
    for peer in ("hf_trainer_adamw_bnb_8bit", "deepspeed_zero2_offload", "deepspeed_zero3_offload"):
        assert first[peer] == "not measured yet"
    assert table.table([]).count("not measured yet") == 2 * len(PEERS) + 1


# The update alone.


def test_every_update_that_can_run_here_is_measured_and_the_others_say_why_not(monkeypatch):
    runs_here = [c for c in CANDIDATES if not set(c.packages) & {"deepspeed", "torchao"}]
    monkeypatch.setattr(
        update, "CANDIDATES", (*runs_here, replace(CANDIDATES[0], packages=("no_such_package",), name="x"))
    )
    found = update.measure(300_000, 1, ["python"])
    assert [row["ok"] for row in found] == [True] * len(runs_here) + [False]
    assert "not installed: pip install no_such_package" in found[-1]["error"]
    for row in found[:-1]:
        values = row["values"]
        assert values["ns_per_parameter"] == pytest.approx(1e9 * values["update_seconds"][0] / 300_000)
        moved = values["bytes_per_parameter"] * 300_000 / values["update_seconds"][0]
        assert values["share_of_copy"] == pytest.approx(moved / values["copy_bytes_per_second"])
    lines = table.update_table(found).splitlines()
    assert len(lines) == 4 + len(found) and "300,000 parameters" in lines[0]


def test_updates_are_lowmems_pieces_and_leave_the_gradients_to_the_next():
    gradients = random_gradients(2**22 + 5)
    assert [gradient.numel() for gradient in gradients] == [2**22, 5]
    small = [gradient[:1000].clone() for gradient in gradients]
    before = [gradient.clone() for gradient in small]
    for candidate in CANDIDATES:
        if not set(candidate.packages) & {"deepspeed", "torchao"}:
            candidate.make(small)()
    assert all(torch.equal(one, other) for one, other in zip(small, before, strict=True))
