"""A loop of one's own that accumulates by hand: ``step.backward`` as often as it likes, then
``step.update()``.
"""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import lockstep
from lockstep.errors import InputError, LossError, StrategyError
from lockstep.strategies import DDP
from zoo import drawn, labels, mlp, plain_sgd, sgd, slow

BOUND = 1e-10
WAYS: dict[str, Any] = {
    "single": ("single", "1xcpu"),
    "dp": ("dp", "3xcpu"),
    "ddp flat": (DDP(reduce="flat"), "2xcpu"),
    "ddp overlapped": (DDP(reduce="overlapped"), "2xcpu"),
    "mp": ("mp", "2xcpu"),
    "pp": ("pp", "2xcpu"),
    "ddp=2xpp=2": ("ddp=2xpp=2", "4xcpu"),
}
SIZES = [[5, 3, 1], [2], [1, 7], [4, 4, 4]]
"""Samples of each part, for each update: some leave a device without one."""


class Switched(nn.Module):
    """A layer that a loop switches on and off, so that some parts of an update give it no
    gradient.
    """

    def __init__(self) -> None:
        super().__init__()
        self.layers, self.more, self.has_more = mlp(), nn.Linear(6, 3), False

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.layers(x)
        return out + self.more(x) if self.has_more else out


def batches() -> list[list[tuple[Tensor, Tensor]]]:
    """The parts of each update; some targets are ignored, and all of one part."""
    sizes = [size for of in SIZES for size in of]
    x, y = drawn(sum(sizes), 6).double(), labels(sum(sizes), 3)
    y[::4] = -100
    parts = iter(zip(x.split(sizes), y.split(sizes), strict=True))
    return [[next(parts) for _ in of] for of in SIZES]


def share(part: tuple[Tensor, Tensor], world: lockstep.World | None) -> tuple[Any, Any]:
    """This rank's; (None, None) where it has none."""
    if world is None:
        return part
    size = -(-len(part[0]) // world.size)
    x, y = (of[world.rank * size : (world.rank + 1) * size] for of in part)
    return (x, y) if len(x) else (None, None)


def weights(model: nn.Module) -> Tensor:
    return torch.cat([p.detach().flatten() for p in model.parameters()])


def by_torch(clip: float | None = None) -> tuple[Tensor, list[float]]:
    """The same, written in PyTorch: weights, and the loss of each update."""
    torch.manual_seed(0)
    model, losses = Switched().double(), []
    optimizer = sgd(model.parameters())
    for parts in batches():
        total = torch.zeros((), dtype=torch.float64)
        for i, (x, y) in enumerate(parts):
            model.has_more = i % 2 == 1
            total = total + nn.functional.cross_entropy(model(x), y, reduction="sum")
        loss = total / sum((y != -100).sum() for _, y in parts)
        optimizer.zero_grad()
        loss.backward()
        if clip is not None:
            nn.utils.clip_grad_norm_(model.parameters(), clip)
        optimizer.step()
        losses.append(loss.item())
    return weights(model), losses


def step_of(
    model: nn.Module, strategy: Any = "single", devices: str = "1xcpu", **settings: Any
) -> Any:
    loss, optimizer = (
        settings.pop("loss", nn.CrossEntropyLoss()),
        settings.pop("optimizer", plain_sgd),
    )
    settings = {"precision": "fp64", **settings}
    return lockstep.parallelize(
        model, loss, optimizer, strategy=strategy, devices=devices, **settings
    )


def by_hand(
    strategy: Any, devices: str, world: Any = None, clip: float | None = None
) -> tuple[Tensor, list[float]]:
    torch.manual_seed(0)
    model = Switched()
    step = step_of(model, strategy, devices, optimizer=sgd, clip_norm=clip)
    losses = []
    for parts in batches():
        for i, part in enumerate(parts):
            model.has_more = i % 2 == 1
            step.backward(*share(part, world))
        losses.append(step.update().loss)
    return weights(model), losses


def looped(way: str, loop: Any, **settings: Any) -> list[Any]:
    strategy, devices = WAYS[way]
    if way.startswith("ddp"):
        each = 2 if "xpp" in way else 1
        return lockstep.launch(
            lambda world: loop(strategy, "auto", world=world, **settings),
            devices=devices,
            devices_per_rank=each,
        )
    return [loop(strategy, devices, **settings)]


SLOW = {
    ("single", 0.1),
    ("dp", None),
    ("ddp flat", None),
    ("ddp overlapped", 0.1),
    ("mp", None),
    ("mp", 0.1),
    ("pp", None),
    ("ddp=2xpp=2", None),
    ("ddp=2xpp=2", 0.1),
}


@pytest.mark.parametrize(
    ("way", "clip"),
    [
        pytest.param(way, clip, marks=[pytest.mark.slow] if (way, clip) in SLOW else [])
        for way in WAYS
        for clip in (None, 0.1)
    ],
)
def test_parts_given_by_hand_equal_one_update_on_all_of_them(way: str, clip: float | None) -> None:
    expected, losses = by_torch(clip)
    for found, its in looped(way, by_hand, clip=clip):
        assert (found - expected).abs().max() < BOUND
        assert its == pytest.approx(losses, abs=BOUND)


def test_parts_by_hand_equal_the_same_step_on_the_joined_batch() -> None:
    ends = []
    for apart in (True, False):
        torch.manual_seed(0)
        step = step_of(model := mlp(), optimizer=sgd)
        for parts in batches():
            if apart:
                results = [step.backward(x, y) for x, y in parts]
                assert sum(r.size for r in results) == (whole := step.update()).size
                assert float(whole.total) == pytest.approx(sum(float(r.total) for r in results))
            else:
                step(*(torch.cat(of) for of in zip(*parts, strict=True)))
        ends.append(weights(model))
        assert step.world.step == len(SIZES)
    assert (ends[0] - ends[1]).abs().max() < BOUND


def test_gradients_may_be_looked_at_and_changed_before_the_update() -> None:
    """They are those of total / samples over the parts so far."""
    x, y = drawn(6, 6).double(), labels(6, 3)
    torch.manual_seed(0)
    step = step_of(model := mlp())
    step.backward(x[:4], y[:4])
    step.backward(x[4:], y[4:])
    before = weights(model)
    expected = torch.autograd.grad(
        nn.functional.cross_entropy(model(x), y), list(model.parameters())
    )
    for p, grad in zip(model.parameters(), expected, strict=True):
        assert p.grad is not None and (p.grad - grad).abs().max() < BOUND
        p.grad.zero_()
    step.update()
    assert torch.equal(before, weights(model))


# ---- misuse --------------------------------------------------------------------------------------


def test_an_update_without_gradients_is_refused() -> None:
    step = step_of(mlp())
    with pytest.raises(
        InputError, match=r"no gradients yet: call step.backward\(inputs, targets\) before"
    ):
        step.update()
    step.backward(drawn(4, 6), labels(4, 3))
    step.update()
    with pytest.raises(InputError, match="no gradients yet"):
        step.update()


@pytest.mark.parametrize("what", ["step", "save", "freeze"])
def test_what_would_lose_waiting_gradients_is_refused(what: str, tmp_path: Path) -> None:
    step = step_of(model := mlp())
    step.backward(drawn(4, 6), labels(4, 3))
    with pytest.raises(
        InputError,
        match=r"gradients of 4 samples by step.backward\(...\) are pending: call step.update\(\)",
    ):
        if what == "step":
            step(drawn(4, 6), labels(4, 3))
        elif what == "save":
            step.save(tmp_path)
        else:
            model[0].weight.requires_grad_(False)
            step.update()


def test_ranks_that_give_unequally_many_parts_are_named() -> None:
    def loop(world: lockstep.World) -> None:
        step = lockstep.parallelize(mlp(), nn.CrossEntropyLoss(), plain_sgd)
        for _ in range(1 + world.rank):
            step.backward(drawn(4, 6), labels(4, 3))
        step.update()

    with pytest.raises(
        InputError,
        match=r"rank 0 calls step.update\(\), rank 1 calls step.backward.* part 2: every rank must",
    ):
        lockstep.launch(loop, devices="2xcpu")


def test_hogwild_refuses_parts_by_hand() -> None:
    with pytest.warns(UserWarning, match="hogwild is not exact"):
        step = step_of(mlp(), "hogwild")
    with pytest.raises(
        StrategyError, match=r"hogwild: a rank takes its part of the learning rate .* or take ddp"
    ):
        step.backward(drawn(4, 6), labels(4, 3))


def test_fsdp_refuses_parts_by_hand() -> None:
    def loop(world: lockstep.World) -> str:
        step = lockstep.parallelize(mlp(), nn.CrossEntropyLoss(), plain_sgd, strategy="fsdp")
        with pytest.raises(StrategyError, match=r"fsdp: step.backward.* or take ddp") as refused:
            step.backward(drawn(4, 6), labels(4, 3))
        return str(refused.value)

    assert all(lockstep.launch(loop, devices="2xcpu"))


def test_a_loss_over_pairs_cannot_be_given_in_parts() -> None:
    def pairs(outputs: Tensor, targets: Tensor) -> Tensor:
        return torch.cdist(outputs, outputs).mean()

    step = step_of(mlp(), loss=pairs)
    step(drawn(4, 6), labels(4, 3))
    with pytest.raises(LossError, match="pairs"):
        step.backward(drawn(4, 6), labels(4, 3))


def halved_anew(model: nn.Module) -> None:
    model[0].weight.grad = model[0].weight.grad * 0.5


def halved_in_place(model: nn.Module) -> None:
    model[0].weight.grad.mul_(0.5)


def left_out(model: nn.Module) -> None:
    model[0].weight.grad = None


def changed_between(world: Any, strategy: str, change: Any) -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    model = mlp().double()
    step = lockstep.parallelize(
        model, nn.CrossEntropyLoss(), sgd(model.named_parameters()), strategy=strategy
    )
    for number in range(4):
        step.backward(
            drawn(8, 6).double()[world.rank :: world.size], labels(8, 3)[world.rank :: world.size]
        )
        if number:
            change(model)
        step.update()
    return {name: value.clone() for name, value in step.state_dict()["model"].items()}


@pytest.mark.sweep
@pytest.mark.parametrize("change", [halved_anew, halved_in_place, left_out])
def test_gradients_that_a_loop_replaces_before_the_update_are_those_of_the_update(
    change: Any,
) -> None:
    one = lockstep.launch(changed_between, devices="1xcpu", args=("single", change))[0]
    several = lockstep.launch(changed_between, devices="2xcpu", args=("ddp", change))[0]
    assert max(float((value - several[name]).abs().max()) for name, value in one.items()) < 1e-12


def thrown_away(world: Any, strategy: str, set_to_none: bool) -> dict[str, Tensor]:
    """A bad batch is left out; then gradients at weights that were moved for a while, as SAM
    does.
    """
    torch.manual_seed(0)
    model = mlp().double()
    step = lockstep.parallelize(
        model, nn.CrossEntropyLoss(), sgd(model.named_parameters()), strategy=strategy
    )
    for number in range(4):
        batch = [
            of[world.rank :: world.size] for of in (drawn(8, 6, seed=number).double(), labels(8, 3))
        ]
        step.backward(*batch)
        if number == 1:
            step.optimizer.zero_grad(set_to_none=set_to_none)
            continue
        if number == 2:
            with torch.no_grad(), step.whole_parameters():
                moves = [0.1 * p.grad for p in model.parameters() if p.grad is not None]
                for p, move in zip(model.parameters(), moves, strict=True):
                    p.add_(move)
            step.optimizer.zero_grad(set_to_none=set_to_none)
            step.backward(*batch)
            with torch.no_grad(), step.whole_parameters():
                for p, move in zip(model.parameters(), moves, strict=True):
                    p.sub_(move)
        step.update()
    return {name: value.clone() for name, value in step.state_dict()["model"].items()}


def thrown_away_in_pytorch() -> dict[str, Tensor]:
    torch.manual_seed(0)
    model = mlp().double()
    optimizer = sgd(model.named_parameters())
    for number in range(4):
        x, y = drawn(8, 6, seed=number).double(), labels(8, 3)
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x), y).backward()
        if number == 1:
            continue
        if number == 2:
            moves = [0.1 * p.grad for p in model.parameters() if p.grad is not None]
            with torch.no_grad():
                for p, move in zip(model.parameters(), moves, strict=True):
                    p.add_(move)
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(x), y).backward()
            with torch.no_grad():
                for p, move in zip(model.parameters(), moves, strict=True):
                    p.sub_(move)
        optimizer.step()
    return model.state_dict()


@pytest.mark.sweep
@pytest.mark.parametrize(
    ("strategy", "devices"),
    [("single", "1xcpu"), ("ddp", "2xcpu"), slow("ddp", "3xcpu")],
)
@pytest.mark.parametrize("set_to_none", [True, False])
def test_gradients_that_a_loop_throws_away_are_no_part_of_the_update(
    strategy: str, devices: str, set_to_none: bool
) -> None:
    """Found by trial: their samples were counted, so that the next update was half as large."""
    expected = thrown_away_in_pytorch()
    for found in lockstep.launch(thrown_away, devices=devices, args=(strategy, set_to_none)):
        assert (
            max(float((value - expected[name]).abs().max()) for name, value in found.items())
            < BOUND
        )


def zeroed_by_model(model: nn.Module, step: Any) -> None:
    with step.whole_parameters():
        model.zero_grad(set_to_none=False)


def dropped_by_model(model: nn.Module, step: Any) -> None:
    with step.whole_parameters():
        model.zero_grad()


def clamped(model: nn.Module, step: Any) -> None:
    with step.whole_parameters():
        for p in model.parameters():
            assert p.grad is not None
            p.grad = p.grad.clamp(-0.01, 0.01)


WRITTEN = {
    "zeroed by the model": zeroed_by_model,
    "dropped by the model": dropped_by_model,
    "dropped by the optimizer": lambda model, step: step.optimizer.zero_grad(),
    "clamped": clamped,
}


def written_between(world: Any, strategy: str, write: str, again: bool) -> dict[str, Tensor]:
    torch.manual_seed(0)
    model = mlp().double()
    step = lockstep.parallelize(
        model,
        nn.CrossEntropyLoss(),
        sgd(model.named_parameters()),
        strategy=strategy,
        devices=None if world else 1,
    )
    rank, size = (world.rank, world.size) if world else (0, 1)
    for number in range(3):
        batch = [of[rank::size] for of in (drawn(8, 6, seed=number).double(), labels(8, 3))]
        step.backward(*batch)
        WRITTEN[write](model, step)
        if again:
            step.backward(*batch)
        step.update()
    return {name: value.clone() for name, value in step.state_dict()["model"].items()}


@pytest.mark.sweep
@pytest.mark.parametrize("again", [True, pytest.param(False, marks=pytest.mark.slow)])
@pytest.mark.parametrize("write", WRITTEN)
def test_gradients_written_between_parts_are_those_of_one_device(write: str, again: bool) -> None:
    expected = written_between(None, "single", write, again)
    for found in lockstep.launch(written_between, devices="3xcpu", args=("ddp", write, again)):
        assert (
            max(float((value - expected[name]).abs().max()) for name, value in found.items())
            < BOUND
        )


def hooked_later(world: Any) -> list[str]:
    model = mlp()
    step = lockstep.parallelize(
        model, nn.CrossEntropyLoss(), sgd(model.named_parameters()), accept_differences=True
    )
    model[0].weight.register_hook(lambda grad: grad.clamp(-0.01, 0.01))
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        for _ in range(2):
            step(drawn(4, 6), labels(4, 3))
    return [str(one.message) for one in said]


def test_a_hook_that_a_loop_registers_later_is_said() -> None:
    """Found by trial: without a line."""
    said, _ = lockstep.launch(hooked_later, devices="2xcpu")
    text = 'the gradient of "0.weight" for the whole batch is not the sum for its parts'
    assert [text in line for line in said].count(True) == 1


def two_of_three(world: Any) -> dict[str, Tensor]:
    torch.manual_seed(0)
    model = mlp().double()
    where = {"strategy": "fsdp"} if world else {"strategy": "single", "devices": 1}
    step = lockstep.parallelize(
        model, nn.CrossEntropyLoss(), sgd(model.named_parameters()), accumulate=2, **where
    )
    rank, size = (world.rank, world.size) if world else (0, 1)
    for number in (7, 2):
        step(*(of[rank::size] for of in (drawn(number, 6).double(), labels(number, 3))))
    return {name: value.clone() for name, value in step.state_dict()["model"].items()}


def test_a_last_batch_that_leaves_whole_parts_empty_under_fsdp() -> None:
    """Found by trial: "the inputs have no tensor with a batch dimension"."""
    expected = two_of_three(None)
    for found in lockstep.launch(two_of_three, devices="2xcpu"):
        assert (
            max(float((value - expected[name]).abs().max()) for name, value in found.items())
            < BOUND
        )


class Centred(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x - x.mean(dim=0))


class Counting(nn.Linear):
    def __init__(self) -> None:
        super().__init__(6, 3)
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return super().forward(x) / self.calls


@pytest.mark.parametrize(
    ("model", "says"),
    [
        (lambda: Centred(6, 3), "results depend on where a batch is cut: in update 2"),
        (Counting, '"calls" is written once per micro-batch, not once per batch'),
        (
            lambda: nn.Sequential(nn.BatchNorm1d(6), nn.Linear(6, 3)),
            "BatchNorm normalizes over each micro-batch, not over the global batch",
        ),
        (lambda: nn.Linear(6, 3), None),
    ],
    ids=["mixing", "counting", "normed", "plain"],
)
def test_what_a_model_makes_of_a_batch_in_parts_is_said(
    model: Any, says: str | None, recwarn: Any
) -> None:
    """Found by trial: under single nothing was said, and results were 9 to 100 % off."""
    step = step_of(model(), accept_differences=True)
    for parts in (1, 2):
        for number in range(parts):
            step.backward(drawn(8, 6, seed=number), labels(8, 3))
        step.update()
        if parts == 1:
            assert not recwarn.list, "of one part there is nothing to say"
    found = [says in str(warned.message) for warned in recwarn] if says else []
    assert found.count(True) == (1 if says else 0)
    assert says or not recwarn.list


@pytest.mark.parametrize("model", [lambda: Centred(6, 3), Counting], ids=["mixing", "counting"])
def test_a_batch_in_parts_is_checked(model: Any) -> None:
    step = step_of(model())
    step.backward(drawn(8, 6), labels(8, 3))
    step.update()
    step.backward(drawn(8, 6), labels(8, 3))
    with pytest.raises(StrategyError, match="results depend on where a batch is cut: in update 2"):
        step.backward(drawn(8, 6), labels(8, 3))


def test_a_state_is_not_loaded_while_gradients_wait(tmp_path: Path) -> None:
    model = nn.Linear(4, 3)
    step = lockstep.parallelize(model, nn.CrossEntropyLoss(), plain_sgd(model.named_parameters()))
    state = step.state_dict()
    step.save(tmp_path)
    step.backward(drawn(4, 4), labels(4, 3))
    for load in (lambda: step.load(tmp_path), lambda: step.load_state_dict(state)):
        with pytest.raises(InputError, match=r"gradients of 4 samples .* are pending: call step"):
            load()
    step.update()
    step.load(tmp_path)
