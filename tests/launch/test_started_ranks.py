"""Processes that others have started: they join where they can, and never train alone without a word."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from torch import nn

import lockstep
from lockstep.errors import DeviceError
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
        "LOCAL_RANK is not set, so that each would train alone: start them with torchrun",
    ),
    "SLURM": ({"SLURM_PROCID": "1", "SLURM_NTASKS": "4"}, r"SLURM has started this process as one of 4 \(SLURM_PROCID"),
    "srun": ({"SLURM_PROCID": "0", "SLURM_NTASKS": "1", "SLURM_STEP_NUM_TASKS": "2"}, "SLURM_STEP_NUM_TASKS"),
    "Open MPI": ({"OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_SIZE": "2"}, "Open MPI has started this process"),
    "MPICH": ({"PMI_RANK": "0", "PMI_SIZE": "2"}, "MPI has started this process as one of 2"),
}
CALLS: dict[str, Callable[[Path], Any]] = {
    "train": lambda path: lockstep.train(ZOO["mlp"], devices="1xcpu", folder=path, quiet=True),
    "evaluate": lambda path: lockstep.evaluate(ZOO["mlp"], devices="1xcpu"),
    "launch": lambda path: lockstep.launch(lambda world: None, devices="2xcpu"),
    "parallelize": lambda path: lockstep.parallelize(mlp(), nn.CrossEntropyLoss(), plain_sgd, devices="1xcpu"),
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
def test_who_is_alone_trains(variables: dict[str, str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    CALLS["train"](tmp_path)
