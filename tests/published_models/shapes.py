"""Published config.json files at a small size: every key stays, in its spelling; the sizes shrink together.

A row of configs.jsonl has a model's name on the hub, its config with the real numbers, the way its weights are saved,
and the known generation configs.
"""

import json
from pathlib import Path

FILE = Path(__file__).with_name("configs.jsonl")
VOCABULARY, POSITIONS, HEAD, HEADS = 384, 128, 16, 4
SHORT = 64  # positions of the pretraining that rotary tables were stretched from
_ATTENTION_HEADS = ("num_attention_heads", "n_head", "num_heads", "n_heads", "attention_heads")
_KEY_HEADS = ("num_key_value_heads", "num_kv_heads")
_WIDTHS = ("hidden_size", "n_embd", "n_embed", "d_model", "attention_hidden_size", "block_dim", "conv_dim")
_LAYERS = ("num_hidden_layers", "n_layer", "num_layers", "n_layers", "num_decoder_layers")
_PATTERNS = (
    *("sliding_window_pattern", "_sliding_window_pattern", "attn_layer_period", "no_rope_layer_interval"),
    *("layer_switch", "expert_layer_period"),
)
_LENGTHS = (
    *("max_position_embeddings", "n_positions", "n_ctx", "max_seq_len", "seq_length", "model_max_length"),
    *("max_sequence_length", "context_length", "initial_context_length"),
)
_INNER = (
    *("intermediate_size", "n_inner", "ffn_dim", "d_ff", "dff", "ffn_hidden_size", "d_inner", "block_ff_dim"),
    *("shared_expert_intermediate_size",),
)
_FIXED = {  # sizes that no other depends on
    **dict.fromkeys(("vocab_size", "padded_vocab_size"), VOCABULARY),
    **dict.fromkeys(("head_dim", "kv_channels", "d_kv", "attention_head_dim", "query_pre_attn_scalar"), HEAD),
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts"), 8),
    **dict.fromkeys(("num_experts_per_tok", "experts_per_token", "n_group"), 2),
    **{"moe_intermediate_size": 32, "topk_group": 1, "first_k_dense_replace": 1, "n_shared_experts": 1},
    **{"q_lora_rank": 24, "kv_lora_rank": 16, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "v_head_dim": 16},
    **{"time_step_rank": 4, "mamba_dt_rank": 4, "state_size": 8, "mamba_d_state": 8, "block_multiple_of": 16},
    **{"window_size": 16, "multi_query_group_num": 2},
}


def published() -> dict[str, dict]:
    """Returns {name on the hub: row of configs.jsonl}."""
    rows = [json.loads(line) for line in FILE.read_text(encoding="utf-8").splitlines()]
    return {row["hub"]: row for row in rows}


def shrunk(config: dict) -> dict:
    """`config` at a small size: as many heads share keys, as many kinds of layers follow each other as did."""
    new = {key: shrunk(value) if key == "text_config" else value for key, value in config.items()}
    _shrink_heads(config, new)
    _shrink_layers(config, new)
    _shrink_lengths(config, new)
    new |= {key: value for key, value in _FIXED.items() if config.get(key) is not None}
    new |= {key: min(config[key], new[key]) for key in ("n_group", "topk_group") if key in config}
    ids = small_ids(config)
    new |= {key: [ids[each] for each in value] if isinstance(value, list) else ids.get(value)
            for key, value in config.items() if key.endswith("_token_id")}  # fmt: skip
    return new


def small_ids(config: dict) -> dict[int, int]:
    """Returns {special id of `config`: its id in the small vocabulary}: below 8 as it was, else from 8 on."""
    named = [value for key, value in config.items() if key.endswith("_token_id") and value is not None]
    flat = sorted({each for value in named for each in (value if isinstance(value, list) else [value])})
    large = [number for number in flat if number >= 8]
    return {number: number for number in flat if number < 8} | {large[place]: 8 + place for place in range(len(large))}


def _first(config: dict, names: tuple[str, ...]) -> int | None:
    return next((config[name] for name in names if isinstance(config.get(name), int)), None)


def _shrink_heads(config: dict, new: dict) -> None:
    heads, width = _first(config, _ATTENTION_HEADS), _first(config, _WIDTHS)
    few = min(heads or HEADS, HEADS)
    small = few * HEAD
    each = _first(config, ("head_dim", "d_kv"))
    if heads and width and each and heads * each != width:  # the heads together are not as wide as the model
        small = max(HEAD, round(width / (heads * each) * few) * HEAD)
        small += HEAD * (small == few * HEAD)
    for name in _ATTENTION_HEADS:
        if config.get(name) is not None:
            new[name] = few
    for name in _KEY_HEADS:
        if config.get(name) is not None:
            new[name] = few if config[name] == heads else max(1, few // 2) if config[name] > 1 else 1
    for name in _WIDTHS:
        if config.get(name) is not None:
            new[name] = small
    for name in _INNER:
        if config.get(name) is not None:
            new[name] = 2 * small
    if config.get("word_embed_proj_dim") is not None:
        new["word_embed_proj_dim"] = small * config["word_embed_proj_dim"] // width
    if config.get("rotary_dim") is not None:
        new["rotary_dim"] = HEAD * config["rotary_dim"] * heads // width


def _shrink_layers(config: dict, new: dict) -> None:
    before = _first(config, _LAYERS)
    after = max([2, *(config[name] for name in _PATTERNS if isinstance(config.get(name), int))])
    for value in config.values():
        if isinstance(value, list) and len(value) == before:  # a prefix with all kinds of layers
            kinds = {str(each): place for place, each in reversed(list(enumerate(value)))}
            after = max(after, max(kinds.values()) + 1)
    for name in _LAYERS:
        if config.get(name) is not None:
            new[name] = after
    for name, value in config.items():
        if isinstance(value, list) and len(value) == before:
            new[name] = value[:after]
    if "attention_types" in config:
        new["attention_types"] = [[kinds, after // len(kinds)] for kinds, _ in config["attention_types"]]
    if config.get("max_window_layers") is not None:
        new["max_window_layers"] = after if config["max_window_layers"] >= before else 1


def _shrink_lengths(config: dict, new: dict) -> None:
    longest = _first(config, _LENGTHS) or POSITIONS
    for name in _LENGTHS:
        if config.get(name) is not None:
            beyond = config[name] - (1 << config[name].bit_length() - 1)
            new[name] = POSITIONS + (beyond if beyond < 8 else 0)  # RoBERTa's 514
    if (window := config.get("sliding_window")) is not None:
        new["sliding_window"] = 32 if window < longest else POSITIONS if window == longest else 2 * POSITIONS

    def original(holder: dict) -> dict:
        found = holder.get("original_max_position_embeddings")
        return {} if found is None else {"original_max_position_embeddings": POSITIONS if found >= longest else SHORT}

    new |= original(config)
    if isinstance(scaling := config.get("rope_scaling"), dict):
        rotated = int(HEAD * config.get("partial_rotary_factor", 1)) // 2
        cut = {key: value[:rotated] for key, value in scaling.items() if isinstance(value, list)}
        new["rope_scaling"] = scaling | cut | original(scaling)
