"""Several hosts, which are network namespaces of this machine: the same bits as on one, slow
links, lost hosts.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from hosts import Host, cluster

pytestmark = pytest.mark.slow

JOB = """
import time

import torch
from torch import nn
from torch.utils.data import Dataset

import lockstep


class Data(Dataset):
    def __init__(self, pause):
        self.pause = pause
        generator = torch.Generator().manual_seed(3)
        self.inputs = torch.randn(96, 20, generator=generator)
        self.targets = torch.randint(5, (96,), generator=generator)

    def __len__(self):
        return 96

    def __getitem__(self, index):
        time.sleep(self.pause)
        return self.inputs[index], self.targets[index]


def job(pause: float = 0.0, width: int = 8):
    return lockstep.Job(
        model=lambda: nn.Sequential(nn.Linear(20, width), nn.Tanh(), nn.Linear(width, width), nn.Linear(width, 5)),
        loss=nn.CrossEntropyLoss(),
        train_data=Data(pause),
        batch_size=8,
        epochs=3,
        optimizer=lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9),
    )
"""

TRAIN = ["-m", "lockstep", "train", "job.py", "--strategy", "ddp"]
ENVIRONMENT = {"OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"}
SLOW = 300
"""A width with which the gradients (360 KiB) are summed in a ring, not in one exchange."""


def torchrun(number: int, hosts: Sequence[Host], ranks: int) -> list[str]:
    """The words that start the ranks of a host, on a core for each: two threads would round
    otherwise than one.
    """
    size, first = str(len(hosts)), hosts[0].address
    address = ["--node-rank", str(number), "--master-addr", first, "--master-port", "29500"]
    cores = ",".join(str(core) for core in sorted(os.sched_getaffinity(0))[:ranks])
    run = ["taskset", "-c", cores, sys.executable, "-m", "torch.distributed.run"]
    return [*run, "--nnodes", size, "--nproc-per-node", str(ranks), *address]


def started(
    hosts: Sequence[Host],
    folder: Path,
    words: Sequence[str] = (),
    *,
    ranks: int = 2,
    own_disks: bool = False,
    train: Sequence[str] = TRAIN,
) -> list[subprocess.Popen[str]]:
    """Start a training on all hosts."""
    (folder / "job.py").write_text(JOB)
    (folder / "runs").mkdir(exist_ok=True)
    return [
        host.start(
            [
                *torchrun(number, hosts, ranks),
                *train,
                *([] if "--devices" in words else ["--devices", "cpu"]),
                *words,
            ],
            folder,
            ENVIRONMENT,
            own_disk=folder / "runs" if own_disks else None,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
        )
        for number, host in enumerate(hosts)
    ]


def ended(
    processes: Sequence[subprocess.Popen[str]], code: int | None = 0, seconds: float = 100
) -> list[str]:
    """Wait for them all; gives what each has printed."""
    said = [process.communicate(timeout=seconds)[0] for process in processes]
    if code is not None:
        assert [process.returncode for process in processes] == [code] * len(processes), "\n".join(
            said
        )
    return said


def model_in(runs: Path) -> bytes:
    """The weights of the one run in a folder."""
    (run,) = runs.iterdir()
    return (run / "model.safetensors").read_bytes()


@pytest.fixture(scope="module", params=[8, SLOW], ids=["exchange", "ring"])
def width(request: pytest.FixtureRequest) -> int:
    return request.param


def on_one_machine(folder: Path, width: int) -> bytes:
    """The weights that four local ranks reach."""
    folder.mkdir()
    (folder / "job.py").write_text(JOB)
    words = [sys.executable, *TRAIN, "--devices", "4xcpu", "--set", f"width={width}"]
    subprocess.run(
        words,
        cwd=folder,
        env={**os.environ, **ENVIRONMENT},
        check=True,
        capture_output=True,
        timeout=100,
    )
    return model_in(folder / "runs")


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> Callable[[int], bytes]:
    """The weights that four local ranks reach, by the model's width."""
    found: dict[int, bytes] = {}

    def of(width: int) -> bytes:
        if width not in found:
            found[width] = on_one_machine(tmp_path_factory.mktemp("local") / "here", width)
        return found[width]

    return of


def test_two_hosts_and_four_are_one_machine_to_the_bit(
    width: int, tmp_path: Path, expected: Any
) -> None:
    for hosts, ranks in ((2, 2), (4, 1)):
        folder = tmp_path / str(hosts)
        with cluster(hosts, folder) as machines:
            ended(started(machines, folder, ["--set", f"width={width}"], ranks=ranks))
        assert model_in(folder / "runs") == expected(width), (hosts, ranks)


def test_a_slow_link_changes_no_bit(tmp_path: Path, expected: Any) -> None:
    with cluster(2, tmp_path) as hosts:
        hosts[1].slow_down()
        ended(started(hosts, tmp_path, ["--set", f"width={SLOW}"]))
    assert model_in(tmp_path / "runs") == expected(SLOW)


def test_a_host_whose_own_name_is_loopback_is_reached_by_the_route(
    tmp_path: Path, expected: Any
) -> None:
    """As Debian sets up /etc/hosts. By itself gloo takes 127.0.1.1 there, and the ranks look for
    one another.
    """
    with cluster(2, tmp_path, own_name_is_loopback=True) as hosts:
        processes = started(hosts, tmp_path, ["--set", "pause=0.05"])
        listening = watched(hosts, processes)
        ended(processes)
    assert model_in(tmp_path / "runs") == expected(8)
    for host, places in zip(hosts, listening, strict=True):
        assert {address for address, _ in places} <= {"0.0.0.0", host.address}


def watched(
    hosts: Sequence[Host], processes: Sequence[subprocess.Popen[str]]
) -> list[set[tuple[str, int]]]:
    """Where the processes of each host listened until they ended."""
    found: list[set[tuple[str, int]]] = [set() for _ in hosts]
    while any(process.poll() is None for process in processes):
        for places, host in zip(found, hosts, strict=True):
            places |= host.listening()
        time.sleep(0.1)
    return found


def test_a_rendezvous_address_that_is_loopback_is_refused_in_a_line(tmp_path: Path) -> None:
    """Without --local-addr torchrun tells all the first host's name."""
    with cluster(2, tmp_path, own_name_is_loopback=True) as hosts:
        (tmp_path / "job.py").write_text(JOB)
        said = ended(
            [replaceable(number, hosts, tmp_path, with_address=False) for number in range(2)], 1
        )
    lines = [
        line
        for text in said
        for line in text.splitlines()
        if line.startswith("lockstep: MASTER_ADDR")
    ]
    assert lines and "is a loopback address here, which other nodes can't reach" in lines[0]
    assert not list(tmp_path.glob("runs/*"))


# Where the run is kept


def resumed(folder: Path, words: Sequence[str], own_disks: bool) -> list[str]:
    with cluster(2, folder) as hosts:
        ended(started(hosts, folder, ["--epochs", "2"], own_disks=own_disks))
        (run,) = (hosts[0].disk if own_disks else folder / "runs").iterdir()
        again = [
            *words,
            "--resume",
            f"runs/{run.name}",
        ]  # without the job file, which config.json names
        return ended(
            started(hosts, folder, again, own_disks=own_disks, train=["-m", "lockstep", "train"])
        )


@pytest.mark.parametrize("own_disks", [False, True], ids=["shared disk", "own disks"])
def test_a_run_is_kept_and_resumed(own_disks: bool, tmp_path: Path, expected: Any) -> None:
    said = resumed(tmp_path, ["--epochs", "3"], own_disks)
    assert "resuming after epoch 2, step 24" in said[0]
    assert model_in(tmp_path / ("host0-own/disk" if own_disks else "runs")) == expected(8)
    if own_disks:
        assert not list((tmp_path / "host1-own" / "disk").iterdir()) and not list(
            (tmp_path / "runs").iterdir()
        )


# Hosts that are lost


def test_a_host_that_was_cut_off_for_a_while_goes_on(tmp_path: Path, expected: Any) -> None:
    """What it sends meanwhile is sent again: nothing of ours, or of gloo's, gives up before the
    system does.
    """
    with cluster(2, tmp_path) as hosts:
        processes = started(hosts, tmp_path, ["--set", "pause=0.1"])
        until(lambda: lines_of_metrics(tmp_path) >= 1, processes)
        hosts[1].cut_off()
        time.sleep(1)  # for what was on the way
        before = lines_of_metrics(tmp_path)
        time.sleep(29)
        assert lines_of_metrics(tmp_path) == before < 3
        hosts[1].bring_back()
        ended(processes)
    assert model_in(tmp_path / "runs") == expected(8)


def lines_of_metrics(folder: Path) -> int:
    """How many epochs are done, of the newest run."""
    files = sorted(folder.glob("runs/*/metrics.jsonl"), key=lambda file: file.stat().st_mtime)
    return len(files[-1].read_text().splitlines()) if files else 0


def until(
    is_so: Callable[[], bool], processes: Sequence[subprocess.Popen[str]], seconds: float = 60
) -> None:
    """Wait for it while these run."""
    end = time.monotonic() + seconds
    while not is_so():
        dead = [process for process in processes if process.poll() is not None]
        assert not dead and time.monotonic() < end, (
            dead[0].communicate()[0] if dead else "it takes too long"
        )
        time.sleep(0.05)


def replaceable(
    number: int, hosts: Sequence[Host], folder: Path, *, with_address: bool = True
) -> subprocess.Popen[str]:
    """A training on a host, which torchrun starts again, with another host in the place of one
    that is lost.
    """
    meeting = [
        "--rdzv-backend",
        "c10d",
        "--rdzv-endpoint",
        f"{hosts[0].address}:29400",
        "--rdzv-id",
        "one",
    ]
    meeting += ["--rdzv-conf", f"is_host={int(number == 0)}"]
    meeting += (
        ["--local-addr", hosts[number].address, "--max-restarts", "3"] if with_address else []
    )
    run = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--nnodes",
        "2",
        "--nproc-per-node",
        "2",
        *meeting,
    ]
    return hosts[number].start(
        [*run, *TRAIN, "--devices", "cpu", "--set", "pause=0.1"],
        folder,
        {
            **ENVIRONMENT,
            "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
        },  # else the new host waits for the old store
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )


@pytest.fixture(scope="module")
def with_a_lost_host(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """The folder of a training one of whose two hosts was lost and replaced, and what rank 0 has
    printed.
    """
    folder = tmp_path_factory.mktemp("lost")
    (folder / "job.py").write_text(JOB)
    with cluster(2, folder) as hosts:
        processes = [replaceable(number, hosts, folder) for number in range(2)]
        until(lambda: lines_of_metrics(folder) >= 1, processes)
        hosts[1].kill()
        processes[1].communicate()
        return folder, ended([processes[0], replaceable(1, hosts, folder)])[0]


def test_torchrun_puts_another_host_in_the_place_of_a_lost_one(
    with_a_lost_host: Any, expected: Any
) -> None:
    folder, said = with_a_lost_host
    assert (
        "failed at step" in said and "because another rank did" in said and "Traceback" not in said
    )
    last = max(folder.glob("runs/*/model.safetensors"), key=lambda file: file.stat().st_mtime)
    assert last.read_bytes() == expected(8)


def test_what_torchrun_starts_again_resumes_by_itself(with_a_lost_host: Any) -> None:
    folder, said = with_a_lost_host
    assert "resuming after epoch" in said and len(list(folder.glob("runs/*"))) == 1


def test_a_run_that_is_not_there_is_refused_everywhere_in_a_line(tmp_path: Path) -> None:
    with cluster(2, tmp_path) as hosts:
        said = ended(started(hosts, tmp_path, ["--resume", "runs/none"]), 1)
    for text in said:
        assert (
            "lockstep: runs/none: no run is kept there" in text and text.count("Traceback") <= 1
        )  # torchrun's own
