"""A U-Net that takes the noise out of handwritten digits: 1,797 real images that come with
scikit-learn.

lockstep train examples/unet.py --devices 2
lockstep partition examples/unet.py --devices 2

A fifth is for evaluation. The images, 8 x 8 pixels, are enlarged to 16 x 16, and get noise of
deviation 0.5 (pixels are 0 to 1). An image's noise depends on its number, so each run and each
number of devices sees the same. Leaving an image as it is has a mean square error of 0.25; the
job's metric says what is left of that.
"""

import torch
from models.unet import UNet
from torch import nn
from torch.utils.data import TensorDataset

import lockstep

DEVIATION = 0.5


def noisy_digits(held_out: bool) -> TensorDataset:
    """Noisy images and clean ones, each (count, 1, 16, 16); every fifth is for evaluation."""
    from sklearn.datasets import load_digits

    clean = torch.tensor(load_digits().images, dtype=torch.float32).unsqueeze(1) / 16
    clean = nn.functional.interpolate(clean, scale_factor=2, mode="bilinear", align_corners=False)
    noisy = clean + DEVIATION * torch.randn(clean.shape, generator=torch.Generator().manual_seed(0))
    chosen = (torch.arange(len(clean)) % 5 == 0) == held_out
    return TensorDataset(noisy[chosen], clean[chosen])


def left(outputs: torch.Tensor, targets: torch.Tensor) -> tuple[torch.Tensor, int]:
    """The share of the noise's square that is left: 1 for an image as it was, 0 for a clean one."""
    return ((outputs - targets) ** 2).mean(dim=(1, 2, 3)).sum() / DEVIATION**2, len(targets)


def job(lr: float = 2e-3, width: int = 16, depth: int = 2, epochs: int = 5) -> lockstep.Job:
    """The job; its parameters are given as `--set width=32`.

    Args:
        lr: the learning rate at the start.
        width: channels at full size.
        depth: how often the size is halved.
        epochs: also the length of the annealing.
    """
    return lockstep.Job(
        model=lambda: UNet(1, 1, width, depth),
        loss=nn.MSELoss(),
        optimizer=lambda params: torch.optim.AdamW(params, lr=lr),
        train_data=lambda: noisy_digits(held_out=False),
        eval_data=lambda: noisy_digits(held_out=True),
        batch_size=32,
        epochs=epochs,
        lr_scheduler=lambda optimizer: torch.optim.lr_scheduler.CosineAnnealingLR(
            optimizer, T_max=epochs
        ),
        metrics={"left": left},
    )
