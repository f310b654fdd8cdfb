"""What callbacks and own loops see of the optimizer of a sharded model, and of a model that they
call themselves.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import lockstep
from lockstep import Callback, train
from lockstep.errors import InputError, LockstepError
from lockstep.launch.world import World

from zoo import ZOO, drawn, labels, slow  # isort: skip

BOUND = 1e-10


def adam(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.Adam(parameters, lr=0.01)


class ByGroups(Callback):
    """Bounds the norm of each parameter, and notes those of gradients."""

    def on_step(self, training: Any) -> None:
        parameters = [p for group in training.optimizer.param_groups for p in group["params"]]
        self.norm = float(torch.stack([p.grad.norm() for p in parameters]).norm())
        with torch.no_grad():
            for p in parameters:
                norm = p.norm()
                p.mul_(norm.clamp(max=0.5) / norm)

    def on_evaluated(self, training: Any) -> None:
        training.metrics["norm"] = self.norm


class OfState(Callback):
    """Centres Adam's first moment, and forgets some of the second."""

    def on_step(self, training: Any) -> None:
        for state in training.optimizer.state.values():
            state["exp_avg"].sub_(state["exp_avg"].mean())
            state["exp_avg_sq"] = state["exp_avg_sq"] * (1 - 0.1 * state["exp_avg_sq"].norm())
        of_one = training.optimizer.state[next(training.model.parameters())]
        of_one["exp_avg"][0] = of_one["exp_avg"].abs().amax()

    def on_evaluated(self, training: Any) -> None:
        training.metrics["moment"] = sum(
            float(s["exp_avg"].norm()) for s in training.optimizer.state.values()
        )
        assert training.weights().keys() == dict(training.model.state_dict()).keys()


class CallsModel(Callback):
    """Scales the parameters by what the model makes of some samples."""

    grad = False

    def on_step(self, training: Any) -> None:
        with torch.set_grad_enabled(self.grad):
            size = training.model(drawn(4, 6).double()).detach().abs().mean()
        with torch.no_grad():
            for p in training.model.parameters():
                p.mul_(1 - 0.01 * size)


class CallsModelWithGradients(CallsModel):
    """It forgets ``no_grad``."""

    grad = True


class Initializes(Callback):
    def on_epoch(self, training: Any) -> None:
        nn.init.orthogonal_(next(training.model.parameters()))


@pytest.mark.sweep
@pytest.mark.parametrize(
    "callback", [ByGroups, OfState, CallsModel, CallsModelWithGradients, Initializes]
)
@pytest.mark.parametrize(
    ("way", "devices"), [("fsdp", "2xcpu"), slow("fsdp", "3xcpu"), slow("ddp=2xfsdp=2", "4xcpu")]
)
def test_callbacks_see_the_optimizer_and_the_model_of_one_device(
    callback: type[Callback], way: str, devices: str, tmp_path: Path
) -> None:
    """Found by trial: norms and means were of this rank's shard, and writes after a forward were
    lost.
    """
    job = dataclasses.replace(ZOO["mlp"], optimizer=adam, callbacks=[callback()], precision="fp64")
    one = train(job, devices="1xcpu", folder=tmp_path, quiet=True)
    other = train(job, strategy=way, devices=devices, folder=tmp_path, quiet=True)
    found, wanted = other.model().state_dict(), one.model().state_dict()
    assert all((found[name] - wanted[name]).abs().max() < BOUND for name in wanted)
    for record, its in zip(one.history, other.history, strict=True):
        assert all(
            abs(its[name] - record[name]) < BOUND
            for name in record
            if name in ("train_loss", "norm", "moment")
        )


def test_own_loops_change_the_state_of_the_optimizer_within_whole_parameters() -> None:
    x, y = drawn(24, 6), labels(24, 3)

    def owns(world: World | None) -> Tensor:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))
        where = (
            {"strategy": "single", "devices": "1xcpu"} if world is None else {"strategy": "fsdp"}
        )
        step = lockstep.parallelize(model, nn.CrossEntropyLoss(), adam, precision="fp64", **where)
        rank, size = (0, 1) if world is None else (world.rank, world.size)
        for _ in range(3):
            step(x[rank::size], y[rank::size])
            step.optimizer.state[
                next(model.parameters())
            ]  # which under fsdp has none, and makes an empty one
            with step.whole_parameters(), torch.no_grad():
                for state in step.optimizer.state.values():
                    state["exp_avg"].sub_(state["exp_avg"].mean())
        return torch.cat([t.flatten() for t in step.state_dict()["model"].values()])

    ends = lockstep.launch(owns, devices="2xcpu")
    assert all((end - owns(None)).abs().max() < BOUND for end in ends)


def test_an_update_within_whole_parameters_is_refused() -> None:
    def owns(world: World) -> str:
        step = lockstep.parallelize(nn.Linear(6, 3), nn.CrossEntropyLoss(), adam, strategy="fsdp")
        with (
            pytest.raises(
                InputError, match=r"step\(...\) was called within step.whole_parameters\(\)"
            ),
            step.whole_parameters(),
        ):
            step(drawn(4, 6), labels(4, 3))
        return "refused"

    assert lockstep.launch(owns, devices="2xcpu") == ["refused"] * 2


def clip(optimizer: torch.optim.Optimizer, *args: Any) -> None:
    nn.utils.clip_grad_norm_([p for group in optimizer.param_groups for p in group["params"]], 0.1)


class HooksOptimizer(Callback):
    def on_start(self, training: Any) -> None:
        training.optimizer.register_step_pre_hook(clip)


class ReplacesStep(Callback):
    def on_start(self, training: Any) -> None:
        optimizer, step = training.optimizer, training.optimizer.step
        optimizer.step = lambda *args: clip(optimizer) or step(*args)


class ReplacesLayer(Callback):
    def on_epoch(self, training: Any) -> None:
        training.model[0] = nn.Linear(
            *training.model[0].weight.shape[::-1], dtype=training.model[0].weight.dtype
        )


class HooksParameter(Callback):
    def on_start(self, training: Any) -> None:
        next(training.model.parameters()).register_hook(lambda grad: 0.5 * grad)


@pytest.mark.sweep
@pytest.mark.parametrize(
    ("callback", "says"),
    [
        (HooksOptimizer, "has hooks on its step"),
        (ReplacesStep, "or another step in its place"),
        (HooksParameter, 'parameter "0.weight" has a hook'),
        (ReplacesLayer, "the optimizer has a parameter that is no longer in the model"),
    ],
)
def test_what_shards_would_be_given_or_lose_later_is_refused(
    callback: type[Callback], says: str, tmp_path: Path
) -> None:
    """Found by trial: hooks of the optimizer were given shards, those of parameters nothing."""
    job = dataclasses.replace(ZOO["mlp"], callbacks=[callback()], lr_scheduler=constant)
    with pytest.raises(LockstepError, match=says):
        train(job, strategy="fsdp", devices="2xcpu", folder=tmp_path, quiet=True)


def constant(optimizer: torch.optim.Optimizer) -> Any:
    return torch.optim.lr_scheduler.ConstantLR(optimizer)


class EvaluatesOthers(Callback):
    """Evaluates with averages, which it holds whole, of which each is scaled by its largest
    element.
    """

    def on_start(self, training: Any) -> None:
        self.averages = {
            name: torch.zeros(p.shape, dtype=p.dtype)
            for name, p in training.model.named_parameters()
        }

    def on_step(self, training: Any) -> None:
        for name, p in training.model.named_parameters():
            self.averages[name] = self.averages[name] * 0.7 + p.detach() * 0.3

    @contextlib.contextmanager
    def evaluating(self, training: Any) -> Iterator[None]:
        parameters = dict(training.model.named_parameters())
        with torch.no_grad():
            kept = {name: p.clone() for name, p in parameters.items()}
            for name, p in parameters.items():
                p.copy_(self.averages[name])
                p.div_(float(p.abs().max()))
            yield
            for name, p in parameters.items():
                p.copy_(kept[name])


class AveragesInPlace(EvaluatesOthers):
    """Averages that it holds whole, written in place one by one, and all at once; a checkpoint
    keeps them.
    """

    loaded: dict[str, Tensor] | None = None

    def on_start(self, training: Any) -> None:
        super().on_start(training)
        for name, value in (self.loaded or {}).items():
            self.averages[name].copy_(value)

    def on_step(self, training: Any) -> None:
        parameters = dict(training.model.named_parameters())
        with torch.no_grad():
            for name, p in parameters.items():
                self.averages[name].lerp_(p, 0.3)
            torch._foreach_add_(list(self.averages.values()), list(parameters.values()), alpha=0.1)

    def state_dict(self) -> dict[str, Any]:
        return self.averages

    def load_state_dict(self, state: Any) -> None:
        self.loaded = state


class AveragesInShards(AveragesInPlace):
    """Averages that are as the parameters are."""

    def on_start(self, training: Any) -> None:
        self.averages = {name: torch.zeros_like(p) for name, p in training.model.named_parameters()}
        for name, value in (self.loaded or {}).items():
            self.averages[name].copy_(value)


class AveragesAssigned(AveragesInPlace):
    """Puts its averages in place by assigning ``data``, and so back."""

    @contextlib.contextmanager
    def evaluating(self, training: Any) -> Iterator[None]:
        parameters = dict(training.model.named_parameters())
        kept = {name: p.data for name, p in parameters.items()}
        for name, p in parameters.items():
            p.data = self.averages[name]
        yield
        for name, p in parameters.items():
            p.data = kept[name]


@pytest.mark.slow
@pytest.mark.parametrize(
    "callback", [AveragesInPlace, slow(AveragesInShards), slow(AveragesAssigned)]
)
def test_averages_by_hand_are_those_of_one_device_and_are_kept(
    callback: type[Callback], tmp_path: Path
) -> None:
    """Found by trial: what was written in place to a whole tensor was lost, and shards were in no
    checkpoint.

    And the averages stayed where ``p.data`` was kept, and assigned again.
    """
    job = dataclasses.replace(ZOO["mlp"], callbacks=[callback()], precision="fp64", epochs=1)
    where = [("fsdp", "2xcpu"), ("single", "1xcpu"), ("fsdp", "2xcpu")]
    run = train(job, strategy="fsdp", devices="2xcpu", folder=tmp_path, quiet=True)
    for epochs, (way, devices) in enumerate(where[1:], 2):
        run = train(
            job.replace(epochs=epochs), strategy=way, devices=devices, resume=run.folder, quiet=True
        )
    one = train(job.replace(epochs=3), devices="1xcpu", folder=tmp_path, quiet=True)
    for record, its in zip(one.history, run.history, strict=True):
        assert abs(its["eval_loss"] - record["eval_loss"]) < BOUND


def test_what_callbacks_put_in_place_for_evaluations_is_that_of_one_device(tmp_path: Path) -> None:
    """Found by trial: a largest element was that of this rank's shard."""
    job = dataclasses.replace(ZOO["mlp"], callbacks=[EvaluatesOthers()], precision="fp64")
    one = train(job, devices="1xcpu", folder=tmp_path, quiet=True)
    other = train(job, strategy="fsdp", devices="2xcpu", folder=tmp_path, quiet=True)
    for record, its in zip(one.history, other.history, strict=True):
        assert abs(its["eval_loss"] - record["eval_loss"]) < BOUND
    assert all(
        (a - b).abs().max() < BOUND
        for a, b in zip(one.model().parameters(), other.model().parameters(), strict=True)
    )


class GoesBack(Callback):
    """Takes every other step back, by copies of the parameters."""

    def on_step(self, training: Any) -> None:
        parameters = list(training.model.parameters())
        if training.step % 2:
            self.copies = copy.deepcopy(parameters)
        with torch.no_grad():
            for p, copied in zip(parameters, self.copies, strict=True):
                p.copy_(0.9 * copied)


@pytest.mark.slow
def test_copies_of_parameters_are_those_of_one_device_where_a_rank_has_no_element(
    tmp_path: Path,
) -> None:
    """Found by trial: PyTorch's error about a storage, on the rank that has none."""
    job = dataclasses.replace(ZOO["mlp"], callbacks=[GoesBack()], precision="fp64")
    one = train(job, devices="1xcpu", folder=tmp_path, quiet=True).model()
    other = train(job, strategy="fsdp", devices="4xcpu", folder=tmp_path, quiet=True).model()
    assert all(
        (a - b).abs().max() < BOUND
        for a, b in zip(one.parameters(), other.parameters(), strict=True)
    )
