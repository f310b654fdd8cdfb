"""Layout: the mesh that a strategy lays over its devices, and which of them each process drives."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple


@dataclass(frozen=True)
class Layout:
    """Named axes of devices, as `torch.distributed.device_mesh.init_device_mesh` takes them.

    Attributes:
        axes: the size of each. Devices next to one another differ in the last axis first. Those of
            the axes ``"data"`` and ``"shard"`` are given a local batch each, those of ``"shard"`` a
            shard of the model each, those of ``"stage"`` some layers each.
        devices_per_process: neighbours.
        together: whether the processes meet in each update.
    """

    axes: Mapping[str, int]
    devices_per_process: int = 1
    together: bool = True

    @property
    def devices(self) -> int:
        """All of them."""
        return math.prod(self.axes.values())

    @property
    def processes(self) -> int:
        """That drive them."""
        return self.devices // self.devices_per_process

    @property
    def local_batches(self) -> int:
        """In how many a batch is cut: the replicas of the model."""
        return self.axes.get("data", 1) * self.axes.get("shard", 1)

    def read_by(self, process: int) -> DataShare:
        """What a process reads of each batch, by the number of the process."""
        readers = min(self.processes, self.local_batches)
        return DataShare(
            process * readers // self.processes, readers, self.local_batches // readers
        )

    def drawn(self, devices: Sequence[str], each: int = 1) -> list[str]:
        """Who holds what and who reads what, with a line for each process.

        Args:
            devices: the names of all of them.
            each: how many parts (stages, say) a device holds, every so many.
        """
        lines = []
        for process in range(self.processes):
            first, held = process * self.devices_per_process, []
            for number in range(first, first + self.devices_per_process):
                words, rest = [], number
                for axis, size in reversed(list(self.axes.items())):
                    parts = range(rest % size, size * each, size)
                    words += [] if axis == "data" else [f"{axis} {' and '.join(map(str, parts))}"]
                    rest //= size
                held.append(f"{devices[number]} {', '.join(reversed(words)) or 'the whole model'}")
            share, size, each_reads = self.read_by(process)
            which = f"batch {share + 1}" if each_reads == 1 else f"batches 1 to {each_reads}"
            reads = (
                f"local {which} of {self.local_batches}"
                if self.local_batches > 1
                else "the whole batch"
            )
            lines.append(f"rank {process}: {', '.join(held)}; {reads}")
        return lines


class DataShare(NamedTuple):
    """What a process reads of each batch.

    Attributes:
        rank: the number of its share. Processes with the same one read the same samples.
        size: how many shares there are.
        local_batches: that its share is cut in, one for each replica that the process drives.
    """

    rank: int
    size: int
    local_batches: int
