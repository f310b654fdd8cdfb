"""Shapes: what each replica sees of a batch, beside what is outside.

::

    with trace_shapes() as shapes:
        net(torch.randn(30, 10))
    print(shapes)

    call 1
    outside   float32(30, 10) -> float32(30, 5)
    cpu:0     float32(15, 10) -> float32(15, 5)
    cpu:1     float32(15, 10) -> float32(15, 5)
"""

from __future__ import annotations

import contextlib
import contextvars
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from lockstep.launch.devices import Device
from lockstep.tensors import pytree


@dataclass(frozen=True)
class ForwardShapes:
    """One forward.

    Attributes:
        size: the batch outside; None where nothing was cut.
        sizes: what each replica got of it, in order.
        rows: where, its inputs, its outputs; outside first, then each replica.
    """

    size: int | None
    sizes: tuple[int, ...]
    rows: tuple[tuple[str, str, str], ...]


@dataclass
class Shapes:
    """What was seen, printable.

    Attributes:
        calls: an entry for each forward of a ``DataParallel`` inside the ``with``, in order.
    """

    calls: list[ForwardShapes] = field(default_factory=list)

    def __str__(self) -> str:
        lines = []
        for number, call in enumerate(self.calls, start=1):
            lines.append(f"call {number}")
            lines += [f"{where:<8}  {inputs} -> {outputs}" for where, inputs, outputs in call.rows]
        return "\n".join(lines)


_traced: contextvars.ContextVar[Shapes | None] = contextvars.ContextVar(
    "lockstep_shapes", default=None
)


@contextlib.contextmanager
def trace_shapes() -> Iterator[Shapes]:
    """Note, for each forward of a ``DataParallel`` or ``data_parallel`` inside a ``with``, what its
    replicas see.

    Its numbers don't change. Outside of the ``with`` nothing is noted, and nothing is paid.
    """
    shapes = Shapes()
    token = _traced.set(shapes)
    try:
        yield shapes
    finally:
        _traced.reset(token)


def note(
    inputs: tuple[tuple[Any, ...], dict[str, Any]],
    shares: Sequence[tuple[tuple[Any, ...], dict[str, Any]]],
    outputs: Sequence[Any],
    whole: Any,
    devices: Sequence[Device],
    sizes: tuple[int, ...],
) -> None:
    """Add one forward to the table that is being made, if one is."""
    shapes = _traced.get()
    if shapes is None:
        return
    rows = [("outside", _arguments(*inputs), pytree.described(whole))]
    for device, (args, kwargs), output in zip(devices, shares, outputs, strict=True):
        rows.append((str(device), _arguments(args, kwargs), pytree.described(output)))
    shapes.calls.append(ForwardShapes(sum(sizes) if sizes else None, sizes, tuple(rows)))


def _arguments(args: tuple[Any, ...], kwargs: dict[str, Any]) -> str:
    named = [f"{name}={pytree.described(value)}" for name, value in kwargs.items()]
    return ", ".join([*map(pytree.described, args), *named]) or "nothing"
