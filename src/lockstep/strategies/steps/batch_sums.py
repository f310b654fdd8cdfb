"""When a training's batches are held to the sum check, on which samples, and what is done with
what it finds.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from torch import nn

from lockstep.data import Batch, Part
from lockstep.data.shares import over_ranks
from lockstep.errors import StrategyError
from lockstep.job import Job
from lockstep.launch.events import Caveat
from lockstep.model.inspection import drops
from lockstep.model.losses.check_interval import is_power_of_two
from lockstep.strategies.steps.sum_check import Piece, SumCheck, Verdict
from lockstep.tensors.pytree import call
from lockstep.tensors.rows import cut, share_sizes

if TYPE_CHECKING:
    from lockstep.strategies.steps.step import Step

_FEWEST = 16
"""Samples that are checked where local batches are smaller."""


class BatchSums:
    """Checks the batches of one step.

    Args:
        step: whose they are.
        job: says how often, and whether differences are accepted.

    Attributes:
        draws: whether the model, or the loss, was found to draw random numbers.
        draws_elsewhere: whether it draws some from Python's or numpy's generators.
    """

    def __init__(self, step: Step, job: Job) -> None:
        self._step = step
        self._every = 0 if job.step is not None else job.check_every
        self._accepts = job.accept_differences
        self._is_told = False  # of a difference that is accepted
        self.draws = False
        self.draws_elsewhere = False

    def is_due(self, update: int) -> bool:
        """Whether an update, from 1, is to be checked: 1, 2, 4, 8, ..., and every
        ``check_every``-th.
        """
        step = self._step
        if self._every == 0 or not step.cuts_batch:
            return False
        if not step.together:  # other ranks write the weights that a check would put back
            return False
        return is_power_of_two(update) or update % self._every == 0

    def check(self, batch: Batch) -> None:
        """Compare a batch with two parts of it; every rank calls this.

        Raises:
            StrategyError: the loss, or its gradients, are no sums over samples, and differences
                aren't accepted.
        """
        step = self._step
        pieces = self._pieces(batch)
        if pieces is None:
            return
        in_turn = step.replicas == 1
        sums = SumCheck(
            step.model, step.loss, _forward, in_turn=in_turn, accelerators=step.accelerators
        )
        with step.whole_parameters():
            verdict = sums(*pieces)
        self.draws |= verdict.draws
        self.draws_elsewhere |= verdict.draws_elsewhere
        self._refuse_written(verdict)
        if verdict.difference and not verdict.communicates:
            self._refuse(verdict, pieces)
        if step.world.is_first:
            step.tell_once(self._notes(verdict))

    # ---- which samples ---------------------------------------------------------------------------

    def _pieces(self, batch: Batch) -> list[Piece] | None:
        """The whole, and two parts of it without a common divisor; None where there are too few
        samples.
        """
        world = self._step.world
        if batch.collate is None:
            return self._cut_pieces(batch)
        local = -(-max(part.of for part in batch.parts) // world.layout.local_batches)
        samples = min(batch.size, max(local, _FEWEST))
        if samples < 2 or batch.samples is None:
            return None
        first = _first_of_two(samples)
        indices = batch.samples[:samples].tolist()
        pairs, _ = batch.collate([indices, indices[:first], indices[first:]])
        sizes = samples, first, samples - first
        starts = 0, 0, first
        return [
            self._piece(inputs, targets, size, start)
            for (inputs, targets), size, start in zip(pairs, sizes, starts, strict=True)
        ]

    def _cut_pieces(self, batch: Batch) -> list[Piece] | None:
        """The local batch, which nobody can collate anew, and two cuts of it."""
        step = self._step
        given = (
            batch.parts
            if batch.shares is None
            else [part for share in batch.shares for part in share]
        )
        part = max(given, key=lambda part: part.size)
        samples = part.size
        if min(here for (here,) in over_ranks(step.world, samples)) < 2:
            return None
        first = _first_of_two(samples)
        pieces = [self._piece(part.inputs, part.targets, samples, 0)]
        for start, size in ((0, first), (first, samples - first)):
            inputs, targets = cut((part.inputs, part.targets), start, size, samples)
            pieces.append(self._piece(inputs, targets, size, start))
        return pieces

    def _piece(self, inputs: Any, targets: Any, size: int, start: int) -> Piece:
        part = self._step.placed(Part(inputs, targets, size, size))
        return Piece(part.inputs, part.targets, size, start)

    # ---- what is done with what is found ---------------------------------------------------------

    def _refuse(self, verdict: Verdict, pieces: list[Piece]) -> None:
        step = self._step
        whole, *parts = pieces
        cut_in = " and ".join(str(part.size) for part in parts)
        text = (
            f"results depend on where a batch is cut: in update {step.number}, of {whole.size} "
            "samples as one and in "
            f"parts of {cut_in}, {verdict.difference}; {verdict.where}"
        )
        instead = (
            "single or mp keep the results"
            if step.replicas > 1
            else "no micro-batches keep the results"
        )
        if self._accepts:
            if step.world.is_first and not self._is_told:
                step.tell_once([Caveat("mixing", text, instead)])
            self._is_told = True
            return
        raise StrategyError(
            text, kind="mixing", fix=f"{instead}, or accept_differences=True trains with this one"
        )

    def _refuse_written(self, verdict: Verdict) -> None:
        """Refuse a forward that writes parameters, where each replica would write its own."""
        step = self._step
        if step.replicas == 1:
            return
        shares = step.world.size == 1
        names = verdict.written if shares else verdict.drifts
        if names:
            raise StrategyError(
                f'the model writes its parameter "{names[0]}" in forward: each replica would '
                "write it once more, or "
                "from its local batch",
                kind="state",
                fix="make it a buffer, write it between updates, or use single",
            )

    def _notes(self, verdict: Verdict) -> Iterator[Caveat]:
        of_replicas = self._step.replicas > 1
        if verdict.communicates:
            text = "the model, or its loss, communicates with other ranks"
            yield Caveat("uncopied", f"{text}: whether parts of a batch add up is not checked")
            return
        if verdict.unchecked:
            text = f"whether parts of a batch add up to it was not checked ({verdict.unchecked})"
            yield Caveat(
                "uncopied",
                text,
                "lockstep verify shows whether results are those of single-device training",
            )
        for name in verdict.written if not of_replicas else ():
            yield Caveat(
                "state", f'the model writes its parameter "{name}" in forward, once per micro-batch'
            )
        for name in verdict.kept:
            yield _of_kept(name, of_replicas=of_replicas)
        if verdict.draws and of_replicas and not any(map(drops, self._step.model.modules())):
            text = (
                "the model draws random numbers in forward, which differ from single-device "
                "training; they are"
            )
            yield Caveat("drawing", f"{text} reproducible")


def _of_kept(name: str, *, of_replicas: bool) -> Caveat:
    if of_replicas:
        text = (
            f'"{name}" is written from the local batch: each replica has its own, or follows '
            "the first"
        )
    else:
        text = f'"{name}" is written once per micro-batch, not once per batch'
    return Caveat("buffer", text, "single keeps the results")


def _first_of_two(samples: int) -> int:
    """The larger of two sizes that have no common divisor: a mask over samples can't leave as
    much of both.
    """
    half = share_sizes(samples, 2)[0]
    return next(size for size in range(half, 0, -1) if math.gcd(size, samples) == 1)


def _forward(model: nn.Module, inputs: Any) -> Any:
    return call(model, inputs)
