"""The command: what bad input gets is one line, an exit code, and nothing made."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from lockstep.cli.command import main

JOB = """
import torch, lockstep
from torch import nn
from torch.utils.data import TensorDataset

class Data:
    def __init__(self, bad=None): self.bad = bad
    def __len__(self): return 20
    def __getitem__(self, i):
        if i == self.bad: raise OSError("broken file")
        return torch.full((4,), float(i)), i % 3

def total_of(name):
    if name == "vector": return nn.CrossEntropyLoss(reduction="none")
    if name == "mse": return nn.L1Loss()
    if name == "nan": return lambda out, y: out.sum() * float("nan")
    if name == "zero": return lambda out, y: (out.sum(), 0)
    return nn.CrossEntropyLoss()

def optimizer_of(params, name):
    params = list(params)
    return torch.optim.SGD(params[1:] if name == "drops" else params, lr=0.01)

class Net(nn.Module):
    def __init__(self, name):
        super().__init__()
        import os
        if name == "unlike" and torch.distributed.is_initialized() and torch.distributed.get_rank() == 1:
            self.other = nn.Linear(4, 3)
        else:
            self.one = nn.Linear(4, 3)
        if name == "random":
            import secrets
            next(iter(self.parameters())).data[0] += secrets.randbelow(10**6)
    def forward(self, x):
        return (self.one if hasattr(self, "one") else self.other)(x)

def job(loss: str = "", bad: int | None = None, optimizer: str = "", empty: bool = False, model: str = ""):
    return lockstep.Job(
        model=lambda: Net(model), loss=total_of(loss), optimizer=lambda p: optimizer_of(p, optimizer),
        train_data=TensorDataset(torch.zeros(0, 4), torch.zeros(0)) if empty else Data(bad), batch_size=8,
        metrics={}, epochs=2,
    )
"""


@pytest.fixture
def job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "a_job.py"
    path.write_text(textwrap.dedent(JOB))
    return path


def said(capfd: pytest.CaptureFixture) -> list[str]:
    return capfd.readouterr().err.strip().splitlines()


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ("train", "name a job file"),
        ("train missing.py", "missing.py: there is no such file"),
        ("train a_job.py --strategy dpd", 'no strategy "dpd": did you mean "d'),
        ("train a_job.py --devices cudaa", "cudaa"),
        ("train a_job.py --devices 99", "99 devices, but"),
        ("train a_job.py --batch-size 0", "batch_size: 0 is too small"),
        ("train a_job.py --batchsize 3", 'no option --batchsize here; did you mean "--batch-size"'),
        (
            "train a_job.py --set los=mse",
            '--set los: the job has no such parameter; did you mean "loss"',
        ),
        ("train a_job.py --set bad=x", "--set bad: 'x' is not a whole number"),
        ("train a_job.py --set loss", "--set key=value"),
        ("train a_job.py --set loss=vector", r"returned a tensor of shape \(8,\)"),
        (
            "train a_job.py --set loss=mse",
            r"can't take outputs float32\(8, 3\) and targets int64\(8,\)",
        ),
        ("train a_job.py --set empty=true", "train_data: it is empty"),
        (
            "train a_job.py --set optimizer=drops",
            'optimizer: 1 of 2 parameters are left out, "one.weight" first',
        ),
        ("train a_job.py --folder a_job.py", "no run can be kept there|can't be made"),
        (
            "train a_job.py --set model=unlike --devices 2xcpu",
            r'model: "one.weight" \(3, 4\) torch.float32 differs between the ranks',
        ),
        (
            "train a_job.py --set model=random --devices 2xcpu",
            r'model: "one.weight" \(3, 4\) torch.float32 differs between the ranks',
        ),
        (
            "train a_job.py --set loss=mse --devices 2xcpu",
            r"can't take outputs float32\(4, 3\) and targets int64\(4,\)",
        ),
        (
            "train a_job.py --microbatches 2",
            "--microbatches belongs to a strategy: name the strategy, too",
        ),
        (
            "train a_job.py --strategy ddp --microbatches 2",
            'strategy "ddp" has no setting "microbatches": pp has it$',
        ),
        (
            "train a_job.py --strategy pp --microbatches x",
            "microbatches: 'x' is not a whole number",
        ),
        (
            "train a_job.py --strategy pp --microbatches none",
            "microbatches: 'none' is not a whole number",
        ),
        (
            "train a_job.py --strategy pp --microbatches 4 --split-size 20",
            "microbatches=4 and split_size=20 set",
        ),
        ("train a_job.py --strategy pp --schedule 2f2b", 'no schedule "2f2b"'),
        (
            'train a_job.py --strategy pp --map {"ones":0}',
            'the model has no "ones": did you mean "one"',
        ),
        (
            "train a_job.py --strategy pp --map nowhere.json",
            "read \\(.*No such file or directory.*\\): give a file",
        ),
        (
            "train a_job.py --strategy mp --devices 2xcpu",
            "2 devices, but the model has layers for 1 only",
        ),
        ("train --resume nowhere", "nowhere: no run is kept there"),
        ("evaluate a_job.py", "eval_data: the job has none"),
        ("evaluate nowhere", "nowhere"),
        ("trian a_job.py", 'no command "trian"; did you mean "train"'),
    ],
)
def test_bad_input_gets_one_line_and_exit_code_2_and_makes_nothing(
    words: str, says: str, job: Path, capfd
) -> None:
    assert main(words.split()) == 2
    lines = said(capfd)
    assert len(lines) == 1, lines
    assert lines[0].startswith("lockstep: ")
    assert re.search(says, lines[0]), lines[0]
    assert not list(job.parent.glob("runs/*")), "nothing was made"


@pytest.mark.sweep
@pytest.mark.parametrize(
    "on", ["--devices 1", "--strategy dp --devices 2xcpu", "--strategy ddp --devices 2xcpu"]
)
@pytest.mark.parametrize(
    ("parameter", "says"),
    [
        ("loss=nan", r"the loss became nan at step 1 on (rank|replica) \d \(cpu:\d\)"),
        ("bad=13", "sample 13.*OSError: broken file"),
        ("loss=zero", r"all 6 updates were skipped: are all targets ignored, or NaN\?"),
    ],
)
def test_a_fault_during_the_run_gets_exit_code_1_and_keeps_the_folder(
    on: str, parameter: str, says: str, job: Path, capfd
) -> None:
    assert main(["train", "a_job.py", "--set", parameter, *on.split()]) == 1
    lines = said(capfd)
    assert re.search(says, lines[-1]), lines
    assert len(list(job.parent.glob("runs/*"))) == 1


def test_a_run_from_the_command_line_is_resumed_and_evaluated(job: Path, capfd) -> None:
    assert main(["train", "a_job.py", "--strategy", "ddp", "--devices", "2xcpu"]) == 0
    out = capfd.readouterr().out
    folder = out.strip().splitlines()[-1].removeprefix("run: ")
    assert "a_job: ddp on 2 devices (cpu:0, cpu:1), gloo" in out
    assert (
        main(
            ["train", "--resume", folder, "--strategy", "dp", "--devices", "2xcpu", "--epochs", "3"]
        )
        == 0
    )
    assert "resuming after epoch 2, step 6" in capfd.readouterr().out


def test_more_micro_batches_than_samples_are_counted_right_at_once(job: Path, capfd) -> None:
    words = [
        "train",
        "a_job.py",
        "--strategy",
        "pp",
        "--devices",
        "1",
        "--microbatches",
        "100",
        "--epochs",
        "1",
    ]
    assert main(words) == 0
    assert "batches of 8, in 8 micro-batches\n" in capfd.readouterr().out


@pytest.mark.parametrize(
    ("command", "file"),
    [
        ("verify", "compare_commands"),
        ("compare", "compare_commands"),
        ("tune", "compare_commands"),
        ("train", "run_commands"),
    ],
)
def test_ctrl_c_says_what_that_command_keeps(
    command: str, file: str, job: Path, capfd, monkeypatch
) -> None:
    def stopped(options: object) -> int:
        raise KeyboardInterrupt

    monkeypatch.setattr(f"lockstep.cli.{file}._{command}", stopped)
    assert main([command, "a_job.py"]) == 130
    kept = "" if command == "train" else "; nothing was kept"
    assert said(capfd) == [f"lockstep: stopped by Ctrl-C{kept}"]


@pytest.mark.slow
def test_torchrun_starts_the_same_job(job: Path) -> None:
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node=2",
        "-m",
        "lockstep",
    ]
    surroundings = {**os.environ, "PYTHONWARNINGS": "ignore"}
    out = subprocess.run(
        [*command, "train", "a_job.py"],
        cwd=job.parent,
        env=surroundings,
        capture_output=True,
        text=True,
        check=False,
    )
    assert out.returncode == 0, out.stderr
    assert out.stdout.count("run: ") == 1
    (folder,) = job.parent.glob("runs/a_job-ddp-*")
    assert (folder / "model.safetensors").is_file()


def test_the_devices_are_listed(capfd) -> None:
    assert main(["devices"]) == 0
    assert "cores" in capfd.readouterr().out


def test_the_mesh_of_a_strategy_is_drawn(capfd) -> None:
    assert main(["devices", "--strategy", "ddp=2xpp=2"]) == 0
    lines = capfd.readouterr().out.splitlines()[-2:]
    assert lines[0] == "rank 0: cpu:0 stage 0, cpu:1 stage 1; local batch 1 of 2"
    assert lines[1] == "rank 1: cpu:2 stage 0, cpu:3 stage 1; local batch 2 of 2"
    assert main(["devices", "--strategy", "dp", "--devices", "2xcpu"]) == 0
    whole = "rank 0: cpu:0 the whole model, cpu:1 the whole model; local batches 1 to 2 of 2"
    assert capfd.readouterr().out.splitlines()[-1] == whole


def test_a_number_behind_a_strategy_and_stages_of_one_without_any_are_refused(
    job: Path, capfd
) -> None:
    assert main(["train", str(job), "--strategy", "fsdp=2"]) == 2
    assert 'there is no strategy "fsdp=2": take fsdp on 2 devices' in capfd.readouterr().err
    assert main(["train", str(job), "--strategy", "mp", "--microbatches", "2"]) == 2
    assert 'strategy "mp" has no setting "microbatches": pp has it' in capfd.readouterr().err
