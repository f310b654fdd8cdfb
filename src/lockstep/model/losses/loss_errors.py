"""Why a loss can't take outputs and targets, and what to write, in the place of PyTorch's words."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from torch import Tensor

_CAUSES = {
    r"(target dtype to be|scalar type) Long.*torch\.(?!int64)": (
        "class numbers of torch.int64 are expected, and the targets are {0.dtype}: give "
        "targets.long(), or a probability for each class, in the shape of the outputs"
    ),
    "type for target with class probabilities": (
        "targets in the shape of the outputs are probabilities of classes, and these are "
        "{0.dtype}: give targets.float()"
    ),
    "multi-target not supported": (
        "one class number for each sample is expected: targets.squeeze(1) takes a dimension of 1 "
        "away, and BCEWithLogitsLoss takes several classes for each sample"
    ),
    r"(Found dtype|output type) Long.*torch\.int64": (
        "numbers of the outputs' type are expected, and the targets are {0.dtype}: give "
        "targets.float()"
    ),
    r"Target (-?\d+) is out of bounds": (
        "target {1} is not one of the classes, which are counted from 0: give the model as many "
        "outputs as there are classes, or name the target in ignore_index"
    ),
}
"""By PyTorch's text and the targets' dtype, what is wrong with the targets."""


def cause_of(error: Exception, outputs: Any, targets: Any, *, takes_tensors: bool) -> str:
    """Return why a loss raised, and what to write; "" where that isn't known.

    Args:
        error: what the loss raised.
        outputs: of the model.
        targets: what the loss takes beside them.
        takes_tensors: whether the loss is one of PyTorch's, which take tensors only.
    """
    text = str(error)
    if outputs is None and (takes_tensors or "NoneType" in text):
        return "forward returned None: let it return the outputs"
    if not isinstance(outputs, Tensor) and (takes_tensors or "must be Tensor, not" in text):
        item = _item_of(outputs)
        return (
            f"the loss takes one tensor: return {item} from forward, or give lambda outputs, "
            f"targets: loss({item}, targets)"
        )
    if not isinstance(targets, Tensor):
        return ""
    for pattern, cause in _CAUSES.items():
        found = re.search(pattern, f"{text} {targets.dtype}")
        if found:
            return cause.format(targets, *found.groups())
    return ""


def _item_of(outputs: Any) -> str:
    """Write how a tensor is taken out of outputs: the logits, or else the first."""
    if isinstance(outputs, tuple | list):
        return "outputs[0]"
    is_dict = isinstance(outputs, Mapping)
    names = list(outputs if is_dict else getattr(outputs, "__dict__", ()))
    name = "logits" if "logits" in names or not names else names[0]
    return f'outputs["{name}"]' if is_dict else f"outputs.{name}"
