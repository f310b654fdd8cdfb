"""Live: how many bytes of tensors were alive at once, on each device or slot.

An accelerator counts its memory itself; of a CPU the operating system knows only pages, for the
whole process. Here a dispatch mode sees each tensor that an operator makes, and a weak reference
when its storage is freed::

    with LiveBytes() as live:
        loss_of(model(inputs), targets).backward()
    live.peak()          # of all together
    live.peak("cpu:1")   # of what slot 1 made

A slot owns what was made in its thread, the caller (``"cpu"``) what was made on the CPU elsewhere,
an accelerator what lies there. What was there before is not counted, nor what a kernel takes for
itself while it runs. It costs tens of microseconds for each operator: count in a run that isn't
timed.
"""

from __future__ import annotations

import contextlib
import threading
import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from lockstep.launch.devices import Device
from lockstep.threads.thread_context import Caller

_ALL = "all"

Follower = Callable[[Device], contextlib.AbstractContextManager[Any]]


@contextlib.contextmanager
def followed_by(make: Follower) -> Iterator[None]:
    """Have the threads of pools compute inside ``make(device)``: modes of PyTorch's are per
    thread.
    """
    run = Caller.run

    def following(self: Caller, function: Callable[[], Any], device: Device) -> Any:
        with make(device):
            return run(self, function, device)

    with mock.patch.object(Caller, "run", following):
        yield


class LiveBytes(contextlib.AbstractContextManager["LiveBytes"]):
    """Counts between the beginning and the end of a ``with``, in this thread and in all that
    compute for it.

    Args:
        caller: who owns what this thread makes on the CPU.
    """

    def __init__(self, caller: Device | str = "cpu") -> None:
        self._caller = str(caller)
        self._lock = threading.RLock()  # a storage may be freed while another one is counted
        self._known: dict[int, weakref.ref[Any]] = {}
        self._now: Counter[str] = Counter()
        self._highest: Counter[str] = Counter()
        self._stack = contextlib.ExitStack()

    def __enter__(self) -> LiveBytes:
        self._stack.enter_context(followed_by(self._mode_of))
        self._stack.enter_context(_Mode(self, self._caller))
        return self

    def __exit__(self, *error: object) -> None:
        self._stack.close()

    def peak(self, owner: Device | str = _ALL) -> int:
        """Find the most bytes alive at once: of one owner (``"cpu:0"``, ``"cuda:1"``), or of all
        together.
        """
        return self._highest[str(owner)]

    def _mode_of(self, device: Device) -> _Mode:
        return _Mode(self, str(device) if device.is_slot else self._caller)

    def add(self, tensor: Tensor, owner: str) -> None:
        """Count a tensor, which is alive from now on."""
        storage = tensor.untyped_storage()
        key = storage._cdata
        size = storage.nbytes()
        if not tensor.is_cpu:
            owner = str(tensor.device)
        with self._lock:
            if key in self._known or not size:
                return
            self._known[key] = weakref.ref(storage, lambda _: self._freed(key, owner, size))
            for counted in (owner, _ALL):
                self._now[counted] += size
                if self._now[counted] > self._highest[counted]:
                    self._highest[counted] = self._now[counted]

    def _freed(self, key: int, owner: str, size: int) -> None:
        with self._lock:
            del self._known[key]
            self._now[owner] -= size
            self._now[_ALL] -= size


class _Mode(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Count what each operator of its thread gives, that of backward too."""

    def __init__(self, live: LiveBytes, owner: str) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._live = live
        self._owner = owner

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = set(map(_key, _strided((args, kwargs))))
        made = func(*args, **(kwargs or {}))
        for tensor in _strided(made):
            if _key(tensor) not in given:
                self._live.add(tensor, self._owner)
        return made


def _key(tensor: Tensor) -> Any:
    """Tell a storage from others."""
    return tensor.untyped_storage()._cdata


def _strided(nest: Any) -> list[Tensor]:
    """Return the tensors of a nest that have one piece of memory."""
    found = [leaf for leaf in tree_leaves(nest) if isinstance(leaf, Tensor)]
    return [tensor for tensor in found if tensor.layout is torch.strided and not tensor.is_meta]
