"""Parts of a batch draw the random numbers that the whole batch has drawn for their samples."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from lockstep.model.communication import communicates
from lockstep.tensors.pytree import tensors

COARSER = [torch.float64, torch.float32, torch.float16, torch.bfloat16]
"""Number formats, from the finest to the coarsest."""


class ReplayedDraws(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Keeps what the whole draws, and gives each part its rows of that.

    Args:
        samples: of the whole.
        layout: how numbers belong to samples, where several do to each: "rows", those of a sample
            lie together; "views", those of a first view of all samples come first, then those of a
            second one; "one by one", samples draw in a loop, each as often.

    Attributes:
        is_lost: whether a part has drawn what the whole has not.
        coarsest: the coarsest format of floating numbers that was computed in.
        communicates: whether something was sent to other ranks.
    """

    def __init__(self, samples: int, layout: str) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._samples = samples
        self._layout = layout
        self._drawn: list[Tensor] = []
        self._records = True
        self._at = 0
        self._start, self._stop = 0, samples
        self._kinds: dict[int, _Kind] = {}  # by the id of an operator
        self._formats: set[torch.dtype] = set()
        self.is_lost = False
        self.coarsest = torch.float64
        self.communicates = False

    @property
    def has_drawn(self) -> bool:
        """Whether the whole has drawn random numbers."""
        return bool(self._drawn)

    def replay(self, start: int, stop: int) -> None:
        """Begin with a piece, of these samples of the whole; the first one is the whole, which
        is recorded.
        """
        self._records = not self._drawn and (start, stop) == (0, self._samples)
        self._start, self._stop = start, stop
        self._at = 0
        if self._layout == "one by one":
            self._at = len(self._drawn) * start // self._samples

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Call an operator, and replace what it draws."""
        del types
        kind = self._kinds.get(id(func))
        if kind is None:
            kind = self._kinds[id(func)] = _Kind(func)
            self.communicates |= kind.communicates
        if kind.dropout_at is not None and kind.dropout_at < len(args):
            args = (*args[: kind.dropout_at], 0.0, *args[kind.dropout_at + 1 :])
        made = func(*args, **(kwargs or {}))
        self._note_formats(made)
        if not kind.draws:
            return made
        if kind.name == "randperm" and not self._records and self._shape_of_next() != made.shape:
            self._at += 1  # one over samples, whose rows mean nothing
            return made
        if kind.name == "native_dropout":
            mask = self._replaced(made[1])
            return args[0] * mask / (1 - args[1]), mask
        return self._replaced(made) if isinstance(made, Tensor) else made

    def _note_formats(self, made: Any) -> None:
        for tensor in (made,) if type(made) is Tensor else tensors(made):
            dtype = tensor.dtype
            if dtype in self._formats:
                continue
            self._formats.add(dtype)
            if dtype.is_floating_point or dtype.is_complex:
                of = dtype.to_real()
                if of in COARSER:
                    self.coarsest = max(self.coarsest, of, key=COARSER.index)

    def _shape_of_next(self) -> torch.Size | None:
        return self._drawn[self._at].shape if self._at < len(self._drawn) else None

    def _replaced(self, drawn: Tensor) -> Tensor:
        if self._records:
            self._drawn.append(drawn.clone())
            return drawn
        kept = self._drawn[self._at] if self._at < len(self._drawn) else torch.empty(0)
        self._at += 1
        rows = self._rows(kept, drawn)
        if rows is None:
            self.is_lost = True
            return drawn
        return drawn.copy_(rows)

    def _rows(self, kept: Tensor, drawn: Tensor) -> Tensor | None:
        """The rows of what the whole has drawn that are a part's; None where there are none."""
        for dim in range(min(kept.dim(), drawn.dim())):
            if kept.shape[dim] != drawn.shape[dim]:
                kept = self._of_part(kept, dim)
                break
        return kept if kept.shape == drawn.shape else None

    def _of_part(self, kept: Tensor, dim: int) -> Tensor:
        each_sample = kept.shape[dim] // self._samples
        size = self._stop - self._start
        if self._layout == "rows" or kept.shape[dim] != each_sample * self._samples:
            return kept.narrow(dim, each_sample * self._start, each_sample * size)
        shape = kept.shape
        views = kept.reshape(*shape[:dim], each_sample, self._samples, *shape[dim + 1 :])
        return views.narrow(dim + 1, self._start, size).flatten(dim, dim + 1)


class _Kind:
    """What is known of an operator.

    Attributes:
        name: its name.
        draws: whether it draws random numbers.
        communicates: whether it sends something to other ranks.
        dropout_at: the place of an argument ``dropout_p``, of attention that draws in its kernel.
    """

    def __init__(self, func: Any) -> None:
        self.name = func.overloadpacket.__name__
        self.draws = torch.Tag.nondeterministic_seeded in func.tags
        self.communicates = communicates(func)
        names = [argument.name for argument in func._schema.arguments]
        self.dropout_at = names.index("dropout_p") if "dropout_p" in names else None
