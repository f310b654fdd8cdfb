"""Conditions that accelerators look for themselves, so that the host doesn't wait for them in each step."""

from __future__ import annotations

import torch


class DeviceChecks:
    """Remembers, on each accelerator, the first step in which something was wrong."""

    def __init__(self) -> None:
        self._first: dict[tuple[str, torch.device], torch.Tensor] = {}

    def note(self, what: str, wrong: torch.Tensor, step: int) -> None:
        """Remember ``step`` where ``wrong``, a boolean scalar, is true, and none was before. Threads may call it."""
        key = what, wrong.device
        first = self._first.get(key)
        if first is None:
            first = torch.zeros((), dtype=torch.int64, device=wrong.device)
        self._first[key] = torch.where((first == 0) & wrong, step, first)

    def first(self) -> tuple[str, int] | None:
        """What was wrong first, and in which step; waits for the accelerators."""
        found = [(int(step), what) for (what, _), step in self._first.items()]
        step, what = min((one for one in found if one[0]), default=(0, ""))
        return (what, step) if step else None
