"""Handwritten digits by a LightningModule: python lightning_before.py."""

import lightning
import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, Subset, TensorDataset


class Digits(lightning.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.net(inputs)

    def training_step(self, batch: tuple[torch.Tensor, torch.Tensor], index: int) -> torch.Tensor:
        inputs, targets = batch
        loss = F.cross_entropy(self(inputs), targets)
        self.log("train_loss", loss, sync_dist=True, on_step=False, on_epoch=True)
        return loss

    def validation_step(self, batch: tuple[torch.Tensor, torch.Tensor], index: int) -> None:
        inputs, targets = batch
        outputs = self(inputs)
        self.log("eval_loss", F.cross_entropy(outputs, targets), sync_dist=True)
        self.log("accuracy", (outputs.argmax(1) == targets).float().mean(), sync_dist=True)

    def configure_optimizers(self) -> tuple[list[torch.optim.Optimizer], list[object]]:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)
        scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=5)
        return [optimizer], [scheduler]


def data() -> tuple[Subset, Subset]:
    images, labels = load_digits(return_X_y=True)
    whole = TensorDataset(torch.tensor(images / 16, dtype=torch.float32), torch.tensor(labels))
    return Subset(whole, range(1536)), Subset(whole, range(1536, 1792))


if __name__ == "__main__":
    lightning.seed_everything(0)
    train_data, eval_data = data()
    trainer = lightning.Trainer(
        max_epochs=5,
        accelerator="cpu",
        devices=2,
        strategy="ddp",
        gradient_clip_val=1.0,
        logger=False,
        enable_checkpointing=False,
    )
    trainer.fit(Digits(), DataLoader(train_data, batch_size=32, shuffle=True), DataLoader(eval_data, batch_size=32))
    if trainer.is_global_zero:
        print(*(f"{name} {value:.5f}" for name, value in trainer.callback_metrics.items()))
