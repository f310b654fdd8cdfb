"""Files that are never written through a link: whoever gave us the folder may have put one
there.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO


@contextlib.contextmanager
def opened_new(path: Path) -> Iterator[BinaryIO]:
    """Give a new file at this place, on the disk when the ``with`` ends; what was there, a link
    perhaps, is taken away.
    """
    path.unlink(missing_ok=True)
    with os.fdopen(
        os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o644), "w+b"
    ) as file:
        yield file
        file.flush()
        os.fsync(file.fileno())


def write_over(path: Path, content: str | bytes) -> None:
    """Write a file beside its place, then move it there; an OSError leaves the one before. A
    link is replaced.
    """
    beside = path.with_name(f".{path.name}.part")
    try:
        with opened_new(beside) as file:
            file.write(content.encode() if isinstance(content, str) else content)
        os.replace(beside, path)
    except OSError:
        with contextlib.suppress(OSError):
            beside.unlink(missing_ok=True)
        raise


def not_followed(path: str | Path, flags: int) -> int:
    """Return the ``opener`` of a file that is added to: an OSError where there is a link."""
    return os.open(path, flags | os.O_NOFOLLOW, 0o644)
