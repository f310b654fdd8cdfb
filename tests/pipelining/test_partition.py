"""Which layers go where: blocks found in the order of execution, timed, split, printed."""

from __future__ import annotations

import ast
import random
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

import lockstep
from lockstep.cli.command import main
from lockstep.errors import StrategyError
from lockstep.launch.devices import slots
from lockstep.pipelining.device_map import stage_of
from lockstep.pipelining.planner.blocks import Block, map_of
from lockstep.pipelining.planner.measured_blocks import measured, state_copies
from lockstep.pipelining.planner.plan import planned
from lockstep.tensors.pytree import call, tensors

EXAMPLES = Path(__file__).parents[2] / "examples"
sys.path.insert(0, str(EXAMPLES))

from models.gpt import GPT  # noqa: E402
from models.resnet50 import ResNet50  # noqa: E402
from models.unet import UNet  # noqa: E402


def look(model: nn.Module, inputs: Any) -> tuple[Block, ...]:
    def total() -> torch.Tensor:
        outputs = call(model, inputs)
        return next(iter(tensors(outputs))).sum()

    return measured(model, total, slots(1)[0], seconds=0.0, rounds=1)


def names(found: tuple[Block, ...]) -> list[str]:
    return [block.name for block in found]


class Backwards(nn.Module):
    """Registered last to first; a list that is never called, an activation for all, layers that
    stay unused.
    """

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(8, 3)
        self.unused = nn.Linear(2, 2)
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))
        self.stem = nn.Linear(4, 8)
        self.scale = nn.Parameter(torch.ones(8))
        self.act = nn.ReLU()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.stem(x)
        for layer in self.layers:
            x = x + self.act(layer(x))
        return self.head(x * self.scale)


def test_blocks_come_in_the_order_of_execution_whatever_the_containers() -> None:
    model = Backwards()
    found = look(model, torch.randn(5, 4))
    assert names(found) == ["stem", "layers.0", "layers.1", "layers.2", "head"]
    made = map_of(model, found, [0, 2, 5])
    assert made == {"scale": 0, "head": 1, "unused": 1, "layers.0": 0, "layers.1": 1} | {
        "layers.2": 1,
        "stem": 0,
    }, "with its neighbour"
    assert [block.parameters for block in found] == [160, 288, 288, 288, 108]


def test_an_attention_that_does_not_call_its_output_layer_stays_whole() -> None:
    layer = nn.TransformerEncoderLayer(16, 4, 32, batch_first=True)
    found = look(nn.Sequential(layer, nn.Linear(16, 2)), torch.randn(2, 6, 16))
    assert names(found) == ["0.self_attn", "0.norm1", "0.linear1", "0.linear2", "0.norm2", "1"]


def test_a_table_of_positions_beside_the_layers_does_not_keep_a_model_whole() -> None:
    model = GPT(11, 8, 16, 2, 2)
    found = look(nn.ModuleDict({"inner": model})["inner"], torch.randint(11, (2, 8)))
    assert len(found) > 6


def test_a_layer_that_is_called_twice_is_one_block() -> None:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), nn.Linear(4, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.a(self.b(self.a(x)))

    found = look(Twice(), torch.randn(2, 4))
    assert names(found) == ["a", "b"]


def test_control_flow_on_values_is_followed_and_leaves_nothing_behind() -> None:
    class Asks(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm, self.a, self.b = nn.BatchNorm1d(4), nn.Linear(4, 4), nn.Linear(4, 4)
            self.drop = nn.Dropout()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = self.drop(self.norm(x))
            return self.a(x) if x.sum() > 1e9 else self.b(x)

    model = Asks()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    inputs = torch.randn(6, 4)
    state = torch.get_rng_state()
    found = look(model, inputs)
    assert names(found) == ["norm", "b"]
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    assert torch.equal(state, torch.get_rng_state()) and all(
        p.grad is None for p in model.parameters()
    )
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())


class Doubling(nn.Module):
    """Its first forward registers a hook, and notes that it has."""

    hooked = False

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(4, 4), nn.Linear(4, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not self.hooked:
            self.first.register_forward_hook(lambda module, args, outputs: 2 * outputs)
            self.hooked = True
        outputs: torch.Tensor = self.last(self.first(x))
        return outputs


def test_a_hook_that_a_first_forward_registers_is_taken_away_with_what_says_so() -> None:
    """Found by trial: a model of transformers then gave each of its hidden states twice."""
    model, x = Doubling(), torch.randn(3, 4)
    look(model, x)
    assert not model.hooked and not model.first._forward_hooks
    expected = model.last(2 * model.first(x))
    assert torch.equal(model(x), expected)


def test_kept_bytes_are_those_that_backward_needs() -> None:
    model = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 8))
    found = look(model, torch.randn(32, 16))
    first, last = found
    assert first.activations == 32 * 16 * 4 + 32 * 64 * 4 and last.activations == 0, (
        "one tensor is not kept twice"
    )
    for parameter in model[0].parameters():
        parameter.requires_grad_(False)
    frozen = look(model, torch.randn(32, 16))
    assert frozen[0].trained == 0 and frozen[1].backward > 0


class Clock:
    """Goes on only where something takes time: a busy machine changes nothing."""

    now = 0.0


class Takes(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, seconds: float) -> torch.Tensor:
        ctx.seconds = seconds
        Clock.now += seconds
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        Clock.now += 2 * ctx.seconds
        return gradient, None


class Slow(nn.Linear):
    def __init__(self, seconds: float) -> None:
        super().__init__(4, 4)
        self.seconds = seconds

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return Takes.apply(super().forward(x), self.seconds)


def test_each_block_gets_its_own_time_forward_and_backward(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(time, "perf_counter", lambda: Clock.now)
    taking = [1.0, 3.0, 0.0, 2.0]
    model = nn.Sequential(*map(Slow, taking), nn.ReLU(inplace=True))
    inputs = torch.randn(3, 4)
    timed = measured(model, lambda: call(model, inputs).sum(), slots(1)[0], seconds=0.0, rounds=3)
    for block, seconds in zip(timed, taking, strict=True):
        assert (block.forward, block.backward) == (seconds, 2 * seconds), block
    assert all(p.grad is None for p in model.parameters())
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())


@pytest.mark.parametrize("stages", [1, 2, 3, 4])
def test_the_map_puts_every_parameter_where_its_block_is(stages: int) -> None:
    for model, inputs in [
        (Backwards(), torch.randn(5, 4)),
        (UNet(1, 1, width=4, depth=2), torch.randn(2, 1, 8, 8)),
        (GPT(11, 8, 16, 2, 2), torch.randint(11, (2, 8))),
        (
            nn.TransformerEncoder(
                nn.TransformerEncoderLayer(8, 2, 8), 2, enable_nested_tensor=False
            ),
            torch.randn(3, 2, 8),
        ),
    ]:
        found = look(model, inputs)
        bounds = [len(found) * s // stages for s in range(stages + 1)]
        made = map_of(model, found, bounds)
        stage = stage_of(model, made, stages)
        for place, block in enumerate(found):
            expected = next(s for s, end in enumerate(bounds[1:]) if place < end)
            assert all(
                stage[f"{block.name}.{key}"] == expected
                for key, _ in model.get_submodule(block.name).named_parameters()
            )
        for name in made:
            below = {
                s
                for key, s in stage.items()
                if key == name or key.startswith(f"{name}." if name else "")
            }
            assert below == {made[name]}, (
                "no container is on one stage, and a layer of it on another"
            )


def test_resnet_50_cut_behind_its_second_group_has_the_short_map() -> None:
    model = ResNet50(10)
    found = look(model, torch.randn(2, 3, 32, 32))
    assert len(found) == 107 and sum(p.numel() for p in ResNet50().parameters()) == 25_557_032
    cut = next(place for place, block in enumerate(found) if block.name.startswith("layer3"))
    made = map_of(model, found, [0, cut, 107])
    assert made == {
        "conv1": 0,
        "bn1": 0,
        "layer1": 0,
        "layer2": 0,
        "layer3": 1,
        "layer4": 1,
        "fc": 1,
    }


def test_tied_and_shared_layers_are_in_the_map_under_each_of_their_names() -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table, self.middle = nn.Embedding(7, 4), nn.Linear(4, 4)
            self.again, self.head = self.middle, nn.Linear(4, 7, bias=False)
            self.head.weight = self.table.weight

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.head(self.again(self.middle(self.table(x))))

    model = Tied()
    found = look(model, torch.randint(7, (3, 2)))
    assert names(found) == ["table", "middle", "head"]
    assert map_of(model, found, [0, 1, 3]) == {"table": 0, "middle": 1, "again": 1, "head": 1}


def test_what_an_optimizer_keeps_is_asked_of_it(tmp_path: Path) -> None:
    def job(optimizer: Any) -> lockstep.Job:
        return small_job().replace(optimizer=optimizer)

    assert state_copies(job(lambda params: torch.optim.SGD(params, lr=0.1))) == 0
    assert state_copies(job(lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9))) == 1
    assert state_copies(job(lambda params: torch.optim.AdamW(params))) == 2
    assert (
        state_copies(job(lambda params: torch.optim.SGD([dict(params)["head.bias"]], lr=0.1))) == 2
    )


def small_job() -> lockstep.Job:
    torch.manual_seed(0)
    data = TensorDataset(torch.randn(40, 4), torch.randn(40, 3))
    return lockstep.Job(
        model=Backwards,
        loss=nn.MSELoss(),
        optimizer=lambda params: torch.optim.SGD(params, lr=0.1),
        train_data=data,
        batch_size=16,
    )


def test_partition_in_python() -> None:
    found = lockstep.partition(small_job(), devices="2xcpu", seconds=0.0)
    assert found.samples == 16 and len(found.stages) == 2
    assert [str(stage.device) for stage in found.stages] == ["cpu:0", "cpu:1"]
    assert all(
        stage.forward > 0 and stage.backward > 0 and stage.need > 0 for stage in found.stages
    )
    assert 1 < found.speed_up <= 2
    stage_of(Backwards(), found.device_map, 2)
    micro = lockstep.partition(small_job(), devices="2xcpu", microbatches=4, seconds=0.0)
    assert micro.samples == 4
    assert sum(stage.activations for stage in micro.stages) < sum(
        stage.activations for stage in found.stages
    )


def test_planning_leaves_the_model_as_it_was() -> None:
    """A job may give the same model every time: what trains it then finds no hook, gradient or
    statistic of the measurement.
    """
    net = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 3))
    before = {name: value.clone() for name, value in net.state_dict().items()}
    job = small_job().replace(model=lambda: net)
    drawn = torch.get_rng_state(), random.getstate()
    _, choice = planned(job, slots(2), microbatches=[4], chunks=(1,), seconds=0.0)
    assert choice.best.microbatches == 4
    assert all(value.equal(before[name]) for name, value in net.state_dict().items())
    assert all(p.grad is None for p in net.parameters())
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in net.modules())
    assert torch.get_rng_state().equal(drawn[0]) and random.getstate() == drawn[1]


def test_micro_batches_that_the_model_can_not_take_are_not_chosen() -> None:
    """One sample alone has nothing that BatchNorm could normalise over."""
    job = small_job().replace(
        model=lambda: nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 3))
    )
    _, choice = planned(job, slots(2), seconds=0.0)
    assert {candidate.microbatches for candidate in choice.candidates} == {1, 2, 3, 4, 6, 8}, (
        "of 16 samples"
    )


def test_memory_is_looked_at(monkeypatch) -> None:
    room = [100.0, 100.0]
    monkeypatch.setattr("lockstep.pipelining.planner.partition.capacities", lambda devices: room)
    with pytest.raises(
        StrategyError, match=r"nothing fits: 1f1b .* needs .*B on a device that has 100 B"
    ):
        lockstep.partition(small_job(), devices="2xcpu", seconds=0.0)
    with pytest.raises(StrategyError, match="6 stages, but the model has 5 blocks"):
        lockstep.partition(small_job(), devices="6xcpu", seconds=0.0)
    room = [1000.0, 1e6]
    wide = lockstep.partition(small_job(), devices="2xcpu", seconds=0.0)
    assert wide.stages[0].need <= 1000 and len(wide.stages[0].blocks) == 1


def test_stages_are_even_in_bytes_where_those_that_are_even_in_time_do_not_fit(monkeypatch) -> None:
    """The layers in the middle are fast and hold nearly all parameters."""

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = nn.Embedding(20_000, 4, sparse=True)
            self.second = nn.Embedding(20_000, 4, sparse=True)
            self.slow = nn.Sequential(*(nn.Linear(4, 4) for _ in range(200)))
            self.out = nn.Linear(4, 3)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            number = x[:, 0].long().abs()
            return self.out(self.slow(self.first(number) + self.second(number)))

    job = small_job().replace(model=Net)
    room = [1.2e6, 1.2e6]  # for one embedding with its gradient, not for both
    monkeypatch.setattr("lockstep.pipelining.planner.partition.capacities", lambda devices: room)
    found = lockstep.partition(job, devices="2xcpu", seconds=0.0)
    first, second = found.stages
    assert [block.name for block in first.blocks] == ["first"]
    assert first.need <= room[0] and second.need <= room[1]


def test_layers_of_a_model_that_does_not_fit_on_a_device_are_divided_by_their_parameters(
    monkeypatch, tmp_path: Path, capsys
) -> None:
    def full(*args: Any, **kwargs: Any) -> Any:
        raise torch.OutOfMemoryError("out of memory")

    monkeypatch.setattr("lockstep.pipelining.planner.measured_blocks.measured", full)
    lockstep.train(small_job(), strategy="mp", devices="2xcpu", folder=tmp_path)
    said = " ".join(capsys.readouterr().out.split())
    assert "OutOfMemoryError" in said and "stages are balanced by parameters" in said


def test_the_plan_chooses_schedule_and_microbatches() -> None:
    found, choice = planned(small_job(), slots(2), seconds=0.0)
    assert len(found.stages) == len(choice.best.plan.costs) and choice.best.microbatches <= 16
    assert (
        "times as fast as one device with the whole batch" in choice.why
        and len(choice.candidates) > 10
    )
    stage_of(Backwards(), found.device_map, len(found.stages))
    _, only = planned(small_job(), slots(2), schedules=["gpipe"], microbatches=[4], seconds=0.0)
    assert str(only.best) == "gpipe with 4 micro-batches"


JOB = """
import lockstep, torch
from torch import nn

def job(layers: int = 3):
    return lockstep.Job(
        model=lambda: nn.Sequential(*(nn.Linear(6, 6) for _ in range(layers))),
        loss=nn.MSELoss(),
        optimizer=lambda params: torch.optim.SGD(params, lr=0.1),
        train_data=torch.utils.data.TensorDataset(torch.randn(32, 6), torch.randn(32, 6)),
        batch_size=16,
    )
"""


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "small.py"
    path.write_text(JOB)
    return str(path)


@pytest.mark.parametrize("width", [60, 80, 140])
def test_the_command_prints_a_table_and_the_map(width: int, file: str, monkeypatch, capsys) -> None:
    monkeypatch.setenv("COLUMNS", str(width))
    assert main(["partition", file, "--devices", "3xcpu", "--set", "layers=6"]) == 0
    table, _, pasted = capsys.readouterr().out.partition("\n\n")
    assert all(len(line) <= width for line in table.splitlines())
    assert "3 stages of 6 blocks; measured" in table and "activations" in table
    written = ast.literal_eval(pasted.strip().removeprefix("device_map="))
    assert list(written) == list("012345") and sorted(set(written.values())) == [0, 1, 2]
    assert not list(Path(file).parent.glob("runs")), "nothing is made"


def test_the_command_chooses_microbatches_and_schedule(file: str, monkeypatch, capsys) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    words = [
        "partition",
        file,
        "--devices",
        "2xcpu",
        "--microbatches",
        "auto",
        "--schedule",
        "1f1b",
    ]
    assert main(words) == 0
    said = capsys.readouterr().out
    assert "bubble" in said and "1f1b with " in said and "device_map={" in said


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--microbatches", "some"], "--microbatches some: write a number, or auto"),
        (["--microbatches", "0"], "partition: 0 micro-batches; there is at least one"),
        (["--microbatches", "auto", "--schedule", "2f2b"], '--schedule: there is no "2f2b"'),
        (["--devices", "4xcpu"], "partition: 4 stages, but the model has 3 blocks"),
    ],
)
def test_wrong_words_get_one_line(words: list[str], says: str, file: str, capsys) -> None:
    assert main(["partition", file, "--devices", "2xcpu", *words]) == 2
    lines = capsys.readouterr().err.strip().splitlines()
    assert len(lines) == 1 and says in lines[0], lines


class Counting:
    """A loss whose later calls weigh less."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return nn.functional.cross_entropy(outputs, targets) + outputs.square().mean() / self.calls


def test_measuring_the_stages_leaves_the_state_of_a_loss(tmp_path: Path) -> None:
    """Found by trial: weights up to 16 % off under mp, without a line."""
    data = TensorDataset(torch.randn(24, 6), torch.randint(3, (24,)))

    def trained(strategy: str, devices: str) -> nn.Module:
        job = lockstep.Job(
            model=lambda: nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3)),
            loss=Counting(),
            batch_size=8,
            optimizer=lambda p: torch.optim.SGD(p, lr=0.1),
            train_data=data,
            epochs=2,
            precision="fp64",
        )
        return lockstep.train(
            job, strategy=strategy, devices=devices, folder=tmp_path, quiet=True
        ).model()

    one, two = trained("single", "1xcpu"), trained("mp", "2xcpu")
    for p, q in zip(one.parameters(), two.parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=1e-10, atol=1e-12)
