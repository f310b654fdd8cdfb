"""The newest whole checkpoint, read on every rank."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from lockstep.checkpoint.folder import CheckpointFolder
from lockstep.checkpoint.index import Index, Split
from lockstep.errors import FolderError, LockstepError
from lockstep.launch.world import World


def load_newest(
    folder: Path, world: World, set_aside: Callable[[str], None], split: Split | None = None
) -> dict[str, Any]:
    """Read the newest whole checkpoint of a folder to the CPU; every rank calls this.

    Args:
        folder: of checkpoints, as rank 0 sees it. Where another rank doesn't, all of it is sent.
        world: the ranks.
        set_aside: called on rank 0 with a line for each checkpoint that is damaged.
        split: the tensors whose rows are shared out: this rank reads only its rows, where it sees
            the folder.

    Raises:
        FolderError: there is none.
    """
    found: tuple[Path, Index] | LockstepError | None = None
    if world.is_first:
        try:
            found = CheckpointFolder(folder.resolve()).newest(set_aside)
        except LockstepError as error:
            found = error
    found = world.broadcast_object(found)
    if not isinstance(found, tuple):
        assert found is not None
        raise found
    path, index = found
    if all(world.gather_objects(_is_there(path, index))):
        state: dict[str, Any] = index.state(path, split)
        return state
    return world.broadcast_object(index.state(path) if world.is_first else {})


def _is_there(path: Path, index: Index) -> bool:
    """Return whether this host sees that very checkpoint."""
    try:
        return Index.read(path).files == index.files
    except FolderError:
        return False
