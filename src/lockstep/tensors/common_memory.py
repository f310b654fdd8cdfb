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
from lockstep.tensors.pytree import is_lazy

Named = tuple[str, Tensor]


def in_common_memory(named: Iterable[Named]) -> list[list[Named]]:
    """Find tensors whose memory overlaps: a list for each piece of memory, in the order of their
    addresses.
    """
    spans: dict[int, tuple[int, int, str, Tensor]] = {}
    for name, tensor in named:
        is_plain = type(tensor) in (Tensor, nn.Parameter) and tensor.layout == torch.strided
        if is_plain and tensor.numel() and not tensor.is_meta:
            start = tensor.data_ptr()
            length = 1 + sum(
                (size - 1) * stride
                for size, stride in zip(tensor.shape, tensor.stride(), strict=True)
            )
            spans.setdefault(
                id(tensor), (start, start + length * tensor.element_size(), name, tensor)
            )
    groups: list[list[Named]] = []
    reach = 0
    for start, end, name, tensor in sorted(spans.values(), key=lambda span: span[:3]):
        if start >= reach:
            groups.append([])
        groups[-1].append((name, tensor))
        reach = max(reach, end)
    return [group for group in groups if len(group) > 1]


@contextmanager
def common_memory_kept(model: nn.Module) -> Iterator[None]:
    """Leave trained parameters in common memory, and others with them, that are converted or moved
    meanwhile.

    Raises:
        StrategyError: that can't be, since they are on several devices now, say.
    """
    groups = in_common_memory(
        [(name, tensor.detach()) for name, tensor in tensors_of(model) if not is_lazy(tensor)]
    )
    yield
    now = dict(tensors_of(model))
    for group in groups:
        is_trained = any(now[name].requires_grad for name, _ in group)
        if not is_trained or all(
            now[name].data_ptr() == before.data_ptr() for name, before in group
        ):
            continue
        (name, first), (other, _), *_ = group
        kinds = {
            (now[n].device, now[n].dtype, before.untyped_storage().data_ptr())
            for n, before in group
        }
        if len(kinds) > 1:
            raise StrategyError(
                f'"{name}" and "{other}" have memory in common without being one parameter, and '
                "can't be moved or "
                "converted together: give both modules the parameter itself, or clone it"
            )
        memory = (
            torch.empty(0, dtype=first.dtype, device=first.device)
            .set_(first.untyped_storage())
            .to(now[name])
        )
        for each, before in group:
            now[each].data = memory.as_strided(
                before.shape, before.stride(), before.storage_offset()
            )


def refuse_common_memory(named: Iterable[Named], strategy: str) -> None:
    """Refuse a parameter that is trained and has memory in common with another tensor, for a
    strategy that parts them.

    Raises:
        StrategyError: with the names of both.
    """
    for group in in_common_memory(named):
        (name, _), (other, _), *_ = group
        if any(isinstance(tensor, nn.Parameter) and tensor.requires_grad for _, tensor in group):
            raise StrategyError(
                f'{strategy}: "{name}" and "{other}" have memory in common without being one '
                "parameter (by .data, "
                "detach() or a view), and each would get its own memory: give both modules the "
                "parameter itself, clone "
                "it, or use ddp"
            )


def tensors_of(model: nn.Module) -> Iterator[Named]:
    """The model's parameters and buffers, by name."""
    return itertools.chain(model.named_parameters(), model.named_buffers())
