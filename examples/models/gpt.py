"""GPT: blocks of causal attention and of neurons, each normalised first (GPT-2, Radford et al.
2019).
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn


class Block(nn.Module):
    """Attention to what came before, then two linear layers, each added to its input: (batch,
    time, width) to that.
    """

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.before_attention = nn.LayerNorm(width)
        self.queries_keys_values = nn.Linear(width, 3 * width)
        self.attended = nn.Linear(width, width)
        self.neurons = nn.Sequential(
            nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )

    def attention(self, x: torch.Tensor) -> torch.Tensor:
        """Each place looks at itself and at those before it."""
        batch, time, width = x.shape
        # (batch, time, 3 x width) to three of (batch, heads, time, width of a head)
        q, k, v = (
            self.queries_keys_values(x).view(batch, time, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        )
        found = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.attended(found.transpose(1, 2).reshape(batch, time, width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """The block."""
        x = x + self.attention(self.before_attention(x))
        return x + self.neurons(x)


class GPT(nn.Module):
    """Tokens (batch, time) to the logits of each next token (batch, time, vocabulary).

    No place looks ahead, so padding at the end changes nothing of what comes before it, and needs
    no mask. The output layer is the embedding itself.

    Args:
        vocabulary: how many tokens there are.
        context: the longest time.
        width: numbers for each place; a multiple of ``heads``.
        layers: blocks.
        heads: of attention, in each block.
    """

    def __init__(self, vocabulary: int, context: int, width: int, layers: int, heads: int) -> None:
        super().__init__()
        if width % heads:
            raise ValueError(f"width {width} is not a multiple of heads {heads}")
        self.tokens = nn.Embedding(vocabulary, width)
        self.places = nn.Embedding(context, width)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        for name, parameter in self.named_parameters():
            if parameter.dim() > 1:
                # What a block adds is begun smaller the more blocks there are, so that their sum is
                # not.
                adds = name.endswith(("attended.weight", "neurons.3.weight"))
                nn.init.normal_(parameter, std=0.02 / (2 * layers) ** 0.5 if adds else 0.02)
            elif name.endswith("bias"):
                nn.init.zeros_(parameter)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Logits (batch, time, vocabulary)."""
        x = self.tokens(tokens) + self.places.weight[: tokens.shape[1]]
        for block in self.blocks:
            x = block(x)
        return F.linear(self.norm(x), self.tokens.weight)
