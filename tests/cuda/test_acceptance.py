"""The GPU acceptance command on the stand-in: its first and last jobs and some of each section, as on a GPU."""

from pathlib import Path

import pytest
from on_card import run

from experiments.gpu_acceptance import element_wise
from experiments.gpu_acceptance.jobs import JOBS
from experiments.harness import rows

CHOSEN = (
    *("correctness/life", "correctness/kernels", "correctness/bitwise", "train/large exact", "denominator/large"),
    *("memory/plain", "unified memory/gpt2-xl"),
    *("memory/lowmem, small", "levers/step", "plans/step", "peers/gpt2-large flashoptim", JOBS[-1].full_name),
)


pytestmark = pytest.mark.timeout(900)  # whichever test comes first waits for all jobs


@pytest.fixture(scope="module")
def found(tmp_path_factory) -> dict[str, dict]:
    """The rows by section and name."""
    folder = tmp_path_factory.mktemp("acceptance")
    result = _command("--dry-run", "--minutes", "30", "--out", str(folder), "--only", *CHOSEN)
    assert result.returncode in (0, 1), result.stderr
    return {f"{row['section']}/{row['name']}": row for row in rows.read(folder / "rows.jsonl")}


def _command(*arguments: str, values: bool = True):
    options = ("--gpu", "rtx3060", *(["--values"] if values else []))
    return run("-m", "experiments.gpu_acceptance", *arguments, options=options)


def test_every_job_is_good_or_says_what_this_machine_lacks(found):
    assert JOBS[0].full_name in CHOSEN and {name.split("/")[0] for name in CHOSEN} == {job.section for job in JOBS}
    assert found.keys() >= set(CHOSEN)
    for name, row in found.items():
        lacking = row["error"] is not None and row["error"].startswith("not installed: ") and row["output"] is None
        assert row["ok"] or lacking, (name, row["error"], row["checks"], row["output"])


def test_every_row_is_marked_as_one_of_the_stand_in(found):
    for row in found.values():
        assert tuple(row) == rows.KEYS and row["dry_run"] and row["stand_in"]
        assert row["device"] == "NVIDIA GeForce RTX 3060" and row["versions"]["cuda"]
        assert row["command"].startswith("python3 -m stand_in --gpu rtx3060 --order issue --values -- -m experiments.")
        assert not rows.is_measured(row)


def test_a_small_models_life_ends_with_the_same_bits_whatever_is_in_its_way(found):
    cases = {name.split(": ")[1]: row for name, row in found.items() if name.startswith("correctness/life: ")}
    assert found["correctness/life"]["checks"] == dict.fromkeys(cases, True) and len(cases) == 4
    assert cases["killed"]["checks"]["was killed"]
    ran_out = cases["out of memory"]["values"]
    assert all("CUDA out of memory" in error for error in ran_out["errors"]), "the real allocator's"
    assert ran_out["measures"][0] == "cache" and len(ran_out["measures"]) == 2
    assert cases["not page-locked"]["values"]["errors"] == [712]


def test_cudas_own_path_was_taken(found):
    assert found["correctness/kernels: fused kernels"]["checks"] == {"compile and agree": True}
    assert found["correctness/kernels: host memory"]["checks"] == {"arrives whole": True, "page-locked": True}
    assert found["correctness/kernels: allocator"]["checks"] == {
        "more than the cap is refused": True,
        "expandable segments": True,
    }
    streamed = found["correctness/bitwise: bf16, half streamed, deferred, groups of 2"]
    assert streamed["checks"] == {"every bit equal": True, "every number finite": True, "page-locked": True}
    training = found["train/large exact"]["values"]
    assert training["streamed_gib_each_way"] > 0 and abs(training["gpu_allocated_peak_bytes_error"]) < 0.001


def test_plans_are_held_against_the_real_allocator(found):
    layouts = [row for name, row in found.items() if name.startswith("plans/step: tiny")]
    assert len(layouts) == 3, "two layouts, and the first one again"
    for row in layouts:
        assert abs(row["values"]["allocated_error"]) < 0.001 and row["checks"]["began with nothing reserved"]
    diagnosed = next(row["values"] for row in layouts if "at_measured_peak" in row["values"])
    assert diagnosed["replayed_allocated_bytes"] == diagnosed["measured_allocated_peak_bytes"]
    for model in ("tiny-gpt2", "tiny-llama"):
        assert found[f"memory/plain: {model}"]["values"]["allocated_error"] == 0
        assert abs(found[f"memory/lowmem, small: {model}"]["values"]["allocated_error"]) < 0.001


def test_managed_weights_are_within_their_limit_and_compute_the_same_bits(found):
    assert found["unified memory/gpt2-xl"]["checks"] == {
        "outputs equal those of all on the GPU, bit for bit": True,
        "outputs of fused groups equal those of all on the GPU, fused": True,
        "no more than the limit is resident": True,
    }
    moved = found["unified memory/gpt2-xl: paged: 24x256x4"]["values"]
    assert moved["resident"]["to_device_bytes"] == 0 < moved["sent_back"]["to_device_bytes"]


def test_what_needs_time_a_profiler_or_a_compiler_says_that_it_was_left_out(found):
    timeline = found["train/large exact: timeline"]
    assert "no event" in timeline["values"]["not_recorded"] and timeline["checks"] == {}
    assert timeline["values"]["simulated"]["copies_in_seconds"] > 0
    assert found["train/large exact: update"]["checks"] == {}
    compiled = found["denominator/large"]["values"]["gpt2-large, compiled"]
    assert "compiles nothing" in compiled["not_measured"] and found["denominator/large"]["checks"] == {}
    assert found["correctness/kernels: fused speed"]["checks"] == {}
    by_size = found["correctness/kernels: element-wise speed"]["values"]
    assert len(by_size) == len(element_wise.NAMES) * len(element_wise.SIZES)
    for values in by_size.values():
        assert values["gib_per_second"] == "left out" and values["predicted_gib_per_second"] > 0
    copies = found["correctness/kernels: host memory"]["values"]
    assert copies["registered_both_gib_per_second"] == copies["registered_busy_both_gib_per_second"] == "left out"
    assert "within 5% of the fastest" not in found["plans/step"]["checks"]


def test_without_dry_run_or_values_it_is_refused_in_a_sentence(tmp_path):
    out = ["--out", str(tmp_path)]
    for result, why in ((_command(*out), "--dry-run"), (_command(*out, "--dry-run", values=False), "--values")):
        assert result.returncode == 2 and why in result.stderr and result.stderr.count("\n") == 1, result.stderr
    assert not any(Path(tmp_path).iterdir())
