"""`make results`: tables and pictures say what the rows say, and name missing rows."""

import re

import pytest

from experiments import results
from experiments.bench import table as bench
from experiments.gpu_acceptance import predicted, table
from experiments.harness.rows import ROOT, append, made_by, read
from experiments.harness.tables import markdown, put, written
from experiments.host_time import table as host_time
from lowmem.units import GIB


def row(section: str, name: str, error: str | None = None, card: str = "RTX 3060", **values) -> dict:
    return {
        "section": section, "name": name, "device": card, "error": error, "dry_run": False, "checks": {},
        "values": values,
    }  # fmt: skip


def training(name: str, sequences_per_second: float, **more) -> dict:
    size = {f"{kind}_peak_bytes": 10 * GIB for kind in ("gpu_allocated", "gpu_reserved", "ram")}
    said = {f"predicted_{key}": value for key, value in size.items()} | {"predicted_step_seconds": 40.0}
    return row(
        "train", name, sequences_per_second=sequences_per_second, step_seconds=41.0, tokens_per_step=65536,
        **size, **said, **more,
    )  # fmt: skip


def denominator(name: str, eager: float | None, compiled: float | None = None) -> dict:
    found = {f"gpt2-xl, {way}": speed and {"sequences_per_second": speed}
             for way, speed in (("eager", eager), ("compiled", compiled))}  # fmt: skip
    return row("denominator", name, **found)


PAGES = [results, bench, host_time, *results.TABLES]


@pytest.mark.parametrize("made", PAGES, ids=[made.__name__.removeprefix("experiments.") for made in PAGES])
def test_a_page_says_what_the_committed_rows_say(made):
    for path, begin, content in made.pages():
        assert written(path, begin) == content, path


def test_without_rows_every_training_is_not_measured_yet():
    found = table.speed_table([])
    assert found.count(table.NOT_MEASURED) == len(table.TRAININGS)
    assert table.NOT_MEASURED in table.memory_table([]) and table.NOT_MEASURED in table.levers_table([])
    assert predicted.__name__ in table.plans_table([])


KILLED = row("train", "xl exact", error="killed")
HALF = {"complete": False, "steps": 2, "of_steps": 4}
WHOLE = {"complete": True, "steps": 4, "of_steps": 4}
PARTS = [
    row("denominator", f"xl: {size}", model="gpt2-xl", way="eager", sequences_per_second=speed)
    for size, speed in ((1, 1.0), (2, 1.25))
]
OTHER_CARD = row("denominator", "xl", card="another card", **{"gpt2-xl, eager": {"sequences_per_second": 99.0}})
NOT_HELD = training("xl exact", 1.0) | {"checks": {"ram_peak_bytes under the cap": False}}
SAID = {  # rows: parts of the line about XL's exact training
    "compared with plain training": (
        [training("xl exact", 1.5, update_adds=0.012), denominator("xl", 1.25, 2.0), OTHER_CARD],
        ["1.20 (bar 1.00)", "0.75 (bar 0.80)", "+1.2%"],
    ),
    "the newest": ([training("xl exact", 1.0), training("xl exact", 2.0), KILLED], ["| 2.00 |"]),
    "a part of a killed one": ([training("xl exact: run", 3.0, **HALF), KILLED], ["| 3.00 (2 of 4 steps) |"]),
    "a whole part": ([training("xl exact: run", 3.0, **HALF), training("xl exact: run", 4.0, **WHOLE)], ["| 4.00 |"]),
    "over its cap": ([NOT_HELD], ["| not held: ram_peak_bytes under the cap |"]),
    "a slow update": ([training("xl exact", 1.0, update_adds=0.2) | {"checks": {"update": False}}], ["+20.0%"]),
    "parts of plain training": (
        [training("xl exact", 1.5), *PARTS, row("denominator", "xl", "killed")],
        ["1.20 (bar 1.00)"],
    ),
    "plain does not fit": ([training("xl exact", 1.0), denominator("xl", None)], ["plain does not fit (bar 1.00)"]),
}


@pytest.mark.parametrize(("rows", "said"), SAID.values(), ids=SAID)
def test_a_trainings_line_says_what_its_rows_say(rows, said):
    line, *others = [line for line in table.speed_table(rows).splitlines() if line.startswith("| xl exact |")]
    assert all(part in line for part in said), line
    assert all(table.NOT_MEASURED in other for other in others), "another card has no such training"


def test_no_table_has_rows_of_a_dry_run_or_of_the_stand_in(tmp_path, monkeypatch):
    monkeypatch.setattr(table, "RESULTS", tmp_path)
    real = training("xl exact", 1.0)  # as rows from before the stand-in, it does not name that
    for found in (real, real | {"stand_in": True}, real | {"dry_run": True}, real | {"stand_in": False}):
        append(tmp_path / "rows.jsonl", found)
    assert table.committed_rows()[0] == [real, real | {"stand_in": False}]


def test_every_picture_that_the_readmes_show_is_there():
    for readme in (results.README, results.RESULTS_PAGE, *results.ROOT.glob("experiments/*/README.md")):
        for picture in re.findall(r"!\[[^]]*\]\(([^)]+)\)", readme.read_text(encoding="utf-8")):
            assert (readme.parent / picture).exists(), (readme, picture)


def test_errors_of_predicted_peaks_have_signs_and_a_mean():
    said = {f"measured_{kind}_peak_bytes": 2 * GIB for kind in ("allocated", "reserved")}
    rows = [
        row("memory", f"m: {error}", model="gpt2", method="lowmem", batch=64, seq=1024, allocated_error=error,
            reserved_error=0.0, completes=True, **said)
        for error in (0.01, -0.03)
    ]  # fmt: skip
    rows.append(row("memory", "m: opt", model="opt", method="lowmem", batch=64, seq=1024, completes=False))
    found = table.memory_table(rows)
    assert "(+1.00%)" in found and "(-3.00%)" in found and "2.00%" in found
    assert found.count("ran out of memory") == 2


def test_checks_that_failed_are_named_and_a_case_counts_once():
    case = row("plans", "step: gpt2") | {
        "ok": False,
        "commit": "c0ffee",
        "checks": {"completes": True, "within 3%": False},
        "error": None,
    }
    other, again = case | {"name": "step: opt", "ok": True}, case | {"checks": {"within 3%": False, "completes": False}}
    crashed = case | {"name": "step: llama", "checks": {}, "error": "the process ended"}
    line = table.checks_table([case, other, crashed, again]).splitlines()[2]
    assert "| 1 of 3 |" in line and "gpt2: within 3%; completes" in line and "llama: the process ended" in line


def test_predicted_rows_are_made_shown_and_drawn(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(predicted, "RAM_LIMITS", {"gpt2-demo": None})
    monkeypatch.setattr(predicted, "BATCHES", (1, 2))
    monkeypatch.setattr(predicted, "SEQ", 32)
    older, others = ({"card": card, "model": "gpt2-demo", "batch": 2} for card in ("rtx3060", "h200"))
    for row_before in (older, others):
        append(tmp_path / predicted.NAME, row_before)
    assert predicted.main(["--gpus", "rtx3060", "--out", str(tmp_path)]) == 0
    kept, *rows = read(tmp_path / predicted.NAME)
    assert kept == others
    assert [(found["batch"], found["card"]) for found in rows] == [(1, "rtx3060"), (2, "rtx3060")]
    assert all(0 < found["sequences_per_second"] < found["alone_sequences_per_second"] for found in rows)
    last = rows[-1]
    ratio = last["sequences_per_second"] / last["plain_sequences_per_second"]
    assert f"| {ratio:.2f} |" in table.plans_table(rows)
    assert table.plans_table([last | {"plain_sequences_per_second": None}]).endswith("s |  |")
    assert "gpt2-demo" in table.plans_table(rows) and "rtx3060" in capsys.readouterr().out
    renamed = [found | {"model": "gpt2-xl"} for found in rows]
    measured = [training("xl exact", 1.5), denominator("xl", 1.25)]
    table.draw_speed(measured, renamed, tmp_path / "speed.png")
    assert (tmp_path / "speed.png").read_bytes().startswith(b"\x89PNG")
    assert list(table._measured_points(measured)) == [("RTX 3060", 65536, 1.2, "xl exact")]


def test_an_interrupted_prediction_loses_no_older_row(tmp_path, monkeypatch):
    older = [{"card": "rtx3060", "model": "gpt2", "batch": batch, "age": "old"} for batch in (1, 2)]
    for row in older:
        append(tmp_path / predicted.NAME, row)

    def interrupted(card, arguments):
        yield older[0] | {"age": "new"}
        raise KeyboardInterrupt

    monkeypatch.setattr(predicted, "rows_of", interrupted)
    assert predicted.main(["--gpus", "rtx3060", "--out", str(tmp_path)]) == 1
    assert [(row["batch"], row["age"]) for row in read(tmp_path / predicted.NAME)] == [(2, "old"), (1, "new")]


def test_content_goes_between_marks_and_nowhere_else(tmp_path):
    text, path = "before\n<!-- a -->\nold\n<!-- end -->\nafter <!-- end -->\n", tmp_path / "README.md"
    path.write_text(text)
    put(path, "<!-- a -->", "new")
    assert path.read_text() == "before\n<!-- a -->\n\nnew\n\n<!-- end -->\nafter <!-- end -->\n"
    assert written(path, "<!-- a -->") == "new"
    for damaged in (text.replace("<!-- a -->", ""), "<!-- a -->\nno end"):
        path.write_text(damaged)
        with pytest.raises(ValueError, match="<!-- a -->"):
            put(path, "<!-- a -->", "new")
        assert path.read_text() == damaged
    assert markdown(("a", "b"), [("1", "2")]) == "| a | b |\n| --- | --- |\n| 1 | 2 |"


def test_a_row_names_no_folder_of_the_machine_that_made_it():
    """Nor do those that are committed."""
    inside, outside = str(ROOT / "experiments" / "rows.jsonl"), "/somewhere/else/rows.jsonl"
    command = made_by("program", ["--rows", inside, f"--out={outside}", "--share=1/2", "word"])["command"]
    assert command.endswith("-m program --rows experiments/rows.jsonl --out=rows.jsonl --share=1/2 word")
    rows = [row for path in ROOT.glob("experiments/*/results/*.jsonl") for row in read(path)]
    assert rows and not [row["command"] for row in rows if re.search(r"(^|[ =])/", row.get("command") or "")]
