"""The loss check: whether a person's loss function is a sum over samples, in each update.

::

    total(batch)  =  total(samples 0..k) + total(samples k..n)        and counts likewise

Both parts are of outputs that forward has computed, so the check is cheap. A mask that comes late
is found in the update in which it comes. Whether the *model* lets samples act on one another, the
sum check finds (``lockstep.strategies.sums.sum_check``). The sizes of the two parts have no common
divisor: a mask over samples leaves the same fraction of both only if all or none are masked.

The totals and counts of a loss that returns ``(total, count)`` are checked. The total of a loss
that returns a scalar, a mean over samples, is that scalar times the number of samples. PyTorch's
own losses (``lockstep.model.losses.torch_losses``) need no check.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from lockstep.errors import LossError
from lockstep.launch.memory import is_out_of_memory
from lockstep.model.communication import NotedCommunication
from lockstep.model.losses.check_interval import CheckInterval
from lockstep.model.losses.loss import Loss, Totalled
from lockstep.model.losses.torch_losses import HALF
from lockstep.tensors.placing import place_of
from lockstep.tensors.pytree import copied_nest, doubled, each, holds_packed, tensors
from lockstep.tensors.pytree import parts as parts_of
from lockstep.tensors.rows import are_batches, coprime_sizes, part_of
from lockstep.tensors.seeding import kept_state_on
from lockstep.threads.random_streams import stream

Nest = tuple[Any, Any]
"""Outputs and targets."""

ADVICE = (
    "return (total, count), the sum over the items that count (not padding) and their number; or "
    "divide by counts= of the whole batch, where the loss has several means; or "
    'loss_over="batch" for a loss that compares samples; or use single (or mp) without accumulate'
)

_LEAST = 1e-5
"""The size of a smaller total, which may be rounding: that of a divergence of equal outputs."""

_DOUBLE = 1e-8
"""How far sums may be off in float64, relative to what is added."""


class LossCheck:
    """Checks one loss.

    Args:
        loss: gives total and count.
        cuts: whether batches are cut; otherwise nothing is checked.
        accepts: whether a difference is logged instead of refused.
        accelerators: the devices that a check is waited for on, where it is timed.

    Attributes:
        is_used: whether the loss is checked in trainings; the same on every rank.
        interval: how often the loss is checked.
        notes: what is to be logged.
    """

    def __init__(
        self,
        loss: Totalled,
        *,
        cuts: bool,
        accepts: bool = False,
        accelerators: Sequence[torch.device] = (),
    ) -> None:
        self._loss = loss
        self.is_used = cuts and not loss.is_known
        self._checks = self.is_used
        self._accepts = accepts
        self._has_passed = False
        self._is_first = True
        self.interval = CheckInterval(accelerators)
        self.notes: list[str] = []

    def wants(self, update: int) -> bool:
        """Return whether the loss is to be checked in this update, counted from 1."""
        return self._checks and self.interval.is_due(update)

    def begin_update(self, update: int) -> None:
        """Begin an update, which is timed where the time decides how often to check."""
        if self._checks:
            self.interval.begin_update(update)

    def end_update(self, update: int, replicas: int, *, logs: bool) -> None:
        """End an update, and choose how often to check.

        Args:
            update: the number of the update.
            replicas: how many of this process checked at the same time.
            logs: whether this rank notes that not every update is checked.
        """
        note = self.interval.end_update(update, replicas)
        if note and logs:
            self.notes.append(note)

    def __call__(
        self,
        outputs: Any,
        targets: Any,
        whole: Loss,
        samples: int,
        *,
        step: int,
        waits: bool,
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
            Where the host may not wait, whether the loss is wrong: a boolean scalar on the
            accelerator.

        Raises:
            LossError: the loss isn't additive.
        """
        if not self.interval.is_timing:
            return self._compared(outputs, targets, whole, samples, step, waits=waits)
        began = self.interval.clock()
        wrong = self._compared(outputs, targets, whole, samples, step, waits=waits)
        self.interval.spent(self.interval.clock() - began)
        return wrong

    def _compared(
        self,
        outputs: Any,
        targets: Any,
        whole: Loss,
        samples: int,
        step: int,
        *,
        waits: bool,
    ) -> Tensor | None:
        """Compare the loss of one local batch with those of two parts of it; see ``__call__``."""
        nest = self._nest_to_cut(outputs, targets, samples)
        if nest is None or (self._accepts and not waits):
            return None
        tolerance = _tolerance(nest, whole.total)
        with torch.no_grad(), _drawing_apart(nest) as drawn:
            if self._is_first:
                self._is_first = False
                self._checks = self._may_be_called(nest, samples)
            parts = self._parts(nest, samples) if self._checks else None
            if parts is None:
                self._checks = False
                return None
            if not waits:
                wrong: Tensor = ~_add_up(map(_on_one_device, (whole, *parts)), tolerance)
                return wrong
            if _add_up(_numbers(whole, *parts), tolerance):
                self._has_passed = True
                return None
            found = None
            if not drawn and not self._may_count_all(nest, samples):
                found = self._repeated(nest, whole, parts, samples)
            if found is None:
                # The sum check decides: its parts are collated, and draw what the whole does.
                self._checks = False
                return None
            whole, parts = found
            if _add_up(_numbers(whole, *parts), tolerance) or self._is_rounding(nest, samples):
                return None
        error = not_additive(self._loss, whole, parts, samples, step)
        if not self._accepts:
            raise error
        self._checks = False
        self.notes.append(f"{error}; this difference is accepted")
        return None

    def _nest_to_cut(self, outputs: Any, targets: Any, samples: int) -> Nest | None:
        """Give outputs, without graph, and targets; None where they can't be cut by samples."""
        if samples < 2 or holds_packed((outputs, targets)):
            return None
        nest = each(_detached, outputs), targets
        if _may_be_of_samples_or_batches(nest, samples):
            return None
        if not _can_be_cut(nest, samples):
            # A batch of as many samples as a tensor has rows would be cut by chance.
            self._checks = False
            return None
        return nest

    def _may_be_called(self, nest: Nest, samples: int) -> bool:
        """Return whether the loss may be called once more: other ranks, with which it communicates,
        may not be checking; and where it has state, a copy of it is called.
        """
        loss = self._loss.copied()
        if loss is self._loss and loss.may_have_state:
            return False
        noted = NotedCommunication()  # type: ignore[no-untyped-call]
        with noted, contextlib.suppress(LossError):
            loss(*copied_nest(nest), samples)
        return not noted.found

    def _parts(self, nest: Nest, samples: int, *, double: bool = False) -> list[Loss] | None:
        """Compute both parts; None where the loss can't take them."""
        loss = self._loss.copied(double=double)
        first, second = coprime_sizes(samples)
        try:
            return [
                loss(*copied_nest(part_of(nest, 0, first, samples)), first),
                loss(*copied_nest(part_of(nest, first, second, samples)), second),
            ]
        except Exception as error:
            if is_out_of_memory(error):
                raise
            return None

    def _may_count_all(self, nest: Nest, samples: int) -> bool:
        """Return whether the loss may read a number of the whole batch, which its parts have too."""
        return not self._has_passed and _holds_numbers_of_all(nest, samples)

    def _repeated(
        self,
        nest: Nest,
        whole: Loss,
        parts: list[Loss] | None,
        samples: int,
    ) -> tuple[Loss, list[Loss]] | None:
        """Give whole and parts of a loss that is the same again.

        A loss without state is tried twice: another thread may meanwhile change a global that it
        reads.

        Returns:
            None for a loss that draws or remembers something.
        """
        tolerance = _tolerance(nest, whole.total)
        has_state = self._loss.copied() is not self._loss
        for _ in range(1 if has_state else 2):
            again = self._loss.copied()(*copied_nest(nest), samples)
            if parts is None:
                return None
            if _add_up(_numbers(whole, again), tolerance):
                return whole, parts
            whole = again
            parts = self._parts(nest, samples)
        return None

    def _is_rounding(self, nest: Nest, samples: int) -> bool:
        """Return whether the parts add up in float64."""
        wide: Nest = doubled(nest)
        loss = self._loss.copied(double=True)
        try:
            with torch.autocast(place_of(nest).type, enabled=False):
                whole = loss(*copied_nest(wide), samples)
                parts = self._parts(wide, samples, double=True)
        except (LossError, TypeError, RuntimeError) as error:
            if is_out_of_memory(error):
                raise
            return False
        return parts is not None and bool(_add_up(_numbers(whole, *parts), _DOUBLE))

    def found_later(self, step: int) -> LossError:
        """Give the error of an update that an accelerator has found wrong."""
        kind = "sum" if self._loss.gives_pairs else "mean"
        return LossError(
            f"{self._loss.name} is not a {kind} over samples in step {step}", fix=ADVICE
        )


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
    """Return whether each floating tensor has a row for each sample, or several."""
    whole = list(tensors(nest))
    of_first = list(tensors(part_of(nest, 0, 1, samples)))
    if len(whole) != len(of_first):
        return bool(whole)  # lists with a tensor for each sample
    for tensor, cut in zip(whole, of_first, strict=True):
        if tensor.is_floating_point() and tensor.shape == cut.shape:
            return False
    return bool(whole)


def _holds_numbers_of_all(nest: Any, samples: int) -> bool:
    """Return whether there is a number of the whole batch, as of items that collate has counted."""
    if isinstance(nest, Tensor):
        return not nest.is_floating_point() and nest.shape[:1] != (samples,)
    inside = parts_of(nest)
    if inside is None:
        return isinstance(nest, int | float)
    return any(_holds_numbers_of_all(one, samples) for one in inside)


@contextlib.contextmanager
def _drawing_apart(nest: Nest) -> Iterator[list[bool]]:
    """Let random numbers go on afterwards as if none had been drawn.

    Yields:
        A list that has an item for each number generator that was asked for on the CPU.
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


def _on_one_device(loss: Loss) -> tuple[Tensor, Any]:
    """Give total and count, which may come of targets on another device, where the total is."""
    count = loss.count
    if isinstance(count, Tensor):
        count = count.to(loss.total.device, non_blocking=True)
    return loss.total, count


def _numbers(*losses: Loss) -> list[tuple[float, float]]:
    """Read total and count of each loss."""
    return [(float(loss.total.detach()), float(loss.count)) for loss in losses]


def _tolerance(nest: Nest, total: Any) -> float:
    """Tell how far sums may be off, by the formats that they may have been computed in."""
    if not isinstance(total, Tensor):
        return 1e-4
    if torch.is_autocast_enabled(total.device.type):
        return 2e-2
    if any(tensor.dtype in HALF for tensor in (total, *tensors(nest[0]))):
        return 2e-2
    return _DOUBLE if total.dtype == torch.float64 else 1e-4


def _add_up(sums: Iterable[tuple[Any, ...]], tolerance: float) -> Any:
    """Return whether total and count of the first, the whole, are those of the others, its parts,
    together.

    They are numbers, or tensors on an accelerator.
    """
    fine: Any = True
    for value, *of_parts in zip(*sums, strict=True):
        size = abs(value) + sum(map(abs, of_parts)) + _LEAST
        # A part that isn't finite, of a whole that is, is wrong too: the variance of one sample.
        is_not_finite = value - value != 0
        fine = fine & (is_not_finite | (abs(sum(of_parts) - value) <= tolerance * size))
    return fine


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
    totals, counts = zip(*_numbers(whole, *parts), strict=True)
    if loss.counts is not None:
        of_whole, first, second = (total / loss.counts.samples for total in totals)
        return LossError(
            f"{loss.name}: shares of the loss don't add up{when} "
            f"(whole {of_whole:.6g}, its two parts {first:.6g} and {second:.6g})",
            fix="with counts=, divide sums over the items at hand by counts of the whole batch, "
            "and take no mean of these items",
        )
    if loss.gives_pairs:
        what = "total"
        numbers = totals
        if _add_up([(total,) for total in totals], _DOUBLE):
            what = "count"
            numbers = counts
        of_whole, first, second = numbers
        return LossError(
            f"{loss.name}: the {what} is not a sum over samples{when} "
            f"(whole {of_whole:.6g}, its two parts {first:.6g} and {second:.6g})",
            fix="return the sum over the items of the batch, and their number; or a share, by "
            'counts=, of a loss of several means; or loss_over="batch" for a loss that compares '
            "samples; or use single (or mp) without accumulate",
        )
    sizes = (samples, *coprime_sizes(samples))
    mean, first, second = (total / size for total, size in zip(totals, sizes, strict=True))
    if first and second and abs(first + second - mean) <= 1e-4 * abs(mean):
        return LossError(
            f"{loss.name} is not a mean over samples but a sum, its value depends on the batch "
            f"size (whole {mean:.6g}, its parts add up to it)",
            fix="use reduction='mean', or return (total, count)",
        )
    together = sum(totals[1:]) / samples
    return LossError(
        f"{loss.name} is not a mean over samples{when} "
        f"(whole {mean:.6g}, from two parts {together:.6g})",
        fix=ADVICE,
    )
