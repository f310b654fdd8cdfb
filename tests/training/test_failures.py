"""Broken on purpose: what a person sees, what is kept, and that nothing is left running."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

from lockstep import Job, train
from lockstep.checkpoint import writer
from lockstep.cli.command import main
from lockstep.errors import FolderError, OutOfMemory, RankFailed, RunError, SaveError
from lockstep.jobfile import JobFile
from lockstep.run.stop_request import StopRequest

from harness import same_bits  # isort: skip
from zoo import drawn, labels, mlp, plain_sgd, state_of

JOB = """
import os, time, torch, lockstep
from torch import nn
from torch.utils.data import TensorDataset

CALL = 14  # of each rank in update 5: three more are made by each of the checks in 1, 2 and 4

class Net(nn.Linear):
    calls = 0
    def forward(self, x):
        Net.calls += 1
        rank = torch.distributed.get_rank() if torch.distributed.is_initialized() else 0
        if Net.calls == CALL and os.environ.get("BREAK") == f"raise {rank}":
            raise ValueError("no such luck")
        if Net.calls == CALL and os.environ.get("BREAK") == f"kill {rank}":
            os.kill(os.getpid(), 9)
        time.sleep(0.01)
        return super().forward(x)

def job():
    return lockstep.Job(
        model=lambda: Net(4, 3), loss=nn.CrossEntropyLoss(), optimizer=lambda p: torch.optim.SGD(p, lr=0.1),
        train_data=TensorDataset(torch.randn(64, 4), torch.randint(3, (64,))), batch_size=8, epochs=10000)
"""
ON = {"single": "1xcpu", "dp": "2xcpu", "ddp": "2xcpu"}


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "endless.py").write_text(textwrap.dedent(JOB))
    return tmp_path


def started(folder: Path, strategy: str) -> subprocess.Popen[str]:
    """A training from the command line that has finished an epoch."""
    command = [sys.executable, "-m", "lockstep", "train", "endless.py"]
    words = [*command, "--strategy", strategy, "--devices", ON[strategy]]
    process = subprocess.Popen(
        words, cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    end = time.monotonic() + 60
    while not list(folder.glob("runs/*/checkpoints/step-*")):
        assert process.poll() is None and time.monotonic() < end, process.communicate()
        time.sleep(0.05)
    return process


def family(process: subprocess.Popen[str]) -> list[psutil.Process]:
    return psutil.Process(process.pid).children(recursive=True)


STOPPED = [(signal.SIGINT, 130, "stopped by Ctrl-C"), (signal.SIGTERM, 143, "")]


@pytest.mark.parametrize(
    ("how", "code", "says", "strategy"),
    # The other signal and pairs are left to the slow tests.
    [
        pytest.param(*stop, way, marks=() if (i, j) == (2, 1) else pytest.mark.slow)
        for i, way in enumerate(ON)
        for j, stop in enumerate(STOPPED)
    ],
)
def test_a_stopped_training_keeps_its_folder_and_leaves_no_process(
    how, code, says, strategy, folder
) -> None:
    process = started(folder, strategy)
    children = family(process)
    process.send_signal(how)
    _, err = process.communicate(timeout=20)
    assert process.returncode == code
    assert says in err and "Traceback" not in err
    _, alive = psutil.wait_procs(children, timeout=5)
    assert not alive
    (run,) = folder.glob("runs/*")
    assert state_of(run)["epoch"] >= 1


def test_what_a_rank_raises_is_shown_once_headed_by_rank_and_step(
    folder, monkeypatch, capfd
) -> None:
    monkeypatch.setenv("BREAK", "raise 1")
    assert main(["train", "endless.py", "--strategy", "ddp", "--devices", "2xcpu"]) == 1
    err = capfd.readouterr().err
    assert err.count("ValueError: no such luck") == 2, "the traceback and the last line"
    assert err.count("Traceback") == 1
    assert err.count("  File ") == 1, "the person's own code only"
    assert (
        err.strip().splitlines()[-1]
        == "lockstep: rank 1 (cpu:1) failed at step 5: ValueError: no such luck"
    )
    assert len(list(folder.glob("runs/*"))) == 1


@pytest.mark.slow
def test_under_one_device_too_the_traceback_begins_with_the_person_s_code(folder: Path) -> None:
    """By the installed command, which is a Python file itself."""
    command = str(Path(sys.executable).parent / "lockstep")
    surroundings = {**os.environ, "BREAK": "raise 0"}
    words = [command, "train", "endless.py", "--devices", "1"]
    found = subprocess.run(
        words, cwd=folder, env=surroundings, capture_output=True, text=True, check=False
    )
    assert found.returncode == 1
    lines = found.stderr.splitlines()
    assert lines[0].startswith("Traceback") and lines[1].endswith(
        'endless.py", line 14, in forward'
    )
    assert found.stderr.count("  File ") == 1
    assert lines[-1] == "lockstep: the run failed: ValueError: no such luck"


def test_a_killed_rank_is_named(folder, monkeypatch, capfd) -> None:
    monkeypatch.setenv("BREAK", "kill 1")
    assert main(["train", "endless.py", "--strategy", "ddp", "--devices", "2xcpu"]) == 1
    assert "rank 1 (cpu:1) was killed by SIGKILL" in capfd.readouterr().err.strip().splitlines()[-1]


def job_of(model=mlp, **settings) -> Job:
    data = torch.utils.data.TensorDataset(drawn(24, 6), labels(24, 3))
    fields = {
        "loss": nn.CrossEntropyLoss(),
        "optimizer": plain_sgd,
        "train_data": data,
        "batch_size": 8,
        "epochs": 3,
    }
    return Job(model=model, **{**fields, **settings})


def wide() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 9000), nn.Linear(9000, 3))


class Hungry(nn.Linear):
    """Asks for a petabyte."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) + torch.empty(10**15)[:3]


@pytest.mark.parametrize("strategy", ON)
def test_out_of_memory_names_device_step_share_and_the_setting_that_helps(
    strategy: str, tmp_path
) -> None:
    share = 8 if strategy == "single" else 4 if strategy == "ddp" else 8
    says = rf"out of memory on cpu:\d at step 1 with a share of {share} samples: .*accumulate=2"
    with pytest.raises(OutOfMemory, match=says):
        train(
            job_of(lambda: Hungry(6, 3)),
            strategy=strategy,
            devices=ON[strategy],
            folder=tmp_path,
            quiet=True,
        )


def test_a_full_disk_at_the_end_of_an_epoch_keeps_what_was_saved(tmp_path, monkeypatch) -> None:
    saves = []

    def full_the_second_time(*args, **kwargs) -> Any:
        saves.append(args)
        if len(saves) > 1:
            raise OSError(28, "No space left on device")
        return real(*args, **kwargs)

    real = writer.write_tensors
    monkeypatch.setattr(writer, "write_tensors", full_the_second_time)
    says = (
        r"checkpoints: could not be written: the disk is full; the checkpoint of step 3 is kept; "
        r"free some space, then"
    )
    with pytest.raises(SaveError, match=says):
        train(job_of(), folder=tmp_path, quiet=True)
    monkeypatch.undo()
    (run,) = tmp_path.glob("*")
    assert state_of(run)["epoch"] == 1
    assert train(job_of(), resume=run, quiet=True).summary["epochs"] == 3


def test_a_disk_that_is_really_full_is_said(small_disk: Path) -> None:
    with pytest.raises(SaveError, match="the disk is full"):
        train(job_of(wide), folder=small_disk, quiet=True, strategy="ddp", devices="2xcpu")
    (run,) = small_disk.glob("*")
    for path in run.glob("*"):  # now not even the first file fits
        if path.is_file():
            path.unlink()
    (small_disk / "filler").write_bytes(b"")
    with (small_disk / "filler").open("wb", buffering=0) as file, pytest.raises(OSError):
        while True:
            file.write(b"0" * 1024)
    before = set(small_disk.glob("*"))
    with pytest.raises(FolderError, match="No space left"):
        train(job_of(), folder=small_disk, quiet=True)
    assert set(small_disk.glob("*")) == before, "nothing was made"


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_a_folder_that_can_not_be_written_is_said(tmp_path) -> None:
    tmp_path.chmod(0o500)
    with pytest.raises(FolderError, match="can't be made"):
        train(job_of(), folder=tmp_path / "runs", quiet=True)


class Deadly(TensorDataset):
    """Ends the loader worker that reads it."""

    def __getitem__(self, index: int) -> Any:
        if torch.utils.data.get_worker_info() is not None:
            os.kill(os.getpid(), signal.SIGKILL)
        return super().__getitem__(index)


def test_a_loader_worker_that_is_killed_is_said(tmp_path) -> None:
    data = Deadly(torch.randn(8, 6), torch.zeros(8, dtype=torch.int64))
    with pytest.raises(
        RunError,
        match=r"a loader worker was killed \(possibly out of memory: check dmesg\): set fewer",
    ):
        train(
            job_of(train_data=data, loader_workers=1), devices="1xcpu", folder=tmp_path, quiet=True
        )


def test_a_damaged_state_is_said(tmp_path) -> None:
    run = train(job_of(epochs=1), folder=tmp_path, quiet=True)
    for path in run.folder.glob("checkpoints/*/*"):
        path.write_bytes(b"nonsense")
    with pytest.raises(
        FolderError, match="all checkpoints are damaged: resume another run, or start a new one"
    ):
        train(job_of(), resume=run.folder, quiet=True)


def test_a_state_of_another_model_is_refused_by_name(tmp_path) -> None:
    run = train(job_of(epochs=1), folder=tmp_path, quiet=True)
    with pytest.raises(Exception, match="the saved model is different"):
        train(job_of(lambda: nn.Linear(6, 3)), resume=run.folder, quiet=True)


def test_a_rank_that_is_stuck_does_not_outlive_one_that_raises(tmp_path) -> None:
    class Uneven(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if torch.distributed.get_rank() == 1:
                time.sleep(3600)
            raise ValueError("first")

    began = time.monotonic()
    with pytest.raises(RankFailed, match=r"rank 0 \(cpu:0\) failed at step 1: ValueError: first"):
        train(
            job_of(lambda: Uneven(6, 3)),
            strategy="ddp",
            devices="2xcpu",
            folder=tmp_path,
            quiet=True,
        )
    assert time.monotonic() - began < 30


SLOW = """
import os, time, torch, lockstep
from torch import nn
from torch.utils.data import TensorDataset

class Net(nn.Linear):
    def forward(self, x):
        time.sleep(float(os.environ.get("SLOWLY", 0)))
        return super().forward(x)

class Marking(torch.optim.SGD):
    def step(self, closure=None):
        super().step(closure)
        self.steps = getattr(self, "steps", 0) + 1
        if self.steps == 2:  # the planner of a pipeline makes one with an optimizer of its own
            open(os.path.join(os.path.dirname(__file__), "stepped"), "w").close()

def job():
    generator = torch.Generator().manual_seed(1)
    inputs, targets = torch.randn(150, 4, generator=generator), torch.randint(3, (150,), generator=generator)
    return lockstep.Job(
        model=lambda: nn.Sequential(Net(4, 8), nn.Tanh(), Net(8, 3)), loss=nn.CrossEntropyLoss(), epochs=2,
        optimizer=lambda p: Marking(p, lr=0.1, momentum=0.9), train_data=TensorDataset(inputs, targets),
        eval_data=TensorDataset(inputs, targets), batch_size=4, precision="fp64")
"""
EVERY = {"single": "1xcpu", "dp": "2xcpu", "ddp": "2xcpu", "pp": "2xcpu", "hogwild": "2xcpu"}


def stopped(
    folder: Path, words: list[str], how: signal.Signals, presses: int = 1
) -> tuple[int, str, str]:
    """What a training says that is stopped in its first epoch."""
    # Hogwild's ranks don't meet before the end of the epoch to say that they have begun.
    awaited = "note: hogwild" if "hogwild" in words else "150 samples"
    process = subprocess.Popen(
        [sys.executable, *words],
        cwd=folder,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONWARNINGS": "ignore", "SLOWLY": "0.6" if presses > 1 else "0.06"},
    )
    assert process.stdout is not None
    lines = []
    for line in process.stdout:
        lines.append(line)
        if line.startswith(awaited):
            break
    end = time.monotonic() + 60
    while not (folder / "stepped").exists() and time.monotonic() < end:
        time.sleep(0.05)
    time.sleep(0.3)
    children = family(process)
    for _ in range(presses):
        process.send_signal(how)
        time.sleep(0.05)
    out, err = process.communicate(timeout=60 if presses == 1 else 15)
    _, alive = psutil.wait_procs(children, timeout=5)
    assert not alive
    return process.returncode, "".join(lines) + out, err


@pytest.mark.slow
@pytest.mark.parametrize(
    ("strategy", "how", "code"),
    [
        (way, how, code)
        for way in EVERY
        for how, code in [(signal.SIGINT, 130), (signal.SIGTERM, 143)]
    ],
)
def test_a_training_that_is_stopped_in_its_first_epoch_is_saved_and_goes_on(
    strategy: str, how: signal.Signals, code: int, tmp_path: Path, capfd
) -> None:
    """Its folder was once deleted, under the words that what was saved is kept."""
    (tmp_path / "slow.py").write_text(SLOW)
    words = [
        "-m",
        "lockstep",
        "train",
        "slow.py",
        "--strategy",
        strategy,
        "--devices",
        EVERY[strategy],
    ]
    found, out, err = stopped(tmp_path, words, how)
    assert found == code, (out, err)
    (run,) = tmp_path.glob("runs/*")
    assert f"resume it with --resume runs/{run.name}" in out.splitlines()[-1]
    assert "stopping at the end of this step" in err and "Traceback" not in err
    state = state_of(run)
    assert state["epoch"] == 0 and 0 < state["position"] == state["step"] < 38
    job = JobFile(str(tmp_path / "slow.py"))
    went_on = train(job, resume=run, quiet=True)
    assert went_on.summary["steps"] == 76
    if strategy != "hogwild":
        whole = train(
            job, strategy=strategy, devices=EVERY[strategy], folder=tmp_path / "whole", quiet=True
        )
        assert same_bits(went_on.model(), whole.model())
        assert [r["train_loss"] for r in went_on.history] == pytest.approx(
            [r["train_loss"] for r in whole.history]
        )


@pytest.mark.slow
def test_under_torchrun_too_it_is_saved(tmp_path: Path) -> None:
    (tmp_path / "slow.py").write_text(SLOW)
    torchrun = [
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node=2",
        "-m",
        "lockstep",
    ]
    _, out, err = stopped(tmp_path, [*torchrun, "train", "slow.py"], signal.SIGTERM)
    (run,) = tmp_path.glob("runs/*")
    assert "resume it with --resume" in out, (out, err)
    assert 0 < state_of(run)["step"] < 76


@pytest.mark.slow
def test_a_second_signal_stops_at_once_and_says_that_nothing_was_saved(tmp_path: Path) -> None:
    (tmp_path / "slow.py").write_text(SLOW)
    words = ["-m", "lockstep", "train", "slow.py", "--strategy", "ddp", "--devices", "2xcpu"]
    found, out, err = stopped(tmp_path, words, signal.SIGINT, presses=2)
    assert found == 130
    assert out.splitlines()[-1] == "nothing was saved yet, so no run is kept"
    assert err.splitlines()[-1] == "lockstep: stopped by Ctrl-C"
    assert not list(tmp_path.glob("runs/*"))


@pytest.mark.slow
def test_before_the_first_step_there_is_nothing_to_wait_for(tmp_path: Path) -> None:
    (tmp_path / "slow.py").write_text(SLOW)
    words = [sys.executable, "-m", "lockstep", "train", "slow.py", "--devices", "1"]
    surroundings = {**os.environ, "SLOWLY": "60"}
    process = subprocess.Popen(
        words,
        cwd=tmp_path,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=surroundings,
    )
    assert process.stdout is not None
    while " an epoch" not in process.stdout.readline():
        pass
    time.sleep(0.5)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=20)
    assert process.returncode == 130
    assert (
        out == "nothing was saved yet, so no run is kept\n"
        and err == "lockstep: stopped by Ctrl-C\n"
    )


def test_a_stop_at_the_end_of_an_epoch_loses_no_record(tmp_path: Path) -> None:
    """What is left to do is the evaluation only, which the run that goes on makes."""
    pressed = []

    class Pressing(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if self.training and not pressed and len(calls) == 5:  # of six batches, the last
                pressed.append(os.kill(os.getpid(), signal.SIGINT))
            if self.training:
                calls.append(1)
            return super().forward(x)

    calls: list[int] = []
    data = torch.utils.data.TensorDataset(drawn(24, 6), labels(24, 3))
    job = Job(
        model=lambda: Pressing(6, 3),
        loss=nn.CrossEntropyLoss(),
        optimizer=plain_sgd,
        train_data=data,
        eval_data=data,
        batch_size=4,
        epochs=2,
        precision="fp64",
    )
    with pytest.raises(KeyboardInterrupt):
        train(job, strategy="single", devices="1xcpu", folder=tmp_path, quiet=True)
    (run,) = tmp_path.iterdir()
    state = state_of(run)
    assert (state["epoch"], state["position"], state["step"]) == (0, 6, 6)
    went_on = train(job, resume=run, quiet=True)
    whole = train(job, strategy="single", devices="1xcpu", folder=tmp_path, quiet=True)
    for name in ("epoch", "step", "train_loss", "eval_loss"):
        assert [r[name] for r in went_on.history] == [r[name] for r in whole.history], name


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # threads of the tests, in Python 3.12
def test_a_loader_worker_that_is_ended_as_it_begins_says_nothing(capfd: Any) -> None:
    """Found by trial: until it has signal handlers of its own it has the training's, with
    tracebacks or a promise.
    """
    with StopRequest(lambda: True):
        if not (worker := os.fork()):
            os.kill(os.getpid(), signal.SIGTERM)
            os._exit(0)
        _, status = os.waitpid(worker, 0)
    assert os.waitstatus_to_exitcode(status) == 143
    assert capfd.readouterr().err == ""
