"""The parity harness: a job under two strategies, and how far apart they end.

Differences are measured as in ``lockstep.verify.measures``, in float64, where rounding is near
1e-15 and a wrong weight of one sample shows as 1e-3. SGD shows errors of scale that Adam would
hide.
"""

from __future__ import annotations

import math
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from lockstep.checkpoint.weights import load_weights
from lockstep.job import Job
from lockstep.launch.devices import Devices, parse
from lockstep.launch.world import World
from lockstep.model.build import build_model
from lockstep.model.precision import PrecisionName
from lockstep.run.run_folder import RunFolder
from lockstep.strategies import Strategy
from lockstep.train import train
from lockstep.training.run import Run
from lockstep.verify.measures import buffer_apart, change_apart, largest, real

_TIMES = ("seconds", "samples_per_second")


@dataclass(frozen=True)
class Differences:
    """How far two runs of one job ended from one another.

    Attributes:
        parameters: by name, as ``change_apart`` gives it.
        buffers: by name, max|a - b| over max(max|b|, 1).
        history: the largest relative difference of a loss or metric of any epoch, by name.
        moved: by name, whether the parameter changed at all (where nothing moves, nothing is
            shown).
    """

    parameters: dict[str, float]
    buffers: dict[str, float]
    history: dict[str, float]
    moved: dict[str, bool]

    @property
    def worst(self) -> float:
        """The largest difference of any parameter or buffer."""
        return max([*self.parameters.values(), *self.buffers.values()])

    def within(self, bound: float) -> bool:
        """Whether every parameter, buffer, loss and metric differs by less than ``bound``."""
        return self.worst < bound and max(self.history.values()) < bound

    def __str__(self) -> str:
        every = {**self.parameters, **self.buffers, **self.history}
        name, value = max(every.items(), key=lambda item: item[1])
        return f"largest difference {value:.1e} ({name})"


def trained(job: Job, folder: Path, strategy: str = "single", **settings: Any) -> Run:
    """Train a job on CPU devices: one under ``single``, three under ``dp``, two under others.

    Three replicas leave one without a sample in some batches.

    Args:
        job: what to train.
        folder: of the run.
        strategy: its name.
        settings: of ``train``, or fields of the job to replace.
    """
    devices = {"single": "1xcpu", "dp": "3xcpu"}.get(strategy, "2xcpu")
    settings = {"devices": devices, "quiet": True, **settings}
    return train(job, strategy=strategy, folder=folder, **settings)


def parity(
    job: Job,
    strategy: str | Strategy,
    devices: Devices,
    *,
    against: str | Strategy = "single",
    against_devices: Devices = "1xcpu",
    against_settings: dict[str, Any] | None = None,
    precision: PrecisionName = "fp64",
    **settings: Any,
) -> Differences:
    """Train a job under two strategies, and compare.

    Args:
        job: what to train; take one whose epochs end with a smaller batch, and at least two of
            them.
        strategy: the one in question.
        devices: its devices.
        against: the one to hold it against.
        against_devices: its devices.
        against_settings: fields of the job to replace on that side only.
        precision: of both; float64 tells rounding and faults apart.
        settings: fields of the job to replace on both sides.
    """
    job = job.replace(**{"save_frozen": True, **settings}, precision=precision)
    with tempfile.TemporaryDirectory() as folder:
        a = train(job, strategy=strategy, devices=devices, folder=folder, quiet=True)
        b = train(
            job,
            strategy=against,
            devices=against_devices,
            folder=folder,
            quiet=True,
            **(against_settings or {}),
        )
        return differences(job, a, b)


def differences(job: Job, a: Run, b: Run) -> Differences:
    """Compare two runs of a job by their saved weights and their records."""
    start = build_model(job.replace(precision="fp64"), World(devices=parse("1xcpu")))
    ends = [load_weights(RunFolder(run.folder).model) for run in (a, b)]
    if ends[0].keys() != ends[1].keys():
        raise AssertionError(
            f"the state dicts have different names: {sorted(ends[0].keys() ^ ends[1].keys())}"
        )
    reach = next(record["lr"] for record in b.history if "lr" in record) * b.summary["steps"]
    parameters, moved = {}, {}
    for name, p in start.named_parameters():
        da, db = (real(end[name]) - real(p.detach()) for end in ends)
        change = largest(db)
        parameters[name] = change_apart(largest(da - db), change, reach)
        moved[name] = change > 0
    buffers = {
        name: buffer_apart(ends[0][name], ends[1][name])
        for name, _ in start.named_buffers()
        if name in ends[0]
    }
    return Differences(parameters, buffers, _histories(a, b), moved)


def _histories(a: Run, b: Run) -> dict[str, float]:
    mine = {record["step"]: record for record in a.history}
    worst: dict[str, float] = {}
    for (
        right
    ) in b.history:  # the other may have records beside, where it was stopped within an epoch
        left = mine.get(right["step"], {})
        for name in (left.keys() | right.keys()) - set(_TIMES):
            x, y = left.get(name, math.inf), right.get(name, math.inf)
            alike = x == y or (math.isnan(x) and math.isnan(y))
            apart = 0.0 if alike else abs(x - y) / max(abs(y), 1e-300)
            worst[name] = max(worst.get(name, 0.0), math.inf if math.isnan(apart) else apart)
    return worst


def same_bits(a: nn.Module, b: nn.Module) -> bool:
    """Whether two models hold the same parameters and buffers to the last bit."""
    mine, theirs = a.state_dict(), b.state_dict()
    return mine.keys() == theirs.keys() and all(
        torch.equal(mine[name], theirs[name]) for name in mine
    )
