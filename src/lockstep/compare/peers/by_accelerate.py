"""Hugging Face Accelerate."""

from __future__ import annotations

from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import gather_object

from lockstep.compare.peers.peer_loop import Parts, dataset_of, loader_of, model_of, optimizer_of
from lockstep.job import Job


def parts_of(job: Job, where: torch.device, ranks: int) -> Parts:
    """The job prepared by an Accelerator."""
    accelerator = Accelerator(cpu=where.type != "cuda")
    net = model_of(job, torch.device("cpu"))
    loader = loader_of(job, dataset_of(job), ranks, shuffle=job.shuffle)
    model, optimizer, loader = accelerator.prepare(net, optimizer_of(job, net), loader)

    def gathered(value: Any) -> list[Any]:
        return [value] if ranks == 1 else list(gather_object([value]))

    return Parts(
        model, optimizer, loader, accelerator.backward, epoch=lambda epoch: None, gather=gathered,
        end=accelerator.end_training,
    )  # fmt: skip
