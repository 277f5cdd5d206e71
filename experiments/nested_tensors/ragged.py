"""Real text of real lengths, in batches of each mode, and their forward.

padded    batches of samples as they come, each padded on the right to its longest
bucketed  batches of samples of like lengths, each padded to its longest
nested    batches as they come, as one ragged row; attention through nested tensors (attention.py)
packed    the same; attention over the packed values
"""

import ast
import copy
import sysconfig
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import AutoModelForCausalLM, GPT2Config, LlamaConfig

from experiments.harness.vocabulary import gpt2_tokenizer
from experiments.nested_tensors.attention import NESTED, PACKED, Documents

PADDED, BUCKETED = "padded", "bucketed"
MODES = (PADDED, BUCKETED, "nested", "packed")
ATTENTION = {PADDED: "sdpa", BUCKETED: "sdpa", "nested": NESTED, "packed": PACKED}
KINDS = ("lines", "functions", "files")  # of samples of Python's standard library
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
LONGEST = 1024  # tokens; longer samples are cut off
IGNORED = -100
VOCABULARY = 50257

SHAPES = {  # without dropout, whose masks would differ from mode to mode
    "gpt2": GPT2Config(resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0),
    "llama": LlamaConfig(  # the shape of SmolLM-135M, with GPT-2's vocabulary
        num_hidden_layers=30, hidden_size=576, intermediate_size=1536, num_attention_heads=9, num_key_value_heads=3,
        vocab_size=VOCABULARY, max_position_embeddings=LONGEST, tie_word_embeddings=True, bos_token_id=0,
        eos_token_id=0,
    ),
}  # fmt: skip


def make_model(shape: str, mode: str, device: torch.device, dtype: str = "fp32", seed: int = 0) -> nn.Module:
    """Returns one of SHAPES with random weights in one of DTYPES, the same for every mode."""
    torch.manual_seed(seed)
    return AutoModelForCausalLM.from_config(copy.deepcopy(SHAPES[shape]), attn_implementation=ATTENTION[mode]).to(
        device, DTYPES[dtype]
    )


def read_samples(data: str, count: int, seed: int = 0) -> list[list[int]]:
    """Returns token ids of `count` drawn samples, each of at most LONGEST tokens. `data`: one of KINDS of Python's
    standard library, "wikitext", or a --data of the training scripts, with a sample for each row or file. Raises
    InputError if `data` is not available, ValueError if there are fewer."""
    texts = _library_texts(data) if data in KINDS else _texts(data)
    if count > len(texts):
        name = f"{data} in the standard library" if data in KINDS else f"samples in {data}"
        raise ValueError(f"there are {len(texts):,} {name}, and not {count:,}")
    order = torch.randperm(len(texts), generator=torch.Generator().manual_seed(seed))[:count]
    return [ids[:LONGEST] for ids in gpt2_tokenizer()([texts[index] for index in order])["input_ids"]]


def _library_texts(kind: str) -> list[str]:
    folder = Path(sysconfig.get_path("stdlib"))
    sources = [path.read_bytes().decode(errors="ignore") for path in sorted(folder.glob("*.py"))]
    if kind == "lines":
        return [line for source in sources for line in source.splitlines(keepends=True) if line.strip()]
    if kind == "functions":
        return [text for source in sources for text in _functions(source)]
    return [source for source in sources if source.strip()]


def _texts(spec: str) -> list[str]:
    from lowmem.data.records import Reading
    from lowmem.data.sources import open_source

    source = open_source("Salesforce/wikitext:wikitext-2-raw-v1" if spec == "wikitext" else spec, Reading())
    # Of a long file the first piece is more than LONGEST tokens.
    texts = [record.columns.get("text") for record in source.train if not record.begun]
    found = [text for text in texts if isinstance(text, str) and text.strip()]
    if texts and not found:
        raise ValueError(f"no row of {spec} has text in a column named text")
    return found


def _functions(source: str) -> Iterator[str]:
    lines = source.splitlines(keepends=True)
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.FunctionDef):
            yield "".join(lines[node.lineno - 1 : node.end_lineno])


@dataclass(frozen=True)
class Inputs:
    """A batch. `keywords`: of the model's call; `labels`: in the shape of its token ids, already shifted; `tokens`: the
    number of real ones."""

    keywords: dict[str, Any]
    labels: Tensor
    tokens: int

    @property
    def positions(self) -> int:
        """Returns the number of tokens and padding."""
        return self.labels.numel()

    def to(self, device: torch.device) -> "Inputs":
        return Inputs(
            {key: value.to(device) for key, value in self.keywords.items()}, self.labels.to(device), self.tokens
        )


def collate(mode: str, samples: Sequence[Sequence[int]], last_label: int = IGNORED) -> Inputs:
    """Returns one batch of `samples`, on the CPU. `last_label`: the label of each sample's last token. Raises
    ValueError for an empty sample."""
    documents = Documents([len(sample) for sample in samples])
    rows = [torch.tensor(sample) for sample in samples]
    shifted = [F.pad(row[1:], (0, 1), value=last_label) for row in rows]
    if mode in (PADDED, BUCKETED):
        input_ids, labels = (
            nn.utils.rnn.pad_sequence(each, batch_first=True, padding_value=value)
            for each, value in ((rows, 0), (shifted, IGNORED))
        )
        return Inputs({"input_ids": input_ids}, labels, documents.tokens)
    input_ids, labels = (torch.cat(each)[None] for each in (rows, shifted))
    if mode == "packed":
        documents.classes  # noqa: B018  made here, where batches are, and not in the first layer
    more = {"position_ids": documents.position_ids, "documents": documents}
    return Inputs({"input_ids": input_ids} | more, labels, documents.tokens)


def batches_of(mode: str, lengths: Sequence[int], batch_size: int) -> list[list[int]]:
    """Returns the indices of the samples of each batch; every sample is in one."""
    order = sorted(range(len(lengths)), key=lengths.__getitem__) if mode == BUCKETED else list(range(len(lengths)))
    return [order[start : start + batch_size] for start in range(0, len(order), batch_size)]


def forward(model: nn.Module, inputs: Inputs) -> tuple[Tensor, Tensor]:
    """Returns the sum of the losses of all predictions, and the logits [.., .., V]."""
    logits = model(use_cache=False, **inputs.keywords).logits
    # A sum over predictions, so that all modes have the same sum over all samples.
    loss = F.cross_entropy(logits.flatten(0, 1), inputs.labels.flatten(), ignore_index=IGNORED, reduction="sum")
    return loss, logits
