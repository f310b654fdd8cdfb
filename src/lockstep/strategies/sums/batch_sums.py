"""When batches are held to the sum check, on which samples, and what is done with what it finds."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from lockstep.data import Batch, Part
from lockstep.data.shares import over_ranks
from lockstep.errors import LossError, StrategyError
from lockstep.launch.memory import is_out_of_memory
from lockstep.model.losses.loss import Totalled
from lockstep.model.losses.loss_check import ADVICE
from lockstep.model.losses.model_loss import mean_of
from lockstep.model.modes import draws_dropout, normalizes_by_batch
from lockstep.recipe import Recipe
from lockstep.run.events import Caveat
from lockstep.strategies.sums.sum_check import Verdict, sum_check
from lockstep.strategies.sums.sums_of_pieces import Metrics, Piece, Summed, SummedLoss
from lockstep.tensors.rows import coprime_sizes, cut

if TYPE_CHECKING:
    from lockstep.strategies.steps.step import Step

_FIRST = 16
"""Samples of the first check, where local batches are smaller."""

_LATER = 8
"""Samples of later checks: what cuts a batch wrongly nearly always shows in a few samples."""


def is_power_of_two(number: int) -> bool:
    """Return whether a number is 1, 2, 4, 8, ...; what may change is checked in these updates."""
    return number & (number - 1) == 0


def _zero(outputs: Any, targets: Any) -> Tensor:
    """Stands for a loss over the whole batch, which is no sum."""
    return torch.zeros(())


class BatchSums:
    """Checks the batches of one step.

    Args:
        step: the step.
        job: its settings decide how often to check, and whether differences are accepted.

    Attributes:
        last: the last update that is checked.
        draws: whether the model, or the loss, was found to draw random numbers.
        notes: of the last check, which the end of the update logs: if the update raises, its error
            is all that is logged.
    """

    def __init__(
        self,
        step: Step,
        job: Recipe,
    ) -> None:
        self._step = step
        self._every = job.check_every
        self._accepts = job.accept_differences
        self._is_logged = False  # of a difference that is accepted
        self._has_checked = False
        self._is_owed = False  # a check, since a batch had too few samples
        self.last: float = math.inf
        self.draws = False
        self.notes: list[Caveat] = []

    def is_due(self, update: int) -> bool:
        """Return whether an update, from 1, is to be checked: 1, 2, 4, 8, ..., and every
        ``check_every``-th; the next one where a batch has too few samples.
        """
        step = self._step
        has_parts = step.cuts_batch and step.whole_batch is None
        if not self._is_possible() or not has_parts or update > self.last:
            return False
        if is_power_of_two(update) or self._is_owed:
            return True
        return self._every is not None and update % self._every == 0

    def _is_possible(self) -> bool:
        """Return whether batches may be checked: where ranks don't meet in updates, others write
        the weights that a check would put back.
        """
        return self._every != 0 and self._step.together

    def check(
        self,
        batch: Batch,
        summed: Summed | None = None,
    ) -> None:
        """Compare a batch of an update with two parts of it; every rank calls this.

        Raises:
            StrategyError: the loss, or its gradients, are no sums over samples, and differences
                aren't accepted.
            LossError: likewise, and the loss is no sum for the outputs of the whole either.
        """
        step = self._step
        summed = summed or SummedLoss(step.model, step.loss)
        is_first = not self._has_checked
        verdict = self._verdict(batch, summed, f"in update {step.world.step}", is_first=is_first)
        self._is_owed = verdict is None and self._has_checked
        if verdict is None:
            return
        self._has_checked = True
        self.draws |= verdict.draws
        if verdict.communicates:
            self._every = 0
        if step.world.is_first:
            self.notes = self._notes(verdict, in_turn=self._is_in_turn(batch))
            if not step.is_checked:
                step.log_once(self.notes)

    def check_evaluation(
        self,
        batch: Batch,
        metrics: Metrics,
        holds: Sequence[Any],
    ) -> None:
        """Compare loss and metrics of an evaluation batch with two parts of it, likewise.

        It is checked in evaluation mode; every rank calls this. What metrics hold (``holds``) is put
        back.
        """
        step = self._step
        number = batch.index + 1
        if not self._is_possible() or step.replicas == 1 or not is_power_of_two(number):
            return
        loss = step.loss
        if step.whole_batch is not None:  # only metrics are sums
            if not holds:
                return
            loss = Totalled(_zero)
        summed = SummedLoss(step.model, loss, metrics, holds)
        when = f"in batch {number} of an evaluation"
        verdict = self._verdict(batch, summed, when, is_first=number == 1)
        if verdict is not None and step.world.is_first:
            step.log_once(self._notes_of_evaluation(verdict))

    def _verdict(
        self,
        batch: Batch,
        summed: Summed,
        when: str,
        *,
        is_first: bool,
    ) -> Verdict | None:
        """Compare, and refuse a difference.

        Args:
            batch: some samples of it are compared.
            summed: computes the sums of a piece.
            when: begins the message.
            is_first: whether no batch was checked before.

        Returns:
            None where there are too few samples.
        """
        step = self._step
        available = self._available(batch)
        if available < 2:
            return None
        first, second = self._sizes(batch, available, is_first=is_first)
        with step.layout.read():
            pieces = self._pieces(batch, first, second)
            try:
                verdict = sum_check(
                    summed,
                    pieces,
                    in_turn=self._is_in_turn(batch),
                    watches=self.draws or (is_first and step.world.size > 1),
                    accelerators=step.draws.accelerators,
                )
            except Exception as error:
                if not is_out_of_memory(error):
                    raise
                return Verdict(unchecked="out of memory")
            self._refuse_written(verdict)
            if verdict.difference and not self._accepts and isinstance(summed, SummedLoss):
                self._refuse_loss(pieces[0])
        if verdict.difference:
            parts = f"of {first + second} samples as a whole and in parts of {first} and {second}"
            self._refuse(verdict, f"{when}, {parts}")
        return verdict

    def _is_in_turn(self, batch: Batch) -> bool:
        """Return whether one model computes parts of the batch one after the other."""
        return self._step.replicas == 1 or len(batch.parts) > 1

    # ---- which samples ---------------------------------------------------------------------------

    def _available(self, batch: Batch) -> int:
        """Return how many samples there are to check. Nobody can collate the batches of an own
        loop, which are cut.
        """
        if batch.collate is not None:
            return 0 if batch.samples is None else batch.size
        samples = self.largest_part(batch).size
        (fewest,) = min(over_ranks(self._step.world, samples))
        return samples if fewest >= 2 else 0

    def _sizes(
        self,
        batch: Batch,
        available: int,
        *,
        is_first: bool,
    ) -> tuple[int, int]:
        """Return the samples of two parts to check, without a common divisor.

        A model may keep something for as many samples (the hidden state of each), which is right
        where replicas keep their own, and wrong where micro-batches use what the last one left. So
        replicas are checked with other numbers of samples than those of a local batch, and later
        with whole micro-batches, if these are small.
        """
        largest = max(part.of for part in batch.parts)
        each = max(self._step.world.layout.sizes(largest))
        wanted = min(available, max(each, _FIRST) if is_first else _LATER)
        if self._step.replicas == 1:
            if not is_first and 2 * each <= min(available, _FIRST):
                return each, each
            return coprime_sizes(wanted)
        for samples in [*range(wanted, available + 1), *range(wanted, 2, -1)]:
            sizes = coprime_sizes(samples)
            if each not in (samples, *sizes):
                return sizes
        return coprime_sizes(wanted)

    def _pieces(
        self,
        batch: Batch,
        first: int,
        second: int,
    ) -> list[Piece]:
        """Return the whole, and two parts of these sizes, each collated by itself, or cut."""
        samples = first + second
        spans = [(0, samples), (0, first), (first, second)]
        if batch.collate is not None and batch.samples is not None:
            indices = batch.samples[:samples].tolist()
            pairs = batch.collate([indices[start : start + size] for start, size in spans])
        else:
            part = self.largest_part(batch)
            nest = part.inputs, part.targets
            pairs = [cut(nest, start, size, part.size) for start, size in spans]
        if self._step.counts is not None:
            pairs = self._step.counts.of_whole(pairs, samples)
        pieces = []
        for (inputs, targets), (start, size) in zip(pairs, spans, strict=True):
            placed = self._step.placed(Part(inputs, targets, size, size))
            pieces.append(Piece(placed.inputs, placed.targets, size, start))
        return pieces

    def largest_part(self, batch: Batch) -> Part:
        """Return the largest local batch, or micro-batch, that this process has."""
        shares = batch.shares or [batch.parts]
        return max((part for share in shares for part in share), key=lambda part: part.size)

    # ---- what is done with what is found ---------------------------------------------------------

    def _refuse(
        self,
        verdict: Verdict,
        where: str,
    ) -> None:
        """Raise the error of a difference, or log it where differences are accepted.

        Args:
            verdict: has a difference.
            where: begins the message.
        """
        step = self._step
        keeps = "single or mp keep" if step.replicas > 1 else "whole batches keep"
        fix = f"{keeps} the results; accept_differences=True trains with this difference"
        if verdict.where.startswith("no module") and not step.loss.is_known:
            fix += f"; if the loss is the cause, {ADVICE}"
        error = StrategyError(
            f"results depend on where a batch is cut: {where}, {verdict.difference}; "
            f"{verdict.where}",
            kind="mixing",
            fix=fix,
        )
        if not self._accepts:
            raise error
        if step.world.is_first and not self._is_logged:
            step.log_once([Caveat("mixing", f"{error} (accept_differences)")])
        self._is_logged = True

    def _refuse_loss(self, whole: Piece) -> None:
        """Refuse a loss that is no sum over samples of outputs; another one is not the cause."""
        step = self._step
        if not step.loss_check.is_used:
            return
        part = Part(whole.inputs, whole.targets, whole.size, whole.size)
        try:
            with torch.no_grad():
                outputs, loss = step._outputs_and_loss(step.model, part, checks=True)
        except RuntimeError:  # the loss may need gradients
            return
        mean = mean_of(outputs)
        if mean is not None and torch.allclose(loss.total, mean.to(loss.total) * whole.size):
            raise LossError(
                f"{step.loss.name} is outputs.loss, the model's mean over its labels, and parts "
                "of a batch have different numbers of labels",
                fix="take loss=lockstep.model_loss, which weights it by the number of labels",
            )

    def _refuse_written(self, verdict: Verdict) -> None:
        """Refuse a forward that writes parameters, where parts would not write the same."""
        step = self._step
        names = verdict.drifts
        if len(step.world.devices) > 1:  # replicas on threads, or micro-batches, share it
            names = verdict.written
        if names:
            raise StrategyError(
                f'the model writes its parameter "{names[0]}" in forward: each replica or '
                "micro-batch would write it once more, or from its own samples",
                kind="state",
                fix="make it a buffer, write it between updates, or use single",
            )

    def _notes_of_evaluation(self, verdict: Verdict) -> list[Caveat]:
        notes = []
        modules = list(self._step.model.modules())
        if any(map(normalizes_by_batch, modules)):
            text = "BatchNorm normalizes over the local batch in evaluation"
            notes.append(Caveat("batchnorm", text))
        if verdict.draws or any(one.training and draws_dropout(one) for one in modules):
            notes.append(_drawing("in evaluation", "those of one device"))
        return notes

    def _notes(
        self,
        verdict: Verdict,
        *,
        in_turn: bool,
    ) -> list[Caveat]:
        notes = []
        if verdict.unchecked:
            text = f"the sum check of an update is left out: {verdict.unchecked}"
            fix = "lockstep verify shows whether results are those of single-device training"
            notes.append(Caveat("uncopied", text, fix))
        of_replicas = self._step.replicas > 1
        how = "from the local batch: each replica has its own, or follows the first"
        if in_turn:
            how = "once per micro-batch, not once per batch"
        names = verdict.kept if of_replicas else [*verdict.written, *verdict.kept]
        for name in names:
            notes.append(Caveat("buffer", f'"{name}" is written {how}', "single keeps the results"))
        has_dropout = any(map(draws_dropout, self._step.model.modules()))
        if verdict.draws and not has_dropout:
            others = "single-device training" if of_replicas else "those of whole batches"
            notes.append(_drawing("in forward", others))
        return notes


def _drawing(where: str, others: str) -> Caveat:
    return Caveat(
        "drawing",
        f"the model draws random numbers {where}, which differ from {others}; they are "
        "reproducible",
    )
