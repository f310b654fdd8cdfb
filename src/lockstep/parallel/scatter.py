"""Scatter: cut a batch along one dimension, a share for each device.

``torch.nn.parallel.scatter`` needs GPUs, cuts each tensor by itself (so that tensors of different
sizes come apart silently), and leaves out dataclasses. The chunk sizes here are the same.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from lockstep.errors import InputError
from lockstep.launch.devices import Device, Devices, parse
from lockstep.parallel import target_devices
from lockstep.tensors import pytree


def chunk_sizes(total: int, count: int) -> list[int]:
    """Cut ``total`` in at most ``count`` as ``torch.chunk`` does: 10 in 4 is 3, 3, 3, 1; 3 in 8 is
    1, 1, 1.
    """
    if not total:
        return []
    size = math.ceil(total / count)
    return [min(size, total - start) for start in range(0, total, size)]


def scatter(
    inputs: Any,
    target_gpus: Devices,
    dim: int = 0,
    *,
    sizes: Sequence[int] | None = None,
) -> Sequence[Any]:
    """Cut ``inputs`` along ``dim``, and bring each share to its device.

    The shares of a tensor are copies, on CPU devices too: a replica may change its share in place
    without disturbing others. Gradients of the shares come back to ``inputs``.

    Args:
        inputs: a tensor, or any nesting of tensors in lists, tuples, named tuples, mappings and
            dataclasses. Whatever isn't a tensor is shared by all; so is a tensor of 0 dimensions,
            which has nothing to cut.
        target_gpus: the devices, as ``lockstep.launch.devices.parse`` reads them or as a list.
        dim: the dimension to cut; the size along it is that of the batch, the same for all tensors.
        sizes: how many items each device gets, instead of the chunks of ``torch.chunk``. A 0 keeps
            its entry, with empty tensors in it; without ``sizes`` a batch smaller than the number
            of devices gives fewer entries.

    Returns:
        A tuple of tensors for a single tensor, else a list of nests of the same types: one for each
        device used.

    Raises:
        InputError: tensors whose sizes along ``dim`` differ, an empty batch; sparse or nested
            tensors, or a call inside a transform of ``torch.func``, for several devices.

    Source: https://docs.pytorch.org/docs/stable/generated/torch.nn.DataParallel.html
    """
    places = parse(target_gpus)
    shares = _shares(inputs, places, dim, sizes)
    if isinstance(inputs, Tensor):
        return tuple(shares)
    return shares


def scatter_kwargs(
    inputs: tuple[Any, ...],
    kwargs: Mapping[str, Any] | None,
    target_gpus: Devices,
    dim: int = 0,
) -> tuple[tuple[tuple[Any, ...], ...], tuple[dict[str, Any], ...]]:
    """Cut positional and keyword arguments together: as many of the one as of the other come out.

    Returns:
        The positional arguments of each device used, and its keyword arguments; both empty where
        there are none.
    """
    given = dict(kwargs or {})
    if not inputs and not given:
        return (), ()
    places = parse(target_gpus)
    both = _shares((tuple(inputs), given), places, dim)
    args, named = zip(*both, strict=True)
    return args, named


def refuse_uncuttable(inputs: Any) -> None:
    """Refuse sparse and nested tensors, which have no rows in memory."""
    for tensor in pytree.tensors(inputs):
        if not is_plain(tensor):
            kind = "nested tensor" if tensor.is_nested else f"tensor of {tensor.layout}"
            raise InputError(
                f"a {kind} can't be cut: give its to_padded_tensor(0.0) or to_dense(), or, if all "
                "replicas share it, keep it in the module as a buffer"
            )


def _refuse_transforms() -> None:
    """Refuse what follows a computation in the caller's thread only."""
    is_transformed = torch._C._are_functorch_transforms_active() or forward_ad._current_level >= 0
    is_traced = torch._C._get_tracing_state() is not None or torch.compiler.is_exporting()
    if is_transformed or is_traced:
        raise InputError(
            "torch.func's transforms, forward-mode derivatives, torch.jit.trace and torch.export "
            "don't follow a batch to the threads of replicas: give them the module itself "
            "(net.module)"
        )


def is_plain(tensor: Tensor) -> bool:
    """Return whether it has rows in memory."""
    return tensor.layout is torch.strided and not tensor.is_nested


def _shares(
    inputs: Any,
    places: tuple[Device, ...],
    dim: int,
    sizes: Sequence[int] | None = None,
) -> list[Any]:
    if len(places) > 1:
        refuse_uncuttable(inputs)
        _refuse_transforms()
    total = _batch_size(inputs, dim)
    homes = [device.torch for device in places]
    if len(places) == 1 and sizes is None:  # as it is: nothing is cut
        return [pytree.each(lambda tensor: target_devices.move(tensor, homes[0]), inputs)]
    if total is None:
        return _cut(inputs, homes, dim, [])

    if sizes is None:
        sizes = chunk_sizes(total, len(places))
    return _cut(inputs, homes[: len(sizes)], dim, list(sizes))


def _batch_size(inputs: Any, dim: int) -> int | None:
    """Find the size along ``dim`` that all tensors have; None where there is nothing to cut."""
    first: Tensor | None = None
    for tensor in pytree.tensors(inputs):
        if tensor.dim() == 0 or not is_plain(tensor):
            continue
        if not -tensor.dim() <= dim < tensor.dim():
            raise InputError(
                f"a tensor of shape {tuple(tensor.shape)} has no dimension {dim} to cut"
            )
        if first is None:
            first = tensor
        elif tensor.shape[dim] != first.shape[dim]:
            raise InputError(
                f"the tensors of a batch have different sizes along dimension {dim} (shapes "
                f"{tuple(first.shape)} and {tuple(tensor.shape)}): give them all the same size "
                "there, or keep what isn't part of the batch in the module"
            )
    if first is None:
        return None
    if first.shape[dim] == 0:
        raise InputError(
            f"a batch of 0 samples (shape {tuple(first.shape)}, dimension {dim}) can't be "
            "scattered: skip it"
        )
    return first.shape[dim]


def _cut(nest: Any, places: list[torch.device], dim: int, sizes: list[int]) -> list[Any]:
    if isinstance(nest, Tensor):
        if nest.dim() == 0:
            return [target_devices.move(nest, place) for place in places]
        shares = zip(torch.split(nest, sizes, dim), places, strict=True)
        return [share.to(p, copy=True, non_blocking=p.type != "cpu") for share, p in shares]
    inside = pytree.parts(nest)
    if not inside:
        return [nest for _ in places]
    columns = [_cut(part, places, dim, sizes) for part in inside]
    return [pytree.rebuilt(nest, row) for row in zip(*columns, strict=True)]
