"""``fsdp``: single-device results and names, from shards."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from lockstep import train
from lockstep.training.run import Run
from lockstep.verify import differences

from zoo import ZOO, _job, halved_weights, sgd, tokens_and_next  # isort: skip

BOUND = 1e-10


class Block(nn.Module):
    def __init__(self, width: int, norm: type[nn.Module] = nn.LayerNorm) -> None:
        super().__init__()
        self.norm, self.up, self.down = norm(width), nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.tanh(self.up(self.norm(x))))


class Stack(nn.Module):
    """Blocks between an embedding and an output layer that are tied."""

    def __init__(self, words: int = 11, width: int = 8, blocks: int = 3) -> None:
        super().__init__()
        self.embedding = nn.Embedding(words, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(blocks))
        self.out = nn.Linear(width, words, bias=False)
        self.out.weight = self.embedding.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        return self.out(x).transpose(1, 2)


class Rows(nn.Module):
    """Blocks with batch norms; the second is frozen."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.Sequential(*(Block(6, nn.BatchNorm1d) for _ in range(3)))
        self.blocks[1].requires_grad_(False)
        self.out = nn.Linear(6, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.out(self.blocks(x))


_tokens, _next = tokens_and_next()
KINDS = {
    **ZOO,
    "tied blocks": _job(Stack, _tokens, _next, optimizer=sgd, metrics={}),
    "tied blocks, in micro-batches, clipped": _job(
        Stack, _tokens, _next, optimizer=halved_weights, accumulate=3, clip_norm=0.1, metrics={}
    ),
    "checkpointed blocks": _job(Stack, _tokens, _next, optimizer=sgd, activation_checkpointing="auto", metrics={}),
    "blocks with sync_batchnorm, one frozen": _job(Rows, sync_batchnorm=True, optimizer=sgd),
    "blocks, and batches smaller than the world": _job(
        Stack, _tokens[:5], _next[:5], batch_size=2, optimizer=sgd, metrics={}
    ),
}
FAST = {
    ("momentum", 2),
    ("ignored tokens and tied weights", 3),
    ("a layer unused in some micro-batches", 2),
    ("a layer unused on one rank", 3),
    ("sparse gradients that are clipped", 2),
    ("tied blocks, in micro-batches, clipped", 3),
    ("checkpointed blocks", 2),
    ("blocks with sync_batchnorm, one frozen", 2),
    ("blocks, and batches smaller than the world", 3),
}


@pytest.fixture(scope="module")
def reference() -> dict[str, Run]:
    return {}


@pytest.mark.parametrize(
    ("kind", "devices"),
    [
        pytest.param(kind, devices, marks=() if (kind, devices) in FAST else pytest.mark.slow)
        for kind in KINDS
        for devices in (2, 3)
    ],
)
def test_shards_end_where_one_device_does(kind: str, devices: int, reference, tmp_path_factory) -> None:
    job = KINDS[kind].replace(precision="fp64")
    if kind not in reference:
        reference[kind] = train(
            job, strategy="single", devices="1xcpu", folder=tmp_path_factory.mktemp("single"), quiet=True
        )
    run = train(job, strategy="fsdp", devices=f"{devices}xcpu", folder=tmp_path_factory.mktemp("run"), quiet=True)
    found = differences(job, run, reference[kind])
    assert found.worst < BOUND, str(found)
    assert any(found.moved.values())
    assert max(found.history.values()) < BOUND
