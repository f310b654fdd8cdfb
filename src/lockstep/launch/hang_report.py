"""The report of a training without progress: which rank the others wait for, and where it is.

Each process has a thread that compares the process's step, collectives and beats (`World.beat`)
once a second with those of the last second. The training itself does nothing for that::

    30 s without progress, or ten of the longest pauses so far
                                 ──> each rank leaves its account in the store of the process group;
                                     the first of them reports
    ``timeout`` without progress ──> the run ends

The seconds are those in which this thread was awake, so a training that was suspended may go on.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import sys
import threading
import traceback
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple

import torch.distributed as dist
from torch.distributed import HashStore  # type: ignore[attr-defined]

from lockstep.errors import Lost, is_own_code
from lockstep.launch.world import COLLECTIVES, World

_LOOK = 1.0
"""Seconds between two looks."""

_ANSWERS = 2.5 * _LOOK
"""Seconds in which the other ranks leave their accounts."""

_PAUSES = 10
"""A report waits for as long as this many of the longest pauses so far, between two updates."""


class Account(NamedTuple):
    """What one rank is doing.

    Attributes:
        rank: its number.
        step: the step that it is in.
        collectives: how many it has begun.
        waits: what it waits for: ``"all_reduce 12"``, ``"backward"``; "" where it computes.
        seconds: since its last progress.
        where: the line of the person's code that it is at.
        stacks: of all its threads.
    """

    rank: int
    step: int
    collectives: int
    waits: str
    seconds: float
    where: str
    stacks: str = ""

    def line(self) -> str:
        """Return all of it but the stacks."""
        step = f"in step {self.step}" if self.step else "before the first step"
        waits = f", waits in {self.waits}" if self.waits else ""
        return f"{step}{waits}, at {self.where} for {self.seconds:.0f} s"


def account(world: World, seconds: float) -> Account:
    """Return the account of this process."""
    frames = sys._current_frames()
    training = frames.get(world.thread)
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    # those of replicas and stages, for which the training's own thread waits, are the first
    computing = [frames[one] for one in frames if names.get(one, "").startswith("lockstep ")]
    where = _where([*computing, training])
    waits = _waits(training, world)
    stacks = ""
    for one, frame in frames.items():
        text = "".join(traceback.format_stack(frame))
        stacks += f"\n==== rank {world.rank}, {names.get(one)}\n{text}"
    return Account(world.rank, world.step, world.collectives, waits, seconds, where, stacks)


def _stack(frame: FrameType | None) -> Iterator[FrameType]:
    """Yield the frames of a thread, from the innermost one on."""
    while frame is not None:
        yield frame
        frame = frame.f_back


def _waits(frame: FrameType | None, world: World) -> str:
    """Return what the training's thread waits for; "" where it computes."""
    for one in _stack(frame):
        file, name = one.f_code.co_filename, one.f_code.co_name
        if name in COLLECTIVES and file.endswith("launch/world.py"):
            return f"{name} {world.collectives}"
    if frame is None:
        return ""
    if frame.f_code.co_name == "_engine_run_backward":
        return "backward"
    if "/torch/distributed/" in frame.f_code.co_filename:
        return f"PyTorch's {frame.f_code.co_name}"
    return ""


def _where(frames: list[FrameType | None]) -> str:
    """Return the innermost line of the person's code, or else that of the last thread."""
    shown = frames[-1]
    for one in (one for frame in frames for one in _stack(frame)):
        if is_own_code(one.f_code.co_filename):
            shown = one
            break
    if shown is None:
        return "?"
    file = Path(shown.f_code.co_filename).name
    return f"{file}, line {shown.f_lineno}, in {shown.f_code.co_name}"


def headline(accounts: Mapping[int, Account], missing: Mapping[int, str]) -> str:
    """Return who has not arrived, in one line.

    Args:
        accounts: of the ranks that have left one.
        missing: the processes of the other ranks.
    """
    if missing:
        rank = min(missing)
        return (
            f"rank {rank} has not arrived: {missing[rank]} does not answer: it is stopped (then "
            "kill -CONT resumes it), or compiled code holds Python's lock"
        )
    found = [accounts[rank] for rank in sorted(accounts)]
    if len(found) == 1:
        return f"this process is {found[0].line()}"
    waiting = [one for one in found if one.waits]
    computing = [one for one in found if not one.waits]
    if not computing and len({one.waits for one in waiting}) > 1:
        each = "; ".join(f"rank {one.rank} in {one.waits}" for one in waiting)
        return f"mismatch: ranks wait in different collectives: {each}"
    behind = min(computing or waiting, key=lambda one: (one.step, one.collectives))
    where = f" at {waiting[0].waits}" if waiting and computing else ""
    return f"rank {behind.rank} has not arrived{where}: it is {behind.line()}"


class Watch:
    """Reports a training without progress, from a thread of its own, in a ``with``.

    Args:
        world: this process's.
        timeout: seconds without progress after which the run is ended, by ``world.fail``; 0 is
            never.
        folder: where ``hang.txt`` is written; None writes none.
        always: report it also where no rank waits for another one (not in a loop of a person's
            own).
    """

    def __init__(
        self,
        world: World,
        timeout: float = 0.0,
        folder: Path | None = None,
        *,
        always: bool = True,
    ) -> None:
        self._world = world
        self._timeout = timeout
        self._folder = folder
        self._always = always
        self._over = threading.Event()
        self._store: Any = HashStore()
        self._asked = 0
        self._idle = 0.0
        self._due = 0.0
        self._longest = 0.0
        self._last = self._progress()
        self._headline = ""
        self._reports = False

    def __enter__(self) -> Watch:
        world = self._world
        world.is_watched = True
        world.thread = threading.get_ident()
        if world.size > 1:
            store: Any = dist.distributed_c10d._get_default_store()
            self._store = store.clone()  # else it would wait for the training's own thread
        process = f"process {os.getpid()} on {socket.gethostname()}"
        self._store.set(f"lockstep/process/{world.rank}", process)
        threading.Thread(target=self._run, name="hang report", daemon=True).start()
        return self

    def __exit__(self, *of_an_error: object) -> None:
        self._world.is_watched = False
        self._over.set()

    def _run(self) -> None:
        """Look once a second, until the training is over."""
        while not self._over.wait(_LOOK):
            try:
                self._look()
            except Exception as error:  # a report that fails must not end what it reports on
                self._headline = f"the report failed: {error!r}"
                self._reports = True
            if self._headline and self._reports and self._is_too_long():
                text = f"no progress for {self._idle:.0f} s, which is --timeout: {self._headline}"
                self._world.fail(Lost(text))
                return

    def _look(self) -> None:
        """Compare the progress with that of the last look, and report where there is none."""
        self._idle += _LOOK
        now = self._progress()
        if now != self._last:
            if self._last[0] > 1:  # the first update compiles and imports
                self._longest = max(self._longest, self._idle)
            self._last = now
            self._idle = 0.0
            self._due = 0.0
            self._headline = ""
        usual = float(os.environ.get("LOCKSTEP_HANG_REPORT_AFTER", 30))
        after = max(usual, _PAUSES * self._longest)
        is_due = self._idle >= max(after, self._due) or self._is_too_long()
        if is_due and not self._headline:
            self._due = self._idle + after
            self._ask(after)
        elif self._store.check([f"lockstep/hang/{self._asked}"]):  # another rank has asked
            self._leave()

    def _is_too_long(self) -> bool:
        return 0 < self._timeout <= self._idle

    def _progress(self) -> tuple[int, int, int]:
        return self._world.step, self._world.collectives, self._world.beats

    def _leave(self) -> None:
        """Leave this rank's account."""
        mine = account(self._world, self._idle)
        self._store.set(f"lockstep/hang/{self._asked}/{mine.rank}", json.dumps(mine))
        self._asked += 1

    def _ask(self, after: float) -> None:
        """Collect the accounts of all ranks; the first rank without progress reports them."""
        world = self._world
        number = self._asked
        self._store.set(f"lockstep/hang/{number}", "")
        progress = self._progress()
        self._leave()
        if world.size > 1:
            self._over.wait(_ANSWERS)
        if self._over.is_set() or self._progress() != progress:
            return
        accounts = {}
        missing = {}
        for rank in range(world.size):
            key = f"lockstep/hang/{number}/{rank}"
            process = f"lockstep/process/{rank}"
            if self._store.check([key]):
                accounts[rank] = Account(*json.loads(self._store.get(key)))
            else:
                is_known = self._store.check([process])
                missing[rank] = self._store.get(process).decode() if is_known else "its process"
        if any(one.seconds < min(after, self._idle) / 2 for one in accounts.values()):
            return  # that rank goes on
        if self._always or any(one.waits for one in accounts.values()):
            self._headline = headline(accounts, missing)
            self._reports = min(accounts) == world.rank
            if self._reports:
                self._report(accounts, missing)

    def _report(self, accounts: Mapping[int, Account], missing: Mapping[int, str]) -> None:
        """Print a line for each rank, and write them with the stacks."""
        lines = [f"no progress for {self._idle:.0f} s: {self._headline}"]
        ranks = {rank: one.line() for rank, one in accounts.items()} | dict(missing)
        lines += [f"      rank {rank}: {text}" for rank, text in ranks.items()]
        if self._folder is not None:
            path = self._folder / "hang.txt"
            text = "\n".join([*lines, *(one.stacks for one in accounts.values())])
            with contextlib.suppress(OSError):  # the disk is full, say
                path.write_text(text)
                lines.append(f"      all stacks: {path}")
        self._world.print("\n".join(lines))
