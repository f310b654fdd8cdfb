"""The checkpoints of a run: which there are, which are whole, how many are kept."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

from lockstep.checkpoint.index import Index
from lockstep.errors import FolderError

_STEP = re.compile(r"step-(\d+)")


class CheckpointFolder:
    """A folder of ``step-N`` folders; it needn't exist."""

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)

    def steps(self) -> list[int]:
        """The steps of which there is a checkpoint, newest first; damaged ones too."""
        try:
            names = os.listdir(self.path)
        except OSError:
            return []
        return sorted(
            (int(found[1]) for name in names if (found := _STEP.fullmatch(name))), reverse=True
        )

    def of_step(self, step: int) -> Path:
        """Where that one is."""
        return self.path / f"step-{step}"

    def whole(self, set_aside: Callable[[str], None]) -> Iterator[tuple[Path, Index]]:
        """Those that are as they were written, newest first.

        One that isn't is renamed, so that it is not looked at again, and ``set_aside`` is called
        with what is wrong.
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
        """The newest whole one.

        Raises:
            FolderError: there is none.
        """
        said: list[str] = []
        for replaced in self.path.glob(".step-*.before"):  # a death between two renames
            path = self.path / replaced.name[1:].removesuffix(".before")
            if not path.exists():
                replaced.rename(path)

        def say(what: str) -> None:
            said.append(what)
            set_aside(what)

        for found in self.whole(say):
            return found
        if said:
            raise FolderError(
                f"no checkpoint is whole: take another run, or begin anew ({'; '.join(said)})"
            )
        why = (
            "nothing was saved in that folder"
            if self.path.parent.is_dir()
            else "there is no such folder"
        )
        if aside := sorted(path.name for path in self.path.glob("step-*.damaged*")):
            why = f"{', '.join(aside)} were found damaged"
        raise FolderError(f"{self.path}: there is no checkpoint to resume from: {why}")

    def put(self, beside: Path, step: int, keep: int) -> None:
        """Give a folder that is whole its name, and take away all but the newest ``keep``, that
        one included.
        """
        path = self.of_step(step)
        if path.exists():
            path.rename(path.with_name(f".{path.name}.before"))
        beside.rename(path)
        _sync(self.path)
        for old in [s for s in self.steps() if s != step][keep - 1 :]:
            # Renamed first: half of it would look damaged.
            gone = free_name(self.path / f".step-{old}.old")
            with contextlib.suppress(OSError):
                self.of_step(old).rename(gone)
        self.clear()

    def clear(self) -> None:
        """Take away what is left of ones that were not finished, or are being taken away."""
        for path in [
            p for ending in ("part", "old*", "before") for p in self.path.glob(f".step-*.{ending}")
        ]:
            shutil.rmtree(path, ignore_errors=True)


def free_name(path: Path) -> Path:
    """This name, or with a number after it where it is taken."""
    number = 1
    free = path
    while free.exists():
        number += 1
        free = path.with_name(f"{path.name}-{number}")
    return free


def _sync(folder: Path) -> None:
    """Have the names in a folder on the disk."""
    with contextlib.suppress(OSError):
        number = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(number)
        finally:
            os.close(number)
