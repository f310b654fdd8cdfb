"""On two cards, or four, every strategy ends where one CPU device would, in float64."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from lockstep import train
from lockstep.callbacks import EMA, SWA
from lockstep.checkpoint.weights import load_weights
from lockstep.errors import StrategyError
from lockstep.strategies import MP, named
from lockstep.strategies.ddp import DDP
from lockstep.strategies.dp import DP
from lockstep.strategies.pp import PP
from lockstep.strategies.single import Single
from lockstep.strategies.strategy import Strategy
from lockstep.training.run import Run

from harness import differences  # isort: skip
from zoo import ZOO, mlp

WAYS: dict[str, tuple[Strategy, str]] = {
    "single": (Single(), "card:1"),
    "dp": (DP(), "card:0,1"),
    "mp": (MP(), "card:0,1"),
    "pp": (PP(microbatches=2), "card:0,1"),
    "ddp flat": (DDP(reduce="flat"), "card:0,1"),
    "ddp overlapped": (DDP(reduce="overlapped"), "card:0,1"),
    "ddp=2xpp=2": (named("ddp=2xpp=2", microbatches=2), "card:0,1,2,3"),
    "fsdp": (named("fsdp"), "card:1,2"),
    "ddp=2xfsdp=2": (named("ddp=2xfsdp=2"), "card:0,1,2,3"),
}
KINDS = [kind for kind in ZOO if "sparse" not in kind]
"""What the CPU gives as a sparse gradient can't be given to a card."""


@pytest.fixture(scope="module")
def reference() -> dict[tuple[str, int], Run]:
    return {}


def _is_fast(number: int, way: str) -> bool:
    if "x" in way:
        return number % 48 == 0
    return number % 16 == 0 if "ddp" in way or way == "fsdp" else number % 8 == 0


@pytest.mark.sweep
@pytest.mark.parametrize(
    ("kind", "way"),
    [
        pytest.param(kind, way, marks=() if _is_fast(number + turn, way) else pytest.mark.slow)
        for number, kind in enumerate(KINDS)
        for turn, way in enumerate(WAYS)
    ],
)
def test_a_strategy_on_cards_ends_where_one_device_does(
    kind: str, way: str, reference, tmp_path_factory
) -> None:
    strategy, devices = WAYS[way]
    job = ZOO[kind].replace(precision="fp64")
    if way == "ddp=2xpp=2" and job.sync_batchnorm:
        strategy = named("ddp=2xpp=2", microbatches=1)
    if way == "pp":
        job = job.replace(sync_batchnorm=False)
    parts = strategy.num_microbatches(job)
    if kind == "a buffer that counts and extra state" and parts > 1:  # refused, as on CPU devices
        job = job.replace(accept_differences=True)
    if (kind, parts) not in reference:
        reference[kind, parts] = train(
            job,
            strategy="single",
            devices="1xcpu",
            folder=tmp_path_factory.mktemp("one"),
            quiet=True,
            accumulate=parts,
        )
    run = train(
        job, strategy=strategy, devices=devices, folder=tmp_path_factory.mktemp("run"), quiet=True
    )
    found = differences(job, run, reference[kind, parts])
    assert found.worst < 1e-10, str(found)
    assert any(found.moved.values())
    assert max(found.history.values()) < 1e-10


@pytest.mark.sweep
@pytest.mark.parametrize("way", ["dp", "ddp flat", "pp"])
def test_averages_on_cards_are_those_of_one_device_and_go_on_to_the_bit(way: str, tmp_path) -> None:
    strategy, devices = WAYS[way]
    job = ZOO["momentum"].replace(precision="fp64", callbacks=[SWA(), EMA(0.9)])
    one = train(job, strategy="single", devices="1xcpu", folder=tmp_path, quiet=True)
    whole = train(job, strategy=strategy, devices=devices, folder=tmp_path, quiet=True)
    half = train(job, strategy=strategy, devices=devices, folder=tmp_path, quiet=True, steps=6)
    again = train(job, strategy=strategy, devices=devices, resume=half.folder, quiet=True)
    for file in ("ema.safetensors", "swa.safetensors"):
        expected, found, resumed = (load_weights(run.folder / file) for run in (one, whole, again))
        for name, weight in expected.items():
            assert (weight - found[name]).abs().max() < 1e-10
            assert found[name].equal(resumed[name])


class Centered(nn.Sequential):
    """Outputs depend on the other samples."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = super().forward(x)
        return x - x.mean(0)


@pytest.mark.parametrize("way", ["dp", "pp", "ddp flat", "fsdp"])
def test_samples_that_act_on_one_another_are_found_on_cards(way: str, tmp_path) -> None:
    strategy, devices = WAYS[way]
    job = ZOO["mlp"].replace(model=lambda: Centered(*mlp()), eval_data=None, metrics={})
    with pytest.raises(StrategyError, match="results depend on where a batch is cut: in update 1,"):
        train(job, strategy=strategy, devices=devices, folder=tmp_path, quiet=True)
