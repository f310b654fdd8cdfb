"""The small step and nothing else: no loading, no loss read, a fused optimizer."""

import torch

from benchmarks.by_hand.common import report, small_data, small_mlp

BATCH = 64

torch.manual_seed(0)
data = small_data()
batches = list(zip(*(tensor.split(BATCH) for tensor in data.tensors), strict=True))
model = small_mlp()
loss_of = torch.nn.CrossEntropyLoss()
optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9, fused=True)


def one_epoch(epoch: int) -> None:
    for inputs, targets in batches:
        optimizer.zero_grad()
        loss_of(model(inputs), targets).backward()
        optimizer.step()


report(0, one_epoch, len(data))
