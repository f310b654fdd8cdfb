"""Pipelines of models that remember deeper than in an attribute: their micro-batches go one
after the other.
"""

from __future__ import annotations

import random

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

from lockstep import Job, train
from lockstep.pipelining.state_probe import prints
from lockstep.strategies.pp import PP

from harness import differences  # isort: skip
from zoo import drawn, labels, sgd  # isort: skip


class Two(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(6, 6), nn.Linear(6, 3)

    def between(self, x: torch.Tensor) -> torch.Tensor:
        return x

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.between(self.b(self.between(torch.tanh(self.a(x)))))


class OwnGenerator(Two):
    def __init__(self) -> None:
        super().__init__()
        self.generators = [torch.Generator().manual_seed(3)]

    def between(self, x: torch.Tensor) -> torch.Tensor:
        return (
            x * (1 + 0.1 * torch.rand(1, generator=self.generators[0]).to(x))
            if self.training
            else x
        )


class OwnRandom(Two):
    def __init__(self) -> None:
        super().__init__()
        self.random = random.Random(3)

    def between(self, x: torch.Tensor) -> torch.Tensor:
        return x * (1 + self.random.random()) if self.training else x


class Memory:
    def __init__(self) -> None:
        self.mean = 0.0


class OwnObject(Two):
    def __init__(self) -> None:
        super().__init__()
        self.memory = Memory()

    def between(self, x: torch.Tensor) -> torch.Tensor:
        if not self.training:
            return x
        x = x + 0.5 * self.memory.mean
        self.memory.mean = float(x.detach().mean())
        return x


class DictInDict(Two):
    def __init__(self) -> None:
        super().__init__()
        self.memory: dict[str, dict[str, float]] = {"of": {"mean": 0.0}}

    def between(self, x: torch.Tensor) -> torch.Tensor:
        if not self.training:
            return x
        x = x + 0.5 * self.memory["of"]["mean"]
        self.memory["of"]["mean"] = float(x.detach().mean())
        return x


class Configured(Two):
    """An object that nobody changes, and one that can't be pickled."""

    def __init__(self) -> None:
        super().__init__()
        self.memory, self.activation = Memory(), lambda x: x

    def between(self, x: torch.Tensor) -> torch.Tensor:
        return self.activation(x) + self.memory.mean


def _trained(model: type[nn.Module], tmp_path) -> float:
    job = Job(
        model=model,
        loss=nn.CrossEntropyLoss(),
        optimizer=sgd,
        train_data=TensorDataset(drawn(20, 6), labels(20, 3)),
        batch_size=6,
        epochs=2,
        precision="fp64",
    )
    one = train(job, strategy="single", devices="1xcpu", folder=tmp_path, quiet=True, accumulate=3)
    return differences(
        job, train(job, strategy=PP({"a": 0, "": 1}, 3), devices="2xcpu", folder=tmp_path), one
    ).worst


@pytest.mark.parametrize("model", [OwnGenerator, OwnRandom, OwnObject, DictInDict])
def test_what_is_remembered_in_an_object_keeps_the_order_of_one_device(
    model, tmp_path, capsys
) -> None:
    assert _trained(model, tmp_path) < 1e-10
    assert "holds, which is one for all micro-batches" in " ".join(capsys.readouterr().out.split())


def test_objects_that_nobody_changes_cost_no_overlap(tmp_path, capsys) -> None:
    assert _trained(Configured, tmp_path) < 1e-10
    assert "nothing overlaps" not in capsys.readouterr().out


def test_only_what_can_not_be_compared_as_it_is_has_a_print() -> None:
    model = Configured()
    model.sizes, model.cache, model.last = [1, 2], {"x": torch.zeros(2)}, torch.zeros(3)
    assert list(prints({module: name for name, module in model.named_modules()})) == ["memory"]
