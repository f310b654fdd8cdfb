"""Under every strategy that cuts a batch: what many people write and what depends on the cut is
stopped or logged, and what is innocent is never stopped.
"""

from __future__ import annotations

import contextlib
import io
import itertools
import warnings
from pathlib import Path

import pytest
import torch

import lockstep
from lockstep.errors import LockstepError
from lockstep.launch import devices
from lockstep.launch.world import World, lone
from lockstep.strategies import named
from strategies.sums.cases import CASES, Case

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
    "capacity-larger-than-a-local-share": "it begins with more samples than a later check takes",
}
"""Rare cases that no check finds in eight updates (docs/limits.md)."""


def outcome(world: World, way: str, case: Case, precision: str) -> str:
    """Train a case in this process: "stopped by StrategyError: ...", "logged", or ""."""
    world.step = 0
    notes: list[object] = []
    world.emit = notes.append
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


def outcome_of_ranks(folder: Path, way: str, case: Case, precision: str) -> str:
    """Train a case on two ranks; see ``outcome``."""
    job = case.job().replace(precision=precision, loader_workers=0)
    said = io.StringIO()
    try:
        with contextlib.redirect_stdout(said):
            lockstep.train(job, strategy=way, devices=WAYS[way][0], folder=folder, steps=UPDATES)
    except LockstepError as error:
        return f"stopped by {type(error).__name__}: {error}"
    return "logged" if "note: " in said.getvalue() else ""


def of_all(way: str, kinds: tuple[str, ...], precision: str, folder: Path) -> dict[str, str]:
    """Train the cases of these kinds; on ranks, which take long to start, every eighth."""
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    cases = [case for case in CASES if case.kind in kinds]
    if way in ("ddp", "fsdp"):
        return {c.name: outcome_of_ranks(folder, way, c, precision) for c in cases[::8]}
    with lone(devices.parse(WAYS[way][0])) as world:
        return {c.name: outcome(world, way, c, precision) for c in cases}


@pytest.mark.slow
@pytest.mark.parametrize("way", WAYS)
def test_what_depends_on_the_cut_is_stopped_or_logged(way: str, tmp_path: Path) -> None:
    found = of_all(way, ("common", "rare"), "fp32", tmp_path)
    cut = "in turn" if way in ("single", "pp") else "replicas"
    differs = {case.name for case in CASES if case.cut in ("both", cut)}
    silent = {name for name, what in found.items() if not what}
    assert silent & differs <= SEEN_BY_VERIFY.keys()


@pytest.mark.slow
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("way", WAYS)
def test_what_is_innocent_is_not_stopped(way: str, precision: str, tmp_path: Path) -> None:
    found = of_all(way, ("innocent",), precision, tmp_path)
    stopped = {name: what for name, what in found.items() if what.startswith("stopped")}
    assert {name: stopped[name] for name in stopped if name not in REFUSED} == {}
