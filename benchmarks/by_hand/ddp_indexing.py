"""A careful hand-written loop: DDP, and batches by indexing the tensors."""

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from benchmarks.by_hand.common import SHARE, report, small_data, small_mlp

dist.init_process_group("gloo")
torch.manual_seed(0)
rank, world = dist.get_rank(), dist.get_world_size()
inputs, targets = small_data().tensors
model = DistributedDataParallel(small_mlp())
loss_of = torch.nn.CrossEntropyLoss()
optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)


def one_epoch(epoch: int) -> None:
    order = torch.randperm(len(inputs), generator=torch.Generator().manual_seed(epoch))
    running = 0.0
    for start in range(rank * SHARE, len(order), world * SHARE):
        mine = order[start : start + SHARE]
        optimizer.zero_grad()
        loss = loss_of(model(inputs[mine]), targets[mine])
        loss.backward()
        optimizer.step()
        running += loss.item()


report(rank, one_epoch, len(inputs))
dist.destroy_process_group()
