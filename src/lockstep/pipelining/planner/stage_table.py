"""The stages that a planner has found, shown as a table and a map to paste."""

from __future__ import annotations

import json
import textwrap
from dataclasses import dataclass

from lockstep.errors import counted
from lockstep.launch.devices import Device
from lockstep.pipelining.planner.blocks import Block
from lockstep.report.table import Table
from lockstep.tensors.byte_size import size


@dataclass(frozen=True)
class Stage:
    """A run of blocks on a device.

    Attributes:
        device: that holds it.
        blocks: in the order of execution.
        need: bytes of weights, their gradients, the optimizer's state, and activations of the
            micro-batches that it holds.
    """

    device: Device
    blocks: tuple[Block, ...]
    need: float = 0.0

    @property
    def name(self) -> str:
        """The first and the last block."""
        if not self.blocks:
            return "nothing"
        names = [self.blocks[0].name or "the model", self.blocks[-1].name or "the model"]
        return " to ".join(dict.fromkeys(names))

    @property
    def forward(self) -> float:
        """Seconds of forward."""
        return sum(block.forward for block in self.blocks)

    @property
    def backward(self) -> float:
        """Seconds of backward."""
        return sum(block.backward for block in self.blocks)

    @property
    def time(self) -> float:
        """Seconds of forward and backward."""
        return self.forward + self.backward

    @property
    def activations(self) -> int:
        """Bytes that the blocks keep for backward."""
        return sum(block.activations for block in self.blocks)

    def cells(self, number: int) -> list[str]:
        """Give the row of a table.

        Args:
            number: of the stage.
        """
        return [
            f"{number}, {self.device}: {self.name}",
            _time(self.forward),
            _time(self.backward),
            size(sum(block.parameters for block in self.blocks)),
            size(self.activations),
            size(self.need),
        ]


_HEAD = ["stage", "forward", "backward", "weights", "activations", "memory"]


def _time(seconds: float) -> str:
    if seconds < 1e-4:
        return f"{seconds * 1e6:.3g} µs"
    if seconds < 1:
        return f"{seconds * 1e3:.3g} ms"
    return f"{seconds:.3g} s"


@dataclass(frozen=True)
class Partition:
    """A choice of layers for each device.

    Attributes:
        device_map: prefixes of names and their stages, for the strategies ``mp`` and ``pp``.
        stages: in order.
        samples: of the micro-batch that was measured.
    """

    device_map: dict[str, int]
    stages: tuple[Stage, ...]
    samples: int

    @property
    def blocks(self) -> tuple[Block, ...]:
        """Every block, in order of execution."""
        return tuple(block for stage in self.stages for block in stage.blocks)

    @property
    def speed_up(self) -> float:
        """Give the speed as a multiple of one device's, for many micro-batches.

        Filling and draining don't count then.
        """
        times: dict[Device, float] = {}
        for stage in self.stages:
            times[stage.device] = times.get(stage.device, 0.0) + stage.time
        slowest = max(times.values())
        return sum(times.values()) / slowest if slowest else 1.0

    def lines(self, width: int = 80) -> list[str]:
        """Give a table of the stages, and the map to paste, for a terminal of a width."""
        stages = counted(len(self.stages), "stage")
        blocks = counted(len(self.blocks), "block")
        samples = counted(self.samples, "sample")
        measured = f"measured on {self.stages[0].device}, a micro-batch of {samples}"
        lines = textwrap.wrap(f"{stages} of {blocks}; {measured}", width)
        rows = [stage.cells(number) for number, stage in enumerate(self.stages)]
        lines += Table(_HEAD, rows).lines(width)
        if len(self.stages) > 1:
            speed_up = f"at most {self.speed_up:.3g} times as fast as one device"
            lines += textwrap.wrap(speed_up, width)
        pasting = "below, for MP and PP; --map takes what is in braces, or a file of it"
        lines += [*textwrap.wrap(pasting, width), ""]
        pasted = f"device_map={json.dumps(self.device_map)}"
        return lines + textwrap.wrap(
            pasted,
            width,
            subsequent_indent="    ",
            break_long_words=False,
            break_on_hyphens=False,
        )

    def __str__(self) -> str:
        return "\n".join(self.lines())
