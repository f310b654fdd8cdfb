"""The sum check: whether the loss of a batch and its gradients are the sums of those of its parts.

Whatever cuts a batch (replicas, ranks, micro-batches) adds up what the parts give. So these have to
agree, for a batch and any two parts of it::

    total(batch)     =  total(part 1)     +  total(part 2)
    count(batch)     =  count(part 1)     +  count(part 2)
    gradient(batch)  =  gradient(part 1)  +  gradient(part 2)       of each parameter

``SumCheck`` computes all three by the model itself, and puts back what that changes: weights,
buffers, attributes, gradients and random numbers. A training with checks ends on the same bits as
one without.

Parts draw the numbers that the whole has drawn for their samples. What differs in float32 is
computed again in float64 before anything is refused, since rounding may differ too.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from lockstep.errors import LossError, first_line
from lockstep.launch.memory import is_out_of_memory
from lockstep.model.snapshot import Snapshot, same
from lockstep.strategies.sums.mixing_layer import first_that_mixes
from lockstep.strategies.sums.reference_modes import (
    full_precision,
    in_float64,
    known_in_evaluation_mode,
)
from lockstep.strategies.sums.replayed_draws import ReplayedDraws
from lockstep.strategies.sums.sums_of_pieces import Piece, PieceSums, Summed

TOLERANCE = {torch.float64: 1e-9, torch.float32: 1e-4, torch.float16: 5e-2, torch.bfloat16: 5e-2}
"""How far a sum may be off, relatively, by the coarsest format that something was computed in."""

_UNDECIDED = 1e-2
"""How far a sum may be off in float32 where nothing can be computed in float64."""

_FLOOR = {torch.float64: 1e-5, torch.float32: 1e-2, torch.float16: 1e-1, torch.bfloat16: 1e-1}
"""The part of the largest gradient below which another one is rounding: that of a key's bias is
zero.
"""

_OF_LOSS = 1e-2
"""The part of the loss that the largest gradient is taken for where all are smaller."""


@dataclass
class Verdict:
    """What a check has found.

    Attributes:
        difference: what is no sum, with the numbers; "" where all is one.
        where: the first module whose outputs show it.
        error: an error that says more of the loss.
        unchecked: why nothing is known; "" where something is.
        communicates: whether the model or the loss communicates with other ranks.
        written: parameters that forward writes.
        drifts: those of them that a part of the batch writes otherwise than the whole does.
        kept: buffers and numbers that forward or the loss writes, and that end otherwise where the
            batch is cut.
        draws: whether random numbers are drawn, which are others for each part in a training.
        draws_elsewhere: whether some are Python's or numpy's.
        apart: how far the worst sum is off, relatively.
        precision: the coarsest format that something was computed in.
    """

    difference: str = ""
    where: str = ""
    error: LossError | None = None
    unchecked: str = ""
    communicates: bool = False
    written: list[str] = field(default_factory=list)
    drifts: list[str] = field(default_factory=list)
    kept: list[str] = field(default_factory=list)
    draws: bool = False
    draws_elsewhere: bool = False
    apart: float = 0.0
    precision: torch.dtype = torch.float64


class SumCheck:
    """Compares a batch with two parts of it.

    Args:
        summed: computes the sums of a piece, by a model that is whole.
        in_turn: whether the parts are micro-batches of one model, each of which begins with what
            the one before has left; else they are those of replicas, which begin alike.
        accelerators: whose random numbers are put back, too.
    """

    def __init__(
        self,
        summed: Summed,
        *,
        in_turn: bool,
        accelerators: Sequence[torch.device] = (),
    ) -> None:
        self._summed = summed
        self._model = summed.model
        self._in_turn = in_turn
        self._accelerators = accelerators

    def __call__(self, whole: Piece, *parts: Piece) -> Verdict:
        """Compare a batch with its parts, and leave everything as it was."""
        gradients = {p: p.grad for p in self._model.parameters()}
        pieces = [whole, *parts]
        try:
            verdict = self._judged(pieces, "rows")
            if verdict.difference and verdict.draws:  # perhaps drawn in another order of samples
                for layout in ("views", "one by one"):
                    again = self._judged(pieces, layout)
                    if not again.difference and not again.unchecked:
                        return again
        finally:
            for p, gradient in gradients.items():
                p.grad = gradient
        return verdict

    def _judged(self, pieces: list[Piece], layout: str) -> Verdict:
        """Compare a batch with its parts; float64 decides whether a difference is rounding."""
        verdict = self._compared(pieces, self._summed, layout)
        if not verdict.difference or verdict.precision is torch.float64:
            return verdict
        with in_float64(self._model):
            doubled = [piece.doubled() for piece in pieces]
            again = self._compared(doubled, self._summed.doubled(), layout)
        if not again.unchecked:
            return again
        if verdict.apart <= _UNDECIDED:
            return Verdict(unchecked=f"float64 can't decide ({again.unchecked})")
        return verdict

    def _compared(self, pieces: list[Piece], summed: Summed, layout: str) -> Verdict:
        snapshot = Snapshot(self._model, summed.holds, self._accelerators)
        draws = ReplayedDraws(pieces[0].size, layout)
        comparison = _Comparison(self._model, snapshot, draws, in_turn=self._in_turn)
        compute = _Computing(summed, draws)
        try:
            comparison.run(pieces, compute)
            verdict = comparison.verdict()
            if verdict.kept:
                verdict.kept = comparison.repeatable(verdict.kept, pieces[0], compute)
            if verdict.difference:
                verdict.where = first_that_mixes(self._model, pieces, compute.outputs, snapshot)
            if verdict.difference and not verdict.where:
                snapshot.put_back()
                verdict.error = summed.explained(pieces[0])
                verdict.where = "it comes of the loss, or of backward"
            return verdict
        except Exception as error:  # a part has too few samples for the model, say
            if is_out_of_memory(error):
                raise
            unchecked = (
                f"a part of a batch can't be computed: {type(error).__name__}: {first_line(error)}"
            )
            return Verdict(
                unchecked=unchecked, communicates=draws.communicates, draws=draws.has_drawn
            )
        finally:
            snapshot.put_back()
            for p in self._model.parameters():
                p.grad = None


class _Computing:
    """Computes pieces in full precision, with known layers in evaluation mode."""

    def __init__(self, summed: Summed, draws: ReplayedDraws) -> None:
        self.model = summed.model
        self._summed = summed
        self._draws = draws

    def __call__(self, piece: Piece, *, divisor: float) -> PieceSums:
        """Compute the sums of a piece, and add the gradient of its total / divisor.

        A divisor of 0 is the count, as one device has it.
        """
        with self._computing(piece):
            sums = self._summed(piece)
            by = divisor or float(sums.count)
            total = sums.with_gradient
            if total is not None and by:
                torch.autograd.backward(total / by)
        return sums

    def outputs(self, piece: Piece) -> Any:
        """Call the model alone."""
        with self._computing(piece):
            return self._summed.outputs(piece)

    @contextlib.contextmanager
    def _computing(self, piece: Piece) -> Iterator[None]:
        self._draws.replay(piece.start, piece.start + piece.size)
        grad = torch.set_grad_enabled(self._summed.trains)
        known = known_in_evaluation_mode(self.model)
        with grad, known, self._draws, full_precision(self.model):
            yield


class _Comparison:
    """The whole and its parts, one after the other, and what they came to."""

    def __init__(
        self, model: nn.Module, snapshot: Snapshot, draws: ReplayedDraws, *, in_turn: bool
    ) -> None:
        self._snapshot = snapshot
        self._draws = draws
        self._in_turn = in_turn
        self._trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
        self._sums: list[dict[str, float]] = []  # of the whole, and of each part
        self._counts: list[float] = []
        self._is_finite = True  # the gradient of the whole
        self._ends: list[dict[str, Any]] = []  # what the snapshot's things came to
        self._sizes = dict.fromkeys(self._trained, 0.0)  # norms of gradients
        self._draws_elsewhere = False

    def run(self, pieces: list[Piece], compute: _Computing) -> None:
        """Compute all pieces. Afterwards gradients are those of the parts, less that of the
        whole.
        """
        whole = pieces[0]
        for p in self._trained.values():
            p.grad = None
        for piece in pieces:
            is_whole = piece is whole
            sums = compute(piece, divisor=0.0 if is_whole else whole.size)
            self._sums.append(sums.numbers())
            self._counts.append(float(sums.count))
            self._draws_elsewhere |= self._snapshot.drew_elsewhere()
            if is_whole:
                self._negate(float(sums.count) / whole.size)
                norms = [_norm(p.grad) for p in self._trained.values()]
                self._is_finite = all(map(math.isfinite, norms))
            self._ends.append(self._snapshot.values())
            if piece is pieces[-1]:
                break
            if is_whole or not self._in_turn:
                self._snapshot.put_back()
            self._note_sizes()

    def _negate(self, by: float) -> None:
        """Make gradients of total / count those of -total / samples."""
        for p in self._trained.values():
            p.grad = None if p.grad is None else p.grad * -by

    def _note_sizes(self) -> None:
        for name, p in self._trained.items():
            self._sizes[name] = max(self._sizes[name], _norm(p.grad))

    def verdict(self) -> Verdict:
        """Judge what the pieces came to."""
        verdict = Verdict(precision=self._draws.coarsest, communicates=self._draws.communicates)
        whole, *parts = self._ends
        ends = parts[-1:] if self._in_turn else parts
        verdict.written = self._snapshot.written(whole)
        others: set[str] = set()
        for end in ends:
            others.update(name for name in verdict.written if not same(whole[name], end.get(name)))
            others.update(self._snapshot.ends_otherwise(whole, end))
        verdict.drifts = [name for name in verdict.written if name in others]
        verdict.kept = sorted(others.difference(verdict.written))
        verdict.draws = self._draws.has_drawn or self._draws_elsewhere
        verdict.draws_elsewhere = self._draws_elsewhere
        if not all(map(math.isfinite, self._sums[0].values())):
            verdict.unchecked = "the loss is not finite"
            return verdict
        if not self._is_finite:
            verdict.unchecked = "a gradient is not finite"
            return verdict
        if not any(self._counts):
            return verdict  # an update that counts no item is skipped
        verdict.apart, difference = self._worst()
        if verdict.apart <= TOLERANCE[verdict.precision]:
            return verdict
        if self._draws.is_lost or self._draws_elsewhere:
            verdict.unchecked = "a part of a batch draws other random numbers than the whole"
            return verdict
        verdict.difference = difference
        return verdict

    def repeatable(self, names: list[str], whole: Piece, compute: _Computing) -> list[str]:
        """Leave out values that end otherwise for the same samples, too: a time, say."""
        self._snapshot.put_back()
        compute(whole, divisor=0.0)
        again = self._snapshot.values()
        return [name for name in names if same(self._ends[0].get(name), again.get(name))]

    def _worst(self) -> tuple[float, str]:
        """How far the worst sum is off, and what to say of it: rather of totals than of
        gradients.
        """
        tolerance = TOLERANCE[self._draws.coarsest]
        whole, *parts = self._sums
        worst = 0.0
        text = ""
        for name, value in whole.items():
            # A batch may leave out a part of the loss.
            of_parts = [part.get(name, 0.0) for part in parts]
            far = _apart(value, of_parts)
            if far > max(worst, tolerance):
                added = " + ".join(f"{part:.6g}" for part in of_parts)
                worst = far
                text = f"{name} is {value:.6g} for the whole batch, and {added} for its parts"
        if text:
            return worst, text

        mean = abs(whole.get("the total of the loss", 0.0)) / max(self._counts[0], 1.0)
        # All gradients may be rounding: those of a constant, say.
        largest = max([*self._sizes.values(), _OF_LOSS * mean])
        floor = _FLOOR[self._draws.coarsest] * largest + 1e-300
        for name, p in self._trained.items():
            far = _finite(_norm(p.grad) / (self._sizes[name] + floor))
            if far > worst:
                worst = far
                text = (
                    f'the gradient of "{name}" for the whole batch is not the sum for its parts '
                    f"({far:.1e})"
                )
        return worst, text


def _apart(whole: float, parts: Sequence[float]) -> float:
    """How far parts are off the whole, relatively."""
    largest = max(abs(value) for value in (whole, *parts))
    return _finite(abs(whole - sum(parts)) / max(1e-300, largest))


def _finite(number: float) -> float:
    """The number, or infinity in the place of NaN."""
    return math.inf if math.isnan(number) else number


def _norm(gradient: Tensor | None) -> float:
    """The norm of a gradient, which rounding that flips one of many ReLUs hardly changes."""
    if gradient is None or not gradient.numel():
        return 0.0
    dense = gradient.to_dense() if gradient.is_sparse else gradient
    return float(dense.norm())
