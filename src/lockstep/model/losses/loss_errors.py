"""Why a loss can't take its targets, and what to write, in the place of PyTorch's words."""

from __future__ import annotations

import re
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


def cause_of(error: Exception, targets: Any) -> str:
    """Return what is wrong with the targets of a loss, and what to write; "" where that isn't
    known.

    Args:
        error: what the loss raised.
        targets: what the loss takes beside the outputs.
    """
    text = str(error)
    if not isinstance(targets, Tensor):
        return ""
    for pattern, cause in _CAUSES.items():
        found = re.search(pattern, f"{text} {targets.dtype}")
        if found:
            return cause.format(targets, *found.groups())
    return ""
