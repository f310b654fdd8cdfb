"""ResNet-50: deep residual learning (He et al. 2015, https://arxiv.org/abs/1512.03385), stride in
the 3x3 convolution.

The names are those that weights of this network usually have (``conv1``, ``layer3.0.downsample.1``,
``fc``), so they can be loaded into it.
"""

from __future__ import annotations

import torch
from torch import nn

GROUPS = [(64, 3, 1), (128, 4, 2), (256, 6, 2), (512, 3, 2)]
"""Inner channels, blocks, stride of the first block (table 1 of the paper); a block puts out
four times as many.
"""


class Bottleneck(nn.Module):
    """Reduce by 1x1, filter by 3x3, expand by 1x1: (batch, ins, h, w) to (batch, 4 * inner, h /
    stride, w / stride).
    """

    def __init__(self, ins: int, inner: int, stride: int) -> None:
        super().__init__()
        outs = 4 * inner
        self.conv1 = nn.Conv2d(ins, inner, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(inner)
        self.conv2 = nn.Conv2d(inner, inner, 3, stride, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(inner)
        self.conv3 = nn.Conv2d(inner, outs, 1, bias=False)
        self.bn3 = nn.BatchNorm2d(outs)
        self.relu = nn.ReLU(inplace=True)
        self.downsample = None
        if stride > 1 or ins != outs:
            self.downsample = nn.Sequential(
                nn.Conv2d(ins, outs, 1, stride, bias=False), nn.BatchNorm2d(outs)
            )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """The block, with its input added, brought to the same shape where that is another."""
        y = self.relu(self.bn1(self.conv1(x)))
        y = self.relu(self.bn2(self.conv2(y)))
        y = self.bn3(self.conv3(y))
        y += x if self.downsample is None else self.downsample(x)
        return self.relu(y)


class ResNet50(nn.Module):
    """Images (batch, 3, height, width) to logits (batch, classes)."""

    def __init__(self, classes: int = 1000) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(3, 64, 7, 2, 3, bias=False)
        self.bn1 = nn.BatchNorm2d(64)
        self.relu = nn.ReLU(inplace=True)
        self.maxpool = nn.MaxPool2d(3, 2, 1)
        channels = 64
        groups = []
        for inner, blocks, stride in GROUPS:
            group: list[nn.Module] = []
            for i in range(blocks):
                group.append(Bottleneck(channels, inner, stride if i == 0 else 1))
                channels = 4 * inner
            groups.append(nn.Sequential(*group))
        self.layer1, self.layer2, self.layer3, self.layer4 = groups
        self.fc = nn.Linear(channels, classes)
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        """Logits of the classes."""
        x = self.maxpool(self.relu(self.bn1(self.conv1(images))))
        x = self.layer4(self.layer3(self.layer2(self.layer1(x))))
        return self.fc(x.mean(dim=(2, 3)))
