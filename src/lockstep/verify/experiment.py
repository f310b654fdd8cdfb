"""Experiment: what is held against what, as plain values that ranks can be sent."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from lockstep.job import Job
from lockstep.jobfile import JobFile
from lockstep.launch.devices import Device
from lockstep.strategies import Strategy
from lockstep.verify.determinism import Thing


@dataclass(frozen=True)
class Experiment:
    """What is held against what.

    Attributes:
        job: whose course both sides go through.
        strategy: the side in question.
        devices: its devices.
        settings: fields of the job to replace on both sides.
        more: batches of the first epoch that are verified beside, for their targets.
        cut: micro-batches on the side in question, where they are to be others than on the other.
        updates: how many; None goes to the end, and evaluates.
        still: what is taken out of the model on both sides.
        shuffled: the side in question mixes the rows of each micro-batch.
        deterministic: operators that aren't deterministic raise.
        watched: the update in which every layer is looked at; the first that gave other numbers is told.
        bound: for that.
        looked: the first update needn't see what the model does in forward, and refuse it: an earlier one has.
    """

    job: Job | JobFile
    strategy: Strategy
    devices: tuple[Device, ...]
    settings: dict[str, Any] = field(default_factory=dict)
    more: tuple[int, ...] = ()
    cut: int | None = None
    updates: int | None = None
    still: frozenset[Thing] = frozenset()
    shuffled: bool = False
    deterministic: bool = False
    watched: int = 0
    bound: float = 0.0
    looked: bool = False
