"""``mp`` and ``pp``: every kind of module, split over stages, ends where one device that
accumulates would.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import threading
import time
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from lockstep import Job, evaluate, parallelize, predict, train
from lockstep.errors import LossError, StrategyError
from lockstep.strategies import MP
from lockstep.strategies.pp import PP
from lockstep.training.run import Run

from harness import differences, same_bits  # isort: skip

# isort: skip
from zoo import SAMPLES, ZOO, Conv, Counting, Said, _job, drawn, labels, plain_sgd, sgd, wants

from zoo import in_place_order, slow, tokens_and_next  # isort: skip

BOUND = 1e-10


def stack() -> nn.Module:
    layers = [nn.Sequential(nn.Linear(6, 6), nn.Tanh()) for _ in range(4)]
    return nn.Sequential(*layers, nn.Linear(6, 3))


class UNet(nn.Module):
    """Skips over all stages, by functional code; ``relu_`` and ``+=`` write in place."""

    def __init__(self) -> None:
        super().__init__()
        self.down1, self.norm1 = nn.Conv2d(2, 4, 3, padding=1), nn.BatchNorm2d(4)
        self.down2, self.norm2 = nn.Conv2d(4, 6, 3, padding=1), nn.BatchNorm2d(6)
        self.middle = nn.Conv2d(6, 6, 3, padding=1)
        self.up2, self.up1 = nn.Conv2d(12, 4, 3, padding=1), nn.Conv2d(8, 4, 3, padding=1)
        self.head = nn.Linear(4, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        one = self.norm1(self.down1(x)).relu_()
        two = torch.relu(self.norm2(self.down2(nn.functional.max_pool2d(one, 2))))
        y = self.middle(two)
        y += two
        y = torch.relu(self.up2(torch.cat([y, two], dim=1)))
        y = self.up1(torch.cat([nn.functional.interpolate(y, scale_factor=2.0), one], dim=1))
        return self.head(y.mean(dim=(2, 3)))


BACK = {"down1": 0, "norm1": 0, "": 1, "up1": 0, "head": 0}
"""The decoder beside the encoder: stage 0, then 1, then 0 again."""


class TinyGPT(nn.Module):
    """Tied weights on the first and the last stage; dicts, an int and None cross them; a
    parameter of its own.
    """

    def __init__(self, words: int = 11, time: int = 5) -> None:
        super().__init__()
        self.embedding = nn.Embedding(words, 8)
        self.places = nn.Parameter(0.1 * torch.randn(time, 8))
        self.blocks = nn.ModuleList(Block() for _ in range(4))
        self.out = nn.Linear(8, words, bias=False)
        self.out.weight = self.embedding.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        state: dict[str, Any] = {
            "x": self.embedding(tokens) + self.places[: tokens.shape[1]],
            "depth": 0,
            "no": None,
        }
        for block in self.blocks:
            state = block(state, scale=0.5)
        assert state["depth"] == 4
        return self.out(state["x"]).transpose(1, 2)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.mix = nn.LayerNorm(8), nn.MultiheadAttention(8, 2, batch_first=True)

    def forward(self, state: dict[str, Any], *, scale: float) -> dict[str, Any]:
        x = self.norm(state["x"])
        y, _ = self.mix(x, x, x, need_weights=False)
        return {"x": state["x"] + scale * y, "depth": state["depth"] + 1, "no": state["no"]}


class Choosing(nn.Module):
    """Which layers run depends on the values; some micro-batches leave a stage out, or go
    another way.
    """

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.third = (nn.Linear(6, 6) for _ in range(3))
        self.out = nn.Linear(6, 3)

    def forward(self, x: torch.Tensor, wants: torch.Tensor) -> torch.Tensor:
        x = torch.tanh(self.first(x))
        for _ in range(1 + int(wants.sum()) % 2):
            x = torch.tanh(self.second(x))
        if wants.any():
            x = self.third(x)
        return self.out(x)


class Twice(nn.Module):
    """A layer with running statistics, called twice: on one stage, then again after another."""

    def __init__(self, norm: bool) -> None:
        super().__init__()
        self.first, self.again, self.other = nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 6)
        self.norm = nn.BatchNorm1d(3) if norm else nn.Identity()
        self.out = nn.Linear(6, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.norm(self.again(torch.tanh(self.first(x))).unflatten(1, (3, 2))).flatten(1)
        x = self.norm(self.again(torch.tanh(self.other(x))).unflatten(1, (3, 2))).flatten(1)
        return self.out(x)


class Speaking(nn.Module):
    """Gives an object; takes a dict."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = nn.Linear(6, 6), nn.Linear(6, 3)

    def forward(self, *, x: torch.Tensor, more: torch.Tensor) -> Said:
        return Said(self.right(torch.tanh(self.left(x)) + more[:, None]))


def said(outputs: Said, targets: torch.Tensor) -> torch.Tensor:
    return nn.functional.cross_entropy(outputs.logits, targets)


class Stem(nn.Module):
    """The first stage is frozen, so that backward never comes there."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 8)).requires_grad_(False)
        self.body, self.out = nn.Linear(8, 8), nn.Linear(8, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.out(torch.tanh(self.body(self.stem(x))))


class Viewing(nn.Module):
    """What a stage gives is a view, which the next one writes to in place."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.flat, self.last = nn.Linear(6, 8), nn.Unflatten(1, (2, 4)), nn.Linear(8, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.flat(self.first(x))
        y.mul_(2.0)
        y[:, 0] += 1.0
        return self.last(y.flatten(1))


class Dropping(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Linear(6, 16), nn.Dropout(0.5), nn.ReLU(), nn.Linear(16, 16), nn.Dropout(0.2)
        )
        self.out = nn.Linear(16, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.out(self.layers(nn.functional.dropout(x, 0.1, self.training)))


class Rerun(Dropping):
    """Computes its dropout again in backward."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = checkpoint(self.layers[:3], x, use_reentrant=False)
        return self.out(checkpoint(self.layers[3:], x, use_reentrant=False))


class Functional(nn.Module):
    """Takes a gradient in forward."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(6, 8), nn.Linear(8, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        slope = torch.func.grad(lambda value: torch.tanh(self.first(value)).sum())(x)
        return self.last(torch.tanh(self.first(x + slope)))


def adamw(params: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(params, lr=0.01, weight_decay=0.1)


_images = drawn(SAMPLES, 2, 8, 8)
_tokens, _next = tokens_and_next()
_choices = (drawn(SAMPLES, 6), wants(1, 2, 9, 20, 28))

KINDS: dict[str, tuple[Job, dict[str, int] | None]] = {
    "a sequence": (_job(stack, optimizer=sgd), None),
    "a sequence, clipped": (_job(stack, optimizer=sgd, clip_norm=0.05), None),
    "a sequence under AdamW": (_job(stack, optimizer=adamw), None),
    "a U-Net": (_job(UNet, _images), None),
    "a U-Net whose decoder is beside its encoder": (_job(UNet, _images, optimizer=sgd), BACK),
    "a tied GPT": (_job(TinyGPT, _tokens, _next, metrics={}), None),
    "control flow": (_job(Choosing, _choices, order=in_place_order, optimizer=sgd), None),
    "a layer called twice on one stage": (_job(lambda: Twice(True)), {"first": 0, "": 1}),
    "a layer called again after another stage": (_job(lambda: Twice(False)), {"other": 1, "": 0}),
    "running statistics moved twice": (_job(lambda: Twice(True)), {"other": 1, "": 0}),
    "dict and object": (
        _job(
            Speaking,
            {"x": drawn(SAMPLES, 6), "more": drawn(SAMPLES, seed=5)},
            loss=said,
            metrics={},
        ),
        {"left": 0, "right": 1},
    ),
    "BatchNorm": (_job(Conv, drawn(SAMPLES, 2, 7, 7), optimizer=sgd), None),
    "a frozen stage": (_job(Stem, optimizer=sgd), {"stem": 0, "": 1}),
    "views written in place": (_job(Viewing, optimizer=sgd), {"last": 1, "": 0}),
    "dropout": (_job(Dropping), {"layers.0": 0, "layers.1": 0, "": 1}),
    "dropout computed again": (_job(Rerun), {"layers.0": 0, "layers.1": 0, "layers.2": 0, "": 1}),
    "a gradient by torch.func": (_job(Functional, optimizer=sgd), {"first": 0, "": 1}),
    "blocks computed again": (
        _job(TinyGPT, _tokens, _next, metrics={}, activation_checkpointing="blocks"),
        None,
    ),
}
MANY = ["a sequence", "a U-Net", "a tied GPT", "control flow", "BatchNorm"]
"""Kinds that are cut in three stages too."""

_singles: dict[tuple[str, int], Run] = {}


def single(kind: str, microbatches: int, tmp_path_factory: pytest.TempPathFactory) -> Run:
    """One device that accumulates: what it all is held against."""
    if (kind, microbatches) not in _singles:
        job = KINDS[kind][0].replace(precision="fp64", accumulate=microbatches)
        folder = tmp_path_factory.mktemp("single")
        _singles[kind, microbatches] = train(
            job, strategy="single", devices="1xcpu", folder=folder, quiet=True
        )
    return _singles[kind, microbatches]


CELLS = [*((kind, 2) for kind in KINDS), *((kind, 3) for kind in MANY), ("a sequence", 4)]


@pytest.mark.sweep
@pytest.mark.parametrize(
    ("kind", "stages", "schedule"),
    [
        *(
            pytest.param(*cell, "1f1b", marks=() if i % 2 else pytest.mark.slow)
            for i, cell in enumerate(CELLS)
        ),
        *(
            pytest.param(*cell, "gpipe", marks=() if cell[1] > 3 else pytest.mark.slow)
            for cell in CELLS
        ),
    ],
)
def test_pp_ends_where_one_device_that_accumulates_does(
    kind: str, stages: int, schedule: str, tmp_path_factory: pytest.TempPathFactory
) -> None:
    job, device_map = KINDS[kind]
    for microbatches in (3, 8):  # the others: test_pipelining_matrix.py
        one = single(kind, microbatches, tmp_path_factory)
        way = PP(device_map, microbatches, schedule)
        folder = tmp_path_factory.mktemp("pp")
        run = train(
            job.replace(precision="fp64"),
            strategy=way,
            devices=f"{stages}xcpu",
            folder=folder,
            quiet=True,
        )
        found = differences(job, run, one)
        assert found.within(BOUND), f"{microbatches} micro-batches: {found}"
        assert any(found.moved.values())


@pytest.mark.slow
@pytest.mark.parametrize(
    "kind", [pytest.param(k, marks=pytest.mark.slow if i % 6 else ()) for i, k in enumerate(MANY)]
)
def test_two_stages_on_each_device_end_where_one_device_does(
    kind: str, tmp_path_factory: pytest.TempPathFactory
) -> None:
    job, _ = KINDS[kind]
    for microbatches in (3, 8):
        way = PP(microbatches=microbatches, schedule="interleaved", chunks=2)
        folder = tmp_path_factory.mktemp("pp")
        run = train(
            job.replace(precision="fp64"), strategy=way, devices="2xcpu", folder=folder, quiet=True
        )
        config = json.loads((run.folder / "config.json").read_text())["strategy_settings"]
        # Where the first forward doesn't come to every layer, they are cut by their parameters.
        if kind != "control flow":
            assert 1 + max(config["device_map"].values()) == 4
        found = differences(job, run, single(kind, microbatches, tmp_path_factory))
        assert found.worst < BOUND, f"{microbatches} micro-batches: {found}"


@pytest.mark.sweep
@pytest.mark.parametrize(
    "kind", [pytest.param(k, marks=pytest.mark.slow if i % 4 else ()) for i, k in enumerate(KINDS)]
)
def test_mp_ends_where_one_device_does(kind: str, tmp_path_factory: pytest.TempPathFactory) -> None:
    job, device_map = KINDS[kind]
    for stages in (2, 3) if kind in MANY else (2,):
        folder = tmp_path_factory.mktemp("mp")
        way = MP(device_map)
        run = train(
            job.replace(precision="fp64"),
            strategy=way,
            devices=f"{stages}xcpu",
            folder=folder,
            quiet=True,
        )
        assert differences(job, run, single(kind, 1, tmp_path_factory)).worst < BOUND


@pytest.mark.sweep
@pytest.mark.parametrize(
    "way",
    [
        pytest.param(MP(), marks=pytest.mark.slow),
        PP(microbatches=3),
        pytest.param(PP(microbatches=2, schedule="gpipe"), marks=pytest.mark.slow),
    ],
    ids=str,
)
@pytest.mark.parametrize(
    "kind", [pytest.param(k, marks=pytest.mark.slow if i % 4 else ()) for i, k in enumerate(ZOO)]
)
def test_all_kinds_of_the_zoo_end_where_one_device_does(kind: str, way: PP, tmp_path) -> None:
    job = ZOO[kind].replace(precision="fp64", sync_batchnorm=False)
    run = train(job, strategy=way, devices="2xcpu", folder=tmp_path, quiet=True)
    parts = way.num_microbatches(job)
    one = train(
        job, strategy="single", devices="1xcpu", folder=tmp_path, quiet=True, accumulate=parts
    )
    found = differences(job, run, one)
    assert found.within(BOUND), str(found)


def _often(kind: str, times: int, tmp_path: Any) -> None:
    job, device_map = KINDS[kind]
    way = PP(device_map, 8)
    runs = [
        train(job, strategy=way, devices="2xcpu", folder=tmp_path, quiet=True).model()
        for _ in range(times)
    ]
    assert all(same_bits(runs[0], run) for run in runs[1:])


@pytest.mark.slow
@pytest.mark.parametrize(
    "kind",
    [
        "a U-Net whose decoder is beside its encoder",
        slow("a tied GPT"),
        slow("dropout computed again"),
    ],
)
def test_equal_runs_give_equal_bits(kind: str, tmp_path) -> None:
    _often(kind, 4, tmp_path)


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("kind", ["a U-Net whose decoder is beside its encoder", "a tied GPT"])
def test_a_hundred_equal_runs_give_equal_bits_and_none_waits_forever(kind: str, tmp_path) -> None:
    _often(kind, 100, tmp_path)


@pytest.mark.slow
def test_a_run_of_pp_goes_on_under_ddp_and_back(tmp_path) -> None:
    job = ZOO["momentum"].replace(precision="fp64", epochs=3)
    whole = train(job, strategy="single", devices="1xcpu", folder=tmp_path, quiet=True)
    run = train(job, strategy="pp", devices="2xcpu", folder=tmp_path, quiet=True, epochs=1)
    for way, epochs in (("ddp", 2), ("mp", 3)):
        run = train(
            job, strategy=way, devices="2xcpu", resume=run.folder, quiet=True, epochs=epochs
        )
    assert differences(job, run, whole).worst < BOUND


def test_evaluation_and_prediction_are_those_of_one_device(tmp_path) -> None:
    job = KINDS["a U-Net"][0].replace(precision="fp64")
    run = train(job, strategy="pp", devices="2xcpu", folder=tmp_path, quiet=True)
    one, two = (
        evaluate(run, strategy=way, devices=on)
        for way, on in (("single", "1xcpu"), ("pp", "2xcpu"))
    )
    assert one == pytest.approx(two, rel=1e-12)
    rows = [
        predict(run, strategy=way, devices=on, quiet=True)
        for way, on in (("single", "1xcpu"), ("mp", "3xcpu"))
    ]
    torch.testing.assert_close(rows[0], rows[1], rtol=1e-12, atol=1e-12)


@pytest.mark.sweep
@pytest.mark.parametrize(
    "kind",
    [
        "a U-Net whose decoder is beside its encoder",
        "a tied GPT",
        "BatchNorm",
        "dict and object",
        "BatchNorm",
    ],
)
def test_an_evaluation_over_stages_is_that_of_one_device(kind: str, tmp_path) -> None:
    job, device_map = KINDS[kind]
    job = job.replace(precision="fp64", eval_batch_size=7)
    run = train(job, strategy="single", devices="1xcpu", folder=tmp_path, quiet=True, epochs=1)
    way = PP(device_map, 3)
    one = evaluate(run, strategy="single", devices="1xcpu")
    assert evaluate(run, strategy=way, devices="2xcpu") == pytest.approx(one, rel=1e-10)
    rows = [
        predict(run, strategy=s, devices=on, quiet=True)
        for s, on in (("single", "1xcpu"), (way, "2xcpu"))
    ]
    ours, theirs = (row if isinstance(row, torch.Tensor) else row.logits for row in rows)
    torch.testing.assert_close(ours, theirs, rtol=1e-10, atol=1e-10)


def test_prediction_draws_what_one_device_draws(tmp_path) -> None:
    """Each batch has a random stream of its own, under any strategy, for models that draw in
    evaluation too.
    """

    class Drawing(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return nn.functional.dropout(super().forward(x), 0.5, training=True) + torch.rand(
                len(x), 1
            )

    job = _job(
        lambda: nn.Sequential(Drawing(6, 6), Drawing(6, 3)), precision="fp64", eval_batch_size=3
    )
    run = train(job, strategy="single", devices="1xcpu", folder=tmp_path, quiet=True, steps=1)
    one = predict(run, strategy="single", devices="1xcpu", quiet=True)
    for way in (PP({"0": 0, "1": 1}), "mp"):
        two = predict(run, strategy=way, devices="2xcpu", quiet=True)
        torch.testing.assert_close(one, two, rtol=1e-12, atol=1e-12)


def test_what_fails_in_a_prediction_over_stages_leaves_nothing(tmp_path) -> None:
    class Failing(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if not self.training and (x == rows[25]).all(1).any():
                raise ValueError("not this one")
            return super().forward(x)

    rows = drawn(SAMPLES, 6).double()
    job = _job(
        lambda: nn.Sequential(Failing(6, 6), nn.Linear(6, 3)), rows, eval_data=None, metrics={}
    )
    job = job.replace(precision="fp64", eval_batch_size=3, steps=1)
    run = train(job, strategy="single", devices="1xcpu", folder=tmp_path / "runs", quiet=True)
    out = tmp_path / "found.npy"
    with pytest.raises(ValueError, match="not this one"):
        predict(run, "train", out, strategy=PP({"0": 0, "1": 1}), devices="2xcpu", quiet=True)
    assert [path.name for path in tmp_path.iterdir()] == ["runs"]


@pytest.mark.sweep
@pytest.mark.timeout(60)
@pytest.mark.parametrize("device_map", [{"0": 1, "": 0}, {"0": 0, "1": 1, "2": 0, "": 1}])
@pytest.mark.parametrize("schedule", ["1f1b", "gpipe"])
def test_a_way_as_long_as_the_straight_one_is_not_taken_for_it(
    device_map: dict[str, int], schedule: str, tmp_path
) -> None:
    """A model that began on stage 1 waited forever; one that came to each of two stages twice
    failed in evaluation.
    """
    job = _job(stack, precision="fp64", eval_batch_size=7)
    one = train(
        job.replace(accumulate=3), strategy="single", devices="1xcpu", folder=tmp_path, quiet=True
    )
    run = train(
        job, strategy=PP(device_map, 3, schedule), devices="2xcpu", folder=tmp_path, quiet=True
    )
    found = differences(job, run, one)
    assert found.within(BOUND), str(found)


@pytest.mark.filterwarnings("ignore:dropout masks differ")  # from those of a whole batch
@pytest.mark.parametrize("dropout", [0.0, 0.4])
def test_an_own_loop_over_stages_ends_where_the_plain_one_does(dropout: float) -> None:
    """With dropout the two were once the same in the first update only."""
    ends, draws = [], []
    for way, devices in ((None, "1xcpu"), (PP(microbatches=3), "2xcpu")):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Dropout(dropout), stack(), nn.Dropout(dropout)).double()
        settings = {} if way else {"accumulate": 3}
        step = parallelize(
            model,
            nn.CrossEntropyLoss(),
            torch.optim.SGD(model.parameters(), lr=0.1),
            strategy=way,
            devices=devices,
            **settings,
        )
        for size in (8, 8, 5, 2):
            step(drawn(size, 6, seed=size).double(), labels(size, 3))
        ends.append(model.state_dict())
        draws.append(torch.rand(3))
    assert torch.equal(*draws), "and the caller's own stream goes on alike"
    for name, value in ends[0].items():
        torch.testing.assert_close(value, ends[1][name], rtol=1e-12, atol=1e-12)


def pairs(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return nn.functional.cross_entropy(outputs @ outputs.T, torch.arange(len(outputs)))


@pytest.mark.parametrize(
    ("way", "stages", "settings", "says"),
    [
        (PP(), 2, {"sync_batchnorm": True}, "pp: sync_batchnorm would make every micro-batch wait"),
        (PP(), 2, {"compile": True}, "pp: compile"),
        (PP(), 10, {}, "10 devices, but the model has layers for 5 only: use fewer devices"),
        (
            PP(schedule="interleaved"),
            3,
            {},
            "6 stages, 2 on each device, but the model has layers for 5 only: use fewer",
        ),
        (PP({"0": 0, "2": 1}), 2, {}, "leaves out 6 of 10 parameters"),
        (PP({"": 0, "body": 1}), 2, {}, 'no "body"'),
        (PP(), 2, {"loss": pairs}, "not a mean over samples"),
    ],
)
def test_what_can_not_be_is_refused_before_the_first_step(
    way: PP, stages: int, settings: Any, says: str, tmp_path
) -> None:
    job = dataclasses.replace(KINDS["a sequence"][0], **settings)
    with pytest.raises((StrategyError, LossError), match=says):
        train(job, strategy=way, devices=f"{stages}xcpu", folder=tmp_path, quiet=True)
    assert not list(tmp_path.iterdir())


def test_settings_of_the_strategy_itself_are_checked() -> None:
    for make, says in (
        (lambda: PP(chunks=0), "chunks is 0: give a whole number from 1"),
        (
            lambda: PP(chunks=2),
            "1f1b has one stage on each device, not 2: take interleaved or auto",
        ),
        (lambda: PP(split_size=0), "split_size is 0: give a whole number from 1"),
        (
            lambda: PP(split_size=5, microbatches=2),
            "microbatches=2 and split_size=5 set the same number: give one of",
        ),
        (
            lambda: PP(split_size=5, microbatches=4),
            "microbatches=4 and split_size=5 set the same number",
        ),
        (
            lambda: PP(split_size=5, microbatches="auto"),
            "microbatches=auto and split_size=5 set the same number",
        ),
        (lambda: MP(split_size=5), "mp has one micro-batch: take pp"),
        (lambda: MP(microbatches="auto"), "mp has one micro-batch: take pp"),
        (lambda: PP(microbatches=0), "microbatches is 0: give a whole number from 1"),
        (lambda: PP(schedule="1f1"), 'no schedule "1f1": did you mean "1f1b"'),
        (lambda: MP(microbatches=2), "mp has one micro-batch: take pp"),
    ):
        with pytest.raises(StrategyError, match=says):
            make()


def test_what_is_auto_is_chosen_and_said_and_kept_where_the_run_goes_on(
    tmp_path, capsys, monkeypatch
) -> None:
    job = KINDS["a sequence"][0].replace(precision="fp64")
    way = PP(microbatches="auto", schedule="auto")
    run = train(job, strategy=way, devices="2xcpu", folder=tmp_path)
    said = capsys.readouterr().out
    assert (
        "stages: " in said
        and "measured" in said
        and "times as fast as one device with the whole batch" in said
    )
    chosen = json.loads((run.folder / "config.json").read_text())["strategy_settings"]
    assert (
        isinstance(chosen["microbatches"], int)
        and chosen["schedule"] != "auto"
        and chosen["device_map"]
    )

    def never(*args: Any, **settings: Any) -> None:
        raise AssertionError("measured again")

    monkeypatch.setattr("lockstep.strategies.pp.planned", never)
    more = train(job, strategy=way, devices="2xcpu", resume=run.folder, epochs=3, quiet=True)
    assert json.loads((more.folder / "config.json").read_text())["strategy_settings"] == chosen


@pytest.mark.slow
def test_a_given_map_may_have_several_stages_on_each_device(tmp_path) -> None:
    device_map = {"0": 0, "1": 1, "2": 2, "": 3}
    for schedule in ("interleaved", "auto"):
        way = PP(device_map, 3, schedule)
        job = KINDS["a sequence"][0].replace(precision="fp64")
        run = train(job, strategy=way, devices="2xcpu", folder=tmp_path, quiet=True)
        one = train(
            job, strategy="single", devices="1xcpu", folder=tmp_path, quiet=True, accumulate=3
        )
        assert differences(job, run, one).worst < BOUND
        kept = json.loads((run.folder / "config.json").read_text())["strategy_settings"]
        assert kept["device_map"] == device_map


def test_the_split_size_says_how_many_samples_a_micro_batch_has(tmp_path) -> None:
    job = KINDS["a sequence"][0]
    for size, parts in ((1, job.batch_size), (3, -(-job.batch_size // 3)), (1000, 1)):
        assert PP(split_size=size).num_microbatches(job) == parts
        assert PP(split_size=size).num_microbatches(job.replace(accumulate=2)) == 2 * -(
            -job.batch_size // (2 * size)
        )
    run = train(
        job,
        strategy=PP(split_size=3),
        devices="2xcpu",
        folder=tmp_path,
        quiet=True,
        precision="fp64",
    )
    parts = PP(split_size=3).num_microbatches(job)
    one = train(
        job,
        strategy="single",
        folder=tmp_path,
        quiet=True,
        precision="fp64",
        accumulate=parts,
        devices="1xcpu",
    )
    assert differences(job, run, one).worst < BOUND


def test_a_device_too_small_for_its_stage_is_refused_with_both_sizes(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr("lockstep.strategies.pp._memory_of", lambda world: [1000.0, 100.0])
    for way in (PP(), MP(), PP(schedule="interleaved"), PP(microbatches="auto")):
        with pytest.raises(
            StrategyError, match=r"fits: .* needs [\d.]+ .*B.* has (100|1e\+03|1,?000) B"
        ):
            train(
                KINDS["a sequence"][0], strategy=way, devices="2xcpu", folder=tmp_path, quiet=True
            )
    assert not list(tmp_path.iterdir())


def test_an_own_loop_is_told_that_nothing_can_be_chosen_for_it() -> None:
    for way, says in (
        (PP(microbatches="auto"), 'microbatches="auto" is for jobs'),
        (PP(schedule="auto"), 'schedule="auto" is for jobs'),
        (PP(split_size=4), "split_size is for jobs"),
    ):
        with pytest.raises(StrategyError, match=says):
            parallelize(stack(), nn.CrossEntropyLoss(), plain_sgd, strategy=way, devices="2xcpu")


class Telling(nn.Module):
    """Leaves something on itself for later: the last micro-batch's would be seen by all."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(6, 6), nn.Linear(6, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.scale = x.abs().mean()
        return self.second(torch.tanh(self.first(x))) * self.scale


@pytest.mark.parametrize(
    ("kind", "says"),
    [
        ("telling", 'forward changes "scale", which other micro-batches share'),
        ("running statistics moved twice", 'forward changes "norm.num_batches_tracked"'),
        ("counting", 'forward changes "steps"'),
    ],
)
def test_a_model_that_forward_changes_is_computed_in_turn(
    kind: str, says: str, tmp_path, capsys
) -> None:
    jobs = {**KINDS, "telling": (_job(Telling), None), "counting": (_job(Counting), None)}
    job, device_map = jobs[kind]
    run = train(
        job.replace(precision="fp64"), strategy=PP(device_map), devices="2xcpu", folder=tmp_path
    )
    assert f"note: {says}" in capsys.readouterr().out
    one = train(
        job.replace(precision="fp64", accumulate=4),
        strategy="single",
        devices="1xcpu",
        folder=tmp_path,
    )
    assert differences(job, run, one).worst < BOUND


def test_what_changes_for_a_person_is_said_at_the_start(tmp_path, capsys) -> None:
    train(KINDS["BatchNorm"][0], strategy=PP(microbatches=12), devices="2xcpu", folder=tmp_path)
    said = capsys.readouterr().out
    assert "batches of 8, in 8 micro-batches" in said
    assert "note: BatchNorm normalizes over each micro-batch, not over the global batch" in said
    assert "note: batches of 8 samples are 8 micro-batches, not 12" in said


def test_a_micro_batch_that_takes_another_way_than_expected_is_said(tmp_path, capsys) -> None:
    class Returning(Choosing):
        def forward(self, x: torch.Tensor, wants: torch.Tensor) -> torch.Tensor:
            y = super().forward(x, wants)
            return y + self.out(self.first(x)) if wants.any() else y

    # The first batch is without wishes, so the route is straight.
    job = _job(Returning, (drawn(SAMPLES, 6), wants(9, 20, 28)), order=in_place_order)
    way = PP({"first": 0, "": 1})
    run = train(job.replace(precision="fp64"), strategy=way, devices="2xcpu", folder=tmp_path)
    assert capsys.readouterr().out.count("pass through the stages in different orders") == 1
    one = train(
        job.replace(precision="fp64", accumulate=4),
        strategy="single",
        devices="1xcpu",
        folder=tmp_path,
    )
    assert differences(job, run, one).worst < BOUND


def test_each_stage_computes_in_one_thread_at_a_time_and_stages_overlap(tmp_path) -> None:
    visits: list[tuple[str, float, float]] = []

    class Slow(nn.Linear):
        def __init__(self, name: str, inner: int) -> None:
            super().__init__(6, inner)
            self.name = name

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            began = time.perf_counter()
            time.sleep(0.01)
            visits.append((self.name, began, time.perf_counter()))
            return super().forward(x)

    job = _job(lambda: nn.Sequential(Slow("first", 6), Slow("second", 3)))
    train(
        job, strategy=PP({"0": 0, "1": 1}), devices="2xcpu", folder=tmp_path, quiet=True, epochs=1
    )
    pairs = itertools.combinations(visits, 2)
    together = {
        (one, other)
        for (one, begin, end), (other, its, ends) in pairs
        if its < end and begin < ends
    }
    assert together and all(one != other for one, other in together)


def test_memory_is_bounded_by_the_schedule(tmp_path) -> None:
    """Under 1F1B two stages hold two micro-batches, under GPipe all."""
    held = {"now": 0, "most": 0}
    lock = threading.Lock()

    class Holding(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            with lock:
                held["now"] += 1
                held["most"] = max(held["most"], held["now"])
            return x.clone()

        @staticmethod
        def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
            with lock:
                held["now"] -= 1
            return gradient

    class Held(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return Holding.apply(super().forward(x))

    job = _job(
        lambda: nn.Sequential(Held(6, 6), nn.Tanh(), nn.Linear(6, 3)), eval_data=None, metrics={}
    )
    for schedule, most in (("1f1b", 2), ("gpipe", 8)):
        held["most"] = 0
        way = PP({"0": 0, "": 1}, 8, schedule)
        train(job, strategy=way, devices="2xcpu", folder=tmp_path, quiet=True)
        assert (held["now"], held["most"]) == (0, most)


def test_a_model_with_stages_can_be_copied_and_pickled() -> None:
    import copy
    import pickle

    model = stack()
    step = parallelize(
        model, nn.CrossEntropyLoss(), lambda p: plain_sgd(p), strategy="pp", devices="2xcpu"
    )
    step(drawn(8, 6), labels(8, 3))
    x = drawn(3, 6)
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        torch.testing.assert_close(other(x), model(x))


class Gated(nn.Module):
    """Keeps a gate in an attribute where a batch asks for one, which its last layer reads."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(6, 6), nn.Linear(6, 3)
        self.gate: Any = 1.0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if (x > 2).any():
            self.gate = x.sum(1, keepdim=True)
        x = self.last(torch.tanh(self.first(x)))
        return (
            x * self.gate if isinstance(self.gate, torch.Tensor) and len(self.gate) == len(x) else x
        )


def test_what_a_batch_leaves_in_attributes_is_what_the_next_one_of_an_evaluation_finds(
    tmp_path,
) -> None:
    """Found by trial: evaluation batches overlapped, and read one another's gates; so did
    metrics.
    """
    model = Gated()

    def gates(outputs: torch.Tensor, targets: torch.Tensor) -> tuple[float, int]:
        return float(torch.as_tensor(model.gate).sum()), len(targets)

    job = _job(lambda: model, precision="fp64", eval_batch_size=3, metrics={"gates": gates})
    run = train(job, strategy="single", devices="1xcpu", folder=tmp_path, quiet=True, steps=1)
    one = evaluate(run, strategy="single", devices="1xcpu")
    rows = predict(run, strategy="single", devices="1xcpu", quiet=True)
    for way in ("mp", PP({"first": 0, "last": 1}, 2)):
        assert evaluate(run, strategy=way, devices="2xcpu") == pytest.approx(one, rel=1e-10)
        again = predict(run, strategy=way, devices="2xcpu", quiet=True)
        torch.testing.assert_close(again, rows, rtol=1e-12, atol=1e-12)
