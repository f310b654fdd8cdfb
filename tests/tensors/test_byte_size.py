"""Numbers of bytes, as a person reads and writes them."""

from __future__ import annotations

from lockstep.tensors.byte_size import size


def test_sizes_are_said_in_three_places() -> None:
    said = [size(n) for n in (17, 2048, 1_500_000, 2**30 * 1.5, 2**30 * 1200)]
    assert said == ["17 B", "2 KiB", "1.43 MiB", "1.5 GiB", "1,200 GiB"]
