"""CLIP in small: which lower half belongs to which upper half of a handwritten digit?

Two towers embed the halves of scikit-learn's digits. The loss compares each upper half with the
lower halves of all digits of the global batch: ``loss_over="batch"``. So under every strategy, and
with ``accumulate``, the negatives and the gradients are those of one device.

lockstep train examples/contrastive.py --strategy ddp --devices 2

``python examples/contrastive.py`` compares with a loss of each local batch by itself, as 8 devices
compute it without ``loss_over="batch"``.
"""

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import TensorDataset

import lockstep


class TwoTowers(nn.Module):
    """Halves (batch, 2, 32) to two embeddings (batch, 16); the first has the learned scale."""

    def __init__(self) -> None:
        super().__init__()
        self.upper = nn.Sequential(nn.Linear(32, 128), nn.ReLU(), nn.Linear(128, 16))
        self.lower = nn.Sequential(nn.Linear(32, 128), nn.ReLU(), nn.Linear(128, 16))
        self.log_scale = nn.Parameter(torch.tensor(2.0))

    def forward(self, halves: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """A row for each digit in each output; a scalar by itself would have none."""
        upper = F.normalize(self.upper(halves[:, 0]), dim=-1)
        lower = F.normalize(self.lower(halves[:, 1]), dim=-1)
        return upper * self.log_scale.exp(), lower


def contrast(outputs: tuple[torch.Tensor, torch.Tensor], kinds: torch.Tensor) -> torch.Tensor:
    """The symmetric cross-entropy of CLIP (Radford et al. 2021, https://arxiv.org/abs/2103.00020)."""
    upper, lower = outputs
    logits = upper @ lower.T
    own = torch.arange(len(logits), device=logits.device)
    return (F.cross_entropy(logits, own) + F.cross_entropy(logits.T, own)) / 2


def digits(held_out: bool) -> TensorDataset:
    """Halves (count, 2, 32), and the digits that they are of; every fourth is for evaluation."""
    from sklearn.datasets import load_digits

    data = load_digits()
    images = torch.tensor(data.data, dtype=torch.float32).view(-1, 2, 32) / 16
    rows = (torch.arange(len(images)) % 4 == 0) == held_out
    return TensorDataset(images[rows], torch.tensor(data.target)[rows])


def found_again(model: nn.Module) -> float:
    """The share of held-out upper halves whose own lower half is the nearest of all."""
    with torch.no_grad():
        upper, lower = model(digits(held_out=True).tensors[0])
    nearest = (upper @ lower.T).argmax(1)
    return float((nearest == torch.arange(len(nearest))).float().mean())


def job(loss_over: str = "batch") -> lockstep.Job:
    """Both towers and their scale."""
    return lockstep.Job(
        model=TwoTowers,
        loss=contrast,
        loss_over=loss_over,
        optimizer=lambda params: torch.optim.AdamW(params, lr=3e-3, weight_decay=0.1),
        train_data=lambda: digits(held_out=False),
        eval_data=lambda: digits(held_out=True),
        batch_size=128,
        epochs=60,
    )


if __name__ == "__main__":
    for seed in range(5):
        shares = []
        for loss_over in ("batch", "samples"):
            # Eight micro-batches are computed as the local batches of eight devices are.
            run = lockstep.train(
                job(loss_over),
                strategy="single",
                devices="1xcpu",
                accumulate=8,
                accept_differences=True,
                seed=seed,
                quiet=True,
            )
            shares.append(found_again(run.model()))
        print(
            f"seed {seed}: {shares[0]:.1%} found over the batch, {shares[1]:.1%} over local batches"
        )
