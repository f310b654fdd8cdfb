"""Compiled models, under every strategy. The backend here traces and differentiates, and leaves
out code generation.
"""

from __future__ import annotations

import dataclasses
import os
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import lockstep
from lockstep import train
from lockstep.errors import JobError, StrategyError
from lockstep.launch.devices import Device, slots
from lockstep.launch.world import World
from lockstep.model.compile import MODES, compile_models, refuse_graphs
from lockstep.strategies.ddp import DDP

from harness import differences, parity  # isort: skip
from batch_dependent_models import Clamping
from zoo import ZOO, slow

FLAT = pytest.param(DDP(reduce="flat"), "2xcpu", marks=pytest.mark.slow)
OVERLAPPED = pytest.param(DDP(reduce="overlapped"), "2xcpu", marks=pytest.mark.slow)
WAYS = [("single", "1xcpu"), ("dp", "2xcpu"), FLAT, OVERLAPPED]


@pytest.mark.sweep
@pytest.mark.parametrize(("way", "devices"), WAYS)
@pytest.mark.parametrize(
    "kind",
    [
        pytest.param("momentum", marks=pytest.mark.slow),
        "ignored tokens and tied weights",
        pytest.param("accumulation", marks=pytest.mark.slow),
    ],
)
def test_compiled_models_give_the_numbers_of_one_device(kind: str, way, devices) -> None:
    found = parity(
        ZOO[kind].replace(compile="aot_eager"), way, devices, against_settings={"compile": False}
    )
    assert found.worst < 1e-10


class Clamped(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(6, 8), nn.Linear(8, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.last(Clamping.apply(self.first(x)))
        return out


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of the compiler itself
def test_what_clamps_in_a_compiled_backward_sees_gradients_of_the_mean() -> None:
    """Found by trial: weights were 3 % off without a line, where items have weights."""
    job = ZOO["mlp"].replace(
        model=Clamped, loss=nn.CrossEntropyLoss(weight=torch.tensor([1.0, 2.0, 9.0])), metrics={}
    )
    found = parity(
        job.replace(compile="aot_eager"), "single", "1xcpu", against_settings={"compile": False}
    )
    assert found.worst < 1e-10


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of the compiler itself
@pytest.mark.parametrize(("way", "devices"), WAYS)
def test_generated_code_gives_the_numbers_of_one_device(way, devices) -> None:
    found = parity(
        ZOO["momentum"].replace(compile=True), way, devices, against_settings={"compile": False}
    )
    assert found.worst < 1e-10


def dropping() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 8), nn.Dropout(), nn.Linear(8, 3))


@pytest.mark.slow
def test_dropout_in_compiled_threads_is_refused(tmp_path) -> None:
    job = dataclasses.replace(ZOO["mlp"], model=dropping, compile="aot_eager")
    with pytest.raises(StrategyError, match="all threads draw from one generator"):
        train(job, strategy="dp", devices="2xcpu", folder=tmp_path, quiet=True)
    train(job, strategy="ddp", devices="2xcpu", folder=tmp_path, quiet=True)


def test_a_model_that_is_compiled_already_is_pointed_to_the_setting(tmp_path, capsys) -> None:
    """Found by trial: the advice was on functions in the model, and a line on an attribute that
    PyTorch made.
    """
    job = dataclasses.replace(
        ZOO["mlp"], model=lambda: torch.compile(nn.Linear(6, 3), backend="aot_eager")
    )
    with pytest.raises(
        StrategyError, match=r"the model was given to torch\.compile already: give the model itself"
    ):
        train(job, strategy="dp", devices="2xcpu", folder=tmp_path, quiet=True)
    train(job, strategy="ddp", devices="2xcpu", folder=tmp_path)
    notes = [line for line in capsys.readouterr().out.splitlines() if line.startswith("note: ")]
    assert notes == []


def test_a_compiled_model_keeps_its_names(tmp_path) -> None:
    job = ZOO["mlp"].replace(compile="aot_eager")
    run = train(job, strategy="single", devices="1xcpu", folder=tmp_path, quiet=True)
    assert list(run.model().state_dict()) == list(ZOO["mlp"].model().state_dict())
    assert isinstance(run.model()(torch.zeros(2, 6)), torch.Tensor)


class Stack(nn.Module):
    """A list of like blocks."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(6, 12), nn.Tanh(), nn.Dropout(dropout), nn.Linear(12, 6))
            for _ in range(2)
        )
        self.out = nn.Linear(6, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = x + block(x)
        return self.out(x)


@pytest.mark.slow
@pytest.mark.parametrize(("way", "devices"), WAYS)
def test_compiled_models_may_checkpoint_their_activations(way, devices) -> None:
    job = dataclasses.replace(
        ZOO["momentum"], model=Stack, compile="aot_eager", activation_checkpointing="auto"
    )
    found = parity(
        job, way, devices, against_settings={"compile": False, "activation_checkpointing": None}
    )
    assert found.worst < 1e-10


@pytest.mark.slow
@pytest.mark.filterwarnings(
    "ignore:The .grad attribute"
)  # which the compiler hides, but not from threads
@pytest.mark.parametrize(("way", "devices"), WAYS[1:3])
def test_compiled_models_may_synchronise_batch_norm(way, devices, capfd) -> None:
    """Found by trial: PyTorch's compiler went into it, with warnings, and took three times as
    long.
    """
    job = ZOO["convolutions with sync_batchnorm"].replace(compile="aot_eager")
    assert parity(job, way, devices, against_settings={"compile": False}).worst < 1e-10
    assert "torch/_dynamo" not in capfd.readouterr().err


@pytest.mark.slow
def test_dropout_in_a_compiled_block_draws_the_same_mask_again(tmp_path) -> None:
    job = dataclasses.replace(
        ZOO["momentum"], model=lambda: Stack(0.5), compile="aot_eager", precision="fp64"
    )
    plain, checkpointed = (
        train(job, devices="1xcpu", folder=tmp_path, quiet=True, activation_checkpointing=wanted)
        for wanted in (None, "blocks")
    )
    assert differences(job, checkpointed, plain).worst < 1e-10


class WarmingUp(nn.Module):
    """A buffer that it writes acts on its outputs."""

    def __init__(self) -> None:
        super().__init__()
        self.out = nn.Linear(6, 3)
        self.register_buffer("steps", torch.zeros(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.steps += 1
        return self.out(x) * self.steps


class Replacing(WarmingUp):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.steps = self.steps + 1
        return self.out(x) * self.steps


@pytest.mark.slow
@pytest.mark.parametrize("kind", [slow("running statistics"), "a buffer that is replaced"])
def test_other_buffers_that_change_may_be_compiled(kind: str) -> None:
    job = ZOO["convolutions with sync_batchnorm"].replace(sync_batchnorm=False, compile="aot_eager")
    if kind != "running statistics":
        job = dataclasses.replace(ZOO["mlp"], model=Replacing, compile="aot_eager")
    assert parity(job, "single", "1xcpu", against_settings={"compile": False}).worst < 1e-10


class Own(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(6, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.body(x).tanh()


@pytest.mark.sweep
@pytest.mark.parametrize(
    "model", [Own, lambda: nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))]
)
@pytest.mark.parametrize(("way", "devices"), WAYS[:2])
def test_models_are_compiled_whether_their_class_is_ones_own_or_of_pytorch(
    model, way, devices, tmp_path
) -> None:
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


@pytest.mark.sweep
@pytest.mark.parametrize(
    ("way", "devices"), [("single", "1xcpu"), ("dp", "2xcpu"), ("ddp", "2xcpu")]
)
def test_an_unknown_backend_is_refused_and_the_nearest_offered(way, devices, tmp_path) -> None:
    job = ZOO["mlp"].replace(compile="inductr")
    with pytest.raises(
        JobError, match=r'^compile: there is no backend or mode "inductr"; did you mean "inductor"'
    ):
        train(job, strategy=way, devices=devices, folder=tmp_path, quiet=True)
    with pytest.raises(JobError, match='did you mean "max-autotune"'):
        train(
            job.replace(compile="max-autotun"),
            strategy=way,
            devices=devices,
            folder=tmp_path,
            quiet=True,
        )
    assert not list(tmp_path.iterdir())


# ---- modes ---------------------------------------------------------------------------------------


def compiled_with(monkeypatch: pytest.MonkeyPatch, wanted: bool | str) -> dict[str, Any]:
    """What PyTorch's compiler is told."""
    told: dict[str, Any] = {}

    def record(function: Callable[..., Any], **words: Any) -> Callable[..., Any]:
        told.update(words)
        return function

    monkeypatch.setattr(torch, "compile", record)
    compile_models([nn.Linear(2, 2)], wanted)
    return told


def test_a_word_is_a_mode_or_the_name_of_a_backend(monkeypatch: pytest.MonkeyPatch) -> None:
    for mode in MODES:
        assert compiled_with(monkeypatch, mode) == {"backend": "inductor", "mode": mode}
    assert compiled_with(monkeypatch, True) == {"backend": "inductor", "mode": None}
    assert compiled_with(monkeypatch, "aot_eager") == {"backend": "aot_eager", "mode": None}
    assert not {*MODES} & {*torch.compiler.list_backends(())}


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of the compiler itself
@pytest.mark.parametrize("mode", MODES)
def test_each_mode_gives_the_numbers_of_one_device(mode: str) -> None:
    found = parity(
        ZOO["momentum"].replace(compile=mode), "ddp", "2xcpu", against_settings={"compile": False}
    )
    assert found.worst < 1e-10
    assert mode in torch._inductor.list_mode_options()


def test_cuda_graphs_are_refused_where_micro_batches_or_threads_would_share_them() -> None:
    job, one, two = (
        ZOO["mlp"].replace(compile="reduce-overhead"),
        Device("cuda", 0),
        Device("cuda", 1),
    )
    refuse_graphs(job, World(devices=(one,)))
    refuse_graphs(
        job.replace(accumulate=2), World(devices=slots(2))
    )  # there PyTorch leaves the graphs out
    refuse_graphs(
        job.replace(compile="max-autotune-no-cudagraphs", accumulate=2), World(devices=(one, two))
    )
    with pytest.raises(JobError, match=r"accumulate is 2: take .*max-autotune-no-cudagraphs"):
        refuse_graphs(job.replace(accumulate=2), World(devices=(one,)))
    with pytest.raises(JobError, match=r"threads of one process.*take ddp"):
        refuse_graphs(job.replace(compile="max-autotune"), World(devices=(one, two)))


FILE = """
import torch, lockstep
from torch import nn
from torch.utils.data import TensorDataset
job = lockstep.Job(
    model=lambda: nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1)), loss=nn.MSELoss(),
    optimizer=lambda p: torch.optim.SGD(p, lr=0.1), train_data=TensorDataset(torch.zeros(8, 4), torch.zeros(8, 1)),
    batch_size=4, compile=True)
"""


def test_each_replica_is_compiled_however_few_models_pytorch_compiles_by_one_code() -> None:
    """Replicas shared a code object, and beyond PyTorch's limit of 8 the rest ran as they were."""
    torch._dynamo.reset()
    step = lockstep.parallelize(
        nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3)),
        nn.CrossEntropyLoss(),
        lambda params: torch.optim.SGD(params, lr=0.1),
        strategy="dp",
        devices="3xcpu",
        compile="aot_eager",
    )
    with torch._dynamo.config.patch(recompile_limit=1, fail_on_recompile_limit_hit=True):
        step(torch.ones(9, 6), torch.zeros(9, dtype=torch.long))
    torch._dynamo.reset()


@pytest.mark.slow
@pytest.mark.parametrize("way", ["dp", "ddp"])
def test_without_a_compiler_compile_is_refused_in_one_line_and_nothing_is_made(
    way: str, tmp_path
) -> None:
    (tmp_path / "job.py").write_text(FILE)
    # Code that was made before would be found in PyTorch's cache.
    without = {
        "PATH": "/nonexistent",
        "CXX": "",
        "TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "cache"),
    }
    words = [
        sys.executable,
        "-m",
        "lockstep",
        "train",
        "job.py",
        "--strategy",
        way,
        "--devices",
        "2xcpu",
    ]
    done = subprocess.run(
        words,
        cwd=tmp_path,
        env={**os.environ, **without},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 2
    assert done.stderr.startswith("lockstep: compile: no C++ compiler works here: install g++")
    assert done.stderr.count("\n") == 1 and not list((tmp_path / "runs").glob("*"))
