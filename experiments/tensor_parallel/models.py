"""Makes the models that are trained: networks.py on digits; transformers' GPT-2 and Llama on text. Each is an ordinary
model; rules.py cuts it."""

import copy
from collections.abc import Iterator
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
from experiments.tensor_parallel.networks import (
    BLOCKS,
    CLASSES,
    ENLARGED,
    RESNET_WIDTHS,
    WIDTH,
    Bottleneck,
    Dense,
    ResNet50,
)
from experiments.tensor_parallel.rules import RULES
from experiments.tensor_parallel.sharding import Sharded, Sharder, padded
from lowmem.data.tokenizer import BYTE_LEVEL_IDS, byte_level_tokenizer, load_tokenizer
from lowmem.errors import InputError
from lowmem.models.build import build_model, check_length, load_config
from lowmem.models.load import random_weights, read_weights

FIRST_RESIDUAL_SCALE = 0.2  # a block begins near its shortcut, where rounding does not grow
SMALL = {  # a prime number of tokens, so that no number of ranks divides the vocabulary
    "gpt2": GPT2Config(n_layer=3, n_embd=96, n_head=6, n_positions=128, vocab_size=257, bos_token_id=None,
                       eos_token_id=None, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0),
    "llama": LlamaConfig(num_hidden_layers=3, hidden_size=96, intermediate_size=250, num_attention_heads=8,
                         num_key_value_heads=4, head_dim=16, max_position_embeddings=128, vocab_size=257,
                         bos_token_id=None, eos_token_id=None),
}  # fmt: skip
SEQ = 64


DECODERS = ("gpt2", "llama")
DROPOUTS = ("resid_pdrop", "embd_pdrop", "attn_pdrop", "attention_dropout")  # of configs


@dataclass(frozen=True)
class Kind:
    """A model to train: its name in RULES, the config of a decoder, and weights of `folder`, or random ones of
    `seed`."""

    name: str
    seed: int = 0
    config: PretrainedConfig | None = None
    folder: str | None = None

    @property
    def classes(self) -> int:
        """Returns the number of classes or words of a prediction."""
        return CLASSES if self.config is None else self.config.vocab_size

    def build(self, dtype: torch.dtype) -> nn.Module:
        """Returns the whole model in training mode, without dropout, with parameters on `meta`."""
        if self.config is not None:
            config = copy.deepcopy(self.config)
            for name in DROPOUTS:
                if hasattr(config, name):
                    setattr(config, name, 0.0)
            model = build_model(config)
            # transformers' norm rounds to fp32 even in fp64; PyTorch's does not.
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
        model = sharder.sharded.model
        if self.config is not None:
            model.set_attn_implementation(ATTENTION)
        sharded = sharder.apply(RULES[self.name](sharder, model))
        sharded.load(self.weights())
        return sharded

    def tokenizer(self) -> PreTrainedTokenizerBase:
        """Returns the folder's tokenizer. Without a folder, or one in it, tokens are bytes."""
        size = self.config.vocab_size
        if self.folder is not None:
            return load_tokenizer(self.folder, "random" if Path(self.folder).is_dir() else "pretrained", size)
        if size < BYTE_LEVEL_IDS:
            raise InputError(f"bytes as tokens are {BYTE_LEVEL_IDS}, and the vocab_size of this shape is {size}")
        return byte_level_tokenizer()

    def samples(self, seq: int) -> tuple[Tensor, Tensor]:
        return self._parted(seq)[:2]

    def tests(self, seq: int) -> tuple[Tensor, Tensor]:
        return self._parted(seq)[2:]

    def _parted(self, seq: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        if self.config is not None:
            tokens = samples.source_tokens(seq + 1, self.tokenizer())
            return samples.parted(tokens[:, :-1], tokens[:, 1:])
        images, labels = samples.digits()
        if self.name == "resnet":
            images = F.interpolate(images, size=(ENLARGED, ENLARGED), mode="bilinear")
        return samples.parted(images, labels)

    def loss(self, sharded: Sharded, inputs: Tensor, targets: Tensor) -> Tensor:
        """Returns the loss, which is the same on every rank."""
        model, ranks = sharded.model, sharded.ranks
        if self.config is None:
            logits = model(inputs)
        else:
            # Given, because the model would count its own from the rank's part of the sequence.
            positions = torch.arange(inputs.shape[1], device=inputs.device)[None]
            hidden = model.base_model(inputs, position_ids=positions, use_cache=False).last_hidden_state
            logits = model.lm_head(hidden).flatten(0, 1)
        first = int(padded(self.classes, ranks.count).indices[ranks.rank][0])
        return vocabulary_cross_entropy(logits, targets.flatten(), first, self.classes, ranks)

    def check(self, ranks: int, sequence_parallel: bool, batch: int, seq: int) -> None:
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
    """Returns the Kind `name`. `weights`: a decoder's folder or hub name; `shape`: a config, for random weights. Raises
    InputError for options that do not fit the model."""
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
