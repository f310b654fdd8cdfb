"""Comparison: what is compared with what, what was found, and up to where a difference is
rounding.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from lockstep.job import Job
from lockstep.jobfile import JobFile, the_job, with_settings
from lockstep.launch.devices import Device
from lockstep.launch.world import place_of
from lockstep.run.events import Caveat
from lockstep.strategies import Strategy
from lockstep.strategies.single import Single
from lockstep.verify.determinism import Thing
from lockstep.verify.measures import relative


@dataclass(frozen=True)
class Experiment:
    """What is compared with what: the side in question, and one device.

    Attributes:
        job: whose course both sides go through.
        strategy: of the side in question.
        devices: likewise.
        parts: micro-batches of a global batch on one device.
        settings: fields of the job to replace on both sides.
        cut: micro-batches on the side in question, where not the strategy's own.
        updates: how many; None goes to the end, and evaluates.
        still: what is taken out of the model on both sides.
        shuffled: whether the side in question mixes the rows of each micro-batch.
        watched: the update in which every layer is looked at.
        checked: whether the sum check of a training runs too; it refuses some jobs, and logs notes.
    """

    job: Job | JobFile
    strategy: Strategy
    devices: tuple[Device, ...]
    parts: int
    settings: dict[str, Any] = field(default_factory=dict)
    cut: int | None = None
    updates: int | None = None
    still: frozenset[Thing] = frozenset()
    shuffled: bool = False
    watched: int = 0
    checked: bool = False

    def but(self, **changes: Any) -> Experiment:
        """Return the same with other fields."""
        return dataclasses.replace(self, **changes)

    def of_single(self, **changes: Any) -> Experiment:
        """Return the same with one device in the place of the strategy.

        It is compared with itself, but for the changes.
        """
        device = place_of(self.devices)
        alone = self.but(strategy=Single(), devices=(device,), cut=self.parts)
        return alone.but(**changes)

    @property
    def loaded(self) -> Job:
        """Return the job with its settings."""
        return the_job(with_settings(self.job, self.settings))

    @property
    def shares(self) -> int:
        """Replicas that each micro-batch is cut for."""
        return self.strategy.layout(len(self.devices)).local_batches


Difference = tuple[str, str, float]
"""A kind (``gradients``), a name, and how large it is."""

EXACT = 1e-10
"""In float64: rounding is near 1e-15, a wrong weight of one sample shows as 1e-3."""

COARSE = 1e-6
"""In float32, where nothing wider was measured."""

_TIMES_NOISE = 30.0
"""How many times the measured noise still counts as noise: one draw of it against another."""

_DOUBT = 0.02
"""In float32, of a metric: a sample whose two best outputs are nearly equal may be counted either
way.
"""


@dataclass(frozen=True)
class Update:
    """One update on both sides.

    Attributes:
        number: from 1.
        epoch: from 1.
        batch: its number in the epoch, from 1.
        samples: of the global batch.
        loss: of the strategy.
        reference: the loss of one device.
        gradients: by name, before clipping: max|a - b| over the larger of max|b| and a thousandth
            of the largest of all.
        parameters: by name, as ``change_apart`` measures them.
        buffers: by name, as ``buffer_apart`` measures them.
    """

    number: int
    epoch: int
    batch: int
    samples: int
    loss: float
    reference: float
    gradients: dict[str, float]
    parameters: dict[str, float]
    buffers: dict[str, float]

    @property
    def losses_apart(self) -> float:
        """Return the relative difference of the losses."""
        return relative(self.loss, self.reference)

    def worst(self, *kinds: str) -> float:
        """Return the largest difference of these kinds, or of all."""
        worst = 0.0
        for kind, _, value in self.numbers():
            if not kinds or kind in kinds:
                worst = max(worst, value)
        return worst

    def numbers(self) -> Iterator[Difference]:
        """Give the kind, the name and the size of every difference."""
        yield "loss", "", self.losses_apart
        for kind in ("gradients", "parameters", "buffers"):
            for name, value in getattr(self, kind).items():
                yield kind, name, value


@dataclass
class Comparison:
    """Both sides over the course: how far they lie apart, and facts that may explain it.

    Attributes:
        updates: every update.
        evaluation: by name, the strategy's value and one device's.
        drifted: the first parameter whose values came to differ between the ranks, if any.
        drew: whether the first update drew random numbers.
        drops: whether there are dropout layers.
        normalises: whether there are batch norms over what a forward sees.
        layer: name and class of the first module that gave other numbers, where watched.
        notes: what was logged before training, and while it ran.
        still: what was taken out of the model on both sides.
    """

    updates: list[Update] = field(default_factory=list)
    evaluation: dict[str, tuple[float, float]] = field(default_factory=dict)
    drifted: str | None = None
    drew: bool = False
    drops: bool = False
    normalises: bool = False
    layer: tuple[str, str] | None = None
    notes: tuple[Caveat, ...] = ()
    still: tuple[Thing, ...] = ()

    @property
    def worst(self) -> float:
        """Return the largest difference of all."""
        return max(self.worst_of(), self._evaluation)

    @property
    def computed(self) -> float:
        """Return the largest difference of losses, gradients and the evaluation.

        An optimizer may make much of a small difference.
        """
        return max(self.worst_of("loss", "gradients"), self._evaluation)

    @property
    def _evaluation(self) -> float:
        """Return the largest difference of a value of the evaluation."""
        pairs = self.evaluation.values()
        return max((relative(a, b) for a, b in pairs), default=0.0)

    def worst_of(self, *kinds: str) -> float:
        """Return the largest difference of these kinds, or of all, in any update."""
        return max((update.worst(*kinds) for update in self.updates), default=0.0)


@dataclass(frozen=True)
class Bounds:
    """Up to where a difference is rounding.

    Attributes:
        least: the bound where nothing wider was measured.
        noise: two runs of one device whose sums were taken in other orders.
    """

    least: float
    noise: Comparison | None = None

    def of(self, kind: str) -> float:
        """Return the bound for a difference of a kind, such as ``gradients``, in any update."""
        if self.noise is None:
            return self.least
        return max(self.least, _TIMES_NOISE * self.noise.worst_of(kind))

    def of_evaluation(self, name: str) -> float:
        """Return the bound for a value of the evaluation."""
        if self.noise is None:
            return self.least

        pair = self.noise.evaluation.get(name, (0.0, 0.0))
        bound = max(self.of("loss"), _TIMES_NOISE * relative(*pair))
        is_loss = name.rpartition("/")[2] == "loss"
        if self.least == COARSE and not is_loss:
            return max(bound, _DOUBT)
        return bound

    def beyond(self, update: Update) -> list[Difference]:
        """Return the differences of an update that are more than rounding."""
        found = []
        for kind, name, value in update.numbers():
            if value > self.of(kind):
                found.append((kind, name, value))
        return found

    def first_apart(self, comparison: Comparison) -> Update | None:
        """Return the first update that differs by more than rounding."""
        for update in comparison.updates:
            if self.beyond(update):
                return update
        return None

    def evaluation_apart(self, comparison: Comparison) -> list[str]:
        """Return the values of the evaluation that differ by more than rounding."""
        found = []
        for name, pair in comparison.evaluation.items():
            if relative(*pair) > self.of_evaluation(name):
                found.append(name)
        return found

    def hold(self, comparison: Comparison) -> bool:
        """Return whether nothing differs by more than rounding."""
        if comparison.drifted:
            return False
        if self.evaluation_apart(comparison):
            return False
        return self.first_apart(comparison) is None
