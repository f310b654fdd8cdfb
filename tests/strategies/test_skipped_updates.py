"""Updates that are skipped: nothing counts in the batch or, with ``nonfinite="skip"``, something
isn't finite.
"""

from __future__ import annotations

import math
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import lockstep
from lockstep import Job, train
from lockstep.checkpoint.weights import load_weights
from lockstep.errors import JobError, NonFiniteLoss, RunError
from lockstep.launch.devices import parse
from lockstep.launch.world import World
from lockstep.model.build import build_model
from lockstep.run.run_folder import RunFolder
from lockstep.strategies import named
from lockstep.strategies.ddp import DDP
from lockstep.strategies.pp import PP

from zoo import drawn, mlp  # isort: skip

NAN = float("nan")
BATCHES = 6
SAMPLES = 45  # in batches of 8: 8, 8, 8, 8, 8, 5
EMPTY, BAD_INPUT, BAD_TARGET = 1, 2, 4
"""Batches in which nothing counts, the loss is NaN, and the gradient is though the loss isn't."""


def adamw(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=0.05, weight_decay=0.1)


def known(outputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """Targets that are NaN don't count; ``torch.where`` has NaN gradients of them where the
    outputs act.
    """
    kept = ~targets.isnan()
    return torch.where(kept, (outputs - targets).square().sqrt(), 0.0).sum(), kept.sum()


def counted(outputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    kept = ~targets.isnan()
    return (outputs - targets.nan_to_num()).square()[kept].sum(), kept.sum()


def in_place_order(epoch: int) -> Tensor:
    return torch.arange(SAMPLES)


def halved(optimizer: torch.optim.Optimizer) -> Any:
    return torch.optim.lr_scheduler.StepLR(optimizer, 4, gamma=0.5)


def data(*batches: int) -> TensorDataset:
    """Samples of which those batches are ill."""
    inputs, targets = drawn(SAMPLES, 6), drawn(SAMPLES, 3, seed=3)
    for number in batches:
        rows = slice(8 * number, 8 * number + 8)
        if number == EMPTY:
            targets[rows] = NAN
        if number == BAD_INPUT:
            inputs[8 * number + 6, 2] = NAN  # the second rank has it
        if number == BAD_TARGET:
            targets[8 * number + 1, 0] = NAN  # and the first rank this
    return TensorDataset(inputs, targets)


def job(*batches: int, **settings: Any) -> Job:
    fields: dict[str, Any] = {
        "model": mlp,
        "loss": counted,
        "optimizer": adamw,
        "train_data": data(*batches),
        "batch_size": 8,
        "epochs": 2,
        "order": in_place_order,
        "lr_scheduler": halved,
        "lr_scheduler_every": "step",
        "precision": "fp64",
    }
    return Job(**{**fields, **settings})


def plain_loop(of: Job, skipped: set[int]) -> tuple[dict[str, Tensor], list[float]]:
    """The same training in PyTorch alone, without the optimizer's step in those batches: weights
    and epochs' losses.
    """
    model = build_model(of, World(devices=parse("1xcpu")))
    optimizer = of.optimizer(list(model.named_parameters()))
    scheduler = halved(optimizer)
    optimizer._opt_called = True  # else the scheduler warns of a first update without a step
    losses = []
    for _ in range(2):
        sums = [0.0, 0.0]
        for number in range(BATCHES):
            inputs, targets = of.train_data[8 * number : 8 * number + 8]
            if number not in skipped:
                optimizer.zero_grad()
                total, count = of.loss(model(inputs.double()), targets.double())
                (total / count).backward()
                optimizer.step()
                sums = [sums[0] + total.item(), sums[1] + float(count)]
            scheduler.step()
        losses.append(sums[0] / sums[1])
    return model.state_dict(), losses


def apart(run: Any, expected: dict[str, Tensor]) -> float:
    found = load_weights(RunFolder(run.folder).model)
    assert found.keys() == expected.keys()
    return max(float((found[name] - value).abs().max()) for name, value in expected.items())


WAYS: dict[str, tuple[Any, str]] = {
    "single": ("single", "1xcpu"),
    "dp": ("dp", "2xcpu"),
    "ddp": (DDP(reduce="flat"), "2xcpu"),
    "ddp overlapped": (DDP(reduce="overlapped"), "2xcpu"),
    "fsdp": ("fsdp", "2xcpu"),
    "pp": (PP(microbatches=2), "2xcpu"),
    "ddp=2xpp=2": (named("ddp=2xpp=2", microbatches=2), "4xcpu"),
}
SLOW = {"ddp=2xpp=2"}


@pytest.mark.parametrize(
    "way", [pytest.param(w, marks=[pytest.mark.slow] * (w in SLOW)) for w in WAYS]
)
def test_a_run_with_skipped_updates_is_a_plain_loop_without_them(
    way: str, tmp_path: Path, capfd: Any
) -> None:
    strategy, devices = WAYS[way]
    ill = {EMPTY, BAD_INPUT, BAD_TARGET}
    of = job(*ill, loss=known, nonfinite="skip")
    weights, losses = plain_loop(of, ill)
    run = train(of, strategy=strategy, devices=devices, folder=tmp_path)
    assert apart(run, weights) < 1e-10
    assert [record["train_loss"] for record in run.history] == pytest.approx(losses, rel=1e-10)
    assert run.summary["skipped_updates"] == 6 and run.summary["steps"] == 12
    out = capfd.readouterr().out
    assert out.count("step 8: the loss counted no item in the batch, so the update is skipped") == 1
    assert out.count("step 9: the loss became NaN or infinite, so the update is skipped") == 1
    assert out.count("step 11: a gradient became NaN or infinite, so the update is skipped") == 1
    assert "6 updates skipped" in out


@pytest.mark.parametrize("way", ["single", "dp", "ddp"])
def test_an_update_that_counts_nothing_is_skipped_in_any_case(way: str, tmp_path: Path) -> None:
    of = job(EMPTY)
    weights, losses = plain_loop(of, {EMPTY})
    strategy, devices = WAYS[way]
    run = train(of, strategy=strategy, devices=devices, folder=tmp_path, quiet=True)
    assert apart(run, weights) < 1e-10
    assert [record["train_loss"] for record in run.history] == pytest.approx(losses, rel=1e-10)
    assert run.summary["skipped_updates"] == 2


def first_is_ill(row: int) -> TensorDataset:
    inputs, targets = data().tensors
    inputs[row] = NAN
    return TensorDataset(inputs, targets)


@pytest.mark.parametrize("way", ["dp", "ddp", "fsdp", pytest.param("pp", marks=pytest.mark.slow)])
def test_the_first_update_may_be_skipped_and_be_cut_in_parts(way: str, tmp_path: Path) -> None:
    """What is looked at in the first update finds NaN then."""
    of = job(train_data=first_is_ill(5), nonfinite="skip", accumulate=2)
    weights, _ = plain_loop(of, {0})
    strategy, devices = WAYS[way]
    run = train(of, strategy=strategy, devices=devices, folder=tmp_path, quiet=True)
    assert apart(run, weights) < 1e-10


def test_a_gradient_that_is_not_finite_in_one_shard_is_skipped_on_all_ranks(tmp_path: Path) -> None:
    """Only the first output's weights have it, which rank 0 holds; the other rank's shard is
    finite.
    """
    of = job(BAD_TARGET, loss=known, nonfinite="skip", model=lambda: nn.Linear(6, 3))
    weights, _ = plain_loop(of, {BAD_TARGET})
    run = train(of, strategy="fsdp", devices="2xcpu", folder=tmp_path, quiet=True)
    assert apart(run, weights) < 1e-10
    assert run.summary["skipped_updates"] == 2


def nothing_counts(outputs: Tensor, targets: Tensor) -> tuple[Tensor, int]:
    return outputs.sum() * 0, 0


def diverges(outputs: Tensor, targets: Tensor) -> Tensor:
    return outputs.sum() * NAN


LIMITS: dict[str, tuple[dict[str, Any], type[Exception], str]] = {
    "nothing counts": (
        {"loss": nothing_counts},
        RunError,
        "step 11: the loss counted 0 items in the batch, and the 10 updates before it were "
        "skipped: are all targets",
    ),
    "nothing counts in a short training": (
        {"loss": nothing_counts, "steps": 5},
        RunError,
        r"all 5 updates were skipped: are all targets ignored, or NaN\?",
    ),
    "a limit of 0": (
        {"loss": nothing_counts, "nonfinite_limit": 0},
        RunError,
        "step 1: the loss counted 0 items in the batch: are all targets ignored",
    ),
    "not finite": (
        {"loss": diverges, "nonfinite": "skip", "nonfinite_limit": 3},
        NonFiniteLoss,
        "the loss became nan at step 4 on .*: the model's outputs are finite, so the loss itself "
        "divides by 0",
    ),
    "gradients": (
        {"train_data": data(BAD_TARGET), "loss": known, "nonfinite": "skip", "nonfinite_limit": 0},
        NonFiniteLoss,
        "a gradient became NaN or infinite at step 5 on rank 0",
    ),
    "not asked for": ({"loss": diverges}, NonFiniteLoss, "the loss became nan at step 1 on"),
}


@pytest.mark.parametrize("kind", LIMITS)
def test_too_many_in_a_row_end_the_training(kind: str, tmp_path: Path) -> None:
    settings, error, says = LIMITS[kind]
    with pytest.raises(error, match=says) as caught:
        train(job(**settings), devices="1xcpu", folder=tmp_path, quiet=True)
    assert "\n" not in str(caught.value)


def test_ranks_end_together_after_too_many(tmp_path: Path) -> None:
    of = job(loss=diverges, nonfinite="skip", nonfinite_limit=2)
    with pytest.raises(NonFiniteLoss, match="the loss became nan at step 3 on rank"):
        train(of, strategy="ddp", devices="2xcpu", folder=tmp_path, quiet=True)


def test_skipped_updates_are_counted_over_a_resume(tmp_path: Path) -> None:
    of = job(EMPTY, BAD_INPUT, nonfinite="skip")
    weights, _ = plain_loop(of, {EMPTY, BAD_INPUT})
    run = train(of, devices="1xcpu", folder=tmp_path, quiet=True, epochs=1)
    assert run.summary["skipped_updates"] == 2
    run = train(of, resume=run.folder, quiet=True, epochs=2)
    assert run.summary["skipped_updates"] == 4
    assert apart(run, weights) < 1e-10


def test_a_scheduler_that_reads_losses_is_not_shown_those_of_skipped_updates(
    tmp_path: Path,
) -> None:
    """It would count a loss that is NaN as one that is no better."""
    shown = []

    class Plateau(torch.optim.lr_scheduler.ReduceLROnPlateau):
        def step(self, metrics: Any, epoch: Any = None) -> None:
            shown.append(float(metrics))
            super().step(metrics)

    of = job(EMPTY, BAD_INPUT, nonfinite="skip", lr_scheduler=Plateau)
    train(of, devices="1xcpu", folder=tmp_path, quiet=True)
    assert len(shown) == 8 and all(map(math.isfinite, shown))


@pytest.mark.parametrize("strategy", ["single", "dp"])
def test_a_loop_of_ones_own_is_told(strategy: str) -> None:
    of = job(EMPTY, BAD_INPUT, loss=known)
    weights, _ = plain_loop(of, {EMPTY, BAD_INPUT})
    model = build_model(of, World(devices=parse("1xcpu")))
    step = lockstep.parallelize(
        model,
        known,
        adamw,
        strategy=strategy,
        devices="1xcpu" if strategy == "single" else "2xcpu",
        nonfinite="skip",
        precision="fp64",
    )
    scheduler = halved(step.optimizer)
    skipped = []
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        for number in range(2 * BATCHES):
            first = 8 * (number % BATCHES)
            inputs, targets = of.train_data[first : first + 8]
            if number < BATCHES:
                result = step(inputs, targets)
            else:  # in two parts
                step.backward(inputs[:4], targets[:4])
                step.backward(inputs[4:], targets[4:])
                result = step.update()
            skipped.append(result.skipped)
            scheduler.step()
    assert [i for i, was in enumerate(skipped) if was] == [1, 2, 7, 8]
    assert sum(str(one.message).endswith("so the update is skipped") for one in warned) == 4
    ends = {name: p.detach() for name, p in model.named_parameters()}
    assert max(float((p - weights[name]).abs().max()) for name, p in ends.items()) < 1e-10


def test_fp16_goes_on_after_a_skipped_update(tmp_path: Path) -> None:
    """Its scaler makes no step either, so that its scale isn't halved, and no update is begun
    twice.
    """
    of = job(EMPTY, BAD_INPUT, nonfinite="skip", precision="fp16", epochs=3)
    run = train(of, devices="1xcpu", folder=tmp_path, quiet=True)
    assert run.summary["skipped_updates"] == 6
    assert all(math.isfinite(record["train_loss"]) for record in run.history)


def test_ranks_of_hogwild_skip_by_themselves(tmp_path: Path, capfd: Any) -> None:
    of = job(
        EMPTY,
        BAD_INPUT,
        nonfinite="skip",
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.01),
    )
    run = train(of, strategy="hogwild", devices="2xcpu", folder=tmp_path)
    out = capfd.readouterr().out
    for rank in (0, 1):
        assert (
            f"step 2 on rank {rank}: the loss counted no item in the batch, so the update is "
            "skipped" in out
        )
    assert "step 3 on rank 1: the loss became NaN" in out and "step 3 on rank 0" not in out
    assert run.summary["skipped_updates"] == 6


def test_a_step_function_refuses_to_skip() -> None:
    with pytest.raises(
        JobError, match=r"^nonfinite: a step function makes several updates, and skipping one"
    ):
        job(
            step=lambda models, batch, update: None,
            optimizer={"0": adamw},
            lr_scheduler=None,
            nonfinite="skip",
        )


def own_loop(
    *, as_on_accelerator: bool, fused: bool = True, **settings: Any
) -> tuple[Any, dict[str, Tensor]]:
    """Some updates of which one counts nothing, perhaps with the branches taken that
    accelerators take.
    """
    of = job(EMPTY)
    model = build_model(of, World(devices=parse("1xcpu")))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05, weight_decay=0.1, fused=fused)
    step = lockstep.parallelize(
        model, counted, optimizer, devices="1xcpu", precision="fp64", fused=fused, **settings
    )
    step._on_accelerator = as_on_accelerator
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for number in range(BATCHES):
            step(*of.train_data[8 * number : 8 * number + 8])
        step.check()
    return step, {name: p.detach() for name, p in model.named_parameters()}


@pytest.mark.parametrize("settings", [{}, {"nonfinite": "skip"}], ids=str)
def test_a_fused_optimizer_on_an_accelerator_skips_what_the_host_has_not_read(
    settings: dict[str, Any],
) -> None:
    here, weights = own_loop(as_on_accelerator=False, **settings)
    there, others = own_loop(as_on_accelerator=True, **settings)
    assert here.skips.number == there.skips.number == 1
    assert all(
        torch.allclose(weights[name], value, rtol=0, atol=1e-12) for name, value in others.items()
    )


def test_another_optimizer_on_an_accelerator_says_what_to_do() -> None:
    with pytest.raises(
        RunError, match=r'step 2: the loss counted 0 items .* Use nonfinite="skip" or a fused'
    ):
        own_loop(as_on_accelerator=True, fused=False)
    step, _ = own_loop(as_on_accelerator=True, fused=False, nonfinite="skip")
    assert step.skips.number == 1


def test_a_count_that_is_not_finite_is_skipped() -> None:
    def loss(outputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        return outputs.square().sum(), targets.sum()

    model = torch.nn.Linear(4, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    step = lockstep.parallelize(model, loss, optimizer, devices="1xcpu", nonfinite="skip")
    before = model.weight.detach().clone()
    for count in (math.nan, math.inf):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            assert step(torch.randn(2, 4), torch.full((2,), count)).skipped
    assert torch.equal(model.weight, before)
