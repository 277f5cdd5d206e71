"""Llama 3.2 3B as torchtune trains it without compiling: its decoder and its step, written again.

Norms and rotations are single operations in fp32, keys and values are copied for each query head, and the logits are
copied to fp32. Shape suffixes: B sequences, T tokens of each, D width, H heads, K heads of keys and values, E width of
a head.
"""

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional as F

LAYERS, WIDTH, HEADS, KEY_HEADS, INNER, VOCABULARY, POSITIONS = 28, 3072, 24, 8, 8192, 128256, 131072
HEAD = WIDTH // HEADS
ADAMW = {
    **{"lr": 2e-5, "beta1": 0.9, "beta2": 0.999, "weight_decay": 0.01, "eps": 1e-8},
    **{"amsgrad": False, "maximize": False, "grad_scale": None, "found_inf": None},
}


def build_torchtune(batch: int, tokens: int) -> tuple[nn.Module, Callable[[], None]]:
    """Returns the model on the meta device, and the step that trains it."""
    with torch.device("meta"):
        model = _Llama().to(torch.bfloat16)
        model.rotations = torch.empty(POSITIONS, HEAD // 2, 2)
        ids_BT = torch.zeros((batch, tokens), dtype=torch.int64)
        count = torch.zeros((), dtype=torch.int64)
    update = fused_adamw(model)

    def step() -> None:
        loss = F.cross_entropy(model(ids_BT).flatten(0, 1), ids_BT.flatten()) * count
        loss.backward()
        for parameter in model.parameters():
            parameter.grad *= 1 / count
        update()

    return model, step


def fused_adamw(model: nn.Module) -> Callable[[], None]:
    """Returns a function that updates the weights and frees the gradients. The moments are made with the first
    update."""
    # torch.optim's fused AdamW refuses tensors on the meta device.
    weights, moments = list(model.parameters()), []
    steps = [torch.zeros((), device="meta") for _ in weights]

    def update() -> None:
        moments[:] = moments or [[torch.zeros_like(weight) for weight in weights] for _ in range(2)]
        with torch.no_grad():
            torch._fused_adamw_(weights, [weight.grad for weight in weights], *moments, [], steps, **ADAMW)
        model.zero_grad()

    return update


class _Llama(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding, self.norm = nn.Embedding(VOCABULARY, WIDTH), _Norm()
        self.blocks = nn.ModuleList(_Block() for _ in range(LAYERS))

    def forward(self, ids_BT: Tensor) -> Tensor:
        x_BTD = self.embedding(ids_BT)
        positions_BT = ids_BT.clone()
        for block in self.blocks:
            x_BTD = block(x_BTD, self.rotations, positions_BT)
        return F.linear(self.norm(x_BTD), self.embedding.weight).float()


class _Norm(nn.Module):
    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x_BTD: Tensor) -> Tensor:
        in_fp32 = x_BTD.float()
        normed = in_fp32 * torch.rsqrt(in_fp32.pow(2).mean(-1, keepdim=True) + 1e-5)
        return normed.type_as(x_BTD) * self.scale


class _Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm_1, self.norm_2 = _Norm(), _Norm()
        self.q, self.out = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(2))
        self.k, self.v = (nn.Linear(WIDTH, KEY_HEADS * HEAD, bias=False) for _ in range(2))
        self.gate, self.up = (nn.Linear(WIDTH, INNER, bias=False) for _ in range(2))
        self.down = nn.Linear(INNER, WIDTH, bias=False)

    def forward(self, x_BTD: Tensor, rotations: Tensor, positions_BT: Tensor) -> Tensor:
        x_BTD = x_BTD + self.attend(self.norm_1(x_BTD), rotations, positions_BT)
        y_BTD = self.norm_2(x_BTD)
        return x_BTD + self.down(F.silu(self.gate(y_BTD)) * self.up(y_BTD))

    def attend(self, x_BTD: Tensor, rotations: Tensor, positions_BT: Tensor) -> Tensor:
        q_BTHE = _rotated(self.q(x_BTD).unflatten(2, (HEADS, HEAD)), rotations[positions_BT])
        k_BTKE, v_BTKE = (project(x_BTD).unflatten(2, (KEY_HEADS, HEAD)) for project in (self.k, self.v))
        k_BTKE = _rotated(k_BTKE, rotations[positions_BT])
        k_BHTE, v_BHTE = (
            y.transpose(1, 2).unsqueeze(2).expand(-1, -1, HEADS // KEY_HEADS, -1, -1).flatten(1, 2)
            for y in (k_BTKE, v_BTKE)
        )
        y_BHTE = F.scaled_dot_product_attention(q_BTHE.transpose(1, 2), k_BHTE, v_BHTE, is_causal=True)
        return self.out(y_BHTE.transpose(1, 2).contiguous().flatten(2))


def _rotated(x_BTHE: Tensor, rotations: Tensor) -> Tensor:
    pairs = x_BTHE.float().unflatten(3, (-1, 2))
    first, second, cosine, sine = pairs[..., 0], pairs[..., 1], rotations[:, :, None, :, 0], rotations[:, :, None, :, 1]
    turned = torch.stack([first * cosine - second * sine, second * cosine + first * sine], -1)
    return turned.flatten(3).type_as(x_BTHE)
