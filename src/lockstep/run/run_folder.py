"""The folder of a run: private to the user, and readable without Lockstep.

::

    runs/digits-ddp-20261121-093000/
      config.json          the job, its settings, the strategy, the devices
      metrics.jsonl        a line for each epoch, also one that ended early, and for each log and
                           evaluation in between
      ranks/1.log          what ranks other than 0 printed
      profile/             with ``--profile``: a trace for each rank, and ``summary.json``
      model.safetensors    the final weights, under one-device names
      best.safetensors     those of the best evaluation: the lowest loss, or the job's best
      checkpoints/step-N/  what ``--resume`` needs (see ``lockstep.checkpoint``)
      audit/               with ``--audit``: the samples of each step
      summary.json         how it ended
      failure.json         why it failed, if it did since it last began
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import itertools
import json
import os
import re
import shutil
import socket
import time
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

from lockstep.errors import FolderError, SaveError
from lockstep.tensors.new_file import not_followed, write_over

_CHECKPOINT = re.compile(r"step-\d+|\.step-\d+\.before")
"""The second is of a death between two renames."""


_ENDING = 5.0
"""Seconds in which a process that was killed has ended all that it had started."""


def json_text(values: Any) -> str:
    """Return a JSON text for people too; null stands for a number that JSON lacks (NaN)."""
    text = json.dumps(values, default=str)
    finite = json.loads(text, parse_constant=lambda word: None)
    return json.dumps(finite, indent=2) + "\n"


_CONFIG = {
    "job",
    "file",
    "sources",
    "set",
    "given",
    "settings",
    "strategy",
    "strategy_settings",
    "devices",
    "resumed",
}
"""What is read of ``config.json``."""


class RunFolder:
    """The files of one run, by name."""

    def __init__(self, path: str | Path) -> None:
        self.path = path = Path(path)
        self.config = path / "config.json"
        self.metrics = path / "metrics.jsonl"
        self.model = path / "model.safetensors"
        self.best = path / "best.safetensors"
        self.checkpoints = path / "checkpoints"
        self.audit = path / "audit"
        self.summary = path / "summary.json"
        self.failure = path / "failure.json"
        self.profile = path / "profile"
        # The last record that this process wrote, and where it begins.
        self._last: tuple[dict[str, Any], int] | None = None

    @property
    def is_resumable(self) -> bool:
        """Whether something was saved from which the run can go on."""
        names = [path.name for path in self.checkpoints.glob("*")]
        return any(map(_CHECKPOINT.fullmatch, names))

    def written_at(self, path: Path) -> int | None:
        """When one of the files was last written; None where it isn't there."""
        try:
            return path.stat().st_mtime_ns
        except OSError:
            return None

    @contextlib.contextmanager
    def held(self) -> Iterator[None]:
        """Keep other processes from training in this folder meanwhile.

        Raises:
            FolderError: another one does.
        """
        path = self.path / ".lock"
        with contextlib.ExitStack() as stack:
            # A file system without locks has none; a full disk is reported when something is
            # written.
            with contextlib.suppress(OSError):
                file = stack.enter_context(open(path, "a+", opener=not_followed))
                self._lock(file)
                stack.callback(_remove, path)
                file.truncate(0)
                os.write(file.fileno(), f"{os.getpid()} on {socket.gethostname()}".encode())
            yield

    def _lock(self, file: IO[str]) -> None:
        """Lock an open file; the system frees it however this process ends.

        The process that holds it may have been killed: what it had started ends a little later.
        """
        end = time.monotonic() + _ENDING
        while time.monotonic() < end:
            with contextlib.suppress(BlockingIOError):
                return fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            time.sleep(0.05)
        file.seek(0)
        who = f"process {file.read()} is training in this folder"
        raise FolderError(f"{self.path}: {who}: wait for it, or stop it")

    @classmethod
    def new(cls, parent: str | Path, name: str) -> RunFolder:
        """Make a folder named after the run and the time.

        Raises:
            FolderError: it can't be made.
        """
        first = path = Path(parent) / f"{name}-{time.strftime('%Y%m%d-%H%M%S')}"
        for attempt in itertools.count(2):
            try:
                path.parent.mkdir(parents=True, exist_ok=True)
                path.mkdir(mode=0o700)
                break
            except FileExistsError:
                if not path.parent.is_dir():
                    text = f"{path.parent}: not a folder, so no run can be kept there"
                    raise FolderError(text) from None
                path = first.with_name(f"{first.name}-{attempt}")
            except OSError as error:
                raise FolderError(
                    f"{path}: the run's folder can't be made: {error.strerror}; choose another "
                    "with --folder"
                ) from error
        return cls(path)

    @classmethod
    def existing(cls, path: str | Path) -> RunFolder:
        """Return the folder of a run that was.

        Raises:
            FolderError: there is none.
        """
        folder = cls(path)
        if not os.path.isfile(folder.config):
            why = "it is a file" if os.path.exists(path) else "there is no such folder"
            if os.path.isdir(path):
                why = "it has no config.json" if os.access(path, os.X_OK) else "it can't be read"
            fix = _newest_in(folder.path.parent)
            raise FolderError(f"{path}: no run is kept there ({why})", fix=fix)
        return folder

    def write_json(self, path: Path, value: Any) -> None:
        """Write a JSON file for people too: indented, values that JSON has no type for as text.

        Raises:
            FolderError: it can't be written.
        """
        try:
            write_over(path, json.dumps(value, indent=2, default=str) + "\n")
        except OSError as error:
            raise FolderError(
                f"{path}: can't be written: {error.strerror}; choose another folder with --folder"
            ) from error

    def read_json(self, path: Path) -> dict[str, Any]:
        """Read one of the run's JSON files.

        Raises:
            FolderError: it isn't there, isn't a JSON object, or lacks something.
        """
        try:
            value = json.loads(path.read_text())
        except (OSError, ValueError, RecursionError) as error:
            raise FolderError(f"{path}: can't be read ({error})") from error
        other = "it is damaged, or Lockstep didn't write it: take another run"
        if not isinstance(value, dict):
            raise FolderError(f"{path}: it isn't a JSON object: {other}")
        missing = _CONFIG - value.keys() if path == self.config else ()
        if missing:
            raise FolderError(f"{path}: without {', '.join(sorted(missing))}: {other}")
        return value

    def add_metrics(self, record: dict[str, Any]) -> None:
        """Append a record of a step; one of the same step as the last is put together with that,
        and wins.

        Raises:
            SaveError: it can't be written.
        """
        try:
            with open(self.metrics, "a+", opener=not_followed) as file:
                start = file.tell()
                if self._last is not None and self._last[0]["step"] == record["step"]:
                    record, start = {**self._last[0], **record}, self._last[1]
                    file.truncate(start)
                file.write(json.dumps(record, default=str) + "\n")
            self._last = record, start
        except OSError as error:
            is_full = error.errno in (errno.ENOSPC, errno.EDQUOT)
            why = "the disk is full" if is_full else error.strerror
            raise SaveError(
                f"{self.metrics}: could not be written: {why}; the checkpoints of before are kept"
            ) from error

    def read_metrics(self) -> list[dict[str, Any]]:
        """Return the records so far, without lines that were cut off as they were written."""
        if not self.metrics.is_file():
            return []
        records = []
        for line in self.metrics.read_text(errors="replace").splitlines():
            with contextlib.suppress(ValueError, RecursionError):
                record = json.loads(line)
                if isinstance(record, dict) and isinstance(record.get("step"), int):
                    records.append(record)
        return records

    def keep_metrics(self, step: int, last: dict[str, Any] | None) -> int:
        """Keep the records up to a step, the last one being ``last``; later ones are written again.

        Gives how many of them are of epochs.
        """
        kept = {record["step"]: record for record in self.read_metrics() if record["step"] <= step}
        if last is not None:
            kept[last["step"]] = {**kept.get(last["step"], {}), **last}
        if not kept and not os.path.lexists(self.metrics):
            return 0
        lines = [json.dumps(kept[step], default=str) + "\n" for step in sorted(kept)]
        if lines:
            self._last = kept[max(kept)], len("".join(lines[:-1]).encode())
        try:
            write_over(self.metrics, "".join(lines))
        except OSError as error:
            raise FolderError(f"{self.metrics}: can't be written: {error.strerror}") from error
        return sum("train_loss" in record for record in kept.values())

    def remove(self) -> None:
        """Take the folder away: nothing was trained."""
        shutil.rmtree(self.path, ignore_errors=True)


def _newest_in(folder: Path) -> str:
    """Name the newest run of a folder of runs; "" where there is none."""
    configs = filter(Path.is_file, folder.glob("*/config.json"))
    times = {config.stat().st_mtime: config.parent for config in configs}
    return f"the newest run in {folder} is {times[max(times)].name}" if times else ""


def _remove(path: Path) -> None:
    """Remove a file; one on a disk that has become read-only stays."""
    with contextlib.suppress(OSError):
        path.unlink()
