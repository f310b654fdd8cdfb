"""The same loop with Lightning Fabric."""

import os

import torch
from lightning.fabric import Fabric
from torch.utils.data import DataLoader

from benchmarks.by_hand.common import SHARE, report, small_data, small_mlp

fabric = Fabric(accelerator="cpu", devices=int(os.environ["WORLD_SIZE"]), strategy="ddp")
fabric.launch()
torch.manual_seed(0)
data = small_data()
loader = fabric.setup_dataloaders(DataLoader(data, batch_size=SHARE, shuffle=True))
net = small_mlp()
model, optimizer = fabric.setup(net, torch.optim.SGD(net.parameters(), lr=0.01, momentum=0.9))
loss_of = torch.nn.CrossEntropyLoss()


def one_epoch(epoch: int) -> None:
    running = 0.0
    for inputs, targets in loader:
        optimizer.zero_grad()
        loss = loss_of(model(inputs), targets)
        fabric.backward(loss)
        optimizer.step()
        running += loss.item()


report(fabric.global_rank, one_epoch, len(data))
