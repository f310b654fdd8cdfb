"""Optimizers of a person's own: schedule-free ones, and one that is made of others."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import lockstep
from lockstep import Callback, Job
from lockstep.callbacks import EMA, Sampler, TrainingContext
from lockstep.checkpoint.weights import load_weights
from lockstep.errors import InputError, StrategyError
from lockstep.strategies.fsdp import FSDP

from harness import same_bits  # isort: skip
from zoo import SAMPLES, ZOO, drawn, labels, mlp, slow, state_of

WAYS: dict[str, Any] = {"dp": "2xcpu", "ddp": "2xcpu", "pp": "2xcpu", "hogwild": "2xcpu"}


class ScheduleFree(torch.optim.Optimizer):
    """SGD without a schedule: the parameters are y in training, and the average x in evaluation."""

    def __init__(self, parameters: Any, lr: float = 0.3, beta: float = 0.9) -> None:
        super().__init__(parameters, {"lr": lr, "beta": beta, "steps": 0, "train_mode": False})

    def _switch(self, train_mode: bool) -> None:
        for group in self.param_groups:
            for p in group["params"] if group["train_mode"] != train_mode else ():
                if "z" in self.state[p]:
                    weight = 1 - group["beta"] if train_mode else 1 - 1 / group["beta"]
                    p.data.lerp_(self.state[p]["z"], weight)
            group["train_mode"] = train_mode

    def train(self) -> None:
        self._switch(True)

    def eval(self) -> None:
        self._switch(False)

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            assert group["train_mode"], "step() in evaluation mode"
            group["steps"] += 1
            for p in group["params"]:
                z = self.state[p].setdefault("z", p.clone())
                p.lerp_(z, 1 - 1 / group["beta"])  # y to x
                z.add_(p.grad, alpha=-group["lr"])
                p.lerp_(z, 1 / group["steps"])
                p.lerp_(z, 1 - group["beta"])  # x to y


class Looks(Callback):
    """Writes down the weights that it is given, by the method and the step."""

    def on_start(self, training: TrainingContext) -> None:
        self.seen: dict[str, Any] = {}

    def _look(self, training: TrainingContext, method: str) -> None:
        weights = {name: p.detach().clone() for name, p in training.model.named_parameters()}
        self.seen[f"{method} {training.step}"] = weights

    def on_step(self, training: TrainingContext) -> None:
        self._look(training, "on_step")

    def on_epoch(self, training: TrainingContext) -> None:
        self._look(training, "on_epoch")

    def on_evaluated(self, training: TrainingContext) -> None:
        self._look(training, "on_evaluated")

    def on_saved(self, training: TrainingContext) -> None:
        self._look(training, "on_saved")

    def on_finish(self, training: TrainingContext) -> None:
        self._look(training, "on_finish")
        if training.world.is_first:
            torch.save(self.seen, training.folder / "seen.pt")


def job(*callbacks: Callback, **settings: Any) -> Job:
    settings = {"epochs": 3, "shuffle": False, "optimizer": ScheduleFree, **settings}
    return ZOO["mlp"].replace(callbacks=callbacks, precision="fp64", model=seeded_mlp, **settings)


def seeded_mlp() -> nn.Module:
    torch.manual_seed(5)
    return mlp()


def plain_loop() -> dict[str, Any]:
    """What a loop by hand comes to: by step the weights in training, by epoch the average, and
    the loss of that.
    """
    model, loss = seeded_mlp().double(), nn.CrossEntropyLoss()
    inputs, targets = drawn(SAMPLES, 6).double(), labels(SAMPLES, 3)
    optimizer = ScheduleFree(model.parameters())
    found: dict[str, Any] = {"steps": [], "epochs": [], "losses": []}
    for _ in range(3):
        optimizer.train()
        for mine, wanted in zip(inputs.split(8), targets.split(8), strict=True):
            optimizer.zero_grad()
            loss(model(mine), wanted).backward()
            optimizer.step()
            found["steps"].append(copy.deepcopy(model.state_dict()))
        optimizer.eval()
        with torch.no_grad():
            found["losses"].append(float(loss(model(inputs), targets)))
        found["epochs"].append(copy.deepcopy(model.state_dict()))
    return found


def apart(mine: Any, theirs: Any) -> float:
    assert mine.keys() == theirs.keys()
    return max(float((mine[name] - theirs[name]).abs().max()) for name in mine)


@pytest.mark.parametrize("way", ["single", "dp", "ddp", slow("pp")])
def test_a_schedule_free_optimizer_is_evaluated_and_saved_with_its_average(
    way: str, tmp_path: Path
) -> None:
    """Its train() and eval() were never called, so that all results were of the weights in
    training.
    """
    sampler = Sampler(lambda model: f"{float(model[0].weight.sum()):.14f}")
    its = job(Looks(), sampler)
    run = lockstep.train(
        its, strategy=way, devices=WAYS.get(way, "1xcpu"), folder=tmp_path, quiet=True
    )
    expected = plain_loop()
    records = [json.loads(line) for line in (run.folder / "metrics.jsonl").read_text().splitlines()]
    assert [record["eval_loss"] for record in records] == pytest.approx(
        expected["losses"], abs=1e-12
    )
    last, best = expected["epochs"][-1], min(range(3), key=expected["losses"].__getitem__)
    assert apart(run.model().state_dict(), last) < 1e-12
    assert apart(run.model(best=True).state_dict(), expected["epochs"][best]) < 1e-12
    assert lockstep.evaluate(run, devices="1xcpu")["loss"] == pytest.approx(
        expected["losses"][-1], abs=1e-12
    )
    seen = torch.load(run.folder / "seen.pt")
    for number, weights in enumerate(expected["steps"], start=1):
        assert apart(seen[f"on_step {number}"], weights) < 1e-12
    for step, weights in zip((4, 8, 12), expected["epochs"], strict=True):
        for method in ("on_epoch", "on_evaluated", "on_saved"):
            assert apart(seen[f"{method} {step}"], weights) < 1e-12
        sampled = float((run.folder / f"samples/step-{step}.txt").read_text())
        assert sampled == pytest.approx(float(weights["0.weight"].sum()), abs=1e-12)
    assert apart(seen["on_finish 12"], last) < 1e-12


@pytest.mark.parametrize("way", ["single", slow("ddp")])
def test_a_schedule_free_training_is_resumed_to_the_bit(way: str, tmp_path: Path) -> None:
    settings = {"strategy": way, "devices": WAYS.get(way, "1xcpu"), "quiet": True}
    its = job(Looks(), EMA(0.5), save_every=3)
    whole = lockstep.train(its, folder=tmp_path / "whole", **settings)
    for steps in (8, 10):  # at the end of an epoch, and within one
        part = lockstep.train(its, folder=tmp_path / f"{steps}", steps=steps, **settings)
        resumed = lockstep.train(its, resume=part.folder, **settings)
        assert same_bits(resumed.model(), whole.model())
        assert apart(state_of(resumed.folder)["model"], state_of(whole.folder)["model"]) == 0.0


class Clamps(Callback):
    """Writes weights where it sees the average."""

    def on_epoch(self, training: TrainingContext) -> None:
        with torch.no_grad():
            training.model[0].weight.clamp_(-0.1, 0.1)


def test_what_a_callback_writes_to_an_average_stays(tmp_path: Path) -> None:
    run = lockstep.train(
        job(Clamps()), strategy="single", devices="1xcpu", folder=tmp_path, quiet=True
    )
    assert float(run.model().state_dict()["0.weight"].abs().max()) == pytest.approx(0.1, abs=1e-12)


def test_an_own_loop_evaluates_with_the_average_and_goes_on_in_training(tmp_path: Path) -> None:
    expected = plain_loop()
    inputs, targets = drawn(SAMPLES, 6).double(), labels(SAMPLES, 3)
    model = seeded_mlp().double()
    step = lockstep.parallelize(
        model,
        nn.CrossEntropyLoss(),
        ScheduleFree(model.parameters()),
        strategy="dp",
        devices="2xcpu",
    )
    number = 0
    for epoch in range(3):
        for mine, wanted in zip(inputs.split(8), targets.split(8), strict=True):
            if epoch == 1:  # in parts, with an evaluation before the update
                step.backward(mine[:3], wanted[:3])
                step.evaluate(inputs, targets)
                step.backward(mine[3:], wanted[3:])
                step.evaluate(inputs, targets)
                step.update()
            else:
                step(mine, wanted)
            assert apart(model.state_dict(), expected["steps"][number]) < 1e-12
            number += 1
        if epoch == 2:  # a person who calls it keeps its mode
            step.optimizer.eval()
        _, total, count = step.evaluate(inputs, targets)
        assert float(total / count) == pytest.approx(expected["losses"][epoch], abs=1e-12)
    assert apart(model.state_dict(), expected["epochs"][-1]) < 1e-12
    step.optimizer.train()
    step.saved.write_weights(tmp_path / "model.safetensors")
    assert apart(load_weights(tmp_path / "model.safetensors"), expected["epochs"][-1]) < 1e-12
    assert apart(model.state_dict(), expected["steps"][-1]) < 1e-12


class EvaluatesInStep(Callback):
    def on_step(self, training: TrainingContext) -> None:
        with training.evaluating():
            self.norm = float(training.model[0].weight.detach().norm())


@pytest.mark.slow
def test_shards_of_a_schedule_free_optimizer_are_switched(tmp_path: Path) -> None:
    its, expected = job(EvaluatesInStep()), plain_loop()
    run = lockstep.train(
        its, strategy=FSDP(elementwise=True), devices="2xcpu", folder=tmp_path, quiet=True
    )
    assert run.metrics["loss"] == pytest.approx(expected["losses"][-1], abs=1e-12)
    assert apart(run.model().state_dict(), expected["epochs"][-1]) < 1e-12


def test_ranks_that_share_weights_refuse_an_optimizer_that_switches_them(tmp_path: Path) -> None:
    with pytest.raises(
        StrategyError,
        match=r"ScheduleFree has train\(\) and eval\(\), by which each rank would write",
    ):
        lockstep.train(job(), strategy="hogwild", devices="2xcpu", folder=tmp_path, quiet=True)


class Both(torch.optim.Optimizer):
    """SGD for matrices and AdamW for the rest, as one optimizer."""

    def __init__(self, named: Any) -> None:
        every = [p for _, p in named]
        matrices = [p for p in every if p.ndim > 1]
        self.by_kind = {
            "matrices": torch.optim.SGD(matrices, lr=0.1, momentum=0.9),
            "rest": torch.optim.AdamW([p for p in every if p.ndim < 2], lr=0.05),
        }

    @property
    def param_groups(self) -> Any:
        return [group for one in self.by_kind.values() for group in one.param_groups]

    def step(self, closure: Any = None) -> None:
        for one in self.by_kind.values():
            one.step()

    def zero_grad(self, set_to_none: bool = True) -> None:
        for one in self.by_kind.values():
            one.zero_grad(set_to_none)


class Delegating(Both):
    def state_dict(self) -> Any:
        return {name: one.state_dict() for name, one in self.by_kind.items()}

    def load_state_dict(self, state: Any) -> None:
        for name, one in self.by_kind.items():
            one.load_state_dict(state[name])


class Unsaveable(Delegating):
    def state_dict(self) -> Any:
        return {**super().state_dict(), "place": Path("here")}


def decaying(optimizer: Any) -> Any:
    return torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)


@pytest.mark.parametrize(
    ("before", "after"), [("single", "single"), ("single", "dp"), slow("ddp", "ddp")]
)
def test_an_optimizer_made_of_others_is_resumed(before: str, after: str, tmp_path: Path) -> None:
    """Its checkpoint had an empty state, and a resumed run ended in a KeyError."""
    its = job(optimizer=Delegating, lr_scheduler=decaying, seed=3)
    run = {
        way: {"strategy": way, "devices": WAYS.get(way, "1xcpu"), "quiet": True}
        for way in (before, after)
    }
    whole = lockstep.train(its, folder=tmp_path / "whole", **run[before])
    half = lockstep.train(its, folder=tmp_path / "half", steps=6, **run[before])
    saved = state_of(half.folder)["optimizer"]["own"]
    assert saved["matrices"]["state"][0]["momentum_buffer"].any()
    assert float(saved["rest"]["state"][0]["step"]) == 6
    resumed = lockstep.train(its, resume=half.folder, **run[after])
    assert apart(resumed.model().state_dict(), whole.model().state_dict()) < 1e-12
    assert before != after or same_bits(resumed.model(), whole.model())


@pytest.mark.parametrize(
    ("optimizer", "why"),
    [
        (
            Both,
            r"Both holds another optimizer \(SGD\), whose state would not be saved: give Both the methods",
        ),
        (Unsaveable, '"optimizer/own/place" is a pathlib.*, which no checkpoint can hold'),
    ],
)
def test_an_optimizer_whose_state_cannot_be_saved_is_refused(
    optimizer: Any, why: str, tmp_path: Path
) -> None:
    with pytest.raises(InputError, match=why):
        lockstep.train(
            job(optimizer=optimizer),
            strategy="single",
            devices="1xcpu",
            folder=tmp_path,
            quiet=True,
        )


@pytest.mark.parametrize(
    ("way", "why"),
    [
        (FSDP(elementwise=True), r"fsdp: Delegating has a state_dict\(\) of its own"),
        slow(
            "hogwild",
            r"Delegating has a state_dict\(\) of its own, and may keep other learning rates",
        ),
    ],
)
def test_ranks_with_parts_of_a_state_refuse_an_optimizer_made_of_others(
    way: Any, why: str, tmp_path: Path
) -> None:
    with pytest.raises(StrategyError, match=why):
        lockstep.train(
            job(optimizer=Delegating), strategy=way, devices="2xcpu", folder=tmp_path, quiet=True
        )
