"""Tune: which settings make a job faster on this machine, by short timed turns of each against the
best so far.

::

    as it is -> strategy and devices -> precision -> compile -> layout -> loading -> memory

Precision and compile, which change rounding, come first: on accelerators they gain the most, and
which layout and how many loader workers are best depends on them. What gains is kept for what comes
after it. Nothing is switched on: the person gets the line to paste, with and without what changes
rounding.
"""

from __future__ import annotations

import shlex
import textwrap
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from lockstep.compare.planned_rows import Setup, first_of
from lockstep.compare.timed_run import TrialResult, Turns, attempt, in_turns
from lockstep.compare.timing import Timing
from lockstep.errors import DeviceError, counted
from lockstep.job import Job
from lockstep.jobfile import JobFile, as_job, the_job, with_settings
from lockstep.launch import devices as _devices
from lockstep.launch import started_as_rank
from lockstep.launch.devices import Device, Devices
from lockstep.model.compile import GRAPHED
from lockstep.model.precision import ROUNDING
from lockstep.strategies import choose, devices_for

_TAKEN = 1.02
"""The least gain of a setting that is kept; it also gained in every round."""


@dataclass(frozen=True)
class Row:
    """One setting, measured.

    Attributes:
        stage: what the setting is about.
        setting: what was tried.
        samples_per_second: the median; None where it failed.
        gain: against the best before it, a ratio from each round.
        peak: its largest memory against that of the best before it.
        taken: whether the stages after it build on it.
        remark: why it failed, or what it does to the numbers.
    """

    stage: str
    setting: str
    samples_per_second: float | None = None
    gain: Timing | None = None
    peak: float | None = None
    taken: bool = False
    remark: str = ""


@dataclass(frozen=True)
class Tuning:
    """What tuning found.

    Attributes:
        start: the job as it is.
        kept: with what gained and keeps the numbers; ``start`` where that was not faster in the
            end.
        changed: with what gained and changes rounding too; ``kept`` where that was not faster in
            the end.
        gain_kept: of ``kept`` against ``start``, measured once more at the end; None where nothing
            is recommended.
        gain_changed: of ``changed`` against ``start``.
        rows: every setting that was tried.
    """

    start: Setup
    kept: Setup
    changed: Setup
    gain_kept: Timing | None
    gain_changed: Timing | None
    rows: Sequence[Row]

    def as_dict(self) -> dict[str, Any]:
        """Return plain values, for a file."""
        return asdict(self)


def tune(
    job: Job | JobFile | Callable[[], Job] | str | Path,
    *,
    strategy: str | None = None,
    devices: Devices = "auto",
    rounds: int = 3,
    seconds: float = 2.0,
    log: Callable[[str], None] | None = print,
    **settings: Any,
) -> Tuning:
    """Try, in short timed turns on this machine, what makes a job faster. Nothing of the job is
    changed.

    Args:
        job: as in ``train``.
        strategy: try only this one; None tries ``dp`` and ``ddp``, and one device.
        devices: those that may be used: ``"auto"`` are all accelerators, or as many CPU devices as
            there are cores.
        rounds: how many turns each setting gets against the best before it.
        seconds: how long the timed updates of a turn take at least.
        log: called with each line of the report; None for silence.
        settings: fields of the job to replace.

    Raises:
        InputError: something asked for can't be done.
        LockstepError: the job as it is fails.
    """
    if started_as_rank():
        raise DeviceError(
            "tune tries the settings of one machine, in processes of its own: start it without "
            "torchrun"
        )
    source = with_settings(as_job(job), settings, tune)
    devices = devices_for(strategy, devices)
    chosen = _devices.parse(devices)
    count = len(chosen)
    start = Setup(choose(strategy, chosen).name, first_of(chosen, count))
    if devices in ("auto", None) and chosen[0].is_slot:
        count = len(_devices.usable_cores())
    search = _Search(source, start, rounds, seconds, log or (lambda line: None))
    search.begin()
    search.stage("devices", _placements(strategy, chosen, count, search.settings.batch_size))
    search.change_rounding(chosen[0].type)
    search.keep_numbers()
    return search.confirmed()


@dataclass
class _Search:
    """The best setup so far, and what was tried.

    Attributes:
        job: whose settings are searched for.
        start: the job as it is.
        rounds: turns of each setting.
        seconds: of the timed updates of a turn.
        log: called with each line of the report.
        rows: every setting that was tried.
        setup: the best so far.
        best: what a trial of that found.
        settings: the job, loaded.
    """

    job: Job | JobFile
    start: Setup
    rounds: int
    seconds: float
    log: Callable[[str], None]
    rows: list[Row] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.setup = self.start
        self.settings = the_job(self.job)

    def begin(self) -> None:
        """Time the job as it is.

        Raises:
            LockstepError: it fails.
        """
        self.best = attempt(self.job, self.start, seconds=self.seconds)
        words = shlex.join(self.start.words)
        self.log(f"as it is: {words}   {self.best.rate:,.4g} samples/s")
        for caveat in self.best.caveats:
            self.below(str(caveat))
        turns = counted(self.rounds, "turn")
        self.log(
            f"\neach setting has {turns} against the best before it; + is kept for later ones; "
            "precision and compile change rounding"
        )
        self.log(
            "\nsetting                             samples/s   gain (lowest, highest)   memory"
        )

    def change_rounding(self, kind: str) -> None:
        """Try formats, and then ways to compile.

        Args:
            kind: the type of the devices.
        """
        is_laid_out = self.settings.channels_last or not self.best.convolves
        setups = {}
        for name in formats(kind):
            if name == self.settings.precision:
                continue
            words = f"precision={name}"
            setup = self.setup.replace(precision=name)
            # In the usual layout convolutions gain little by a half format, or lose.
            if name != "tf32" and kind != "cpu" and not is_laid_out:
                words += ", channels_last"
                setup = setup.replace(channels_last=True)
            setups[words] = setup
        self.stage("precision", setups)
        if self.settings.compile:
            return
        graphs = self.settings.accumulate == 1 and self.setup.strategy != "dp"
        setups = {}
        for mode in compilations(kind, graphs=graphs):
            words = "compile" if mode is True else f"compile={mode}"
            setups[words] = self.setup.replace(compile=mode)
        self.stage("compile", setups)

    def keep_numbers(self) -> None:
        """Try the layout of convolutions, other numbers of loader workers, and kept memory."""
        if self.best.convolves:
            self.switch("layout", "channels_last")
        workers = self.best.workers
        if workers is not None:
            half = workers // 2
            more = workers + max(1, half)
            setups = {}
            for count in sorted({0, half, more} - {workers}):
                setups[f"loader_workers={count}"] = self.setup.replace(loader_workers=count)
            self.stage("loading", setups)
        self.switch("memory", "keep_memory")

    def switch(self, stage: str, name: str) -> None:
        """Try the other value of a setting that is true or false.

        Args:
            stage: what the setting is about.
            name: of the setting.
        """
        before = self.setup.settings.get(name, getattr(self.settings, name))
        words = f"{name}=false" if before else name
        self.stage(stage, {words: self.setup.replace(**{name: not before})})

    def stage(self, stage: str, setups: Mapping[str, Setup]) -> None:
        """Try setups in turns with the best so far; the fastest one takes its place, where it
        gains.

        Args:
            stage: what these settings are about.
            setups: by the words of the table.
        """
        found = self.turns(setups)
        gains = {}
        for setting, (_, gain) in found.items():
            if gain is not None and gain.median >= _TAKEN and gain.spread[0] > 1.0:
                gains[setting] = gain.median
        taken = max(gains, key=gains.__getitem__, default=None)
        for setting, (turns, gain) in found.items():
            row = Row(stage, setting, remark=turns.reason)
            if not turns.reason:
                row = Row(
                    stage,
                    setting,
                    samples_per_second=turns.timing.median,
                    gain=gain,
                    peak=turns.tries[0].peak / self.best.peak,
                    taken=setting == taken,
                    remark=self.remark(turns.tries[0]),
                )
            self.log_row(row)
        if taken is not None:
            self.setup = setups[taken]
            self.best = found[taken][0].tries[0]

    def turns(self, setups: Mapping[str, Setup]) -> dict[str, tuple[Turns, Timing | None]]:
        """Return the turns of each setup but the best so far, and its gain against that; None where
        it failed.

        Args:
            setups: by the words of the table.
        """
        others = {words: setup for words, setup in setups.items() if setup != self.setup}
        if not others:
            return {}
        found = in_turns(self.job, {"": self.setup, **others}, self.rounds, self.seconds)
        best = found.pop("").timing
        gains: dict[str, tuple[Turns, Timing | None]] = {}
        for words, turns in found.items():
            gains[words] = turns, None if turns.reason else turns.timing.over(best)
        return gains

    def remark(self, tried: TrialResult) -> str:
        """Return what a person should know of a setting, by its first trial."""
        remarks = [str(caveat) for caveat in tried.caveats if caveat not in self.best.caveats]
        if tried.first > 5.0 + 3 * self.best.first:
            remarks.append(f"its first update took {tried.first:.0f} s, this once at least")
        return "; ".join(remarks)

    def log_row(self, row: Row) -> None:
        """Print a line of the table, and below it a remark that no row before it has."""
        if row.gain is None:
            self.log(f"  {row.setting:<32}  can't be used here")
        else:
            mark = "+" if row.taken else " "
            rate = f"{row.samples_per_second:,.4g}"
            gain = _ratio(row.gain)
            self.log(f"{mark} {row.setting:<32}{rate:>11}   {gain:<23}{row.peak:>7.2f}")
        if all(row.remark != before.remark for before in self.rows):
            self.below(row.remark)
        self.rows.append(row)

    def below(self, remark: str) -> None:
        """Print a remark below a line of the table."""
        for line in textwrap.wrap(remark, 79, initial_indent="    ", subsequent_indent="    "):
            self.log(line)

    def confirmed(self) -> Tuning:
        """Measure what was found against the job as it is, once more, and print what to take."""
        settings = dict(self.setup.settings)
        for name in ("precision", "compile"):
            settings.pop(name, None)
        setups = {
            "that keep the numbers": replace(self.setup, settings=settings),
            "of both kinds": self.setup,
        }
        if setups["that keep the numbers"] == self.setup:
            del setups["of both kinds"]

        self.setup = self.start
        found = Tuning(self.start, self.start, self.start, None, None, self.rows)
        for what, (_, gain) in self.turns(setups).items():
            if gain is None:
                continue
            self.log(f"\nall settings {what}: {_ratio(gain)} times as fast as it is")
            if gain.median < _TAKEN:
                self.log("  these settings are not recommended")
                continue
            self.log(f"  {setups[what].line(self.job)}")
            found = replace(found, changed=setups[what], gain_changed=gain)
            if what == "that keep the numbers":
                found = replace(found, kept=setups[what], gain_kept=gain)

        if found.changed == self.start:
            self.log("\nnothing that was tried is faster than the job as it is")
        else:
            self.log("\nnothing was changed: the line is yours to paste")
        return found


def formats(kind: str) -> list[str]:
    """Return the formats to try on devices of a type, in this order."""
    names = []
    if kind in ROUNDING:
        names.append("tf32")
    names.append("bf16")
    if kind != "cpu":
        names.append("fp16")
    return names


def compilations(kind: str, *, graphs: bool) -> list[bool | str]:
    """Return the values of ``compile`` to try.

    Args:
        kind: the type of the devices.
        graphs: whether CUDA graphs can be captured.
    """
    if kind == "cpu":
        return [True]
    if kind == "cuda" and graphs:
        return [True, *GRAPHED]
    return [True, "max-autotune-no-cudagraphs"]


def _placements(
    strategy: str | None,
    chosen: tuple[Device, ...],
    count: int,
    batch_size: int,
) -> dict[str, Setup]:
    """Return one device, and each strategy to try on 2, 4, ... and all devices.

    Args:
        strategy: the only one to try, by name, or None for those that replicate the model: others
            are for models too large for one device.
        chosen: the devices as a person gave them.
        count: how many there are; as many slots as there are cores, where none were given.
        batch_size: of the job; no more devices than samples are tried.
    """
    names = ["dp", "ddp"]
    setups = []
    if strategy in (None, "single"):
        setups.append(Setup("single", first_of(chosen, 1)))
    if strategy is not None:
        names = [strategy]
    counts = [2**power for power in range(1, count.bit_length())]
    for n in dict.fromkeys([*counts, count]):
        if 1 < n <= batch_size and strategy != "single":
            setups += [Setup(name, first_of(chosen, n)) for name in names]
    return {f"{setup.strategy} on {setup.devices}": setup for setup in setups}


def _ratio(gain: Timing) -> str:
    """Return ``1.20 (1.15, 1.24)``: the median, the lowest and the highest of several rounds."""
    median = f"{gain.median:.2f}"
    if len(gain.rates) == 1:
        return median
    lowest, highest = gain.spread
    return f"{median} ({lowest:.2f}, {highest:.2f})"
