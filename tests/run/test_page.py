"""The page of a run: its data are those of the run's files, it asks no network for anything, and no text becomes HTML.

What a person sees was looked at in a browser, in light and dark, wide and narrow.
"""

import json
import re
import shutil
import subprocess
from html.parser import HTMLParser
from pathlib import Path

import pytest

from lowmem.__main__ import main
from lowmem.run.figures import format_seconds
from lowmem.run.metrics import read_metrics
from lowmem.run.page import MOST_POINTS, make_page, run_data
from runs import python, stored, write_rows

FILES = ("plan.json", "report.json")
HOSTILE = "</script><script>document.title = 'broken'</script><img src=x onerror=alert(1)><!-- \u2028 & \" '"


class Elements(HTMLParser):
    """The elements of a page, and the texts of its scripts."""

    def __init__(self, page: str):
        super().__init__()
        self.found: list[tuple[str, dict]] = []
        self.scripts: list[str] = []
        self.feed(page)

    def handle_starttag(self, tag: str, attributes: list) -> None:
        self.found.append((tag, dict(attributes)))

    def handle_data(self, data: str) -> None:
        if self.found and self.found[-1][0] == "script":
            self.scripts.append(data)


def data_of(page: str) -> list[dict]:
    """The runs in the page's JSON. The page has the elements of the template and no others."""
    elements = Elements(page)
    assert [tag for tag, _ in elements.found if tag in ("script", "img")] == ["script", "script"]
    return json.loads(elements.scripts[0])["runs"]


def write_hostile_samples(run: Path) -> None:
    rows = [{"step": step, "prompt": HOSTILE, "text": f"sample: {HOSTILE} {step}"} for step in (0, 2, 3)]
    write_rows(run / "samples.jsonl", rows)


@pytest.fixture
def run(finished, tmp_path) -> Path:
    return shutil.copytree(finished, tmp_path / "run")


def test_a_run_leaves_a_page_with_the_figures_of_its_files(finished):
    (shown,) = data_of((finished / "report.html").read_text())
    rows, plan, report = read_metrics(finished / "metrics.jsonl"), *map(stored, map(finished.joinpath, FILES))
    assert (shown["name"], shown["finished"], shown["planned_steps"]) == (finished.name, True, 3)
    assert shown["summary"] == report["summary"] and shown["summary"]["steps"].startswith("3 of 3")
    assert shown["columns"]["step"] == [1, 2, 3]
    assert shown["columns"]["loss"] == pytest.approx([row["loss"] for row in rows], rel=1e-5)
    before, after = report["loss"]["eval_first"], report["loss"]["eval_last"]
    assert shown["held_out"] == {"held-out": [[0, pytest.approx(before, 1e-5)], [3, pytest.approx(after, 1e-5)]]}
    (ram,) = shown["memory"]
    assert (ram["kind"], ram["parts"], ram["cap"]) == ("RAM", plan["ram_breakdown"], None)
    assert ram["measured"] == report["measured"]["ram_peak_bytes"]
    assert dict((phase, measured) for phase, _, measured in shown["phases"])["train"] > 0
    assert ["--steps", "3", True] in shown["settings"] and ["--clip-norm", "1.0", False] in shown["settings"]


def test_the_page_asks_no_network_for_anything(finished):
    page = (finished / "report.html").read_text()
    for tag, attributes in Elements(page).found:
        assert not attributes.keys() & {"src", "href", "srcset", "action", "data", "poster"}, tag
    code = page.split('<script type="application/json"')[0] + page.split("</script>")[1]
    assert re.findall(r"https?://[^\"'\s]*", code) == ["http://www.w3.org/2000/svg"]  # the name of a format
    assert not re.search(r"@import|url\((?!#)|\bimport\b|fetch\(|XMLHttpRequest|WebSocket|innerHTML|eval\(", code)
    assert "default-src 'none'" in page


def test_no_text_of_a_run_can_become_html(run, tmp_path):
    hostile = run.rename(tmp_path / "<b>name")
    write_hostile_samples(hostile)
    (hostile / "settings.json").write_text(json.dumps(stored(hostile / "settings.json") | {"run_name": HOSTILE}))
    assert main(["report", str(hostile)]) == 0
    (shown,) = data_of((hostile / "report.html").read_text())
    assert shown["samples"] == [{"prompt": HOSTILE, "texts": [[0, " 0"], [2, " 2"], [3, " 3"]]}]
    assert shown["name"] == "<b>name" and ["--run-name", HOSTILE, True] in shown["settings"]


def test_runs_are_laid_over_one_another_and_may_still_go_on_or_have_been_stopped(run, tmp_path, capsys):
    stopped = shutil.copytree(run, tmp_path / "stopped")
    (stopped / "report.json").unlink()
    lines = (stopped / "metrics.jsonl").read_text().splitlines()
    (stopped / "metrics.jsonl").write_text(f"{lines[0]}\n{lines[1][:40]}")  # half a line, as a kill leaves it
    begun = shutil.copytree(stopped, tmp_path / "other/run")
    (begun / "metrics.jsonl").unlink()
    page = tmp_path / "page.html"
    assert main(["report", str(run), str(stopped), str(begun), "--out", str(page)]) == 0
    assert capsys.readouterr().out == f"{page}\n"
    one, two, three = data_of(page.read_text())
    assert [shown["name"] for shown in (one, two, three)] == [str(run), str(stopped), str(begun)]
    assert [(shown["finished"], shown["steps"], shown["planned_steps"]) for shown in (one, two, three)] == [
        *((True, 3, 3), (False, 1, 3), (False, 0, 3))
    ]
    assert two["held_out"] == {"held-out": one["held_out"]["held-out"][:1]}
    assert list(two["summary"]) == list(three["summary"]) == list(one["summary"])
    assert two["memory"][0]["measured"] == json.loads(lines[0])["ram_peak_bytes"]
    assert three["columns"]["step"] == [] and three["memory"][0]["measured"] is None


def test_a_report_of_an_earlier_run_in_the_folder_is_not_shown(run):
    lines = (run / "metrics.jsonl").read_text().splitlines()
    (run / "metrics.jsonl").write_text(f"{lines[0]}\n")
    assert run_data(run, "")["finished"] is False


def test_a_long_run_is_thinned_out_and_its_loss_is_smoothed(run):
    (row, *_) = read_metrics(run / "metrics.jsonl")
    rows = [row | {"step": step, "loss": 2.0 if step % 50 else None} for step in range(1, 2 * MOST_POINTS + 2)]
    write_rows(run / "metrics.jsonl", rows)
    (shown,) = data_of(make_page([run_data(run, "long")]))
    columns = shown["columns"]
    assert len(columns["step"]) <= MOST_POINTS and columns["step"][:3] == [1, 4, 7]
    assert {len(column) for column in columns.values()} == {len(columns["step"])}
    assert set(columns["loss"]) == {2.0, None} and set(columns["smooth_loss"]) == {2.0, None}


@pytest.mark.parametrize(("words", "said"), [
    ([], "required: RUN"), (["nowhere"], "nowhere is no run folder"),
    (["RUN", "--out", "nowhere/page.html"], "there is no folder nowhere"), (["DAMAGED"], "its files cannot be shown"),
    (["RUN/log.txt"], "log.txt is no run folder"), (["RUN", "--out", "/proc/page.html"], "report: /proc/page.html: "),
    (["RUN", "--outt", "x"], "--outt"), (["RUN", "--out", "RUN/log.txt"], "is there already, and is not an .html"),
])  # fmt: skip
def test_what_is_no_run_is_refused_in_a_sentence(words, said, run, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    damaged = shutil.copytree(run, tmp_path / "damaged")
    (damaged / "plan.json").write_text('{"fits": true, "tokens_per_step": 1, "predicted": {}}')
    (damaged / "report.html").unlink()
    assert main(["report", *(word.replace("RUN", "run").replace("DAMAGED", "damaged") for word in words)]) == 2
    sentence = capsys.readouterr().err
    assert sentence.startswith("lowmem report: ") and said in sentence and sentence.count("\n") == 1
    assert not list(tmp_path.glob("*.html")) and not (damaged / "report.html").exists()


def test_the_command_needs_no_pytorch(run):
    program = "import sys; from lowmem.__main__ import main; print(main(sys.argv[1:]), 'torch' in sys.modules)"
    result = python("-c", program, "report", run)
    assert result.stdout.splitlines() == [str(run / "report.html"), "0 False"], result.stderr


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0.5, "0.5 s"), (59.9, "59.9 s"), (192, "3 min"), (3599.9, "1 h"), (12_000, "3 h 20 min"), (190_800, "2 d 5 h")],
)  # fmt: skip
def test_durations_are_said_in_at_most_two_units(seconds, text):
    assert format_seconds(seconds) == text


ZOOM = """<script>
Element.prototype.setPointerCapture = () => {};  // synthetic pointers cannot be captured
const svg = document.querySelector("section svg[role=img]"), box = svg.getBoundingClientRect();
const labels = () => [...svg.querySelectorAll("text")].map(text => text.textContent).join(" ");
const at = share => box.left + 54 + share * (box.width - 64);
const drag = (type, share) => svg.dispatchEvent(new PointerEvent(type, { clientX: at(share) }));
const before = labels();
for (const [type, share] of [["pointerdown", 0.4], ["pointermove", 0.6], ["pointerup", 0.7]]) drag(type, share);
const zoomed = labels();
svg.dispatchEvent(new MouseEvent("dblclick"));
document.body.dataset.result = JSON.stringify([before, zoomed, labels(), document.title]);
</script>"""


@pytest.mark.exhaustive
@pytest.mark.skipif(shutil.which("chromium") is None, reason="no browser: apt-get install chromium")
def test_a_browser_draws_the_page_zooms_in_by_a_drag_and_out_by_a_double_click(run, tmp_path):
    write_hostile_samples(run)
    (row, *_) = read_metrics(run / "metrics.jsonl")
    write_rows(run / "metrics.jsonl", [row | {"step": step, "loss": 5 - step / 100} for step in range(1, 201)])
    page = tmp_path / "page.html"
    page.write_text(make_page([run_data(run, "run")]).replace("</body>", f"{ZOOM}</body>"))
    browser = ["chromium", "--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={tmp_path / 'browser'}"]
    words = [*browser, "--window-size=1200,900", "--dump-dom", page.as_uri()]
    result = subprocess.run(words, capture_output=True, text=True, timeout=120)
    elements = Elements(result.stdout)
    (body,) = (attributes for tag, attributes in elements.found if tag == "body")
    before, zoomed, after, title = json.loads(body["data-result"])
    assert before == after != zoomed and "200" in before.split() and "100" in zoomed.split()
    assert title == "run: lowmem" and "img" not in {tag for tag, _ in elements.found}
    assert sum(tag == "section" for tag, _ in elements.found) == 10


def test_of_several_folders_those_that_are_no_runs_are_left_out(run, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    damaged = shutil.copytree(run, tmp_path / "damaged")
    with open(damaged / "metrics.jsonl", "a") as file:
        file.write('{"step": "a", "loss": "b"}\n')
    assert main(["report", "run", ".", "damaged", "--out", "page.html"]) == 0
    said = capsys.readouterr()
    assert said.out == "page.html\n" and said.err.count("; it is left out\n") == said.err.count("\n") == 2
    assert ": . is no run folder" in said.err and ": damaged: its files cannot be shown" in said.err
    assert len(data_of((tmp_path / "page.html").read_text())) == 1
    assert main(["report", ".", "damaged"]) == 2 and "no run is left to show" in capsys.readouterr().err
