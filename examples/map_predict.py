"""A function over processes and a model over devices, item by item: handwritten digits, turned
upright and read.

python examples/map_predict.py [devices]
"""

import sys

import torch
from digits import Net, digits

import lockstep


def upright(image: torch.Tensor) -> torch.Tensor:
    """Shear an image of (1, 8, 8) so that its ink leans neither way."""
    rows, columns = torch.meshgrid(torch.arange(8.0), torch.arange(8.0), indexing="ij")
    ink = image[0] / image.sum()
    down, right = rows - (ink * rows).sum(), columns - (ink * columns).sum()
    lean = (ink * down * right).sum() / (ink * down**2).sum()
    matrix = torch.tensor([[1.0, lean, 0.0], [0.0, 1.0, 0.0]])
    grid = torch.nn.functional.affine_grid(matrix[None], [1, 1, 8, 8], align_corners=False)
    return torch.nn.functional.grid_sample(image[None], grid, align_corners=False)[0]


def main(devices: str = "2xcpu", epochs: int = 10) -> float:
    """Train on upright images, read those that were for evaluation; gives the part that was read
    right.
    """
    (images, labels), (unseen, expected) = (
        digits(held_out=False).tensors,
        digits(held_out=True).tensors,
    )
    straight = torch.stack(list(lockstep.map(upright, images, devices)))

    job = lockstep.Job(
        model=Net,
        loss=torch.nn.CrossEntropyLoss(),
        optimizer=lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9),
        train_data=torch.utils.data.TensorDataset(straight, labels),
        batch_size=128,
        epochs=epochs,
    )
    model = lockstep.train(job, devices=devices, quiet=True).model()

    # Lazily: no more than some images are in memory at once, however many there are.
    found = lockstep.map(model, lockstep.map(upright, unseen, devices), devices, batch_size=64)
    right = sum(
        int(logits.argmax()) == label
        for logits, label in zip(found, expected.tolist(), strict=True)
    )
    return right / len(expected)


if __name__ == "__main__":
    print(f"read right: {main(*sys.argv[1:]):.1%}")
