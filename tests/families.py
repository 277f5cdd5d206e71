"""Families of decoders at a tiny size: real classes of transformers with every part that their blocks have."""

from transformers import (
    BioGptConfig,
    BloomConfig,
    CodeGenConfig,
    Exaone4Config,
    Gemma3TextConfig,
    Glm4Config,
    GPT2Config,
    GPTBigCodeConfig,
    GPTJConfig,
    GPTNeoConfig,
    GPTNeoXConfig,
    LlamaConfig,
    Olmo2Config,
    Olmo3Config,
    OPTConfig,
    Qwen3Config,
)

V = 97
SPECIAL = {"vocab_size": V, "bos_token_id": 0, "eos_token_id": 0}
OLD = {"n_layer": 3, "n_embd": 32, "n_head": 4, "n_positions": 64, **SPECIAL}  # GPT-2's names for the sizes
NEW = {"num_hidden_layers": 3, "hidden_size": 32, "num_attention_heads": 4, "max_position_embeddings": 64, **SPECIAL}
LLAMA = {**NEW, "intermediate_size": 64, "num_key_value_heads": 2}
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
# A norm comes after the last product of their blocks and saves it for backward, so that product is needed.
POST_NORM = {
    "olmo2": lambda: Olmo2Config(**LLAMA),
    "olmo3": lambda: Olmo3Config(**LLAMA),
    "exaone4": lambda: Exaone4Config(**LLAMA),
    "glm4": lambda: Glm4Config(head_dim=8, **LLAMA, pad_token_id=1),
    "gemma3_text": lambda: Gemma3TextConfig(head_dim=8, **LLAMA),
}
