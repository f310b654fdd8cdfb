"""The file that is to be written: its place is checked first, and it is made in a hidden folder beside
it.
"""

from __future__ import annotations

import tempfile
from pathlib import Path

from lockstep.errors import FolderError, InputError


def check_target(target: Path, overwrite: bool, endings: tuple[str, ...]) -> None:
    """Refuse a file of another ending, or one that is there already.

    Args:
        target: the file.
        overwrite: accept one that is there.
        endings: that it may have; "" for one that is added later.

    Raises:
        InputError, FolderError: with what is wrong.
    """
    if target.suffix not in endings:
        wanted = " or ".join(filter(None, endings))
        raise InputError(f"out: {target.name} should end in {wanted}")
    if target.is_dir():
        raise FolderError(f"{target}: out is a folder; name a file in it")
    endings = (target.suffix,) if target.suffix else (".npy", ".npz")
    for path in map(target.with_suffix, endings):
        if path.exists() and not overwrite:
            raise FolderError(
                f"{path}: it is there already; --overwrite replaces it, --out names another"
            )


def folder_beside(target: Path | None) -> Path:
    """Make a hidden folder on the disk of the target, or among the temporary files.

    Raises:
        FolderError: it can't be made there.
    """
    if target is None:
        return Path(tempfile.mkdtemp(prefix="lockstep-"))
    try:
        return Path(tempfile.mkdtemp(prefix=f".{target.name}.", suffix=".part", dir=target.parent))
    except FileNotFoundError:
        raise FolderError(f"{target.parent}: there is no such folder for out") from None
    except OSError as error:
        raise FolderError(
            f"{target}: can't be written: {error.strerror}; name another file with --out"
        ) from error
