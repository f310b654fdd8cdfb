"""A loss as (total, count): the sum over items and their number, so that shares of any size add up.

::

    loss of the whole batch  =  sum(totals of its parts) / sum(counts of its parts)

This holds for any cut of the batch. It doesn't hold for a mean of means: parts differ in size, in
ignored tokens, in the weights of their classes. A loss is made (total, count) in one of four ways:

- PyTorch's own losses with ``reduction="mean"`` (and ``KLDivLoss`` with ``"batchmean"``): the same
  loss with ``reduction="sum"`` is the total, and the count is what PyTorch's mean divides by (see
  ``lockstep.model.losses.torch_losses``).
- ``lockstep.model_loss`` is the mean that the model computed itself. The count is the number of
  labels.
- A loss may return ``(total, count)``, or a ``Loss``, which has parts beside it.
- Any other scalar is taken as a mean over samples.

With ``Job(counts=...)`` a loss returns its share of the loss of the whole batch: the total is the
share times the samples of the whole batch, and the count is the samples of the share.

Losses of the last two kinds, and shares, are checked (``lockstep.model.losses.loss_check``).
"""

from __future__ import annotations

import contextlib
import copy
import dis
import functools
import math
import operator
import threading
import types
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from lockstep.errors import LockstepError, LossError, first_line
from lockstep.launch.memory import is_out_of_memory
from lockstep.model.losses.counts import Counts
from lockstep.model.losses.loss_errors import cause_of
from lockstep.model.losses.model_loss import loss_of_model, model_loss
from lockstep.model.losses.torch_losses import HALF, Misshapen, SummedMean
from lockstep.tensors.common_memory import tensors_of
from lockstep.tensors.pytree import described, tensors

Number = float | Tensor
"""A total, or a count."""

_TENSOR = "leave out .item(), float() and numpy(), since backward needs the tensor"


class Loss(tuple[Any, Any]):
    """``(total, count)``, with parts of the loss that are reported, and act on nothing::

        return lockstep.Loss(total, count, parts={"kl": (kl.sum(), len(kl))})

    Attributes:
        total: the sum of the loss over items, a scalar tensor.
        count: the number of items.
        parts: by name, a total and a count each. Batches that lack a part may leave it out.
    """

    parts: dict[str, tuple[Number, Number]]
    total = property(operator.itemgetter(0), doc="The sum over items.")
    count = property(operator.itemgetter(1), doc="The number of items.")

    def __new__(
        cls,
        total: Any,
        count: Any,
        parts: Mapping[str, tuple[Any, Any]] | None = None,
    ) -> Loss:
        """Make the tuple, with parts as an attribute."""
        made = super().__new__(cls, (total, count))
        made.parts = dict(parts or {})
        return made

    def __getnewargs__(self) -> tuple[Any, ...]:
        return self[0], self[1], self.parts

    def detached(self) -> Loss:
        """Give the same loss without its graph."""
        return Loss(self.total.detach(), self.count, self.parts)

    def means(self, prefix: str) -> dict[str, float]:
        """Give the mean of the loss and of each part: ``{"train_loss": 0.5, "train_kl": 0.1}``.

        The mean over no item is NaN.
        """
        found = {}
        for name, (total, count) in {"loss": self, **self.parts}.items():
            found[prefix + name] = float(total) / float(count) if count else math.nan
        return found


def no_loss(outputs: Any, targets: Any) -> Any:
    """Stands for the loss of a job that has none.

    Raises:
        LossError: always.
    """
    raise LossError("the job has no loss(outputs, targets): its step function computes several")


class Totalled:
    """``(outputs, targets, samples) -> (total, count)`` made of a person's loss.

    It can be copied, pickled (where the loss can) and called by several threads at once.

    Args:
        loss: ``loss(outputs, targets)``; a module's tensors are used on the device of the outputs.
        dtype: the format that floating tensors of a module are converted to; None leaves them.
        device: where a module is moved; None leaves it where it is.

    Attributes:
        loss: the person's loss.
        name: the loss in messages: ``loss nll``, or ``loss`` where it has no name.
        is_known: whether it is one of PyTorch's means, or the model's own.
        gives_pairs: whether it has returned ``(total, count)``.
        counts: the numbers of the whole batch that the loss is given, too; None without.
        within: gives the context in which a person's loss is called.
        one_at_a_time: the lock that a thread holds meanwhile.

    Raises:
        LossError: the loss can't be called, or has parameters that learn.
    """

    def __init__(
        self,
        loss: Callable[..., Any],
        dtype: torch.dtype | None = None,
        device: torch.device | None = None,
    ) -> None:
        if isinstance(loss, type):
            raise LossError(f"loss is the class {loss.__name__}: write {loss.__name__}()")
        if not callable(loss):
            raise LossError(
                f"loss is a {type(loss).__name__}, a function (outputs, targets) is expected"
            )
        self.loss = loss
        self._has_tensors = False
        self._to = device, dtype
        self._copies: dict[torch.device, nn.Module] = {}
        if isinstance(loss, nn.Module):
            _refuse_learning(loss)
            self._has_tensors = any(True for _ in tensors_of(loss))
            self.follow()
        self.name = _name_of(loss)
        self._mean: Callable[..., Any] | None = SummedMean.of(loss)
        if loss is model_loss:
            self._mean = loss_of_model
        self._called = False
        self.is_known = self._mean is not None
        self.gives_pairs = False
        self.counts: Counts | None = None
        self.within: Callable[[], contextlib.AbstractContextManager[Any]] = contextlib.nullcontext
        self.one_at_a_time: contextlib.AbstractContextManager[Any] = contextlib.nullcontext()

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.loss,)

    def follow(self) -> None:
        """Put a module, which may have changed, in its format again, and copy it to other devices
        anew.
        """
        if isinstance(self.loss, nn.Module) and self._has_tensors:
            self.loss.to(*self._to)
            self._copies.clear()

    def call_one_at_a_time(self) -> None:
        """Let one of several threads call the loss at a time, where it may write to attributes or
        to variables around it.
        """
        has_state = bool(getattr(self.loss, "__dict__", None))
        if isinstance(self.loss, types.FunctionType):
            names = {one.opname for one in dis.get_instructions(self.loss)}
            has_state = "STORE_DEREF" in names
        if not self.is_known and has_state:
            self.one_at_a_time = threading.RLock()

    @property
    def counts_items(self) -> bool:
        """Whether the loss gives the number of items that it sums over."""
        return self.is_known or self.gives_pairs

    def __call__(self, outputs: Any, targets: Any, samples: int) -> Loss:
        """Compute total and count of one share, or one micro-batch; parts have no gradient.

        Args:
            outputs: what the model gave.
            targets: what the loss takes beside them.
            samples: how many samples these are; above 0.

        Returns:
            total: scalar, with gradient; fp32 where the outputs are of half precision.
            count: the items that total sums over.

        Raises:
            LossError: the first call in this process raised (the message has both shapes), or the
                loss returned neither a scalar nor (total, count), or isn't additive for these
                shapes. What a later call raises is passed on, unless its cause is known.
        """
        given: tuple[Any, ...] = (outputs, targets)
        try:
            if self.counts is not None:
                whole, numbers = self.counts.on(outputs)
                given = (outputs, targets, numbers)
            value = (self._mean or self._call)(*given)
        except Exception as error:
            known = self._explained(error, outputs, targets, samples)
            if known is None:
                raise
            raise known from error
        self._called = True
        if self.counts is not None:
            return self._share(value, whole, samples)
        if self._mean is not None:
            return Loss(*value)
        return self._as_loss(value, samples)

    def _explained(
        self,
        error: Exception,
        outputs: Any,
        targets: Any,
        samples: int,
    ) -> LossError | None:
        """Explain an error by the shapes of the arguments; None where they aren't the cause."""
        if is_out_of_memory(error) or isinstance(error, LockstepError):
            return None
        given = f"outputs {described(outputs)} and targets {described(targets)}"
        what = f"{self.name} can't take {given}"
        if samples == 1 and _is_squeezed(outputs, targets):
            what += " of a local batch of one sample: the outputs have no row for it"
            fix = "where forward calls squeeze(), name the dimension, as in squeeze(-1)"
            return LossError(what, kind="shape", fix=fix)
        takes_tensors = isinstance(self._mean, SummedMean)
        why = cause_of(error, outputs, targets, takes_tensors=takes_tensors)
        if not why and (isinstance(error, Misshapen) or not self._called):
            why = first_line(error)
        return LossError(f"{what}: {why}", kind="shape") if why else None

    # ---- any other loss --------------------------------------------------------------------------

    def _call(self, *given: Any) -> Any:
        """Call a person's loss."""
        loss = self._beside(given[0])
        with self.one_at_a_time, self.within():
            return loss(*given)

    def _beside(self, outputs: Any) -> Callable[..., Any]:
        """Give the loss with its tensors on the device of the outputs.

        Each other device has a copy of the module.
        """
        module = self.loss
        if not isinstance(module, nn.Module) or not self._has_tensors:
            return module
        here = next(t.device for _, t in tensors_of(module))
        there = next((t.device for t in tensors(outputs)), here)
        if here == there:
            return module
        if there not in self._copies:
            self._copies[there] = copy.deepcopy(module).to(there)
        return self._copies[there]

    def _as_loss(self, value: Any, samples: int) -> Loss:
        """Make total and count of what a person's loss returned."""
        if isinstance(value, Tensor):
            if value.dim():
                raise LossError(
                    f"{self.name} returned a tensor of shape {tuple(value.shape)}, not a scalar: "
                    "reduction='none'? return the sum and the count"
                )
            mean = value.float() if value.dtype in HALF else value
            return Loss(mean * samples, samples)
        if not self.gives_pairs:
            self._validate(value)
        total, count = value
        if isinstance(count, Tensor) and count.requires_grad:
            raise LossError(
                f"{self.name}: the count depends on parameters, so the gradient of total / count "
                "is not a sum over samples",
                fix="count.detach(), if it is a number of items; or return the scalar, with "
                "single or mp",
            )
        return Loss(total_of_items(total, count), count, self._parts(value))

    def _share(self, value: Any, whole: Tensor, samples: int) -> Loss:
        """Make total and count of a share of the loss.

        Args:
            value: the share, or a ``Loss`` whose total it is.
            whole: the number of samples of the whole batch.
            samples: of the share.
        """
        share = value.total if isinstance(value, Loss) else value
        if not isinstance(share, Tensor) or share.dim():
            raise LossError(
                f"{self.name} returned {described(value)}: with counts= it returns a share of the "
                "loss, a scalar tensor, or lockstep.Loss(share, 1, parts=...)"
            )
        if share.dtype in HALF:
            share = share.float()
        return Loss(share * whole, samples, self._parts(value))

    def _parts(self, value: Any) -> dict[str, tuple[Number, Number]]:
        """Check the parts of what a person's loss returned."""
        parts = {}
        if isinstance(value, Loss):
            for name, pair in value.parts.items():
                parts[name] = self._part(name, pair)
        return parts

    def _part(self, name: Any, pair: Any) -> tuple[Number, Number]:
        """Check a part of a loss, and give it without its graph."""
        if not isinstance(name, str) or name in ("", "loss"):
            raise LossError(
                f"{self.name}: a part can't be called {name!r}: it is logged as train_NAME"
            )
        if not isinstance(pair, tuple) or len(pair) != 2 or not all(map(is_number, pair)):
            raise LossError(
                f'{self.name}: part "{name}" is {described(pair)}, (total, count) is expected, '
                "two numbers"
            )
        total, count = pair
        if isinstance(count, Tensor):
            count = count.detach()
        if isinstance(total, Tensor):
            total = total.detach()
        return total_of_items(total, count), count

    def _validate(self, value: Any) -> None:
        """Refuse what is no pair of a total and a count."""
        is_pair = isinstance(value, tuple) and len(value) == 2
        total, count = value if is_pair else (value, None)
        if not isinstance(total, Tensor) or total.dim() or not is_number(count):
            raise LossError(
                f"{self.name} returned {described(value)}, a scalar tensor is expected, or "
                "(total, count): a scalar tensor and a number",
                fix=_TENSOR if isinstance(total, float) else "",
            )
        self.gives_pairs = True


def total_of_items(total: Any, count: Number) -> Any:
    """Give a total, or 0 in the place of NaN where it is of no item: the mean of none times 0.

    The host doesn't wait for a count on an accelerator.
    """
    if not isinstance(total, Tensor):
        return 0.0 if not count and math.isnan(total) else total
    if isinstance(count, Tensor) and not count.is_cpu:
        is_of_none = count.to(total.device, non_blocking=True) == 0
        return total.masked_fill(total.isnan() & is_of_none, 0.0)
    return total.new_zeros(()) if not count and total.isnan() else total


def _refuse_learning(loss: nn.Module) -> None:
    for name, p in loss.named_parameters():
        if p.requires_grad:
            raise LossError(
                f"loss {type(loss).__name__} has parameters that learn ({name}): put them in the "
                "model"
            )


def _name_of(loss: Any) -> str:
    named = loss.func if isinstance(loss, functools.partial) else loss
    name = getattr(named, "__name__", type(named).__name__)
    return "loss" if name in ("<lambda>", "loss") else f"loss {name}"


def _is_squeezed(outputs: Any, targets: Any) -> bool:
    """Return whether targets have a row for the only sample, and outputs have none."""
    if not isinstance(outputs, Tensor) or not isinstance(targets, Tensor):
        return False
    return outputs.shape[:1] != targets.shape[:1] == (1,)


def is_number(value: Any) -> bool:
    """Return whether a value is a number, or a scalar tensor."""
    return isinstance(value, int | float) or (isinstance(value, Tensor) and not value.dim())
