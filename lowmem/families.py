"""Lists facts about model families (a config's `model_type`) that their configs do not contain. Imports no PyTorch."""

# Encoder-decoders that can be trained. UMT5 cannot (a table of position biases in each block), nor LongT5 (another
# attention).
ENCODER_DECODERS = ("t5", "mt5")
ENCODERS = (  # these models are decoders only if the config has "is_decoder": true
    *("albert", "bert", "camembert", "deberta", "deberta-v2", "distilbert", "electra", "ernie", "esm", "eurobert"),
    *("flaubert", "longformer", "mobilebert", "modernbert", "mpnet", "nomic_bert", "roberta", "roformer", "xlm"),
    *("xlm-roberta", "xlm-roberta-xl"),
)

# The fields in which transformers 4 has the rotary embedding's base frequency, and the share of rotated dimensions.
# Version 5 has both in `rope_parameters`.
ROPE_NAMES = dict.fromkeys(("gpt_neox", "gpt_neox_japanese"), ("rotary_emb_base", "rotary_pct"))
# The fields with the base frequencies of full and of sliding attention. None: both use the first frequency.
ROPE_NAMES_BY_ATTENTION = {
    **dict.fromkeys(("gemma3_text", "gemma3n_text"), ("rope_theta", "rope_local_base_freq")),
    "olmo3": ("rope_theta", None),
    "modernbert-decoder": ("global_rope_theta", None),
}
# Families whose `rope_scaling` has only the keys "type" and "factor" in transformers 4.
ROPE_TYPE_AND_FACTOR = ("olmo", "olmo2", "chameleon", "fuyu", "hunyuan_v1_dense", "hunyuan_v1_moe")
# Families whose `rope_scaling` for longrope has only "type" and the factors in transformers 4.
ROPE_FACTORS_ONLY = ("phi3", "phi4_multimodal")
