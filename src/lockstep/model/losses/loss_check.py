"""Holds a loss to its word in each update: that it is additive over samples, so that local batches
may be summed.

::

    local batch    | s . . . a | . . . . . . b |      e: a sample of an earlier local batch

    total(local batch) = total(a) + total(b)
    closer: total(s and e) = total(s) + total(e)
            total(n times the local batch) = n total(local batch)
            total(local batch and o) = total(local batch) + total(o)  o: its targets, with outputs of other samples

It looks closer in updates 1 to 5, 8, 16 and so on, at new values, and as often as that is cheap.
The earlier sample is the first rank's, on all: a mask may be even over each local batch, and not
over two. A shorter one is padded. The sizes of the two parts have no common divisor: a mask over
samples leaves the same part of both if all or none only.

The totals and counts of a loss that returns ``(total, count)`` are held to that; of one that
returns a scalar, a mean over samples by its word, the total is that scalar times their number. The
mean over the items that a mask leaves isn't one over samples, once the mask leaves more items of
one sample than of another. PyTorch's own mean losses (`lockstep.model.losses.torch_losses`) need no
check.

Outputs that aren't one row for each sample (the model's own scalar loss, say) can't be cut. Whether
the loss reads them is found by giving it NaN in their place. A scalar that reads them is refused;
of a pair that reads what the model sums over samples the rest is checked, with zeros in its place
(ones, where the loss divides by it).
"""

from __future__ import annotations

import contextlib
import itertools
import math
from collections.abc import Collection, Mapping
from typing import Any

import torch
from torch import Tensor

from lockstep.errors import LossError
from lockstep.launch.memory import is_out_of_memory
from lockstep.launch.world import World
from lockstep.model.losses import loss_error
from lockstep.model.losses.additivity import (
    CantTell,
    EarlierSamples,
    Nest,
    Piece,
    Sum,
    are_wrong,
    detached,
    doubled,
    first_wrong,
    is_alike,
    is_apart,
    is_finite,
    is_nan,
    is_sum,
    kept_generators,
    noted_others,
    parts_apart,
    sums_of_many,
    tolerance_of,
    without_warnings,
)
from lockstep.model.losses.check_interval import TIMED, CheckInterval
from lockstep.model.losses.loss import Totalled, id_of
from lockstep.model.losses.new_values import NewValues
from lockstep.model.losses.uncut_outputs import Uncut, holds_numbers, refuse_to_tell, with_value
from lockstep.tensors.pytree import copied_nest, each, holds_packed, named_tensors, tensors
from lockstep.tensors.rows import both_of, part_of, with_sample_lists

_SUMS = 3
"""The updates in each of which a loss of whole batches has to be a sum to be refused."""

_MOST = 8
"""Local batches as which the loss is given one, at most: the hardest 10 samples are fewer than
all of a batch only.
"""


class LossCheck:
    """Checks one loss.

    Args:
        loss: it.
        cuts: whether batches are cut. Otherwise only a sum over samples is refused, one in each of
            the first three updates: a mean over the batch is as good as any other loss then, but
            the scale of a sum depends on the size of the batch. (A loss divided by the positives of
            a batch, or by 1, is a sum where there are none.)
        local_batches: in how many they are cut.
        joins: whether a sample is always joined with that of an earlier local batch, not only where
            it looks closer.

    Attributes:
        interval: how often it is checked.
        reads: names of the model's outputs without a row for each sample that the loss was seen to
            read.
        of_batch: what those that are known are (`Seen`): one may have as many rows as there are
            samples by chance.
        bent: names of parts of the loss that are no sums where parts of a batch have such outputs
            of their own (Seen).
        said_parts: names of parts of the loss of which something was noted.
        notes: what the person has to know, until somebody has told it.
    """

    def __init__(
        self, loss: Totalled, *, cuts: bool, local_batches: int = 2, joins: bool = False
    ) -> None:
        self._loss, self._cuts, self._joins = loss, cuts, joins
        self._local_batches = min(local_batches, _MOST)
        self._trusted, self._earlier = loss.is_known, EarlierSamples()
        self._of_earlier: tuple[Nest | None, Piece] = (
            None,
            Piece(torch.zeros(()), 0, 0),
        )  # the last, and its loss
        self._is_constant = True  # as far as is known, that is the same in each update
        self._sums_in_a_row, self._has_state = 0, False
        self._instead: float | None = (
            None  # the value in the place of what can't be cut; NaN until it is read
        )
        self.said_parts, self._lists = set[str](), dict[str, bool]()
        self._new, self._settings = NewValues(), loss.settings()
        self.interval = CheckInterval()
        self.reads: tuple[str, ...] = ()
        self.of_batch: Mapping[str, str] = {}
        self.bent: Collection[str] = ()
        self.notes: list[str] = []

    def wants(self, update: int, *, closer: bool = False) -> bool:
        """Whether the loss is to be checked in this update, counted from 1; in any that is
        looked at closer.
        """
        if self._trusted or not self._cuts:
            return not self._trusted and update <= _SUMS
        return closer or self.interval.is_due(update)

    def __call__(
        self,
        outputs: Any,
        targets: Any,
        whole: Piece,
        *,
        step: int = 0,
        closer: bool | None = True,
        waits: bool = True,
    ) -> Tensor | None:
        """Check the loss of one local batch. Random numbers go on as if nothing had happened.

        Args:
            outputs: of the model, for ``whole.samples`` samples.
            targets: of the same.
            whole: what the loss made of them.
            step: the update, for the message; 0 in an evaluation.
            closer: whether to look at more samples than a local batch has. Unless None, new values
                have it done.
            waits: False on an accelerator where the host must not wait for it.

        Returns:
            Whether the loss is wrong, as a boolean scalar on an accelerator that isn't waited for;
            else None.

        Raises:
            LossError: it isn't additive, or can't be checked.
        """
        if id_of(outputs) in self._loss.spoilt:
            self._loss.spoilt.discard(id_of(outputs))
            return None
        if holds_packed((outputs, targets)):
            self._refuse_scalar(packed := "a PackedSequence, which can't be cut")
            self._trust(f"it reads {packed}")
            return None
        nest = with_sample_lists((each(detached, outputs), targets), whole.samples, self._lists)
        try:
            tolerance = tolerance_of(nest, [whole.total], waits=waits)
            with (
                torch.no_grad(),
                kept_generators(nest) as drawn,
                without_warnings(unless=self._cuts),
            ):
                new = (
                    self._cuts
                    and waits
                    and closer is not None
                    and self._is_new(nest, whole.samples)
                )
                closer = self._cuts and closer is not None and (closer or new)
                sums = self._sums(nest, whole.samples, whole, closer=closer, waits=waits)
                if not waits:
                    return are_wrong(sums, tolerance)
                if (wrong := first_wrong(sums, tolerance)) is not None:
                    self._is_constant = False
                    with noted_others(drawn):
                        sums = self._sums(nest, whole.samples, whole, closer=closer)
                    wrong = first_wrong(sums, tolerance)
                if wrong is not None:
                    wrong = self._still_wrong(nest, whole, wrong, closer)
                if wrong is not None and self._loss.gives_pairs:
                    refuse_to_tell(nest, whole.samples, self._instead)
                apart = (
                    self._parts_apart(nest, whole.samples, sums, tolerance, closer)
                    if self._cuts
                    else {}
                )
        except CantTell as error:
            self._trust(str(error))
            return None
        if wrong is not None and any(drawn):
            self._draws()
        elif wrong is not None:
            a_sum = is_sum(wrong) and self._doubles(nest, whole)
            self._sums_in_a_row += a_sum
            if self._cuts or self._sums_in_a_row == _SUMS:
                raise loss_error.not_additive(self._loss, wrong, step, is_sum=a_sum)
        elif not any(drawn):
            self.said_parts |= apart.keys()
            self.notes += apart.values()
        return None

    def _is_new(self, nest: Nest, samples: int) -> bool:
        """Whether a batch, or the loss, has something that neither had before."""
        before, self._settings = self._settings, () if self._has_state else self._loss.settings()
        return self._new.add(*nest, samples) or self._settings != before

    def _trust(self, why: str) -> None:
        """Check no more; the person has to know why, where batches are cut."""
        if why and self._cuts and not self._trusted:  # (another thread may have said so)
            self.notes.append(
                f"whether {self._loss.name} is additive over samples can't be checked: {why}"
            )
        self._trusted = True

    def found_later(self, step: int) -> LossError:
        """The error of an update that an accelerator has found wrong."""
        return loss_error.found_later(self._loss, step)

    def compare_ranks(self, world: World) -> None:
        """Hold a sample of this rank against one of the first rank, and keep that one. All ranks
        have to call it.

        Raises:
            LossError: it isn't additive.
        """
        if self._loss.is_known or not self._cuts or world.size == 1:
            return
        mine = self._earlier.first(self._instead)
        theirs = world.broadcast_object([t.cpu() for t in tensors(mine)])
        if mine is None or self._trusted or world.is_first:
            return
        if self._earlier.replace(theirs, self._instead):
            with torch.no_grad(), kept_generators(mine):
                whole = Piece.of(self._loss.copied()(*mine, 1), 1)
            self(*mine, whole, step=world.step)

    def follow_first(self, world: World) -> None:
        """Know of outputs what the first rank has seen of them. All ranks have to call it."""
        if world.layout.together and world.size > 1 and self._cuts and not self._loss.is_known:
            self.of_batch, self.bent = world.broadcast_object((self.of_batch, self.bent))

    # ---- how often -------------------------------------------------------------------------------

    def is_timed(self, update: int) -> bool:
        """Whether to time this update."""
        return update in TIMED and self.wants(update)

    def timed(self, update: int, seconds: float, replicas: int) -> str | None:
        """Choose how often to check, after an update that was timed; gives a line where that
        isn't in every one.
        """
        line = self.interval.timed(update, seconds, replicas)
        if line is None or self._loss.gives_pairs:
            return line
        return f"{line}; return (total, count) if it masks some items"

    def agree(self, world: World, update: int, line: str | None, *, meets: bool) -> None:
        """Check as seldom as the slowest rank, and have rank 0 note what any rank has noted. All
        ranks have to call it.

        ``line`` is what ``timed`` gave; ranks tell their notes where it ``meets``, and after the
        last timed update.
        """
        if (
            world.size > 1
            and world.layout.together
            and not self._loss.is_known
            and (meets or update == TIMED.stop - 1)
        ):
            heard = world.gather_objects(
                (self.interval.every, self.interval.closer_every, line or "", self.notes)
            )
            self.interval.every, self.interval.closer_every, line, _ = max(heard)
            self.notes = (
                list(dict.fromkeys(note for *_, notes in heard for note in notes))
                if world.is_first
                else []
            )
        if line and world.is_first:
            self.notes.append(line)

    # ---- one check -------------------------------------------------------------------------------

    def _sums(
        self,
        nest: Nest,
        samples: int,
        whole: Piece | None = None,
        *,
        closer: bool,
        waits: bool = True,
        double: bool = False,
    ) -> list[Sum]:
        """The sums that must hold; where the whole isn't known, each piece is computed by a loss
        in the same state.
        """
        loss, knows = self._loss.copied(double=double), whole is not None and not self._has_state
        its_uncut = Uncut(nest, samples, self.of_batch, gives_pairs=self._loss.gives_pairs)
        nest, known = its_uncut.nest, its_uncut.known

        def piece(of: Nest, size: int) -> Piece:
            its = loss if knows else loss.copied()
            try:
                total, count = made = its(*copied_nest(of), size)
                return Piece(total, count, size, made.parts)
            except Exception as error:
                self._cant_take(error, nest, size, samples)
                raise

        instead, reads = self._instead, self.reads  # (which another thread may change meanwhile)
        unread = its_uncut.unread(reads, instead)
        of_unread = set(map(id, unread))
        held = with_value(
            nest, [t for t in its_uncut.floating if id(t) not in of_unread], instead or 0.0
        )
        rows = with_value(held, unread, math.nan)
        if its_uncut.floating and instead is not None:
            whole = piece(rows, samples)
            if (
                instead == 0
                and waits
                and not is_finite(whole)
                and not is_finite(piece(held, samples))
            ):  # it divides
                self._instead = 1.0
                return self._sums(nest, samples, whole, closer=closer, double=double)
        elif whole is None or not knows:
            whole = piece(nest, samples)
        sums = []
        if samples > 1:
            first = next(
                size for size in range((samples + 1) // 2, 0, -1) if math.gcd(size, samples) == 1
            )
            parts = ((0, first), (first, samples - first))
            sums.append(
                Sum(
                    whole,
                    *(piece(part_of(rows, start, size, samples), size) for start, size in parts),
                )
            )
        if closer or samples == 1 or self._joins:
            one = (
                part_of(rows, 0, 1, samples) if samples > 1 else rows
            )  # those of a local batch may be alike in length
            if longer := self._earlier.padded_with(one, instead):
                with contextlib.suppress(LossError, CantTell):  # it may not take them
                    sums.append(Sum(*itertools.starmap(piece, longer)))
            anew = bool(its_uncut.constants) or instead is not None
            both, earlier = self._earlier.joined_with(one, instead, alone=samples == 1, anew=anew)
            kept, value = self._of_earlier
            if kept is not earlier or not (self._is_constant and knows and waits):
                value = piece(doubled(earlier) if double else earlier, 1)
                self._of_earlier = earlier, value
            sums.append(Sum(piece(both, 2), whole if samples == 1 else piece(one, 1), value))
        asks = bool(unread) and waits
        shows = asks and any(map(is_nan, itertools.chain(*sums)))
        if (
            asks and not shows and first_wrong(sums, 1e-4) is not None
        ):  # a guard against NaN may hide it
            shows = piece(rows, samples).numbers != piece(held, samples).numbers
        if shows and not is_nan(known_whole := piece(held, samples)):
            without = [(t, piece(with_value(held, [t], math.nan), samples)) for t in unread]
            read = [t for t, made in without if made.numbers != known_whole.numbers] or unread
            self._look_at_read(read, nest, samples)
            if self._cuts:
                pieces = [made for _, made in without]
                self.notes += loss_error.parts_that_bend(
                    self._loss, pieces, self.bent, self.said_parts
                )
            if not self._loss.gives_pairs or any(t.dim() and id(t) not in known for t in read):
                # (Of graphs with several nodes each, say: the number of rows is no constant.)
                raise CantTell("it reads what has no row for each sample")
            self._instead = instead or 0.0
            return self._sums(nest, samples, whole, closer=closer, waits=waits, double=double)
        return sums + (sums_of_many(piece, rows, whole, self._local_batches) if closer else [])

    def _cant_take(self, error: Exception, nest: Nest, size: int, samples: int) -> None:
        """Say that the loss can't take a part; of a pair it is told, and that nothing can be
        checked.
        """
        if is_out_of_memory(error) or isinstance(error, LossError | CantTell):
            return
        why = loss_error.why_not_taken(error, nest, size, samples)
        if self._loss.gives_pairs or not self._cuts:
            raise CantTell(why) from error
        raise LossError(
            f"{self._loss.name} can't be checked: {why}", fix=loss_error.ADVICE
        ) from error

    def _draws(self) -> None:
        """It draws other random numbers for each part."""
        self._trusted = True
        self.notes += loss_error.draws(self._loss) if self._cuts else []

    def _look_at_read(self, read: list[Tensor], nest: Nest, samples: int) -> None:
        """What the loss reads can't be cut.

        Raises:
            LossError: and it gives a scalar.
        """
        for what, its in zip(("outputs", "targets"), nest, strict=True):
            named = {
                name: t.shape for name, t in named_tensors(its) if any(t is one for one in read)
            }
            if what == "outputs":
                self.reads = tuple(dict.fromkeys((*self.reads, *named)))
            for name, shape in named.items():
                called = f' "{name}"' if name else ""
                reads = (
                    f"{what}{called} {tuple(shape)}, without one row for each of the "
                    f"{samples} samples"
                )
                self._refuse_scalar(
                    reads, loss_error.OWN_LOSS if name == "loss" else loss_error.ADVICE
                )

    def _refuse_scalar(self, reads: str, advice: str = loss_error.ADVICE) -> None:
        if self._cuts and not self._loss.gives_pairs:
            raise LossError(f"{self._loss.name} can't be checked: it reads {reads}", fix=advice)

    # ---- the verdict -----------------------------------------------------------------------------

    def _still_wrong(self, nest: Nest, whole: Piece, wrong: Sum, closer: bool) -> Sum | None:
        """What is wrong in float64 too, and where a loss that counts its calls, say, doesn't see
        that it is called.
        """
        if (again := self._in_double(nest, whole.samples, closer)) is None:
            return wrong
        if (wrong_again := first_wrong(*again)) is None and not self._has_state:
            if self._loss.may_have_state:
                self.remembers()
            elif self._instead is None and not is_alike(self._loss.copied(), nest, whole):
                self._trust("it is another one where no gradients are computed")
        return wrong_again

    def _in_double(self, nest: Nest, samples: int, closer: bool) -> tuple[list[Sum], float] | None:
        """The sums in float64, with their tolerance; None where the loss can't compute in that."""
        kind = next((t.device.type for t in tensors(nest)), "cpu")
        in_double = doubled(nest)
        try:
            with torch.autocast(kind, enabled=False):
                sums = self._sums(in_double, samples, None, closer=closer, double=True)
        except (LossError, TypeError, RuntimeError) as error:
            if is_out_of_memory(error):
                raise
            return None
        return sums, tolerance_of(in_double, [of.whole.total for of in sums], waits=False)

    def _parts_apart(
        self, nest: Nest, samples: int, sums: list[Sum], tolerance: float, closer: bool
    ) -> dict[str, str]:
        """What to say of the parts of the loss that are no sums over samples, by their names."""
        names = {name for of in sums for piece in of for name in piece.parts} - self.said_parts
        wrong = parts_apart(names, sums, tolerance)
        if wrong and (again := self._in_double(nest, samples, closer)) is not None:
            wrong = parts_apart(wrong.keys(), *again)
        return {
            name: loss_error.part_not_additive(self._loss, name, of) for name, of in wrong.items()
        }

    def remembers(self, *, outside: bool = False) -> None:
        """The loss has changed what it holds; several threads may say so.

        What is held ``outside``, in a variable, no copy of the loss has for itself: then it is
        checked no more.
        """
        self._has_state = True
        self._trusted |= outside
        self.notes += [loss_error.remembers(self._loss, outside=outside)] if self._cuts else []

    def _doubles(self, nest: Nest, whole: Piece) -> bool:
        """Whether a scalar for every sample twice is twice as large; unknown beside a number of
        the whole batch.
        """
        size, twice = whole.samples, both_of(nest, whole.samples, nest, whole.samples)
        numbers = holds_numbers(nest[1], size) or holds_numbers(nest[0], size, in_tensors=False)
        if numbers or twice is None or self._loss.gives_pairs:
            return False
        with torch.no_grad(), kept_generators(nest), without_warnings(unless=self._cuts):
            total = float(self._loss.copied()(twice[0], twice[1], 2 * size)[0])
        return not is_apart(total, 2 * float(whole.total), 2 * float(whole.total), tolerance=1e-4)
