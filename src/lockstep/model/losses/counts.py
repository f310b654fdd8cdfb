"""Counts: numbers of a whole batch that a loss divides by (``Job(counts=...)``).

::

    counts(targets)                 of each part of the batch: {"tokens": 21, "sentences": 4}
    summed                          over micro-batches, replicas and ranks
    loss(outputs, targets, counts)  the share of these outputs in the loss; shares add up

A loss of several means has several counts, so it isn't one (total, count).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lockstep.errors import JobError
from lockstep.tensors.placing import place_of
from lockstep.tensors.pytree import tensors, to_device

Shapes = dict[str, tuple[int, ...]]
"""The shapes of numbers, by name; most are scalars, ()."""

NUM_ITEMS = "num_items_in_batch"
"""The number that a model of transformers divides the loss by, if it is given this argument."""


@dataclass(frozen=True)
class Counts:
    """The numbers of a batch, or of a part of it.

    Attributes:
        shapes: of the numbers.
        sums: float64: how many samples there are, and then the elements of all numbers.
        work: sums them over the ranks, where there are several.
    """

    shapes: Shapes
    sums: Tensor
    work: dist.Work | None = None

    @classmethod
    def of(
        cls,
        function: Callable[[Any], Any],
        targets: Any,
        samples: int,
        home: torch.device,
    ) -> Counts:
        """Count in the targets of some samples.

        Args:
            function: of the job.
            targets: of the samples.
            samples: how many these are.
            home: where the sums are; the host doesn't wait for an accelerator.

        Raises:
            JobError: the function gives no numbers by name.
        """
        numbers = function(targets)
        if not isinstance(numbers, Mapping):
            raise JobError(
                f"counts: a dict of numbers by name is expected, not a {type(numbers).__name__}"
            )
        shapes: Shapes = {}
        flat = [_scalar(samples, home).flatten()]
        for name in sorted(numbers):
            value = numbers[name]
            if not isinstance(value, int | float | Tensor):
                raise JobError(
                    f'counts: "{name}" is a {type(value).__name__}, a number or a tensor of '
                    "numbers is expected"
                )
            if not isinstance(value, Tensor):
                value = _scalar(value, home)
            shapes[name] = tuple(value.shape)
            flat.append(to_device(value.detach(), home, torch.float64).double().flatten())
        return cls(shapes, torch.cat(flat))

    @property
    def samples(self) -> float:
        """The number of samples; the host waits for an accelerator."""
        return float(self.sums[0])

    def on(self, nest: Any) -> tuple[Tensor, dict[str, Tensor]]:
        """Give the number of samples, and the other numbers by name.

        Args:
            nest: has tensors; the numbers are on their device, and in float64 if a tensor is,
                otherwise in float32.
        """
        if self.work is not None:
            self.work.wait()
        is_double = any(tensor.dtype == torch.float64 for tensor in tensors(nest))
        dtype = torch.float64 if is_double else torch.float32
        sums = to_device(self.sums, place_of(nest), dtype)
        samples, *numbers = sums.split([1, *map(math.prod, self.shapes.values())])
        found = {}
        for (name, shape), number in zip(self.shapes.items(), numbers, strict=True):
            found[name] = number.view(shape)
        return samples.view(()), found

    def given_to(self, model: nn.Module, inputs: Any) -> Any:
        """Add ``num_items_in_batch``, if it is counted, to inputs that are a dict.

        Args:
            model: takes the inputs.
            inputs: of some samples.
        """
        if NUM_ITEMS not in self.shapes or not isinstance(inputs, Mapping):
            return inputs
        _, numbers = self.on(next(model.parameters()))
        return {**inputs, NUM_ITEMS: numbers[NUM_ITEMS]}


def _scalar(value: float, home: torch.device) -> Tensor:
    return torch.full((), value, dtype=torch.float64, device=home)
