"""Trains, exports and reads every published folder, and leaves a row for each in results.jsonl: six minutes, no GPU.

make transformers4 && python -m tests.published_models
"""

import os
import sys
import tempfile
import time
import warnings
from pathlib import Path

from experiments.harness import rows as row_file

PYTHON_4 = row_file.ROOT / ".venv-transformers4/bin/python"


def main() -> int:
    os.environ |= {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}

    import torch

    from tests.published_models import runs, table
    from tests.published_models.cases import all_cases

    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    common = row_file.made_by("tests.published_models", [])
    rows = []
    with tempfile.TemporaryDirectory() as folder, runs.transformers_4(PYTHON_4) as ask_4:
        for number, case in enumerate(all_cases()):
            started = time.monotonic()
            found = runs.run(case, Path(folder, str(number)), ask_4)
            ok = all(found["checks"].values())
            rows.append({"kind": case.kind, "name": case.name, "ok": ok, **found, **common})
            shown = f"{case.kind} {case.name}: {found['outcome']} {found['said']}"
            print(f"{time.monotonic() - started:4.1f} s {'ok' if ok else 'BAD'} {shown}", flush=True)
    row_file.write(table.RESULTS, rows)
    table.put_tables()
    return 0 if all(row["ok"] for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
