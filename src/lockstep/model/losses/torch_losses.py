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
"""The number of items of a loss: a scalar tensor where data had to be read for it."""

HALF = (torch.float16, torch.bfloat16)
"""The formats in which a sum over many items overflows or loses digits, and the mean doesn't."""

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

    @classmethod
    def of(cls, loss: Any) -> SummedMean | None:
        """Make the sum of a mean of PyTorch's: a module, or a function (options as a partial).

        None is given for any other loss.
        """
        if isinstance(loss, nn.Module):
            return cls._of_module(loss)
        options: _Options = {}
        if isinstance(loss, functools.partial) and not loss.args:
            options = loss.keywords
            loss = loss.func
        for rule in _MEANS.values():
            if rule.function is not loss or not rule.is_mean(options.get("reduction", "mean")):
                continue
            if set(options) <= {"reduction", *rule.options}:
                return cls(None, rule, options)
        return None

    @classmethod
    def _of_module(cls, loss: nn.Module) -> SummedMean | None:
        """Make the sum of a module, unless somebody may have changed what it computes."""
        rule = _MEANS.get(type(loss))
        if rule is None or not rule.is_mean(str(loss.reduction)):
            return None
        if loss._forward_hooks or loss._forward_pre_hooks or "forward" in vars(loss):
            return None
        return cls(loss, rule, {})

    def __call__(self, outputs: Tensor, targets: Tensor) -> tuple[Tensor, Count]:
        """Compute total and count; the total of half-precision outputs is in fp32.

        Raises:
            Misshapen: with these shapes PyTorch's mean is not a mean over items that belong to
                samples.
        """
        given = self._options
        if self._mean is not None:
            # A person may change a weight or a smoothing between steps.
            given = {**vars(self._mean), **self._mean._buffers}
        options: dict[str, Any] = {}
        for name in self._rule.options:
            if name in given:
                options[name] = given[name]
        if outputs.dtype in HALF:
            outputs = outputs.float()
            targets = targets.float() if targets.dtype in HALF else targets
        for name in ("weight", "pos_weight"):
            weight = options.get(name)
            if weight is not None:
                dtype = torch.float32 if weight.dtype in HALF else weight.dtype
                options[name] = weight.to(outputs.device, dtype, non_blocking=True)
        count = self._rule.divisor(options, outputs, targets)
        if given.get("reduction") == "batchmean":
            count = outputs.shape[0]
        return self._rule.function(outputs, targets, reduction="sum", **options), count


def _elements(options: _Options, outputs: Tensor, targets: Tensor) -> int:
    """Count all elements, those that broadcasting makes included."""
    for name in ("weight", "pos_weight"):
        weight = options.get(name)
        if weight is not None and weight.dim() >= outputs.dim() and weight.shape[0] != 1:
            raise Misshapen(
                f"{name} {tuple(weight.shape)} has a value for each element of the batch and "
                "can't be cut with the batch; put the values in the targets, and return (total, "
                "count) from a function"
            )
    if outputs.shape == targets.shape:
        return outputs.numel()
    if outputs.dim() == targets.dim() and outputs.shape[:1] == targets.shape[:1]:
        return math.prod(map(max, outputs.shape, targets.shape))
    raise Misshapen(
        "broadcasting would compare samples with other samples; give both the same shape"
    )


def _kept_targets(options: _Options, outputs: Tensor, targets: Tensor) -> Count:
    """Count the targets of cross-entropy that aren't ignored, or sum the weights of their classes.

    Smoothing changes neither. Targets that are probabilities of classes count one for each
    position, whatever the weights.
    """
    if outputs.dim() < 2:
        raise Misshapen("outputs (batch, classes, ...) are expected")
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


class _Mean(NamedTuple):
    """A line of the table.

    Attributes:
        function: the functional form.
        options: those that the function shares with the module.
        divisor: gives what the mean divides by.
    """

    function: Callable[..., Tensor]
    options: tuple[str, ...]
    divisor: Callable[[_Options, Tensor, Tensor], Count]

    def is_mean(self, reduction: str) -> bool:
        """Return whether that reduction is a mean."""
        return reduction == "mean" or (reduction == "batchmean" and self.function is F.kl_div)


_MEANS: dict[type[nn.Module], _Mean] = {
    nn.CrossEntropyLoss: _Mean(
        F.cross_entropy,
        ("weight", "ignore_index", "label_smoothing"),
        _kept_targets,
    ),
    nn.NLLLoss: _Mean(F.nll_loss, ("weight", "ignore_index"), _kept_targets),
    nn.MSELoss: _Mean(F.mse_loss, (), _elements),
    nn.L1Loss: _Mean(F.l1_loss, (), _elements),
    nn.SmoothL1Loss: _Mean(F.smooth_l1_loss, ("beta",), _elements),
    nn.HuberLoss: _Mean(F.huber_loss, ("delta",), _elements),
    nn.BCELoss: _Mean(F.binary_cross_entropy, ("weight",), _elements),
    nn.BCEWithLogitsLoss: _Mean(
        F.binary_cross_entropy_with_logits,
        ("weight", "pos_weight"),
        _elements,
    ),
    nn.KLDivLoss: _Mean(F.kl_div, ("log_target",), _elements),
}
"""The common losses of PyTorch. Any other one is checked, as a person's own mean over samples."""
