"""ResNet-34 (He et al. 2016, arXiv:1512.03385) in plain PyTorch, with GroupNorm.

BatchNorm would take its statistics over a rank's own images, so that contenders on different
numbers of ranks would train different models. GroupNorm (Wu and He 2018, arXiv:1803.08494) looks at
one image at a time.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from workloads import ResNet

GROUPS = 32

STAGES = (3, 4, 6, 3)
"""Blocks per stage; each stage has twice the channels of the one before, and half the size."""


class Block(nn.Module):
    """Two 3 x 3 convolutions and a shortcut: (rows, channels, height, width) in and out."""

    def __init__(self, channels: int, into: int, stride: int) -> None:
        super().__init__()
        self.conv_1 = _conv(channels, into, 3, stride)
        self.norm_1 = nn.GroupNorm(GROUPS, into)
        self.conv_2 = _conv(into, into, 3, 1)
        self.norm_2 = nn.GroupNorm(GROUPS, into)
        self.shortcut = nn.Sequential()
        if stride != 1 or channels != into:
            self.shortcut = nn.Sequential(
                _conv(channels, into, 1, stride), nn.GroupNorm(GROUPS, into)
            )

    def forward(self, x: Tensor) -> Tensor:
        inner = F.relu(self.norm_1(self.conv_1(x)))
        return F.relu(self.norm_2(self.conv_2(inner)) + self.shortcut(x))


class ResNetModel(nn.Module):
    """Images (rows, 3, height, width), fp32, to logits (rows, classes)."""

    def __init__(self, size: ResNet) -> None:
        super().__init__()
        self.stem = _conv(3, size.width, 7, 2)
        self.norm = nn.GroupNorm(GROUPS, size.width)
        self.blocks = nn.ModuleList()
        channels = size.width
        for stage, count in enumerate(STAGES):
            inner = size.width << stage
            for number in range(count):
                stride = 2 if stage and not number else 1
                self.blocks.append(Block(channels, inner, stride))
                channels = inner
        self.head = nn.Linear(channels, size.classes)

    def forward(self, images: Tensor) -> Tensor:
        x = F.max_pool2d(F.relu(self.norm(self.stem(images))), 3, stride=2, padding=1)
        for block in self.blocks:
            x = block(x)
        return self.head(x.mean((2, 3)))


def _conv(channels: int, into: int, kernel: int, stride: int) -> nn.Conv2d:
    made = nn.Conv2d(channels, into, kernel, stride, padding=kernel // 2, bias=False)
    nn.init.kaiming_normal_(made.weight, mode="fan_out", nonlinearity="relu")
    return made


def batch(size: ResNet, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Random images and their random classes, for all ranks together."""
    shape = (size.batch, 3, size.image, size.image)
    images = torch.randn(shape, generator=generator)
    return images, torch.randint(size.classes, (size.batch,), generator=generator)
