"""Many kills over small runs: each ends with the bits, the records and the samples of one that
nobody disturbed.

``pytest tests/training/test_soak.py --soak 1000`` makes so many; ``make test-all`` does.
"""

from __future__ import annotations

import os
import random
import threading
import time
from pathlib import Path

import psutil
import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

from lockstep import Job, Run, train
from lockstep.launch.processes import fork_server
from lockstep.training.records.audit import added_up

from harness import same_bits  # isort: skip
from zoo import drawn, labels


class Samples(TensorDataset):
    """Fetched one by one, so that loader workers have something to do."""

    def __getitem__(self, index):
        return super().__getitem__(index)


class Slow(nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        time.sleep(0.004)
        return super().forward(x)


def job() -> Job:
    data = Samples(drawn(61, 6), labels(61, 3))
    return Job(
        model=lambda: nn.Sequential(Slow(6, 16), nn.Tanh(), nn.Dropout(0.1), nn.Linear(16, 3)),
        loss=nn.CrossEntropyLoss(),
        optimizer=lambda p: torch.optim.Adam(p, lr=0.01),
        train_data=data,
        eval_data=data,
        batch_size=8,
        epochs=5,
        precision="fp64",
        save_every=3,
        loader_workers=1,
    )


class Killer(threading.Thread):
    """Kills ranks, their loader workers, and the process that forks them, until it is told to
    end.
    """

    def __init__(self, chance: random.Random, kills: int) -> None:
        super().__init__(daemon=True)
        self.chance, self.left, self.over = chance, kills, threading.Event()

    def run(self) -> None:
        while self.left and not self.over.wait(self.chance.uniform(0.02, 0.9)):
            below = psutil.Process().children(recursive=True)
            if len(below) > 1:
                try:
                    self.chance.choice(below).kill()
                    self.left -= 1
                except psutil.Error:
                    """It has ended meanwhile."""


def listening() -> int:
    return sum(c.status == psutil.CONN_LISTEN for c in psutil.Process().net_connections())


def shared_memory() -> set[str]:
    return set(os.listdir("/dev/shm"))


def without_times(run: Run) -> list[dict[str, float]]:
    return [
        {n: v for n, v in r.items() if n not in ("seconds", "samples_per_second")}
        for r in run.history
    ]


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_no_kill_changes_a_bit_a_record_or_a_sample(
    tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    kills: int = request.config.getoption("--soak")
    whole = train(job(), strategy="ddp", devices="2xcpu", folder=tmp_path / "whole", quiet=True)
    before, ports, chance, done, number = shared_memory(), listening(), random.Random(kills), 0, 0
    while done < kills:
        number += 1
        killer = Killer(chance, kills - done)
        wanted = killer.left
        killer.start()
        try:
            run = train(
                job(),
                strategy="ddp",
                devices="2xcpu",
                folder=tmp_path,
                quiet=True,
                restarts=10**6,
                audit=True,
            )
        finally:
            killer.over.set()
            killer.join()
        done += wanted - killer.left
        assert same_bits(run.model(), whole.model()), f"run {number}"
        assert without_times(run) == without_times(whole)
        lines, right = added_up(run.folder)
        assert right, lines
        assert sorted(path.name for path in run.folder.iterdir() if path.name.startswith(".")) == []
        assert sorted(path.name for path in (run.folder / "checkpoints").iterdir()) == [
            "step-39",
            "step-40",
        ]
    fork_server.stop()
    assert psutil.Process().children(recursive=True) == []
    assert listening() <= ports
    left = {name for name in shared_memory() - before if str(os.getpid()) not in name}
    # PyTorch makes a file in shared memory and unlinks it at once. Who is killed in between leaves
    # it: one of a thousand kills met that moment.
    assert len({name for name in left if name.startswith("torch_")}) <= kills // 200
    assert {name for name in left if not name.startswith("torch_")} == set()
