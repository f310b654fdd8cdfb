"""Compiled models, under every strategy. The backend here traces and differentiates, and leaves out code generation."""

from __future__ import annotations

import dataclasses
import os
import subprocess
import sys

import pytest
import torch
from torch import nn

from lockstep import train
from lockstep.errors import JobError, StrategyError
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


class Own(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(6, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.body(x).tanh()


@pytest.mark.parametrize("model", [Own, lambda: nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))])
@pytest.mark.parametrize(("way", "devices"), WAYS[:2])
def test_models_are_compiled_whether_their_class_is_ones_own_or_of_pytorch(model, way, devices, tmp_path) -> None:
    torch._dynamo.reset()
    graphs = []

    @torch._dynamo.register_backend(name="counting")  # type: ignore[untyped-decorator]
    def counting(graph, inputs):
        graphs.append(graph)
        return graph.forward

    try:
        job = dataclasses.replace(ZOO["mlp"], model=model, compile="counting")
        train(job, strategy=way, devices=devices, folder=tmp_path, quiet=True)
    finally:
        del torch._dynamo.backends.registry._COMPILER_FNS["counting"]
    assert graphs


@pytest.mark.parametrize(("way", "devices"), [("single", "1xcpu"), ("dp", "2xcpu"), ("ddp", "2xcpu")])
def test_an_unknown_backend_is_refused_and_the_nearest_offered(way, devices, tmp_path) -> None:
    job = ZOO["mlp"].having(compile="inductr")
    with pytest.raises(JobError, match=r'^compile: there is no backend "inductr"; did you mean "inductor"'):
        train(job, strategy=way, devices=devices, folder=tmp_path, quiet=True)
    assert not list(tmp_path.iterdir())


FILE = """
import torch, lockstep
from torch import nn
from torch.utils.data import TensorDataset
job = lockstep.Job(
    model=lambda: nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1)), loss=nn.MSELoss(),
    optimizer=lambda p: torch.optim.SGD(p, lr=0.1), train_data=TensorDataset(torch.zeros(8, 4), torch.zeros(8, 1)),
    batch_size=4, compile=True)
"""


@pytest.mark.parametrize("way", ["dp", pytest.param("ddp", marks=pytest.mark.slow)])
def test_without_a_compiler_compile_is_refused_in_one_line_and_nothing_is_made(way: str, tmp_path) -> None:
    (tmp_path / "job.py").write_text(FILE)
    # Code that was made before would be found in PyTorch's cache.
    without = {"PATH": "/nonexistent", "CXX": "", "TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "cache")}
    words = [sys.executable, "-m", "lockstep", "train", "job.py", "--strategy", way, "--devices", "2xcpu"]
    done = subprocess.run(
        words, cwd=tmp_path, env={**os.environ, **without}, capture_output=True, text=True, check=False
    )
    assert done.returncode == 2
    assert done.stderr.startswith("lockstep: compile: no C++ compiler works here: install g++")
    assert done.stderr.count("\n") == 1 and not list((tmp_path / "runs").glob("*"))
