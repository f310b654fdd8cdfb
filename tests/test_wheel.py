"""The wheel, installed into an empty environment without extras: what it requires is all that it
needs.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]

JOB = """
import lockstep, torch
from torch import nn
from torch.utils.data import TensorDataset

def data(seed):
    generator = torch.Generator().manual_seed(seed)
    return TensorDataset(torch.randn(40, 6, generator=generator), torch.randint(3, (40,), generator=generator))

def job(lr: float = 0.1):
    return lockstep.Job(
        model=lambda: nn.Linear(6, 3), loss=nn.CrossEntropyLoss(), train_data=data(1), eval_data=data(2),
        optimizer=lambda params: torch.optim.SGD(params, lr=lr, momentum=0.9), batch_size=8, epochs=2,
    )
"""


def called(*command: str, folder: Path) -> str:
    own = {
        name: value
        for name, value in os.environ.items()
        if name not in ("PYTHONPATH", "VIRTUAL_ENV")
    }
    out = subprocess.run(command, cwd=folder, env=own, capture_output=True, text=True, check=False)
    assert out.returncode == 0, f"{' '.join(command)}\n{out.stdout}\n{out.stderr}"
    return out.stdout


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_plain_install_trains_evaluates_predicts_and_resumes(tmp_path: Path) -> None:
    """safetensors once wanted numpy to save, which nothing required."""
    wheels, environment = tmp_path / "wheels", tmp_path / "environment"
    try:
        called(
            sys.executable,
            "-m",
            "pip",
            "wheel",
            "--no-deps",
            "-w",
            str(wheels),
            str(ROOT),
            folder=tmp_path,
        )
    except AssertionError as error:
        if "Could not find a version" in str(error) or "No matching distribution" in str(error):
            pytest.skip("no package index is here to build with")
        raise
    (wheel,) = wheels.glob("*.whl")
    called(sys.executable, "-m", "venv", str(environment), folder=tmp_path)
    python = str(environment / "bin" / "python")
    constraints = ["--constraint", str(ROOT / "constraints.txt")]
    called(python, "-m", "pip", "install", "--quiet", *constraints, str(wheel), folder=tmp_path)
    extras = (
        "import importlib.util as u; print([n for n in ('sklearn', 'matplotlib', 'psutil') "
        "if u.find_spec(n)])"
    )
    assert called(python, "-c", extras, folder=tmp_path).strip() == "[]"

    (tmp_path / "job.py").write_text(JOB)
    lockstep = str(environment / "bin" / "lockstep")
    out = called(
        lockstep, "train", "job.py", "--strategy", "ddp", "--devices", "2xcpu", folder=tmp_path
    )
    run = out.splitlines()[-1].removeprefix("run: ")
    assert "loss" in called(lockstep, "evaluate", run, folder=tmp_path)
    assert "predictions" in called(lockstep, "predict", run, folder=tmp_path)
    assert "resuming after epoch 2" in called(
        lockstep, "train", "--resume", run, "--epochs", "3", folder=tmp_path
    )
