"""RAM over the whole life of a run: predicted by phase, measured by phase, and under a cap that is hardly larger."""

import json
import sys

import pytest
import torch

from lowmem.core.optimizers import OPTIMIZERS, get_optimizer
from lowmem.files import CHUNK_BYTES
from lowmem.planning.ram import PHASES, RUNS_BYTES, largest, most_streamed, on_a_gpu, on_the_cpu
from lowmem.units import GIB, MIB
from runs import measured_run, stored

ADAMW = get_optimizer("adamw")


def totals(ram: dict[str, dict[str, int]]) -> dict[str, int]:
    return {phase: sum(held.values()) for phase, held in ram.items()}


def test_where_all_states_are_on_the_gpu_loading_random_weights_takes_the_most():
    ram = on_a_gpu(GIB, {"streamed_states": 0}, 300 * MIB, ADAMW, torch.bfloat16)
    assert largest(ram) is ram["load"] and totals(ram)["load"] == GIB + 300 * MIB + RUNS_BYTES
    assert totals(ram)["save"] == GIB + CHUNK_BYTES and totals(ram)["train"] == GIB


def test_streamed_moments_leave_loading_their_room_until_they_are_page_locked():
    """4 of 5 bytes: they are zeros until then. The largest phase is the last, whose runs come on top."""
    ram = on_a_gpu(GIB, {"streamed_states": 10 * GIB}, 300 * MIB, ADAMW, torch.bfloat16)
    assert totals(ram) == {
        "load": 11 * GIB, "evaluate": 11 * GIB, "train": 11 * GIB, "save": 11 * GIB + CHUNK_BYTES,
        "export": 11 * GIB + RUNS_BYTES,
    }  # fmt: skip
    small = on_a_gpu(GIB, {"streamed_states": 100 * MIB}, 300 * MIB, ADAMW, torch.bfloat16)
    assert totals(small)["load"] == GIB + 100 * MIB + 300 * MIB + RUNS_BYTES - 80 * MIB


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_a_cap_leaves_room_for_exactly_the_streamed_bytes_that_need_all_of_it(name, dtype):
    """Seen to fail: under the bytes that a model without streamed states takes, not even those fitted."""
    optimizer = OPTIMIZERS[name]
    for streamed in (0, 1, 2, 3, 5, 100, 7 * MIB + 3, 200 * MIB, 9 * GIB + 1):
        for drawn in (0, 30 * MIB, 300 * MIB + 7):
            cap = sum(largest(on_a_gpu(GIB, {"streamed_states": streamed}, drawn, optimizer, dtype)).values())
            most = most_streamed(cap, GIB, drawn, optimizer, dtype)
            assert most >= streamed > most_streamed(cap - 1, GIB, drawn, optimizer, dtype)
            assert sum(largest(on_a_gpu(GIB, {"streamed_states": most}, drawn, optimizer, dtype)).values()) == cap


def test_on_the_cpu_training_takes_activations_and_gradients_on_top():
    train = {"working_weights": 4 * MIB, "resident_states": 8 * MIB, "gradients": 4 * MIB, "freed_and_kept": MIB}
    found = totals(on_the_cpu(100 * MIB, train, 0))
    assert found["train"] == 117 * MIB and found["evaluate"] == found["save"] == 113 * MIB
    assert found["load"] == 112 * MIB + RUNS_BYTES


@pytest.mark.exhaustive
@pytest.mark.skipif(sys.platform != "linux", reason="the mark is Linux's")
def test_a_run_ends_under_a_cap_just_above_its_plan_and_goes_on_under_it(tmp_path):
    """Evaluation, checkpoints, export and resume included, and predicted as near as a small model allows: of 0.9 GiB
    a third is what the process takes by itself. Seen: 0.91 of what was predicted."""
    fields = {
        "model_type": "gpt2", "n_layer": 3, "n_embd": 640, "n_head": 10, "vocab_size": 12_000, "n_positions": 64,
        "bos_token_id": 0, "eos_token_id": 0,
    }  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(fields))
    (tmp_path / "text.txt").write_text("".join(f"The square of {number} is {number**2}.\n" for number in range(3000)))

    def train(out: str, *options: str) -> dict:
        command = [
            *("train_gpt2_large.py", "--model", str(tmp_path / "config.json"), "--init", "random", "--device", "cpu"),
            *("--data", str(tmp_path / "text.txt"), "--seq", "32", "--batch", "2", "--micro-batch", "1", "--steps"),
            *("2", "--save-every", "1", "--eval-every", "1", "--eval-batches", "1", "--out", str(tmp_path / out)),
        ]
        code, _, errors, _, _ = measured_run([*command, *options], {"OMP_NUM_THREADS": "1"})
        assert code == 0, errors
        return stored(tmp_path / out / "report.json")

    free = train("free", "--ram-limit", "none")
    predicted, measured = free["plan"]["predicted"]["ram_peak_bytes"], free["measured"]["ram_peak_bytes"]
    print(f"{measured / predicted:.3f} of {predicted / MIB:.0f} MiB", free["ram_phases"])
    assert free["ram_phases"].keys() == {*PHASES}
    assert measured == max(phase["measured"] for phase in free["ram_phases"].values())
    assert predicted == max(phase["predicted"] for phase in free["ram_phases"].values())
    assert 0.8 * predicted < measured < 1.01 * predicted
    cap = ("--ram-limit", f"{predicted // MIB + 16}MiB")
    assert train("capped", *cap)["steps"] == 2
    again = train("capped", *cap)  # from its last checkpoint: loaded, exported
    assert again["steps"] == 2 and again["ram_phases"]["load"]["measured"] < predicted
