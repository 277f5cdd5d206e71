"""Layouts of SentencePiece's family (Llama 1 and 2, Mistral, Gemma, T5), and of older vocabularies."""

from itertools import product

from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

from tests.published_models.layouts import (
    CORPUS,
    HUGE,
    Layout,
    added_token,
    described,
    ends,
    llama_bpe,
    unigram,
    word_piece,
)

LLAMA2_CHAT = (
    "{% for message in messages %}{% if message['role'] == 'user' %}{{ bos_token + '[INST] ' + message['content'] + "
    "' [/INST]' }}{% else %}{{ ' ' + message['content'] + ' ' + eos_token }}{% endif %}{% endfor %}"
)
ZEPHYR_CHAT = (
    "{% for message in messages %}\n{{ '<|' + message['role'] + '|>\n' + message['content'] + eos_token }}\n"
    "{% endfor %}"
)
NAMED = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
OLD = {name: added_token(token) for name, token in NAMED.items()}
LLAMA = {
    "add_bos_token": True, "add_eos_token": False, **OLD, "clean_up_tokenization_spaces": False, "legacy": False,
    "model_max_length": HUGE, "pad_token": None, "padding_side": "right", "sp_model_kwargs": {},
    "tokenizer_class": "LlamaTokenizer",
}  # fmt: skip
DECODER = {"<unk>": {}, "<s>": {}, "</s>": {}}
BOTH = ("tokenizer.json", "tokenizer.model")
LLAMA1, LLAMA2, MISTRAL = "huggyllama/llama-7b", "meta-llama/Llama-2-7b-chat-hf", "mistralai/Mistral-7B-v0.1"
T5_EXTRA = [f"<extra_id_{number}>" for number in range(20)]
T5 = {"eos_token": "</s>", "unk_token": "<unk>", "pad_token": "<pad>", "extra_ids": 20, "model_max_length": 512,
      "additional_special_tokens": T5_EXTRA, "tokenizer_class": "T5Tokenizer", "sp_model_kwargs": {}}  # fmt: skip


def gemma():
    added = ("<start_of_turn>", "<end_of_turn>")
    scheme = normalizers.Replace(" ", "▁")
    backend = llama_bpe(("<pad>", "<eos>", "<bos>", "<unk>"), added=added, bos="<bos>", normalizer=scheme)
    backend.pre_tokenizer = pre_tokenizers.Split(" ", "merged_with_previous", False)
    return backend


def phi3():
    return llama_bpe(added=("<|endoftext|>", "<|assistant|>", "<|system|>", "<|end|>", "<|user|>"), bos=None)


def t5(extra=T5_EXTRA):
    backend = unigram(["<pad>", "</s>", "<unk>"], list(extra))
    backend.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.WhitespaceSplit(), backend.pre_tokenizer])
    return ends(backend, None, "</s>")


def xglm():
    backend = unigram(["<s>", "<pad>", "</s>", "<unk>"], ["<madeupword0>"])
    backend.normalizer = normalizers.Replace(Regex(" {2,}"), " ")
    return ends(backend, "</s>", None)


def helium():
    return ends(unigram(["<unk>", "<s>", "</s>", "<pad>"]), "<s>", None)


def words():
    """CTRL's and OpenAI GPT's kind: pieces of words, of which the last ends with a mark."""
    backend = Tokenizer(models.BPE(unk_token="<unk>", end_of_word_suffix="</w>"))
    backend.normalizer = normalizers.BertNormalizer(lowercase=True)
    backend.pre_tokenizer, backend.decoder = pre_tokenizers.BertPreTokenizer(), decoders.BPEDecoder("</w>")
    trainer = trainers.BpeTrainer(vocab_size=200, special_tokens=["<unk>"], end_of_word_suffix="</w>")
    backend.train_from_iterator(CORPUS, trainer)
    return backend


LAYOUTS = [
    Layout("Llama 1: tokenizer.model alone, LlamaTokenizer", LLAMA1, llama_bpe, ("tokenizer.model",),
           {key: value for key, value in LLAMA.items() if key != "legacy"}, OLD),
    Layout("Llama 1 as first converted: LLaMATokenizer", LLAMA1, llama_bpe, BOTH,
           {"bos_token": "", "eos_token": "", "model_max_length": HUGE, "tokenizer_class": "LLaMATokenizer",
            "unk_token": ""}, {}),
    Layout("Llama 2: tokenizer.model and tokenizer.json, legacy false, template", LLAMA2, llama_bpe, BOTH,
           {**LLAMA, "chat_template": LLAMA2_CHAT}, OLD),
    Layout("Llama 2 with tokens as words, LlamaTokenizerFast, legacy true", LLAMA2, llama_bpe, config={
           **LLAMA, **NAMED, "legacy": True, "tokenizer_class": "LlamaTokenizerFast", "use_default_system_prompt":
           False}, decoder=DECODER),
    *[Layout(f"Llama 2, add_bos_token {str(bos).lower()}, add_eos_token {str(eos).lower()}", LLAMA2,
             lambda bos=bos, eos=eos: llama_bpe(bos="<s>" if bos else None, eos="</s>" if eos else None), BOTH,
             {**LLAMA, "add_bos_token": bos, "add_eos_token": eos}, decoder=DECODER)
      for bos, eos in product((True, False), repeat=2)],
    Layout("add_eos_token set by hand, which tokenizer.json does not do", LLAMA2, llama_bpe,
           config={**LLAMA, "add_eos_token": True}, decoder=DECODER),
    Layout("TinyLlama chat: end as padding, template", "TinyLlama/TinyLlama-1.1B-Chat-v1.0", llama_bpe, BOTH,
           {**LLAMA, **NAMED, "chat_template": ZEPHYR_CHAT, "model_max_length": 2048, "pad_token": "</s>"},
           {**NAMED, "pad_token": "</s>"}, decoder=DECODER),
    Layout("Zephyr: additional special tokens, truncation left", "HuggingFaceH4/zephyr-7b-beta", llama_bpe, BOTH,
           {**LLAMA, **NAMED, "additional_special_tokens": ["<unk>", "<s>", "</s>"], "chat_template": ZEPHYR_CHAT,
            "legacy": True, "model_max_length": HUGE, "pad_token": "</s>", "truncation_side": "left",
            "use_default_system_prompt": True}, decoder=DECODER),
    Layout("Mistral v0.1: legacy true, huge length", MISTRAL, llama_bpe, BOTH,
           {**LLAMA, **NAMED, "additional_special_tokens": [], "legacy": True, "spaces_between_special_tokens": False,
            "use_default_system_prompt": False}, {name: described(token) for name, token in NAMED.items()},
           decoder=DECODER),
    Layout("Mistral v0.3: Metaspace first, add_prefix_space", "mistralai/Mistral-7B-Instruct-v0.3",
           lambda: llama_bpe(("<unk>", "<s>", "</s>", "[INST]", "[/INST]"), scheme="first"), BOTH,
           {**LLAMA, **NAMED, "add_prefix_space": True, "chat_template": LLAMA2_CHAT},
           decoder={**DECODER, "[INST]": {}, "[/INST]": {}}),
    Layout("Yi: LlamaTokenizer with other names, no start", "01-ai/Yi-6B",
           lambda: llama_bpe(("<unk>", "<|startoftext|>", "<|endoftext|>"), bos=None), BOTH,
           {**LLAMA, "add_bos_token": False, "bos_token": "<|startoftext|>", "eos_token": "<|endoftext|>",
            "unk_token": "<unk>", "pad_token": "<unk>", "model_max_length": 4096}),
    Layout("Phi-3: LlamaTokenizer, added tokens that strip", "microsoft/Phi-3-mini-4k-instruct", phi3, BOTH,
           {**LLAMA, "add_bos_token": False, "bos_token": "<s>", "eos_token": "<|endoftext|>", "pad_token":
            "<|endoftext|>", "unk_token": "<unk>", "padding_side": "left", "model_max_length": 4096},
           added={"<|endoftext|>": 360, "<|assistant|>": 361, "<|system|>": 362, "<|end|>": 363, "<|user|>": 364},
           decoder={**DECODER, "</s>": {"rstrip": True, "special": False}, "<|endoftext|>": {},
                    **{token: {"rstrip": True} for token in ("<|assistant|>", "<|system|>", "<|end|>", "<|user|>")}}),
    Layout("Gemma: GemmaTokenizer, no space before", "google/gemma-2b", gemma, BOTH,
           {"add_bos_token": True, "add_eos_token": False, "additional_special_tokens": ["<start_of_turn>",
            "<end_of_turn>"], "bos_token": "<bos>", "clean_up_tokenization_spaces": False, "eos_token": "<eos>",
            "legacy": None, "model_max_length": HUGE, "pad_token": "<pad>", "sp_model_kwargs": {},
            "spaces_between_special_tokens": False, "tokenizer_class": "GemmaTokenizer", "unk_token": "<unk>",
            "use_default_system_prompt": False},
           decoder={token: {} for token in ("<pad>", "<eos>", "<bos>", "<unk>", "<start_of_turn>", "<end_of_turn>")}),
    Layout("Gemma 3: GemmaTokenizerFast, image tokens as attributes", "google/gemma-3-1b-it", gemma,
           config={"add_bos_token": True, "add_eos_token": False, "boi_token": "<start_of_turn>", "bos_token": "<bos>",
                   "eos_token": "<eos>", "pad_token": "<pad>", "unk_token": "<unk>", "model_max_length": HUGE,
                   "extra_special_tokens": {"boi_token": "<start_of_turn>"}, "processor_class": "Gemma3Processor",
                   "tokenizer_class": "GemmaTokenizer", "sp_model_kwargs": None}),
    Layout("T5 of 2020: spiece.model alone", "google-t5/t5-small", t5, ("spiece.model",), None),
    Layout("T5: spiece.model and tokenizer.json, extra ids", "google-t5/t5-small", t5,
           ("tokenizer.json", "spiece.model"), T5, {key: T5[key] for key in ("eos_token", "unk_token", "pad_token")}),
    Layout("XGLM: sentencepiece.bpe.model and tokenizer.json", "facebook/xglm-564M", xglm,
           ("tokenizer.json", "sentencepiece.bpe.model"), {**NAMED, "sep_token": "</s>", "cls_token": "<s>",
           "pad_token": "<pad>", "additional_special_tokens": ["<madeupword0>"], "tokenizer_class": "XGLMTokenizer"}),
    Layout("XGLM without tokenizer.json", "facebook/xglm-564M", xglm, ("sentencepiece.bpe.model",),
           {**NAMED, "pad_token": "<pad>", "tokenizer_class": "XGLMTokenizer"}),
    Layout("Helium: Unigram under PreTrainedTokenizerFast", "kyutai/helium-1-2b", helium, config={
           **NAMED, "pad_token": "<pad>", "clean_up_tokenization_spaces": False, "model_max_length": HUGE,
           "tokenizer_class": "PreTrainedTokenizerFast"}),
    Layout("BERT: vocab.txt alone", "google-bert/bert-base-uncased as a decoder", word_piece, ("vocab.txt",),
           {"do_lower_case": True, "model_max_length": 512}),
    Layout("BERT with an end", "google-bert/bert-base-uncased as a decoder", word_piece, ("tokenizer.json",
           "vocab.txt"), {"do_lower_case": True, "model_max_length": 512, "eos_token": "[SEP]", "bos_token": "[CLS]",
           "tokenizer_class": "BertTokenizer"}),
    Layout("CTRL: words in pieces, no end", "Salesforce/ctrl", words, ("vocab.json",), None),
    Layout("OpenAI GPT: tokenizer.json of words in pieces, no end", "openai-community/openai-gpt", words,
           ("tokenizer.json", "vocab.json"), {"model_max_length": 512}),
    Layout("BioGPT: Moses and merges", "microsoft/biogpt", words, ("vocab.json",), {**NAMED, "pad_token": "<pad>",
           "sep_token": "</s>", "tokenizer_class": "BioGptTokenizer"}),
]  # fmt: skip
