"""ResNet-50 over two devices: stem and first two groups of blocks on one, the rest on the other.

lockstep train examples/resnet50_split.py --steps 20
lockstep partition examples/resnet50_split.py --devices 2     the split that measuring finds
lockstep compare examples/resnet50_split.py --strategies single,mp,pp --sweep microbatches=1,2,4,8
--devices 2

`--set data=FILE.pt` takes a file that torch.save wrote: a dict of "images", bytes (count, 3, h, w),
and "labels" (count,). Without one there is noise in their place, for timing; `generated=false`
refuses that.
"""

from pathlib import Path

import torch
from models.resnet50 import ResNet50
from torch import nn
from torch.utils.data import TensorDataset

import lockstep
from lockstep.errors import JobError

TWO_DEVICES = {"conv1": 0, "bn1": 0, "layer1": 0, "layer2": 0, "layer3": 1, "layer4": 1, "fc": 1}
"""Device map: stem and first two groups on one device, the rest on the other."""


class Classifier(ResNet50):
    """ResNet-50 that takes images as bytes, so that only bytes are kept and travel."""

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        """Logits (batch, classes) of bytes (batch, 3, h, w), which are brought to about mean 0
        and deviation 1.
        """
        return super().forward((images.to(self.conv1.weight.dtype) - 127.5) / 64)


def images_of(data: str) -> TensorDataset:
    """The images and labels of a file.

    Raises:
        JobError: there is none, or it has other things in it.
    """
    if not data:
        raise JobError(
            "data: say a file of images, --set data=FILE.pt; without generated=false noise is taken"
        )
    if not Path(data).is_file():
        raise JobError(f"data: there is no file {data}")
    held = torch.load(data, weights_only=True)
    if not isinstance(held, dict) or not {"images", "labels"} <= set(held):
        raise JobError(f'data: {data} has no "images" and "labels"')
    return TensorDataset(held["images"], held["labels"])


def noise(count: int, size: int, classes: int) -> TensorDataset:
    """Noise in the shape of images; nothing can be learned from it."""
    made = torch.Generator().manual_seed(1)
    images = torch.randint(256, (count, 3, size, size), generator=made, dtype=torch.uint8)
    return TensorDataset(images, torch.randint(classes, (count,), generator=made))


def say_generated(event: lockstep.Event) -> None:
    """A line at the start, so that nobody takes the loss for one."""
    if event.kind == "started":
        print(
            "generated noise in the place of images: the times count, loss and accuracy mean "
            "nothing"
        )


def accuracy(outputs: torch.Tensor, targets: torch.Tensor) -> tuple[torch.Tensor, int]:
    """How many are right, of how many."""
    return (outputs.argmax(dim=1) == targets).sum(), len(targets)


def job(
    data: str = "",
    generated: bool = True,
    samples: int = 1024,
    image_size: int = 112,
    classes: int = 10,
    lr: float = 0.05,
) -> lockstep.Job:
    """The job; its parameters are given as `--set image_size=224`.

    Args:
        data: a file of images and labels.
        generated: take noise where no file is given.
        samples: of the noise.
        image_size: of the noise, height and width.
        classes: of the labels.
        lr: the learning rate.
    """
    noisy = generated and not data
    return lockstep.Job(
        model=lambda: Classifier(classes),
        loss=nn.CrossEntropyLoss(),
        optimizer=lambda params: torch.optim.SGD(params, lr=lr, momentum=0.9, weight_decay=1e-4),
        train_data=(lambda: noise(samples, image_size, classes))
        if noisy
        else (lambda: images_of(data)),
        batch_size=32,
        metrics={"accuracy": accuracy},
        on_event=[say_generated] if noisy else [],
    )
