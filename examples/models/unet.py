"""A U-Net: convolutions down and up again, with skips between equal sizes (Ronneberger et al.
2015).

https://arxiv.org/abs/1505.04597
"""

from __future__ import annotations

import torch
from torch import nn


class Double(nn.Sequential):
    """Two 3x3 convolutions, each normalised: (batch, ins, h, w) to (batch, outs, h, w)."""

    def __init__(self, ins: int, outs: int) -> None:
        layers: list[nn.Module] = []
        for first in (ins, outs):
            layers += [
                nn.Conv2d(first, outs, 3, 1, 1, bias=False),
                nn.BatchNorm2d(outs),
                nn.ReLU(inplace=True),
            ]
        super().__init__(*layers)


class UNet(nn.Module):
    """Images (batch, ins, h, w) to (batch, outs, h, w); h and w are multiples of ``2 ** depth``.

    ::

        down[0] ------------------------------> up[1] -> head
           down[1] ------------------> up[0]
                     bottom

    Args:
        ins: channels of the images.
        outs: channels of the result.
        width: channels at full size; each halving of the size doubles them.
        depth: how often the size is halved.
    """

    def __init__(self, ins: int, outs: int, width: int = 32, depth: int = 3) -> None:
        super().__init__()
        widths = [width * 2**i for i in range(depth + 1)]
        self.down = nn.ModuleList(
            Double(a, b) for a, b in zip([ins, *widths], widths[:-1], strict=False)
        )
        self.pool = nn.MaxPool2d(2)
        self.bottom = Double(widths[-2], widths[-1])
        levels = list(reversed(range(depth)))
        self.enlarge = nn.ModuleList(
            nn.ConvTranspose2d(widths[i + 1], widths[i], 2, 2) for i in levels
        )
        self.up = nn.ModuleList(Double(2 * widths[i], widths[i]) for i in levels)
        self.head = nn.Conv2d(width, outs, 1)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        """What the head makes of the last level."""
        x, skips = images, []
        for down in self.down:
            x = down(x)
            skips.append(x)
            x = self.pool(x)
        x = self.bottom(x)
        for enlarge, up in zip(self.enlarge, self.up, strict=True):
            x = up(torch.cat([skips.pop(), enlarge(x)], dim=1))
        return self.head(x)
