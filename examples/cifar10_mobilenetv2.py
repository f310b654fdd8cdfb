"""CIFAR-10 enlarged to 112 x 112, MobileNetV2, SGD, cosine annealing: one device against several by
one command.

lockstep train examples/cifar10_mobilenetv2.py --devices 2 --set data=FOLDER
lockstep train examples/cifar10_mobilenetv2.py --devices 2 --set generated=true  without the images,
for timing only

FOLDER holds the six .bin files of https://www.cs.toronto.edu/~kriz/cifar.html
(cifar-10-binary.tar.gz); nothing is downloaded. At 112 x 112 a batch of 256 wants about 8 GB over
all devices: `--accumulate 4` takes a fourth of that.
"""

from collections.abc import Callable
from pathlib import Path

import torch
from models.mobilenetv2 import MobileNetV2
from torch import nn
from torch.utils.data import TensorDataset

import lockstep
from lockstep.errors import JobError

ROW = 1 + 3 * 32 * 32
"""Bytes of an image in the files: its label, then its red, green and blue pixels, row by row."""

TRAINING = [f"data_batch_{i}.bin" for i in range(1, 6)]
HELD_OUT = ["test_batch.bin"]
SOURCE = "unpack cifar-10-binary.tar.gz of https://www.cs.toronto.edu/~kriz/cifar.html"


class Enlarged(nn.Module):
    """Bytes (batch, 3, 32, 32) to standardised images (batch, 3, size, size).

    It is the model's first layer, so that enlarging is done on the device, and only bytes are kept
    and travel: all 50,000 images are 0.15 GB as bytes, and would be 7.5 GB as floats of 112 x 112.
    """

    def __init__(self, size: int) -> None:
        super().__init__()
        self.size = size
        # Mean and deviation of the training images.
        self.register_buffer(
            "mean", 255 * torch.tensor([0.4914, 0.4822, 0.4465]).view(3, 1, 1), persistent=False
        )
        self.register_buffer(
            "deviation",
            255 * torch.tensor([0.2470, 0.2435, 0.2616]).view(3, 1, 1),
            persistent=False,
        )

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        """The images as the network wants them, in the number format of this module."""
        standard = (images - self.mean) / self.deviation
        if self.size == images.shape[-1]:
            return standard
        return nn.functional.interpolate(
            standard, size=(self.size, self.size), mode="bilinear", align_corners=False
        )


def cifar10(folder: str, files: list[str]) -> TensorDataset:
    """Images as bytes (count, 3, 32, 32) and labels (count,) of some of the binary files.

    Raises:
        JobError: a file isn't there, or is no whole number of images with labels 0 to 9.
    """
    if not folder:
        raise JobError(
            f"data: say where CIFAR-10 is, --set data=FOLDER ({SOURCE}), or time it with "
            "generated=true"
        )
    place = Path(folder).expanduser()
    if (place / "cifar-10-batches-bin").is_dir():
        place = place / "cifar-10-batches-bin"
    rows = [_rows(place / name) for name in files]
    images, labels = torch.cat([r[:, 1:] for r in rows]), torch.cat([r[:, 0] for r in rows])
    return TensorDataset(images.view(-1, 3, 32, 32), labels.long())


def _rows(path: Path) -> torch.Tensor:
    """The bytes of a file: (images, ROW); they are read when they are used."""
    if not path.is_file():
        raise JobError(
            f"data: there is no {path.name} in {path.parent}: {SOURCE}, and say its folder"
        )
    size = path.stat().st_size
    if not size or size % ROW:
        raise JobError(
            f"data: {path} has {size:,} bytes, no whole number of images of {ROW:,}: {SOURCE} again"
        )
    rows = torch.from_file(str(path), size=size, dtype=torch.uint8).view(-1, ROW)
    if (highest := int(rows[:, 0].max())) > 9:
        raise JobError(
            f"data: {path} has a label {highest}, where 0 to 9 are expected (CIFAR-100?): "
            f"{SOURCE} again"
        )
    return rows


def stand_in(count: int, seed: int) -> TensorDataset:
    """Noise in the shape of the real images; nothing can be learned from it."""
    made = torch.Generator().manual_seed(seed)
    images = torch.randint(256, (count, 3, 32, 32), generator=made, dtype=torch.uint8)
    return TensorDataset(images, torch.randint(10, (count,), generator=made))


def say_generated(event: lockstep.Event) -> None:
    """A line at the start, so that nobody takes the accuracy for one."""
    if event.kind == "started":
        print(
            "generated noise in the place of CIFAR-10: the times count, loss and accuracy mean "
            "nothing"
        )


def accuracy(outputs: torch.Tensor, targets: torch.Tensor) -> tuple[torch.Tensor, int]:
    """How many are right, of how many."""
    return (outputs.argmax(dim=1) == targets).sum(), len(targets)


def job(
    data: str = "",
    image_size: int = 112,
    lr: float = 0.05,
    epochs: int = 30,
    generated: bool = False,
    samples: int = 50_000,
    dropout: float = 0.2,
) -> lockstep.Job:
    """The job; its parameters are given as `--set image_size=224`.

    Args:
        data: the folder of the binary files, or one that has it as ``cifar-10-batches-bin``.
        image_size: height and width that the images are enlarged to.
        lr: the learning rate at the start.
        epochs: also the length of the annealing; ``--epochs 10`` sets it.
        generated: take a stand-in of the same shape for the images.
        samples: of the stand-in for training; a fifth of that is for evaluation.
        dropout: before the classifier.
    """
    if image_size < 32:
        raise JobError(f"image_size: {image_size} is smaller than the images, which are 32 x 32")
    if samples < 5:
        raise JobError(f"samples: {samples} is too small, a fifth is for evaluation")
    train_data: Callable[[], TensorDataset] = lambda: cifar10(data, TRAINING)  # noqa: E731
    eval_data: Callable[[], TensorDataset] = lambda: cifar10(data, HELD_OUT)  # noqa: E731
    if generated:
        train_data, eval_data = lambda: stand_in(samples, 1), lambda: stand_in(samples // 5, 2)
    return lockstep.Job(
        model=lambda: nn.Sequential(Enlarged(image_size), MobileNetV2(10, dropout)),
        loss=nn.CrossEntropyLoss(),
        optimizer=lambda params: torch.optim.SGD(params, lr=lr, momentum=0.9, weight_decay=5e-4),
        train_data=train_data,
        eval_data=eval_data,
        batch_size=256,
        epochs=epochs,
        lr_scheduler=lambda optimizer: torch.optim.lr_scheduler.CosineAnnealingLR(
            optimizer, T_max=epochs
        ),
        metrics={"accuracy": accuracy},
        on_event=[say_generated] if generated else [],
    )
