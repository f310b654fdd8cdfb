"""Balanced: the outputs of all replicas, left where they were computed."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from lockstep.launch.devices import Device


@dataclass(frozen=True)
class Balanced:
    """What ``DataParallel(..., balanced=True)`` gives: an output per replica that ran, in the order of the batch.

    Nothing was gathered, so no device holds more than its share. It has a length, can be indexed and gone through.

    Attributes:
        outputs: what each replica gave, with its gradient history; of any nesting.
        devices: for each output the device where it was computed, and where it lies.
    """

    outputs: list[Any]
    devices: list[Device]

    def __len__(self) -> int:
        return len(self.outputs)

    def __iter__(self) -> Iterator[Any]:
        return iter(self.outputs)

    def __getitem__(self, index: int) -> Any:
        return self.outputs[index]
