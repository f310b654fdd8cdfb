"""The turns of a comparison::

a look at each    A B C      sizes, sample ids, where the time goes, parity; nothing of it is timed
rounds            A B C  A B C   A B C  ...      each in fresh processes that warm up for themselves
with epochs       A B C      each trained, for its losses and metrics
"""

from __future__ import annotations

import statistics
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from lockstep.compare import comparison_folder
from lockstep.compare.agreement import agreement_of
from lockstep.compare.planned_rows import Entry, Sweep, line_up
from lockstep.compare.result import Comparison, Row
from lockstep.compare.timed_run import TrialResult, attempt
from lockstep.errors import DeviceError, LockstepError, first_line
from lockstep.job import Job
from lockstep.jobfile import JobFile, as_job, the_job, with_settings
from lockstep.launch import started_as_rank
from lockstep.launch.device_table import machine
from lockstep.launch.devices import Devices
from lockstep.run.run_folder import RunFolder
from lockstep.strategies import Strategy, choose
from lockstep.train import train

_LOOK = 1e-9
"""Seconds of the timed updates of a look: two of them, to warm up."""


def compare(
    job: Job | JobFile | Callable[[], Job] | str | Path,
    *,
    strategies: Sequence[str | Strategy] | None = None,
    devices: Devices = "auto",
    sweep: Sweep | None = None,
    device_map: Mapping[str, int] | None = None,
    rounds: int = 5,
    seconds: float = 2.0,
    parity: bool = True,
    folder: str | Path | None = "runs",
    log: Callable[[str], None] | None = print,
    **settings: Any,
) -> Comparison:
    """Measure strategies side by side on a job: in turns, in fresh processes, on the same global
    batches.

    Args:
        job: as in ``train``.
        strategies: by name, or with settings of their own; None takes ``single``, ``dp``, ``ddp``,
            ``mp`` and ``pp``. ``single`` on one device is always there: the others are held against
            it.
        devices: as in ``train``; ``"auto"`` without an accelerator is a CPU device for each core.
        sweep: values to try, by the name of a setting of the job or of a strategy, or ``devices``:
            ``{"microbatches": [1, 2, 4]}``. Several make all combinations.
        device_map: which layer is on which device, under ``mp`` and ``pp``.
        rounds: how many turns each has.
        seconds: how long the timed updates of a turn take at least.
        parity: also hold the numbers of each against those of one device.
        folder: where the folder of the comparison is made, with its report; None makes none.
        log: called with each line of the report; None for silence.
        settings: fields of the job to replace. With ``epochs``, each strategy also trains for this
            number of epochs.

    Returns:
        The rows. A strategy that is refused or fails is a row with its reason.

    Raises:
        InputError: something asked for can't be done.
    """
    if started_as_rank():
        raise DeviceError(
            "compare starts processes of its own on one machine: start it without torchrun"
        )
    source = with_settings(as_job(job), settings, compare)
    loaded = the_job(source)
    entries = line_up(strategies, devices, sweep or {}, device_map)
    name = "job"
    path = "job"
    if isinstance(source, JobFile):
        name = source.name
        path = source.path
    kept = None
    folder_of_runs = None
    if folder is not None:
        kept = RunFolder.new(folder, f"{name}-compare")
        folder_of_runs = kept.path / "runs"
    log = log or (lambda line: None)
    turns = _Turns(source, entries, log)
    try:
        turns.look(parity=parity)
        turns.time(rounds, seconds)
        if settings.get("epochs") is not None:
            turns.train(folder_of_runs)
    except BaseException:
        if kept is not None:
            kept.remove()
        raise

    asked = {
        "strategies": strategies and list(strategies),
        "devices": devices,
        "sweep": sweep,
        "device_map": device_map,
        "rounds": rounds,
        "seconds": seconds,
    }
    if not parity:
        asked["no_parity"] = True
    found = Comparison(
        job=path,
        command=comparison_folder.command(source, asked),
        batch_size=loaded.batch_size,
        rounds=rounds,
        seconds=seconds,
        machine=machine(),
        on_slots=all(entry.devices[0].is_slot for entry in entries),
        rows=list(turns.rows.values()),
        folder="" if kept is None else str(kept.path),
    )
    comparison_folder.log_comparison(found, log)
    return found


class _Turns:
    """What is measured of each entry.

    Args:
        source: the job, or its file.
        entries: what is to be measured, in this order.
        log: called with each line of the report.

    Attributes:
        rows: the row of each entry, by name.
    """

    def __init__(
        self,
        source: Job | JobFile,
        entries: Sequence[Entry],
        log: Callable[[str], None],
    ) -> None:
        self.source = source
        self.entries = entries
        self.log = log
        self.rows = {entry.name: _row_of(entry, source) for entry in entries}

    def alive(self) -> list[Entry]:
        """Return the entries that didn't fail."""
        alive = []
        for entry in self.entries:
            if not self.rows[entry.name].reason:
                alive.append(entry)
        return alive

    def note(self, entry: Entry, **found: Any) -> None:
        """Add what was found to the row of an entry.

        Args:
            entry: what was measured.
            found: fields of the row.
        """
        row = self.rows[entry.name]
        self.rows[entry.name] = replace(row, **found)

    def look(self, *, parity: bool) -> None:
        """Try each once; what fails here isn't timed.

        Args:
            parity: also hold the numbers of each strategy against those of one device.
        """
        for entry in self.entries:
            tried = self._attempt(entry, seconds=_LOOK, looks=True)
            if tried is None:
                self.log(f"{entry.name}: failed: {self.rows[entry.name].reason}")
                continue
            self.note(
                entry,
                caveats=[str(caveat) for caveat in tried.caveats],
                plans=list(tried.plans),
                observed=tried.observed,
            )
            line = f"{entry.name}: works, started in {tried.started:.1f} s"
            if parity and entry.role == "strategy":
                agreement = agreement_of(self.source, entry)
                self.note(entry, agreement=agreement)
                line += f", {agreement}"
            self.log(line)

    def time(self, rounds: int, seconds: float) -> None:
        """Give each its turns. What fails in one of them has no more.

        Args:
            rounds: how many turns.
            seconds: how long the timed updates of a turn take at least.
        """
        tries: dict[str, list[TrialResult]] = {entry.name: [] for entry in self.alive()}
        for turn in range(rounds):
            for entry in self.alive():
                tried = self._attempt(entry, seconds=seconds)
                if tried is not None:
                    tries[entry.name].append(tried)
            self.log(f"round {turn + 1}/{rounds} done")
        for entry in self.alive():
            turns = tries[entry.name]
            peaks = zip(*(tried.peaks for tried in turns), strict=True)
            self.note(
                entry,
                rates=[tried.rate for tried in turns],
                started=statistics.median(tried.started for tried in turns),
                peaks=[max(of_one) for of_one in peaks],
            )

    def _attempt(self, entry: Entry, *, seconds: float, looks: bool = False) -> TrialResult | None:
        """Make one trial; if it fails, note why, and return None.

        Args:
            entry: what is tried.
            seconds: how long the timed updates take at least.
            looks: whether a few more updates are observed.
        """
        try:
            return attempt(self.source, entry.setup, seconds=seconds, looks=looks)
        except LockstepError as error:
            self.note(entry, reason=first_line(error))
            return None

    def train(self, folder: Path | None) -> None:
        """Train each strategy, and ``single`` on one device, for the job's epochs.

        Args:
            folder: where the runs are made; None keeps none.
        """
        with tempfile.TemporaryDirectory(prefix="lockstep-") as scratch:
            for entry in self.alive():
                if entry.role == "all cores":
                    continue
                self._train(entry, folder or Path(scratch))
                if folder is None:
                    self.note(entry, run="")

    def _train(self, entry: Entry, folder: Path) -> None:
        """Train an entry, and note its history; a failure is a caveat of its row."""
        setup = entry.setup
        try:
            run = train(
                with_settings(self.source, setup.settings),
                strategy=choose(setup.strategy, entry.devices, **setup.options),
                devices=entry.devices,
                folder=folder,
                quiet=True,
            )
        except LockstepError as error:
            failed = f"its training failed: {first_line(error)}"
            before = self.rows[entry.name].caveats
            self.note(entry, caveats=[*before, failed])
            self.log(f"{entry.name}: {failed}")
            return
        self.note(entry, history=run.history, run=str(run.folder))
        last = run.history[-1]
        loss = last.get("eval_loss", last["train_loss"])
        self.log(f"{entry.name}: trained, loss {loss:.4g}")


def _row_of(entry: Entry, source: Job | JobFile) -> Row:
    """Return the row of an entry, with nothing measured yet.

    Args:
        entry: what is to be measured.
        source: the job, for the command that trains it so.
    """
    setup = entry.setup
    return Row(
        name=entry.name,
        role=entry.role,
        strategy=setup.strategy,
        settings={**setup.options, **setup.settings},
        devices=[str(device) for device in entry.devices],
        where=entry.where,
        line=setup.line(source),
        one=entry.one,
        cores=entry.cores,
    )
