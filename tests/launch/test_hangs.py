"""A training without progress: who has not arrived is named, with where it is, and it ends
where that is asked for.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
import torch

import lockstep
from lockstep import train
from lockstep.cli.command import main
from lockstep.errors import Lost
from lockstep.jobfile import JobFile
from lockstep.launch import hang_report
from lockstep.launch.hang_report import Account, headline
from lockstep.launch.world import World

FILE = """
import os, threading, time, torch, lockstep
import torch.distributed as dist
from lockstep.launch.world import current
from torch import nn
from torch.utils.data import TensorDataset

HANG = os.environ.get("HANG", "").split()  # where, rank or device, step

def hangs():
    time.sleep(float(os.environ.get("FOR", 40)))

class Data(TensorDataset):
    def __getitem__(self, index):
        if HANG[:1] == ["loading"] and current().rank == int(HANG[1]) and current().step >= int(HANG[2]):
            hangs()
        return super().__getitem__(index)

class Net(nn.Linear):
    def forward(self, x):
        world = current()
        if HANG[:1] == ["forward"] and world.rank == int(HANG[1]) and world.step == int(HANG[2]):
            hangs()
        if HANG[:1] == ["thread"] and world.step == int(HANG[2]) and HANG[1] in threading.current_thread().name:
            hangs()
        if HANG[:1] == ["mismatch"] and world.step == 3:
            world.broadcast_object(1, 0) if world.rank else dist.broadcast(torch.zeros(5), 1)
        if HANG[:1] == ["slow"] and world.step > 2:
            time.sleep(1.6)
        return super().forward(x)

def job():
    data = Data(torch.randn(60, 4), torch.randint(3, (60,)))
    return lockstep.Job(
        model=lambda: nn.Sequential(Net(4, 8), nn.Tanh(), Net(8, 3)), loss=nn.CrossEntropyLoss(), epochs=2,
        optimizer=lambda p: torch.optim.SGD(p, lr=0.1), train_data=data, batch_size=12, loader_workers=0)
"""


@pytest.fixture
def own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONWARNINGS", "ignore")
    monkeypatch.setenv("LOCKSTEP_HANG_REPORT_AFTER", "1")
    (tmp_path / "own.py").write_text(FILE)
    return tmp_path


def ended(
    own: Path, monkeypatch, capfd, hang: str, strategy: str = "ddp", devices: str = "2xcpu"
) -> str:
    """What is said of a training that is ended by ``--timeout``."""
    monkeypatch.setenv("HANG", hang)
    words = ["train", "own.py", "--strategy", strategy, "--devices", devices, "--timeout", "4"]
    began = time.monotonic()
    assert main(words) == 1
    assert time.monotonic() - began < 35, "it was ended"
    said = capfd.readouterr().err
    (run,) = own.glob("runs/*")
    assert re.search(
        r'File ".*own.py", line \d+, in (hangs|forward)', (run / "hang.txt").read_text()
    )
    return said


def test_the_rank_that_has_not_arrived_is_named_with_its_line(
    own: Path, monkeypatch, capfd
) -> None:
    said = ended(own, monkeypatch, capfd, "forward 1 5")
    says = r"no progress for \d s: rank 1 has not arrived at all_reduce \d+: it is in step 5, "
    assert re.search(says + r"at own.py, line \d+, in hangs for \d+ s", said), said
    assert re.search(r"rank 0: in step 5, waits in all_reduce \d+, at .* for \d+ s", said)
    assert re.search(
        r"lockstep: no progress for \d+ s, which is --timeout: rank 1 has not arrived", said
    )


@pytest.mark.slow
def test_ranks_in_different_collectives_are_a_mismatch(own: Path, monkeypatch, capfd) -> None:
    said = ended(own, monkeypatch, capfd, "mismatch")
    assert re.search(
        r"mismatch: ranks wait in different collectives: rank 0 in PyTorch's broadcast; rank 1 in broadcast",
        said,
    )


@pytest.mark.slow
def test_a_loader_that_hangs(own: Path, monkeypatch, capfd) -> None:
    said = ended(own, monkeypatch, capfd, "loading 0 2", "single", "1xcpu")
    assert re.search(
        r"no progress for \d+ s: this process is in step \d, at own.py, line \d+, in hangs",
        said,
    )
    assert "lockstep: no progress for 4 s, which is --timeout" in said


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["dp", "pp"])
def test_a_thread_of_one_process_that_hangs(own: Path, strategy: str, monkeypatch, capfd) -> None:
    said = ended(own, monkeypatch, capfd, "thread cpu:1 4", strategy)
    assert re.search(
        r"this process is in step 4, at own.py, line \d+, in hangs",
        said,
    )


@pytest.mark.slow
def test_a_stopped_process_is_named_and_the_run_is_ended(own: Path, monkeypatch) -> None:
    (own / "own.py").write_text(
        FILE.replace('["slow"]', "[]").replace("1.6", "0.1").replace("epochs=2", "epochs=999")
    )
    words = [
        sys.executable,
        "-m",
        "lockstep",
        "train",
        "own.py",
        "--strategy",
        "ddp",
        "--devices",
        "2",
        "--timeout",
        "5",
    ]
    process = subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    while not list(own.glob("runs/*/checkpoints/step-*")):
        assert process.poll() is None
        time.sleep(0.05)
    (server,) = psutil.Process(process.pid).children()
    ranks = sorted(server.children(), key=lambda one: one.pid)
    ranks[1].send_signal(signal.SIGSTOP)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 1
    says = r"rank 1 has not arrived: process %d on .* does not answer: it is stopped"
    assert re.search(says % ranks[1].pid, err), err
    _, alive = psutil.wait_procs([server, *ranks], timeout=10)
    assert not alive


@pytest.mark.slow
def test_a_run_that_is_slow_but_steady_is_left_alone(own: Path, monkeypatch, capfd) -> None:
    """Each step takes longer than the report waits for; ten of the longest are more."""
    monkeypatch.setenv("HANG", "slow")
    train(JobFile("own.py"), strategy="ddp", devices="2xcpu", steps=5, timeout=30)
    out, err = capfd.readouterr()
    assert "no progress" not in out + err and not list(own.glob("runs/*/hang.txt"))


@pytest.mark.slow
def test_a_hanging_rank_is_started_again(own: Path, monkeypatch, capfd) -> None:
    (own / "own.py").write_text(
        FILE.replace(
            "    time.sleep(float",
            "    if os.path.exists('done'): return\n    open('done', 'w').close()\n    "
            "time.sleep(float",
        )
    )
    monkeypatch.setenv("HANG", "forward 1 7")
    run = train(JobFile("own.py"), strategy="ddp", devices="2xcpu", timeout=4, restarts=1)
    assert run.summary["steps"] == 10
    assert "resuming from step 5 (restart 1 of 1" in capfd.readouterr().out


@pytest.mark.slow
def test_never_is_never(own: Path, monkeypatch, capfd) -> None:
    monkeypatch.setenv("HANG", "forward 1 4")
    monkeypatch.setenv("FOR", "6")
    assert (
        train(JobFile("own.py"), strategy="ddp", devices="2xcpu", timeout=0).summary["steps"] == 10
    )
    assert "rank 1 has not arrived" in capfd.readouterr().err, "and goes on when it has"


@pytest.mark.slow
def test_under_torchrun(own: Path) -> None:
    environment = {**os.environ, "HANG": "forward 0 4", "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
    words = [
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node=2",
        "-m",
        "lockstep",
        "train",
        "own.py",
    ]
    found = subprocess.run(
        [sys.executable, *words, "--timeout", "6"],
        env=environment,
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert found.returncode == 1
    says = r"no progress for \d+ s: rank 0 has not arrived at \w+ \d+: it is in step "
    assert re.search(says, found.stderr), found.stderr
    assert re.search(
        r"lockstep: no progress for \d+ s, which is --timeout: rank 0 has not arrived", found.stderr
    )


@pytest.mark.slow
def test_in_a_loop_of_one_s_own_a_rank_that_others_wait_for_is_named(own: Path, capfd) -> None:
    def loop(world):
        step = lockstep.parallelize(
            torch.nn.Linear(4, 2), torch.nn.MSELoss(), lambda p: torch.optim.SGD(p, lr=0.1)
        )
        for number in range(3):
            if world.rank == 1 and number == 2:
                time.sleep(7)
            step(torch.randn(4, 4), torch.randn(4, 2))

    lockstep.launch(loop, devices="2xcpu")
    says = r"no progress for \d+ s: rank 1 has not arrived at \w+ \d+: it is in step "
    assert re.search(says, capfd.readouterr().err)


def test_the_headline() -> None:
    def one(rank: int, collectives: int, waits: str = "") -> Account:
        return Account(rank, 7, collectives, waits, 31.0, "a.py, line 3, in f")

    waits = one(0, 12, "all_reduce 12")
    assert headline({0: waits, 1: one(1, 11, "all_reduce 11")}, {}).startswith("mismatch")
    assert headline({0: one(0, 12, "backward"), 1: one(1, 12), 2: one(2, 11)}, {}) == (
        "rank 2 has not arrived at backward: it is in step 7, at a.py, line 3, in f for 31 s"
    )
    assert headline({0: waits}, {1: "process 5 on host"}).startswith(
        "rank 1 has not arrived: process 5 on host does not answer: "
    )


def test_the_watch_costs_nothing_that_shows(own: Path, monkeypatch) -> None:
    """Not its time, which a loaded machine would miss, but its work: it reads three numbers a
    second.
    """
    monkeypatch.setenv("LOCKSTEP_HANG_REPORT_AFTER", "30")  # a loaded machine builds for seconds
    monkeypatch.setattr(
        hang_report, "account", lambda *of: pytest.fail("no account is made in a healthy run")
    )
    train(JobFile("own.py"), devices="1xcpu", quiet=True)


def test_the_timeout_ends_a_training_whose_report_fails(monkeypatch) -> None:
    """Found by review: one report that failed ended the thread that enforces the timeout."""

    def fails(*of: object) -> Account:
        raise ValueError("bad frame")

    ended: list[Exception] = []
    monkeypatch.setattr(hang_report, "account", fails)
    monkeypatch.setattr(hang_report, "_LOOK", 0.05)
    monkeypatch.setenv("LOCKSTEP_HANG_REPORT_AFTER", "0.1")
    with hang_report.Watch(World(fail=ended.append), timeout=0.3):
        end = time.monotonic() + 20
        while not ended and time.monotonic() < end:
            time.sleep(0.01)
    assert isinstance(ended[0], Lost)
    assert str(ended[0]).endswith("which is --timeout: the report failed: ValueError('bad frame')")


def test_the_error_is_one_that_restarts_take(own: Path) -> None:
    assert issubclass(lockstep.errors.RankFailed, Lost)
