"""Which samples were used in which step: written by each rank as it trains, added up over all that
a run went through.

Each start of a run has files of its own, ``audit/2-rank-0.jsonl``: first where it began, then a
line for each update::

    {"start": 2, "rank": 0, "ranks": 2, "step": 40, "samples": 1437, "order": false}
    [41, 0, 40, [17, 903, ...]]                      step, epoch, batch, this process's samples

What an earlier start did beyond the step where the next one began was lost, and doesn't count.
"""

from __future__ import annotations

import json
import os
import re
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from lockstep.data import Batch, is_stream
from lockstep.errors import FolderError, counted
from lockstep.launch.run_folder import RunFolder
from lockstep.launch.world import World

_FILE = re.compile(r"(\d+)-rank-(\d+)\.jsonl")


class Audit:
    """Writes this process's lines. Every rank makes one, together.

    Raises:
        OSError: it can't be written.
    """

    def __init__(self, world: World, folder: RunFolder, train_data: Any, *, order: bool) -> None:
        self._several = world.size > 1
        starts = [
            int(found[1])
            for path in folder.audit.glob("*")
            if (found := _FILE.fullmatch(path.name))
        ]
        start = world.broadcast_object(max(starts, default=0) + 1)
        folder.audit.mkdir(parents=True, exist_ok=True, mode=0o700)
        head = {
            "start": start,
            "rank": world.rank,
            "ranks": world.size,
            "step": world.step,
            "samples": None if is_stream(train_data) else len(train_data),
            "order": order,
        }
        flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_EXCL
        self._file = os.open(folder.audit / f"{start}-rank-{world.rank}.jsonl", flags, 0o600)
        self._write(head)

    def note(self, step: int, batch: Batch) -> None:
        """Write the line of an update."""
        if self._several:
            samples = [
                int(index)
                for part in batch.parts
                if part.samples is not None
                for index in part.samples
            ]
        else:
            samples = [] if batch.samples is None else batch.samples.tolist()
        self._write([step, batch.epoch, batch.index, samples])

    def _write(self, line: Any) -> None:
        os.write(self._file, json.dumps(line).encode() + b"\n")  # unbuffered: a death loses nothing

    def close(self) -> None:
        """Write no more."""
        os.close(self._file)


@dataclass
class Epoch:
    """What was used in an epoch.

    Attributes:
        number: from 1.
        samples: how many times each was used.
        steps: the steps in which it was.
        whole: whether a later epoch was begun, or the run has ended.
    """

    number: int
    samples: Counter[int] = field(default_factory=Counter)
    steps: dict[int, list[int]] = field(default_factory=dict)
    whole: bool = False


def added_up(folder: str | Path) -> tuple[list[str], bool]:
    """The lines that say what a run has used, an epoch each, and whether each sample was used once.

    Raises:
        FolderError: there is no such run, or it was trained without an audit.
    """
    run = RunFolder.existing(folder)
    files = sorted(path for path in run.audit.glob("*") if _FILE.fullmatch(path.name))
    if not files:
        raise FolderError(f"{folder}: it was trained without an audit: train it with --audit")
    starts: dict[int, list[list[Any]]] = {}
    for path in files:
        starts.setdefault(int(path.name.partition("-")[0]), []).append(_lines(path))
    numbers = sorted(starts)
    began = {number: max(lines[0]["step"] for lines in starts[number]) for number in numbers}
    head = starts[numbers[-1]][0][0]
    epochs: dict[int, Epoch] = {}
    seen: Counter[int] = Counter()  # ranks by step
    for number, later in zip(numbers, [*numbers[1:], None], strict=True):
        end = None if later is None else min(began[n] for n in numbers if n >= later)
        for lines in starts[number]:
            for step, epoch, _, samples in lines[1:]:
                if end is None or step <= end:
                    one = epochs.setdefault(epoch, Epoch(epoch + 1))
                    one.samples.update(samples)
                    seen[step] += 1
                    for sample in samples:
                        one.steps.setdefault(sample, []).append(step)
    for epoch in epochs.values():
        epoch.whole = epoch.number < max(epochs) + 1 or _has_ended(run, epoch.number)
    said = [_said(epoch, head) for _, epoch in sorted(epochs.items())]
    first = began[numbers[0]]
    return [
        f"{counted(len(numbers), 'start')}, {counted(max(seen, default=0), 'step')}",
        *([f"steps 1 to {first} were trained without --audit"] if first else []),
        *(line for line, _ in said),
    ], (all(right for _, right in said))


def _lines(path: Path) -> list[Any]:
    """Those of a file, but for one that was cut off."""
    found = []
    for line in path.read_text().splitlines():
        try:
            found.append(json.loads(line))
        except ValueError:
            break
    if not found:
        raise FolderError(f"{path}: it has no head: take it out")
    return found


def _has_ended(run: RunFolder, epochs: int) -> bool:
    return run.summary.is_file() and run.read_json(run.summary)["epochs"] >= epochs


def _said(epoch: Epoch, head: dict[str, Any]) -> tuple[str, bool]:
    """An epoch's line, and whether nothing is wrong with it. A person's own order may leave out
    and repeat samples.
    """
    of = head["samples"]
    twice = sorted(sample for sample, times in epoch.samples.items() if times > 1)
    never = (
        []
        if of is None or not epoch.whole
        else [sample for sample in range(of) if sample not in epoch.samples]
    )
    used = counted(epoch.samples.total(), "sample")
    so_far = "" if epoch.whole else " so far"
    if head["order"]:
        return f"epoch {epoch.number}: {used}{so_far}, in the job's own order", True
    if not twice and not never:
        return f"epoch {epoch.number}: {used}{so_far}, each once", True
    wrong = [f"{counted(len(twice), 'sample')} more than once"] if twice else []
    wrong += [f"{counted(len(never), 'sample')} never"] if never else []
    for sample in twice[:3]:
        wrong.append(f"sample {sample} in steps {', '.join(map(str, epoch.steps[sample]))}")
    wrong += [f"sample {sample} in none" for sample in never[:3]]
    return f"epoch {epoch.number}: {used}{so_far}: {'; '.join(wrong)}", False
