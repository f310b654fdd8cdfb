"""Transformer: an encoder of what is said and a decoder that says it again (Vaswani et al.
2017).
"""

from __future__ import annotations

import math

import torch
from torch import nn


def places(longest: int, width: int) -> torch.Tensor:
    """Sines and cosines of each place, with wavelengths from 2 pi to 20,000 pi: (longest,
    width).
    """
    rates = torch.exp(
        torch.arange(0, width, 2, dtype=torch.get_default_dtype()) * (-math.log(10_000) / width)
    )
    angles = torch.arange(longest)[:, None] * rates
    return torch.stack([angles.sin(), angles.cos()], dim=2).flatten(1)


class Transformer(nn.Module):
    """Source and target tokens (batch, time) to hidden states (batch, target time, width).

    One embedding serves the source, the target and the output layer, ``generator``, which makes
    logits (batch, time, vocabulary) of the hidden states. It is not called here: a loss may do so
    in chunks.

    Args:
        vocabulary: tokens of both sides together.
        padding: the token that is none.
        width: numbers for each place; even, and a multiple of ``heads``.
        layers: of the encoder, and of the decoder.
        heads: of attention, in each layer.
        dropout: of embeddings, attention and layers.
        longest: the longest source or target.
    """

    def __init__(
        self,
        vocabulary: int,
        padding: int,
        width: int,
        layers: int,
        heads: int,
        dropout: float,
        longest: int,
    ) -> None:
        super().__init__()
        self.padding = padding
        self.embedding = nn.Embedding(vocabulary, width)
        nn.init.normal_(self.embedding.weight, std=width**-0.5)
        self.generator = nn.Linear(width, vocabulary, bias=False)
        self.generator.weight = self.embedding.weight
        self.register_buffer("places", places(longest, width), persistent=False)
        self.dropout = nn.Dropout(dropout)
        settings = {
            "dim_feedforward": 4 * width,
            "dropout": dropout,
            "batch_first": True,
            "norm_first": True,
        }
        self.encoder = nn.TransformerEncoder(
            nn.TransformerEncoderLayer(width, heads, **settings),
            layers,
            norm=nn.LayerNorm(width),
            enable_nested_tensor=False,
        )
        self.decoder = nn.TransformerDecoder(
            nn.TransformerDecoderLayer(width, heads, **settings), layers, norm=nn.LayerNorm(width)
        )
        for part in (
            self.encoder,
            self.decoder,
        ):  # its layers are copies of one: let each begin by itself
            for parameter in part.parameters():
                if parameter.dim() > 1:
                    nn.init.xavier_uniform_(parameter)

    def embedded(self, tokens: torch.Tensor) -> torch.Tensor:
        """(batch, time) to (batch, time, width)."""
        scaled = self.embedding(tokens) * self.embedding.embedding_dim**0.5
        return self.dropout(scaled + self.places[: tokens.shape[1]])

    def encode(self, source: torch.Tensor) -> torch.Tensor:
        """What the decoder looks at: (batch, source time, width)."""
        return self.encoder(self.embedded(source), src_key_padding_mask=source == self.padding)

    def decode(
        self, target: torch.Tensor, source: torch.Tensor, encoded: torch.Tensor
    ) -> torch.Tensor:
        """Hidden states (batch, target time, width); each place sees the target up to itself."""
        time = target.shape[1]
        ahead = torch.ones(time, time, dtype=torch.bool, device=target.device).triu(1)
        return self.decoder(
            self.embedded(target),
            encoded,
            tgt_mask=ahead,
            tgt_key_padding_mask=target == self.padding,
            memory_key_padding_mask=source == self.padding,
        )

    def forward(self, source: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        """The hidden states; the generator makes logits of them."""
        return self.decode(target, source, self.encode(source))

    @torch.no_grad()
    def greedy(self, source: torch.Tensor, start: int, longest: int) -> torch.Tensor:
        """The likeliest token after what was said so far, again and again: (batch, longest)."""
        encoded = self.encode(source)
        said = source.new_full((len(source), 1), start)
        for _ in range(longest):
            last = self.generator(self.decode(said, source, encoded)[:, -1])
            said = torch.cat([said, last.argmax(1, keepdim=True)], dim=1)
        return said[:, 1:]
