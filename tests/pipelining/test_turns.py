"""Turns: who computes next on each device, and where it wakes up."""

from __future__ import annotations

import os
import sys
import threading
import time

import pytest
from torch import nn

from lockstep.errors import StrategyError
from lockstep.launch.devices import slots, usable_cores
from lockstep.launch.placement import alone
from lockstep.pipelining.microbatch import MicroBatch
from lockstep.pipelining.runner import Runner
from lockstep.pipelining.schedule import Visit
from lockstep.pipelining.turns import Aborted, Turns


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
    while not turns._waiting:
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
        Runner(nn.Identity(), world, lambda count: [], (0, 1))._beckon(numbers[0], 1)
    wake.set()
    thread.join(timeout=10)
    assert cores == [set(slots(2)[1].cores)]


def test_where_all_wait_one_fails_and_says_where() -> None:
    """Stage 1 is kept for a micro-batch that doesn't come."""
    turns = Turns([[(0, 0), (0, 1)], [(1, 2), (1, 0), (1, 1)]], (0, 1), microbatches=2)
    route = Visit(0, "F"), Visit(1, "F")
    errors: list[BaseException] = []

    def goes(microbatch: MicroBatch) -> None:
        try:
            with microbatch:
                microbatch.enter(1)
        except (StrategyError, Aborted) as error:
            errors.append(error)
            turns.abort()

    threads = [
        threading.Thread(target=goes, args=[MicroBatch(n, lambda stage: None, route, turns)])
        for n in range(2)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=20)
    assert not any(thread.is_alive() for thread in threads)
    first, second = errors
    assert isinstance(first, StrategyError) and isinstance(second, Aborted)
    assert str(first).startswith(
        "stage 1, forward of micro-batch 0: it waits for its turn, and all others that are"
    )
