"""A run's identity, its figures, and the remarks before it begins."""

import dataclasses
import json
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import transformers
from transformers import GPT2Config

from lowmem.core.kernels import Kernels, fused
from lowmem.core.layout import Layout
from lowmem.core.ranks import Ranks
from lowmem.cudasim.gpus import CARDS
from lowmem.data.tokenizer import byte_level_tokenizer
from lowmem.errors import InputError
from lowmem.planning.plan import Plan
from lowmem.planning.question import Question
from lowmem.run import prepare
from lowmem.run.figures import build_report
from lowmem.run.identity import refuse_another_run, run_identity
from lowmem.run.prepare import kernels_here
from lowmem.run.report import device_name, opening_remarks, versions
from lowmem.settings import FIELD_NAMES, Settings
from tests.test_settings import OPTION_VALUES

PLAN = {"fits": True, "model": "tiny"}
PEAKS = {"gpu_allocated_peak_bytes": None, "gpu_reserved_peak_bytes": None, "ram_peak_bytes": 5}


def row(step: int, step_ms: float, **more: float) -> dict:
    return {"step": step, "loss": 10.0 / step, "step_ms": step_ms} | more


def report(rows: list[dict], eval_first: float | None = None) -> dict:
    return build_report(PLAN, rows, PEAKS, "a device", {"torch": "2.13"}, 8, eval_first)


def test_a_report_has_the_keys_of_the_contract():
    found = report([row(1, 900.0), row(2, 100.0, eval_loss=4.0)], eval_first=6.0)
    assert found.keys() == {"plan", "measured", "loss", "steps", "device", "versions"}
    assert found["measured"].keys() == PEAKS.keys() | {"step_seconds", "sequences_per_second"}
    losses = {"first": 10.0, "last": 5.0, "eval_first": 6.0, "eval_last": 4.0}
    assert found["loss"] == losses | {
        **{"eval_best": 4.0, "eval_best_step": 2, "eval_exported": 4.0, "exported_step": 2, "diverged": False}
    }
    assert (found["plan"], found["steps"], found["device"]) == (PLAN, 2, "a device")


def test_a_steps_time_is_the_median_without_the_first_which_also_warms_up():
    rows = [row(1, 60_000.0), row(2, 100.0), row(3, 300.0), row(4, 200.0), row(5, 5_000.0)]
    measured = report(rows)["measured"]
    assert measured["step_seconds"] == pytest.approx(0.25)
    assert measured["sequences_per_second"] == pytest.approx(8 / 0.25)
    assert report([row(1, 500.0)])["measured"]["step_seconds"] == pytest.approx(0.5)


def test_a_peak_is_that_of_all_processes_of_the_run():
    rows = [row(1, 500.0, ram_peak_bytes=7, gpu_reserved_peak_bytes=None), row(2, 500.0, ram_peak_bytes=4)]
    measured = report(rows)["measured"]
    assert (measured["ram_peak_bytes"], measured["gpu_reserved_peak_bytes"]) == (7, None)


def test_what_there_is_no_figure_for_is_null():
    found = report([])
    assert found["measured"]["step_seconds"] is found["measured"]["sequences_per_second"] is None
    assert {found["loss"][name] for name in ("first", "last", "eval_first", "eval_last")} == {None}
    assert found["steps"] == 0


def test_the_last_held_out_loss_is_that_of_the_last_row_that_has_one():
    rows = [row(1, 1.0), row(2, 1.0, eval_loss=3.0), row(3, 1.0, eval_loss=2.5), row(4, 1.0)]
    assert report(rows, eval_first=6.0)["loss"]["eval_last"] == 2.5


def test_versions_are_those_of_the_packages_that_a_result_depends_on():
    found = versions()
    assert found["torch"] == torch.__version__ and found["transformers"] == transformers.__version__
    assert {"python", "platform", "safetensors"} <= found.keys()


# --- the identity of a run

DEFAULTS = Settings()
# Every setting, and the first value of test_settings.py that is not its default.
CHANGED = {field: value for _, field, value in reversed(OPTION_VALUES) if value != getattr(DEFAULTS, field)}
CHANGED |= {"demo": True}
# The settings that a resumed run must share. The others change no bit, or the identity has them by another name: the
# data's fingerprint, the number of steps, the planned precision and micro-batch.
SHARED = {
    *("model", "init", "seq", "target_tokens", "document_mask", "pack", "batch", "fixed_batch", "lr", "schedule"),
    *("warmup_steps", "weight_decay", "adam_beta1", "adam_beta2", "adam_epsilon", "clip_norm", "seed", "optimizer"),
    "residual",
}
# Those that decide the tokens: a difference is named if the hash of the data differs.
OF_DATA = {
    *("eval_data", "eval_fraction", "split", "max_samples", "text_field", "prompt_field", "completion_field"),
    *("messages_field", "train_on", "chat_template"),
}


def identity(
    settings: Settings, *, steps: int = 10, data: str = "abc", precision: str = "bf16", micro_batch: int = 4,
    fused_kernels: Kernels = Kernels.ALL,
):  # fmt: skip
    layout = Layout(micro_batch, states_on_gpu=3)
    plan = Plan(settings, 3_000, 3, 1, precision, layout, {}, steps=steps, fused_kernels=fused_kernels)
    return run_identity(GPT2Config(), plan, data)


def test_the_table_above_has_every_setting():
    assert CHANGED.keys() == set(FIELD_NAMES)
    assert all(getattr(DEFAULTS, name) != value for name, value in CHANGED.items())


@pytest.mark.parametrize("name", sorted(CHANGED))
def test_a_setting_that_changes_the_bits_is_part_of_the_identity(name):
    base = Settings(eval_every=9, sample_prompt="y")  # without which some others have nothing to do
    changed = dataclasses.replace(base, **{name: CHANGED[name]})
    assert (identity(changed) != identity(base)) == (name in SHARED | OF_DATA)


@pytest.mark.parametrize(
    "change",
    [{"steps": 11}, {"data": "abd"}, {"precision": "fp16"}, {"micro_batch": 8}, {"fused_kernels": Kernels.PRODUCTS}],
)
def test_so_is_what_settings_turned_into(change):
    assert identity(Settings(), **change) != identity(Settings())


def test_a_checkpoint_from_when_all_kernels_ran_or_none_goes_on():
    for known, kernels in ((True, Kernels.ALL), (False, Kernels.NONE)):
        wanted = identity(Settings(), fused_kernels=kernels)
        refuse_another_run(Path("step-1"), {"identity": wanted | {"fused_kernels": known}}, wanted)
    in_fp32 = identity(Settings(), precision="fp32", fused_kernels=Kernels.PRODUCTS)
    refuse_another_run(Path("step-1"), {"identity": in_fp32 | {"fused_kernels": True}}, in_fp32)
    with pytest.raises(InputError, match="its fused kernels of products and norms and .* do not run here"):
        refuse_another_run(Path("step-1"), {"identity": wanted | {"fused_kernels": True}}, wanted)


def test_a_checkpoint_from_before_it_named_the_settings_of_its_data_goes_on():
    wanted = identity(Settings(eval_fraction=0.2, chat_template="a.jinja"))
    older = {name: value for name, value in wanted.items() if name not in OF_DATA}
    refuse_another_run(Path("step-1"), {"identity": older}, wanted)
    with pytest.raises(InputError, match="from step-1: the data, their weights or the tokenizer have changed"):
        refuse_another_run(Path("step-1"), {"identity": older}, wanted | {"data": "abd"})


def test_other_settings_of_the_same_data_are_no_other_run():
    """A file may have another name, and a column no rows."""
    saved, wanted = identity(Settings(eval_data=("a.txt",))), identity(Settings(eval_data=("b.txt",)))
    refuse_another_run(Path("step-1"), {"identity": json.loads(json.dumps(saved))}, wanted)
    with pytest.raises(InputError, match=r"from step-1: --eval-data a\.txt -> b\.txt\. Use"):
        refuse_another_run(Path("step-1"), {"identity": saved}, wanted | {"data": "abd"})


class WithoutSums(Ranks):
    """Ranks of which another one's GPU does not run the kernels of sums."""

    def __init__(self):
        super().__init__()
        self._asked = iter(Kernels)

    def most(self, number: int) -> int:
        assert type(number) is int  # real ranks compare tensors of one dtype
        return max(number, int(next(self._asked) is Kernels.SUMS))


def test_kernels_that_do_not_run_on_every_rank_are_left_out(monkeypatch):
    said: list[str] = []
    monkeypatch.setattr(fused, "failures", lambda device: {Kernels.ROTARY: "no ptxas"})
    assert kernels_here("bf16", CPU, WithoutSums(), said.append) == Kernels.ALL & ~(Kernels.ROTARY | Kernels.SUMS)
    start = "without fused kernels of {}, which takes more memory and time: "
    assert said == [start.format("rotary") + "no ptxas", start.format("sums") + "they do not run on another rank's GPU"]
    said.clear()
    assert kernels_here("fp32", CPU, Ranks(), said.append) == Kernels.PRODUCTS and not said  # these it uses


@pytest.mark.parametrize(
    ("saved", "planned"),
    [
        (["products", "norms"], Kernels.PRODUCTS | Kernels.NORMS),
        (False, Kernels.NONE),  # as in that run
        (True, Kernels.ALL & ~Kernels.ROTARY),  # then it is refused
    ],
)
def test_a_resumed_run_plans_for_the_kernels_of_its_checkpoint(monkeypatch, saved, planned):
    monkeypatch.setattr(fused, "failures", lambda device: {Kernels.ROTARY: "no ptxas"})
    for name in ("take_workspaces", "forget_allocations"):
        monkeypatch.setattr(prepare.devices, name, lambda device: None)
    asked: list[Question] = []
    monkeypatch.setattr(prepare, "plan_of_ranks", lambda question, *others: asked.append(question) or Plan)
    monkeypatch.setattr(Plan, "sharing", 1)
    state = {"identity": {"precision": "bf16", "micro_batch": 4, "fused_kernels": saved}}
    question = Question(Settings(), GPT2Config(), "bf16", CARDS["rtx3060"])
    prepare.plan_here(question, torch.device("cuda"), Ranks(), None, print, (Path("step-1"), state))
    assert asked[0].fused_kernels == planned


# --- what is said

CPU = torch.device("cpu")


class OtherTokenizer(SimpleNamespace):
    init_kwargs = {}


def test_random_weights_and_bytes_for_tokens_are_said_aloud():
    said = opening_remarks("random", GPT2Config(), byte_level_tokenizer(), CPU)
    assert any("weights are random" in sentence for sentence in said)
    assert any("a token is a byte" in sentence for sentence in said)
    usual = opening_remarks("pretrained", GPT2Config(), OtherTokenizer(), CPU)
    assert usual == [f"training on {device_name(CPU)}"]
