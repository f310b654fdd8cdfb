"""Tune: which settings make a job faster on this machine, by short timed turns of each against the
best so far.

::

    as it is -> strategy and devices -> layout -> optimizer -> loading -> memory        numbers kept
                                                                  |-> precision -> compile     rounding changed

On accelerators precision and compile come first: they gain the most there, and which layout and how
many loader workers are best depends on them. What gains is kept for what comes after it. Nothing is
switched on: the person gets the line to paste.
"""

from __future__ import annotations

import shlex
import statistics
import textwrap
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any, Literal

import torch

from lockstep.compare.entries import Way, first_of
from lockstep.compare.timed_run import Tried, attempt
from lockstep.compare.timing import Timing, in_turns
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
"""The gain from which on a setting is kept, if it also gained in every round."""

_HOPELESS = 0.8
"""What comes out below that share of the best in its first turn isn't timed again."""

_PATIENCE = 4.0
"""How many times as long as the best's first update a first one may take, and after that the
second.
"""


@dataclass(frozen=True)
class Row:
    """One setting, measured.

    Attributes:
        effect: whether the numbers of the job stay what they are.
        stage: what the setting is about.
        setting: what was tried.
        samples_per_second: the median; None where it failed.
        gain: against the best before it, a ratio from each round.
        peak: its largest memory against that.
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

    start: Way
    kept: Way
    changed: Way
    gain_kept: Timing | None
    gain_changed: Timing | None
    rows: Sequence[Row]

    def as_dict(self) -> dict[str, Any]:
        """Plain values, for a file."""
        return {one.name: _plain(getattr(self, one.name)) for one in fields(self)}


def _plain(value: Any) -> Any:
    if isinstance(value, Way):
        return {"strategy": value.strategy, "devices": value.devices, "settings": value.settings}
    if isinstance(value, Timing):
        return {"median": value.median, "rounds": list(value.rates)}
    if isinstance(value, Row):
        return {one.name: _plain(getattr(value, one.name)) for one in fields(value)}
    if isinstance(value, list):
        return list(map(_plain, value))
    return value


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
    """Try, in short timed turns on this machine, what makes a job faster. Nothing of the job is
    changed.

    Args:
        job: as in ``train``.
        strategy: try only this one; None tries ``dp`` and ``ddp``, and one device.
        devices: those that may be used: ``"auto"`` are all accelerators, or as many slots as there
            are cores.
        rounds: how many turns each setting gets against the best before it.
        seconds: how long the timed updates of a turn take at least.
        told: called with each line of the report; None for silence.
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
    source = with_settings(as_job(job), settings)
    devices = devices_for(strategy, devices)
    chosen = _devices.parse(devices)
    as_said = isinstance(devices, str | int) and devices != "auto"
    words = str(devices) if as_said else first_of(chosen, len(chosen))
    start = Way(choose(strategy, chosen).name, words)
    search = _Search(source, start, rounds, seconds, told or (lambda line: None))
    count = len(chosen)
    if devices in ("auto", None) and chosen[0].is_slot:
        count = len(_devices.usable_cores())
    return search.through(strategy, chosen, count)


@dataclass
class _Turns:
    """Settings in turns with the best so far.

    Attributes:
        alive: those that neither failed nor were hopeless.
        tries: of each setting.
        of_best: rates of the best so far, turn by turn.
        failed: why, by setting.
    """

    alive: dict[str, Way]
    tries: dict[str, list[Tried]]
    of_best: list[float] = field(default_factory=list)
    failed: dict[str, str] = field(default_factory=dict)

    def drop_hopeless(self) -> None:
        """Leave out what was far behind the fastest in the first turn."""
        rates = {setting: self.tries[setting][0].rate for setting in self.alive}
        least = _HOPELESS * max([self.of_best[0], *rates.values()])
        for setting, rate in rates.items():
            if rate < least:
                del self.alive[setting]


class _Search:
    """The best way so far, and what was tried."""

    def __init__(
        self,
        job: Job | JobFile,
        start: Way,
        rounds: int,
        seconds: float,
        told: Callable[[str], None],
    ) -> None:
        self.job = job
        self.settings = the_job(job)  # for the values that it has itself
        self.start = self.way = start
        self.rounds = rounds
        self.seconds = seconds
        self.told = told
        self.effect: Effect = "numbers kept"
        self.rows: list[Row] = []

    def through(self, strategy: str | None, chosen: tuple[Device, ...], count: int) -> Tuning:
        """All stages, one after the other; ``count`` devices may be used."""
        turns = counted(self.rounds, "turn")
        self.told(
            f"each setting in {turns} against the best before it; + is kept for those that follow"
        )
        self.best = self.attempt(self.start)
        self.told(f"\nas it is: {shlex.join(self.start.words)}   {self.best.rate:,.4g} samples/s")
        for caveat in self.best.caveats:
            self.below(str(caveat))
        self.told(
            "\nsettings that keep the numbers      samples/s   gain (lowest, highest)   memory"
        )
        self.try_placements(strategy, chosen, count)
        if any(caveat.kind == "batchnorm" and caveat.fix for caveat in self.best.caveats):
            synchronised = self.way.replace(sync_batchnorm=True)
            self.stage("batch norm", {"sync_batchnorm": synchronised}, only_told=True)

        if chosen[0].is_slot:
            self.keep_numbers()
            self.switch("memory", "keep_memory")
            same = self.way
            self.change_rounding("cpu", strategy)
            return self.confirmed(same)

        self.change_rounding(chosen[0].type, strategy)
        self.told("\nsettings that keep the numbers")
        self.keep_numbers()
        kept = dict(self.way.settings)
        for name in ("precision", "compile"):
            kept.pop(name, None)
        return self.confirmed(replace(self.way, settings=kept))

    def try_placements(self, strategy: str | None, chosen: tuple[Device, ...], count: int) -> None:
        """Try strategies, and numbers of devices."""
        ways = {}
        for way in _placements(strategy, chosen, count, self.settings.batch_size):
            if way != self.start:
                ways[f"{way.strategy} on {way.devices}"] = way
        self.stage("devices", ways)

    def keep_numbers(self) -> None:
        """Try the layout, the optimizer's implementation, and loader workers."""
        self.effect = "numbers kept"
        if self.best.convolves:
            self.switch("layout", "channels_last")
        fused = not self.best.fused
        self.stage("optimizer", {f"fused={fused}".lower(): self.way.replace(fused=fused)})

        workers = self.best.workers
        if workers is not None:
            others = {0, workers // 2, workers + max(1, workers // 2)} - {workers}
            ways = {}
            for number in sorted(others):
                ways[f"loader_workers={number}"] = self.way.replace(loader_workers=number)
            self.stage("loading", ways)

    def change_rounding(self, kind: str, strategy: str | None) -> None:
        """Try formats, and then ways to compile, on devices of a type."""
        self.effect = "rounding changed"
        self.told("\nsettings that change rounding")
        # Convolutions gain little by a narrow format in the layout they have, or lose.
        other_layout = kind != "cpu" and self.best.convolves and not self.settings.channels_last
        ways = {}
        for name in formats(kind, self.best.dtype):
            if name == self.settings.precision:
                continue
            setting = f"precision={name}"
            way = self.way.replace(precision=name)
            if other_layout and name in ("bf16", "fp16"):
                setting += ", channels_last"
                way = way.replace(channels_last=True)
            ways[setting] = way
        self.stage("precision", ways)
        if not self.settings.compile:
            self.try_compilations(kind, strategy)

    def try_compilations(self, kind: str, strategy: str | None) -> None:
        """Try ways to compile."""
        graphs = self.settings.accumulate == 1 and self.way.strategy != "dp"
        ways = {}
        for mode in compilations(kind, graphs=graphs):
            setting = "compile" if mode is True else f"compile={mode}"
            ways[setting] = self.way.replace(compile=mode)
        if self.way.strategy == "dp" and strategy is None:
            # The threads of dp can't compile all that processes can.
            ways["compile, ddp"] = replace(ways["compile"], strategy="ddp")
        self.stage("compile", ways)

    def attempt(self, way: Way, patience: float | None = None) -> Tried:
        return attempt(self.job, way, seconds=self.seconds, patience=patience)

    def switch(self, stage: str, name: str) -> None:
        """Try the other value of a setting that is true or false."""
        value = not self.way.settings.get(name, getattr(self.settings, name))
        self.stage(stage, {name if value else f"{name}=false": self.way.replace(**{name: value})})

    def stage(self, stage: str, ways: Mapping[str, Way], *, only_told: bool = False) -> None:
        """Try these in turns with the best so far.

        The fastest of them takes its place, where it gains, and where it isn't ``only_told``.
        """
        turns = self.in_turns(ways)
        gains = {}
        for setting, its in turns.tries.items():
            if setting not in turns.failed:
                rates = Timing([tried.rate for tried in its])
                gains[setting] = rates.over(Timing(turns.of_best[: len(its)]))

        good = []
        for setting in turns.alive:
            gain = gains[setting]
            if gain.median >= _TAKEN and gain.spread[0] > 1.0 and not only_told:
                good.append(setting)
        taken = max(good, key=lambda setting: gains[setting].median, default=None)

        for setting, gain in gains.items():
            its = turns.tries[setting]
            rate = statistics.median(tried.rate for tried in its)
            peak = its[0].peak / self.best.peak
            remark = self.remark(its[0], only_once=setting not in turns.alive)
            self.say(Row(self.effect, stage, setting, rate, gain, peak, setting == taken, remark))
        for setting, reason in turns.failed.items():
            self.say(Row(self.effect, stage, setting, remark=reason))
        if taken is not None:
            self.way = ways[taken]
            self.best = turns.tries[taken][0]

    def in_turns(self, ways: Mapping[str, Way]) -> _Turns:
        """Try these in turns with the best so far; what fails or is hopeless drops out."""
        turns = _Turns(alive=dict(ways), tries={setting: [] for setting in ways})
        for turn in range(self.rounds):
            if not turns.alive:
                break
            turns.of_best.append(self.attempt(self.way).rate)
            for setting, way in list(turns.alive.items()):
                patience: float | None = _PATIENCE * self.best.first
                if turn or "compile" in way.settings:
                    patience = None
                try:
                    turns.tries[setting].append(self.attempt(way, patience))
                except LockstepError as error:
                    turns.failed[setting] = first_line(error)
                    del turns.alive[setting]
            if turn == 0:
                turns.drop_hopeless()
        return turns

    def remark(self, tried: Tried, *, only_once: bool) -> str:
        said = [str(caveat) for caveat in tried.caveats if caveat not in self.best.caveats]
        if tried.first > 5.0 + 3 * self.best.first:
            said.append(f"its first update took {tried.first:.0f} s, this once at least")
        if only_once:
            said.append("one turn only")
        return "; ".join(said)

    def say(self, row: Row) -> None:
        """A line of the table, and what must be said of it below."""
        is_new = len(row.remark) <= 40 or all(row.remark != before.remark for before in self.rows)
        self.rows.append(row)
        if row.samples_per_second is None or row.gain is None:
            self.told(f"  {row.setting:<32}  can't be used here")
        else:
            mark = "+" if row.taken else " "
            rate, gain = f"{row.samples_per_second:,.4g}", _ratio(row.gain)
            self.told(f"{mark} {row.setting:<32}{rate:>11}   {gain:<23}{row.peak:>7.2f}")
        self.below(row.remark if is_new else "the same")

    def below(self, remark: str) -> None:
        for line in textwrap.wrap(remark, 79, initial_indent="    ", subsequent_indent="    "):
            self.told(line)

    def confirmed(self, kept: Way) -> Tuning:
        """Measure what was found against the job as it is, once more."""
        ways = {"that keep the numbers": kept, "of both kinds": self.way}
        found = {what: way for what, way in ways.items() if way != self.start}
        if self.way == kept:
            found.pop("of both kinds", None)
        gains: dict[str, Timing] = {}
        if found:
            turns = {name: self.turn(way) for name, way in {"": self.start, **found}.items()}
            timings = in_turns(turns, rounds=self.rounds, warm_up=0)
            gains = {what: timings[what].over(timings[""]) for what in found}
        good: dict[str, tuple[Way, Timing | None]] = {}
        for what, gain in gains.items():
            self.told(f"\nall settings {what}: {_ratio(gain)} times as fast as it is")
            if gain.median < _TAKEN:
                self.told("  these settings are not recommended")
                continue
            good[what] = found[what], gain
            line = found[what].line(self.job)
            self.told(_in_lines(line) if isinstance(self.job, JobFile) else f"  {line}")
        done = "nothing was changed: the line is yours to paste"
        self.told(f"\n{done if good else 'nothing that was tried is faster than the job as it is'}")
        kept, gain_kept = good.get("that keep the numbers", (self.start, None))
        changed, gain_changed = good.get("of both kinds", (kept, gain_kept))
        return Tuning(self.start, kept, changed, gain_kept, gain_changed, self.rows)

    def turn(self, way: Way) -> Callable[[], float]:
        return lambda: self.attempt(way).rate


def formats(kind: str, held: torch.dtype) -> list[str]:
    """The formats to try on devices of a type, in this order, for parameters that are held in
    one.
    """
    found = ["tf32"] if kind in ROUNDING else []
    found.append("bf16")
    if held == torch.float64:
        found.append("fp32")
    elif kind != "cpu":
        found.append("fp16")
    return found


def compilations(kind: str, *, graphs: bool) -> list[bool | str]:
    """The values of ``compile`` to try on devices of a type, CUDA graphs only where they can be
    captured.
    """
    if kind == "cpu":
        return [True]
    if kind == "cuda" and graphs:
        return [True, *GRAPHED]
    return [True, "max-autotune-no-cudagraphs"]


def _placements(
    strategy: str | None, chosen: tuple[Device, ...], count: int, batch_size: int
) -> list[Way]:
    """One device, and each exact strategy on 2, 4, ... and all ``count`` of them."""
    counts = {count}
    n = 2
    while n <= count:
        counts.add(n)
        n *= 2

    names = []
    for name, kind in STRATEGIES.items():
        if kind.exact is not True or name == "single":
            continue
        # Those that split layers or shard them are for models too large for one device: only where
        # they are asked for.
        splits = {"stage", "shard"} & kind().layout(2).axes.keys()
        if name == strategy or (strategy is None and not splits):
            names.append(name)

    ways = []
    if strategy in (None, "single"):
        ways.append(Way("single", first_of(chosen, 1)))
    for n in sorted(counts):
        if 1 < n <= batch_size:
            ways += [Way(name, first_of(chosen, n)) for name in names]
    return ways


def _ratio(gain: Timing) -> str:
    if len(gain.rates) == 1:
        return f"{gain.median:.2f}"
    return f"{gain.median:.2f} ({gain.spread[0]:.2f}, {gain.spread[1]:.2f})"


def _in_lines(command: str, width: int = 120) -> str:
    """A command in lines that a shell joins, none longer than ``width``, as far as its words are
    shorter.
    """
    lines = [" "]
    for word in map(shlex.quote, shlex.split(command)):
        if len(f"{lines[-1]} {word} \\") > width:
            lines[-1] += " \\"
            lines.append("   ")
        lines[-1] += f" {word}"
    return "\n".join(lines)
