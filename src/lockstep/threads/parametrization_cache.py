"""Parametrized: tensors that PyTorch computes as they are read, of which each replica caches its
own.

Inside ``torch.nn.utils.parametrize.cached()`` such a tensor is kept under the identity of the
module that it was registered on, which all its copies go by: every replica would compute with the
first one's, and send gradients through that one's graph. So a replica is of a class of its own,
that keeps them by replica.

(torch 2.11 to 2.13; to be deleted when PyTorch's key is the module that is read.)
"""

from __future__ import annotations

import contextlib
import functools
import threading
import types
from collections.abc import Iterator
from typing import Any

from torch import Tensor, nn
from torch.nn.utils import parametrize

_here = threading.local()


def cache_apart(copied: nn.Module, original: nn.Module | None = None) -> None:
    """Let a copy of a module cache parametrized tensors for itself; any other module stays as it
    is.

    Copies that each thread makes anew of one ``original`` go on with what the one before them has
    cached.
    """
    if "parametrizations" not in copied._modules:
        return
    object.__setattr__(copied, "_cached_as", id(copied if original is None else original))
    names = tuple(copied.parametrizations)  # type: ignore[arg-type]
    kind = type(copied)
    if vars(kind).get("_cached_apart") == names:
        return  # the copy of a copy
    made = vars(kind).get("_apart")
    if made is None or vars(made)["_cached_apart"] != names:
        made = _class_apart(kind, names)
        kind._apart = made  # type: ignore[attr-defined]  # PyTorch made that class for this one module
    object.__setattr__(copied, "__class__", made)


def _class_apart(kind: type, names: tuple[str, ...]) -> type:
    """A subclass of a parametrized module's class whose replicas read through ``_read``."""
    body: dict[str, Any] = {"_cached_apart": names, "__module__": kind.__module__}
    for name in names:
        body[name] = property(functools.partial(_read, name), functools.partial(_write, name))
    return types.new_class(kind.__name__, (kind,), exec_body=lambda made: made.update(body))


@contextlib.contextmanager
def uncached() -> Iterator[None]:
    """Meanwhile this thread's replicas cache nothing: each chunk of a batch goes backward
    through its own graph.
    """
    before = getattr(_here, "off", False)
    _here.off = True
    try:
        yield
    finally:
        _here.off = before


def _read(name: str, replica: Any) -> Tensor:
    compute = replica.parametrizations[name]
    if not parametrize._cache_enabled or getattr(_here, "off", False):
        return compute()  # type: ignore[no-any-return]
    # What it was made of lies there too, since that may be another tensor in each forward.
    cache: Any = parametrize._cache
    sources = list(compute.parameters())
    key = ("replica", replica._cached_as, threading.get_ident(), name)
    made_of, found = cache.get(key, ((), None))
    if [id(source) for source in made_of] != [id(source) for source in sources] or found is None:
        found = compute()
        cache[key] = sources, found
    return found  # type: ignore[no-any-return]


def _write(name: str, replica: Any, value: Tensor) -> None:
    replica.parametrizations[name].right_inverse(value)
