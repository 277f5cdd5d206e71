"""Reads a folder in transformers 4 or 5: its logits, token ids, special tokens, and the text of a conversation.

    python probe.py    reads one JSON request a line and answers each in one line; no package of the repository

{"do": "make", "folder", "weights"} writes random weights, as save_pretrained names them, for the config.json there;
{"do": "read", "folder", "logits"} answers with these, and leaves the logits in a file.
"""

import json
import logging
import os
import re
import sys
import warnings
from pathlib import Path

TEXTS = (
    *("hello", " hello", "hello  world\n\tthe cat", "The dog sat on 2024 mats, 12345!", "x = f(a_b)  # ok\r\n"),
    *("naïve Ünïcode “quotes” — dash", "日本語 中文", "🙂👍🏽", "a</s>b <|endoftext|> <s>", ""),
    *("user: yes\nassistant: no", "don't I'LL we've"),
)  # fmt: skip
CHAT = [{"role": "user", "content": "hello"}, {"role": "assistant", "content": "yes no"}]
OLD_BUFFERS = {  # by model type: the buffers of a layer that earlier versions saved
    "gpt2": ("h.{}.attn.bias", "h.{}.attn.masked_bias"),
    "gpt_neo": ("transformer.h.{}.attn.attention.bias", "transformer.h.{}.attn.attention.masked_bias"),
    "gptj": ("transformer.h.{}.attn.bias", "transformer.h.{}.attn.masked_bias"),
    "gpt_neox": (
        *("gpt_neox.layers.{}.attention.bias", "gpt_neox.layers.{}.attention.masked_bias"),
        *("gpt_neox.layers.{}.attention.rotary_emb.inv_freq",),
    ),
    "llama": ("model.layers.{}.self_attn.rotary_emb.inv_freq",),
    "codegen": ("transformer.h.{}.attn.causal_mask",),
}


def model_class(config):
    import transformers

    return transformers.AutoModelForSeq2SeqLM if config.is_encoder_decoder else transformers.AutoModelForCausalLM


def make(folder: str, weights: list[str]) -> None:
    """Writes weights for `folder`'s config.json, and leaves the config as it is."""
    import torch
    from transformers import AutoConfig

    text = (Path(folder) / "config.json").read_text(encoding="utf-8")
    fields = json.loads(text)
    config = AutoConfig.from_pretrained(folder, trust_remote_code=False)
    torch.manual_seed(0)
    with torch.no_grad():
        model = model_class(config).from_config(config, trust_remote_code=False).float()
        for name, parameter in model.named_parameters():  # wide enough for every position to count
            if parameter.dim() >= 2 and not re.search("A_log|conv|time_", name):
                parameter.normal_(std=parameter.shape[-1] ** -0.5)
            elif name.endswith("bias") and "dt_" not in name:
                parameter.normal_(std=0.1)
            elif not re.search("A_log|dt_|time_", name):
                parameter.normal_(mean=1, std=0.1)
        dtype = getattr(torch, str(fields.get("torch_dtype") or fields.get("dtype") or "float32"))
        state = {name: tensor.to(dtype) for name, tensor in model.state_dict().items()}
    model.save_pretrained(folder, state_dict=state, safe_serialization="bin" not in weights)
    for name in ("config.json", "generation_config.json"):
        (Path(folder) / name).unlink(missing_ok=True)
    (Path(folder) / "config.json").write_text(text, encoding="utf-8")
    rewrite(Path(folder), model, weights)


def rewrite(folder: Path, model, weights: list[str]) -> None:
    """Gives the weights in `folder` the names that they have on the hub."""
    import torch
    from safetensors.torch import load_file, save_file

    path = next(folder.glob("*.safetensors"), None) or folder / "pytorch_model.bin"
    state = load_file(path) if path.suffix == ".safetensors" else torch.load(path)
    if "base" in weights:
        state = {name.removeprefix(model.base_model_prefix + "."): tensor for name, tensor in state.items()}
    if "buffers" in weights:
        kind, prefix = model.config.model_type, "" if "base" in weights else "transformer."
        for layer in range(model.config.num_hidden_layers):
            for name in OLD_BUFFERS[kind]:
                name = (prefix if kind == "gpt2" else "") + name.format(layer)
                state[name] = torch.ones(8) if "inv_freq" in name else torch.ones(1, 1, 128, 128, dtype=torch.uint8)
    if "t5 table" in weights:
        name = "block.0.layer.{}.relative_attention_bias.weight"
        state["decoder." + name.format("1.EncDecAttention")] = state[
            "decoder." + name.format("0.SelfAttention")
        ].clone()
    if path.suffix == ".safetensors":
        save_file(state, path, metadata={"format": "pt"})
    else:
        torch.save(state, path)


def forward(model, length: int = 60):
    """Returns the logits of `model` for `length` ids, no two alike, in the mode in which it is."""
    import torch

    vocabulary = model.config.get_text_config().vocab_size
    ids = ((torch.arange(length) * 37 + 11) % (vocabulary - 20) + 20)[None]
    more = {"decoder_input_ids": ids[:, :40]} if model.config.is_encoder_decoder else {}
    with torch.no_grad():
        return model(input_ids=ids, use_cache=False, return_dict=True, **more).logits


def logits_of(folder: str, attention: str | None):
    """Returns its logits in fp32 for a short and a long text, and the keys that loading missed or that did not fit."""
    import torch
    from transformers import AutoConfig

    config = AutoConfig.from_pretrained(folder, trust_remote_code=False)
    model, info = model_class(config).from_pretrained(
        folder,
        output_loading_info=True,
        torch_dtype=torch.float32,
        trust_remote_code=False,
        attn_implementation=attention,
    )
    model.eval()
    logits = [forward(model), forward(model, 120)]
    return logits, sorted(info["missing_keys"]), sorted(map(str, info["mismatched_keys"]))


def tokens_of(folder: str) -> dict:
    """Returns all that a user sees of the tokenizer."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
    said = {
        "ids": [tokenizer(text)["input_ids"] for text in TEXTS],
        "bare": [tokenizer(text, add_special_tokens=False)["input_ids"] for text in TEXTS],
        "pair": tokenizer(TEXTS[0], TEXTS[2])["input_ids"],
        "special": {name: getattr(tokenizer, f"{name}_token_id") for name in ("bos", "eos", "unk", "pad")},
        "length": len(tokenizer),
        "side": tokenizer.padding_side,
        "skips": sorted(tokenizer.all_special_ids),
    }
    said["text"] = [tokenizer.decode(ids) for ids in said["ids"]]
    said["template"] = "none"
    if tokenizer.chat_template is not None:
        said["template"] = tokenizer.apply_chat_template(CHAT, tokenize=False)
    return said


def read(folder: str, logits: str, attention: str | None = None) -> dict:
    """Describes the model and the tokenizer in `folder`; saves the model's logits in the file `logits`."""
    import torch

    found = {}
    try:
        values, found["missing"], found["mismatched"] = logits_of(folder, attention)
        torch.save(values, logits)
    except Exception as error:
        found["model_error"] = reason(error)
    try:
        found["tokens"] = tokens_of(folder)
    except Exception as error:
        found["tokens_error"] = reason(error)
    return found


def reason(error: BaseException) -> str:
    return " ".join(f"{type(error).__name__}: {error}".split())[:300]


def quiet() -> None:
    warnings.simplefilter("ignore")
    os.environ["TRANSFORMERS_VERBOSITY"] = "critical"
    logging.disable(logging.CRITICAL)


def main() -> None:
    quiet()
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what packages print is no answer
    for line in sys.stdin:
        request = json.loads(line)
        do = request.pop("do")
        try:
            answer = {"make": make, "read": read}[do](**request) or {}
        except Exception as error:
            answer = {"error": reason(error)}
        answers.write(json.dumps(answer) + "\n")
        answers.flush()


if __name__ == "__main__":
    main()
