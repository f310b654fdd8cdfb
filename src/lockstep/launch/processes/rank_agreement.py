"""Whether all ranks call the same: they meet by the store of the process group, which names late ones.

It is for what a person calls, perhaps on one rank only: a collective that some ranks don't come to
would end the process, or be taken for another one.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable

import torch.distributed as dist

from lockstep.errors import InputError

END_OF_CALLBACKS = "the end of callbacks"
"""What ranks meet at that have no call of a callback's to make."""


class Meeting:
    """One meeting of all ranks.

    Args:
        name: the same on every rank, and of no other meeting.
        rank: this one.
        size: how many ranks there are.
    """

    def __init__(self, name: str, rank: int, size: int) -> None:
        self._store = dist.distributed_c10d._get_default_store()
        self._name = name
        self._rank = rank
        self._size = size

    def wait(self, what: str, waits: float, is_gone: Callable[[int], bool]) -> None:
        """Wait until every rank is here with the same words.

        Args:
            what: the words.
            waits: seconds, at most.
            is_gone: whether a rank has gone further, so that it won't come.

        Raises:
            InputError: another rank hasn't come, or with other words.
        """
        self._store.set(self._key(self._rank), what)
        end = time.monotonic() + waits

        while late := self._missing(range(self._size)):
            # (Asked again, since it may have come, and gone on, meanwhile.)
            gone = self._missing(filter(is_gone, late))
            if gone or time.monotonic() > end:
                ranks = gone or late
                plural = "s" if len(ranks) > 1 else ""
                named = f"rank{plural} {', '.join(map(str, ranks))}"
                raise InputError(
                    f"{what} must happen on every rank, but {named} continued without it"
                )
            time.sleep(1e-3)

        self._compare([self._store.get(self._key(rank)).decode() for rank in range(self._size)])

    def _key(self, rank: int) -> str:
        return f"{self._name}/{rank}"

    def _missing(self, ranks: Iterable[int]) -> list[int]:
        """Return the ranks that haven't come."""
        return [rank for rank in ranks if not self._store.check([self._key(rank)])]

    def _compare(self, calls: list[str]) -> None:
        """Refuse ranks that came for something else.

        The words are the same on all ranks, since any may be the first to fail.

        Raises:
            InputError: two calls differ.
        """
        if len(set(calls)) == 1:
            return
        call = next(one for one in calls if one != END_OF_CALLBACKS)
        rank, other = next((rank, one) for rank, one in enumerate(calls) if one != call)
        raise InputError(f"{call} must happen on every rank, but rank {rank} reached {other}")
