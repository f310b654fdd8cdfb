"""What a person sees of a training: lines of logs and as epochs end, and in between a live line, or
one now and then in a file.
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
import sys
import time
from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, Literal, Self

from lockstep.run.events import Event, Line, Progress

if TYPE_CHECKING:
    from rich.console import Console
    from rich.live import Live


_APART = 10.0
"""Seconds without a line after which a line shows where the training is, in a file or a pipe."""


class Display:
    """Prints what happens in a training.

    On a terminal the last line is live: epoch, step, loss, samples per second, time left, memory
    of rank 0's devices; in a notebook with ipywidgets rich keeps it so. Elsewhere (a file, a pipe,
    CI) only whole lines are printed, and within an epoch a line of where the training is when ten
    seconds have passed without any line.

    Where escape sequences aren't wanted (``NO_COLOR``, ``TERM=dumb``), a terminal is like a file.

    Args:
        quiet: print nothing; ``"notes"``: only notes, on standard error.
    """

    def __init__(self, *, quiet: bool | Literal["notes"] = False) -> None:
        self._quiet = quiet
        self._printed = time.monotonic()  # when the last line was
        self._live: Live | None = None
        self._console: Console | None = None
        self._notes: set[Line] = set()

    def __enter__(self) -> Self:
        if self._quiet:
            return self
        is_terminal = takes_escapes()
        if is_terminal or _is_notebook_with_widgets():
            from rich.console import Console
            from rich.live import Live

            console = Console(highlight=False)
            # In a notebook other lines stay the text of the cell.
            self._console = console if is_terminal else None
            self._live = Live(
                console=console,
                transient=True,
                refresh_per_second=8 if is_terminal else 2,
                redirect_stdout=is_terminal,
                redirect_stderr=is_terminal,
            )
            self._live.start()
        return self

    def __exit__(self, *of_an_error: object) -> None:
        if self._live is not None:
            self._live.stop()
            self._live = None

    def show(self, event: Any) -> None:
        """Show an event of the training."""
        if isinstance(event, Line):
            self._show_line(event)
        elif self._quiet:
            return
        elif isinstance(event, Progress):
            self._show_progress(event)
        elif isinstance(event, Event) and event.kind == "evaluated":
            self.line(epoch_line(event))

    def _show_line(self, event: Line) -> None:
        """Print a line of the training; a note that another rank has logged is left out."""
        if event.kind == "plain":
            self.line(event.text)
            return
        if event.kind == "note":
            if event in self._notes:
                return
            self._notes.add(event)
        self.line(f"note: {event.text}", note=True)

    def _show_progress(self, event: Progress) -> None:
        """Update the live line; without one, print a line now and then."""
        if self._live is not None:
            from rich.text import Text

            # One row, however narrow: what doesn't fit is left out at its end.
            status = _status(event, event.memory)
            self._live.update(Text(status, no_wrap=True, overflow="ellipsis"))
        elif time.monotonic() - self._printed >= _APART:
            self.line(_status(event, ()))

    def line(self, text: str, *, note: bool = False) -> None:
        """Print a line above the live one."""
        if self._quiet and not (self._quiet == "notes" and note):
            return
        self._printed = time.monotonic()
        with self._going_on():
            if self._quiet:
                print(text, file=sys.stderr, flush=True)
            elif self._console is not None:
                self._console.print(text, style="yellow" if note else None, markup=False)
            else:
                print(text, flush=True)

    def output(self, text: str, stream: str) -> None:
        """Print what rank 0 printed, above the live line."""
        with self._going_on():
            if self._console is not None:
                print_above(self._console, text)
            else:
                to_own_streams(text, stream)

    @contextlib.contextmanager
    def _going_on(self) -> Iterator[None]:
        """Log once that the output can't be written; the training goes on without printing."""
        try:
            yield
        except OSError as error:  # a pipe that was closed, a disk that is full
            if self._quiet:
                return
            self._quiet = True
            with contextlib.suppress(OSError):
                os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
                reason = error.strerror
                text = f"lockstep: the output can't be written ({reason}): the training goes on"
                print(text, file=sys.stderr)


def takes_escapes() -> bool:
    """Return whether standard output is a terminal where escape sequences are wanted."""
    if os.environ.get("NO_COLOR") or os.environ.get("TERM") == "dumb":
        return False
    return sys.stdout is not None and sys.stdout.isatty()


def _is_notebook_with_widgets() -> bool:
    """Return whether rich can keep a line live in this notebook's cell."""
    if "IPython" not in sys.modules or importlib.util.find_spec("ipywidgets") is None:
        return False
    from rich.console import Console

    return Console().is_jupyter


def print_above(console: Console, text: str) -> None:
    """Print what a rank or a worker printed, above the live line of a console."""
    console.print(text.rstrip("\n"), markup=False, soft_wrap=True, highlight=False)


def to_own_streams(text: str, stream: str) -> None:
    """Print what rank 0 printed, on whatever ``sys.stdout`` or ``sys.stderr`` is now (a
    notebook's, say).
    """
    target = sys.stdout if stream == "stdout" else sys.stderr
    if target is not None:
        target.write(text)
        target.flush()


def epoch_line(event: Event) -> str:
    """``epoch  3  train loss 0.1234  eval loss 0.1400  accuracy 0.9611  12,345 samples/s``.

    An evaluation within an epoch has its step instead of the training loss.
    """
    words = [f"epoch {event.epoch:>3}"]
    if "train_loss" not in event.metrics:
        words.append(f"step {event.step:,}")
    words += words_of(event.metrics)
    if "samples_per_second" in event.metrics:
        words.append(f"{event.metrics['samples_per_second']:,.0f} samples/s")
    return "  ".join(words)


def words_of(record: Mapping[str, float]) -> list[str]:
    """``train loss 0.1234``, ... for each loss and metric; under sets by name, the first's loss
    isn't repeated.
    """
    left_out = {"lr", "seconds", "samples_per_second"}
    if any(name.endswith("/loss") for name in record):
        left_out.add("eval_loss")
    words = []
    for name, value in record.items():
        if name not in left_out:
            words.append(named_number(name, value))
    return words


def named_number(name: str, value: float) -> str:
    """``train loss 0.1234``, ``lr 0.00025``: a learning rate has all its places."""
    is_rate = name.partition("/")[0] == "lr"
    text = f"{value:.4g}" if is_rate else number(value)
    return f"{name.replace('_', ' ')} {text}"


def number(value: float) -> str:
    """Four places, or an exponent where that would be long or show nothing."""
    return f"{value:.4f}" if value == 0 or 1e-3 <= abs(value) < 1e6 else f"{value:.3e}"


def _status(event: Progress, memory: Iterable[tuple[str, int]]) -> str:
    epochs = f"/{event.epochs}" if event.epochs else ""
    steps = f"/{event.steps:,}" if event.steps else ""
    words = [
        f"epoch {event.epoch}{epochs}",
        f"step {event.step:,}{steps}",
        named_number("train_loss", event.loss),
        f"{event.samples_per_second:,.0f} samples/s",
    ]
    if event.seconds_left is not None:
        words.append(f"{duration(event.seconds_left)} left")
    words += [f"{device} {size / 2**30:.2f} GiB" for device, size in memory]
    return "  ".join(words)


def duration(seconds: float) -> str:
    """``1:02:03``, ``4:05`` or ``0:07``."""
    whole = round(seconds)
    hours, minutes = divmod(whole // 60, 60)
    return f"{hours}:{minutes:02}:{whole % 60:02}" if hours else f"{minutes}:{whole % 60:02}"
