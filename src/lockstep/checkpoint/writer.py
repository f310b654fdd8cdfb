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
from lockstep.tensors.pytree import may_pin
from lockstep.tensors.row_shard import RowShard
from lockstep.tensors.state_tree import encoded

_LOOK = 0.01
"""Seconds between rank 0's looks at whether the others' parts are there."""

_OTHERS = 5.0
"""Seconds that others have to end their parts of a save, where something has failed."""

_ON_ALL = ("model/", "optimizer/")
"""Begins of the names of tensors that all ranks have; others are rank 0's, unless they are rows."""


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
        self._world, self._keep, self._alike = world, keep, alike
        self._buffers: dict[str, torch.Tensor] = {}
        self._thread: threading.Thread | None = None
        self._error: SaveError | None = None
        self._see: list[int] | None = None
        self._folder: Path | None = None
        self._name, self._number = "", 0

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
        beside = self._made(step)
        same = {
            n: tensor
            for n, tensor in tensors.items()
            if n.startswith(_ON_ALL) or isinstance(tensor, RowShard)
        }
        rows = {name: [Rows(0)] for name in tensors} | shared_out(same, len(ranks))
        if self._world.rank not in ranks:
            return
        part = ranks.index(self._world.rank)
        mine = {
            name: one.of(tensors[name])
            for name, of in rows.items()
            for one in of
            if one.part == part
        }
        self._buffers = {name: self._buffer(name, source) for name, source in mine.items()}
        for name, source in mine.items():
            self._buffers[name].copy_(source, non_blocking=True)
        devices = {source.device for source in mine.values() if source.device.type != "cpu"}
        queued = [torch.accelerator.current_stream(device).record_event() for device in devices]
        form = _print(same)
        index = Index({}, table_of(tensors, rows), tree, dict(about)) if part == 0 else None

        def write() -> None:
            _step_back()
            try:
                for event in queued:
                    event.synchronize()
                self._write_part(beside, part, len(ranks), form)
                if index is not None:
                    if before is not None:
                        before()
                    index.files = self._files(beside, len(ranks), form)
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

    def _made(self, step: int) -> Path:
        """The folder to write to, of a name that no other start of the run has used; rank 0 makes
        it.

        Raises:
            SaveError: it can't be made.
        """
        if self._folder is None:
            own = self._checkpoints.path.resolve(), f"{os.getpid()}-{time.time_ns()}"
            self._folder, self._name = self._world.broadcast_object(own)
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
        """The ranks that see rank 0's folder."""
        if self._see is None:
            beside = self._made(0)
            self._world.barrier()
            self._see = [
                rank
                for rank, does in enumerate(self._world.gather_objects(beside.is_dir()))
                if does
            ]
            if self._world.is_first:
                beside.rmdir()
        return self._see

    @property
    def is_shared(self) -> bool:
        """Whether every rank writes its part of a state; all of them ask at the same time."""
        return self._alike and len(self._writing()) == self._world.size

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
        return torch.empty(source.shape, dtype=source.dtype, pin_memory=may_pin(source.device))

    # ---- in the thread ---------------------------------------------------------------------------

    def _write_part(self, beside: Path, part: int, parts: int, form: str) -> None:
        end = time.monotonic() + _OTHERS
        while not beside.is_dir() and time.monotonic() < end:  # rank 0 makes it
            time.sleep(_LOOK)
        whole = [
            *write_tensors(beside / part_name(part, parts), self._buffers, {"format": "pt"}),
            form,
        ]
        with opened_new(beside / f".{part}.part") as file:
            file.write(json.dumps(whole).encode())
        (beside / f".{part}.part").rename(beside / f".{part}.done")

    def _files(self, beside: Path, parts: int, form: str) -> dict[str, Any]:
        """What the ranks have said of their files, as soon as all have.

        Raises:
            OSError: one could not write its file.
            SaveError: one has tensors of other names or shapes.
        """
        left = set(range(parts))
        files: dict[int, Any] = {}
        while left:
            for part in sorted(left):
                for failed in beside.glob(f".{part}.failed-*"):
                    number = int(failed.name.rpartition("-")[2])
                    raise OSError(number, os.strerror(number))
                if (done := beside / f".{part}.done").exists():
                    *files[part], its = json.loads(done.read_text())
                    if its != form:
                        raise SaveError(
                            f"{self._checkpoints.path}: rank {part} has other parameters than "
                            "rank 0, or states"
                        )
                    done.unlink()
                    left.remove(part)
            if left:
                time.sleep(_LOOK)
        return {part_name(part, parts): files[part] for part in range(parts)}

    def _give_up(self, beside: Path, part: int, parts: int, error: Exception) -> None:
        """Take away what was written. Other ranks than 0 leave word for it to raise, and raise
        where they can't.
        """
        try:
            if part == 0:
                self._error = self._failed(error)
                end = time.monotonic() + _OTHERS
                while (
                    time.monotonic() < end
                    and len([*beside.glob(".*.done"), *beside.glob(".*.failed-*")]) < parts - 1
                ):
                    time.sleep(_LOOK)
                shutil.rmtree(beside, ignore_errors=True)
            elif beside.is_dir():  # else rank 0 has given up
                (beside / part_name(part, parts)).unlink(missing_ok=True)
                (beside / f".{part}.failed-{getattr(error, 'errno', None) or errno.EIO}").touch()
        except OSError:
            self._error = self._failed(error)


def _step_back() -> None:
    """Let this thread have its core when the computing one doesn't want it, where the system can
    (Linux).
    """
    with contextlib.suppress(OSError):
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), 19)


def _print(tensors: Mapping[str, torch.Tensor | RowShard]) -> str:
    """A hash of names, types and shapes."""
    text = repr([(name, tensor.dtype, tuple(tensor.shape)) for name, tensor in tensors.items()])
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()
