"""Layers on two slots: `pp` against one core that trains the whole batch, and against what the
schedule allows.

The bound is taken in the same round: the rate of one core with as many micro-batches (so what
cutting costs is in it), times what the schedule gains by simulation on stage times that were
measured on one core just then.
"""

from __future__ import annotations

import tempfile
import threading
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn
from torch.utils.data import Subset, TensorDataset

import lockstep
from benchmarks import models
from benchmarks.timing import ROOT, Benchmark, Ratio, by_torchrun, rate
from examples.models.unet import UNet
from lockstep.jobfile import JobFile
from lockstep.launch.devices import Device, slots, usable_cores
from lockstep.pipelining.microbatch import current
from lockstep.pipelining.planner.plan import planned
from lockstep.strategies import MP, named
from lockstep.strategies.pp import PP

HALVES = {f"layers.{i}": i // 4 for i in range(8)}
QUARTERS = {f"layers.{i}": i // 2 for i in range(8)}


def one_core() -> Device:
    return Device("cpu", 0, usable_cores()[:1])


class Bound:
    """What a schedule allows, by what one core just did.

    Args:
        job: which is trained.
        way: with its map, its schedule and its number of micro-batches.
    """

    def __init__(self, job: lockstep.Job, way: PP) -> None:
        self._job = job
        self._way = way
        self._cut = rate(job.replace(accumulate=way.num_microbatches(job)), "single", one_core())
        self._last = 0.0

    def cut(self) -> float:
        """The rate of one core with as many micro-batches."""
        self._last = self._cut()
        return self._last

    def rate(self) -> float:
        """That, times what the schedule gains."""
        way = self._way
        _, choice = planned(
            self._job,
            slots(2),
            device_map=way.device_map,
            schedules=[way.schedule],
            microbatches=[way.num_microbatches(self._job)],
            chunks=[way.chunks_on(2)],
        )
        return self._last * choice.best.timeline.speed_up


def stack() -> Mapping[str, Callable[[], float]]:
    job = models.stack_job()
    bound = Bound(job, PP(HALVES, 16))
    return {
        "one core": rate(job, "single", one_core()),
        "one core, 16 micro-batches": bound.cut,
        "bound": bound.rate,
        "pp, 16 micro-batches": rate(job, PP(HALVES, 16), slots(2)),
        "pp, 16 micro-batches, gpipe": rate(job, PP(HALVES, 16, "gpipe"), slots(2)),
        "pp, 16 micro-batches, interleaved": rate(job, PP(QUARTERS, 16, "interleaved"), slots(2)),
        "mp": rate(job, MP(HALVES), slots(2)),
        "torch.distributed.pipelining": by_torchrun("pipelining_1f1b.py"),
    }


def found(job: lockstep.Job) -> Callable[[], Mapping[str, Callable[[], float]]]:
    """One core, the best that simulation finds on two, and its bound."""

    def alternatives() -> Mapping[str, Callable[[], float]]:
        partition, choice = planned(job, slots(2), seconds=3.0)
        print(f"   {choice.why}", flush=True)
        way = PP(
            partition.device_map,
            choice.best.microbatches,
            choice.best.schedule,
            chunks=choice.best.plan.chunks,
        )
        bound = Bound(job, way)
        return {
            "one core": rate(job, "single", one_core()),
            "one core, as many micro-batches": bound.cut,
            "bound": bound.rate,
            "pp": rate(job, way, slots(2)),
        }

    return alternatives


def product() -> Mapping[str, Callable[[], float]]:
    """What the pipeline costs: two replicas on two slots, or each on two stages, four slots of
    the same two cores.
    """
    job, four = models.stack_job(), slots(4, usable_cores()[:2])
    staged = named("ddp=2xpp=2", device_map=HALVES, microbatches=4)
    return {
        "ddp, 2 slots": rate(job, "ddp", slots(2)),
        "ddp=2xpp=2, 4 slots of 2 cores": rate(job, staged, four),
    }


def resnet_job() -> lockstep.Job:
    """examples/resnet50_split.py on noise: 112 x 112, batch 32, two batches an epoch."""
    path = str(ROOT / "examples" / "resnet50_split.py")
    return (
        JobFile(path, {"generated": "true", "samples": "64"})
        .load()
        .replace(epochs=3, on_event=[], metrics={})
    )


def unet_job() -> lockstep.Job:
    """Batch 32 of 64 x 64, four sizes; two batches an epoch."""
    data = TensorDataset(torch.randn(64, 1, 64, 64), torch.randn(64, 1, 64, 64))
    return lockstep.Job(
        model=lambda: UNet(1, 1, 32, 3),
        loss=nn.MSELoss(),
        optimizer=models.sgd,
        train_data=data,
        batch_size=32,
        epochs=3,
        shuffle=False,
    )


class Predicting(nn.Module):
    """GPT-2 of Hugging Face: tokens to logits."""

    def __init__(self) -> None:
        from transformers import GPT2Config, GPT2LMHeadModel

        super().__init__()
        config = GPT2Config(
            vocab_size=4096,
            n_positions=128,
            n_embd=256,
            n_layer=6,
            n_head=4,
            resid_pdrop=0.0,
            embd_pdrop=0.0,
            attn_pdrop=0.0,
            use_cache=False,
            bos_token_id=None,
            eos_token_id=None,
        )
        self.inner = GPT2LMHeadModel(config)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.inner(input_ids=tokens).logits.transpose(1, 2)


def gpt2_job() -> lockstep.Job:
    """Batch 16 of 128 tokens of 4096; two batches an epoch."""
    tokens = torch.randint(4096, (32, 129))
    return lockstep.Job(
        model=Predicting,
        loss=nn.CrossEntropyLoss(),
        optimizer=models.sgd,
        train_data=TensorDataset(tokens[:, :-1], tokens[:, 1:]),
        batch_size=16,
        epochs=4,
        shuffle=False,
    )


def char_lm_job() -> lockstep.Job:
    """examples/char_lm.py, its head tied to its embedding; two batches of 16 windows an epoch."""
    job = JobFile(str(ROOT / "examples" / "char_lm.py"), {"size": "300000"}).load()
    data: Any = job.train_data
    return job.replace(
        train_data=Subset(data(), range(32)),
        eval_data=None,
        metrics={},
        on_event=[],
        steps=None,
        epochs=4,
        shuffle=False,
        loader_workers=0,
    )


# ---- the most bytes of activations that a stage holds --------------------------------------------


class Saved:
    """Bytes that autograd keeps for backward, by stage: those of parameters are left out."""

    def __init__(self) -> None:
        self.most: Counter[int] = Counter()
        self._now: Counter[int] = Counter()
        self._of: Counter[tuple[int, int]] = Counter()
        self._lock = threading.RLock()

    def pack(self, tensor: torch.Tensor) -> Any:
        flight = current()
        if flight is None or flight.stage is None or isinstance(tensor, nn.Parameter):
            return tensor
        return _Kept(self, tensor, flight.stage)

    def keep(self, key: tuple[int, int], size: int) -> None:
        with self._lock:
            self._of[key] += 1
            if self._of[key] == 1:
                self._now[key[0]] += size
                self.most[key[0]] = max(self.most[key[0]], self._now[key[0]])

    def free(self, key: tuple[int, int], size: int) -> None:
        with self._lock:
            self._of[key] -= 1
            if not self._of[key]:
                self._now[key[0]] -= size


class _Kept:
    def __init__(self, saved: Saved, tensor: torch.Tensor, stage: int) -> None:
        storage = tensor.untyped_storage()
        self.tensor, self._saved = tensor, saved
        self._key, self._size = (stage, storage.data_ptr()), storage.nbytes()
        saved.keep(self._key, self._size)

    def __del__(self) -> None:
        self._saved.free(self._key, self._size)


def memory() -> Mapping[str, Callable[[], float]]:
    saved: list[Saved] = []

    class Watched(models.Stack):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            with torch.autograd.graph.saved_tensors_hooks(
                saved[-1].pack, lambda kept: kept.tensor if isinstance(kept, _Kept) else kept
            ):
                return super().forward(x)

    def rarity(schedule: str) -> Callable[[], float]:
        def once() -> float:
            saved.append(Saved())
            job = models.stack_job().replace(model=Watched, epochs=2)
            with tempfile.TemporaryDirectory() as folder:
                way = PP(QUARTERS, 16, schedule)
                lockstep.train(job, strategy=way, devices="4xcpu", folder=folder, quiet=True)
            print(
                "     ",
                {stage: f"{size / 1e6:.1f} MB" for stage, size in sorted(saved[-1].most.items())},
                flush=True,
            )
            return 1e9 / max(saved[-1].most.values())

        return once

    return {schedule: rarity(schedule) for schedule in ("1f1b", "gpipe")}


JOBS: dict[str, Callable[[], lockstep.Job]] = {
    "stack": models.stack_job,
    "resnet50": resnet_job,
    "unet": unet_job,
    "gpt2": gpt2_job,
    "char_lm": char_lm_job,
}


def _bounded(goal: float) -> tuple[Ratio, ...]:
    return (
        Ratio("pp", "bound", goal),
        Ratio("pp", "one core"),
        Ratio("bound", "one core"),
        Ratio("one core, as many micro-batches", "one core"),
    )


PIPELINING = {
    "pipelining-stack": Benchmark(
        stack,
        (
            Ratio("pp, 16 micro-batches", "bound", 0.97),
            Ratio("pp, 16 micro-batches", "one core"),
            Ratio("bound", "one core"),
            Ratio("pp, 16 micro-batches, gpipe", "bound"),
            Ratio("pp, 16 micro-batches, interleaved", "one core"),
            Ratio("one core, 16 micro-batches", "one core"),
            Ratio("mp", "one core"),
            Ratio("pp, 16 micro-batches", "torch.distributed.pipelining", 1.05),
        ),
        rounds=3,
    ),
    **{
        f"pipelining-{name}": Benchmark(
            found(JOBS[name]()), _bounded(0.95 if name == "resnet50" else 0.92), rounds=3
        )
        for name in ("resnet50", "unet", "gpt2", "char_lm")
    },
    "pipelining-product": Benchmark(
        product,
        (Ratio("ddp=2xpp=2, 4 slots of 2 cores", "ddp, 2 slots", 0.9),),
    ),
    "pipelining-memory": Benchmark(
        memory,
        (Ratio("1f1b", "gpipe", 1 / 0.35),),
        rounds=1,
        unit="1 / GB that the stage keeps for backward that keeps most",
    ),
}
