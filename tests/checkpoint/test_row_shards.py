"""Tensors of which each rank has some rows, in a checkpoint."""

from __future__ import annotations

from pathlib import Path

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


def test_each_rank_writes_its_rows_and_other_ranks_take_theirs_only(tmp_path: Path) -> None:
    assert launch(write, devices="3xcpu", args=(str(tmp_path),)) == [True] * 3
    ((path, index),) = CheckpointFolder(tmp_path).whole(lambda said: None)
    state = index.state(path)
    for name, expected in {**WHOLE, "bias": torch.ones(3)}.items():
        assert torch.equal(state["model"][name], expected)

    def split(name: str, shape: list[int]) -> tuple[tuple[int, ...], int] | None:
        return None if name == "model/bias" else ((5, 2), 1)

    reader = Reader(Index.read(path), path, split)
    found = {name: reader[f"model/{name}"] for name in WHOLE}
    for name, expected in WHOLE.items():
        assert torch.equal(found[name].local, expected[5:]) and found[name].shape == expected.shape
