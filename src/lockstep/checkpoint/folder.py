"""The checkpoints of a run: which there are, which are whole, how many are kept."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from lockstep.checkpoint.index import Index, Split
from lockstep.errors import FolderError, LockstepError
from lockstep.launch.world import World

_STEP = re.compile(r"step-(\d+)")


class CheckpointFolder:
    """A folder of ``step-N`` folders; it needn't exist."""

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)

    def steps(self) -> list[int]:
        """Return the steps that have a checkpoint, newest first; damaged ones too."""
        try:
            names = os.listdir(self.path)
        except OSError:
            return []
        steps = []
        for name in names:
            found = _STEP.fullmatch(name)
            if found:
                steps.append(int(found[1]))
        return sorted(steps, reverse=True)

    def of_step(self, step: int) -> Path:
        """Return where the checkpoint of a step is."""
        return self.path / f"step-{step}"

    def whole(self, set_aside: Callable[[str], None]) -> Iterator[tuple[Path, Index]]:
        """Yield the checkpoints that are as they were written, newest first.

        A damaged one is renamed, so that it is not read again, and ``set_aside`` is called with
        what is wrong.

        Args:
            set_aside: called with a line for each damaged one.
        """
        for step in self.steps():
            path = self.of_step(step)
            try:
                index = Index.read(path)
                index.check(path)
            except FolderError as error:
                aside = free_name(path.with_name(f"{path.name}.damaged"))
                with contextlib.suppress(OSError):
                    path.rename(aside)
                set_aside(f"{error}: that checkpoint is set aside as {aside.name}")
                continue
            yield path, index

    def newest(self, set_aside: Callable[[str], None]) -> tuple[Path, Index]:
        """Return the newest whole checkpoint, with the checkpoint's index.

        Args:
            set_aside: called with a line for each damaged one.

        Raises:
            FolderError: there is none.
        """
        for replaced in self.path.glob(".step-*.before"):  # a death between two renames
            path = self.path / replaced.name[1:].removesuffix(".before")
            if not path.exists():
                replaced.rename(path)
        damaged: list[str] = []

        def report(what: str) -> None:
            damaged.append(what)
            set_aside(what)

        for found in self.whole(report):
            return found
        if damaged:
            reasons = "; ".join(damaged)
            raise FolderError(
                f"all checkpoints are damaged: resume another run, or start a new one ({reasons})"
            )
        raise FolderError(f"{self.path}: there is no checkpoint to resume from")

    def put(self, beside: Path, step: int, keep: int) -> None:
        """Give a whole checkpoint its name, and remove older ones.

        Args:
            beside: the folder it was written to.
            step: its number.
            keep: how many are kept, this one included.
        """
        path = self.of_step(step)
        if path.exists():
            path.rename(path.with_name(f".{path.name}.before"))
        beside.rename(path)
        _sync(self.path)
        others = [other for other in self.steps() if other != step]
        for old in others[keep - 1 :]:
            # Renamed first: half of it would look damaged.
            gone = free_name(self.path / f".step-{old}.old")
            with contextlib.suppress(OSError):
                self.of_step(old).rename(gone)
        self.clear()

    def clear(self) -> None:
        """Remove what is left of checkpoints that were not finished, or are being removed."""
        for ending in ("part", "old*", "before"):
            for path in self.path.glob(f".step-*.{ending}"):
                shutil.rmtree(path, ignore_errors=True)


def load_newest(
    folder: Path, world: World, set_aside: Callable[[str], None], split: Split | None = None
) -> dict[str, Any]:
    """Read the newest whole checkpoint of a folder to the CPU; every rank calls this.

    Args:
        folder: of checkpoints, as rank 0 sees it. Where another rank doesn't, all of it is sent.
        world: the ranks.
        set_aside: called on rank 0 with a line for each checkpoint that is damaged.
        split: the tensors whose rows are shared out: this rank reads only its rows, where it sees
            the folder.

    Raises:
        FolderError: there is none.
    """
    found: tuple[Path, Index] | LockstepError | None = None
    if world.is_first:
        try:
            found = CheckpointFolder(folder.resolve()).newest(set_aside)
        except LockstepError as error:
            found = error
    found = world.broadcast_object(found)
    if not isinstance(found, tuple):
        assert found is not None
        raise found
    path, index = found
    if all(world.gather_objects(_is_there(path, index))):
        state: dict[str, Any] = index.state(path, split)
        return state
    return world.broadcast_object(index.state(path) if world.is_first else {})


def _is_there(path: Path, index: Index) -> bool:
    """Return whether this host sees that very checkpoint."""
    try:
        return Index.read(path).files == index.files
    except FolderError:
        return False


def free_name(path: Path) -> Path:
    """Return this name, or with a number after it where it is taken."""
    number = 1
    free = path
    while free.exists():
        number += 1
        free = path.with_name(f"{path.name}-{number}")
    return free


def _sync(folder: Path) -> None:
    """Wait until the names in a folder are on the disk."""
    with contextlib.suppress(OSError):
        number = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(number)
        finally:
            os.close(number)
