"""Models with a ``train`` of their own, which does more than to set a mode: evaluations call it,
and call it back.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import TensorDataset

import lockstep
from lockstep import Job
from lockstep.errors import StrategyError
from zoo import drawn, labels, plain_sgd, slow

WAYS = {"single": 1, "dp": 2, "ddp": 2, "fsdp": 2, "mp": 2, "pp": 2, "dp 3": 3, "ddp=2xpp=2": 4}
SOME = [way if way in ("single", "dp", "fsdp", "mp") else slow(way) for way in WAYS]


class Adapted(nn.Linear):
    """Low-rank adapters that are merged into the weights in evaluation mode, as common libraries
    have them.
    """

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__(inputs, outputs)
        self.weight.requires_grad_(False)
        self.down, self.up = (
            nn.Parameter(torch.randn(of) * 0.3) for of in ((2, inputs), (outputs, 2))
        )
        self.merged = False

    def train(self, mode: bool = True) -> Adapted:
        super().train(mode)
        if mode is self.merged:
            self.weight.data += (-1 if mode else 1) * (self.up.data @ self.down.data)
            self.merged = not mode
        return self

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out = F.linear(x, self.weight, self.bias)
        return out if self.merged else out + x @ self.down.T @ self.up.T


class Still(nn.Sequential):
    """Keeps its batch norm in evaluation mode."""

    def train(self, mode: bool = True) -> Still:
        super().train(mode)
        self[1].eval()
        return self


def adapted() -> nn.Module:
    return nn.Sequential(Adapted(6, 8), nn.Tanh(), nn.Sequential(Adapted(8, 3), nn.Identity()))


def still() -> nn.Module:
    return nn.Sequential(
        nn.Linear(6, 8), nn.Tanh(), Still(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Linear(8, 3))
    )


DATA = TensorDataset(drawn(21, 6), labels(21, 3))


def in_plain_pytorch(model: nn.Module) -> list[float]:
    """The evaluation losses of three epochs on one device."""
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.SGD(trained, lr=0.1)
    inputs, targets = DATA.tensors[0].double(), DATA.tensors[1]
    found = []
    for _ in range(3):
        model.train()
        for start in range(0, 21, 8):
            optimizer.zero_grad()
            F.cross_entropy(model(inputs[start : start + 8]), targets[start : start + 8]).backward()
            optimizer.step()
        model.eval()
        with torch.no_grad():
            found.append(float(F.cross_entropy(model(inputs), targets)))
    return found


def job_of(model: Any, batch_size: int, **settings: Any) -> Job:
    return Job(
        model=model,
        loss=nn.CrossEntropyLoss(),
        optimizer=plain_sgd,
        train_data=DATA,
        eval_data=DATA,
        batch_size=batch_size,
        epochs=3,
        **settings,
    )


@pytest.mark.sweep
@pytest.mark.parametrize("make", [adapted, still])
@pytest.mark.parametrize("way", SOME)
def test_evaluations_leave_a_model_as_it_was(way: str, make: Any, tmp_path: Path) -> None:
    """Found by trial: adapters were trained in the first epoch only, since later ones went on
    with merged weights.
    """
    its = job_of(make, 8, shuffle=False, precision="fp64")
    one = lockstep.train(its, strategy="single", devices="1xcpu", folder=tmp_path, quiet=True)
    begun = lockstep.train(
        its.replace(epochs=1, optimizer=still_sgd), devices="1xcpu", folder=tmp_path, quiet=True
    )
    model = make().double()
    model.load_state_dict(begun.model().train().state_dict())
    expected = in_plain_pytorch(model)
    several = lockstep.train(
        its, strategy=way.split()[0], devices=f"{WAYS[way]}xcpu", folder=tmp_path, quiet=True
    )
    for run in (one, several):
        assert [record["eval_loss"] for record in run.history] == pytest.approx(expected, rel=1e-10)


class Stopping(nn.Sequential):
    """Keeps its batch norm in evaluation mode from when it is told to."""

    is_still = False

    def train(self, mode: bool = True) -> Stopping:
        super().train(mode)
        if self.is_still:
            self[1].eval()
        return self


class Stops(lockstep.Callback):
    def on_epoch(self, training: Any) -> None:
        training.model.is_still = True


@pytest.mark.parametrize("way", ["single", slow("dp"), slow("ddp"), slow("fsdp")])
def test_what_a_model_is_told_to_keep_in_evaluation_mode_is_so_after_the_next_evaluation(
    way, tmp_path: Path
) -> None:
    """Found by trial: the batch norm was put in training mode again, which a call of ``train``
    had just frozen.
    """
    its = job_of(
        lambda: Stopping(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Linear(8, 3)),
        7,
        callbacks=[Stops()],
    )
    devices = "1xcpu" if way == "single" else "2xcpu"
    run = lockstep.train(its, strategy=way, devices=devices, folder=tmp_path, quiet=True)
    assert int(run.model().state_dict()["1.num_batches_tracked"]) == 3  # those of one epoch


def still_sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD([p for _, p in parameters], lr=0.0)


def test_a_map_over_devices_leaves_the_weights_alone() -> None:
    torch.manual_seed(0)
    model = adapted()
    inputs = [drawn(1, 6)[0] for _ in range(12)]
    before = {name: value.clone() for name, value in model.state_dict().items()}
    with torch.no_grad():
        expected = [model(x[None])[0] for x in inputs]
    found = list(lockstep.map(model, inputs, devices="2xcpu", batch_size=2))
    assert all(torch.allclose(a, b, atol=1e-6) for a, b in zip(found, expected, strict=True))
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert model.training


class Halved(nn.Linear):
    """Writes its weight in evaluation mode."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not self.training:
            self.weight.data.mul_(0.5)
        return super().forward(x)


def test_the_trial_evaluation_leaves_weights_that_the_model_writes_in_it(tmp_path: Path) -> None:
    """Replicas on threads, which share it, may not."""
    whole = Job(
        model=lambda: nn.Sequential(nn.Linear(6, 8), Halved(8, 3)),
        loss=nn.CrossEntropyLoss(),
        optimizer=plain_sgd,
        train_data=DATA,
        eval_data=DATA,
        batch_size=21,
        precision="fp64",
        epochs=1,
    )
    run = lockstep.train(whole, strategy="single", devices="1xcpu", folder=tmp_path, quiet=True)
    without = lockstep.train(
        whole.replace(eval_data=None), strategy="single", folder=tmp_path, quiet=True
    )
    weights, expected = run.model().state_dict(), without.model().state_dict()
    assert torch.equal(weights["1.weight"], expected["1.weight"] * 0.5), (
        "in the evaluation of the epoch, and no other"
    )
    assert torch.equal(weights["0.weight"], expected["0.weight"])
    with pytest.raises(StrategyError, match=r'writes its parameter "1.weight" in forward'):
        lockstep.train(whole, strategy="dp", devices="2xcpu", folder=tmp_path, quiet=True)


class Scripted(nn.Module):
    """Has a frozen layer of TorchScript."""

    def __init__(self) -> None:
        super().__init__()
        self.teacher = torch.jit.script(nn.Linear(6, 8).double().requires_grad_(False))
        self.last = nn.Linear(8, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.last(torch.tanh(self.teacher(x)))
        return out


@pytest.mark.filterwarnings("ignore:.torch.jit")
@pytest.mark.parametrize("way", ["single", slow("ddp")])
def test_a_model_may_have_a_layer_of_torchscript(way: str, tmp_path: Path) -> None:
    """Found by trial: the trial evaluation ended in an AttributeError."""
    job = Job(
        model=Scripted,
        loss=nn.CrossEntropyLoss(),
        optimizer=plain_sgd,
        train_data=DATA,
        eval_data=DATA,
        batch_size=7,
        precision="fp64",
        epochs=2,
    )
    run = lockstep.train(job, strategy=way, devices=f"{WAYS[way]}xcpu", folder=tmp_path, quiet=True)
    assert run.metrics["loss"] < 2
