"""A hand-written loop of PyTorch's fully_shard: over each block, then the model. JOB names what
is trained.
"""

import os
import statistics
import time
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard
from torch.nn.utils import clip_grad_norm_

from benchmarks.sharding import JOBS
from lockstep.tensors.allocator import prepare

prepare()  # huge pages, as the command has them
dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
job = JOBS[os.environ["JOB"]]()
data: Any = job.train_data
rows = [data[i] for i in range(len(data))]
collate = job.collate or torch.utils.data.default_collate
batches = [
    collate(rows[start : start + job.batch_size][rank::world])
    for start in range(0, len(rows), job.batch_size)
]
torch.manual_seed(0)
model: Any = job.model()
for block in getattr(model, "blocks", None) or model.layers:
    fully_shard(block)
fully_shard(model)
optimizer = job.optimizer(list(model.named_parameters()))
rates = []
for _ in range(job.epochs):
    began = time.perf_counter()
    for inputs, targets in batches:
        optimizer.zero_grad()
        loss = job.loss(model(inputs), targets)
        if isinstance(loss, tuple):
            loss = loss[0] / loss[1]
        loss.backward()
        if job.clip_norm is not None:
            clip_grad_norm_(model.parameters(), job.clip_norm)
        optimizer.step()
        loss.item()
    rates.append(len(rows) / (time.perf_counter() - began))
if rank == 0:
    print(statistics.median(rates[1:]), flush=True)
dist.destroy_process_group()
