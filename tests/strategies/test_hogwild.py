"""``hogwild``: shared weights, nobody waits. Not exact, so not in the parity matrix: what it
keeps is tested here.
"""

from __future__ import annotations

import dataclasses
import os
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import Dataset, TensorDataset

import lockstep
from lockstep import Job, Run, train
from lockstep.checkpoint.weights import load_weights
from lockstep.cli.command import main
from lockstep.errors import NonFiniteLoss, RankFailed, RunError, StrategyError
from lockstep.launch import world as worlds
from lockstep.launch.devices import Device, usable_cores
from lockstep.launch.world import World
from lockstep.strategies import STRATEGIES
from lockstep.strategies.hogwild import Hogwild

from zoo import ZOO, state_of  # isort: skip

DIGITS = Path(__file__).parents[2] / "examples" / "digits.py"
MARGIN = 0.03
"""Of the accuracy on 360 digits: eleven of them."""


class Rows(nn.Module):
    """A row for each sample, which no other sample touches: (batch,) to (batch, 2)."""

    def __init__(self, samples: int, sparse: bool) -> None:
        super().__init__()
        self.rows = nn.Embedding(samples, 2, sparse=sparse)

    def forward(self, index: torch.Tensor) -> torch.Tensor:
        return self.rows(index)


def rows_job(samples: int = 29, sparse: bool = True, **settings: Any) -> Job:
    """Updates of different samples never meet, so that in this job even ranks that wait for
    nobody are exact.
    """
    index = torch.arange(samples)
    generator = torch.Generator().manual_seed(3)
    defaults: dict[str, Any] = {
        "model": lambda: Rows(samples, sparse),
        "loss": nn.MSELoss(),
        "optimizer": lambda params: torch.optim.SGD(params, lr=0.5),
        "train_data": TensorDataset(
            index, torch.randn(samples, 2, generator=generator, dtype=torch.float64)
        ),
        "batch_size": 8,
        "epochs": 3,
        "precision": "fp64",
    }
    return Job(**{**defaults, **settings})


def weights(run: Run) -> dict[str, torch.Tensor]:
    return load_weights(Path(run.folder) / "model.safetensors")


# What it keeps


@pytest.mark.slow
def test_digits_are_learned_as_well_as_on_one_device(tmp_path: Path) -> None:
    """After half as many epochs the accuracy of one and the same run differs by four points,
    after these by one.
    """
    core = Device("cpu", 0, usable_cores()[:1])
    one = train(DIGITS, strategy="single", devices=core, epochs=8, folder=tmp_path, quiet=True)
    run = train(DIGITS, strategy="hogwild", devices="2xcpu", epochs=8, folder=tmp_path, quiet=True)
    assert run.metrics["accuracy"] > one.metrics["accuracy"] - MARGIN
    assert run.history[-1]["train_loss"] < 2 * one.history[-1]["train_loss"] + 0.05


FAST = {(True, "2xcpu"), (False, "3xcpu")}


@pytest.mark.sweep
@pytest.mark.parametrize(
    ("sparse", "devices", "accumulate"),
    [
        pytest.param(
            sparse, devices, accumulate, marks=() if (sparse, devices) in FAST else pytest.mark.slow
        )
        for sparse in (True, False)
        for devices in ("2xcpu", "3xcpu")
        for accumulate in (1, 3)
    ],
)
def test_the_updates_of_a_batch_are_together_that_of_one_device(
    sparse: bool, devices: str, accumulate: int, tmp_path: Path
) -> None:
    """Each sample once an epoch, weighted right in unequal shares, and in the smaller last
    batch.
    """
    job = rows_job(sparse=sparse, accumulate=accumulate)
    if (
        not sparse
    ):  # a dense update writes every row, also those without a gradient; here nobody else is at it
        job = job.replace(batch_size=29, epochs=1)
    one = train(job, strategy="single", devices="1xcpu", folder=tmp_path, quiet=True)
    run = train(job, strategy="hogwild", devices=devices, folder=tmp_path, quiet=True)
    assert run.summary["steps"] == one.summary["steps"] and run.summary["train_samples"] == 29
    if sparse:
        found, expected = weights(run)["rows.weight"], weights(one)["rows.weight"]
        assert (found - expected).abs().max() < 1e-12
        for a, b in zip(run.history, one.history, strict=True):
            assert a["train_loss"] == pytest.approx(b["train_loss"], rel=1e-12), (
                "the sum over all ranks"
            )


class Noting(Dataset[Any]):
    """Writes down which sample was taken by which process."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def __len__(self) -> int:
        return 29

    def __getitem__(self, i: int) -> tuple[torch.Tensor, torch.Tensor]:
        with open(self.folder / str(os.getpid()), "a") as file:
            file.write(f"{i}\n")
        return torch.tensor(i), torch.zeros(2, dtype=torch.float64)

    draws_random = False


def test_every_sample_is_used_once_an_epoch_by_one_rank(tmp_path: Path) -> None:
    noted = tmp_path / "noted"
    noted.mkdir()
    train(
        rows_job(train_data=Noting(noted), epochs=1, loader_workers=0),
        strategy="hogwild",
        devices="3xcpu",
        folder=tmp_path,
        quiet=True,
    )
    files = [file.read_text().split() for file in noted.iterdir()]
    assert len(files) == 3
    assert sorted(int(i) for lines in files for i in lines) == list(range(29))


def test_evaluation_counts_each_sample_once_on_weights_that_nobody_writes(tmp_path: Path) -> None:
    job = ZOO["mlp"].replace(precision="fp64", epochs=3)
    run = train(job, strategy="hogwild", devices="3xcpu", folder=tmp_path, quiet=True)
    again = lockstep.evaluate(run, strategy="single", devices="1xcpu")
    assert again["loss"] == pytest.approx(run.summary["loss"], rel=1e-10)
    assert again["accuracy"] == run.metrics["accuracy"]
    assert lockstep.evaluate(run, strategy="hogwild", devices="2xcpu")["loss"] == pytest.approx(
        again["loss"], rel=1e-10
    )


def test_nobody_waits_for_a_slow_rank(tmp_path: Path) -> None:
    """Rank 0 begins its first step only when rank 1 has done three: a sum in each step would
    hang.
    """

    class Waits(Rows):
        def forward(self, index: torch.Tensor) -> torch.Tensor:
            world = worlds.current()
            assert world is not None
            (tmp_path / f"{world.rank}-{world.step}").touch()
            limit = time.monotonic() + 20
            while world.rank == 0 and not (tmp_path / "1-4").exists():
                assert time.monotonic() < limit, "rank 1 has waited"
                time.sleep(0.01)
            return super().forward(index)

    job = rows_job(model=lambda: Waits(29, True), epochs=1)
    run = train(job, strategy="hogwild", devices="2xcpu", folder=tmp_path / "runs", quiet=True)
    one = train(
        rows_job(epochs=1), strategy="single", devices="1xcpu", folder=tmp_path / "runs", quiet=True
    )
    assert (weights(run)["rows.weight"] - weights(one)["rows.weight"]).abs().max() < 1e-12


def test_one_rank_is_one_device(tmp_path: Path) -> None:
    job = ZOO["momentum"].replace(precision="fp64")
    one = train(job, strategy="single", devices="1xcpu", folder=tmp_path, quiet=True)
    run = train(job, strategy="hogwild", devices="1xcpu", folder=tmp_path, quiet=True)
    assert (
        max(float((weights(run)[name] - w).abs().max()) for name, w in weights(one).items()) < 1e-12
    )


def test_a_batch_smaller_than_the_ranks_leaves_some_without_an_update(tmp_path: Path) -> None:
    job = rows_job(samples=5, batch_size=2)
    one = train(job, strategy="single", devices="1xcpu", folder=tmp_path, quiet=True)
    run = train(job, strategy="hogwild", devices="3xcpu", folder=tmp_path, quiet=True)
    assert (weights(run)["rows.weight"] - weights(one)["rows.weight"]).abs().max() < 1e-12


# What is saved


@pytest.mark.sweep
@pytest.mark.parametrize(
    "optimizer",
    [
        lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9, weight_decay=1e-3),
        lambda params: torch.optim.AdamW(params, lr=0.01),
        pytest.param(lambda params: torch.optim.Adagrad(params, lr=0.1), marks=pytest.mark.slow),
    ],
    ids=["momentum", "adamw", "adagrad"],
)
def test_runs_go_on_under_another_strategy_and_back(optimizer: Any, tmp_path: Path) -> None:
    job = ZOO["mlp"].replace(precision="fp64", epochs=1, optimizer=optimizer)
    names = set(job.model().state_dict())
    run = train(job, strategy="hogwild", devices="2xcpu", folder=tmp_path, quiet=True)
    state = state_of(Path(run.folder))
    assert set(state["model"]) == set(state["optimizer"]["state"]) == names == set(weights(run))
    for values in state["optimizer"]["state"].values():
        assert float(values.get("step", 4)) == 4, "a rank's counter counts global batches"
    assert state["optimizer"]["groups"][0]["lr"] in (0.1, 0.01), (
        "the rate of the job, not a rank's part of it"
    )
    for epochs, (way, devices) in enumerate(
        (("ddp", "2xcpu"), ("hogwild", "3xcpu"), ("single", "1xcpu")), start=2
    ):
        run = train(
            job, strategy=way, devices=devices, resume=run.folder, epochs=epochs, quiet=True
        )
    assert run.summary["steps"] == 16 and [r["epoch"] for r in run.history] == [1, 2, 3, 4]
    losses = [record["train_loss"] for record in run.history]
    assert losses[-1] < losses[0]


def test_an_epoch_is_taken_up_in_its_middle_with_its_sums(tmp_path: Path) -> None:
    job = rows_job(epochs=1)
    whole = train(job, strategy="single", devices="1xcpu", folder=tmp_path, quiet=True)
    part = train(job, strategy="hogwild", devices="2xcpu", folder=tmp_path, quiet=True, steps=2)
    run = train(job, strategy="hogwild", devices="3xcpu", resume=part.folder, quiet=True)
    assert run.history[-1]["train_loss"] == pytest.approx(
        whole.history[-1]["train_loss"], rel=1e-12
    )
    assert (weights(run)["rows.weight"] - weights(whole)["rows.weight"]).abs().max() < 1e-12


def test_a_scheduler_by_step_moves_every_rank_alike(tmp_path: Path) -> None:
    job = rows_job(
        lr_scheduler=lambda optimizer: torch.optim.lr_scheduler.StepLR(optimizer, 3, 0.5),
        lr_scheduler_every="step",
    )
    one = train(job, strategy="single", devices="1xcpu", folder=tmp_path, quiet=True)
    run = train(job, strategy="hogwild", devices="2xcpu", folder=tmp_path, quiet=True)
    assert [r["lr"] for r in run.history] == [r["lr"] for r in one.history]
    assert (weights(run)["rows.weight"] - weights(one)["rows.weight"]).abs().max() < 1e-12


# What is said


def test_that_it_is_not_exact_is_declared_and_said_before_training(
    tmp_path: Path, capsys: Any
) -> None:
    assert isinstance(STRATEGIES["hogwild"].exact, str)
    assert all(kind.exact is True for name, kind in STRATEGIES.items() if name != "hogwild")
    train(ZOO["mlp"], strategy="hogwild", devices="2xcpu", folder=tmp_path)
    out = capsys.readouterr().out
    notes = [line for line in out.splitlines() if line.startswith("note: ")]
    assert notes[0].startswith(
        "note: hogwild is not exact: ranks write the same weights without waiting"
    )
    assert out.index(notes[-1]) < out.index("epoch   1")


@pytest.mark.slow
def test_the_command_takes_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    monkeypatch.chdir(tmp_path)
    assert (
        main(["train", str(DIGITS), "--strategy", "hogwild", "--devices", "2xcpu", "--epochs", "1"])
        == 0
    )
    assert "digits: hogwild on 2 devices" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("settings", "devices", "says"),
    [
        ({"sync_batchnorm": True}, "2xcpu", "sync_batchnorm makes ranks wait for one another"),
        (
            {"precision": "fp16"},
            "2xcpu",
            "fp16 isn't supported, since each rank would scale the loss differently: take bf16",
        ),
        (
            {"optimizer": lambda params: NoRate(p for _, p in params)},
            "2xcpu",
            "each rank its part of the learning rate, and NoRate has none",
        ),
        (
            {"optimizer": lambda params: torch.optim.Rprop(params)},
            "2xcpu",
            "and Rprop makes steps that don't follow it",
        ),
        (
            {"optimizer": lambda params: torch.optim.Adafactor(params)},
            "2xcpu",
            "and Adafactor makes steps that don't",
        ),
    ],
)
def test_what_it_cannot_do_is_refused(
    settings: dict[str, Any], devices: str, says: str, tmp_path: Path
) -> None:
    job = dataclasses.replace(ZOO["mlp"], **settings)
    with pytest.raises(StrategyError, match=says):
        train(job, strategy="hogwild", devices=devices, folder=tmp_path, quiet=True)


class NoRate(torch.optim.Optimizer):
    def __init__(self, params: Any) -> None:
        super().__init__(params, {})

    def step(self, closure: Any = None) -> None:
        del closure


def test_accelerators_several_machines_and_one_process_are_refused() -> None:
    job = ZOO["mlp"]
    with pytest.raises(
        StrategyError, match="in the memory of the CPU, and this is cuda:1: take ddp, or 2xcpu"
    ):
        Hogwild().prepare(job, World(rank=1, size=2, devices=(Device("cuda", 1),)))
    with pytest.raises(
        StrategyError, match="the memory of one machine, and these ranks are on several: take ddp"
    ):
        Hogwild().prepare(job, World(size=2, devices=(Device("cpu"),)))
    with pytest.raises(
        StrategyError, match="hogwild needs 2 processes with 1 device each, and there are 1 with 2"
    ):
        Hogwild().prepare(job, World(devices=(Device("cpu", 0), Device("cpu", 1))))


def test_weights_that_leave_the_shared_memory_are_told(tmp_path: Path) -> None:
    class Leaves(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if self.training and worlds.current().step == 2:  # type: ignore[union-attr]
                self.weight.data = self.weight.data.clone()
            return super().forward(x)

    job = dataclasses.replace(ZOO["mlp"], model=lambda: Leaves(6, 3))
    with pytest.raises(
        RunError, match='parameter "weight" no longer lies in the memory that the ranks share'
    ):
        train(job, strategy="hogwild", devices="2xcpu", folder=tmp_path, quiet=True)


# What goes wrong


def test_a_rank_that_fails_stops_all_at_once_and_is_named(tmp_path: Path) -> None:
    class Fails(Rows):
        def forward(self, index: torch.Tensor) -> torch.Tensor:
            world = worlds.current()
            assert world is not None
            if world.rank == 1 and world.step == 3:
                raise ValueError("this rank is ill")
            time.sleep(0.01)
            return super().forward(index)

    began = time.monotonic()
    with pytest.raises(
        RankFailed, match=r"rank 1 \(cpu:1\) failed at step 3: ValueError: this rank is ill"
    ):
        train(
            rows_job(model=lambda: Fails(29, True), epochs=10_000),
            strategy="hogwild",
            devices="2xcpu",
            folder=tmp_path,
            quiet=True,
        )
    assert time.monotonic() - began < 15


def test_a_loss_that_is_not_finite_is_told_by_the_rank_that_had_it(tmp_path: Path) -> None:
    job = rows_job(loss=lambda outputs, targets: ((outputs * float("inf")).sum(), len(outputs)))
    with pytest.raises(NonFiniteLoss, match="the loss became"):
        train(job, strategy="hogwild", devices="2xcpu", folder=tmp_path, quiet=True)


def test_nothing_is_left_in_shared_memory(tmp_path: Path) -> None:
    before = set(os.listdir("/dev/shm"))
    train(rows_job(), strategy="hogwild", devices="2xcpu", folder=tmp_path, quiet=True)
    assert not {name for name in set(os.listdir("/dev/shm")) - before if "lockstep" in name}


# In a loop of one's own


def test_an_own_loop_may_use_it(tmp_path: Path) -> None:
    def loop(world: World) -> tuple[float, float]:
        model = Rows(29, True).double()
        with torch.no_grad():
            model.rows.weight.fill_(1.0)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
        step = lockstep.parallelize(model, nn.MSELoss(), optimizer, strategy="hogwild")
        data = TensorDataset(torch.arange(29), torch.zeros(29, 2, dtype=torch.float64))
        for batch in lockstep.batches(data, batch_size=8):
            step(batch)
        world.barrier()
        return float(model.rows.weight.min()), float(model.rows.weight.max())

    (low, high), other = lockstep.launch(loop, "2xcpu")
    assert (low, high) == other
    assert low == pytest.approx(1 - 0.5 / 5, rel=1e-12) and high == pytest.approx(
        1 - 0.5 / 8, rel=1e-12
    )


@pytest.mark.sweep
@pytest.mark.parametrize("kind", ["mlp", "momentum", "ignored tokens and tied weights"])
def test_other_kinds_of_job_run_and_learn(kind: str, tmp_path: Path) -> None:
    job = ZOO[kind].replace(epochs=4)
    run = train(job, strategy="hogwild", devices="2xcpu", folder=tmp_path, quiet=True)
    assert run.history[-1]["train_loss"] < run.history[0]["train_loss"]
    assert set(weights(run)) == set(job.model().state_dict())
