"""The result of a comparison, and what follows from it: speed-ups, efficiency, who is exact."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from lockstep.compare.agreement import Agreement
from lockstep.compare.planned_rows import Role
from lockstep.compare.timing import Timing
from lockstep.strategies import kind_of


@dataclass(frozen=True)
class Row:
    """One way to train, measured; the first nine fields are those of its ``Entry``.

    Attributes:
        name: of the row.
        role: what it is in the comparison.
        strategy: by name.
        settings: of the job and of the strategy, which this row has and others may not.
        devices: their names.
        where: the devices in words.
        line: the command that trains the job so.
        one: the name of the row that is its one device.
        cores: the name of the row that is all cores, where the devices are CPU devices.
        rates: samples per second, round by round; empty where it failed.
        reason: why it failed.
        started: seconds from the call until the first update was done, the median of all rounds.
        peaks: the most bytes that each process, or each accelerator, held.
        caveats: where results differ from single-device training.
        plans: what was chosen for it, such as the stages of a pipeline.
        agreement: whether its numbers are those of one device.
        shapes: the ``device``, ``inputs`` and ``outputs`` of the first micro-batch of each replica
            that has a sample: by its path in the nest, the shape of each tensor.
        history: with ``epochs``, the lines of its ``metrics.jsonl``.
    """

    name: str
    role: Role
    strategy: str
    settings: dict[str, Any]
    devices: Sequence[str]
    where: str
    line: str
    one: str
    cores: str | None
    rates: Sequence[float] = field(default_factory=list)
    reason: str = ""
    started: float | None = None
    peaks: Sequence[int] = field(default_factory=list)
    caveats: Sequence[str] = field(default_factory=list)
    plans: Sequence[str] = field(default_factory=list)
    agreement: Agreement | None = None
    shapes: Sequence[dict[str, Any]] = field(default_factory=list)
    history: Sequence[dict[str, Any]] = field(default_factory=list)

    @property
    def timing(self) -> Timing:
        """The rates of its turns."""
        return Timing(self.rates)

    @property
    def is_exact(self) -> bool:
        """Whether its numbers are those of one device, as far as that is known."""
        if self.agreement is None or self.agreement.equal is None:
            return kind_of(self.strategy).exact is True
        return self.agreement.equal


@dataclass(frozen=True)
class Comparison:
    """All rows, and what they were measured with.

    Attributes:
        job: the path of the job file, or ``job``.
        batch_size: samples of the global batch (of the job; a sweep may have others).
        rounds: how many turns each row had.
        seconds: how long the timed updates of a turn took at least.
        machine: what it was measured on, and the versions.
        on_slots: whether the devices are CPU devices.
        rows: in the order of measuring.
        folder: where the report is.
    """

    job: str
    batch_size: int
    rounds: int
    seconds: float
    machine: dict[str, Any]
    on_slots: bool
    rows: Sequence[Row]
    folder: str = ""

    def __getitem__(self, name: str) -> Row:
        """Return the row of that name."""
        return next(row for row in self.rows if row.name == name)

    @property
    def measured(self) -> list[Row]:
        """The rows that didn't fail."""
        return [row for row in self.rows if row.rates]

    def samples_of(self, row: Row) -> int:
        """Return the samples of the global batches of a row."""
        return int(row.settings.get("batch_size", self.batch_size))

    def speed_up(self, row: Row) -> Timing | None:
        """Return how many times as fast as one of its devices a row is, from each round; None
        where either failed.
        """
        return self._ratio(row, row.one)

    def against_cores(self, row: Row) -> Timing | None:
        """Return how many times as fast as all cores of the machine a row is, where the
        devices are CPU devices.
        """
        return self._ratio(row, row.cores)

    def _ratio(self, row: Row, to: str | None) -> Timing | None:
        """Return the ratio of a row to another one, from each round.

        Args:
            row: of this comparison.
            to: the name of the other row; None where there is none.

        Returns:
            None where one of them failed, too.
        """
        if to is not None and row.rates:
            other = self[to]
            if other.rates:
                return row.timing.over(other.timing)
        return None

    def figures(self, row: Row) -> dict[str, Any]:
        """Return what follows from the measurements of a row, by name, as far as it is known.

        The efficiency is the speed-up for each device: 1 is all that there is to gain.
        """
        figures: dict[str, Any] = {}
        if row.rates:
            figures["samples_per_second"] = row.timing.median
            figures["lowest"], figures["highest"] = row.timing.spread
            speed_up = self.speed_up(row)
            if speed_up is not None:
                figures["speed_up"] = speed_up.median
                figures["efficiency"] = speed_up.median / len(row.devices)
            against_cores = self.against_cores(row)
            if against_cores is not None:
                figures["against_all_cores"] = against_cores.median
            figures["largest_memory_bytes"] = max(row.peaks)
            figures["memory_bytes"] = sum(row.peaks)
            figures["start_seconds"] = row.started
        if row.agreement is not None:
            figures["parity"] = row.agreement.word
            figures["difference"] = row.agreement.difference
        return figures

    def as_dict(self) -> dict[str, Any]:
        """Return plain values, for a file."""
        rows = [{**asdict(row), **self.figures(row)} for row in self.rows]
        return {**asdict(self), "rows": rows}
