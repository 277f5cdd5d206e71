"""Predicts the published measurements and puts their tables into README.md: ten minutes, no GPU.

python -m tests.published
"""

import argparse
import json
import sys

import torch
import transformers

from experiments.harness.tables import put
from tests.published import table
from tests.published.peaks import peak_bytes
from tests.published.points import peaks, step_times
from tests.published.programs import build
from tests.published.reserved import reserved, reserved_bytes
from tests.published.simulated import simulate

PARTS = ("step_seconds", "peak_bytes", "reserved_bytes")


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.published", description=__doc__, allow_abbrev=False)
    parser.add_argument("--only", choices=PARTS, help="one part; the others keep their predictions")
    only = parser.parse_args().only
    found = json.loads(table.PREDICTIONS.read_text(encoding="utf-8")) if table.PREDICTIONS.exists() else {}
    if only in (None, "step_seconds"):
        found["step_seconds"] = []
        for point in step_times():
            found["step_seconds"].append(seconds := simulate(point.card, *build(point), point.host_share))
            print(f"{seconds / point.seconds:5.2f}  {point.group['name']}  {point.shape}", flush=True)
    if only in (None, "peak_bytes"):
        found["peak_bytes"] = []
        for peak in peaks():
            found["peak_bytes"].append(size := peak_bytes(peak))
            print(f"{size / peak.allocated_bytes - 1:+7.2%}  {peak}", flush=True)
    if only in (None, "reserved_bytes"):
        found["reserved_bytes"] = []
        for point in reserved():
            found["reserved_bytes"].append(size := reserved_bytes(point))
            print(f"{size / 2**30 / point.gib - 1:+7.2%}  {point}", flush=True)
    found["versions"] = {"torch": torch.__version__, "transformers": transformers.__version__}
    table.PREDICTIONS.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    put(table.README, table.BEGIN, table.tables())
    return 0


if __name__ == "__main__":
    sys.exit(main())
