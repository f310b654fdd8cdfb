"""Averaged weights: the same under every strategy as on one device."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

import lockstep
from lockstep import Callback, Job
from lockstep.callbacks import EMA, SWA, TrainingContext
from lockstep.checkpoint.weights import load_weights
from lockstep.errors import JobError, StrategyError

from harness import same_bits, trained  # isort: skip
from zoo import ZOO, mlp, sgd, slow, state_of


def job(*callbacks: Any, kind: str = "mlp", **settings: Any) -> Job:
    return ZOO[kind].replace(callbacks=callbacks, precision="fp64", optimizer=sgd, **settings)


def apart(mine: Mapping[str, Any], theirs: Mapping[str, Any]) -> float:
    assert mine.keys() == theirs.keys()
    return max(float((mine[name] - theirs[name]).abs().max()) for name in mine)


class Keeps(Callback):
    """Writes down the weights before the first step and after each."""

    def on_start(self, training: TrainingContext) -> None:
        self.weights: list[Any] = []
        self.on_step(training)

    def on_step(self, training: TrainingContext) -> None:
        self.weights.append(
            {name: p.detach().clone() for name, p in training.model.named_parameters()}
        )

    def on_finish(self, training: TrainingContext) -> None:
        torch.save(self.weights, training.folder / "weights.pt")


def test_a_moving_average_is_that_of_its_formula_and_is_what_is_evaluated(tmp_path: Path) -> None:
    run = trained(job(Keeps(), EMA(0.8)), tmp_path, "single")
    first, *others = torch.load(run.folder / "weights.pt")
    for name, average in first.items():
        for weights in others:
            average = 0.8 * average + 0.2 * weights[name]
        assert torch.allclose(run.model("ema.safetensors").get_parameter(name), average, atol=1e-14)
        assert torch.equal(run.model().get_parameter(name), others[-1][name])
    assert (
        lockstep.evaluate(run, weights="ema.safetensors", devices="1xcpu")["loss"]
        == run.metrics["loss"]
    )
    assert lockstep.evaluate(run, devices="1xcpu")["loss"] != pytest.approx(
        run.metrics["loss"], rel=1e-3
    )
    assert same_bits(run.model(best=True), run.model("ema.safetensors")), (
        "the best weights are those of the best loss"
    )


@pytest.mark.parametrize("way", [slow("dp"), "ddp", slow("mp"), "pp"])
def test_averages_are_those_of_one_device(way: str, tmp_path: Path) -> None:
    its = job(EMA(0.9), SWA(start=2))
    cut = {"accumulate": 4} if way == "pp" else {}
    one, several = trained(its, tmp_path, "single", **cut), trained(its, tmp_path, way)
    for file in ("ema.safetensors", "swa.safetensors", "model.safetensors"):
        assert apart(load_weights(one.folder / file), load_weights(several.folder / file)) < 1e-10
    assert one.metrics["loss"] == pytest.approx(several.metrics["loss"], rel=1e-10)


@pytest.mark.parametrize(
    "kind", ["convolutions with sync_batchnorm", slow("ignored tokens and tied weights")]
)
def test_averages_of_running_statistics_and_tied_weights_are_those_of_one_device(
    kind: str, tmp_path: Path
) -> None:
    its = job(SWA(), EMA(0.5, every=2), kind=kind)
    one, several = trained(its, tmp_path, "single"), trained(its, tmp_path, "ddp")
    for file in ("ema.safetensors", "swa.safetensors"):
        mine, theirs = load_weights(one.folder / file), load_weights(several.folder / file)
        assert apart(mine, theirs) < 1e-10
        assert mine.keys() == one.model().state_dict().keys()


def test_the_mean_over_epochs_is_that_of_their_ends(tmp_path: Path) -> None:
    run = trained(job(Keeps(), SWA(start=2), epochs=4), tmp_path, "single")
    weights = torch.load(run.folder / "weights.pt")
    for name, p in run.model("swa.safetensors").named_parameters():
        mean = torch.stack([weights[step][name] for step in (8, 12, 16)]).mean(0)
        assert torch.allclose(p, mean, atol=1e-14)


LAID_OUT = "channels_last in volumes and in images"


@pytest.mark.parametrize(
    ("before", "after", "kind"),
    [("single", "single", LAID_OUT), slow("single", "single", "mlp"), slow("ddp", "dp", "mlp")],
)
def test_an_average_goes_on_to_the_bit(before: str, after: str, kind: str, tmp_path: Path) -> None:
    its = job(EMA(0.9), SWA(), kind=kind)
    whole = trained(its, tmp_path, before)
    half = trained(its.replace(steps=6), tmp_path, before)
    again = trained(its, tmp_path, after, resume=half.folder)
    for file in ("ema.safetensors", "swa.safetensors"):
        mine, theirs = load_weights(again.folder / file), load_weights(whole.folder / file)
        assert apart(mine, theirs) <= (0 if before == after else 1e-12)
    assert state_of(again.folder)["callbacks"]["EMA"]["number"] == 9


def test_an_average_of_16_bits_moves_by_less_than_they_show(tmp_path: Path) -> None:
    its = ZOO["mlp"].replace(model=lambda: mlp().bfloat16(), callbacks=[EMA(0.999)], eval_data=None)
    data = [(inputs.bfloat16(), target) for inputs, target in its.train_data]
    run = trained(its.replace(train_data=data, metrics={}), tmp_path, "single")
    average = state_of(run.folder)["callbacks"]["EMA"]["average"]
    assert all(not torch.equal(of, of.bfloat16().float()) for of in average.values())


def test_ranks_that_share_weights_and_wait_for_nobody_have_no_average(tmp_path: Path) -> None:
    with pytest.raises(StrategyError, match="EMA: each rank would average other weights: take ddp"):
        lockstep.train(job(EMA()), strategy="hogwild", devices="2xcpu", folder=tmp_path, quiet=True)


def test_the_decay_may_be_a_function_of_the_step(tmp_path: Path) -> None:
    run = trained(job(Keeps(), EMA(lambda step: step / (10 + step))), tmp_path, "single")
    average, *others = torch.load(run.folder / "weights.pt")
    for step, weights in enumerate(others, start=1):
        decay = step / (10 + step)
        average = {name: decay * average[name] + (1 - decay) * weights[name] for name in weights}
    assert apart(average, load_weights(run.folder / "ema.safetensors")) < 1e-14


def test_a_function_that_gives_no_decay_is_named(tmp_path: Path) -> None:
    with pytest.raises(JobError, match=r"EMA: decay is from 0 to 1, and decay\(2\) gave 2.0"):
        trained(job(EMA(float)), tmp_path, "single")


def test_the_raw_weights_are_evaluated_too(tmp_path: Path) -> None:
    run = trained(job(EMA(0.9, raw=True)), tmp_path, "ddp")
    last = run.history[-1]
    for prefix, weights in (("", "ema.safetensors"), ("raw/", None)):
        values = lockstep.evaluate(run, weights=weights, devices="1xcpu")
        assert values["loss"] == pytest.approx(last[f"{prefix}eval_loss"], rel=1e-12)
        assert values["accuracy"] == last[f"{prefix}accuracy"]
    assert run.metrics["raw/accuracy"] == last["raw/accuracy"]


def test_a_decay_of_one_is_refused() -> None:
    with pytest.raises(JobError, match="EMA: decay is from 0 to below 1"):
        EMA(1.0)
