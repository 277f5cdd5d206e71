"""Splits T5 like a decoder (decoder.py): into `embed`, one chain of blocks, and `final`.

    [B, S + T, D]   hidden states of S source tokens, and after them of T decoder positions
    encoder block   changes the first S positions and passes the rest on
    decoder block   attends to the first S positions, passes them on, and changes the rest

So every saved block input holds all S + T positions.
"""

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import (
    AttentionInterface,
    AttentionMaskInterface,
    AutoModelForCausalLM,
    AutoModelForSeq2SeqLM,
    PretrainedConfig,
    PreTrainedModel,
)
from transformers.masking_utils import eager_mask

from lowmem.core.decoder import Decoder, Extra
from lowmem.core.kernels import Kernels
from lowmem.core.logits import LogitFunction
from lowmem.errors import InputError
from lowmem.families import ENCODER_DECODERS
from lowmem.settings import Settings

_ATTENTION = "lowmem_with_position_bias"  # its name in transformers' registry


@dataclass
class SharedUse:
    """Describes one block's use of a parameter that several blocks share: T5's table of position biases."""

    name: str  # the parameter's name in the model
    parameter: Callable[[], nn.Parameter]  # returns the shared parameter that the model has now
    # The blocks' gradients are added in the order of the blocks, whatever the order in which blocks run.
    own: nn.Parameter | None = None  # this block's own, with the same data; None until accumulation.py makes it

    def value(self) -> nn.Parameter:
        """Returns the parameter that this block uses. That is `own`, which gets the current data of the shared
        parameter, or the shared parameter itself if `own` is None."""
        if self.own is None:
            return self.parameter()
        self.own.data = self.parameter().data
        return self.own

    def __call__(self, buckets: Tensor) -> Tensor:
        """Returns fp32 position biases [T, S, H] for T queries, S keys and H heads. `buckets` [T, S] int64: the table's
        row for the distance between query and key. Similar distances share a row."""
        # In fp32, because each bias's gradient is a sum of T x S numbers.
        return F.embedding(buckets, self.value().float())


def _attention(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, *,
    position_bias: Tensor, dropout: float = 0.0, **_,
) -> tuple[Tensor, None]:  # fmt: skip
    """Returns T5's attention [B, T, H, d]: softmax(q k^T + bias + mask) v, without a scale (arXiv:1910.10683)."""
    scores = torch.matmul(query, key.transpose(2, 3)).float()  # fp32 scores are not copied
    scores += position_bias
    if attention_mask is not None:
        scores += attention_mask
    weights = F.dropout(scores.softmax(-1), dropout, module.training).to(value.dtype)
    return torch.matmul(weights, value).transpose(1, 2).contiguous(), None


AttentionInterface.register(_ATTENTION, _attention)
AttentionMaskInterface.register(_ATTENTION, eager_mask)


class EncoderDecoder(Decoder):
    """Splits a T5 or mT5. `blocks` has the encoder's blocks, then the decoder's."""

    needs_sources = True

    def _refuse_unsupported(self) -> None:
        config = self.model.config
        start, buckets = decoder_start(config), config.relative_attention_num_buckets
        distance = config.relative_attention_max_distance
        if type(start) is not int or not 0 <= start < config.vocab_size:
            raise InputError(
                f"{self.architecture}: targets begin with decoder_start_token_id, which is {start!r}, and the model "
                f"has the ids 0 to {config.vocab_size - 1}; correct its config.json"
            )
        if not 2 <= buckets // 2 < distance:
            raise InputError(
                f"{self.architecture}: relative_attention_num_buckets is {buckets}, and it must be at least 4 and at "
                f"most {2 * distance - 1} (2 x relative_attention_max_distance - 1); correct its config.json"
            )

    def _find_blocks(self) -> Sequence[nn.Module]:
        model = self.model
        self._encoder, self._decoder = model.encoder, model.decoder
        self._first_of_decoder = len(self._encoder.block)
        blocks = [*self._encoder.block, *self._decoder.block]
        if not len(self._encoder.block) or not len(self._decoder.block):
            raise InputError(f"{self.architecture}: its encoder or its decoder has no blocks; each needs one at least")
        names = {id(parameter): name for name, parameter in model.named_parameters()}
        self.shared = []
        for stack in (self._encoder, self._decoder):
            table = stack.block[0].layer[0].SelfAttention._modules["relative_attention_bias"]
            for block in stack.block:
                # T5 looks up position biases in a stack's first block. Here each block does, so that any block can be
                # recomputed.
                attention = block.layer[0].SelfAttention
                parameter = functools.partial(getattr, table, "weight")
                self.shared.append(use := SharedUse(names[id(table.weight)], parameter))
                attention.has_relative_attention_bias = True  # else it expects the first block's biases
                attention.__dict__["relative_attention_bias"] = use  # found before the module of this name
        return blocks

    def embed(
        self, input_ids: Tensor, position_ids: None, document_ids: None, source_mask: Tensor
    ) -> tuple[Tensor, list[Extra]]:
        """Returns the first block's input [B, S + T, D] and each block's other arguments. `input_ids` [B, S + T] are
        the source and then the decoder's input. `source_mask` [B, S] is False for padding."""
        source = source_mask.shape[1]
        target = input_ids.shape[1] - source
        # Copies both: CUDA's lookup would copy them anyway, but a plan's lookup would not.
        of_encoder, of_decoder = (ids.contiguous() for ids in (input_ids[:, :source], input_ids[:, source:]))
        of_encoder = self._encoder.dropout(self._encoder.embed_tokens(of_encoder))
        of_decoder = self._decoder.dropout(self._decoder.embed_tokens(of_decoder))
        hidden = torch.cat([of_encoder, of_decoder], dim=1)
        lowest = torch.finfo(torch.float32).min
        padding = torch.zeros(source_mask.shape, device=hidden.device).masked_fill_(~source_mask, lowest)
        padding = padding[:, None, None, :]  # [B, 1, 1, S]
        later = torch.full((target, target), lowest, device=hidden.device).triu_(1)[None, None]  # [1, 1, T, T]
        encoder = {"attention_mask": padding}
        decoder = {"attention_mask": later, "encoder_decoder_position_bias": padding}
        extras = [((source,), encoder)] * self._first_of_decoder
        return hidden, extras + [((source,), decoder)] * (len(self.blocks) - self._first_of_decoder)

    def block(self, index: int, hidden: Tensor, extra: Extra) -> Tensor:
        (source,), keywords = extra
        of_encoder, of_decoder = hidden[:, :source], hidden[:, source:]
        if index < self._first_of_decoder:
            of_encoder = self.blocks[index](of_encoder, **keywords)[0]
        else:
            if index == self._first_of_decoder:
                of_encoder = self._encoder.dropout(self._encoder.final_layer_norm(of_encoder))
            of_decoder = self.blocks[index](of_decoder, encoder_hidden_states=of_encoder, **keywords)[0]
        # In backward, the gradient for the encoder's output is summed up in the first S positions.
        return torch.cat([of_encoder, of_decoder], dim=1)

    def final(self, hidden: Tensor) -> Tensor:
        """Returns the head's input for `hidden` [B, T, D], the last block's output at the decoder's positions."""
        hidden = self._decoder.dropout(self._decoder.final_layer_norm(hidden))
        scaled = getattr(self.model.config, "scale_decoder_outputs", False)  # True for T5, but not for T5 1.1 and mT5
        return hidden * self.model.config.d_model**-0.5 if scaled else hidden

    def example(self, vocabulary_size: int) -> tuple[Tensor | None, ...]:
        source, target = (torch.arange(32, device=self.head_weight.device).view(2, 2, 8) * 7919).unbind()
        mask = torch.ones_like(source, dtype=torch.bool)
        mask[1, 4:] = False
        return torch.cat([source, target], dim=1) % vocabulary_size, None, None, mask

    def whole(self, *inputs: Tensor | None) -> Tensor:
        input_ids, _, _, mask = inputs
        source, target = input_ids.tensor_split([mask.shape[1]], dim=1)
        return self.model(
            input_ids=source, attention_mask=mask.long(), decoder_input_ids=target, use_cache=False
        ).logits  # fmt: skip

    # The embeddings' unit (0) also has the position biases. The decoder's first block has the encoder's final norm.
    def _unit_of_parameters(self) -> dict[int, int]:
        final = [*self._decoder.final_layer_norm.parameters(), self._head.weight]
        of_blocks = {id(p): 1 + index for index, block in enumerate(self.blocks) for p in block.parameters()}
        between = dict.fromkeys(map(id, self._encoder.final_layer_norm.parameters()), 1 + self._first_of_decoder)
        embedded = [self.model.shared.weight, *(use.parameter() for use in self.shared)]
        return dict.fromkeys(map(id, final), -1) | of_blocks | between | dict.fromkeys(map(id, embedded), 0)

    def _find_logit_function(self) -> LogitFunction:
        return LogitFunction()  # models/compatibility.py compares it with the model's


# --- how a run differs for an encoder-decoder


def is_encoder_decoder(config: PretrainedConfig) -> bool:
    """Returns True for T5 and mT5, False for all other models."""
    return config.model_type in ENCODER_DECODERS


def stock_model(config: PretrainedConfig, **options) -> PreTrainedModel:
    """Builds the model of `config` with random weights; T5 gets the attention of this file. `options`: keywords for
    transformers' `from_config`."""
    if is_encoder_decoder(config):
        return AutoModelForSeq2SeqLM.from_config(config, attn_implementation=_ATTENTION, **options)
    return AutoModelForCausalLM.from_config(config, **options)


def take_apart(model: nn.Module, fused_kernels: Kernels = Kernels.NONE) -> Decoder:
    """Splits `model`. Returns an EncoderDecoder for T5 and mT5, else a Decoder. A step may use `fused_kernels`."""
    kind = EncoderDecoder if is_encoder_decoder(model.config) else Decoder
    return kind(model, fused_kernels)


def decoder_start(config: PretrainedConfig) -> int | None:
    """Returns the token id that an encoder-decoder's decoder reads before the target. Returns None for other models."""
    if not is_encoder_decoder(config):
        return None
    ids = (getattr(config, name, None) for name in ("decoder_start_token_id", "pad_token_id"))
    return next((number for number in ids if number is not None), 0)


def with_target_tokens(settings: Settings, config: PretrainedConfig) -> Settings:
    """Returns `settings`. For an encoder-decoder without `target_tokens`, they become a quarter of `seq`. Raises
    InputError for settings that the kind of model (decoder or encoder-decoder) does not support."""
    if not is_encoder_decoder(config):
        if settings.target_tokens is not None:
            raise InputError("--target-tokens is for encoder-decoders, and this model is none: leave it out")
        return settings
    if settings.masks_documents:
        raise InputError(
            "an encoder-decoder has one source and one target in a row: leave out --document-mask on and --pack packed"
        )
    if settings.train_on == "all":
        raise InputError("an encoder-decoder learns targets, never sources: leave out --train-on all")
    return replace(settings, target_tokens=settings.target_tokens or max(settings.seq // 4, 1))
