"""Tune: which settings make a job faster on this machine, by short timed turns of each against the
best so far.

::

    as it is -> strategy and devices -> layout -> loading -> memory                    numbers kept
                                                      |-> precision -> compile         rounding changed

On accelerators precision and compile come first: they gain the most there, and which layout and how
many loader workers are best depends on them. What gains is kept for what comes after it. Nothing is
switched on: the person gets the line to paste.
"""

from __future__ import annotations

import shlex
import statistics
import textwrap
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import torch

from lockstep.compare.planned_rows import Setup, first_of
from lockstep.compare.timed_run import TrialResult, attempt
from lockstep.compare.timing import Timing
from lockstep.errors import DeviceError, LockstepError, counted, first_line
from lockstep.job import Job
from lockstep.jobfile import JobFile, as_job, the_job, with_settings
from lockstep.launch import devices as _devices
from lockstep.launch import started_as_rank
from lockstep.launch.devices import Device, Devices
from lockstep.model.compile import GRAPHED
from lockstep.model.precision import ROUNDING
from lockstep.strategies import STRATEGIES, choose, devices_for

Effect = Literal["numbers kept", "rounding changed"]

_TAKEN = 1.02
"""The least gain of a setting that is kept; it also gained in every round."""

_HOPELESS = 0.8
"""A setting below this share of the best in its first turn isn't timed again."""

_LONG = 40
"""Letters of a remark that is printed again; a longer one is only referred to."""


@dataclass(frozen=True)
class Row:
    """One setting, measured.

    Attributes:
        effect: whether the numbers of the job stay what they are.
        stage: what the setting is about.
        setting: what was tried.
        samples_per_second: the median; None where it failed.
        gain: against the best before it, a ratio from each round.
        peak: its largest memory against that of the best before it.
        taken: whether the stages after it build on it.
        remark: why it failed, or what it does to the numbers.
    """

    effect: Effect
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
    placements = _placements(strategy, chosen, count, the_job(source).batch_size)
    log = log or (lambda line: None)
    search = _Search(source, start, rounds, seconds, log)
    return search.through(placements, chosen[0])


@dataclass
class _Turns:
    """The turns of one stage.

    Attributes:
        best: the rates of the best setup before it.
        tries: by setting, its turns.
        failed: by setting, why it failed.
        alive: the settings that are still timed.
    """

    best: list[float]
    tries: dict[str, list[TrialResult]]
    alive: list[str]
    failed: dict[str, str] = field(default_factory=dict)

    def drop_hopeless(self) -> None:
        """Drop the settings that are far behind after the first turn."""
        rates = {setting: self.tries[setting][0].rate for setting in self.alive}
        highest = max([self.best[0], *rates.values()])
        least = _HOPELESS * highest
        self.alive = [setting for setting in self.alive if rates[setting] >= least]

    def gain(self, setting: str) -> Timing:
        """Return the gain of a setting: a ratio to the best from each round that it was in."""
        rates = [tried.rate for tried in self.tries[setting]]
        best = Timing(self.best[: len(rates)])
        return Timing(rates).over(best)

    def taken(self) -> str | None:
        """Return the setting that gained most, if any gained."""
        gains = {}
        for setting in self.alive:
            gain = self.gain(setting)
            if gain.median >= _TAKEN and gain.spread[0] > 1.0:
                gains[setting] = gain.median
        return max(gains, key=gains.__getitem__, default=None)


@dataclass
class _Search:
    """The best setup so far, and what was tried.

    Attributes:
        job: whose settings are searched for.
        start: the job as it is.
        rounds: turns of each setting.
        seconds: of the timed updates of a turn.
        log: called with each line of the report.
        effect: whether what is tried now keeps the numbers.
        rows: every setting that was tried.
        setup: the best so far.
        best: what a trial of that found.
    """

    job: Job | JobFile
    start: Setup
    rounds: int
    seconds: float
    log: Callable[[str], None]
    effect: Effect = "numbers kept"
    rows: list[Row] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.setup = self.start
        self.settings = the_job(self.job)

    def through(self, placements: Mapping[str, Setup], device: Device) -> Tuning:
        """Try all stages, one after the other.

        Args:
            placements: strategies and devices to try, by the words of the table.
            device: one of these devices; its type decides what else is tried.
        """
        turns = counted(self.rounds, "turn")
        self.log(f"each setting has {turns} against the best before it; + is kept for later ones")
        self.best = self.attempt(self.start)
        self.log(f"\nas it is: {shlex.join(self.start.words)}   {self.best.rate:,.4g} samples/s")
        for caveat in self.best.caveats:
            self.below(str(caveat))
        self.log(
            "\nsettings that keep the numbers      samples/s   gain (lowest, highest)   memory"
        )
        others = {words: setup for words, setup in placements.items() if setup != self.start}
        self.stage("devices", others)
        if device.is_slot:
            self.keep_numbers()
            self.switch("memory", "keep_memory")
            kept = self.setup
            self.change_rounding(device.type)
            return self.confirmed(kept)

        self.change_rounding(device.type)
        self.log("\nsettings that keep the numbers")
        self.keep_numbers()
        settings = dict(self.setup.settings)
        for name in ("precision", "compile"):
            settings.pop(name, None)
        return self.confirmed(replace(self.setup, settings=settings))

    def keep_numbers(self) -> None:
        """Try the layout of convolutions, and other numbers of loader workers."""
        self.effect = "numbers kept"
        if self.best.convolves:
            self.switch("layout", "channels_last")
        workers = self.best.workers
        if workers is None:
            return
        half = workers // 2
        more = workers + max(1, half)
        setups = {}
        for count in sorted({0, half, more} - {workers}):
            setups[f"loader_workers={count}"] = self.setup.replace(loader_workers=count)
        self.stage("loading", setups)

    def change_rounding(self, kind: str) -> None:
        """Try formats, and then ways to compile.

        Args:
            kind: the type of the devices.
        """
        self.effect = "rounding changed"
        self.log("\nsettings that change rounding")
        self.stage("precision", self.in_formats(kind))
        if self.settings.compile:
            return
        graphs = self.settings.accumulate == 1 and self.setup.strategy != "dp"
        setups = {}
        for mode in compilations(kind, graphs=graphs):
            words = "compile"
            if mode is not True:
                words = f"compile={mode}"
            setups[words] = self.setup.replace(compile=mode)
        self.stage("compile", setups)

    def in_formats(self, kind: str) -> dict[str, Setup]:
        """Return the best setup in other formats, in half ones with the layout of convolutions.

        Args:
            kind: the type of the devices.
        """
        # In the usual layout convolutions gain little by a half format, or lose.
        is_laid_out = self.settings.channels_last or not self.best.convolves
        setups = {}
        for name in formats(kind, self.best.dtype):
            if name == self.settings.precision:
                continue
            words = f"precision={name}"
            setup = self.setup.replace(precision=name)
            is_half = name in ("bf16", "fp16")
            if is_half and kind != "cpu" and not is_laid_out:
                words += ", channels_last"
                setup = setup.replace(channels_last=True)
            setups[words] = setup
        return setups

    def attempt(self, setup: Setup) -> TrialResult:
        """Time a setup once.

        Raises:
            LockstepError: it is refused, or fails.
        """
        return attempt(self.job, setup, seconds=self.seconds)

    def switch(self, stage: str, name: str) -> None:
        """Try the other value of a setting that is true or false.

        Args:
            stage: what the setting is about.
            name: of the setting.
        """
        before = self.setup.settings.get(name, getattr(self.settings, name))
        value = not before
        words = name
        if before:
            words = f"{name}=false"
        self.stage(stage, {words: self.setup.replace(**{name: value})})

    def stage(self, stage: str, setups: Mapping[str, Setup]) -> None:
        """Try setups in turns with the best so far; the fastest one takes its place, where it
        gains.

        Args:
            stage: what these settings are about.
            setups: by the words of the table.
        """
        turns = _Turns([], {setting: [] for setting in setups}, list(setups))
        for _ in range(self.rounds):
            if turns.alive:
                self.turn(turns, setups)

        taken = turns.taken()
        for setting, tries in turns.tries.items():
            if setting in turns.failed:
                continue
            row = Row(
                self.effect,
                stage,
                setting,
                samples_per_second=statistics.median(tried.rate for tried in tries),
                gain=turns.gain(setting),
                peak=tries[0].peak / self.best.peak,
                taken=setting == taken,
                remark=self.remark(tries[0], only_once=setting not in turns.alive),
            )
            self.log_row(row)
        for setting, reason in turns.failed.items():
            self.log_row(Row(self.effect, stage, setting, remark=reason))
        if taken is not None:
            self.setup = setups[taken]
            self.best = turns.tries[taken][0]

    def turn(self, turns: _Turns, setups: Mapping[str, Setup]) -> None:
        """Time the best and each setting once.

        Args:
            turns: of this stage; a setting that fails has no more.
            setups: by setting.
        """
        turns.best.append(self.attempt(self.setup).rate)
        for setting in list(turns.alive):
            try:
                tried = self.attempt(setups[setting])
            except LockstepError as error:
                turns.failed[setting] = first_line(error)
                turns.alive.remove(setting)
            else:
                turns.tries[setting].append(tried)
        if len(turns.best) == 1:
            turns.drop_hopeless()

    def remark(self, tried: TrialResult, *, only_once: bool) -> str:
        """Return what a person should know of a setting.

        Args:
            tried: its first trial.
            only_once: whether it was too far behind for a second one.
        """
        remarks = [str(caveat) for caveat in tried.caveats if caveat not in self.best.caveats]
        if tried.first > 5.0 + 3 * self.best.first:
            remarks.append(f"its first update took {tried.first:.0f} s, this once at least")
        if only_once:
            remarks.append("one turn only")
        return "; ".join(remarks)

    def log_row(self, row: Row) -> None:
        """Print a line of the table, and its remark below it.

        Args:
            row: what was measured; a long remark of an earlier row isn't printed again.
        """
        is_long = len(row.remark) > _LONG
        is_repeated = is_long and any(row.remark == before.remark for before in self.rows)
        self.rows.append(row)
        if row.samples_per_second is None or row.gain is None:
            self.log(f"  {row.setting:<32}  can't be used here")
        else:
            mark = "+" if row.taken else " "
            rate = f"{row.samples_per_second:,.4g}"
            gain = _ratio(row.gain)
            self.log(f"{mark} {row.setting:<32}{rate:>11}   {gain:<23}{row.peak:>7.2f}")
        self.below("the same" if is_repeated else row.remark)

    def below(self, remark: str) -> None:
        """Print a remark below a line of the table."""
        for line in textwrap.wrap(remark, 79, initial_indent="    ", subsequent_indent="    "):
            self.log(line)

    def confirmed(self, kept: Setup) -> Tuning:
        """Measure what was found against the job as it is, once more, and print what to take.

        Args:
            kept: the best setup of those that keep the numbers.
        """
        setups = {}
        if kept != self.start:
            setups["that keep the numbers"] = kept
        if self.setup not in (self.start, kept):
            setups["of both kinds"] = self.setup

        kept = self.start
        changed = self.start
        gain_kept = None
        gain_changed = None
        for what, gain in self.gains(setups).items():
            self.log(f"\nall settings {what}: {_ratio(gain)} times as fast as it is")
            if gain.median < _TAKEN:
                self.log("  these settings are not recommended")
                continue
            self.log(f"  {setups[what].line(self.job)}")
            changed = setups[what]
            gain_changed = gain
            if what == "that keep the numbers":
                kept = changed
                gain_kept = gain

        if changed == self.start:
            self.log("\nnothing that was tried is faster than the job as it is")
        else:
            self.log("\nnothing was changed: the line is yours to paste")
        return Tuning(
            self.start,
            kept,
            changed,
            gain_kept,
            gain_changed,
            self.rows,
        )

    def gains(self, setups: Mapping[str, Setup]) -> dict[str, Timing]:
        """Return how many times as fast as the job as it is each setup is.

        Args:
            setups: by what is printed of them. They are timed in turns with the job as it is.
        """
        if not setups:
            return {}
        rates: dict[str, list[float]] = {what: [] for what in ("", *setups)}
        for _ in range(self.rounds):
            rates[""].append(self.attempt(self.start).rate)
            for what, setup in setups.items():
                rates[what].append(self.attempt(setup).rate)
        start = Timing(rates.pop(""))
        return {what: Timing(mine).over(start) for what, mine in rates.items()}


def formats(kind: str, held: torch.dtype) -> list[str]:
    """Return the formats to try, in this order.

    Args:
        kind: the type of the devices.
        held: the dtype of the parameters.
    """
    names = []
    if kind in ROUNDING:
        names.append("tf32")
    names.append("bf16")
    if held == torch.float64:
        names.append("fp32")
    elif kind != "cpu":
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
    """Return one device, and each exact strategy on 2, 4, ... and all devices.

    Args:
        strategy: the only one to try, by name, or None.
        chosen: the devices as a person gave them.
        count: how many there are; as many slots as there are cores, where none were given.
        batch_size: of the job; no more devices than samples are tried.
    """
    setups = []
    if strategy in (None, "single"):
        setups.append(Setup("single", first_of(chosen, 1)))
    counts = [2**power for power in range(1, count.bit_length())]
    for n in dict.fromkeys([*counts, count]):
        if 1 < n <= batch_size:
            for name in _replicating(strategy):
                setups.append(Setup(name, first_of(chosen, n)))
    return {f"{setup.strategy} on {setup.devices}": setup for setup in setups}


def _replicating(strategy: str | None) -> list[str]:
    """Return the names of the exact strategies to try, or of the one that was asked for.

    Those that split or shard the model are for models too large for one device: they are tried only
    where they are asked for.
    """
    names = []
    for name, kind in STRATEGIES.items():
        if name == "single" or kind.exact is not True:
            continue
        axes = kind().layout(2).axes
        is_split = "stage" in axes or "shard" in axes
        if name == strategy or (strategy is None and not is_split):
            names.append(name)
    return names


def _ratio(gain: Timing) -> str:
    """Return ``1.20 (1.15, 1.24)``: the median, the lowest and the highest of several rounds."""
    median = f"{gain.median:.2f}"
    if len(gain.rates) == 1:
        return median
    lowest, highest = gain.spread
    return f"{median} ({lowest:.2f}, {highest:.2f})"
