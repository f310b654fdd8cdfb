r"""Synchronised batch norm: every replica normalises over the micro-batch that one device would
have seen.

``torch.nn.SyncBatchNorm`` works between processes with GPUs only. This one works on CPU devices
too, between threads or ranks, with shares of any size, and is exact. With the count :math:`n_i`,
mean :math:`m_i` and sum of squared deviations :math:`M_i` of each replica's share, those of the
whole are (Chan, Golub, LeVeque 1979)

.. math:: N = \sum n_i \qquad m = \sum n_i m_i / N \qquad M = \sum M_i + n_i (m_i - m)^2

The gradient of a share is that of PyTorch's kernel, to which `_Shared` adds what comes by way of the
statistics. The gradients of weight and bias stay the replica's own sums:
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

    forward = _over_all(exchange)
    for norm in norms:
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


def _over_all(exchange: Exchange) -> Callable[[_BatchNorm, torch.Tensor], torch.Tensor]:
    """Make the forward of a batch norm, with the statistics of all parties in training."""

    def forward(self: _BatchNorm, input: torch.Tensor) -> torch.Tensor:
        if not self.training or (session := exchange.session()).parties == 1:
            return _BatchNorm.forward(self, input)
        self._check_input_dim(input)  # type: ignore[no-untyped-call]
        with torch.no_grad():
            mean, square, total = _of_all(input, session)
            if self.track_running_stats:
                _track(self, mean, square / (total - 1))
        dtype = torch.float64 if input.dtype == torch.float64 else torch.float32
        mean = mean.to(dtype)
        var = (square / total).to(dtype)
        scale = (var + self.eps).rsqrt()
        shared = _Shared.apply(input, mean, scale, total, session)  # type: ignore[no-untyped-call]
        # PyTorch's own kernels: in eval mode they normalise with the statistics that they are
        # given.
        weight = None if self.weight is None else self.weight.to(dtype)
        bias = None if self.bias is None else self.bias.to(dtype)
        return F.batch_norm(shared, mean, var, weight, bias, False, 0.0, self.eps)

    # Replicas wait for one another in it: no part of it is compiled, and PyTorch's compiler isn't
    # shown it.
    return cast(Callable[..., torch.Tensor], torch.compiler.disable(forward))  # type: ignore[no-untyped-call]


def _of_all(
    input: torch.Tensor, session: Session
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Compute mean and sum of squared deviations of each channel, and the count, over all shares.

    Each party sends (means, squared deviations, count) of its share: 2 x channels + 1 numbers.

    Raises:
        ValueError: all shares together have one value per channel.
    """
    wide = torch.float32 if input.device.type == "mps" else torch.float64
    channels = input.shape[1]
    count = input.numel() // channels
    mean, var = _statistics(input)
    mine = torch.cat([mean.to(wide), var.to(wide) * count, mean.new_tensor([count], dtype=wide)])
    found = session.gather(mine)
    means, squares, counts = torch.split(found, [channels, channels, 1], dim=1)
    total = counts.sum()
    if count <= 1 and total.item() <= 1:
        raise ValueError(
            "Expected more than 1 value per channel when training, got input size "
            f"{tuple(input.shape)} on each of {session.parties} replicas"
        )
    whole = (counts * means).sum(0) / total
    return whole, (squares + counts * (means - whole).square()).sum(0), total


def _track(norm: _BatchNorm, mean: torch.Tensor, var: torch.Tensor) -> None:
    """Move the running statistics of a batch norm."""
    momentum = norm.momentum
    if norm.num_batches_tracked is not None:
        norm.num_batches_tracked.add_(1)
        if momentum is None:  # the average of all batches so far
            momentum = 1.0 / float(norm.num_batches_tracked)
    for running, value in ((norm.running_mean, mean), (norm.running_var, var)):
        if running is not None and momentum:
            running.lerp_(value.to(running.dtype), momentum)


class _Shared(torch.autograd.Function):
    r"""Gives its input; in backward it adds what reaches the input by the statistics of all parties.

    With the gradient :math:`g = w s\,dy` of an input whose statistics are held to be constants, that
    of all is :math:`g - \frac{1}{N} \sum g - \frac{\hat x}{N} \sum g\,\hat x`.
    """

    @staticmethod
    def forward(
        ctx: Any,
        input: torch.Tensor,
        mean: torch.Tensor,
        scale: torch.Tensor,
        total: torch.Tensor,
        session: Session,
    ) -> torch.Tensor:
        ctx.save_for_backward(input, mean, scale, total)
        ctx.session = session
        return input.view_as(input)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        input, mean, scale, total = ctx.saved_tensors
        shape = [1, -1, *[1] * (input.dim() - 2)]
        dims = [0, *range(2, input.dim())]
        normal = (input.to(mean.dtype) - mean.view(shape)) * scale.view(shape)
        wide = grad.to(mean.dtype)
        mine = torch.stack([wide.sum(dims), (wide * normal).sum(dims)])
        means = ctx.session.gather(mine.to(total.dtype)).sum(0) / total
        by_mean, by_scale = means.to(mean.dtype)
        found = wide - by_mean.view(shape) - normal * by_scale.view(shape)
        return found.to(input.dtype), None, None, None, None


def _statistics(input: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute mean and biased variance of each channel, over samples and positions.

    Args:
        input: (batch, channels, ...).

    Returns:
        Two tensors of (channels,); zeros for an empty share.
    """
    values = input if input.dtype == torch.float64 else input.float()
    if input.numel() == 0:
        zeros = values.new_zeros(input.shape[1])
        return zeros, zeros
    if input.device.type in ("cpu", "cuda"):  # 3 to 30 times as fast as var_mean
        mean, var = torch.batch_norm_update_stats(values, None, None, 0.0)
    else:
        var, mean = torch.var_mean(values, [0, *range(2, input.dim())], correction=0)
    return mean, var
