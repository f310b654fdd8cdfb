"""Stages, schedules and micro-batches against kinds of model: every cell ends where one device that
accumulates does.

The slow tests run them all; each fast one has a kind, a number of stages and a schedule, and few
micro-batches.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from lockstep import Job, train
from lockstep.pipelining.schedule import SCHEDULES
from lockstep.strategies.pp import PP
from lockstep.training.run import Run

from harness import differences  # isort: skip
from test_pipelining import KINDS  # isort: skip
from zoo import _job, drawn, sgd, tokens_and_next  # isort: skip

BOUND = 1e-10

_tokens, _next = tokens_and_next()


class OfHuggingFace(nn.Module):
    """One of their models, of a configuration; gives the logits as PyTorch's losses take them."""

    def __init__(self, which: str) -> None:
        super().__init__()
        import transformers

        if which == "GPT-2":
            config = transformers.GPT2Config(
                vocab_size=11,
                n_positions=8,
                n_embd=8,
                n_layer=4,
                n_head=2,
                resid_pdrop=0,
                embd_pdrop=0,
                attn_pdrop=0,
            )
            self.model = transformers.GPT2LMHeadModel(config)
        else:
            config = transformers.BertConfig(
                vocab_size=11,
                hidden_size=8,
                num_hidden_layers=4,
                num_attention_heads=2,
                intermediate_size=16,
                max_position_embeddings=8,
                hidden_dropout_prob=0,
                attention_probs_dropout_prob=0,
            )
            self.model = transformers.BertForMaskedLM(config)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.model(input_ids=tokens, attention_mask=(tokens > 0).long()).logits.transpose(
            1, 2
        )


def stack() -> nn.Module:
    return nn.Sequential(
        *(nn.Sequential(nn.Linear(6, 6), nn.Tanh()) for _ in range(8)), nn.Linear(6, 3)
    )


class Choosing(nn.Module):
    """How often a layer runs, and whether others run at all, depends on the values of a
    micro-batch.
    """

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(6, 6) for _ in range(8))
        self.out = nn.Linear(6, 3)

    def forward(self, x: torch.Tensor, wants: torch.Tensor) -> torch.Tensor:
        for i, layer in enumerate(self.layers):
            if i == 1 and int(wants.sum()) % 2:
                x = torch.tanh(layer(x))
            if i < 4 or wants.any():
                x = torch.tanh(layer(x))
        return self.out(x)


class Deep(nn.Module):
    """Eight layers, of which the first three are frozen, and a layer that is used twice."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(6, 6) for _ in range(8))
        self.layers[:3].requires_grad_(False)
        self.out = nn.Linear(6, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return self.out(torch.tanh(self.layers[4](x)))


class Normed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Conv2d(2, 2, 3, padding=1), nn.BatchNorm2d(2)) for _ in range(4)
        )
        self.out = nn.Linear(2, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = torch.relu(layer(x))
        return self.out(x.mean(dim=(2, 3)))


class Passing(nn.Module):
    """Dicts on their way."""

    def __init__(self) -> None:
        super().__init__()
        self.layers, self.out = nn.ModuleList(PassingLayer() for _ in range(8)), nn.Linear(6, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        state: dict[str, Any] = {"x": x, "first": x, "none": None, "depth": 0}
        for layer in self.layers:
            state = layer(state)
        return self.out(state["x"])


class PassingLayer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6)

    def forward(self, state: dict[str, Any]) -> dict[str, Any]:
        return {
            **state,
            "x": torch.tanh(self.linear(state["x"])) + state["first"],
            "depth": state["depth"] + 1,
        }


SOME: dict[str, Job] = {
    # As deep as two stages on each of four devices want it.
    **{
        kind: KINDS[kind][0].replace(model=stack)
        for kind in ("a sequence", "a sequence, clipped", "a sequence under AdamW")
    },
    "control flow": KINDS["control flow"][0].replace(model=Choosing),
    **{kind: KINDS[kind][0] for kind in ("a U-Net", "a tied GPT", "blocks computed again")},
    "BatchNorm": _job(Normed, drawn(29, 2, 4, 4), optimizer=sgd),
    "frozen stages, and a layer used again": _job(Deep, optimizer=sgd),
    "dicts": _job(Passing, optimizer=sgd),
    "GPT-2": _job(lambda: OfHuggingFace("GPT-2"), _tokens, _next, metrics={}, optimizer=sgd),
    "BERT": _job(lambda: OfHuggingFace("BERT"), _tokens, _next, metrics={}, optimizer=sgd),
}

_singles: dict[tuple[str, int], Run] = {}


def compare(
    kind: str, stages: int, schedule: str, microbatches: int, made: pytest.TempPathFactory
) -> None:
    if kind in ("GPT-2", "BERT"):
        pytest.importorskip("transformers")
    job = SOME[kind].replace(precision="fp64")
    key = kind, microbatches
    if key not in _singles:
        folder = made.mktemp("single")
        _singles[key] = train(
            job,
            strategy="single",
            devices="1xcpu",
            folder=folder,
            quiet=True,
            accumulate=microbatches,
        )
    way = PP(None, microbatches, schedule)
    run = train(job, strategy=way, devices=f"{stages}xcpu", folder=made.mktemp("pp"), quiet=True)
    found = differences(job, run, _singles[key])
    assert found.within(BOUND), str(found)


FAST = [
    ("BatchNorm", 4, "gpipe", 2),
    ("BatchNorm", 3, "1f1b", 3),
    ("frozen stages, and a layer used again", 4, "1f1b", 3),
    ("frozen stages, and a layer used again", 2, "gpipe", 8),
    ("dicts", 4, "1f1b", 8),
    ("dicts", 3, "gpipe", 11),
    ("a U-Net", 4, "1f1b", 3),
    ("control flow", 4, "1f1b", 2),
    ("a tied GPT", 4, "gpipe", 2),
    ("GPT-2", 4, "1f1b", 2),
    ("BERT", 3, "1f1b", 2),
    ("a sequence, clipped", 3, "1f1b", 1),
]


@pytest.mark.sweep
@pytest.mark.parametrize(
    ("kind", "stages", "schedule", "microbatches"),
    [
        pytest.param(
            *cell, marks=pytest.mark.slow if cell[0] in ("GPT-2", "BERT", "a tied GPT") else ()
        )
        for cell in FAST
    ],
)
def test_some_cells(
    kind: str, stages: int, schedule: str, microbatches: int, tmp_path_factory
) -> None:
    compare(kind, stages, schedule, microbatches, tmp_path_factory)


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("stages", [2, 3, 4])
@pytest.mark.parametrize("kind", SOME)
def test_every_cell(kind: str, stages: int, schedule: str, tmp_path_factory) -> None:
    for microbatches in (1, 2, 3, 8, 11):  # the last one is more than the batch has samples
        compare(kind, stages, schedule, microbatches, tmp_path_factory)
