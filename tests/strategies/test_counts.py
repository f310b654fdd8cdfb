"""Numbers of the whole batch for its loss (``Job(counts=...)``): several means in one loss, however a batch is cut."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import lockstep

from harness import parity  # isort: skip
from lockstep import Job
from lockstep.errors import JobError, LockstepError

BOUND = 1e-10
SAMPLES = 26
"""Batches of 8, and one of 2: three ranks, or micro-batches, leave one without a sample."""

WORDS, KINDS, LENGTH = 11, 4, 6


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)


def data() -> TensorDataset:
    """Words, and as targets the masked ones (few, or none), a kind, and where a box is."""
    numbers = torch.Generator().manual_seed(0)
    words = torch.randint(WORDS, (SAMPLES, LENGTH), generator=numbers)
    chance = torch.rand(SAMPLES, LENGTH, generator=numbers)
    masked = words.masked_fill(chance > torch.arange(SAMPLES)[:, None] / SAMPLES, -100)
    kinds = torch.randint(KINDS, (SAMPLES,), generator=numbers).clamp(max=KINDS - 2)
    boxes = (torch.arange(SAMPLES) % 9 == 0).long()  # most local batches have none
    return TensorDataset(words, torch.cat([masked, kinds[:, None], boxes[:, None]], 1))


class TwoHeads(nn.Module):
    """BERT in small: a head for masked words, and one for the sentence."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(WORDS, 8)
        self.body = nn.Linear(8, 8)
        self.words, self.kinds = nn.Linear(8, WORDS), nn.Linear(8, KINDS)

    def forward(self, words: Tensor) -> tuple[Tensor, Tensor]:
        hidden = torch.tanh(self.body(self.embedding(words)))
        return self.words(hidden), self.kinds(hidden.mean(1))


def summed(logits: Tensor, labels: Tensor, **options: Any) -> Tensor:
    return F.cross_entropy(logits.flatten(0, -2), labels.flatten(), reduction="sum", **options)


def masked_and_sentences(targets: Tensor) -> dict[str, Any]:
    return {"words": (targets[:, :LENGTH] != -100).sum(), "sentences": len(targets)}


def bert(outputs: Any, targets: Tensor, counts: dict[str, Tensor]) -> Any:
    words = summed(outputs[0], targets[:, :LENGTH])
    kinds = summed(outputs[1], targets[:, LENGTH])
    share = words / counts["words"] + kinds / counts["sentences"]
    return lockstep.Loss(share, 1, parts={"kinds": (kinds, len(targets))})


def number_of_boxes(targets: Tensor) -> dict[str, Any]:
    return {"boxes": int(targets[:, -1].sum())}


def detector(outputs: Any, targets: Tensor, counts: dict[str, Tensor]) -> Tensor:
    has_box = targets[:, -1] == 1
    assert counts["boxes"].dtype == outputs[1].dtype
    return outputs[1][has_box].square().sum() / max(counts["boxes"], 1)


def frequencies(targets: Tensor) -> dict[str, Any]:
    return {"kinds": targets[:, LENGTH].bincount(minlength=KINDS)}


def balanced(outputs: Any, targets: Tensor, counts: dict[str, Tensor]) -> Tensor:
    weight = counts["kinds"].sum() / counts["kinds"].clamp(min=1)
    whole = (weight * counts["kinds"]).sum()
    return summed(outputs[1], targets[:, LENGTH], weight=weight) / whole


class OwnLoss(nn.Module):
    """Has the contract of a model of transformers: a mean, or a sum over the given number."""

    def __init__(self) -> None:
        super().__init__()
        self.heads = TwoHeads()

    def forward(
        self, words: Tensor, labels: Tensor, num_items_in_batch: Tensor | None = None
    ) -> dict[str, Tensor]:
        logits, _ = self.heads(words)
        if num_items_in_batch is None:
            loss = F.cross_entropy(logits.flatten(0, 1), labels.flatten())
        else:
            loss = summed(logits, labels) / num_items_in_batch
        return {"loss": loss, "logits": logits}


def with_labels(samples: list[Any]) -> tuple[dict[str, Tensor], Tensor]:
    words = torch.stack([words for words, _ in samples])
    labels = torch.stack([targets[:LENGTH] for _, targets in samples])
    return {"words": words, "labels": labels}, labels


def items(labels: Tensor) -> dict[str, Any]:
    return {"num_items_in_batch": (labels != -100).sum()}


def of_the_model(outputs: Any, labels: Tensor, counts: dict[str, Tensor]) -> Tensor:
    return outputs["loss"]


OF_MODEL: dict[str, Any] = {"model": OwnLoss, "collate": with_labels, "counts": items}

LOSSES: dict[str, dict[str, Any]] = {
    "two heads": {"loss": bert, "counts": masked_and_sentences},
    "boxes": {"loss": detector, "counts": number_of_boxes},
    "balanced classes": {"loss": balanced, "counts": frequencies},
    "model_loss": {"loss": lockstep.model_loss, **OF_MODEL},
    "the model's": {"loss": of_the_model, **OF_MODEL},
}

WAYS: list[Any] = [
    ("single", "1xcpu", {"accumulate": 3}),
    pytest.param("single", "1xcpu", {"accumulate": 2}, marks=pytest.mark.slow),
    ("dp", "2xcpu", {}),
    pytest.param("dp", "3xcpu", {"accumulate": 2}, marks=pytest.mark.slow),
    ("ddp", "3xcpu", {}),
    pytest.param("ddp", "2xcpu", {"accumulate": 2}, marks=pytest.mark.slow),
    pytest.param("ddp", "2xcpu", {"loss_over": "batch"}, marks=pytest.mark.slow),
    pytest.param("fsdp", "2xcpu", {}, marks=pytest.mark.slow),
    pytest.param("fsdp", "3xcpu", {}, marks=pytest.mark.slow),
    pytest.param("pp", "2xcpu", {}, marks=pytest.mark.slow),
    pytest.param("ddp=2xpp=2", "4xcpu", {}, marks=pytest.mark.slow),
]


def job_of(case: str, **settings: Any) -> Job:
    fields = {"model": TwoHeads, **LOSSES[case], **settings}
    return Job(**fields, optimizer=sgd, train_data=data(), eval_data=data(), batch_size=8, epochs=2)


@pytest.mark.sweep
@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize(("strategy", "devices", "settings"), WAYS)
def test_shares_of_a_loss_add_up_to_that_of_one_device(
    loss: str, strategy: str, devices: str, settings: dict[str, Any]
) -> None:
    if "loss_over" in settings and "model" in LOSSES[loss]:
        return  # the outputs have no row for each sample
    usual = {"accumulate": 1, "loss_over": "samples"}
    found = parity(job_of(loss, **settings), strategy, devices, against_settings=usual)
    assert found.within(BOUND), str(found)


def test_a_loss_of_two_means_is_that_of_the_formula() -> None:
    """One update on the whole batch, by hand."""
    words, targets = data().tensors
    torch.manual_seed(0)
    model = TwoHeads()
    outputs = model(words)
    expected = summed(outputs[0], targets[:, :LENGTH]) / (targets[:, :LENGTH] != -100).sum()
    expected = expected + F.cross_entropy(outputs[1], targets[:, LENGTH])
    step = lockstep.parallelize(
        model, bert, sgd, devices="2xcpu", counts=masked_and_sentences, accumulate=2
    )
    result = step(words, targets)
    assert result.loss == pytest.approx(expected.item(), rel=1e-5)
    assert result.count == SAMPLES


def own_loop(world: lockstep.World | None) -> list[float]:
    """Train by hand; ranks have 3, 3, 2 samples, then one has none."""
    torch.manual_seed(0)
    where: dict[str, Any] = {} if world is not None else {"strategy": "single"}
    model = TwoHeads().double()
    step = lockstep.parallelize(model, bert, sgd, counts=masked_and_sentences, **where)
    words, targets = data().tensors
    losses = []
    for start, end in ((0, 8), (8, 16), (16, 18)):
        rows = torch.arange(start, end)
        if world is not None:
            rows = rows.tensor_split(world.size)[world.rank]
        mine: tuple[Any, Any] = (words[rows], targets[rows]) if len(rows) else (None, None)
        losses.append(step(*mine).loss)
        _, total, count = step.evaluate(*mine)
        sums = torch.tensor([float(total), float(count)], dtype=torch.float64)
        if world is not None:
            world.all_reduce(sums)
        losses.append(float(sums[0] / sums[1]))
    return losses


def test_a_loop_of_ones_own_counts_over_all_ranks() -> None:
    found = lockstep.launch(own_loop, devices="3xcpu")[0]
    assert found == pytest.approx(own_loop(None), rel=BOUND)


def test_an_update_whose_count_is_zero_is_skipped_on_all_ranks() -> None:
    """No word of one batch is masked, so that the share is 0 / 0."""
    words, targets = data().tensors
    targets[8:16, :LENGTH] = -100
    job = job_of("two heads", shuffle=False, nonfinite="skip")
    job = job.replace(train_data=TensorDataset(words, targets), eval_data=None)
    found = parity(job, "ddp", "2xcpu")
    assert found.within(BOUND), str(found)


def test_a_batch_whose_labels_are_all_ignored_is_skipped() -> None:
    """The model gives 0 / 0."""
    words, targets = data().tensors
    targets[8:16, :LENGTH] = -100
    data_set = TensorDataset(words, targets)
    job = job_of("model_loss").replace(shuffle=False, train_data=data_set, eval_data=data_set)
    found = parity(job, "dp", "2xcpu")
    assert found.within(BOUND), str(found)


# ---- what is refused -----------------------------------------------------------------------------


def mean_of_two_means(outputs: Any, targets: Tensor, counts: dict[str, Tensor]) -> Tensor:
    return F.cross_entropy(outputs[1], targets[:, LENGTH]) * len(targets) / counts["sentences"] + (
        outputs[0].square().mean()
    )


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "a mean": ({"loss": mean_of_two_means}, "shares of the loss don't add up"),
    "a pair": ({"loss": lambda *given: (given[0][1].sum(), 4)}, "it returns a share of the loss"),
    "PyTorch's": ({"loss": nn.CrossEntropyLoss()}, "takes outputs and targets only"),
    "two arguments": ({"loss": lambda outputs, targets: 0.0}, "takes 2 positional arguments"),
    "no dict": ({"counts": len}, "a dict of numbers by name is expected, not a int"),
    "a mean of numbers": (
        {"counts": lambda targets: {**masked_and_sentences(targets), "mean": targets[0, 0]}},
        "return sums over samples",
    ),
    "no number": ({"counts": lambda targets: {"words": "many"}}, '"words" is a str'),
    "another name": (
        {"counts": lambda targets: {**masked_and_sentences(targets), f"{targets[0, 0]}": 1}},
        "return all numbers for any samples",
    ),
    "no items": (
        {**LOSSES["model_loss"], "counts": lambda labels: {"labels": 1}},
        'the counts have no "num_items_in_batch"',
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_no_share_or_no_number_is_refused(case: str) -> None:
    fields, message = REFUSED[case]
    job = job_of("two heads", **{"accumulate": 2, **fields})
    with pytest.raises(LockstepError, match=re.escape(message)):
        lockstep.train(job, strategy="single", devices="1xcpu", quiet=True)


class Forgetful(OwnLoss):
    """Takes the number, and gives the mean."""

    def forward(self, words: Tensor, labels: Tensor, **others: Any) -> dict[str, Tensor]:
        return super().forward(words, labels)


def test_a_model_that_ignores_the_number_of_items_is_refused() -> None:
    job = job_of("model_loss", model=Forgetful, accumulate=2)
    with pytest.raises(LockstepError, match="the total of the loss is"):
        lockstep.train(job, strategy="single", devices="1xcpu", quiet=True)


def test_hogwild_step_functions_and_parts_of_a_batch_are_refused() -> None:
    with pytest.raises(LockstepError, match="take ddp"):
        lockstep.train(job_of("two heads"), strategy="hogwild", devices="2xcpu", quiet=True)
    with pytest.raises(JobError, match="counts: a step function"):
        Job(
            model=lambda: {"heads": TwoHeads()},
            step=lambda models, batch, update: None,
            optimizer={"heads": torch.optim.SGD},
            counts=len,
            train_data=data(),
            batch_size=8,
        )
    step = lockstep.parallelize(TwoHeads(), bert, sgd, devices="1xcpu", counts=masked_and_sentences)
    with pytest.raises(LockstepError, match="counts= needs the whole batch"):
        step.backward(*data()[:8])
