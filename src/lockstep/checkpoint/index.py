"""The index of a checkpoint: which rows of which tensor are in which file, and all that is no
tensor.
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import json
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Self

import torch
from safetensors import safe_open

from lockstep.checkpoint.safe_file import sha256_of
from lockstep.errors import FolderError, first_line
from lockstep.tensors.array_file import SAFETENSORS_TYPES
from lockstep.tensors.new_file import opened_new
from lockstep.tensors.row_shard import RowShard
from lockstep.tensors.rows import share_sizes
from lockstep.tensors.state_tree import decoded

INDEX = "index.json"
_FORMAT = 1
_TYPES = {name: dtype for dtype, name in SAFETENSORS_TYPES.items()}


@dataclass(frozen=True)
class Rows:
    """Rows ``start`` to ``end`` of a tensor, in one file; the whole of it where ``end`` is None.

    Attributes:
        part: the number of the file.
    """

    part: int
    start: int = 0
    end: int | None = None

    def of(self, tensor: torch.Tensor | RowShard) -> torch.Tensor:
        """These rows of it."""
        if isinstance(tensor, RowShard):
            return tensor.local
        return tensor if self.end is None else tensor[self.start : self.end]


def shared_out(tensors: Mapping[str, torch.Tensor | RowShard], parts: int) -> dict[str, list[Rows]]:
    """Which rows each of so many files has of tensors of these shapes: about as many bytes each.

    Of a tensor whose rows are on several ranks each rank's file has its rows.
    """
    if parts == 1:
        return {name: [Rows(0)] for name in tensors}
    loads = [0] * parts
    found: dict[str, list[Rows]] = {}
    large = sum(
        tensor.nbytes for tensor in tensors.values() if isinstance(tensor, torch.Tensor)
    ) / (8 * parts)
    for name, tensor in tensors.items():
        if isinstance(tensor, RowShard):
            ends = itertools.accumulate(tensor.sizes)
            rows = zip(range(parts), tensor.sizes, ends, strict=True)
            found[name] = [Rows(part, end - size, end) for part, size, end in rows if size]
        elif tensor.nbytes > large and tensor.dim() and len(tensor) >= parts:
            found[name] = []
            start = 0
            for part, size in enumerate(share_sizes(len(tensor), parts)):
                found[name].append(Rows(part, start, start + size))
                loads[part] += size * (tensor.nbytes // len(tensor))
                start += size
        else:
            part = loads.index(min(loads))
            loads[part] += tensor.nbytes
            found[name] = [Rows(part)]
    return found


def part_name(part: int, parts: int) -> str:
    """The name of a rank's file."""
    return f"rank-{part}-of-{parts}.safetensors"


def table_of(
    tensors: Mapping[str, torch.Tensor | RowShard], rows: Mapping[str, list[Rows]]
) -> dict[str, Any]:
    """Type, global shape and rows of each tensor, by name."""
    return {
        name: {
            "dtype": SAFETENSORS_TYPES[tensor.dtype],
            "shape": list(tensor.shape),
            "rows": [asdict(one) for one in rows[name]],
        }
        for name, tensor in tensors.items()
    }


class Index:
    """What a checkpoint has: files by name, with their sizes and sums; tensors by name, with their
    rows; the rest.

    Attributes:
        files: by name, bytes and SHA-256.
        tensors: as ``table_of`` gives them.
        tree: as ``tensors.state_tree`` gives it.
        about: a few plain values to list it by: ``step``, ``epoch``.
    """

    def __init__(
        self, files: dict[str, Any], tensors: dict[str, Any], tree: Any, about: dict[str, Any]
    ) -> None:
        self.files, self.tensors, self.tree, self.about = files, tensors, tree, about

    def write(self, folder: Path) -> None:
        """Write it, with a sum of its own.

        Raises:
            OSError: it can't be written.
        """
        body = {
            "format": _FORMAT,
            "about": self.about,
            "files": self.files,
            "tensors": self.tensors,
            "tree": self.tree,
        }
        text = json.dumps(body)
        with opened_new(folder / INDEX) as file:
            file.write(f'{{"sha256": "{_sum_of(text)}",\n"index": {text}}}\n'.encode())

    @classmethod
    def read(cls, folder: Path) -> Index:
        """The index in a folder.

        Raises:
            FolderError: it can't be read, or isn't as it was written.
        """
        path = folder / INDEX
        try:
            whole = json.loads(path.read_text())
            body = whole["index"]
            if whole["sha256"] != _sum_of(json.dumps(body)):
                raise FolderError(f"{path}: it isn't as it was written")
            if body["format"] != _FORMAT:
                raise FolderError(f"{path}: written by a newer Lockstep (format {body['format']})")
            return cls(body["files"], body["tensors"], body["tree"], body["about"])
        except FileNotFoundError:
            raise FolderError(f"{path}: it isn't there") from None
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise FolderError(
                f"{path}: it isn't as it was written ({first_line(error)})"
            ) from error

    def check(self, folder: Path) -> None:
        """Read every file once and compare its sum.

        Raises:
            FolderError: one is missing, cut or changed.
        """
        with ThreadPoolExecutor(min(4, len(self.files))) as pool:
            list(pool.map(lambda name: self._check_file(folder / name), self.files))

    def _check_file(self, path: Path) -> None:
        size, summed = self.files[path.name]
        try:
            if (now := path.stat().st_size) != size:
                raise FolderError(f"{path}: it has {now:,} bytes, and {size:,} were written")
            if sha256_of(path) != summed:
                raise FolderError(f"{path}: its bytes aren't those that were written")
        except FileNotFoundError:
            raise FolderError(f"{path}: it isn't there") from None
        except OSError as error:
            raise FolderError(f"{path}: it can't be read ({error.strerror})") from error

    def state(self, folder: Path, split: Split | None = None) -> Any:
        """All of it, on the CPU; ``split`` says of which tensors only some rows are read."""
        with Reader(self, folder, split) as reader:
            return decoded(self.tree, reader)


Split = Callable[[str, Sequence[int]], "tuple[tuple[int, ...], int] | None"]
"""By a tensor's name and shape, how many rows of it each rank has, and this rank; None where it
has all of it.
"""


class Reader(dict[str, Any]):
    """The tensors of a checkpoint by name, each read when it is asked for, while in a ``with``.

    Attributes:
        bytes_read: those of all that were read.
    """

    def __init__(self, index: Index, folder: Path, split: Split | None = None) -> None:
        super().__init__()
        self._index, self._folder, self._split = index, folder, split
        self.bytes_read = 0
        self._stack = contextlib.ExitStack()
        self._files: dict[int, Any] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *of_an_error: object) -> None:
        self._stack.close()

    def __missing__(self, name: str) -> torch.Tensor | RowShard:
        split = (
            self._split(name, self._index.tensors[name]["shape"])
            if self._split is not None
            else None
        )
        if split is None:
            return self.rows(name)
        start = sum(split[0][: split[1]])
        return RowShard(self.rows(name, start, start + split[0][split[1]]), *split)

    def rows(self, name: str, start: int = 0, end: int | None = None) -> torch.Tensor:
        """Rows ``start`` to ``end`` of a tensor, a copy; nothing else is read."""
        found = self._rows(name, start, end)
        self.bytes_read += found.nbytes
        return found

    def _rows(self, name: str, start: int, end: int | None) -> torch.Tensor:
        about = self._index.tensors[name]
        found = []
        for part, first, last in ((one["part"], one["start"], one["end"]) for one in about["rows"]):
            if last is None and start == 0 and end is None:
                whole: torch.Tensor = self._file(part).get_tensor(name)
                return whole.clone()  # else it would be mapped from the file
            last = about["shape"][0] if last is None else last
            a, b = max(start, first), last if end is None else min(end, last)
            if a < b:
                found.append(self._file(part).get_slice(name)[a - first : b - first])
        return (
            torch.cat(found)
            if found
            else torch.empty(0, *about["shape"][1:], dtype=_TYPES[about["dtype"]])
        )

    def _file(self, part: int) -> Any:
        """A file that is opened once."""
        if part not in self._files:
            path = self._folder / part_name(part, len(self._index.files))
            self._files[part] = self._stack.enter_context(safe_open(path, framework="pt"))
        return self._files[part]


def _sum_of(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()
