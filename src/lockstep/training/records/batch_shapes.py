"""The first step's shapes: inside (a replica's share) and outside (the global batch).

A batch of 30 on two devices is 30 x 8 outside and 15 x 8 inside. Later steps cost nothing.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from lockstep.data import Part
from lockstep.launch.observer import Observer
from lockstep.strategies.steps.step import Step
from lockstep.tensors.pytree import each, named_tensors

Shapes = dict[str, list[int]]
"""By the path to the tensor: ``logits``, ``hidden.2``, or "" where there is one only."""


class _Forward(NamedTuple):
    """The samples and the shapes of one replica's first forward."""

    size: int
    inputs: Shapes
    outputs: Shapes


class FirstStep(Observer):
    """Observes the next update of a step."""

    def __init__(self, step: Step) -> None:
        self._step = step
        self._forwards: dict[str, _Forward] = {}
        step.observers.append(self)

    def forwarded(
        self,
        where: str,
        part: Part,
        outputs: Any,
    ) -> None:
        """Note the shapes of a replica's first micro-batch.

        Replicas on threads call this at the same time.
        """
        if where not in self._forwards:
            forward = _Forward(part.size, shapes_of(part.inputs), shapes_of(outputs))
            self._forwards[where] = forward

    def done(
        self,
        devices: list[str],
        size: int,
    ) -> dict[str, Any]:
        """Return the shapes over all ranks and devices, after the update; alike on each rank.

        Args:
            devices: the names of all ranks' devices.
            size: of the global batch.

        Returns:
            ``inputs`` and ``outputs`` of the global batch, and those of the first micro-batch in
            each replica, by the first of its ``devices``.
        """
        self._step.observers.remove(self)
        world = self._step.world
        places = sorted(self._forwards, key=lambda where: (len(where), where))
        of_ranks = world.gather_objects([self._forwards[where] for where in places])
        forwards = [forward for of_rank in of_ranks for forward in of_rank]
        if not forwards:  # a strategy whose forward is its own
            return {"inputs": {}, "outputs": {}, "devices": []}

        # The devices without a sample are the last ones.
        firsts = devices[:: world.layout.devices // world.layout.local_batches]
        inside = []
        for device, forward in zip(firsts, forwards, strict=False):
            shapes = {"device": device, "inputs": forward.inputs, "outputs": forward.outputs}
            inside.append(shapes)

        first = forwards[0]
        return {
            "inputs": _whole(first.inputs, first.size, size),
            "outputs": _whole(first.outputs, first.size, size),
            "devices": inside,
        }


def shapes_of(nest: Any) -> Shapes:
    """Return the shapes of all tensors in a nest, but for nested tensors, whose rows differ in
    size.
    """
    unpacked = each(lambda t: t, nest, on_packed=lambda packed: {"data": packed.data})
    shapes = {}
    for path, tensor in named_tensors(unpacked):
        if not tensor.is_nested:
            shapes[path] = list(tensor.shape)
    return shapes


def _whole(shapes: Shapes, samples: int, size: int) -> Shapes:
    """Return the shapes of the global batch.

    Args:
        shapes: those of the first share.
        samples: of the first share.
        size: the samples of the global batch.
    """
    whole: Shapes = {}
    for name, shape in shapes.items():
        if shape[:1] == [samples]:
            shape = [size, *shape[1:]]
        whole[name] = shape
    return whole


def line_of(shapes: dict[str, Any], microbatches: int) -> str | None:
    """Return ``inputs 30 x 8, outputs 30 x 2; each device: 15 x 8 -> 15 x 2``.

    Where devices differ, ``summary.json`` has the shapes on those after the first. None where there
    is no tensor.
    """
    if not shapes["inputs"] or not shapes["outputs"]:
        return None

    line = f"inputs {written(shapes['inputs'])}, outputs {written(shapes['outputs'])}"
    devices = shapes["devices"]
    if len(devices) <= 1 and microbatches == 1:
        return line

    first = devices[0]
    who = "each device" if len(devices) > 1 else "each micro-batch"
    if any(one["inputs"] != first["inputs"] for one in devices):
        who = first["device"]
    if microbatches > 1 and len(devices) > 1:
        who += " in a micro-batch"
    return f"{line}; {who}: {written(first['inputs'])} -> {written(first['outputs'])}"


def written(shapes: Shapes) -> str:
    """Return ``30 x 8``, ``(tokens 30 x 12, mask 30 x 12)``."""
    words = []
    for name, shape in shapes.items():
        is_number = not name.replace(".", "").strip("0123456789")
        words.append(_dimensions(shape) if is_number else f"{name} {_dimensions(shape)}")

    if len(words) == 1:
        return words[0]

    if len(words) > 4:
        words = [*words[:3], f"... {len(words)} in all"]
    return f"({', '.join(words)})"


def _dimensions(shape: list[int]) -> str:
    """Return ``30 x 8``."""
    return " x ".join(map(str, shape)) or "a scalar"
