"""What is trained, and by which rules it is cut.

    mlp        pairs of dense layers on images of digits
    mlp-norm   the same with norms over the cut features, layer norm and batch norm alternately
    resnet     ResNet-50 (He et al. 2015, arXiv 1512.03385) on the digits, enlarged to 64 x 64 pixels
    gpt2       transformers' GPT-2, and
    llama      Llama with grouped-query heads, on the text of the standard library

Each is an ordinary model first: what one process trains is that, and knows nothing of ranks.
"""

import copy
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import GPT2Config, LlamaConfig, PretrainedConfig, PreTrainedTokenizerBase
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from experiments.harness import samples
from experiments.tensor_parallel.layers import ATTENTION, vocabulary_cross_entropy
from experiments.tensor_parallel.sharding import Sharded, Sharder, evenly, padded
from lowmem.data.tokenizer import BYTE_LEVEL_IDS, byte_level_tokenizer, load_tokenizer
from lowmem.errors import InputError
from lowmem.models.build import build_model, check_length, load_config
from lowmem.models.load import random_weights, read_weights

WIDTH, BLOCKS, CLASSES = 96, 4, 10
PIXELS, ENLARGED = 8, 64  # of a side
FIRST_RESIDUAL_SCALE = 0.2  # a block begins near its shortcut, where rounding does not grow
RESNET_BLOCKS, RESNET_WIDTHS, EXPANSION = (3, 4, 6, 3), (64, 128, 256, 512), 4
SMALL = {  # a prime number of tokens, so that no number of ranks divides the vocabulary
    "gpt2": GPT2Config(n_layer=3, n_embd=96, n_head=6, n_positions=128, vocab_size=257, bos_token_id=None,
                       eos_token_id=None, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0),
    "llama": LlamaConfig(num_hidden_layers=3, hidden_size=96, intermediate_size=250, num_attention_heads=8,
                         num_key_value_heads=4, head_dim=16, max_position_embeddings=128, vocab_size=257,
                         bos_token_id=None, eos_token_id=None),
}  # fmt: skip
SEQ = 64


class Pair(nn.Module):
    """Two dense layers, [B, into] -> [B, out], added to what came in where the widths allow it."""

    def __init__(self, into: int, hidden: int, out: int, norm: Callable[[int], nn.Module]):
        super().__init__()
        self.norm, self.drop = norm(hidden), nn.Dropout(0.0)
        # A batch norm takes away what a bias before it adds.
        self.into = nn.Linear(into, hidden, bias=not isinstance(self.norm, nn.BatchNorm1d))
        self.out = nn.Linear(hidden, out)

    def forward(self, hidden_states: Tensor) -> Tensor:
        return self.out(self.drop(F.gelu(self.norm(self.into(hidden_states)))))


class Dense(nn.Module):
    """Pairs and a classifier: images [B, 1, 8, 8] -> logits [B, 10]."""

    def __init__(self, norms: list[Callable[[int], nn.Module]]):
        super().__init__()
        widths = [PIXELS**2] + [WIDTH] * len(norms)
        self.blocks = nn.ModuleList(
            Pair(into, 4 * WIDTH, out, norm) for into, out, norm in zip(widths, widths[1:], norms, strict=False)
        )
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, CLASSES)

    def forward(self, images: Tensor) -> Tensor:
        x = images.flatten(1)
        for block in self.blocks:
            x = block(x) + (x if x.shape[1] == WIDTH else 0)
        return self.head(self.norm(x))


class Bottleneck(nn.Module):
    """[B, into, H, W] -> [B, 4 width, H / stride, W / stride]"""

    def __init__(self, into: int, width: int, stride: int):
        super().__init__()
        out = EXPANSION * width
        self.conv1, self.norm1 = nn.Conv2d(into, width, 1, bias=False), nn.BatchNorm2d(width)
        self.conv2 = nn.Conv2d(width, width, 3, stride=stride, padding=1, bias=False)
        self.norm2 = nn.BatchNorm2d(width)
        self.conv3, self.norm3 = nn.Conv2d(width, out, 1, bias=False), nn.BatchNorm2d(out)
        self.shortcut = None
        if stride != 1 or into != out:
            self.shortcut = nn.Sequential(nn.Conv2d(into, out, 1, stride=stride, bias=False), nn.BatchNorm2d(out))

    def forward(self, x: Tensor) -> Tensor:
        found = F.relu(self.norm2(self.conv2(F.relu(self.norm1(self.conv1(x))))))
        return F.relu(self.norm3(self.conv3(found)) + (x if self.shortcut is None else self.shortcut(x)))


class ResNet50(nn.Module):
    """[B, 1, 64, 64] -> logits [B, 10]"""

    def __init__(self):
        super().__init__()
        self.conv, self.norm = nn.Conv2d(1, RESNET_WIDTHS[0], 7, 2, 3, bias=False), nn.BatchNorm2d(RESNET_WIDTHS[0])
        self.pool = nn.MaxPool2d(3, 2, 1)
        self.blocks, into = nn.ModuleList(), RESNET_WIDTHS[0]
        for stage, (width, count) in enumerate(zip(RESNET_WIDTHS, RESNET_BLOCKS, strict=True)):
            for place in range(count):
                self.blocks.append(Bottleneck(into, width, 2 if stage and not place else 1))
                into = EXPANSION * width
        self.mean, self.head = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten()), nn.Linear(into, CLASSES)

    def forward(self, images: Tensor) -> Tensor:
        x = self.pool(F.relu(self.norm(self.conv(images))))
        for block in self.blocks:
            x = block(x)
        return self.head(self.mean(x))


def dense_rules(s: Sharder, model: Dense) -> dict:
    """Divides two layers as one round: by the outputs of the first, which are the inputs of the second."""
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
    """Divides the first two convolutions of a block as a pair, and the third, with its norm, by its outputs. The
    third's output is gathered: sums between blocks are whole."""
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
    """Heads of queries go where their head of keys and values goes."""
    config, ranks = model.config, s.ranks.count
    groups = config.num_attention_heads // config.num_key_value_heads
    head = model.model.layers[0].self_attn.head_dim
    key = evenly(config.num_key_value_heads * head, ranks, block=head)
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
DECODERS = ("gpt2", "llama")
DROPOUTS = ("resid_pdrop", "embd_pdrop", "attn_pdrop", "attention_dropout")  # of configs


@dataclass(frozen=True)
class Kind:
    """One of RULES, `config` of a decoder, its weights: of `folder`, or random ones of `seed`."""

    name: str
    seed: int = 0
    config: PretrainedConfig | None = None
    folder: str | None = None

    @property
    def classes(self) -> int:
        """How many there are to choose from in a prediction."""
        return CLASSES if self.config is None else self.config.vocab_size

    def build(self, dtype: torch.dtype) -> nn.Module:
        """Returns the whole model in training mode and without dropout, its parameters on `meta`. Where transformers'
        norm rounds to fp32 in the middle of fp64, torch's stands."""
        if self.config is not None:
            config = copy.deepcopy(self.config)
            for name in DROPOUTS:
                if hasattr(config, name):
                    setattr(config, name, 0.0)
            model = build_model(config)
            if dtype == torch.float64:
                for name, module in list(model.named_modules()):
                    if isinstance(module, LlamaRMSNorm):
                        exact = nn.RMSNorm(len(module.weight), module.variance_epsilon, device="meta")
                        exact.weight = module.weight
                        model.set_submodule(name, exact)
            return model
        plain = {
            "mlp": partial(Dense, [lambda _: nn.Identity()] * BLOCKS),
            "mlp-norm": partial(Dense, [nn.LayerNorm, nn.BatchNorm1d] * (BLOCKS // 2)),
            "resnet": ResNet50,
        }
        with torch.device("meta"):
            return plain[self.name]().to(dtype)

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        """Yields names, and whole tensors or flat runs of them."""
        if self.folder is not None:
            return read_weights(build_model(self.config), self.folder)
        if self.config is not None:
            return random_weights(self.config, self.seed)
        torch.manual_seed(self.seed)
        plain = self.build(torch.float32).to_empty(device="cpu")
        for module in plain.modules():
            if hasattr(module, "reset_parameters"):
                module.reset_parameters()
        for module in plain.modules():
            if isinstance(module, Bottleneck):  # not 0, as Goyal et al. 2017: nothing before it would have a gradient
                nn.init.constant_(module.norm3.weight, FIRST_RESIDUAL_SCALE)
        return iter(plain.state_dict().items())

    def shard(self, sharder: Sharder) -> Sharded:
        """This rank's part, with its weights."""
        model = sharder.sharded.model
        if self.config is not None:
            model.set_attn_implementation(ATTENTION)
        sharded = sharder.apply(RULES[self.name](sharder, model))
        sharded.load(self.weights())
        return sharded

    def tokenizer(self) -> PreTrainedTokenizerBase:
        """Returns the folder's; of random weights, or if it has none, one whose tokens are bytes."""
        size = self.config.vocab_size
        if self.folder is not None:
            return load_tokenizer(self.folder, "random" if Path(self.folder).is_dir() else "pretrained", size)
        if size < BYTE_LEVEL_IDS:
            raise InputError(f"bytes as tokens are {BYTE_LEVEL_IDS}, and the vocab_size of this shape is {size}")
        return byte_level_tokenizer()

    def samples(self, seq: int) -> tuple[Tensor, Tensor]:
        """Inputs and targets of all samples there are."""
        if self.config is not None:
            tokens = samples.source_tokens(seq + 1, self.tokenizer())
            return tokens[:, :-1], tokens[:, 1:]
        images, labels = samples.digits()
        if self.name == "resnet":
            images = F.interpolate(images, size=(ENLARGED, ENLARGED), mode="bilinear")
        return images, labels

    def loss(self, sharded: Sharded, inputs: Tensor, targets: Tensor) -> Tensor:
        """Returns the loss of the parts, which is the same on every rank. Decoders get every position's number, since
        their own count would be that of a rank's part of the sequence."""
        model, ranks = sharded.model, sharded.ranks
        if self.config is None:
            logits = model(inputs)
        else:
            positions = torch.arange(inputs.shape[1], device=inputs.device)[None]
            hidden = model.base_model(inputs, position_ids=positions, use_cache=False).last_hidden_state
            logits = model.lm_head(hidden).flatten(0, 1)
        first = int(padded(self.classes, ranks.count).indices[ranks.rank][0])
        return vocabulary_cross_entropy(logits, targets.flatten(), first, self.classes, ranks)

    def check(self, ranks: int, sequence_parallel: bool, batch: int, seq: int) -> None:
        """Raises InputError for a model that cannot be divided, or trained."""
        if self.config is None:
            if sequence_parallel:
                raise InputError(f"{self.name} has no sequence that --sequence-parallel could cut")
            fewest = RESNET_WIDTHS[0] if self.name == "resnet" else 4 * WIDTH
            if ranks > fewest:
                raise InputError(f"{self.name} has layers of {fewest} features: --ranks {fewest} is the most")
            if self.name == "mlp-norm" and batch < 2:
                raise InputError("a batch norm needs several samples: --batch 2 is the least for mlp-norm")
            return
        what, heads = "heads", self.config.num_attention_heads
        if self.name == "llama":
            what, heads = "heads of keys and values", self.config.num_key_value_heads
        if ranks > heads:
            raise InputError(f"the model has {heads} {what}: {ranks} ranks are more; --ranks {heads} is the most")
        if sequence_parallel and seq % ranks:
            raise InputError(f"--sequence-parallel needs a length that {ranks} ranks divide, and --seq is {seq}")
        check_length(self.config, seq)
        self.tokenizer()


def kind_of(name: str, seed: int = 0, weights: str | None = None, shape: str | None = None) -> Kind:
    """Returns the kind. `weights`: a folder, or a name on the hub, of a decoder of this kind; `shape`: only its config.
    InputError for another."""
    source = weights or shape
    if name not in DECODERS:
        if source is not None:
            raise InputError(f"--weights and --shape are for {' and '.join(DECODERS)}, and not for {name}")
        return Kind(name, seed)
    if source is None:
        return Kind(name, seed, SMALL[name])
    if weights and shape:
        raise InputError("--weights come with their shape: leave out --shape")
    config = load_config(source, "pretrained" if weights else "random")
    if config.model_type != name:
        raise InputError(f"{source} is of type {config.model_type}, and --model is {name}")
    return Kind(name, seed, config, weights)
