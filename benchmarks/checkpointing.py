"""Activation checkpointing on char_lm with 8 blocks: the peak of activations with it, to that
without.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

import torch

from benchmarks.live_memory import LiveBytes
from benchmarks.timing import Benchmark, Ratio
from lockstep.data import Loader
from lockstep.jobfile import JobFile
from lockstep.launch.devices import parse
from lockstep.launch.world import World
from lockstep.strategies import choose

CHAR_LM = Path(__file__).parent.parent / "examples" / "char_lm.py"


def _rarity(checkpointing: str | None) -> Callable[[], float]:
    """One over the GB that were alive at once in forward, loss and backward, beyond weights and
    gradients.
    """

    def once() -> float:
        job = JobFile(
            str(CHAR_LM), {"layers": 8}, {"activation_checkpointing": checkpointing}
        ).load()
        world = World(devices=parse("1xcpu"))
        step = choose("single", world.devices).prepare(job, world)
        batches = iter(Loader(job.train_data(), batch_size=job.batch_size, collate=job.collate))
        batch = next(batches)
        step(*batch)  # gradients and the optimizer's state are there from now on
        with LiveBytes() as live:
            step(*batch)
        return 1e9 / live.peak()

    return once


def memory() -> Mapping[str, Callable[[], float]]:
    torch.manual_seed(0)
    return {"with": _rarity("auto"), "without": _rarity(None)}


CHECKPOINTING = {
    "checkpointing": Benchmark(
        memory,
        (Ratio("with", "without", 1 / 0.35),),
        rounds=1,
        unit="1 / GB of activations at the peak",
    )
}
