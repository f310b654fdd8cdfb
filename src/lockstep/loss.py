"""A loss as (total, count): the sum over items and their number, so that shares of any size add up.

::

    loss of the whole batch  =  sum(totals of its parts) / sum(counts of its parts)

holds for any cut of the batch, which a mean of means does not: parts differ in size, in ignored tokens, in the weights
of their classes. A loss becomes that in one of three ways:

- PyTorch's own losses with ``reduction="mean"`` (and ``KLDivLoss`` with ``"batchmean"``): the same loss with
  ``reduction="sum"`` is the total, and the count is what PyTorch's mean divides by (see ``lockstep.means``).
- A loss that returns ``(total, count)`` is taken at its word.
- Any other scalar is taken as a mean over samples, and *probed*: the loss of the whole must equal the weighted loss of
  two unequal parts of the same outputs. That is done again in the updates 1, 2, 4, 8, ... and where targets have a
  whole number that none before had (of many, a smaller or larger one than any before): so a value that the loss
  ignores, such as -100, is seen when it comes.
"""

from __future__ import annotations

import copy
import functools
import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from lockstep.errors import LockstepError, LossError
from lockstep.means import HALF, Count, Misshapen, SummedMean
from lockstep.memory import is_out_of_memory
from lockstep.nesting import cut, each, tensors

Number = float | Tensor
"""A total, or a count."""

_FEW = 1024
"""Whole numbers that targets may range over, where each of them is looked for."""


def totalled(loss: Callable[..., Any]) -> Totalled:
    """``Totalled.of(loss)``."""
    return Totalled.of(loss)


class Totalled:
    """``(outputs, targets, samples) -> (total, count)`` made of a person's loss.

    It can be copied, pickled (where the loss can) and called by several threads at once.

    Args:
        loss: ``loss(outputs, targets)``; a module's tensors are used on the device of the outputs.

    Attributes:
        loss: what the person gave.
        proven: whether the loss is known to be additive over samples: so from the start for PyTorch's means, after the
            first call for one that returns ``(total, count)``, after ``check`` for any other.

    Raises:
        LossError: it can't be called, or has parameters that learn.
    """

    def __init__(self, loss: Callable[..., Any]) -> None:
        if isinstance(loss, type) or not callable(loss):
            raise LossError(
                f"loss is the class {loss.__name__}: write {loss.__name__}()"
                if isinstance(loss, type)
                else f"loss is a {type(loss).__name__}, a function (outputs, targets) is expected"
            )
        if isinstance(loss, nn.Module) and (learns := [n for n, p in loss.named_parameters() if p.requires_grad]):
            raise LossError(
                f"loss {type(loss).__name__} has parameters that learn ({learns[0]}): put them in the model"
            )
        self.loss = loss
        self._name = _name_of(loss)
        self._mean = SummedMean.of(loss)
        self._has_tensors = isinstance(loss, nn.Module) and any(True for _ in (*loss.buffers(), *loss.parameters()))
        self._copies: dict[Any, Any] = {}
        self._called = False
        self._valid = False
        self._ends: tuple[int, int] | None = None
        self._values: set[int] = set()
        self.proven = self._mean is not None

    @classmethod
    def of(cls, loss: Callable[..., Any]) -> Totalled:
        """The same object where ``loss`` is one already."""
        return loss if isinstance(loss, cls) else cls(loss)

    def __reduce__(self) -> tuple[Any, ...]:
        return _restored, (self.loss, self.proven)

    def __repr__(self) -> str:
        return f"Totalled({self.loss!r}, proven={self.proven})"

    def __call__(self, outputs: Any, targets: Any, samples: int) -> tuple[Tensor, Count]:
        """Total and count of one share, or one micro-batch.

        Args:
            outputs: what the model gave.
            targets: what the loss takes beside them.
            samples: how many samples these are; above 0.

        Returns:
            total: scalar, with gradient; fp32 where the outputs are of half precision.
            count: the items that total sums over.

        Raises:
            LossError: the first call in this process raised (both shapes are said), or what it returned is neither a
                scalar nor (total, count), or is not additive for these shapes. What a later call raises is passed on.
        """
        try:
            if self._mean is not None:
                taken = self._mean(outputs, targets)
                self._called = True
                return taken
            value = self._beside(outputs)(outputs, targets)
        except Misshapen as error:
            raise LossError(f"{self._cannot_take(outputs, targets)}: {error}") from None
        except Exception as error:
            if self._called or isinstance(error, LockstepError) or is_out_of_memory(error):
                raise
            raise LossError(f"{self._cannot_take(outputs, targets)}: {_first_line(error)}") from error
        self._called = True
        return self._taken(value, samples)

    def check(self, outputs: Any, targets: Any, samples: int, *, again: bool = False) -> None:
        """Make sure that the loss is additive over samples.

        Args:
            outputs: of one share.
            targets: of one share.
            samples: how many these are; of a single one two are made, the second with halved outputs.
            again: also where an earlier batch has shown it; a rare mask may not have been in that one. (Where targets
                have new values, on the CPU, it is done again anyway.)

        Outputs are detached, random numbers go on as if nothing had happened, and a module's state is left alone.

        Raises:
            LossError: it isn't additive, or can't be probed.
        """
        if self._mean is not None or self._valid or not (self._widened(targets) or again or not self.proven):
            return
        if samples == 1:
            outputs = each(lambda t: torch.cat([t, t / 2 if t.is_floating_point() else t]) if t.dim() else t, outputs)
            targets = each(lambda t: torch.cat([t, t]) if t.dim() else t, targets)
            samples = 2
        devices = {t.device for t in tensors(outputs) if t.device.type not in ("cpu", "meta")}
        kind = next((d.type for d in devices), "cuda")
        indices = [d.index or 0 for d in devices]
        with torch.no_grad(), torch.random.fork_rng(indices, enabled=True, device_type=kind):
            self._probe(each(Tensor.detach, outputs), targets, outputs, samples)

    def _widened(self, targets: Any) -> bool:
        """Whether the targets have whole numbers that none before had; of many, outside of all that came before."""
        whole = [t for t in tensors(targets) if _is_whole(t)]
        ends = [int(end) for t in whole for end in t.aminmax()]
        if not ends:
            return False
        before = self._ends or (min(ends), max(ends))
        reached = min(*ends, before[0]), max(*ends, before[1])
        widened = reached != self._ends
        self._ends = reached
        if reached[1] - reached[0] < _FEW:
            known = len(self._values)
            self._values.update(*map(_values_of, whole))
            widened = widened or len(self._values) > known
        return widened

    # ---- any other loss ---------------------------------------------------------------------------------------------

    def _beside(self, outputs: Any) -> Callable[..., Any]:
        """The loss with its tensors on the device of the outputs: a copy of the module for each other device."""
        if not self._has_tensors:
            return self.loss
        module = self.loss
        assert isinstance(module, nn.Module)
        here = next((t.device for t in (*module.buffers(), *module.parameters())), None)
        there = next((t.device for t in tensors(outputs)), here)
        if here == there:
            return module
        if there not in self._copies:
            self._copies[there] = copy.deepcopy(module).to(there)
        moved: nn.Module = self._copies[there]
        return moved

    def _taken(self, value: Any, samples: int) -> tuple[Tensor, Count]:
        """What a person's loss returned, as total and count."""
        if isinstance(value, Tensor):
            if value.dim():
                raise LossError(
                    f"{self._name} returned a tensor of shape {tuple(value.shape)}, not a scalar: "
                    "reduction='none'? return the sum and the count"
                )
            return (value.float() if value.dtype in HALF else value) * samples, samples
        if not self._valid:
            self._validate(value)
        total, count = value
        if isinstance(count, Tensor) and count.requires_grad:
            count = count.detach()
        self.proven = True
        return total, count

    def _validate(self, value: Any) -> None:
        what = f"{self._name} returned {_told(value)}"
        if not isinstance(value, tuple) or len(value) != 2:
            raise LossError(f"{what}, a scalar tensor or (total, count) is expected")
        total, count = value
        if not isinstance(total, Tensor) or total.dim():
            raise LossError(f"{what}, where total is expected to be a scalar tensor")
        if not (isinstance(count, int | float) or (isinstance(count, Tensor) and not count.dim())):
            raise LossError(f"{what}, where count is expected to be a number or a scalar tensor")
        self._valid = True

    # ---- the probe --------------------------------------------------------------------------------------------------

    def _probe(self, outputs: Any, targets: Any, originals: Any, samples: int) -> None:
        loss = copy.deepcopy(self.loss) if isinstance(self.loss, nn.Module) else self.loss
        probed = Totalled(loss)
        whole, _ = probed(outputs, targets, samples)
        if probed.proven:  # it gave (total, count)
            self.proven = True
            return
        advice = "return (total, count) from it, or use single (or mp) without accumulate"
        for name, tree in (("outputs", originals), ("targets", targets)):
            if name == "outputs" and not any(True for _ in tensors(tree)):
                raise LossError(f"{self._name} can't be probed: outputs have no tensor to cut: {advice}")
            for tensor in tensors(tree):
                if not tensor.dim() or tensor.shape[0] != samples:
                    raise LossError(
                        f"{self._name} can't be probed: {name} have a tensor {tuple(tensor.shape)} "
                        f"that isn't one row for each of {samples} samples: {advice}"
                    )
        value = whole.item() / samples
        tolerance = _tolerance([whole, *tensors(outputs)])
        if value != value or abs(value) == float("inf"):
            return  # nothing can be learned from this batch; the step that uses it will say so
        for first in {max(1, samples // 3), samples - max(1, samples // 4)}:
            parts = []
            for start, size in ((0, first), (first, samples - first)):
                try:
                    total, _ = probed(cut(outputs, start, size, samples), cut(targets, start, size, samples), size)
                except Exception as error:
                    if is_out_of_memory(error):
                        raise
                    raise LossError(
                        f"{self._name} is not a mean over samples (it can't take {size} of {samples} samples: "
                        f"{_first_line(error)}): {advice}"
                    ) from error
                parts.append((total.item(), size))
            together = sum(t for t, _ in parts) / samples
            scale = max(abs(value), sum(abs(t) for t, _ in parts) / samples)
            # (A part that isn't finite, of a whole that is: the variance of one sample, say.)
            if math.isfinite(scale) and abs(together - value) <= tolerance * scale:
                continue
            added = sum(t / size for t, size in parts)
            if math.isfinite(scale) and abs(added - value) <= tolerance * max(
                abs(value), sum(abs(t / size) for t, size in parts)
            ):
                raise LossError(
                    f"{self._name} is not a mean over samples but a sum, its value depends on the batch size "
                    f"(whole {value:.6g}, its parts add up to it): use reduction='mean', or return (total, count)"
                )
            raise LossError(
                f"{self._name} is not a mean over samples (whole {value:.6g}, from two parts {together:.6g}): {advice}"
            )
        self.proven = True

    def _cannot_take(self, outputs: Any, targets: Any) -> str:
        return f"{self._name} can't take outputs {_told(outputs)} and targets {_told(targets)}"


def _is_whole(tensor: Tensor) -> bool:
    return tensor.device.type == "cpu" and tensor.dtype in (torch.int64, torch.int32) and bool(tensor.numel())


def _values_of(tensor: Tensor) -> list[int]:
    """The whole numbers in it, which lie near one another, each once: by counting, since a mask has millions."""
    least = int(tensor.min())
    return [least + i for i in torch.bincount(tensor.flatten() - least).nonzero().flatten().tolist()]


def _restored(loss: Callable[..., Any], proven: bool) -> Totalled:
    made = Totalled(loss)
    made.proven = proven
    return made


def _tolerance(values: list[Tensor]) -> float:
    """How far two ways to round may lie apart, by the coarsest number format."""
    formats = {t.dtype for t in values if t.is_floating_point()}
    if formats & set(HALF):
        return 2e-2
    return 1e-8 if formats <= {torch.float64} else 1e-4


def _name_of(loss: Any) -> str:
    named = loss.func if isinstance(loss, functools.partial) else loss
    name = getattr(named, "__name__", type(named).__name__)
    return "loss" if name in ("<lambda>", "loss") else f"loss {name}"


def _told(value: Any) -> str:
    """A value by its shapes, for messages."""
    if isinstance(value, Tensor):
        return str(tuple(value.shape))
    if isinstance(value, tuple | list):
        return f"{type(value).__name__}[{', '.join(map(_told, value))}]"
    if isinstance(value, dict):
        return f"{type(value).__name__}[{', '.join(f'{k}: {_told(v)}' for k, v in value.items())}]"
    return "None" if value is None else f"a {type(value).__name__}"


def _first_line(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__
