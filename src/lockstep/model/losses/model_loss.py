"""``loss=lockstep.model_loss``: the loss that a model of Hugging Face computes itself, weighted by
its labels.

Given labels, such a model puts the mean over its labels that count in ``outputs.loss``. That of a
batch isn't the mean of the means of its parts, which differ in length: a part has to say how many
labels it had. A model that predicts the next token (``CausalLMOutput...``) shifts them::

    outputs.loss  =  total / count  count  =  labels[:, 1:] != -100  next tokens
                                              labels        != -100  masked tokens, a decoder's, classes

Some calls hold the number against the logits: a model that adds something to its loss is refused.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from lockstep.errors import LossError
from lockstep.model.losses.check_interval import is_power_of_two
from lockstep.model.losses.torch_losses import HALF

_IGNORED = -100
"""A label that doesn't count."""

_LABELS = 10_000
"""Up to which new ones are looked at."""

_OWN = (
    "return (total, count) from a loss(outputs, labels) of your own: the sum over the labels "
    "that count, their number"
)


def model_loss(outputs: Any, labels: Tensor) -> tuple[Tensor, Tensor]:
    """Total and count of the loss that the model computed, of these labels.

    Args:
        outputs: what the model gave: ``loss``, a scalar, and ``logits``: (batch, time, vocabulary)
            or (batch, classes); attributes, or in a dict.
        labels: those that the model was given too: (batch, time) or (batch,), whole numbers; -100
            doesn't count.

    Raises:
        LossError: there is no ``loss``, or the labels are no tokens and no classes.
    """
    loss = _of(outputs, "loss")
    if not isinstance(loss, Tensor) or loss.dim():
        raise LossError(
            "model_loss: the outputs have no loss, a scalar: give the model labels (inputs a dict "
            "with labels=...)"
            if loss is None
            else f"model_loss: outputs.loss has shape {tuple(loss.shape)}, a scalar is expected",
            fix=_OWN,
        )
    count = (_aligned(outputs, labels)[1] != _IGNORED).sum().to(loss.device)
    # A mean over no label is NaN, and its gradient is 0: the model writes none where a label is
    # ignored.
    mean = torch.where(count > 0, loss, torch.zeros_like(loss))
    return (mean.float() if mean.dtype in HALF else mean) * count, count


def mean_of(outputs: Any) -> Tensor | None:
    """The mean that a model computed itself, ``outputs.loss``; None where it gave none."""
    loss = _of(outputs, "loss")
    return loss if isinstance(loss, Tensor) and not loss.dim() else None


def _aligned(outputs: Any, labels: Any) -> tuple[Tensor, Tensor]:
    """Logits (items, classes), and the label of each, (items,)."""
    logits: Any = _of(outputs, "logits")
    named = f"logits {_shape(logits)} and labels {_shape(labels)}"
    fits = (
        isinstance(logits, Tensor)
        and isinstance(labels, Tensor)
        and logits.shape[:-1] == labels.shape
    )
    if not fits or labels.is_floating_point() or labels.dtype == torch.bool:
        raise LossError(f"model_loss: it is of tokens or classes, and these are {named}", fix=_OWN)
    if "CausalLM" in type(outputs).__name__:
        logits, labels = logits[:, :-1], labels[:, 1:]
    return logits.flatten(0, -2), labels.flatten()


def _of(outputs: Any, name: str) -> Any:
    return outputs.get(name) if isinstance(outputs, Mapping) else getattr(outputs, name, None)


def _shape(value: Any) -> str:
    return str(tuple(value.shape)) if isinstance(value, Tensor) else f"a {type(value).__name__}"


class ModelLoss:
    """``model_loss`` in a training: in calls 1, 2, 4, 8, ... the model's loss is held against its
    logits.

    On CPU devices also where labels have a value that none had before: a padding that the model
    leaves out, say.
    """

    def __init__(self) -> None:
        self._calls = 0
        self._labels: set[int] = set()

    def __call__(self, outputs: Any, labels: Any) -> tuple[Tensor, Tensor]:
        """Total and count.

        Raises:
            LossError: as ``model_loss``, or the model's loss is another one than its logits and
                labels have.
        """
        total, count = model_loss(outputs, labels)
        self._calls += 1
        new = self._new(labels)
        if new or is_power_of_two(self._calls):
            self._hold(outputs, labels, total.detach(), count)
        self._labels |= new
        return total, count

    def _new(self, labels: Tensor) -> set[int]:
        if labels.device.type != "cpu" or len(self._labels) > _LABELS:
            return set()
        return set(torch.unique(labels).tolist()) - self._labels

    @torch.no_grad()
    def _hold(self, outputs: Any, labels: Tensor, total: Tensor, count: Tensor) -> None:
        logits, wanted = _aligned(outputs, labels)
        wide = logits if logits.dtype == torch.float64 else logits.float()
        expected = nn.functional.cross_entropy(
            wide, wanted.to(wide.device), ignore_index=_IGNORED, reduction="sum"
        )
        is_half = logits.dtype in HALF or torch.is_autocast_enabled(logits.device.type)
        bound = 2e-2 if is_half else 1e-8 if logits.dtype == total.dtype == torch.float64 else 1e-5
        if expected.isfinite() and not abs(total - expected) <= bound * abs(expected):
            number = max(int(count), 1)
            own, its = float(total) / number, float(expected) / number
            raise LossError(
                f"model_loss: the model's loss is {own:.6g}, and the cross-entropy of its logits "
                f"over the {int(count)} "
                f"labels that count {its:.6g}: it has something added, or is no mean over them",
                fix=_OWN,
            )
