"""Measures the cost of saving: RAM above training, and time relative to the disk's.

    python -m tests.faults.saving --model gpt2-medium [--record]

Trains a model of that shape (random weights, on the CPU) and saves after every step. The disk's time is measured just
before every save, with the same tensors: `plain` writes one file with one fsync, `best` also starts writing early and
removes the previous file, as a save does. Neither hashes. The first save does not count. Prints one JSON row of
medians.
"""

import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import lowmem.run.saver
from lowmem.core.parameters import Store
from lowmem.files import start_writeback
from lowmem.limits import ram_peak_bytes, reset_ram_peak
from lowmem.run import checkpoint
from lowmem.run.main import main as run_script
from tests.faults import table
from tests.runs import ROOT, SCRIPTS


def seconds_of(work: Callable[[], object]) -> float:
    """Returns the seconds of `work`; earlier writes are on the disk when it begins."""
    os.sync()
    began = time.monotonic()
    work()
    return round(time.monotonic() - began, 3)


def write_bare(path: Path, store: Store, early: bool) -> None:
    """Writes a checkpoint's tensors to one new file, with an fsync."""
    with open(path, "xb", buffering=0) as file:
        for part in store.parts:
            for piece in checkpoint._file_content(part):
                rest = memoryview(piece)
                while len(rest):
                    rest = rest[file.write(rest) :]
                if early:
                    start_writeback(file.fileno())
        os.fsync(file.fileno())


def replace_bare(folder: Path, store: Store) -> None:
    """Does the disk's part of a save: writes new bytes, then removes the old ones."""
    old, new = folder / "old", folder / "new"
    write_bare(new, store, early=True)
    old.unlink(missing_ok=True)
    new.rename(old)


def measure(model: str, folder: Path, saves: int) -> dict:
    """Returns the row's counts, of a run that saves `saves` times after the first; `folder` is on the disk to
    measure."""
    found: list[dict] = []
    save = checkpoint.save_checkpoint

    def measured_save(out: Path, store: Store, *arguments, **keywords) -> Path:
        def plainly():
            write_bare(folder / "plain", store, early=False)

        times = {"plain_seconds": seconds_of(plainly)}
        (folder / "plain").unlink()
        times["best_seconds"] = seconds_of(lambda: replace_bare(folder, store))
        training_bytes = ram_peak_bytes()
        assert reset_ram_peak()
        began_bytes = ram_peak_bytes()
        times["save_seconds"] = seconds_of(lambda: save(out, store, *arguments, **keywords))
        added_bytes = ram_peak_bytes() - began_bytes
        path = max((out / "checkpoints").iterdir())
        saved_bytes = sum(file.stat().st_size for file in path.iterdir())
        found.append({"ram": training_bytes, "added": added_bytes, "saved": saved_bytes, **times})
        return path

    lowmem.run.saver.save_checkpoint = measured_save
    try:
        code = run_script(
            SCRIPTS["large"].SETTINGS,
            [
                *("--model", model, "--init", "random", "--data", str(ROOT / "lowmem" / "core"), "--device", "cpu"),
                *("--seq", "64", "--batch", "2", "--micro-batch", "1", "--steps", str(saves + 1), "--save-every", "1"),
                *("--keep-last", "1", "--eval-batches", "1", "--ram-limit", "none", "--out", str(folder / "out")),
            ],
        )
    finally:
        lowmem.run.saver.save_checkpoint = save
    assert code == 0 and len(found) == saves + 1, (code, found)
    names = ("plain_seconds", "best_seconds", "save_seconds")
    counted = found[1:]
    return {
        "model": model, "saved_bytes": found[-1]["saved"], "ram_of_training_bytes": max(one["ram"] for one in found),
        "ram_added_bytes": max(one["added"] for one in found),
        "share_of_ram_added": round(max(one["added"] / one["ram"] for one in found), 6),
        "share_of_plain": round(statistics.median(one["save_seconds"] / one["plain_seconds"] for one in counted), 3),
        "share_of_best": round(statistics.median(one["save_seconds"] / one["best_seconds"] for one in counted), 3),
        **{name: round(statistics.median(one[name] for one in counted), 3) for name in names},
        "each": [{name: one[name] for name in names} for one in counted],
    }  # fmt: skip


def main() -> int:
    parser = table.parser("saving", __doc__)
    parser.add_argument("--model", default="gpt2-medium")
    parser.add_argument("--saves", type=int, default=5, help="that count (%(default)s)")
    parser.add_argument("--folder", help="where to save: on the disk to measure (a temporary folder)")
    options = parser.parse_args()
    common, began = table.common("saving", options.record), time.monotonic()
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        row = measure(options.model, Path(folder), options.saves)
    table.report(common | row | {"seconds": round(time.monotonic() - began)}, options.record)
    return 0


if __name__ == "__main__":
    sys.exit(main())
