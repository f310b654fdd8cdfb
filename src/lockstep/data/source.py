"""The dataset of a job: given as it is, or by a callable that may have to make it first (a download, say)."""

from __future__ import annotations

from typing import Any

from torch.utils.data import IterableDataset

from lockstep.errors import JobError, told
from lockstep.world import World


def resolve(source: Any, world: World, name: str = "train_data") -> Any:
    """The map-style dataset that ``source`` is, or gives when it is called.

    A callable is called on the first rank of each node before the others, so that files are made once. Every rank has
    to call this; where one's callable raises, every rank raises.

    Args:
        source: an object with ``__getitem__`` and ``__len__``, or a callable without arguments that gives one.
        world: who else calls.
        name: the job's field, for messages.

    Raises:
        JobError: it is no map-style dataset, it is empty, or the callable raised.
    """
    if callable(source) and (isinstance(source, type) or not _is_map_style(source)):
        source = _called(source, world, name)
    if isinstance(source, IterableDataset) or (hasattr(source, "__iter__") and not _is_map_style(source)):
        raise JobError(
            f"{name}: a {type(source).__name__} can only be gone through, which is not yet supported: give a map-style "
            "dataset, with __getitem__ and __len__"
        )
    if not _is_map_style(source):
        raise JobError(f"{name}: a {type(source).__name__} is no dataset: it needs __getitem__ and __len__")
    try:
        length = len(source)
    except Exception as error:
        raise JobError(f"{name}: its length can't be told ({told(error)})") from error
    if not length:
        raise JobError(f"{name}: it is empty")
    return source


def _is_map_style(source: Any) -> bool:
    return hasattr(source, "__getitem__") and hasattr(source, "__len__") and not isinstance(source, IterableDataset)


def _called(source: Any, world: World, name: str) -> Any:
    """What the callable gives: the first rank of each node goes first, and all hear how it went."""
    made: Any = None
    for mine in (world.local_rank == 0, world.local_rank > 0):
        failure: Exception | None = None
        if mine:
            try:
                made = source()
            except Exception as error:
                failure = error
        # Also the barrier: the others wait here for the first, and learn whether to go on.
        for rank, said in enumerate(world.gather_objects(None if failure is None else told(failure))):
            if said is not None:
                where = f" on rank {rank}" if world.size > 1 else ""
                raise JobError(f"{name}: calling it{where} raised {said}") from failure
    return made
