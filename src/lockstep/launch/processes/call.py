"""What the ranks of a launch are given: the function, its arguments, and the surroundings of the
caller.

It lies in a file without a name that the caller writes once and every rank maps, however many ranks
and however large the arguments. Its head is the *board*, where each rank keeps the number of its
step for the caller to see, also when the rank has died without a word, and the caller whether they
are to stop::

    ranks: 8 bytes | step of rank 0: 8 bytes | step of rank 1 | ... | stop | Setup, pickled | (fn, args), pickled
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import io
import mmap
import operator
import os
import pickle
import sys
import tempfile
import types
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import IO, Any, NamedTuple

import torch

from lockstep.errors import InputError, first_line
from lockstep.launch.devices import Device, usable_cores

_LOOPBACK = "lo" if sys.platform == "linux" else "lo0"


class Modes(NamedTuple):
    """PyTorch's modes of a thread, in which another process is to compute for it."""

    grad: bool
    inference: bool
    autocast: tuple[tuple[str, bool, torch.dtype], ...]
    """By type of device: whether it is on, and to what."""

    @classmethod
    def here(cls, devices: tuple[Device, ...]) -> Modes:
        """Those of the calling thread."""
        kinds = sorted({"cpu"} | {device.type for device in devices})
        autocast = tuple(
            (kind, torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind))
            for kind in kinds
        )
        return cls(torch.is_grad_enabled(), torch.is_inference_mode_enabled(), autocast)

    @contextlib.contextmanager
    def entered(self) -> Iterator[None]:
        """Compute in them for a while."""
        with contextlib.ExitStack() as stack:
            if self.inference:
                stack.enter_context(torch.inference_mode())
            stack.enter_context(torch.set_grad_enabled(self.grad))
            for kind, enabled, dtype in self.autocast:
                if enabled:
                    stack.enter_context(torch.autocast(kind, dtype))
            yield


_FLAGS = tuple(
    f"{owner}.{name}"
    for owner, names in {
        "cuda.matmul": "allow_tf32 allow_fp16_reduced_precision_reduction "
        "allow_bf16_reduced_precision_reduction",
        "cudnn": "allow_tf32 enabled benchmark deterministic fp32_precision",
        **dict.fromkeys(
            ("cudnn.conv", "cudnn.rnn", "mkldnn.matmul", "mkldnn.conv", "mkldnn.rnn"),
            "fp32_precision",
        ),
        "cuda": "matmul.fp32_precision matmul.allow_fp16_accumulation",
    }.items()
    for name in names.split()
)
"""Of ``torch.backends``, in an order in which they can be set: PyTorch's old names of a setting
before its new ones.
"""


def _flag(name: str) -> Any:
    """Its value; None where PyTorch doesn't say it, because it was set under its new name and is
    asked by its old.
    """
    with contextlib.suppress(RuntimeError):
        return (
            operator.attrgetter(name)(torch.backends)
            if name
            else torch.get_float32_matmul_precision()
        )
    return None


def flags() -> dict[str, Any]:
    """PyTorch's settings of how products round."""
    return {name: _flag(name) for name in ("", *_FLAGS)}


def set_flags(wanted: dict[str, Any]) -> None:
    """Set them as ``flags`` found them."""
    if wanted[""] is not None:
        torch.set_float32_matmul_precision(wanted[""])
    for flag in _FLAGS:
        if wanted[flag] is not None and _flag(flag) != wanted[flag]:
            owner, _, name = flag.rpartition(".")
            setattr(operator.attrgetter(owner)(torch.backends), name, wanted[flag])


def _switches() -> dict[str, Any]:
    return {
        "dtype": torch.get_default_dtype(),
        "flags": flags(),
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "warns": torch.is_deterministic_algorithms_warn_only_enabled(),
    }


@dataclass(frozen=True)
class Setup:
    """The surroundings in which the function is called.

    Attributes:
        devices: of all ranks.
        modes: the caller's.
        rendezvous: the file where the ranks meet; no other launch has it. None for workers, which
            don't.
        backend: of the process group, or None for the device's own.
        folder: where the run keeps its files, or None.
        timeout: seconds after which a collective gives up.
        devices_per_rank: neighbours.
        environment, path, arguments, directory, cores: the caller's environment variables,
            ``sys.path``, ``sys.argv``, working directory and affinity.
        switches: the caller's settings of torch that change numbers.
    """

    devices: tuple[Device, ...]
    modes: Modes
    rendezvous: str | None = None
    backend: str | None = None
    folder: str | None = None
    timeout: float = 1800.0
    devices_per_rank: int = 1
    environment: dict[str, str] = field(
        # Local ranks talk over the loopback interface, and listen nowhere else.
        default_factory=lambda: {
            "THP_MEM_ALLOC_ENABLE": "1",
            **os.environ,
            "GLOO_SOCKET_IFNAME": _LOOPBACK,
            "NCCL_SOCKET_IFNAME": _LOOPBACK,
        }
    )
    path: list[str] = field(default_factory=lambda: list(sys.path))
    arguments: list[str] = field(default_factory=lambda: list(sys.argv))
    directory: str = field(default_factory=os.getcwd)
    cores: tuple[int, ...] = field(default_factory=usable_cores)
    switches: dict[str, Any] = field(default_factory=_switches)

    @property
    def groups(self) -> list[tuple[Device, ...]]:
        """The devices of each rank."""
        each = self.devices_per_rank
        return [self.devices[i : i + each] for i in range(0, len(self.devices), each)]

    def apply(self) -> None:
        """Make this process's surroundings the caller's."""
        os.environ.clear()
        os.environ.update(self.environment)
        sys.path[:] = self.path
        sys.argv[:] = self.arguments
        os.chdir(self.directory)
        if hasattr(os, "sched_setaffinity") and usable_cores() != self.cores:
            os.sched_setaffinity(0, self.cores)
        importlib.invalidate_caches()
        torch.set_default_dtype(self.switches["dtype"])
        set_flags(self.switches["flags"])
        torch.use_deterministic_algorithms(
            self.switches["deterministic"], warn_only=self.switches["warns"]
        )
        # The person's script is not imported here, and what it defines comes by value.
        sys.modules["__main__"] = types.ModuleType("__main__")


def write(setup: Setup, fn: Callable[..., Any], args: tuple[Any, ...]) -> IO[bytes]:
    """Write a call to a new file without a name; raises as `pickled`."""
    body = pickled(fn, args)
    file = tempfile.TemporaryFile()  # noqa: SIM115
    size = len(setup.groups)
    file.write(size.to_bytes(8, sys.byteorder) + bytes(8 * (size + 1)) + pickle.dumps(setup))
    file.write(body)
    file.flush()
    return file


class Call:
    """A call as read from its file, by a rank or, for the board, by the caller."""

    def __init__(self, number: int) -> None:
        self._map = mmap.mmap(number, 0)
        self.size = int.from_bytes(self._map[:8], sys.byteorder)
        self.board = memoryview(self._map)[8 : 16 + 8 * self.size].cast("q")

    def read(self) -> tuple[Callable[..., Any], tuple[Any, ...], Setup]:
        """Enter the caller's surroundings, and take the function and its arguments, which may
        need them.
        """
        self._map.seek(16 + 8 * self.size)
        setup: Setup = pickle.load(self._map)
        setup.apply()
        fn, args = pickle.load(self._map)
        return fn, args, setup


def dumps(value: Any) -> bytes:
    """A value by which the other process can make the same; what can't be imported there goes by
    value.
    """
    try:
        return pickle.dumps(value)  # ten times as fast, and enough for numbers and names
    except Exception:
        return _by_value(value)


def _by_value(value: Any) -> bytes:
    import cloudpickle

    memories: dict[int, _Memory] = {}

    class Pickler(cloudpickle.Pickler):  # type: ignore[misc]  # it has no types
        def reducer_override(self, held: Any) -> Any:
            if type(held) is torch.Tensor and _is_plain(
                held
            ):  # PyTorch's own would give each its memory
                storage = held.untyped_storage()
                memory = memories.setdefault(storage._cdata, _Memory(storage))
                place = (
                    held.dtype,
                    held.storage_offset(),
                    held.shape,
                    held.stride(),
                    held.requires_grad,
                )
                return _tensor_in, (memory, *place)
            if isinstance(held, functools._lru_cache_wrapper) and held.__module__ == "__main__":
                return _cached, (held.__wrapped__, held.cache_parameters())
            if type(held) is functools.cached_property:  # that of Python 3.11 has a lock
                return _cached_property, (held.func, held.attrname)
            if isinstance(held, types.FunctionType) and held.__module__ != "__main__":
                module = sys.modules.get(held.__module__)
                if held.__globals__ is getattr(module, "__dict__", None):
                    # Of a function within a function: it shares what the module's classes use, and
                    # are sent by name.
                    self.globals_ref.setdefault(
                        id(held.__globals__), _Globals(__name__=held.__module__)
                    )
            if isinstance(held, types.CellType):
                return types.CellType, ()  # a function that closes over it fills it
            reduced = super().reducer_override(held)
            if (
                isinstance(held, types.FunctionType)
                and held.__closure__
                and isinstance(reduced, tuple)
            ):
                return _with_cells(held.__closure__, reduced)
            return reduced

    file = io.BytesIO()
    Pickler(file).dump(value)
    return file.getvalue()


def _is_plain(tensor: torch.Tensor) -> bool:
    """Whether it is no more than its memory, and where it lies there."""
    is_plain = (
        tensor.is_cpu
        and tensor.layout == torch.strided
        and tensor.is_leaf
        and not tensor.is_quantized
    )
    return is_plain and not (
        tensor.is_conj() or tensor.is_neg() or vars(tensor) or tensor._backward_hooks
    )


class _Memory:
    """What several tensors lie in, sent once."""

    def __init__(self, storage: torch.UntypedStorage) -> None:
        self.storage = storage

    def __reduce__(self) -> Any:
        held = torch.empty(0, dtype=torch.uint8).set_(self.storage)
        return _memory_with, (held.numpy().tobytes(),)


def _memory_with(data: bytes) -> _Memory:
    made = torch.empty(len(data), dtype=torch.uint8, device="cpu")  # aligned as PyTorch does
    if data:
        made.copy_(torch.frombuffer(bytearray(data), dtype=torch.uint8))
    return _Memory(made.untyped_storage())


def _tensor_in(
    memory: _Memory,
    dtype: torch.dtype,
    offset: int,
    size: Sequence[int],
    stride: Sequence[int],
    requires_grad: bool,
) -> torch.Tensor:
    with torch.no_grad():
        made = torch.empty(0, dtype=dtype, device="cpu").set_(memory.storage, offset, size, stride)
    return made.requires_grad_(requires_grad)


def _with_cells(cells: tuple[types.CellType, ...], reduced: tuple[Any, ...]) -> tuple[Any, ...]:
    """As cloudpickle reduces a function, which gives each its own cells: functions that share
    some still do so.
    """
    make, arguments, (state, slots), *_, restore = reduced
    given = restore, (state, {**slots, "__closure__": None}), [_content(cell) for cell in cells]
    return make, (*arguments[:4], cells), given, None, None, _restored


def _content(cell: types.CellType) -> list[Any]:
    """What a variable holds, alone in a list; an empty one where it isn't assigned yet."""
    with contextlib.suppress(ValueError):
        return [cell.cell_contents]
    return []


def _restored(function: Any, given: tuple[Callable[..., None], Any, list[list[Any]]]) -> None:
    restore, state, contents = given
    restore(function, state)
    for cell, content in zip(function.__closure__, contents, strict=True):
        for value in content:
            cell.cell_contents = value


class _Globals(dict[str, Any]):
    """Stands for the global variables of a module that the other process imports."""

    def __reduce__(self) -> Any:
        return _globals_of, (self["__name__"],)


def _globals_of(module: str) -> dict[str, Any]:
    try:
        return vars(importlib.import_module(module))
    except ImportError:  # a file that was loaded by its path
        return {"__name__": module}


def _cached(function: Callable[..., Any], settings: Any) -> Any:
    return functools.lru_cache(**settings)(function)


def _cached_property(function: Callable[[Any], Any], name: str) -> Any:
    made = functools.cached_property(function)
    made.__set_name__(object, name)
    return made


def pickled(fn: Callable[..., Any], args: tuple[Any, ...]) -> bytes:
    """A function and its arguments, by value.

    Raises:
        InputError: one of them can't be pickled, or is a model in shared memory; it says which.
    """
    given = [(f"args[{i}]", arg) for i, arg in enumerate(args)]
    for name, value in (*given, *(("the function", one) for one in closed_over(fn))):
        model = value if isinstance(value, torch.nn.Module) else torch.nn.Identity()
        if any(p.is_cpu and p.is_shared() for p in model.parameters()):  # type: ignore[no-untyped-call]
            raise InputError(
                f"{name} holds a model in shared memory, of which each rank would get a copy: "
                "make it in the function, "
                'or train it with strategy="hogwild"'
            )
    try:
        return _by_value((fn, args))
    except Exception as whole:
        for name, value in (("the function", fn), *given):
            try:
                _by_value(value)
            except Exception as error:
                raise InputError(
                    f"{name} ({_type_of(value)}) can't be sent to the ranks: {first_line(error)}: "
                    "make what it holds inside the function, on each rank"
                ) from error
        raise InputError(
            f"the function and its arguments can't be sent to the ranks: {first_line(whole)}"
        ) from whole


def closed_over(function: Any) -> list[Any]:
    """What a function holds of the variables around it."""
    cells = getattr(function, "__closure__", None) or ()
    return [value for cell in cells for value in _content(cell) if value is not None]


def _type_of(value: object) -> str:
    name = getattr(value, "__qualname__", None)
    return str(name) if isinstance(name, str) else f"a {type(value).__qualname__}"
