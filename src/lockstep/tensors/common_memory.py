"""Tensors in common memory that are several objects: ``nn.Parameter(other.t())``, and what it
was made of.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from lockstep.errors import StrategyError

Named = tuple[str, Tensor]
"""A parameter or buffer, with its name."""


def in_common_memory(named: Iterable[Named]) -> list[list[Named]]:
    """Find tensors whose memory overlaps.

    Returns:
        A list for each piece of memory that several tensors have, in the order of their addresses.
    """
    spans: dict[int, tuple[int, int, str, Tensor]] = {}
    for name, tensor in named:
        if _is_plain(tensor):
            start, end = _span(tensor)
            spans.setdefault(id(tensor), (start, end, name, tensor))

    groups: list[list[Named]] = []
    reach = 0
    for start, end, name, tensor in sorted(spans.values(), key=lambda span: span[:3]):
        if start >= reach:
            groups.append([])
        groups[-1].append((name, tensor))
        reach = max(reach, end)

    return [group for group in groups if len(group) > 1]


def _is_plain(tensor: Tensor) -> bool:
    """Return whether a tensor has memory of its own that can be told: no subclass, sparse or on
    meta.
    """
    if type(tensor) not in (Tensor, nn.Parameter) or tensor.layout != torch.strided:
        return False
    return bool(tensor.numel()) and not tensor.is_meta


def _span(tensor: Tensor) -> tuple[int, int]:
    """Return the addresses of a tensor's first byte, and of the byte after the last one."""
    start = tensor.data_ptr()
    last = 0  # the place of the last element
    for size, stride in zip(tensor.shape, tensor.stride(), strict=True):
        last += (size - 1) * stride
    return start, start + (last + 1) * tensor.element_size()


@contextmanager
def common_memory_unmoved(model: nn.Module) -> Iterator[None]:
    """Refuse to convert or move tensors in common memory meanwhile: each would get its own.

    Groups of tensors without a trained parameter are left alone.

    Args:
        model: whose parameters and buffers are converted or moved.

    Raises:
        StrategyError: tensors in common memory were moved; two are named.
    """
    before = _trained_in_common_memory(tensors_of(model))
    yield

    for names in before:
        if names not in _trained_in_common_memory(tensors_of(model)):
            raise StrategyError(
                f'"{names[0]}" and "{names[1]}" have memory in common without being one parameter, '
                "and can't be moved or converted together: give both modules the parameter itself, "
                "or clone it"
            )


def _trained_in_common_memory(named: Iterable[Named]) -> list[list[str]]:
    """Return the names of tensors in each piece of common memory that has a trained parameter."""
    found = []
    for group in in_common_memory(named):
        if any(isinstance(tensor, nn.Parameter) and tensor.requires_grad for _, tensor in group):
            found.append([name for name, _ in group])
    return found


def refuse_common_memory(named: Iterable[Named], strategy: str) -> None:
    """Refuse a trained parameter that has memory in common with another tensor.

    Args:
        named: parameters and buffers.
        strategy: the name of one that gives each tensor its own memory.

    Raises:
        StrategyError: with the names of both.
    """
    for name, other, *_ in _trained_in_common_memory(named):
        raise StrategyError(
            f'{strategy}: "{name}" and "{other}" have memory in common without being one '
            "parameter (by .data, detach() or a view), and each would get its own memory: give "
            "both modules the parameter itself, clone it, or use ddp"
        )


def tensors_of(model: nn.Module) -> Iterator[Named]:
    """Yield the model's parameters and buffers, by name."""
    return itertools.chain(model.named_parameters(), model.named_buffers())
