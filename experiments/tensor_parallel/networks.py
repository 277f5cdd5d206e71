"""Defines the networks for images of digits, in plain PyTorch.

mlp        pairs of dense layers
mlp-norm   the same with layer norms and batch norms
resnet     ResNet-50 (He et al. 2015, arXiv 1512.03385); it gets the images enlarged to 64 x 64 pixels
"""

from collections.abc import Callable

from torch import Tensor, nn
from torch.nn import functional as F

WIDTH, BLOCKS, CLASSES = 96, 4, 10
PIXELS, ENLARGED = 8, 64  # of a side
RESNET_BLOCKS, RESNET_WIDTHS, EXPANSION = (3, 4, 6, 3), (64, 128, 256, 512), 4


class Pair(nn.Module):
    """Two dense layers, [B, into] -> [B, out]."""

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
