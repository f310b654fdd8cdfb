"""Arrays on disk, on any kind of disk."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest
import torch

from lockstep.errors import SaveError
from lockstep.tensors.array_file import Array, arrays_in_files, create, mapped, write_rows


def refuse(number: int) -> None:
    raise OSError(number, os.strerror(number))


def test_a_disk_that_reserves_no_room_is_written_to(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "posix_fallocate", lambda *_: refuse(errno.EOPNOTSUPP))
    arrays = arrays_in_files("", [Array("x", torch.float32, (3, 2))])
    create(tmp_path, arrays)
    rows = torch.arange(4.0).view(2, 2)
    write_rows(tmp_path, arrays[0], 1, rows)
    assert mapped(tmp_path, arrays)["x"].tolist() == [[0, 0], [0, 1], [2, 3]]


def test_a_full_disk_is_named_before_anything_is_computed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "posix_fallocate", lambda *_: refuse(errno.ENOSPC))
    arrays = arrays_in_files(".npy", [Array("x", torch.float32, (3, 2))])
    with pytest.raises(SaveError, match="the disk is full"):
        create(tmp_path, arrays)
