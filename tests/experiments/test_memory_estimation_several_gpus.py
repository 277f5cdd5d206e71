"""Published runs of several GPUs: each is compared by the kind of its figure, and the table is its rows."""

from dataclasses import replace

import pytest
from transformers import GPT2Config

from experiments.memory_estimation import rows as row_file
from experiments.memory_estimation import table
from experiments.memory_estimation.several_gpus import published
from experiments.memory_estimation.several_gpus.published import NAME, RESULTS, RUNS, compared
from lowmem.limits import CONTEXT_BYTES
from lowmem.models.build import build_model
from lowmem.units import MIB

TINY = replace(
    RUNS["ddp"], name="tiny", model="tiny", seq=32, micro_batch=1, ranks=2, held={"gradients": MIB},
    config=lambda: GPT2Config(n_layer=2, n_embd=64, n_head=4, n_positions=64, vocab_size=512),
    measured={"allocated": 2 * MIB, "active": 4 * MIB, "reserved": 8 * MIB},
)  # fmt: skip


def test_a_figure_is_compared_with_the_predicted_peak_of_its_kind():
    row = compared(TINY)
    allocated, reserved = row["allocated_peak_bytes"], row["reserved_peak_bytes"]
    assert allocated < reserved and row["fits"]
    sizes = {"allocated": allocated / MIB / 2, "active": allocated / MIB / 4, "reserved": reserved / MIB / 8}
    assert row["errors"] == pytest.approx({kind: size - 1 for kind, size in sizes.items()})
    with_held = {"allocated": 1 / 2, "active": 1 / 4, "reserved": 1 / 8}
    assert row["errors_with_held"] == pytest.approx({kind: row["errors"][kind] + with_held[kind] for kind in sizes})


def test_a_run_that_ran_out_of_memory_is_tried_under_its_card():
    peak = compared(TINY)["allocated_peak_bytes"]
    for more, fits in ((-MIB, False), (100 * MIB, True)):
        row = compared(replace(TINY, measured={}, card_bytes=CONTEXT_BYTES + peak + more))
        assert row["fits"] is fits and row["errors"] == {}


def test_the_allocators_segments_are_those_of_the_run():
    default, expandable = (compared(replace(TINY, expandable_segments=value)) for value in (False, True))
    assert default["allocated_peak_bytes"] == expandable["allocated_peak_bytes"]
    assert default["reserved_peak_bytes"] != expandable["reserved_peak_bytes"]


def test_the_program_replaces_the_rows_of_its_runs(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(published, "RUNS", {"tiny": TINY, "other": replace(TINY, name="other", seq=16, measured={})})
    for arguments in ([], ["--only", "tiny"]):
        assert published.main([*arguments, "--out", str(tmp_path)]) == 0
    found = {row["name"]: row for row in row_file.read(tmp_path / NAME)}
    assert "--only tiny" in found["tiny"]["command"] and "--only" not in found["other"]["command"]
    assert len(row_file.read(tmp_path / NAME)) == 2
    assert found["tiny"]["sources"] == published.sources() and found["tiny"]["versions"]["torch"]
    assert "active" in capsys.readouterr().out


def test_what_is_held_besides_is_counted_from_the_shapes():
    parameters = sum(p.numel() for p in build_model(RUNS["ddp"].config()).parameters())
    assert sum(RUNS["ddp"].held.values()) == 4 * parameters
    for name in ("fsdp2", "fsdp2 + sp"):
        run = RUNS[name]
        words = run.config().vocab_size // (1 if run.method == "fsdp2" else 2)
        assert sum(run.held.values()) == 4 * run.micro_batch * run.seq * words


@pytest.mark.exhaustive
def test_every_run_has_a_row_and_a_cheap_one_is_predicted_anew():
    committed = {row["name"]: row for row in row_file.read(RESULTS / NAME)}
    assert committed.keys() == RUNS.keys()
    for name, run in RUNS.items():
        row = committed[name]
        assert row["measured"] == {kind: round(size) for kind, size in run.measured.items()}
        assert (row["source"], row["differs"], row["unknown"]) == (run.source, run.differs, run.unknown)
    found = compared(RUNS["ddp"])
    for name in ("allocated_peak_bytes", "reserved_peak_bytes"):
        assert found[name] == pytest.approx(committed["ddp"][name], rel=1e-3)


def test_the_table_has_a_line_for_each_figure_and_notes_for_each_run():
    rows = row_file.read(RESULTS / NAME)
    lines = table._published_table(rows).splitlines()[2:]
    assert len(lines) == sum(len(run.measured) or 1 for run in RUNS.values())
    for row in rows:
        own = [line for line in lines if line.startswith(f"| {row['name']} | ")]
        for line, (kind, error) in zip(own, row["errors"].items(), strict=bool(row["errors"])):
            assert f" {kind} " in line and f"{error:+.1%}" in line
        assert row["errors"] or "out of memory" in own[0]
        assert any(row["name"] in note and row["source"] in note for note in table._published_notes(rows).splitlines())
