"""Kills (SIGKILL) a run again and again on a disk that fills up. Needs root, to mount a disk in RAM.

    python -m tests.faults.full_disk --kills 50

Trains GPT-2 (--model, random weights) with --save-every 1 on a disk with room for the run's plan. In every other life
of the process, something else fills the disk but for the room of the exported model. A run that is refused for lack of
room (exit code 3) gets that room back. After every kill the newest valid checkpoint must be no older than the one
before; every run must end with exit code 0 and the exported model of an undisturbed run.
"""

import contextlib
import hashlib
import os
import random
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from tests.faults.sigkill import killed, rows_in, start, wait

import torch  # isort: skip
from lowmem.units import MIB
from tests.faults import table
from tests.runs import ROOT

SPARE_BYTES = 48 * MIB  # that the disk has beyond the plan: what is in an export beside weights, rows, pictures


def arguments_of(model: str, steps: int) -> list[str]:
    shape = ["--seq", "16", "--batch", "2", "--micro-batch", "1", "--eval-batches", "1", "--eval-fraction", "0.05"]
    saving = ["--save-every", "1", "--keep-last", "1", "--steps", str(steps)]
    data = ["--data", str(ROOT / "tests" / "runs.py")]
    return ["--model", model, "--init", "random", "--device", "cpu", *shape, *saving, *data]


def exported(out: Path) -> str:
    """Returns a hash of the weights that a run exported."""
    digest = hashlib.blake2b()
    for path in sorted((out / "model").glob("*.safetensors")):
        digest.update(path.read_bytes())
    return digest.hexdigest()


def bytes_in(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


class Ballast:
    """A file that fills the disk."""

    def __init__(self, disk: Path, export_bytes: int):
        self.path, self.left_bytes = disk / "ballast", export_bytes + SPARE_BYTES
        self.filled = 0

    def fill(self) -> None:
        """Takes all but the room for an export."""
        if self.path.exists():
            return
        with open(self.path, "wb") as file:
            size_bytes, piece = 0, 4 * MIB
            while shutil.disk_usage(self.path.parent).free > self.left_bytes + piece:
                with contextlib.suppress(OSError):
                    os.posix_fallocate(file.fileno(), size_bytes, piece)
                    size_bytes += piece
        self.filled += size_bytes > 0

    def clear(self) -> None:
        self.path.unlink(missing_ok=True)


def kill_often(folder: Path, model: str, kills: int, steps: int, seed: int) -> dict:
    """Returns the row that is printed."""
    generator = random.Random(seed)
    arguments = arguments_of(model, steps)
    whole, disk = folder / "whole", folder / "disk"
    began = time.monotonic()
    code = wait(start([*arguments, "--out", str(whole)], folder / "whole.log", real=False), 1200)
    assert code == 0, (code, (folder / "whole.log").read_text()[-2000:])
    life_seconds = time.monotonic() - began
    expected = exported(whole)
    export_bytes = bytes_in(whole / "model")
    size_bytes = 2 * bytes_in(whole / "checkpoints") + export_bytes + 2 * SPARE_BYTES
    shutil.rmtree(whole)
    disk.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={size_bytes}", "tmpfs", disk], check=True)
    ballast = Ballast(disk, export_bytes)
    names = ("kills", "runs", "refused_for_room", "lost", "wrong_exits", "different_models")
    row = dict.fromkeys(names, 0)
    try:
        while row["kills"] < kills:
            row["runs"] += 1
            out, log = disk / "run", folder / f"run-{row['runs']}.log"
            reached, code = 0, None
            while code is None:
                process = start([*arguments, "--out", str(out)], log, real=False)
                last = row["kills"] == kills
                middle = rows_in(out) + generator.randint(1, max(steps - rows_in(out) - 1, 1))
                if last or generator.random() < 0.5:
                    code = wait(process, 1200, until=lambda out=out, rows=middle: rows_in(out) >= rows)
                    ballast.fill()
                limit_seconds = 1200 if last else generator.uniform(0, life_seconds)
                code = wait(process, limit_seconds) if code is None else code
                if code == 3 and ballast.path.exists():  # no room for checkpoints
                    row["refused_for_room"] += 1
                    ballast.clear()
                    code = None
                elif code is None:
                    reached = killed(process, out, row, reached)
            row["wrong_exits"] += code != 0
            if code != 0:
                print(code, log.read_text()[-1000:], file=sys.stderr)
            row["different_models"] += code == 0 and exported(out) != expected
            ballast.clear()
            shutil.rmtree(out)
    finally:
        subprocess.run(["umount", "--lazy", disk], check=True)  # a run may still end
    sizes = {"disk_bytes": size_bytes, "disk_filled": ballast.filled, "life_seconds": round(life_seconds, 1)}
    logs = "".join(path.read_text() for path in folder.glob("run-*.log"))
    row["saves_without_room"] = logs.count(" could not be saved in ")
    row |= sizes | {"model": model, "steps_of_a_run": steps, "seed": seed}
    return row | {"seconds": round(time.monotonic() - began)}


def main() -> int:
    parser = table.parser("full_disk", __doc__)
    parser.add_argument("--kills", type=int, default=50)
    parser.add_argument("--model", default="gpt2", help="a name that the code knows the shape of (%(default)s)")
    parser.add_argument("--steps", type=int, default=8, help="of a run (%(default)s)")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    torch.set_num_threads(1)
    common = table.common("full_disk", options.record)
    with tempfile.TemporaryDirectory() as folder:
        row = kill_often(Path(folder), options.model, options.kills, options.steps, options.seed)
    table.report(common | row, options.record)
    return 1 if row["lost"] or row["wrong_exits"] or row["different_models"] else 0


if __name__ == "__main__":
    sys.exit(main())
