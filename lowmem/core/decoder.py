"""Splits a Hugging Face decoder into embeddings, blocks and head, because a training step runs each block by itself.
Embeddings and final norm run inside the model's own forward, with stubs in the place of the blocks."""

from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils.hooks import RemovableHandle
from transformers import PreTrainedModel, masking_utils

from lowmem.core.kernels import Kernels
from lowmem.core.logits import Followed, LogitFunction
from lowmem.errors import InputError

Extra = tuple[tuple, dict[str, Any]]  # a block's positional and keyword arguments after the hidden state
_PLACES = ("layer_idx", "layer_id", "layer_number")  # attributes with a block's number


@dataclass
class Unit:
    """Holds parameters that are updated together: the embeddings, one block, or the final norm (and an untied head)."""

    name: str
    parameters: dict[str, nn.Parameter]  # {the model's name of it: parameter}; each parameter is in exactly one unit


class _Stop(Exception):
    def __init__(self, value: Tensor):
        self.value = value


class _Stub(nn.Module):
    """Takes the place of a block: runs `call`, and has the block's other attributes."""

    def __init__(self, block: nn.Module, call: Callable):
        super().__init__()
        self.__dict__.update(block=block, forward=call)  # not a submodule: the tree of parameters must not change

    def __getattr__(self, name: str):
        return getattr(self.__dict__["block"], name)


class Decoder:
    """Splits `model`, a causal language model of transformers, into embeddings, blocks and head. Parameters may be on
    the meta device. `fused_kernels`: those that a step may use. Raises InputError if the model cannot be split."""

    needs_sources = False  # True for an encoder-decoder, whose batches have a source_mask
    shared: Sequence = ()  # a SharedUse (encoder_decoder.py) per block that uses a shared parameter

    def __init__(self, model: nn.Module, fused_kernels: Kernels = Kernels.NONE):
        self.model, self.fused_kernels = model, fused_kernels
        self.architecture = type(model).__name__
        self._refuse_unsupported()
        self.blocks = self._find_blocks()
        # For each block, the layer whose product a recomputation may leave out; None if there is none (products.py).
        self.skippable_layers: list[nn.Module | None] = [None] * len(self.blocks)
        self.block_forwards: list = []  # BlockForward of each block whose sums are fused (residual_sums.py)
        self.structure: list = []  # structure_of the model when these two lists were made (dry_run.py)
        self._head = model.get_output_embeddings()
        if type(self._head) is not nn.Linear:
            raise InputError(f"{self.architecture}: the head is {type(self._head).__name__}, not a plain linear layer")
        self._returns_tuple = False
        self._hooks: list[RemovableHandle] = []
        buffers = list(model.buffers())
        self.units = self._find_units()  # embedding, blocks in order, final
        self.logit_function = self._find_logit_function()  # computes the model's logits from the head's output
        if any(now is not before for now, before in zip(model.buffers(), buffers, strict=True)):
            raise InputError(
                f"{self.architecture}: the model replaces its buffers while it runs (rotary tables that grow with the "
                "sequence, perhaps), which is not supported"
            )

    @property
    def head_weight(self) -> nn.Parameter:  # [V, D]
        return self._head.weight

    @property
    def head_bias(self) -> nn.Parameter | None:  # [V]
        return self._head.bias

    def embed(
        self, input_ids: Tensor, position_ids: Tensor | None = None, document_ids: Tensor | None = None
    ) -> tuple[Tensor, list[Extra]]:
        """Returns the first block's input [B, T, D] for `input_ids` [B, T] int64, and each block's other arguments. If
        `document_ids` [B, T] are given, a position attends only to positions with the same id."""
        extras: list[Extra] = []

        def record(hidden: Tensor, *arguments, **keywords):
            extras.append((arguments, keywords))
            if len(extras) == len(self.blocks):
                raise _Stop(hidden)
            return self._as_block_output(hidden)

        with self._blocks_replaced(record):
            return self._run(input_ids, position_ids, document_ids), extras

    def block(self, index: int, hidden: Tensor, extra: Extra) -> Tensor:
        """Returns the output [B, T, D] of block `index` for its input `hidden`. `extra`: its other arguments, from
        `embed`."""
        arguments, keywords = extra
        output = self.blocks[index](hidden, *arguments, **keywords)
        return output[0] if isinstance(output, tuple | list) else output  # blocks of OpenAI GPT return a list

    def before_blocks(self, indices: Iterable[int], call: Callable[[int], None]) -> None:
        """Registers hooks that call `call(index)` before each forward of block `index`, for the blocks `indices`.
        Removes the hooks of an earlier call of this method."""
        for hook in self._hooks:
            hook.remove()
        self._hooks = [
            self.blocks[index].register_forward_pre_hook(lambda *_, index=index: call(index)) for index in indices
        ]

    def final(self, hidden: Tensor) -> Tensor:
        """Returns the head's input [B, T, D'] for the last block's output `hidden` [B, T, D]."""
        # The embedding runs again, on token 0, forward only: a lookup costs little next to the head's product.
        zeros = torch.zeros(hidden.shape[:2], dtype=torch.int64, device=hidden.device)
        head_stops = patch.object(self._head, "forward", _stop)
        with self._blocks_replaced(lambda *_, **__: self._as_block_output(hidden)), head_stops:
            return self._run(zeros)

    # --- for comparisons; training never has all logits

    def example(self, vocabulary_size: int) -> tuple[Tensor | None, ...]:
        """Returns arguments for `embed`: two rows of 8 token ids."""
        return ((torch.arange(16, device=self.head_weight.device).view(2, 8) * 7919) % vocabulary_size,)

    def logits(self, *inputs: Tensor | None) -> Tensor:
        """Returns all logits [B, T, V] of the split model. `inputs`: the arguments of `embed`."""
        hidden, extras = self.embed(*inputs)
        for index, extra in enumerate(extras):
            hidden = self.block(index, hidden, extra)
        sources = inputs[3].shape[1] if self.needs_sources else 0
        return self.logit_function(self._head(self.final(hidden[:, sources:])))

    def whole(self, *inputs: Tensor | None) -> Tensor:
        """Returns the logits [B, T, V] of the model's own forward, not split, for the token ids `inputs[0]`."""
        with _padding_not_sought():
            return self.model(input_ids=inputs[0], use_cache=False).logits

    def with_head_output(self, output: Tensor, *inputs: Tensor | None) -> Tensor:
        """Runs the model's own forward with `output` [B, T, V] in the place of the head's output. Returns the logits
        [B, T, V] that the model computes from `output`, by a soft cap for example."""
        with patch.object(self._head, "forward", lambda hidden: output):
            return self.whole(*inputs)

    # --- how the model splits

    def _run(self, input_ids: Tensor, position_ids: Tensor | None = None, document_ids: Tensor | None = None) -> Tensor:
        positions = {} if position_ids is None else {"position_ids": position_ids}
        # Replaces transformers' guess of the documents, which copies a value from the GPU in every forward pass, and
        # runs other code on meta tensors.
        documents_known = patch.object(masking_utils, "find_packed_sequence_indices", lambda _: document_ids)
        try:
            with documents_known, _padding_not_sought():
                self.model(input_ids=input_ids, use_cache=False, **positions)
        except _Stop as stop:
            return stop.value
        raise InputError(f"{self.architecture}: the model's forward never reached its blocks or its head")

    def _as_block_output(self, hidden: Tensor) -> Tensor | tuple[Tensor]:
        return (hidden,) if self._returns_tuple else hidden

    def _blocks_replaced(self, call: Callable) -> AbstractContextManager:
        stubs = nn.ModuleList([_Stub(block, call) for block in self.blocks])
        return patch.dict(self._owner._modules, {self._list_name: stubs})

    def _refuse_unsupported(self) -> None:
        if self.model.config.is_encoder_decoder:
            raise InputError(f"{self.architecture} is an encoder-decoder; of these only T5 and mT5 can be trained here")
        if getattr(self.model.config.get_text_config(), "layerdrop", 0):
            raise InputError(
                f"{self.architecture}: leaving out whole blocks at random is not supported; set layerdrop to 0 in its "
                "config.json"
            )

    def _find_blocks(self) -> Sequence[nn.Module]:
        count = self.model.config.get_text_config().num_hidden_layers
        if count < 1:
            raise InputError(f"{self.architecture}: its config says {count} blocks; at least one is needed")
        found = [
            (module, name, child)
            for module in self.model.modules()
            for name, child in module.named_children()
            if isinstance(child, nn.ModuleList) and len(child) == count
        ]
        inner = {id(module) for _, _, blocks in found for block in blocks for module in block.modules()}
        outermost = [entry for entry in found if id(entry[0]) not in inner]
        if len(outermost) != 1:
            raise InputError(f"{self.architecture}: found {len(outermost)} lists of {count} blocks, expected one")
        self._owner, self._list_name, blocks = outermost[0]
        return blocks

    def _find_units(self) -> list[Unit]:
        unit_of = self._unit_of_parameters()
        names = ["embedding", *(f"block {index}" for index in range(len(self.blocks))), "final"]
        units = [Unit(name, {}) for name in names]
        unused = []
        for name, parameter in self.model.named_parameters():
            if id(parameter) in unit_of:
                units[unit_of[id(parameter)]].parameters[name] = parameter
            else:
                unused.append(name)
        if unused:
            raise InputError(f"{self.architecture}: neither embedding, blocks nor head use {', '.join(unused[:5])}")
        return units

    def _unit_of_parameters(self) -> dict[int, int]:
        # Index 0 is the embeddings, i + 1 is block i, and -1 is the final norm and an untied head.
        before, after = self._parameters_called()
        of_blocks = {id(p): 1 + index for index, block in enumerate(self.blocks) for p in block.parameters()}
        if len(of_blocks) != sum(len(list(block.parameters())) for block in self.blocks):
            raise InputError(f"{self.architecture}: blocks share parameters with one another, which is not supported")
        return dict.fromkeys(after, -1) | dict.fromkeys(before, 0) | of_blocks

    def _find_logit_function(self) -> LogitFunction:
        head_output = self.head_weight.new_zeros((1, 1, self.head_weight.shape[0]))
        with (
            torch.no_grad(),
            AnswerYes(),
            self._blocks_replaced(lambda hidden, *_, **__: self._as_block_output(hidden)),
            Followed(head_output) as followed,
        ):
            input_ids = torch.zeros((1, 1), dtype=torch.int64, device=head_output.device)
            function = followed.function_of(self.with_head_output(head_output, input_ids))
        if isinstance(function, str):
            raise InputError(
                f"{self.architecture} cannot be trained in pieces: what it does to its logits after the head is "
                f"neither a factor nor a soft cap ({function})"
            )
        return function

    def _parameters_called(self) -> tuple[set[int], set[int]]:
        input_ids = torch.zeros((2, 3), dtype=torch.int64, device=self.head_weight.device)
        failure = ""
        # Blocks return a tuple in some versions of transformers, and a stub must do the same: the model fails
        # otherwise.
        for self._returns_tuple in (False, True):
            before, after, shapes = set(), {id(p) for p in self._head.parameters()}, []  # ids of parameters

            def note(module: nn.Module, _, before=before, after=after, shapes=shapes) -> None:
                if not isinstance(module, _Stub):
                    (after if shapes else before).update(id(p) for p in module.parameters(recurse=False))

            def pass_on(hidden: Tensor, *_, shapes=shapes, **__):
                shapes.append(hidden.shape)
                return self._as_block_output(hidden)

            hook = nn.modules.module.register_module_forward_pre_hook(note)
            try:
                head_stops = patch.object(self._head, "forward", _stop)
                with torch.no_grad(), AnswerYes(), self._blocks_replaced(pass_on), head_stops:
                    shapes.append(self._run(input_ids).shape)
            except (RuntimeError, IndexError, ValueError, TypeError, AttributeError) as error:
                failure = f" ({error})"
                continue
            finally:
                hook.remove()
            if len(shapes) == len(self.blocks) + 1 and all(shape[:-1] == (2, 3) for shape in shapes):
                return before, after
        raise InputError(f"{self.architecture} cannot be taken apart into embedding, blocks and head{failure}")


def kind_of(block: nn.Module) -> tuple:
    """Returns a key for the structure of `block`. Blocks with equal keys allocate equal amounts of memory, and save
    tensors of equal shapes and dtypes for backward."""
    return tuple(
        (
            name,
            type(module),
            getattr(vars(module).get("forward"), "kind", None),  # of a Norm or an ActivationForward
            tuple((key, tensor.shape, tensor.dtype) for key, tensor in module.named_parameters(recurse=False)),
            tuple(
                (key, value)
                for key, value in sorted(vars(module).items())
                if isinstance(value, bool | int | float | str | None) and key not in _PLACES
            ),
        )
        for name, module in block.named_modules()
    )


def _padding_not_sought() -> AbstractContextManager:
    # transformers looks for padding in the ids, which copies a value from the GPU, and warns of a missing mask. Padding
    # is on the right here, where no real token sees it.
    return patch.object(PreTrainedModel, "warn_if_padding_and_no_attention_mask", lambda *_: None)


def _stop(value: Tensor) -> None:
    raise _Stop(value)


class AnswerYes(TorchFunctionMode):
    """Makes `bool(x)` and `y in x` return True for a meta tensor x, which has no values."""

    def __torch_function__(self, function, types, arguments=(), keywords=None):
        # Models test, for example, if all tokens are real. With True, the usual modules run.
        if function in (Tensor.__bool__, Tensor.__contains__) and arguments[0].is_meta:
            return True
        return function(*arguments, **(keywords or {}))
