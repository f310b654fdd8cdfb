"""Tune: which settings make a job faster on this machine, by short timed turns of each against the best so far.

::

    as it is -> strategy and devices -> layout -> optimizer -> loading -> memory        numbers kept
                                                                  |-> precision -> compile     rounding changed

What gains is kept for what comes after it. Nothing is switched on: the person gets the line to paste.
"""

from __future__ import annotations

import shlex
import textwrap
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import torch

from lockstep.compare.entries import Way, first_of
from lockstep.compare.timed_run import Tried, attempt
from lockstep.compare.timing import Timing, in_turns
from lockstep.errors import DeviceError, LockstepError, first_line
from lockstep.job import Job
from lockstep.jobfile import JobFile, as_job, the_job, with_settings
from lockstep.launch import devices as _devices
from lockstep.launch import started_as_rank
from lockstep.launch.devices import Device, Devices
from lockstep.strategies import STRATEGIES, choose

Effect = Literal["numbers kept", "rounding changed"]

_TAKEN = 1.02
"""The gain from which on a setting is kept, if it also gained in every round."""

_HOPELESS = 0.8
"""What comes out below that share of the best in its first turn isn't timed again."""

_PATIENCE = 4.0
"""How many times as long as the best's a first update may take."""


@dataclass(frozen=True)
class Row:
    """One setting, measured.

    Attributes:
        effect: whether the numbers of the job stay what they are.
        stage: what the setting is about.
        setting: what was tried.
        way: the whole of it.
        rate: samples per second, the median; None where it failed.
        gain: against the best before it, a ratio from each round.
        peak: its largest memory against that.
        taken: whether the stages after it build on it.
        remark: why it failed, or what it does to the numbers.
    """

    effect: Effect
    stage: str
    setting: str
    way: Way
    rate: float | None = None
    gain: Timing | None = None
    peak: float | None = None
    taken: bool = False
    remark: str = ""


@dataclass(frozen=True)
class Tuning:
    """What tuning found.

    Attributes:
        start: the job as it is.
        kept: with what gained and keeps the numbers.
        changed: with what gained and changes rounding too.
        gain_kept: of ``kept`` against ``start``, measured once more at the end.
        gain_changed: of ``changed`` against ``start``.
        rows: every setting that was tried.
    """

    start: Way
    kept: Way
    changed: Way
    gain_kept: Timing | None
    gain_changed: Timing | None
    rows: tuple[Row, ...]

    @property
    def found(self) -> Way:
        """The fastest way of all."""
        return self.changed

    def as_dict(self) -> dict[str, Any]:
        """Plain values, for a file."""

        def way(of: Way) -> dict[str, Any]:
            return {"strategy": of.strategy, "devices": of.devices, "settings": of.settings}

        def gain(of: Timing | None) -> dict[str, Any] | None:
            return None if of is None else {"median": of.median, "rounds": list(of.rates)}

        return {
            "start": way(self.start),
            "kept": way(self.kept),
            "changed": way(self.changed),
            "gain_kept": gain(self.gain_kept),
            "gain_changed": gain(self.gain_changed),
            "rows": [
                {
                    "effect": row.effect,
                    "stage": row.stage,
                    "setting": row.setting,
                    "samples_per_second": row.rate,
                    "gain": gain(row.gain),
                    "peak": row.peak,
                    "taken": row.taken,
                    "remark": row.remark,
                }
                for row in self.rows
            ],
        }


def tune(
    job: Job | JobFile | Callable[[], Job] | str | Path,
    *,
    strategy: str | None = None,
    devices: Devices = "auto",
    rounds: int = 3,
    seconds: float = 2.0,
    told: Callable[[str], None] | None = print,
    **settings: Any,
) -> Tuning:
    """Try, in short timed turns on this machine, what makes a job faster. Nothing of the job is changed.

    Args:
        job: as in ``train``.
        strategy: try only this one; None tries ``dp`` and ``ddp``, and one device.
        devices: those that may be used: ``"auto"`` are all accelerators, or as many slots as there are cores.
        rounds: how many turns each setting gets against the best before it.
        seconds: how long the timed updates of a turn take at least.
        told: called with each line of the report; None for silence.
        settings: fields of the job to replace.

    Raises:
        InputError: something asked for can't be done.
        LockstepError: the job as it is fails.
    """
    if started_as_rank():
        raise DeviceError("tune tries the settings of one machine, in processes of its own: start it without torchrun")
    source = with_settings(as_job(job), settings)
    chosen = _devices.parse(devices)
    start = Way(choose(strategy, chosen).name, _words(devices, chosen))
    search = _Search(source, start, rounds, seconds, told or (lambda line: None))
    return search.through(strategy, chosen, by_default=devices in ("auto", None))


def _words(devices: Devices, chosen: tuple[Device, ...]) -> str:
    if isinstance(devices, str | int) and devices != "auto":
        return str(devices)
    return first_of(chosen, len(chosen))


@dataclass
class _Search:
    """The best way so far, and what was tried."""

    job: Job | JobFile
    start: Way
    rounds: int
    seconds: float
    told: Callable[[str], None]
    effect: Effect = "numbers kept"
    rows: list[Row] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.way = self.start
        self.settings = the_job(self.job)  # for the values that it has itself

    def through(self, strategy: str | None, chosen: tuple[Device, ...], *, by_default: bool) -> Tuning:
        """All stages, one after the other."""
        self.told(f"each setting in {self.rounds} turns against the best before it; + is kept for those that follow")
        self.best = attempt(self.job, self.start, seconds=self.seconds)
        self.told(f"\nas it is: {shlex.join(self.start.words)}   {self.best.rate:,.4g} samples/s")
        for line in (line for caveat in self.best.caveats for line in _below(str(caveat))):
            self.told(line)
        self.told("\nsettings that keep the numbers      samples/s   gain (lowest, highest)   memory")
        placed = _placements(strategy, chosen, self.settings.batch_size, by_default)
        self.stage("devices", [(f"{way.strategy} on {way.devices}", way) for way in placed if way != self.start])
        if any(caveat.kind == "batchnorm" and caveat.fix for caveat in self.best.caveats):
            self.stage("batch norm", [("sync_batchnorm", self.way.replace(sync_batchnorm=True))], only_told=True)
        if self.best.convolves:
            self.switch("layout", "channels_last")
        self.stage("optimizer", [(f"fused={not self.best.fused}".lower(), self.way.replace(fused=not self.best.fused))])
        if (workers := self.best.workers) is not None:
            others = sorted({0, 1, workers + 1} - {workers})
            self.stage("loading", [(f"loader_workers={n}", self.way.replace(loader_workers=n)) for n in others])
        on_slots = chosen[0].is_slot
        if on_slots:
            self.switch("memory", "keep_memory")
        kept = self.way
        self.effect = "rounding changed"
        self.told("\nsettings that change rounding")
        names = {torch.float64: ["fp32"]}.get(self.best.dtype, [] if on_slots else ["fp16"])
        names = [name for name in ["bf16", *names] if name != self.settings.precision]
        self.stage("precision", [(f"precision={name}", self.way.replace(precision=name)) for name in names])
        if not self.settings.compile:
            compiled = self.way.replace(compile=True)
            ways = [("compile", compiled)]
            if compiled.strategy == "dp" and strategy is None:  # whose threads can't compile all that processes can
                ways.append(("compile, ddp", replace(compiled, strategy="ddp")))
            self.stage("compile", ways)
        return self.confirmed(kept)

    def switch(self, stage: str, name: str) -> None:
        """Try the other value of a setting that is true or false."""
        value = not self.way.settings.get(name, getattr(self.settings, name))
        self.stage(stage, [(name if value else f"{name}=false", self.way.replace(**{name: value}))])

    def stage(self, stage: str, ways: Sequence[tuple[str, Way]], *, only_told: bool = False) -> None:
        """Try these against the best so far; the best of them takes its place, where it gains."""
        first: dict[str, Tried] = {}
        failed: list[Row] = []
        for setting, way in ways:
            patience = None if "compile" in way.settings else _PATIENCE * self.best.first
            try:
                first[setting] = attempt(self.job, way, seconds=self.seconds, patience=patience)
            except LockstepError as error:
                failed.append(Row(self.effect, stage, setting, way, remark=first_line(error)))
        by_name = dict(ways)
        highest = max([self.best.rate, *(tried.rate for tried in first.values())])
        timed = [setting for setting, tried in first.items() if tried.rate >= _HOPELESS * highest]
        gains: dict[str, Timing] = {s: Timing((t.rate / self.best.rate,)) for s, t in first.items() if s not in timed}
        rates: dict[str, float] = {setting: tried.rate for setting, tried in first.items()}
        if timed:
            turns = {name: self.turn(way) for name, way in [("", self.way), *((s, by_name[s]) for s in timed)]}
            timings = in_turns(turns, rounds=self.rounds, warm_up=0)
            gains |= {setting: timings[setting].over(timings[""]) for setting in timed}
            rates |= {setting: timings[setting].median for setting in timed}
        good = [s for s in timed if gains[s].median >= _TAKEN and gains[s].spread[0] > 1.0]
        best = max(good, key=lambda setting: gains[setting].median) if good and not only_told else None
        for setting, tried in first.items():
            row = Row(
                self.effect,
                stage,
                setting,
                by_name[setting],
                rates[setting],
                gains[setting],
                tried.peak / self.best.peak,
                taken=setting == best,
                remark=self.remark(tried, setting in timed),
            )
            self.say(row)
        for row in failed:
            self.say(row)
        if best is not None:
            self.way, self.best = by_name[best], first[best]

    def turn(self, way: Way) -> Callable[[], float]:
        return lambda: attempt(self.job, way, seconds=self.seconds).rate

    def remark(self, tried: Tried, timed: bool) -> str:
        said = [str(caveat) for caveat in tried.caveats if caveat not in self.best.caveats]
        if tried.first > 5.0 + 3 * self.best.first:
            said.append(f"its first update took {tried.first:.0f} s, this once at least")
        if not timed:
            said.append("one turn only")
        return "; ".join(said)

    def say(self, row: Row) -> None:
        self.rows.append(row)
        if len(row.remark) > 40 and any(row.remark == before.remark for before in self.rows[:-1]):
            row = replace(row, remark="the same")
        for line in lines_of(row):
            self.told(line)

    def confirmed(self, kept: Way) -> Tuning:
        """Measure what was found against the job as it is, once more."""
        ways = {"start": self.start, "kept": kept, "changed": self.way}
        if kept == self.start:
            del ways["kept"]
        if self.way == kept:
            del ways["changed"]
        gains: dict[str, Timing] = {}
        if len(ways) > 1:
            timings = in_turns({name: self.turn(way) for name, way in ways.items()}, rounds=self.rounds, warm_up=0)
            gains = {name: timings[name].over(timings["start"]) for name in ways if name != "start"}
        gain_kept = gains.get("kept")
        gain_changed = gains.get("changed", gain_kept)
        for name, way in ways.items():
            if name != "start":
                what = "that keep the numbers" if name == "kept" else "of both kinds"
                self.told(f"\nall settings {what}: {_ratio(gains[name])} times as fast as it is")
                self.told(f"  {way.line(self.job)}")
        if len(ways) == 1:
            self.told("\nnothing that was tried is faster than the job as it is")
        self.told("\nnothing was changed: the line is yours to paste")
        return Tuning(self.start, kept, self.way, gain_kept, gain_changed, tuple(self.rows))


def _placements(strategy: str | None, chosen: tuple[Device, ...], batch_size: int, by_default: bool) -> list[Way]:
    """One device, and each exact strategy on 2, 4, ... and all of them."""
    count = len(chosen)
    if by_default and chosen[0].is_slot:
        count = len(_devices.usable_cores())
    counts = sorted({2**k for k in range(1, count.bit_length()) if 2**k <= count} | {count})
    # Those that split layers are for models too large for one device: only where they are asked for.
    names = [
        name
        for name, kind in STRATEGIES.items()
        if kind.exact is True and name != "single" and (name == strategy or not kind.splits_layers)
    ]
    ways = [] if strategy not in (None, "single") else [Way("single", first_of(chosen, 1))]
    for n in counts:
        if 1 < n <= batch_size:
            words = f"{n}xcpu" if chosen[0].is_slot else first_of(chosen, n)
            ways += [Way(name, words) for name in names if strategy in (None, name)]
    return ways


def _ratio(gain: Timing) -> str:
    if len(gain.rates) == 1:
        return f"{gain.median:.2f}"
    return f"{gain.median:.2f} ({gain.spread[0]:.2f}, {gain.spread[1]:.2f})"


def lines_of(row: Row) -> list[str]:
    """A row of the table, and what must be said of it below."""
    if row.rate is None or row.gain is None:
        head = f"  {row.setting:<32}  can't be used here"
    else:
        memory = "" if row.peak is None else f"{row.peak:.2f}"
        mark = "+" if row.taken else " "
        head = f"{mark} {row.setting:<32}{row.rate:>11,.4g}   {_ratio(row.gain):<23}{memory:>7}"
    return [head.rstrip(), *_below(row.remark)]


def _below(remark: str) -> list[str]:
    return textwrap.wrap(remark, 79, initial_indent="    ", subsequent_indent="    ")
