"""Numbers of bytes, as a person reads them."""

from __future__ import annotations


def size(count: float) -> str:
    """Return a number of bytes in three places: ``1.5 GiB``, ``300 KiB``, ``17 B``."""
    for unit, one in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if count >= one:
            form = ".3g" if count < 999.5 * one else ",.0f"
            return f"{count / one:{form}} {unit}"
    return f"{count:.0f} B"
