"""Layout: the mesh that a strategy lays over its devices, and which of them each process drives."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

from lockstep.tensors.rows import weighted_sizes


@dataclass(frozen=True)
class Layout:
    """Named axes of devices, as `torch.distributed.device_mesh.init_device_mesh` takes them.

    Attributes:
        axes: the size of each. Devices next to one another differ in the last axis first. Those of
            the axes ``"data"`` and ``"shard"`` are given a local batch each, those of ``"shard"`` a
            shard of the model each, those of ``"stage"`` some layers each.
        devices_per_process: how many neighbouring devices each process drives.
        together: whether the processes meet in each update.
        shares: the sizes of the local batches, in proportion; none is even.
    """

    axes: Mapping[str, int]
    devices_per_process: int = 1
    together: bool = True
    shares: tuple[int, ...] = ()

    @property
    def devices(self) -> int:
        """The number of devices on all axes."""
        return math.prod(self.axes.values())

    @property
    def processes(self) -> int:
        """The number of processes that drive the devices."""
        return self.devices // self.devices_per_process

    @property
    def local_batches(self) -> int:
        """The number of local batches that a batch is cut into: one for each replica."""
        return self.axes.get("data", 1) * self.axes.get("shard", 1)

    def sizes(self, samples: int) -> list[int]:
        """Return the samples of each local batch."""
        return weighted_sizes(samples, self.shares or [1] * self.local_batches)

    def read_by(self, process: int) -> DataShare:
        """Return what a process reads of each batch, by the number of the process."""
        readers = min(self.processes, self.local_batches)
        return DataShare(
            process * readers // self.processes, readers, self.local_batches // readers
        )


class DataShare(NamedTuple):
    """What a process reads of each batch.

    Attributes:
        rank: the number of its share. Processes with the same one read the same samples.
        size: how many shares there are.
        local_batches: how many local batches the share has, one for each replica of the process.
    """

    rank: int
    size: int
    local_batches: int
