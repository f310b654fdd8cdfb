"""Writing checkpoints while the training goes on: it waits for a copy in memory only.

::

    training  step | copy of this rank's part | step | step | step ...
    thread                                    | write the part | (rank 0) wait for the others' | index, rename

The copy goes to buffers that are kept from one save to the next: new memory would cost as much
again to be touched. Threads must not meet in collectives, so each rank leaves word beside its part:
``.1.done``, or ``.1.failed-28`` (the system's error number; an empty file, for which a full disk
has room).
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import shutil
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from lockstep.checkpoint.checksummed_file import could_not_write, write_tensors
from lockstep.checkpoint.folder import CheckpointFolder
from lockstep.checkpoint.index import Index, Rows, part_name, shared_out, table_of
from lockstep.errors import SaveError
from lockstep.launch.world import World
from lockstep.tensors.new_file import opened_new
from lockstep.tensors.pytree import may_pin
from lockstep.tensors.row_shard import RowShard
from lockstep.tensors.state_tree import encoded

_LOOK = 0.01
"""Seconds between rank 0's looks at whether the others' parts are there."""

_OTHERS = 5.0
"""Seconds that a part of a save may take to begin, or to end where something else has failed."""

_ON_ALL = ("model/", "optimizer/")
"""Prefixes of the names of tensors that all ranks have; others are rank 0's, unless they are rows."""


@dataclass(frozen=True)
class _Part:
    """One rank's part of a checkpoint.

    Attributes:
        folder: where the parts are written.
        number: of this part.
        count: of all parts.
    """

    folder: Path
    number: int
    count: int

    @property
    def path(self) -> Path:
        """Return the file of tensors of this part."""
        return self.folder / part_name(self.number, self.count)

    def word(self, ending: str) -> Path:
        """Return the file by which this rank leaves word: ``.1.done``, ``.1.failed-28``."""
        return self.folder / f".{self.number}.{ending}"


class Writer:
    """Writes the checkpoints of one training; every rank has one, and its methods are called on all
    of them together.

    Args:
        folder: of the checkpoints, as rank 0 sees it.
        world: the ranks.
        keep: how many are kept.
        alike: whether every rank has the same state, so that they share it out; else rank 0 writes
            all of it.
    """

    def __init__(self, folder: Path, world: World, keep: int, *, alike: bool = True) -> None:
        self._checkpoints = CheckpointFolder(folder)
        self._world = world
        self._keep = keep
        self._alike = alike
        self._buffers: dict[str, torch.Tensor] = {}
        self._thread: threading.Thread | None = None
        self._error: SaveError | None = None
        self._see: list[int] | None = None
        self._folder: Path | None = None
        self._name = ""
        self._number = 0

    def save(
        self,
        step: int,
        state: Mapping[str, Any],
        about: Mapping[str, Any],
        before: Callable[[], None] | None = None,
    ) -> None:
        """Begin to write a checkpoint; the one before is waited for.

        Args:
            step: its number.
            state: under one-device names; what is no tensor is rank 0's. Where ``is_shared``, a
                tensor may be the rows that this rank has of it.
            about: a few plain values to list it by.
            before: called in rank 0's thread before the checkpoint gets its name.

        Raises:
            SaveError: it, or the one before, can't be written.
            InputError: something in the state can't be.
        """
        self.finish()
        tree, tensors = encoded(dict(state))
        ranks = self._writing() if self._alike else [0]
        folder = self._made(step)
        rows = {name: [Rows(0)] for name in tensors}
        rows |= shared_out(_on_all_ranks(tensors), len(ranks))
        if self._world.rank not in ranks:
            return
        part = _Part(folder, ranks.index(self._world.rank), len(ranks))
        mine: dict[str, torch.Tensor] = {}
        for name, pieces in rows.items():
            for piece in pieces:
                if piece.part == part.number:
                    mine[name] = piece.of(tensors[name])
        copied = self._copy(mine)
        index = Index({}, table_of(tensors, rows), tree, dict(about))

        def write() -> None:
            """Write this rank's part, and on rank 0 what makes the checkpoint whole."""
            _step_back()
            try:
                for event in copied:
                    event.synchronize()
                self._write_part(part)
                if part.number == 0:
                    if before is not None:
                        before()
                    index.files = self._files(part)
                    index.write(folder)
                    self._checkpoints.put(folder, step, self._keep)
            except Exception as error:
                self._give_up(part, error)

        self._thread = threading.Thread(target=write, name="checkpoint", daemon=True)
        self._thread.start()

    def _copy(self, tensors: Mapping[str, torch.Tensor]) -> list[torch.Event]:
        """Copy tensors to the buffers.

        Returns:
            An event for each accelerator, which comes when it has copied its tensors.
        """
        buffers = {}
        devices = set()
        for name, source in tensors.items():
            buffers[name] = self._buffer(name, source)
            buffers[name].copy_(source, non_blocking=True)
            if source.device.type != "cpu":
                devices.add(source.device)
        self._buffers = buffers

        events = []
        for device in devices:
            stream = torch.accelerator.current_stream(device)
            events.append(stream.record_event())
        return events

    def check(self) -> None:
        """Raise the error of the last save, if it has failed; it is not waited for.

        Raises:
            SaveError: it could not be written.
        """
        if self._error is not None:
            self.finish()

    def finish(self) -> None:
        """Wait for the last save: on rank 0 until it has its name, else for this rank's part.

        Raises:
            SaveError: it could not be written. (Rank 0 raises it for all.)
        """
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        error = self._error
        if error is not None:
            self._error = None
            raise error

    def settle(self) -> None:
        """Let what was copied be written, for some seconds, after something else has failed."""
        if self._thread is not None:
            self._thread.join(2 * _OTHERS)

    def _made(self, step: int) -> Path:
        """Return the folder to write to, which rank 0 makes, under a name that no other start of
        the run has used.

        Raises:
            SaveError: it can't be made.
        """
        if self._folder is None:
            name = f"{os.getpid()}-{time.time_ns()}"
            found = self._world.broadcast_object((self._checkpoints.path.resolve(), name))
            self._folder, self._name = found
        beside = self._folder / f".step-{step}-{self._name}-{self._number}.part"
        self._number += 1
        if self._world.is_first:
            try:
                self._checkpoints.clear()
                beside.mkdir(parents=True, mode=0o700)
            except OSError as error:
                raise self._failed(error) from error
        return beside

    def _writing(self) -> list[int]:
        """Return the ranks that see rank 0's folder."""
        if self._see is None:
            beside = self._made(0)
            self._world.barrier()
            sees = self._world.gather_objects(beside.is_dir())
            self._see = [rank for rank in range(self._world.size) if sees[rank]]
            if self._world.is_first:
                beside.rmdir()
        return self._see

    @property
    def is_shared(self) -> bool:
        """Return whether every rank writes its part of a state; every rank asks at the same time."""
        return self._alike and len(self._writing()) == self._world.size

    def _failed(self, error: Exception) -> SaveError:
        """Return the error for what was raised in the thread, with what there is to resume from."""
        if isinstance(error, SaveError):
            return error
        steps = self._checkpoints.steps()
        kept = f"the checkpoint of step {steps[0]}" if steps else ""
        return could_not_write(self._checkpoints.path, error, kept, resumable=bool(steps))

    def _buffer(self, name: str, source: torch.Tensor) -> torch.Tensor:
        """Return memory on the CPU for a tensor: that of the last save, if it fits."""
        kept = self._buffers.get(name)
        if kept is not None and kept.shape == source.shape and kept.dtype == source.dtype:
            return kept
        is_pinned = may_pin(source.device)
        return torch.empty(source.shape, dtype=source.dtype, pin_memory=is_pinned)

    # ---- in the thread ---------------------------------------------------------------------------

    def _write_part(self, part: _Part) -> None:
        """Write this rank's file, then leave word with its size and hash.

        Raises:
            OSError: it can't be written.
        """
        end = time.monotonic() + _OTHERS
        while not part.folder.is_dir() and time.monotonic() < end:  # rank 0 makes it
            time.sleep(_LOOK)
        written = write_tensors(part.path, self._buffers, {"format": "pt"})
        with opened_new(part.word("part")) as file:
            file.write(json.dumps(written).encode())
        part.word("part").rename(part.word("done"))

    def _files(self, mine: _Part) -> dict[str, Any]:
        """Return sizes and hashes of the files of all ranks, as soon as all are written.

        Raises:
            OSError: one could not write its file.
        """
        files: dict[str, Any] = {}
        for number in range(mine.count):
            part = replace(mine, number=number)
            while not part.word("done").exists():
                for failed in mine.folder.glob(".*.failed-*"):
                    code = int(failed.name.rpartition("-")[2])
                    raise OSError(code, os.strerror(code))
                time.sleep(_LOOK)
            files[part.path.name] = json.loads(part.word("done").read_text())
        for number in range(mine.count):
            replace(mine, number=number).word("done").unlink()
        return files

    def _give_up(self, part: _Part, error: Exception) -> None:
        """Remove what was written. Other ranks than 0 leave word for it to raise, and raise where
        they can't.
        """
        folder = part.folder
        try:
            if part.number == 0:
                self._error = self._failed(error)
                shutil.rmtree(folder, ignore_errors=True)
            elif folder.is_dir():  # else rank 0 has given up
                part.path.unlink(missing_ok=True)
                number = getattr(error, "errno", None) or errno.EIO
                part.word(f"failed-{number}").touch()
        except OSError:
            self._error = self._failed(error)


def _on_all_ranks(tensors: Mapping[str, Any]) -> dict[str, Any]:
    """Return the tensors that all ranks have, or have rows of."""
    found = {}
    for name, tensor in tensors.items():
        if name.startswith(_ON_ALL) or isinstance(tensor, RowShard):
            found[name] = tensor
    return found


def _step_back() -> None:
    """Give this thread the lowest priority, so that computing goes first (on Linux)."""
    with contextlib.suppress(OSError):
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), 19)
