"""A profile: where the time goes, for each rank; and a training that is as if it had not been."""

from __future__ import annotations

import gzip
import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import Dataset, TensorDataset

import lockstep
from lockstep import Job, train
from lockstep.profiling.profile_table import lines_of
from lockstep.profiling.time_breakdown import KINDS, StepTimes, Track, times_of
from lockstep.strategies.ddp import DDP
from lockstep.strategies.dp import DP
from lockstep.strategies.pp import PP
from lockstep.strategies.steps.step import Step
from zoo import Conv, drawn, labels, mlp, sgd

NAP = 0.05
WAYS = {
    "single": ("single", "1xcpu"),
    "dp": ("dp", "2xcpu"),
    "dp on one device": ("dp", "1xcpu"),
    "ddp": ("ddp", "2xcpu"),
    "ddp overlapped": (DDP(reduce="overlapped"), "2xcpu"),
    "pp": (PP(microbatches=3), "2xcpu"),
    "fsdp": ("fsdp", "2xcpu"),
}


def job(**settings: Any) -> Job:
    fields: dict[str, Any] = {
        "model": mlp,
        "loss": nn.CrossEntropyLoss(),
        "optimizer": sgd,
        "train_data": TensorDataset(drawn(50, 6), labels(50, 3)),
        "batch_size": 8,
        "epochs": 2,
        "precision": "fp64",
        "clip_norm": 1.0,
    }
    return Job(**{**fields, **settings})


def profiled(job: Job, way: str, folder: Path, **more: Any) -> tuple[lockstep.Run, dict[str, Any]]:
    strategy, devices = WAYS[way]
    run = train(
        job,
        strategy=strategy,
        devices=devices,
        folder=folder,
        profile=True,
        **{"quiet": True, **more},
    )
    return run, json.loads((run.folder / "profile" / "summary.json").read_text())


def rows_of(summary: dict[str, Any]) -> list[dict[str, Any]]:
    return next(summary[whose] for whose in ("ranks", "replicas", "devices") if whose in summary)


def shares(summary: dict[str, Any], number: int) -> dict[str, float]:
    return rows_of(summary)[number]["shares"]


def weights(run: lockstep.Run) -> dict[str, torch.Tensor]:
    return run.model().state_dict()


class Napping(nn.Module):
    """Sleeps on rank 1, or in the second replica."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = mlp()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if len(x) == 3:
            time.sleep(NAP)
        return self.inner(x)


class SlowData(Dataset):
    def __len__(self) -> int:
        return 16

    def __getitem__(self, i: int) -> tuple[torch.Tensor, torch.Tensor]:
        time.sleep(
            3 * NAP
        )  # longer than a step of a busy machine, or a loader worker keeps up with it
        return torch.full((6,), float(i)), torch.tensor(i % 3)


def slow_second(**settings: Any) -> Job:
    # Batches of 7 are cut in shares of 4 and 3, and only those of 3 are slow.
    return job(
        model=Napping,
        train_data=TensorDataset(drawn(35, 6), labels(35, 3)),
        batch_size=7,
        **settings,
    )


@pytest.mark.sweep
@pytest.mark.parametrize("way", WAYS)
def test_the_training_is_bit_for_bit_the_one_without_a_profile(way: str, tmp_path: Path) -> None:
    strategy, devices = WAYS[way]
    plain = train(job(), strategy=strategy, devices=devices, folder=tmp_path, quiet=True)
    run, summary = profiled(job(), way, tmp_path)
    assert (summary["first_step"], summary["last_step"]) == (3, 7)  # an epoch has seven
    expected = weights(plain)
    for name, value in weights(run).items():
        assert torch.equal(value, expected[name]), name
    timed = ("seconds", "samples_per_second")
    for ours, theirs in zip(run.history, plain.history, strict=True):
        assert {k: v for k, v in ours.items() if k not in timed} == {
            k: v for k, v in theirs.items() if k not in timed
        }


@pytest.mark.sweep
@pytest.mark.parametrize("way", WAYS)
def test_the_kinds_of_time_add_up_to_the_step(way: str, tmp_path: Path) -> None:
    _, summary = profiled(job(), way, tmp_path)
    rows = rows_of(summary)
    assert len(rows) == int(WAYS[way][1][0])
    for row in rows:
        assert list(row["seconds"]) == list(KINDS)
        assert sum(row["seconds"].values()) == pytest.approx(row["step_seconds"])
        noted = {kind: seconds for kind, seconds in row["seconds"].items() if kind != "other"}
        assert all(seconds >= 0 for seconds in noted.values())
        # Nothing is counted twice: what was noted is not more than the step.
        assert sum(noted.values()) <= row["step_seconds"] * 1.001
        assert sum(row["phases"].values()) == pytest.approx(sum(noted.values()))


@pytest.mark.sweep
@pytest.mark.parametrize("way", [way for way in WAYS if way != "pp"])
def test_a_slow_model_is_computing_and_nearly_all_of_the_step_is_explained(
    way: str, tmp_path: Path
) -> None:
    slow = job(
        model=Napping, train_data=TensorDataset(drawn(12, 6), labels(12, 3)), batch_size=6, epochs=2
    )
    if WAYS[way][1] == "1xcpu":
        slow = slow.replace(batch_size=3)
    _, summary = profiled(slow, way, tmp_path)
    for number in range(int(WAYS[way][1][0])):
        assert shares(summary, number)["computing"] > 0.5
        assert shares(summary, number)["other"] < 0.4


@pytest.mark.sweep
@pytest.mark.parametrize("way", ["dp", "ddp", "ddp overlapped"])
def test_the_others_wait_for_a_slow_one(way: str, tmp_path: Path) -> None:
    _, summary = profiled(slow_second(epochs=1), way, tmp_path)
    assert shares(summary, 0)["waiting"] > 0.4 > shares(summary, 1)["waiting"], summary
    assert shares(summary, 1)["computing"] > 0.4 > shares(summary, 0)["computing"], summary
    notes = " ".join(summary["notes"])
    assert ("backward did not hide" in notes) == (way == "ddp overlapped")


@pytest.mark.sweep
@pytest.mark.parametrize("way", ["single", "dp", "ddp"])
@pytest.mark.parametrize("workers", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_a_slow_dataset_is_loading(way: str, workers: int, tmp_path: Path) -> None:
    _, summary = profiled(
        job(train_data=SlowData(), loader_workers=workers, epochs=1, batch_size=2), way, tmp_path
    )
    for number in range(int(WAYS[way][1][0])):
        assert shares(summary, number)["loading"] > 0.15  # a few hundredths otherwise


@pytest.mark.parametrize("way", ["dp", "ddp"])
def test_synchronised_batch_norm_is_communicating_not_computing(way: str, tmp_path: Path) -> None:
    data = TensorDataset(drawn(50, 2, 7, 7), labels(50, 3))
    _, summary = profiled(job(model=Conv, train_data=data, sync_batchnorm=True), way, tmp_path)
    for row in summary["ranks" if "ranks" in summary else "replicas"]:
        assert row["phases"]["batch norm"] > 0
        assert row["seconds"]["communicating"] >= row["phases"]["batch norm"]


@pytest.mark.sweep
@pytest.mark.parametrize(
    ("way", "names"),
    {
        "single": {"reduce": False},
        "dp": {"reduce": True, "replica 0": True, "replica 1": True},
        "ddp": {"reduce": True, "all_reduce": True},
        "ddp overlapped": {"reduce": True},
    }.items(),
)
def test_a_trace_of_each_rank_names_the_phases(
    way: str, names: dict[str, bool], tmp_path: Path
) -> None:
    run, _ = profiled(job(), way, tmp_path)
    ranks = 2 if way.startswith("ddp") else 1
    files = {f"rank{rank}.json.gz" for rank in range(ranks)}
    assert {path.name for path in (run.folder / "profile").iterdir()} == files | {"summary.json"}
    for file in files:
        with gzip.open(run.folder / "profile" / file) as trace:
            events = json.load(trace)["traceEvents"]
        named = {event["name"] for event in events if event.get("cat") == "user_annotation"}
        assert named >= {
            "load",
            "forward and loss",
            "backward",
            "clip",
            "optimizer",
            "step 3",
            "step 7",
        }
        assert not named & {"step 2", "step 8"}
        assert {name: name in named for name in names} == names
        # Operators are in it too, those of the replicas' threads as well.
        linear = [event for event in events if event.get("name") == "aten::addmm"]
        assert len({event["tid"] for event in linear}) == (2 if way == "dp" else 1)


@pytest.mark.parametrize(
    ("settings", "first", "last"),
    [
        ({"steps": 1, "epochs": None}, 1, 1),
        ({"steps": 2, "epochs": None}, 2, 2),
        ({"steps": 5, "epochs": None}, 3, 5),
        ({"batch_size": 50, "epochs": 4}, 3, 3),  # an epoch is one step
        ({"batch_size": 25, "epochs": 4}, 3, 4),
        ({"batch_size": 2}, 3, 12),
        ({"batch_size": 4}, 3, 12),  # 13 steps
        ({"batch_size": 4, "steps": 12}, 3, 12),
    ],
)
def test_a_short_training_is_profiled_as_far_as_it_goes(
    settings: Any, first: int, last: int, tmp_path: Path
) -> None:
    # A schedule by step looks whether the optimizer's step is still the one it knows.
    by_step = {
        "lr_scheduler": lambda o: torch.optim.lr_scheduler.ExponentialLR(o, 0.9),
        "lr_scheduler_every": "step",
    }
    _, summary = profiled(job(**{**settings, **by_step}), "single", tmp_path)
    assert (summary["first_step"], summary["last_step"]) == (first, last)


def test_a_resumed_run_is_profiled_again(tmp_path: Path) -> None:
    run, _ = profiled(job(epochs=1), "ddp", tmp_path)
    again, summary = profiled(job(epochs=2), "single", tmp_path, resume=run.folder)
    assert (summary["first_step"], summary["last_step"]) == (10, 14)
    assert {path.name for path in (run.folder / "profile").iterdir()} == {
        "rank0.json.gz",
        "summary.json",
    }
    plain = train(job(), strategy="single", devices="1xcpu", folder=tmp_path, quiet=True)
    for name, value in weights(plain).items():
        assert torch.allclose(value, weights(again)[name], rtol=1e-12, atol=1e-12)


def test_a_training_that_is_stopped_before_says_that_there_is_no_profile(
    tmp_path: Path, capfd: Any
) -> None:
    stopped = job(
        batch_size=50,
        epochs=9,
        on_event=[lambda event: "stop" if event.kind == "evaluated" else None],
    )
    train(stopped, strategy="single", devices="1xcpu", folder=tmp_path, profile=True)
    assert "note: no profile: the training ended after step 1\n" in capfd.readouterr().out


def test_a_fault_in_a_profiled_step_leaves_nothing_running(tmp_path: Path) -> None:
    def fails(outputs: torch.Tensor, targets: torch.Tensor) -> tuple[torch.Tensor, int]:
        calls.append(torch.is_grad_enabled())
        if calls.count(True) == 5:
            raise ValueError("the fifth")
        return (outputs.sum(dim=1) - targets).square().sum(), len(targets)

    calls: list[bool] = []  # those without are checks
    with pytest.raises(ValueError, match="the fifth"):
        profiled(job(loss=fails), "single", tmp_path)
    profiled(job(), "single", tmp_path)  # PyTorch has one profiler at a time


def test_afterwards_every_method_is_its_own_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    built: list[Step] = []
    build = DP.build
    monkeypatch.setattr(DP, "build", lambda *args: built.append(build(*args)) or built[0])
    profiled(job(sync_batchnorm=True), "dp", tmp_path)
    [step] = built
    for thing in (step, step.optimizer, step.world, step._exchange):
        replaced = {
            name
            for name, value in vars(thing).items()
            if hasattr(type(thing), name) and callable(value)
        }
        assert replaced <= {"emit", "print", "fail"}  # fields of the world


JOB = """
import lockstep, torch
from torch.utils.data import TensorDataset

job = lockstep.Job(
    model=lambda: torch.nn.Linear(4, 2),
    loss=torch.nn.CrossEntropyLoss(),
    optimizer=lambda params: torch.optim.SGD(params, lr=0.1),
    train_data=TensorDataset(torch.ones(40, 4), torch.zeros(40, dtype=torch.int64)),
    batch_size=8,
)
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    "start",
    [
        "-m lockstep",
        pytest.param(
            "-m torch.distributed.run --nproc-per-node 2 -m lockstep", marks=pytest.mark.slow
        ),
    ],
)
def test_the_table_is_printed_and_nothing_but_it(start: str, tmp_path: Path) -> None:
    (tmp_path / "job.py").write_text(JOB)
    words = [sys.executable, *start.split(), "train", "job.py", "--profile"]
    more = [] if "torch" in start else ["--devices", "2"]
    done = subprocess.run(
        [*words, *more], cwd=tmp_path, capture_output=True, text=True, timeout=100
    )
    assert done.returncode == 0, done.stderr
    assert "USDT" not in done.stderr
    lines = done.stdout.splitlines()
    at = lines.index("profile of steps 3 to 5, in ms per step and % of it:")
    assert lines[at + 1].split() == ["rank", *KINDS, "step"]
    assert [line[:7] for line in lines[at + 2 : at + 4]] == ["0 cpu:0", "1 cpu:1"]
    end = next(number for number, line in enumerate(lines) if line.startswith("traces"))
    assert lines[end].startswith("traces for ui.perfetto.dev: runs/job-ddp-")
    assert max(len(line) for line in lines[at : end + 1]) < 80


# ---- what the notes mean -------------------------------------------------------------------------


def track(number: int, wall: float, **spent: float) -> Track:
    noted: Any = {("computing", "backward"): 1.0}
    noted |= {("communicating", name): seconds for name, seconds in spent.items()}
    return Track(number, f"cpu:{number}", [StepTimes(wall, noted)])


def test_waiting_is_what_communicating_takes_longer_than_on_the_last_rank_to_come() -> None:
    first, second = times_of([track(0, 6.0, sum=3.0), track(1, 6.0, sum=1.0)], "rank")
    assert (first["seconds"]["waiting"], first["seconds"]["communicating"]) == (2.0, 1.0)
    assert (second["seconds"]["waiting"], second["seconds"]["communicating"]) == (0.0, 1.0)
    assert first["seconds"]["other"] == 6.0 - 1.0 - 3.0
    assert first["phases"] == {"backward": 1.0, "sum": 1.0, "sum: waiting": 2.0}


def test_a_rank_that_takes_no_part_lets_nobody_wait() -> None:
    first, second = times_of([track(0, 6.0, sum=3.0), track(1, 6.0)], "rank")
    assert (first["seconds"]["waiting"], first["seconds"]["communicating"]) == (0.0, 3.0)
    assert second["seconds"]["communicating"] == second["seconds"]["waiting"] == 0.0


def a_summary(ranks: int) -> dict[str, Any]:
    kinds = dict(zip(KINDS, (1.0, 0.1, 0.0, 0.00012, 0.1), strict=True))
    shares = {kind: seconds / 1.20012 for kind, seconds in kinds.items()}
    rows = [
        {"rank": i, "device": f"cuda:{i}", "step_seconds": 1.20012, "seconds": kinds}
        | {"shares": shares}
        for i in range(ranks)
    ]
    notes = ["a note of some words that will be wrapped in two, since it is longer than a line is"]
    return {"first_step": 3, "last_step": 12, "ranks": rows, "notes": notes}


@pytest.mark.parametrize("ranks", [1, 3, 64])
def test_the_table_fits_the_terminal(ranks: int) -> None:
    lines = lines_of(a_summary(ranks), "rank", "runs/x/profile")
    assert max(map(len, lines)) <= 80
    assert len(lines) < 24
    wider = "  " if ranks == 64 else ""  # "10 cuda:10" is a name too
    assert [lines[1].replace("rank" + wider, "rank"), lines[2].replace(":0" + wider, ":0")] == [
        "rank       computing  communicating  waiting    loading     other   step",
        "0 cuda:0  1,000  83%       100   8%   0   0%  0.12   0%  100   8%  1,200",
    ]
    assert any("and 48 more" in line for line in lines) == (ranks == 64)
    assert lines[-1] == "traces for ui.perfetto.dev: runs/x/profile/rank*.json.gz"


class Sleeper(nn.Sequential):
    """Its second stage takes much longer than its first."""

    def __init__(self) -> None:
        super().__init__(nn.Linear(6, 6), Late(6, 3))


class Late(nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        time.sleep(NAP / 4)
        return super().forward(x)


def test_a_device_of_a_pipeline_waits_for_the_stages_of_others(tmp_path) -> None:
    way = PP({"0": 0, "1": 1}, 4)
    run = train(job(model=Sleeper), strategy=way, devices="2xcpu", folder=tmp_path, profile=True)
    summary = json.loads((run.folder / "profile" / "summary.json").read_text())
    first, second = summary["devices"]
    assert second["shares"]["computing"] > first["shares"]["computing"]
    assert first["shares"]["waiting"] > max(0.4, second["shares"]["waiting"])
    for row in summary["devices"]:
        assert sum(row["shares"].values()) == pytest.approx(1.0)
