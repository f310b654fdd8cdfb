"""The turns of a comparison::

    a look at each    A B C      sizes and parity; nothing of it is timed
    rounds            A B C  A B C   A B C  ...      each in fresh processes that warm up for themselves
    with epochs       A B C      each trained, for its losses and metrics

docs/compare.md explains the measures.
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
from lockstep.compare.timed_run import Turns, attempt, in_turns
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
    if folder is not None:
        kept = RunFolder.new(folder, f"{name}-compare")
    log = log or (lambda line: None)
    try:
        rows = _measured(source, entries, rounds, seconds, log, parity=parity)
        if settings.get("epochs") is not None:
            with tempfile.TemporaryDirectory(prefix="lockstep-") as scratch:
                where = Path(scratch) if kept is None else kept.path / "runs"
                rows = [
                    _trained(source, entry, row, where, log)
                    for entry, row in zip(entries, rows, strict=True)
                ]
    except BaseException:
        if kept is not None:
            kept.remove()
        raise

    found = Comparison(
        job=path,
        batch_size=loaded.batch_size,
        rounds=rounds,
        seconds=seconds,
        machine=machine(),
        on_slots=all(entry.devices[0].is_slot for entry in entries),
        rows=rows,
        folder="" if kept is None else str(kept.path),
    )
    comparison_folder.log_comparison(found, log)
    return found


def _measured(
    source: Job | JobFile,
    entries: Sequence[Entry],
    rounds: int,
    seconds: float,
    log: Callable[[str], None],
    *,
    parity: bool,
) -> list[Row]:
    """Return the row of each entry, after a look at each and all turns.

    Args:
        source: the job, or its file.
        entries: what is measured.
        rounds: how many turns each has.
        seconds: how long the timed updates of a turn take at least.
        log: called with each line of the report.
        parity: also hold the numbers of each strategy against those of one device.
    """
    rows = {}
    setups = {}
    for entry in entries:
        row = _look(source, entry, log, parity=parity)
        rows[entry.name] = row
        if not row.reason:
            setups[entry.name] = entry.setup
    for name, turns in in_turns(source, setups, rounds, seconds, log).items():
        rows[name] = _timed(rows[name], turns)
    return list(rows.values())


def _look(
    source: Job | JobFile,
    entry: Entry,
    log: Callable[[str], None],
    *,
    parity: bool,
) -> Row:
    """Return the row of an entry with what one trial shows; a failure is its reason, and it isn't
    timed.

    Args:
        source: the job, or its file.
        entry: what is tried.
        log: called with each line of the report.
        parity: also hold the numbers of a strategy against those of one device.
    """
    row = _row_of(entry, source)
    try:
        tried = attempt(source, entry.setup, seconds=_LOOK, looks=True)
    except LockstepError as error:
        log(f"{entry.name}: failed: {first_line(error)}")
        return replace(row, reason=first_line(error))
    caveats = [str(caveat) for caveat in tried.caveats]
    row = replace(
        row,
        caveats=caveats,
        plans=list(tried.plans),
        shapes=tried.shapes,
    )
    line = f"{entry.name}: works, started in {tried.started:.1f} s"
    if parity and entry.role == "strategy":
        agreement = agreement_of(source, entry)
        row = replace(row, agreement=agreement)
        line += f", {agreement}"
        if agreement.reason:
            caveats.append(f"parity is not known: {agreement.reason}")
    log(line)
    return row


def _timed(row: Row, turns: Turns) -> Row:
    """Return a row with what its turns found."""
    if turns.reason:
        return replace(row, reason=turns.reason)
    peaks = zip(*(tried.peaks for tried in turns.tries), strict=True)
    return replace(
        row,
        rates=turns.timing.rates,
        started=statistics.median(tried.started for tried in turns.tries),
        peaks=[max(of_one) for of_one in peaks],
    )


def _trained(
    source: Job | JobFile,
    entry: Entry,
    row: Row,
    folder: Path,
    log: Callable[[str], None],
) -> Row:
    """Return a row with the history of a training, if it is one that is trained; a failure is a
    caveat of it.

    Args:
        source: the job, or its file.
        entry: what is trained.
        row: of the entry.
        folder: where the run is made.
        log: called with each line of the report.
    """
    if row.reason or entry.role == "all cores":
        return row
    setup = entry.setup
    try:
        run = train(
            with_settings(source, setup.settings),
            strategy=choose(setup.strategy, entry.devices, **setup.options),
            devices=entry.devices,
            folder=folder,
            quiet=True,
        )
    except LockstepError as error:
        failed = f"its training failed: {first_line(error)}"
        log(f"{entry.name}: {failed}")
        return replace(row, caveats=[*row.caveats, failed])
    last = run.history[-1]
    loss = last.get("eval_loss", last["train_loss"])
    log(f"{entry.name}: trained, loss {loss:.4g}")
    return replace(row, history=run.history)


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
