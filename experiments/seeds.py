"""Tests every claim on a small scale by its own command, and writes one page of results: `make seeds`.

    python -m experiments.seeds [--only NAME ...] [--out DIR]

About a quarter of an hour on two cores; no GPU, no network. Claims that need the stand-in (`make stand-in`) are left
out without one. --out gets index.html, rows.jsonl, and a folder per claim. Exit code 1 if a claim does not hold.
"""

import html
import os
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from urllib.parse import quote

from experiments.claims import CLAIMS, Claim
from experiments.harness import rows as row_file
from experiments.harness.options import exit_code_of, make_folder, parser_of
from experiments.harness.rows import ROOT
from lowmem.errors import InputError

PROGRAM = "experiments.seeds"
STAND_IN = ROOT / ".venv-cuda" / "bin" / "python"
SECONDS = 900  # after which a command counts as hung
OUTPUT, ROWS = "output.txt", "rows.jsonl"
HOLDS, FAILS, LEFT_OUT = "holds", "fails", "left out"
SHOWN = {HOLDS: "hold", FAILS: "fail", LEFT_OUT: "left out"}  # of several claims
_STYLE = """
:root { color-scheme: light; --line: #e4e7ec; --faint: #667085; }
body { font: 16px/1.5 system-ui, sans-serif; margin: 2rem auto; max-width: 1000px; padding: 0 1rem; color: #101828; }
h1 { font-size: 1.5rem; margin-bottom: .25rem; } h2 { font-size: 1.05rem; margin: 0 0 .25rem; }
p { margin: .25rem 0; } .faint { color: var(--faint); font-size: .9rem; }
article { border-top: 1px solid var(--line); padding: 1rem 0; }
b { border-radius: 6px; padding: .1rem .5rem; font-size: .85rem; color: #fff; margin-right: .5rem; }
.holds { background: #1a7f37; } .fails { background: #b42318; } .left { background: #667085; }
pre { margin: .5rem 0; padding: .6rem; background: #f9fafb; border-radius: 6px; overflow-x: auto;
      font: 13px/1.45 ui-monospace, "DejaVu Sans Mono", monospace; white-space: pre-wrap; }
img { max-width: 48%; max-height: 320px; margin: .5rem .5rem 0 0; border: 1px solid var(--line); border-radius: 6px; }
"""


def main(arguments: list[str] | None = None) -> int:
    arguments = sys.argv[1:] if arguments is None else arguments
    parser = parser_of(PROGRAM, __doc__)
    names = [claim.name for claim in CLAIMS]
    parser.add_argument("--only", nargs="+", choices=names, metavar="NAME", help=f"of {', '.join(names)}")
    parser.add_argument("--out", type=Path, default=Path("runs/seeds"), metavar="DIR", help="default: %(default)s")
    options = parser.parse_args(arguments)
    page = options.out / "index.html"
    try:
        make_folder(options.out, page.name, ROWS)
    except InputError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    made_by, rows = row_file.made_by(PROGRAM, arguments), []
    for claim in CLAIMS:
        if options.only and claim.name not in options.only:
            continue
        print(f"{claim.name}: {claim.claim}", flush=True)
        rows.append(tried(claim, options.out.resolve()) | made_by)
        row_file.append(options.out / ROWS, rows[-1])
        page.write_text(make_page(rows, options.out), encoding="utf-8")
        print(f"  {rows[-1]['verdict']}: {rows[-1]['number']} ({rows[-1]['seconds']:.0f} s)", flush=True)
    failed = sum(row["verdict"] == FAILS for row in rows)
    print(f"{len(rows)} claims, {failed} of them fail; see {page}")
    return 1 if failed else 0


def tried(claim: Claim, runs: Path) -> dict:
    folder, began = runs / claim.name, time.monotonic()
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    words = [word.format(out=folder) for word in shlex.split(claim.words)]
    python = [sys.executable]
    if claim.stand_in is not None:
        python = [str(STAND_IN), "-m", "stand_in", *shlex.split(claim.stand_in), "--"]
    row = {"name": claim.name, "claim": claim.claim, "run": shlex.join([Path(python[0]).name, *python[1:], *words])}
    if claim.stand_in is not None and not STAND_IN.exists():
        return row | {"verdict": LEFT_OUT, "number": "needs the stand-in: make stand-in", "seconds": 0.0}
    verdict, number = _judged(claim, [*python, *words], folder)
    return row | {"verdict": verdict, "number": number, "seconds": time.monotonic() - began}


def _judged(claim: Claim, command: Sequence[str], folder: Path) -> tuple[str, str]:
    output = folder / OUTPUT
    with output.open("w", encoding="utf-8") as file:
        try:
            ended = subprocess.run(
                command, cwd=ROOT, env=os.environ | {"WANDB_MODE": "disabled"}, stdin=subprocess.DEVNULL, stdout=file,
                stderr=subprocess.STDOUT, timeout=SECONDS,
            )  # fmt: skip
        except subprocess.TimeoutExpired:
            return FAILS, f"did not end in {SECONDS} seconds"
    if ended.returncode:
        last = output.read_text(encoding="utf-8", errors="replace").strip().splitlines()[-1:]
        return FAILS, " ".join([f"exit code {ended.returncode}", *last])
    try:
        number, holds = claim.judge(folder)
    except (OSError, LookupError, TypeError, ValueError) as error:  # what the command wrote is not what it used to be
        return FAILS, f"its output cannot be read: {type(error).__name__}: {error}"
    return (HOLDS if holds else FAILS), number


def make_page(rows: Sequence[dict], folder: Path) -> str:
    """Returns the page's HTML. `folder`: has the claims' folders, with pictures."""
    counts = {verdict: sum(row["verdict"] == verdict for row in rows) for verdict in (HOLDS, FAILS, LEFT_OUT)}
    of = rows[-1]
    return "\n".join([
        '<!doctype html><html lang="en"><meta charset="utf-8"><title>lowmem: claims and evidence</title>',
        f"<style>{_STYLE}</style><h1>Claims and evidence</h1>",
        f"<p>{', '.join(f'{count} {SHOWN[verdict]}' for verdict, count in counts.items() if count)}; "
        f"{sum(row['seconds'] for row in rows) / 60:.1f} minutes.</p>",
        _faint(f"commit {of['commit']}, torch {of['versions']['torch']}, {of['machine']}, {of['date']}"),
        *(_article(row, folder) for row in rows), "</html>",
    ])  # fmt: skip


def _article(row: dict, folder: Path) -> str:
    pictures = sorted(path.relative_to(folder).as_posix() for path in (folder / row["name"]).rglob("*.png"))
    output = folder / row["name"] / OUTPUT
    link = f' <a href="{quote(row["name"])}/{OUTPUT}">output</a>' if output.exists() else ""
    seconds = _faint(f"{row['seconds']:.0f} seconds{link}")
    command = row["run"].replace(str((folder / row["name"]).resolve()), f"runs/{folder.name}/{row['name']}")
    return (
        f'<article><h2>{html.escape(row["claim"])}</h2>'
        f'<p><b class="{row["verdict"].split()[0]}">{row["verdict"]}</b>{html.escape(row["number"])}</p>'
        f"<pre>{html.escape(command)}</pre>{seconds}"
        + "".join(f'<img src="{quote(path)}" alt="{html.escape(path)}">' for path in pictures) + "</article>"
    )  # fmt: skip


def _faint(text: str) -> str:
    return f'<p class="faint">{text}</p>'


if __name__ == "__main__":
    sys.exit(exit_code_of(main))
