"""Watched: what functions do in an inspected forward: what they drop, count, and write to."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from lockstep.tensors.pytree import tensors

_NO_WRITES = {"requires_grad_", "detach_", "share_memory_", "rename_"}
"""Functions that leave values as they are, though their names end with an underscore."""

NORMS = nn.modules.batchnorm._BatchNorm, nn.modules.instancenorm._InstanceNorm
"""Layers whose running statistics act in evaluation only."""

_OPERATORS = {"__setitem__", "__iadd__", "__isub__", "__imul__", "__itruediv__"}
"""Python's own, as a mode sees their names."""


def writes_in_place(name: str) -> bool:
    """Whether a function of tensors of that name writes to its first argument."""
    ends = name.endswith("_") and not name.endswith("__")
    return name in _OPERATORS or (ends and name not in _NO_WRITES)


class Watched(TorchFunctionMode):
    """Lets functions drop nothing; notes that, embeddings that scale gradients by frequency, and
    writes to parameters.

    Embeddings with ``max_norm`` write theirs where a row is longer, in whatever batch that is.

    Args:
        places: the names of parameters, by where their storage is.
    """

    def __init__(self, places: Mapping[int, str]) -> None:
        super().__init__()
        self._places = places
        self.counts_words = self.drops = False
        self.writes: str | None = None
        self.renorms: str | None = None

    def __torch_function__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        kwargs, name = dict(kwargs or {}), getattr(func, "__name__", "")
        for written in tensors((args[:1] if writes_in_place(name) else (), kwargs.get("out"))):
            if written.layout is torch.strided and not written.is_meta:
                self.writes = self.writes or self._places.get(written.untyped_storage().data_ptr())
        if kwargs.get("scale_grad_by_freq") or (
            func is torch.embedding and len(args) > 3 and args[3]
        ):
            self.counts_words = True
        if (
            kwargs.get("max_norm") is not None
            and len(args) > 1
            and isinstance(args[1], torch.Tensor)
        ):
            self.renorms = self.renorms or self._places.get(args[1].untyped_storage().data_ptr())
        if func is F.scaled_dot_product_attention and kwargs.get("dropout_p"):
            kwargs["dropout_p"], self.drops = 0.0, True
        elif kwargs.get("training") and kwargs.get(
            "p"
        ):  # F.dropout and its kin, which give these by name
            kwargs["training"], self.drops = False, True
        return func(*args, **kwargs)


def drops(module: nn.Module) -> bool:
    """Whether it is a layer that is known to draw."""
    if isinstance(module, nn.modules.dropout._DropoutNd):
        return module.p > 0
    return (
        isinstance(getattr(module, "dropout", None), float) and getattr(module, "dropout", 0.0) > 0
    )


def without_noise(copied: nn.Module) -> None:
    """Let dropout layers and batch norms of PyTorch's stay in evaluation mode, also where forward
    sets another.

    Of other classes with a rate of dropout ``Watched`` sees to that.
    """
    for module in copied.modules():
        is_of_torch = type(module).__module__.startswith("torch.")
        if (drops(module) and is_of_torch) or isinstance(module, NORMS):
            module.training = False
            module.train = _stays  # type: ignore


def _stays(mode: bool = True) -> None:
    """In the place of a layer's ``train``."""
