"""The first step of plain DDP, as torchrun starts it; writes the time when it is done."""

import os
import time

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from benchmarks.by_hand.common import SHARE, small_data, small_mlp

dist.init_process_group("gloo")
torch.manual_seed(0)
inputs, targets = small_data(2 * SHARE).tensors
model = DistributedDataParallel(small_mlp())
optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
mine = slice(dist.get_rank(), None, dist.get_world_size())
torch.nn.functional.cross_entropy(model(inputs[mine]), targets[mine]).backward()
optimizer.step()
if dist.get_rank() == 0:
    with open(os.environ["FIRST_STEP"], "w") as file:
        file.write(repr(time.time()))
dist.barrier()
dist.destroy_process_group()
