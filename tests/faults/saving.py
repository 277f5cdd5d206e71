"""What saving costs, in RAM above training and in time beside the disk's own.

    python -m tests.faults.saving --model gpt2-medium

Trains two steps of a model of that shape (random weights, on the CPU) and saves after each. RAM is the kernel's
high-water mark of the process, read before a save and after it; the mark starts anew before, so that what saving adds
is seen even where training once took more. The disk's own time is that of writing as many bytes of zeros into one file
on the same disk, fsync included. Prints one JSON row.
"""

import argparse
import json
import os
import sys
import tempfile
import time
from pathlib import Path

import lowmem.train
from lowmem.budget import ram_peak_bytes
from lowmem.durable import CHUNK_BYTES
from lowmem.main import main as run_script
from tests.runs import ROOT, SCRIPTS


def disk_seconds(folder: Path, size_bytes: int) -> float:
    """How long plain writing takes."""
    zeros = memoryview(bytearray(CHUNK_BYTES))
    began = time.monotonic()
    with open(folder / "zeros", "wb", buffering=0) as file:
        for start in range(0, size_bytes, CHUNK_BYTES):
            file.write(zeros[: size_bytes - start])
        os.fsync(file.fileno())
    seconds = time.monotonic() - began
    (folder / "zeros").unlink()
    return seconds


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.faults.saving", description=__doc__.split("\n\n")[0])
    parser.add_argument("--model", default="gpt2-medium")
    parser.add_argument("--folder", help="where to save (a temporary folder)")
    options = parser.parse_args()
    saves = []
    save = lowmem.train.save_checkpoint

    def measured_save(folder, *arguments, **keywords):
        training_bytes = ram_peak_bytes()
        Path("/proc/self/clear_refs").write_text("5")  # the mark starts anew at what is resident now
        began_bytes, began = ram_peak_bytes(), time.monotonic()
        path = save(folder, *arguments, **keywords)
        seconds = time.monotonic() - began
        saved_bytes = sum(file.stat().st_size for file in path.iterdir())
        saves.append(
            {
                "ram_of_training_bytes": training_bytes, "ram_added_by_saving_bytes": ram_peak_bytes() - began_bytes,
                "saved_bytes": saved_bytes, "save_seconds": round(seconds, 2),
                "disk_seconds": round(disk_seconds(folder, saved_bytes), 2),
            }
        )  # fmt: skip
        return path

    lowmem.train.save_checkpoint = measured_save
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        code = run_script(
            SCRIPTS["large"].SETTINGS,
            [
                *("--model", options.model, "--init", "random", "--data", str(ROOT / "lowmem"), "--device", "cpu"),
                *("--seq", "64", "--batch", "2", "--micro-batch", "1", "--steps", "2", "--save-every", "1"),
                *("--keep-last", "1", "--eval-batches", "1", "--out", f"{folder}/out"),
            ],
        )
    share = max(s["ram_added_by_saving_bytes"] / s["ram_of_training_bytes"] for s in saves)
    print(json.dumps({"model": options.model, "share_of_ram_added": round(share, 5), "saves": saves}))
    return code


if __name__ == "__main__":
    sys.exit(main())
