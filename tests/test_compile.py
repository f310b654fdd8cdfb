"""Compiled models, under every strategy. The backend here traces and differentiates, and leaves out code generation."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from torch import nn

from lockstep import train
from lockstep.errors import StrategyError
from lockstep.strategies.ddp import DDP
from lockstep.verify import parity
from zoo import ZOO

WAYS = [("single", "1xcpu"), ("dp", "2xcpu"), (DDP(reduce="flat"), "2xcpu"), (DDP(reduce="overlapped"), "2xcpu")]


@pytest.mark.parametrize(("way", "devices"), WAYS)
@pytest.mark.parametrize("kind", ["momentum", "ignored tokens and tied weights", "accumulation"])
def test_compiled_models_give_the_numbers_of_one_device(kind: str, way, devices) -> None:
    found = parity(ZOO[kind].having(compile="aot_eager"), way, devices, against_settings={"compile": False})
    assert found.worst < 1e-10


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of the compiler itself
@pytest.mark.parametrize(("way", "devices"), WAYS)
def test_generated_code_gives_the_numbers_of_one_device(way, devices) -> None:
    found = parity(ZOO["momentum"].having(compile=True), way, devices, against_settings={"compile": False})
    assert found.worst < 1e-10


def dropping() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 8), nn.Dropout(), nn.Linear(8, 3))


def test_dropout_in_compiled_threads_is_refused(tmp_path) -> None:
    job = dataclasses.replace(ZOO["mlp"], model=dropping, compile="aot_eager")
    with pytest.raises(StrategyError, match="compiled code takes them from one generator"):
        train(job, strategy="dp", devices="2xcpu", folder=tmp_path, quiet=True)
    train(job, strategy="ddp", devices="2xcpu", folder=tmp_path, quiet=True)


def test_a_compiled_model_keeps_its_names(tmp_path) -> None:
    job = ZOO["mlp"].having(compile="aot_eager")
    run = train(job, strategy="single", devices="1xcpu", folder=tmp_path, quiet=True)
    assert list(run.model().state_dict()) == list(ZOO["mlp"].model().state_dict())
    assert isinstance(run.model()(torch.zeros(2, 6)), torch.Tensor)
