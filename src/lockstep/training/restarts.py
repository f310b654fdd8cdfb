"""Trains again, from the last checkpoint, when ranks of this machine are lost; and what is left of
a run that fails.
"""

from __future__ import annotations

import contextlib
import dataclasses
from typing import Any

from lockstep.checkpoint.folder import CheckpointFolder
from lockstep.errors import (
    FolderError,
    InputError,
    LockstepError,
    Lost,
    StrategyError,
    error_line,
)
from lockstep.launch.devices import Device
from lockstep.launch.placement import needs_one_process, on_devices
from lockstep.run.run_folder import RunFolder
from lockstep.run.stop_request import asked
from lockstep.run.terminal import Display
from lockstep.strategies import Strategy
from lockstep.training.loop import train_on
from lockstep.training.setup import Plan


def check_restarts(
    strategy: Strategy,
    devices: tuple[Device, ...],
    restarts: int,
    *,
    torchrun: bool,
) -> None:
    """Refuse a strategy, and restarts, that the way of starting the ranks doesn't allow."""
    name = strategy.name
    if torchrun and strategy.in_one_process:
        raise StrategyError(
            f"{name} is one process for all devices, and torchrun starts one for each: take ddp"
        )
    if restarts < 0:
        raise InputError(f"restarts: {restarts}, a whole number from 0 is expected")
    if restarts and torchrun:
        raise InputError("restarts: torchrun has --max-restarts")
    if restarts and needs_one_process(strategy, devices):
        raise InputError(
            f"restarts: {name} is one process here: start the command again, with --resume auto"
        )


_NEVER = 1e7
"""Seconds that collectives wait where the run is never ended."""


def with_restarts(
    plan: Plan,
    devices: tuple[Device, ...],
    display: Display,
    run: RunFolder | None,
    restarts: int,
) -> tuple[dict[str, Any], str]:
    """Train, and resume when ranks are lost.

    Args:
        plan: what to train.
        devices: a rank for each, or several.
        display: shows what is logged.
        run: the folder of the run; None where others start lost ranks again.
        restarts: how many times ranks are started again.

    Returns:
        The summary of the run, and the path of the folder.
    """
    before = None if run is None else run.written_at(run.summary)
    # A collective waits longer, so that the report of who has not arrived comes first.
    longest = plan.timeout + 60 if plan.timeout else _NEVER

    number = 0
    while True:
        try:
            return on_devices(train_on, plan, devices, plan.folder, display, longest)
        except Lost as error:
            if run is None:
                raise
            if run.written_at(run.summary) not in (None, before):
                # All that the run leaves is written: what was lost had nothing more to do.
                display.line(f"note: {error}, after the end", note=True)
                with run.held():  # removes the lock that a killed rank has left
                    return run.read_json(run.summary), str(run.path)
            if number >= restarts or asked():
                raise
            number += 1
            saved = CheckpointFolder(run.checkpoints).steps()
            start = f"step {saved[0]}" if saved else "the beginning"
            how = f"restart {number} of {restarts}"
            display.line(f"{error}: resuming from {start} ({how})", note=True)
            plan = dataclasses.replace(plan, resume=run.is_resumable, again=True)


def after_error(
    run: RunFolder,
    error: BaseException,
    display: Display,
    *,
    resumed: bool,
) -> None:
    """Remove the folder of a run that was refused, or was stopped before it had anything.

    Else log where it is, and write what failed.
    """
    is_stopped = not isinstance(error, Exception)
    is_refused = isinstance(error, InputError)
    if not resumed and not run.is_resumable and (is_refused or is_stopped):
        run.remove()
        if is_stopped:
            display.line("nothing was saved yet, so no run is kept", note=True)
        return

    if is_refused and (resumed or not run.is_resumable):
        return
    if not is_stopped:
        text = error_line(error)
        if isinstance(error, LockstepError):
            text = str(error).partition("\n")[0]
        with contextlib.suppress(FolderError):  # a full disk, say, which was reported already
            run.write_json(run.failure, {"error": text})

    how = f"; resume it with --resume {run.path}" if run.is_resumable else ""
    display.line(f"run: {run.path}{how}", note=True)
