"""Handwritten digits by Lockstep in a loop of one's own: python plain_ddp_after.py, or torchrun as before."""

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import Subset, TensorDataset

import lockstep


def main(world: lockstep.World) -> None:
    torch.manual_seed(0)
    images, labels = load_digits(return_X_y=True)
    data = TensorDataset(torch.tensor(images / 16, dtype=torch.float32), torch.tensor(labels))
    train_data, eval_data = Subset(data, range(1536)), Subset(data, range(1536, 1792))

    model = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10))
    loss_fn = nn.CrossEntropyLoss()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=5)
    step = lockstep.parallelize(model, loss_fn, optimizer)
    train_loader = lockstep.batches(train_data, batch_size=64, order=sampler)
    eval_loader = lockstep.batches(eval_data, batch_size=64, shuffle=False)

    for epoch in range(5):
        for inputs, targets in train_loader:
            step(inputs, targets)
        scheduler.step()

        sums = torch.zeros(3)
        for inputs, targets in eval_loader:
            outputs, _, _ = step.evaluate(inputs, targets)
            sums[0] += loss_fn(outputs, targets) * len(targets)
            sums[1] += (outputs.argmax(1) == targets).sum()
            sums[2] += len(targets)
        world.all_reduce(sums)
        if world.rank == 0:
            print(f"epoch {epoch + 1}  loss {sums[0] / sums[2]:.5f}  accuracy {sums[1] / sums[2]:.5f}")


def sampler(epoch: int) -> torch.Tensor:
    """The order of DistributedSampler, so that the same numbers are printed; leave it out."""
    return torch.randperm(1536, generator=torch.Generator().manual_seed(epoch))


if __name__ == "__main__":
    lockstep.launch(main, devices=2)
