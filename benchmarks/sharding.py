"""``fsdp`` on two ranks against a hand-written loop of fully_shard, and against ``ddp``; the
memory of a rank.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

import lockstep
from benchmarks import models
from benchmarks.pipelining import char_lm_job
from benchmarks.timing import ROOT, Benchmark, Ratio, rate, torchrun
from lockstep.data import Loader
from lockstep.launch.devices import slots
from lockstep.tensors.pytree import tensors

JOBS: dict[str, Callable[[], lockstep.Job]] = {
    "stack": models.stack_job,
    "char_lm": lambda: char_lm_job().replace(epochs=8),
}


def by_hand(name: str) -> Callable[[], float]:
    """The hand-written loop's rate."""
    environment = {"JOB": name, "PYTHONPATH": f"{ROOT / 'src'}:{ROOT}"}
    return lambda: float(
        torchrun("fully_shard_loop.py", 2, environment).stdout.strip().splitlines()[-1]
    )


def sharding(name: str) -> Mapping[str, Callable[[], float]]:
    """Each in fresh ranks."""
    job = JOBS[name]()
    return {
        "fsdp": rate(job, "fsdp", slots(2)),
        "fully_shard by hand": by_hand(name),
        "ddp": rate(job, "ddp", slots(2)),
    }


def kept(world: Any) -> int:
    """Bytes of weights, gradients and the optimizer's state that a rank has after three updates
    of char_lm by AdamW.
    """
    job = JOBS["char_lm"]()
    batch = next(iter(Loader(job.train_data, batch_size=8, collate=job.collate)))
    strategy = "fsdp" if world.size > 1 else "single"
    step = lockstep.parallelize(
        job.model(), job.loss, lambda named: torch.optim.AdamW(named), strategy=strategy
    )
    for _ in range(3):
        step(*batch)
    parameters = list(step.layout.parts().values())
    gradients = [p.grad for p in parameters]
    states = [dict(state) for state in step.optimizer.state.values()]
    sizes = {}
    for tensor in tensors([parameters, gradients, states]):
        storage = tensor.untyped_storage()
        sizes[storage.data_ptr()] = storage.nbytes()
    return sum(sizes.values())


def rarity(devices: int) -> Callable[[], float]:
    """One over the GB of the rank that keeps most."""
    return lambda: 1e9 / max(lockstep.launch(kept, devices=f"{devices}xcpu"))


def memory() -> Mapping[str, Callable[[], float]]:
    return {"single": rarity(1), "fsdp, 2 ranks": rarity(2), "fsdp, 4 ranks": rarity(4)}


SHARDING = {
    "sharding-memory": Benchmark(
        memory,
        tuple(Ratio(f"fsdp, {n} ranks", "single", n / 1.05) for n in (2, 4)),
        rounds=1,
        unit="1 / GB of weights, gradients and the optimizer's state that a rank keeps at most",
    ),
} | {
    f"sharding-{name}": Benchmark(
        lambda name=name: sharding(name),  # type: ignore[misc]
        (Ratio("fsdp", "fully_shard by hand", 1.0), Ratio("fsdp", "ddp")),
    )
    for name in JOBS
}
