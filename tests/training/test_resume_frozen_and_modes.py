"""What callbacks freeze, and the modes that they set: a resumed run has them again."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import lockstep
from lockstep import Callback, Job
from lockstep.callbacks import Freeze, TrainingContext
from lockstep.errors import InputError

from harness import trained  # isort: skip
from zoo import ZOO, slow


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


def differ(a: lockstep.Run, b: lockstep.Run) -> float:
    pairs = zip(a.model().state_dict().values(), b.model().state_dict().values(), strict=True)
    return max(float((one - other).abs().max()) for one, other in pairs if one.is_floating_point())


def set_scale(model: nn.Module) -> None:
    model.scale = 0.5  # type: ignore[assignment]


@pytest.mark.sweep
@pytest.mark.parametrize("change", [frozen, still])
@pytest.mark.parametrize("way", ["single", "dp", "ddp", "fsdp", "mp"])
def test_what_a_callback_froze_in_mid_run_is_frozen_in_a_resumed_run(
    change: Any, way: str, tmp_path: Path
) -> None:
    its = job(At(2, change))
    # A third replica would have one sample of the last batch, too few for its BatchNorm.
    devices = "1xcpu" if way == "single" else "2xcpu"
    whole = trained(its, tmp_path / "whole", way, steps=7, devices=devices)
    run = trained(its, tmp_path / "cut", way, steps=3, devices=devices)
    assert differ(lockstep.train(its, resume=run.folder, steps=7), whole) == 0.0


class Begins(Callback):
    """Changes the model when a run begins, so that a resumed run has it again."""

    def on_start(self, training: TrainingContext) -> None:
        set_scale(training.model)
        still(training.model)
        training.model.get_submodule("last").register_forward_hook(
            lambda module, inputs, output: output * 2
        )


def test_what_callbacks_do_when_a_run_begins_is_done_again(tmp_path: Path) -> None:
    whole = trained(job(Begins()), tmp_path / "whole", "single", steps=7)
    run = lockstep.train(
        job(Begins()), strategy="single", devices="1xcpu", folder=tmp_path / "cut", steps=3
    )
    assert differ(lockstep.train(job(Begins()), resume=run.folder, steps=7), whole) == 0.0


def test_what_freeze_has_frozen_is_frozen_again(tmp_path: Path) -> None:
    its = job(Freeze("first", start=2))
    whole = trained(its, tmp_path / "whole", "single", steps=7)
    run = trained(its, tmp_path / "cut", "single", steps=3)
    assert differ(lockstep.train(its, resume=run.folder, steps=7), whole) == 0.0


def test_freezing_for_a_time_goes_on_after_a_resume(tmp_path: Path) -> None:
    its = job(Freeze("first", until=5))
    whole = trained(its, tmp_path / "whole", "single", steps=7)
    run = trained(its, tmp_path / "cut", "single", steps=3)
    assert differ(lockstep.train(its, resume=run.folder, steps=7, quiet=True), whole) == 0.0


def untrained(model: nn.Module) -> None:
    model.last = nn.Linear(8, 3).double()


def test_a_layer_that_the_optimizer_does_not_know_is_refused(tmp_path: Path) -> None:
    with pytest.raises(
        InputError, match="the optimizer has a parameter that is no longer in the model"
    ):
        trained(job(At(2, untrained)), tmp_path, "single", steps=3)


@pytest.mark.parametrize("way", ["ddp", slow("fsdp")])
def test_a_batch_norm_in_evaluation_mode_has_the_first_ones_statistics_everywhere(
    way: str, tmp_path: Path
) -> None:
    """As with PyTorch's DistributedDataParallel; before, each replica went on with those of its
    own local batches.
    """
    its = job(At(2, still))
    assert (
        differ(*(trained(its, tmp_path, one, steps=5, devices="2xcpu") for one in ("dp", way)))
        < 1e-12
    )


def test_other_settings_of_a_job_that_is_no_file_are_said(tmp_path: Path, capsys: Any) -> None:
    its = ZOO["momentum"].replace(epochs=1)
    run = trained(its, tmp_path, "single")
    capsys.readouterr()
    lockstep.train(its.replace(epochs=2, keep=1), resume=run.folder)
    assert "begun" not in capsys.readouterr().out
    lockstep.train(
        its.replace(epochs=3, clip_norm=0.5, accumulate=2, precision="fp64"), resume=run.folder
    )
    said = " ".join(capsys.readouterr().out.split())
    for name, now, then in (
        ("clip_norm", 0.5, None),
        ("accumulate", 2, 1),
        ("precision", "fp64", its.precision),
    ):
        assert f"note: {name}: it is {now}, and was {then} when the run was started" in said
    assert said.count("was started") == 3
