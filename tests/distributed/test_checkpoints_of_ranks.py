"""A checkpoint of any number of ranks is that of one process, byte for byte, and any number of ranks loads it."""

import json
import sys
from pathlib import Path

import pytest

from experiments.harness import group

sys.path.insert(0, str(Path(__file__).parent))
from cases import CASES  # noqa: E402
from worker import saved_again, work  # noqa: E402

CHECKPOINT = "checkpoints/step-00000001"


def files(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in (folder / CHECKPOINT).iterdir()}


def by_ranks(folder: Path, ranks: int, case: str, stored: Path | None) -> Path:
    """Saves what `ranks` ranks have loaded from `stored`, or trained, in `folder`."""
    folder.mkdir()
    checkpoint = None if stored is None else str(stored / CHECKPOINT)
    (folder / "asked.json").write_text(json.dumps({"ranks": ranks, "cases": [case], "stored": checkpoint}))
    group.run(work, folder, ranks)
    return folder


@pytest.mark.exhaustive
@pytest.mark.parametrize("case", ["bf16, untied", "8-bit states", "fp32"])
def test_checkpoints_pass_between_numbers_of_ranks_bit_for_bit(tmp_path, case):
    one = tmp_path / "one"
    one.mkdir()
    saved_again(CASES[case], one, None)
    two = by_ranks(tmp_path / "two", 2, case, one)
    assert files(two) == files(one)
    three = by_ranks(tmp_path / "three", 3, case, two)
    assert files(three) == files(one)


def test_what_ranks_have_trained_is_loaded_by_one_process_and_a_flipped_byte_is_refused(tmp_path):
    two, one = by_ranks(tmp_path / "two", 2, "bf16, untied", None), tmp_path / "one"
    one.mkdir()
    saved_again(CASES["bf16, untied"], one, str(two / CHECKPOINT))
    assert files(one) == files(two)
    path = two / CHECKPOINT / "block-1-matrices.safetensors"
    content = bytearray(path.read_bytes())
    content[-100] ^= 1
    path.write_bytes(content)
    with pytest.raises(group.ProcessFailed, match="block-1-matrices"):
        by_ranks(tmp_path / "again", 2, "bf16, untied", two)
