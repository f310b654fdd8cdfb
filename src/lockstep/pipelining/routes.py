"""Routes: which stages a micro-batch visits, forwards and back, and the order of turns that follows from it.

The route is seen, not traced: the first micro-batch goes alone, and notes where it goes::

    straight     0F 1F 2F   2B 1B 0B
    U-Net        0F 1F 0F   0B 1B 0B        the decoder beside the encoder
    frozen stem  0F 1F 2F   2B 1B

A straight route, some visits left out perhaps, takes its turns by the schedule. For another one the turns are found by
letting the micro-batches go through stages that take equally long: a forward one tick, a backward two.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from difflib import SequenceMatcher

from lockstep.pipelining.schedule import Key, Route, Schedule, Visit, devices_of, greedy, straight


def whole(route: Route, stages: int) -> Route:
    """A straight route with the visits that it leaves out; another one as it is."""
    forwards = [visit.stage for visit in route if visit.kind == "F"]
    backs = [visit.stage for visit in route if visit.kind == "B"]
    return straight(stages) if _rises(forwards) and _rises(backs[::-1]) else route


def _rises(numbers: Sequence[int]) -> bool:
    return all(a < b for a, b in itertools.pairwise(numbers))


def merged(route: Route, other: Route) -> Route:
    """A short route that has the visits of both in their orders."""
    together: list[Visit] = []
    for kind in ("F", "B"):
        ours, theirs = ([v for v in r if v.kind == kind] for r in (route, other))
        for same, start, end, its_start, its_end in SequenceMatcher(None, ours, theirs, autojunk=False).get_opcodes():
            together += ours[start:end]
            if same != "equal":
                together += theirs[its_start:its_end]
    return tuple(together)


def orders_of(route: Route, schedule: Schedule, microbatches: int) -> list[list[Key]]:
    """For each device the visits in their order, as numbers within the route and of micro-batches.

    Args:
        route: of every micro-batch; made ``whole``.
        schedule: for the stages there are, and so many micro-batches.
        microbatches: how many go.
    """
    places = devices_of(schedule)
    if route == straight(len(places)):  # another one may be as long: 1F 0F 0B 1B
        at = {visit: i for i, visit in enumerate(route)}
        return [[(at[Visit(a.stage, a.kind)], a.microbatch) for a in actions] for actions in schedule]
    kinds = [action.kind for action in schedule[-1]]
    forward_first = microbatches > 1 and "B" not in kinds[: len(kinds) // 2]
    forwards = [i for i, visit in enumerate(route) if visit.kind == "F"]
    # A micro-batch starts while no more are under way than the schedule would have, or than it visits stages.
    held = itertools.accumulate(1 if action.kind == "F" else -1 for action in schedule[0] if action.stage == 0)
    most = microbatches if forward_first else max(*held, len(forwards))

    def may(i: int, microbatch: int, begun: Sequence[int]) -> bool:
        if route[i].kind == "B":
            return not forward_first or begun[forwards[-1]] == microbatches
        return i > 0 or microbatch - begun[-1] < most

    order = [places[stage] for stage in range(len(places))]
    return greedy(route, order, microbatches, lambda i, _: 1.0 if route[i].kind == "F" else 2.0, may)
