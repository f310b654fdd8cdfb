"""What any strategy saved is taken up by any other, weights and optimizer, and a rank reads what
it needs only.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from torch import nn

import lockstep
from lockstep import Job, Run, train
from lockstep.checkpoint.folder import CheckpointFolder
from lockstep.checkpoint.index import Reader
from lockstep.strategies.sharded.shards import Shards

from harness import differences  # isort: skip
from zoo import tokens_and_next

ON = {"single": 1, "dp": 2, "ddp": 2, "fsdp": 4, "pp": 2, "ddp=2xpp=2": 4}
BOUND = 1e-10

_tokens, _next = tokens_and_next()


class Tied(nn.Module):
    """Blocks between an embedding and an output layer that are tied."""

    def __init__(self, words: int = 11, width: int = 8) -> None:
        super().__init__()
        self.embedding = nn.Embedding(words, width)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(width, width), nn.Tanh()) for _ in range(3)
        )
        self.out = nn.Linear(width, words, bias=False)
        self.out.weight = self.embedding.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = x + block(x)
        return self.out(x).transpose(1, 2)


def job_of() -> Job:
    return Job(
        model=Tied,
        loss=nn.CrossEntropyLoss(),
        optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=0.01),
        train_data=torch.utils.data.TensorDataset(_tokens, _next),
        batch_size=8,
        epochs=2,
        precision="fp64",
    )


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Run:
    return train(
        job_of(),
        strategy="single",
        devices="1xcpu",
        folder=tmp_path_factory.mktemp("whole"),
        quiet=True,
    )


@pytest.mark.slow
@pytest.mark.parametrize("was", ON)
def test_every_strategy_goes_on_from_every_other(was: str, whole: Run, tmp_path: Path) -> None:
    job = job_of()
    half = train(job, strategy=was, devices=f"{ON[was]}xcpu", folder=tmp_path, quiet=True, steps=3)
    for number, now in enumerate(ON):
        copy = tmp_path / f"copy-{number}"
        shutil.copytree(half.folder, copy)
        run = train(job, strategy=now, devices=f"{ON[now]}xcpu", resume=copy, quiet=True)
        assert differences(job, run, whole).worst < BOUND, f"{was} to {now}"
        model = run.model()
        assert model.out.weight is model.embedding.weight


def test_shards_of_four_ranks_are_files_of_rows_that_one_device_goes_on_from(
    whole: Run, tmp_path: Path, monkeypatch
) -> None:
    job = job_of()
    half = train(job, strategy="fsdp", devices="4xcpu", folder=tmp_path, quiet=True, steps=3)
    ((_, index), *_) = CheckpointFolder(half.folder / "checkpoints").whole(pytest.fail)
    for name in ("model/embedding.weight", "optimizer/state/embedding.weight/exp_avg"):
        rows = [(one["part"], one["start"]) for one in index.tensors[name]["rows"]]
        assert rows == [(0, 0), (1, 3), (2, 6), (3, 9)]
    with safe_open(half.folder / "model.safetensors", framework="pt") as file:
        assert set(file.keys()) == set(Tied().state_dict())
        assert file.get_slice("out.weight").get_shape() == [11, 8]
    run = train(job, strategy="single", devices="1xcpu", resume=half.folder, quiet=True)
    assert differences(job, run, whole).worst < BOUND
    assert json.loads((run.folder / "config.json").read_text())["strategy"] == "single"


def read_and_gathered(world: Any, folder: str) -> tuple[int, int, int]:
    """Bytes that this rank reads of a checkpoint, those of all its tensors, and how many were
    gathered for it.
    """
    torch.manual_seed(0)
    model = Tied(64, 32).double()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    step = lockstep.parallelize(model, nn.CrossEntropyLoss(), optimizer, strategy="fsdp")
    rows = torch.arange(8).tensor_split(world.size)[world.rank]
    step(_tokens[rows], _next[rows])
    read, gathered, rows_of, gather = [], [], Reader.rows, Shards.gathered

    def noted(self: Reader, *which: Any) -> torch.Tensor:
        found = rows_of(self, *which)
        read.append(found.nbytes)
        return found

    def counted(tensor: Any) -> torch.Tensor:
        gathered.append(tensor)
        return gather(tensor)

    Reader.rows, Shards.gathered = noted, staticmethod(counted)  # type: ignore[method-assign]
    step.save(folder)
    step.load(folder)
    ((_, index),) = CheckpointFolder(Path(folder)).whole(lambda said: None)
    sizes = [torch.Size(about["shape"]).numel() * 8 for about in index.tensors.values()]
    return sum(read), sum(sizes), len(gathered)


def test_a_rank_of_shards_reads_its_rows_only_and_gathers_nothing_to_save(tmp_path: Path) -> None:
    for read, all_of_it, gathered in lockstep.launch(
        read_and_gathered, devices="2xcpu", args=(str(tmp_path),)
    ):
        assert read < all_of_it / 2 * 1.05
        assert gathered == 0
