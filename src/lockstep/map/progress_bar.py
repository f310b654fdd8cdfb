"""The bar of a map: how far it is, on a terminal only."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from typing import TypeVar

T = TypeVar("T")


class Bar:
    """A bar on the terminal, where there is one.

    Args:
        wanted: False shows nothing anywhere.
        total: items, where that is known.
        name: what stands before it.
    """

    def __init__(self, wanted: bool, total: int | None, name: str) -> None:
        self._shown = wanted and sys.stdout is not None and sys.stdout.isatty()
        self._total, self._name = total, name
        self.on_output: Callable[[str, str], None] | None = self._print if self._shown else None

    def over(self, results: Iterator[T]) -> Iterator[T]:
        """The same results, counted as they are given; the bar goes when they end, or are closed."""
        if not self._shown:
            return results
        return self._counted(results)

    def _counted(self, results: Iterator[T]) -> Iterator[T]:
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
        self._console = Console(highlight=False)
        with Progress(*columns, console=self._console, transient=True) as progress:
            task = progress.add_task(self._name, total=self._total)
            for result in results:
                progress.advance(task)
                yield result

    def _print(self, text: str, stream: str) -> None:
        self._console.print(text.rstrip("\n"), markup=False, soft_wrap=True, highlight=False)
