"""Trains, exports and reads every published folder, and leaves a row for each in results.jsonl: six minutes, no GPU.

make transformers4 && python -m tests.published_models
"""

import argparse
import os
import sys
import tempfile
import time
import warnings
from pathlib import Path

from experiments.harness import rows as row_file

PYTHON_4 = row_file.ROOT / ".venv-transformers4/bin/python"


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.published_models", allow_abbrev=False, description=__doc__)
    parser.add_argument(
        "--transformers-4", default=PYTHON_4, type=Path, metavar="PYTHON", help="one that imports version 4"
    )
    parser.add_argument("--only", default="", metavar="WORD", help="cases with that in their names; leaves no rows")
    parser.add_argument(
        "--keep", metavar="DIR", help="a folder for what the runs write, instead of one that is removed"
    )
    options = parser.parse_args()
    os.environ |= {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}

    import torch

    from tests.published_models import runs, table
    from tests.published_models.cases import all_cases

    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    common = row_file.made_by("tests.published_models", [])
    rows = []
    with tempfile.TemporaryDirectory() as temporary, runs.transformers_4(options.transformers_4) as later:
        for number, case in enumerate(all_cases()):
            if options.only not in f"{case.kind} {case.name}":
                continue
            started = time.monotonic()
            found = runs.run(case, Path(options.keep or temporary) / str(number), later)
            ok = all(found["checks"].values())
            rows.append({"kind": case.kind, "name": case.name, "ok": ok, **found, **common})
            failed = ", ".join(key for key, holds in found["checks"].items() if not holds)
            shown = f"{found['outcome']} {found['values'] or ''} {failed and f'NOT {failed}:'} {found['said']}"
            print(
                f"{time.monotonic() - started:4.1f} s {'ok' if ok else 'BAD'} {case.kind} {case.name}: {shown}",
                flush=True,
            )
    if not options.only:
        row_file.write(table.RESULTS, rows)
        table.put_tables()
    return 0 if all(row["ok"] for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
