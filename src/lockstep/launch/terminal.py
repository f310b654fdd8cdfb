"""What a person sees of a training: lines as epochs end, and below them a live line on a terminal."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Self

from lockstep.launch.events import Event, Line, Memory, Profile, Progress

if TYPE_CHECKING:
    from rich.console import Console
    from rich.live import Live


class Display:
    """Takes what the training tells, and prints it.

    On a terminal the last line is live: epoch, step, loss, samples per second, time left, memory per device. Elsewhere
    (a file, a pipe, CI) only whole lines are printed.
    """

    def __init__(self, *, quiet: bool = False) -> None:
        self._quiet = quiet
        self._live: Live | None = None
        self._console: Console | None = None
        self._memory: dict[str, int] = {}

    def __enter__(self) -> Self:
        if not self._quiet and sys.stdout.isatty():
            from rich.console import Console
            from rich.live import Live

            self._console = Console(highlight=False)
            self._live = Live(console=self._console, transient=True, refresh_per_second=8)
            self._live.start()
        return self

    def __exit__(self, *of_an_error: object) -> None:
        if self._live is not None:
            self._live.stop()
            self._live = None

    def tell(self, event: Any) -> None:
        """Show something that the training told."""
        if self._quiet:
            return
        if isinstance(event, Line):
            plain = event.kind in ("plain", "log")
            self.line(event.text if plain else f"note: {event.text}", note=not plain)
        elif isinstance(event, Memory):
            self._memory |= event.sizes
        elif isinstance(event, Progress):
            self._memory |= event.memory
            if self._live is not None:
                from rich.text import Text

                # One row, however narrow: what doesn't fit is left out at its end.
                self._live.update(Text(_status(event, self._memory), no_wrap=True, overflow="ellipsis"))
        elif isinstance(event, Event) and event.kind == "evaluated":
            self.line(epoch_line(event))
        elif isinstance(event, Profile):
            width = 80 if self._console is None else self._console.width
            for line in (line for draw in event.drawings for line in draw(width)):
                self.line(line)

    def line(self, text: str, *, note: bool = False) -> None:
        """Print a line above the live one."""
        if self._quiet:
            return
        if self._console is not None:
            self._console.print(text, style="yellow" if note else None, markup=False)
        else:
            print(text, flush=True)

    def output(self, text: str, stream: str) -> None:
        """What rank 0 printed, above the live line."""
        if self._console is not None:
            print_above(self._console, text)
        else:
            to_own_streams(text, stream)


def print_above(console: Console, text: str) -> None:
    """Print what a rank or a worker printed, above the live line of a console."""
    console.print(text.rstrip("\n"), markup=False, soft_wrap=True, highlight=False)


def to_own_streams(text: str, stream: str) -> None:
    """Print what rank 0 printed, on whatever ``sys.stdout`` or ``sys.stderr`` is now (a notebook's, say)."""
    target = sys.stdout if stream == "stdout" else sys.stderr
    if target is not None:
        target.write(text)
        target.flush()


def epoch_line(event: Event) -> str:
    """``epoch  3  train loss 0.1234  eval loss 0.1400  accuracy 0.9611  12,345 samples/s``.

    An evaluation within an epoch has its step instead of the training loss.
    """
    within = [] if "train_loss" in event.metrics else [f"step {event.step:,}"]
    words = [f"epoch {event.epoch:>3}", *within, *words_of(event.metrics)]
    if "samples_per_second" in event.metrics:
        words.append(f"{event.metrics['samples_per_second']:,.0f} samples/s")
    return "  ".join(words)


def words_of(record: Mapping[str, float]) -> list[str]:
    """``train loss 0.1234``, ... for each loss and metric; under sets by name, the first's loss isn't said twice."""
    left_out = {"lr", "seconds", "samples_per_second"}
    if any(name.endswith("/loss") for name in record):
        left_out.add("eval_loss")
    return [f"{n.replace('_', ' ')} {number(value)}" for n, value in record.items() if n not in left_out]


def number(value: float) -> str:
    """Four places, or an exponent where that would be long or say nothing."""
    return f"{value:.4f}" if value == 0 or 1e-3 <= abs(value) < 1e6 else f"{value:.3e}"


def _status(event: Progress, memory: Mapping[str, int]) -> str:
    words = [f"epoch {event.epoch}" + (f"/{event.epochs}" if event.epochs else "")]
    words.append(f"step {event.step:,}" + (f"/{event.steps:,}" if event.steps else ""))
    words.append(f"loss {number(event.loss)}")
    words.append(f"{event.samples_per_second:,.0f} samples/s")
    if event.seconds_left is not None:
        words.append(f"{duration(event.seconds_left)} left")
    words += [f"{device} {memory[device] / 2**30:.2f} GiB" for device in sorted(memory)]
    return "  ".join(words)


def duration(seconds: float) -> str:
    """``1:02:03``, ``4:05`` or ``0:07``."""
    whole = round(seconds)
    hours, minutes = divmod(whole // 60, 60)
    return f"{hours}:{minutes:02}:{whole % 60:02}" if hours else f"{minutes}:{whole % 60:02}"
