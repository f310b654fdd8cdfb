"""Turns: who computes next on each device, and where it wakes up."""

from __future__ import annotations

import os
import sys
import threading
import time

import pytest

from lockstep.launch.devices import slots, usable_cores
from lockstep.launch.placement import alone
from lockstep.pipelining.device_turns import Turns
from lockstep.pipelining.stage_threads import StageThreads


def test_who_waits_is_beckoned_to_the_device_where_it_goes_on() -> None:
    beckoned: list[tuple[int, int]] = []
    turns = Turns(
        [[(0, 0), (0, 1)], [(1, 0)]],
        (0, 1),
        lambda thread, device: beckoned.append((thread, device)),
    )
    turns.take(0, (0, 0))
    numbers: list[int] = []

    def second() -> None:
        numbers.append(threading.get_native_id())
        turns.take(0, (0, 1))

    thread = threading.Thread(target=second)
    thread.start()
    while not turns._devices[0].waiting:
        time.sleep(0.001)
    assert not beckoned, "it isn't its turn yet"
    turns.leave(0)
    thread.join(timeout=10)
    assert beckoned == [(numbers[0], 0)]


@pytest.mark.skipif(
    sys.platform != "linux" or len(usable_cores()) < 2, reason="pinning to one of several cores"
)
def test_a_thread_wakes_up_on_the_core_of_its_stage() -> None:
    """Pinned to where it computed before it would have to wait there, behind who computes now."""
    wake = threading.Event()
    cores: list[set[int]] = []
    ready = threading.Event()
    numbers: list[int] = []

    def waits() -> None:
        os.sched_setaffinity(0, slots(2)[0].cores)
        numbers.append(threading.get_native_id())
        ready.set()
        wake.wait()
        cores.append(os.sched_getaffinity(0))

    thread = threading.Thread(target=waits)
    thread.start()
    ready.wait()
    with alone(slots(2)) as world:
        StageThreads(world.devices, world.devices).beckon(numbers[0], 1)
    wake.set()
    thread.join(timeout=10)
    assert cores == [set(slots(2)[1].cores)]
