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


def agree(
    what: str, name: str, rank: int, size: int, waits: float, is_gone: Callable[[int], bool]
) -> None:
    """Wait until every rank is here with the same words.

    Args:
        what: the words.
        name: of this meeting, the same on every rank, and of no other meeting.
        rank: this one.
        size: how many ranks there are.
        waits: seconds, at most.
        is_gone: whether a rank has gone further, so that it won't come.

    Raises:
        InputError: another rank hasn't come, or with other words. The message is the same on all
            ranks, since any may be the first to fail.
    """
    store = dist.distributed_c10d._get_default_store()
    keys = [f"{name}/{number}" for number in range(size)]

    def missing(ranks: Iterable[int]) -> list[int]:
        return [number for number in ranks if not store.check([keys[number]])]

    store.set(keys[rank], what)
    end = time.monotonic() + waits
    while late := missing(range(size)):
        # (Asked again, since it may have come, and gone on, meanwhile.)
        gone = missing(filter(is_gone, late))
        if gone or time.monotonic() > end:
            ranks = gone or late
            named = f"rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))}"
            text = f"{what} must happen on every rank, but {named} continued without it"
            raise InputError(text)
        time.sleep(1e-3)

    calls = [store.get(key).decode() for key in keys]
    if len(set(calls)) > 1:
        call = next(one for one in calls if one != END_OF_CALLBACKS)
        other = next(number for number, one in enumerate(calls) if one != call)
        text = f"{call} must happen on every rank, but rank {other} reached {calls[other]}"
        raise InputError(text)
