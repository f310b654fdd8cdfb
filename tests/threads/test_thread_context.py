"""What a thread takes over from the caller."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import torch

from lockstep.launch.devices import Device
from lockstep.threads.thread_context import Caller


class Pretended(NamedTuple):
    """A stream as PyTorch has it: its object can't be entered while it is entered."""

    stream_id: int
    device_index: int
    device_type: int
    entered: list[bool]

    def __enter__(self) -> None:
        assert not self.entered, "Stream's context should not be initialized"
        self.entered.append(True)

    def __exit__(self, *error: Any) -> None:
        self.entered.clear()


def test_threads_on_one_card_compute_on_the_callers_stream_at_once(monkeypatch) -> None:
    """They entered one object of it, which PyTorch 2.11 refuses."""
    monkeypatch.setattr(
        torch.accelerator, "current_stream", lambda device: Pretended(7, device.index, 1, [])
    )
    monkeypatch.setattr(
        torch, "Stream", lambda **place: made.append(place) or Pretended(**place, entered=[])
    )
    made: list[Any] = []
    card, both = Device("cuda", 0), threading.Barrier(2)
    caller = Caller([card])
    with ThreadPoolExecutor(2) as threads:
        inside = [threads.submit(caller.run, lambda: both.wait(10), card) for _ in range(2)]
        assert sorted(one.result() for one in inside) == [0, 1]
    assert made == [{"stream_id": 7, "device_index": 0, "device_type": 1}] * 2
