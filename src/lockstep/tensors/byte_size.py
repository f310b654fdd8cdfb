"""Numbers of bytes, as a person reads and writes them."""

from __future__ import annotations

import re

from lockstep.errors import InputError

_UNITS = {"b": 1, "kib": 2**10, "mib": 2**20, "gib": 2**30, "kb": 10**3, "mb": 10**6, "gb": 10**9}


def size(count: float) -> str:
    """Return a number of bytes in three places: ``1.5 GiB``, ``300 KiB``, ``17 B``."""
    for unit, one in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if count >= one:
            form = ".3g" if count < 999.5 * one else ",.0f"
            return f"{count / one:{form}} {unit}"
    return f"{count:.0f} B"


def bytes_of(word: str, name: str) -> int:
    """Return the number of bytes that ``8GiB`` or ``5GB`` is.

    Args:
        word: what the person wrote.
        name: the option, for messages.

    Raises:
        InputError: it is no size.
    """
    match = re.fullmatch(r"(\d*\.?\d+)\s*((?:[kmg]i?)?b)?", word.strip().lower())
    if match is None:
        raise InputError(f"{name} {word}: write a size: 8GiB, 500MiB")

    return int(float(match[1]) * _UNITS[match[2] or "b"])
