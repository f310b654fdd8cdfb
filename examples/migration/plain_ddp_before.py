"""Handwritten digits by DistributedDataParallel: torchrun --nproc-per-node 2 plain_ddp_before.py."""

import torch
import torch.distributed as dist
from sklearn.datasets import load_digits
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import Subset, TensorDataset
from torch.utils.data.distributed import DistributedSampler


def main() -> None:
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    images, labels = load_digits(return_X_y=True)
    data = TensorDataset(torch.tensor(images / 16, dtype=torch.float32), torch.tensor(labels))
    train_data, eval_data = Subset(data, range(1536)), Subset(data, range(1536, 1792))

    model = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10))
    model = DistributedDataParallel(model)
    loss_fn = nn.CrossEntropyLoss()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=5)
    sampler = DistributedSampler(train_data)
    train_loader = torch.utils.data.DataLoader(train_data, batch_size=32, sampler=sampler)
    eval_loader = torch.utils.data.DataLoader(
        eval_data, batch_size=32, sampler=DistributedSampler(eval_data, shuffle=False)
    )

    for epoch in range(5):
        sampler.set_epoch(epoch)
        model.train()
        for inputs, targets in train_loader:
            loss = loss_fn(model(inputs), targets)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        scheduler.step()

        model.eval()
        sums = torch.zeros(3)
        for inputs, targets in eval_loader:
            with torch.no_grad():
                outputs = model(inputs)
            sums[0] += loss_fn(outputs, targets) * len(targets)
            sums[1] += (outputs.argmax(1) == targets).sum()
            sums[2] += len(targets)
        dist.all_reduce(sums)
        if dist.get_rank() == 0:
            print(f"epoch {epoch + 1}  loss {sums[0] / sums[2]:.5f}  accuracy {sums[1] / sums[2]:.5f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
