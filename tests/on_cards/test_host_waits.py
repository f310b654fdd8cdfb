"""What the host does in an update on accelerators: it waits for nothing, and gives them little
beyond the bare step.
"""

from __future__ import annotations

import functools
import itertools
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import IterableDataset, TensorDataset

from lockstep import Job, Loss, launch, train
from lockstep.data import eval_loaders
from lockstep.launch import devices
from lockstep.launch.world import World
from lockstep.strategies import MP
from lockstep.strategies.ddp import DDP
from lockstep.strategies.dp import DP
from lockstep.strategies.fsdp import FSDP
from lockstep.strategies.pp import PP
from lockstep.strategies.single import Single
from lockstep.strategies.strategy import Strategy
from lockstep.training.evaluation import evaluate_sets
from lockstep.training.records.logs import Logs

from harness import same_bits  # isort: skip
from simulated_card import counts

WAITING = ("host_reads", "waits", "blocking_copies")
HALVES = {"0": 0, "": 1}
WAYS: dict[str, tuple[Strategy, str]] = {
    "single": (Single(), "card:1"),
    "dp": (DP(), "card:0,1"),
    "mp": (MP(HALVES), "card:0,1"),
    "pp": (PP(HALVES, microbatches=2), "card:0,1"),
    "ddp flat": (DDP(reduce="flat"), "card:0,1"),
    "ddp overlapped": (DDP(reduce="overlapped"), "card:0,1"),
    "fsdp": (FSDP(blocks="0, 2"), "card:0,1"),
}
IN_RANKS = {"ddp flat", "ddp overlapped", "fsdp"}


def net() -> nn.Module:
    return nn.Sequential(
        nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 4)
    )


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)


def masked_pair(outputs: torch.Tensor, targets: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    mask = targets > 0
    return (F.cross_entropy(outputs, targets, reduction="none") * mask).sum(), mask.sum()


def accuracy(outputs: torch.Tensor, targets: torch.Tensor) -> tuple[torch.Tensor, int]:
    return (outputs.argmax(1) == targets).sum(), len(targets)


def with_parts(outputs: torch.Tensor, targets: torch.Tensor) -> Loss:
    total, count = masked_pair(outputs, targets)
    size = outputs.square().sum()
    return Loss(
        total + 0.01 * size, count, parts={"masked": (total, count), "size": (size, len(targets))}
    )


def unmasked(targets: torch.Tensor) -> dict[str, Any]:
    return {"items": (targets > 0).sum(), "samples": len(targets)}


def share(
    outputs: torch.Tensor, targets: torch.Tensor, counts: dict[str, torch.Tensor]
) -> torch.Tensor:
    total, _ = masked_pair(outputs, targets)
    return total / counts["items"] + 0.01 * outputs.square().sum() / counts["samples"]


def contrast(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    features = F.normalize(outputs, dim=1)
    others = torch.arange(len(outputs), device=outputs.device).roll(1)
    return F.cross_entropy(features @ features.T, others)


def data(samples: int) -> TensorDataset:
    generator = torch.Generator().manual_seed(1)
    targets = torch.randint(4, (samples,), generator=generator)
    targets[::7] = 0
    return TensorDataset(torch.randn(samples, 6, generator=generator), targets)


LOSSES: dict[str, Any] = {
    "cross-entropy": nn.CrossEntropyLoss(),
    "ignored targets": nn.CrossEntropyLoss(ignore_index=0),
    "a function": F.cross_entropy,
    "a pair with a mask": masked_pair,
    "a loss with parts": with_parts,
}
OF_COUNTS = "a share by counts"
OVER_BATCH = "over the batch"
SETTINGS: dict[str, dict[str, Any]] = {
    "plain": {},
    "clipped and accumulated": {"clip_norm": 0.5, "accumulate": 2},
    "bf16": {"precision": "bf16"},
    "fp16": {
        "precision": "fp16",
        "optimizer": functools.partial(torch.optim.SGD, lr=0.1, fused=True),
    },
    "adamw": {"optimizer": functools.partial(torch.optim.AdamW, lr=0.01)},
}
CASES = [("cross-entropy", "plain"), *((name, "bf16") for name in LOSSES)]
CASES += [("a pair with a mask", name) for name in SETTINGS if name != "bf16"]
CASES += [("a loss with parts", "clipped and accumulated"), (OF_COUNTS, OF_COUNTS)]
CASES += [(OVER_BATCH, OVER_BATCH)]
LOSSES |= {OF_COUNTS: share, OVER_BATCH: contrast}
SETTINGS |= {OF_COUNTS: {"counts": unmasked}, OVER_BATCH: {"loss_over": "batch"}}


def waited(world: World, way: str, loss: str, settings: str, source: str) -> dict[str, int]:
    """How often the host waits in updates 17 to 25.

    Args:
        world: this rank's.
        way: a name of ``WAYS``.
        loss: a name of ``LOSSES``.
        settings: a name of ``SETTINGS``.
        source: of the batches: ``"loader"``, ``"loop"`` for tensors on the CPU in a loop of one's
            own, or ``"card"`` for a dataset that is on the card.
    """
    strategy, _ = WAYS[way]
    dataset = data(400)
    if source == "card":
        dataset = TensorDataset(*(t.to(world.device.torch) for t in dataset.tensors))
    fields = {"optimizer": sgd, **SETTINGS[settings]}
    job = Job(model=net, loss=LOSSES[loss], train_data=dataset, batch_size=16, **fields)
    step = strategy.prepare(job, world)
    step.own_loop = source == "loop"
    before: dict[str, int] = {}
    for number, batch in enumerate(strategy.training_loader(job, world, dataset).epoch(0), 1):
        before = counts(*WAITING) if number == 17 else before
        if source == "loop":
            step(*(t[16 * number - 16 : 16 * number] for t in dataset.tensors))
        else:
            step.seed(0)
            step.update(batch)
    after = counts(*WAITING)
    step.check()
    return {name: after[name] - before[name] for name in WAITING}


@pytest.mark.parametrize(
    ("loss", "settings", "way"),
    [
        pytest.param(*case, way, marks=() if (number + turn) % 3 == 0 else pytest.mark.slow)
        for number, case in enumerate(CASES)
        for turn, way in enumerate(WAYS)
        if (case[1], way) != ("fp16", "fsdp")  # which is refused
    ],
)
def test_an_update_waits_for_no_card(way: str, loss: str, settings: str) -> None:
    """All of its losses and counts are read together, now and then."""
    if way in IN_RANKS:
        found = launch(waited, devices=WAYS[way][1], args=(way, loss, settings, "loader"))[0]
    else:
        found = waited(World(devices=devices.parse(WAYS[way][1])), way, loss, settings, "loader")
    assert found == dict.fromkeys(WAITING, 0)


@pytest.mark.parametrize("source", ["loop", "card"])
@pytest.mark.parametrize("way", ["single", "dp", "pp"])
def test_nor_does_one_on_data_of_a_loop_or_of_a_card(way: str, source: str) -> None:
    found = waited(
        World(devices=devices.parse(WAYS[way][1])), way, "a pair with a mask", "plain", source
    )
    assert found == dict.fromkeys(WAITING, 0)


@pytest.mark.parametrize("loss", ["cross-entropy", "a pair with a mask"])
@pytest.mark.parametrize("way", ["single", "dp", "mp", "pp"])
def test_an_evaluation_waits_a_few_times_however_many_batches_there_are(
    way: str, loss: str
) -> None:
    def waited_for(batches: int) -> int:
        strategy, place = WAYS[way]
        dataset = data(16 * batches)
        world = World(devices=devices.parse(place))
        job = Job(
            model=net,
            loss=LOSSES[loss],
            optimizer=sgd,
            train_data=dataset,
            batch_size=16,
            metrics={"accuracy": accuracy},
        )
        step = strategy.prepare(job, world)
        loader = eval_loaders(job, world, {"": dataset})[""]
        before = counts(*WAITING)
        evaluate_sets(step, {"": loader}, job)
        after = counts(*WAITING)
        return sum(after[name] - before[name] for name in WAITING)

    assert waited_for(127) - waited_for(65) <= 16  # once for each batch would be 62


BEYOND = {"single": 4, "mp": 4, "dp": 14, "pp": 12, "ddp flat": 12, "ddp overlapped": 16}
"""Operators beyond those of a step by hand.

Where nothing is cut: two for the count, and two for 1 / count. Else the counts of all parts, the
sums of totals and counts, and the weighting of the gradients; under ``dp`` what puts tensors
together for a copy; under ``ddp`` what PyTorch's reducer does, or the flat gradient.
"""


# ---- operators -----------------------------------------------------------------------------------


def given(world: World, way: str, loss: str) -> float:
    """Operators that the cards of this process are given in an update, the mean over updates 17
    to 23.
    """
    strategy, _ = WAYS[way]
    dataset = data(400)
    job = Job(model=net, loss=LOSSES[loss], optimizer=sgd, train_data=dataset, batch_size=16)
    step = strategy.prepare(job, world)
    before = 0
    for number, batch in enumerate(strategy.training_loader(job, world, dataset).epoch(0), 1):
        if number == 17:
            before = counts("operators")["operators"]
        if number == 24:
            return (counts("operators")["operators"] - before) / 7
        step.seed(0)
        step.update(batch)
    raise AssertionError


def bare(way: str, loss: str) -> int:
    """Those of forwards, backwards, sums of the gradients of replicas, and the optimizer, as
    written by hand.
    """
    first, last = net().to("card:0"), net()
    last.to("card:1")
    if way in ("mp", "pp"):
        first = nn.Sequential(first[0], *last[1:])
    models = [first, last] if way == "dp" else [first, first] if way == "pp" else [first]
    optimizer = sgd(first.parameters())
    function = LOSSES[loss]
    found = 0
    for _ in range(2):
        inputs, targets = (t.chunk(len(models)) for t in data(16).tensors)
        before = counts("operators")["operators"]
        optimizer.zero_grad()
        last.zero_grad()
        for model, x, y in zip(models, inputs, targets, strict=True):
            for layer in model:
                x = layer(x.to(next((p.device for p in layer.parameters()), x.device)))
            value = function(x, y.to(x.device))
            (value[0] / value[1] if isinstance(value, tuple) else value).backward()
        if way == "dp":
            mine, theirs = ([p.grad for p in model.parameters()] for model in models)
            torch._foreach_add_(mine, [gradient.to("card:0") for gradient in theirs])
        optimizer.step()
        found = counts("operators")["operators"] - before
    return found


@pytest.mark.parametrize("loss", ["cross-entropy", "ignored targets"])
@pytest.mark.parametrize("way", BEYOND)
def test_cards_are_given_little_beyond_the_bare_step(way: str, loss: str) -> None:
    if way in IN_RANKS:
        found = launch(given, devices=WAYS[way][1], args=(way, loss))[0]
    else:
        found = given(World(devices=devices.parse(WAYS[way][1])), way, loss)
    assert found - bare(way, loss) <= BEYOND[way]


@pytest.mark.parametrize("way", ["dp", "mp", "pp"])
def test_copies_between_cards_dont_grow_with_the_number_of_parameters(way: str) -> None:
    """Nor with that of the layers of a stage."""

    def crossings(layers: int) -> int:
        def build() -> nn.Module:
            return nn.Sequential(
                nn.Linear(6, 16), *(nn.Linear(16, 16) for _ in range(layers)), nn.Linear(16, 4)
            )

        job = Job(
            model=build,
            loss=nn.CrossEntropyLoss(),
            optimizer=sgd,
            train_data=data(80),
            batch_size=16,
        )
        strategy, place = WAYS[way]
        world = World(devices=devices.parse(place))
        step = strategy.prepare(job, world)
        first, second, third, *_ = strategy.training_loader(job, world, job.train_data).epoch(0)
        step.update(first)
        step.update(second)
        before = counts("crossings")["crossings"]
        step.update(third)
        return counts("crossings")["crossings"] - before

    assert crossings(2) == crossings(9)


# ---- logs ----------------------------------------------------------------------------------------


def test_a_log_reads_results_once_and_steps_between_logs_read_nothing(
    tmp_path, monkeypatch
) -> None:
    """Totals are one read and counts another, as at the end of an epoch; the norm of the
    gradients is a third.
    """
    clock = itertools.count(1.0, 1e-6)
    monkeypatch.setattr(Logs, "_now", lambda self: next(clock))  # the live line reads by the clock

    def reads(**settings: Any) -> int:
        job = Job(
            model=net,
            loss=nn.CrossEntropyLoss(),
            optimizer=sgd,
            train_data=data(16 * 35),
            batch_size=16,
        )
        before = sum(counts(*WAITING).values())
        train(job, strategy="single", devices="card:1", folder=tmp_path, quiet=True, **settings)
        return sum(counts(*WAITING).values()) - before

    plain, clipped = reads(), reads(clip_norm=1.0)
    assert reads(log_every=10) == plain + 3 * 3
    assert reads(log_every=35) == plain + 1, "the epoch's end reads the same, but for the norm"
    assert reads(log_every=10, clip_norm=1.0) == clipped + 3 * 3


# ---- the state of data ---------------------------------------------------------------------------


class Moving(TensorDataset):
    """Each sample that is read changes it, and the ones after it."""

    def __init__(self) -> None:
        super().__init__(*data(64).tensors)
        self.read = 0

    def __getitem__(self, index: int) -> Any:
        self.read += 1
        inputs, targets = super().__getitem__(index)
        return inputs + 0.01 * self.read, targets

    __getitems__ = None  # type: ignore[assignment]

    def state_dict(self) -> dict[str, Any]:
        return {"read": self.read}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.read = state["read"]


class MovingStream(IterableDataset[Any]):
    """Its state is the place in it."""

    def __init__(self) -> None:
        self.at, self.start = 0, 0

    def set_epoch(self, epoch: int) -> None: ...

    def __iter__(self) -> Any:
        self.at, self.start = self.start, 0
        inputs, targets = data(64).tensors
        while self.at < 64:
            self.at += 1
            yield inputs[self.at - 1], targets[self.at - 1]

    def state_dict(self) -> dict[str, Any]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.start = state["at"]


@pytest.mark.parametrize("kind", [Moving, MovingStream])
def test_the_state_of_data_that_is_saved_is_of_the_batches_trained_on(kind: Any, tmp_path) -> None:
    """A batch is copied ahead, so that the dataset's own state is that of one more."""
    job = Job(
        model=net,
        loss=nn.CrossEntropyLoss(),
        optimizer=sgd,
        train_data=kind,
        batch_size=8,
        epochs=2,
        loader_workers=0,
        shuffle=False,
    )
    on: dict[str, Any] = {"strategy": "single", "devices": "card:1", "quiet": True}
    whole = train(job, folder=tmp_path / "whole", **on)
    first = train(job, folder=tmp_path, steps=5, **on)
    run = train(job, resume=first.folder, **on)
    assert same_bits(run.model(), whole.model())
