r"""Synchronised batch norm: every replica normalises over the micro-batch that one device would
have seen.

``torch.nn.SyncBatchNorm`` works between processes with GPUs only. This one works on CPU devices
too, between threads or ranks, with shares of any size, and is exact. With the count :math:`n_i`,
mean :math:`m_i` and sum of squared deviations :math:`M_i` of each replica's share, those of the
whole are (Chan, Golub, LeVeque 1979)

.. math:: N = \sum n_i \qquad m = \sum n_i m_i / N \qquad M = \sum M_i + n_i (m_i - m)^2

and with :math:`s = 1 / \sqrt{M / N + \epsilon}` and :math:`\hat x = s (x - m)` the gradient of a
share is

.. math:: dx = w s \Bigl(dy - \frac{1}{N} \sum dy - \frac{\hat x}{N} \sum dy\,\hat x\Bigr)

with both sums over all replicas. The gradients of weight and bias stay the replica's own sums:
whoever adds up gradients adds these too.
"""

from __future__ import annotations

import types
from collections.abc import Callable
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from lockstep.errors import InputError, StrategyError
from lockstep.threads.replica_collectives import Exchange, Session

_KINDS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)


def synchronise(module: nn.Module, exchange: Exchange) -> int:
    """Make every ``nn.BatchNorm1d``, ``2d`` and ``3d``, and ``nn.SyncBatchNorm``, normalise over
    all parties.

    The modules stay the same objects of the same classes, with their parameters, buffers, hooks and
    names: only their ``forward`` is another one. ``InstanceNorm`` is left alone. In eval mode they
        behave as before.

    Args:
        module: is changed in place. Copies made of it afterwards are parties to the same exchange.
        exchange: ``ThreadExchange`` or ``RankExchange``.

    Returns:
        How many modules were changed; they are counted once where they occur in several places.

    Raises:
        InputError: a lazy batch norm that hasn't seen data yet.
        StrategyError: a batch norm of another class, or with a forward of its own.
    """
    norms: list[_BatchNorm] = []
    for name, part in module.named_modules():
        if isinstance(part, _BatchNorm):
            _refuse_unknown(name or "the model", part)
            norms.append(part)

    for number, norm in enumerate(norms):
        forward = _over_all(exchange, number)
        norm.forward = types.MethodType(forward, norm)  # type: ignore[method-assign]
    return len(norms)


def _refuse_unknown(name: str, norm: _BatchNorm) -> None:
    """Refuse a batch norm that computes something else than PyTorch's."""
    if isinstance(norm, nn.modules.lazy.LazyModuleMixin):
        raise InputError(f"{name} is lazy and has seen no data yet: run the model once before")

    problem = None
    if type(norm) not in _KINDS:
        problem = f"is a {type(norm).__name__}"
    forward = vars(norm).get("forward")
    if forward is not None and forward.__module__ != __name__:
        problem = "has had its forward replaced"
    if problem is not None:
        raise StrategyError(
            f"{name} {problem}, and only PyTorch's own BatchNorm1d, 2d and 3d can be synchronised: "
            "use one of those, or leave sync_batchnorm off"
        )


def _gathered(session: Session, mine: torch.Tensor, number: int) -> torch.Tensor:
    """Return what all parties have of batch norm ``number``: ``(parties, len(mine))``.

    Raises:
        StrategyError: another party has come to another batch norm of this size.
    """
    if mine.device.type != "cpu":  # comparing numbers would wait for the device
        return session.gather(mine)

    found = session.gather(torch.cat([mine, mine.new_tensor([number])]))
    if (found[:, -1] != number).any():
        raise StrategyError(
            "sync_batchnorm: replicas have come to different batch norms at the same time, since "
            "forward takes branches by its samples: let each forward call all of them, or leave "
            "sync_batchnorm off"
        )
    return found[:, :-1]


def _over_all(
    exchange: Exchange, number: int
) -> Callable[[_BatchNorm, torch.Tensor], torch.Tensor]:
    """Make the forward of batch norm ``number``, with the statistics of all parties in training."""

    def forward(self: _BatchNorm, input: torch.Tensor) -> torch.Tensor:
        if not self.training or (session := exchange.session()).parties == 1:
            return _BatchNorm.forward(self, input)
        self._check_input_dim(input)  # type: ignore[no-untyped-call]
        momentum = self.momentum
        if self.track_running_stats and self.num_batches_tracked is not None:
            self.num_batches_tracked.add_(1)
            if momentum is None:  # the average of all batches so far
                momentum = 1.0 / float(self.num_batches_tracked)
        tracks = self.track_running_stats
        output: torch.Tensor = _Normalise.apply(  # type: ignore[no-untyped-call]
            input,
            self.weight,
            self.bias,
            self.running_mean if tracks else None,
            self.running_var if tracks else None,
            momentum or 0.0,
            self.eps,
            session,
            number,
        )
        return output

    # Replicas wait for one another in it: no part of it is compiled, and PyTorch's compiler isn't
    # shown it.
    return cast(Callable[..., torch.Tensor], torch.compiler.disable(forward))  # type: ignore[no-untyped-call]


class _Normalise(torch.autograd.Function):
    """Forward and backward over all parties; each exchanges one small tensor::

    forward    (means, squared deviations, count) of each share      2 x channels + 1 numbers
    backward   (sum of dy * xhat, sum of dy) of each share           2 x channels numbers
    """

    @staticmethod
    def forward(
        ctx: Any,
        input: torch.Tensor,
        weight: torch.Tensor | None,
        bias: torch.Tensor | None,
        running_mean: torch.Tensor | None,
        running_var: torch.Tensor | None,
        momentum: float,
        eps: float,
        session: Session,
        number: int,
    ) -> torch.Tensor:
        """Normalise a share. input: (batch, channels, ...); weight, bias: (channels,).

        Raises:
            StrategyError: the parties have come to different batch norms.
            ValueError: all shares together have one value per channel.
        """
        dtype = torch.float64 if input.dtype == torch.float64 else torch.float32
        wide = torch.float32 if input.device.type == "mps" else torch.float64
        # What this party has of its share.
        count = input.numel() // input.shape[1]
        mean, var = _statistics(input, dtype)
        mine = torch.cat(
            [mean.to(wide), var.to(wide) * count, mean.new_tensor([count], dtype=wide)]
        )
        found = _gathered(session, mine, number)
        # Those of the whole.
        channels = len(mean)
        means, squares, counts = torch.split(found, [channels, channels, 1], dim=1)
        total = counts.sum()
        if count <= 1 and total.item() <= 1:
            raise ValueError(
                "Expected more than 1 value per channel when training, got input size "
                f"{tuple(input.shape)} "
                f"on each of {session.parties} replicas"
            )
        mean = (counts * means).sum(0) / total
        square = (squares + counts * (means - mean).square()).sum(0)
        if running_mean is not None:
            running_mean.mul_(1 - momentum).add_((momentum * mean).to(running_mean.dtype))
        if running_var is not None:
            unbiased = square / (total - 1)
            running_var.mul_(1 - momentum).add_((momentum * unbiased).to(running_var.dtype))
        mean = mean.to(dtype)
        var = (square / total).to(dtype)
        ctx.save_for_backward(input, weight, mean, var, total)
        ctx.eps = eps
        ctx.session = session
        ctx.bias_dtype = None if bias is None else bias.dtype
        # PyTorch's own kernels: in eval mode they normalise with the statistics that they are
        # given.
        return F.batch_norm(input, mean, var, _as(weight, dtype), _as(bias, dtype), False, 0.0, eps)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        """Give the gradients of a share: those of weight and bias are the replica's own sums."""
        input, weight, mean, var, total = ctx.saved_tensors
        wants_input, wants_weight, wants_bias = ctx.needs_input_grad[:3]
        scale = torch.ones_like(mean) if weight is None else weight.to(mean.dtype)
        # In eval mode the kernel gives dy w / sqrt(var + eps), and beside it the replica's own sums
        # of dy xhat and dy.
        if input.numel():
            grad_input, grad_weight, grad_bias = torch.ops.aten.native_batch_norm_backward(
                grad, input, scale, mean, var, None, None, False, ctx.eps, [wants_input, True, True]
            )
        else:  # that kernel divides by the size
            grad_input = torch.zeros_like(input)
            grad_weight = torch.zeros_like(mean)
            grad_bias = torch.zeros_like(mean)
        if wants_input:
            means = ctx.session.sum(torch.stack([grad_weight, grad_bias]).to(total.dtype)) / total
            by_mean, by_bias = (-means.to(mean.dtype) * scale * (var + ctx.eps).rsqrt()).unbind(0)
            grad_input = grad_input + F.batch_norm(
                input, mean, var, by_mean, by_bias, False, 0.0, ctx.eps
            )
        return (
            grad_input if wants_input else None,
            grad_weight.to(weight.dtype) if wants_weight else None,
            grad_bias.to(ctx.bias_dtype) if wants_bias else None,
            *(None,) * 6,
        )


def _statistics(input: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute mean and biased variance of each channel, over samples and positions.

    Args:
        input: (batch, channels, ...).
        dtype: to compute in.

    Returns:
        Two tensors of (channels,); zeros for an empty share.
    """
    if input.numel() == 0:
        zeros = torch.zeros(input.shape[1], dtype=dtype, device=input.device)
        return zeros, zeros
    values = input.to(dtype)
    if input.device.type in ("cpu", "cuda"):  # 3 to 30 times as fast as var_mean
        mean, var = torch.batch_norm_update_stats(values, None, None, 0.0)
    else:
        var, mean = torch.var_mean(values, [0, *range(2, input.dim())], correction=0)
    return mean, var


def _as(tensor: torch.Tensor | None, dtype: torch.dtype) -> torch.Tensor | None:
    return None if tensor is None else tensor.to(dtype)
