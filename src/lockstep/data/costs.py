"""What each sample costs, by which batches are cut: ``cut_by`` of a job."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from lockstep.errors import JobError, error_line


def costs_of(cut_by: Any, n: int) -> Callable[[Tensor], list[float]]:
    """Return a function that gives the costs of samples.

    Args:
        cut_by: the cost of each sample, or a function of its index.
        n: samples of the dataset.

    Raises:
        JobError: there isn't a cost for each sample. The function raises it, too: a cost isn't a
            number from 0.
    """
    if callable(cut_by):
        return lambda samples: _checked(_asked(cut_by, samples)).tolist()

    try:
        table = torch.as_tensor(cut_by, dtype=torch.float64, device="cpu")
    except Exception as error:
        raise JobError(f"cut_by: reading the costs raised {error_line(error)}") from error
    if table.shape != (n,):
        raise JobError(
            f"cut_by: costs of shape {tuple(table.shape)} were given, ({n},) is expected: a number "
            "for each sample"
        )

    table = _checked(table.clone())
    return lambda samples: table[samples].tolist()


def _asked(function: Callable[[int], Any], samples: Tensor) -> Tensor:
    costs = []
    for index in samples.tolist():
        try:
            costs.append(float(function(index)))
        except Exception as error:
            raise JobError(f"cut_by: for sample {index} it raised {error_line(error)}") from error
    return torch.tensor(costs, dtype=torch.float64)


def _checked(costs: Tensor) -> Tensor:
    """Refuse costs that can't be added up."""
    wrong = costs[~(costs.isfinite() & (costs >= 0))]
    if len(wrong):
        raise JobError(f"cut_by: a cost is {float(wrong[0])}, a number from 0 is expected")
    return costs
