r"""In place: the gradient of a linear layer's weight, added where it is kept.

Autograd makes the gradient of a weight anew for each use, and adds it afterwards. An output layer
of 32,000 words that works through a sequence in chunks does so for each chunk: 65 MB written, read
and freed each time. Inside ``with Adding(weights):`` this thread's linear layers add by one
``addmm`` instead:

.. math:: G \leftarrow G + dY^\top X

The sums are the same up to rounding; under autocast, and for weights in other layers, autograd does
what it always did.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode


class Adding(TorchFunctionMode):
    """Linear layers with one of these weights add to its ``.grad`` in place, in this thread, inside
    a ``with``.

    Args:
        weights: leaves that want gradients, of this thread alone. Their hooks are not called.
    """

    def __init__(self, weights: Iterable[Tensor]) -> None:
        super().__init__()
        self._weights = {id(weight) for weight in weights if weight.dim() == 2}

    def __torch_function__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        if func is F.linear:
            return self._linear(*args, **(kwargs or {}))
        return func(*args, **(kwargs or {}))

    def _linear(self, input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        is_plain = input.dtype == weight.dtype and torch.is_grad_enabled()
        is_cast = torch.is_autocast_enabled(input.device.type)
        # A checkpoint must save the same when it recomputes, without us.
        hooks = torch._C._autograd._top_saved_tensors_default_hooks(True)
        if id(weight) not in self._weights or not is_plain or is_cast or hooks is not None:
            return F.linear(input, weight, bias)
        output: Tensor = _Linear.apply(input, weight, bias)
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
