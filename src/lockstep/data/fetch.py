"""Samples made into (inputs, targets), with random numbers that belong to the sample.

An augmentation draws from torch's, ``random``'s or numpy's global generator. Before each sample
these are seeded by (seed, epoch, index of the sample), so that it comes out the same whichever rank
or loader worker makes it, in a batch of any size. A dataset that hands out whole batches
(``TensorDataset``, ``__getitems__``) is asked for whole batches as long as it draws nothing, which
is detected by the generators' states.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import Subset, TensorDataset
from torch.utils.data._utils.collate import collate as put_together
from torch.utils.data._utils.collate import default_collate_fn_map

from lockstep.data.dataset_state import has_state
from lockstep.data.shares import COLLATE, EVALUATION, TRAINING, absorbed
from lockstep.errors import JobError, SampleError, error_line
from lockstep.tensors.digest import digest
from lockstep.tensors.pytree import described, own_copy, parts, to_device
from lockstep.tensors.seeding import kept_generators, kept_states, same, seed_all, states

Collate = Callable[[list[Any]], Any]
"""Makes ``(inputs, targets)`` of a list of samples."""

Pair = tuple[Any, Any]
"""Inputs and targets."""


class SampleMaker:
    """Makes samples of a dataset under random numbers that belong to them, and puts them together.

    ``draws_random = False`` on the dataset says that it draws no random numbers, which saves
    seeding.

    Args:
        dataset: of samples.
        seed: of the run.
        evaluation: whether random numbers are of the evaluation's stream.
        collate: as in ``AnyLoader``.
        name: the job's field, for messages.

    Attributes:
        dataset: what the samples come from.
    """

    def __init__(
        self,
        dataset: Any,
        *,
        seed: int = 0,
        evaluation: bool = False,
        collate: Collate | None = None,
        name: str = "train_data",
    ) -> None:
        self.dataset = dataset
        self._collate = collate
        self._name = name
        self._stream = absorbed(0, seed, EVALUATION if evaluation else TRAINING)
        self._draws = getattr(dataset, "draws_random", True)

    def _together(self, samples: list[Any], epoch: int, first: int) -> Pair:
        """Put samples together; what draws in it is seeded by the number of the first."""
        if self._collate is not None and self._draws:
            seed_all(absorbed(self._stream, epoch, first, COLLATE) >> 1)
        return together(samples, self._collate, self._name)


class Fetcher(SampleMaker):
    """Gives ``(inputs, targets)`` for indices of a map-style dataset.

    Args:
        given: a dataset, or a ``Subset`` of one.
        pin: whether the rows of a tensor dataset are to be in pinned memory.
        settings: of ``SampleMaker``.

    Attributes:
        tensors: inputs and targets of a tensor dataset, to be indexed directly; None otherwise.
    """

    def __init__(self, given: Any, *, pin: bool = False, **settings: Any) -> None:
        super().__init__(base_of(given), **settings)
        self.tensors: tuple[Tensor, Tensor] | None = None
        self._pin = pin
        self._lookup = lookup_of(given)
        self._whole = callable(getattr(self.dataset, "__getitems__", None))
        self._draws = getattr(given, "draws_random", self._draws)

        # Tensors draw nothing, but what puts samples together may.
        if type(self.dataset) is TensorDataset and self._collate is None:
            self._draws = False
            self.tensors = _pair_of_tensors(self.dataset, self._name)

    def __call__(self, epoch: int, shares: Sequence[Any]) -> list[Pair]:
        """Return inputs and targets of each share.

        The three random states are as before afterwards.

        Args:
            epoch: the number of the epoch.
            shares: the indices of each, of one sample at least; of a tensor dataset they may be
                tensors.

        Raises:
            SampleError: a sample raised; its index is named.
            JobError: samples aren't pairs, or can't be put together.
        """
        if self.tensors is not None:
            return [self._indexed(self.tensors, share) for share in shares]
        pairs = []
        with kept_states() if self._draws else nullcontext():
            for share in shares:
                samples = self._samples(epoch, share)
                (first,) = self._numbers(share[:1])
                pairs.append(self._together(samples, epoch, first))
        return pairs

    def with_parts(self, epoch: int, shares: Sequence[Sequence[int]]) -> list[Pair]:
        """Return inputs and targets of some samples, and of parts of them.

        Samples are fetched once. Generators that the dataset holds, and its state, are as before
        afterwards.

        Args:
            epoch: the number of the epoch.
            shares: the indices of all the samples, then those of each part.

        Raises:
            SampleError: a sample raised; its index is named.
            JobError: samples aren't pairs, or can't be put together.
        """
        if self.tensors is not None:
            return self(epoch, shares)

        whole = shares[0]
        state = self.dataset.state_dict() if has_state(self.dataset) else None
        pairs = []
        with kept_states(), kept_generators(self.dataset):
            by_index = dict(zip(whole, self._samples(epoch, whole), strict=True))
            for share in shares:
                copies = [own_copy(by_index[i]) for i in share]
                (first,) = self._numbers(share[:1])
                pairs.append(self._together(copies, epoch, first))

        if state is not None:
            self.dataset.load_state_dict(state)
        return pairs

    def _numbers(self, share: Sequence[int]) -> list[int]:
        """Return the indices of samples in the dataset under any ``Subset``."""
        if self._lookup is None:
            return list(share)
        found: list[int] = self._lookup[torch.as_tensor(share)].tolist()
        return found

    def _indexed(self, tensors: tuple[Tensor, Tensor], share: Any) -> Pair:
        """Return the rows of a tensor dataset that are a share."""
        at = torch.as_tensor(share)
        if self._lookup is not None:
            at = self._lookup[at]
        if not tensors[0].is_cpu:
            at = to_device(at, tensors[0].device)
        return _rows(tensors[0], at, self._pin), _rows(tensors[1], at, self._pin)

    def _samples(self, epoch: int, share: Sequence[int]) -> list[Any]:
        """Return the samples of some indices."""
        if self._whole:
            samples = self._at_once(epoch, share)
            if samples is not None:
                return samples
            self._whole = False
        return self._one_by_one(epoch, share)

    def _at_once(self, epoch: int, share: Sequence[int]) -> list[Any] | None:
        """Return the samples by one call, or None where they draw random numbers, which one seed
        for all would get wrong.
        """
        before = states() if self._draws else None
        try:
            samples = list(self.dataset.__getitems__(self._numbers(share)))
        except Exception as error:
            self._one_by_one(epoch, share)  # names the sample that raises
            shown = ", ".join(map(str, share[:3])) + ", ..." * (len(share) > 3)
            raise SampleError(
                f"{self._name}: fetching samples {shown} raised {error_line(error)}"
            ) from error
        if len(samples) != len(share):
            raise JobError(
                f"{self._name}: its __getitems__ gave {len(samples)} samples for {len(share)} "
                "indices"
            )
        return samples if before is None or same(before, states()) else None

    def _one_by_one(self, epoch: int, share: Sequence[int]) -> list[Any]:
        """Return the samples by a call for each, under random numbers of its own."""
        state = absorbed(self._stream, epoch)
        samples = []
        for index, number in zip(share, self._numbers(share), strict=True):
            if self._draws:
                seed_all(absorbed(state, number) >> 1)
            try:
                samples.append(self.dataset[number])
            except Exception as error:
                raise SampleError(
                    f"{self._name}: sample {index} raised {error_line(error)}"
                ) from error

        return samples


def _pair_of_tensors(dataset: TensorDataset, name: str) -> tuple[Tensor, Tensor]:
    """Return inputs and targets of all samples."""
    if len(dataset.tensors) != 2:
        raise JobError(
            f"{name}: its TensorDataset has {len(dataset.tensors)} tensors, (inputs, targets) is "
            "expected; for several inputs return ((a, b), targets), for model(a, b)"
        )

    return dataset.tensors


def _rows(tensor: Tensor, at: Tensor, pin: bool) -> Tensor:
    """Return some rows of a tensor, where it is, or in pinned memory."""
    if not tensor.is_cpu:
        own = at if at.device == tensor.device else to_device(at, tensor.device)
        return tensor.index_select(0, own)

    if not pin:
        return tensor.index_select(0, at)

    out = torch.empty((len(at), *tensor.shape[1:]), dtype=tensor.dtype, pin_memory=True)
    return torch.index_select(tensor, 0, at, out=out)


def number_of(nest: Any) -> int:
    """Return a number of 64 bits made of a sample, the same in each process."""
    inside = parts(nest)
    if inside is not None:
        state = len(inside)
        for part in inside:
            state = absorbed(state, number_of(part))
        return state

    if isinstance(nest, Tensor):
        sums = digest(nest)
        return 0 if sums is None else absorbed(*sums)

    if isinstance(nest, int | float | str | bytes):
        return zlib.crc32(repr(nest).encode())
    return zlib.crc32(nest.tobytes()) if hasattr(nest, "tobytes") else 0


def base_of(dataset: Any) -> Any:
    """Return the dataset under any ``Subset``s."""
    while type(dataset) is Subset:
        dataset = dataset.dataset
    return dataset


def lookup_of(dataset: Any) -> Tensor | None:
    """Return for a ``Subset`` (of a ``Subset`` ...) the index in the dataset below of each of its
    samples; for any other dataset None.
    """
    if type(dataset) is not Subset:
        return None
    given: Any = dataset.indices
    if isinstance(given, range):
        given = torch.arange(given.start, given.stop, given.step)

    taken = torch.as_tensor(given).to(torch.int64)
    below: Any = dataset.dataset
    deeper = lookup_of(below)
    if deeper is not None:
        return deeper[taken]

    from_the_end = taken < 0
    return torch.where(from_the_end, taken + len(below), taken) if from_the_end.any() else taken


def together(samples: list[Any], collate: Collate | None, name: str) -> Pair:
    """Return one ``(inputs, targets)`` of a list of samples.

    Inputs that are a tuple in a sample are one in the batch.

    Args:
        samples: of a dataset.
        collate: the person's; None for PyTorch's.
        name: the job's field, for messages.

    Raises:
        JobError: they aren't pairs, or can't be put together.
    """
    if collate is not None:
        try:
            made = collate(samples)
        except JobError:
            raise
        except Exception as error:
            raise JobError(f"collate: it raised {error_line(error)}") from error
        if not _is_pair(made):
            raise JobError(
                f"collate: it gave {described(made)}, (inputs, targets) is expected"
                f"{_hint_for(made)}"
            )
        return made[0], made[1]

    for sample in samples:
        _check_pair(sample, name)
    try:
        inputs = put_together([sample[0] for sample in samples], collate_fn_map=_COLLATES)
        targets = put_together([sample[1] for sample in samples], collate_fn_map=_COLLATES)
    except Exception as error:
        raise JobError(
            f"collate: samples can't be batched ({error_line(error)}): give a collate that can"
        ) from error

    return inputs, targets


def _tuple_of_batches(batch: Sequence[Any], *, collate_fn_map: Any = None) -> Any:
    """Put tuples together as a tuple: PyTorch's collate makes a list of them."""
    made = []
    for values in zip(*batch, strict=True):
        made.append(put_together(values, collate_fn_map=collate_fn_map))

    kind: Any = type(batch[0])
    return kind._make(made) if hasattr(kind, "_make") else tuple(made)


_COLLATES: Any = {**default_collate_fn_map, tuple: _tuple_of_batches}
"""How PyTorch's collate puts values of a type together, and tuples."""


def _check_pair(sample: Any, name: str) -> None:
    """Refuse a sample that is no ``(inputs, targets)``."""
    if not _is_pair(sample):
        hint = _hint_for(sample)
        if isinstance(sample, Tensor):
            hint = "; combine tensors of inputs and targets by TensorDataset(inputs, targets)"
        raise JobError(
            f"{name}: a sample is {described(sample)}, (inputs, targets) is expected{hint}"
        )

    if sample[1] is None:
        raise JobError(
            f"{name}: the targets of a sample are None: return a number (0, say) if the loss "
            "needs no targets, or give a collate of your own"
        )


def _is_pair(value: Any) -> bool:
    return isinstance(value, tuple | list) and len(value) == 2


def _hint_for(value: Any) -> str:
    """Return what to give in the place of what is no pair; "" where that isn't known."""
    if isinstance(value, tuple | list) and len(value) > 2:
        return "; for several inputs return ((a, b), targets), for model(a, b)"
    if isinstance(value, Mapping):
        return (
            "; return a pair from the dataset, or from a collate: its inputs may be a dict, for "
            "model(**inputs)"
        )
    return ""
