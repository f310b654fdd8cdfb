"""Pipelines of models that draw nothing go without random streams; others have one for each
micro-batch.
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
from batch_dependent_models import NoisyGradient  # isort: skip
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


@pytest.mark.parametrize(
    ("model", "with_streams"),
    [(Model, [0, 0, 0, 0, 0, 0, 0, 0]), (Always, [0, 3, 3, 3, 3, 3, 3, 3])],
)
def test_streams_are_there_for_models_that_draw(
    model: type[nn.Module], with_streams: list[int], tmp_path
) -> None:
    assert _worst(model, tmp_path) < 1e-10
    assert _forwards_with_streams() == with_streams


@pytest.mark.parametrize("model", [Beginning, Normalized])
def test_a_model_that_begins_to_draw_is_logged_and_has_streams_from_the_next_step_on(
    model: type[nn.Module], tmp_path, capsys
) -> None:
    streamed.clear()
    train(_job(model), strategy=PP(SPLIT, 3), devices="2xcpu", folder=tmp_path)
    assert _forwards_with_streams() == [0, 0, 0, 3, 3, 3, 3, 3]
    said = " ".join(capsys.readouterr().out.split())
    assert said.count("at step 3 the model began to draw random numbers") == 1


def _forwards_with_streams() -> list[int]:
    """How many of each update's three."""
    return [sum(streamed[i : i + 3]) for i in range(0, len(streamed), 3)]


def test_a_model_with_checkpoints_keeps_its_streams(tmp_path) -> None:
    """Each sets PyTorch's generator back, and another thread's draw with it."""
    assert _worst(Checkpointed, tmp_path) < 1e-10
    assert all(streamed[3 * 2 :])


class ShakenAlways(Model):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return NoisyGradient.apply(super().forward(NoisyGradient.apply(self.a(x))))


class ShakenAndDropped(ShakenAlways):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(F.dropout(x, 0.1, self.training))


class Elsewhere(Model):
    """Draws from Python's generator."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x * random.random() if self.training else x)


@pytest.mark.sweep
@pytest.mark.parametrize(
    ("model", "says"),
    [
        (ShakenAlways, "backward draws from PyTorch's generator"),
        (ShakenAndDropped, "backward draws from PyTorch's generator"),
        (Elsewhere, "forward draws from Python's or NumPy's generator"),
    ],
)
def test_what_no_stream_gives_is_drawn_in_turn(
    model: type[nn.Module], says: str, tmp_path, capsys
) -> None:
    assert _worst(model, tmp_path) < 1e-10
    said = " ".join(capsys.readouterr().out.split())
    assert f"{says}, which all micro-batches share: micro-batches run one after another" in said


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
