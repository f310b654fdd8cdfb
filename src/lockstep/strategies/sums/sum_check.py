"""The sum check: whether the loss of a batch and its gradients are the sums of those of its parts.

Whatever cuts a batch (replicas, ranks, micro-batches) adds up what the parts give. So these have to
agree, for a batch and any two parts of it::

    total(batch)     =  total(part 1)     +  total(part 2)
    count(batch)     =  count(part 1)     +  count(part 2)
    gradient(batch)  =  gradient(part 1)  +  gradient(part 2)       of each parameter

``sum_check`` computes all three by the model itself, and puts back what that changes: weights,
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
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lockstep.errors import first_line
from lockstep.launch.memory import is_out_of_memory
from lockstep.model.losses.loss import total_of_items
from lockstep.model.snapshot import Snapshot, same
from lockstep.strategies.sums.cross_sample_layer import first_that_mixes
from lockstep.strategies.sums.reference_modes import as_compared, in_float64
from lockstep.strategies.sums.replayed_draws import ReplayedDraws
from lockstep.strategies.sums.sums_of_pieces import Piece, Summed


class _Bounds(NamedTuple):
    """What is rounding, where something was computed in a format.

    Attributes:
        tolerance: how far a sum may be off, relatively.
        floor: the part of the largest gradient below which another one is rounding: that of a key's
            bias is zero.
        least: the size of a smaller gradient, and of smaller losses of an item: they may be
            rounding, as a divergence of equal outputs is.
    """

    tolerance: float
    floor: float
    least: float


_HALF = _Bounds(5e-2, 1e-1, 1e-300)
_BOUNDS = {
    torch.bfloat16: _HALF,
    torch.float16: _HALF,
    torch.float32: _Bounds(1e-4, 1e-2, 1e-300),
    torch.float64: _Bounds(1e-9, 1e-5, 1e-5),
}
"""By number format, from the coarsest to the finest."""

_UNDECIDED = 1e-2
"""How far a sum may be off in float32 where nothing can be computed in float64."""

_OF_LOSS = 1e-2
"""The part of the loss that the largest gradient is taken for where all are smaller."""


@dataclass
class Verdict:
    """What a check has found.

    Attributes:
        difference: what is no sum, with the numbers; "" where all is one.
        where: the first module whose outputs show it.
        unchecked: why nothing is known; "" where something is.
        communicates: whether the model or the loss communicates with other ranks, so that nothing
            else is known.
        written: parameters that forward writes.
        drifts: those of them that a part of the batch writes otherwise than the whole does.
        kept: buffers and numbers that forward or the loss writes, and that end otherwise where the
            batch is cut.
        draws: whether random numbers are drawn, which are others for each part in a training.
        apart: how far the worst sum is off, relatively.
    """

    difference: str = ""
    where: str = ""
    unchecked: str = ""
    communicates: bool = False
    written: list[str] = field(default_factory=list)
    drifts: list[str] = field(default_factory=list)
    kept: list[str] = field(default_factory=list)
    draws: bool = False
    apart: float = 0.0


def sum_check(
    summed: Summed,
    pieces: Sequence[Piece],
    *,
    in_turn: bool,
    watches: bool = False,
    accelerators: Sequence[torch.device] = (),
) -> Verdict:
    """Compare a batch with two parts of it, and leave everything as it was.

    Args:
        summed: computes the sums of a piece, by a model that is whole.
        pieces: the batch, and its parts.
        in_turn: whether the parts are micro-batches of one model: each begins with the state that
            the one before has left. Otherwise they are local batches of replicas, which begin with
            the same state.
        watches: whether the model is known to draw random numbers, or may communicate.
        accelerators: whose random numbers are put back, too.
    """

    def compared(pieces: Sequence[Piece], *, watches: bool = True) -> Verdict:
        comparison = _Comparison(
            summed, pieces, in_turn=in_turn, watches=watches, accelerators=accelerators
        )
        return comparison.verdict

    gradients = {p: p.grad for p in summed.model.parameters()}
    try:
        verdict = compared(pieces, watches=watches)
        if not verdict.difference:
            return verdict
        with in_float64(summed.model, *summed.holds):
            again = compared([piece.doubled() for piece in pieces])
        if not again.unchecked:
            return again
        verdict = compared(pieces)
        if verdict.difference and verdict.apart <= _UNDECIDED:
            verdict.difference = ""
            verdict.unchecked = f"float64 can't decide ({again.unchecked})"
        return verdict
    finally:
        for p, gradient in gradients.items():
            p.grad = gradient


class _Computed(NamedTuple):
    """What a piece came to.

    Attributes:
        items: how many its loss counts.
        numbers: totals and counts by name.
        written: what forward has written, by name.
        norms: of the gradients so far: those of the parts, less that of the whole.
    """

    items: float
    numbers: dict[str, float]
    written: dict[str, Any]
    norms: list[float]


class _Comparison:
    """The whole and its parts, one after the other, and what they came to.

    Attributes:
        verdict: what was found; nothing where a part has too few samples for the model.
    """

    def __init__(
        self,
        summed: Summed,
        pieces: Sequence[Piece],
        *,
        in_turn: bool,
        watches: bool,
        accelerators: Sequence[torch.device],
    ) -> None:
        self._summed = summed
        self._pieces = pieces
        self._in_turn = in_turn
        self._snapshot = Snapshot(summed.model, summed.holds, accelerators)
        self._draws = ReplayedDraws(pieces[0], watches=watches)
        named = summed.model.named_parameters()
        self._trained = {name: p for name, p in named if p.requires_grad}
        self._computed: list[_Computed] = []
        self._draws_elsewhere = False
        self.verdict = Verdict()
        for p in self._trained.values():
            p.grad = None
        try:
            self._compare()
        finally:
            self._snapshot.put_back()

    def _compare(self) -> None:
        verdict = self.verdict
        try:
            for number, piece in enumerate(self._pieces):
                if number == 1 or (number and not self._in_turn):
                    self._snapshot.put_back()
                self._computed.append(self._compute(piece))
                if self._draws.communicates:
                    verdict.communicates = True
                    verdict.unchecked = "the model, or its loss, communicates with other ranks"
                    return
        except Exception as error:
            if is_out_of_memory(error):
                raise
            kind = type(error).__name__
            verdict.unchecked = f"a part of a batch can't be computed: {kind}: {first_line(error)}"
            return
        self._note_writes()
        self._judge()
        if verdict.difference and (self._draws.is_lost or self._draws_elsewhere):
            verdict.difference = ""
            verdict.unchecked = "a part of a batch draws other random numbers than the whole"
        if verdict.difference and self._draws.watches:
            self._explain()

    @contextlib.contextmanager
    def _computing(self, piece: Piece) -> Iterator[None]:
        summed = self._summed
        with as_compared(summed.model, trains=summed.trains), self._draws.of(piece):
            yield

    def _compute(self, piece: Piece) -> _Computed:
        """Compute the sums of a piece, and add the gradient of its part of the mean.

        The whole has the gradient of total / count, as on one device.
        """
        whole = self._pieces[0]
        with self._computing(piece):
            sums = self._summed(piece)
            count = float(sums.count)
            divisor = count if piece is whole else whole.size
            if divisor and sums.total.requires_grad:
                torch.autograd.backward(sums.total / divisor)
        self._draws_elsewhere |= self._snapshot.drew_elsewhere()
        self.verdict.draws |= self._draws_elsewhere
        if piece is whole:
            self.verdict.draws |= bool(self._draws.drawn) or self._snapshot.drew()
            for p in self._trained.values():
                if p.grad is not None:
                    p.grad = p.grad * (-count / whole.size)
        numbers = {}
        for name, (total, items) in sums.parts.items():
            numbers[f"the total of {name}"] = float(total_of_items(total, items))
            numbers[f"the count of {name}"] = float(items)
        norms = [_norm(p.grad) for p in self._trained.values()]
        return _Computed(count, numbers, self._snapshot.changed(), norms)

    # ---- judging ---------------------------------------------------------------------------------

    def _note_writes(self) -> None:
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
        self.verdict.written = [name for name in whole.written if name in parameters]
        self.verdict.drifts = [name for name in self.verdict.written if name in differing]
        self.verdict.kept = sorted(differing - parameters)

    def _judge(self) -> None:
        """Find the worst difference: rather one of totals than one of gradients."""
        whole = self._computed[0]
        if not all(map(math.isfinite, [*whole.numbers.values(), *whole.norms])):
            self.verdict.unchecked = "the loss, or a gradient, is not finite"
            return
        if not any(one.items for one in self._computed):
            return  # the update is skipped
        formats = {p.dtype for p in self._summed.model.parameters()} | self._draws.formats
        real = {dtype.to_real() for dtype in formats}
        bounds = next((b for dtype, b in _BOUNDS.items() if dtype in real), _BOUNDS[torch.float64])
        for sums in (self._sums(bounds), self._gradients(bounds)):
            self.verdict.apart, text = max(sums, default=(0.0, ""))
            if self.verdict.apart > bounds.tolerance:
                self.verdict.difference = text
                return

    def _sums(self, bounds: _Bounds) -> Iterator[tuple[float, str]]:
        """Yield how far each total and each count is off, and what to say."""
        whole, *parts = self._computed
        total = whole.numbers.get("the total of the loss", 0.0)
        for name, value in whole.numbers.items():
            # A batch may leave out a part of the loss.
            of_parts = [part.numbers.get(name, 0.0) for part in parts]
            size = max(1e-300, *map(abs, [value, *of_parts]))
            if name.startswith("the total"):
                # A part, or a metric, may be 0 but for rounding.
                size = max(size, bounds.floor * abs(total), bounds.least * whole.items)
            apart = _finite(abs(value - sum(of_parts)) / size)
            added = " + ".join(f"{number:.6g}" for number in of_parts)
            yield apart, f"{name} is {value:.6g} for the whole batch, and {added} for its parts"

    def _gradients(self, bounds: _Bounds) -> Iterator[tuple[float, str]]:
        """Yield how far each gradient is off, and what to say."""
        whole = self._computed[0]
        total = whole.numbers.get("the total of the loss", 0.0)
        *before, left = [one.norms for one in self._computed]
        sizes = list(map(max, *before))
        # All gradients may be rounding: those of a constant, say.
        largest = max([*sizes, _OF_LOSS * abs(total) / max(whole.items, 1.0)])
        smallest = max(bounds.floor * largest, bounds.least)
        for name, size, norm in zip(self._trained, sizes, left, strict=True):
            apart = _finite(norm / (size + smallest))
            what = f'the gradient of "{name}" for the whole batch is not the sum for its parts'
            yield apart, f"{what} ({apart:.1e})"

    def _explain(self) -> None:
        """Find where a difference comes from."""

        def outputs(piece: Piece) -> Any:
            with self._computing(piece):
                return self._summed.outputs(piece)

        verdict = self.verdict
        verdict.where = first_that_mixes(self._summed.model, self._pieces, outputs, self._snapshot)
        if verdict.where:
            return
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
        gradient = gradient.coalesce().values()
    return float(torch.linalg.vector_norm(gradient))
