"""The index of a checkpoint: the file of each tensor's rows, and all values that aren't tensors."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open

from lockstep.checkpoint.checksummed_file import sha256_of
from lockstep.errors import FolderError, first_line
from lockstep.tensors.new_file import opened_new
from lockstep.tensors.row_shard import RowShard
from lockstep.tensors.state_tree import decoded

INDEX = "index.json"
_FORMAT = 1


def part_name(part: int, parts: int) -> str:
    """Return the name of a rank's file."""
    return f"rank-{part}-of-{parts}.safetensors"


def table_of(tensors: Mapping[str, torch.Tensor | RowShard]) -> dict[str, Any]:
    """Return the global shape of each tensor, by name, and which file has the rows from which on.

    Each rank's rows are in its own file, any other tensor is in the first rank's.
    """
    table = {}
    for name, tensor in tensors.items():
        rows = []
        start = 0
        for part, size in enumerate(tensor.sizes if isinstance(tensor, RowShard) else [1]):
            if size:
                rows.append({"part": part, "start": start})
            start += size
        table[name] = {"shape": list(tensor.shape), "rows": rows}
    return table


@dataclass
class Index:
    """What a checkpoint has: files, tensors, and the rest.

    Attributes:
        files: by name, bytes and SHA-256.
        tensors: as ``table_of`` gives them.
        tree: as ``tensors.state_tree`` gives it.
        about: a few plain values to list it by: ``step``, ``epoch``.
    """

    files: dict[str, Any]
    tensors: dict[str, Any]
    tree: Any
    about: dict[str, Any]

    def write(self, folder: Path) -> None:
        """Write the index, with a hash of its own.

        Raises:
            OSError: it can't be written.
        """
        text = json.dumps({"format": _FORMAT, **vars(self)})
        with opened_new(folder / INDEX) as file:
            file.write(f'{{"sha256": "{_sum_of(text)}",\n"index": {text}}}\n'.encode())

    @classmethod
    def read(cls, folder: Path) -> Index:
        """Read the index in a folder.

        Raises:
            FolderError: it can't be read, or isn't as it was written.
        """
        path = folder / INDEX
        try:
            whole = json.loads(path.read_text())
            body = whole["index"]
            if whole["sha256"] != _sum_of(json.dumps(body)):
                raise FolderError(f"{path}: it isn't as it was written")
            written_format = body.pop("format")
            if written_format != _FORMAT:
                raise FolderError(f"{path}: written by a newer Lockstep (format {written_format})")
            return cls(**body)
        except FileNotFoundError:
            raise FolderError(f"{path}: it isn't there") from None
        except (OSError, ValueError, KeyError, TypeError) as error:
            why = first_line(error)
            raise FolderError(f"{path}: it isn't as it was written ({why})") from error

    def check(self, folder: Path) -> None:
        """Read every file once and compare its hash.

        Args:
            folder: of the checkpoint.

        Raises:
            FolderError: one is missing, cut or changed.
        """
        paths = [folder / name for name in self.files]
        with ThreadPoolExecutor(min(4, len(paths))) as pool:
            list(pool.map(self._check_file, paths))

    def _check_file(self, path: Path) -> None:
        """Compare size and hash of a file with what was written.

        Raises:
            FolderError: it isn't there, can't be read, or has changed.
        """
        size, summed = self.files[path.name]
        try:
            now = path.stat().st_size
            if now != size:
                raise FolderError(f"{path}: it has {now:,} bytes instead of {size:,}")
            if sha256_of(path) != summed:
                raise FolderError(f"{path}: the checksum does not match")
        except FileNotFoundError:
            raise FolderError(f"{path}: it isn't there") from None
        except OSError as error:
            raise FolderError(f"{path}: it can't be read ({error.strerror})") from error

    def state(self, folder: Path, split: Split | None = None) -> Any:
        """Read the state to the CPU.

        Args:
            folder: of the checkpoint.
            split: which tensors this rank reads some rows only of; None reads all.
        """
        return decoded(self.tree, Reader(self, folder, split))


Split = Callable[[str, Sequence[int]], "tuple[tuple[int, ...], int] | None"]
"""Maps a tensor's name and shape to how many rows each rank has, and this rank; None where each
has all of them.
"""


class Reader(dict[str, Any]):
    """The tensors of a checkpoint by name, each read when it is asked for."""

    def __init__(self, index: Index, folder: Path, split: Split | None = None) -> None:
        super().__init__()
        self._index = index
        self._folder = folder
        self._split = split
        self._files: dict[int, Any] = {}

    def __missing__(self, name: str) -> torch.Tensor | RowShard:
        split = None
        if self._split is not None:
            split = self._split(name, self._index.tensors[name]["shape"])
        if split is None:
            return self.rows(name)
        sizes, rank = split
        start = sum(sizes[:rank])
        return RowShard(self.rows(name, start, start + sizes[rank]), sizes, rank)

    def rows(self, name: str, start: int = 0, end: int | None = None) -> torch.Tensor:
        """Join some rows of a tensor, from whichever files have them; nothing else is read.

        Args:
            name: of the tensor.
            start: the first row.
            end: the row after the last one; None is the end.
        """
        found = []
        for one in self._index.tensors[name]["rows"]:
            # It is mapped from the file, so that only the rows that are copied are read.
            rows = self._file(one["part"]).get_tensor(name)
            if end is not None:
                first = one["start"]
                rows = rows[max(start - first, 0) : max(end - first, 0)]
            found.append(rows)
        return torch.cat(found) if len(found) > 1 else found[0].clone()

    def _file(self, part: int) -> Any:
        """Return a file, which is opened once."""
        if part not in self._files:
            path = self._folder / part_name(part, len(self._index.files))
            self._files[part] = safe_open(path, framework="pt")
        return self._files[part]


def _sum_of(text: str) -> str:
    """Return the SHA-256 of a text."""
    return hashlib.sha256(text.encode()).hexdigest()
