"""The table of cases is true: plain trainings of each, with whole batches and with batches cut in
two.

All is computed in float64 where a model can be. A batch of n samples is cut in n1 + n2. Each part
is collated by itself, and computed in one of two ways::

    replicas  copies of the model that begin each update with the weights and buffers of the first one
    in turn   one model, which computes the second part with what the first one has left

    gradient  =  sum of the parts' (total / n).backward(), times n / count  count: sum of those of the parts

What a batch draws row by row (dropout, noise), its parts draw too. What has no row for each sample
is drawn anew. So is what Python or NumPy draws: replicas have generators of their own, in turn
there is one.
"""

from __future__ import annotations

import collections
import copy
import math
import pickle
import random
from collections.abc import Iterator
from typing import Any

import numpy
import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.data import default_collate

from lockstep import Job
from lockstep.model.losses.loss import Totalled
from lockstep.tensors.pytree import call, to_device
from strategies.sums.cases import CASES, Case

DIFFERS = 1e-6
WAYS = {
    "both": ("replicas", "in turn"),
    "replicas": ("replicas",),
    "in turn": ("in turn",),
    "none": (),
}


class Whole(TorchDispatchMode):
    """Keeps what a batch draws."""

    def __init__(self) -> None:
        super().__init__()
        self.drawn: list[Tensor] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        if draws(func, made):
            self.drawn.append(made.detach().clone())
        return made


class Part(TorchDispatchMode):
    """Gives the samples ``start`` to ``stop`` of a batch the rows that the whole has drawn for
    them.
    """

    def __init__(self, drawn: list[Tensor], start: int, stop: int, samples: int) -> None:
        super().__init__()
        self.drawn, self.start, self.stop, self.samples = iter(drawn), start, stop, samples

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        if draws(func, made):
            rows = self.rows(next(self.drawn, None), made.shape)
            return made if rows is None else made.copy_(rows)
        return made

    def rows(self, kept: Tensor | None, shape: torch.Size) -> Tensor | None:
        """The rows of a draw; None where it has none for each sample."""
        if kept is None or kept.shape == shape or kept.dim() != len(shape):
            return None
        dim = next(d for d in range(kept.dim()) if kept.shape[d] != shape[d])
        each = kept.shape[dim] // self.samples
        kept = kept.narrow(dim, each * self.start, each * (self.stop - self.start))
        for later in range(dim + 1, kept.dim()):  # the part is padded to a shorter length
            kept = kept.narrow(later, 0, min(shape[later], kept.shape[later]))
        return kept if kept.shape == shape else None


def draws(func: Any, made: Any) -> bool:
    is_random = torch.Tag.nondeterministic_seeded in func.tags and isinstance(made, Tensor)
    return is_random and func.overloadpacket.__name__ != "randperm"


class Replica:
    """The model and the loss of a job, in one number format."""

    def __init__(self, job: Job, dtype: torch.dtype) -> None:
        torch.manual_seed(job.seed)
        self.dtype = dtype
        self.model: nn.Module = as_format(job.model().train(), dtype)
        self.loss = Totalled(as_format(copy.deepcopy(job.loss), dtype))

    def __call__(self, inputs: Any, targets: Any, samples: int) -> tuple[Tensor, Any]:
        inputs, targets = to_device((inputs, targets), torch.device("cpu"), self.dtype)
        return self.loss(call(self.model, inputs), targets, samples)

    def begin_as(self, other: Replica) -> None:
        with torch.no_grad():
            for mine, others in zip(self.model.parameters(), other.model.parameters(), strict=True):
                mine.copy_(others)
                mine.grad = None
            for mine, others in zip(self.model.modules(), other.model.modules(), strict=True):
                mine._buffers.update(copy.deepcopy(others._buffers))


def as_format(part: Any, dtype: torch.dtype) -> Any:
    """A module in that format, with complex numbers of twice as many bytes in float64."""
    if not isinstance(part, nn.Module) or dtype is torch.float32:
        return part
    part.double()
    return part._apply(lambda t: t.to(torch.complex128) if t.is_complex() else t)


def batches(job: Job) -> Iterator[list[Any]]:
    """The samples of each update, in order, over and over again."""
    data = job.train_data() if callable(job.train_data) else job.train_data
    while True:
        for start in range(0, len(data), job.batch_size):
            yield [sample(data, i) for i in range(start, min(start + job.batch_size, len(data)))]


def sample(data: Any, index: int) -> Any:
    seed(index)
    return data[index]


def seed(number: int) -> None:
    torch.default_generator.manual_seed(
        number
    )  # (``torch.manual_seed`` takes a hundred times as long)
    random.seed(number)
    numpy.random.seed(number)


def trained(case: Case, way: str, drawn: list[list[Tensor]]) -> list[Tensor]:
    """All parameters as one vector: at the beginning, and after each update. Of "whole" batches
    ``drawn`` is filled.
    """
    job = case.job()
    replicas = [Replica(job, case.dtype) for _ in range(2 if way == "replicas" else 1)]
    first = replicas[0]
    optimizer = job.optimizer(
        [(n, p) for n, p in first.model.named_parameters() if p.requires_grad]
    )
    found = [vector(first.model)]
    for update, samples in zip(range(job.steps), batches(job), strict=False):
        collate = job.collate or default_collate
        seed(1000 + update)
        if way == "whole":
            drawn.append(backward_of_whole(first, collate(samples), len(samples)))
        else:
            parts = [samples[: case.parts[0]], samples[case.parts[0] :]]
            backward_of_parts(
                replicas, [(collate(part), len(part)) for part in parts], drawn[update]
            )
        optimizer.step()
        optimizer.zero_grad()
        for other in replicas[1:]:
            other.begin_as(first)
        found.append(vector(first.model))
    return found


def backward_of_whole(replica: Replica, batch: Any, n: int) -> list[Tensor]:
    """Its numbers that were drawn."""
    with Whole() as tape:
        total, count = replica(*batch, n)
        (total / count).backward()
    return tape.drawn


def backward_of_parts(
    replicas: list[Replica], parts: list[tuple[Any, int]], drawn: list[Tensor]
) -> None:
    n = sum(size for _, size in parts)
    start, counted = 0, 0.0
    for number, (batch, size) in enumerate(parts):
        replica = replicas[number % len(replicas)]
        if replica is not replicas[0]:
            seed(number)
        with Part(drawn, start, start + size, n):
            total, count = replica(*batch, size)
            if count:
                (total / n).backward()
        start += size
        counted += float(count)
    add_gradients([replica.model for replica in replicas], n / counted)


def add_gradients(models: list[nn.Module], weight: float) -> None:
    """Into those of the first model."""
    for p, *others in zip(*(model.parameters() for model in models), strict=True):
        gradients = [each.grad for each in (p, *others) if each.grad is not None]
        p.grad = sum(gradients[1:], gradients[0]) * weight if gradients else None


def vector(model: nn.Module) -> Tensor:
    parameters = [p.detach() for p in model.parameters()]
    real = [torch.view_as_real(p) if p.is_complex() else p for p in parameters]
    return torch.cat([p.double().flatten() for p in real])


def apart(whole: list[Tensor], parts: list[Tensor]) -> list[float]:
    """How far parameters are apart after each update, as a part of how far they have moved."""
    start = whole[0]
    found = [
        distance(a, b) / max(distance(a, start), 1e-300)
        for a, b in zip(whole[1:], parts[1:], strict=True)
    ]
    return [math.inf if math.isnan(each) else each for each in found]


def distance(a: Tensor, b: Tensor) -> float:
    return float((a - b).norm())


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """These tensors are too small for more."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def parameters() -> list[Any]:
    return [pytest.param(c, id=c.name, marks=[pytest.mark.slow] if c.slow else []) for c in CASES]


@pytest.mark.parametrize("case", parameters())
def test_training_in_parts_differs_where_the_table_says_so(case: Case) -> None:
    drawn: list[list[Tensor]] = []
    whole = trained(case, "whole", drawn)
    firsts = []
    for way in ("replicas", "in turn"):
        far = apart(whole, trained(case, way, drawn))
        if way in WAYS[case.cut]:
            assert far[-1] > DIFFERS, f"{way}: {far}"
            firsts.append(next(update for update, by in enumerate(far, 1) if by > DIFFERS))
            assert all(by <= case.bound for by in far[: firsts[-1] - 1]), f"{way}: {far}"
        else:
            assert max(far) <= case.bound, f"{way}: {far}"
    assert min(firsts, default=case.first) == case.first


def test_the_table_has_enough_cases_of_each_kind() -> None:
    kinds = collections.Counter(case.kind for case in CASES)
    assert kinds["common"] >= 60
    assert kinds["rare"] >= 20
    assert kinds["innocent"] >= 60
    assert set(kinds) == {"common", "rare", "innocent"}
    assert len({case.name for case in CASES}) == len(CASES)


def test_innocent_cases_are_those_that_never_differ() -> None:
    assert all((case.kind == "innocent") == (case.cut == "none") for case in CASES)


def test_jobs_can_be_sent_to_other_processes() -> None:
    for case in CASES:
        sent = pickle.loads(pickle.dumps(case.job()))
        assert sent.batch_size == 8
