"""PyTorch's mean losses as a sum and a count: what each of their means divides by.

The sum is the same loss with ``reduction="sum"``. The count is a Python number where shapes alone
decide it, so that nothing waits for an accelerator; only ignored targets and the weights of classes
have to be read.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

Count = int | float | Tensor
"""The number of items of a loss: a Python number where no data had to be read for it, else a
scalar tensor.
"""

HALF = (torch.float16, torch.bfloat16)
"""The formats in which a sum over many items overflows, or loses its digits, where their mean
does not.
"""

_Options = Mapping[str, Any]


class Misshapen(Exception):
    """Shapes for which one of PyTorch's means is not a mean over items that belong to samples."""


class SummedMean:
    """``(outputs, targets) -> (total, count)`` of one of PyTorch's mean losses.

    Args:
        mean: a module of one of the types in ``_MEANS``, or None for the function with ``options``.
        rule: its line of the table.
        options: of the function, where there is no module.
    """

    def __init__(self, mean: nn.Module | None, rule: _Mean, options: _Options) -> None:
        self._mean = mean
        self._rule = rule
        self._options = options
        self._copies: dict[tuple[str, torch.device], tuple[Tensor, int, Tensor]] = {}

    @classmethod
    def of(cls, loss: Any) -> SummedMean | None:
        """For a mean of PyTorch's, module or function (options as a partial); None for any other
        loss.
        """
        if isinstance(loss, nn.Module):
            rule = _MEANS.get(type(loss))
            # A hook, or another forward: somebody changed what it computes.
            if (
                rule is None
                or loss._forward_hooks
                or loss._forward_pre_hooks
                or "forward" in loss.__dict__
            ):
                return None
            return cls(loss, rule, {}) if rule.is_mean(str(loss.reduction)) else None
        options: _Options = {}
        if isinstance(loss, functools.partial) and not loss.args:
            loss, options = loss.func, loss.keywords
        rule = next((r for r in _MEANS.values() if r.function is loss), None)
        if rule is None or not set(options) <= {"reduction", *rule.options}:
            return None
        return cls(None, rule, options) if rule.is_mean(options.get("reduction", "mean")) else None

    def __call__(self, outputs: Tensor, targets: Tensor) -> tuple[Tensor, Count]:
        """Total and count; the total of half-precision outputs is in fp32.

        Raises:
            Misshapen: over these shapes the mean isn't one over items of the samples.
        """
        if self._mean is None:
            given = self._options
            options = {name: given[name] for name in self._rule.options if name in given}
            reduction = given.get("reduction", "mean")
        else:  # read afresh: a person may change a weight or a smoothing between steps
            given, tensors = self._mean.__dict__, self._mean._buffers
            options = {
                name: tensors[name] if name in tensors else given[name]
                for name in self._rule.options
            }
            reduction = given["reduction"]
        if outputs.dtype in HALF:
            outputs = outputs.float()
            targets = targets.float() if targets.dtype in HALF else targets
        for name in ("weight", "pos_weight"):
            if options.get(name) is not None:
                options[name] = self._beside(name, options[name], outputs)
        count = self._rule.divisor(options, outputs, targets)
        if reduction == "batchmean":
            count = outputs.shape[0]
        return self._rule.function(outputs, targets, reduction="sum", **options), count

    def _beside(self, name: str, weight: Tensor, outputs: Tensor) -> Tensor:
        """A weight on the device of the outputs; the copy is kept until the person changes the
        weight.
        """
        if weight.device == outputs.device and weight.dtype not in HALF:
            return weight
        key = (name, outputs.device)
        held = self._copies.get(key)
        if held is None or held[0] is not weight or held[1] != weight._version:
            moved = weight.to(
                outputs.device, torch.float32 if weight.dtype in HALF else weight.dtype
            )
            held = self._copies[key] = (weight, weight._version, moved)
        return held[2]


def _elements(options: _Options, outputs: Tensor, targets: Tensor) -> int:
    """Losses of each element: all elements, those that broadcasting makes included."""
    for name in ("weight", "pos_weight"):
        weight = options.get(name)
        if weight is not None and weight.dim() >= outputs.dim() and weight.shape[0] != 1:
            raise Misshapen(
                f"{name} {tuple(weight.shape)} has a number for each place in the batch, which "
                "can't be cut with it; "
                "put them in the targets, and return (total, count) from a function"
            )
    if outputs.shape == targets.shape:
        return outputs.numel()
    if outputs.dim() == targets.dim() and outputs.shape[:1] == targets.shape[:1]:
        return math.prod(map(max, outputs.shape, targets.shape))
    raise Misshapen("broadcasting would set every sample against others; give both one shape")


def _elements_by_class(options: _Options, outputs: Tensor, targets: Tensor) -> int:
    """Losses of each element, of which each row is a mean over its classes already."""
    _need_classes(outputs)
    return _elements(options, outputs, targets) // max(outputs.shape[-1], targets.shape[-1])


def _rows(options: _Options, outputs: Tensor, targets: Tensor) -> int:
    """Margin losses: each row is a mean over its classes already."""
    _need_classes(outputs)
    return outputs.shape[0]


def _kept_targets(options: _Options, outputs: Tensor, targets: Tensor) -> Count:
    """Cross-entropy: the targets that aren't ignored, or the sum of their classes' weights;
    smoothing changes neither.

    Targets that are probabilities of classes count one for each position, whatever the weights.
    """
    _need_classes(outputs)
    if targets.is_floating_point():
        return outputs.numel() // outputs.shape[1]
    weight: Tensor | None = options.get("weight")
    ignored = options.get("ignore_index", -100)
    if weight is None:
        if ignored < 0 and targets.dtype == torch.uint8:
            return targets.numel()
        return torch.count_nonzero(targets.ne(ignored))
    kept = targets.ne(ignored)
    classes = targets.where(kept, 0)  # an ignored target need not be a class
    return weight.detach().take(classes.long()).where(kept, 0).sum()


def _need_classes(outputs: Tensor) -> None:
    if outputs.dim() < 2:
        raise Misshapen("outputs (batch, classes, ...) are expected")


class _Mean(NamedTuple):
    """A line of the table: the function, the options it shares with the module, what its mean
    divides by.
    """

    function: Callable[..., Tensor]
    options: tuple[str, ...]
    divisor: Callable[[_Options, Tensor, Tensor], Count]

    def is_mean(self, reduction: str) -> bool:
        """Whether that reduction is a mean."""
        return reduction == "mean" or (reduction == "batchmean" and self.function is F.kl_div)


_MEANS: dict[type[nn.Module], _Mean] = {
    nn.CrossEntropyLoss: _Mean(
        F.cross_entropy, ("weight", "ignore_index", "label_smoothing"), _kept_targets
    ),
    nn.NLLLoss: _Mean(F.nll_loss, ("weight", "ignore_index"), _kept_targets),
    nn.MSELoss: _Mean(F.mse_loss, (), _elements),
    nn.L1Loss: _Mean(F.l1_loss, (), _elements),
    nn.SmoothL1Loss: _Mean(F.smooth_l1_loss, ("beta",), _elements),
    nn.HuberLoss: _Mean(F.huber_loss, ("delta",), _elements),
    nn.BCELoss: _Mean(F.binary_cross_entropy, ("weight",), _elements),
    nn.BCEWithLogitsLoss: _Mean(
        F.binary_cross_entropy_with_logits, ("weight", "pos_weight"), _elements
    ),
    nn.KLDivLoss: _Mean(F.kl_div, ("log_target",), _elements),
    nn.PoissonNLLLoss: _Mean(F.poisson_nll_loss, ("log_input", "full", "eps"), _elements),
    nn.SoftMarginLoss: _Mean(F.soft_margin_loss, (), _elements),
    nn.HingeEmbeddingLoss: _Mean(F.hinge_embedding_loss, ("margin",), _elements),
    nn.MultiMarginLoss: _Mean(F.multi_margin_loss, ("p", "margin", "weight"), _rows),
    nn.MultiLabelMarginLoss: _Mean(F.multilabel_margin_loss, (), _rows),
    nn.MultiLabelSoftMarginLoss: _Mean(
        F.multilabel_soft_margin_loss, ("weight",), _elements_by_class
    ),
}
"""Every loss of PyTorch's that takes two arguments and is a mean."""
