"""``mp``: one process; each device holds some of the layers, and they compute in turn.

It is ``pp`` with one micro-batch: nothing overlaps, but a model may be as large as all devices together, and BatchNorm
and a loss over pairs see the whole batch.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from lockstep.errors import StrategyError
from lockstep.strategies.pp import PP


@dataclass(frozen=True)
class MP(PP):
    """Stages of layers on the devices of one process, one after the other."""

    name: ClassVar[str] = "mp"
    summary: ClassVar[str] = "one process, a stage of layers per device, one after the other"
    good_for: ClassVar[str] = "models too large for one device, whose batch can't be split"

    microbatches: int = 1

    @classmethod
    def choices(cls) -> set[str]:
        """Without those that say how a batch is cut."""
        return super().choices() - {"microbatches", "split_size", "schedule"}

    def __post_init__(self) -> None:
        if self.microbatches != 1 or self.split_size is not None:
            wanted = self.microbatches if self.split_size is None else f"those of {self.split_size!r} samples"
            raise StrategyError(f"mp has one micro-batch, not {wanted}: take pp")
        super().__post_init__()
