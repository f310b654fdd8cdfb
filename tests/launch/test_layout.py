"""Layouts: which process reads what of a batch."""

from __future__ import annotations

import pytest

from lockstep.launch.devices import Device
from lockstep.launch.layout import Layout
from lockstep.launch.world import World
from lockstep.strategies import STRATEGIES, choose


@pytest.mark.parametrize(
    ("layout", "reads"),
    [
        (Layout({"data": 3}), [(0, 3, 1), (1, 3, 1), (2, 3, 1)]),
        (Layout({"data": 3}, devices_per_process=3), [(0, 1, 3)]),
        (Layout({"stage": 2}, devices_per_process=2), [(0, 1, 1)]),
        (Layout({"data": 2, "stage": 2}, devices_per_process=2), [(0, 2, 1), (1, 2, 1)]),
        (Layout({"data": 2, "tensor": 2}), [(0, 2, 1), (0, 2, 1), (1, 2, 1), (1, 2, 1)]),
    ],
    ids=str,
)
def test_each_process_reads_the_samples_of_its_replicas(
    layout: Layout, reads: list[tuple[int, int, int]]
) -> None:
    assert layout.processes == len(reads)
    assert [layout.read_by(process) for process in range(layout.processes)] == reads


@pytest.mark.parametrize("name", STRATEGIES)
def test_a_strategy_lays_out_all_devices(name: str) -> None:
    devices = 1 if name == "single" else 4
    layout = choose(name, tuple(Device("cpu", i) for i in range(devices))).layout(devices)
    assert layout.devices == devices
    assert layout.together == (name != "hogwild")


def test_without_a_strategy_each_device_has_a_local_batch() -> None:
    assert World(rank=1, size=2, devices=(Device("cpu", 1),)).data == (1, 2, 1)
    assert World(devices=(Device("cpu", 0), Device("cpu", 1))).data == (0, 1, 2)
