"""Handwritten digits by Accelerate: torchrun --nproc-per-node 2 accelerate_before.py."""

import torch
from accelerate import Accelerator
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import Subset, TensorDataset


def main() -> None:
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    torch.manual_seed(0)
    images, labels = load_digits(return_X_y=True)
    data = TensorDataset(torch.tensor(images / 16, dtype=torch.float32), torch.tensor(labels))
    train_data, eval_data = Subset(data, range(1536)), Subset(data, range(1536, 1792))

    model = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10))
    loss_fn = nn.CrossEntropyLoss()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.003)
    train_loader = torch.utils.data.DataLoader(train_data, batch_size=16)
    eval_loader = torch.utils.data.DataLoader(eval_data, batch_size=32)
    model, optimizer, train_loader, eval_loader = accelerator.prepare(model, optimizer, train_loader, eval_loader)

    for epoch in range(3):
        model.train()
        for inputs, targets in train_loader:
            with accelerator.accumulate(model):
                accelerator.backward(loss_fn(model(inputs), targets))
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                optimizer.zero_grad()

        model.eval()
        loss, right, count = 0.0, 0, 0
        for inputs, targets in eval_loader:
            with torch.no_grad():
                outputs = model(inputs)
            outputs, targets = accelerator.gather_for_metrics((outputs, targets))
            loss += loss_fn(outputs, targets).item() * len(targets)
            right += (outputs.argmax(1) == targets).sum().item()
            count += len(targets)
        if accelerator.is_main_process:
            print(f"epoch {epoch + 1}  loss {loss / count:.5f}  accuracy {right / count:.5f}")
    accelerator.end_training()


if __name__ == "__main__":
    main()
