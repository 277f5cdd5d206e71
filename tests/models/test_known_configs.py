"""Models that are known without a network: their counts of parameters, and when the hub's own config is taken."""

import pytest
from transformers import Qwen3Config

from lowmem.models import build
from lowmem.models.build import KNOWN_CONFIGS, build_model, load_config
from lowmem.run import plan_command

GPT2 = {
    **{"gpt2": 124_439_808, "gpt2-medium": 354_823_168, "openai-community/gpt2-large": 774_030_080},
    "gpt2-xl": 1_557_611_200,
}
PARAMETERS = GPT2 | {name: known["parameters"] for name, known in KNOWN_CONFIGS.items()}


@pytest.mark.parametrize("name", PARAMETERS)
def test_a_known_model_has_its_published_number_of_parameters_and_a_source(name, monkeypatch):
    monkeypatch.setattr(build, "model_folder", lambda *_: pytest.fail("the hub was asked"))
    model = build_model(load_config(name, "random"))
    assert sum(parameter.numel() for parameter in model.parameters()) == PARAMETERS[name]
    assert name in GPT2 or KNOWN_CONFIGS[name]["source"]


def test_the_hubs_config_is_preferred_for_pretrained_weights(monkeypatch, tmp_path):
    name = "Qwen/Qwen3-0.6B"
    with monkeypatch.context() as offline:
        offline.setenv("HF_HUB_OFFLINE", "1")
        offline.setattr(build.constants, "HF_HUB_OFFLINE", True)
        assert load_config(name, "pretrained").to_dict() == load_config(name, "random").to_dict()
    Qwen3Config(num_hidden_layers=3).save_pretrained(tmp_path)
    monkeypatch.setattr(build, "model_folder", lambda *_: tmp_path)
    assert load_config(name, "pretrained").num_hidden_layers == 3
    assert load_config(name, "random").num_hidden_layers == 28


def test_planning_a_known_model_asks_no_hub(monkeypatch, capsys):
    def asked(*_):
        raise AssertionError("the hub was asked")

    monkeypatch.setattr(build, "model_folder", asked)
    options = "--gpu rtx3090 --gpu-limit 100MiB --ram-limit 3GiB --batch 1 --seq 32 --recompute on --segment-blocks 1"
    assert plan_command.main(["--model", "google/gemma-3-1b-pt", *options.split()]) == 3
    assert "google/gemma-3-1b-pt at 1 x 32 tokens" in capsys.readouterr().err
