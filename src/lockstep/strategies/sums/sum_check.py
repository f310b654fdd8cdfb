"""The sum check: whether the loss of a batch and its gradients are the sums of those of its parts.

Whatever cuts a batch (replicas, ranks, micro-batches) adds up what the parts give. So these have to
agree, for a batch and any two parts of it::

    total(batch)     =  total(part 1)     +  total(part 2)
    count(batch)     =  count(part 1)     +  count(part 2)
    gradient(batch)  =  gradient(part 1)  +  gradient(part 2)       of each parameter

``SumCheck`` computes all three by the model itself, and puts back what that changes: weights,
buffers, attributes, gradients and random numbers. A training with checks ends on the same bits as
one without. A check is made in this order::

    the whole, then each part     as the model trains, but without autocast
    the same in float64           where they differ: it may be rounding
    layer by layer                where they still differ: which module shows it first

Parts draw the numbers that the whole has drawn for their samples. That takes a dispatch mode, under
which each operator takes several times as long, so models that draw nothing do without.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from lockstep.errors import LossError, first_line
from lockstep.launch.memory import is_out_of_memory
from lockstep.model.snapshot import Snapshot, same
from lockstep.strategies.sums.cross_sample_layer import first_that_mixes
from lockstep.strategies.sums.reference_modes import (
    full_precision,
    in_float64,
    known_in_evaluation_mode,
)
from lockstep.strategies.sums.replayed_draws import ReplayedDraws
from lockstep.strategies.sums.sums_of_pieces import Piece, Summed

TOLERANCE = {
    torch.float64: 1e-9,
    torch.float32: 1e-4,
    torch.float16: 5e-2,
    torch.bfloat16: 5e-2,
}
"""How far a sum may be off, relatively, by the coarsest format that something was computed in."""

_UNDECIDED = 1e-2
"""How far a sum may be off in float32 where nothing can be computed in float64."""

_FLOOR = {
    torch.float64: 1e-5,
    torch.float32: 1e-2,
    torch.float16: 1e-1,
    torch.bfloat16: 1e-1,
}
"""The part of the largest gradient below which another one is rounding: that of a key's bias is
zero.
"""

_LEAST = 1e-5
"""The size of a smaller gradient, and of smaller losses of an item, in float64: they may be
rounding, as a divergence of equal outputs is.
"""

_OF_LOSS = 1e-2
"""The part of the loss that the largest gradient is taken for where all are smaller."""


@dataclass
class Verdict:
    """What a check has found.

    Attributes:
        difference: what is no sum, with the numbers; "" where all is one.
        where: the first module whose outputs show it.
        error: an error that describes the loss more closely.
        unchecked: why nothing is known; "" where something is.
        communicates: whether the model or the loss communicates with other ranks; nothing else is
            known then.
        written: parameters that forward writes.
        drifts: those of them that a part of the batch writes otherwise than the whole does.
        kept: buffers and numbers that forward or the loss writes, and that end otherwise where the
            batch is cut.
        draws: whether random numbers are drawn, which are others for each part in a training.
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
    apart: float = 0.0
    precision: torch.dtype = torch.float64


class SumCheck:
    """Compares a batch with two parts of it.

    Args:
        summed: computes the sums of a piece, by a model that is whole.
        in_turn: whether the parts are micro-batches of one model: each begins with the state that
            the one before has left. Otherwise they are local batches of replicas, which begin with
            the same state.
        watches: whether the model may draw random numbers, or communicate.
        accelerators: whose random numbers are put back, too.
    """

    def __init__(
        self,
        summed: Summed,
        *,
        in_turn: bool,
        watches: bool = False,
        accelerators: Sequence[torch.device] = (),
    ) -> None:
        self._summed = summed
        self._model = summed.model
        self._in_turn = in_turn
        self._watches = watches
        self._accelerators = accelerators

    def __call__(self, *pieces: Piece) -> Verdict:
        """Compare a batch, the first piece, with its parts, and leave everything as it was."""
        gradients = {p: p.grad for p in self._model.parameters()}
        try:
            return self._judged(pieces)
        finally:
            for p, gradient in gradients.items():
                p.grad = gradient

    def _judged(self, pieces: Sequence[Piece]) -> Verdict:
        """Compare as the model trains; float64 decides whether a difference is rounding."""
        verdict = self._compared(pieces, watches=self._watches)
        if not verdict.difference:
            return verdict
        with in_float64(self._model, *self._summed.holds):
            again = self._compared([piece.doubled() for piece in pieces], explains=True)
        if again.communicates or not again.unchecked:
            return again
        undecided = max(_UNDECIDED, TOLERANCE[again.precision])
        if verdict.apart > undecided:
            return self._compared(pieces, explains=True)
        verdict.difference = ""
        verdict.unchecked = f"float64 can't decide ({again.unchecked})"
        return verdict

    def _compared(
        self, pieces: Sequence[Piece], *, watches: bool = True, explains: bool = False
    ) -> Verdict:
        """Compute the whole and its parts, and judge what they came to.

        Args:
            pieces: the whole, and its parts.
            watches: whether to look at all operators.
            explains: whether to find where a difference comes from.
        """
        formats = {p.dtype for p in self._model.parameters()}
        draws = ReplayedDraws(pieces[0].size, formats, watches=watches)
        snapshot = Snapshot(self._model, self._summed.holds, self._accelerators)
        comparison = _Comparison(
            self._summed,
            snapshot,
            draws,
            in_turn=self._in_turn,
        )
        try:
            verdict = comparison(pieces)
            if verdict.difference and explains:
                comparison.explain(verdict, pieces)
            return verdict
        finally:
            snapshot.put_back()
            for p in self._model.parameters():
                p.grad = None


@contextlib.contextmanager
def _as_compared(summed: Summed) -> Iterator[None]:
    """Compute in full precision, with known layers in evaluation mode."""
    with (
        torch.set_grad_enabled(summed.trains),
        known_in_evaluation_mode(summed.model),
        full_precision(summed.model),
    ):
        yield


@dataclass
class _Computed:
    """What a piece came to.

    Attributes:
        count: the number of items that its loss counted.
        numbers: its totals and counts, by name.
        written: the values that were written, by name.
    """

    count: float
    numbers: dict[str, float]
    written: dict[str, Any]


class _Comparison:
    """The whole and its parts, one after the other, and what they came to.

    Args:
        summed: computes the sums of a piece.
        snapshot: of the model, which is put back before each piece.
        draws: gives the parts the random numbers of the whole.
        in_turn: whether a part begins with what the one before has left.
    """

    def __init__(
        self,
        summed: Summed,
        snapshot: Snapshot,
        draws: ReplayedDraws,
        *,
        in_turn: bool,
    ) -> None:
        self._summed = summed
        self._snapshot = snapshot
        self._draws = draws
        self._in_turn = in_turn
        named = summed.model.named_parameters()
        self._trained = {name: p for name, p in named if p.requires_grad}
        self._computed: list[_Computed] = []
        self._norms: list[list[float]] = []  # of the gradients, after each piece
        self._draws_elsewhere = False

    def __call__(self, pieces: Sequence[Piece]) -> Verdict:
        """Compute and judge; nothing is known where a part has too few samples for the model."""
        why = ""
        try:
            self._compute_all(*pieces)
        except Exception as error:
            if is_out_of_memory(error):
                raise
            kind = type(error).__name__
            why = f"a part of a batch can't be computed: {kind}: {first_line(error)}"
        verdict = Verdict(
            unchecked=why,
            communicates=self._draws.communicates,
            draws=self._draws.has_drawn or self._draws_elsewhere,
            precision=self._draws.coarsest,
        )
        if not why and not verdict.communicates:
            self._note_writes(verdict)
            self._judge(verdict)
        if verdict.kept:
            self._leave_out_times(verdict, pieces[0])
        return verdict

    # ---- computing -------------------------------------------------------------------------------

    def _compute_all(self, whole: Piece, *parts: Piece) -> None:
        """Compute all pieces. Gradients end as those of the parts, less that of the whole."""
        of_whole = self._compute_whole(whole)
        if not self._draws.watches and self._snapshot.drew():
            self._draws.watches = True
            self._snapshot.put_back()
            of_whole = self._compute_whole(whole)
        self._computed.append(of_whole)
        if self._draws.communicates:
            return
        factor = -of_whole.count / whole.size
        for p in self._trained.values():
            if p.grad is not None:
                p.grad = p.grad * factor
        self._note_norms()
        for part in parts:
            if part is parts[0] or not self._in_turn:
                self._snapshot.put_back()
            of_part = self._compute(part, divisor=whole.size)
            self._computed.append(of_part)
            self._note_norms()

    def _compute_whole(self, whole: Piece) -> _Computed:
        """Compute the whole, whose gradients are those of total / count, as one device has them."""
        for p in self._trained.values():
            p.grad = None
        return self._compute(whole, divisor=None)

    def _compute(self, piece: Piece, *, divisor: int | None) -> _Computed:
        """Compute the sums of a piece, and add the gradient of its total / divisor."""
        with _as_compared(self._summed):
            with self._draws.forward(piece):
                sums = self._summed(piece)
            count = float(sums.count)
            by = divisor or count
            if sums.total is not None and by:
                with self._draws.backward():
                    torch.autograd.backward(sums.total / by)
        self._draws_elsewhere |= self._snapshot.drew_elsewhere()
        return _Computed(
            count=count,
            numbers=sums.numbers(),
            written=self._snapshot.changed(),
        )

    def _note_norms(self) -> None:
        norms = [_norm(p.grad) for p in self._trained.values()]
        self._norms.append(norms)

    # ---- judging ---------------------------------------------------------------------------------

    def _note_writes(self, verdict: Verdict) -> None:
        """Note what forward writes, and what ends otherwise where the batch is cut."""
        whole, *parts = self._computed
        if self._in_turn:
            parts = parts[-1:]
        differing: set[str] = set()
        for part in parts:
            for name in {**whole.written, **part.written}:
                if not same(whole.written.get(name), part.written.get(name)):
                    differing.add(name)
        parameters = self._snapshot.parameters
        for name in whole.written:
            if name in parameters:
                verdict.written.append(name)
                if name in differing:
                    verdict.drifts.append(name)
        verdict.kept = sorted(differing - parameters)

    def _leave_out_times(self, verdict: Verdict, whole: Piece) -> None:
        """Leave out what ends otherwise for the same samples, too: a time, say."""
        self._snapshot.put_back()
        again = self._compute_whole(whole).written
        before = self._computed[0].written
        verdict.kept = [name for name in verdict.kept if same(before.get(name), again.get(name))]

    def _judge(self, verdict: Verdict) -> None:
        """Find the worst difference: rather one of totals than one of gradients."""
        whole = self._computed[0]
        of_whole = [*whole.numbers.values(), *self._norms[0]]
        if not all(map(math.isfinite, of_whole)):
            verdict.unchecked = "the loss, or a gradient, is not finite"
            return
        if not any(one.count for one in self._computed):
            # An update that counts no item is skipped.
            return
        floor = _FLOOR[verdict.precision]
        least = _LEAST if verdict.precision == torch.float64 else 1e-300
        for sums in (self._sums(floor, least), self._gradients(floor, least)):
            verdict.apart, text = max(sums, default=(0.0, ""))
            if verdict.apart > TOLERANCE[verdict.precision]:
                verdict.difference = text
                break
        if verdict.difference and (self._draws.is_lost or self._draws_elsewhere):
            verdict.difference = ""
            verdict.unchecked = "a part of a batch draws other random numbers than the whole"

    def _sums(self, floor: float, least: float) -> Iterator[tuple[float, str]]:
        """Yield how far each total and each count is off, and what to say."""
        whole, *parts = self._computed
        total = whole.numbers.get("the total of the loss", 0.0)
        for name, value in whole.numbers.items():
            # A batch may leave out a part of the loss.
            of_parts = [part.numbers.get(name, 0.0) for part in parts]
            size = max(1e-300, *map(abs, [value, *of_parts]))
            if name.startswith("the total"):
                # A part, or a metric, may be 0 but for rounding.
                size = max(size, floor * abs(total), least * whole.count)
            apart = _finite(abs(value - sum(of_parts)) / size)
            added = " + ".join(f"{number:.6g}" for number in of_parts)
            text = f"{name} is {value:.6g} for the whole batch, and {added} for its parts"
            yield apart, text

    def _gradients(self, floor: float, least: float) -> Iterator[tuple[float, str]]:
        """Yield how far each gradient is off, and what to say."""
        whole = self._computed[0]
        total = whole.numbers.get("the total of the loss", 0.0)
        mean = abs(total) / max(whole.count, 1.0)
        *before, left = self._norms
        sizes = [max(norms) for norms in zip(*before, strict=True)]
        # All gradients may be rounding: those of a constant, say.
        largest = max([*sizes, _OF_LOSS * mean])
        smallest = max(floor * largest, least)
        for name, size, norm in zip(self._trained, sizes, left, strict=True):
            apart = _finite(norm / (size + smallest))
            what = f'the gradient of "{name}" for the whole batch is not the sum for its parts'
            yield apart, f"{what} ({apart:.1e})"

    def explain(self, verdict: Verdict, pieces: Sequence[Piece]) -> None:
        """Find where a difference comes from."""

        def outputs(piece: Piece) -> Any:
            with _as_compared(self._summed), self._draws.forward(piece):
                return self._summed.outputs(piece)

        verdict.where = first_that_mixes(self._summed.model, pieces, outputs, self._snapshot)
        if not verdict.where:
            self._snapshot.put_back()
            with _as_compared(self._summed):
                verdict.error = self._summed.explained(pieces[0])
            verdict.where = "no module differs: the cause is the loss, a metric, or backward"
            if self._in_turn and verdict.kept:
                verdict.where = (
                    f'forward writes "{verdict.kept[0]}", which the next micro-batch may read'
                )


def _finite(number: float) -> float:
    """Return the number, or infinity in the place of NaN."""
    return math.inf if math.isnan(number) else number


def _norm(gradient: Tensor | None) -> float:
    """Return the norm of a gradient, which rounding that flips one of many ReLUs hardly changes."""
    if gradient is None or not gradient.numel():
        return 0.0
    if gradient.is_sparse:
        gradient = gradient.to_dense()
    return float(torch.linalg.vector_norm(gradient))
