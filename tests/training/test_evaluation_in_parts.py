"""What evaluations, predictions and metrics make of models and losses that act on more than
single samples.
"""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from lockstep import Job, Loss, evaluate, predict, train
from lockstep.errors import JobError, LossError, StrategyError

from zoo import drawn, labels, plain_sgd, slow  # isort: skip

SAMPLES = 22
DATA = TensorDataset(drawn(SAMPLES, 6), labels(SAMPLES, 3))


def job_of(model: Any, **settings: Any) -> Job:
    fields: dict[str, Any] = {
        "loss": nn.CrossEntropyLoss(),
        "optimizer": plain_sgd,
        "train_data": DATA,
    }
    return Job(
        model=model,
        batch_size=8,
        epochs=1,
        precision="fp64",
        **{**fields, "eval_data": DATA, **settings},
    )


def run_of(model: Any, tmp_path: Path, **settings: Any) -> Any:
    return train(job_of(model, **settings), devices="1xcpu", folder=tmp_path, quiet=True)


# ---- losses that are checked with what they read -------------------------------------------------


class Scaled(nn.Module):
    """Gives a scale that it learns beside its outputs."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.scale = nn.Linear(6, 3), nn.Parameter(torch.tensor(0.5))

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        return {
            "logits": self.layer(x),
            "scale": self.scale.exp(),
            "spread": self.layer(x).square().sum(),
        }


def per_sample(outputs: dict[str, Tensor], targets: Tensor) -> Tensor:
    logits = outputs["logits"] / outputs["scale"]
    return nn.functional.cross_entropy(logits, targets, reduction="none", ignore_index=-1)


def masked_mean(outputs: dict[str, Tensor], targets: Tensor) -> tuple[Tensor, int]:
    return per_sample(outputs, targets).sum() / (targets >= 0).sum() * len(targets), len(targets)


def masked_sum(outputs: dict[str, Tensor], targets: Tensor) -> tuple[Tensor, Tensor]:
    return per_sample(outputs, targets).sum() + 0.01 * outputs["spread"], (targets >= 0).sum()


def late(*missing: int) -> TensorDataset:
    targets = labels(SAMPLES, 3).clone()
    targets[list(missing)] = -1
    return TensorDataset(drawn(SAMPLES, 6), targets)


@pytest.mark.parametrize("way", ["dp", "ddp"])
def test_a_mask_that_comes_late_is_found_where_the_loss_divides_by_an_output_of_the_model(
    way: str, tmp_path: Path
) -> None:
    """Found by trial: with zeros in the place of the scale nothing was ever checked."""
    job = job_of(Scaled, loss=masked_mean, train_data=late(9, 10), shuffle=False, eval_data=None)
    with pytest.raises(StrategyError, match=r"in update 2, .* the total of the loss is"):
        train(job, strategy=way, devices="2xcpu", folder=tmp_path, quiet=True)


@pytest.mark.parametrize("way", ["dp", slow("ddp")])
def test_a_loss_that_adds_up_beside_such_outputs_is_taken(way: str, tmp_path: Path) -> None:
    job = job_of(Scaled, loss=masked_sum, train_data=late(17, 18), shuffle=False, eval_data=None)
    one = train(job, devices="1xcpu", folder=tmp_path, quiet=True)
    other = train(job, strategy=way, devices="2xcpu", folder=tmp_path, quiet=True)
    found, wanted = other.model().state_dict(), one.model().state_dict()
    assert all((found[name] - wanted[name]).abs().max() < 1e-10 for name in wanted)


def weighted_mean(outputs: Tensor, targets: tuple[Tensor, Tensor]) -> tuple[Tensor, int]:
    wanted, weights = targets
    each = nn.functional.cross_entropy(outputs, wanted, reduction="none") * weights[wanted]
    return each.sum() / weights[wanted].sum() * len(wanted), len(wanted)


def with_weights(samples: list[Any]) -> Any:
    x, y = (torch.stack(of) for of in zip(*samples, strict=True))
    return x, (y, torch.tensor([1.0, 2.0, 8.0], dtype=torch.float64))


def test_weights_of_classes_beside_the_targets_are_left_as_they_are_in_the_check(
    tmp_path: Path,
) -> None:
    """Found by trial: the check was left out without a line."""
    job = job_of(lambda: nn.Linear(6, 3), loss=weighted_mean, collate=with_weights, eval_data=None)
    with pytest.raises(StrategyError, match="the total of the loss is"):
        train(job, strategy="dp", devices="2xcpu", folder=tmp_path, quiet=True)


def mean_of_items(outputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    counted = targets >= 0
    return nn.functional.cross_entropy(
        outputs[counted], targets[counted]
    ) * counted.sum(), counted.sum()


def test_an_evaluation_with_a_local_batch_of_no_item_has_a_loss(tmp_path: Path) -> None:
    """Found by trial: it was NaN."""
    data = late(*range(4, 8))
    run = run_of(
        lambda: nn.Linear(6, 3), tmp_path, loss=mean_of_items, eval_data=data, eval_batch_size=8
    )
    assert evaluate(run, strategy="dp", devices="2xcpu")["loss"] == pytest.approx(
        run.metrics["loss"], rel=1e-10
    )


# ---- what evaluations say ------------------------------------------------------------------------


class Adapting(nn.Module):
    """Its batch norm stays in training."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.layer = nn.BatchNorm1d(6), nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.layer(self.norm(x))
        return out

    def train(self, mode: bool = True) -> Adapting:
        super().train(mode)
        self.norm.train()
        return self


def test_a_batch_norm_that_stays_in_training_is_said(tmp_path: Path, capfd: Any) -> None:
    """Found by trial: in trainings only."""
    evaluate(run_of(Adapting, tmp_path), strategy="dp", devices="2xcpu")
    assert "BatchNorm normalizes over the local batch in evaluation" in capfd.readouterr().out


def stacked(samples: list[Any]) -> Any:
    x, y = (torch.stack(of) for of in zip(*samples, strict=True))
    return x, y


def test_a_collate_is_said_in_evaluations_and_predictions(tmp_path: Path, capfd: Any) -> None:
    """Found by trial: in trainings only."""
    run = run_of(lambda: nn.Linear(6, 3), tmp_path, collate=stacked)
    for use in (
        lambda: evaluate(run, strategy="dp", devices="2xcpu"),
        lambda: predict(run, strategy="dp", devices=2),
    ):
        use()
        assert "collate gets each device's local batch" in capfd.readouterr().out


class Reusing(nn.Module):
    """Gives rows of a buffer, which the next batch is written to."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(6, 8), nn.Linear(8, 3)
        self.register_buffer("room", torch.zeros(32, 3), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.last(self.first(x))
        if self.training:
            return out
        self.room[: len(out)] = out
        return self.room[: len(out)]  # type: ignore[no-any-return]


@pytest.mark.parametrize("way", ["mp", "pp"])
def test_outputs_that_share_memory_are_those_of_their_batch(way: str, tmp_path: Path) -> None:
    """Found by trial: several batches are under way, and the last one's were given."""
    run = run_of(Reusing, tmp_path)
    data = TensorDataset(drawn(SAMPLES, 6))
    one, other = (
        predict(run, data, devices=1, quiet=True),
        predict(run, data, strategy=way, devices="2xcpu", quiet=True),
    )
    assert (one - other).abs().max() < 1e-12


def hardest(outputs: Tensor, targets: Tensor) -> tuple[Tensor, int]:
    return nn.functional.cross_entropy(outputs, targets, reduction="none").topk(
        min(4, len(targets))
    ).values.sum(), 4


def test_the_hardest_samples_of_a_local_batch_are_no_sum_in_an_evaluation(tmp_path: Path) -> None:
    """Found by trial: where all of a local batch are counted, their sums add up."""
    run = run_of(lambda: nn.Linear(6, 3), tmp_path, loss=hardest)
    with pytest.raises(LossError, match="is not a sum over samples"):
        evaluate(run, strategy="dp", devices="2xcpu")


class Cropping(nn.Module):
    """Outputs as long as the longest sample of the batch."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x)[:, : int((x != 0).sum(1).max())]


def of_known(outputs: Tensor, targets: tuple[Tensor, Tensor]) -> Any:
    values, lengths = targets
    mask = torch.arange(outputs.shape[1]) < lengths[:, None]
    total = ((outputs - values[:, : outputs.shape[1]]).square() * mask).sum()
    return Loss(total, len(values), parts={"activation": mean_of(outputs, targets)})


def mean_of(outputs: Tensor, targets: tuple[Tensor, Tensor]) -> tuple[Tensor, int]:
    return outputs.abs().mean() * len(outputs), len(outputs)


@pytest.mark.parametrize("training", [True, False])
def test_a_part_that_counts_the_padding_of_outputs_is_refused(
    training: bool, tmp_path: Path
) -> None:
    """Found by trial: 0.07 to 0.22 off without a line: parts are cut of outputs of one forward."""
    lengths = torch.arange(16) // 4 % 2 * 2 + 4
    x = drawn(16, 6).double() * (torch.arange(6) < lengths[:, None])
    data = [(x[i], (drawn(6, seed=i).double(), lengths[i])) for i in range(16)]
    job = job_of(Cropping, loss=of_known, train_data=data, eval_data=data, shuffle=False)
    run = train(job, devices="1xcpu", folder=tmp_path, quiet=True)
    with pytest.raises(StrategyError, match='the total of part "activation" of the loss is'):
        if training:
            train(job, strategy="dp", devices="2xcpu", folder=tmp_path, quiet=True)
        else:
            evaluate(run, strategy="dp", devices="2xcpu")


class Confusion:
    """Keeps a matrix beside its value, and the largest probability so far."""

    def __init__(self) -> None:
        self.matrix, self.calls = torch.zeros(3, 3), 0

    def __call__(self, outputs: Tensor, targets: Tensor) -> tuple[Tensor, int]:
        self.calls += 1
        for found, wanted in zip(outputs.argmax(1), targets, strict=True):
            self.matrix[found, wanted] += 1
        return (outputs.argmax(1) == targets).sum(), len(targets)


class OfNumpy(Confusion):
    """Keeps an array, and draws."""

    def __init__(self) -> None:
        super().__init__()
        self.matrix, self.draws = np.zeros((3, 3)), random.Random(0)

    def __call__(self, outputs: Tensor, targets: Tensor) -> tuple[Tensor, int]:
        self.draws.random()
        return super().__call__(outputs, targets)


@pytest.mark.sweep
@pytest.mark.parametrize("kind", [Confusion, OfNumpy])
@pytest.mark.parametrize("way", ["single", "dp", "mp"])
def test_what_a_metric_keeps_is_of_the_evaluations_alone(
    way: str, kind: Any, tmp_path: Path
) -> None:
    """Found by trial: the first trial wrote to it, too."""
    metric = kind()
    job = job_of(
        lambda: nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 3)), metrics={"accuracy": metric}
    )
    train(job, strategy=way, devices="1xcpu" if way == "single" else "2xcpu", folder=tmp_path)
    assert metric.matrix.sum() == SAMPLES and metric.calls == (6 if way == "dp" else 3)


class Packed(nn.Module):
    """Its outputs are as long as the longest sample."""

    def __init__(self) -> None:
        super().__init__()
        self.rnn, self.head = nn.GRU(3, 3, batch_first=True), nn.Linear(3, 2)

    def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
        packed = nn.utils.rnn.pack_padded_sequence(
            x, lengths.cpu(), batch_first=True, enforce_sorted=False
        )
        return self.head(nn.utils.rnn.pad_packed_sequence(self.rnn(packed)[0], batch_first=True)[0])  # type: ignore[no-any-return]


def padded_error(outputs: Tensor, targets: Tensor) -> tuple[Tensor, int]:
    return (outputs - targets[:, : outputs.shape[1]]).square().flatten(1).mean(1).sum(), len(
        targets
    )


def masked_error(outputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    targets = targets[:, : outputs.shape[1]]
    is_there = targets != 0
    return ((outputs - targets).square() * is_there).sum(), is_there.sum()


@pytest.mark.parametrize("loss", [padded_error, masked_error])
def test_padding_that_a_loss_counts_is_refused_though_both_halves_have_a_longest_sample(
    loss: Any, tmp_path: Path
) -> None:
    lengths = torch.tensor(
        [2, 4, 3, 4, 5, 3, 4, 5]
    )  # of 5 steps: the first device's are 2 to 4, the second's 3 to 5
    x, y = (
        drawn(8, 5, width) * (torch.arange(5) < lengths[:, None])[..., None] for width in (3, 2)
    )
    data = [((x[i], lengths[i]), y[i]) for i in range(8)]
    run = run_of(Packed, tmp_path, loss=loss, train_data=data, eval_data=data)
    if loss is padded_error:
        with pytest.raises(StrategyError, match=r"in batch 1 of an evaluation, .*the total of the"):
            evaluate(run, strategy="ddp", devices="2xcpu")
        return
    one, two = (
        evaluate(run, strategy=way, devices=devices)["loss"]
        for way, devices in (("single", "1xcpu"), ("ddp", "2xcpu"))
    )
    assert abs(one - two) < 1e-12


class Experts(nn.Module):
    """Says which of four experts are used, and how much, beside its outputs: as many as a local
    batch has samples.
    """

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.head = nn.Linear(6, 4), nn.Linear(6, 3)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        gates = self.gate(x).softmax(1)
        used = torch.bincount(gates.argmax(1), minlength=4) > 0
        return {
            "logits": self.head(x) * gates.amax(1, keepdim=True),
            "used": used,
            "load": gates.sum(0),
        }


def of_gated(outputs: dict[str, Tensor], targets: Tensor) -> tuple[Tensor, int]:
    return nn.functional.cross_entropy(outputs["logits"], targets, reduction="sum"), len(targets)


def with_unused(outputs: dict[str, Tensor], targets: Tensor) -> Loss:
    total, count = of_gated(outputs, targets)
    unused = (~outputs["used"]).sum()
    return Loss(total + 0.1 * unused, count, {"unused": (unused, count)})


class Sampled(nn.Module):
    """Drops in evaluation, too."""

    def __init__(self) -> None:
        super().__init__()
        self.dropout, self.head = nn.Dropout(0.5), nn.Linear(6, 3)

    def train(self, mode: bool = True) -> Sampled:
        super().train(mode)
        self.dropout.train()
        return self

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.dropout(x))  # type: ignore[no-any-return]


def test_dropout_that_draws_in_evaluation_is_said(tmp_path: Path, capfd: Any) -> None:
    run = run_of(Sampled, tmp_path)
    capfd.readouterr()
    evaluate(run, strategy="dp", devices="2xcpu")
    assert "the model draws random numbers in evaluation" in capfd.readouterr().out


class Balanced(nn.Module):
    """Beside its outputs a sum, a constant and a balance of its experts, which is NaN where
    there is one sample.
    """

    def __init__(self) -> None:
        super().__init__()
        self.head, self.scale = nn.Linear(6, 3), nn.Parameter(torch.zeros(()))

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        logits = self.head(x)
        balance = logits.softmax(1).var(0).sum()
        return {
            "logits": logits,
            "scale": self.scale.exp(),
            "size": logits.square().sum(),
            "balance": balance,
            "positive": (logits > 0).sum(),
        }


def with_guarded_balance(outputs: dict[str, Tensor], targets: Tensor) -> tuple[Tensor, int]:
    total, count = of_gated(outputs, targets)
    total = total + 0.01 * outputs["size"]
    if torch.isfinite(outputs["balance"]):
        total = total + count * outputs["balance"]
    return total, count


def with_weights_by_counts(outputs: dict[str, Tensor], targets: Tensor) -> tuple[Tensor, int]:
    total, count = of_gated(outputs, targets)
    return total / (1 + outputs["positive"]), count


class OwnMean(nn.Module):
    """Gives the mean of its own loss over the labels that count, NaN where there is none."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(6, 3)

    def forward(self, x: Tensor, y: Tensor) -> dict[str, Tensor]:
        logits = self.head(x)
        return {"logits": logits, "mean": nn.functional.cross_entropy(logits, y, ignore_index=2)}


def times_their_number(outputs: dict[str, Tensor], targets: Tensor) -> tuple[Tensor, Tensor]:
    count = (targets != 2).sum()
    return torch.nan_to_num(outputs["mean"]) * count, count


@pytest.mark.parametrize("way", ["dp", "ddp"])
def test_a_mean_of_the_model_times_its_items_behind_a_guard_is_right(
    way: str, tmp_path: Path
) -> None:
    """Found by trial: zeros were in its place, and the loss was no sum."""
    y = torch.tensor([0, 1, 2, 2, 1, 2, 0, 2] * 3)
    data = [((x, label), label) for x, label in zip(drawn(24, 6), y, strict=True)]
    job = job_of(OwnMean, loss=times_their_number, train_data=data, eval_data=None)
    one, two = (
        train(job, strategy=strategy, devices=devices, folder=tmp_path, quiet=True)
        for strategy, devices in (("single", "1xcpu"), (way, "2xcpu"))
    )
    assert abs(one.history[-1]["train_loss"] - two.history[-1]["train_loss"]) < 1e-12


@pytest.mark.sweep
@pytest.mark.parametrize(
    ("model", "loss"),
    [(Balanced, with_guarded_balance), (Balanced, with_weights_by_counts), (Experts, with_unused)],
)
@pytest.mark.parametrize("way", ["single", "dp", "ddp"])
def test_a_loss_of_what_the_model_computes_over_all_samples_is_refused(
    model: Any, loss: Any, way: str, tmp_path: Path
) -> None:
    """Found by trial: behind a guard, beside a constant, or of as many experts as a local batch
    has samples.
    """
    job = job_of(model, loss=loss, eval_data=None, accumulate=2 if way == "single" else 1)
    devices = "1xcpu" if way == "single" else "2xcpu"
    with pytest.raises(StrategyError, match=r"in update 1, .* the total of .* is"):
        train(job, strategy=way, devices=devices, folder=tmp_path, quiet=True)


def mean_of_words(outputs: Tensor, targets: Tensor) -> Tensor:
    return ((outputs * (targets >= 0)).square().sum()) / (targets >= 0).sum()


def masked_words(batches: int, uneven: int, *, within: bool) -> TensorDataset:
    """Batches of 16 samples, of which one batch has unequal masks: within each local batch, or
    only between both.
    """
    targets = torch.zeros(16 * batches, 3, dtype=torch.long)
    targets[:, 2] = -1
    batch = targets[16 * (uneven - 1) :][:16]
    batch[1 if within else slice(8, 16), 1] = -1
    return TensorDataset(drawn(len(targets), 6), targets)


@pytest.mark.parametrize("writes", ["outputs", "targets"])
def test_a_metric_that_writes_to_what_it_is_given_is_refused(writes: str, tmp_path: Path) -> None:
    def accuracy(outputs: torch.Tensor, targets: torch.Tensor) -> tuple[torch.Tensor, int]:
        {"outputs": outputs, "targets": targets}[writes].zero_()
        return (outputs.argmax(-1) == targets).sum(), len(targets)

    with pytest.raises(JobError, match='metrics: "accuracy" writes to the outputs or targets'):
        run_of(lambda: nn.Linear(6, 3), tmp_path, metrics={"accuracy": accuracy})
