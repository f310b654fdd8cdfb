"""Processes that others have started: they join where they can, and never train alone without a
word.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from torch import nn

import lockstep
from lockstep.errors import DeviceError
from lockstep.launch import started_as_rank, started_ranks
from lockstep.launch.devices import Device
from lockstep.launch.world import World
from lockstep.strategies import devices_for
from zoo import ZOO, mlp, plain_sgd

SPAWNED = """
import json, sys
import torch, torch.distributed as dist, torch.multiprocessing as mp
from torch import nn
from torch.utils.data import TensorDataset
import lockstep
from lockstep.launch.world import enter

def data():
    generator = torch.Generator().manual_seed(3)
    return TensorDataset(torch.randn(41, 6, generator=generator), torch.randint(3, (41,), generator=generator))

def job():
    return lockstep.Job(
        model=lambda: nn.Linear(6, 3), loss=nn.CrossEntropyLoss(), train_data=data(), batch_size=8, epochs=2,
        optimizer=lambda params: torch.optim.SGD(params, lr=0.5), precision="fp64",
    )

def main(rank, size, folder):
    if size > 1:
        dist.init_process_group("gloo", init_method=f"file://{folder}/meeting", rank=rank, world_size=size)
    torch.manual_seed(0)
    step = lockstep.parallelize(
        nn.Linear(6, 3), nn.CrossEntropyLoss(), lambda p: torch.optim.SGD(p, lr=0.5), devices="1xcpu", precision="fp64"
    )
    losses = [step(inputs, targets).loss for inputs, targets in lockstep.batches(data(), batch_size=8)]
    own = step.world.size
    enter(None)  # its loop is done
    run = lockstep.train(job(), devices="1xcpu", folder=f"{folder}/runs-{size}", quiet=True)
    if rank == 0:
        print(own, json.dumps([*losses, run.metrics["loss"]]), run.summary["world_size"], run.summary["strategy"])
    if size > 1:
        assert dist.is_initialized(), "the group is the person's own"
        dist.barrier()  # gloo may end a process whose peer leaves first
        dist.destroy_process_group()

if __name__ == "__main__":
    if sys.argv[2] == "1":
        main(0, 1, sys.argv[1])
    else:
        mp.spawn(main, (2, sys.argv[1]), nprocs=2)
"""


@pytest.mark.slow
def test_a_process_group_made_by_hand_is_joined(tmp_path: Path) -> None:
    """Under ``mp.spawn`` each process once trained alone."""
    script = tmp_path / "spawned.py"
    script.write_text(SPAWNED)
    found = {}
    for size in ("1", "2"):
        command = [sys.executable, str(script), str(tmp_path), size]
        out = subprocess.run(command, capture_output=True, text=True, check=False, timeout=100)
        assert out.returncode == 0, out.stderr
        head, rest = out.stdout.split(" ", 1)
        losses, _, tail = rest.rpartition("] ")
        found[head] = json.loads(losses + "]"), tail.split()
    assert found["1"][1] == ["1", "single"] and found["2"][1] == ["2", "ddp"]
    assert found["2"][0] == pytest.approx(found["1"][0], abs=1e-12)


ALONE = {
    "no address": (
        {"RANK": "1", "WORLD_SIZE": "4"},
        "one of 4 .*LOCAL_RANK and MASTER_ADDR and MASTER_PORT are",
    ),
    "no local rank": (
        {"RANK": "1", "WORLD_SIZE": "4", "MASTER_ADDR": "localhost", "MASTER_PORT": "29500"},
        "LOCAL_RANK is not set, so each process would train alone: start all with torchrun",
    ),
    "SLURM": (
        {"SLURM_PROCID": "1", "SLURM_NTASKS": "4"},
        r"SLURM has started this process as one of 4 \(SLURM_PROCID",
    ),
    "srun": (
        {"SLURM_PROCID": "0", "SLURM_NTASKS": "1", "SLURM_STEP_NUM_TASKS": "2"},
        "SLURM_STEP_NUM_TASKS",
    ),
    "Open MPI": (
        {"OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_SIZE": "2"},
        "Open MPI has started this process",
    ),
    "MPICH": ({"PMI_RANK": "0", "PMI_SIZE": "2"}, "MPI has started this process as one of 2"),
}
CALLS: dict[str, Callable[[Path], Any]] = {
    "train": lambda path: lockstep.train(ZOO["mlp"], devices="1xcpu", folder=path, quiet=True),
    "evaluate": lambda path: lockstep.evaluate(ZOO["mlp"], devices="1xcpu"),
    "launch": lambda path: lockstep.launch(lambda world: None, devices="2xcpu"),
    "parallelize": lambda path: lockstep.parallelize(
        mlp(), nn.CrossEntropyLoss(), plain_sgd, devices="1xcpu"
    ),
}


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("case", ALONE)
def test_who_would_train_alone_is_refused_in_a_line(
    case: str, call: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    variables, said = ALONE[case]
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(DeviceError, match=said) as caught:
        CALLS[call](tmp_path)
    assert "\n" not in str(caught.value)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    "variables",
    [
        {"SLURM_PROCID": "0", "SLURM_NTASKS": "1"},
        {"SLURM_NTASKS": "4"},
        {"PMI_RANK": "0", "PMI_SIZE": "1"},
        {"RANK": "0"},
    ],
    ids=str,
)
def test_who_is_alone_trains(
    variables: dict[str, str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    CALLS["train"](tmp_path)


ADDRESS = {"MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "29500"}
FOUND = {
    "SLURM": (
        {"SLURM_PROCID": "5", "SLURM_NTASKS": "8", "SLURM_LOCALID": "1", "SLURM_NODEID": "2"}
        | {"SLURM_STEP_TASKS_PER_NODE": "2(x4)"},
        (5, 8, 1, 2),
    ),
    "a step": (
        {
            "SLURM_PROCID": "1",
            "SLURM_STEP_NUM_TASKS": "2",
            "SLURM_NTASKS": "8",
            "SLURM_LOCALID": "0",
        }
        | {"SLURM_NODEID": "1", "SLURM_STEP_TASKS_PER_NODE": "1(x2)"},
        (1, 2, 0, 1),
    ),
    "Open MPI in a SLURM job": (
        {
            "OMPI_COMM_WORLD_RANK": "3",
            "OMPI_COMM_WORLD_SIZE": "4",
            "OMPI_COMM_WORLD_LOCAL_RANK": "1",
        }
        | {
            "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
            "SLURM_PROCID": "0",
            "SLURM_NTASKS": "4",
            "SLURM_LOCALID": "0",
        },
        (3, 4, 1, 2),
    ),
    "MPICH": (
        {"PMI_RANK": "1", "PMI_SIZE": "4", "MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "4"},
        (1, 4, 1, 4),
    ),
    "srun --mpi=pmi2": (
        {
            "PMI_RANK": "1",
            "PMI_SIZE": "2",
            "SLURM_PROCID": "1",
            "SLURM_NTASKS": "2",
            "SLURM_LOCALID": "1",
        }
        | {"SLURM_NODEID": "0", "SLURM_STEP_TASKS_PER_NODE": "2"},
        (1, 2, 1, 2),
    ),
}


@pytest.fixture
def environment(monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """The environment, as it may be changed by a test and by what it calls."""
    environment = dict(os.environ)
    monkeypatch.setattr(os, "environ", environment)
    return environment


@pytest.mark.parametrize("case", FOUND)
def test_slurm_and_mpi_make_a_rank(case: str, environment: dict[str, str]) -> None:
    variables, expected = FOUND[case]
    environment.update(variables | ADDRESS)
    assert started_as_rank()
    place = started_ranks.place()
    assert (place.rank, place.size, place.local_rank, place.local_size) == expected
    assert [environment[name] for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK")] == [
        str(n) for n in expected[:3]
    ]


def test_what_is_missing_is_named(environment: dict[str, str]) -> None:
    environment.update({"PMI_RANK": "1", "PMI_SIZE": "4", "MASTER_PORT": "29500"})
    with pytest.raises(
        DeviceError, match=r"train alone: set MPI_LOCALRANKID and MASTER_ADDR \(docs/clusters.md\)"
    ):
        started_as_rank()


CARDS = tuple(Device("cuda", number) for number in range(2))


def test_one_accelerator_for_each_task_is_that_tasks_own(environment: dict[str, str]) -> None:
    environment.update(FOUND["SLURM"][0] | ADDRESS)
    environment["CUDA_VISIBLE_DEVICES"] = "0"
    assert started_as_rank()
    assert started_ranks.devices_of_this_rank(CARDS[:1]) == CARDS[:1]
    environment["CUDA_VISIBLE_DEVICES"] = "0,1"
    assert started_ranks.devices_of_this_rank(CARDS) == CARDS[1:2]
    with pytest.raises(DeviceError, match="2 processes were started for 1 device here"):
        started_ranks.devices_of_this_rank(CARDS[:1])


def test_under_torchrun_one_accelerator_for_several_is_refused(environment: dict[str, str]) -> None:
    environment.update(
        FOUND["SLURM"][0] | ADDRESS | {"CUDA_VISIBLE_DEVICES": "0", "TORCHELASTIC_RUN_ID": "none"}
    )
    assert started_as_rank()
    with pytest.raises(DeviceError, match="2 processes were started for 1 device here"):
        started_ranks.devices_of_this_rank(CARDS[:1])


def test_a_number_of_devices_that_the_processes_do_not_have_is_refused(
    environment: dict[str, str],
) -> None:
    environment.update(FOUND["Open MPI in a SLURM job"][0] | ADDRESS)
    for strategy, devices, given, each in (
        (None, "1", "1 device", "1 device"),
        ("ddp", "3xcpu", "3 devices", "1 device"),
        ("ddp=2xpp=2", 2, "2 devices", "2 devices"),
    ):
        says = f"2 processes with {each} each were started for {given} here: give"
        with pytest.raises(DeviceError, match=says):
            devices_for(strategy, devices)
    assert devices_for("ddp", "2xcpu") == "2xcpu" and devices_for("ddp", "cpu") == "cpu"
    assert devices_for("ddp=2xpp=2", "4") == "4xcpu"


# Which network interface is used between nodes

TWO_NODES = World(size=2)


def chosen(environment: dict[str, str]) -> list[str | None]:
    return [environment.get(name) for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")]


@pytest.fixture
def network(environment: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """A host with two interfaces, whose route to the first node is by the second."""
    environment["MASTER_ADDR"] = "first"
    monkeypatch.setattr(
        started_ranks,
        "_interfaces",
        lambda: {"127.0.0.1": "lo", "10.0.0.7": "eth0", "10.1.0.7": "ib0"},
    )
    monkeypatch.setattr(
        started_ranks, "_address_towards", {"first": "10.1.0.7", "me": "127.0.0.1"}.__getitem__
    )
    return environment


def test_the_interface_is_that_of_the_route_to_the_first_node(network: dict[str, str]) -> None:
    started_ranks._choose_interface(TWO_NODES)
    assert chosen(network) == ["ib0", "=ib0"]


def test_on_one_node_nothing_is_chosen(network: dict[str, str]) -> None:
    network["MASTER_ADDR"] = "me"
    started_ranks._choose_interface(World(local_size=2, size=2))
    assert chosen(network) == [None, None]


@pytest.mark.parametrize("name", ["GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"])
def test_an_interface_that_a_person_has_set_is_kept(name: str, network: dict[str, str]) -> None:
    network |= {name: "eth0", "MASTER_ADDR": "me"}
    started_ranks._choose_interface(TWO_NODES)
    assert [one for one in chosen(network) if one] == ["eth0"]


def test_loopback_is_refused_in_a_line(network: dict[str, str]) -> None:
    network["MASTER_ADDR"] = "me"
    with pytest.raises(DeviceError, match="MASTER_ADDR me is a loopback address here") as caught:
        started_ranks._choose_interface(TWO_NODES)
    assert "\n" not in str(caught.value) and chosen(network) == [None, None]


@pytest.mark.skipif(sys.platform != "linux", reason="asks Linux")
def test_addresses_and_interfaces_are_those_of_this_machine() -> None:
    assert started_ranks._address_towards("127.0.0.1") == "127.0.0.1"
    found = started_ranks._interfaces()
    assert found["127.0.0.1"] == "lo"
    assert set(found.values()) <= {name for _, name in socket.if_nameindex()}


RESTARTED = """
import os, time, torch
from lockstep.launch import launch

again = os.environ["TORCHELASTIC_RESTART_COUNT"] != "0"
if again and os.environ["RANK"] == "0":
    time.sleep(3)  # meanwhile rank 1 looks for it

def fn(world):
    world.all_reduce(torch.ones(1))
    if not again:
        raise ValueError("the first time")
    return world.rank

print(f"{launch(fn)}\\n", end="", flush=True)
"""


@pytest.mark.slow
def test_ranks_that_torchrun_starts_again_find_one_another(tmp_path: Path) -> None:
    """Torchrun keeps its store. A rank that came first once waited at the other's former
    address, for minutes.
    """
    (tmp_path / "again.py").write_text(RESTARTED)
    torchrun = [
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node=2",
        "--max-restarts=1",
        "again.py",
    ]
    done = subprocess.run(
        [sys.executable, *torchrun], cwd=tmp_path, capture_output=True, text=True, timeout=100
    )
    assert done.returncode == 0 and done.stdout.split("\n").count("[0, 1]") == 2, done.stderr


LATE = """
import os, time
from lockstep.launch import launch, started_ranks

if os.environ["RANK"] == "2":
    time.sleep(2)  # the others have read by then, and rank 1 has begun to wait for the next thing
read = started_ranks.read_by_first(lambda: 7)
print(launch(lambda world: world.rank, "cpu"), read)
"""


@pytest.mark.slow
def test_a_rank_that_comes_late_cuts_nobody_off(tmp_path: Path) -> None:
    """Rank 0 served one store after the other at one port; who waited at the first for the
    second was cut off.
    """
    (tmp_path / "late.py").write_text(LATE)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    environment = {**os.environ, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "WORLD_SIZE": "3"}
    ranks = [
        subprocess.Popen(
            [sys.executable, "late.py"],
            cwd=tmp_path,
            env={**environment, "RANK": rank, "LOCAL_RANK": rank},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in "012"
    ]
    try:
        said = [process.communicate(timeout=60)[0] for process in ranks]
    finally:
        for process in ranks:
            process.kill()
    assert said == ["[0, 1, 2] 7\n"] * 3


def test_local_ranks_have_their_place_in_the_environment() -> None:
    """Libraries look there: for whose turn it is to print, or to download."""
    found = lockstep.launch(
        lambda world: [os.environ[name] for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK")],
        devices="2xcpu",
    )
    assert found == [["0", "2", "0"], ["1", "2", "1"]]
    assert "RANK" not in os.environ
