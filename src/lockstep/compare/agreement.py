"""Do a strategy's numbers agree with those of one device? A short check: three updates, the weights afterwards.

The first update is on the epoch's smaller last batch. Both sides run in float64 where the model can, since rounding is
then near 1e-15 and a fault shows as 1e-3; elsewhere in the job's own number format, where less can be told.

This is the one place where a comparison asks that question (``lockstep verify`` answers it at length).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from lockstep.compare.entries import Entry
from lockstep.compare.timed_run import Way, weights_after
from lockstep.errors import LockstepError, first_line
from lockstep.job import Job
from lockstep.jobfile import JobFile, the_job, with_settings
from lockstep.model.checkpoint import load_weights
from lockstep.strategies import choose

UPDATES = 3

_EQUAL = {"fp64": 1e-9, "": 1e-4}
"""The largest difference that rounding makes in a few updates, in float64 and in other formats."""


@dataclass(frozen=True)
class Agreement:
    """Whether the numbers are those of one device.

    Attributes:
        equal: up to rounding; None where that can't be told.
        difference: the largest of any parameter, as a part of how far it went.
        precision: what both sides computed in: ``fp64``, or "" for the job's own format.
        reason: why it can't be told.
        micro_batches: in how many one device was given each batch too, where the strategy cuts it for itself.
    """

    equal: bool | None
    difference: float | None = None
    precision: str = ""
    reason: str = ""
    micro_batches: int = 1

    def __str__(self) -> str:
        if self.equal is None:
            return "not known"
        word = "equal" if self.equal else "differs"
        return word if self.difference is None else f"{word} {self.difference:.0e}".replace(" 0e+00", " 0")


class Agreements:
    """The checks of one comparison; what is held against is computed once for all that share it.

    Args:
        job: whose numbers they are.
        folder: for the weights, meanwhile.
    """

    def __init__(self, job: Job | JobFile, folder: Path) -> None:
        self._job = job
        self._folder = folder
        self._references: dict[tuple[Any, ...], tuple[Path, Path, float] | str] = {}
        self._files = 0

    def of(self, entry: Entry) -> Agreement:
        """Hold a row against ``single`` on one of its devices, with as many micro-batches."""
        found = Agreement(None, reason="")
        for precision in ("fp64", ""):
            found = self._held(entry, precision)
            if found.equal is not None:
                return found
        return found

    def _held(self, entry: Entry, precision: str) -> Agreement:
        settings: dict[str, Any] = {"precision": precision, "compile": False} if precision else {}
        way = replace(entry.way, settings={**entry.way.settings, **settings})
        job = the_job(with_settings(self._job, way.settings))
        parts = choose(way.strategy, entry.devices, **way.options).num_microbatches(job)
        reference = self._reference(entry, way, parts)
        if isinstance(reference, str):
            return Agreement(None, precision=precision, reason=f"single: {reference}")
        before, end, reach = reference
        mine = self._file()
        try:
            weights_after(self._job, way, mine, updates=UPDATES)
            difference = difference_of(load_weights(before), load_weights(mine), load_weights(end), reach)
        except LockstepError as error:
            return Agreement(None, precision=precision, reason=first_line(error))
        finally:
            mine.unlink(missing_ok=True)
        cut = parts if parts != job.accumulate else 1
        return Agreement(difference <= _EQUAL[precision], difference, precision, micro_batches=cut)

    def _reference(self, entry: Entry, way: Way, parts: int) -> tuple[Path, Path, float] | str:
        """The weights of ``single`` before and after, and the sum of its learning rates; or why it has none."""
        alone = Way("single", entry.devices[:1], {**way.settings, "accumulate": parts})
        key = (alone.devices, *sorted((name, str(value)) for name, value in alone.settings.items()))
        if key not in self._references:
            before, end = self._file(), self._file()
            try:
                reach = weights_after(self._job, alone, end, updates=UPDATES, before=before)
                self._references[key] = before, end, reach
            except LockstepError as error:
                self._references[key] = first_line(error)
        return self._references[key]

    def _file(self) -> Path:
        self._files += 1
        return self._folder / f"weights-{self._files}.safetensors"


def difference_of(start: Mapping[str, Any], mine: Mapping[str, Any], theirs: Mapping[str, Any], reach: float) -> float:
    """The largest max|da - db| / max(max|db|, reach) of any parameter or buffer, d being its change since the start.

    Args:
        start: what both began with, by name.
        mine: the weights in question.
        theirs: those of one device.
        reach: how far a parameter goes by a gradient of 1: the learning rate times the updates.
    """
    worst = 0.0
    for name, first in start.items():
        if not isinstance(first, torch.Tensor) or not first.numel():
            continue
        a, b, zero = (_wide(state[name]) for state in (mine, theirs, start))
        scale = max(float((b - zero).abs().max()), reach if reach > 0 else 1.0)
        gap = float((a - b).abs().max()) / scale
        worst = max(worst, gap if gap == gap else float("inf"))
    return worst


def _wide(tensor: torch.Tensor) -> torch.Tensor:
    return torch.view_as_real(tensor.to(torch.complex128)) if tensor.is_complex() else tensor.double()
