"""Numbers of bytes, as a person reads and writes them."""

from __future__ import annotations

import pytest

from lockstep.errors import InputError
from lockstep.tensors.byte_size import bytes_of, size


def test_sizes_are_said_in_three_places() -> None:
    said = [size(n) for n in (17, 2048, 1_500_000, 2**30 * 1.5, 2**30 * 1200)]
    assert said == ["17 B", "2 KiB", "1.43 MiB", "1.5 GiB", "1,200 GiB"]


def test_sizes_are_read_as_they_are_written() -> None:
    assert [bytes_of(word, "size") for word in ("8GiB", "1.5 MB", "300B", "7")] == [
        8 * 2**30,
        1_500_000,
        300,
        7,
    ]
    with pytest.raises(InputError, match="--memory a lot: write a size"):
        bytes_of("a lot", "--memory")
