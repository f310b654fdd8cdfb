"""What a model does in forward that local batches can't do as one device would is refused when it
begins, too.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

from lockstep import Callback, train
from lockstep.errors import StrategyError

from harness import parity  # isort: skip
from zoo import ZOO, labels  # isort: skip


class Beginning(nn.Linear):
    """Centres its batch from the third forward in training on."""

    def __init__(self) -> None:
        super().__init__(6, 3)
        self.register_buffer("forwards", torch.zeros((), dtype=torch.int64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.forwards += self.training
        return super().forward(x - x.mean(dim=0) if self.forwards > 2 else x)


class Gated(nn.Linear):
    """Centres its batch by a gate, which is closed until the first update has opened it."""

    def __init__(self) -> None:
        super().__init__(6, 3)
        self.gate = nn.Parameter(torch.zeros(6))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x - self.gate * x.mean(dim=0))


class BuffersLate(nn.Linear):
    """Keeps a mean of its inputs from the second forward in training on, and subtracts it."""

    def __init__(self) -> None:
        super().__init__(6, 3)
        self.register_buffer("forwards", torch.zeros((), dtype=torch.int64))
        self.register_buffer("mean", torch.zeros(6))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.forwards += self.training
        if self.training and self.forwards > 1:
            self.mean.lerp_(x.detach().mean(dim=0), 0.1)
        return super().forward(x - self.mean)


class Averaged(torch.autograd.Function):
    """Gives all samples the mean of their gradients."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        return gradient.mean(dim=0, keepdim=True).expand_as(gradient)


class Averaging(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(6, 5), nn.Linear(5, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(Averaged.apply(torch.tanh(self.first(x))))


class Freezing(nn.Module):
    """Freezes a layer in its first forward of a training."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(6, 5), nn.Linear(5, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = torch.tanh(self.first(x))
        if self.training:
            self.first.requires_grad_(False)
        return self.second(hidden)


class Dropping(Gated):
    """As Gated, behind a function that drops."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(F.dropout(x, 0.1, self.training))


WAYS = [("dp", "2xcpu", 1), ("ddp", "2xcpu", 1), ("single", "1xcpu", 2), ("pp", "2xcpu", 1)]
REFUSED = "results depend on where a batch is cut: in update [124], "


@pytest.mark.sweep
@pytest.mark.parametrize(
    "model",
    [Beginning, Gated, Dropping, BuffersLate, Averaging],
    ids=lambda model: model.__name__,
)
@pytest.mark.parametrize(("way", "devices", "accumulate"), WAYS, ids=[way for way, *_ in WAYS])
def test_it_is_refused(model: Any, way: str, devices: str, accumulate: int, tmp_path: Path) -> None:
    job = dataclasses.replace(
        ZOO["mlp"], model=lambda: nn.Sequential(nn.Linear(6, 6), model()), accumulate=accumulate
    )
    with pytest.raises(StrategyError, match=REFUSED):
        train(job, strategy=way, devices=devices, folder=tmp_path, quiet=True)


@pytest.mark.parametrize(("way", "devices", "accumulate"), [("dp", 2, 1), ("single", 1, 2)])
def test_a_layer_that_its_first_forward_freezes_is_frozen_as_on_one_device(
    way: str, devices: int, accumulate: int
) -> None:
    job = ZOO["mlp"].replace(model=Freezing, epochs=1, accumulate=accumulate)
    found = parity(job, way, f"{devices}xcpu", against_settings={"accumulate": 1})
    assert found.worst < 1e-10


@pytest.mark.parametrize("way", ["dp", "ddp"])
def test_compiled_models_are_checked_too(way: str, tmp_path: Path, capsys: Any) -> None:
    """Found by reading: they were checked in the first update only."""
    job = dataclasses.replace(ZOO["mlp"], model=Gated, compile="aot_eager")
    where: dict[str, Any] = {"strategy": way, "devices": "2xcpu", "folder": tmp_path}
    with pytest.raises(StrategyError, match=REFUSED):
        train(job, **where, quiet=True)
    train(dataclasses.replace(job, model=lambda: nn.Linear(6, 3)), **where)
    assert "note: " not in capsys.readouterr().out


class Counting(nn.Linear):
    """As ``Beginning``, with a plain attribute."""

    forwards = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.forwards += self.training
        return super().forward(x - x.mean(dim=0) if self.forwards > 2 else x)


@pytest.mark.parametrize("model", [Gated, lambda: Counting(6, 3)], ids=["a gate", "an attribute"])
def test_shards_are_checked_too(model: Any, tmp_path: Path) -> None:
    """Found by trial: only the first update was looked at, without a line; later, with
    attributes of before it.
    """
    job = dataclasses.replace(
        ZOO["mlp"], model=lambda: nn.Sequential(nn.Linear(6, 6), model()), eval_data=None
    )
    with pytest.raises(StrategyError, match=REFUSED):
        train(job, strategy="fsdp", devices="2xcpu", folder=tmp_path, quiet=True)


class InTheFifth(Beginning):
    """Centres its batch from the fifth forward in training on."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.forwards += self.training
        return nn.Linear.forward(self, x - x.mean(dim=0) if self.forwards > 4 else x)


def test_check_every_finds_what_begins_in_between(tmp_path: Path) -> None:
    job = dataclasses.replace(ZOO["mlp"], model=InTheFifth, epochs=None, steps=5, check_every=5)
    with pytest.raises(StrategyError, match="in update 5, "):
        train(job, strategy="ddp", devices="2xcpu", folder=tmp_path, quiet=True)


def test_where_a_batch_of_one_sample_was_to_be_checked_the_next_one_is(tmp_path: Path) -> None:
    """Found by trial: with four batches an epoch, the last of one sample, nothing was seen but
    in updates 1 and 2.
    """
    data = TensorDataset(torch.randn(25, 6), labels(25, 3))
    job = dataclasses.replace(
        ZOO["mlp"], model=InTheFifth, train_data=data, batch_size=8, epochs=2, accumulate=2
    )
    with pytest.raises(StrategyError, match="in update 5, "):
        train(job, devices="1xcpu", folder=tmp_path, quiet=True)


class Normalized(nn.Module):
    """With a batch norm that stays in evaluation mode while it is frozen, and dropout of
    nothing.
    """

    def __init__(self) -> None:
        super().__init__()
        self.frozen = True
        self.norm, self.dropout, self.head = nn.BatchNorm1d(6), nn.Dropout(0.0), nn.Linear(6, 3)

    def train(self, mode: bool = True) -> Normalized:
        super().train(mode)
        self.norm.train(mode and not self.frozen)
        return self

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.dropout(self.norm(x)))


class Setting(Callback):
    """Sets something in the second epoch."""

    def __init__(self, what: str) -> None:
        self.what = what

    def on_epoch(self, context: Any) -> None:
        if context.epoch == 2:
            for module in context.model.modules():
                if self.what == "norm" and isinstance(module, Normalized):
                    module.frozen = False
                    module.train()
                if self.what == "dropout" and isinstance(module, nn.Dropout):
                    module.p = 0.5


@pytest.mark.sweep
@pytest.mark.parametrize(
    ("what", "said"),
    [("norm", "BatchNorm normalizes over each replica's local batch"), ("dropout", "dropout ")],
)
@pytest.mark.parametrize("way", ["dp", "ddp"])
def test_what_a_callback_sets_is_said(
    what: str, said: str, way: str, tmp_path: Path, capfd: Any
) -> None:
    """Found by trial: layers were asked before the first update only."""
    job = dataclasses.replace(
        ZOO["mlp"], model=Normalized, eval_data=None, epochs=4, callbacks=[Setting(what)]
    )
    train(job, strategy=way, devices="2xcpu", folder=tmp_path)
    assert capfd.readouterr().out.count(f"note: {said}") == 1


class OwnNorm(nn.modules.batchnorm._NormBase):
    """Normalizes by itself what PyTorch's class keeps."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        mean, var = (
            (x.mean(0), x.var(0)) if self.training else (self.running_mean, self.running_var)
        )
        return (x - mean) / (var + self.eps).sqrt()


def test_a_norm_of_ones_own_is_checked(tmp_path: Path) -> None:
    job = dataclasses.replace(ZOO["mlp"], model=lambda: nn.Sequential(OwnNorm(6), nn.Linear(6, 3)))
    with pytest.raises(StrategyError, match=r'samples influence one another in "0" \(OwnNorm\)'):
        train(job, strategy="dp", devices="2xcpu", folder=tmp_path, quiet=True)


class Plain(nn.Module):
    """Attention, an embedding, dropout by module and by function, batch norm, a frozen and an
    unused layer.
    """

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(11, 8)
        self.layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.1, batch_first=True)
        self.norm = nn.BatchNorm1d(8)
        self.frozen, self.unused = nn.Linear(8, 8).requires_grad_(False), nn.Linear(2, 2)
        self.out = nn.Linear(8, 3)

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        hidden = self.frozen(self.layer(self.words(words)).mean(dim=1))
        return self.out(self.norm(F.dropout(hidden, 0.1, self.training)))


@pytest.mark.parametrize("precision", ["fp64", None, "bf16"])
def test_nothing_else_is_said_of_a_plain_model(precision: Any, tmp_path: Path, capsys: Any) -> None:
    data = TensorDataset(
        torch.randint(11, (40, 6), generator=torch.Generator().manual_seed(3)), labels(40, 3)
    )
    job = dataclasses.replace(
        ZOO["mlp"], model=Plain, train_data=data, eval_data=data, batch_size=8, precision=precision
    )
    train(job, strategy="single", devices="1xcpu", folder=tmp_path, accumulate=2)
    notes = [line for line in capsys.readouterr().out.splitlines() if line.startswith("note: ")]
    assert [note.split()[1] for note in notes] == ["BatchNorm", "dropout"], (
        "which accumulate makes differ"
    )
