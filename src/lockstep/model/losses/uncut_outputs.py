"""Uncut outputs: those without a row for each sample (the model's own loss, prototypes), in a
check of a loss.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import Any

from torch import Tensor, nn

from lockstep.model.losses.additivity import CantTell, Nest
from lockstep.tensors.pytree import each, named_tensors, parts, tensors
from lockstep.tensors.rows import folded, has_rows, holds_samples


class Uncut:
    """Those of one local batch.

    Args:
        nest: outputs and targets of so many samples.
        samples: their number.
        kinds: what outputs are that are known (`Seen`): one may have as many rows as there are
            samples by chance.
        gives_pairs: whether the loss does.

    Attributes:
        nest: as given, but for what is the same for any samples, which isn't cut: parameters.
        known: the kinds of those that are known, by their ids.
        floating: the tensors.
    """

    def __init__(
        self, nest: Nest, samples: int, kinds: Mapping[str, str], *, gives_pairs: bool
    ) -> None:
        self._names = {id(t): name for name, t in named_tensors(nest[0])}
        self.known = {number: kinds[name] for number, name in self._names.items() if name in kinds}
        self.constants = constants_in(nest, samples, self.known) if gives_pairs else set()
        found = without_rows(nest, samples, self.known)
        self.floating = [t for t in found if t.is_floating_point() and id(t) not in self.constants]
        self.nest: Nest = each(
            lambda t: nn.Parameter(t, requires_grad=False) if id(t) in self.constants else t, nest
        )

    def unread(self, reads: Collection[str], instead: float | None) -> list[Tensor]:
        """Those that the loss wasn't seen to read, where it reads some; of targets none."""
        if instead is None:
            return self.floating
        return [
            t for t in self.floating if id(t) in self._names and self._names[id(t)] not in reads
        ]


def without_rows(nest: Nest, samples: int, known: Collection[int]) -> list[Tensor]:
    """The tensors that aren't one row for each sample, nor parameters, and those with an id that
    is ``known``.
    """
    found: list[Tensor] = []

    def look(tensor: Tensor) -> Tensor:
        if (
            not (has_rows(tensor, samples) or isinstance(tensor, nn.Parameter))
            or id(tensor) in known
        ):
            found.append(tensor)
        return tensor

    each(
        look,
        folded(nest, samples) or nest,
        on_list=lambda items: items if holds_samples(items, samples) else None,
    )
    return found


def constants_in(nest: Nest, samples: int, kinds: Mapping[int, str]) -> set[int]:
    """The ids of outputs that are the same for any samples (a learned scale), and of targets
    without rows (weights).

    They are left as they are: with zeros in the place of a factor much would go unseen.
    """
    outputs, targets = map(tensors, nest)
    same = {id(t) for t in outputs if kinds.get(id(t)) == "same"}
    of_targets = [t for t in targets if not has_rows(t, samples)]
    return same if folded(nest, samples) is not None else same.union(map(id, of_targets))


def refuse_to_tell(nest: Nest, samples: int, instead: float | None) -> None:
    """Where totals and counts of parts don't add up, perhaps for another reason than the loss.

    Raises:
        CantTell: with the reason.
    """
    if folded(nest, samples) is not None:
        raise CantTell(
            "outputs have several rows for each sample, perhaps in another order than targets"
        )
    if instead == 1:
        raise CantTell(
            "it reads outputs without a row for each sample, and with ones in their place it isn't"
        )
    if _holds(
        nest[1],
        samples,
        lambda t: not (has_rows(t, samples) or (t.dim() == 1 and t.is_floating_point())),
    ):
        raise CantTell(
            "targets hold something that isn't one row for each sample, which parts are given as "
            "it is"
        )
    if _holds_counts(nest[0], samples):
        raise CantTell(
            "outputs hold a whole number, or one of Python's, which parts of the batch are given "
            "as it is"
        )


def holds_numbers(nest: Any, samples: int, *, in_tensors: bool = True) -> bool:
    """Whether it has a number that is no sample's (how many tokens the batch has, say), or a
    tensor of one.
    """
    return _holds(nest, samples, lambda tensor: in_tensors and not tensor.dim())


def _holds_counts(nest: Any, samples: int) -> bool:
    return _holds(
        nest,
        samples,
        lambda t: not (t.is_floating_point() or t.is_complex() or has_rows(t, samples)),
    )


def _holds(nest: Any, samples: int, is_one: Callable[[Tensor], bool]) -> bool:
    """Whether there is one of Python's numbers in it, or such a tensor."""
    if isinstance(nest, Tensor):
        return is_one(nest)
    if isinstance(nest, list) and holds_samples(nest, samples):
        return False
    return isinstance(nest, int | float) or any(
        _holds(part, samples, is_one) for part in parts(nest) or ()
    )


def with_value(nest: Nest, some: list[Tensor], value: float) -> Nest:
    """The nest with a number in the place of each element of some tensors."""
    if not some:
        return nest
    ids = set(map(id, some))
    made: Nest = each(lambda t: t.new_full((), value).expand(t.shape) if id(t) in ids else t, nest)
    return made
