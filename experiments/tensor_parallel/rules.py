"""The rules by which each model is cut: names of its modules, and methods of sharding.Sharder for them."""

from torch import nn

from experiments.tensor_parallel.networks import RESNET_WIDTHS, WIDTH, Dense, ResNet50
from experiments.tensor_parallel.sharding import Sharder, evenly


def dense_rules(s: Sharder, model: Dense) -> dict:
    # Two layers are one round: the outputs of the first are the inputs of the second.
    inner = evenly(4 * WIDTH, s.ranks.count)
    rules = {
        "blocks.*": (s.block, s.enters),
        "blocks.*.into": s.column(inner),
        "blocks.*.drop": s.drop(1, inner),
        "blocks.*.out": s.row(inner),
        "norm": s.head_follows,
        "head": s.head,
    }
    for number, block in enumerate(model.blocks):
        if isinstance(block.norm, nn.LayerNorm):
            rules[f"blocks.{number}.norm"] = s.layer_norm(inner)
        elif isinstance(block.norm, nn.BatchNorm1d):
            rules[f"blocks.{number}.norm"] = s.batch_norm(inner)
    return rules


def resnet_rules(s: Sharder, model: ResNet50) -> dict:
    # The first two convolutions of a block are a pair. The third is cut by its outputs, which are gathered, since sums
    # between blocks are whole.
    stem = evenly(RESNET_WIDTHS[0], s.ranks.count)
    rules = {
        "conv": s.column(stem),
        "norm": (s.batch_norm(stem), s.gathers_channels),
        "mean": s.head_follows,
        "head": s.head,
    }
    for number, block in enumerate(model.blocks):
        width, out = (evenly(conv.out_channels, s.ranks.count) for conv in (block.conv1, block.conv3))
        rules |= {
            f"blocks.{number}": s.block,
            f"blocks.{number}.conv1": (s.column(width), s.enters),
            f"blocks.{number}.norm1": s.batch_norm(width),
            f"blocks.{number}.conv2": s.row(width),
            f"blocks.{number}.conv3": (s.column(out), s.enters),
            f"blocks.{number}.norm3": (s.batch_norm(out), s.gathers_channels),
        }
        if block.shortcut is not None:
            rules |= {
                f"blocks.{number}.shortcut.0": (s.column(out), s.enters),
                f"blocks.{number}.shortcut.1": (s.batch_norm(out), s.gathers_channels),
            }
    return rules


def gpt2_rules(s: Sharder, model: nn.Module) -> dict:
    config, ranks = model.config, s.ranks.count
    head = config.n_embd // config.n_head
    query, each_head = evenly(config.n_embd, ranks, block=head), evenly(config.n_head, ranks)
    inner = evenly(config.n_inner or 4 * config.n_embd, ranks)

    def own_heads(module: nn.Module, name: str) -> None:
        module.num_heads = len(each_head.indices[s.ranks.rank])
        module.split_size = module.num_heads * head  # of the fused Q, K and V

    return {
        "transformer.wte": s.vocabulary,
        "transformer.wpe": s.own_positions,
        "transformer.drop": s.drop(),
        "transformer.h.*": s.block,
        "transformer.h.*.attn": (own_heads, s.enters),
        "transformer.h.*.attn.c_attn": s.column(evenly(config.n_embd, ranks, block=head, blocks=3)),
        "transformer.h.*.attn.attn_dropout": s.drop(1, each_head),
        "transformer.h.*.attn.c_proj": s.row(query),
        "transformer.h.*.attn.resid_dropout": s.drop(),
        "transformer.h.*.mlp": s.enters,
        "transformer.h.*.mlp.c_fc": s.column(inner),
        "transformer.h.*.mlp.c_proj": s.row(inner),
        "transformer.h.*.mlp.dropout": s.drop(),
        "transformer.ln_f": s.head_follows,
        "lm_head": s.head,
    }


def llama_rules(s: Sharder, model: nn.Module) -> dict:
    config, ranks = model.config, s.ranks.count
    groups = config.num_attention_heads // config.num_key_value_heads
    head = model.model.layers[0].self_attn.head_dim
    key = evenly(config.num_key_value_heads * head, ranks, block=head)
    # Heads of queries go with their head of keys and values.
    query = evenly(config.num_attention_heads * head, ranks, block=head * groups)
    inner = evenly(config.intermediate_size, ranks)

    def drops(module: nn.Module, name: str) -> None:
        module.attn_dropout = s.drop(1, evenly(config.num_attention_heads, ranks, block=groups))(module, name)

    return {
        "model.embed_tokens": s.vocabulary,
        "model.layers.*": s.block,
        "model.layers.*.self_attn": (drops, s.enters),
        "model.layers.*.self_attn.q_proj": s.column(query),
        "model.layers.*.self_attn.k_proj": s.column(key),
        "model.layers.*.self_attn.v_proj": s.column(key),
        "model.layers.*.self_attn.o_proj": s.row(query),
        "model.layers.*.mlp": s.enters,
        "model.layers.*.mlp.gate_proj": s.column(inner),
        "model.layers.*.mlp.up_proj": s.column(inner),
        "model.layers.*.mlp.down_proj": s.row(inner),
        "model.norm": s.head_follows,
        "lm_head": s.head,
    }


RULES = {"mlp": dense_rules, "mlp-norm": dense_rules, "resnet": resnet_rules, "gpt2": gpt2_rules, "llama": llama_rules}
