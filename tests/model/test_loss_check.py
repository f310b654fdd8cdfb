"""A loss is held to being additive over samples, in each update: not only in the first ones."""

from __future__ import annotations

import functools
import itertools
import math
import random
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from lockstep.model.losses.additivity import Piece
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import lockstep
from lockstep.errors import LockstepError, LossError
from lockstep.model.losses.check_interval import is_power_of_two
from lockstep.model.losses.loss import Totalled
from lockstep.model.losses.loss_check import LossCheck
from zoo import drawn, labels, mlp, plain_sgd

Loss = Callable[[Any, Any], Any]


def checked(loss: Loss, batches: Any, *, cuts: bool = True) -> LossCheck:
    """The check of a loss after these local batches, as a step makes it."""
    made = Totalled(loss)
    check = LossCheck(made, cuts=cuts)
    check.interval.closer_every = 100
    for step, (outputs, targets, size) in enumerate(batches, start=1):
        if check.wants(step):
            whole = Piece(*made(outputs, targets, size), size)
            closer = is_power_of_two(step) or check.interval.is_closer(step)  # as a step does
            check(outputs, targets, whole, step=step, closer=closer)
    return check


# ---- masks that become uneven late ---------------------------------------------------------------

SAMPLES, TIME = 6, 4


def masked_mean(outputs: Tensor, targets: tuple[Tensor, Tensor]) -> Tensor:
    values, mask = targets
    return ((outputs - values).square() * mask).sum() / mask.sum()


def without_nan(outputs: Tensor, targets: Tensor) -> Tensor:
    return (outputs - targets).square().nanmean()


def without_sentinel(outputs: Tensor, targets: Tensor) -> Tensor:
    return (outputs - targets).square()[targets != -10].mean()


def masks(dtype: torch.dtype) -> Callable[[Tensor], Any]:
    def targets(uneven: Tensor) -> Any:
        return torch.zeros(SAMPLES, TIME, dtype=torch.float64), (~uneven).to(dtype)

    return targets


def filled(value: float) -> Callable[[Tensor], Tensor]:
    return lambda uneven: torch.zeros(SAMPLES, TIME, dtype=torch.float64).masked_fill(uneven, value)


LATE: dict[str, tuple[Loss, Callable[[Tensor], Any]]] = {
    **{
        str(d): (masked_mean, masks(d))
        for d in (torch.float64, torch.bool, torch.uint8, torch.int16, torch.int64)
    },
    "NaN": (without_nan, filled(float("nan"))),
    "sentinel": (without_sentinel, filled(-10)),
    "sample weights": (masked_mean, lambda uneven: (filled(0)(uneven), 1 + 0.1 * uneven)),
}


def late(
    targets: Callable[[Tensor], Any], step: int, rows: slice
) -> Iterator[tuple[Tensor, Any, int]]:
    for number in range(1, step + 1):
        uneven = torch.zeros(SAMPLES, TIME, dtype=torch.bool)
        if number == step:
            uneven[rows, TIME // 2 :] = True
        yield drawn(SAMPLES, TIME, seed=number).double(), targets(uneven), SAMPLES


@pytest.mark.parametrize("rows", [slice(2, 3), slice(0, 2), slice(5, 6), slice(None)], ids=str)
@pytest.mark.parametrize("step", [1, 3, 6])
@pytest.mark.parametrize("name", LATE)
def test_a_mask_that_becomes_uneven_is_seen_in_that_update(
    name: str, step: int, rows: slice
) -> None:
    loss, targets = LATE[name]
    if step == 1 and rows == slice(None):
        checked(loss, late(targets, step, rows))  # alike for all samples so far
        return
    with pytest.raises(
        LossError, match=r"not a mean over samples" + (rf" in step {step} " if step > 1 else " ")
    ):
        checked(loss, late(targets, step, rows))


@pytest.mark.parametrize("name", LATE)
def test_even_masks_are_accepted(name: str) -> None:
    loss, targets = LATE[name]
    checked(loss, itertools.chain(*(late(targets, 2, slice(0, 0)) for _ in range(4))))


@pytest.mark.sweep
@pytest.mark.parametrize("samples", [2, 3, 4, 6, 8, pytest.param(12, marks=pytest.mark.slow)])
def test_no_mask_over_samples_is_balanced_between_the_two_parts(samples: int) -> None:
    """Found by trial: a mask that leaves every other sample leaves as much of each half."""
    for left in itertools.product([0.0, 1.0], repeat=samples):
        if 0 < sum(left) < samples:
            targets = torch.zeros(samples, 1).double(), torch.tensor(left).double().view(-1, 1)
            with pytest.raises(LossError, match="is not a mean over samples"):
                checked(masked_mean, [(drawn(samples, 1, seed=1).double(), targets, samples)])


def test_of_single_samples_each_is_held_against_an_earlier_one() -> None:
    def batches(uneven: bool) -> Iterator[tuple[Tensor, Any, int]]:
        for number in range(4):
            mask = torch.ones(1, TIME)
            mask[:, 2:] = 0 if uneven and number == 3 else 1
            yield drawn(1, TIME, seed=number), (torch.zeros(1, TIME), mask), 1

    checked(masked_mean, batches(uneven=False))
    with pytest.raises(LossError, match="in step 4 "):
        checked(masked_mean, batches(uneven=True))


def spread_of_the_rare(outputs: Tensor, targets: Tensor) -> tuple[Tensor, int]:
    total, rare = F.cross_entropy(outputs, targets, reduction="sum"), outputs[targets == 2]
    return total + ((rare - rare.mean(0)).square().sum() if len(rare) else 0.0), len(targets)


def means_of_the_rare(outputs: Tensor, targets: Tensor) -> Tensor:
    loss, rare = F.cross_entropy(outputs, targets), outputs[targets == 2]
    return loss + (rare @ rare.t()).triu(1).mean() if len(rare) > 1 else loss


@pytest.mark.parametrize("loss", [spread_of_the_rare, means_of_the_rare])
def test_pairs_of_a_rare_class_are_seen_where_it_comes_though_each_local_batch_has_one(
    loss: Loss,
) -> None:
    """Found by trial: weights up to 100 % off without a line; a sample twice differs from itself
    in nothing.
    """

    def batches(step: int) -> Iterator[tuple[Tensor, Tensor, int]]:
        for number in range(1, 6):
            targets = torch.arange(SAMPLES) % 2
            targets[SAMPLES // 2] += 2 - targets[SAMPLES // 2] if number == step else 0
            yield drawn(SAMPLES, 3, seed=number).double(), targets, SAMPLES

    checked(loss, batches(step=0))
    with pytest.raises(LossError, match="in step 3 "):
        checked(loss, batches(step=3))


def test_a_loss_that_takes_outputs_with_their_own_targets_only_is_no_worse_for_it() -> None:
    def loss(outputs: Tensor, targets: Tensor) -> Tensor:
        assert (outputs.argmax(1) == targets).all()
        return F.cross_entropy(outputs, targets)

    targets = torch.arange(SAMPLES) % 3
    checked(loss, [(F.one_hot(targets, 3).double(), targets, SAMPLES)] * 2)


@pytest.mark.parametrize("samples", [1, 3])
@pytest.mark.parametrize("is_right", [True, False])
def test_local_batches_of_other_lengths_are_held_against_one_another(
    samples: int, is_right: bool
) -> None:
    """Found by trial: outputs as long as the longest sample of a local batch, of which all are
    as long.
    """

    def loss(outputs: Tensor, targets: tuple[Tensor, Tensor]) -> Tensor:
        values, lengths = targets
        mask = torch.arange(outputs.shape[1]) < lengths[:, None]
        errors = (outputs - values[:, : outputs.shape[1]]).square() * mask
        return (errors.sum(1) / lengths).mean() if is_right else errors.sum() / mask.sum()

    def batches(*lengths: int) -> Iterator[tuple[Tensor, Any, int]]:
        for number, length in enumerate(lengths):
            outputs = drawn(samples, length, seed=number).double()
            yield outputs, (drawn(samples, 6).double(), torch.full((samples,), length)), samples

    if is_right:
        checked(loss, batches(6, 3, 6, 4))
        return
    with pytest.raises(LossError, match="loss is not a mean over samples in step 2 "):
        checked(loss, batches(6, 3))


def test_rows_that_are_no_samples_are_not_made_as_long_as_others() -> None:
    """Found by trial: nodes of graphs, as many as each batch has, and a loss that adds up over
    them.
    """

    def batches() -> Iterator[tuple[Tensor, Any, int]]:
        for number, nodes in enumerate((14, 11, 14)):
            yield drawn(nodes, 3, seed=number).double(), drawn(nodes, 3).double(), 5

    check = checked(
        lambda outputs, targets: ((outputs - targets).square().sum(), len(outputs)), batches()
    )
    assert not any("is not a sum" in note for note in check.notes)


@pytest.mark.parametrize("shape", [(1,), (1, 3), (SAMPLES, 3), ()])
def test_an_output_that_is_the_same_for_all_samples_is_left_as_it_is_whatever_its_shape(
    shape: tuple[int, ...],
) -> None:
    """Found by trial: a learned scale of shape (1,) was taken for a row of one sample, and
    nothing was checked.
    """

    def loss(outputs: dict[str, Tensor], targets: Tensor) -> tuple[Tensor, Any]:
        losses = (outputs["x"] * outputs["scale"].sum() - targets).square().mean(1)
        known = targets[:, 0] > 0
        return (losses * known).sum() / known.sum() * len(targets), len(targets)

    check = LossCheck(made := Totalled(loss), cuts=True)
    check.of_batch = {"scale": "same"}
    outputs = {"x": drawn(SAMPLES, TIME).double(), "scale": torch.full(shape, 0.5).double()}
    whole = torch.ones(SAMPLES, TIME).double()
    check(outputs, whole, Piece(*made(outputs, whole, SAMPLES), SAMPLES), step=1)
    assert check.notes == []
    masked = whole.index_fill(0, torch.tensor([1]), 0.0)
    with pytest.raises(LossError, match="the total is not a sum over samples in step 3"):
        check(outputs, masked, Piece(*made(outputs, masked, SAMPLES), SAMPLES), step=3)


def test_a_row_that_all_samples_have_is_that_of_the_same_update(tmp_path: Any) -> None:
    """Found by trial: transitions of a CRF that forward expands over the batch were mixed with
    those of before.
    """
    samples = [
        (drawn(SAMPLES, 3, seed=seed).double(), labels(SAMPLES, 3, seed=seed)) for seed in range(3)
    ]

    def loss(outputs: tuple[Tensor, Tensor], targets: Tensor) -> tuple[Tensor, int]:
        scores, transitions = outputs
        chances = (scores[:, :, None] + transitions[0]).logsumexp(1)
        return F.cross_entropy(chances, targets, reduction="sum"), len(targets)

    def batches(which: list[int]) -> Iterator[tuple[Any, Tensor, int]]:
        for update, number in enumerate(which):
            scores, targets = samples[number]
            yield (scores, (update * torch.eye(3).double()).expand(SAMPLES, 3, 3)), targets, SAMPLES

    assert checked(loss, batches([0, 1, 2, 0])).notes == []


@pytest.mark.parametrize(
    ("before", "afterwards"), [("first", None), ("first", "second"), (None, "first")]
)
def test_an_output_that_is_there_in_some_updates_only_is_held_against_one_of_its_kind(
    before, afterwards
) -> None:
    """Found by trial: an auxiliary head that ended was refused, since an earlier sample had
    outputs of it.
    """

    def loss(outputs: dict[str, Any], targets: Tensor) -> tuple[Tensor, int]:
        total = F.cross_entropy(outputs["main"], targets, reduction="sum")
        if outputs["aside"] is not None:
            scale = {"first": 0.3, "second": 0.1}[outputs["aside"][0]]
            total = total + scale * F.cross_entropy(outputs["aside"][1], targets, reduction="sum")
        return total, len(targets)

    def batches() -> Iterator[tuple[Any, Tensor, int]]:
        for update in range(9):
            scores, targets = (
                drawn(SAMPLES, 3, seed=update).double(),
                labels(SAMPLES, 3, seed=update),
            )
            kind = before if update < 6 else afterwards
            yield (
                {"main": scores, "aside": None if kind is None else [kind, scores.square()]},
                targets,
                SAMPLES,
            )

    assert checked(loss, batches()).notes == []


TRAINED = {
    "dp 2": {"strategy": "dp", "devices": "2xcpu"},
    "ddp 2": {"strategy": "ddp", "devices": "2xcpu"},
    "single, accumulate 2": {"strategy": "single", "devices": "1xcpu", "accumulate": 2},
    "pp 2": {"strategy": "pp", "devices": "2xcpu"},
}


@pytest.mark.sweep
@pytest.mark.parametrize("way", TRAINED)
def test_a_training_ends_in_the_update_in_which_a_mask_becomes_uneven(
    way: str, tmp_path: Any
) -> None:
    """Found by trial: weights 2 to 4 % off without a line, with a mask that is uneven first in
    update 3.
    """
    mask = torch.ones(32, TIME)
    mask[20, 2:] = 0  # of batches of 8 in their own order: the third

    def loss(outputs: Tensor, targets: tuple[Tensor, Tensor]) -> Tensor:
        return masked_mean(outputs, targets)

    data = [(drawn(6, seed=i), (drawn(TIME, seed=100 + i), mask[i])) for i in range(32)]
    job = lockstep.Job(
        model=lambda: nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, TIME)),
        loss=loss,
        optimizer=plain_sgd,
        train_data=data,
        batch_size=8,
        shuffle=False,
    )
    with pytest.raises(
        LossError, match=r"loss is not a mean over samples in step 3 .*return \(total, count\)"
    ):
        lockstep.train(job, folder=tmp_path, quiet=True, **TRAINED[way])


def labelled_mean(outputs: Tensor, targets: Tensor) -> Tensor:
    known = targets >= 0
    return (
        F.cross_entropy(outputs, targets.clamp(min=0), reduction="none") * known
    ).sum() / known.sum().clamp(min=1)


def labelled_pair(outputs: Tensor, targets: Tensor) -> tuple[Tensor, int]:
    return labelled_mean(outputs, targets) * len(targets), len(targets)


@pytest.mark.sweep
@pytest.mark.parametrize("loss", [labelled_mean, labelled_pair])
@pytest.mark.parametrize("evaluated", [False, True], ids=["trained", "evaluated"])
def test_a_mask_that_is_even_on_each_rank_and_not_between_them_is_seen(
    loss: Loss, evaluated: bool, tmp_path
) -> None:
    """Found by trial: weights up to 59 % off without a line, where the second half of each batch
    has no labels.
    """
    unknown = TensorDataset(drawn(32, 6), labels(32, 3).where(torch.arange(32) % 8 < 4, -1))
    data = {"eval_data": unknown} if evaluated else {"train_data": unknown}
    job = job_of(loss).replace(**data)
    with pytest.raises(LossError, match="is not a"):
        lockstep.train(
            job, strategy="ddp", devices="2xcpu", shuffle=False, folder=tmp_path, quiet=True
        )


def test_a_local_batch_that_is_masked_as_a_whole_is_seen_in_any_update() -> None:
    """Found by trial: not of a pair in update 7, for batches of samples of one length each."""
    with pytest.raises(LossError, match="is not a sum over samples"):
        known = [(drawn(4, 3, seed=number), labels(4, 3), 4) for number in range(6)]
        checked(labelled_pair, [*known, (drawn(4, 3), torch.full((4,), -1), 4)])


# ---- pairs ---------------------------------------------------------------------------------------


def pair(outputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    kept = targets != -100
    return F.cross_entropy(outputs, targets, reduction="sum"), kept.sum()


WRONG_PAIRS: dict[str, tuple[Loss, str]] = {
    "a mean": (lambda o, t: (F.cross_entropy(o, t), t.numel()), "total"),
    "a count of 1": (lambda o, t: (F.cross_entropy(o, t, reduction="sum"), 1), "count"),
    "regularised once for each batch": (
        lambda o, t: (F.cross_entropy(o, t, reduction="sum") + 3, len(t)),
        "total",
    ),
    "samples against one another": (
        lambda o, t: ((o @ o.T).logsumexp(1).sum(), t.numel()),
        "total",
    ),
}


@pytest.mark.parametrize("name", WRONG_PAIRS)
def test_a_pair_that_does_not_add_up_is_refused(name: str) -> None:
    loss, what = WRONG_PAIRS[name]
    with pytest.raises(
        LossError,
        match=rf"loss: the {what} is not a sum over samples \(whole .*, its two parts .* and ",
    ):
        checked(loss, [(drawn(8, 3), labels(8, 3), 8)])


def test_a_right_pair_is_accepted_with_ignored_targets_and_a_constant_for_each_item() -> None:
    def batches() -> Iterator[tuple[Tensor, Tensor, int]]:
        for number in range(8):
            targets = labels(5, 3, seed=number)
            targets[:number] = -100
            yield drawn(5, 3, seed=number), targets, 5

    def with_constant(outputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        total, count = pair(outputs, targets)
        return total + 0.3 * count, count

    checked(pair, batches())
    checked(with_constant, batches())


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_terms_that_cancel_are_no_fault(dtype: torch.dtype) -> None:
    """In float32 the rounding of large terms is more than what is left of their sum."""

    def loss(outputs: Tensor, targets: Tensor) -> tuple[Tensor, int]:
        return (outputs * targets).sum(), len(outputs)

    for seed in range(20):
        large = 1e4 * drawn(64, seed=seed)
        outputs = torch.cat([large, large]).to(dtype) + 1e-3 * drawn(128, seed=99).to(dtype)
        signs = torch.ones(128, dtype=dtype)
        signs[64:] = -1
        checked(loss, [(outputs[torch.randperm(128)], signs, 128), (outputs, signs, 128)])


def test_a_pair_that_draws_random_numbers_or_cant_be_cut_is_taken_at_its_word() -> None:
    def noisy(outputs: Tensor, targets: Tensor) -> tuple[Tensor, int]:
        return (outputs * torch.rand(len(outputs), 1)).sum(), len(outputs)

    def fixed(outputs: Tensor, targets: Tensor) -> tuple[Tensor, int]:
        return outputs.view(8, 3).sum(), 8

    def nodes(outputs: Tensor, targets: Tensor) -> tuple[Tensor, int]:
        return (outputs.sum(1) - targets).square().sum(), len(
            targets
        )  # of graphs, of which these are samples

    packed = nn.utils.rnn.pack_sequence([drawn(3), drawn(2)])
    for loss, outputs, targets, size in (
        (noisy, drawn(8, 3), labels(8, 3), 8),
        (fixed, drawn(8, 3), labels(8, 3), 8),
        (nodes, drawn(20, 3), drawn(20), 8),
        (lambda o, t: (o.data.sum(), 2), packed, labels(2, 3), 2),
    ):
        made = Totalled(loss)
        whole = Piece(*made(outputs, targets, size), size)
        state = torch.get_rng_state()
        check = LossCheck(made, cuts=True)
        check(outputs, targets, whole)
        assert not check.wants(2)
        assert torch.equal(state, torch.get_rng_state())


@pytest.mark.parametrize("scalar", [False, True])
def test_a_loss_of_the_hardest_samples_is_found_where_a_local_batch_has_fewer(scalar: bool) -> None:
    """Found by trial: the hardest six of a batch, of local batches of four, 13 % off without a
    line.
    """

    def hardest(outputs: Tensor, targets: Tensor) -> Any:
        each_loss = F.cross_entropy(outputs, targets, reduction="none")
        total = each_loss.topk(min(6, len(each_loss))).values.sum()
        return total / len(targets) if scalar else (total, len(targets))

    with pytest.raises(
        LossError,
        match="is not a mean over samples" if scalar else "the total is not a sum over sam",
    ):
        checked(hardest, batches_of(1))


def boxes_apart(outputs: Tensor, targets: list[Tensor]) -> tuple[Tensor, int]:
    total = sum(
        (each[: len(boxes)] - boxes).abs().sum()
        for each, boxes in zip(outputs, targets, strict=True)
    )
    return torch.as_tensor(total), sum(map(len, targets))


def boxes(*counts: int) -> tuple[Tensor, list[Tensor], int]:
    samples = len(counts)
    return drawn(samples, 5, 4).double(), [drawn(n, 4, seed=n).double() for n in counts], samples


def test_boxes_of_as_many_images_as_each_has_are_no_batches_of_boxes() -> None:
    """Found by trial: refused, or not checked, where an image has one box, or each of two images
    two.
    """
    check = checked(boxes_apart, [boxes(1, 3), boxes(2, 2), boxes(1), boxes(3, 3, 3), boxes(1, 1)])
    assert check.notes == [] and check.wants(6)


# ---- what outputs hold beside --------------------------------------------------------------------


def test_a_loss_that_reads_only_the_logits_is_accepted_beside_the_models_own_loss() -> None:
    outputs = {"loss": torch.tensor(1.5), "logits": drawn(8, 3), "per_head": drawn(2, 5)}
    checked(lambda o, t: F.mse_loss(o["logits"], t), [(outputs, drawn(8, 3, seed=2), 8)])
    checked(
        lambda o, t: (F.mse_loss(o["logits"], t, reduction="sum"), 8 * len(t) // 8),
        [(outputs, drawn(8, 3), 8)],
    )


def test_what_a_pair_reads_that_is_of_the_whole_batch_is_named() -> None:
    outputs = {"loss": torch.tensor(1.5), "logits": drawn(8, 3)}
    check = checked(
        lambda o, t: (o["logits"].sum() + o["loss"], len(t)), [(outputs, drawn(8, 3), 8)]
    )
    assert check.reads == ("loss",)
    assert check.wants(2)


def test_a_pair_is_held_to_the_rest_where_it_reads_what_is_of_the_whole_batch() -> None:
    outputs = {"loss": torch.tensor(1.5), "logits": drawn(8, 3)}

    def masked(outputs: Any, targets: Tensor) -> tuple[Tensor, int]:
        kept = targets[:, 0] > 0
        return outputs["logits"][kept].mean() * len(targets) + outputs["loss"], len(targets)

    with pytest.raises(LossError, match="the total is not a sum over samples"):
        checked(masked, [(outputs, drawn(8, 3), 8)])


class Weighing(nn.Module):
    """Gives the weights of two losses beside its outputs."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.weights = nn.Linear(6, 3), nn.Parameter(torch.ones(2))

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        return {"logits": self.linear(x), "weights": self.weights.exp()}


def weighed(outputs: dict[str, Tensor], targets: Tensor) -> tuple[Tensor, int]:
    each = F.cross_entropy(outputs["logits"], targets, reduction="none")
    rare = outputs["weights"][1] * each[targets == 2].sum()
    return outputs["weights"][0] * each.sum() + rare, len(targets)


def weighed_means(outputs: dict[str, Tensor], targets: Tensor) -> tuple[Tensor, int]:
    each = F.cross_entropy(outputs["logits"], targets, reduction="none")
    rare = outputs["weights"][1] * each[targets == 2].mean().nan_to_num()
    return (outputs["weights"][0] * each.mean() + rare) * len(targets), len(targets)


def test_a_pair_that_reads_two_weights_is_held_to_the_rest(tmp_path: Any, capsys: Any) -> None:
    """Found by trial: the weights of two losses were cut where two samples are joined, and
    nothing was checked then.
    """
    job = job_of(weighed).replace(model=Weighing, eval_data=None, metrics={})
    lockstep.train(job, strategy="dp", devices="2xcpu", folder=tmp_path)
    assert "can't be checked" not in capsys.readouterr().out
    with pytest.raises(LossError, match="the total is not a sum over samples"):
        lockstep.train(
            job.replace(loss=weighed_means),
            strategy="dp",
            devices="2xcpu",
            folder=tmp_path,
            quiet=True,
        )


def test_a_mean_by_a_number_that_the_model_gives_is_no_sum() -> None:
    """Found by trial: refused under single, since the number isn't doubled with the samples."""
    outputs = {"logits": drawn(8, 3), "samples": 8}
    batches = [(outputs, drawn(8, 3), 8)] * 3
    checked(
        lambda o, t: F.mse_loss(o["logits"], t, reduction="sum") / o["samples"], batches, cuts=False
    )


def test_a_pair_over_a_packed_sequence_is_said_not_to_be_checked() -> None:
    packed = nn.utils.rnn.pack_sequence([drawn(3), drawn(2)])
    check = checked(lambda o, t: (o.data.sum(), 2), [(packed, labels(2, 3), 2)])
    assert check.notes == [
        "whether loss is additive over samples can't be checked: it reads a PackedSequence, which "
        "can't be cut"
    ]


def test_a_scalar_that_reads_it_is_refused_by_its_name() -> None:
    outputs = {"loss": torch.tensor(1.5), "logits": drawn(8, 3)}
    with pytest.raises(
        LossError, match=r'reads outputs "loss" \(\), without one row for each of the 8 samples'
    ):
        checked(lambda o, t: o["loss"], [(outputs, drawn(8, 3), 8)])


# ---- under one device ----------------------------------------------------------------------------


def summed(outputs: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(outputs, targets, reduction="sum")


def contrastive(outputs: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(outputs @ outputs.T, torch.arange(len(outputs)))


@pytest.mark.parametrize("way", ["single", "mp", "dp", "ddp"])
def test_a_sum_is_refused_under_every_strategy(way: str, tmp_path: Any) -> None:
    job = job_of(summed)
    devices = "1xcpu" if way == "single" else "2xcpu"
    with pytest.raises(
        LossError, match=r"a sum, its value depends on the batch size .*use reduction='mean'"
    ):
        lockstep.train(job, strategy=way, devices=devices, folder=tmp_path, quiet=True)


def focal(outputs: Tensor, targets: Tensor) -> Tensor:
    """Divided by the positives, as in detection: where a batch has one or none, it adds up as a
    sum does.
    """
    summed = F.binary_cross_entropy_with_logits(
        outputs[:, 0], (targets > 0).double(), reduction="sum"
    )
    return summed / (targets > 0).sum().clamp(min=1)


def test_what_is_divided_by_positives_is_no_sum_where_there_are_few(tmp_path: Any) -> None:
    """Found by trial: refused under single, since the first batch had no positive."""
    targets = torch.zeros(32, dtype=torch.long)
    targets[[9, 12, 26]] = 1
    job = job_of(focal).replace(
        train_data=TensorDataset(drawn(32, 6).double(), targets), precision="fp64"
    )
    run = lockstep.train(
        job, strategy="single", devices="1xcpu", shuffle=False, folder=tmp_path, quiet=True
    )
    assert run.summary["steps"] == 4
    with pytest.raises(LossError, match="is not a mean over samples"):
        lockstep.train(
            job, strategy="dp", devices="2xcpu", shuffle=False, folder=tmp_path, quiet=True
        )


def test_what_needs_the_whole_batch_trains_on_one_device(tmp_path: Any) -> None:
    run = lockstep.train(
        job_of(contrastive), strategy="single", devices="1xcpu", folder=tmp_path, quiet=True
    )
    assert run.summary["steps"] == 4
    with pytest.raises(LockstepError, match="not a mean over samples"):
        lockstep.train(
            job_of(contrastive), strategy="dp", devices="2xcpu", folder=tmp_path, quiet=True
        )


def job_of(loss: Loss) -> lockstep.Job:
    return lockstep.Job(
        model=mlp,
        loss=loss,
        optimizer=plain_sgd,
        train_data=TensorDataset(drawn(32, 6), labels(32, 3)),
        batch_size=8,
    )


def test_a_sum_divided_by_a_number_of_the_whole_batch_is_no_sum(tmp_path: Any) -> None:
    """Found by trial: the number of tokens that collate gives, refused as a sum on one device,
    where it is right.
    """
    data = [(drawn(1 + i % 4, 6, seed=i), drawn(1 + i % 4, 3, seed=i)) for i in range(32)]

    def collate(samples: list[Any]) -> Any:
        inputs, targets = (
            nn.utils.rnn.pad_sequence(each, batch_first=True) for each in zip(*samples, strict=True)
        )
        lengths = torch.tensor([len(its) for its, _ in samples])
        return inputs, (targets, int(lengths.sum()), lengths)

    def loss(outputs: Tensor, targets: Any) -> Tensor:
        values, tokens, lengths = targets
        kept = torch.arange(outputs.shape[1]) < lengths[:, None]
        return ((outputs - values).square().sum(-1) * kept).sum() / tokens

    job = lockstep.Job(
        model=mlp, loss=loss, optimizer=plain_sgd, train_data=data, batch_size=8, collate=collate
    )
    lockstep.train(job, strategy="single", devices="1xcpu", folder=tmp_path, quiet=True)
    with pytest.raises(
        LossError, match=r"loss is not a mean over samples \(.*return \(total, count\)"
    ):
        lockstep.train(job, strategy="dp", devices="2xcpu", folder=tmp_path, quiet=True)


# ---- how often -----------------------------------------------------------------------------------


def test_a_dear_loss_is_checked_now_and_then_and_that_is_said() -> None:
    check = LossCheck(Totalled(contrastive), cuts=True)
    line = None
    for update in range(1, 6):
        assert check.wants(update)
        assert check.is_timed(update) == (update > 1)
        if update > 1:
            check.interval.spent(0.3, closer=False)
            check.interval.spent(0.3, closer=False)
            line = check.timed(update, 1.3, replicas=2)
    assert check.interval.every == 9
    assert line is not None and line.startswith(
        "whether the loss is additive over samples is checked in one of 9 updates"
    )
    assert [update for update in range(6, 20) if check.wants(update)] == [9, 18]


def test_more_samples_than_a_local_batch_has_are_looked_at_now_and_then_and_that_is_said() -> None:
    """Found by trial: between updates 4 and 8, and so on, nothing looked at them, without a
    line.
    """
    check, line = LossCheck(Totalled(contrastive), cuts=True), None
    for update in range(2, 6):
        for closer in check.interval.looks(update, again=False):
            check.interval.spent(0.0138 if closer else 0.004, closer=bool(closer))
        line = check.timed(update, 1.0, replicas=1)
    assert (check.interval.every, check.interval.closer_every) == (1, 20)
    assert (
        line is not None
        and "is checked with more samples than a local batch has in one of 20 updates only" in line
    )
    assert [update for update in range(1, 41) if check.interval.is_closer(update)] == [
        1,
        2,
        3,
        4,
        5,
        20,
        40,
    ]


def test_a_cheap_loss_is_checked_always_and_nothing_is_said() -> None:
    check = LossCheck(Totalled(contrastive), cuts=True)
    for update in range(2, 6):
        spent = 0.3 if update == 3 else 0.04  # once the system was busy
        check.interval.spent(spent, closer=False)
        line = check.timed(update, 0.96 + spent, replicas=1)
    assert check.interval.every == 1 and line is None and check.wants(7)


def test_the_loss_of_an_earlier_sample_is_computed_once_unless_the_loss_changes() -> None:
    """A weight that a person lowers from update to update is neither a fault nor something that
    the loss remembers.
    """
    sizes: list[int] = []
    weight = 1.0

    def loss(outputs: Tensor, targets: Tensor) -> tuple[Tensor, int]:
        sizes.append(len(outputs))
        return weight * (outputs - targets).square().sum(), len(outputs)

    check = LossCheck(totalled := Totalled(loss), cuts=True)
    for update in range(6):
        outputs, targets = drawn(8, 3, seed=update), drawn(8, 3)
        whole = Piece.of(totalled(outputs, targets, 8), 8)
        sizes.clear()
        check(outputs, targets, whole)
        assert (sizes.count(1) > 1) == (update == 0 or update >= 3)
        weight = 1.0 if update < 2 else 0.5**update
    assert check.notes == []


def test_pytorchs_means_are_never_checked() -> None:
    assert not LossCheck(Totalled(nn.CrossEntropyLoss()), cuts=True).wants(1)


# ---- what is said --------------------------------------------------------------------------------


def batches_of(count: int) -> Iterator[tuple[Tensor, Tensor, int]]:
    for number in range(count):
        yield drawn(4, 3, seed=number).double(), labels(4, 3), 4


def with_part(part: Callable[[Any, Any], tuple[Any, Any]]) -> Loss:
    def loss(outputs: Any, targets: Tensor) -> Any:
        logits = outputs["logits"] if isinstance(outputs, dict) else outputs
        total = F.cross_entropy(logits, targets, reduction="sum")
        return lockstep.Loss(total, len(targets), parts={"part": part(outputs, targets)})

    return loss


RIGHT_PARTS: dict[str, Callable[[Any, Any], tuple[Any, Any]]] = {
    "a sum": lambda o, t: (o.square().sum(), len(t)),
    "a number": lambda o, t: (float(o.square().sum()), len(t)),
    "in single precision": lambda o, t: (o.float().square().sum(), len(t)),
    "none of some": lambda o, t: (o[t == 2].sum(), (t == 2).sum()),
}
WRONG_PARTS: dict[str, Callable[[Any, Any], tuple[Any, Any]]] = {
    "a maximum": lambda o, t: (o.max(), 1),
    "a maximum times samples": lambda o, t: (o.max() * len(t), len(t)),
    "a mean": lambda o, t: (o.square().mean(), 1),
}


@pytest.mark.parametrize("name", [*RIGHT_PARTS, *WRONG_PARTS])
def test_a_part_that_is_no_sum_is_said_once_by_its_name(name: str) -> None:
    check = checked(with_part({**RIGHT_PARTS, **WRONG_PARTS}[name]), batches_of(4))
    if name in RIGHT_PARTS:
        assert check.notes == []
        return
    (note,) = check.notes
    assert note.startswith('loss: part "part" is not a sum over samples: its totals')
    assert checked(with_part(WRONG_PARTS[name]), batches_of(4), cuts=False).notes == []


def test_a_part_that_is_no_sum_only_later_is_said_then() -> None:
    def loss(outputs: Tensor, targets: Tensor) -> Any:
        mean = outputs[targets >= 0].mean()
        return lockstep.Loss(
            outputs.sum(), len(targets), parts={"known": (mean * len(targets), len(targets))}
        )

    def batches(count: int) -> Iterator[tuple[Tensor, Tensor, int]]:
        for number, (outputs, targets, size) in enumerate(batches_of(count)):
            yield outputs, targets.where(torch.arange(size) != size - number, -1), size

    assert checked(loss, batches(1)).notes == []
    (note,) = checked(loss, batches(3)).notes
    assert 'part "known" is not a sum over samples' in note


def test_a_part_that_reads_what_is_of_the_whole_batch_is_said() -> None:
    outputs = {"balance": torch.tensor(1.5), "logits": drawn(8, 3)}
    check = checked(with_part(lambda o, t: (o["balance"], 1)), [(outputs, labels(8, 3), 8)] * 2)
    (note,) = check.notes
    assert note.startswith('loss: part "part" reads what isn\'t one row for each sample')


def test_a_loss_that_differentiates_outputs_is_told_to_give_a_pair() -> None:
    def physics(outputs: Any, targets: Tensor) -> Tensor:
        value, place = outputs
        (slope,) = torch.autograd.grad(value.sum(), place, create_graph=True)
        return (slope - targets).square().mean()

    def of(loss: Loss) -> LossCheck:
        place = drawn(8, 1).requires_grad_()
        return checked(loss, [((place.square(), place), drawn(8, 1, seed=2), 8)])

    with pytest.raises(
        LossError,
        match=r"physics can't be checked: it differentiates outputs, .*: return \(total, cou",
    ):
        of(physics)
    (note,) = of(lambda o, t: (physics(o, t) * len(t), len(t))).notes
    assert "can't be checked: it differentiates outputs, of which a part has no graph" in note


def test_a_pair_that_cant_be_checked_is_said() -> None:
    """Found by trial: hardest negatives among at least four samples, 5 to 14 % off without a
    line.
    """

    def hardest(outputs: Tensor, targets: Tensor) -> tuple[Tensor, int]:
        return torch.cdist(outputs, outputs).topk(4, dim=1).values.sum(), len(targets)

    check = checked(hardest, batches_of(2))
    (note,) = check.notes
    assert note.startswith(
        "whether loss hardest is additive over samples can't be checked: it fails with 1 of 4 "
        "samples"
    )


def test_objects_that_cant_be_cut_are_named_with_what_could() -> None:
    class Scores:
        def __init__(self, logits: Tensor) -> None:
            self.logits = logits

    def entropy(outputs: Scores, targets: Tensor) -> Tensor:
        return F.cross_entropy(outputs.logits, targets)

    batches = [(Scores(drawn(8, 3)), labels(8, 3), 8)]
    said = r"it reads an object of the class Scores, whose tensors are not seen \(make it a dataclass, a named tuple or"
    with pytest.raises(LossError, match=f"entropy can't be checked: {said}"):
        checked(entropy, batches)
    (note,) = checked(lambda o, t: (entropy(o, t) * len(t), len(t)), batches).notes
    assert re.search(said, note)


@pytest.mark.parametrize(
    "draw", [torch.randn_like, lambda of: of * random.random(), lambda of: of * np.random.rand()]
)
def test_a_loss_that_draws_random_numbers_is_said(draw: Any) -> None:
    def noisy(outputs: Tensor, targets: Tensor) -> Tensor:
        return F.cross_entropy(outputs + draw(outputs), targets)

    with pytest.raises(
        LossError,
        match="loss noisy draws random numbers, so whether it is a mean over samples can't be",
    ):
        checked(noisy, batches_of(1))
    check = checked(
        lambda outputs, targets: (noisy(outputs, targets) * len(targets), len(targets)),
        batches_of(2),
    )
    (note,) = check.notes
    assert note.startswith("loss draws random numbers, others than one device would")


class Annealed:
    """Counts its calls, for a weight that grows."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, outputs: Tensor, targets: Tensor) -> Tensor:
        self.calls += 1
        return self.calls * F.cross_entropy(outputs, targets)


def test_a_loss_that_counts_its_calls_is_left_alone_and_said() -> None:
    loss = Annealed()
    check = checked(loss, batches_of(3))
    assert loss.calls == 3  # checks call copies
    (note,) = check.notes
    assert note.startswith(
        "loss Annealed remembers something from call to call, and is called for each local batch"
    )


def test_an_output_with_as_many_rows_as_samples_by_chance_is_known(
    tmp_path: Any, capsys: Any
) -> None:
    """Found by trial: a loss for load balancing over four experts, and a local batch of four
    samples.
    """

    class Gated(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.gate, self.layer = nn.Linear(6, 4), nn.Linear(6, 3)

        def forward(self, inputs: Tensor) -> tuple[Tensor, Tensor]:
            return self.layer(inputs), self.gate(inputs).softmax(-1).mean(0).square()

    def mean(outputs: Any, targets: Tensor) -> Tensor:
        return F.cross_entropy(outputs[0], targets) + outputs[1].mean()

    data = TensorDataset(drawn(16, 6), labels(16, 3))
    job = lockstep.Job(
        model=Gated, loss=mean, optimizer=plain_sgd, train_data=data, batch_size=8, epochs=1
    )
    with pytest.raises(LossError, match=r'loss mean can.t be checked: it reads outputs "1" \(4,\)'):
        lockstep.train(job, strategy="dp", devices="2xcpu", folder=tmp_path, quiet=True)

    def pair(outputs: Any, targets: Tensor) -> tuple[Tensor, int]:
        return mean(outputs, targets) * len(targets), len(targets)

    for way in (
        {"strategy": "dp", "devices": "2xcpu"},
        {"strategy": "single", "devices": "1xcpu", "accumulate": 2},
    ):
        lockstep.train(job.replace(loss=pair), folder=tmp_path, **way)
        assert (
            'the loss reads the model\'s output "1", which is no sum or mean over samples'
            in capsys.readouterr().out
        )


def test_what_a_rank_other_than_the_first_notes_of_the_loss_is_said(
    tmp_path: Any, capsys: Any
) -> None:
    """Found by trial: a loss that draws for one kind of sample, which only the second local
    batch had.
    """

    def pair(outputs: Tensor, targets: Tensor) -> tuple[Tensor, int]:
        noise = torch.randn(len(targets)) if (targets == 2).any() else 0.0
        return (
            F.cross_entropy(outputs, targets, reduction="none") + noise * outputs.mean(-1)
        ).sum(), len(targets)

    data = TensorDataset(drawn(16, 6), torch.tensor([0, 1, 1, 0, 2, 2, 0, 1]).repeat(2))
    job = job_of(pair).replace(train_data=data, shuffle=False, epochs=1)
    lockstep.train(job, strategy="ddp", devices="2xcpu", folder=tmp_path)
    assert (
        "note: loss pair draws random numbers, others than one device would"
        in capsys.readouterr().out
    )


def test_ranks_check_the_loss_as_often_as_one_another() -> None:
    def on_rank(world: lockstep.World) -> tuple[int, list[str]]:
        check = LossCheck(Totalled(contrastive), cuts=True)
        line = None
        for update in range(2, 6):
            check.interval.spent(0.3 if world.rank else 0.01, closer=False)
            line = check.timed(update, 1.0, replicas=1)
            check.agree(world, update, line, meets=update == 2)
        return check.interval.every, check.notes

    (every, notes), (others, nothing) = lockstep.launch(on_rank, devices="2xcpu")
    assert every == others == 13
    (note,) = notes
    assert note.startswith(
        "whether the loss is additive over samples is checked in one of 13 updates"
    )
    assert nothing == []


class Flat(nn.Module):
    """A language model whose logits have a row for each word; with ``mixes`` its words see those
    of all samples.
    """

    def __init__(self, mixes: bool = False) -> None:
        super().__init__()
        self.words, self.layer, self.mixes = nn.Embedding(9, 6), nn.Linear(6, 9), mixes

    def forward(self, inputs: Tensor) -> Tensor:
        hidden = self.words(inputs)
        return self.layer(hidden - hidden.mean(0) if self.mixes else hidden).view(-1, 9)


def flat_job(targets: Tensor, **fields: Any) -> lockstep.Job:
    job = lockstep.Job(
        model=Flat,
        loss=lambda outputs, targets: F.cross_entropy(outputs, targets.view(-1)),
        optimizer=plain_sgd,
        train_data=TensorDataset(labels(22 * 5, 9).view(22, 5), targets),
        metrics={
            "accuracy": lambda outputs, targets: (
                (outputs.argmax(-1) == targets.view(-1)).sum(),
                targets.numel(),
            )
        },
        batch_size=8,
        precision="fp64",
        shuffle=False,
    )
    return job.replace(**fields)


@pytest.mark.sweep
@pytest.mark.parametrize("way", TRAINED)
def test_a_language_model_with_a_row_for_each_word_is_checked_by_samples(
    way: str, tmp_path: Any, capsys: Any
) -> None:
    """Found by trial: refused, since the loss "fails with 1 of 4 samples"; its metrics were said
    to be no sums.
    """
    targets = labels(22 * 5, 9, seed=3).view(22, 5)
    job = flat_job(targets)
    job = job.replace(eval_data=job.train_data)
    expected = lockstep.train(job, strategy="single", devices="1xcpu", folder=tmp_path)
    run = lockstep.train(job, folder=tmp_path, **TRAINED[way])
    assert "no sum over samples" not in capsys.readouterr().out
    assert run.metrics == pytest.approx(expected.metrics, rel=1e-10)
    for mine, theirs in zip(run.model().parameters(), expected.model().parameters(), strict=True):
        torch.testing.assert_close(mine, theirs, atol=1e-10, rtol=0)
    targets[10, 2:] = -100
    with pytest.raises(LossError, match="loss is not a mean over samples in step 2 "):
        lockstep.train(flat_job(targets), folder=tmp_path, quiet=True, **TRAINED[way])


def test_a_language_model_with_a_row_for_each_word_that_mixes_samples_is_said(
    tmp_path: Any, capsys: Any
) -> None:
    job = flat_job(labels(22 * 5, 9, seed=3).view(22, 5), model=lambda: Flat(mixes=True))
    lockstep.train(job, strategy="dp", devices="2xcpu", folder=tmp_path)
    assert "outputs depend on other samples of the batch" in capsys.readouterr().out


class Squeezing(nn.Module):
    """Of one sample it gives a row less."""

    def __init__(self, outputs: int) -> None:
        super().__init__()
        self.body = nn.Linear(6, outputs)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.body(x).squeeze()


def own_cross_entropy(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(outputs, targets)


def own_mse(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return F.mse_loss(outputs, targets)


@pytest.mark.parametrize(
    ("way", "devices", "outputs", "loss"),
    [
        ("single", "1xcpu", 3, nn.CrossEntropyLoss()),
        ("single", "1xcpu", 1, nn.MSELoss()),
        ("dp", "2xcpu", 3, own_cross_entropy),
        ("dp", "2xcpu", 1, nn.MSELoss()),
        ("ddp", "2xcpu", 3, nn.CrossEntropyLoss()),
        ("ddp", "2xcpu", 1, own_mse),
    ],
)
def test_outputs_without_a_row_for_the_only_sample_are_explained(
    way: str, devices: str, outputs: int, loss: Any, tmp_path: Path
) -> None:
    """The advice was to return (total, count), or the text one of PyTorch's on sizes."""
    samples = 9 if way == "single" else 10  # in batches of 8
    job = lockstep.Job(
        model=functools.partial(Squeezing, outputs),
        loss=loss,
        train_data=TensorDataset(
            drawn(samples, 6), labels(samples, 3) if outputs == 3 else drawn(samples)
        ),
        optimizer=plain_sgd,
        batch_size=8,
    )
    with pytest.raises(
        LossError, match=r"of a local batch of one sample: .* squeeze\(\), name the dimension"
    ):
        lockstep.train(job, strategy=way, devices=devices, folder=tmp_path, quiet=True)


@pytest.mark.parametrize("where", ["targets", "outputs", "wide targets"])
def test_pairs_of_flagged_samples_are_seen_where_the_flag_comes(where: str) -> None:
    """Found by trial: flags of floats, among outputs, and beside many other targets were not
    looked at.
    """

    def loss(outputs: dict[str, Tensor], targets: Tensor) -> tuple[Tensor, int]:
        flags = outputs["flags"] if where == "outputs" else targets[..., 0] > 0
        total = outputs["x"].square().sum()
        return total + F.pdist(outputs["x"][flags]).sum() if flags.sum() > 1 else total, len(
            targets
        )

    def batches(step: int) -> Iterator[tuple[Any, Tensor, int]]:
        for number in range(1, 8):
            flags = torch.zeros(SAMPLES, dtype=torch.bool)
            flags[SAMPLES // 2] = number == step
            outputs = {"x": drawn(SAMPLES, 3, seed=number).double(), "flags": flags}
            wide = torch.arange(SAMPLES * 300).view(SAMPLES, 300) * (
                1 if where == "wide targets" else 0
            )
            yield outputs, torch.cat([flags[:, None].double(), wide.double()], 1), SAMPLES

    checked(loss, batches(step=0))
    step = 3 if where == "wide targets" else 6  # the first four updates are looked at closer
    with pytest.raises(LossError, match=f"in step {step} "):
        checked(loss, batches(step=step))


def map_of(flagged: float, others: float) -> Iterator[Tensor]:
    """For each of seven batches, maps, of which one has something flagged in batch 6."""
    for number in range(1, 8):
        maps = torch.full((SAMPLES, 32, 32), others, dtype=torch.float64)
        maps[SAMPLES // 2, :3, :2] = flagged if number == 6 else others
        yield maps


def column_of(flagged: float) -> Iterator[Tensor]:
    for number in range(1, 8):
        column = drawn(SAMPLES, seed=number).double().clamp(-1, 1) + 0.003
        column[SAMPLES // 2] = flagged if number == 6 else 0.5
        yield column


def pairs_of_whole_numbers() -> Iterator[Tensor]:
    for number in range(1, 8):
        columns = torch.stack([torch.arange(SAMPLES) % 2, (torch.arange(SAMPLES) + 1) % 2], 1)
        columns[SAMPLES // 2] = 1 if number == 6 else 0
        yield columns


def labelled_boxes() -> Iterator[list[dict[str, Tensor]]]:
    for number in range(1, 8):
        classes = [torch.arange(1 + sample % 3) for sample in range(SAMPLES)]
        classes[SAMPLES // 2] = torch.tensor([9 if number == 6 else 0])
        yield [{"classes": its} for its in classes]


def texts() -> Iterator[list[str]]:
    for number in range(1, 8):
        yield [
            "rare" if number == 6 and sample == SAMPLES // 2 else "common"
            for sample in range(SAMPLES)
        ]


def long_texts() -> Iterator[Tensor]:
    for number in range(1, 8):
        words = torch.randint(50, (SAMPLES, 512), generator=torch.Generator().manual_seed(number))
        words[SAMPLES // 2, 100] = 99 if number == 6 else 0
        yield words


RARE: dict[str, tuple[Any, Any]] = {
    "a lesion on a map": (lambda: map_of(1, 0), lambda y: y.flatten(1).amax(1) > 0),
    "what is missing on a map": (
        lambda: map_of(math.nan, 0.5),
        lambda y: y.isnan().flatten(1).any(1),
    ),
    "beyond a threshold": (lambda: column_of(2.5), lambda y: y > 1.5),
    "below one": (lambda: column_of(-2.5), lambda y: y < -1.5),
    "a class of a group": (pairs_of_whole_numbers, lambda y: y.all(1)),
    "a text": (texts, lambda y: torch.tensor([text == "rare" for text in y])),
    "a word of long texts": (long_texts, lambda y: (y == 99).any(1)),
    "a class of boxes": (
        labelled_boxes,
        lambda y: torch.stack([(of["classes"] == 9).any() for of in y]),
    ),
}


@pytest.mark.parametrize("kind", RARE)
def test_a_mean_over_what_is_rare_is_seen_where_it_comes(kind: str) -> None:
    """Found by trial: only new whole numbers of small targets were looked at. A local batch has
    one of them at most.
    """
    made, is_rare = RARE[kind]

    def loss(outputs: Tensor, targets: Any) -> tuple[Tensor, int]:
        errors, mask = outputs.square().sum(1), is_rare(targets)
        return errors.sum() + (errors * mask).sum() / mask.sum().clamp(min=1), len(errors)

    with pytest.raises(LossError, match="in step 6 "):
        checked(loss, ((drawn(SAMPLES, 3).double(), targets, SAMPLES) for targets in made()))


class Hardest:
    """The sum over all samples, or over the hardest."""

    def __init__(self) -> None:
        self.kept: int | None = None

    def __call__(self, outputs: Tensor, targets: Tensor) -> tuple[Tensor, int]:
        errors = (outputs - targets).square().sum(1)
        return errors.topk(min(self.kept or len(errors), len(errors))).values.sum(), len(errors)


def test_a_loss_that_somebody_sets_is_looked_at_closer() -> None:
    """Found by trial: the hardest samples of a local batch, from update 6 on."""
    loss = Hardest()

    def batches(step: int) -> Iterator[tuple[Any, Tensor, int]]:
        for number in range(1, 8):
            loss.kept = SAMPLES if number >= step else None
            yield drawn(SAMPLES, 3).double(), torch.zeros(SAMPLES, 3), SAMPLES

    with pytest.raises(LossError, match="in step 6 "):
        checked(loss, batches(step=6))


def of_tokens(outputs: Tensor, targets: dict[str, Any]) -> tuple[Tensor, Any]:
    return (outputs.sum(1) * targets["weights"]).sum(), targets["tokens"]


def of_images(outputs: Tensor, targets: Tensor) -> tuple[Tensor, int]:
    losses = [
        (outputs[i] - targets[targets[:, 0] == i][:, 1:]).square().sum()
        for i in range(len(outputs))
    ]
    return torch.stack(losses).sum(), len(targets)


OF_THE_WHOLE: dict[str, tuple[Any, Any]] = {
    "tokens": (of_tokens, {"weights": torch.ones(SAMPLES), "tokens": 22}),
    "tokens of a tensor": (of_tokens, {"weights": torch.ones(SAMPLES), "tokens": torch.tensor(22)}),
    "boxes with the number of their image": (
        of_images,
        torch.cat([torch.arange(2 * SAMPLES)[:, None] % SAMPLES, drawn(2 * SAMPLES, 3, seed=4)], 1),
    ),
}


@pytest.mark.parametrize("kind", OF_THE_WHOLE)
def test_a_pair_with_what_collate_counted_is_taken_at_its_word(kind: str) -> None:
    """Found by trial: parts of a local batch have the number of the whole, and right losses were
    refused.
    """
    loss, targets = OF_THE_WHOLE[kind]
    check = checked(loss, [(drawn(SAMPLES, 3).double(), targets, SAMPLES)])
    assert [
        "targets hold something that isn't one row for each sample" in note for note in check.notes
    ] == [True]


class Deep(nn.Module):
    """Gives outputs of its earlier layers too, in a list of dictionaries, as DETR does."""

    def __init__(self, layers: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(6, 6) for _ in range(1 + layers))
        self.out = nn.Linear(6, 3)

    def forward(self, x: Tensor) -> dict[str, Any]:
        found = []
        for layer in self.layers:
            x = torch.tanh(layer(x))
            found.append({"logits": self.out(x)})
        return {**found[-1], "aux_outputs": found[:-1]}


def deep_mean(outputs: dict[str, Any], targets: Tensor) -> Tensor:
    return sum(F.cross_entropy(of["logits"], targets) for of in (outputs, *outputs["aux_outputs"]))


def deep_pair(outputs: dict[str, Any], targets: Tensor) -> tuple[Tensor, int]:
    return deep_mean(outputs, targets) * len(targets), len(targets)


@pytest.mark.parametrize("loss", [deep_mean, deep_pair], ids=["mean", "pair"])
@pytest.mark.parametrize("layers", [1, 2, 3])
def test_a_list_of_layers_is_none_of_samples(
    layers: int, loss: Any, tmp_path: Path, capsys: Any
) -> None:
    """Found by trial: a right mean was refused where as many samples were looked at as there are
    such layers.
    """
    job = lockstep.Job(
        model=functools.partial(Deep, layers),
        loss=loss,
        metrics={"deep": deep_pair},
        optimizer=plain_sgd,
        train_data=TensorDataset(drawn(29, 6), labels(29, 3)),
        eval_data=TensorDataset(drawn(13, 6), labels(13, 3)),
        batch_size=8,
        epochs=1,
    )
    runs = [
        lockstep.train(job, strategy=way, devices=on, folder=tmp_path)
        for way, on in (("single", "1xcpu"), ("ddp", "2xcpu"))
    ]
    said = capsys.readouterr().out
    assert "checked" not in said and "no sum" not in said
    assert runs[1].history[-1]["train_loss"] == pytest.approx(
        runs[0].history[-1]["train_loss"], rel=1e-5
    )


class Adapting(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body, self.last, self.judge = nn.Linear(6, 8), nn.Linear(8, 6), nn.Linear(6, 1)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        made = self.last(torch.tanh(self.body(x)))
        return made, self.judge(made)


def adapting() -> Any:
    """A term is weighted by the gradients of both, as in VQGAN; where there are none, by 0."""
    models: list[Adapting] = []

    def build() -> Adapting:
        models.append(Adapting())
        return models[-1]

    def loss(outputs: tuple[Tensor, Tensor], targets: Tensor) -> Tensor:
        apart, judged = (outputs[0] - targets).abs().mean(), -outputs[1].mean()
        try:
            norms = [
                torch.autograd.grad(of, models[0].last.weight, retain_graph=True)[0].norm()
                for of in (apart, judged)
            ]
            weight = norms[0] / (norms[1] + 1e-4)
        except RuntimeError:
            weight = torch.zeros(())
        return apart + weight.detach() * judged

    x = drawn(30, 6)
    return lockstep.Job(
        model=build,
        loss=loss,
        optimizer=plain_sgd,
        train_data=TensorDataset(x, x),
        batch_size=20,
        epochs=1,
    )


@pytest.mark.parametrize(
    "way", [{"strategy": "dp", "devices": "2xcpu"}, {"devices": "1xcpu", "accumulate": 2}]
)
def test_a_loss_that_is_another_one_without_gradients_is_said(
    way: dict[str, Any], tmp_path: Path, capsys: Any
) -> None:
    """Found by trial: weights 3 % off without a line; under dp 27 %, whose replicas have other
    weights.
    """
    lockstep.train(adapting(), **way, folder=tmp_path)
    said = " ".join(capsys.readouterr().out.split())
    assert "can't be checked: it is another one where no gradients are computed" in said


def coarse_of_many(outputs: Tensor, targets: Tensor) -> Tensor:
    """A mean that is rounded more where there are more samples, as some kernels do in float32."""
    made = F.cross_entropy(outputs, targets)
    return made * 1.0001 if len(targets) > SAMPLES and outputs.dtype == torch.float32 else made


def test_rounding_of_more_samples_is_no_other_loss() -> None:
    check = checked(coarse_of_many, [(drawn(SAMPLES, 3), labels(SAMPLES, 3), SAMPLES)] * 2)
    assert not check.notes and check.wants(3)
