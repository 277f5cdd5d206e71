"""Layouts whose vocabulary is made of bytes: GPT-2 and what came after it."""

from tokenizers import normalizers, pre_tokenizers, processors

from tests.published_models.layouts import (
    BLOOM_SPLIT,
    GPT2_SPLIT,
    GPT4O_SPLIT,
    HUGE,
    LLAMA3_SPLIT,
    QWEN_SPLIT,
    Layout,
    added_token,
    byte_bpe,
    byte_level,
    ends,
    split,
)

EOT = "<|endoftext|>"
LLAMA3 = ["<|begin_of_text|>", "<|end_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"]
QWEN = [EOT, "<|im_start|>", "<|im_end|>"]
CHATML = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
LLAMA3_CHAT = (
    "{% for message in messages %}{% set content = '<|start_header_id|>' + message['role'] + '<|end_header_id|>\n\n' "
    "+ message['content'] | trim + '<|eot_id|>' %}{% if loop.index0 == 0 %}{% set content = bos_token + content %}"
    "{% endif %}{{ content }}{% endfor %}"
)


def gpt2(**more):
    return byte_bpe([EOT], last=True, **more)


def neox():
    return byte_bpe([EOT, "<|padding|>"], normalizer=normalizers.NFC())


def llama3():
    backend = byte_bpe([], pre=split(LLAMA3_SPLIT))
    reserved = [f"<|reserved_special_token_{number}|>" for number in range(4)]
    backend.add_special_tokens([*LLAMA3, *reserved])
    return ends(backend, LLAMA3[0], None)


def qwen():
    return byte_bpe(QWEN, last=True, pre=split(QWEN_SPLIT), normalizer=normalizers.NFC())


def falcon():
    parts = [pre_tokenizers.Punctuation("contiguous"), byte_level(), pre_tokenizers.Digits(False)]
    return byte_bpe([">>TITLE<<", EOT], pre=pre_tokenizers.Sequence(parts))


def deepseek():
    patterns = (r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", r"[一-龥ࠀ-一가-퟿]+", r"\p{N}")
    from tokenizers import Regex

    parts = [pre_tokenizers.Split(Regex(pattern), "isolated", False) for pattern in patterns]
    backend = byte_bpe([], pre=pre_tokenizers.Sequence([*parts, byte_level(regex=False)]))
    backend.add_special_tokens(["<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>"])
    return ends(backend, "<｜begin▁of▁sentence｜>", None)


def deepseek_r1():
    backend = byte_bpe([], pre=split(QWEN_SPLIT), normalizer=normalizers.NFC())
    backend.add_special_tokens(["<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>", "<｜User｜>", "<｜Assistant｜>"])
    return ends(backend, "<｜begin▁of▁sentence｜>", None)


def digits(special: list[str], individual: bool = True):
    return byte_bpe(special, pre=pre_tokenizers.Sequence([pre_tokenizers.Digits(individual), byte_level()]))


def cohere():
    special = ["<PAD>", "<UNK>", "<BOS_TOKEN>", "<|START_OF_TURN_TOKEN|>", "<|END_OF_TURN_TOKEN|>"]
    backend = byte_bpe(special, pre=pre_tokenizers.Sequence([pre_tokenizers.Digits(True), byte_level()]))
    backend.normalizer = normalizers.NFC()
    return ends(backend, "<BOS_TOKEN>", None)


def roberta(trim: bool):
    backend = byte_bpe(["<s>", "<pad>", "</s>", "<unk>", "<mask>"], pre=byte_level(prefix=True, trim=trim))
    backend.post_processor = processors.RobertaProcessing(("</s>", 2), ("<s>", 0), trim, True)
    return backend


def opt():
    return ends(byte_bpe(["<s>", "<pad>", "</s>", "<unk>"]), "</s>", None)


ADDED = {
    "gpt2": {name: added_token(EOT) for name in ("unk_token", "bos_token", "eos_token")},
    "opt": {name: added_token("</s>") for name in ("unk_token", "bos_token", "eos_token")},
}
COHERE_CHAT = (
    "{{ bos_token }}{% for message in messages %}{{ '<|START_OF_TURN_TOKEN|>' + message['content'] + "
    "'<|END_OF_TURN_TOKEN|>' }}{% endfor %}"
)
QWEN_CONFIG = {
    "add_prefix_space": False, "additional_special_tokens": QWEN[1:], "bos_token": None, "chat_template": CHATML,
    "clean_up_tokenization_spaces": False, "eos_token": "<|im_end|>", "errors": "replace", "model_max_length": 32768,
    "pad_token": EOT, "split_special_tokens": False, "tokenizer_class": "Qwen2Tokenizer", "unk_token": None,
}  # fmt: skip
LLAMA3_CONFIG = {
    "bos_token": LLAMA3[0], "chat_template": LLAMA3_CHAT, "clean_up_tokenization_spaces": True, "eos_token": LLAMA3[4],
    "model_input_names": ["input_ids", "attention_mask"], "model_max_length": 131072,
    "tokenizer_class": "PreTrainedTokenizerFast",
}  # fmt: skip
NEOX_CONFIG = {
    "add_prefix_space": False, "bos_token": EOT, "eos_token": EOT, "unk_token": EOT, "tokenizer_class":
    "GPTNeoXTokenizer", "name_or_path": "EleutherAI/gpt-neox-20b", "special_tokens_map_file": "/admin/special.json",
}  # fmt: skip
THREE = {name: EOT for name in ("bos_token", "eos_token", "unk_token")}
SMOL = {"add_prefix_space": False, **THREE, "clean_up_tokenization_spaces": False, "model_max_length": 2048}
TRUNCATED = {
    "truncation": {"direction": "Right", "max_length": 16, "strategy": "LongestFirst", "stride": 0},
    "padding": {"strategy": {"Fixed": 16}, "direction": "Right", "pad_to_multiple_of": None, "pad_id": 0,
                "pad_type_id": 0, "pad_token": "<|begin_of_text|>"},
}  # fmt: skip
ALL3 = ("tokenizer.json", "vocab.json")
LLAMA31, GPT2, QWEN2 = "meta-llama/Llama-3.1-8B-Instruct", "openai-community/gpt2", "Qwen/Qwen2-0.5B-Instruct"

LAYOUTS = [
    Layout("GPT-2 of 2019: vocab.json and merges.txt alone", GPT2, gpt2, ("vocab.json",), None),
    Layout("gpt2: tokenizer.json, vocab.json, merges.txt, a length", GPT2, gpt2, ALL3, {"model_max_length": 1024}),
    Layout("GPT-2 of transformers 4.2: tokens as AddedToken in the config and in special_tokens_map.json", GPT2, gpt2,
           ("vocab.json",), {**ADDED["gpt2"], "add_prefix_space": False, "errors": "replace", "name_or_path": "gpt2",
           "tokenizer_class": "GPT2Tokenizer", "special_tokens_map_file": None}, ADDED["gpt2"]),
    Layout("end named in special_tokens_map.json alone", GPT2, gpt2, config={"tokenizer_class": "GPT2TokenizerFast"},
           special_map={"eos_token": EOT}),
    Layout("CodeGen: added_tokens.json with runs of spaces and tabs", "Salesforce/codegen-350M-mono", gpt2,
           ("tokenizer.json", "vocab.json"), {**THREE, "add_prefix_space": False, "model_max_length": 2048,
           "special_tokens_map_file": None, "tokenizer_class": "CodeGenTokenizer"}, THREE,
           {" " * 4: 321, " " * 3: 322, " " * 2: 323, "\t\t": 324}),
    Layout("Phi-1.5: CodeGenTokenizer without tokenizer.json", "microsoft/phi-1_5", gpt2, ("vocab.json",),
           {**THREE, "add_prefix_space": False, "model_max_length": 2048, "tokenizer_class": "CodeGenTokenizer"}, THREE,
           {EOT: 320, " " * 4: 321, " " * 3: 322, "\t\t": 323}),
    Layout("GPT-J: GPT2Tokenizer with extra tokens behind the end", "EleutherAI/gpt-j-6b", gpt2, ALL3,
           {**THREE, "add_prefix_space": False, "errors": "replace", "model_max_length": 2048,
            "tokenizer_class": "GPT2Tokenizer"}, THREE, {f"<|extratoken_{n}|>": 320 + n for n in range(1, 9)}),
    Layout("OPT: </s> is start, end and unknown; slow files with add_bos_token", "facebook/opt-125m", opt,
           ("vocab.json",), {**ADDED["opt"], "pad_token": added_token("<pad>"), "add_bos_token": True,
           "add_prefix_space": False, "errors": "replace", "tokenizer_class": "GPT2Tokenizer"},
           {**ADDED["opt"], "pad_token": added_token("<pad>")}),
    Layout("Pythia: GPTNeoXTokenizer with NFC", "EleutherAI/pythia-160m", neox, config=NEOX_CONFIG, special_map=THREE),
    Layout("OLMo: GPTNeoXTokenizer, add_bos_token and add_eos_token false", "allenai/OLMo-1B-hf", neox,
           config={**NEOX_CONFIG, "add_bos_token": False, "add_eos_token": False, "bos_token": None,
                   "pad_token": "<|padding|>", "model_max_length": HUGE}),
    Layout("BLOOM: Split and ByteLevel, padding left", "bigscience/bloom-560m",
           lambda: byte_bpe(["<unk>", "<s>", "</s>", "<pad>"], pre=split(BLOOM_SPLIT)), config={
           "unk_token": "<unk>", "eos_token": "</s>", "bos_token": "<s>", "pad_token": "<pad>", "padding_side": "left",
           "name_or_path": "bigscience/tokenizer", "tokenizer_class": "BloomTokenizerFast",
           "special_tokens_map_file": None}, special_map={"bos_token": "<s>", "eos_token": "</s>"}),
    Layout("StarCoder: GPT2Tokenizer with Digits and additional special tokens", "bigcode/starcoderbase-1b",
           lambda: digits([EOT, "<fim_prefix>", "<fim_middle>"]), ALL3, {**SMOL, "tokenizer_class": "GPT2Tokenizer",
           "additional_special_tokens": [EOT, "<fim_prefix>", "<fim_middle>"], "vocab_size": 49152}),
    Layout("SmolLM2: GPT2Tokenizer, Digits, ChatML", "HuggingFaceTB/SmolLM2-360M-Instruct",
           lambda: digits([EOT, *QWEN[1:]]), ALL3, {**SMOL, "bos_token": "<|im_start|>", "eos_token": "<|im_end|>",
           "pad_token": "<|im_end|>", "additional_special_tokens": QWEN[1:], "chat_template": CHATML,
           "tokenizer_class": "GPT2Tokenizer"}, decoder={token: {} for token in QWEN}),
    Layout("Falcon: Punctuation, ByteLevel, Digits", "tiiuae/falcon-7b", falcon, config={
           "add_prefix_space": False, "eos_token": EOT, "model_input_names": ["input_ids", "attention_mask"],
           "model_max_length": 2048, "special_tokens_map_file": None, "tokenizer_class": "PreTrainedTokenizerFast"},
           special_map={"additional_special_tokens": [">>TITLE<<"], "eos_token": EOT}),
    Layout("MPT: GPTNeoXTokenizer beside a config without ids", "mosaicml/mpt-7b", neox, config=NEOX_CONFIG),
    Layout("Llama 3: PreTrainedTokenizerFast, Split, added_tokens_decoder", LLAMA31, llama3, config=LLAMA3_CONFIG,
           special_map={"bos_token": LLAMA3[0], "eos_token": LLAMA3[4]}, decoder={token: {} for token in LLAMA3}),
    Layout("Llama 3 as unsloth has it: pad of its own, padding left", "unsloth/Llama-3.2-1B-Instruct", llama3,
           config={**LLAMA3_CONFIG, "pad_token": "<|reserved_special_token_0|>", "padding_side": "left",
                   "unk_token": None}, decoder={token: {} for token in LLAMA3}),
    Layout("Llama 3's original tokenizer.model, a tiktoken file", "meta-llama/Meta-Llama-3-8B", lambda: byte_bpe([]),
           ("tokenizer.model",), {}, tiktoken=True),
    Layout("truncation and padding in tokenizer.json", LLAMA31, llama3, config=LLAMA3_CONFIG, edit=TRUNCATED),
    Layout("TokenizersBackend, as transformers 5 writes it", LLAMA31, llama3, config={
           "backend": "tokenizers", "bos_token": LLAMA3[0], "clean_up_tokenization_spaces": True,
           "eos_token": LLAMA3[4], "extra_special_tokens": LLAMA3[2:4], "is_local": True,
           "model_input_names": ["input_ids", "attention_mask"],
           "model_max_length": 131072, "tokenizer_class": "TokenizersBackend"},
           extra={"chat_template.jinja": LLAMA3_CHAT}),
    Layout("extra_special_tokens as a list, chat_template.jinja beside", LLAMA31, llama3, config={
           **{key: value for key, value in LLAMA3_CONFIG.items() if key != "chat_template"},
           "extra_special_tokens": LLAMA3[2:4]}, extra={"chat_template.jinja": LLAMA3_CHAT}),
    Layout("extra_special_tokens as a dict", LLAMA31, llama3, config={
           **LLAMA3_CONFIG, "extra_special_tokens": {"boi_token": "<|start_header_id|>"}}),
    Layout("additional_chat_templates beside chat_template.jinja", LLAMA31, llama3, config={
           key: value for key, value in LLAMA3_CONFIG.items() if key != "chat_template"},
           extra={"chat_template.jinja": LLAMA3_CHAT, "additional_chat_templates/tool_use.jinja": CHATML}),
    Layout("Command-R: templates by name, CohereTokenizerFast", "CohereForAI/c4ai-command-r-v01", cohere, config={
           "add_bos_token": True, "add_eos_token": False, "add_prefix_space": False, "bos_token": "<BOS_TOKEN>",
           "chat_template": [{"name": "default", "template": COHERE_CHAT}, {"name": "rag", "template": CHATML}],
           "clean_up_tokenization_spaces": False, "eos_token": "<|END_OF_TURN_TOKEN|>", "legacy": True,
           "merges_file": None, "model_max_length": HUGE, "pad_token": "<PAD>", "sp_model_kwargs": {},
           "spaces_between_special_tokens": False, "tokenizer_class": "CohereTokenizer", "unk_token": None,
           "use_default_system_prompt": False, "vocab_file": None}),
    Layout("Qwen2: all files", QWEN2, qwen, ALL3, QWEN_CONFIG, decoder={token: {} for token in QWEN}),
    Layout("Qwen2 without tokenizer.json", QWEN2, qwen, ("vocab.json",), QWEN_CONFIG,
           decoder={token: {} for token in QWEN}),
    Layout("Qwen3: the template in the config, no additional tokens", "Qwen/Qwen3-0.6B", qwen, ALL3,
           {**QWEN_CONFIG, "add_bos_token": False, "model_max_length": 131072}, decoder={token: {} for token in QWEN}),
    Layout("Qwen 1: qwen.tiktoken and code of its own", "Qwen/Qwen-7B", lambda: byte_bpe([]), ("qwen.tiktoken",),
           {"model_max_length": 8192, "tokenizer_class": "QWenTokenizer",
            "auto_map": {"AutoTokenizer": ["tokenization_qwen.QWenTokenizer", None]}}),
    Layout("DeepSeek LLM: LlamaTokenizerFast over bytes", "deepseek-ai/deepseek-llm-7b-base", deepseek, config={
           "add_bos_token": True, "add_eos_token": False, "bos_token": added_token("<｜begin▁of▁sentence｜>"),
           "eos_token": added_token("<｜end▁of▁sentence｜>"), "pad_token": added_token("<｜end▁of▁sentence｜>"),
           "clean_up_tokenization_spaces": False, "model_max_length": 16384, "sp_model_kwargs": {}, "unk_token": None,
           "legacy": True, "tokenizer_class": "LlamaTokenizerFast", "use_default_system_prompt": False}),
    Layout("DeepSeek-R1 distilled: LlamaTokenizerFast beside Qwen2", "deepseek-ai/DeepSeek-R1-Distill-Qwen-1.5B",
           deepseek_r1, config={"add_bos_token": True, "add_eos_token": False, "bos_token": added_token(
           "<｜begin▁of▁sentence｜>"), "eos_token": added_token("<｜end▁of▁sentence｜>"), "legacy": True,
           "model_max_length": 16384, "sp_model_kwargs": {}, "tokenizer_class": "LlamaTokenizerFast",
           "unk_token": None}),
    Layout("Phi-4: GPT2Tokenizer with cl100k's Split", "microsoft/phi-4",
           lambda: byte_bpe(["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|dummy_87|>"], last=True,
                            pre=split(LLAMA3_SPLIT)), ALL3, {**SMOL, "eos_token": "<|im_end|>", "unk_token": EOT,
           "pad_token": "<|dummy_87|>", "chat_template": CHATML, "model_max_length": 16384,
           "tokenizer_class": "GPT2Tokenizer"}),
    Layout("Phi-4-mini: GPT-4o's Split, all ends one token", "microsoft/Phi-4-mini-instruct",
           lambda: byte_bpe([EOT, "<|assistant|>"], last=True, pre=split(GPT4O_SPLIT)), ALL3,
           {**SMOL, "pad_token": EOT, "add_bos_token": False, "add_eos_token": False, "tokenizer_class":
            "GPT2TokenizerFast"}, decoder={EOT: {}, "<|assistant|>": {"rstrip": True}}),
    Layout("StableLM 2: GPT2Tokenizer with a Split of its own", "stabilityai/stablelm-2-1_6b",
           lambda: byte_bpe([EOT, "<|fim_prefix|>"], last=True, pre=split(GPT2_SPLIT, pre_tokenizers.Digits(True))),
           ALL3, {**SMOL, "pad_token": EOT, "tokenizer_class": "GPT2Tokenizer"}),
    Layout("GLM-4: PreTrainedTokenizerFast, ends of several kinds", "zai-org/GLM-4-9B-0414",
           lambda: byte_bpe([EOT, "[gMASK]", "<sop>", "<|user|>"], last=True, pre=split(LLAMA3_SPLIT)), config={
           "additional_special_tokens": [EOT, "[gMASK]", "<sop>"], "clean_up_tokenization_spaces": False,
           "do_lower_case": False, "eos_token": "<|user|>", "pad_token": EOT, "model_input_names": ["input_ids",
           "attention_mask"], "model_max_length": 128000, "padding_side": "left", "remove_space": False,
           "tokenizer_class": "PreTrainedTokenizer"}),
    *[Layout(f"ByteLevel that writes a space before, trim_offsets {trim}", "FacebookAI/roberta-base as a decoder",
             lambda trim=trim: roberta(trim), ("tokenizer.json", "vocab.json"), {"add_prefix_space": True,
             "bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>", "pad_token": "<pad>", "trim_offsets": trim,
             "cls_token": "<s>", "sep_token": "</s>", "mask_token": "<mask>", "tokenizer_class": "RobertaTokenizer"})
      for trim in (True, False)],
    Layout("no end at all", GPT2, lambda: byte_bpe([]), config={"tokenizer_class": "PreTrainedTokenizerFast"}),
    Layout("an end that the vocabulary lacks", LLAMA31, llama3, config={**LLAMA3_CONFIG, "eos_token": "<|my_end|>"}),
    Layout("tekken.json alone", "mistralai/Mistral-Nemo-Base-2407", lambda: byte_bpe([]), ("tekken.json",), None),
    Layout("tekken.json beside tokenizer.json", "mistralai/Mistral-Nemo-Base-2407",
           lambda: ends(byte_bpe(["<unk>", "<s>", "</s>", "[INST]"], pre=split(GPT4O_SPLIT)), "<s>", None),
           ("tokenizer.json", "tekken.json"), {"add_bos_token": True, "add_eos_token": False, "add_prefix_space": False,
           "bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>", "legacy": False, "model_max_length": HUGE,
           "tokenizer_class": "PreTrainedTokenizerFast"}, decoder={"<s>": {}, "</s>": {}, "[INST]": {}}),
    Layout("code of its own beside tokenizer.json", "huggyllama/llama-7b",
           lambda: byte_bpe(["<unk>", "<s>", "</s>"]), config={"bos_token": "<s>", "eos_token": "</s>", "auto_map":
           {"AutoTokenizer": ["tokenization_own.OwnTokenizer", "tokenization_own_fast.OwnTokenizerFast"]},
           "tokenizer_class": "OwnTokenizer"}),
    Layout("Galactica: tokenizer.json, names in the config's prefix", "facebook/galactica-125m",
           lambda: byte_bpe(["<s>", "<pad>", "</s>", "<unk>"], pre=split(GPT2_SPLIT, pre_tokenizers.Digits(True))),
           config={"name_or_path": "/content/tokenizer", "special_tokens_map_file": "/content/special_tokens_map.json",
                   "tokenizer_class": "PreTrainedTokenizerFast"}, special_map={"eos_token": "</s>"}),
]  # fmt: skip
