"""Parts of a batch draw the random numbers that the whole batch has drawn for their samples."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from lockstep.model.communication import communicates
from lockstep.strategies.sums.sums_of_pieces import Piece
from lockstep.tensors.pytree import tensors

_COARSER = [torch.float64, torch.float32, torch.float16, torch.bfloat16]
"""Number formats, from the finest to the coarsest."""


class ReplayedDraws(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Keeps what the whole draws, and gives each part its rows of that.

    Args:
        samples: of the whole.
        formats: the number formats that are known to be computed in.
        watches: whether to look at all operators.

    Attributes:
        watches: whether operators are looked at; otherwise nothing is known of draws.
        is_lost: whether a part may have drawn what the whole has not: the numbers of its samples
            aren't known where several rows belong to each, or samples draw one by one.
        communicates: whether something was sent to other ranks.
    """

    def __init__(self, samples: int, formats: set[torch.dtype], *, watches: bool) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._samples = samples
        self._formats = formats
        self._drawn: list[Tensor] = []
        self._in_forward = 0  # how many of them forward has drawn
        self._records = True
        self._at = 0
        self._start = 0
        self._size = samples
        self.watches = watches
        self.is_lost = False
        self.communicates = False

    @property
    def has_drawn(self) -> bool:
        """Whether the whole has drawn random numbers."""
        return bool(self._drawn)

    @property
    def coarsest(self) -> torch.dtype:
        """The coarsest format of floating numbers that was computed in."""
        real = {dtype.to_real() for dtype in self._formats}
        for dtype in reversed(_COARSER):
            if dtype in real:
                return dtype
        return torch.float64

    @contextlib.contextmanager
    def forward(self, piece: Piece) -> Iterator[None]:
        """Compute forward of a piece; the first one is the whole, which is recorded."""
        self._records = not self._drawn and piece.size == self._samples
        self._start = piece.start
        self._size = piece.size
        self._at = 0
        with self if self.watches else contextlib.nullcontext():
            yield
        if self._records:
            self._in_forward = len(self._drawn)
        elif self._at != self._in_forward:
            self.is_lost = True

    @contextlib.contextmanager
    def backward(self) -> Iterator[None]:
        """Compute backward of the same piece, which may compute forward once more, and draw again:
        parts do so where the whole does.
        """
        draws = self._records or len(self._drawn) > self._in_forward
        with self if self.watches and draws else contextlib.nullcontext():
            yield

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Call an operator, and replace what it draws.

        Args:
            func: the operator.
            types: of its arguments; not used.
            args: its arguments.
            kwargs: those given by name.
        """
        del types
        kind = _kind_of(func)
        self.communicates |= kind.communicates
        at = kind.dropout_at
        if at is not None and at < len(args):
            args = (*args[:at], 0.0, *args[at + 1 :])
        made = func(*args, **(kwargs or {}))
        for tensor in tensors(made):
            self._formats.add(tensor.dtype)
        if not kind.draws:
            return made

        if kind.name == "native_dropout":
            inputs, rate = args[:2]
            mask = self._replaced(made[1])
            return inputs * mask / (1 - rate), mask

        draws_rows = kind.name == "multinomial" and args[0].dim() == 1
        is_of_samples = draws_rows or kind.name == "randperm"
        if is_of_samples and not self._records and self._kept().shape != made.shape:
            # The numbers of samples of the whole mean nothing in a part.
            self._at += 1
            self.is_lost |= draws_rows
            return made
        if isinstance(made, Tensor):
            return self._replaced(made)
        return made

    def _kept(self) -> Tensor:
        """Return what the whole has drawn in the place of what comes next."""
        if self._at < len(self._drawn):
            return self._drawn[self._at]
        return torch.empty(0)

    def _replaced(self, drawn: Tensor) -> Tensor:
        if self._records:
            self._drawn.append(drawn.clone())
            return drawn
        rows = self._rows(self._kept(), drawn)
        self._at += 1
        if rows.shape != drawn.shape:
            self.is_lost = True
            return drawn
        return drawn.copy_(rows)

    def _rows(self, kept: Tensor, drawn: Tensor) -> Tensor:
        """Return the rows of what the whole has drawn that are a part's."""
        for dim in range(min(kept.dim(), drawn.dim())):
            if kept.shape[dim] == drawn.shape[dim]:
                continue
            rows = kept.shape[dim] // self._samples
            if rows != 1:
                self.is_lost = True
            return kept.narrow(dim, rows * self._start, rows * self._size)
        return kept


class _Kind(NamedTuple):
    """What is known of an operator.

    Attributes:
        name: its name.
        draws: whether it draws random numbers.
        communicates: whether it sends something to other ranks.
        dropout_at: the place of an argument ``dropout_p``, of attention that draws in its kernel.
    """

    name: str
    draws: bool
    communicates: bool
    dropout_at: int | None


@functools.cache
def _kind_of(func: Any) -> _Kind:
    dropout_at = None
    for place, argument in enumerate(func._schema.arguments):
        if argument.name == "dropout_p":
            dropout_at = place
    return _Kind(
        name=func.overloadpacket.__name__,
        draws=torch.Tag.nondeterministic_seeded in func.tags,
        communicates=communicates(func),
        dropout_at=dropout_at,
    )
