"""Whole runs of a small T5: planned, trained, evaluated, stopped and gone on with, sampled, exported."""

import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForSeq2SeqLM, T5Config

from lowmem.errors import InputError
from lowmem.models.build import build_model
from lowmem.models.load import read_weights
from runs import assert_same_run, last_line, stopped_in_step, stored, write_rows

SIZES = {
    **{"vocab_size": 300, "d_model": 32, "d_kv": 8, "d_ff": 64, "num_layers": 2, "num_heads": 4},
    **{"num_decoder_layers": 3},  # targets begin behind its padding, which is 0
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("t5")
    T5Config(**SIZES).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def train_t5(folder, train):
    """Three steps of 4 x (24 + 8) tokens; returns the exit code."""
    return lambda out, *options: train(out, "--model", str(folder), *options)


@pytest.fixture(scope="module")
def finished_t5(train_t5, tmp_path_factory):
    out = tmp_path_factory.mktemp("run") / "out"
    assert train_t5(out, "--eval-every", "2", "--eval-batches", "1", "--sample-prompt", "one 1: the ") == 0
    return out


def test_a_run_ends_with_a_model_that_transformers_loads(finished_t5, folder):
    report = stored(finished_t5 / "report.json")
    assert report["plan"]["tokens_per_step"] == 128 and report["steps"] == 3
    assert report["loss"]["eval_last"] < report["loss"]["eval_first"]
    model, loaded = AutoModelForSeq2SeqLM.from_pretrained(finished_t5 / "model", output_loading_info=True)
    assert not any(loaded.values()) and model.config.is_encoder_decoder
    assert model.config.decoder_start_token_id == model.generation_config.decoder_start_token_id == 0
    assert stored(finished_t5 / "settings.json")["target_tokens"] == 8
    log = (finished_t5 / "log.txt").read_text()
    assert "sample: " in log and "no sample: " not in log


@pytest.mark.exhaustive
@pytest.mark.parametrize("options", [
    ["--weights", "streamed", "--recompute", "on"], ["--boundaries", "streamed", "--recompute", "on"],
    ["--states", "disk"], ["--group", "2", "--segment-blocks", "3", "--recompute", "on"],
])  # fmt: skip
def test_where_tensors_lie_changes_no_bit(train_t5, finished_t5, tmp_path, options):
    options = [*options, "--states-folder", str(tmp_path / "states")] if "disk" in options else options
    assert train_t5(tmp_path / "out", "--eval-every", "2", "--eval-batches", "1", *options) == 0
    assert_same_run(tmp_path / "out", finished_t5)


def test_an_interrupted_run_ends_as_if_it_had_not_been(train_t5, finished_t5, tmp_path, monkeypatch):
    options = ("--eval-every", "2", "--eval-batches", "1")
    with stopped_in_step(2):
        assert train_t5(tmp_path / "out", *options) == 75
    assert train_t5(tmp_path / "out", *options) == 0
    assert_same_run(tmp_path / "out", finished_t5)


def test_a_model_that_transformers_has_saved_is_trained_further(finished_t5, tmp_path, train):
    """At a rate near 0 its logits stay. So does a tensor that no model uses, as in T5's files on the hub."""
    model = AutoModelForSeq2SeqLM.from_pretrained(finished_t5 / "model")
    there = tmp_path / "there"
    model.save_pretrained(there)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (there / name).write_bytes((finished_t5 / "model" / name).read_bytes())
    tensors = load_file(there / "model.safetensors")
    tensors["decoder.block.0.layer.1.EncDecAttention.relative_attention_bias.weight"] = torch.zeros(32, 4)
    save_file(tensors, there / "model.safetensors", {"format": "pt"})
    out = tmp_path / "out"
    options = ("--init", "pretrained", "--steps", "1", "--lr", "1e-12", "--weight-decay", "0")
    assert train(out, "--model", str(there), *options) == 0
    other = AutoModelForSeq2SeqLM.from_pretrained(out / "model")
    source, target = torch.arange(24).view(2, 12), torch.arange(8).view(2, 4)
    logits = [each.eval()(input_ids=source, decoder_input_ids=target).logits for each in (model, other)]
    assert torch.allclose(*logits, atol=1e-6)


def test_files_with_a_head_of_their_own_are_refused(finished_t5, tmp_path):
    """As those of T5's version 1.1, whose head transformers 5 ties all the same."""
    tensors = load_file(finished_t5 / "model" / "model.safetensors")
    save_file(tensors | {"lm_head.weight": torch.ones(300, 32)}, tmp_path / "model.safetensors", {"format": "pt"})
    with pytest.raises(InputError, match="a head of its own"):
        read_weights(build_model(T5Config(**SIZES)), str(tmp_path))


def test_prompts_with_completions_are_sources_and_targets(train_t5, tmp_path, capsys):
    rows = [{"prompt": f"what is {n}?", "completion": str(n * n)} for n in range(40)]
    assert train_t5(tmp_path / "out", "--data", write_rows(tmp_path / "rows.jsonl", rows), "--fixed-batch") == 0
    assert "a row is a source of at most 24 tokens and a target of at most 8" in capsys.readouterr().err


@pytest.mark.parametrize("options, said", [
    (["--document-mask", "on"], "one source and one target in a row"),
    (["--pack", "packed"], "one source and one target in a row"),
    (["--train-on", "all"], "learns targets, never sources"),
    (["--target-tokens", "32"], "leave no token for a source"), (["--target-tokens", "0"], "at least 1"),
    (["--model", "gpt2-demo", "--target-tokens", "8"], "is for encoder-decoders"),
])  # fmt: skip
def test_what_an_encoder_decoder_does_not_do_is_refused_and_nothing_written(train_t5, tmp_path, capsys, options, said):
    assert train_t5(tmp_path / "out", *options) == 2
    assert said in last_line(capsys)
    assert not (tmp_path / "out").exists() or list((tmp_path / "out").iterdir()) == []


def test_a_run_is_not_gone_on_with_another_length_of_targets(train_t5, finished_t5, tmp_path, capsys):
    shutil.copytree(finished_t5, tmp_path / "out")
    assert train_t5(tmp_path / "out", "--target-tokens", "12") == 2
    assert "--target-tokens 8 -> 12" in last_line(capsys)
