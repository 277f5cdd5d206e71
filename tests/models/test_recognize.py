"""Things that people give as --model: each is refused with its kind and with advice."""

import json

import pytest

import lowmem
from lowmem.errors import InputError
from lowmem.models.recognize import is_hub_name, recognize
from lowmem.run.main import main
from runs import SCRIPTS, python
from tests.data.loading import POINTER

GPT2 = {"model_type": "gpt2", "architectures": ["GPT2LMHeadModel"], "n_layer": 1, "n_embd": 8, "n_head": 1}
BART = {"model_type": "bart", "is_encoder_decoder": True}
MADE_UP = {  # {file name: content} of a folder that is not a model; its kind and the advice in the message
    "adapter": (
        {"adapter_config.json": {"base_model_name_or_path": "org/base"}, "adapter_model.safetensors": ""},
        ["LoRA or PEFT adapter of org/base", "merge_and_unload"],
    ),
    "adapter of nothing": ({"adapter_config.json": [], "config.json": GPT2}, ["PEFT adapter, and", "merge"]),
    "gguf": ({"tiny-q4.gguf": ""}, ["GGUF file", "give that file", "NAME.gguf"]),
    "nanogpt": ({"ckpt.pt": ""}, ["checkpoint of nanoGPT", "transposed"]),
    "trainer output": (
        {f"checkpoint-{step}/config.json": GPT2 for step in (500, 1000, 90)} | {"checkpoint-best/x": ""},
        ["Hugging Face's Trainer", "checkpoint-1000, the newest"],
    ),
    "trainer output with adapters": (
        {"checkpoint-5/adapter_config.json": {"base_model_name_or_path": "org/base"}},
        ["checkpoint-5 is a LoRA or PEFT adapter of org/base", "merge_and_unload"],
    ),
    "umt5": ({"config.json": {"model_type": "umt5", "is_encoder_decoder": True}}, ["umt5 is an encoder-decoder"]),
    "bart": (
        {"config.json": BART | {"architectures": ["BartForConditionalGeneration"]}},
        ["BartForConditionalGeneration is an encoder-decoder", "only T5"],
    ),
    **{
        sense: (
            {"config.json": {"model_type": "gemma3", "architectures": ["Seer"], f"{sense}_config": {}}},
            [f"Seer also reads {sense}", "only models of text"],
        )
        for sense in ("vision", "audio")
    },
    "code of its own, and no model_type": (
        {"config.json": {"architectures": ["MiniCPMForCausalLM"], "auto_map": {"AutoConfig": "own.Config"}}},
        ["MiniCPMForCausalLM, without a model_type, needs Python code", "not run here"],
    ),
    "bert": ({"config.json": {"model_type": "bert"}}, ["bert is an encoder", "attends to later tokens", "a decoder"]),
    **{
        method: (
            {"config.json": GPT2 | {"quantization_config": {"quant_method": method}}},
            [f"quantised ({method})", "original precision"],
        )
        for method in ("bitsandbytes", "gptq", "awq", "fp8")
    },
    "run without model": ({"settings.json": {}, "metrics.jsonl": ""}, ["has not exported its model yet"]),
    "checkpoint": (
        {"x/checkpoints/step-00000003/manifest.json": {}, "x/checkpoints/step-00000003/state.json": {}},
        ["checkpoint of a run of lowmem", "--resume", "x/model"],
    ),
    "sentence-transformers": ({"modules.json": [], "0_Transformer/config.json": GPT2}, ["sentence-transformers"]),
    "diffusers": ({"model_index.json": {}}, ["diffusers pipeline"]),
    "tensorflow": ({"config.json": GPT2, "tf_model.h5": ""}, ["TensorFlow only", "from_tf=True"]),
    "flax": ({"config.json": GPT2, "flax_model.msgpack": ""}, ["Flax only", "from_flax=True"]),
    "onnx": ({"config.json": GPT2, "onnx/decoder.onnx": ""}, ["ONNX only"]),
    "gguf beside a config": ({"config.json": GPT2, "x.gguf": ""}, ["GGUF file", "give that file"]),
    "meta": ({"config.json": GPT2, "consolidated.00.pth": "", "params.json": {}}, ["Meta's", "convert_"]),
    "mistral": ({"config.json": GPT2, "consolidated.safetensors": ""}, ["Mistral's", "convert_"]),
    "deepspeed": ({"config.json": GPT2, "zero_to_fp32.py": "", "latest": ""}, ["DeepSpeed", "zero_to_fp32.py"]),
    "fsdp": ({"config.json": GPT2, "pytorch_model_fsdp_0/__0_0.distcp": ""}, ["FSDP", "accelerate merge-weights"]),
    "litgpt": ({"config.json": GPT2, "lit_model.pth": ""}, ["litgpt", "convert_from_litgpt"]),
    "pointer": ({"config.json": GPT2, "model.safetensors": POINTER}, ["model.safetensors is a Git LFS pointer"]),
    "pointer config": ({"config.json": POINTER, "model.safetensors": ""}, ["config.json is a Git LFS pointer"]),
    "no weights": ({"config.json": GPT2, "training_args.bin": ""}, ["no model.safetensors and no pytorch_model.bin"]),
    "no shard": (
        {"config.json": GPT2, "pytorch_model.bin.index.json": {"weight_map": {"x": "a-00001-of-00001.bin"}}},
        ["lacks 1 of 1 weight files (a-00001-of-00001.bin)"],
    ),
    "no index": ({"config.json": GPT2, "model.safetensors.index.json": []}, ["has no weight_map"]),
    "no config": ({"model.safetensors": ""}, ["weights and no config.json", "copy config.json"]),
    "nothing": ({"notes.txt": ""}, ["holds no config.json"]),
}
FILES = {
    "model.safetensors": ["has only weights", "give the folder"],
    "tiny.gguf": ["GGUF file"],
    "ckpt.pt": ["checkpoint of nanoGPT"],
    "last.ckpt": ["checkpoint of another trainer"],
    "config.json": ["config without weights", "--init random"],
}


def made(folder, files: dict):
    for name, content in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(content if isinstance(content, str) else json.dumps(content))
    return folder


@pytest.mark.parametrize(("files", "said"), MADE_UP.values(), ids=MADE_UP)
def test_a_folder_that_is_no_model_is_named_for_what_it_is(tmp_path, capsys, files, said):
    model = made(tmp_path / "model", files)
    for deepest in model.glob("x/checkpoints/*"):
        model = deepest
    assert main(SCRIPTS["large"].SETTINGS, ["--model", str(model), "--out", str(tmp_path / "out")]) == 2
    errors = capsys.readouterr().err
    assert errors.count("\n") == 1 and all(words in errors for words in said), errors
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(("name", "said"), FILES.items(), ids=FILES)
def test_a_file_in_the_place_of_a_folder_is_named_for_what_it_is(tmp_path, name, said):
    (tmp_path / name).write_text(json.dumps(GPT2))
    with pytest.raises(InputError) as refusal:
        recognize(str(tmp_path / name), with_weights=True)
    assert all(words in str(refusal.value) for words in said)


def test_a_runs_folder_stands_for_the_model_that_it_exported_and_that_is_said(tmp_path):
    made(tmp_path, {"settings.json": {}, "model/config.json": GPT2, "model/model.safetensors": ""})
    exported = str(tmp_path / "model")
    model, remark = recognize(str(tmp_path), with_weights=True)
    assert model == exported and exported in remark
    assert recognize(exported, with_weights=True) == (exported, None)
    with pytest.warns(UserWarning, match="its exported model"), pytest.raises(InputError, match="--seq 4096"):
        lowmem.plan(lowmem.Settings(model=str(tmp_path), init="random", seq=4096, gpu="rtx3060"))


def test_of_a_trainers_checkpoint_the_weights_are_taken_and_that_is_said(tmp_path):
    made(tmp_path, {"config.json": GPT2, "model.safetensors": "", "trainer_state.json": {}, "optimizer.pt": ""})
    model, remark = recognize(str(tmp_path), with_weights=True)
    assert model == str(tmp_path) and "neither its optimizer's" in remark
    assert recognize(str(tmp_path), with_weights=False)[1] is None


def test_what_is_a_model_stays_what_it_is(tmp_path):
    for name, config in {
        "decoder": GPT2,
        "bert": {"model_type": "bert", "is_decoder": True},
        "bart": BART | {"architectures": ["BartForCausalLM"]},
        "t5": {"model_type": "t5", "is_encoder_decoder": True},
    }.items():
        folder = str(made(tmp_path / name, {"config.json": config, "model.safetensors": ""}))
        assert recognize(folder, with_weights=True) == (folder, None)
    for name in ("gpt2", "EleutherAI/pythia-410m", "Qwen/Qwen2.5-0.5B", "gpt2-demo"):
        assert recognize(name, with_weights=True) == (name, None)


@pytest.mark.parametrize("name", ["no/such/folder", "./here", "/nowhere", "org/", "a--b", "org/.name", "é/é/é"])
def test_a_path_that_leads_nowhere_is_no_name_on_the_hub(name):
    assert not is_hub_name(name)
    with pytest.raises(InputError, match="neither a folder here nor a name on the Hugging Face hub"):
        recognize(name, with_weights=False)


@pytest.mark.parametrize("name", ["gpt2", "org/name"])
def test_a_folder_in_the_way_of_a_name_on_the_hub_is_said_to_be_that(tmp_path, monkeypatch, capsys, name):
    monkeypatch.chdir(tmp_path)
    (tmp_path / name).mkdir(parents=True)
    with pytest.raises(InputError, match=f"folder {name} hides the hub's model of that name"):
        recognize(name, with_weights=True)
    with pytest.raises(InputError, match="holds no config.json; give the folder"):
        recognize(str(tmp_path / name), with_weights=True)
    assert main(SCRIPTS["large"].SETTINGS, ["--model", "org/other", "--out", "org/other/"]) == 2
    assert (
        "would be a folder that hides the hub's model" in capsys.readouterr().err
        and not (tmp_path / "org/other").exists()
    )


@pytest.mark.parametrize("program", [["train_gpt2_large.py"], ["-m", "lowmem.plan"]], ids=" ".join)
def test_it_is_said_in_a_real_process(tmp_path, program):
    run = python(*program, "--model", made(tmp_path, {"x.gguf": ""}))
    assert (run.returncode, run.stdout, run.stderr.count("\n")) == (2, "", 1) and "GGUF" in run.stderr


def test_a_run_in_a_folder_called_tilde_keeps_its_place(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "~/model").mkdir(parents=True)
    (tmp_path / "~/settings.json").touch()
    (tmp_path / "~/model/config.json").write_text('{"model_type": "gpt2"}')
    assert recognize("./~", with_weights=False)[0] == "./~/model"  # "~/model" would be in the home folder


@pytest.mark.parametrize("name", ["config.json", "tokenizer.json", "model.safetensors", "generation_config.json"])
def test_a_link_that_leads_nowhere_is_named(tmp_path, name):
    """As in a snapshot of the hub's cache that was copied without its blobs."""
    for other in ("config.json", "tokenizer.json", "model.safetensors", "generation_config.json"):
        (tmp_path / other).write_text(json.dumps(GPT2))
    (tmp_path / name).unlink()
    (tmp_path / name).symlink_to("../blobs/abc")
    with pytest.raises(InputError, match=rf"{name} is a link to \.\./blobs/abc, which is not there; copy the folder"):
        recognize(str(tmp_path), True)
