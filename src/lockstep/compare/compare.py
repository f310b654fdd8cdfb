"""The turns of a comparison::

a look at each    A B C       sizes, sample ids, where the time goes, parity; nothing of it is timed
rounds            A B C   A B C   A B C  ...      each in fresh processes that warm up for themselves
with epochs       A B C       each trained, for its losses and metrics
"""

from __future__ import annotations

import statistics
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from lockstep.compare import comparison_folder
from lockstep.compare.agreement import Agreement, agreement_of
from lockstep.compare.entries import Entry, Sweep, devices_of, line_up
from lockstep.compare.peers import attempt_peer, check_peers
from lockstep.compare.result import Comparison, Row
from lockstep.compare.timed_run import Tried, attempt
from lockstep.compare.timing import in_turns
from lockstep.errors import DeviceError, LockstepError, StrategyError, first_line
from lockstep.job import Job
from lockstep.jobfile import JobFile, as_job, the_job, with_settings
from lockstep.launch import started_as_rank
from lockstep.launch.device_table import machine
from lockstep.launch.devices import Devices
from lockstep.strategies import Strategy, choose
from lockstep.train import train

_LOOK = 1e-9
"""Seconds of a look's timed updates: two of them, to warm up."""

Told = Callable[[str], None]


def compare(
    job: Job | JobFile | Callable[[], Job] | str | Path,
    *,
    strategies: Sequence[str | Strategy] | None = None,
    devices: Devices = "auto",
    sweep: Sweep | None = None,
    device_map: Mapping[str, int] | None = None,
    peers: Sequence[str] = (),
    rounds: int = 5,
    seconds: float = 2.0,
    parity: bool = True,
    folder: str | Path | None = "runs",
    told: Told | None = print,
    **settings: Any,
) -> Comparison:
    """Measure strategies side by side on a job: in turns, in fresh processes, on the same global batches.

    Args:
        job: as in ``train``.
        strategies: by name, or with settings of their own; None takes ``single``, ``dp``, ``ddp``, ``mp`` and ``pp``.
            ``single`` on one device is always there: the others are held against it.
        devices: as in ``train``; ``"auto"`` without an accelerator is a slot for each core.
        sweep: values to try, by the name of a setting of the job or of a strategy, or ``devices``:
            ``{"microbatches": [1, 2, 4]}``. Several make all combinations.
        device_map: which layer is on which device, under ``mp`` and ``pp``.
        peers: the same job by other means: ``"torch"`` (DistributedDataParallel by hand), ``"fabric"``,
            ``"accelerate"``.
        rounds: how many turns each has.
        seconds: how long the timed updates of a turn take at least.
        parity: also hold the numbers of each against those of one device.
        folder: where the folder of the comparison is made, with its report; None makes none.
        told: called with each line of the report; None for silence.
        settings: fields of the job to replace. With ``epochs``, each is also trained for so many.

    Returns:
        The rows. A strategy that is refused or fails is a row with its reason.

    Raises:
        InputError: something asked for can't be done.
    """
    if started_as_rank():
        raise DeviceError("compare starts processes of its own on one machine: start it without torchrun")
    source = with_settings(as_job(job), settings)
    loaded = the_job(source)
    entries = line_up(strategies, devices, sweep or {}, check_peers(peers), device_map)
    kept = None if folder is None else comparison_folder.new_folder(folder, source)
    say = told or (lambda line: None)
    asked = comparison_folder.Asked(
        strategies, devices, dict(sweep or {}), device_map, tuple(peers), rounds, seconds, parity, settings
    )
    turns = _Turns(source, entries, rounds, seconds, say)
    try:
        turns.look(parity)
        turns.refuse_map()
        turns.time()
        if "epochs" in settings and settings["epochs"] is not None:
            turns.train(None if kept is None else kept / "runs")
    except BaseException:
        if kept is not None:
            comparison_folder.remove(kept)
        raise
    found = Comparison(
        job=source.path if isinstance(source, JobFile) else "job",
        command=comparison_folder.command(source, asked),
        batch_size=loaded.batch_size,
        rounds=rounds,
        seconds=seconds,
        machine=machine(),
        on_slots=all(entry.devices[0].is_slot for entry in entries),
        rows=tuple(turns.row(entry) for entry in entries),
        folder="" if kept is None else str(kept),
        keeps_memory=loaded.keep_memory,
    )
    comparison_folder.tell(found, say)
    return found


@dataclass
class _Turns:
    """What is known of each entry so far."""

    source: Job | JobFile
    entries: Sequence[Entry]
    rounds: int
    seconds: float
    say: Told
    looks: dict[str, Tried] = field(default_factory=dict)
    agreements: dict[str, Agreement] = field(default_factory=dict)
    tried: dict[str, list[Tried]] = field(default_factory=dict)
    reasons: dict[str, str] = field(default_factory=dict)
    histories: dict[str, tuple[dict[str, Any], ...]] = field(default_factory=dict)
    runs: dict[str, str] = field(default_factory=dict)
    stopped: dict[str, str] = field(default_factory=dict)

    def look(self, parity: bool) -> None:
        """Try each once; what fails here isn't timed."""
        for entry in self.entries:
            tried = self._attempt(entry, seconds=_LOOK, looks=True)
            if tried is None:
                self.say(f"{entry.name}: failed: {self.reasons[entry.name]}")
                continue
            self.looks[entry.name] = tried
            said = ""
            if parity and entry.role == "strategy":
                self.agreements[entry.name] = agreement = agreement_of(self.source, entry)
                said = f", {agreement}"
            self.say(f"{entry.name}: works, started in {tried.started:.1f} s{said}")

    def refuse_map(self) -> None:
        """Refuse a device map that nobody can take, before an hour is spent on the others.

        Raises:
            StrategyError: what is wrong with it.
        """
        reasons = [self.reasons.get(entry.name, "") for entry in self.entries if "device_map" in entry.way.options]
        if reasons and all(reason.startswith("device map: ") for reason in reasons):
            raise StrategyError(reasons[0])

    def time(self) -> None:
        """The rounds."""
        alive = [entry for entry in self.entries if entry.name in self.looks]
        turns = {entry.name: self._turn(entry) for entry in alive}
        in_turns(turns, rounds=self.rounds, warm_up=0, told=lambda line: self.say(line.split(":")[0] + " done"))

    def _turn(self, entry: Entry) -> Callable[[], float]:
        def once() -> float:
            tried = None if entry.name in self.reasons else self._attempt(entry, seconds=self.seconds)
            if tried is None:
                return 0.0
            self.tried.setdefault(entry.name, []).append(tried)
            return tried.rate

        return once

    def _attempt(self, entry: Entry, *, seconds: float, looks: bool = False) -> Tried | None:
        try:
            if entry.role == "peer":
                return attempt_peer(self.source, entry, seconds=seconds)
            return attempt(self.source, entry.way, seconds=seconds, looks=looks)
        except LockstepError as error:
            self.reasons[entry.name] = first_line(error)
            return None

    def train(self, folder: Path | None) -> None:
        """Train each strategy, and ``single`` on one device, for the job's epochs."""
        with tempfile.TemporaryDirectory(prefix="lockstep-") as scratch:
            for entry in self.entries:
                if entry.name in self.reasons or entry.role in ("all cores", "peer"):
                    continue
                try:
                    run = train(
                        with_settings(self.source, entry.way.settings),
                        strategy=choose(entry.way.strategy, entry.devices, **entry.way.options),
                        devices=entry.devices,
                        folder=folder or scratch,
                        quiet=True,
                    )
                except LockstepError as error:
                    self.stopped[entry.name] = f"its training failed: {first_line(error)}"
                    self.say(f"{entry.name}: {self.stopped[entry.name]}")
                    continue
                self.histories[entry.name] = tuple(run.history)
                self.runs[entry.name] = "" if folder is None else str(run.folder)
                last = run.history[-1]
                self.say(f"{entry.name}: trained, loss {last.get('eval_loss', last['train_loss']):.4g}")

    def _line(self, entry: Entry) -> str:
        """What trains the job so; "" where there is no such line."""
        if entry.role == "peer":
            return ""
        if isinstance(entry.way.devices, str):
            return entry.way.line(self.source)
        if not isinstance(self.source, JobFile) or sys.platform != "linux" or len(entry.devices) > 1:
            return ""
        # One slot of several: as many cores for the whole process.
        cores = ",".join(map(str, entry.devices[0].cores))
        return f"taskset -c {cores} {replace(entry.way, devices='1xcpu').line(self.source)}"

    def row(self, entry: Entry) -> Row:
        """All that was found of an entry."""
        way = entry.way
        row = Row(
            name=entry.name,
            role=entry.role,
            strategy=way.strategy,
            settings={**way.options, **way.settings},
            devices=tuple(map(str, entry.devices)),
            where=devices_of(entry),
            line=self._line(entry),
            one=entry.one,
            cores=entry.cores,
            history=self.histories.get(entry.name, ()),
            run=self.runs.get(entry.name, ""),
            agreement=self.agreements.get(entry.name),
        )
        if entry.name in self.reasons:
            return replace(row, reason=self.reasons[entry.name])
        tried = self.tried[entry.name]
        look = self.looks[entry.name]
        return replace(
            row,
            rates=tuple(one.rate for one in tried),
            started=statistics.median(one.started for one in tried),
            peaks=tuple(max(column) for column in zip(*(one.peaks for one in tried), strict=True)),
            caveats=(*map(str, look.caveats), *([self.stopped[entry.name]] if entry.name in self.stopped else [])),
            plans=look.plans,
            glance=look.glance,
            system=statistics.median(one.system for one in tried),
        )
