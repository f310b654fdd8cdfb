"""A variational autoencoder of handwritten digits (Kingma and Welling 2013).

lockstep train examples/vae.py --strategy ddp --devices 2

The digits, 8 x 8 pixels, come with scikit-learn. Reconstruction and KL divergence are summed over
the images of a batch, and both are reported beside the loss. The noise of the code
(https://arxiv.org/abs/1312.6114) is drawn in `forward`: another number of devices draws other
numbers, and ends as another seed would; a resumed run ends as if it had not been stopped. At each
evaluation new digits are decoded, `samples/step-23.png` in the run's folder.
"""

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import TensorDataset

import lockstep
from lockstep.callbacks import Sampler


class VAE(nn.Module):
    """Images (batch, 64) to logits of that shape, mean and log-variance (batch, code)."""

    def __init__(self, width: int, code: int) -> None:
        super().__init__()
        self.code = code
        self.encoder = nn.Sequential(nn.Linear(64, width), nn.ReLU(), nn.Linear(width, 2 * code))
        self.decoder = nn.Sequential(nn.Linear(code, width), nn.ReLU(), nn.Linear(width, 64))

    def forward(self, images: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Logits, mean and log-variance; in evaluation the code is the mean."""
        mean, log_variance = self.encoder(images).chunk(2, dim=1)
        code = mean
        if self.training:
            code = mean + torch.randn_like(mean) * (log_variance / 2).exp()
        return self.decoder(code), mean, log_variance


def elbo(outputs: tuple[torch.Tensor, ...], images: torch.Tensor) -> lockstep.Loss:
    """The negative evidence lower bound, summed over images, in nats."""
    logits, mean, log_variance = outputs
    reconstruction = F.binary_cross_entropy_with_logits(logits, images, reduction="sum")
    kl = (mean**2 + log_variance.exp() - log_variance - 1).sum() / 2
    count = len(images)
    parts = {"reconstruction": (reconstruction, count), "kl": (kl, count)}
    return lockstep.Loss(reconstruction + kl, count, parts=parts)


def digits(held_out: bool) -> TensorDataset:
    """Images (count, 64), also as targets; every fifth is for evaluation."""
    from sklearn.datasets import load_digits

    images = torch.tensor(load_digits().data, dtype=torch.float32) / 16
    images = images[(torch.arange(len(images)) % 5 == 0) == held_out]
    return TensorDataset(images, images)


def new_digits(model: nn.Module) -> torch.Tensor:
    """Eight pictures, decoded from codes that are drawn."""
    like = next(model.parameters())
    codes = torch.randn(8, model.code, dtype=like.dtype, device=like.device)
    pictures = model.decoder(codes).sigmoid().view(8, 1, 8, 8)
    return F.interpolate(pictures, scale_factor=8)


def job(lr: float = 2e-3, width: int = 256, code: int = 8, epochs: int = 30) -> lockstep.Job:
    """The job; its parameters are given as `--set code=2`."""
    return lockstep.Job(
        model=lambda: VAE(width, code),
        loss=elbo,
        optimizer=lambda params: torch.optim.Adam(params, lr=lr),
        train_data=lambda: digits(held_out=False),
        eval_data=lambda: digits(held_out=True),
        batch_size=64,
        epochs=epochs,
        callbacks=[Sampler(new_digits)],
    )
