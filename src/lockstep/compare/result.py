"""What a comparison found, and what follows from it: speed-ups, efficiency, who is exact."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from typing import Any

from lockstep.compare.agreement import Agreement
from lockstep.compare.entries import Role
from lockstep.compare.snapshot import Glance, Seen
from lockstep.compare.timing import Timing
from lockstep.launch.events import TimesOf
from lockstep.strategies import kind_of


@dataclass(frozen=True)
class Row:
    """One way to train, measured; the first nine are those of its ``Entry``."""

    name: str
    role: Role
    strategy: str
    settings: dict[str, Any]  # of the job and of the strategy, that this row has and others may not
    devices: Sequence[str]
    where: str
    line: str  # what trains the job so; "" where there is no such line
    one: str
    cores: str | None
    rates: Sequence[float] = field(
        default_factory=list
    )  # samples/s, round by round; empty where it failed
    reason: str = ""  # why it failed
    started: float | None = (
        None  # seconds from asking until the first update was done; the median of all rounds
    )
    peaks: Sequence[int] = field(
        default_factory=list
    )  # bytes that each process, or each accelerator, held at most
    caveats: Sequence[str] = field(
        default_factory=list
    )  # where results differ from single-device training
    plans: Sequence[str] = field(
        default_factory=list
    )  # what was chosen for it: the stages of a pipeline, say
    agreement: Agreement | None = None
    glance: Glance | None = None
    history: Sequence[dict[str, Any]] = field(
        default_factory=list
    )  # with ``epochs``, a record for each
    run: str = ""  # the folder of that training
    # the part of the (first) process's processor time that the system took; the median of rounds
    system: float = 0.0

    @property
    def timing(self) -> Timing:
        """Its rates."""
        return Timing(self.rates)

    @property
    def is_exact(self) -> bool:
        """Whether its numbers are those of one device, as far as that is known."""
        if self.agreement is None or self.agreement.equal is None:
            return kind_of(self.strategy).exact is True
        return self.agreement.equal

    @property
    def clocked(self) -> float:
        """Seconds of an update that was clocked, the mean over ranks or replicas; 0 where that
        isn't known.
        """
        times = () if self.glance is None else self.glance.times
        return statistics.fmean(one.step for one in times) if times else 0.0

    @property
    def shares(self) -> dict[str, float]:
        """The parts of a step (computing, ...), of all ranks or replicas together; empty where
        that isn't known.
        """
        if self.glance is None or not self.clocked:
            return {}
        times = self.glance.times
        return {
            kind: statistics.fmean(one.kinds[kind] for one in times) / self.clocked
            for kind in times[0].kinds
        }


@dataclass(frozen=True)
class Comparison:
    """All rows, and what they were measured with.

    Attributes:
        command: what repeats the comparison.
        batch_size: samples of the global batch (of the job; a sweep may have others).
        machine: what it was measured on, and the versions.
        rows: in the order of measuring.
        folder: where the report is.
        keeps_memory: whether the job asks for ``keep_memory``.
    """

    job: str
    command: str
    batch_size: int
    rounds: int
    seconds: float
    machine: dict[str, Any]
    on_slots: bool
    rows: Sequence[Row]
    folder: str = ""
    keeps_memory: bool = False

    def __getitem__(self, name: str) -> Row:
        """The row of that name."""
        return next(row for row in self.rows if row.name == name)

    @property
    def measured(self) -> list[Row]:
        """The rows that didn't fail."""
        return [row for row in self.rows if row.rates]

    def samples_of(self, row: Row) -> int:
        """Samples of the global batches of a row."""
        return int(row.settings.get("batch_size", self.batch_size))

    def speed_up(self, row: Row) -> Timing | None:
        """How many times as fast as one of its devices it is, from each round; None where either
        failed.
        """
        return self._ratio(row, row.one)

    def against_cores(self, row: Row) -> Timing | None:
        """Likewise of all cores of the machine, where slots are the devices."""
        return None if row.cores is None else self._ratio(row, row.cores)

    def _ratio(self, row: Row, to: str) -> Timing | None:
        return row.timing.over(self[to].timing) if row.rates and self[to].rates else None

    def efficiency(self, row: Row) -> float | None:
        """The speed-up over one device, for each device; 1 is all that there is to gain."""
        speed_up = self.speed_up(row)
        return None if speed_up is None else speed_up.median / len(row.devices)

    def as_dict(self) -> dict[str, Any]:
        """Plain values, for a file; ``Comparison.of`` reads them."""
        rows = []
        for row in self.rows:
            speed_up, cores = self.speed_up(row), self.against_cores(row)
            rows.append(
                {
                    **asdict(row),
                    "samples_per_second": row.timing.median if row.rates else None,
                    "speed_up": None if speed_up is None else speed_up.median,
                    "against_all_cores": None if cores is None else cores.median,
                    "efficiency": self.efficiency(row),
                }
            )
        return {**asdict(self), "rows": rows}

    @classmethod
    def of(cls, values: Mapping[str, Any]) -> Comparison:
        """What ``as_dict`` gave."""
        return cls(**{**values, "rows": [_row(row) for row in values["rows"]]})


def _row(values: Mapping[str, Any]) -> Row:
    kept = {one.name: values[one.name] for one in fields(Row)}
    agreement, glance = kept["agreement"], kept["glance"]
    if agreement is not None:
        kept["agreement"] = Agreement(**agreement)
    if glance is not None:
        devices = [Seen(**one) for one in glance["devices"]]
        times = [TimesOf(**one) for one in glance["times"]]
        kept["glance"] = Glance(**{**glance, "devices": devices, "times": times})
    return Row(**kept)
