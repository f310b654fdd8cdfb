"""Plain PyTorch: DistributedDataParallel, DistributedSampler, DataLoader."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data.distributed import DistributedSampler

from lockstep.compare.peers.peer_loop import Parts, dataset_of, loader_of, model_of, optimizer_of
from lockstep.job import Job


def parts_of(job: Job, where: torch.device, ranks: int) -> Parts:
    """The job under DistributedDataParallel."""
    on_card = where.type == "cuda"
    dist.init_process_group("nccl" if on_card else "gloo")
    data = dataset_of(job)
    sampler: Any = DistributedSampler(data, shuffle=job.shuffle, seed=job.seed)
    net = model_of(job, where)
    model = DistributedDataParallel(net, device_ids=[where.index] if on_card else None)

    def gathered(value: Any) -> list[Any]:
        found: list[Any] = [None] * ranks
        dist.all_gather_object(found, value)
        return found

    return Parts(
        model,
        optimizer_of(job, net),
        loader_of(job, data, ranks, sampler=sampler, pin_memory=on_card),
        backward=torch.autograd.backward,
        epoch=sampler.set_epoch,
        gather=gathered,
        end=dist.destroy_process_group,
    )
