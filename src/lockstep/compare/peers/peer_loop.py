"""The loop that a person writes by hand, on each rank that torchrun started: one for all peers.

python -m torch.distributed.run --nproc-per-node 2 -m lockstep.compare.peers.peer_loop PLAN OUT
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import pickle
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader

from lockstep.data import is_stream, resolve
from lockstep.errors import InputError
from lockstep.job import Job
from lockstep.jobfile import the_job
from lockstep.launch import devices as _devices
from lockstep.launch.devices import Device
from lockstep.launch.memory import peak_memory
from lockstep.launch.world import World, now
from lockstep.tensors.pytree import call, to_device
from lockstep.tensors.seeding import seed_all


@dataclass
class Parts:
    """What a peer makes of a job.

    Attributes:
        model: wrapped.
        optimizer: wrapped.
        loader: of this rank's share.
        backward: called with the loss.
        epoch: called before each epoch, with its number.
        gather: every rank's object, on every rank.
        end: called at the end.
    """

    model: Any
    optimizer: Any
    loader: Any
    backward: Callable[[torch.Tensor], None]
    epoch: Callable[[int], None]
    gather: Callable[[Any], list[Any]]
    end: Callable[[], None]


def main() -> None:
    """Time the loop, and have rank 0 write what was found."""
    plan, out = map(Path, sys.argv[1:])
    name, source, devices, seconds = pickle.loads(plan.read_bytes())
    rank = int(os.environ["RANK"])
    device: Device = devices[rank]
    _devices.limit_threads(device)
    job = the_job(source)
    where = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if device.type == "cuda" else torch.device("cpu")
    if device.type == "cuda":
        torch.cuda.set_device(where)
    parts: Parts = importlib.import_module(f"lockstep.compare.peers.by_{name}").parts_of(job, where, len(devices))
    _devices.pin(device)
    batches = _endless(parts)
    first, size = _timed(job, parts, batches, where, 1)
    started = now()
    count, rate, elapsed = 1, size / first, 0.0
    while elapsed < seconds:
        count *= 2
        elapsed, size = _timed(job, parts, batches, where, count)
        rate = size / elapsed
    # ``peak_memory`` asks only which devices are this process's.
    mine = World(devices=(Device(device.type, where.index or 0, device.cores),))
    peaks = [byte for of in parts.gather(peak_memory(mine)) for byte in of]
    if rank == 0:
        out.write_text(json.dumps({"rate": rate * len(devices), "first": first, "started": started, "peaks": peaks}))
    parts.end()


def model_of(job: Job, where: torch.device) -> nn.Module:
    """The job's model, the same on every rank."""
    seed_all(job.seed)
    model: nn.Module = job.model()
    if job.channels_last:
        model = model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    return model.to(where)


def optimizer_of(job: Job, model: nn.Module) -> torch.optim.Optimizer:
    """The job's optimizer."""
    return job.optimizer([(name, p) for name, p in model.named_parameters() if p.requires_grad])


def dataset_of(job: Job) -> Any:
    """The job's dataset."""
    data = resolve(job.train_data, World(devices=_devices.slots(1)), "train_data")
    if is_stream(data):
        raise InputError("train_data: the loop by hand needs a dataset with a length, and this is a stream")
    return data


def loader_of(job: Job, data: Any, ranks: int, **named: Any) -> DataLoader[Any]:
    """A loader of a rank's share, by the job's own settings."""
    size = max(1, job.batch_size // ranks)
    workers = job.loader_workers or 0
    return DataLoader(data, batch_size=size, collate_fn=job.collate, num_workers=workers, **named)


def _endless(parts: Parts) -> Iterator[Any]:
    epoch = 0
    while True:
        parts.epoch(epoch)
        yield from parts.loader
        epoch += 1


def _timed(job: Job, parts: Parts, batches: Iterator[Any], where: torch.device, count: int) -> tuple[float, int]:
    """Seconds for so many updates, the same on every rank, and this rank's samples in them."""
    mixed = job.precision == "bf16"
    start = time.perf_counter()
    samples = 0
    for _ in range(count):
        inputs, targets = next(batches)
        inputs, targets = (
            to_device(inputs, where, None, channels_last=job.channels_last),
            to_device(targets, where, None),
        )
        parts.optimizer.zero_grad()
        with torch.autocast(where.type, dtype=torch.bfloat16) if mixed else contextlib.nullcontext():
            found = job.loss(call(parts.model, inputs), targets)
        loss = found[0] / found[1] if isinstance(found, tuple) else found
        parts.backward(loss)
        if job.clip_norm is not None:
            nn.utils.clip_grad_norm_(parts.model.parameters(), job.clip_norm)
        parts.optimizer.step()
        samples += len(targets) if hasattr(targets, "__len__") else job.batch_size // int(os.environ["WORLD_SIZE"])
    if where.type == "cuda":
        torch.cuda.synchronize()
    return max(parts.gather(time.perf_counter() - start)), samples


if __name__ == "__main__":
    main()
