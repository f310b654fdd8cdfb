"""A dataset with a state of its own goes on in it: a resumed training doesn't go through a
stream again.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import IterableDataset, TensorDataset

from lockstep import Job, Run, train

from harness import same_bits  # isort: skip
from zoo import drawn, labels

ON = {"single": "1xcpu", "dp": "2xcpu"}
INPUTS, TARGETS = drawn(30, 6), labels(30, 3)
OTHERS = drawn(30, 6, seed=3)


class Reads:
    """Counts the samples that a stream makes, in a file, since a rank or a loader worker may
    make them.
    """

    @staticmethod
    def note() -> None:
        with open(os.environ["READS"], "a") as file:
            file.write(".")

    @staticmethod
    def taken() -> int:
        size = os.stat(os.environ["READS"]).st_size
        os.truncate(os.environ["READS"], 0)
        return size


class Told(IterableDataset[Any]):
    """Is told the epoch; its state is the place in it."""

    def __init__(self) -> None:
        self.epoch, self.at = 0, 0
        self.start = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[Any]:
        self.at, self.start = self.start, 0
        while self.at < len(INPUTS):
            Reads.note()
            index = (self.at * 7 + self.epoch) % len(INPUTS)
            self.at += 1
            yield INPUTS[index], TARGETS[index]

    def state_dict(self) -> dict[str, Any]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.start = state["at"]


class Counting(IterableDataset[Any]):
    """Counts the epochs itself; nobody tells it, so that its state has to."""

    def __init__(self) -> None:
        self.state = {"epoch": -1, "at": 0}
        self.loaded = False

    def __iter__(self) -> Iterator[Any]:
        if not self.loaded:
            self.state.update(epoch=self.state["epoch"] + 1, at=0)
        self.loaded = False
        while self.state["at"] < len(INPUTS):
            Reads.note()
            index = (self.state["at"] * 7 + self.state["epoch"]) % len(INPUTS)
            self.state["at"] += 1
            yield INPUTS[index], TARGETS[index]

    def state_dict(self) -> dict[str, Any]:
        return self.state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.state, self.loaded = dict(state), True


class Mosaic(Told):
    """The state of MosaicML's StreamingDataset is asked for with the number of samples used."""

    def state_dict(self, num_samples: int, from_beginning: bool) -> dict[str, Any]:
        assert from_beginning
        return {"at": num_samples}


def a_job(data: Any, **settings: Any) -> Job:
    usual: dict[str, Any] = {
        "model": lambda: nn.Sequential(
            nn.Linear(6, 8), nn.Tanh(), nn.Dropout(0.1), nn.Linear(8, 3)
        ),
        "loss": nn.CrossEntropyLoss(),
        "optimizer": lambda params: torch.optim.SGD(params, lr=0.05, momentum=0.9),
        "train_data": data,
        "batch_size": 4,
        "epochs": 3,
        "shuffle": False,
        "precision": "fp64",
        "loader_workers": 0,
    }
    return Job(**{**usual, **settings})


@pytest.fixture(autouse=True)
def counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("READS", str(tmp_path / "reads"))
    (tmp_path / "reads").touch()


def runs(
    data: Any, tmp_path: Path, strategy: str, steps: int, **settings: Any
) -> tuple[Run, Run, int]:
    """The run that was never stopped, one that was after so many steps, and the samples that its
    second start read.
    """
    job, on = (
        a_job(data, **settings),
        {"strategy": strategy, "devices": ON[strategy], "quiet": True},
    )
    whole = train(job, folder=tmp_path / "whole", **on)
    first = train(job, folder=tmp_path, steps=steps, **on)
    Reads.taken()
    run = train(job, resume=first.folder, **on)
    return whole, run, Reads.taken()


@pytest.mark.sweep
@pytest.mark.parametrize(
    ("kind", "steps"),
    [(Told, 5), (Told, 8), (Told, 11), (Counting, 8), (Counting, 11), (Mosaic, 5)],
)
def test_a_stream_with_a_state_is_not_gone_through_again(
    kind: Any, steps: int, tmp_path: Path
) -> None:
    """8 batches are an epoch, so that the second case stops at its end, where a set_epoch tells
    the next one.
    """
    whole, run, read = runs(kind, tmp_path, "single", steps)
    assert same_bits(run.model(), whole.model())
    done = 30 if steps == 8 else 4 * steps if steps < 8 else 30 + 4 * (steps - 8)
    assert read == 90 - done


@pytest.mark.parametrize(("strategy", "workers"), [("dp", 0), ("single", 1)])
def test_on_several_devices_and_in_a_loader_worker_too(
    strategy: str, workers: int, tmp_path: Path
) -> None:
    """The worker reads ahead: what is saved is the state after the last batch that was trained
    on.
    """
    whole, run, read = runs(Told, tmp_path, strategy, 5, loader_workers=workers)
    assert same_bits(run.model(), whole.model()) and read == 70


def test_a_run_that_dies_goes_on_where_it_was_saved(tmp_path: Path) -> None:
    class Died(Exception):
        pass

    left = [8]

    def loss(outputs: torch.Tensor, targets: torch.Tensor) -> Any:
        left[0] -= outputs.requires_grad
        if left[0] < 0:
            raise Died
        return nn.functional.cross_entropy(outputs, targets, reduction="sum"), len(targets)

    job = a_job(Told, loss=loss, save_every=3, epochs=2)
    with pytest.raises(Died):
        train(job, devices="1xcpu", folder=tmp_path / "run", quiet=True)
    left[0] = 1000
    whole = train(job, devices="1xcpu", folder=tmp_path / "whole", quiet=True)
    Reads.taken()
    (folder,) = (tmp_path / "run").iterdir()
    run = train(job, resume=folder, quiet=True)
    assert same_bits(run.model(), whole.model()) and Reads.taken() in (60 - 24, 60 - 30)


def test_what_several_ranks_saved_is_resumed_by_one(tmp_path: Path) -> None:
    job = a_job(Told, model=lambda: nn.Linear(6, 3))
    whole = train(job, devices="1xcpu", folder=tmp_path, quiet=True)
    run = train(job, strategy="ddp", devices="2xcpu", folder=tmp_path, steps=5, quiet=True)
    Reads.taken()
    train(job, resume=run.folder, steps=7, quiet=True)
    assert Reads.taken() == 2 * 10, (
        "of two batches and the smaller last one, whose end shows in reading it"
    )
    run = train(job, strategy="single", devices="1xcpu", resume=run.folder, quiet=True)
    torch.testing.assert_close(
        run.model().state_dict(), whole.model().state_dict(), rtol=1e-10, atol=1e-10
    )
    assert Reads.taken() == 62


def pair(samples: list[dict[str, Any]]) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.tensor([s["x"] for s in samples]), torch.tensor([s["y"] for s in samples])


def huggingface(*, buffered: bool = False) -> Any:
    def counting(sample: dict[str, Any]) -> dict[str, Any]:
        Reads.note()
        return sample

    import datasets

    whole = datasets.Dataset.from_dict({"x": INPUTS.tolist(), "y": TARGETS.tolist()})
    stream = whole.to_iterable_dataset(num_shards=3).map(counting)
    return stream.shuffle(seed=1, buffer_size=7) if buffered else stream


def test_a_stream_of_datasets_goes_on_in_its_state(tmp_path: Path) -> None:
    whole, run, read = runs(huggingface, tmp_path, "single", 11, collate=pair)
    assert same_bits(run.model(), whole.model()) and read < 90 - 30


def test_a_shuffle_buffer_that_is_not_in_the_state_is_gone_through_again(
    tmp_path: Path, capsys
) -> None:
    """Its samples would be left out: each is used once in an epoch all the same."""
    whole, run, read = runs(
        lambda: huggingface(buffered=True), tmp_path, "single", 11, collate=pair
    )
    assert same_bits(run.model(), whole.model()) and read >= 60
    train(
        a_job(lambda: huggingface(buffered=True), collate=pair, epochs=1),
        devices="1xcpu",
        folder=tmp_path,
    )
    assert (
        "note: train_data has a shuffle buffer that is not in its state" in capsys.readouterr().out
    )


def test_a_state_that_no_checkpoint_can_hold_is_refused(
    tmp_path: Path,
) -> None:
    class Odd(Told):
        def state_dict(self) -> dict[str, Any]:
            return {"file": object()}

    with pytest.raises(Exception, match="no checkpoint can hold"):
        train(a_job(Odd, save_every=2), devices="1xcpu", folder=tmp_path / "run", quiet=True)
    assert not list((tmp_path / "run").iterdir())


class Moving(TensorDataset):
    """Map-style, and each sample changes it."""

    def __init__(self) -> None:
        super().__init__(INPUTS, TARGETS)
        self.read = 0

    def __getitem__(self, index: int) -> Any:
        self.read += 1
        return INPUTS[index] + 0.01 * self.read, TARGETS[index]

    __getitems__ = None  # type: ignore[assignment]

    def state_dict(self) -> dict[str, Any]:
        return {"read": self.read}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.read = state["read"]


@pytest.mark.parametrize("steps", [5, 8])
def test_a_map_style_dataset_with_a_state_goes_on_in_it(steps: int, tmp_path: Path) -> None:
    whole, run, _ = runs(Moving, tmp_path, "single", steps)
    assert same_bits(run.model(), whole.model())
