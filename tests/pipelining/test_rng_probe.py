"""Pipelines of models that draw nothing go without random streams; one that begins to draw is
right all the same.
"""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint
from torch.utils.data import TensorDataset

import lockstep
from lockstep import Job, train
from lockstep.strategies.pp import PP
from lockstep.threads.random_streams import source

from harness import differences  # isort: skip
from planted import NoisyGradient  # isort: skip
from zoo import drawn, labels, sgd  # isort: skip

SPLIT = {"a": 0, "": 1}
streamed: list[bool] = []
"""Of each forward in training: whether it had a random stream."""


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.norm, self.b = nn.Linear(6, 6), nn.Identity(), nn.Linear(6, 3)

    def noise(self, x: torch.Tensor) -> torch.Tensor:
        return x

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.training:
            streamed.append(source() is not None)
        y = self.norm(torch.tanh(self.a(x)))
        return self.b(self.noise(y) if self.training and bool(x.max() > 50) else y)


class Beginning(Model):
    def noise(self, x: torch.Tensor) -> torch.Tensor:
        return F.dropout(x, 0.5)


class Always(Beginning):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(F.dropout(x, 0.1, self.training))


class Checkpointed(Beginning):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return checkpoint(super().forward, x, use_reentrant=False)  # type: ignore[return-value]


class Normalized(Beginning):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(6)


class Counting(Beginning):
    """Its buffer is written first in the update in which it draws first."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("drawn", torch.zeros(()))

    def noise(self, x: torch.Tensor) -> torch.Tensor:
        self.drawn += 1
        return super().noise(x)


class Noting(Beginning):
    """It remembers something first in the update in which it draws first."""

    def noise(self, x: torch.Tensor) -> torch.Tensor:
        self.has_drawn = True
        return super().noise(x)


def _job(model: type[nn.Module]) -> Job:
    """Four updates; in the third the last two of three micro-batches hold a sample that draws."""
    inputs = drawn(24, 6)
    inputs[15, 0] = inputs[17, 0] = 99.0
    return Job(
        model=model,
        loss=nn.CrossEntropyLoss(),
        optimizer=sgd,
        train_data=TensorDataset(inputs, labels(24, 3)),
        batch_size=6,
        epochs=2,
        shuffle=False,
        precision="fp64",
    )


def _worst(model: type[nn.Module], tmp_path: Any) -> float:
    job = _job(model)
    one = train(job, strategy="single", devices="1xcpu", folder=tmp_path, quiet=True, accumulate=3)
    streamed.clear()
    run = train(job, strategy=PP(SPLIT, 3), devices="2xcpu", folder=tmp_path)
    return differences(job, run, one).worst


@pytest.mark.sweep
@pytest.mark.parametrize(
    ("model", "with_streams"),
    [
        (Model, [0, 0, 0, 0, 0, 0, 0, 0]),
        # The third update is computed twice.
        (Beginning, [0, 0, 0, 3, 3, 3, 3, 3, 3]),
        (Always, [0, 3, 3, 3, 3, 3, 3, 3]),
        (Normalized, [0, 3, 3, 3, 3, 3, 3, 3]),
    ],
)
def test_streams_are_there_for_models_that_draw(
    model: type[nn.Module], with_streams: list[int], tmp_path
) -> None:
    assert _worst(model, tmp_path) < 1e-10
    assert [sum(streamed[i : i + 3]) for i in range(0, len(streamed), 3)] == with_streams


def test_a_model_with_checkpoints_keeps_its_streams(tmp_path) -> None:
    """Each sets PyTorch's generator back, and another thread's draw with it."""
    assert _worst(Checkpointed, tmp_path) < 1e-10
    assert all(streamed[3 * 2 :])


@pytest.mark.parametrize("model", [Counting, Noting])
def test_draws_that_begin_with_a_write_to_the_model_are_said(
    model: type[nn.Module], tmp_path, capsys
) -> None:
    train(_job(model), strategy=PP(SPLIT, 3), devices="2xcpu", folder=tmp_path)
    assert "at step 3 the model began to draw random numbers and to write buffers" in " ".join(
        capsys.readouterr().out.split()
    )


class ShakenAlways(Model):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return NoisyGradient.apply(super().forward(NoisyGradient.apply(self.a(x))))


class ShakenAndDropped(ShakenAlways):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(F.dropout(x, 0.1, self.training))


class ShakenLater(Model):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (
            NoisyGradient.apply(super().forward(NoisyGradient.apply(x)))
            if bool(x.max() > 50)
            else super().forward(x)
        )

    def noise(self, x: torch.Tensor) -> torch.Tensor:
        return NoisyGradient.apply(x)


class Elsewhere(Model):
    """Draws from Python's generator, once that begins."""

    def noise(self, x: torch.Tensor) -> torch.Tensor:
        return x * random.random()


@pytest.mark.sweep
@pytest.mark.parametrize("model", [ShakenAlways, ShakenAndDropped, ShakenLater, Elsewhere])
def test_what_no_stream_gives_is_drawn_in_turn(model: type[nn.Module], tmp_path, capsys) -> None:
    assert _worst(model, tmp_path) < 1e-10
    assert "in an order that would be left to chance" in " ".join(capsys.readouterr().out.split())


class Masked(Model):
    """The same masks each time, from a seed of its own."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for seed in (5, 6):
            with torch.random.fork_rng([]):
                torch.manual_seed(seed)
                x = x * torch.rand(6).to(x)
            x = self.a(F.dropout(x, 0.1, self.training))
        return self.b(x)


def test_a_model_that_seeds_in_forward_is_computed_in_turn(tmp_path, capsys) -> None:
    assert _worst(Masked, tmp_path) < 1e-10
    assert "forward seeds PyTorch's generator" in " ".join(capsys.readouterr().out.split())


class Sampling(Model):
    """Draws in evaluation, as an ensemble by dropout does."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.b(F.dropout(torch.tanh(self.a(F.dropout(x, 0.3))), 0.3))


@pytest.mark.parametrize("way", ["mp", PP(SPLIT, 3)], ids=str)
def test_what_a_model_draws_in_evaluation_is_what_one_device_draws(way: Any, tmp_path) -> None:
    job = _job(Sampling).replace(
        eval_data=TensorDataset(drawn(17, 6, seed=9), labels(17, 3)), eval_batch_size=4
    )
    parts = 1 if way == "mp" else 3
    one = train(
        job, strategy="single", devices="1xcpu", folder=tmp_path, quiet=True, accumulate=parts
    )
    run = train(job, strategy=way, devices="2xcpu", folder=tmp_path, quiet=True)
    for ours, its in zip(run.history, one.history, strict=True):
        assert ours["eval_loss"] == pytest.approx(its["eval_loss"], rel=1e-12)
    assert one.history[0]["eval_loss"] != one.history[1]["eval_loss"]
    again = [
        lockstep.evaluate(run, strategy=s, devices=d)
        for s, d in (("single", "1xcpu"), (way, "2xcpu"))
    ]
    assert again[0] == pytest.approx(again[1], rel=1e-12)
    assert again[0]["loss"] == pytest.approx(one.history[-1]["eval_loss"], rel=1e-12)
