"""What a run survives: signals, kills, lost ranks; and that it ends as one that was not stopped."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import psutil
import pytest

from lockstep import Run, train
from lockstep.checkpoint.folder import CheckpointFolder
from lockstep.cli.command import main
from lockstep.errors import FolderError, InputError, RankFailed, SaveError
from lockstep.jobfile import JobFile
from lockstep.launch.devices import slots
from lockstep.run.run_folder import RunFolder
from lockstep.run.terminal import Display
from lockstep.training import restarts
from lockstep.training.records.audit import added_up
from lockstep.training.resume import newest_of

from harness import same_bits  # isort: skip

FILE = """
import os, time, torch, lockstep
from lockstep.launch.world import current
from torch import nn
from torch.utils.data import TensorDataset

class Data(TensorDataset):
    def __getitem__(self, index):
        return super().__getitem__(index)

class Net(nn.Linear):
    def forward(self, x):
        time.sleep(float(os.environ.get("SLOWLY", 0)))
        plan = os.environ.get("KILL", "")  # rank and step, and a file that says that it was done
        if plan and self.training:
            world = current()
            rank, step, done = plan.split()
            if world.step == int(step) and world.rank == int(rank) and not os.path.exists(done):
                open(done, "w").close()
                os.kill(os.getpid(), 9)
        return super().forward(x)

def job(width: int = 8):
    generator = torch.Generator().manual_seed(1)
    inputs, targets = torch.randn(75, 4, generator=generator), torch.randint(3, (75,), generator=generator)
    return lockstep.Job(
        model=lambda: nn.Sequential(Net(4, width), nn.Tanh(), nn.Dropout(0.1), nn.Linear(width, 3)),
        loss=nn.CrossEntropyLoss(), epochs=3,
        optimizer=lambda p: torch.optim.Adam(p, lr=0.01), train_data=Data(inputs, targets),
        eval_data=TensorDataset(inputs, targets), batch_size=8, precision="fp64", save_every=4)
"""


@pytest.fixture
def own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONWARNINGS", "ignore")
    (tmp_path / "own.py").write_text(FILE)
    return tmp_path


def unbroken(own: Path, strategy: str = "ddp", devices: str = "2xcpu") -> Run:
    return train(
        JobFile("own.py"), strategy=strategy, devices=devices, folder=own / "whole", quiet=True
    )


def same(run: Run, whole: Run) -> None:
    """Bit by bit, with the same records."""
    assert same_bits(run.model(), whole.model())
    times = ("seconds", "samples_per_second")
    for mine, its in zip(run.history, whole.history, strict=True):
        assert {n: v for n, v in mine.items() if n not in times} == {
            n: v for n, v in its.items() if n not in times
        }


def command(*words: str, **environment: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "lockstep", "train", *words],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, **environment},
    )


def wait_for(pattern: str, folder: Path = Path(), seconds: float = 60) -> None:
    end = time.monotonic() + seconds
    while not list(folder.glob(pattern)):
        assert time.monotonic() < end, f"no {pattern}"
        time.sleep(0.02)


# ---- lost ranks ----------------------------------------------------------------------------------


@pytest.mark.parametrize("plan", [pytest.param("1 2", marks=pytest.mark.slow), "0 14"])
def test_a_lost_rank_is_started_again_and_the_run_ends_as_it_would_have(
    own: Path, plan: str, monkeypatch, capfd
) -> None:
    whole = unbroken(own)
    monkeypatch.setenv("KILL", f"{plan} {own / 'done'}")
    run = train(JobFile("own.py"), strategy="ddp", devices="2xcpu", restarts=1, audit=True)
    rank, step = plan.split()
    of = "the beginning" if step == "2" else r"step (8|10|12)"  # as far as it was written
    says = rf"rank {rank} \(cpu:{rank}\) was killed by SIGKILL at step {step} .*: resuming from {of} \(restart 1 of 1"
    assert re.search(says, capfd.readouterr().out)
    same(run, whole)
    lines, found = added_up(run.folder)
    assert (
        found["right"]
        and lines[0] == "2 starts, 30 steps"
        and lines[3] == "epoch 3: 75 samples, each once"
    )


@pytest.mark.slow
def test_restarts_come_to_an_end(own: Path, monkeypatch) -> None:
    (own / "own.py").write_text(FILE.replace("and not os.path.exists(done)", ""))
    monkeypatch.setenv("KILL", f"1 6 {own / 'done'}")
    monkeypatch.setenv("SLOWLY", "0.1")  # so that the checkpoint of step 4 is written by then
    with pytest.raises(RankFailed, match=r"rank 1 \(cpu:1\) was killed by SIGKILL at step 6"):
        train(JobFile("own.py"), strategy="ddp", devices="2xcpu", restarts=2, quiet=True)
    (run,) = own.glob("runs/*")
    assert CheckpointFolder(run / "checkpoints").steps()[0] == 4


def test_a_checkpoint_that_was_set_aside_is_not_what_a_restart_names(
    own: Path, monkeypatch, capsys
) -> None:
    """Found by review: a folder ``step-4.damaged-2`` ended the run with a ValueError."""
    run = RunFolder(own)
    for name in ("step-2", "step-4.damaged", "step-4.damaged-2"):
        (run.checkpoints / name).mkdir(parents=True)
    answers = [RankFailed("rank 1 was killed"), ({"steps": 4}, "run")]

    def trained(*of: Any) -> Any:
        answer = answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer

    @dataclasses.dataclass
    class Plan:
        timeout: float = 0.0
        folder: str = ""
        resume: bool = False
        again: bool = False

    monkeypatch.setattr(restarts, "on_devices", trained)
    found = restarts.with_restarts(Plan(), slots(2), Display(), run, 1)  # type: ignore[arg-type]
    assert found == ({"steps": 4}, "run")
    says = "rank 1 was killed: resuming from step 2 (restart 1 of 1)"
    assert says in capsys.readouterr().out


def test_numbers_that_can_not_be_are_refused(own: Path) -> None:
    for settings, says in (
        ({"restarts": -1}, "restarts: -1, a whole number"),
        (
            {"restarts": 1, "strategy": "dp"},
            "restarts: dp is one process here: start the command again, with --resume",
        ),
    ):
        with pytest.raises(InputError, match=says):
            train(JobFile("own.py"), **{"strategy": "ddp", "devices": "2xcpu", **settings})
    assert not list(own.glob("runs/*"))


@pytest.mark.slow
def test_a_rank_that_is_lost_after_the_end_changes_nothing(own: Path, capfd) -> None:
    whole = unbroken(own)
    (own / "own.py").write_text(
        FILE + "\nimport atexit\natexit.register(lambda: os.environ.get('RANK') == '1' and "
        "os.kill(os.getpid(), 9))\n"
    )
    run = train(JobFile("own.py"), strategy="ddp", devices="2xcpu")
    same(run, whole)
    assert run.summary["steps"] == 30


@pytest.mark.slow
def test_a_first_rank_that_is_lost_after_the_end_leaves_no_lock(own: Path) -> None:
    """Found by the soak: its lock stayed in the folder of the run, which was done."""
    whole = unbroken(own)
    (own / "own.py").write_text(
        FILE + "\nfrom lockstep.run import run_folder\nif os.environ.get('RANK') == '0':\n"
        "    run_folder._remove = lambda path: os.kill(os.getpid(), 9)\n"
    )
    run = train(JobFile("own.py"), strategy="ddp", devices="2xcpu", restarts=1)
    same(run, whole)
    assert run.summary["steps"] == 30 and not list(run.folder.glob(".*"))


# ---- the whole command is killed -----------------------------------------------------------------


def killed_at_random(words: list[str], chance: random.Random, seconds: float) -> None:
    process = command(*words, SLOWLY="0.005")
    wait_for("runs/*/checkpoints/step-*")
    time.sleep(chance.random() * seconds)
    who = chance.choice(
        [psutil.Process(process.pid), *psutil.Process(process.pid).children(recursive=True)]
    )
    who.kill()
    process.communicate(timeout=60)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("strategy", "devices"), [("ddp", "2xcpu"), ("single", "1xcpu"), ("pp", "2xcpu")]
)
def test_whatever_process_is_killed_resume_auto_ends_with_the_same_bits(
    own: Path, strategy: str, devices: str
) -> None:
    whole = unbroken(own, strategy, devices)
    chance = random.Random(strategy)
    words = [
        "own.py",
        "--strategy",
        strategy,
        "--devices",
        devices,
        "--resume",
        "auto",
        "--audit",
        "--loader-workers",
        "1",
    ]
    for _ in range(2):
        killed_at_random(words, chance, 0.5)
    last = command(*words)
    out, err = last.communicate(timeout=100)
    assert last.returncode == 0, (out, err)
    runs = [RunFolder(path) for path in own.glob("runs/*")]
    (finished,) = [run for run in runs if run.summary.is_file()]
    same(Run.open(finished.path), whole)
    assert added_up(finished.path)[1]["right"]
    assert not list(finished.checkpoints.glob(".*"))


def test_a_run_that_lacks_only_its_last_files_is_completed(own: Path) -> None:
    whole = unbroken(own)
    left = own / "runs" / "left"
    shutil.copytree(whole.folder, left)
    for name in ("summary.json", "model.safetensors"):
        (left / name).unlink()
    run = train(JobFile("own.py"), resume=left, quiet=True)
    same(run, whole)
    assert run.summary["steps"] == 30 and run.summary["loss"] == whole.summary["loss"]


@pytest.mark.slow
def test_a_second_run_on_a_folder_is_refused_while_the_first_trains_and_not_after_its_death(
    own: Path,
) -> None:
    first = command(
        "own.py", "--strategy", "ddp", "--devices", "2xcpu", "--loader-workers", "1", SLOWLY="0.5"
    )
    wait_for("runs/*/checkpoints/step-*")
    (run,) = own.glob("runs/*")
    second = command("--resume", str(run))
    out, err = second.communicate(timeout=60)
    assert second.returncode == 2
    assert re.search(
        r"process \d+ on \S+ is training in this folder: wait for it, or stop it", err
    ), (out, err)
    first.kill()
    first.communicate()
    again = command("--resume", str(run))
    out, err = again.communicate(timeout=100)
    assert again.returncode == 0, (out, err)


# ---- resume auto ---------------------------------------------------------------------------------


def test_auto_takes_the_newest_unfinished_run_of_this_job_or_begins_one(own: Path, capfd) -> None:
    words = ["train", "own.py", "--devices", "1", "--resume", "auto"]
    assert main([*words, "--steps", "5"]) == 0
    (first,) = own.glob("runs/*")
    assert "resuming" not in capfd.readouterr().out
    shutil.copy("own.py", "other.py")
    assert main(["train", "other.py", "--devices", "1", "--steps", "5"]) == 0
    capfd.readouterr()
    assert main(words) == 0
    said = capfd.readouterr().out
    assert said.splitlines()[0] == f"resuming runs/{first.name}"
    assert json.loads((first / "summary.json").read_text())["steps"] == 30
    assert main(words) == 0, "that one is at its end: a new one"
    assert len(list(own.glob("runs/own-*"))) == 2
    assert newest_of(own / "runs", JobFile("own.py"), "own") is None
    assert newest_of(own / "runs", JobFile("own.py", {}, {"steps": "30"}), "own") is None
    assert newest_of(own / "runs", JobFile("own.py", {}, {"epochs": "99"}), "own") is not None
    assert main(["train", "--resume", "auto"]) == 2


def test_auto_begins_a_run_after_one_of_as_many_steps_as_the_job_has(own: Path, capfd) -> None:
    assert main(["train", "own.py", "--devices", "1", "--steps", "30"]) == 0
    capfd.readouterr()
    assert main(["train", "own.py", "--devices", "1", "--resume", "auto"]) == 0
    assert "resuming" not in capfd.readouterr().out


TORCHRUN = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "--max-restarts=2"]


@pytest.mark.slow
def test_what_torchrun_starts_again_goes_on_by_itself(own: Path) -> None:
    whole = unbroken(own)
    environment = {**os.environ, "KILL": f"1 14 {own / 'done'}"}
    words = [sys.executable, *TORCHRUN, "-m", "lockstep", "train", "own.py", "--audit"]
    found = subprocess.run(
        words, env=environment, capture_output=True, text=True, timeout=100, check=False
    )
    assert found.returncode == 0, found.stderr
    (run,) = own.glob("runs/*")
    assert f"resuming runs/{run.name}" in found.stdout and "resuming after epoch " in found.stdout
    same(Run.open(run), whole)
    assert added_up(run)[1]["right"]


@pytest.mark.slow
def test_what_torchrun_starts_again_before_the_first_checkpoint_begins_in_its_folder(
    own: Path,
) -> None:
    whole = unbroken(own)
    environment = {**os.environ, "KILL": f"0 2 {own / 'done'}"}
    words = [sys.executable, *TORCHRUN, "-m", "lockstep", "train", "own.py"]
    found = subprocess.run(
        words, env=environment, capture_output=True, text=True, timeout=100, check=False
    )
    assert found.returncode == 0, found.stderr
    (run,) = own.glob("runs/*")
    assert f"beginning again in runs/{run.name}" in found.stdout
    same(Run.open(run), whole)


# ---- signals -------------------------------------------------------------------------------------


@pytest.mark.slow
def test_sigusr1_saves_and_ends_as_sigterm_does(own: Path) -> None:
    process = command("own.py", "--strategy", "ddp", "--devices", "2xcpu", SLOWLY="0.05")
    wait_for("runs/*/checkpoints/step-*")
    process.send_signal(signal.SIGUSR1)
    out, err = process.communicate(timeout=30)
    assert process.returncode == 143 and "resume it with --resume" in out and "Traceback" not in err


@pytest.mark.slow
@pytest.mark.parametrize(
    "how", [signal.SIGTERM, pytest.param(signal.SIGINT, marks=pytest.mark.slow)]
)
@pytest.mark.parametrize("strategy", ["ddp", pytest.param("single", marks=pytest.mark.slow)])
def test_a_signal_to_all_processes_saves_and_shows_no_traceback(
    own: Path, strategy: str, how: signal.Signals
) -> None:
    """As systemd, SLURM and a terminal do."""
    words = [
        "own.py",
        "--strategy",
        strategy,
        "--devices",
        {"ddp": "2xcpu", "single": "1xcpu"}[strategy],
    ]
    process = command(*words, "--loader-workers", "1", SLOWLY="0.05")
    wait_for("runs/*/checkpoints/step-*")
    (run,) = own.glob("runs/*")
    children = psutil.Process(process.pid).children(recursive=True)
    for one in (*children, psutil.Process(process.pid)):
        one.send_signal(how)
    out, err = process.communicate(timeout=60)
    assert process.returncode == {signal.SIGTERM: 143, signal.SIGINT: 130}[how], (out, err)
    assert f"resume it with --resume runs/{run.name}" in out and "Traceback" not in err
    _, alive = psutil.wait_procs(children, timeout=5)
    assert not alive


@pytest.mark.slow
def test_a_step_that_does_not_end_in_time_is_not_waited_for(own: Path) -> None:
    process = command("own.py", "--devices", "1", "--grace", "1", SLOWLY="0.02")
    wait_for("runs/*/checkpoints/step-*")
    process.send_signal(signal.SIGSTOP)  # so that it is in no hurry
    process.send_signal(signal.SIGCONT)
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=20)
    assert process.returncode == 143
    (own / "own.py").write_text(
        FILE.replace(
            "def forward(self, x):",
            "def forward(self, x):\n        time.sleep(50 * (calls.append(1) or len(calls) > 9))",
        ).replace("class Net", "calls = []\nclass Net")
    )
    process = command("own.py", "--devices", "1", "--grace", "1", "--folder", "slow")
    wait_for("slow/*/checkpoints/step-*")
    time.sleep(1)
    began = time.monotonic()
    process.send_signal(signal.SIGTERM)
    out, _ = process.communicate(timeout=30)
    assert process.returncode == 143 and time.monotonic() - began < 20
    assert "resume it with --resume slow/" in out


# ---- the audit, and the list ---------------------------------------------------------------------


def test_the_audit_finds_what_was_used_twice_and_never(own: Path, capsys) -> None:
    run = train(
        JobFile("own.py"), strategy="ddp", devices="2xcpu", quiet=True, audit=True, steps=12
    )
    lines, found = added_up(run.folder)
    assert found["right"] and lines == [
        "1 start, 12 steps",
        "epoch 1: 75 samples, each once",
        "epoch 2: 16 samples so far, each once",
    ]
    file = run.folder / "audit" / "1-rank-1.jsonl"
    body = file.read_text().splitlines()
    step, epoch, index, samples = json.loads(body[3])
    body[3] = json.dumps([step, epoch, index, [7, *samples[1:]]])
    file.write_text("\n".join(body))
    assert main(["audit", str(run.folder)]) == 1
    said = capsys.readouterr().out
    assert "epoch 1: 75 samples: 1 sample more than once, sample 7 say; 1 sample never, " in said
    assert f"sample {samples[0]} say" in said
    with pytest.raises(FolderError, match="trained without an audit: train it with --audit"):
        added_up(unbroken(own).folder)


def test_the_list_of_checkpoints_and_what_is_damaged(own: Path, capsys) -> None:
    run = train(JobFile("own.py"), strategy="ddp", devices="2xcpu", quiet=True)
    assert main(["checkpoints", str(run.folder), "--verify"]) == 0
    first, second = capsys.readouterr().out.splitlines()
    assert re.fullmatch(r"step +30  after 3 epochs and 0 batches, 1 part, 0\.0 MB, whole", first)
    assert re.fullmatch(r"step +28  after 2 epochs and 8 batches, 1 part, 0\.0 MB, whole", second)
    part = run.folder / "checkpoints" / "step-28" / "rank-0-of-1.safetensors"
    body = bytearray(part.read_bytes())
    body[-1] ^= 1
    part.write_bytes(body)
    assert main(["checkpoints", str(run.folder)]) == 0
    assert main(["checkpoints", str(run.folder), "--verify"]) == 1
    assert "step       28  damaged: " in capsys.readouterr().out


def test_metrics_and_lock_leave_no_thread_behind(own: Path) -> None:
    before = set(threading.enumerate())
    train(JobFile("own.py"), devices="1xcpu", quiet=True)
    for thread in set(threading.enumerate()) - before:
        thread.join(5)
        assert not thread.is_alive(), thread
    assert not list(own.glob("runs/*/.*"))


@pytest.mark.slow
@pytest.mark.parametrize(("strategy", "devices"), [("single", "1xcpu"), ("ddp", "2xcpu")])
def test_a_killed_loader_worker_is_named_at_once(own: Path, strategy: str, devices: str) -> None:
    (own / "own.py").write_text(
        FILE.replace(
            "        return super().__getitem__(index)",
            "        time.sleep(0.05)\n        return super().__getitem__(index)",
        )
    )
    words = ["own.py", "--strategy", strategy, "--devices", devices, "--loader-workers", "1"]
    process = command(*words)
    wait_for("runs/*/checkpoints/step-*")
    below = psutil.Process(process.pid).children(recursive=True)
    worker = max((one for one in below if not one.children()), key=lambda one: one.create_time())
    worker.kill()
    _, err = process.communicate(timeout=30)
    assert process.returncode == 1 and "Traceback" not in err
    last = err.strip().splitlines()[-1]
    assert re.search(
        r"a loader worker was killed \(possibly out of memory: check dmesg\): set fewer",
        last,
    )


# ---- disks ---------------------------------------------------------------------------------------


def filled(disk: Path) -> None:
    """Take all that is left of a disk, when what is being written is."""
    while list(disk.glob("*/checkpoints/.step-*")):
        time.sleep(0.01)
    with contextlib.suppress(OSError), (disk / "filler").open("wb", buffering=0) as file:
        while True:
            file.write(b"0" * 512)


@pytest.mark.sweep
@pytest.mark.parametrize("strategy", ["single", "ddp"])
def test_a_disk_that_fills_up_leaves_the_checkpoint_of_before_and_nothing_half_written(
    own: Path, strategy: str, small_disk: Path
) -> None:
    def fill(event: Any) -> None:
        if event.kind == "epoch" and event.epoch == 2:
            filled(small_disk)

    job = JobFile("own.py").load().replace(on_event=[fill], save_every=None, keep=1)
    devices = {"single": "1xcpu", "ddp": "2xcpu"}[strategy]
    with pytest.raises(
        SaveError, match=r"could not be written: the disk is full; the checkpoint.* kept"
    ):
        train(job, strategy=strategy, devices=devices, folder=small_disk, quiet=True)
    (run,) = small_disk.glob("job-*")
    assert [path.name for path in (run / "checkpoints").iterdir()] == ["step-10"]
    assert not [path for path in run.rglob("*") if path.is_file() and path.name.endswith(".part")]
    (small_disk / "filler").unlink()
    finished = train(job.replace(on_event=[]), resume=run, quiet=True)
    same(finished, unbroken(own, strategy, devices))


def test_a_disk_that_is_full_from_the_first_checkpoint_on_advises_to_begin_anew(
    own: Path, small_disk: Path, capfd
) -> None:
    def fill(event: Any) -> None:
        if event.kind == "epoch":
            filled(small_disk)

    job = JobFile("own.py").load().replace(on_event=[fill], save_every=None)
    with pytest.raises(SaveError, match="the disk is full"):
        train(job, devices="1xcpu", folder=small_disk)
    assert "--resume" not in capfd.readouterr().out, "there is nothing to resume"


@pytest.mark.parametrize("strategy", ["single", "ddp"])
def test_a_disk_that_becomes_read_only_is_said(own: Path, strategy: str, small_disk: Path) -> None:
    def remount(event: Any) -> None:
        if event.kind == "epoch" and event.epoch == 2:
            for how in (["--make-private"], ["--bind", str(small_disk)], ["-o", "remount,bind,ro"]):
                subprocess.run(["mount", *how, str(small_disk)], check=True)

    job = JobFile("own.py").load().replace(on_event=[remount], save_every=None)
    devices = {"single": "1xcpu", "ddp": "2xcpu"}[strategy]
    try:
        with pytest.raises(SaveError, match=r"could not be written: Read-only file system"):
            train(job, strategy=strategy, devices=devices, folder=small_disk, quiet=True)
    finally:
        subprocess.run(["umount", str(small_disk)], check=True)
