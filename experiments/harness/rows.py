"""Writes and reads files of results: one JSON object, a row, per line.

A row has figures (`values`), conditions that must hold (`checks`), and everything needed to measure again. A job writes
a row "job: detail" for each of its parts, and the row "job" at its end.
"""

import ast
import hashlib
import io
import json
import os
import platform
import shlex
import subprocess
import tokenize
from datetime import UTC, datetime
from pathlib import Path

from lowmem.run.metrics import as_line, finite

ROOT = Path(__file__).resolve().parents[2]
KEYS = (
    *("section", "name", "ok", "values", "checks", "error", "output", "seconds", "date"),
    *("command", "caps", "commit", "sources", "device", "versions", "dry_run", "stand_in"),
)


def on_stand_in() -> bool:
    """Returns True if this process runs on the stand-in for a GPU (stand_in/)."""
    return bool(os.environ.get("STAND_IN_LIBRARIES"))


def computes_values() -> bool:
    """Returns False if this process runs on a stand-in for a GPU whose kernels write nothing; else True."""
    return not on_stand_in() or bool(os.environ.get("STAND_IN_VALUES"))


def card_counts() -> dict[str, int]:
    """Returns the counts (launches, copies, bytes) of the stand-in for a GPU; {} if this process runs without it."""
    if not on_stand_in():
        return {}
    from stand_in.card_library import counts

    return counts()


def through_stand_in() -> list[str]:
    """Returns arguments of Python that run a command on the stand-in for a GPU, with this process's --gpu, --order,
    --values and --ram. Returns [] if this process does not run on it."""
    if not on_stand_in():
        return []
    found = os.environ
    values = ["--values"] if computes_values() else []
    ram = ["--ram"] if "host_resident=1" in found.get("STAND_IN_CARD", "") else []
    return ["-m", "stand_in", "--gpu", found["STAND_IN_GPU"], "--order", found["STAND_IN_ORDER"], *values, *ram, "--"]


def is_measured(row: dict) -> bool:
    """Returns whether a row was measured with real shapes on a real machine."""
    # Rows older than the stand-in do not name it.
    return not row.get("dry_run", False) and not row.get("stand_in", False)


def make_row(
    common: dict,
    name: str,
    seconds: float,
    *,
    values: dict | None = None,
    checks: dict[str, bool] | None = None,
    error: str | None = None,
    output: str | None = None,
) -> dict:
    """Returns a row with the fields KEYS. `common`: the fields that all rows of a job share. `output`: the end of the
    job's stderr. The row is `ok` if there is no error and all checks hold."""
    checks = checks or {}
    row = common | {
        "name": name,
        "ok": error is None and all(checks.values()),
        "values": finite(values or {}),
        "checks": checks,
        "error": error,
        "output": output,
        "seconds": round(seconds, 3),
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
    }
    return {key: row[key] for key in KEYS}


def append(path: Path, row: dict) -> None:
    """Appends a row. Numbers that are not finite become null."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(path, "ab+") as file:
        # A killed process may have left half a line.
        if file.tell():
            file.seek(-1, os.SEEK_END)
            if file.read(1) != b"\n":
                file.write(b"\n")
        file.write(as_line(row).encode())


def read(path: Path) -> list[dict]:
    """Returns all rows of the file; [] if it does not exist. Skips lines that are incomplete."""
    rows = []
    for line in path.read_text(encoding="utf-8").splitlines() if path.exists() else ():
        try:
            rows.append(json.loads(line))
        except json.JSONDecodeError:
            continue
    return rows


def write(path: Path, rows: list[dict]) -> None:
    """Replaces the file by `rows`, atomically."""
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_suffix(".part")
    part.write_text("".join(json.dumps(row, allow_nan=False) + "\n" for row in rows), encoding="utf-8")
    part.replace(path)


def summary(row: dict) -> str:
    verdict = "ok    " if row["ok"] else "FAILED"
    failed = [name for name, holds in row["checks"].items() if not holds]
    facts = [row["error"]] if row["error"] else [f"not so: {name}" for name in failed]
    facts += [
        f"{key} {value:.4g}" if isinstance(value, float) else f"{key} {value}"
        for key, value in row["values"].items()
        if isinstance(value, int | float | str) and len(str(value)) < 40
    ]
    return f"{verdict} {row['section']}/{row['name']}  {row['seconds']:.1f} s  {', '.join(facts[:6])}"


def commit() -> str | None:
    """Returns the checked-out commit, with "+dirty" if files other than results have changed; None without git."""
    try:
        head = _git("rev-parse", "--short=12", "HEAD")
        changed = _git("status", "--porcelain", "--", ".", ":!*/results/*", ":!*/results.jsonl")
    except (OSError, subprocess.CalledProcessError):
        return None
    return head + ("+dirty" if changed else "")


def sources(target: str) -> str:
    """Returns a digest of the code that makes the rows of `target`, a "module" or "module:function": lowmem,
    train_gpt2_*.py, the experiment's own folder, and the folders that experiments share."""
    folders = {"harness", "gpu_acceptance", "memory_estimation", *target.split(":")[0].split(".")[1:2]}
    return digest("lowmem/**/*.py", "train_gpt2_*.py", *(f"experiments/{folder}/*.py" for folder in sorted(folders)))


def plan_sources(*own: str) -> str:
    """Returns a digest of the code that makes plans, and of the files that match the globs `own`."""
    rooms = ("", "core/**/", "cudasim/**/", "models/**/", "planning/**/")
    return digest(*(f"lowmem/{room}*.{kind}" for room in rooms for kind in ("py", "json", "csv")), *own)


# A commit's name says nothing about a working tree that was changed since, so the code itself is hashed.
def digest(*patterns: str) -> str:
    """Returns a digest of the files that match the globs, except __init__.py and files that only show rows. Of Python
    files, docstrings, comments and blank lines do not count."""
    found = hashlib.sha256()
    for path in sorted(path for pattern in patterns for path in ROOT.glob(pattern)):
        if path.name in ("table.py", "tables.py", "predicted.py", "__init__.py"):
            continue
        text = path.read_bytes()
        found.update(f"{path.relative_to(ROOT)}\0".encode() + (code_of(text) if path.suffix == ".py" else text) + b"\0")
    return found.hexdigest()[:12]


def code_of(source: bytes) -> bytes:
    """Returns Python source without docstrings, comments and blank lines."""
    lines = source.decode().splitlines()
    for token in tokenize.generate_tokens(io.StringIO(source.decode()).readline):
        if token.type == tokenize.COMMENT:
            row, column = token.start
            lines[row - 1] = lines[row - 1][:column]
    for node in ast.walk(ast.parse(source)):
        kinds = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef
        if isinstance(node, kinds) and ast.get_docstring(node, clean=False) is not None:
            docstring = node.body[0]
            lines[docstring.lineno - 1 : docstring.end_lineno] = [""] * (docstring.end_lineno - docstring.lineno + 1)
    return "\n".join(line.rstrip() for line in lines if line.strip()).encode()


def made_by(program: str, arguments: list[str]) -> dict:
    """Returns the fields that all rows of one call of `python -m program` share, such as command, commit and date. Jobs
    make their rows otherwise (`make_row`)."""
    from lowmem.run.report import versions  # and with it torch, which the process that starts jobs does without

    return {
        "command": shlex.join(["python", *through_stand_in(), "-m", program, *map(portable, arguments)]),
        "commit": commit(),
        "versions": versions(),
        "machine": f"{os.cpu_count()} CPU cores, {platform.machine()}",
        "stand_in": on_stand_in(),
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
    }


def portable(argument: str) -> str:
    """Returns a command-line argument without this machine's folders. An absolute path in the repository becomes
    relative; of any other absolute path, only the last name is kept."""
    option, equals, value = argument.rpartition("=")
    path = Path(value)
    if not path.is_absolute():
        return argument
    return option + equals + (str(path.relative_to(ROOT)) if path.is_relative_to(ROOT) else path.name)


def _git(*arguments: str) -> str:
    result = subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True, check=True)
    return result.stdout.strip()
