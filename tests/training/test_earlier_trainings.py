"""Several trainings in one process: each begins as if it were the first, or a line says that it doesn't."""

from __future__ import annotations

import functools
import sys
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from torch import nn

import lockstep
from lockstep import Callback, Job, predict, train
from lockstep.callbacks import TrainingContext
from lockstep.errors import JobError
from lockstep.verify import same_bits
from zoo import ZOO, drawn, labels, plain_sgd


def trained(
    job: Job, folder: Path, capfd: Any, way: tuple[str, str] = ("single", "1xcpu"), **how: Any
) -> tuple[Any, str]:
    """A run, and what is said in its beginning of earlier ones."""
    run = train(job, strategy=way[0], devices=way[1], folder=folder, **how)
    return run, "\n".join(line for line in capfd.readouterr().out.splitlines() if line.startswith("note: "))


class OfParameter(nn.Module):
    """Has a parameter that it is given."""

    def __init__(self, weight: nn.Parameter) -> None:
        super().__init__()
        self.weight = weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.linear(x, self.weight)


@functools.cache
def kept_layer() -> nn.Module:
    return nn.Linear(6, 3)


@functools.lru_cache
def kept_vectors() -> torch.Tensor:
    return drawn(20, 4)


@pytest.mark.parametrize("given", ["the model", "a part", "a dict", "a parameter", "a kept one"])
def test_a_module_that_is_not_built_anew_is_said_to_be_trained_further(given: str, tmp_path: Path, capfd) -> None:
    """Found by trial: the second of two trainings began with the weights of the first, without a line."""
    net = nn.Linear(6, 3)
    nets = {"net": net}
    makes = {"the model": lambda: net, "a part": lambda: nn.Sequential(net, nn.Tanh()), "a dict": lambda: nets["net"]}
    weight = nn.Parameter(drawn(3, 6))
    makes |= {"a parameter": lambda: OfParameter(weight), "a kept one": kept_layer}
    job = ZOO["mlp"].replace(model=makes[given], metrics={}, eval_data=None, epochs=1)
    first, said = trained(job, tmp_path, capfd)
    assert "used before" not in said
    ends = first.model()
    second, said = trained(job, tmp_path, capfd)
    assert "model: its function gives a module or parameter that this process has used before" in said
    assert not same_bits(ends, second.model()), "the model of a run is its own"
    assert same_bits(ends, first.model())
    predict(first, drawn(4, 6), quiet=True)
    _, said = trained(job, tmp_path, capfd, ("ddp", "2xcpu"))
    assert "used before" in said or given == "a kept one"  # which ranks keep anew
    _, said = trained(job.replace(epochs=2), tmp_path, capfd, resume=second.folder)
    assert "used before" not in said


FILE = """
import lockstep, torch, own_backbone
from torch import nn
from torch.utils.data import TensorDataset

def job():
    return lockstep.Job(
        model=lambda: nn.Sequential(own_backbone.NET, nn.Linear(8, 3)), loss=nn.CrossEntropyLoss(), epochs=1,
        optimizer=lambda p: torch.optim.SGD(p, lr=0.1), batch_size=8,
        train_data=TensorDataset(torch.randn(32, 6), torch.randint(3, (32,))))
"""


def test_so_is_one_that_a_job_file_imports(tmp_path: Path, capfd, monkeypatch: pytest.MonkeyPatch) -> None:
    """Found by trial: a file is loaded anew in each training, and what it imports isn't."""
    (tmp_path / "own_backbone.py").write_text("from torch import nn\nNET = nn.Linear(6, 8)\n")
    (tmp_path / "own.py").write_text(FILE)
    monkeypatch.chdir(tmp_path)
    for number in range(2):
        train("own.py", strategy="single", devices=1, folder=tmp_path)
        assert ("used before" in capfd.readouterr().out) is bool(number)
    sys.modules.pop("own_backbone")


def test_a_frozen_module_may_be_the_same_in_each_training(tmp_path: Path, capfd) -> None:
    backbone = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8)).eval().requires_grad_(False)
    job = ZOO["mlp"].replace(model=lambda: nn.Sequential(backbone, nn.Linear(8, 3)), metrics={}, epochs=1)
    for _ in range(2):
        assert "used before" not in trained(job, tmp_path, capfd)[1]


@pytest.mark.parametrize("kind", ["a tensor", "an array", "rows of an array", "two of one", "a kept one"])
def test_a_tensor_from_which_a_layer_is_made_stays_as_it_was(kind: str, tmp_path: Path, capfd) -> None:
    """Found by trial: pretrained vectors were trained in place, and the next training began with those."""
    vectors: Any = {
        "an array": drawn(20, 4).numpy(),
        "rows of an array": drawn(23, 4).numpy()[3:],
        "a kept one": kept_vectors(),
    }.get(kind, drawn(20, 4))
    before = torch.as_tensor(vectors).clone()

    class Bag(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            weights = kept_vectors() if kind == "a kept one" else torch.as_tensor(vectors)
            self.words = nn.Embedding.from_pretrained(weights, freeze=False)
            self.last = nn.Linear(4, 20)
            if kind == "two of one":
                self.last.weight.data = self.words.weight.data

        def forward(self, words: torch.Tensor) -> torch.Tensor:
            out: torch.Tensor = self.last(self.words(words).mean(1))
            return out

    data = torch.utils.data.TensorDataset(labels(64, 20).view(32, 2), labels(32, 20))
    job = Job(model=Bag, loss=nn.CrossEntropyLoss(), optimizer=plain_sgd, train_data=data, batch_size=8, epochs=1)
    ends = [trained(job, tmp_path, capfd)[0].model() for _ in range(2)]
    assert same_bits(*ends)
    assert torch.equal(torch.as_tensor(vectors), before)
    assert torch.equal(ends[0].words.weight, ends[0].last.weight) == (kind == "two of one")


@pytest.mark.parametrize("kind", ["frozen vectors", "statistics"])
def test_weights_that_are_loaded_are_not_written_to_tensors_of_before(kind: str, tmp_path: Path) -> None:
    """Found by trial: a run's model, an evaluation and a prediction wrote its weights to them."""
    given = drawn(20, 8) if kind == "frozen vectors" else torch.zeros(8)

    def model() -> nn.Module:
        norm = nn.BatchNorm1d(8)
        if kind == "statistics":
            norm.running_mean = given
            return nn.Sequential(nn.Linear(2, 8), norm, nn.Linear(8, 3))
        return nn.Sequential(nn.EmbeddingBag.from_pretrained(given), norm, nn.Linear(8, 3))

    words = labels(32, 20).view(16, 2)
    data = torch.utils.data.TensorDataset(words if kind == "frozen vectors" else words.float(), labels(16, 3))
    job = Job(model=model, loss=nn.CrossEntropyLoss(), optimizer=plain_sgd, train_data=data, batch_size=8, epochs=1)
    run = train(job.replace(eval_data=data), strategy="ddp", devices="2xcpu", folder=tmp_path, quiet=True)
    given += 1
    before = given.clone()
    run.model()
    lockstep.evaluate(run, devices=1)
    predict(run, data.tensors[0], devices=1, quiet=True)
    assert torch.equal(given, before)
    if kind == "frozen vectors":
        train(job, strategy="single", devices=1, folder=tmp_path, quiet=True, init=str(run.folder))
        assert torch.equal(given, before)


def test_ranks_train_no_file_of_weights_that_they_have_mapped(tmp_path: Path) -> None:
    """Found by trial: all ranks wrote to the same memory, so that weights were 3 % off without a line."""
    numpy.save(tmp_path / "vectors.npy", before := drawn(20, 6).numpy())

    def model() -> nn.Module:
        vectors = torch.from_numpy(numpy.load(tmp_path / "vectors.npy", mmap_mode="r+"))
        return nn.Sequential(nn.Embedding.from_pretrained(vectors, freeze=False), nn.Flatten(), nn.Linear(12, 3))

    data = torch.utils.data.TensorDataset(labels(32, 20).view(16, 2), labels(16, 3))
    job = Job(model=model, loss=nn.CrossEntropyLoss(), optimizer=plain_sgd, train_data=data, batch_size=8, epochs=2)
    runs = [
        train(job, strategy=way, devices=2 if way == "ddp" else 1, folder=tmp_path, quiet=True)
        for way in ("single", "ddp")
    ]
    expected, found = (nn.utils.parameters_to_vector(run.model().parameters()) for run in runs)
    assert (found - expected).abs().max() < 1e-6
    assert (numpy.load(tmp_path / "vectors.npy") == before).all()


class Shifting:
    """An order that a callback moves on."""

    def __init__(self) -> None:
        self.shift = 0

    def __call__(self, epoch: int) -> torch.Tensor:
        return torch.arange(64).roll(self.shift)


class Harder(torch.utils.data.TensorDataset):
    """Samples that a callback makes harder."""

    level = 0.0

    def __getitem__(self, index: int) -> tuple[torch.Tensor, ...]:
        x, y = super().__getitem__(index)
        return x + self.level, y


class Raises(Callback):
    def __init__(self, of: Any, name: str) -> None:
        self.of, self.name = of, name

    def on_epoch(self, training: TrainingContext) -> None:
        setattr(self.of, self.name, getattr(self.of, self.name) + 1)


@pytest.mark.parametrize("of", ["an order", "a dataset"])
def test_what_a_training_left_in_other_objects_is_said(of: str, tmp_path: Path, capfd) -> None:
    data = Harder(drawn(64, 6), labels(64, 3))
    job = ZOO["mlp"].replace(train_data=data, eval_data=None, metrics={}, epochs=1, loader_workers=0)
    if of == "an order":
        job = job.replace(order=(order := Shifting()), callbacks=(Raises(order, "shift"),))
    else:
        job = job.replace(callbacks=(Raises(data, "level"),))
    says = '"Shifting.shift" has the value' if of == "an order" else '"Harder.level" has the value'
    assert says not in trained(job, tmp_path, capfd)[1]
    assert says in trained(job, tmp_path, capfd)[1]


class Annealed(nn.Module):
    """A loss with a weight that a callback raises."""

    def __init__(self) -> None:
        super().__init__()
        self.beta = 0.0

    def forward(self, outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return nn.functional.cross_entropy(outputs, targets) + self.beta * outputs.square().mean()


SETTINGS = {"beta": 0.0}


def of_settings(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return nn.functional.cross_entropy(outputs, targets) + SETTINGS["beta"] * outputs.square().mean()


@pytest.mark.parametrize("where", ["the loss", "a global"])
def test_what_a_training_left_in_the_loss_is_said(where: str, tmp_path: Path, capfd) -> None:
    loss: Any = Annealed() if where == "the loss" else of_settings
    SETTINGS["beta"] = 0.0

    def anneal(event: Any) -> None:
        if event.kind == "epoch":
            if where == "the loss":
                loss.beta += 0.5
            else:
                SETTINGS["beta"] += 0.5

    job = ZOO["mlp"].replace(loss=loss, on_event=(anneal,), metrics={}, eval_data=None, epochs=1)
    says = '"Annealed.beta" has the value' if where == "the loss" else "SETTINGS"
    assert says not in trained(job, tmp_path, capfd)[1]
    assert says in trained(job, tmp_path, capfd)[1]
    SETTINGS["beta"] = 0.0
    job = job.replace(loss=Annealed() if where == "the loss" else of_settings)
    assert says not in trained(job, tmp_path, capfd)[1]


def test_verify_refuses_a_model_that_is_not_built_anew() -> None:
    """Found by trial: it was said to draw unseeded numbers."""
    net = nn.Linear(6, 3)
    with pytest.raises(JobError, match="its function gives the same module each time, and verify trains several"):
        lockstep.verify(ZOO["mlp"].replace(model=lambda: net), strategy="dp", devices="2xcpu")
