"""A loss as (total, count): the sum over items and their number, so that shares of any size add up.

::

    loss of the whole batch  =  sum(totals of its parts) / sum(counts of its parts)

holds for any cut of the batch, which a mean of means does not: parts differ in size, in ignored
tokens, in the weights of their classes. A loss becomes that in one of four ways:

- PyTorch's own losses with ``reduction="mean"`` (and ``KLDivLoss`` with ``"batchmean"``): the same
  loss with ``reduction="sum"`` is the total, and the count is what PyTorch's mean divides by (see
  ``lockstep.model.losses.torch_losses``).
- ``lockstep.model_loss`` is the mean that the model computed itself, and counts the labels that it
  is over.
- A loss may return ``(total, count)``, or a ``Loss``, which has parts beside it.
- Any other scalar is taken as a mean over samples.

The last two are held to that in each update (``lockstep.model.losses.loss_check``).
"""

from __future__ import annotations

import contextlib
import copy
import functools
import math
import threading
import types
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from lockstep.errors import LockstepError, LossError, first_line
from lockstep.launch.memory import is_out_of_memory
from lockstep.model.losses.followed_copy import FollowedCopy
from lockstep.model.losses.model_loss import ModelLoss, model_loss
from lockstep.model.losses.torch_losses import HALF, Misshapen, SummedMean
from lockstep.tensors.pytree import clones, tensors, versions

Number = float | Tensor
"""A total, or a count."""


class Loss(tuple[Any, Any]):
    """``(total, count)``, with parts of it that are reported beside it, and act on nothing::

        return lockstep.Loss(total, count, parts={"kl": (kl.sum(), len(kl))})

    Args:
        total: the sum of the loss over items, a scalar tensor.
        count: their number.
        parts: by name, a total and a count each. A part that some batches don't have may be left
            out there.
    """

    parts: dict[str, tuple[Number, Number]]

    def __new__(
        cls, total: Any, count: Any, parts: Mapping[str, tuple[Any, Any]] | None = None
    ) -> Loss:
        """As a tuple is made."""
        made = super().__new__(cls, (total, count))
        made.parts = dict(parts or {})
        return made

    def __getnewargs__(self) -> tuple[Any, ...]:
        return self[0], self[1], self.parts

    @property
    def total(self) -> Any:
        """The sum over items."""
        return self[0]

    @property
    def count(self) -> Any:
        """The number of items."""
        return self[1]

    def detached(self) -> Loss:
        """It without its graph."""
        return Loss(self.total.detach(), self.count, self.parts)

    def means(self, prefix: str) -> dict[str, float]:
        """The mean of the loss and of each part, as ``{"train_loss": 0.5, "train_kl": 0.1}``;
        NaN of no item.
        """
        named = {"loss": self, **self.parts}
        return {
            prefix + name: float(t) / float(c) if c else math.nan for name, (t, c) in named.items()
        }


class Totalled:
    """``(outputs, targets, samples) -> (total, count)`` made of a person's loss.

    It can be copied, pickled (where the loss can) and called by several threads at once.

    Args:
        loss: ``loss(outputs, targets)``; a module's tensors are used on the device of the outputs.
        dtype: the format that floating tensors of a module are used in; None as they are.

    Attributes:
        loss: what the person gave, or a copy in that format.
        name: it in messages: ``loss nll``, or ``loss`` where it has no name.
        is_known: whether it is one of PyTorch's means, or the model's own.
        gives_pairs: whether it has returned ``(total, count)``.
        within: gives what a person's loss is called in.
        one_at_a_time: what a thread holds meanwhile.

    Raises:
        LossError: it can't be called, or has parameters that learn.
    """

    def __init__(self, loss: Callable[..., Any], dtype: torch.dtype | None = None) -> None:
        if isinstance(loss, type) or not callable(loss):
            raise LossError(
                f"loss is the class {loss.__name__}: write {loss.__name__}()"
                if isinstance(loss, type)
                else f"loss is a {type(loss).__name__}, a function (outputs, targets) is expected"
            )
        if isinstance(loss, nn.Module) and (
            learns := [n for n, p in loss.named_parameters() if p.requires_grad]
        ):
            raise LossError(
                f"loss {type(loss).__name__} has parameters that learn ({learns[0]}): put them in "
                "the model"
            )
        kept: list[Tensor] = []
        self._converted: FollowedCopy | None = None
        if isinstance(loss, nn.Module):
            kept = [*loss.parameters(), *loss.buffers()]
            if dtype is not None and any(
                t.dtype is not dtype for t in kept if t.is_floating_point()
            ):
                self._converted = FollowedCopy(loss, dtype)
                loss = self._converted.copy
        self.loss = loss
        self.name = _name_of(loss)
        self._mean = ModelLoss() if loss is model_loss else SummedMean.of(loss)
        self._has_tensors = bool(kept)
        self._copies: dict[torch.device, FollowedCopy] = {}
        self._called = False
        self._seen: set[str] = (
            set()
        )  # of it and its copies: whether it was "tried", and "writes" to what it is given
        self.is_known = self._mean is not None
        self.gives_pairs = False
        self.within: Callable[[], contextlib.AbstractContextManager[Any]] = contextlib.nullcontext
        self.one_at_a_time: contextlib.AbstractContextManager[Any] = contextlib.nullcontext()

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.loss,)

    def __repr__(self) -> str:
        return f"Totalled({self.loss!r})"

    def follow(self) -> None:
        """Give copies of a module what was changed in it since."""
        for copied in (
            *([] if self._converted is None else [self._converted]),
            *self._copies.values(),
        ):
            copied.follow()

    def call_one_at_a_time(self) -> None:
        """Of several threads, where it has variables that all would write to: ``self.weights``,
        a global.
        """
        if not self.is_known and self.may_have_state:
            self.one_at_a_time = threading.RLock()

    @property
    def counts_items(self) -> bool:
        """Whether it says over how many items it sums."""
        return self.is_known or self.gives_pairs

    @property
    def may_have_state(self) -> bool:
        """Whether it is an object with attributes."""
        return bool(getattr(self.loss, "__dict__", None)) and not isinstance(
            self.loss, types.FunctionType
        )

    def copied(self, *, double: bool = False) -> Totalled:
        """One whose calls leave the state of a loss that is an object alone; a module in
        float64, if ``double``.
        """
        if not self.may_have_state:
            return self
        modules = [m for m in (self.loss, *vars(self.loss).values()) if isinstance(m, nn.Module)]
        parameters = (
            {} if double else {id(p): p for m in modules for p in m.parameters()}
        )  # they may be large
        try:
            copied = copy.deepcopy(self.loss, parameters)
        except Exception:  # what it holds can't be copied
            return self
        made = Totalled(copied.double() if double and isinstance(copied, nn.Module) else copied)
        made._called, made._seen = True, self._seen
        made.within, made.one_at_a_time = self.within, self.one_at_a_time
        return made

    def __call__(self, outputs: Any, targets: Any, samples: int) -> Loss:
        """Total and count of one share, or one micro-batch; parts are without gradient.

        Args:
            outputs: what the model gave.
            targets: what the loss takes beside them.
            samples: how many samples these are; above 0.

        Returns:
            total: scalar, with gradient; fp32 where the outputs are of half precision.
            count: the items that total sums over.

        Raises:
            LossError: the first call in this process raised (both shapes are said), or what it
                returned is neither a scalar nor (total, count), or is not additive for these
                shapes. What a later call raises is passed on.
        """
        try:
            if self._mean is not None:
                taken = self._mean(outputs, targets)
                self._called = True
                return Loss(*taken)
            value = self._of_copies(self._beside(outputs), outputs, targets)
        except Misshapen as error:
            raise LossError(
                f"{self._cannot_take(outputs, targets)}: {error}", kind="shape"
            ) from None
        except Exception as error:
            if self._called or isinstance(error, LockstepError) or is_out_of_memory(error):
                raise
            raise LossError(
                f"{self._cannot_take(outputs, targets)}: {first_line(error)}", kind="shape"
            ) from error
        self._called = True
        return self._taken(value, samples)

    # ---- any other loss --------------------------------------------------------------------------

    def _of_copies(self, loss: Callable[..., Any], outputs: Any, targets: Any) -> Any:
        """What ``loss`` returns; outputs and targets, which are needed again, stay as they are
        if it writes to them.
        """
        given = outputs, targets
        copies = "writes" in self._seen or (
            "tried" not in self._seen and not torch.is_grad_enabled()
        )
        if copies:
            self._seen.add("tried")
            given = clones(given)
        before = versions(given)
        with self.one_at_a_time, self.within():
            value = loss(*given)
        if versions(given) != before:
            self._seen.add("writes")
        return value

    def _beside(self, outputs: Any) -> Callable[..., Any]:
        """The loss with its tensors on the device of the outputs: a copy of the module for each
        other device.
        """
        if not self._has_tensors:
            return self.loss
        module = self.loss
        assert isinstance(module, nn.Module)
        here = next(t.device for t in (*module.buffers(), *module.parameters()))
        there = next((t.device for t in tensors(outputs)), here)
        if here == there:
            return module
        if there not in self._copies:
            self._copies[there] = FollowedCopy(module, there)
        return self._copies[there].copy

    def _taken(self, value: Any, samples: int) -> Loss:
        """What a person's loss returned, as total and count."""
        if isinstance(value, Tensor):
            if value.dim():
                raise LossError(
                    f"{self.name} returned a tensor of shape {tuple(value.shape)}, not a scalar: "
                    "reduction='none'? return the sum and the count"
                )
            return Loss((value.float() if value.dtype in HALF else value) * samples, samples)
        if not self.gives_pairs:
            self._validate(value)
        total, count = value
        if isinstance(count, Tensor) and count.requires_grad:
            raise LossError(
                f"{self.name}: the count depends on parameters, so that the gradient of total / "
                "count is no sum over "
                "samples",
                fix="count.detach(), if it is a number of items; or return the scalar, with "
                "single or mp",
            )
        parts = value.parts if isinstance(value, Loss) else {}
        return Loss(total, count, {name: self._part(name, pair) for name, pair in parts.items()})

    def _part(self, name: Any, pair: Any) -> tuple[Number, Number]:
        if not isinstance(name, str) or name in ("", "loss"):
            raise LossError(
                f"{self.name}: a part can't be called {name!r}: it is logged as train_NAME"
            )
        if not isinstance(pair, tuple) or len(pair) != 2 or not all(map(_is_number, pair)):
            raise LossError(
                f'{self.name}: part "{name}" is {_told(pair)}, (total, count) is expected, two '
                "numbers"
            )
        total, count = (each.detach() if isinstance(each, Tensor) else each for each in pair)
        if isinstance(total, Tensor) and (isinstance(count, Tensor) or not count):
            total = total.masked_fill(
                total.isnan() & (count == 0), 0.0
            )  # a mean over none, times none
        return total, count

    def _validate(self, value: Any) -> None:
        what = f"{self.name} returned {_told(value)}"
        if not isinstance(value, tuple) or len(value) != 2:
            raise LossError(f"{what}, a scalar tensor or (total, count) is expected")
        total, count = value
        if not isinstance(total, Tensor) or total.dim():
            raise LossError(f"{what}, where total is expected to be a scalar tensor")
        if not _is_number(count):
            raise LossError(f"{what}, where count is expected to be a number or a scalar tensor")
        self.gives_pairs = True

    def _cannot_take(self, outputs: Any, targets: Any) -> str:
        return f"{self.name} can't take outputs {_told(outputs)} and targets {_told(targets)}"


def _name_of(loss: Any) -> str:
    named = loss.func if isinstance(loss, functools.partial) else loss
    name = getattr(named, "__name__", type(named).__name__)
    return "loss" if name in ("<lambda>", "loss") else f"loss {name}"


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) or (isinstance(value, Tensor) and not value.dim())


def _told(value: Any) -> str:
    """A value by its shapes, for messages."""
    if isinstance(value, Tensor):
        return str(tuple(value.shape))
    if isinstance(value, tuple | list):
        return f"{type(value).__name__}[{', '.join(map(_told, value))}]"
    if isinstance(value, dict):
        return f"{type(value).__name__}[{', '.join(f'{k}: {_told(v)}' for k, v in value.items())}]"
    return "None" if value is None else f"a {type(value).__name__}"
