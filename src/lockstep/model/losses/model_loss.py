"""``loss=lockstep.model_loss``: the loss that a model of Hugging Face computes itself, weighted by
the number of labels.

Given labels, such a model puts the mean over the labels that count in ``outputs.loss``. The mean of
a batch isn't the mean of the means of its parts, which differ in length: each part has to give its
number of labels. A model that predicts the next token (``CausalLMOutput...``) shifts labels::

    outputs.loss  =  total / count  count  =  labels[:, 1:] != -100  next tokens
                                              labels        != -100  masked tokens, a decoder's, classes

A model that adds something to its loss is one for the sum check.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from lockstep.errors import LossError
from lockstep.model.losses.counts import NUM_ITEMS
from lockstep.model.losses.torch_losses import HALF
from lockstep.tensors.pytree import described

_IGNORED = -100
"""A label that doesn't count."""

_OWN = (
    "return (total, count) from a loss(outputs, labels) of your own: the sum over the labels "
    "that count, their number"
)


def model_loss(outputs: Any, labels: Tensor) -> tuple[Tensor, Tensor]:
    """Give total and count of the loss that the model computed.

    Args:
        outputs: what the model gave: ``loss``, a scalar, and ``logits``: (batch, time, vocabulary)
            or (batch, classes); attributes, or in a dict.
        labels: the labels that the model was given too: (batch, time) or (batch,), whole numbers;
            -100 doesn't count.

    Raises:
        LossError: there is no ``loss``, or the labels are neither tokens nor classes.
    """
    loss = mean_of(outputs)
    if loss is None:
        raise LossError(
            "model_loss: the outputs have no loss, a scalar: give the model labels (inputs a dict "
            "with labels=...)",
            fix=_OWN,
        )
    logits = _of(outputs, "logits")
    if not _fit(logits, labels):
        raise LossError(
            "model_loss: logits and labels of tokens or classes are expected, not "
            f"{described(logits)} and {described(labels)}",
            fix=_OWN,
        )
    if "CausalLM" in type(outputs).__name__:
        labels = labels[:, 1:]
    count = (labels != _IGNORED).sum().to(loss.device)
    mean = _of_items(loss, count)
    if mean.dtype in HALF:
        mean = mean.float()
    return mean * count, count


def loss_of_model(outputs: Any, labels: Tensor, counts: Mapping[str, Tensor] | None = None) -> Any:
    """Give total and count of the loss that the model computed; with counts, the loss itself, which
    is a share of that of the whole batch.

    Args:
        outputs, labels: as ``model_loss`` takes them.
        counts: of the whole batch; has the number that the model divided by.

    Raises:
        LossError: as ``model_loss``, or that number is missing.
    """
    pair = model_loss(outputs, labels)
    if counts is None:
        return pair
    if NUM_ITEMS not in counts:
        raise LossError(
            f'model_loss: the counts have no "{NUM_ITEMS}", which the model divides by',
            fix=f'return {{"{NUM_ITEMS}": (labels != -100).sum()}}, or leave counts= out',
        )
    return _of_items(_of(outputs, "loss"), counts[NUM_ITEMS])


def _of_items(loss: Tensor, count: Tensor) -> Tensor:
    """Give the model's loss, or 0 where no label counts.

    The mean over no label is NaN, with a gradient of 0: the model computes none for a label that
    is ignored.
    """
    return torch.where(count > 0, loss, torch.zeros_like(loss))


def mean_of(outputs: Any) -> Tensor | None:
    """Return the mean that a model computed itself, ``outputs.loss``; None where it gave none."""
    loss = _of(outputs, "loss")
    return loss if isinstance(loss, Tensor) and not loss.dim() else None


def _fit(logits: Any, labels: Any) -> bool:
    """Return whether there is a label, a whole number, for each row of logits."""
    if not isinstance(logits, Tensor) or not isinstance(labels, Tensor):
        return False
    if labels.is_floating_point() or labels.dtype == torch.bool:
        return False
    return logits.shape[:-1] == labels.shape


def _of(outputs: Any, name: str) -> Any:
    return outputs.get(name) if isinstance(outputs, Mapping) else getattr(outputs, name, None)
