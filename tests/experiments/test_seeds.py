"""`make seeds`: each claim's command is run, judged by what it wrote, and shown on one page."""

import importlib.util
import json
import shlex
import sys
from pathlib import Path

import pytest

from experiments import seeds
from experiments.claims import CLAIMS, Claim
from experiments.harness.rows import ROOT, read

WRITES = "-c \"import json, pathlib; pathlib.Path('{out}/report.json').write_text(json.dumps(dict(number=%s)))\""


def judged(folder: Path) -> tuple[str, bool]:
    number = json.loads((folder / "report.json").read_text())["number"]
    return f"the number is <{number}>", number > 1


@pytest.fixture
def claims(monkeypatch):
    found = [
        Claim("true", "Two is more than one.", WRITES % 2, judged),
        Claim("false", "One is more than one.", WRITES % 1, judged),
        Claim("broken", "A command that fails.", "-c \"raise SystemExit('no such thing')\"", judged),
        Claim("silent", "A command that writes nothing.", "-c pass", judged),
        Claim("card", "A command of a card.", "-c pass", judged, stand_in="--gpu rtx3090"),
    ]
    monkeypatch.setattr(seeds, "CLAIMS", found)
    monkeypatch.setattr(seeds, "STAND_IN", Path("no such interpreter"))


def test_each_claim_is_tried_judged_and_shown(claims, tmp_path, capsys):
    assert seeds.main(["--out", str(tmp_path / "seeds")]) == 1
    rows = {row["name"]: (row["verdict"], row["number"]) for row in read(tmp_path / "seeds" / "rows.jsonl")}
    assert rows["true"] == ("holds", "the number is <2>")
    assert rows["false"] == ("fails", "the number is <1>")
    assert rows["broken"] == ("fails", "exit code 1 no such thing")
    assert rows["silent"][0] == "fails" and "FileNotFoundError" in rows["silent"][1]
    assert rows["card"] == ("left out", "needs the stand-in: make stand-in")
    page = (tmp_path / "seeds" / "index.html").read_text()
    assert "1 hold, 3 fail, 1 left out" in page and "the number is &lt;2&gt;" in page
    assert "5 claims, 3 of them fail" in capsys.readouterr().out
    (tmp_path / "seeds" / "true" / "picture.png").write_bytes(b"")
    assert seeds.main(["--out", str(tmp_path / "seeds"), "--only", "true"]) == 0
    assert [row["name"] for row in read(tmp_path / "seeds" / "rows.jsonl")] == ["true"]
    assert not (tmp_path / "seeds" / "true" / "picture.png").exists(), "of an older run"


def test_a_claims_command_exists_and_writes_to_its_folder():
    """The commands themselves take a quarter of an hour."""
    assert len({claim.name for claim in CLAIMS}) == len(CLAIMS)
    for claim in CLAIMS:
        words = shlex.split(claim.words)
        assert any("{out}" in word for word in words), claim.name
        if words[0] == "-m":
            assert importlib.util.find_spec(words[1]) is not None, claim.name
        else:
            assert (ROOT / words[0]).is_file(), claim.name


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", ["XL in 11 GiB", "three kinds"])
def test_a_claim_holds(name, tmp_path):
    row = seeds.tried(next(claim for claim in CLAIMS if claim.name == name), tmp_path)
    assert row["verdict"] == "holds", row
    assert row["run"].startswith(Path(sys.executable).name)
