"""T5 as the same three callables as a decoder (decoder.py): embedding, one chain of blocks, head.

What flows from block to block is one tensor, [B, S + T, D]: the hidden states of a source of S tokens, and behind them
those of the T positions of the decoder. A block of the encoder changes the first S and hands the rest on; a block of
the decoder attends to the first S, hands them on, and changes the rest. So an encoder-decoder is a decoder of E + D
blocks to everything else: segments, groups, streamed weights, boundaries in RAM. In the backward pass the gradient for
the encoder's output gathers in the first S rows, block by block of the decoder, and is complete when it reaches the
encoder. What that costs: every saved boundary holds both halves, S + T rows of D numbers, of which S (in the decoder)
or T (in the encoder) are those of the block before. Where S = T that is half of all boundaries, and of T5-11B's 12 GiB
for 64 x (512 + 512) tokens in fp32 6.

Who has which parameters:

    unit 0         the token embedding, and both tables of relative position biases
    blocks         their own; the first of the decoder also the encoder's final norm, which it applies to what it reads
    final          the decoder's final norm

A stack's first block has the table of position biases, and hands the biases [1, H, T, T] on to the others. Here each
block looks them up itself, so that blocks can be computed again one by one. As every block adds to the table's
gradient, the order of the sums would follow the schedule; so each block's use has a gradient of its own, summed over
micro-batches in their order, and these are added in the order of the blocks when the last one is final
(accumulation.py).

Attention is computed as T5 has it, softmax(q k^T + bias + mask) v without a scale, a T x T matrix per head, with the
scores from the bias on in fp32, as under autocast. (arXiv:1910.10683)
"""

import functools
from collections.abc import Sequence
from types import SimpleNamespace

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import AttentionInterface, AttentionMaskInterface, PretrainedConfig
from transformers.masking_utils import eager_mask

from lowmem.core.decoder import Decoder, Extra, SharedUse, Unit
from lowmem.core.logits import LogitFunction
from lowmem.errors import InputError

ATTENTION = "lowmem_with_position_bias"  # its name in transformers' registry
MODEL_TYPES = ("t5", "mt5")  # by their configs; UMT5 has a table in each block, LongT5 and others another attention


def _attention(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, *,
    position_bias: Tensor, dropout: float = 0.0, **_,
) -> tuple[Tensor, None]:  # fmt: skip
    """`query` [B, H, T, d], `key` and `value` [B, H, S, d]; `position_bias` and `attention_mask` are added to the
    scores [B, H, T, S]. The result is [B, T, H, d]."""
    scores = torch.matmul(query, key.transpose(2, 3)).float()  # fp32 ones are not copied
    scores += position_bias
    if attention_mask is not None:
        scores += attention_mask
    weights = F.dropout(scores.softmax(-1), dropout, module.training).to(value.dtype)
    return torch.matmul(weights, value).transpose(1, 2).contiguous(), None


AttentionInterface.register(ATTENTION, _attention)
AttentionMaskInterface.register(ATTENTION, eager_mask)


class EncoderDecoder(Decoder):
    """`model`, a T5ForConditionalGeneration, taken apart. A row of S + T `input_ids` is a source and what the decoder
    is given, which `source_mask` [B, S] (bool: which positions of the source are real) tells apart. `blocks`: the
    encoder's and behind them the decoder's; the rest is Decoder's."""

    def _refuse_unsupported(self) -> None:
        pass  # `take_apart` chooses by the config

    def _find_blocks(self) -> Sequence[nn.Module]:
        model = self.model
        self._encoder, self._decoder = model.encoder, model.decoder
        self._first_of_decoder = len(self._encoder.block)
        blocks = [*self._encoder.block, *self._decoder.block]
        if not len(self._encoder.block) or not len(self._decoder.block):
            raise InputError(f"{self.architecture}: its encoder or its decoder has no blocks; each needs one at least")
        names = {id(parameter): name for name, parameter in model.named_parameters()}
        self._shared = []
        for stack in (self._encoder, self._decoder):
            owner = stack.block[0].layer[0].SelfAttention
            for block in stack.block:
                attention = block.layer[0].SelfAttention
                use = SharedUse(
                    blocks.index(block),
                    names[id(owner.relative_attention_bias.weight)],
                    functools.partial(getattr, owner.relative_attention_bias, "weight"),
                )
                self._shared.append(use)
                attention.has_relative_attention_bias = True  # in training; else the first block's are handed on
                attention.compute_bias = functools.partial(_position_biases, attention, use)
        return blocks

    @property
    def shared(self) -> Sequence[SharedUse]:
        return self._shared

    def embed(
        self, input_ids: Tensor, position_ids: None, document_ids: None, source_mask: Tensor
    ) -> tuple[Tensor, list[Extra]]:
        """`input_ids` [B, S + T] int64, `source_mask` [B, S] bool -> the first block's input [B, S + T, D] and, per
        block, its extra arguments. Positions are relative, so there are no ids of them; documents are not told apart.
        """
        source = source_mask.shape[1]
        target = input_ids.shape[1] - source
        # Copies of both, as CUDA's lookup would make them, and the plan's would not.
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
        """Block `index` on `hidden` [B, S + T, D]."""
        (source,), keywords = extra
        of_encoder, of_decoder = hidden[:, :source], hidden[:, source:]
        if index < self._first_of_decoder:
            of_encoder = self.blocks[index](of_encoder, **keywords)[0]
        else:
            if index == self._first_of_decoder:
                of_encoder = self._encoder.dropout(self._encoder.final_layer_norm(of_encoder))
            of_decoder = self.blocks[index](of_decoder, encoder_hidden_states=of_encoder, **keywords)[0]
        return torch.cat([of_encoder, of_decoder], dim=1)

    def final(self, hidden: Tensor) -> Tensor:
        """The last block's output for the decoder's positions [B, T, D] -> what the head's weight is applied to."""
        hidden = self._decoder.dropout(self._decoder.final_layer_norm(hidden))
        scaled = getattr(self.model.config, "scale_decoder_outputs", False)  # T5's; not of its version 1.1, nor of mT5
        return hidden * self.model.config.d_model**-0.5 if scaled else hidden

    def logits(self, input_ids: Tensor, position_ids: None, document_ids: None, source_mask: Tensor) -> Tensor:
        """The pieces in turn: `input_ids` [B, S + T] -> [B, T, V]. For comparisons; training never has them all."""
        hidden, extras = self.embed(input_ids, position_ids, document_ids, source_mask)
        for index, extra in enumerate(extras):
            hidden = self.block(index, hidden, extra)
        return self._head(self.final(hidden[:, source_mask.shape[1] :]))

    def _find_units(self) -> list[Unit]:
        of_blocks = {id(p): index for index, block in enumerate(self.blocks) for p in block.parameters()}
        first = {use.name for use in self._shared}
        final = {id(p) for p in self._decoder.final_layer_norm.parameters()}
        between = {id(p) for p in self._encoder.final_layer_norm.parameters()}
        embedded = id(self.model.shared.weight)
        units = [Unit("embedding", {}), *(Unit(f"block {index}", {}) for index in range(len(self.blocks)))]
        units.append(Unit("final", {}))
        for name, parameter in self.model.named_parameters():
            number = id(parameter)
            if number == embedded or name in first:
                unit = units[0]
            elif number in between:
                unit = units[1 + self._first_of_decoder]
            elif number in of_blocks:
                unit = units[1 + of_blocks[number]]
            elif number in final or parameter is self._head.weight:
                unit = units[-1]
            else:
                raise InputError(f"{self.architecture}: neither embedding, blocks nor head use {name}")
            unit.parameters[name] = parameter
        return units

    def _find_logit_function(self) -> LogitFunction:
        return LogitFunction()  # whether that is true is seen where pieces and model are compared


def _position_biases(
    attention: nn.Module, use: SharedUse, query_length: int, key_length: int, device=None, past_seen_tokens=0
) -> Tensor:
    """Relative position biases [1, H, T, S] of `attention`, by the table of `use`: the lookup is the model's own."""
    weight = use.value()
    own = SimpleNamespace(
        relative_attention_bias=lambda buckets: F.embedding(buckets, weight.float()),  # its gradient sums T x T numbers
        _relative_position_bucket=attention._relative_position_bucket,
        is_decoder=attention.is_decoder,
        relative_attention_num_buckets=attention.relative_attention_num_buckets,
        relative_attention_max_distance=attention.relative_attention_max_distance,
    )
    device = weight.device if device is None else device
    return type(attention).compute_bias(own, query_length, key_length, device, past_seen_tokens)


def is_encoder_decoder(config: PretrainedConfig) -> bool:
    """Whether the model of `config` comes apart as an EncoderDecoder."""
    return config.model_type in MODEL_TYPES


def take_apart(model: nn.Module, fused_kernels: bool = False) -> Decoder:
    """A Decoder of `model`, or an EncoderDecoder where it is one."""
    kind = EncoderDecoder if is_encoder_decoder(model.config) else Decoder
    return kind(model, fused_kernels)
