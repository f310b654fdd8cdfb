"""When batches are held to the sum check, on which samples, and what is done with what it finds."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from lockstep.data import Batch, Part
from lockstep.data.shares import over_ranks
from lockstep.errors import StrategyError
from lockstep.launch.memory import is_out_of_memory
from lockstep.model.losses.loss import Totalled
from lockstep.model.modes import draws_dropout, normalizes_by_batch
from lockstep.recipe import Recipe
from lockstep.run.events import Caveat
from lockstep.strategies.sums.sum_check import SumCheck, Verdict
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

    def __init__(self, step: Step, job: Recipe) -> None:
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
        step = self._step
        return self._every != 0 and step.together

    def check(self, batch: Batch, summed: Summed | None = None) -> None:
        """Compare a batch of an update with two parts of it; every rank calls this.

        Raises:
            StrategyError: the loss, or its gradients, are no sums over samples, and differences
                aren't accepted.
            LossError: likewise, and the loss is no sum for the outputs of the whole either.
        """
        step = self._step
        if summed is None:
            summed = SummedLoss(step.model, step.loss)
        is_first = not self._has_checked
        verdict = self._verdict(
            batch,
            summed,
            f"in update {step.world.step}",
            is_first=is_first,
        )
        self._is_owed = verdict is None and self._has_checked
        if verdict is None:
            return
        self._has_checked = True
        self.draws |= verdict.draws
        if verdict.communicates:
            self._every = 0
        if step.world.is_first:
            self.notes = list(self._notes(verdict, in_turn=self._is_in_turn(batch)))
            if not step.is_checked:
                step.log_once(self.notes)

    def check_evaluation(self, batch: Batch, metrics: Metrics, holds: Sequence[Any]) -> None:
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
        summed = SummedLoss(step.model, loss, metrics=metrics, trains=False)
        summed.holds = [*summed.holds, *holds]
        verdict = self._verdict(
            batch,
            summed,
            f"in batch {number} of an evaluation",
            is_first=number == 1,
        )
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
        check = SumCheck(
            summed,
            in_turn=self._is_in_turn(batch),
            watches=self.draws or (is_first and step.world.size > 1),
            accelerators=step.draws.accelerators,
        )
        available = self._available(batch)
        if available < 2:
            return None
        first, second = self._sizes(batch, available, is_first=is_first)
        with step.layout.read():
            pieces = self._pieces(batch, first, second)
            try:
                verdict = check(*pieces)
            except Exception as error:
                if not is_out_of_memory(error):
                    raise
                return Verdict(unchecked="out of memory")
        self._refuse_written(verdict)
        if verdict.difference:
            self._refuse(verdict, pieces, when)
        return verdict

    def _is_in_turn(self, batch: Batch) -> bool:
        """Return whether one model computes parts of the batch one after the other."""
        return self._step.replicas == 1 or len(batch.parts) > 1

    # ---- which samples ---------------------------------------------------------------------------

    def _samples_of_a_part(self, batch: Batch) -> int:
        """Return how many samples are computed at once in the largest local batch, or micro-batch."""
        largest = max(part.of for part in batch.parts)
        return max(self._step.world.layout.sizes(largest))

    def _available(self, batch: Batch) -> int:
        """Return how many samples there are to check. Nobody can collate the batches of an own
        loop, which are cut.
        """
        if batch.collate is not None:
            return 0 if batch.samples is None else batch.size
        samples = self.largest_part(batch).size
        (fewest,) = min(over_ranks(self._step.world, samples))
        return samples if fewest >= 2 else 0

    def _sizes(self, batch: Batch, available: int, *, is_first: bool) -> tuple[int, int]:
        """Return the samples of two parts to check, without a common divisor.

        A model may keep something for as many samples (the hidden state of each), which is right
        where replicas keep their own, and wrong where micro-batches use what the last one left. So
        replicas are checked with other numbers of samples than those of a local batch, and later
        with whole micro-batches, if these are small.
        """
        each = self._samples_of_a_part(batch)
        wanted = max(each, _FIRST) if is_first else _LATER
        wanted = min(available, wanted)
        if self._step.replicas == 1:
            if not is_first and 2 * each <= min(available, _FIRST):
                return each, each
            return coprime_sizes(wanted)

        more = range(wanted, available + 1)
        fewer = range(wanted, 2, -1)
        for samples in [*more, *fewer]:
            sizes = coprime_sizes(samples)
            is_even = 3 * min(sizes) >= max(sizes)
            if is_even and each not in (samples, *sizes):
                return sizes
        return coprime_sizes(wanted)

    def _pieces(self, batch: Batch, first: int, second: int) -> list[Piece]:
        """Return the whole, and two parts of these sizes, each collated by itself, or cut."""
        samples = first + second
        spans = [(0, samples), (0, first), (first, second)]
        if batch.collate is not None and batch.samples is not None:
            indices = batch.samples[:samples].tolist()
            of_spans = []
            for start, size in spans:
                of_spans.append(indices[start : start + size])
            pairs = batch.collate(of_spans)
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
        given = batch.parts
        if batch.shares is not None:
            given = []
            for share in batch.shares:
                given += share
        return max(given, key=lambda part: part.size)

    # ---- what is done with what is found ---------------------------------------------------------

    def _refuse(self, verdict: Verdict, pieces: list[Piece], when: str) -> None:
        """Raise the error of a difference, or log it where differences are accepted.

        Args:
            verdict: has a difference.
            pieces: the whole, and its parts.
            when: begins the message.
        """
        step = self._step
        whole, first, second = pieces
        keeps = "whole batches keep"
        if step.replicas > 1:
            keeps = "single or mp keep"
        error = verdict.error or StrategyError(
            f"results depend on where a batch is cut: {when}, of {whole.size} samples as a whole "
            f"and in parts of {first.size} and {second.size}, {verdict.difference}; "
            f"{verdict.where}",
            kind="mixing",
            fix=f"{keeps} the results; accept_differences=True trains with this difference",
        )
        if not self._accepts:
            raise error
        if step.world.is_first and not self._is_logged:
            step.log_once([Caveat("mixing", f"{error} (accept_differences)")])
        self._is_logged = True

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

    def _notes_of_evaluation(self, verdict: Verdict) -> Iterator[Caveat]:
        draws = verdict.draws
        has_batch_norm = False
        for module in self._step.model.modules():
            draws |= module.training and draws_dropout(module)
            has_batch_norm |= normalizes_by_batch(module)
        if has_batch_norm:
            yield Caveat("batchnorm", "BatchNorm normalizes over the local batch in evaluation")
        if draws:
            yield _drawing("in evaluation", "those of one device")

    def _notes(self, verdict: Verdict, *, in_turn: bool) -> Iterator[Caveat]:
        of_replicas = self._step.replicas > 1
        if verdict.communicates:
            yield Caveat(
                "uncopied",
                "the model, or its loss, communicates with other ranks: the sum check is left out",
            )
            return
        if verdict.unchecked:
            yield Caveat(
                "uncopied",
                f"the sum check of an update was not possible ({verdict.unchecked})",
                "lockstep verify shows whether results are those of single-device training",
            )

        how = "from the local batch: each replica has its own, or follows the first"
        if in_turn:
            how = "once per micro-batch, not once per batch"
        names = verdict.kept
        if not of_replicas:
            names = [*verdict.written, *names]
        for name in names:
            yield Caveat("buffer", f'"{name}" is written {how}', "single keeps the results")

        if not verdict.draws:
            return
        has_dropout = any(map(draws_dropout, self._step.model.modules()))
        if not has_dropout:
            others = "those of whole batches"
            if of_replicas:
                others = "single-device training"
            yield _drawing("in forward", others)


def _drawing(where: str, others: str) -> Caveat:
    return Caveat(
        "drawing",
        f"the model draws random numbers {where}, which differ from {others}; they are "
        "reproducible",
    )
