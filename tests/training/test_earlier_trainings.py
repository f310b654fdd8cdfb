"""Several trainings in one process: each begins as if it were the first, or a line says that it doesn't."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from torch import nn

import lockstep
from lockstep import Job, predict, train
from lockstep.errors import JobError
from lockstep.verify import same_bits
from zoo import ZOO, drawn, labels, plain_sgd


def trained(
    job: Job, folder: Path, capfd: Any, way: tuple[str, str] = ("single", "1xcpu"), **how: Any
) -> tuple[Any, str]:
    """A run, and what is said in its beginning of earlier ones."""
    run = train(job, strategy=way[0], devices=way[1], folder=folder, **how)
    return run, "\n".join(line for line in capfd.readouterr().out.splitlines() if line.startswith("note: "))


@functools.lru_cache
def kept_vectors() -> torch.Tensor:
    return drawn(20, 4)


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


def test_verify_refuses_a_model_that_is_not_built_anew() -> None:
    """Found by trial: it was said to draw unseeded numbers."""
    net = nn.Linear(6, 3)
    with pytest.raises(JobError, match="its function gives the same module each time, and verify trains several"):
        lockstep.verify(ZOO["mlp"].replace(model=lambda: net), strategy="dp", devices="2xcpu")
