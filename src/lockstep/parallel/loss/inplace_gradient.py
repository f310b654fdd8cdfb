r"""In place: the gradient of a linear layer's weight, added where it is kept.

Autograd makes the gradient of a weight anew for each use, and adds it afterwards. An output layer
of 32,000 words that works through a sequence in chunks does so for each chunk: 65 MB written, read
and freed each time. Linear layers of a module given to ``add_in_place`` add by one ``addmm`` instead:

.. math:: G \leftarrow G + dY^\top X

The sums are the same up to rounding; under autocast, and for other layers, autograd does what it
always did.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn


def add_in_place(module: nn.Module) -> None:
    """Let the linear layers of a module add gradients to their weights' ``.grad`` in place.

    Args:
        module: has parameters of one thread alone. The hooks of those of linear layers aren't called.
    """
    for layer in module.modules():
        if type(layer) is nn.Linear:
            layer.__class__ = _AddingLinear


class _AddingLinear(nn.Linear):
    def forward(self, input: Tensor) -> Tensor:
        weight = self.weight
        is_own = weight.requires_grad and weight.is_leaf and input.dtype == weight.dtype
        is_cast = torch.is_autocast_enabled(input.device.type)
        # A checkpoint must save the same when it recomputes.
        is_saved = torch._C._autograd._top_saved_tensors_default_hooks(True) is not None
        if not is_own or not torch.is_grad_enabled() or is_cast or is_saved:
            return super().forward(input)
        output: Tensor = _Linear.apply(input, weight, self.bias)  # type: ignore[no-untyped-call]
        return output


class _Linear(torch.autograd.Function):
    """``F.linear``, whose weight has no gradient as far as autograd knows."""

    @staticmethod
    def forward(ctx: Any, input: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(input, weight)
        return F.linear(input, weight, bias)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, None, Tensor | None]:
        input, weight = ctx.saved_tensors
        wants_input, _, wants_bias = ctx.needs_input_grad
        input_grad = None
        bias_grad = None
        rows = grad.reshape(-1, grad.shape[-1])
        values = input.reshape(-1, input.shape[-1])
        if weight.grad is None:
            weight.grad = rows.t() @ values
        else:
            weight.grad.addmm_(rows.t(), values)

        if wants_input:
            input_grad = grad @ weight
        if wants_bias:
            bias_grad = rows.sum(0)
        return input_grad, None, bias_grad
