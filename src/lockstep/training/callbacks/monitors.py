"""What shows how a training goes: learning rates, and samples of what the model makes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

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
    under one seed. It gives a text, a list of texts, or pictures (which need matplotlib): a tensor
    of (channels, height, width), or a batch of them, with 1 or 3 channels, of bytes, or of floats
    from 0 to 1::

        def digits(model):
            return model.decode(torch.randn(8, 16))

        callbacks = [Sampler(digits)]

    Args:
        function: is given the model.
        name: of the folder.
        seed: of what it draws.
    """

    def __init__(
        self,
        function: Callable[[nn.Module], str | Sequence[str] | torch.Tensor],
        *,
        name: str = "samples",
        seed: int = 0,
    ) -> None:
        self._function = function
        self._seed = seed
        self.output: str = name

    def on_evaluated(self, training: TrainingContext) -> None:
        """Call the function, and write on rank 0 what it gives."""
        with training.evaluating(), training._step.whole_parameters(), seeded(self._seed):
            made = self._function(training.model)
        if not training.world.is_first:
            return

        path = training.folder / self.output / f"step-{training.step}"
        path.parent.mkdir(exist_ok=True)
        if isinstance(made, torch.Tensor):
            _write_pictures(path.with_suffix(".png"), made.detach().cpu())
        else:
            text = made if isinstance(made, str) else "\n".join(made)
            path.with_suffix(".txt").write_text(text)


def _write_pictures(file: Path, pictures: torch.Tensor) -> None:
    """Write a picture, or several side by side.

    Raises:
        JobError: the tensor isn't of pictures, or matplotlib isn't installed.
    """
    try:
        from matplotlib.image import imsave
    except ImportError:
        raise JobError(
            "Sampler: pictures need matplotlib: pip install 'torch-lockstep[report]'"
        ) from None

    batch = pictures[None] if pictures.dim() == 3 else pictures
    if batch.dim() != 4 or batch.shape[1] not in (1, 3):
        raise JobError(
            f"Sampler: pictures are (n, 1 or 3, height, width), not {tuple(pictures.shape)}"
        )
    if batch.is_floating_point():
        batch = (batch.float().clamp(0, 1) * 255).round().byte()
    rows = torch.cat(list(batch), dim=2).permute(1, 2, 0)
    imsave(file, rows.expand(-1, -1, 3).contiguous().numpy())
