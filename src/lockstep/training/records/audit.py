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
from collections import Counter
from pathlib import Path
from typing import Any

from lockstep.data import Batch, is_stream
from lockstep.errors import FolderError, counted
from lockstep.launch.world import World
from lockstep.run.run_folder import RunFolder

_FILES = "*-rank-*.jsonl"


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
        earlier = map(_start_of, folder.audit.glob(_FILES))
        start = world.broadcast_object(max(earlier, default=0) + 1)

        folder.audit.mkdir(parents=True, exist_ok=True, mode=0o700)
        self._file = os.open(
            folder.audit / f"{start}-rank-{world.rank}.jsonl",
            os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_EXCL,
            0o600,
        )
        samples = None if is_stream(train_data) else len(train_data)
        self._write({"step": world.step, "samples": samples, "order": order})

    def note(self, step: int, batch: Batch) -> None:
        """Write the line of an update."""
        samples: list[int] = []
        for one in batch.parts if self._several else [batch]:
            samples += [] if one.samples is None else map(int, one.samples)
        self._write([step, batch.epoch, batch.index, samples])

    def _write(self, line: Any) -> None:
        """Append a line."""
        os.write(self._file, json.dumps(line).encode() + b"\n")  # unbuffered: a death loses nothing

    def close(self) -> None:
        """Write no more."""
        os.close(self._file)


def added_up(folder: str | Path) -> tuple[list[str], dict[str, Any]]:
    """Return the lines that report what a run has used, an epoch each, and the same as plain
    values: ``right`` is whether each sample was used once.

    Raises:
        FolderError: there is no such run, or it was trained without an audit.
    """
    run = RunFolder.existing(folder)
    heads, epochs, last_step = _read(run)
    if not heads:
        raise FolderError(f"{folder}: it was trained without an audit: train it with --audit")

    lines = [f"{counted(len(heads), 'start')}, {counted(last_step, 'step')}"]
    first = heads[0]["step"]
    if first:
        lines.append(f"steps 1 to {first} were trained without --audit")
    head = heads[-1]
    ended = max(epochs, default=0)
    if run.summary.is_file():
        ended = max(ended, run.read_json(run.summary)["epochs"])

    found = []
    for epoch, uses in sorted(epochs.items()):
        is_whole = epoch < ended
        wrong = _wrong(uses, head["samples"] if is_whole else None)
        line = f"epoch {epoch + 1}: {counted(uses.total(), 'sample')}"
        line += "" if is_whole else " so far"
        if head["order"]:
            line += ", in the job's own order"
        if not wrong:
            line += ", each once"
        elif not head["order"]:
            line += f": {'; '.join(wrong)}"
        lines.append(line)
        found.append(
            {
                "epoch": epoch + 1,
                "samples": uses.total(),
                "whole": is_whole,
                "wrong": wrong,
            }
        )

    return lines, {
        "right": head["order"] or not any(one["wrong"] for one in found),
        "own_order": head["order"],
        "starts": len(heads),
        "steps": last_step,
        "epochs": found,
    }


def _read(run: RunFolder) -> tuple[list[dict[str, Any]], dict[int, Counter[int]], int]:
    """Return the head of each start, how often each epoch has used each sample, and the last step;
    what was lost doesn't count.
    """
    heads: dict[int, dict[str, Any]] = {}
    epochs: dict[int, Counter[int]] = {}
    last_step = 0
    end: float = float("inf")  # where the next start began

    for path in sorted(run.audit.glob(_FILES), key=_start_of, reverse=True):
        if heads and _start_of(path) not in heads:
            end = min(end, heads[min(heads)]["step"])
        for line in path.read_text().splitlines():
            try:
                values = json.loads(line)
            except ValueError:  # cut off
                break
            if isinstance(values, dict):
                heads[_start_of(path)] = values
                continue
            step, epoch, _, samples = values
            if step <= end:
                last_step = max(last_step, step)
                epochs.setdefault(epoch, Counter()).update(samples)

    return [head for _, head in sorted(heads.items())], epochs, last_step


def _start_of(path: Path) -> int:
    """Return the number of the start of the run that a file is of."""
    return int(path.name.partition("-")[0])


def _wrong(uses: Counter[int], samples: int | None) -> list[str]:
    """Return what is wrong with an epoch.

    Args:
        uses: of its samples.
        samples: how many there are; None where an epoch isn't whole, or of a stream.
    """
    twice = sorted(sample for sample, number in uses.items() if number > 1)
    never = [sample for sample in range(samples or 0) if sample not in uses]
    wrong = []
    if twice:
        wrong.append(f"{counted(len(twice), 'sample')} more than once, sample {twice[0]} say")
    if never:
        wrong.append(f"{counted(len(never), 'sample')} never, sample {never[0]} say")
    return wrong
