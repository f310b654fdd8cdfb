"""Tensors of which each rank has some rows, in a checkpoint."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from lockstep import launch
from lockstep.checkpoint.folder import CheckpointFolder
from lockstep.checkpoint.index import Index, Reader
from lockstep.checkpoint.writer import Writer
from lockstep.launch.world import World
from lockstep.tensors.row_shard import RowShard

WHOLE = {"even": torch.arange(14.0).reshape(7, 2), "odd": torch.arange(7.0) + 100}
SIZES = {"even": (3, 3, 1), "odd": (3, 4, 0)}


def write(world: World, folder: str) -> bool:
    writer = Writer(Path(folder), world, 1)
    shards = {
        name: RowShard(WHOLE[name].split(SIZES[name])[world.rank], SIZES[name], world.rank)
        for name in WHOLE
    }
    shared = writer.is_shared
    writer.save(1, {"model": {**shards, "bias": torch.ones(3)}, "step": 1}, {"step": 1})
    writer.finish()
    return shared


class Noted:
    """A file, or a slice of one, that notes the bytes that are read."""

    def __init__(self, read: Any, noted: list[int]) -> None:
        self.read = read
        self.noted = noted

    def get_slice(self, name: str) -> Noted:
        return Noted(self.read.get_slice(name), self.noted)

    def __getitem__(self, rows: slice) -> torch.Tensor:
        found = self.read[rows]
        self.noted.append(found.nbytes)
        return found


def test_each_rank_writes_its_rows_and_other_ranks_read_theirs_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert launch(write, devices="3xcpu", args=(str(tmp_path),)) == [True] * 3
    ((path, index),) = CheckpointFolder(tmp_path).whole(lambda said: None)
    state = index.state(path)
    for name, expected in {**WHOLE, "bias": torch.ones(3)}.items():
        assert torch.equal(state["model"][name], expected)

    def split(name: str, shape: list[int]) -> tuple[tuple[int, ...], int] | None:
        return None if name == "model/bias" else ((5, 2), 1)

    noted: list[int] = []
    file_of = Reader._file
    monkeypatch.setattr(Reader, "_file", lambda self, part: Noted(file_of(self, part), noted))
    with Reader(Index.read(path), path, split) as reader:
        found = {name: reader[f"model/{name}"] for name in WHOLE}
    assert sum(noted) == sum(its[5:].nbytes for its in WHOLE.values())
    for name, expected in WHOLE.items():
        assert torch.equal(found[name].local, expected[5:]) and found[name].shape == expected.shape
