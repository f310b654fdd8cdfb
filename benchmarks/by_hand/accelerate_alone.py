"""The small step with Accelerate, one process."""

import torch
from accelerate import Accelerator
from torch.utils.data import DataLoader

from benchmarks.by_hand.common import report, small_data, small_mlp

accelerator = Accelerator(cpu=True)
torch.manual_seed(0)
data = small_data()
net = small_mlp()
model, optimizer, loader = accelerator.prepare(
    net,
    torch.optim.SGD(net.parameters(), lr=0.01, momentum=0.9, fused=True),
    DataLoader(data, batch_size=64, shuffle=True),
)
loss_of = torch.nn.CrossEntropyLoss()


def one_epoch(epoch: int) -> None:
    for inputs, targets in loader:
        optimizer.zero_grad()
        loss = loss_of(model(inputs), targets)
        accelerator.backward(loss)
        optimizer.step()


report(0, one_epoch, len(data))
accelerator.end_training()
