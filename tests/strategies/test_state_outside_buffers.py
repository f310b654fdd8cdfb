"""State in other places than parameters and buffers: kept right where it can be, and else said
or refused.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib
import sys
import types
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

import lockstep
from lockstep import train
from lockstep.errors import JobError, LockstepError, StrategyError
from lockstep.tensors.rows import cut

from harness import parity, same_bits  # isort: skip
from zoo import ZOO, drawn, labels, mlp  # isort: skip

DP = {"strategy": "dp", "devices": "2xcpu"}
ACCUMULATE = {"strategy": "single", "devices": "1xcpu", "accumulate": 2}


class Penalty:
    """A loss with a penalty on weights, of the model that it was built with."""

    model: nn.Module

    def build(self) -> nn.Module:
        self.model = mlp()
        return self.model

    def __call__(self, outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(outputs, targets) + 0.01 * sum(
            p.pow(2).sum() for p in self.model.parameters()
        )


def test_a_loss_that_uses_the_model_itself_is_refused_under_dp(tmp_path: Path) -> None:
    loss = Penalty()
    job = dataclasses.replace(ZOO["mlp"], model=loss.build, loss=loss)
    with pytest.raises(StrategyError, match="of the model itself"):
        train(job, **DP, folder=tmp_path, quiet=True)


def test_a_child_that_refers_to_its_parent_is_refused_under_dp(tmp_path: Path) -> None:
    class Child(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x * model.scale

    model = nn.Sequential(nn.Linear(6, 3), Child())
    model.scale = nn.Parameter(torch.ones(3))
    with pytest.raises(StrategyError, match='uses "scale" of the model itself'):
        train(
            dataclasses.replace(ZOO["mlp"], model=lambda: model), **DP, folder=tmp_path, quiet=True
        )


held: dict[str, nn.Module] = {}


class Hidden(nn.Module):
    """Leaves what is hidden in an attribute: the last one, or all of them in a list."""

    def __init__(self, way: str) -> None:
        super().__init__()
        self.way, self.body, self.out = way, nn.Linear(6, 6), nn.Linear(6, 3)
        self.last: Any = torch.zeros(1, 6) if way == "replaced" else None
        self.kept: list[torch.Tensor] = []
        held["model"] = self

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = torch.tanh(self.body(x))
        self.last = hidden.detach()
        self.kept.append(hidden)
        return self.out(hidden)


def of_kept(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(outputs, targets) + 0.1 * held["model"].kept[-1].square().mean()


def of_last(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(outputs, targets) + 0.1 * held["model"].last.square().mean()


@pytest.mark.sweep
@pytest.mark.parametrize(
    ("way", "loss"),
    [("kept", of_kept), ("new", of_last), ("replaced", of_last)],
    ids=lambda of: getattr(of, "__name__", of),
)
def test_a_loss_may_read_what_forward_left_in_the_model_under_ddp(way: str, loss: Any) -> None:
    job = ZOO["mlp"].replace(
        model=functools.partial(Hidden, way), loss=loss, eval_data=None, metrics={}
    )
    assert parity(job, "ddp", "2xcpu").worst < 1e-12


class Warming:
    """A loss whose second term grows with its calls in training."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        if outputs.requires_grad:
            self.calls += 1
        return F.cross_entropy(outputs, targets) + min(1.0, self.calls / 100) * outputs.abs().mean()


class Remembering(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body, self.calls = mlp(), 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += self.training
        return self.body(x) * (1 + 0.1 * self.calls)


class Reversal(torch.autograd.Function):
    """Gradients are turned back, times a factor."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, factor: float) -> torch.Tensor:
        ctx.factor = factor
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        return -ctx.factor * gradient, None


class Adversarial(nn.Module):
    """Its gradients are turned back more from call to call; its outputs are the same."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head, self.calls = mlp(), nn.Linear(3, 3), 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += self.training
        return self.head(Reversal.apply(self.body(x), 0.1 * self.calls))


class WritingInBackward(nn.Module):
    """Divides by a mean of the norms of its gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.body = mlp()
        self.register_buffer("norm", torch.ones(()))
        self.body[-1].register_full_backward_hook(self.record)

    def record(self, module: nn.Module, inputs: Any, outputs: Any) -> None:
        self.norm.mul_(0.9).add_(outputs[0].norm())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.body(x) / self.norm


class Growing(nn.Module):
    """Keeps the largest input, which of two local batches is in one only."""

    def __init__(self) -> None:
        super().__init__()
        self.body = mlp()
        self.register_buffer("largest", torch.zeros(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.training:
            self.largest = torch.maximum(self.largest, x.detach().max())
            return self.body(x)
        return self.body(x / self.largest)


def first_is_large() -> TensorDataset:
    inputs = drawn(8, 6)
    inputs[0, 0] = 9.0
    return TensorDataset(inputs, labels(8, 3))


class Centering(nn.Module):
    """Subtracts the mean of its first batch, which it keeps in a new attribute, one that was
    None, or a dictionary.
    """

    def __init__(self, where: str) -> None:
        super().__init__()
        self.where, self.linear = where, nn.Linear(6, 3)
        self.kept: dict[str, torch.Tensor] = {}
        self.mean: torch.Tensor | None = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        of = self.kept if self.where == "dict" else vars(self)
        name = "mean" if self.where == "None" else "new"
        if of.get(name) is None:
            of[name] = x.mean(dim=0).detach()
        return self.linear(x - of[name])


class MixingInEvaluation(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = mlp()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        outputs = self.body(x)
        return outputs if self.training else outputs - outputs.mean(dim=0)


def padded(samples: list[tuple[torch.Tensor, torch.Tensor]]) -> tuple[torch.Tensor, torch.Tensor]:
    inputs, targets = (torch.stack(list(of)) for of in zip(*samples, strict=True))
    return 0.7 * inputs + 0.3 * inputs.flip(0), targets


def normed() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Linear(8, 3))


def dropping() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 8), nn.Dropout(0.1), nn.Linear(8, 3))


@pytest.mark.sweep
@pytest.mark.parametrize(
    ("changes", "way", "says"),
    [
        (
            {"model": WritingInBackward},
            {**DP, "accept_differences": True},
            '"norm" is written from the local batch: each replica has its own',
        ),
        (
            {"model": WritingInBackward},
            {**ACCUMULATE, "accept_differences": True},
            '"norm" is written once per micro-batch, not once per batch',
        ),
        (
            {"model": Growing, "train_data": first_is_large(), "shuffle": False},
            DP,
            '"largest" is written from the local batch',
        ),
        ({"model": normed}, ACCUMULATE, "BatchNorm normalizes over each micro-batch"),
        ({"model": dropping}, ACCUMULATE, "dropout masks differ from single-device training"),
        (
            {"collate": padded},
            {**ACCUMULATE, "accept_differences": True},
            "collate gets each micro-batch, not the global batch",
        ),
    ],
    ids=lambda value: "",
)
def test_it_is_said(changes: Any, way: Any, says: str, tmp_path: Path, capsys: Any) -> None:
    train(dataclasses.replace(ZOO["mlp"], **changes), **way, folder=tmp_path)
    assert says in capsys.readouterr().out


class Fading(nn.Module):
    """Its outputs fade by a buffer that isn't persistent."""

    def __init__(self) -> None:
        super().__init__()
        self.body = mlp()
        self.register_buffer("strength", torch.ones(()), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.training:
            self.strength = self.strength * 0.9
        return self.body(x) * self.strength


def test_a_buffer_that_is_not_persistent_is_resumed(tmp_path: Path) -> None:
    job = dataclasses.replace(ZOO["mlp"], model=Fading, eval_data=None)
    whole = train(job.replace(epochs=2), devices="1xcpu", folder=tmp_path / "a", quiet=True)
    half = train(job.replace(epochs=1), devices="1xcpu", folder=tmp_path / "b", quiet=True)
    resumed = train(job.replace(epochs=2), devices="1xcpu", resume=half.folder, quiet=True)
    assert same_bits(resumed.model(), whole.model())
    assert resumed.history[-1]["train_loss"] == whole.history[-1]["train_loss"]


class Configured(nn.Module):
    """Its outputs depend on plain attributes; it keeps its last outputs, with their history."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.factor, self.factors = mlp(), 1.0, [1.0, 2.0]
        self.scales, self.last = {"outer": {"inner": 1.0}}, None
        self.register_buffer("scale", torch.ones(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        scale = self.factor * self.factors[0] * self.scales["outer"]["inner"] * self.scale
        self.last = torch.sigmoid(self.body(x)) * scale
        return self.last


CHANGES = {
    "a number": lambda model: setattr(model, "factor", 0.5),
    "a list": lambda model: model.factors.__setitem__(0, 0.5),
    "a nested dictionary": lambda model: model.scales["outer"].update(inner=0.5),
    "a buffer": lambda model: setattr(model, "scale", model.scale * 0.5),
    "a buffer in place": lambda model: model.scale.mul_(0.5),
}


@pytest.mark.sweep
@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("after", [1, 5])
def test_replicas_follow_plain_attributes_and_buffers_that_a_loop_changes(
    change: str, after: int
) -> None:
    """Found by trial: after an update other than 1, 2, 4, 8 and so on weights were 3 % off
    without a line.
    """
    found = []
    for way, devices in (("single", "1xcpu"), ("dp", "2xcpu")):
        torch.manual_seed(0)
        model = Configured().double()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        step = lockstep.parallelize(
            model, F.cross_entropy, optimizer, strategy=way, devices=devices
        )
        for update in range(after + 2):
            if update == after:
                CHANGES[change](model)
                step.evaluate(drawn(8, 6).double(), labels(8, 3))
            step(drawn(8, 6).double(), labels(8, 3))
        found.append(model.body)
    assert all(
        torch.allclose(a, b, atol=1e-12)
        for a, b in zip(*(m.parameters() for m in found), strict=True)
    )


def changed_by_on_event() -> lockstep.Job:
    built: list[nn.Module] = []

    def act(event: Any) -> None:
        if event.kind == "epoch":
            for change in CHANGES.values():
                change(built[0])

    job = dataclasses.replace(
        ZOO["mlp"], model=lambda: built.append(Configured()) or built[-1], eval_data=None
    )
    return job.replace(on_event=[act], precision="fp64", epochs=3, metrics={})


def test_what_on_event_changes_in_the_model_is_followed_by_replicas(tmp_path: Path) -> None:
    expected = train(
        changed_by_on_event(), strategy="single", devices="1xcpu", folder=tmp_path, quiet=True
    ).model()
    model = train(changed_by_on_event(), **DP, folder=tmp_path, quiet=True).model()
    assert all(
        torch.allclose(a, b, atol=1e-12)
        for a, b in zip(model.parameters(), expected.parameters(), strict=True)
    )


def test_lists_of_dictionaries_are_cut_by_sample_whatever_their_rows() -> None:
    boxes = [{"boxes": torch.full((7 if i == 5 else 3, 4), float(i))} for i in range(7)]
    first = cut(boxes, 0, 4, 7)
    assert len(first) == 4 and first[0]["boxes"].shape == (3, 4)
    assert [one["boxes"].shape[0] for one in cut(boxes, 4, 3, 7)] == [3, 7, 3]
    assert len(cut([{"boxes": torch.ones(1, 4)}], 0, 1, 1)) == 1


CALLS = 0
SEEN: dict[str, torch.Tensor] = {}


def counted_loss(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    global CALLS
    CALLS += 1
    return F.cross_entropy(outputs, targets) * (1 + 0.1 * CALLS)


class Counted(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = mlp()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        global CALLS
        CALLS += 1
        return self.body(x) * (1 + 0.1 * CALLS)


@pytest.mark.parametrize(
    "changes", [{"loss": counted_loss}, {"model": Counted}], ids=["loss", "model"]
)
def test_a_global_counter_counts_updates_only(changes: Any, tmp_path: Path) -> None:
    global CALLS
    CALLS = 0
    job = dataclasses.replace(ZOO["mlp"], eval_data=None, **changes)
    run = train(job, strategy="single", devices="1xcpu", folder=tmp_path, quiet=True)
    assert run.summary["steps"] == CALLS


def hooked() -> nn.Module:
    model = mlp()

    def keep(module: nn.Module, inputs: Any, output: torch.Tensor) -> None:
        SEEN["hidden"] = output

    model[0].register_forward_hook(keep)
    return model


def penalty_on_hidden(outputs: torch.Tensor, targets: torch.Tensor) -> tuple[torch.Tensor, int]:
    penalty = SEEN["hidden"].square().mean(dim=1).sum()
    return F.cross_entropy(outputs, targets, reduction="sum") + penalty, len(outputs)


def test_a_hook_that_writes_to_a_global_keeps_its_numbers_under_mp(tmp_path: Path) -> None:
    job = dataclasses.replace(ZOO["mlp"], model=hooked, loss=penalty_on_hidden)
    expected = train(job, strategy="single", devices="1xcpu", folder=tmp_path, quiet=True)
    got = train(job, strategy="mp", devices="2xcpu", folder=tmp_path, quiet=True)
    assert got.metrics == pytest.approx(expected.metrics, rel=1e-12)
    assert got.history[-1]["train_loss"] == pytest.approx(
        expected.history[-1]["train_loss"], rel=1e-12
    )


OVERLAPPING = {"strategy": "pp", "devices": "2xcpu", "accumulate": 2}


@pytest.mark.parametrize("way", [DP, ACCUMULATE, OVERLAPPING], ids=str)
def test_a_hook_that_writes_to_a_global_is_refused_where_batches_are_cut(
    way: Any, tmp_path: Path
) -> None:
    job = dataclasses.replace(ZOO["mlp"], model=hooked, loss=penalty_on_hidden, eval_data=None)
    says = "is not a sum over samples"
    if way is OVERLAPPING:  # which of them comes first depends on which micro-batches overlap
        says += "|backward reached tensors of micro-batch .* through a hook"
    with pytest.raises(LockstepError, match=says):
        train(job, **way, folder=tmp_path, quiet=True)


def late_mask(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """A mean over the samples that aren't of class 0."""
    return F.cross_entropy(outputs, targets.where(targets != 0, -100))


def test_a_masked_mean_is_no_sum_where_the_first_part_of_a_batch_is_masked(tmp_path: Path) -> None:
    data = TensorDataset(drawn(8, 6), torch.tensor([0, 0, 0, 0, 0, 1, 2, 1]))
    job = dataclasses.replace(
        ZOO["mlp"],
        loss=late_mask,
        train_data=data,
        eval_data=None,
        batch_size=8,
        shuffle=False,
        epochs=1,
    )
    train(job, strategy="single", devices="1xcpu", folder=tmp_path, quiet=True)


def counted_by_default(
    outputs: torch.Tensor,
    targets: torch.Tensor,
    calls: list[int] = [0],  # noqa: B006
) -> torch.Tensor:
    calls[0] += 1
    return F.cross_entropy(outputs, targets) * (1 + 0.1 * calls[0])


def counted_by_attribute(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    counted_by_attribute.calls = getattr(counted_by_attribute, "calls", 0) + 1  # type: ignore[attr-defined]
    return F.cross_entropy(outputs, targets) * (1 + 0.1 * counted_by_attribute.calls)  # type: ignore[attr-defined]


@pytest.mark.sweep
@pytest.mark.parametrize(
    ("changes", "way", "says"),
    [
        ({"loss": Warming()}, ACCUMULATE, "the total of the loss"),
        ({"loss": counted_by_default}, ACCUMULATE, "the total of the loss"),
        ({"loss": counted_by_attribute}, ACCUMULATE, "the total of the loss"),
        ({"loss": counted_loss}, ACCUMULATE, "the total of the loss"),
        ({"loss": counted_loss}, DP, "the total of the loss"),
        ({"model": Counted}, ACCUMULATE, "the total of the loss"),
        ({"model": Counted}, DP, "the total of the loss"),
        ({"model": Remembering}, ACCUMULATE, "the total of the loss"),
        ({"model": Adversarial}, ACCUMULATE, "the gradient of"),
        ({"model": Adversarial}, {**DP, "accumulate": 2}, "the gradient of"),
        *[
            ({"model": functools.partial(Centering, where)}, way, "samples influence one another")
            for where, way in (("new", ACCUMULATE), ("None", DP), ("dict", DP))
        ],
        ({"model": MixingInEvaluation}, DP, "in batch 1 of an evaluation"),
    ],
    ids=lambda value: "",
)
def test_it_is_refused(changes: Any, way: Any, says: str, tmp_path: Path) -> None:
    with pytest.raises(StrategyError, match=f"results depend on where a batch is cut: .*{says}"):
        train(dataclasses.replace(ZOO["mlp"], **changes), **way, folder=tmp_path, quiet=True)


class CentringLate(nn.Module):
    """Centres its batch in evaluation where a sample is large."""

    def __init__(self) -> None:
        super().__init__()
        self.body = mlp()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        outputs = self.body(x)
        return outputs - outputs.mean(dim=0) if not self.training and bool(x.max() > 4) else outputs


def test_what_begins_in_the_second_batch_of_an_evaluation_is_refused(tmp_path: Path) -> None:
    inputs = drawn(16, 6)
    inputs[8:] *= 4
    job = dataclasses.replace(
        ZOO["mlp"],
        model=CentringLate,
        eval_data=TensorDataset(inputs, labels(16, 3)),
        eval_batch_size=8,
    )
    with pytest.raises(StrategyError, match=r"in batch 2 of an evaluation, .* \(CentringLate\)"):
        train(job, **DP, folder=tmp_path, quiet=True)


class CountingCalls(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body, self.calls, self.lists = mlp(), 0, {"calls": [0]}
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        self.lists["calls"][0] += 1
        self.seen += 1
        return self.body(x) / (self.calls + self.lists["calls"][0] + self.seen)


class LossOfCalls:
    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return F.cross_entropy(outputs, targets) * (1 + 1 / self.calls)


@pytest.mark.parametrize(
    "counting",
    [
        lambda job: job.replace(model=CountingCalls),
        lambda job: job.replace(loss=LossOfCalls()),
    ],
)
def test_what_is_tried_before_the_training_is_not_counted(counting: Any, tmp_path: Path) -> None:
    job = ZOO["mlp"].replace(epochs=1)
    tried, plain = (
        train(counting(its), devices="1xcpu", folder=tmp_path, quiet=True).model()
        for its in (job, job.replace(eval_data=None))
    )
    assert all(map(torch.equal, tried.parameters(), plain.parameters()))


class Tempered(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body, self.temperature = mlp(), 1.0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.body(x) / self.temperature


def test_replicas_follow_an_attribute_in_evaluation_too() -> None:
    inputs, targets = drawn(8, 6), labels(8, 3)
    found = []
    for way, devices in (("single", "1xcpu"), ("dp", "2xcpu")):
        torch.manual_seed(0)
        model = Tempered()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        step = lockstep.parallelize(
            model, F.cross_entropy, optimizer, strategy=way, devices=devices
        )
        step(inputs, targets)
        model.temperature = 0.25
        found.append(float(step.evaluate(inputs, targets)[1]))
    assert found[0] == pytest.approx(found[1], rel=1e-5)


class Counting(torch.optim.SGD):
    """Its learning rate falls with its steps, which it counts under a name of its own in its
    state.
    """

    def step(self, closure: Any = None) -> None:
        self.state["all"]["steps"] = self.state["all"].get("steps", 0) + 1
        for group in self.param_groups:
            group["lr"] = 0.1 / self.state["all"]["steps"]
        super().step(closure)


def test_an_optimizers_state_of_no_parameter_is_resumed(tmp_path: Path) -> None:
    job = dataclasses.replace(
        ZOO["mlp"], optimizer=lambda parameters: Counting(parameters, lr=0.1), eval_data=None
    )
    whole = train(job.replace(epochs=2), devices="1xcpu", folder=tmp_path / "a", quiet=True)
    half = train(job.replace(epochs=1), devices="1xcpu", folder=tmp_path / "b", quiet=True)
    resumed = train(job.replace(epochs=2), devices="1xcpu", resume=half.folder, quiet=True)
    assert same_bits(resumed.model(), whole.model())


def test_a_scheduler_without_state_is_refused(tmp_path: Path) -> None:
    job = dataclasses.replace(
        ZOO["mlp"], lr_scheduler=lambda optimizer: types.SimpleNamespace(step=lambda: None)
    )
    with pytest.raises(JobError, match="gave a SimpleNamespace, which has no state_dict"):
        train(job, devices="1xcpu", folder=tmp_path, quiet=True)


class Langevin(torch.optim.Optimizer):
    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for p in (p for group in self.param_groups for p in group["params"]):
            p.add_(p.grad, alpha=-0.05).add_(torch.randn_like(p), alpha=0.01)


class Expanded(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = mlp()
        self.register_buffer("ones", torch.ones(1, 1).expand(2, 3))
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return self.body(x) * self.ones.mean(0)


WAYS: dict[str, dict[str, Any]] = {
    "dp": {"strategy": "dp", "devices": "2xcpu"},
    "ddp": {"strategy": "ddp", "devices": "2xcpu"},
    "accumulate": {"strategy": "single", "devices": "1xcpu", "accumulate": 2},
    "pp": {"strategy": "pp", "devices": "2xcpu"},
}


@pytest.mark.parametrize("way", WAYS)
def test_an_optimizer_that_draws_random_numbers_draws_the_same_under_every_strategy(
    way: str, tmp_path: Path
) -> None:
    """Found by trial: with micro-batches it drew from the stream of the last one; under ddp each
    rank from its own.
    """
    job = ZOO["mlp"].replace(precision="fp64", metrics={})
    job = dataclasses.replace(
        job, optimizer=lambda named: Langevin([p for _, p in named]), eval_data=None
    )
    expected = train(job, strategy="single", devices="1xcpu", folder=tmp_path, quiet=True).model()
    model = train(job, **WAYS[way], folder=tmp_path, quiet=True).model()
    for mine, theirs in zip(model.parameters(), expected.parameters(), strict=True):
        torch.testing.assert_close(mine, theirs, atol=1e-10, rtol=0)


@pytest.mark.parametrize("way", ["dp", "ddp", "accumulate"])
def test_a_buffer_that_was_expanded_is_copied_and_compared(
    way: str, tmp_path: Path, capsys: Any
) -> None:
    """Found by trial: replicas raised PyTorch's error, and with micro-batches no buffer was seen
    to be written.
    """
    job = dataclasses.replace(ZOO["mlp"], model=Expanded)
    train(job, **WAYS[way], folder=tmp_path)
    said = '"calls" is written once per micro-batch' in capsys.readouterr().out
    assert said is (way == "accumulate")


MODULE = """
import torch
from torch import nn
from torch.nn import functional as F

CONFIG = {"strength": 1.0}


class Setting(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Linear(6, 3)
        CONFIG["strength"] = 0.3

    def forward(self, x):
        return self.body(x)


def loss_within():
    return lambda outputs, targets: F.cross_entropy(outputs, targets) + CONFIG["strength"] * outputs.square().mean()
"""


@pytest.fixture
def of_a_module(tmp_path: Path, monkeypatch: Any) -> Any:
    """A module that ranks import."""
    (tmp_path / "of_a_person.py").write_text(MODULE)
    monkeypatch.syspath_prepend(tmp_path)
    yield importlib.import_module("of_a_person")
    del sys.modules["of_a_person"]


def test_a_function_within_a_function_shares_what_a_module_holds_on_ranks_too(
    of_a_module: Any,
) -> None:
    """Found by trial: it had values of its own, so the loss was another one without a line."""
    job = dataclasses.replace(ZOO["mlp"], model=of_a_module.Setting, eval_data=None, metrics={})
    assert parity(job.replace(loss=of_a_module.loss_within()), "ddp", "2xcpu").worst < 1e-10


class Named(nn.Module):
    """Finds factors of its layers by themselves, or by their weights."""

    def __init__(self, key: str) -> None:
        super().__init__()
        self.layers, self.out = nn.ModuleList(nn.Linear(6, 6) for _ in range(3)), nn.Linear(6, 3)
        self.key = {"layer": lambda layer: layer, "weight": lambda layer: layer.weight}[key]
        self.factors = {self.key(self.layers[1]): 0.3}

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = x + torch.tanh(layer(x)) * self.factors.get(self.key(layer), 1.0)
        return self.out(x)


@pytest.mark.parametrize("key", ["layer", "weight"])
def test_a_dictionary_goes_by_the_layers_of_each_replica(key: str) -> None:
    """Found by trial: weights 28 % off under dp without a line."""
    job = ZOO["mlp"].replace(model=functools.partial(Named, key), precision="fp64", epochs=1)
    assert parity(job, "dp", "2xcpu").worst < 1e-10
