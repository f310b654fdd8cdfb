"""Datasets of which only the inputs are wanted: for predicting, with or without targets."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.utils.data import Subset, TensorDataset

from lockstep.data.fetch import base_of, lookup_of
from lockstep.errors import InputError


def inputs_of(dataset: Any, name: str, *, whole: bool) -> Any:
    """The dataset as pairs of which the second is nothing of interest; the samples as they are where ``whole``.

    A ``Subset`` stays one, so that a sample draws the random numbers that it draws in evaluation.

    Args:
        dataset: map-style.
        name: what it is called in messages.
        whole: for a collate of the job, which is given the samples as they are.

    Raises:
        InputError: it has no length.
    """
    if not (hasattr(dataset, "__getitem__") and hasattr(dataset, "__len__")):
        raise InputError(
            f"{name}: a stream has no length, and predicting needs one: give a list of the samples, or a dataset with "
            "__getitem__ and __len__"
        )
    base, lookup = base_of(dataset), lookup_of(dataset)
    if whole or (type(base) is TensorDataset and len(base.tensors) == 2):
        return dataset
    if isinstance(base, torch.Tensor) and base.is_cpu:
        base = TensorDataset(base)
    if type(base) is TensorDataset and len(base.tensors) == 1:
        base = TensorDataset(base.tensors[0], torch.zeros(1).expand(len(base)))
    else:
        base = _Inputs(base, getattr(dataset, "draws_random", getattr(base, "draws_random", True)))
    return base if lookup is None else Subset(base, lookup.tolist())


class _Inputs:
    """Samples as ``(inputs, 0)``, whether or not they have targets."""

    def __init__(self, dataset: Any, draws_random: bool) -> None:
        self._dataset = dataset
        self.draws_random = draws_random
        if callable(at_once := getattr(dataset, "__getitems__", None)):
            self.__getitems__ = lambda indices: [(_inputs(sample), 0) for sample in at_once(indices)]

    def __len__(self) -> int:
        return len(self._dataset)

    def __getitem__(self, index: int) -> tuple[Any, int]:
        return _inputs(self._dataset[index]), 0


def _inputs(sample: Any) -> Any:
    return sample[0] if isinstance(sample, tuple | list) and len(sample) == 2 else sample


def inputs_collated(collate: Callable[[list[Any]], Any], samples: list[Any]) -> tuple[Any, Any]:
    """What a person's collate makes of the samples, with or without targets, as a pair."""
    return _inputs(collate(samples)), None
