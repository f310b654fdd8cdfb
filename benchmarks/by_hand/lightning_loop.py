"""The small step with Lightning's Trainer, one process, with all that it does besides switched
off.
"""

import logging
import statistics
import time
from typing import Any

import lightning
import torch
from torch.utils.data import DataLoader

from benchmarks.by_hand.common import EPOCHS, small_data, small_mlp

logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)


class Module(lightning.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = small_mlp()
        self.loss_of = torch.nn.CrossEntropyLoss()
        self.rates: list[float] = []

    def training_step(self, batch: Any, index: int) -> torch.Tensor:
        inputs, targets = batch
        return self.loss_of(self.net(inputs), targets)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.01, momentum=0.9, fused=True)

    def on_train_epoch_start(self) -> None:
        self.start = time.perf_counter()

    def on_train_epoch_end(self) -> None:
        self.rates.append(len(data) / (time.perf_counter() - self.start))


torch.manual_seed(0)
data = small_data()
module = Module()
trainer = lightning.Trainer(
    accelerator="cpu",
    devices=1,
    max_epochs=EPOCHS,
    logger=False,
    enable_checkpointing=False,
    enable_progress_bar=False,
    enable_model_summary=False,
)
trainer.fit(module, DataLoader(data, batch_size=64, shuffle=True))
print(statistics.median(module.rates[1:]))
