"""Trains again, from the last checkpoint, when ranks of this machine are lost; and what is left of
a run that fails.
"""

from __future__ import annotations

import contextlib
import dataclasses
from typing import Any

from lockstep.checkpoint.folder import CheckpointFolder
from lockstep.errors import (
    DeviceError,
    FolderError,
    InputError,
    LockstepError,
    Lost,
    RankFailed,
    StrategyError,
    counted,
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
    min_devices: int | None,
    *,
    torchrun: bool,
) -> None:
    """Refuse a strategy, and restarts, that the way of starting the ranks doesn't allow."""
    name = strategy.name
    if torchrun and strategy.in_one_process:
        raise StrategyError(
            f"{name} is one process for all devices, and torchrun starts one for each: take ddp"
        )
    if min_devices is not None and strategy.devices_needed is not None:
        raise InputError(
            f"min_devices: {name} is for {strategy.devices_needed} devices, and no fewer: "
            "leave it out"
        )

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
    backend: str | None,
    display: Display,
    run: RunFolder | None,
    lost: LostRanks,
) -> tuple[dict[str, Any], str]:
    """Train, and resume when ranks are lost.

    Args:
        plan: what to train.
        devices: a rank for each, or several.
        backend: of the ranks.
        display: shows what is logged.
        run: the folder of the run; None where others start lost ranks again.
        lost: counts failures, and decides how to continue.

    Returns:
        The summary of the run, and the path of the folder.
    """
    before = None if run is None else run.written_at(run.summary)
    # A collective waits longer, so that the report of who has not arrived comes first.
    longest = plan.timeout + 60 if plan.timeout else _NEVER

    while True:
        try:
            return on_devices(train_on, plan, devices, backend, plan.folder, display, longest)
        except Lost as error:
            if run is None:
                raise
            if run.written_at(run.summary) not in (None, before):
                # All that the run leaves is written: what was lost had nothing more to do.
                display.line(f"note: {error}, after the end", note=True)
                with run.held(waits=True):  # removes the lock that a killed rank has left
                    return run.read_json(run.summary), str(run.path)
            saved = CheckpointFolder(run.checkpoints).steps()
            devices, line = lost.after(error, saved)
            display.line(line, note=True)
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


class LostRanks:
    """Counts the failures of one training, and decides how it continues.

    Args:
        restarts: how many times ranks are started again.
        min_devices: the fewest devices to continue with; None is all of them.
        devices: those it begins with.

    Raises:
        InputError: a number is impossible.
    """

    def __init__(self, restarts: int, min_devices: int | None, devices: tuple[Device, ...]) -> None:
        if restarts < 0:
            raise InputError(f"restarts: {restarts}, a whole number from 0 is expected")
        if min_devices is not None and not restarts:
            raise InputError(
                f"min_devices: {min_devices} has an effect only with restarts: give both, or "
                "leave it out"
            )
        if min_devices is not None and not 1 < min_devices <= len(devices):
            raise DeviceError(
                f"min_devices: {min_devices}: give a number from 2 to the number of devices, "
                f"which is {len(devices)}"
            )
        self._restarts = restarts
        self._devices = devices
        self._fewest = len(devices) if min_devices is None else min_devices
        self._number = 0
        self._reached = -1

    def after(self, error: Lost, saved: list[int]) -> tuple[tuple[Device, ...], str]:
        """Return the devices to continue with, and a line for the log.

        A rank that is lost again, without progress since, is left out where there are more devices
        than are needed.

        Args:
            error: what was lost.
            saved: the steps that have a checkpoint, newest first.

        Raises:
            Lost: the run ends.
        """
        if self._number >= self._restarts or asked():
            raise error
        self._number += 1
        left_out = self._left_out(error)
        start = f"step {saved[0]}" if saved else "the beginning"
        how = f"restart {self._number} of {self._restarts}"
        count = counted(len(self._devices), "device")
        return self._devices, f"{error}: resuming from {start} ({how}, on {count}{left_out})"

    def _left_out(self, error: Lost) -> str:
        """Leave out the device whose rank was lost twice in the same step."""
        if not isinstance(error, RankFailed) or error.rank is None:
            self._reached += 1
            return ""
        step = error.step or 0
        is_again = step <= self._reached
        self._reached = max(step, self._reached)
        if not is_again or len(self._devices) <= self._fewest:
            return ""
        gone = self._devices[error.rank]
        self._devices = tuple(device for device in self._devices if device != gone)
        return f", without {gone}"
