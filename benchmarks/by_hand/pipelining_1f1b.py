"""PyTorch's own pipeline over two processes: the stack's halves, 16 micro-batches, 1F1B."""

import torch
import torch.distributed as dist
from torch.distributed.pipelining import PipelineStage, Schedule1F1B

from benchmarks.by_hand.common import report
from benchmarks.models import Stack, sgd, stack_job

BATCH, MICROBATCHES = 64, 16


class Half(torch.nn.Module):
    """Four of the eight layers; the second half also takes the mean over the tokens."""

    def __init__(self, layers: torch.nn.ModuleList, last: bool) -> None:
        super().__init__()
        self.layers, self.last = layers, last

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x.mean(dim=1) if self.last else x


dist.init_process_group("gloo")
torch.manual_seed(0)
rank = dist.get_rank()
inputs, targets = stack_job().train_data.tensors
half = Half(Stack().layers[4 * rank : 4 * rank + 4], rank == 1)
stage = PipelineStage(half, rank, 2, torch.device("cpu"))
schedule = Schedule1F1B(stage, MICROBATCHES, loss_fn=torch.nn.MSELoss())
optimizer = sgd(half.parameters())


def one_epoch(epoch: int) -> None:
    for start in range(0, len(inputs), BATCH):
        optimizer.zero_grad()
        if rank == 0:
            schedule.step(inputs[start : start + BATCH])
        else:
            losses: list[torch.Tensor] = []
            schedule.step(target=targets[start : start + BATCH], losses=losses)
            torch.stack(losses).detach().mean().item()
        optimizer.step()


report(rank, one_epoch, len(inputs))
dist.destroy_process_group()
