"""The sums that hold for an additive loss: a whole, and its two parts."""

from __future__ import annotations

import contextlib
import math
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lockstep.errors import LossError
from lockstep.model.losses.loss import Loss, Number
from lockstep.model.losses.torch_losses import HALF
from lockstep.tensors.placing import place_of
from lockstep.tensors.pytree import copied_nest, each, tensors, to_device
from lockstep.tensors.rows import both_of, part_of
from lockstep.tensors.seeding import other_states, put_state_on, same_others, state_on
from lockstep.threads.random_streams import source, stream

Nest = tuple[Any, Any]
"""Outputs and targets."""


class CantTell(Exception):
    """A loss of which nothing can be checked; the text says why, where the person has to know."""


@dataclass(frozen=True, slots=True)
class Piece:
    """What the loss made of some samples."""

    total: Tensor
    count: Number
    samples: int
    parts: Mapping[str, tuple[Number, Number]] = field(default_factory=dict)

    @classmethod
    def of(cls, loss: Loss, samples: int) -> Piece:
        """Of a loss of so many samples."""
        return cls(loss.total.detach(), loss.count, samples, loss.parts)

    @property
    def numbers(self) -> tuple[float, float]:
        """Total and count. The total of no item is 0, also where it is a mean of none, NaN,
        times 0.
        """
        total, count = float(self.total), float(self.count)
        return (0.0 if math.isnan(total) and not count else total), count

    def times(self, number: int) -> Piece:
        """What an additive loss makes of the same samples so many times."""
        parts = {
            name: (total * number, count * number) for name, (total, count) in self.parts.items()
        }
        return Piece(self.total * number, self.count * number, self.samples * number, parts)


class Sum(NamedTuple):
    """A piece, and the two that it is made of."""

    whole: Piece
    one: Piece
    other: Piece

    def of_part(self, name: str) -> list[tuple[float, float]]:
        """Total and count of a part of the loss, for each piece; none where it is left out."""
        return [
            (float(total), float(count))
            for total, count in (p.parts.get(name, (0.0, 0)) for p in self)
        ]


_REPEATED = 2**26
"""Bytes of outputs and targets that are made, at most, to see what a loss makes of more samples."""

DOUBLED = 1e-8
"""How far two ways to round may lie apart in float64, as a part of what is added."""


_REPORTED = 1e-5
"""The same for parts of a loss, which are reported only, and may be float32 where the loss is
float64.
"""


def tolerance_of(nest: Nest, totals: list[Tensor], *, waits: bool) -> float:
    """The same by the format that the totals are computed in; more where nobody will look again
    in float64.
    """
    if any(t.dtype in HALF for t in (*tensors(nest[0]), *totals)):
        return 2e-2
    return DOUBLED if all(t.dtype == torch.float64 for t in totals) else 1e-5 if waits else 1e-4


def are_double(totals: Iterable[Any]) -> bool:
    """Whether all are tensors of float64; what Python's numbers were computed in isn't known."""
    return all(isinstance(total, Tensor) and total.dtype == torch.float64 for total in totals)


def is_apart(whole: float, one: float, other: float, *, tolerance: float) -> bool:
    """Whether two parts don't add up to the whole."""
    # A part that isn't finite, of a whole that is, is wrong too: the variance of one sample, say.
    return math.isfinite(whole) and not abs(one + other - whole) <= tolerance * (
        abs(whole) + abs(one) + abs(other)
    )


def first_wrong(sums: list[Sum], tolerance: float) -> Sum | None:
    """The first sum that doesn't hold."""
    for of in sums:
        if any(
            is_apart(*values, tolerance=tolerance)
            for values in zip(*(piece.numbers for piece in of), strict=True)
        ):
            return of
    return None


def is_alike(loss: Callable[[Any, Any, int], Loss], nest: Nest, whole: Piece) -> bool:
    """Whether a loss of the same samples is the same again."""
    again = Piece.of(loss(*copied_nest(nest), whole.samples), whole.samples)
    return not any(
        is_apart(*of, 0.0, tolerance=1e-5) for of in zip(whole.numbers, again.numbers, strict=True)
    )


def parts_apart(names: Iterable[str], sums: list[Sum], tolerance: float) -> dict[str, Sum]:
    """For each part of the loss whose totals or counts don't add up, the first sum that doesn't
    hold.
    """
    return {
        name: next(of for of in sums if _is_part_apart(of, name, tolerance))
        for name in sorted(names)
        if any(_is_part_apart(of, name, tolerance) for of in sums)
    }


def _is_part_apart(of: Sum, name: str, tolerance: float) -> bool:
    if not are_double(number for piece in of for number in piece.parts.get(name, ())[:1]):
        tolerance = max(tolerance, _REPORTED)
    return any(
        is_apart(*values, tolerance=tolerance) for values in zip(*of.of_part(name), strict=True)
    )


def are_wrong(sums: list[Sum], tolerance: float) -> Tensor:
    """Whether one of them is, found by the accelerator; Python numbers are looked at here."""
    wrong = torch.zeros_like(sums[0].whole.total, dtype=torch.bool)

    def total(
        piece: Piece,
    ) -> Tensor:  # as in `Piece.numbers`; a number made a tensor would be waited for
        total, count = piece.total, piece.count
        if isinstance(count, Tensor):
            return torch.where(
                count.to(total.device, non_blocking=True) == 0, total.nan_to_num(), total
            )
        return total if count else total.nan_to_num()

    for of in sums:
        values: list[list[Any]] = [[total(piece) for piece in of], [piece.count for piece in of]]
        for whole, one, other in values:
            if isinstance(whole, Tensor):
                bound = tolerance * (abs(whole) + abs(one) + abs(other))
                wrong = wrong | (torch.isfinite(whole) & ~(abs(one + other - whole) <= bound))
            elif is_apart(float(whole), float(one), float(other), tolerance=tolerance):
                wrong = torch.ones_like(wrong)
    return wrong


def is_sum(of: Sum) -> bool:
    """Whether a scalar's values, rather than its means, add up; those of a part that is masked
    say nothing.
    """
    whole, one, other = (float(piece.total) / piece.samples for piece in of)
    return one != 0 and other != 0 and not is_apart(whole, one, other, tolerance=1e-4)


def is_finite(piece: Piece) -> bool:
    """Whether its total and its count are."""
    return all(map(math.isfinite, piece.numbers))


def is_nan(piece: Piece) -> bool:
    """Whether its total or its count is."""
    return any(map(math.isnan, piece.numbers))


def doubled(nest: Nest) -> Nest:
    """The nest in float64."""
    made: Nest = each(lambda t: _as(t, t.double()) if t.is_floating_point() else t, nest)
    return made


def _as(tensor: Tensor, made: Tensor) -> Tensor:
    """What was made of a tensor; of a parameter, which isn't cut, a parameter."""
    return nn.Parameter(made, requires_grad=False) if isinstance(tensor, nn.Parameter) else made


def _cloned(tensor: Tensor) -> Tensor:
    return _as(tensor, tensor.clone())


def detached(tensor: Tensor) -> Tensor:
    """A tensor without its history; a parameter as it is, which isn't cut."""
    return tensor if isinstance(tensor, nn.Parameter) else tensor.detach()


class EarlierSamples:
    """One sample that came before, for each device, with a number, or NaN (None), in the place
    of what can't be cut.
    """

    def __init__(self) -> None:
        self._held: dict[tuple[torch.device | None, float | None], Nest] = {}
        self._alike: dict[
            tuple[torch.device | None, float | None], Nest
        ] = {}  # the last of another shape

    def first(self, instead: float | None) -> Nest | None:
        """The first of all."""
        return self._held.get((None, instead))

    def replace(self, others: list[Tensor], instead: float | None) -> bool:
        """Keep the tensors of another rank's sample instead; False where it has none, or fewer."""
        theirs = iter(others)
        with contextlib.suppress(StopIteration):
            mine = self._held[None, instead]
            self._held = {(None, instead): each(lambda t: _as(t, next(theirs).to(t.device)), mine)}
            return True
        return False

    def joined_with(
        self, one: Nest, instead: float | None, *, alone: bool, anew: bool
    ) -> tuple[Nest, Nest]:
        """A sample joined with one of its shape that came before, and that one.

        Of both, what isn't one row for each sample is ``instead``, or NaN.
        Where it is ``alone`` in its local batch and no other came before, one is made of it. Where
        ``anew``, the one before has what isn't cut as it is now.
        """
        earlier = _with_common_rows(self._first_on(one, instead), one)
        if (both := both_of(one, 1, earlier, 1)) is None:
            key = place_of(one), instead
            earlier = self._alike.get(key, one)
            both = both_of(one, 1, earlier, 1)
        if both is None or earlier is one:
            self._alike[key] = earlier = each(_cloned, one)
            if alone:
                earlier = (
                    each(lambda t: t / 2 if t.is_floating_point() else t, earlier[0]),
                    earlier[1],
                )
            both = both_of(one, 1, earlier, 1)
            assert both is not None
        if anew or any(isinstance(t, nn.Parameter) for t in tensors(one[0])):
            earlier = _of_both(both, 1, one)
        return both, earlier

    def _first_on(self, one: Nest, instead: float | None) -> Nest:
        """The first of all, or this one, on the same device."""
        key = place_of(one), instead
        if key not in self._held:  # (perhaps in several threads)
            first = self._held.setdefault((None, instead), each(_cloned, one))
            self._held[key] = to_device(first, key[0])
        return self._held[key]

    def padded_with(self, one: Nest, instead: float | None) -> list[tuple[Nest, int]]:
        """A sample and the first one, where they are of different lengths, with zeros as long:
        both, and each of them.

        Empty where they are of one shape, or don't go together.
        """
        earlier = self._first_on(one, instead)
        shapes = [[t.shape for t in tensors(nest)] for nest in (one, earlier)]
        if shapes[0] == shapes[1] or [len(shape) for shape in shapes[0]] != [
            len(shape) for shape in shapes[1]
        ]:
            return []
        if any(
            shape[:1] != other[:1] for shape, other in zip(*shapes, strict=True)
        ):  # (nodes of graphs aren't cut)
            return []
        longest = [
            [max(sizes) for sizes in zip(*both, strict=True)] for both in zip(*shapes, strict=True)
        ]

        def padded(nest: Nest) -> Nest:
            sizes = iter(longest)

            def of_tensor(tensor: Tensor) -> Tensor:
                missing = [
                    wanted - size for wanted, size in zip(next(sizes), tensor.shape, strict=True)
                ]
                return (
                    F.pad(tensor, [n for size in reversed(missing) for n in (0, size)])
                    if any(missing)
                    else tensor
                )

            made: Nest = each(of_tensor, nest)
            return made

        if (both := both_of(padded(one), 1, padded(earlier), 1)) is None:
            return []
        return [(both, 2), *((_of_both(both, number, one), 1) for number in range(2))]


def _with_common_rows(earlier: Nest, one: Nest) -> Nest:
    """An earlier sample, with the row of now of outputs that have one for all samples
    (``t.expand(n, -1, -1)``).
    """
    is_common = [
        t.layout == torch.strided and t.dim() > 0 and t.stride(0) == 0 for t in tensors(one[0])
    ]
    if not any(is_common) or len(is_common) != len(list(tensors(earlier[0]))):
        return earlier
    pairs = zip(tensors(one[0]), is_common, strict=True)

    def of_now(tensor: Tensor) -> Tensor:
        mine, common = next(pairs)
        return mine if common and mine.shape == tensor.shape else tensor

    return each(of_now, earlier[0]), earlier[1]


def _of_both(both: Nest, number: int, one: Nest) -> Nest:
    """The first or second of two samples that were joined; what ``one`` has no row of (two
    weights, say) is whole.
    """
    of, joined = part_of(both, number, 1, 2), list(tensors(both))
    shapes = [t.shape for t in tensors(one)]
    if len(shapes) != len(joined):  # lists with a tensor for each sample
        return of
    whole = iter([b if b.shape == shape else None for b, shape in zip(joined, shapes, strict=True)])

    def kept(tensor: Tensor) -> Tensor:
        return tensor if (b := next(whole)) is None else b

    made: Nest = each(kept, of)
    return made


def repeated(nest: Nest, samples: int, times: int) -> Nest | None:
    """The samples so many times; None where they don't go together, or are too large."""
    if times * sum(t.numel() * t.element_size() for t in tensors(nest)) > _REPEATED:
        return None
    made: Nest | None = nest
    for number in range(1, times):
        made = None if made is None else both_of(made, number * samples, nest, samples)
    return made


def sums_of_many(
    piece: Callable[[Nest, int], Piece], rows: Nest, whole: Piece, times: int
) -> list[Sum]:
    """Those of more samples than a local batch has: of the same so many times, and of its targets
    with other outputs.

    Of a class that one sample of the local batch is of there are two then, which differ.
    """
    sums, samples = [], whole.samples
    if (many := repeated(rows, samples, times)) is not None:
        sums.append(Sum(piece(many, times * samples), whole, whole.times(times - 1)))
    if many is not None and (turned := with_next(rows, samples)) is not None:
        with contextlib.suppress(
            LossError, CantTell
        ):  # it may take outputs with their own targets only
            others, both = turned
            sums.append(Sum(piece(both, 2 * samples), whole, piece(others, samples)))
    return sums


def with_next(rows: Nest, samples: int) -> tuple[Nest, Nest] | None:
    """The targets with the outputs of the next sample each, and both together; None where they
    don't go together.
    """
    if samples < 2:
        return None
    turned = both_of(
        part_of(rows, 1, samples - 1, samples), samples - 1, part_of(rows, 0, 1, samples), 1
    )
    if turned is None:
        return None
    its = iter(list(tensors(turned[0])))
    # (Flags and classes among outputs stay with the targets: rows that they name are others then.)
    others = (
        each(lambda t: pair[0] if (pair := (next(its), t))[0].is_floating_point() else t, rows[0]),
        rows[1],
    )
    both = both_of(rows, samples, others, samples)
    return None if both is None else (others, both)


@contextlib.contextmanager
def kept_generators(nest: Nest) -> Iterator[list[Any]]:
    """Leave PyTorch's random numbers as they are; gives a list in which something is true where
    some were drawn.
    """
    drawn: list[Any] = []
    devices = {t.device: None for t in tensors(nest[0]) if t.device.type != "meta"} or [
        torch.device("cpu")
    ]
    if (
        source() is not None and torch.device("cpu") in devices
    ):  # this thread has a stream of its own

        def noted() -> torch.Generator:
            drawn.append(True)
            return torch.Generator()

        with stream(noted):
            yield drawn
        return
    before = {device: state_on(device) for device in devices}
    try:
        yield drawn
    finally:
        for device, state in before.items():
            drawn.append(not torch.equal(state, state_on(device)))
            put_state_on(device, state)


@contextlib.contextmanager
def noted_others(drawn: list[Any]) -> Iterator[None]:
    """Note whether random numbers of Python or numpy are drawn."""
    before = other_states()
    yield
    drawn.append(not same_others(before, other_states()))


@contextlib.contextmanager
def without_warnings(*, unless: bool) -> Iterator[None]:
    """In which a loss may say what it says of parts that nobody but the check gives it, where
    batches aren't cut.

    Args:
        unless: they are, perhaps by several threads, which have their warnings in common.
    """
    if unless:
        yield
        return
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield
