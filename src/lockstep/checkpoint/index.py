"""The index of a checkpoint: the file of each tensor's rows, and all values that aren't tensors."""

from __future__ import annotations

import contextlib
import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Self

import torch
from safetensors import safe_open

from lockstep.checkpoint.checksummed_file import sha256_of
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
    """Rows of a tensor that are in one file.

    Attributes:
        part: the number of the file.
        start: the first row.
        end: the row after the last one; None for the whole tensor, which may have no rows.
    """

    part: int
    start: int = 0
    end: int | None = None

    def of(self, tensor: torch.Tensor | RowShard) -> torch.Tensor:
        """Return these rows of a tensor."""
        if isinstance(tensor, RowShard):
            return tensor.local
        return tensor if self.end is None else tensor[self.start : self.end]


def shared_out(tensors: Mapping[str, torch.Tensor | RowShard], parts: int) -> dict[str, list[Rows]]:
    """Assign rows of tensors to files: about as many bytes to each.

    ::

        a large tensor    | rank 0 | rank 1 | rank 2 |     equally many rows
        a RowShard        | rank 0   | rank 1 |            the rows that a rank has
        any other         | the one with the fewest bytes so far |

    Args:
        tensors: by name.
        parts: the number of files, one for each rank that writes.
    """
    if parts == 1:
        return {name: [Rows(0)] for name in tensors}
    nbytes = 0
    for tensor in tensors.values():
        if isinstance(tensor, torch.Tensor):
            nbytes += tensor.nbytes

    large = nbytes / (8 * parts)
    loads = [0] * parts
    found: dict[str, list[Rows]] = {}
    for name, tensor in tensors.items():
        if isinstance(tensor, RowShard):
            found[name] = _in_turn(tensor.sizes)
        elif tensor.nbytes > large and tensor.dim() and len(tensor) >= parts:
            found[name] = _in_turn(share_sizes(len(tensor), parts))
            for rows in found[name]:
                loads[rows.part] += rows.of(tensor).nbytes
        else:
            part = loads.index(min(loads))
            loads[part] += tensor.nbytes
            found[name] = [Rows(part)]
    return found


def _in_turn(sizes: Sequence[int]) -> list[Rows]:
    """Return rows for each file, one file after the other; none where a size is 0."""
    found = []
    end = 0
    for part, size in enumerate(sizes):
        start = end
        end += size
        if size:
            found.append(Rows(part, start, end))
    return found


def part_name(part: int, parts: int) -> str:
    """Return the name of a rank's file."""
    return f"rank-{part}-of-{parts}.safetensors"


def table_of(
    tensors: Mapping[str, torch.Tensor | RowShard], rows: Mapping[str, list[Rows]]
) -> dict[str, Any]:
    """Return type, global shape and rows of each tensor, by name."""
    table = {}
    for name, tensor in tensors.items():
        table[name] = {
            "dtype": SAFETENSORS_TYPES[tensor.dtype],
            "shape": list(tensor.shape),
            "rows": [asdict(one) for one in rows[name]],
        }
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
        with Reader(self, folder, split) as reader:
            return decoded(self.tree, reader)


Split = Callable[[str, Sequence[int]], "tuple[tuple[int, ...], int] | None"]
"""Maps a tensor's name and shape to how many rows each rank has, and this rank; None where each
has all of them.
"""


class Reader(dict[str, Any]):
    """The tensors of a checkpoint by name, each read when it is asked for, while in a ``with``."""

    def __init__(self, index: Index, folder: Path, split: Split | None = None) -> None:
        super().__init__()
        self._index = index
        self._folder = folder
        self._split = split
        self._stack = contextlib.ExitStack()
        self._files: dict[int, Any] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *of_an_error: object) -> None:
        self._stack.close()

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
        about = self._index.tensors[name]
        found = []
        for one in about["rows"]:
            first, last = one["start"], one["end"]
            if last is None and start == 0 and end is None:
                whole: torch.Tensor = self._file(one["part"]).get_tensor(name)
                return whole.clone()  # else it would be mapped from the file
            if last is None:
                last = about["shape"][0]
            begin = max(start, first)
            stop = last if end is None else min(end, last)
            if begin < stop:
                rows = self._file(one["part"]).get_slice(name)
                found.append(rows[begin - first : stop - first])
        if not found:
            return torch.empty(0, *about["shape"][1:], dtype=_TYPES[about["dtype"]])
        return torch.cat(found)

    def _file(self, part: int) -> Any:
        """Return a file, which is opened once."""
        if part not in self._files:
            path = self._folder / part_name(part, len(self._index.files))
            self._files[part] = self._stack.enter_context(safe_open(path, framework="pt"))
        return self._files[part]


def _sum_of(text: str) -> str:
    """Return the SHA-256 of a text."""
    return hashlib.sha256(text.encode()).hexdigest()
