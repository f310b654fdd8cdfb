"""Frozen weights that the job builds itself are in no file of the run, and everything goes as if
they were.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from torch import nn

import lockstep
from lockstep import Callback, Job, Run
from lockstep.callbacks import EMA, TrainingContext
from lockstep.errors import FolderError, JobError, RunError

from harness import same_bits, trained  # isort: skip
from zoo import ZOO, drawn, sgd, slow, state_of

FROZEN = {"0.weight", "0.bias"}


def adapted(base: float = 1.0) -> nn.Module:
    """A pretrained layer, a batch norm that is trained with its buffers, and a new layer."""
    first = nn.Linear(6, 8)
    nn.init.constant_(first.weight, base)
    first.requires_grad_(False)
    return nn.Sequential(first, nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 3))


def job(*callbacks: Callback, **settings: Any) -> Job:
    fields: dict[str, Any] = {
        "model": adapted,
        "optimizer": sgd,
        "precision": "fp64",
        "save_frozen": False,
        "batch_size": 10,
    }
    return ZOO["mlp"].replace(callbacks=callbacks, **{**fields, **settings})


def names_in(file: Path) -> set[str]:
    with safe_open(file, framework="pt") as opened:
        return set(opened.keys())


@pytest.mark.parametrize(
    "way", ["single", slow("dp"), slow("ddp"), slow("mp"), "pp", slow("fsdp"), slow("hogwild")]
)
def test_frozen_weights_are_in_no_file_and_a_run_resumes_to_the_same_bits(
    way: str, tmp_path: Path
) -> None:
    callbacks = () if way == "hogwild" else (EMA(0.5),)
    its = job(*callbacks)
    half = trained(its.replace(steps=4), tmp_path, way)
    run = trained(its, tmp_path, way, resume=half.folder)
    files = [
        path
        for path in run.folder.rglob("*.safetensors")
        if path.parent.parent.name != "checkpoints"
    ]
    assert len(files) == 2 + len(callbacks)
    for file in files:
        assert {"1.running_mean", "3.weight"} <= names_in(file)
    for file in run.folder.rglob("*.safetensors"):
        assert not {name for name in names_in(file) if name.endswith(tuple(FROZEN))}, file
    if way != "hogwild":  # which waits for nobody
        saved = trained(its.replace(save_frozen=True), tmp_path, way)
        for name in ("model.safetensors", "ema.safetensors", "best.safetensors"):
            assert same_bits(run.model(name), saved.model(name))
        assert run.metrics == saved.metrics
    assert lockstep.predict(run, drawn(5, 6), quiet=True).shape == (5, 3)
    assert lockstep.evaluate(run, devices=1)["loss"] < 3
    assert "0.weight" in names_in(lockstep.export(run, format="safetensors", quiet=True).path)


def test_another_base_is_refused_wherever_it_would_be_taken(tmp_path: Path) -> None:
    its = job()
    run = trained(its.replace(steps=4), tmp_path)
    other = its.replace(model=lambda: adapted(2.0))
    says = (
        r'"0\.weight" was frozen and not saved \(save_frozen\), and the job now builds other values'
    )
    with pytest.raises(FolderError, match=says):
        Run.open(run.folder, other).model()
    with pytest.raises(FolderError, match=f"the checkpoint: {says}"):
        trained(other, tmp_path, resume=run.folder)
    begun = its.replace(save_frozen=True, init=str(run.folder), epochs=1)
    assert trained(begun, tmp_path).metrics["loss"] < run.metrics["loss"]
    with pytest.raises(FolderError, match=f"init: .*{says}"):
        trained(begun.replace(model=lambda: adapted(2.0)), tmp_path)
    with pytest.raises(
        JobError, match="save_frozen: with false, frozen weights come from model only"
    ):
        job(init=str(run.folder))


class Unfreezes(Callback):
    def __init__(self, writes: str) -> None:
        self.writes = writes

    def on_epoch(self, training: TrainingContext) -> None:
        p = training.model.get_parameter("0.bias")
        if self.writes == "in place":
            with torch.no_grad():
                p.add_(1.0)
        else:
            p.data = p.data + 1.0


@pytest.mark.parametrize("writes", ["in place", "data"])
def test_what_does_not_stay_as_it_was_built_would_be_lost(writes: str, tmp_path: Path) -> None:
    """Found by trial: what was written to the data of a parameter was not seen."""
    with pytest.raises(
        RunError,
        match=r'save_frozen: "0.bias" was frozen when the training began, .* has other values now',
    ):
        trained(job(Unfreezes(writes)), tmp_path)


def test_what_a_callback_freezes_for_a_while_is_saved(tmp_path: Path) -> None:
    run = trained(job(lockstep.callbacks.Freeze("3", until=5)), tmp_path)
    assert isinstance(state_of(run.folder)["model"]["3.weight"], torch.Tensor)
