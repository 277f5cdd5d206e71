"""GPT-2 and GPT-3 by name, cut into the pieces that move; weights of a piece are one stretch of memory."""

from dataclasses import dataclass

import torch
from torch import nn
from transformers import GPT2Config

from experiments.unified_memory.schedule import PAGE_BYTES, Access

SHAPES = {  # blocks, width, heads: Radford et al. 2019; Brown et al. 2020, table 2.1
    "gpt2-small": (12, 768, 12),
    "gpt2-medium": (24, 1024, 16),
    "gpt2-large": (36, 1280, 20),
    "gpt2-xl": (48, 1600, 25),
    "gpt3-6.7b": (32, 4096, 32),
    "gpt3-13b": (40, 5120, 40),  # the table says 5,140, which is not 40 heads of 128
}
POSITIONS = {"gpt2": 1024, "gpt3": 2048}


def config_of(name: str) -> GPT2Config:
    """Returns the config of a name in SHAPES, or of a smaller GPT-2 written `BLOCKSxWIDTHxHEADS`."""
    blocks, width, heads = SHAPES.get(name) or map(int, name.split("x"))
    positions = POSITIONS.get(name.partition("-")[0], 1024)
    return GPT2Config(
        n_layer=blocks, n_embd=width, n_head=heads, n_positions=positions,
        resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0,
    )  # fmt: skip


@dataclass(frozen=True)
class Pieces:
    """A model's pieces. `names`: of the parameters of each; `begins`: bytes before a parameter in its piece; `sizes`:
    bytes, whole pages; `forward`: the pieces that each access of a forward uses."""

    names: tuple[tuple[str, ...], ...]
    begins: dict[str, int]
    sizes: tuple[int, ...]
    forward: tuple[Access, ...]

    def accesses(self, backward: bool) -> tuple[Access, ...]:
        """Returns the accesses of a pass. In backward, an access also uses the gradients of its pieces, numbered after
        the weights."""
        if not backward:
            return self.forward
        count, known, gradients = len(self.names), set(), []
        for access in self.forward:
            # A tied weight's gradient is that of its first use, since autograd adds it up before it is written.
            gradients.append(tuple(count + piece for piece in access if piece not in known))
            known.update(access)
        backwards = zip(self.forward[::-1], gradients[::-1], strict=True)
        return self.forward + tuple(access + gradient for access, gradient in backwards)


def pieces_of(model: nn.Module, dtype: torch.dtype) -> Pieces:
    """Returns the pieces: the embeddings, each block, the last norm. The head uses the embeddings' piece."""
    groups: dict[str, list[str]] = {}
    for name, _ in model.named_parameters():
        words = name.split(".")
        group = ".".join(words[:3]) if words[1] == "h" else "embeddings" if words[1] in ("wte", "wpe") else "last"
        groups.setdefault(group, []).append(name)
    parameters, begins, sizes = dict(model.named_parameters()), {}, []
    for names in groups.values():
        end = 0
        for name in names:
            begins[name] = end
            end += -(-parameters[name].numel() * dtype.itemsize // 512) * 512
        sizes.append(-(-end // PAGE_BYTES) * PAGE_BYTES)
    numbers = {group: number for number, group in enumerate(groups)}
    blocks = [(number,) for group, number in numbers.items() if group not in ("embeddings", "last")]
    forward = [(numbers["embeddings"],), *blocks, (numbers["last"], numbers["embeddings"])]
    return Pieces(tuple(map(tuple, groups.values())), begins, tuple(sizes), tuple(forward))


def hooked(model: nn.Module) -> list[tuple[nn.Module, nn.Module]]:
    """Returns, for each access, the modules that begin it in forward and in backward."""
    inner = model.transformer
    # After the dropout, autograd enters both tables of the embeddings.
    return [(inner.wte, inner.drop), *((block, block) for block in inner.h), (inner.ln_f, model.lm_head)]
