"""Criterion: a loss over rows of tokens as (total, count), whatever it calls its result.

A parallel loss adds up what many devices find in many chunks, so it needs sums. Three kinds of
criterion give them:

==============================================  =====================================================
PyTorch's means                                 the same sum and count as for a job (``lockstep.model.losses.loss``)
what returns ``(total, count)``                 is taken at its word
any other that returns a scalar                 a sum over rows, *probed*; its count is given with the call
==============================================  =====================================================
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from lockstep.errors import LossError
from lockstep.model.losses.loss import Totalled
from lockstep.model.losses.torch_losses import HALF, Count
from lockstep.tensors import pytree
from lockstep.tensors.rows import batch_size_of, cut


class Criterion:
    """``(outputs, targets) -> (total, count)`` made of a person's criterion; several threads may
    call it at once.

    A module's tensors are used on the device of the outputs.
    """

    def __init__(self, criterion: Callable[..., Any]) -> None:
        self._totalled = Totalled(criterion)
        self._probed = self._totalled.is_known

    def __call__(
        self,
        outputs: Any,
        targets: Any,
        count: Count | None = None,
    ) -> tuple[Tensor, Count]:
        """Give total and count of some rows: outputs (rows, classes), targets (rows, ...), or what
        the criterion takes.

        Where the caller knows the ``count`` of all rows together, what is returned as count means
        nothing.
        """
        total, found = self._totalled(outputs, targets, 1)  # a mean over one sample is a sum
        if self._totalled.counts_items:
            return total, found
        if count is None:
            raise LossError(
                f"{self._totalled.name} returned a scalar without the number of tokens: return "
                "(total, count), or pass it: parallel_loss(..., count=tokens)"
            )
        if not self._probed:
            self._probe(outputs, targets, total)
        return total, 0

    @torch.no_grad()
    def _probe(self, outputs: Any, targets: Any, total: Tensor) -> None:
        """Refuse what is not a sum over rows, which is that of two unequal parts of them."""
        rows = batch_size_of(outputs)
        value = total.item()
        if rows < 2 or not math.isfinite(value):
            return  # nothing can be learned from these

        first = max(1, rows // 3)
        found = []
        for start, size in ((0, first), (first, rows - first)):
            some, wanted = cut((outputs, targets), start, size, rows)
            loss, _ = self._totalled(some, wanted, 1)
            found.append(loss.item())
        together = sum(found)
        scale = max(abs(value), sum(map(abs, found)))

        is_half = any(tensor.dtype in HALF for tensor in pytree.tensors(outputs))
        tolerance = 2e-2 if is_half else 1e-4
        if abs(together - value) > tolerance * scale:
            raise LossError(
                f"{self._totalled.name} is not a sum over tokens ({value:.6g} for all of them, and "
                f'{together:.6g} for two parts added): use reduction="sum", or return (total, '
                "count)"
            )
        self._probed = value != 0  # zeros (all ignored, say) show nothing
