"""RowShard: the rows that a rank has of a tensor."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class RowShard:
    """Some rows of a tensor whose others are on other ranks.

    Attributes:
        local: these rows.
        sizes: how many rows each rank has, in rank order.
        rank: that of these.
    """

    local: torch.Tensor
    sizes: tuple[int, ...]
    rank: int

    @property
    def shape(self) -> torch.Size:
        """The shape of the whole tensor."""
        return torch.Size([sum(self.sizes), *self.local.shape[1:]])

    @property
    def dtype(self) -> torch.dtype:
        """The number format of the rows."""
        return self.local.dtype
