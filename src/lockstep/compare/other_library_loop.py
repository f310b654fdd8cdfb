"""The loop that a person writes by hand, on each rank that torchrun started: one for all peers.

python -m torch.distributed.run --nproc-per-node 2 -m lockstep.compare.other_library_loop PLAN OUT
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import pickle
import sys
import time
from collections.abc import Callable, Generator, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader
from torch.utils.data.distributed import DistributedSampler

from lockstep.compare.timing import rate_of
from lockstep.data import is_stream, resolve
from lockstep.errors import InputError
from lockstep.job import Job
from lockstep.jobfile import the_job
from lockstep.launch import devices as _devices
from lockstep.launch.devices import Device
from lockstep.launch.memory import peak_memory
from lockstep.launch.world import World, default_backend, now
from lockstep.tensors.pytree import call, to_device
from lockstep.tensors.seeding import seed_all


class Parts(NamedTuple):
    """What a peer makes of a job: model, optimizer and loader are wrapped, ``backward`` is
    called with the loss.
    """

    model: Any
    optimizer: Any
    loader: Any
    backward: Callable[[torch.Tensor], None]


def main() -> None:
    """Time the loop, and have rank 0 write what was found."""
    plan, out = map(Path, sys.argv[1:])
    name, source, devices, seconds = pickle.loads(plan.read_bytes())
    rank = int(os.environ["RANK"])
    device: Device = devices[rank]
    _devices.limit_threads(device)
    job = the_job(source)
    where = device.torch
    if not device.is_slot:
        if (
            device.type == "cuda"
        ):  # whose numbers count within CUDA_VISIBLE_DEVICES, which names the ranks' alone
            where = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.accelerator.set_device_index(where.index)
    parts = _BY_NAME[name](job, where, len(devices))
    _devices.pin(device)
    batches = _endless(parts.loader)
    first, _ = _timed(job, parts, batches, where, 1)
    started = now()
    rate = rate_of(lambda count: _timed(job, parts, batches, where, count), seconds)
    # ``peak_memory`` asks only which devices are this process's.
    mine = World(devices=(Device(device.type, where.index or 0, device.cores),))
    peaks = [byte for of in _of_all(peak_memory(mine)) for byte in of]
    if rank == 0:
        out.write_text(
            json.dumps(
                {"rate": rate * len(devices), "first": first, "started": started, "peaks": peaks}
            )
        )
    batches.close()
    if dist.is_initialized():
        dist.barrier()
    # Threads of gloo's now and then hold up or abort a process that goes away with its group; all
    # is written here.
    os._exit(0)


def _by_torch(job: Job, where: torch.device, ranks: int) -> Parts:
    """Plain PyTorch: DistributedDataParallel, DistributedSampler, DataLoader."""
    on_card = where.type != "cpu"
    dist.init_process_group(default_backend(Device(where.type, where.index or 0)))
    data = _dataset_of(job)
    sampler: Any = DistributedSampler(data, shuffle=job.shuffle, seed=job.seed)
    net = _model_of(job).to(where)
    model = nn.parallel.DistributedDataParallel(net, device_ids=[where.index] if on_card else None)
    loader = _loader_of(job, data, ranks, sampler=sampler, pin_memory=on_card)
    return Parts(model, _optimizer_of(job, net), loader, torch.autograd.backward)


def _by_fabric(job: Job, where: torch.device, ranks: int) -> Parts:
    """Lightning Fabric."""
    from lightning.fabric import Fabric

    fabric = Fabric(accelerator=where.type, devices=ranks, strategy="ddp")
    fabric.launch()
    loader = fabric.setup_dataloaders(_loader_of(job, _dataset_of(job), ranks, shuffle=job.shuffle))
    net = _model_of(job)
    model, optimizer = fabric.setup(net, _optimizer_of(job, net))
    return Parts(model, optimizer, loader, fabric.backward)


def _by_accelerate(job: Job, where: torch.device, ranks: int) -> Parts:
    """Hugging Face Accelerate."""
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=where.type == "cpu")
    net = _model_of(job)
    loader = _loader_of(job, _dataset_of(job), ranks, shuffle=job.shuffle)
    model, optimizer, loader = accelerator.prepare(net, _optimizer_of(job, net), loader)
    return Parts(model, optimizer, loader, accelerator.backward)


_BY_NAME = {"torch": _by_torch, "fabric": _by_fabric, "accelerate": _by_accelerate}


def _of_all(value: Any) -> list[Any]:
    """Every rank's value, on every rank."""
    if not dist.is_initialized():
        return [value]
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, value)
    return found


def _model_of(job: Job) -> nn.Module:
    """The job's model, the same on every rank."""
    seed_all(job.seed)
    model: nn.Module = job.model()
    return model.to(memory_format=torch.channels_last) if job.channels_last else model  # type: ignore[call-overload]


def _optimizer_of(job: Job, model: nn.Module) -> torch.optim.Optimizer:
    if isinstance(job.optimizer, Mapping):
        raise InputError(
            "step: other libraries have no such function: compare a job with step= without peers"
        )
    return job.optimizer([(name, p) for name, p in model.named_parameters() if p.requires_grad])


def _dataset_of(job: Job) -> Any:
    data = resolve(job.train_data, World(devices=_devices.slots(1)), "train_data")
    if is_stream(data):
        raise InputError(
            "train_data: the loop by hand needs a dataset with a length, and this is a stream"
        )
    return data


def _loader_of(job: Job, data: Any, ranks: int, **named: Any) -> DataLoader[Any]:
    """A loader of a rank's share, by the job's own settings."""
    size = max(1, job.batch_size // ranks)
    return DataLoader(
        data, batch_size=size, collate_fn=job.collate, num_workers=job.loader_workers or 0, **named
    )


def _endless(loader: Any) -> Generator[Any]:
    for epoch in itertools.count():
        if isinstance(loader.sampler, DistributedSampler):
            loader.sampler.set_epoch(epoch)
        yield from loader


def _timed(
    job: Job, parts: Parts, batches: Iterator[Any], where: torch.device, count: int
) -> tuple[float, int]:
    """Seconds for so many updates, the same on every rank, and this rank's samples in them."""
    mixed = job.precision == "bf16"
    start = time.perf_counter()
    samples = 0
    for _ in range(count):
        inputs, targets = next(batches)
        inputs = to_device(inputs, where, None, channels_last=job.channels_last)
        targets = to_device(targets, where, None)
        parts.optimizer.zero_grad()
        with (
            torch.autocast(where.type, dtype=torch.bfloat16) if mixed else contextlib.nullcontext()
        ):
            found = job.loss(call(parts.model, inputs), targets)
        loss = found[0] / found[1] if isinstance(found, tuple) else found
        parts.backward(loss)
        if job.clip_norm is not None:
            nn.utils.clip_grad_norm_(parts.model.parameters(), job.clip_norm)
        parts.optimizer.step()
        samples += (
            len(targets)
            if hasattr(targets, "__len__")
            else job.batch_size // int(os.environ["WORLD_SIZE"])
        )
    if where.type != "cpu":
        torch.accelerator.synchronize()
    return max(_of_all(time.perf_counter() - start)), samples


if __name__ == "__main__":
    main()
