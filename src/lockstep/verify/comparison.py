"""Comparison: what is compared, how far the two runs lie apart after each update, and up to
where that is rounding.
"""

from __future__ import annotations

import dataclasses
import hashlib
import statistics
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from lockstep.job import Job
from lockstep.jobfile import JobFile, the_job, with_settings
from lockstep.launch.devices import Device
from lockstep.launch.events import Caveat
from lockstep.launch.world import place_of
from lockstep.strategies import Strategy
from lockstep.strategies.single import Single
from lockstep.tensors.digest import bits_of
from lockstep.tensors.pytree import tensors
from lockstep.verify.determinism import Thing
from lockstep.verify.measures import relative

EXACT = 1e-10
"""Where numbers are in float64: rounding is near 1e-15, a wrong weight of one sample shows as
1e-3.
"""

COARSE = 1e-6
"""In float32, where nothing wider was measured."""

_TIMES_NOISE = 30.0
"""How many times the measured noise still counts as noise: one draw of it against another."""


@dataclass(frozen=True)
class Rows:
    """How the samples of one side differ from those of one device."""

    repeated: tuple[int, ...] = ()  # numbers in the dataset of those that were used more often
    left_out: tuple[int, ...] = ()  # of those that were used less often
    others: int = 0  # how many are no samples of that batch at all

    def __bool__(self) -> bool:
        return bool(self.repeated or self.left_out or self.others)


@dataclass(frozen=True)
class Update:
    """One update on both sides."""

    number: int  # from 1
    epoch: int  # from 1
    batch: int  # its number in the epoch, from 1
    samples: int  # of the global batch
    loss: float  # of the strategy
    reference: float  # the loss of one device
    # By name, before clipping: max|a - b| over the larger of max|b| and a thousandth of the largest
    # of all.
    gradients: dict[str, float]
    ratios: dict[
        str, float
    ]  # by name, how many times one device's gradient the strategy's is, where it is a multiple
    parameters: dict[str, float]  # by name, as ``parity`` measures them
    buffers: dict[str, float]  # by name likewise
    rates: tuple[float, ...]  # learning rates of the strategy, group by group
    reference_rates: tuple[float, ...]  # of one device
    rows: Rows  # how the samples differ

    @property
    def losses_apart(self) -> float:
        """The relative difference of the losses."""
        return relative(self.loss, self.reference)

    @property
    def rates_apart(self) -> float:
        """The largest relative difference of a learning rate."""
        pairs = zip(self.rates, self.reference_rates, strict=True)
        return max((relative(a, b) for a, b in pairs), default=0.0)

    @property
    def computed(self) -> float:
        """The largest difference of the loss and of gradients."""
        return max(value for kind, _, value in self.numbers() if kind in ("loss", "gradients"))

    def numbers(self) -> Iterator[tuple[str, str, float]]:
        """Every difference: its kind, its name, and how large it is."""
        yield "loss", "", self.losses_apart
        yield "learning rate", "", self.rates_apart
        for kind in ("gradients", "parameters", "buffers"):
            for name, value in getattr(self, kind).items():
                yield kind, name, value


@dataclass
class Comparison:
    """Both sides over the course: how far they lie apart, and what was seen of the model that
    may say why.
    """

    start: tuple[str, ...] = ()  # parameters and buffers that differed before the first update
    updates: list[Update] = field(default_factory=list)
    evaluation: dict[str, tuple[float, float]] = field(
        default_factory=dict
    )  # the strategy's value, and one device's
    drifted: tuple[str, ...] = ()  # parameters whose values came to differ between the ranks
    # Buffers that are other ones on each replica after the first update; which changed it, where
    # not all did.
    own_buffers: dict[str, tuple[int, ...]] = field(default_factory=dict)
    # Plain attributes of modules ("body.calls") that training changed, and that ended otherwise
    # than on one device.
    apart_attributes: tuple[str, ...] = ()
    # From where the first update drew random numbers: "somewhere", "elsewhere" (Python or numpy),
    # "backward".
    drew: tuple[str, ...] = ()
    drops: bool = False  # whether there are dropout layers, which may be switched off
    normalises: bool = False  # whether there are batch norms over what a forward sees
    mixes: bool = (
        False  # whether the look before training saw outputs depend on other samples, and no memory
    )
    reads: tuple[
        str, ...
    ] = ()  # outputs over a whole forward, no sum over its samples, that the loss reads
    collated: bool = False  # whether collate made other rows of the shares than of the whole batch
    layer: tuple[str, str] | None = (
        None  # name and class of the first module that gave other numbers, where watched
    )
    called: tuple[str, ...] = ()  # the modules in the order of their first call, where watched
    functions: tuple[str, ...] = ()  # autograd functions that are not PyTorch's own
    hooked: tuple[str, ...] = ()  # parameters with hooks on their gradients
    notes: tuple[Caveat, ...] = ()  # what was said before training, and while it ran
    still: tuple[Thing, ...] = ()  # what was taken out of the model on both sides

    @property
    def worst(self) -> float:
        """The largest difference of all."""
        return self._worst(("loss", "learning rate", "gradients", "parameters", "buffers"))

    @property
    def computed(self) -> float:
        """The largest difference of what is computed: losses, gradients and the evaluation.

        An optimizer may make much of a small difference.
        """
        return self._worst(("loss", "gradients"))

    def _worst(self, kinds: Sequence[str]) -> float:
        values = [
            value for update in self.updates for kind, _, value in update.numbers() if kind in kinds
        ]
        return max([*values, *(relative(a, b) for a, b in self.evaluation.values())], default=0.0)


@dataclass(frozen=True)
class Bounds:
    """Up to where a difference is rounding."""

    least: float  # for any number
    noise: Comparison | None = None  # two runs of one device whose sums were taken in other orders

    def of(self, kind: str, name: str) -> float:
        """The bound for a difference of a kind, such as ``gradients``, in any update."""
        noise = self._noise(kind)
        own = max((value for n, value in noise if n == name), default=0.0)
        bound = max(self.least, _TIMES_NOISE * own, _TIMES_NOISE * self.typical(kind))
        if kind == "parameters":
            # Adam makes of a gradient near its epsilon what it likes, of any parameter, in any run.
            worst = max((value for _, value in noise), default=0.0)
            bound = max(bound, (_TIMES_NOISE if worst < COARSE else 3.0) * worst)
        return bound

    def typical(self, kind: str) -> float:
        """The median noise of a kind."""
        return statistics.median([value for _, value in self._noise(kind)] or [0.0])

    def _noise(self, kind: str) -> list[tuple[str, float]]:
        """Of every update: names and noise."""
        updates = () if self.noise is None else self.noise.updates
        return [
            (name, value)
            for update in updates
            for which, name, value in update.numbers()
            if which == kind
        ]

    def of_evaluation(self, name: str) -> float:
        """The bound for a value of the evaluation."""
        if self.noise is None:
            return self.least
        a, b = self.noise.evaluation.get(name, (0.0, 0.0))
        # A sample whose two best outputs are as good as equal may fall to either side.
        doubt = 0.0 if self.least < COARSE or name == "loss" or name.endswith("/loss") else 0.02
        return max(
            self.least,
            _TIMES_NOISE * max([relative(a, b), *(v for _, v in self._noise("loss"))]),
            doubt,
        )

    def beyond(self, update: Update) -> list[tuple[str, str, float]]:
        """The differences of an update that are more than rounding."""
        return [
            (kind, name, value)
            for kind, name, value in update.numbers()
            if value > self.of(kind, name)
        ]

    def first_apart(self, comparison: Comparison) -> Update | None:
        """The first update that differs by more than rounding, or in its samples."""
        return next((u for u in comparison.updates if u.rows or self.beyond(u)), None)

    def evaluation_apart(self, comparison: Comparison) -> list[str]:
        """The values of the evaluation that differ by more than rounding."""
        return [
            n
            for n, (a, b) in comparison.evaluation.items()
            if relative(a, b) > self.of_evaluation(n)
        ]

    def hold(self, comparison: Comparison) -> bool:
        """Whether nothing differs by more than rounding."""
        if comparison.start or comparison.drifted or self.evaluation_apart(comparison):
            return False
        return self.first_apart(comparison) is None


@dataclass(frozen=True)
class Experiment:
    """What is held against what: the side in question, and one device."""

    job: Job | JobFile  # whose course both sides go through
    strategy: Strategy
    devices: tuple[Device, ...]
    parts: int  # micro-batches of a global batch on one device
    settings: dict[str, Any] = field(
        default_factory=dict
    )  # fields of the job to replace on both sides
    more: tuple[
        int, ...
    ] = ()  # batches of the first epoch that are verified beside, for their targets
    cut: int | None = None  # micro-batches on the side in question, where not the strategy's own
    updates: int | None = None  # how many; None goes to the end, and evaluates
    still: frozenset[Thing] = frozenset()  # what is taken out of the model on both sides
    shuffled: bool = False  # the side in question mixes the rows of each micro-batch
    deterministic: bool = False  # operators that aren't deterministic raise
    watched: int = 0  # the update in which every layer is looked at
    looked: bool = (
        False  # an earlier one has seen what the model does in forward, and didn't refuse it
    )

    def but(self, **changes: Any) -> Experiment:
        """The same with other fields."""
        return dataclasses.replace(self, **changes)

    def of_single(self, **changes: Any) -> Experiment:
        """The same with one device in the place of the strategy: it is held against itself, but
        for the changes.
        """
        return self.but(
            **{
                "strategy": Single(),
                "devices": (place_of(self.devices),),
                "cut": self.parts,
                **changes,
            }
        )

    @property
    def loaded(self) -> Job:
        """The job with its settings."""
        return the_job(with_settings(self.job, self.settings))

    @property
    def shares(self) -> int:
        """Replicas that each micro-batch is cut for."""
        return self.strategy.layout(len(self.devices)).local_batches


def row_ids(inputs: Any, targets: Any, size: int) -> list[bytes] | None:
    """An id for each of ``size`` samples, or None where no tensor has a row for each.

    It is a hash of the bits of a sample's rows: the same in any order and on any rank, and equal
    samples have equal ids.
    """
    hashes = [hashlib.blake2b(digest_size=8) for _ in range(size)]
    found = False
    for tensor in tensors((inputs, targets)):
        if (
            not tensor.dim()
            or tensor.shape[0] != size
            or tensor.layout != torch.strided
            or not tensor.numel()
        ):
            continue
        found = True
        rows = tensor.detach().cpu().resolve_conj().resolve_neg()
        for made, row in zip(hashes, bits_of(rows).view(size, -1).numpy(), strict=True):
            made.update(row)
    return [made.digest() for made in hashes] if found else None


def rows_apart(ours: list[bytes], theirs: list[bytes], samples: list[int] | None) -> Rows:
    """Compare the row ids of one device (``theirs``) with those of a strategy, in any order.

    ``samples`` are the numbers in the dataset of ``theirs``; where they aren't known, places in the
    batch are given.
    """
    names = dict(zip(theirs, samples if samples is not None else range(len(theirs)), strict=True))
    counts, wanted = Counter(ours), Counter(theirs)
    more, fewer = counts - wanted, wanted - counts
    return Rows(
        tuple(sorted(names[row] for row in more if row in names)),
        tuple(sorted(names[row] for row in fewer)),
        sum(count for row, count in more.items() if row not in names),
    )
