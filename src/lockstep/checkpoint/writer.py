"""Writing checkpoints while the training goes on: it waits for a copy in memory only.

::

    training  step | copy of this rank's part | step | step | step ...
    thread                                    | write the part | (rank 0) wait for the others' | index, rename

Rank 0 writes all that isn't in shards. The copy goes to buffers that are kept from one save to the
next: new memory would cost as much again to be touched. Threads must not meet in collectives, so
ranks leave word in the store.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import json
import os
import shutil
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from lockstep.checkpoint.checksummed_file import could_not_write, write_tensors
from lockstep.checkpoint.folder import CheckpointFolder
from lockstep.checkpoint.index import Index, part_name, table_of
from lockstep.errors import SaveError
from lockstep.launch.world import World
from lockstep.tensors.pytree import may_pin
from lockstep.tensors.row_shard import RowShard
from lockstep.tensors.state_tree import encoded

_LOOK = 0.01
"""Seconds between rank 0's looks at whether the others' parts are there."""

_SETTLES = 10.0
"""Seconds that a save may take to end where something else has failed."""


class Writer:
    """Writes the checkpoints of one training; every rank has one, and its methods are called on all
    of them together.

    Args:
        folder: of the checkpoints, as rank 0 sees it.
        world: the ranks.
        keep: how many are kept.
    """

    def __init__(self, folder: Path, world: World, keep: int) -> None:
        self._checkpoints = CheckpointFolder(folder)
        self._world = world
        self._keep = keep
        self._buffers: dict[str, torch.Tensor] = {}
        self._thread: threading.Thread | None = None
        self._error: SaveError | None = None

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
            state: under one-device names; it is rank 0's, but for the rows that a rank has of a
                tensor (where ``is_shared``).
            about: a few plain values to list it by.
            before: called in rank 0's thread before the checkpoint gets its name.

        Raises:
            SaveError: it, or the one before, can't be written.
            InputError: something in the state can't be.
        """
        self.finish()
        tree, tensors = encoded(dict(state))
        rank = self._world.rank
        has_rows = any(isinstance(tensor, RowShard) for tensor in tensors.values())
        if rank > 0 and not has_rows:
            return
        folder = self._made(step, together=has_rows)
        copied = self._copy(self._of_rank(tensors))
        parts = self._world.size if has_rows else 1
        index = Index({}, table_of(tensors), tree, dict(about))

        def write() -> None:
            """Write this rank's part, and on rank 0 what makes the checkpoint whole."""
            _step_back()
            try:
                for event in copied:
                    event.synchronize()
                path = folder / part_name(rank, parts)
                written = write_tensors(path, self._buffers, {"format": "pt"})
                if rank > 0:
                    self._leave_word(folder, list(written))
                    return
                if before is not None:
                    before()
                index.files = {path.name: written, **self._of_others(folder, parts)}
                index.write(folder)
                self._checkpoints.put(folder, step, self._keep)
            except Exception as error:
                if rank > 0:
                    self._leave_word(folder, getattr(error, "errno", None) or errno.EIO)
                else:
                    self._error = self._failed(error)
                    shutil.rmtree(folder, ignore_errors=True)

        self._thread = threading.Thread(target=write, name="checkpoint", daemon=True)
        self._thread.start()

    def _of_rank(self, tensors: Mapping[str, torch.Tensor | RowShard]) -> dict[str, torch.Tensor]:
        """Return what this rank writes: its rows, and on rank 0 what isn't in rows."""
        rank = self._world.rank
        mine = {}
        for name, tensor in tensors.items():
            if isinstance(tensor, RowShard):
                if tensor.sizes[rank]:
                    mine[name] = tensor.local
            elif rank == 0:
                mine[name] = tensor
        return mine

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

    def _buffer(self, name: str, source: torch.Tensor) -> torch.Tensor:
        """Return memory on the CPU for a tensor: that of the last save, if it fits."""
        kept = self._buffers.get(name)
        if kept is not None and kept.shape == source.shape and kept.dtype == source.dtype:
            return kept
        is_pinned = may_pin(source.device)
        return torch.empty(source.shape, dtype=source.dtype, pin_memory=is_pinned)

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
            self._thread.join(_SETTLES)

    def _made(self, step: int, *, together: bool) -> Path:
        """Return the folder to write to, which rank 0 makes, under a name that no other start of
        the run has used.

        Args:
            step: of the checkpoint.
            together: whether every rank calls this.

        Raises:
            SaveError: it can't be made.
        """
        name = f".step-{step}-{os.getpid()}-{time.time_ns()}.part"
        folder = self._checkpoints.path.resolve() / name
        made: Path | SaveError = folder
        if self._world.is_first:
            try:
                self._checkpoints.clear()
                folder.mkdir(parents=True, mode=0o700)
            except OSError as error:
                made = self._failed(error)
        if together:
            made = self._world.broadcast_object(made)
        if isinstance(made, SaveError):
            raise made
        return made

    @functools.cached_property
    def is_shared(self) -> bool:
        """Whether every rank sees rank 0's folder; every rank asks at the same time."""
        folder = self._made(0, together=True)
        sees = self._world.gather_objects(folder.is_dir())
        if self._world.is_first:
            folder.rmdir()
        return all(sees)

    def _failed(self, error: Exception) -> SaveError:
        """Return the error for what was raised in the thread, with what there is to resume from."""
        if isinstance(error, SaveError):
            return error
        steps = self._checkpoints.steps()
        kept = f"the checkpoint of step {steps[0]}" if steps else ""
        return could_not_write(self._checkpoints.path, error, kept, resumable=bool(steps))

    # ---- in the thread ---------------------------------------------------------------------------

    def _leave_word(self, folder: Path, word: Any) -> None:
        """Tell rank 0 size and hash of this rank's file, or the system's error number."""
        store = dist.distributed_c10d._get_default_store()
        store.set(f"{folder.name}/{self._world.rank}", json.dumps(word))

    def _of_others(self, folder: Path, parts: int) -> dict[str, Any]:
        """Return sizes and hashes of the files of the other ranks, as soon as all are written.

        Raises:
            OSError: one could not write its file.
        """
        files = {}
        for part in range(1, parts):
            key = f"{folder.name}/{part}"
            store = dist.distributed_c10d._get_default_store()
            while not store.check([key]):
                time.sleep(_LOOK)
            word = json.loads(store.get(key))
            if isinstance(word, int):
                raise OSError(word, os.strerror(word))
            files[part_name(part, parts)] = word
        return files


def _step_back() -> None:
    """Give this thread the lowest priority, so that computing goes first (on Linux)."""
    with contextlib.suppress(OSError):
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), 19)
