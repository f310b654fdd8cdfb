"""Writing checkpoints while the training goes on: it waits for a copy in memory only.

::

    training   step | copy of this rank's part | step | step | step ...
    thread                                     | write the part | (rank 0) wait for the others' | index, rename

The copy goes to buffers that are kept from one save to the next: new memory would cost as much again to be touched.
Threads must not meet in collectives, so each rank leaves word beside its part: ``.1.done``, or ``.1.failed-28``
(the system's error number; an empty file, for which a full disk has room).
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import shutil
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

from lockstep.checkpoint.folder import CheckpointFolder
from lockstep.checkpoint.index import Index, Rows, part_name, shared_out, table_of
from lockstep.checkpoint.safe_file import could_not_write, write_tensors
from lockstep.errors import SaveError
from lockstep.launch.world import World
from lockstep.tensors.new_file import opened_new
from lockstep.tensors.state_tree import encoded

_LOOK = 0.01
"""Seconds between rank 0's looks at whether the others' parts are there."""

_OTHERS = 5.0
"""Seconds that others have to end their parts of a save, where something has failed."""

_ON_ALL = ("model/", "optimizer/")
"""Begins of the names of tensors that all ranks have; others are rank 0's."""


class Writer:
    """Writes the checkpoints of one training; every rank has one, and its methods are called on all of them together.

    Args:
        folder: of the checkpoints, as rank 0 sees it.
        world: the ranks.
        keep: how many are kept.
        alike: whether every rank has the same state, so that they share it out; else rank 0 writes all of it.
    """

    def __init__(self, folder: Path, world: World, keep: int, *, alike: bool = True) -> None:
        self._checkpoints = CheckpointFolder(folder)
        self._world, self._keep, self._alike = world, keep, alike
        self._buffers: dict[str, torch.Tensor] = {}
        self._thread: threading.Thread | None = None
        self._error: SaveError | None = None
        self._see: list[int] | None = None

    def save(
        self, step: int, state: Mapping[str, Any], about: Mapping[str, Any], before: Callable[[], None] | None = None
    ) -> None:
        """Begin to write a checkpoint; the one before is waited for.

        Args:
            step: its number.
            state: under one-device names; what is no tensor is rank 0's.
            about: a few plain values to list it by.
            before: called in rank 0's thread before the checkpoint gets its name.

        Raises:
            SaveError: it, or the one before, can't be written.
            InputError: something in the state can't be.
        """
        self.finish()
        tree, tensors = encoded(dict(state))
        told = self._world.gather_objects((self._made(step), _print(tensors)))
        beside = told[0][0]
        if not isinstance(beside, Path):
            assert beside is not None
            raise beside
        if self._see is None:
            sees = self._world.gather_objects(beside.is_dir())
            self._see = [rank for rank, does in enumerate(sees) if does]
        ranks = self._see if self._alike and len({form for _, form in told}) == 1 else [0]
        same = {name: tensor for name, tensor in tensors.items() if name.startswith(_ON_ALL)}
        rows = {name: [Rows(0)] for name in tensors} | shared_out(same, len(ranks))
        if self._world.rank not in ranks:
            return
        part = ranks.index(self._world.rank)
        mine = {name: one.of(tensors[name]) for name, of in rows.items() for one in of if one.part == part}
        self._buffers = {name: self._buffer(name, source) for name, source in mine.items()}
        for name, source in mine.items():
            self._buffers[name].copy_(source, non_blocking=True)
        devices = {source.device for source in mine.values() if source.device.type != "cpu"}
        queued = [torch.accelerator.current_stream(device).record_event() for device in devices]
        index = Index({}, table_of(tensors, rows), tree, dict(about)) if part == 0 else None

        def write() -> None:
            try:
                for event in queued:
                    event.synchronize()
                self._write_part(beside, part, len(ranks))
                if index is not None:
                    if before is not None:
                        before()
                    index.files = self._files(beside, len(ranks))
                    index.write(beside)
                    self._checkpoints.put(beside, step, self._keep)
            except Exception as error:
                self._give_up(beside, part, len(ranks), error)

        self._thread = threading.Thread(target=write, name="checkpoint", daemon=True)
        self._thread.start()

    def check(self) -> None:
        """Raise where the last one can't be written; it is not waited for.

        Raises:
            SaveError: with why.
        """
        if self._error is not None:
            self.finish()

    def finish(self) -> None:
        """Wait until the last one has its name, or for this rank's part of it.

        Raises:
            SaveError: it could not be written. (Rank 0 raises it for all.)
        """
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        if self._error is not None:
            error, self._error = self._error, None
            raise error

    def settle(self) -> None:
        """After something else has failed: let what was copied be written, for some seconds."""
        if self._thread is not None:
            self._thread.join(2 * _OTHERS)

    def _made(self, step: int) -> Path | SaveError | None:
        """On rank 0 the folder to write to, or why there is none."""
        if not self._world.is_first:
            return None
        beside = self._checkpoints.path.resolve() / f".step-{step}-{os.getpid()}-{time.monotonic_ns()}.part"
        try:
            self._checkpoints.clear()
            beside.mkdir(parents=True, mode=0o700)
        except OSError as error:
            return self._failed(error)
        return beside

    def _failed(self, error: Exception) -> SaveError:
        if isinstance(error, SaveError):
            return error
        newest = self._checkpoints.steps()[:1]
        kept = "".join(f"the checkpoint of step {step}" for step in newest)
        return could_not_write(self._checkpoints.path, error, kept, resumable=bool(newest))

    def _buffer(self, name: str, source: torch.Tensor) -> torch.Tensor:
        kept = self._buffers.get(name)
        if kept is not None and kept.shape == source.shape and kept.dtype == source.dtype:
            return kept
        return torch.empty(source.shape, dtype=source.dtype, pin_memory=source.is_cuda)

    # ---- in the thread ----------------------------------------------------------------------------------------------

    def _write_part(self, beside: Path, part: int, parts: int) -> None:
        whole = write_tensors(beside / part_name(part, parts), self._buffers, {"format": "pt"})
        with opened_new(beside / f".{part}.part") as file:
            file.write(json.dumps(whole).encode())
        (beside / f".{part}.part").rename(beside / f".{part}.done")

    def _files(self, beside: Path, parts: int) -> dict[str, Any]:
        """What the ranks have said of their files, as soon as all have.

        Raises:
            OSError: one could not write its file.
        """
        left = set(range(parts))
        files: dict[int, Any] = {}
        while left:
            for part in sorted(left):
                for failed in beside.glob(f".{part}.failed-*"):
                    number = int(failed.name.rpartition("-")[2])
                    raise OSError(number, os.strerror(number))
                if (done := beside / f".{part}.done").exists():
                    files[part] = json.loads(done.read_text())
                    done.unlink()
                    left.remove(part)
            if left:
                time.sleep(_LOOK)
        return {part_name(part, parts): files[part] for part in range(parts)}

    def _give_up(self, beside: Path, part: int, parts: int, error: Exception) -> None:
        """Take away what was written. Other ranks than 0 leave word for it to raise, and raise where they can't."""
        try:
            if part == 0:
                self._error = self._failed(error)
                end = time.monotonic() + _OTHERS
                while (
                    time.monotonic() < end and len([*beside.glob(".*.done"), *beside.glob(".*.failed-*")]) < parts - 1
                ):
                    time.sleep(_LOOK)
                shutil.rmtree(beside, ignore_errors=True)
            elif beside.is_dir():  # else rank 0 has given up
                (beside / part_name(part, parts)).unlink(missing_ok=True)
                (beside / f".{part}.failed-{getattr(error, 'errno', None) or errno.EIO}").touch()
        except OSError:
            self._error = self._failed(error)


def _print(tensors: Mapping[str, torch.Tensor]) -> bytes:
    """A hash of names, types and shapes."""
    text = repr([(name, tensor.dtype, tuple(tensor.shape)) for name, tensor in tensors.items()])
    return hashlib.blake2b(text.encode(), digest_size=16).digest()
