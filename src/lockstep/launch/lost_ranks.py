"""What follows when ranks of this machine are lost: they start again, or the run ends."""

from __future__ import annotations

from lockstep.errors import DeviceError, InputError, Lost, RankFailed, counted
from lockstep.launch.devices import Device
from lockstep.launch.run_folder import RunFolder
from lockstep.launch.stop_request import asked


class LostRanks:
    """Counts failures of one training, and says how it goes on.

    Args:
        restarts: how many times ranks are started again.
        min_devices: the fewest devices to go on with; None is all of them.
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
        self._restarts, self._devices = restarts, devices
        self._fewest = len(devices) if min_devices is None else min_devices
        self._number = 0
        self._reached = -1

    def after(self, error: Lost, run: RunFolder) -> tuple[tuple[Device, ...], str]:
        """The devices to go on with, and the line to say.

        A rank that is lost again, without the run having come further, is left out, where there are
        more devices than are needed.

        Raises:
            Lost: it is not to go on.
        """
        if self._number >= self._restarts or asked():
            raise error
        self._number += 1
        newest = max(
            run.checkpoints.glob("step-*[0-9]"), key=lambda path: int(path.name[5:]), default=None
        )
        name = "the beginning" if newest is None else newest.name.replace("-", " ")
        left_out = ""
        rank, step = (
            (error.rank, error.step or 0)
            if isinstance(error, RankFailed)
            else (None, self._reached + 1)
        )
        if rank is not None and step <= self._reached and len(self._devices) > self._fewest:
            gone = self._devices[rank]
            self._devices = tuple(device for device in self._devices if device != gone)
            left_out = f", without {gone}"
        self._reached = max(step, self._reached)
        how = (
            f"restart {self._number} of {self._restarts}, on "
            f"{counted(len(self._devices), 'device')}{left_out}"
        )
        return self._devices, f"{error}: resuming from {name} ({how})"
