"""Families of decoders, and T5, at a tiny size: real classes of transformers with every part that their blocks have."""

from transformers import (
    BioGptConfig,
    BloomConfig,
    CodeGenConfig,
    CohereConfig,
    DeepseekV2Config,
    Ernie4_5Config,
    Exaone4Config,
    FalconConfig,
    Gemma2Config,
    Gemma3TextConfig,
    GemmaConfig,
    Glm4Config,
    GlmConfig,
    GPT2Config,
    GPTBigCodeConfig,
    GPTJConfig,
    GPTNeoConfig,
    GPTNeoXConfig,
    GraniteConfig,
    HeliumConfig,
    LlamaConfig,
    MistralConfig,
    MixtralConfig,
    MptConfig,
    NanoChatConfig,
    Olmo2Config,
    Olmo3Config,
    OlmoConfig,
    OlmoeConfig,
    OPTConfig,
    Phi3Config,
    PhiConfig,
    Qwen2Config,
    Qwen3Config,
    SmolLM3Config,
    StableLmConfig,
    Starcoder2Config,
    T5Config,
    XGLMConfig,
)

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

FAMILIES = {
    "gpt2": lambda: GPT2Config(**OLD),
    # alternating global and local attention: the blocks' masks differ
    "gpt_neo": lambda: GPTNeoConfig(
        num_layers=3,
        hidden_size=32,
        num_heads=4,
        attention_types=[[["global", "local"], 1], [["global"], 1]],
        window_size=4,
        max_position_embeddings=64,
        **SPECIAL,
    ),
    "gptj": lambda: GPTJConfig(rotary_dim=4, **OLD),
    "opt": lambda: OPTConfig(**OPT),
    # OPT-350m's shape: project_in before the blocks, project_out after, norms after each block and none at the end
    "opt_projected": lambda: OPTConfig(word_embed_proj_dim=16, do_layer_norm_before=False, **OPT),
    "bloom": lambda: BloomConfig(n_layer=3, hidden_size=32, n_head=4, **SPECIAL),
    "codegen": lambda: CodeGenConfig(rotary_dim=4, n_ctx=64, **OLD),
    "biogpt": lambda: BioGptConfig(**{**NEW, "intermediate_size": 64, "pad_token_id": 1}),
    "gpt_bigcode": lambda: GPTBigCodeConfig(**OLD),
    "llama": lambda: LlamaConfig(**LLAMA),
    "gpt_neox": lambda: GPTNeoXConfig(**{**NEW, "intermediate_size": 64}),
    "qwen3": lambda: Qwen3Config(head_dim=8, **LLAMA),
}
POST_NORM = {  # a norm comes after the last product of a block and saves it for backward, so that product is needed
    "olmo2": lambda: Olmo2Config(**LLAMA),
    "olmo3": lambda: Olmo3Config(**LLAMA),
    "exaone4": lambda: Exaone4Config(**LLAMA),
    "glm4": lambda: Glm4Config(head_dim=8, **LLAMA, pad_token_id=1),
    "gemma3_text": lambda: Gemma3TextConfig(head_dim=8, **LLAMA),
    "gemma2": lambda: Gemma2Config(head_dim=8, final_logit_softcapping=3.0, **LLAMA),
}
MORE_FAMILIES = POST_NORM | {  # that show themselves in one way only
    "cohere": lambda: CohereConfig(logit_scale=2.0, **LLAMA),
    "ernie4_5": lambda: Ernie4_5Config(head_dim=8, **LLAMA),
    "gemma": lambda: GemmaConfig(head_dim=8, **LLAMA),
    "glm": lambda: GlmConfig(head_dim=8, **LLAMA, pad_token_id=1),
    "granite": lambda: GraniteConfig(logits_scaling=0.5, **LLAMA),
    "helium": lambda: HeliumConfig(head_dim=8, **LLAMA),
    "mistral": lambda: MistralConfig(sliding_window=16, **LLAMA),
    "mpt": lambda: MptConfig(n_layers=3, d_model=32, n_heads=4, max_seq_len=64, **SPECIAL),
    "nanochat": lambda: NanoChatConfig(**LLAMA),
    "olmo": lambda: OlmoConfig(**LLAMA),
    "phi": lambda: PhiConfig(**LLAMA),
    "phi3": lambda: Phi3Config(**LLAMA, pad_token_id=1),
    "qwen2": lambda: Qwen2Config(**LLAMA),
    "smollm3": lambda: SmolLM3Config(**LLAMA, pad_token_id=1),
    "stablelm": lambda: StableLmConfig(**LLAMA),
    "starcoder2": lambda: Starcoder2Config(**LLAMA),
    # Falcon-7B's layout: one head of keys for all queries, where the CPU's fused attention wants as many as of queries
    "falcon": lambda: FalconConfig(multi_query=True, alibi=False, **NEW),
    # rotary tables whose frequencies follow the length: those of short sequences are kept (models/build.py)
    "dynamic": lambda: LlamaConfig(**LLAMA, rope_parameters={"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}),
    "longrope": lambda: Phi3Config(
        **LLAMA, pad_token_id=1, rope_parameters=LONGROPE, original_max_position_embeddings=32
    ),
    # heads whose values are narrower than their keys
    "deepseek_v2": lambda: DeepseekV2Config(
        **{**LLAMA, "num_key_value_heads": 4},
        q_lora_rank=None,
        kv_lora_rank=8,
        qk_nope_head_dim=8,
        qk_rope_head_dim=4,
        v_head_dim=8,
        n_routed_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=16,
        n_shared_experts=1,
        first_k_dense_replace=1,
    ),  # fmt: skip
    "falcon_alibi": lambda: FalconConfig(multi_query=False, alibi=True, **NEW),
    "mixtral": lambda: MixtralConfig(num_local_experts=4, **LLAMA),
    "olmoe": lambda: OlmoeConfig(num_experts=8, num_experts_per_tok=2, **LLAMA),
    "xglm": lambda: XGLMConfig(
        num_layers=3, d_model=32, attention_heads=4, ffn_dim=64, max_position_embeddings=64, pad_token_id=1, **SPECIAL
    ),
}

# Unlike numbers of blocks, heads that are wider together than the model, buckets that overflow.
T5 = {
    **{"num_layers": 3, "num_decoder_layers": 2, "d_model": 48, "d_kv": 16, "d_ff": 96, "num_heads": 4},
    **{"relative_attention_num_buckets": 8, "relative_attention_max_distance": 16, "dropout_rate": 0.0},
    **{"vocab_size": V, "decoder_start_token_id": 0},
}
ENCODER_DECODERS = {
    "t5": lambda: T5Config(**T5),
    "t5_gated": lambda: T5Config(feed_forward_proj="gated-gelu", tie_word_embeddings=False, **T5),  # version 1.1's
}
