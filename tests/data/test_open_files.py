"""Open files of a dataset: a forked loader worker would share the position of each, and give
other records.
"""

from __future__ import annotations

import contextlib
import io
import json
import logging
import multiprocessing
import os
import socket
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

RECORDS = 2048
WORDS = 64
NOTE = (
    'attribute "file" is an open file, and loader workers would share its position: samples are '
    "fetched in the "
    "training process; to have loader workers, open it in __getitem__, or leave it out in the "
    "dataset's __getstate__"
)


def records(folder: Path) -> str:
    """A file whose record i is the number i, many times."""
    path = folder / "records"
    torch.arange(RECORDS, dtype=torch.float64)[:, None].repeat(1, WORDS).numpy().tofile(path)
    return str(path)


class Records(Dataset[Any]):
    """Sample i is (record i, i): the model's outputs are the targets as long as the records are
    the right ones.
    """

    def __init__(self, path: str) -> None:
        self.path = path
        self.file: Any = open(path, "rb", buffering=0)  # noqa: SIM115

    def __del__(self) -> None:
        self.file.close()

    def __len__(self) -> int:
        return RECORDS

    def __getitem__(self, index: int) -> Any:
        size = 8 * WORDS
        self.file.seek(index * size)
        row = torch.frombuffer(bytearray(self.file.read(size)), dtype=torch.float64)
        return row[:1], torch.tensor([index], dtype=torch.float64)


class LeavesOut(Records):
    """The same without the file in its state, which is opened again."""

    def __getstate__(self) -> Any:
        return {"path": self.path}

    def __setstate__(self, state: Any) -> None:
        self.__init__(state["path"])  # type: ignore[misc]


def identity() -> nn.Module:
    layer = nn.Linear(1, 1, bias=False, dtype=torch.float64)
    nn.init.ones_(layer.weight)
    return layer


def trained(strategy: str, dataset: type[Records], folder: Path) -> dict[str, Any]:
    """The record of an epoch by two loader workers, whose losses are 0 where each sample has its
    own record.
    """
    path = records(folder)
    job = lockstep.Job(
        model=identity,
        train_data=lambda: dataset(path),
        eval_data=lambda: Subset(ConcatDataset([dataset(path)]), range(0, RECORDS, 2)),
        loss=nn.MSELoss(),
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.0),
        batch_size=64,
        epochs=1,
        loader_workers=2,
    )
    devices = "1xcpu" if strategy == "single" else "2xcpu"
    run = lockstep.train(job, strategy=strategy, devices=devices, folder=folder)
    record: dict[str, Any] = json.loads((run.folder / "metrics.jsonl").read_text().splitlines()[-1])
    return record


@pytest.mark.parametrize("strategy", ["single", "dp", "ddp"])
def test_a_dataset_that_opens_its_file_when_it_is_made_gives_its_own_records(
    strategy: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    record = trained(strategy, Records, tmp_path)
    assert (record["train_loss"], record["eval_loss"]) == (0, 0)
    told = " ".join("".join(capfd.readouterr()).split())
    assert told.count(f"train_data: {NOTE}") == told.count(f"eval_data: {NOTE}") == 1


def test_workers_take_a_copy_of_a_dataset_whose_getstate_leaves_its_file_out(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    record = trained("single", LeavesOut, tmp_path)
    assert (record["train_loss"], record["eval_loss"]) == (0, 0)
    assert "open file" not in "".join(capfd.readouterr())


class ByWhom(Records):
    """Sample i is (the process that fetches it, i)."""

    def __getitem__(self, index: int) -> Any:
        return os.getpid(), index


def is_fetched_here(dataset: Any) -> bool:
    loader = Loader(dataset, batch_size=64, workers=1)
    try:
        batch = next(loader.epoch(0))
        return {int(process) for process in batch.parts[0].inputs} == {os.getpid()}
    finally:
        loader.close()


class Reader:
    def __init__(self, file: Any) -> None:
        self.file = file

    def close(self) -> None:
        """Leave what it reads open."""


class H5File:
    """An open file as h5py has it: without a number, and true as long as it is open."""

    __module__ = "h5py._hl.files"

    def close(self) -> None:
        """Stay open."""


@pytest.mark.parametrize(
    "kind", ["a file in a list", "a zip archive of a reader", "a database", "a socket", "h5py"]
)
def test_open_files_are_found_among_attributes_of_attributes(kind: str, tmp_path: Path) -> None:
    path = records(tmp_path)
    with contextlib.ExitStack() as stack:
        dataset = ByWhom(path)
        stack.enter_context(dataset.file)
        if kind == "a file in a list":
            dataset.file = Reader([0, (dataset.file,)])
        elif kind == "a zip archive of a reader":
            with zipfile.ZipFile(tmp_path / "archive", "w") as archive:
                archive.writestr("name", "text")
            dataset.file = Reader(
                {"zip": stack.enter_context(zipfile.ZipFile(tmp_path / "archive"))}
            )
        elif kind == "a database":
            dataset.file = stack.enter_context(
                contextlib.closing(sqlite3.connect(tmp_path / "data"))
            )
        elif kind == "h5py":
            dataset.file = H5File()
        else:
            dataset.file = stack.enter_context(socket.socket())
        with pytest.warns(
            UserWarning, match="is an open file, and loader workers would share its position"
        ):
            assert is_fetched_here(dataset)


def test_closed_files_logs_and_files_in_memory_leave_workers(tmp_path: Path) -> None:
    dataset = ByWhom(records(tmp_path))
    dataset.file.close()
    with open(tmp_path / "log", "w") as log:
        dataset.others = [
            log,
            io.BytesIO(),
            sys.__stderr__,
            logging.getLogger(),
            multiprocessing.Queue(),
        ]  # type: ignore[attr-defined]
        assert not is_fetched_here(dataset)


def test_a_file_that_was_opened_before_workers_begin_is_found_then(tmp_path: Path) -> None:
    dataset = ByWhom(path := records(tmp_path))
    dataset.file.close()
    loader = Loader(dataset, batch_size=64, workers=1)
    with (
        open(path, "rb") as dataset.file,
        pytest.warns(UserWarning, match='attribute "file" is an open file'),
    ):
        next(loader.epoch(0))
    assert not loader._count
