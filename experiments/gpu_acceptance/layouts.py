"""Lists the layouts that plans.py measures: every attention kernel, precision and kind of layout, and combinations.

Widths are those of real models. Peaks are 1 to 10 GiB: much more than a page of the allocator (20 MiB), and little
enough for most cards.
"""

from collections.abc import Callable
from dataclasses import dataclass, fields
from functools import partial

import torch
from transformers import GPT2Config, LlamaConfig, OPTConfig, PretrainedConfig

from lowmem.core.batch import Batch
from lowmem.core.decoder import Decoder
from lowmem.core.kernels import Kernels
from lowmem.core.layout import Layout
from lowmem.core.optimizers import get_optimizer
from lowmem.core.precision import WORKING_DTYPES
from lowmem.models.build import load_config, make_decoder
from lowmem.planning.simulated_step import StepCase

MODELS: dict[str, Callable[[], PretrainedConfig]] = {
    "gpt2": partial(load_config, "gpt2", "random"),
    "gpt2-medium": partial(load_config, "gpt2-medium", "random"),
    "gpt2-large of 6": lambda: GPT2Config(n_layer=6, n_embd=1280, n_head=20),
    "llama of 6": lambda: LlamaConfig(
        vocab_size=32000, hidden_size=2048, intermediate_size=5632, num_hidden_layers=6, num_attention_heads=32,
        num_key_value_heads=4, max_position_embeddings=2048,
    ),
    "opt of 6": lambda: OPTConfig(hidden_size=2048, ffn_dim=8192, num_hidden_layers=6, num_attention_heads=32),
    "tiny gpt2": lambda: GPT2Config(
        n_layer=2, n_embd=64, n_head=2, vocab_size=257, n_positions=32, bos_token_id=0, eos_token_id=0
    ),
    "tiny llama": lambda: LlamaConfig(
        vocab_size=257, hidden_size=64, intermediate_size=176, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, max_position_embeddings=32,
    ),
}  # fmt: skip


@dataclass(frozen=True)
class ModelLayout:
    model: str
    precision: str = "bf16"
    micro_batch: int = 1
    group: int = 1
    segment: int = 1
    kept: float = 0  # Layout's, as a multiple of the model's blocks: 1 keeps all products, 2 everything
    states: str = "resident"  # optimizer states: on the card; "streamed" from RAM; "mixed": half of the units are
    optimizer: str = "adamw"
    document_mask: bool = False
    residual: str = "fp32"
    seq: int = 1024
    batch: int = 8

    @property
    def name(self) -> str:
        others = [(field, getattr(self, field.name)) for field in fields(self)[1:]]
        return ", ".join([self.model, *(f"{field.name} {v}" for field, v in others if v != field.default)])

    def decoder(self, fused_kernels: Kernels) -> Decoder:
        return make_decoder(MODELS[self.model](), self.precision, self.residual, fused_kernels)

    def case(self, units: int) -> StepCase:
        resident = {"resident": units, "streamed": 0, "mixed": units // 2}[self.states]
        layout = Layout(
            self.micro_batch, self.group, self.segment, round(self.kept * (units - 2)), states_on_gpu=resident
        )  # fmt: skip
        return StepCase(
            self.seq, self.batch, layout, WORKING_DTYPES[self.precision], get_optimizer(self.optimizer),
            document_mask=self.document_mask,
        )  # fmt: skip

    def tokens(self) -> Batch:
        """Returns random tokens; with a document mask, two documents to a row."""
        generator = torch.Generator().manual_seed(0)
        shape = (self.batch, self.seq)
        ids, labels = torch.randint(0, MODELS[self.model]().vocab_size, (2, *shape), generator=generator)
        if not self.document_mask:
            return Batch(ids, labels)
        position = torch.arange(self.seq)
        second = position >= self.seq // 3
        position = torch.where(second, position - self.seq // 3, position)
        return Batch(ids, labels, position.expand(shape).contiguous(), second.int().expand(shape).contiguous())


GRID = (  # every kernel and every kind of layout early on, then the mixtures
    ModelLayout("gpt2-medium"),
    ModelLayout("gpt2-medium", micro_batch=4, kept=2, states="streamed"),
    ModelLayout("gpt2-medium", micro_batch=4, kept=1, states="streamed"),
    ModelLayout("llama of 6", micro_batch=4, kept=2, states="mixed"),
    ModelLayout("gpt2", "fp32"),
    ModelLayout("gpt2", document_mask=True),
    ModelLayout("gpt2", "fp16", micro_batch=4, kept=2, states="mixed"),
    ModelLayout("opt of 6", states="streamed"),
    ModelLayout("gpt2-large of 6", micro_batch=4, segment=3, states="mixed"),
    ModelLayout("gpt2-medium", group=2, segment=3, states="streamed"),
    ModelLayout("llama of 6"),
    ModelLayout("llama of 6", document_mask=True, segment=3),
    ModelLayout("llama of 6", micro_batch=4, kept=4 / 3, segment=3),
    ModelLayout("llama of 6", "fp32", micro_batch=4),
    ModelLayout("gpt2", micro_batch=4, kept=2, document_mask=True),
    ModelLayout("gpt2", document_mask=True, seq=500),
    ModelLayout("gpt2-medium", micro_batch=4, segment=3, optimizer="sgd"),
    ModelLayout("opt of 6", "fp16", micro_batch=4, kept=2),
    ModelLayout("gpt2-large of 6", "fp32", group=2, kept=2, states="streamed"),
    ModelLayout("gpt2-large of 6", micro_batch=4, residual="16bit"),
    ModelLayout("gpt2", "fp32", micro_batch=4, kept=2, optimizer="sgd"),
    ModelLayout("opt of 6", micro_batch=4, group=2, segment=3, states="mixed"),
)
CAPPED = (GRID[0], GRID[1], GRID[13])  # little and much reserved beside what is allocated
TINY = {"precision": "fp32", "seq": 32, "batch": 4}  # 16-bit products on the CPU take memory that is none of ours
DRY_GRID = (
    ModelLayout("tiny gpt2", group=2, segment=2, **TINY),
    ModelLayout("tiny llama", micro_batch=2, kept=3 / 2, document_mask=True, **TINY),
)
