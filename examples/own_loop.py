"""Your own loop: on two CPU devices, which share its cores by ddp, a process for each.

python examples/own_loop.py
"""

import torch
from torch import nn
from torch.utils.data import TensorDataset

import lockstep


def train(world: lockstep.World, epochs: int) -> float:
    """Runs on every rank; gives the last loss of the global batch."""
    torch.manual_seed(0)
    inputs = torch.randn(1000, 20)
    data = TensorDataset(inputs, inputs.sum(dim=1, keepdim=True).tanh())
    model = nn.Sequential(nn.Linear(20, 64), nn.Tanh(), nn.Linear(64, 1))
    step = lockstep.parallelize(
        model, nn.MSELoss(), lambda params: torch.optim.Adam(params, lr=0.01)
    )
    batches = lockstep.batches(data, batch_size=64)  # each pass is an epoch, in a new order
    loss = float("nan")
    for epoch in range(epochs):
        for batch in batches:
            loss = step(batch).loss
        if world.rank == 0:
            print(f"epoch {epoch + 1}  loss {loss:.4f}")
    return loss


if __name__ == "__main__":
    print(lockstep.launch(train, devices=2, args=(5,)))
