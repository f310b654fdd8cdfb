"""A model that is larger than what a rank may have of memory trains in shards."""

from __future__ import annotations

import contextlib
import errno
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

from lockstep import Job, train
from lockstep.errors import FolderError, LockstepError
from lockstep.strategies.fsdp import FSDP
from lockstep.strategies.sharded.parameters_on_disk import parameters_on_disk

from harness import differences  # isort: skip
from zoo import Residual, drawn, labels

GROUPS = Path("/sys/fs/cgroup/memory")
WIDTH, BLOCKS = 1024, 48
LIMIT = int(os.environ.get("LOCKSTEP_TEST_LIMIT") or 280 << 20)
"""Bytes that a rank may have beside what it had before: weights and gradients are 385 MiB
together.
"""


class Wide(nn.Module):
    def __init__(self, width: int = WIDTH, blocks: int = BLOCKS) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Residual(width) for _ in range(blocks))
        self.out = nn.Linear(width, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return self.out(x)


def limited() -> nn.Module:
    """The model, in a process that may have so much memory from now on."""
    group = GROUPS / f"lockstep-test-{os.getpid()}"
    if os.environ.get("LOCKSTEP_TEST_LIMIT") and not group.exists():
        group.mkdir()
        (group / "memory.limit_in_bytes").write_text(str(LIMIT))
        (group / "cgroup.procs").write_text(str(os.getpid()))
    return Wide()


def job_of(model: Any, width: int = WIDTH) -> Job:
    return Job(
        model=model,
        loss=nn.CrossEntropyLoss(),
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.01),
        train_data=TensorDataset(drawn(16, width).float(), labels(16, 3)),
        batch_size=8,
        epochs=1,
    )


@pytest.fixture
def limit(monkeypatch) -> Any:
    """Ranks are in control groups of their own."""
    probe = GROUPS / f"lockstep-test-{os.getpid()}"
    try:
        probe.mkdir()
        (probe / "memory.limit_in_bytes").write_text(str(LIMIT))
    except OSError:
        pytest.skip("no right to limit a process's memory by a control group")
    finally:
        with contextlib.suppress(OSError):
            probe.rmdir()
    monkeypatch.setenv("LOCKSTEP_TEST_LIMIT", str(LIMIT))
    yield
    for group in GROUPS.glob("lockstep-test-*"):
        with contextlib.suppress(OSError):
            group.rmdir()


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_model_larger_than_the_memory_of_a_rank_trains_in_shards(
    limit: None, tmp_path: Path
) -> None:
    job = job_of(limited)
    run = train(
        job, strategy=FSDP(build_on_disk=True), devices="4xcpu", folder=tmp_path, quiet=True
    )
    with pytest.raises(LockstepError):  # the system kills a rank
        train(job, strategy="ddp", devices="2xcpu", folder=tmp_path, quiet=True)
    os.environ.pop("LOCKSTEP_TEST_LIMIT")
    one = train(job, strategy="single", devices="1xcpu", folder=tmp_path, quiet=True)
    assert differences(job, run, one).worst < 1e-5  # in float32


def test_a_model_that_is_built_on_disk_is_the_same(tmp_path: Path) -> None:
    job = job_of(lambda: Wide(160, 3), 160).replace(precision="fp64")
    run = train(
        job, strategy=FSDP(build_on_disk=True), devices="2xcpu", folder=tmp_path, quiet=True
    )
    one = train(job, strategy="single", devices="1xcpu", folder=tmp_path, quiet=True)
    assert differences(job, run, one).worst < 1e-10
    assert not list(tmp_path.rglob(".parameter-*"))


def test_parameters_on_disk_stay_tied_and_are_drawn_alike(tmp_path: Path) -> None:
    def build() -> nn.Module:
        torch.manual_seed(0)
        model = Wide(160, 3)
        model.blocks[2].linear.weight = model.blocks[0].linear.weight
        return model

    plain = build()
    with parameters_on_disk(str(tmp_path)):
        mapped = build()
    assert mapped.blocks[2].linear.weight is mapped.blocks[0].linear.weight
    assert all(
        torch.equal(p, q) for p, q in zip(plain.parameters(), mapped.parameters(), strict=True)
    )
    assert not list(tmp_path.iterdir())


def test_parameters_are_built_on_a_disk_that_reserves_no_room(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def unsupported(file: int, offset: int, size: int) -> None:
        raise OSError(errno.EOPNOTSUPP, os.strerror(errno.EOPNOTSUPP))

    monkeypatch.setattr(os, "posix_fallocate", unsupported)
    with parameters_on_disk(str(tmp_path)):
        layer = nn.Linear(160, 160)
    assert layer.weight.untyped_storage().filename is not None


def test_a_full_disk_is_said_where_parameters_are_built_on_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(file: int, offset: int, size: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "posix_fallocate", full)
    with (
        pytest.raises(FolderError, match=r"no room for a parameter of 0\.1 MB"),
        parameters_on_disk(str(tmp_path)),
    ):
        nn.Linear(160, 160)
    assert not list(tmp_path.iterdir())
