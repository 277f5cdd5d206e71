"""timm's vit_giant_patch14_dinov2 as torchao's benchmark of optimizers trains it: 1.1 billion parameters in bf16.

Each block is recomputed in backward. Images are cut into patches before the step, not by a convolution. Shape suffixes:
B images, T patches of each and a class token, D width, H heads, E width of a head.
"""

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from tests.published.torchtune_llama import fused_adamw

LAYERS, WIDTH, HEADS, INNER, CLASSES = 40, 1536, 24, 4096, 45
PATCHES, PATCH = 16 * 16, 3 * 14 * 14  # of an image of 224 x 224


def build_vision_transformer(batch: int) -> tuple[nn.Module, Callable[[], None]]:
    """Returns the model on the meta device, and the step that trains it on `batch` images."""
    with torch.device("meta"):
        model = _VisionTransformer().to(torch.bfloat16)
        patches_BTD = torch.empty(batch, PATCHES, PATCH, dtype=torch.bfloat16)
        labels_B = torch.zeros(batch, dtype=torch.int64)
    update = fused_adamw(model)

    def step() -> None:
        F.cross_entropy(model(patches_BTD), labels_B).backward()
        update()

    return model, step


class _VisionTransformer(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding, self.norm, self.head = nn.Linear(PATCH, WIDTH), nn.LayerNorm(WIDTH), nn.Linear(WIDTH, CLASSES)
        self.token, self.positions = (nn.Parameter(torch.empty(1, size, WIDTH)) for size in (1, 1 + PATCHES))
        self.blocks = nn.ModuleList(_Block() for _ in range(LAYERS))

    def forward(self, patches_BTD: Tensor) -> Tensor:
        x_BTD = self.embedding(patches_BTD)
        x_BTD = torch.cat([self.token.expand(len(x_BTD), -1, -1), x_BTD], 1) + self.positions
        for block in self.blocks:
            x_BTD = checkpoint(block, x_BTD, use_reentrant=False)
        return self.head(self.norm(x_BTD)[:, 0])


class _Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm_1, self.norm_2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.scale_1, self.scale_2 = (nn.Parameter(torch.empty(WIDTH)) for _ in range(2))
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 2 * INNER), nn.Linear(INNER, WIDTH)

    def forward(self, x_BTD: Tensor) -> Tensor:
        x_BTD = x_BTD + self.attend(self.norm_1(x_BTD)) * self.scale_1
        gate, up = self.up(self.norm_2(x_BTD)).chunk(2, -1)
        return x_BTD + self.down(F.silu(gate) * up) * self.scale_2

    def attend(self, x_BTD: Tensor) -> Tensor:
        q_BHTE, k_BHTE, v_BHTE = self.qkv(x_BTD).unflatten(2, (3, HEADS, -1)).permute(2, 0, 3, 1, 4).unbind(0)
        y_BHTE = F.scaled_dot_product_attention(q_BHTE, k_BHTE, v_BHTE)
        return self.out(y_BHTE.transpose(1, 2).reshape(x_BTD.shape))
