"""Families of decoders, and T5, at a tiny size: real classes of transformers with every part that their blocks have."""

from collections.abc import Callable
from functools import partial

from transformers import AutoConfig, PretrainedConfig

V = 97
SPECIAL = {"vocab_size": V, "bos_token_id": 0, "eos_token_id": 0}
OLD = {"n_layer": 3, "n_embd": 32, "n_head": 4, "n_positions": 64, **SPECIAL}  # GPT-2's names for the sizes
NEW = {"num_hidden_layers": 3, "hidden_size": 32, "num_attention_heads": 4, "max_position_embeddings": 64, **SPECIAL}
LLAMA = {**NEW, "intermediate_size": 64, "num_key_value_heads": 2}
LONGROPE = {
    **{"rope_type": "longrope", "rope_theta": 1e4, "original_max_position_embeddings": 32, "factor": 2.0},
    **{"short_factor": [1.0, 1.1, 1.2, 1.3], "long_factor": [1.0, 2.0, 4.0, 8.0]},
}
OPT = {**NEW, "ffn_dim": 64, "pad_token_id": 1}


def config(model_type: str, *sizes: dict, **more) -> Callable[[], PretrainedConfig]:
    """Returns a function that makes a config of this model_type; of what is given twice, the last counts."""
    fields = {name: value for given in (*sizes, more) for name, value in given.items()}
    return partial(AutoConfig.for_model, model_type, **fields)


DROPOUTS = (
    *("resid_pdrop", "embd_pdrop", "attn_pdrop", "dropout", "attention_dropout", "hidden_dropout"),
    *("hidden_dropout_prob", "resid_dropout", "embed_dropout", "activation_dropout", "dropout_rate"),
)


def with_dropout(config: PretrainedConfig, dropout: float) -> PretrainedConfig:
    """Sets every rate that `config` has, and returns it; no layer is left out as a whole."""
    for name in DROPOUTS:
        if hasattr(config, name):
            setattr(config, name, dropout)
    config.layerdrop = 0.0
    return config


FAMILIES = {
    "gpt2": config("gpt2", OLD),
    # alternating global and local attention: the blocks' masks differ
    "gpt_neo": config(
        "gpt_neo", SPECIAL, num_layers=3, hidden_size=32, num_heads=4, window_size=4, max_position_embeddings=64,
        attention_types=[[["global", "local"], 1], [["global"], 1]],
    ),
    "gptj": config("gptj", OLD, rotary_dim=4),
    "opt": config("opt", OPT),
    # OPT-350m's shape: project_in before the blocks, project_out after, norms after each block and none at the end
    "opt_projected": config("opt", OPT, word_embed_proj_dim=16, do_layer_norm_before=False),
    "bloom": config("bloom", SPECIAL, n_layer=3, hidden_size=32, n_head=4),
    "codegen": config("codegen", OLD, rotary_dim=4, n_ctx=64),
    "biogpt": config("biogpt", NEW, intermediate_size=64, pad_token_id=1),
    "gpt_bigcode": config("gpt_bigcode", OLD),
    "llama": config("llama", LLAMA),
    "gpt_neox": config("gpt_neox", NEW, intermediate_size=64),
    "qwen3": config("qwen3", LLAMA, head_dim=8),
}  # fmt: skip
POST_NORM = {  # a norm comes after the last product of a block and saves it for backward, so that product is needed
    **{name: config(name, LLAMA) for name in ("olmo2", "olmo3", "exaone4")},
    "glm4": config("glm4", LLAMA, head_dim=8, pad_token_id=1),
    "gemma3_text": config("gemma3_text", LLAMA, head_dim=8),
    "gemma2": config("gemma2", LLAMA, head_dim=8, final_logit_softcapping=3.0),
}
MORE_FAMILIES = POST_NORM | {  # that show themselves in one way only
    "cohere": config("cohere", LLAMA, logit_scale=2.0),
    "ernie4_5": config("ernie4_5", LLAMA, head_dim=8),
    "gemma": config("gemma", LLAMA, head_dim=8),
    "glm": config("glm", LLAMA, head_dim=8, pad_token_id=1),
    "granite": config("granite", LLAMA, logits_scaling=0.5),
    "helium": config("helium", LLAMA, head_dim=8),
    "mistral": config("mistral", LLAMA, sliding_window=16),
    "mpt": config("mpt", SPECIAL, n_layers=3, d_model=32, n_heads=4, max_seq_len=64),
    "nanochat": config("nanochat", LLAMA),
    "olmo": config("olmo", LLAMA),
    "phi": config("phi", LLAMA),
    "phi3": config("phi3", LLAMA, pad_token_id=1),
    "qwen2": config("qwen2", LLAMA),
    "smollm3": config("smollm3", LLAMA, pad_token_id=1),
    "stablelm": config("stablelm", LLAMA),
    "starcoder2": config("starcoder2", LLAMA),
    # Falcon-7B's layout: one head of keys for all queries, where the CPU's fused attention wants as many as of queries
    "falcon": config("falcon", NEW, multi_query=True, alibi=False),
    # rotary tables whose frequencies follow the length: those of short sequences are kept (models/build.py)
    "dynamic": config("llama", LLAMA, rope_parameters={"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}),
    "longrope": config("phi3", LLAMA, pad_token_id=1, rope_parameters=LONGROPE, original_max_position_embeddings=32),
    # heads whose values are narrower than their keys
    "deepseek_v2": config(
        "deepseek_v2", LLAMA, num_key_value_heads=4, q_lora_rank=None, kv_lora_rank=8, qk_nope_head_dim=8,
        qk_rope_head_dim=4, v_head_dim=8, n_routed_experts=4, num_experts_per_tok=2, moe_intermediate_size=16,
        n_shared_experts=1, first_k_dense_replace=1,
    ),
    "falcon_alibi": config("falcon", NEW, multi_query=False, alibi=True),
    "mixtral": config("mixtral", LLAMA, num_local_experts=4),
    "olmoe": config("olmoe", LLAMA, num_experts=8, num_experts_per_tok=2),
    "xglm": config(
        "xglm", SPECIAL, num_layers=3, d_model=32, attention_heads=4, ffn_dim=64, max_position_embeddings=64,
        pad_token_id=1,
    ),
}  # fmt: skip

# Unlike numbers of blocks, heads that are wider together than the model, buckets that overflow.
T5 = {
    **{"num_layers": 3, "num_decoder_layers": 2, "d_model": 48, "d_kv": 16, "d_ff": 96, "num_heads": 4},
    **{"relative_attention_num_buckets": 8, "relative_attention_max_distance": 16, "dropout_rate": 0.0},
    **{"vocab_size": V, "decoder_start_token_id": 0},
}
ENCODER_DECODERS = {
    "t5": config("t5", T5),
    "t5_gated": config("t5", T5, feed_forward_proj="gated-gelu", tie_word_embeddings=False),  # version 1.1's
}
