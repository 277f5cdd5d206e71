"""Lists facts about model families, by the `model_type` of a config, that the config itself does not contain.

Imports no PyTorch, because a model's folder is recognized before PyTorch is imported (models/recognize.py).
"""

# Those that can be trained. UMT5 (a table of position biases in each block) and LongT5 (another attention) cannot.
ENCODER_DECODERS = ("t5", "mt5")
ENCODERS = (  # a config of these is a decoder's only with "is_decoder": true
    *("albert", "bert", "camembert", "deberta", "deberta-v2", "distilbert", "electra", "ernie", "esm", "eurobert"),
    *("flaubert", "longformer", "mobilebert", "modernbert", "mpnet", "nomic_bert", "roberta", "roformer", "xlm"),
    *("xlm-roberta", "xlm-roberta-xl"),
)

# transformers 4's names for the rotary embedding's base frequency, and for the share of dimensions that it rotates. In
# version 5 both are in `rope_parameters`.
ROPE_NAMES = dict.fromkeys(("gpt_neox", "gpt_neox_japanese"), ("rotary_emb_base", "rotary_pct"))
# ... and of the base frequencies of full and of sliding attention; None: it has one for both.
ROPE_NAMES_BY_ATTENTION = {
    **dict.fromkeys(("gemma3_text", "gemma3n_text"), ("rope_theta", "rope_local_base_freq")),
    "olmo3": ("rope_theta", None),
    "modernbert-decoder": ("global_rope_theta", None),
}
# ... and families whose `rope_scaling` has the keys "type" and "factor" only.
ROPE_TYPE_AND_FACTOR = ("olmo", "olmo2", "chameleon", "fuyu", "hunyuan_v1_dense", "hunyuan_v1_moe")
# ... or "type" and the factors of longrope only.
ROPE_FACTORS_ONLY = ("phi3", "phi4_multimodal")
