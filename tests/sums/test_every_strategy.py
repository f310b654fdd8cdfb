"""Under every strategy that cuts a batch: what many people write and what depends on the cut is
stopped or logged, and what is innocent is never stopped.
"""

from __future__ import annotations

import itertools
import warnings

import pytest
import torch

import lockstep
from lockstep.errors import LockstepError
from lockstep.launch import devices
from lockstep.launch.world import World, lone
from lockstep.strategies import named
from sums.cases import CASES, Case

UPDATES = 8
WAYS = {
    "single": ("1xcpu", 2),
    "dp": ("2xcpu", 1),
    "pp": ("2xcpu", 1),
    "ddp": ("2xcpu", 1),
    "fsdp": ("2xcpu", 1),
}
"""The devices of each strategy, and its micro-batches."""

REFUSED = {
    "gradient-halved-by-hook": "replicas and shards would not have a hook",
    "weights-clamped-in-forward": "a parameter is written in forward",
    "complex-spectrum": "a single layer has no stages",
    "hyper-network": "a single layer has no stages",
    "vmap-over-samples": "a single layer has no stages",
}
"""Innocent cases that some strategy refuses, with why; no check has stopped them."""

SEEN_BY_VERIFY = {
    "small-term-1e-5": "a term of 1e-5 of the loss is rounding in float32",
    "centres-from-forward-10": "it begins between two checks",
    "rare-class-pairs": "it comes between two checks",
}
"""Rare cases that no check finds in eight updates (docs/limits.md)."""


def outcomes(world: World, way: str, kinds: tuple[str, ...], precision: str) -> dict[str, str]:
    """Train each case of these kinds: was it "stopped by StrategyError: ...", "logged", or ""?"""
    warnings.simplefilter("ignore")
    found = {}
    for case in CASES:
        if case.kind in kinds:
            found[case.name] = outcome(world, way, case, precision)
    return found


def outcome(world: World, way: str, case: Case, precision: str) -> str:
    world.step = 0
    notes: list[object] = []
    world.tell = notes.append
    job = case.job().replace(precision=precision, accumulate=WAYS[way][1], loader_workers=0)
    try:
        strategy = named(way).planned(job, world)
        notes.clear()  # of the stages that were found
        step = strategy.prepare(job, world)
        loader = strategy.training_loader(job, world, job.train_data)
        notes += strategy.caveats(job, step.model, step.replicas)
        epochs = itertools.chain.from_iterable(map(loader.epoch, itertools.count()))
        for batch in itertools.islice(epochs, UPDATES):
            step.seed(job.seed)
            step.update(batch)
        loader.close()
    except LockstepError as error:
        return f"stopped by {type(error).__name__}: {error}"
    return "logged" if notes else ""


def of_all(way: str, kinds: tuple[str, ...], precision: str) -> dict[str, str]:
    torch.set_num_threads(1)
    place = WAYS[way][0]
    if way in ("ddp", "fsdp"):
        return lockstep.launch(outcomes, devices=place, args=(way, kinds, precision))[0]
    with lone(devices.parse(place)) as world:
        return outcomes(world, way, kinds, precision)


@pytest.mark.slow
@pytest.mark.parametrize("way", WAYS)
def test_what_depends_on_the_cut_is_stopped_or_logged(way: str) -> None:
    found = of_all(way, ("common", "rare"), "fp32")
    silent = [name for name, what in found.items() if not what and name not in SEEN_BY_VERIFY]
    assert silent == []


@pytest.mark.slow
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("way", WAYS)
def test_what_is_innocent_is_not_stopped(way: str, precision: str) -> None:
    found = of_all(way, ("innocent",), precision)
    stopped = {name: what for name, what in found.items() if what.startswith("stopped")}
    assert {name: stopped[name] for name in stopped if name not in REFUSED} == {}
