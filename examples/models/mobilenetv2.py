"""MobileNetV2: inverted residuals and linear bottlenecks (Sandler et al. 2018,
https://arxiv.org/abs/1801.04381).
"""

from __future__ import annotations

import torch
from torch import nn

STAGES = [
    (1, 16, 1, 1),
    (6, 24, 2, 2),
    (6, 32, 3, 2),
    (6, 64, 4, 2),
    (6, 96, 3, 1),
    (6, 160, 3, 2),
    (6, 320, 1, 1),
]
"""Expansion, channels, blocks, stride of the first block (table 2 of the paper)."""


def _norm_act(channels: int) -> list[nn.Module]:
    return [nn.BatchNorm2d(channels), nn.ReLU6(inplace=True)]


class InvertedResidual(nn.Module):
    """Expand by 1x1, filter each channel by 3x3, project back: (batch, ins, h, w) to (batch,
    outs, ...).
    """

    def __init__(self, ins: int, outs: int, stride: int, expansion: int) -> None:
        super().__init__()
        inner = ins * expansion
        expand = [nn.Conv2d(ins, inner, 1, bias=False), *_norm_act(inner)] if expansion > 1 else []
        self.body = nn.Sequential(
            *expand,
            nn.Conv2d(inner, inner, 3, stride, 1, groups=inner, bias=False),
            *_norm_act(inner),
            nn.Conv2d(inner, outs, 1, bias=False),
            nn.BatchNorm2d(outs),
        )
        self.adds = stride == 1 and ins == outs

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """The block, with its input added where the shapes agree."""
        return x + self.body(x) if self.adds else self.body(x)


class MobileNetV2(nn.Module):
    """Images (batch, 3, height, width) to logits (batch, classes)."""

    def __init__(self, classes: int = 1000, dropout: float = 0.2) -> None:
        super().__init__()
        channels = 32
        blocks: list[nn.Module] = [
            nn.Conv2d(3, channels, 3, 2, 1, bias=False),
            *_norm_act(channels),
        ]
        for expansion, outs, repeats, stride in STAGES:
            for i in range(repeats):
                blocks.append(InvertedResidual(channels, outs, stride if i == 0 else 1, expansion))
                channels = outs
        self.features = nn.Sequential(
            *blocks, nn.Conv2d(channels, 1280, 1, bias=False), *_norm_act(1280)
        )
        self.classifier = nn.Sequential(nn.Dropout(dropout), nn.Linear(1280, classes))
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight, mode="fan_out")

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        """Logits of the classes."""
        return self.classifier(self.features(images).mean(dim=(2, 3)))
