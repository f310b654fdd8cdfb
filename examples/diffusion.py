"""Denoising diffusion on handwritten digits (Ho et al. 2020, https://arxiv.org/abs/2006.11239).

lockstep train examples/diffusion.py --strategy ddp --devices 2

The digits, 8 x 8 pixels, come with scikit-learn; the network learns to predict the noise in a noisy
one. Time and noise are drawn in the dataset: they depend on the epoch and the sample, so every
strategy and number of devices draws the same. At each evaluation new digits are made out of noise,
`samples/step-230.png` in the run's folder. After the 60 epochs, about one minute of two cores, most
of them can be read.
"""

import math

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import Dataset

import lockstep
from lockstep.callbacks import Sampler

TIMES = 100
BETAS = torch.linspace(1e-3, 0.12, TIMES)
"""Variance of the noise that each time adds."""
KEPT = torch.cumprod(1 - BETAS, dim=0)
"""The share of an image's variance that is left at each time; 0.002 at the last."""


class NoisyDigits(Dataset[tuple[tuple[torch.Tensor, int], torch.Tensor]]):
    """((noisy digit, time), noise); every fifth digit is for evaluation."""

    def __init__(self, held_out: bool) -> None:
        from sklearn.datasets import load_digits

        images = torch.tensor(load_digits().images, dtype=torch.float32).unsqueeze(1) / 8 - 1
        self.images = images[(torch.arange(len(images)) % 5 == 0) == held_out]

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, i: int) -> tuple[tuple[torch.Tensor, int], torch.Tensor]:
        time = int(torch.randint(TIMES, ()))
        noise = torch.randn(1, 8, 8)
        noisy = KEPT[time].sqrt() * self.images[i] + (1 - KEPT[time]).sqrt() * noise
        return (noisy, time), noise


def normed(width: int) -> nn.Sequential:
    """A convolution of what is normalized first."""
    convolution = nn.Conv2d(width, width, 3, padding=1)
    return nn.Sequential(nn.GroupNorm(4, width), nn.SiLU(), convolution)


class Block(nn.Module):
    """Two convolutions with the time added between them, added to (batch, width, h, w)."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.first = normed(width)
        self.time = nn.Linear(width, width)
        self.second = normed(width)

    def forward(self, x: torch.Tensor, time: torch.Tensor) -> torch.Tensor:
        """The block; time: (batch, width)."""
        return x + self.second(self.first(x) + self.time(time)[:, :, None, None])


class Denoiser(nn.Module):
    """Noisy images (batch, 1, 8, 8) and times (batch,) to the noise, by a small U-Net."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.width = width
        self.time = nn.Sequential(nn.Linear(width, width), nn.SiLU(), nn.Linear(width, width))
        self.begin = nn.Conv2d(1, width, 3, padding=1)
        self.down = Block(width)
        self.halve = nn.Conv2d(width, width, 3, stride=2, padding=1)
        self.bottom = Block(width)
        self.enlarge = nn.ConvTranspose2d(width, width, 2, stride=2)
        self.join = nn.Conv2d(2 * width, width, 1)
        self.up = Block(width)
        self.end = nn.Conv2d(width, 1, 3, padding=1)

    def forward(self, images: torch.Tensor, times: torch.Tensor) -> torch.Tensor:
        """The noise, (batch, 1, 8, 8)."""
        rates = torch.exp(torch.arange(self.width // 2).to(images) * (-8 / self.width))
        angles = times[:, None] * rates
        time = self.time(torch.cat([angles.sin(), angles.cos()], dim=1))
        skip = self.down(self.begin(images), time)
        x = self.enlarge(self.bottom(self.halve(skip), time))
        return self.end(self.up(self.join(torch.cat([skip, x], dim=1)), time))


def digits_from_noise(model: nn.Module) -> torch.Tensor:
    """Eight pictures with pixels from 0 to 1: the model takes the noise away, time by time."""
    like = next(model.parameters())
    x = torch.randn(8, 1, 8, 8, dtype=like.dtype, device=like.device)
    for time in reversed(range(TIMES)):
        beta, kept = float(BETAS[time]), float(KEPT[time])
        noise = model(x, torch.full((8,), time, device=like.device))
        x = (x - beta / math.sqrt(1 - kept) * noise) / math.sqrt(1 - beta)
        if time:
            x = x + math.sqrt(beta) * torch.randn_like(x)
    return F.interpolate((x + 1) / 2, scale_factor=8).clamp(0, 1)


def job(lr: float = 2e-3, width: int = 32, epochs: int = 60) -> lockstep.Job:
    """The job; its parameters are given as `--set width=64`."""
    return lockstep.Job(
        model=lambda: Denoiser(width),
        loss=nn.MSELoss(),
        optimizer=lambda params: torch.optim.AdamW(params, lr=lr),
        train_data=lambda: NoisyDigits(held_out=False),
        eval_data=lambda: NoisyDigits(held_out=True),
        batch_size=64,
        epochs=epochs,
        eval_every="10epochs",
        lr_scheduler=lambda it: torch.optim.lr_scheduler.CosineAnnealingLR(it, T_max=epochs),
        callbacks=[Sampler(digits_from_noise)],
    )
