"""Local batches of sizes in proportion (``shares``): the results of one device, and a slower
replica that gets fewer samples.
"""

from __future__ import annotations

import json
import re
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

import lockstep
from lockstep import Job, predict, train
from lockstep.cli.command import main
from lockstep.data import Batch, batches
from lockstep.errors import JobError, StrategyError
from lockstep.launch import world
from lockstep.strategies import DDP, DP, named
from lockstep.tensors.rows import share_sizes, weighted_sizes
from lockstep.verify import verify

from harness import parity  # isort: skip
from zoo import ZOO, drawn, labels, mlp, plain_sgd  # isort: skip

BOUND = 1e-10

# ---- sizes ---------------------------------------------------------------------------------------


def test_sizes_are_in_proportion_and_nobody_is_left_without_a_sample() -> None:
    assert weighted_sizes(8, [3, 1]) == [6, 2]
    assert weighted_sizes(10, [1, 2, 3]) == [2, 3, 5]
    assert weighted_sizes(5, [100, 1, 1]) == [3, 1, 1]
    assert weighted_sizes(2, [1, 1, 100]) == [1, 1, 0], "the empty ones are the last ones"
    for total in range(40):
        for weights in ([1, 1], [5, 5, 5], [2, 2, 2, 2]):
            assert weighted_sizes(total, weights) == share_sizes(total, len(weights))
        for weights in ([3, 1], [1, 7], [1, 2, 3], [9, 1, 1, 4]):
            sizes = weighted_sizes(total, weights)
            assert sum(sizes) == total
            assert min(sizes) > 0 or total < len(weights)


@pytest.mark.parametrize("accumulate", [1, 2])
def test_a_loader_cuts_each_batch_by_the_shares_and_every_sample_once(accumulate: int) -> None:
    data = TensorDataset(torch.arange(26), torch.arange(26))

    def read(rank: int | None) -> list[Batch]:
        settings: Any = {"rank": rank, "world_size": 3, "accumulate": accumulate}
        return list(batches(data, 10, shares=(1, 2, 3), workers=0, **settings))

    ranks = [read(rank) for rank in range(3)]
    for number, of_all in enumerate(read(None)):
        assert of_all.shares is not None and of_all.samples is not None
        seen = []
        for rank in range(3):
            of_rank = ranks[rank][number].parts
            theirs = [part.samples.tolist() for part in of_rank]
            assert theirs == [part.samples.tolist() for part in of_all.shares[rank]]
            for one in theirs:
                seen += one
        assert sorted(seen) == sorted(of_all.samples.tolist())
    first = [[part.size for part in of_rank[0].parts] for of_rank in ranks]
    assert first == ([[2], [3], [5]] if accumulate == 1 else [[1, 1], [2, 2], [2, 2]])

    with pytest.raises(JobError, match=r"^shares: \(3, 1\), 3 whole numbers above 0 are expected"):
        batches(data, 10, rank=0, world_size=3, shares=(3, 1))


# ---- the results of one device -------------------------------------------------------------------

WAYS: list[Any] = [
    ("dp", "3,1", "clipping with accumulation"),
    ("dp", "1,2,3", "an empty rank under sync_batchnorm"),
    ("ddp", "3,1", "ignored tokens and tied weights"),
    ("ddp", "1,2,3", "an empty rank under sync_batchnorm"),
    ("fsdp", "3,1", "clipping with accumulation"),
    ("ddp=2xpp=2", "1,3", "accumulation of unequal counts"),
]


def held_to_one_device(strategy: str, shares: str, kind: str) -> None:
    job = ZOO[kind].replace(precision="fp64")
    way = named(strategy, shares=shares)
    needed = way.devices_needed
    accumulate = way.num_microbatches(job)
    found = parity(job, way, f"{needed}xcpu", against_settings={"accumulate": accumulate})
    assert found.within(BOUND), str(found)
    assert any(found.moved.values())
    assert found.history.get("accuracy", 0.0) == 0.0


@pytest.mark.parametrize(("strategy", "shares", "kind"), WAYS)
def test_shares_end_where_one_device_does(strategy: str, shares: str, kind: str) -> None:
    held_to_one_device(strategy, shares, kind)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ZOO)
@pytest.mark.parametrize(
    ("strategy", "shares"), [("dp", "1,2,3"), ("ddp", "3,1"), ("ddp", "1,2,3")]
)
def test_every_kind_of_job_may_have_shares(strategy: str, shares: str, kind: str) -> None:
    held_to_one_device(strategy, shares, kind)


def correlations(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """A loss of all samples of the batch together."""
    centred = outputs - outputs.mean(0)
    return (centred.T @ centred / len(outputs) - torch.eye(outputs.shape[1])).square().sum()


def by_number(outputs: torch.Tensor, targets: torch.Tensor, counts: Any) -> torch.Tensor:
    return nn.functional.cross_entropy(outputs, targets, reduction="sum") / counts["samples"]


def of_uneven_sizes(epoch: int) -> Any:
    return torch.arange(29).split([9, 4, 13, 3])


JOBS: dict[str, dict[str, Any]] = {
    "a loss over the batch": {"loss": correlations, "loss_over": "batch"},
    "counts": {"loss": by_number, "counts": lambda targets: {"samples": len(targets)}},
    "batches cut by cost": {"batches": of_uneven_sizes, "cut_by": range(1, 30), "accumulate": 2},
}


@pytest.mark.slow
@pytest.mark.parametrize("fields", JOBS.values(), ids=JOBS)
@pytest.mark.parametrize("shares", ["3,1", "1,2,3", "auto"])
@pytest.mark.parametrize("strategy", ["dp", "ddp"])
def test_other_jobs_may_have_shares(strategy: str, shares: str, fields: dict[str, Any]) -> None:
    job = ZOO["mlp"].replace(**fields)
    way = named(strategy, shares=shares)
    against: Any = {}
    if "cut_by" in fields:
        against["cut_by"] = None
    found = parity(job, way, f"{way.devices_needed or 2}xcpu", against_settings=against)
    assert found.within(BOUND), str(found)


def test_verify_and_predict_take_shares(tmp_path: Path) -> None:
    job = ZOO["mlp"]
    found = verify(job, strategy=DDP(shares="3,1"), devices="2xcpu")
    assert found, str(found)
    run = train(job, strategy="single", devices="1xcpu", folder=tmp_path, quiet=True)
    data = job.eval_data
    whole = predict(run, data, devices="1xcpu", quiet=True)
    for strategy in (DDP(shares="3,1"), DP(shares="1,3")):
        lines = tmp_path / f"{strategy.name}.jsonl"
        predict(run, data, lines, strategy=strategy, devices="2xcpu", quiet=True)
        rows = [json.loads(line) for line in lines.read_text().splitlines()]
        assert torch.allclose(torch.tensor(rows), torch.as_tensor(whole), atol=1e-6)


def test_an_own_loop_has_shares_by_its_step() -> None:
    data = ZOO["mlp"].train_data
    torch.manual_seed(0)
    model = mlp()
    step = lockstep.parallelize(
        model, nn.CrossEntropyLoss(), plain_sgd, strategy=DP(shares="3,1"), devices="2xcpu"
    )
    assert [[part.size for part in one] for one in step.scatter(next(iter(batches(data, 8))))] == [
        [6],
        [2],
    ]
    with pytest.raises(StrategyError, match=r"shares auto is for jobs, .*: give numbers"):
        lockstep.parallelize(
            mlp(), nn.CrossEntropyLoss(), plain_sgd, strategy=DP(shares="auto"), devices="2xcpu"
        )


# ---- words ---------------------------------------------------------------------------------------


def test_shares_are_written_in_several_ways() -> None:
    assert DDP(shares=(3, 1)) == DDP(shares="3, 1") == named("ddp", shares=[3, 1])
    assert DDP(shares=(3, 1)).devices_needed == 2
    assert DDP(shares="auto").devices_needed is None
    assert "shares" not in named("pp").settings()


@pytest.mark.parametrize("shares", ["3", "3,0", "3,-1", "1.5,1", "fast", "auto:3", "3,,1", ""])
def test_what_are_no_shares_is_refused(shares: str) -> None:
    with pytest.raises(StrategyError, match=r"^ddp: shares .* give a whole number from 1"):
        DDP(shares=shares)


def test_shares_for_another_number_of_replicas_or_strategy_are_refused(tmp_path: Path) -> None:
    job = ZOO["mlp"]
    with pytest.raises(StrategyError, match=r"^dp: shares 3,1 are for 2 replicas, not 3: give a"):
        train(job, strategy=DP(shares="3,1"), devices="3xcpu", folder=tmp_path, quiet=True)
    with pytest.raises(StrategyError, match=r"shares 3,1,1 are for 3 replicas, not 2"):
        train(job, strategy=named("ddp=2xpp=2", shares="3,1,1"), folder=tmp_path, quiet=True)
    for name in ("single", "mp", "pp", "hogwild"):
        with pytest.raises(StrategyError, match=r'no setting "shares": dp and ddp and fsdp have'):
            named(name, shares="3,1")
    assert not list(tmp_path.iterdir())


# ---- measured speeds -----------------------------------------------------------------------------


class Uneven(nn.Module):
    """Sleeps on rank 1, for each sample."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 3)
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))
        self.dropout = nn.Dropout(0.2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        here = world.current()
        slower = here is not None and here.devices[0].index == 1
        time.sleep(len(x) * (6e-3 if slower else 1e-3))
        self.calls += 1
        return self.layer(self.dropout(x))


def slow_job() -> Job:
    data = TensorDataset(drawn(40, 6), labels(40, 3))
    return Job(
        model=Uneven,
        loss=nn.CrossEntropyLoss(),
        optimizer=plain_sgd,
        train_data=data,
        batch_size=16,
        epochs=1,
    )


def shares_of(run: lockstep.Run) -> list[int]:
    config = json.loads((run.folder / "config.json").read_text())
    kept = config["strategy_settings"]["shares"]
    assert kept.startswith("auto:")
    return [int(word) for word in re.findall(r"\d+", kept)]


@pytest.mark.slow
def test_auto_gives_a_slower_rank_less_and_the_run_keeps_it(tmp_path: Path, capsys) -> None:
    job = slow_job()
    way: Any = {"strategy": DDP(shares="auto"), "devices": "2xcpu"}
    run = train(job, **way, folder=tmp_path)
    faster, slower = shares_of(run)
    assert faster > 1.5 * slower, "six times, but for a busy machine"
    assert run.summary["shares"] == weighted_sizes(16, [faster, slower])
    text = capsys.readouterr().out
    assert f"shares {faster},{slower}: forward and backward of 8 samples take" in text
    assert f"batches of 16 = {run.summary['shares'][0]} + {run.summary['shares'][1]} over" in text

    given = train(job, strategy=DDP(shares=(faster, slower)), folder=tmp_path / "given", quiet=True)
    for name, value in run.model().state_dict().items():
        assert torch.equal(value, given.model().state_dict()[name]), f"measuring leaves {name}"

    train(job, resume=run.folder, epochs=2, quiet=True)
    assert shares_of(run) == [faster, slower]
    train(job, resume=run.folder, **way, epochs=3, quiet=True)
    assert shares_of(run) == [faster, slower], "measured once"
    train(job, resume=run.folder, devices="3xcpu", epochs=4, quiet=True)
    assert len(shares_of(run)) == 3


def test_a_run_with_shares_resumes_with_them_or_refuses_another_number(tmp_path: Path) -> None:
    job = ZOO["mlp"].replace(epochs=1)
    run = train(job, strategy=DP(shares="3,1"), folder=tmp_path, quiet=True)
    resumed = train(job, resume=run.folder, epochs=2, quiet=True)
    assert resumed.summary["shares"] == run.summary["shares"] == [6, 2]
    with pytest.raises(StrategyError, match="shares 3,1 are for 2 replicas, not 3"):
        train(job, resume=run.folder, devices="3xcpu", epochs=3, quiet=True)
    train(job, resume=run.folder, strategy="single", devices="1xcpu", epochs=3, quiet=True)


def test_auto_measures_the_same_number_of_samples_on_each_replica(tmp_path: Path, capsys) -> None:
    job = ZOO["mlp"].replace(batch_size=8, accumulate=4, steps=1)
    train(job, strategy=DP(shares="auto"), devices="3xcpu", folder=tmp_path)
    assert "forward and backward of 1 sample take" in capsys.readouterr().out


def test_auto_refuses_what_cannot_be_measured_before_a_training(tmp_path: Path) -> None:
    job = ZOO["a stream that draws"]
    with pytest.raises(StrategyError, match=r"the job has a stream, .*: give numbers"):
        train(job, strategy=DP(shares="auto"), devices="2xcpu", folder=tmp_path, quiet=True)


def test_the_command_has_shares(tmp_path: Path, monkeypatch, capsys) -> None:
    monkeypatch.chdir(tmp_path)
    Path("small.py").write_text("from zoo import ZOO\n\njob = ZOO['mlp'].replace(epochs=1)\n")
    assert main(["train", "small.py", "--strategy", "dp", "--shares", "1,3"]) == 0
    assert "= 2 + 6 over the devices" in capsys.readouterr().out
    assert main(["train", "small.py", "--shares", "1,3"]) == 2
    assert "name the strategy, too (--strategy ddp)" in capsys.readouterr().err
