"""Lightning Fabric."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from lightning.fabric import Fabric

from lockstep.compare.peers.peer_loop import Parts, dataset_of, loader_of, model_of, optimizer_of
from lockstep.job import Job


def parts_of(job: Job, where: torch.device, ranks: int) -> Parts:
    """The job under Fabric's own strategy of that name."""
    fabric = Fabric(accelerator="cuda" if where.type == "cuda" else "cpu", devices=ranks, strategy="ddp")
    fabric.launch()
    loader = fabric.setup_dataloaders(loader_of(job, dataset_of(job), ranks, shuffle=job.shuffle))
    net = model_of(job, torch.device("cpu"))
    model, optimizer = fabric.setup(net, optimizer_of(job, net))

    def gathered(value: Any) -> list[Any]:
        found: list[Any] = [None] * ranks
        if ranks == 1:
            return [value]
        dist.all_gather_object(found, value)
        return found

    return Parts(model, optimizer, loader, fabric.backward, epoch=lambda epoch: None, gather=gathered, end=lambda: None)
