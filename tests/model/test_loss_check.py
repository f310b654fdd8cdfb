"""A loss is held to being a sum over samples: not only in the first updates."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lockstep.errors import LossError
from lockstep.model.losses.loss import Totalled
from lockstep.model.losses.loss_check import LossCheck
from zoo import drawn, labels

Loss = Callable[[Any, Any], Any]
Batches = Iterator[tuple[Any, Any, int]]
SAMPLES, TIME = 6, 4


def checked(loss: Loss, batches: Any, *, accepts: bool = False) -> LossCheck:
    """The check of a loss after these local batches, as a step makes it."""
    made = Totalled(loss)
    check = LossCheck(made, cuts=True, accepts=accepts)
    for step, (outputs, targets, size) in enumerate(batches, start=1):
        whole = made(outputs, targets, size)
        if check.wants(step):
            check(outputs, targets, whole, size, step=step)
    return check


def batches_of(count: int, samples: int = 8) -> Batches:
    for number in range(count):
        yield drawn(samples, 3, seed=number).double(), labels(samples, 3, seed=number), samples


# ---- masks that become uneven late ---------------------------------------------------------------


def masked_mean(outputs: Tensor, targets: tuple[Tensor, Tensor]) -> Tensor:
    values, mask = targets
    return ((outputs - values).square() * mask).sum() / mask.sum()


def without_nan(outputs: Tensor, targets: Tensor) -> Tensor:
    return (outputs - targets).square().nanmean()


def without_sentinel(outputs: Tensor, targets: Tensor) -> Tensor:
    return (outputs - targets).square()[targets != -10].mean()


def filled(value: float) -> Callable[[Tensor], Tensor]:
    return lambda uneven: torch.zeros(SAMPLES, TIME, dtype=torch.float64).masked_fill(uneven, value)


LATE: dict[str, tuple[Loss, Callable[[Tensor], Any]]] = {
    **{
        str(dtype): (masked_mean, lambda uneven, d=dtype: (filled(0)(uneven), (~uneven).to(d)))
        for dtype in (torch.float64, torch.bool, torch.int64)
    },
    "NaN": (without_nan, filled(float("nan"))),
    "sentinel": (without_sentinel, filled(-10)),
    "sample weights": (masked_mean, lambda uneven: (filled(0)(uneven), 1 + 0.1 * uneven)),
}


def late(targets: Callable[[Tensor], Any], step: int, rows: slice) -> Batches:
    for number in range(1, step + 1):
        uneven = torch.zeros(SAMPLES, TIME, dtype=torch.bool)
        if number == step:
            uneven[rows, TIME // 2 :] = True
        yield drawn(SAMPLES, TIME, seed=number).double(), targets(uneven), SAMPLES


@pytest.mark.parametrize("rows", [slice(2, 3), slice(0, 2), slice(5, 6)], ids=str)
@pytest.mark.parametrize("step", [1, 3, 7])
@pytest.mark.parametrize("name", LATE)
def test_a_mask_that_becomes_uneven_is_seen_in_that_update(
    name: str, step: int, rows: slice
) -> None:
    loss, targets = LATE[name]
    when = rf" in step {step} " if step > 1 else " "
    with pytest.raises(LossError, match=r"not a mean over samples" + when):
        checked(loss, late(targets, step, rows))


@pytest.mark.parametrize("name", LATE)
def test_even_masks_are_accepted(name: str) -> None:
    loss, targets = LATE[name]
    assert checked(loss, itertools.chain(*[late(targets, 2, slice(0, 0))] * 4)).wants(16)


@pytest.mark.sweep
@pytest.mark.parametrize("samples", [2, 3, 4, 6, 8, pytest.param(12, marks=pytest.mark.slow)])
def test_no_mask_over_samples_is_balanced_between_the_two_parts(samples: int) -> None:
    """Found by trial: a mask that leaves every other sample leaves as much of each half."""
    for left in itertools.product([0.0, 1.0], repeat=samples):
        if 0 < sum(left) < samples:
            targets = torch.zeros(samples, 1).double(), torch.tensor(left).double().view(-1, 1)
            with pytest.raises(LossError, match="is not a mean over samples"):
                checked(masked_mean, [(drawn(samples, 1, seed=1).double(), targets, samples)])


# ---- pairs and scalars ---------------------------------------------------------------------------


def pair(outputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    return F.cross_entropy(outputs, targets, reduction="sum"), (targets != -100).sum()


def contrastive(outputs: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(outputs @ outputs.T, torch.arange(len(outputs)))


WRONG: dict[str, tuple[Loss, str]] = {
    "a mean": (lambda o, t: (F.cross_entropy(o, t), t.numel()), "the total is not a sum"),
    "a count of 1": (
        lambda o, t: (F.cross_entropy(o, t, reduction="sum"), 1),
        r"the count is not a sum over samples \(whole 1, its two parts 1 and 1\)",
    ),
    "regularised once for each batch": (lambda o, t: (o.sum() + 3, len(t)), "the total is not a"),
    "pairs of samples": (lambda o, t: ((o @ o.T).logsumexp(1).sum(), len(t)), "the total is not a"),
    "a scalar over pairs": (
        contrastive,
        r"not a mean over samples \(whole [\d.e-]+, its two parts .*return \(total, count",
    ),
}


@pytest.mark.parametrize("samples", [2, 3, 8])
@pytest.mark.parametrize("name", WRONG)
def test_what_does_not_add_up_is_refused_with_its_numbers(name: str, samples: int) -> None:
    loss, said = WRONG[name]
    with pytest.raises(LossError, match=said):
        checked(loss, batches_of(1, samples))


def test_a_difference_that_is_accepted_is_noted_once() -> None:
    (note,) = checked(contrastive, batches_of(3), accepts=True).notes
    assert "over samples" in note and note.endswith("; this difference is accepted")


def boxes_apart(outputs: Tensor, targets: list[Tensor]) -> tuple[Tensor, int]:
    each = [(o[: len(b)] - b).abs().sum() for o, b in zip(outputs, targets, strict=False)]
    return torch.stack(each).sum(), sum(map(len, targets))


def boxes(*counts: int) -> tuple[Tensor, list[Tensor], int]:
    each = [drawn(n, 4, seed=n).double() for n in counts]
    return drawn(len(counts), 5, 4).double(), each, len(counts)


def ignoring() -> Batches:
    for number, (outputs, targets, size) in enumerate(batches_of(9)):
        targets[:number] = -100
        yield outputs, targets, size


RIGHT: dict[str, tuple[Loss, Callable[[], Any]]] = {
    "ignored targets": (pair, ignoring),
    "a constant for each item": (
        lambda o, t: (pair(o, t)[0] + len(t), len(t)),
        lambda: batches_of(2),
    ),
    "boxes of images": (boxes_apart, lambda: [boxes(1, 3), boxes(2, 2), boxes(1), boxes(3, 3, 3)]),
    "rows of layers": (
        lambda o, t: sum(F.cross_entropy(layer, t) for layer in o),
        lambda: [([drawn(SAMPLES, 3, seed=i) for i in range(3)], labels(SAMPLES, 3), SAMPLES)] * 2,
    ),
}


@pytest.mark.parametrize("name", RIGHT)
def test_what_adds_up_is_accepted_and_checked_on(name: str) -> None:
    loss, batches = RIGHT[name]
    check = checked(loss, batches())
    assert check.notes == [] and check.wants(16)


# ---- rounding ------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_terms_that_cancel_are_no_fault(dtype: torch.dtype) -> None:
    """In float32 the rounding of large terms is more than what is left of their sum."""
    large = 1e4 * drawn(64)
    outputs = torch.cat([large, large]).to(dtype) + 1e-3 * drawn(128, seed=99).to(dtype)
    signs = torch.ones(128, dtype=dtype)
    signs[64:] = -1
    batches = [(outputs[torch.randperm(128)], signs, 128), (outputs, signs, 128)]
    checked(lambda o, t: ((o * t).sum(), len(o)), batches * 10)


# ---- losses that a check can't repeat ------------------------------------------------------------


@pytest.mark.parametrize(
    "draw", [torch.randn_like, lambda of: of * random.random(), lambda of: of * np.random.rand()]
)
def test_a_loss_that_draws_random_numbers_goes_on_with_those_it_would_have(draw: Any) -> None:
    def noisy(outputs: Tensor, targets: Tensor) -> tuple[Tensor, int]:
        return (outputs + draw(outputs)).square().sum(), len(targets)

    made, (outputs, targets, size) = Totalled(noisy), next(batches_of(1))
    whole, state = made(outputs, targets, size), torch.get_rng_state()
    check = LossCheck(made, cuts=True)
    check(outputs, targets, whole, size, step=1)
    assert not check.wants(2) and torch.equal(state, torch.get_rng_state())


class Annealed:
    """Counts its calls, for a weight that grows."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, outputs: Tensor, targets: Tensor) -> Tensor:
        self.calls += 1
        return self.calls * F.cross_entropy(outputs, targets)


def test_a_loss_that_counts_its_calls_is_left_alone() -> None:
    loss = Annealed()
    assert checked(loss, batches_of(3)).notes == []
    assert loss.calls == 3  # checks call copies


def test_a_function_that_counts_its_calls_in_a_variable_around_it_is_left_alone() -> None:
    calls = 0
    seen: list[int] = []

    def annealed(outputs: Tensor, targets: Tensor) -> Tensor:
        nonlocal calls
        calls += 1
        seen.append(calls)
        return calls * F.cross_entropy(outputs, targets)

    assert checked(annealed, batches_of(3)).notes == []
    assert (calls, seen) == (3, [1, 2, 3])


PACKED = nn.utils.rnn.pack_sequence([drawn(3), drawn(2)])
WITH_A_SCALAR = {"balance": torch.tensor(1.5), "logits": drawn(8, 3)}
UNCUT: dict[str, tuple[Loss, Any]] = {
    "a size of its own": (lambda o, t: (o.view(8, 3).sum(), 8), batches_of(1)),
    "a packed sequence": (lambda o, t: (o.data.sum(), 2), [(PACKED, labels(2, 3), 2)]),
    "a number of all samples": (
        lambda o, t: (o["logits"].sum() + o["balance"], len(t)),
        [(WITH_A_SCALAR, labels(8, 3), 8)],
    ),
    "nodes of graphs": (
        lambda o, t: ((o.sum(1) - t).sum(), len(t)),
        [(drawn(20, 3), drawn(20), 8)],
    ),
    "a single sample": (pair, [(drawn(1, 3), labels(1, 3), 1)]),
}


@pytest.mark.parametrize("name", UNCUT)
def test_a_loss_of_what_cant_be_cut_is_left_to_the_sum_check(name: str) -> None:
    assert checked(*UNCUT[name]).notes == []


# ---- how often -----------------------------------------------------------------------------------


def due(
    loss: Loss, *, cuts: bool = True, every: int | None = None, seconds: float = math.inf
) -> list[int]:
    check = LossCheck(Totalled(loss), cuts=cuts, every=every)
    found = []
    for update in range(1, 50):
        if check.wants(update):
            check._spent += seconds
            found.append(update)
    return found


def test_a_check_that_takes_little_time_is_made_in_every_update() -> None:
    assert due(contrastive, seconds=0) == [*range(1, 50)]


def test_a_check_that_takes_long_is_made_in_each_of_the_first_updates_and_then_in_some() -> None:
    assert due(contrastive) == due(contrastive, every=100) == [*range(1, 17), 32]
    assert due(contrastive, every=40) == due(contrastive, every=0) == due(contrastive)
    assert due(contrastive, every=10) == [*range(1, 17), 20, 30, 40]
    assert due(contrastive, every=1) == [*range(1, 50)]


def test_what_is_known_or_not_cut_is_not_checked() -> None:
    assert due(nn.CrossEntropyLoss()) == due(contrastive, cuts=False) == []
