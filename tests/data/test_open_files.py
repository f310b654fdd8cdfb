"""Open files of a dataset: each forked loader worker has a position of its own in them."""

from __future__ import annotations

import json
import os
import sqlite3
import sys
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import ConcatDataset, Dataset, Subset

import lockstep
from lockstep.data import Loader

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="workers are forked on Linux")

RECORDS = 2048
WORDS = 64


def records(folder: Path) -> str:
    """A file whose record i is the number i, many times."""
    path = folder / "records"
    torch.arange(RECORDS, dtype=torch.float64)[:, None].repeat(1, WORDS).numpy().tofile(path)
    return str(path)


class Records(Dataset[Any]):
    """Sample i is (record i, i): the model's outputs are the targets as long as the records are
    the right ones.
    """

    def __init__(self, path: str, buffering: int = 0) -> None:
        self.file: Any = open(path, "rb", buffering=buffering)  # noqa: SIM115

    def __del__(self) -> None:
        self.file.close()

    def __len__(self) -> int:
        return RECORDS

    def __getitem__(self, index: int) -> Any:
        size = 8 * WORDS
        self.file.seek(index * size)
        row = torch.frombuffer(bytearray(self.file.read(size)), dtype=torch.float64)
        return row[:1], torch.tensor([index], dtype=torch.float64)


class Buffered(Records):
    def __init__(self, path: str) -> None:
        super().__init__(path, 8192)


class Archived(Records):
    """The records are the files of a zip archive."""

    def __init__(self, path: str) -> None:
        whole = Path(path).read_bytes()
        with zipfile.ZipFile(f"{path}.zip", "w") as archive:
            for i in range(RECORDS):
                archive.writestr(str(i), whole[8 * WORDS * i :][: 8 * WORDS])
        self.file = zipfile.ZipFile(f"{path}.zip")

    def __getitem__(self, index: int) -> Any:
        row = torch.frombuffer(bytearray(self.file.read(str(index))), dtype=torch.float64)
        return row[:1], torch.tensor([index], dtype=torch.float64)


class Database(Records):
    """The records are the rows of a table."""

    def __init__(self, path: str) -> None:
        self.file = sqlite3.connect(f"{path}.db")
        self.file.execute(
            "create table records (number integer primary key, value real, rest text)"
        )
        rows = ((i, float(i), "." * 4000) for i in range(RECORDS))
        self.file.executemany("insert into records values (?, ?, ?)", rows)
        self.file.commit()

    def __getitem__(self, index: int) -> Any:
        question = "select value from records where number = ?"
        value = self.file.execute(question, (index,)).fetchone()
        return torch.tensor(value, dtype=torch.float64), torch.tensor([float(index)])


@pytest.mark.parametrize("kind", [Records, Buffered, Archived, Database])
def test_loader_workers_read_the_right_records(kind: Any, tmp_path: Path) -> None:
    loader = Loader(kind(records(tmp_path)), batch_size=64, workers=4)
    try:
        for batch in loader:
            inputs, targets = batch
            assert torch.equal(inputs.double(), targets.double())
    finally:
        loader.close()


def identity() -> nn.Module:
    layer = nn.Linear(1, 1, bias=False, dtype=torch.float64)
    nn.init.ones_(layer.weight)
    return layer


@pytest.mark.parametrize("strategy", ["single", "dp", "ddp"])
def test_a_dataset_that_opens_its_file_when_it_is_made_gives_its_own_records(
    strategy: str, tmp_path: Path
) -> None:
    """The losses are 0 where each sample has its own record."""
    path = records(tmp_path)
    job = lockstep.Job(
        model=identity,
        train_data=lambda: Records(path),
        eval_data=lambda: Subset(ConcatDataset([Records(path)]), range(0, RECORDS, 2)),
        loss=nn.MSELoss(),
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.0),
        batch_size=64,
        epochs=1,
        loader_workers=2,
    )
    devices = "1xcpu" if strategy == "single" else "2xcpu"
    run = lockstep.train(job, strategy=strategy, devices=devices, folder=tmp_path)
    record = json.loads((run.folder / "metrics.jsonl").read_text().splitlines()[-1])
    assert (record["train_loss"], record["eval_loss"]) == (0, 0)


class ByWhom(Records):
    """Sample i is (the process that fetches it, i)."""

    def __getitem__(self, index: int) -> Any:
        return os.getpid(), index


def test_an_open_file_leaves_fetching_to_the_workers(tmp_path: Path) -> None:
    loader = Loader(ByWhom(records(tmp_path)), batch_size=64, workers=1)
    try:
        (by,) = {int(process) for process in next(loader.epoch(0)).parts[0].inputs}
        assert by != os.getpid()
    finally:
        loader.close()
