"""The command that holds two commits' weights against each other sees a difference of one line and of one byte."""

import json
import shutil

import pytest

from tests import same_weights

RUN = "fp32, SGD, no dropout"


@pytest.mark.exhaustive
def test_a_tree_with_another_line_ends_with_exit_code_1(tmp_path, capsys):
    """Another weight decay as the script's default: the first step's loss and norm are the same, and no weight is."""
    shutil.copytree(same_weights.ROOT / "lowmem", tmp_path / "lowmem", ignore=shutil.ignore_patterns("__pycache__"))
    text = (same_weights.ROOT / same_weights.SCRIPT).read_text()
    assert text.count("SETTINGS = Settings(") == 1
    (tmp_path / same_weights.SCRIPT).write_text(
        text.replace("SETTINGS = Settings(", "SETTINGS = Settings(weight_decay=0.02, ")
    )
    assert same_weights.main(["--before", str(tmp_path), "--only", RUN]) == 1
    said = capsys.readouterr().out
    assert said.startswith(f"DIFFERENT  {RUN}: ") and "step 1: loss" not in said
    assert "1 runs, 1 not the same" in said


def test_one_byte_of_a_run_folder_is_a_difference_and_its_times_are_not(finished, tmp_path):
    other = tmp_path / "other"
    shutil.copytree(finished, other)
    found = dict(same_weights.found_in(finished))

    def different() -> list[str]:
        return same_weights.differences(found, dict(same_weights.found_in(other)))

    metrics = other / "metrics.jsonl"
    rows = [json.loads(line) for line in metrics.read_text().splitlines()]
    metrics.write_text("".join(json.dumps(row | {"step_ms": 0.0, "ram_peak_bytes": 1}) + "\n" for row in rows))
    assert len(found) > 100 and different() == []
    metrics.write_text("".join(json.dumps(row | {"grad_norm": 1.0}) + "\n" for row in rows))
    assert different() == [f"step {row['step']}: grad_norm" for row in rows]
    shutil.copy(finished / "metrics.jsonl", metrics)

    path = other / "model/model.safetensors"
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    (exported,) = different()
    assert exported.startswith("exported ")

    (path,) = other.glob("checkpoints/*/embedding-matrices.safetensors")
    tensors = same_weights.safe_open(path, "pt").keys()
    content = bytearray(path.read_bytes())
    content[8 + int.from_bytes(content[:8], "little")] ^= 1  # the first byte behind the header: the first weight's
    path.write_bytes(content)
    assert len(tensors) == 3 and len(different()) == 2
    assert different()[1].startswith("checkpoint: working of ")


def test_what_is_missing_is_a_difference():
    assert same_weights.differences({"a": "1", "b": "2"}, {"b": "2", "c": "3"}) == ["a", "c"]
