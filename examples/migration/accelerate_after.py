"""Handwritten digits by Lockstep in a loop of one's own: python accelerate_after.py, or torchrun."""

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
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.003)
    train_loader = lockstep.batches(train_data, batch_size=64, shuffle=False)
    eval_loader = lockstep.batches(eval_data, batch_size=64, shuffle=False)
    step = lockstep.parallelize(model, loss_fn, optimizer, accumulate=2, clip_norm=1.0)

    for epoch in range(3):
        model.train()
        for inputs, targets in train_loader:
            step(inputs, targets)

        loss, right, count = 0.0, 0, 0
        for inputs, targets in eval_loader:
            outputs, _, _ = step.evaluate(inputs, targets)
            loss += loss_fn(outputs, targets).item() * len(targets)
            right += (outputs.argmax(1) == targets).sum().item()
            count += len(targets)
        loss, right, count = world.all_reduce(torch.tensor([loss, right, count]))
        if world.rank == 0:
            print(f"epoch {epoch + 1}  loss {loss / count:.5f}  accuracy {right / count:.5f}")


if __name__ == "__main__":
    lockstep.launch(main, devices=2)
