"""World: what the ranks of accelerators exchange over the CPU, where the host waits for it;
whose cores a rank has.
"""

from __future__ import annotations

import os
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from lockstep.launch import launch
from lockstep.launch.devices import Device, slots
from lockstep.launch.processes import group
from lockstep.launch.world import World


def on_cards(world: World) -> None:
    """From now on this rank's device is a card, whose collectives begin and don't hold the host,
    as NCCL's.
    """
    world.devices, world.backend = (Device("meta", world.rank),), "nccl"
    over_cpu = dist.all_reduce

    def begun(tensor, *args, **named):
        return over_cpu(tensor, *args, **named) if tensor.is_cpu else None

    dist.all_reduce = begun


def written_late(world: World, path: Path) -> bool:
    on_cards(world)
    if world.is_first:
        time.sleep(0.5)
        path.write_text("whole")
    world.barrier()
    return path.exists()


def test_a_barrier_holds_the_host_where_collectives_of_the_device_do_not(tmp_path: Path) -> None:
    """Ranks went on to open a file before rank 0 had written it."""
    assert launch(written_late, "2xcpu", args=(tmp_path / "file",)) == [True, True]


def told(world: World) -> tuple[list[int], str, str]:
    on_cards(world)
    told = world.broadcast_object("from the first" if world.is_first else "")
    return world.gather_objects(world.rank), told, str(world.exchange_device)


def test_objects_of_ranks_on_accelerators_go_over_the_cpu() -> None:
    assert launch(told, "2xcpu") == [([0, 1], "from the first", "cpu")] * 2


@pytest.mark.parametrize(
    ("kind", "backend", "asked", "bound"),
    [
        ("cuda", None, "cpu:gloo,cuda:nccl", True),
        ("xpu", None, "cpu:gloo,xpu:xccl", False),
        ("cuda", "gloo", "gloo", False),
        ("cpu", None, "gloo", False),
    ],
)
def test_a_group_on_accelerators_has_gloo_beside_it(
    kind, backend, asked, bound, monkeypatch
) -> None:
    found = {}
    monkeypatch.setattr(
        dist, "init_process_group", lambda name, **named: found.update(named, name=name)
    )
    for name in ("settle", "pin", "share_threads"):
        monkeypatch.setattr(group.cores, name, lambda *of: None)
    monkeypatch.setattr(group, "enter", lambda world: None)
    world = World(devices=(Device(kind, 0),), backend=backend)
    group.join(world, SimpleNamespace(set_timeout=lambda patience: None))
    assert found["name"] == asked
    assert found["device_id"] == (torch.device(kind, 0) if bound else None)


def surroundings(world: World) -> tuple[list[str], int, set[int], int]:
    return (
        list(map(str, world.devices)),
        world.size,
        os.sched_getaffinity(0),
        torch.get_num_threads(),
    )


def test_a_rank_of_several_devices_has_the_cores_of_all_of_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    devices = slots(4)
    for rank, found in enumerate(launch(surroundings, devices, devices_per_rank=2)):
        mine = devices[2 * rank : 2 * rank + 2]
        cores = {core for device in mine for core in device.cores}
        assert found == (list(map(str, mine)), 2, cores, len(cores))
