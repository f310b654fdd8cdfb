"""Parts of a batch draw the random numbers that the whole batch has drawn for their samples."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from lockstep.model.communication import communicates
from lockstep.strategies.sums.sums_of_pieces import Piece
from lockstep.tensors.pytree import tensors


class ReplayedDraws(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Keeps what the whole draws, and gives each part its rows of that.

    Args:
        whole: is computed first.
        watches: see below.

    Attributes:
        watches: whether operators are looked at; otherwise nothing is known of draws.
        formats: the number formats that were computed in.
        drawn: what the whole has drawn.
        is_lost: whether a part may have drawn what the whole has not: the numbers of its samples
            aren't known where several rows belong to each, or samples draw one by one.
        communicates: whether something was sent to other ranks.
    """

    def __init__(
        self,
        whole: Piece,
        *,
        watches: bool,
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._whole = whole
        self._piece = whole
        self.watches = watches
        self._at = 0
        self.formats: set[torch.dtype] = set()
        self.drawn: list[Tensor] = []
        self.is_lost = False
        self.communicates = False

    @contextlib.contextmanager
    def of(self, piece: Piece) -> Iterator[None]:
        """Compute a piece: forward, and backward, which may compute forward once more."""
        self._piece = piece
        self._at = 0
        with self if self.watches else contextlib.nullcontext():
            yield
        if piece is not self._whole and self._at != len(self.drawn):
            self.is_lost = True

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: Any = (),
        kwargs: Any = None,
    ) -> Any:
        """Call an operator, and replace what it draws.

        Args:
            func: the operator.
            types: of its arguments; not used.
            args: its arguments.
            kwargs: those given by name.
        """
        self.communicates |= communicates(func)
        at = _dropout_at(func)
        if at is not None and at < len(args):
            args = (*args[:at], 0.0, *args[at + 1 :])
        made = func(*args, **(kwargs or {}))
        self.formats.update(tensor.dtype for tensor in tensors(made))
        if torch.Tag.nondeterministic_seeded not in func.tags:
            return made

        name = func.overloadpacket.__name__
        if name == "native_dropout":
            inputs, rate = args[:2]
            mask = self._replaced(made[1])
            return inputs * mask / (1 - rate), mask
        if not isinstance(made, Tensor):
            return made
        draws_rows = name == "multinomial" and args[0].dim() == 1
        if (draws_rows or name == "randperm") and self._kept(made).shape != made.shape:
            # The numbers of samples of the whole mean nothing in a part.
            self._at += 1
            self.is_lost |= draws_rows
            return made
        return self._replaced(made)

    def _kept(self, drawn: Tensor) -> Tensor:
        """Return what the whole has drawn in the place of what is drawn now."""
        if self._at < len(self.drawn):
            return self.drawn[self._at]
        if self._piece is self._whole:
            self.drawn.append(drawn.clone())
            return drawn
        return torch.empty(0)

    def _replaced(self, drawn: Tensor) -> Tensor:
        rows = self._rows(self._kept(drawn), drawn)
        self._at += 1
        if rows.shape != drawn.shape:
            self.is_lost = True
            return drawn
        return drawn.copy_(rows)

    def _rows(
        self,
        kept: Tensor,
        drawn: Tensor,
    ) -> Tensor:
        """Return the rows of what the whole has drawn that are a part's."""
        for dim, (of_whole, of_part) in enumerate(zip(kept.shape, drawn.shape, strict=False)):
            if of_whole != of_part:
                rows = of_whole // self._whole.size
                self.is_lost |= rows != 1
                return kept.narrow(dim, rows * self._piece.start, rows * self._piece.size)
        return kept


@functools.cache
def _dropout_at(func: Any) -> int | None:
    """Return the place of an argument ``dropout_p``, of attention that draws in its kernel."""
    names = [argument.name for argument in func._schema.arguments]
    return names.index("dropout_p") if "dropout_p" in names else None
