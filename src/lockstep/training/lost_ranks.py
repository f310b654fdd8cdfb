"""What follows when ranks of this machine are lost: they start again, or the run ends."""

from __future__ import annotations

from lockstep.errors import DeviceError, InputError, Lost, RankFailed, counted
from lockstep.launch.devices import Device
from lockstep.run.stop_request import asked


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
        if min_devices is not None and not 1 < min_devices <= len(devices):
            raise DeviceError(
                f"min_devices: {min_devices}, from 2 to the {len(devices)} devices there are is "
                "expected"
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
