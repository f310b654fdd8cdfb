"""What callbacks change in a model beside its tensors: a resumed run goes on with it, or it is said that it doesn't."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import lockstep
from lockstep import Callback, Job
from lockstep.callbacks import Freeze, TrainingContext
from lockstep.errors import InputError, StrategyError
from zoo import ZOO, drawn, labels, plain_sgd, slow

WAYS = {"single": "1xcpu", "dp": "2xcpu", "ddp": "2xcpu", "fsdp": "2xcpu", "mp": "2xcpu"}


class Body(nn.Module):
    """With what acts otherwise in training: dropout, and a batch norm's own statistics."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Linear(8, 3)
        self.act: Any = torch.tanh
        self.end, self.scale = nn.Identity(), 1.0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.end(self.last(self.act(self.norm(self.first(x))) * self.scale))


class At(Callback):
    """Changes the model at a step."""

    def __init__(self, step: int, change: Any) -> None:
        self.step, self.change = step, change

    def on_step(self, training: TrainingContext) -> None:
        if training.step == self.step:
            self.change(training.model)


def frozen(model: nn.Module) -> None:
    for p in model.get_submodule("first").parameters():
        p.requires_grad_(False)


def still(model: nn.Module) -> None:
    model.get_submodule("norm").eval()


def job(*callbacks: Any, **settings: Any) -> Job:
    return ZOO["momentum"].replace(model=Body, callbacks=callbacks, precision="fp64", **settings)


def trained(its: Job, way: str, folder: Path, **settings: Any) -> lockstep.Run:
    return lockstep.train(its, strategy=way, devices=WAYS[way], folder=folder, quiet=True, **settings)


def differ(a: lockstep.Run, b: lockstep.Run) -> float:
    pairs = zip(a.model().state_dict().values(), b.model().state_dict().values(), strict=True)
    return max(float((one - other).abs().max()) for one, other in pairs if one.is_floating_point())


@pytest.mark.sweep
@pytest.mark.parametrize(
    ("way", "change"),
    [
        (way, change) if way in ("single", "dp") else slow(way, change)
        for way in WAYS
        for change in (frozen, still, nn.Module.eval)
        if not (change is not frozen and way == "ddp")  # (which differs on each rank: its batch norm's)
    ],
)
def test_a_resumed_run_goes_on_with_what_callbacks_changed(way: str, change: Any, tmp_path: Path) -> None:
    """Found by trial: what was frozen in the first epoch was trained again after a resume, without a line."""
    its = job(At(2, change))
    whole = trained(its, way, tmp_path / "whole", steps=7)
    run = trained(its, way, tmp_path / "cut", steps=3)
    assert differ(lockstep.train(its, resume=run.folder, steps=7, quiet=True), whole) == 0.0
    assert differ(trained(job(), way, tmp_path / "none", steps=7), whole) > 1e-3


def test_what_is_frozen_as_the_run_was_saved_is_said_and_what_callbacks_do_again_is_not(
    tmp_path: Path, capsys: Any
) -> None:
    run = trained(job(Freeze("first", start=1)), "single", tmp_path, steps=3)
    lockstep.train(job(Freeze("first", start=1)), resume=run.folder, steps=4)
    assert "as when the run was saved" not in capsys.readouterr().out
    lockstep.train(job(), resume=run.folder, steps=5)
    assert '"first.weight" and 1 more parameter are frozen, as when the run was saved' in capsys.readouterr().out


def test_freezing_for_a_time_goes_on_after_a_resume(tmp_path: Path) -> None:
    its = job(Freeze("first", until=5))
    whole = trained(its, "single", tmp_path / "whole", steps=7)
    run = trained(its, "single", tmp_path / "cut", steps=3)
    assert differ(lockstep.train(its, resume=run.folder, steps=7, quiet=True), whole) == 0.0


def other_act(model: nn.Module) -> None:
    model.act = torch.relu


def hooked(model: nn.Module) -> None:
    model.get_submodule("last").register_forward_hook(lambda module, inputs, output: output * 2)


def replaced(model: nn.Module) -> None:
    model.end = nn.Tanh()


def clamped(model: nn.Module) -> None:
    model.get_submodule("last").weight.register_hook(lambda gradient: gradient.clamp(-0.01, 0.01))


def clamped_afterwards(model: nn.Module) -> None:
    model.get_submodule("last").weight.register_post_accumulate_grad_hook(lambda p: setattr(p, "grad", p.grad / 2))


def other_forward(model: nn.Module) -> None:
    model.get_submodule("last").forward = torch.sin


LOST = {
    "a hook on a parameter": (clamped, 'layer "last" of the model, or its hooks,'),
    "a hook on a gradient": (clamped_afterwards, 'layer "last" of the model, or its hooks,'),
    "a forward": (other_forward, 'layer "last" of the model, or its hooks,'),
    "act": (other_act, 'the model\'s attribute "act"'),
    "a hook": (hooked, 'layer "last" of the model, or its hooks,'),
    "a layer": (replaced, 'layer "end" of the model, or its hooks,'),
}


@pytest.mark.parametrize("change", LOST)
def test_what_a_resumed_run_would_begin_with_anew_is_said(change: str, tmp_path: Path, capsys: Any) -> None:
    act, what = LOST[change]
    lockstep.train(job(At(2, act)), strategy="single", devices="1xcpu", folder=tmp_path, steps=3)
    assert f"{what} changes in training, and no checkpoint keeps it" in capsys.readouterr().out


def test_a_hook_of_the_optimizer_that_a_resumed_run_would_lack_is_said(tmp_path: Path, capsys: Any) -> None:
    class Hooks(Callback):
        def on_step(self, training: TrainingContext) -> None:
            if training.step == 2:
                training.optimizer.register_step_post_hook(lambda optimizer, args, kwargs: None)

    lockstep.train(job(Hooks()), strategy="single", devices="1xcpu", folder=tmp_path, steps=3)
    assert "what hooks the optimizer has changes in training, and no checkpoint keeps it" in capsys.readouterr().out


def test_a_layer_that_the_copy_of_rank_0_has_not_is_refused(tmp_path: Path) -> None:
    with pytest.raises(StrategyError, match='layer "act" was put in or taken out after it was built'):
        trained(job(At(2, lambda model: setattr(model, "act", nn.Tanh()))), "fsdp", tmp_path, steps=4)


def untrained(model: nn.Module) -> None:
    model.last = nn.Linear(8, 3).double()


def test_a_layer_that_the_optimizer_does_not_know_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="the optimizer has a parameter that the model hasn't any more"):
        trained(job(At(2, untrained)), "single", tmp_path, steps=3)


class Begins(Callback):
    """Does so when a run begins, so that a resumed one has it, too."""

    def on_start(self, training: TrainingContext) -> None:
        hooked(training.model)
        other_act(training.model)


def test_what_callbacks_do_when_a_run_begins_is_done_again(tmp_path: Path, capsys: Any) -> None:
    whole = trained(job(Begins()), "single", tmp_path / "whole", steps=7)
    run = lockstep.train(job(Begins()), strategy="single", devices="1xcpu", folder=tmp_path / "cut", steps=3)
    assert differ(lockstep.train(job(Begins()), resume=run.folder, steps=7), whole) == 0.0
    assert "no checkpoint keeps it" not in capsys.readouterr().out


def own(model: nn.Module) -> Any:
    return lockstep.parallelize(model, nn.CrossEntropyLoss(), plain_sgd(model.named_parameters()))


@pytest.mark.parametrize("evaluates", [False, True])
def test_an_own_loop_keeps_what_is_frozen_and_layers_that_are_still(evaluates: bool, tmp_path: Path) -> None:
    """The mode of the model itself is left to the loop: it may save within an evaluation."""
    model, other = Body().double(), Body().double()
    step, again = own(model), own(other)
    step(drawn(8, 6).double(), labels(8, 3))
    frozen(model)
    still(model)
    if evaluates:
        model.eval()
    step.save(tmp_path / "kept")
    with pytest.warns(UserWarning, match='"first.weight" and 1 more parameter are frozen, as when the run was saved'):
        again.load(tmp_path / "kept")
    assert [p.requires_grad for p in other.parameters()] == [p.requires_grad for p in model.parameters()]
    assert [m.training for m in (other.first, other.norm)] == [True, evaluates]
    assert other.training


@pytest.mark.parametrize("way", ["ddp", slow("fsdp")])
def test_a_batch_norm_in_evaluation_mode_has_the_first_ones_statistics_everywhere(way: str, tmp_path: Path) -> None:
    """As with PyTorch's DistributedDataParallel; before, each replica went on with those of its own local batches."""
    its = job(At(2, still))
    assert differ(trained(its, "dp", tmp_path, steps=5), trained(its, way, tmp_path, steps=5)) < 1e-12


class WarmUp(Callback):
    """Begins with something that it undoes later."""

    def __init__(self, what: str) -> None:
        self.what = what

    def set(self, model: nn.Module, *, early: bool) -> None:
        if self.what == "frozen":
            model.get_submodule("first").requires_grad_(not early)
        elif self.what == "mode":
            model.get_submodule("norm").train(not early)
        else:
            model.scale = 0.5 if early else 1.0  # type: ignore[assignment]

    def on_start(self, training: TrainingContext) -> None:
        self.set(training.model, early=True)

    def on_step(self, training: TrainingContext) -> None:
        if training.step == 2:
            self.set(training.model, early=False)


@pytest.mark.parametrize("what", ["frozen", "mode", "attribute"])
def test_what_a_run_had_undone_again_stays_undone_after_resumes(what: str, tmp_path: Path) -> None:
    """Found by trial: on_start of the resumed run did it again, for good."""
    whole = trained(job(WarmUp(what)), "single", tmp_path / "whole", steps=8)
    run = trained(job(WarmUp(what)), "single", tmp_path / "cut", steps=3)
    run = lockstep.train(job(WarmUp(what)), resume=run.folder, steps=5, quiet=True)
    assert differ(lockstep.train(job(WarmUp(what)), resume=run.folder, steps=8, quiet=True), whole) == 0.0


def backwards(epoch: int) -> range:
    return range(28, -1, -1)


def test_what_is_other_in_a_job_that_is_no_file_is_said(tmp_path: Path, capsys: Any) -> None:
    its = ZOO["momentum"].replace(epochs=1)
    run = trained(its, "single", tmp_path)
    capsys.readouterr()
    lockstep.train(its.replace(epochs=2, keep=1), resume=run.folder)
    assert "begun" not in capsys.readouterr().out
    smoothed = nn.CrossEntropyLoss(label_smoothing=0.1)
    other = its.replace(epochs=3, clip_norm=0.5, accumulate=2, loss=smoothed, order=backwards, precision="fp64")
    lockstep.train(other.replace(lr_scheduler=lambda o: torch.optim.lr_scheduler.StepLR(o, 2)), resume=run.folder)
    said = " ".join(capsys.readouterr().out.split())
    for name, now, then in (("clip_norm", 0.5, None), ("accumulate", 2, 1), ("precision", "fp64", its.precision)):
        assert f"note: {name}: it is {now}, and was {then} when the run was begun" in said
    for name in ("loss", "order", "lr_scheduler"):
        assert f"note: {name}: it isn't the one that the run was begun with" in said
    assert said.count("begun") == 6


class Shares(nn.Module):
    """Its layers read a dictionary, as of a configuration that all of them are given."""

    def __init__(self, settings: dict[str, float]) -> None:
        super().__init__()
        self.linear, self.settings = nn.Linear(6, 6), settings

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.linear(x)) * self.settings["scale"]


class Annealed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.settings = {"scale": 1.0}
        self.body = nn.Sequential(*(Shares(self.settings) for _ in range(2)), nn.Linear(6, 3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.body(x)


class Anneals(Callback):
    def on_step(self, training: TrainingContext) -> None:
        training.model.settings["scale"] *= 0.8  # type: ignore[index, operator]


class Meter:
    calls = 0


class Metered(nn.Linear):
    def __init__(self, meter: Meter) -> None:
        super().__init__(6, 6)
        self.meter = meter

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.meter.calls += 1
        return super().forward(x)


def metered() -> nn.Module:
    meter = Meter()
    return nn.Sequential(*(Metered(meter) for _ in range(3)), nn.Linear(6, 3))


def test_an_object_of_many_layers_is_said_once(tmp_path: Path, capsys: Any) -> None:
    lockstep.train(job().replace(model=metered), strategy="single", devices="1xcpu", folder=tmp_path, steps=2)
    assert capsys.readouterr().out.count("no checkpoint keeps it") == 1


@pytest.mark.parametrize("way", ["single", "dp", "ddp", "fsdp"])
def test_layers_share_a_dictionary_after_a_resume_too(way: str, tmp_path: Path) -> None:
    """Each had one of its own then, so that what a callback changed in the model's reached none of them."""
    its = job(Anneals()).replace(model=Annealed)
    whole = trained(its, way, tmp_path / "whole", steps=7)
    run = trained(its, way, tmp_path / "cut", steps=3)
    assert differ(lockstep.train(its, resume=run.folder, steps=7, quiet=True), whole) == 0.0


def test_a_model_of_a_class_made_in_a_function_is_the_same_in_ranks(tmp_path: Path, capsys: Any) -> None:
    """Found by trial: it was said not to be the one that the run was begun with."""

    class Local(Body):
        pass

    its = job().replace(model=Local)
    run = trained(its, "single", tmp_path, steps=2)
    lockstep.train(its, strategy="ddp", devices="2xcpu", resume=run.folder, folder=tmp_path)
    assert "begun with" not in capsys.readouterr().out
