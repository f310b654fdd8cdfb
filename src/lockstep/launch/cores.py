"""The cores and the computing threads of a device: thread limits, pinning to cores."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Sequence

import torch

from lockstep.launch.devices import Device, usable_cores


def limit_threads(device: Device) -> None:
    """Give the calling thread as many computing threads as the device has cores, or as
    ``OMP_NUM_THREADS`` allows.

    OpenMP's limit belongs to the thread that sets it, so each computing thread calls this itself.
    """
    if device.is_slot:
        # a thread's first question gives it the process's limit, over one set before
        torch.get_num_threads()
        torch.set_num_threads(min(device.threads, _own_limit() or device.threads))


def settle(device: Device) -> None:
    """Compute on a device from now on, in the calling thread: its thread limit, or its being the
    current one.
    """
    limit_threads(device)
    if device.type == "cuda":  # makes a context, too, which a new thread hasn't got
        torch.cuda.set_device(device.index)
    elif not device.is_slot:
        torch.accelerator.set_device_index(device.index)


def _own_limit() -> int | None:
    """``OMP_NUM_THREADS``, unless it may be torchrun's own default, which is 1 however many
    cores a process has.
    """
    word = os.environ.get("OMP_NUM_THREADS", "").partition(",")[0]
    own = int(word) if word.isdigit() and int(word) else None
    return None if own == 1 and "TORCHELASTIC_RUN_ID" in os.environ else own


def note_on_threads(device: Device) -> str | None:
    """Return what the person has to know of ``OMP_NUM_THREADS``."""
    if not device.is_slot or device.threads == 1:
        return None
    cores = f"{device.threads} cores"
    own = _own_limit()
    if own is not None and own < device.threads:
        return f"each device has {cores}, but computes with {own}, as OMP_NUM_THREADS sets"
    if own is None and os.environ.get("OMP_NUM_THREADS") == "1":
        return (
            f"each rank computes with its {cores}: OMP_NUM_THREADS=1 may be torchrun's own default"
        )
    return None


def pin(device: Device) -> None:
    """Keep the calling thread on the cores of its slot.

    Call it after the process group exists: threads that gloo makes later would inherit the pinning,
    and an all-reduce then takes twice as long.
    """
    if device.is_slot and device.cores and hasattr(os, "sched_setaffinity"):
        with contextlib.suppress(OSError):
            os.sched_setaffinity(0, device.cores)


def bound_by_launcher(cores: Sequence[int]) -> bool:
    """Return whether what started this process gave it only these of its own cores: they are this
    process's alone.
    """
    try:
        return set(cores) < os.sched_getaffinity(os.getppid())
    except (AttributeError, OSError):  # not on this system, or it has ended
        return False


def share_threads(devices: Sequence[Device], ranks: int) -> None:
    """Give a rank with accelerators its part of the cores as computing threads.

    Args:
        devices: the rank's; CPU devices have cores of their own (``pin``).
        ranks: how many ranks this machine has.
    """
    if devices[0].is_slot:
        return
    cores = usable_cores()
    mine = len(cores) if bound_by_launcher(cores) else len(cores) // ranks
    torch.set_num_threads(max(1, min(torch.get_num_threads(), mine)))


@contextlib.contextmanager
def occupied(device: Device) -> Iterator[None]:
    """Compute on a device for a while: its thread limit, or its being the current one; as before
    afterwards.
    """
    if device.is_slot:
        before = torch.get_num_threads()
        limit_threads(device)
        try:
            yield
        finally:
            torch.set_num_threads(before)
    else:
        with torch.accelerator.device_index(device.index):
            yield
