"""The first step, looked at once: shapes inside (a replica's share) and outside (the global batch).

A batch of 30 on two devices is 30 x 8 outside and 15 x 8 inside. Nothing of this costs a later step
anything.
"""

from __future__ import annotations

from typing import Any

from lockstep.data import Part
from lockstep.launch.observer import Observer
from lockstep.launch.world import World
from lockstep.strategies.steps.step import Step
from lockstep.tensors.pytree import each, named_tensors

Shape = list[int | list[int]]
"""A dimension that differs between devices is ``[smallest, largest]``."""

_LONG = 80
"""Characters beyond which the shapes inside are not said too."""

Shapes = dict[str, Shape]
"""By the way to the tensor: ``logits``, ``hidden.2``, or "" where there is one only."""


class FirstStep(Observer):
    """Listens to a step during its next update."""

    def __init__(self, step: Step) -> None:
        self._step = step
        self._seen: dict[str, tuple[int, Shapes, Shapes]] = {}
        step.observers.append(self)

    def forwarded(self, where: str, part: Part, outputs: Any) -> None:
        """Take note of a forward; replicas on threads do so at the same time."""
        if where in self._seen:
            return  # another micro-batch
        self._seen[where] = part.size, shapes_of(part.inputs), shapes_of(outputs)

    def done(self, world: World, devices: list[str], size: int) -> dict[str, Any]:
        """After the update on a global batch of ``size``: the shapes over all ranks and their
        devices, alike on each.

        Returns:
            ``inputs`` and ``outputs`` of the global batch, and of the first micro-batch in each
            replica, by the first of its ``devices``.
        """
        self._step.observers.remove(self)
        mine = [
            self._seen[where] for where in sorted(self._seen, key=lambda where: (len(where), where))
        ]
        found = [one for theirs in world.gather_objects(mine) for one in theirs]
        if not found:  # a strategy whose forward is its own
            return {"inputs": {}, "outputs": {}, "devices": []}
        firsts = devices[:: world.layout.devices // world.layout.local_batches]
        # Devices without a sample are the last ones.
        inside = [
            {"device": d, "inputs": given, "outputs": made}
            for d, (_, given, made) in zip(firsts, found, strict=False)
        ]
        sizes = [rows for rows, _, _ in found]
        return {
            "inputs": _together([given for _, given, _ in found], sizes, size),
            "outputs": _together([made for _, _, made in found], sizes, size),
            "devices": inside,
        }


def shapes_of(nest: Any) -> Shapes:
    """The shapes of all tensors in a nest, but for nested ones, whose rows are of different
    sizes.
    """
    unpacked = each(lambda t: t, nest, on_packed=lambda packed: {"data": packed.data})
    return {
        way: list(tensor.shape) for way, tensor in named_tensors(unpacked) if not tensor.is_nested
    }


def _together(every: list[Shapes], sizes: list[int], size: int) -> Shapes:
    """The shapes of the global batch, of ``size`` samples, where those of its shares are
    ``every``.
    """
    whole: Shapes = {}
    for name, first in every[0].items():
        alike = [
            shapes[name] for shapes in every if name in shapes and len(shapes[name]) == len(first)
        ]
        spans: Shape = [
            min(column) if len(set(column)) == 1 else [min(column), max(column)]
            for column in zip(*alike, strict=True)
        ]
        if (
            first
            and len(alike) == len(sizes)
            and all(s[0] == n for s, n in zip(alike, sizes, strict=True))
        ):
            spans[0] = size
        whole[name] = spans
    return whole


def line_of(shapes: dict[str, Any], micro_batches: int) -> str | None:
    """``inputs 30 x 8, outputs 30 x 2; each device: 15 x 8 -> 15 x 2``; None where there is no
    tensor to tell of.
    """
    if not shapes["inputs"] or not shapes["outputs"]:
        return None
    said = f"inputs {written(shapes['inputs'])}, outputs {written(shapes['outputs'])}"
    groups: dict[str, list[str]] = {}
    for one in shapes["devices"]:
        if one["inputs"] and one["outputs"]:
            groups.setdefault(f"{written(one['inputs'])} -> {written(one['outputs'])}", []).append(
                one["device"]
            )
    several = len(shapes["devices"]) > 1
    if not several and micro_batches == 1:
        return said
    if len(said) > _LONG:
        return f"{said}; summary.json has them for each device"
    of = " in a micro-batch" if micro_batches > 1 else ""
    if len(groups) == 1:
        return (
            f"{said}; {f'each device{of}' if several else 'each micro-batch'}: {next(iter(groups))}"
        )
    shown = [f"{_listed(devices)}{of}: {words}" for words, devices in groups.items()]
    return "; ".join([said, *(shown if len(shown) <= 4 else [*shown[:3], "..."])])


def written(shapes: Shapes) -> str:
    """``30 x 8``, ``(tokens 30 x 12, mask 30 x 12)``."""
    words = [
        f"{name} {_dimensions(shape)}" if not _is_number(name) else _dimensions(shape)
        for name, shape in shapes.items()
    ]
    shown = words if len(words) <= 4 else [*words[:3], f"... {len(words)} in all"]
    return shown[0] if len(words) == 1 else f"({', '.join(shown)})"


def _is_number(name: str) -> bool:
    return not name.replace(".", "").strip("0123456789")


def _dimensions(shape: Shape) -> str:
    sizes = [f"({d[0]} to {d[1]})" if isinstance(d, list) else str(d) for d in shape]
    return " x ".join(sizes) or "a scalar"


def _listed(devices: list[str]) -> str:
    return ", ".join(devices) if len(devices) <= 4 else f"{devices[0]}, ..., {devices[-1]}"
