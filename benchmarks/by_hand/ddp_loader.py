"""The loop of the tutorials: DDP, DistributedSampler, DataLoader."""

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader
from torch.utils.data.distributed import DistributedSampler

from benchmarks.by_hand.common import SHARE, report, small_data, small_mlp

dist.init_process_group("gloo")
torch.manual_seed(0)
data = small_data()
sampler = DistributedSampler(data)
loader = DataLoader(data, batch_size=SHARE, sampler=sampler)
model = DistributedDataParallel(small_mlp())
loss_of = torch.nn.CrossEntropyLoss()
optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)


def one_epoch(epoch: int) -> None:
    sampler.set_epoch(epoch)
    running = 0.0
    for inputs, targets in loader:
        optimizer.zero_grad()
        loss = loss_of(model(inputs), targets)
        loss.backward()
        optimizer.step()
        running += loss.item()


report(dist.get_rank(), one_epoch, len(data))
dist.destroy_process_group()
