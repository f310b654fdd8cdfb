"""Which samples were used in which step: written by each rank as it trains, added up over all that
a run went through.

Each start of a run has files of its own, ``audit/2-rank-0.jsonl``: first where it began, then a
line for each update::

    {"step": 40, "samples": 1437, "order": false}    where it began, all samples, an own order
    [41, 0, 40, [17, 903, ...]]                      step, epoch, batch, this process's samples

What an earlier start did beyond the step where the next one began was lost, and doesn't count.
"""

from __future__ import annotations

import json
import os
import re
from pathlib import Path
from typing import Any

from lockstep.data import Batch, is_stream
from lockstep.errors import FolderError, counted
from lockstep.launch.world import World
from lockstep.run.run_folder import RunFolder

_FILE = re.compile(r"(\d+)-rank-\d+\.jsonl")


class Audit:
    """Writes this process's lines. Every rank makes one, together.

    Args:
        world: this rank's.
        folder: of the run.
        train_data: what is trained on.
        order: whether the job has an order of its own, which may leave out and repeat samples.

    Raises:
        OSError: it can't be written.
    """

    def __init__(
        self,
        world: World,
        folder: RunFolder,
        train_data: Any,
        *,
        order: bool,
    ) -> None:
        self._several = world.size > 1
        start = 1
        for path in folder.audit.glob("*"):
            found = _FILE.fullmatch(path.name)
            if found:
                start = max(start, int(found[1]) + 1)
        start = world.broadcast_object(start)

        folder.audit.mkdir(parents=True, exist_ok=True, mode=0o700)
        self._file = os.open(
            folder.audit / f"{start}-rank-{world.rank}.jsonl",
            os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_EXCL,
            0o600,
        )

        self._write(
            {
                "step": world.step,
                "samples": None if is_stream(train_data) else len(train_data),
                "order": order,
            }
        )

    def note(self, step: int, batch: Batch) -> None:
        """Write the line of an update."""
        samples: list[int] = []

        if not self._several:
            samples += [] if batch.samples is None else batch.samples.tolist()
        else:
            for part in batch.parts:
                samples += [] if part.samples is None else map(int, part.samples)

        self._write([step, batch.epoch, batch.index, samples])

    def _write(self, line: Any) -> None:
        """Append a line."""
        os.write(self._file, json.dumps(line).encode() + b"\n")  # unbuffered: a death loses nothing

    def close(self) -> None:
        """Write no more."""
        os.close(self._file)


Uses = dict[int, list[int]]
"""The steps in which each sample was used."""


def added_up(folder: str | Path) -> tuple[list[str], dict[str, Any]]:
    """Return the lines that report what a run has used, an epoch each, and the same as plain
    values: ``right`` is whether each sample was used once.

    Raises:
        FolderError: there is no such run, or it was trained without an audit.
    """
    run = RunFolder.existing(folder)
    starts = _starts(run)
    if not starts:
        raise FolderError(f"{folder}: it was trained without an audit: train it with --audit")

    epochs, last_step = _uses_by_epoch(starts)
    first = _began(starts[min(starts)])
    lines = [f"{counted(len(starts), 'start')}, {counted(last_step, 'step')}"]
    if first:
        lines.append(f"steps 1 to {first} were trained without --audit")
    head = starts[max(starts)][0][0]
    ended = 0
    if run.summary.is_file():
        ended = run.read_json(run.summary)["epochs"]
    is_right = True
    found = []

    for epoch, uses in sorted(epochs.items()):
        is_whole = epoch < max(max(epochs), ended)
        number = sum(map(len, uses.values()))
        line = f"epoch {epoch + 1}: {counted(number, 'sample')}"
        line += "" if is_whole else " so far"
        wrong = _wrong(uses, head["samples"] if is_whole else None)
        found.append({"epoch": epoch + 1, "samples": number, "whole": is_whole, "wrong": wrong})
        if head["order"]:
            line += ", in the job's own order"
        if wrong and head["order"]:
            lines.append(line)
        elif wrong:
            is_right = False
            lines.append(f"{line}: {'; '.join(wrong)}")
        else:
            lines.append(f"{line}, each once")

    return lines, {
        "right": is_right,
        "own_order": head["order"],
        "starts": len(starts),
        "steps": last_step,
        "epochs": found,
    }


def _uses_by_epoch(starts: dict[int, list[list[Any]]]) -> tuple[dict[int, Uses], int]:
    """Return the uses of samples in each epoch, and the last step; what was lost doesn't count."""
    epochs: dict[int, Uses] = {}
    last_step = 0
    end: float = float("inf")  # where the next start began

    for number in sorted(starts, reverse=True):
        for lines in starts[number]:
            for step, epoch, _, samples in lines[1:]:
                if step > end:
                    continue
                last_step = max(last_step, step)
                uses = epochs.setdefault(epoch, {})
                for sample in samples:
                    uses.setdefault(sample, []).append(step)
        end = min(end, _began(starts[number]))

    return epochs, last_step


def _starts(run: RunFolder) -> dict[int, list[list[Any]]]:
    """Return the lines of each file, by the number of the start of the run."""
    starts: dict[int, list[list[Any]]] = {}
    for path in sorted(run.audit.glob("*")):
        found = _FILE.fullmatch(path.name)
        if found:
            starts.setdefault(int(found[1]), []).append(_lines(path))
    return starts


def _lines(path: Path) -> list[Any]:
    """Return the lines of a file, but for one that was cut off."""
    lines = []
    for line in path.read_text().splitlines():
        try:
            lines.append(json.loads(line))
        except ValueError:
            break

    if not lines:
        raise FolderError(f"{path}: it has no head: take it out")
    return lines


def _began(files: list[list[Any]]) -> int:
    """Return the step at which a start of the run began."""
    steps: list[int] = [lines[0]["step"] for lines in files]
    return max(steps)


def _wrong(uses: Uses, samples: int | None) -> list[str]:
    """Return what is wrong with an epoch.

    Args:
        uses: of its samples.
        samples: how many there are; None where an epoch isn't whole, or of a stream.
    """
    twice = sorted(sample for sample, steps in uses.items() if len(steps) > 1)
    never = [sample for sample in range(samples or 0) if sample not in uses]
    wrong = []

    if twice:
        wrong.append(f"{counted(len(twice), 'sample')} more than once")
    if never:
        wrong.append(f"{counted(len(never), 'sample')} never")
    for sample in twice[:3]:
        wrong.append(f"sample {sample} in steps {', '.join(map(str, sorted(uses[sample])))}")
    for sample in never[:3]:
        wrong.append(f"sample {sample} in none")
    return wrong
