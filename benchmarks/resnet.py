"""ResNets (He et al. 2016, arXiv:1512.03385) in plain PyTorch: of depth 34, and of depth 50.

BatchNorm would take its statistics over a rank's own images, so that contenders on different
numbers of ranks would train different models; so the one of depth 34 has GroupNorm (Wu and He
2018, arXiv:1803.08494), which looks at one image at a time. The one of depth 50 is for one
accelerator, and as users train it: bottlenecks and BatchNorm.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from workloads import ResNet

GROUPS = 32
WIDER = 4
"""A bottleneck's channels that come out, over those inside."""

STAGES = (3, 4, 6, 3)
"""Blocks per stage; each stage has twice the channels of the one before, and half the size."""


class Block(nn.Module):
    """Two 3 x 3 convolutions beside a shortcut: (rows, channels, height, width) in and out."""

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


class Bottleneck(nn.Module):
    """A 3 x 3 convolution between two of 1 x 1, beside a shortcut; four times as many channels
    come out as are inside."""

    def __init__(self, channels: int, inner: int, stride: int) -> None:
        super().__init__()
        into = WIDER * inner
        self.conv_1 = _conv(channels, inner, 1, 1)
        self.norm_1 = nn.BatchNorm2d(inner)
        self.conv_2 = _conv(inner, inner, 3, stride)
        self.norm_2 = nn.BatchNorm2d(inner)
        self.conv_3 = _conv(inner, into, 1, 1)
        self.norm_3 = nn.BatchNorm2d(into)
        self.shortcut = nn.Sequential()
        if stride != 1 or channels != into:
            self.shortcut = nn.Sequential(_conv(channels, into, 1, stride), nn.BatchNorm2d(into))

    def forward(self, x: Tensor) -> Tensor:
        inner = F.relu(self.norm_1(self.conv_1(x)))
        inner = F.relu(self.norm_2(self.conv_2(inner)))
        return F.relu(self.norm_3(self.conv_3(inner)) + self.shortcut(x))


class ResNetModel(nn.Module):
    """Images (rows, 3, height, width), fp32, to logits (rows, classes)."""

    def __init__(self, size: ResNet) -> None:
        super().__init__()
        deep = size.depth == 50
        self.stem = _conv(3, size.width, 7, 2)
        self.norm = nn.BatchNorm2d(size.width) if deep else nn.GroupNorm(GROUPS, size.width)
        self.blocks = nn.ModuleList()
        channels = size.width
        for stage, count in enumerate(STAGES):
            inner = size.width << stage
            for number in range(count):
                stride = 2 if stage and not number else 1
                self.blocks.append((Bottleneck if deep else Block)(channels, inner, stride))
                channels = WIDER * inner if deep else inner
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
