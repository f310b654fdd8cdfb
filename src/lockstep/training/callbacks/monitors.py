"""What shows how a training goes: learning rates, and samples of what the model makes."""

from __future__ import annotations

import struct
import zlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from lockstep.errors import JobError
from lockstep.tensors.seeding import seeded
from lockstep.training.callbacks.callback import Callback, TrainingContext


class LearningRateMonitor(Callback):
    """Adds the learning rate of each group of the optimizer to the metrics, as ``lr/0`` or
    ``lr/name``.

    A group's name is its ``"name"``, where it has one. (``lr``, that of the first group, is there
    by itself.)::

        callbacks = [LearningRateMonitor()]
    """

    def on_log(self, training: TrainingContext) -> None:
        """Add the learning rates."""
        for i, group in enumerate(training.optimizer.param_groups):
            if "lr" in group:
                training.metrics[f"lr/{group.get('name', i)}"] = float(group["lr"])

    def on_evaluated(self, training: TrainingContext) -> None:
        """Add the learning rates."""
        self.on_log(training)


class Sampler(Callback):
    """Writes what a function makes with the model at each evaluation: ``samples/step-120.txt`` or
    ``.png``.

    The function is called on every rank, in evaluation mode, with the weights that are evaluated,
    under one seed. It gives a text, a list of texts, or pictures: a tensor of (channels, height,
    width), or a batch of them, with 1 or 3 channels, of bytes, or of floats from 0 to 1::

        def digits(model):
            return model.decode(torch.randn(8, 16))

        callbacks = [Sampler(digits, every=2)]

    Args:
        function: is given the model.
        every: evaluations from one sample to the next.
        name: of the folder.
        seed: of what it draws.
    """

    def __init__(
        self,
        function: Callable[[nn.Module], str | Sequence[str] | torch.Tensor],
        *,
        every: int = 1,
        name: str = "samples",
        seed: int = 0,
    ) -> None:
        self._function = function
        self._every = every
        self._seed = seed
        self.output: str = name
        self._evaluations = 0

    def on_evaluated(self, training: TrainingContext) -> None:
        """Call the function, and write on rank 0 what it gives."""
        self._evaluations += 1
        if self._evaluations % self._every:
            return

        with training.evaluating(), training._step.whole_parameters(), seeded(self._seed):
            made = self._function(training.model)
        if not training.world.is_first:
            return

        path = training.folder / self.output / f"step-{training.step}"
        path.parent.mkdir(exist_ok=True)
        if isinstance(made, torch.Tensor):
            path.with_suffix(".png").write_bytes(png_of(made))
        else:
            text = made if isinstance(made, str) else "\n".join(made)
            path.with_suffix(".txt").write_text(text)

    def state_dict(self) -> dict[str, Any]:
        """Return the number of evaluations so far."""
        return {"evaluations": self._evaluations}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on counting from there."""
        self._evaluations = state["evaluations"]


def png_of(pictures: torch.Tensor) -> bytes:
    """Return a PNG file of a picture, or of several side by side. Source:
    https://www.w3.org/TR/png-3/.

    Raises:
        JobError: the tensor isn't of pictures.
    """
    batch = pictures.detach().cpu()
    if batch.dim() == 3:
        batch = batch[None]
    if batch.dim() != 4 or batch.shape[1] not in (1, 3) or not batch.numel():
        raise JobError(
            f"Sampler: pictures are (n, 1 or 3, height, width), not {tuple(pictures.shape)}"
        )

    if batch.is_floating_point():
        batch = (batch.float().clamp(0, 1) * 255).round()
    side_by_side = torch.cat(list(batch.to(torch.uint8)), dim=2)
    rows = side_by_side.permute(1, 2, 0).contiguous().numpy()

    height, width, channels = rows.shape
    colour_type = 2 if channels == 3 else 0
    header = struct.pack(">IIBBBBB", width, height, 8, colour_type, 0, 0, 0)
    body = b"".join(b"\0" + row.tobytes() for row in rows)  # each row begins with its filter: none
    chunks = [
        _chunk(b"IHDR", header),
        _chunk(b"IDAT", zlib.compress(body)),
        _chunk(b"IEND", b""),
    ]
    return b"\x89PNG\r\n\x1a\n" + b"".join(chunks)


def _chunk(kind: bytes, data: bytes) -> bytes:
    """Return a chunk of a PNG file: the length of its data, its kind, the data, and a checksum."""
    checksum = struct.pack(">I", zlib.crc32(kind + data))
    return struct.pack(">I", len(data)) + kind + data + checksum
