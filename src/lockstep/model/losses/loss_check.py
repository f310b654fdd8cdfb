"""The loss check: whether a person's loss function is a sum over samples.

::

    total(batch)  =  total(samples 0..k) + total(samples k..n)        and counts likewise

Both parts are of outputs that forward has computed, so the check is cheap. Whether the *model*
lets samples act on one another, the sum check finds (``lockstep.strategies.sums.sum_check``). The
sizes of the two parts have no common divisor: a mask over samples leaves the same fraction of both
only if all or none are masked.

The totals and counts of a loss that returns ``(total, count)`` are checked. The total of a loss
that returns a scalar, a mean over samples, is that scalar times the number of samples. PyTorch's
own losses (``lockstep.model.losses.torch_losses``) need no check.
"""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from lockstep.errors import LossError
from lockstep.launch.memory import is_out_of_memory
from lockstep.model.communication import NotedCommunication
from lockstep.model.losses.loss import Loss, Totalled
from lockstep.model.losses.torch_losses import HALF
from lockstep.model.snapshot import kept
from lockstep.tensors.placing import place_of
from lockstep.tensors.pytree import copied_nest, doubled, each, holds_packed, tensors
from lockstep.tensors.pytree import parts as parts_of
from lockstep.tensors.rows import are_batches, coprime_sizes, cut
from lockstep.tensors.seeding import kept_state_on
from lockstep.threads.random_streams import stream

Nest = tuple[Any, Any]
"""Outputs and targets."""

ADVICE = (
    "return (total, count), the sum over the items that count (not padding) and their number; or "
    "divide by counts= of the whole batch, where the loss has several means; or "
    'loss_over="batch" for a loss that compares samples; or use single (or mp) without accumulate'
)

_FIRST = 16
"""The first updates, in each of which the loss is checked."""

_INTERVAL = 32
"""The longest interval between later checks."""

_LARGEST_SHARE = 0.05
"""The part of the time of a training for checks between these updates."""

_LEAST = 1e-5
"""The size of a smaller total, which may be rounding: that of a divergence of equal outputs."""

_DOUBLE = 1e-8
"""How far sums may be off in float64, relative to what is added."""

_SINGLE = 1e-4
"""The same in float32."""


class LossCheck:
    """Checks one loss, in every update while the checks take at most 5 % of the time; otherwise in
    updates 1 to 16 and in each 32nd, or each ``every``-th.

    On an accelerator, too, it is checked in these updates only: the host waits for the results of a
    check. Ranks and threads need not check in the same updates: the check of a loss that
    communicates ends in the first update.

    Args:
        loss: gives total and count.
        cuts: whether batches are cut; otherwise nothing is checked.
        accepts: whether a difference is logged instead of refused.
        every: the interval between later checks, if it is below 32 and not 0.

    Attributes:
        is_used: whether the loss is checked in some updates.
        notes: what is to be logged.
    """

    def __init__(
        self,
        loss: Totalled,
        *,
        cuts: bool,
        accepts: bool = False,
        every: int | None = None,
    ) -> None:
        self._loss = loss
        self.is_used = cuts and not loss.is_known
        self._accepts = accepts
        self._every = min(every or _INTERVAL, _INTERVAL)
        self._began = 0.0
        self._spent = 0.0
        self.notes: list[str] = []

    def wants(self, update: int) -> bool:
        """Return whether the loss is to be checked in this update, counted from 1."""
        if not self.is_used:
            return False
        now = time.perf_counter()
        self._began = self._began or now
        is_due = update <= _FIRST or update % self._every == 0
        return is_due or self._spent <= _LARGEST_SHARE * (now - self._began)

    def __call__(
        self,
        outputs: Any,
        targets: Any,
        whole: Loss,
        samples: int,
        *,
        step: int,
    ) -> None:
        """Check the loss of one local batch. Random numbers go on as if nothing had happened.

        A loss that can't be called on parts, communicates, or is another one when it is called
        again, is left to the sum check from now on.

        Args:
            outputs: of the model.
            targets: what the loss takes beside them.
            whole: what the loss made of both.
            samples: how many there are.
            step: the update, for the message; 0 outside of a training.

        Raises:
            LossError: the loss isn't additive.
        """
        began = time.perf_counter()
        if samples < 2 or holds_packed((outputs, targets)):
            return
        nest: Nest = each(_detached, outputs), targets
        if _may_be_of_samples_or_batches(nest, samples):
            return
        if not _can_be_cut(nest, samples):
            # A batch of as many samples as a tensor has rows would be cut by chance.
            self.is_used = False
            return
        with torch.no_grad(), _drawing_apart(nest):
            parts = self._wrong_parts(nest, whole, samples)
        self._spent += time.perf_counter() - began
        if place_of(nest).type != "cpu":
            self._spent = math.inf
        if not parts:
            return
        error = not_additive(self._loss, whole, parts, samples, step)
        if not self._accepts:
            raise error
        self.is_used = False
        self.notes.append(f"{error}; this difference is accepted")

    def _wrong_parts(self, nest: Nest, whole: Loss, samples: int) -> list[Loss]:
        """Compute two parts; return them if the loss of the whole is not their sum, also in
        float64.
        """
        sizes = coprime_sizes(samples)
        tolerance = _tolerance(nest, whole.total)
        parts = self._of_parts(nest, samples, *sizes)
        if parts and _add_up([whole, *parts], tolerance):
            return []
        if not parts or not _add_up([whole, *self._of_parts(nest, samples, samples)], tolerance):
            self.is_used = False
            return []
        wide: Nest = doubled(nest)
        with torch.autocast(place_of(nest).type, enabled=False):
            again = self._of_parts(wide, samples, samples)
            again += self._of_parts(wide, samples, *sizes)
        is_rounding = len(again) == 3 and _add_up(again, _DOUBLE)
        return [] if is_rounding else parts

    def _of_parts(self, nest: Nest, samples: int, *sizes: int) -> list[Loss]:
        """Compute the loss of parts of these sizes; none where it can't be computed."""
        loss = self._loss
        found = []
        start = 0
        noted = NotedCommunication()  # type: ignore[no-untyped-call]
        try:
            with loss.one_at_a_time, kept(loss.loss), noted:
                for size in sizes:
                    outputs, targets = copied_nest(cut(nest, start, size, samples))
                    found.append(loss(outputs, targets, size))
                    start += size
        except Exception as error:
            if is_out_of_memory(error):
                raise
            return []
        return [] if noted.found else found


def _detached(tensor: Tensor) -> Tensor:
    """Give a tensor without its graph; a parameter, which has no rows of samples, stays one."""
    return tensor if isinstance(tensor, nn.Parameter) else tensor.detach()


def _may_be_of_samples_or_batches(nest: Any, samples: int) -> bool:
    """Return whether there is a list of as many tensors as samples, each with as many rows.

    It may be the two boxes of each of two images, or what each of two layers gives of both.
    """
    if isinstance(nest, list) and len(nest) == samples and are_batches(nest, samples):
        return True
    return any(_may_be_of_samples_or_batches(one, samples) for one in parts_of(nest) or ())


def _can_be_cut(nest: Nest, samples: int) -> bool:
    """Return whether each tensor has a row for each sample.

    A number may be one of the whole batch, as of items that collate has counted.
    """
    whole = list(tensors(nest))
    of_first = list(tensors(cut(nest, 0, 1, samples)))
    if not whole or _holds_numbers(nest):
        return False
    if len(whole) != len(of_first):
        return True  # lists with a tensor for each sample
    return all(t.shape != one.shape for t, one in zip(whole, of_first, strict=True))


def _holds_numbers(nest: Any) -> bool:
    inside = parts_of(nest)
    if inside is None:
        return isinstance(nest, int | float)
    return any(map(_holds_numbers, inside))


@contextlib.contextmanager
def _drawing_apart(nest: Nest) -> Iterator[None]:
    """Let random numbers go on afterwards as if none had been drawn."""
    with contextlib.ExitStack() as stack:
        for place in {tensor.device for tensor in tensors(nest)}:
            if place.type not in ("cpu", "meta"):
                stack.enter_context(kept_state_on(place))
        stack.enter_context(stream(torch.Generator))
        yield


def _numbers(losses: Iterable[Loss]) -> Iterator[tuple[float, ...]]:
    """Give the totals of losses, and then the counts."""
    return zip(*[(float(loss.total.detach()), float(loss.count)) for loss in losses], strict=True)


def _tolerance(nest: Nest, total: Any) -> float:
    """Tell how far sums may be off, by the formats that they may have been computed in."""
    if not isinstance(total, Tensor):
        return 1e-4
    if torch.is_autocast_enabled(total.device.type):
        return 2e-2
    if any(tensor.dtype in HALF for tensor in (total, *tensors(nest[0]))):
        return 2e-2
    return _DOUBLE if total.dtype == torch.float64 else _SINGLE


def _add_up(losses: Iterable[Loss], tolerance: float) -> bool:
    """Return whether total and count of the first, the whole, are those of the others, its parts,
    together.
    """
    for value, *of_parts in _numbers(losses):
        # A part that isn't finite, of a whole that is, is wrong too: the variance of one sample.
        size = abs(value) + sum(map(abs, of_parts)) + _LEAST
        if math.isfinite(value) and not abs(sum(of_parts) - value) <= tolerance * size:
            return False
    return True


def not_additive(
    loss: Totalled,
    whole: Loss,
    parts: list[Loss],
    samples: int,
    step: int,
) -> LossError:
    """Give the error of a loss that isn't additive, with the numbers that don't add up.

    Args:
        loss: the loss.
        whole: what it made of a batch.
        parts: what it made of the two parts of the batch.
        samples: of the batch.
        step: the update; 0 or 1 isn't named.
    """
    when = f" in step {step}" if step > 1 else ""
    totals, counts = _numbers([whole, *parts])
    numbers = totals
    fix = ADVICE
    if loss.counts is not None:
        what = ": shares of the loss don't add up"
        numbers = tuple(total / loss.counts.samples for total in totals)
        fix = (
            "with counts=, divide sums over the items at hand by counts of the whole batch, "
            "and take no mean of these items"
        )
    elif loss.gives_pairs:
        what = ": the total is not a sum over samples"
        if abs(sum(totals[1:]) - totals[0]) <= _SINGLE * abs(totals[0]):
            what = ": the count is not a sum over samples"
            numbers = counts
    else:
        what = " is not a mean over samples"
        sizes = (samples, *coprime_sizes(samples))
        numbers = tuple(total / size for total, size in zip(totals, sizes, strict=True))
        of_whole, first, second = numbers
        if first and second and abs(first + second - of_whole) <= _SINGLE * abs(of_whole):
            what = " is not a mean over samples but a sum, its value depends on the batch size"
            fix = "use reduction='mean', or return (total, count)"
    of_whole, first, second = numbers
    return LossError(
        f"{loss.name}{what}{when} "
        f"(whole {of_whole:.6g}, its two parts {first:.6g} and {second:.6g})",
        fix=fix,
    )
