"""A training that stands still: which rank, or thread, the others wait for, and where it is.

Each process has a thread that looks once a second whether its step, its collectives or its beats
(`World.beat`) have moved. That costs the training nothing: what a process is doing is read from its
stack, when it stands still::

    30 s, or ten usual steps, without progress ──> each rank leaves its account in the store of the process group,
                                                   the first of them puts all together: a headline, and each stack
    ``timeout`` without progress               ──> the run ends, as it does at once where ranks gather different
                                                   blocks, which they never come out of

The seconds are those in which this thread was awake, so that a training that was suspended and goes
on is left alone.
"""

from __future__ import annotations

import json
import os
import socket
import sys
import threading
import traceback
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist

from lockstep.errors import Lost, StrategyError, counted, is_own_code
from lockstep.launch.world import COLLECTIVES, World

_LOOK = 1.0
"""Seconds between two looks."""

_ANSWERS = 2.5 * _LOOK
"""Seconds in which the other ranks leave their accounts."""

_PACKAGE = str(Path(__file__).parents[1])

_PHASES = {
    "training/evaluation.py": "evaluation",
    "checkpoint/": "saving",
    "data/": "loading",
}
"""What a process is doing that has a frame of these files of ours, the first that fits."""

_FUNCTIONS = {
    "_run_backward": "backward",
    "forward_loss": "forward",
    "_optimize": "optimizer",
    "gradients": "forward",
}
"""What it is doing that is in these functions, the innermost first."""

_ORDER = ("loading", "forward", "backward", "reduce", "optimizer", "evaluation", "saving")


def report_after() -> float:
    """Seconds without progress after which it is said, unless ten usual steps take longer."""
    return float(os.environ.get("LOCKSTEP_HANG_REPORT_AFTER", 30))


@dataclass
class Account:
    """What a rank says of itself.

    Attributes:
        rank, step: which rank, and the step that it is in.
        phase: what it is doing.
        collective: the one it waits for: number, name, shape; None where it waits for none.
        seconds: since when nothing has moved.
        where: the line of the person's own code that it is at, or of whatever else.
        stacks: of its threads, by their names.
        progress: its step, collectives and beats.
        trail: the blocks that it has gathered in this step (``World.trail``).
    """

    rank: int
    step: int
    phase: str
    collective: list[Any] | None
    seconds: float
    where: str
    stacks: dict[str, str] = field(repr=False)
    progress: tuple[int, int, int] = (0, 0, 0)
    trail: list[str] = field(default_factory=list, repr=False)

    @property
    def named(self) -> str:
        """``all_reduce 12 (float32 of 1000)``."""
        number, name, shape = self.collective or (0, "", "")
        return f"{name} {number}{f' ({shape})' if shape else ''}"

    def line(self) -> str:
        """All of it but the stacks."""
        waits = f", waits for {self.named}" if self.collective else ""
        step = f"step {self.step}" if self.step else "before the first step"
        return (
            f"rank {self.rank}: {step}, {self.phase}{waits}, for {self.seconds:.0f} s, at "
            f"{self.where}"
        )


def account(world: World, seconds: float) -> Account:
    """This process's."""
    threads = _threads()
    own = next((frame for thread, frame in threads if thread.ident == world.thread), None)
    phase, collective = _doing(own, world)
    where = _where(next((frame for _, frame in _busy(threads)), own))
    stacks: dict[str, str] = {}
    for thread, frame in threads:
        name = thread.name if thread.name not in stacks else f"{thread.name} {thread.ident}"
        stacks[name] = "".join(traceback.format_stack(frame))
    progress = world.step, world.collectives, world.beats
    trail = [name for step, name in world.trail if step == world.step]
    return Account(
        world.rank, world.step, phase, collective, seconds, where, stacks, progress, trail
    )


def _threads() -> list[tuple[threading.Thread, FrameType]]:
    """Those of this process but for the calling one, with their innermost frames."""
    frames = sys._current_frames()
    here = threading.current_thread()
    return [
        (t, frames[t.ident]) for t in threading.enumerate() if t is not here and t.ident in frames
    ]


def _busy(
    threads: list[tuple[threading.Thread, FrameType]],
) -> list[tuple[threading.Thread, FrameType]]:
    """Threads of replicas and stages that neither are idle nor wait for another one."""
    return [(t, f) for t, f in threads if t.name.startswith("lockstep ") and not _waits(f)]


def _stack(frame: FrameType | None) -> Iterator[FrameType]:
    """From the innermost frame on."""
    while frame is not None:
        yield frame
        frame = frame.f_back


def _doing(frame: FrameType | None, world: World) -> tuple[str, list[Any] | None]:
    frames = list(_stack(frame))
    collective = None
    for one in frames:
        if one.f_code.co_name in COLLECTIVES and one.f_code.co_filename.endswith("launch/world.py"):
            tensor = one.f_locals.get("tensor")
            shape = ""
            if isinstance(tensor, torch.Tensor):
                sizes = " x ".join(map(str, tensor.shape)) or "1"
                shape = f"{str(tensor.dtype).removeprefix('torch.')} of {sizes}"
            collective = [world.collectives, one.f_code.co_name, shape]
    ours = [f.f_code.co_filename.removeprefix(_PACKAGE).lstrip("/") for f in frames]
    for file, phase in _PHASES.items():
        if any(name.startswith(file) for name in ours):
            return phase, collective
    for one in frames:
        known = _FUNCTIONS.get(one.f_code.co_name)
        if known is not None and one.f_code.co_filename.startswith(_PACKAGE):
            return ("reduce" if collective and known != "backward" else known), collective
    return ("reduce" if collective else "between steps"), collective


def _where(frame: FrameType | None) -> str:
    """The innermost line of the person's own, or else the innermost one."""
    frames = list(_stack(frame))
    own = next(
        (one for one in frames if is_own_code(one.f_code.co_filename)),
        frames[0] if frames else None,
    )
    return (
        "?"
        if own is None
        else f"{Path(own.f_code.co_filename).name}, line {own.f_lineno}, in {own.f_code.co_name}"
    )


def _waits(frame: FrameType) -> bool:
    """Whether a thread of ours is idle, or waits for another one."""
    return frame.f_code.co_name == "_work" or frame.f_code.co_filename == threading.__file__


def headline(accounts: Mapping[int, Account], missing: Mapping[int, str]) -> str:
    """Who has not arrived, in a line.

    Args:
        accounts: of the ranks that stand still and say so.
        missing: the others, with what is known of each.
    """
    if missing:
        rank, why = min(missing.items())
        return f"rank {rank} has not arrived: {why}"
    if apart := _apart(accounts):
        return apart
    waiting = [one for one in accounts.values() if one.collective is not None]
    others = [one for one in accounts.values() if one.collective is None]
    if len(accounts) == 1:
        (only,) = accounts.values()
        busy = [
            n for n, s in only.stacks.items() if n.startswith("lockstep ") and not _is_waiting(s)
        ]
        who = f"the thread of {busy[0].split()[1]}" if busy else "this process"
        return f"{who} has not come further for {only.seconds:.0f} s: {_at(only)}"
    if not others and len({tuple(one.collective or ()) for one in waiting}) > 1:
        each = "; ".join(f"rank {one.rank} in {one.named}" for one in waiting)
        return f"mismatch: ranks wait in different collectives: {each}"
    behind = min(others or waiting, key=lambda one: (one.step, _rank_of(one.phase)))
    for_what = f" at {waiting[0].named}" if waiting and others else ""
    return f"rank {behind.rank} has not arrived{for_what}: {_at(behind)} for {behind.seconds:.0f} s"


def parting(trails: Mapping[int, Sequence[str]]) -> str:
    """Where ranks come to different blocks (``World.trail``), which; nothing where one is only
    behind another.
    """
    for each in zip(*trails.values(), strict=False):
        if len(set(each)) > 1:
            comes = (f"to {name} on rank {rank}" for rank, name in zip(trails, each, strict=True))
            return f"forward comes {', '.join(comes)}"
    return ""


def other_blocks(what: str) -> StrategyError:
    """The refusal of a model in which ranks gather different blocks: they wait for one another
    for ever.
    """
    return StrategyError(
        f"fsdp: {what}: blocks that depend on the samples can't be gathered on their own",
        fix="name the other blocks: --blocks NAMES, or FSDP(blocks=...)",
    )


def _apart(accounts: Mapping[int, Account]) -> str:
    together = len({one.step for one in accounts.values()}) == 1
    return parting({rank: one.trail for rank, one in accounts.items()}) if together else ""


def _at(one: Account) -> str:
    step = f"of step {one.step}" if one.step else "before the first step"
    return f"it is in {one.phase} {step} ({one.where})"


def _rank_of(phase: str) -> int:
    return _ORDER.index(phase) if phase in _ORDER else -1


def _is_waiting(stack: str) -> bool:
    """As ``_waits``, of a stack as text."""
    last = stack.rstrip().rpartition('  File "')[2]
    return last.startswith(threading.__file__) or ", in _work\n" in f"{last}\n"


class Watch:
    """Looks whether a process's training comes further, in a thread of its own, in a ``with``.

    Args:
        world: this process's.
        timeout: seconds without progress after which the run is ended, by ``world.fail``; 0 is
            never.
        folder: where ``hang.txt`` is written; None writes none.
        always: say it also where no rank waits for another one (not in a loop of a person's own).
    """

    def __init__(
        self,
        world: World,
        timeout: float = 0.0,
        folder: Path | None = None,
        *,
        always: bool = True,
    ) -> None:
        self._world, self._timeout, self._folder, self._always = world, timeout, folder, always
        self._over = threading.Event()
        self._store: Any = None
        self._asked = 0

    def __enter__(self) -> Watch:
        global _watches
        _watches += 1
        world = self._world
        world.thread = threading.get_ident()
        if world.size > 1:
            store = dist.distributed_c10d._get_default_store()
            # One that another thread waits in can't be asked meanwhile.
            self._store = store.clone() if hasattr(store, "clone") else store
            self._store.set(
                f"lockstep/process/{world.rank}", f"{socket.gethostname()} {os.getpid()}"
            )
        threading.Thread(target=self._look, name="hang report", daemon=True).start()
        return self

    def __exit__(self, *of_an_error: object) -> None:
        global _watches
        _watches -= 1
        self._over.set()

    def _look(self) -> None:
        world = self._world
        first: tuple[float, int] | None = None
        last, idle, awake = self._progress(), 0.0, 0.0
        said, due = False, 0.0
        while not self._over.wait(_LOOK):
            awake += _LOOK
            now = self._progress()
            if now != last:
                last, idle, said, due = now, 0.0, False, 0.0
                if world.step > 1 and first is None:
                    first = awake, world.step
            else:
                idle += _LOOK
            pace = (
                (awake - idle - first[0]) / (world.step - first[1])
                if first and world.step > first[1]
                else 0.0
            )
            after = max(report_after(), 10 * pace)
            ends = 0 < self._timeout <= idle
            try:
                if (idle >= max(after, due) and not said) or ends:
                    said = self._ask(idle, after, shows=not said, ends=ends)
                    due = idle + after
                else:
                    self._answer(idle)
                if said and ends:
                    return
            except Exception as error:  # a report that fails must not end what it reports on
                os.write(
                    2, f"lockstep: no report of a training that stands still: {error!r}\n".encode()
                )
                return

    def _progress(self) -> tuple[int, int, int]:
        return self._world.step, self._world.collectives, self._world.beats

    def _answer(self, idle: float) -> None:
        """Where another rank has asked, leave this one's account."""
        if self._store is not None and self._store.check([f"lockstep/hang/{self._asked}"]):
            self._leave_account(idle)

    def _leave_account(self, idle: float) -> Account:
        mine = account(self._world, idle)
        if self._store is not None:
            self._store.set(f"lockstep/hang/{self._asked}/{mine.rank}", json.dumps(asdict(mine)))
            self._asked += 1
        return mine

    def _ask(self, idle: float, after: float, *, shows: bool, ends: bool) -> bool:
        """Collect the accounts of all ranks, and report them on the first rank without progress.

        Args:
            idle: seconds without progress on this rank.
            after: seconds after which a report is due.
            shows: whether to show the report.
            ends: whether to end the run.

        Returns:
            Whether the training is reported; a training that makes progress isn't.
        """
        number = self._asked
        if self._store is not None:
            self._store.set(f"lockstep/hang/{number}", "")
        mine = self._leave_account(idle)
        if self._store is not None and self._over.wait(_ANSWERS):
            return False
        accounts, missing = self._collected(mine, number)
        if self._progress() != mine.progress:
            return False
        if any(one.seconds < min(after, idle) / 2 for one in accounts.values()):
            return False
        apart = _apart(accounts)
        waits = any(one.collective or one.phase == "backward" for one in accounts.values())
        if not (waits or apart or self._always):
            return False
        if min(accounts) == self._world.rank:
            self._report(accounts, missing, shows=shows, ends=ends)
        return True

    def _collected(self, mine: Account, number: int) -> tuple[dict[int, Account], dict[int, str]]:
        """Read the accounts that the other ranks have left.

        Args:
            mine: the account of this rank.
            number: of the question.

        Returns:
            The accounts by rank, and what the system knows of the other ranks.
        """
        accounts = {self._world.rank: mine}
        missing: dict[int, str] = {}
        if self._store is None:
            return accounts, missing
        for rank in {*range(self._world.size)} - {self._world.rank}:
            key = f"lockstep/hang/{number}/{rank}"
            if self._store.check([key]):
                accounts[rank] = Account(**json.loads(self._store.get(key)))
            else:
                missing[rank] = self._state_of(rank)
        return accounts, missing

    def _report(
        self,
        accounts: Mapping[int, Account],
        missing: Mapping[int, str],
        *,
        shows: bool,
        ends: bool,
    ) -> None:
        """Show which rank the others wait for, or end the run with that."""
        line = headline(accounts, missing)
        if shows:
            of_ranks = [one.line() for _, one in sorted(accounts.items())]
            quiet = [f"rank {rank}: {why}" for rank, why in sorted(missing.items())]
            self._tell([line, *of_ranks, *quiet], accounts)
        apart = _apart(accounts)
        if ends:
            seconds = accounts[self._world.rank].seconds
            self._world.fail(Lost(f"no progress for {seconds:.0f} s, which is --timeout: {line}"))
        elif apart:
            self._world.fail(other_blocks(apart))

    def _state_of(self, rank: int) -> str:
        """What the system knows of a rank's process that says nothing."""
        key = f"lockstep/process/{rank}"
        host, pid = (
            self._store.get(key).decode().split() if self._store.check([key]) else ("?", "0")
        )
        who = f"process {pid} on {host}"
        if host != socket.gethostname():
            return f"{who} gives no account of itself"
        try:
            state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
        except OSError:
            return f"{who} is gone"
        if state in "Tt":
            return f"{who} was stopped, by SIGSTOP or Ctrl-Z: kill -CONT {pid} lets it go on"
        return (
            f"{who} gives no account of itself: compiled code holds Python's lock, or it comes "
            "further"
        )

    def _tell(self, lines: list[str], accounts: Mapping[int, Account]) -> None:
        """Show the lines, and write them with the stacks."""
        path = None if self._folder is None else self._folder / "hang.txt"
        if path is not None:
            stacks = [
                f"\n==== rank {one.rank}, {name}\n{stack}"
                for one in accounts.values()
                for name, stack in one.stacks.items()
            ]
            try:
                path.write_text("\n".join([*lines, *stacks]))
            except OSError:
                path = None
        shown = [f"the training stands still: {lines[0]}", *(f"      {line}" for line in lines[1:])]
        shown += [f"      all stacks: {path}"] if path is not None else []
        self._world.say("\n".join(shown))


_watches = 0


def is_watched() -> bool:
    """Whether a training in this process is watched."""
    return _watches > 0


def threads_line(seconds: float) -> str:
    """What to say of threads of this process that others wait for, where no training is watched."""
    busy = _busy([*_threads(), (threading.current_thread(), sys._getframe())])
    each = "; ".join(
        f"that of {thread.name.removeprefix('lockstep ')} is at {_where(frame)}"
        for thread, frame in busy
    )
    return (
        f"{counted(len(busy), 'thread')} of replicas have not come to an end for {seconds:.0f} "
        f"s: {each}"
    )
