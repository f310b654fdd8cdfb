"""The loss check: whether a person's loss function is a sum over samples, in each update.

::

    total(batch)  =  total(samples 0..k) + total(samples k..n)        and counts likewise

Both parts are of outputs that forward has computed, so the check is cheap, and a mask that comes
late is found in the update in which it comes. (Whether the *model* lets samples act on one another
is for the sum check, see ``lockstep.strategies.sums.sum_check``.) The sizes of the two parts have
no common divisor: a mask over samples leaves the same fraction of both only if all or none are
masked.

The totals and counts of a loss that returns ``(total, count)`` are checked. The total of a loss
that returns a scalar, a mean over samples, is that scalar times the number of samples. PyTorch's
own losses (``lockstep.model.losses.torch_losses``) need no check.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from lockstep.errors import LossError
from lockstep.launch.memory import is_out_of_memory
from lockstep.launch.world import World
from lockstep.model.communication import NotedCommunication
from lockstep.model.losses.check_interval import TIMED, CheckInterval
from lockstep.model.losses.loss import Loss, Totalled
from lockstep.model.losses.torch_losses import HALF
from lockstep.tensors.placing import place_of
from lockstep.tensors.pytree import copied_nest, each, holds_packed, tensors
from lockstep.tensors.pytree import parts as parts_of
from lockstep.tensors.rows import are_batches, part_of
from lockstep.tensors.seeding import kept_state_on
from lockstep.threads.random_streams import stream

Nest = tuple[Any, Any]
"""Outputs and targets."""

ADVICE = (
    "return (total, count), the sum over the items that count (not padding) and their number; or "
    "use single (or mp) without accumulate"
)

_DOUBLE = 1e-8
"""How far sums may be off in float64, as a part of what is added."""


class LossCheck:
    """Checks one loss.

    Args:
        loss: gives total and count.
        cuts: whether batches are cut; else nothing is checked.
        accepts: whether a difference is logged, rather than refused.

    Attributes:
        interval: how often the loss is checked.
        notes: what is to be logged.
    """

    def __init__(self, loss: Totalled, *, cuts: bool, accepts: bool = False) -> None:
        self._loss = loss
        self._checks = cuts and not loss.is_known
        self._accepts = accepts
        self._has_passed = False
        self._is_first = True
        self.interval = CheckInterval()
        self.notes: list[str] = []

    def wants(self, update: int) -> bool:
        """Whether the loss is to be checked in this update, counted from 1."""
        return self._checks and self.interval.is_due(update)

    def __call__(
        self, outputs: Any, targets: Any, whole: Loss, samples: int, *, step: int, waits: bool
    ) -> Tensor | None:
        """Check the loss of one local batch. Random numbers go on as if nothing had happened.

        Args:
            outputs: of the model.
            targets: what the loss takes beside them.
            whole: what the loss made of both.
            samples: how many there are.
            step: the update, for the message; 0 in an evaluation.
            waits: whether the host may wait for an accelerator.

        Returns:
            Whether the loss is wrong, as a boolean scalar on an accelerator that isn't waited for;
            else None.

        Raises:
            LossError: the loss isn't additive.
        """
        if samples < 2 or holds_packed((outputs, targets)):
            return None
        nest = each(torch.Tensor.detach, outputs), targets
        if _may_be_of_samples_or_batches(nest, samples):
            return None
        if _holds_parameters(outputs) or not _can_be_cut(nest, samples):
            self._checks = False  # else a batch of as many samples would be cut by chance
            return None
        loss = self._loss.copied()
        if loss is self._loss and loss.may_have_state:  # the check would change that
            self._checks = False
            return None
        sizes = _sizes(samples)
        with torch.no_grad(), _drawing_apart(nest) as drawn:
            if self._is_first:
                self._is_first = False
                if self._communicates(loss, nest, samples):
                    return None
            parts = self._parts(loss, nest, sizes, samples)
            if parts is None:
                return None
            tolerance = _tolerance(nest, whole.total)
            if not waits:
                return _are_apart(whole, parts, tolerance)
            if not _is_apart(whole, parts, tolerance):
                self._has_passed = True
                return None
            is_of_all = not self._has_passed and _holds_numbers_of_all(nest, samples)
            if drawn or is_of_all or not self._is_repeatable(nest, whole, samples):
                self._checks = (
                    False  # the sum check has parts collated, and draw what the whole does
                )
                return None
            if self._is_rounding(nest, samples):
                return None
            error = not_additive(self._loss, whole, parts, (samples, *sizes), step)
        if not self._accepts:
            raise error
        self._checks = False
        self.notes.append(f"{error}; this difference is accepted")
        return None

    def _parts(
        self, loss: Totalled, nest: Nest, sizes: tuple[int, int], samples: int
    ) -> list[Loss] | None:
        """Compute both parts; None, now and later, where the loss can't take them."""
        first, second = sizes
        try:
            return [
                loss(*copied_nest(part_of(nest, start, size, samples)), size)
                for start, size in ((0, first), (first, second))
            ]
        except Exception as error:
            if is_out_of_memory(error):
                raise
            self._checks = False
            return None

    def _communicates(self, loss: Totalled, nest: Nest, samples: int) -> bool:
        """Whether the loss communicates with other ranks, which may not be checking: then the loss
        isn't checked at all.
        """
        noted = NotedCommunication()  # type: ignore[no-untyped-call]
        with noted, contextlib.suppress(LossError):
            loss(*copied_nest(nest), samples)
        self._checks = not noted.found
        return bool(noted.found)

    def _is_repeatable(self, nest: Nest, whole: Loss, samples: int) -> bool:
        """Whether the loss is the same again: one that draws, or remembers something, isn't."""
        again = self._loss.copied()(*copied_nest(nest), samples)
        return not _is_apart(whole, [again], _tolerance(nest, whole.total))

    def _is_rounding(self, nest: Nest, samples: int) -> bool:
        """Whether the parts add up in float64."""
        doubled: Nest = each(_doubled, nest)
        loss = self._loss.copied(double=True)
        try:
            with torch.autocast(place_of(nest).type, enabled=False):
                whole = loss(*copied_nest(doubled), samples)
                parts = self._parts(loss, doubled, _sizes(samples), samples)
        except (LossError, TypeError, RuntimeError) as error:
            if is_out_of_memory(error):
                raise
            return False
        return parts is not None and not _is_apart(whole, parts, _DOUBLE)

    def found_later(self, step: int) -> LossError:
        """Give the error of an update that an accelerator has found wrong."""
        kind = "sum" if self._loss.gives_pairs else "mean"
        return LossError(
            f"{self._loss.name} is not a {kind} over samples in step {step}", fix=ADVICE
        )

    # ---- how often -------------------------------------------------------------------------------

    def is_timed(self, update: int) -> bool:
        """Whether to time this update."""
        return update in TIMED and self.wants(update)

    def agree(self, world: World, update: int, line: str | None) -> None:
        """Check as seldom as the slowest rank; every rank calls this in each update.

        ``line`` is what ``interval.timed`` gave.
        """
        if not self._loss.is_known and update == TIMED.stop - 1:
            if world.size > 1 and world.layout.together:
                found = world.gather_objects((self.interval.every, line or ""))
                self.interval.every, line = max(found)
            if line:
                self.notes.append(line)


def _sizes(samples: int) -> tuple[int, int]:
    """The sizes of two parts, which have no common divisor."""
    first = (samples + 1) // 2
    while math.gcd(first, samples) > 1:
        first -= 1
    return first, samples - first


def _holds_parameters(outputs: Any) -> bool:
    return any(tensor.is_leaf and tensor.requires_grad for tensor in tensors(outputs))


def _may_be_of_samples_or_batches(nest: Any, samples: int) -> bool:
    """Whether there is a list of as many tensors as samples, each with as many rows.

    It may be the two boxes of each of two images, or what each of two layers gives of both.
    """
    if isinstance(nest, list) and len(nest) == samples and are_batches(nest, samples):
        return True
    return any(_may_be_of_samples_or_batches(one, samples) for one in parts_of(nest) or ())


def _can_be_cut(nest: Nest, samples: int) -> bool:
    """Whether each tensor has a row for each sample (or several), but for integers of all."""
    one = part_of(nest, 0, 1, samples)
    shapes = [(tensor.shape, tensor.is_floating_point()) for tensor in tensors(nest)]
    of_one = [tensor.shape for tensor in tensors(one)]
    if not shapes or len(shapes) != len(of_one):
        return bool(shapes)  # lists with a tensor for each sample
    return not any(
        is_floating and shape == of_first
        for (shape, is_floating), of_first in zip(shapes, of_one, strict=True)
    )


def _holds_numbers_of_all(nest: Any, samples: int) -> bool:
    """Whether there is a number of the whole batch, as of items that collate has counted."""
    if isinstance(nest, Tensor):
        return not nest.is_floating_point() and nest.shape[:1] != (samples,)
    inside = parts_of(nest)
    if inside is None:
        return isinstance(nest, int | float)
    return any(_holds_numbers_of_all(one, samples) for one in inside)


@contextlib.contextmanager
def _drawing_apart(nest: Nest) -> Iterator[list[bool]]:
    """Let random numbers go on afterwards as if none had been drawn.

    The list that this gives isn't empty once some were drawn on the CPU.
    """
    drawn: list[bool] = []

    def generator() -> torch.Generator:
        drawn.append(True)
        return torch.Generator()

    places = {tensor.device for tensor in tensors(nest)}
    with contextlib.ExitStack() as stack:
        for place in places:
            if place.type not in ("cpu", "meta"):
                stack.enter_context(kept_state_on(place))
        stack.enter_context(stream(generator))
        yield drawn


def _doubled(tensor: Tensor) -> Tensor:
    return tensor.double() if tensor.is_floating_point() else tensor


def _pair(loss: Loss) -> tuple[float, float]:
    """Total and count. The total of no item is 0, also where a mean of none, NaN, is times 0."""
    total = float(loss.total)
    count = float(loss.count)
    return (0.0 if math.isnan(total) and not count else total), count


def _tolerance(nest: Nest, total: Any) -> float:
    """How far sums may be off, by the formats that they may have been computed in."""
    if not isinstance(total, Tensor):
        return 1e-4
    if torch.is_autocast_enabled(total.device.type):
        return 2e-2
    if any(tensor.dtype in HALF for tensor in (total, *tensors(nest[0]))):
        return 2e-2
    return _DOUBLE if total.dtype == torch.float64 else 1e-4


def _is_apart(whole: Loss, parts: list[Loss], tolerance: float) -> bool:
    """Whether parts don't add up to the whole."""
    columns = zip(*map(_pair, parts), strict=True)
    for value, of_parts in zip(_pair(whole), columns, strict=True):
        size = abs(value) + sum(map(abs, of_parts))
        # A part that isn't finite, of a whole that is, is wrong too: the variance of one sample.
        if math.isfinite(value) and not abs(sum(of_parts) - value) <= tolerance * size:
            return True
    return False


def _are_apart(whole: Loss, parts: list[Loss], tolerance: float) -> Tensor:
    """Whether parts don't add up to the whole, computed by the accelerator."""
    wrong = torch.zeros_like(whole.total, dtype=torch.bool)
    for value, one, other in zip(whole, *parts, strict=True):
        if isinstance(value, Tensor):
            bound = tolerance * (abs(value) + abs(one) + abs(other))
            wrong = wrong | (torch.isfinite(value) & ~(abs(one + other - value) <= bound))
        elif one + other != value:
            wrong = torch.ones_like(wrong)
    return wrong


def not_additive(
    loss: Totalled, whole: Loss, parts: list[Loss], sizes: tuple[int, ...], step: int
) -> LossError:
    """Give the error of a loss that isn't additive, with the numbers that don't add up.

    Args:
        loss: the loss.
        whole: what it made of a batch.
        parts: what it made of two parts.
        sizes: how many samples the batch and the parts have.
        step: the update; 0 or 1 isn't named.
    """
    when = f" in step {step}" if step > 1 else ""
    numbers = [_pair(one) for one in (whole, *parts)]
    if loss.gives_pairs:
        totals, counts = zip(*numbers, strict=True)
        is_total = not abs(totals[0] - sum(totals[1:])) <= _DOUBLE * sum(map(abs, totals))
        what, (a, b, c) = ("total", totals) if is_total else ("count", counts)
        return LossError(
            f"{loss.name}: the {what} is not a sum over samples{when} "
            f"(whole {a:.6g}, its two parts {b:.6g} and {c:.6g})",
            fix="return the sum over the items of the batch, and their number; or use single (or "
            "mp) without accumulate",
        )
    means = [total / size for (total, _), size in zip(numbers, sizes, strict=True)]
    if means[1] and means[2] and abs(means[1] + means[2] - means[0]) <= 1e-4 * abs(means[0]):
        return LossError(
            f"{loss.name} is not a mean over samples but a sum, its value depends on the batch "
            f"size (whole {means[0]:.6g}, its parts add up to it)",
            fix="use reduction='mean', or return (total, count)",
        )
    together = sum(total for total, _ in numbers[1:]) / sizes[0]
    return LossError(
        f"{loss.name} is not a mean over samples{when} "
        f"(whole {means[0]:.6g}, from two parts {together:.6g})",
        fix=ADVICE,
    )


@contextlib.contextmanager
def squeezing_explained(outputs: Any, targets: Any, samples: int) -> Iterator[None]:
    """Explain a loss that fails with outputs of one sample that have no row for it.

    Raises:
        LossError: instead of what the loss raises.
    """
    try:
        yield
    except Exception as error:
        if not _is_squeezed(outputs, targets, samples) or is_out_of_memory(error):
            raise
        raise LossError(
            f"the loss can't take outputs {tuple(outputs.shape)} and targets "
            f"{tuple(targets.shape)} of a local batch of one sample: the outputs have no row for it",
            kind="shape",
            fix="where forward calls squeeze(), name the dimension, as in squeeze(-1)",
        ) from error


def _is_squeezed(outputs: Any, targets: Any, samples: int) -> bool:
    if samples != 1 or not isinstance(outputs, Tensor) or not isinstance(targets, Tensor):
        return False
    return outputs.shape[:1] != (1,) and targets.shape[:1] == (1,)
