"""The shapes on each device in the first update: of what a replica's model is given, and gives.

A batch of 30 on two devices is 15 x 8 on each. Later updates cost nothing.
"""

from __future__ import annotations

import itertools
from typing import Any

from lockstep.data import Part
from lockstep.launch.observer import Observer
from lockstep.strategies.steps.step import Step
from lockstep.tensors.pytree import each, named_tensors

Shapes = dict[str, list[int]]
"""By the path to the tensor: ``logits``, ``hidden.2``, or "" where there is one only."""


class FirstStep(Observer):
    """Observes the next update of a step."""

    def __init__(self, step: Step) -> None:
        self._step = step
        self._forwards: dict[str, dict[str, Shapes]] = {}
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
            shapes = {"inputs": shapes_of(part.inputs), "outputs": shapes_of(outputs)}
            self._forwards[where] = shapes

    def done(self, devices: list[str]) -> list[dict[str, Any]]:
        """Return ``device``, ``inputs`` and ``outputs`` of each replica's first micro-batch, after
        the update; alike on each rank.

        Args:
            devices: the names of all ranks' devices; a replica has the name of its first one.
        """
        self._step.observers.remove(self)
        world = self._step.world
        places = sorted(self._forwards, key=lambda where: (len(where), where))
        of_ranks = world.gather_objects([self._forwards[where] for where in places])
        firsts = devices[:: world.layout.devices // world.layout.local_batches]
        # The devices without a sample are the last ones.
        found = zip(firsts, itertools.chain(*of_ranks), strict=False)
        return [{"device": device, **shapes} for device, shapes in found]


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


def line_of(devices: list[dict[str, Any]], microbatches: int) -> str | None:
    """Return ``each device: inputs 15 x 8, outputs 15 x 2``.

    Where devices differ, it is of the first; ``summary.json`` has the others. None where there is
    no tensor.
    """
    if not devices or not devices[0]["inputs"] or not devices[0]["outputs"]:
        return None

    first = devices[0]
    who = "each device"
    if len(devices) == 1 or any(one["inputs"] != first["inputs"] for one in devices):
        who = first["device"]
    if microbatches > 1:
        who += " in a micro-batch"
    return f"{who}: inputs {written(first['inputs'])}, outputs {written(first['outputs'])}"


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
