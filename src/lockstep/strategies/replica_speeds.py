"""How fast each replica computes: forward, loss and backward of the same number of samples, all
processes at the same time, as in a training.

For the measurement every process builds a model of its own, and drops the model afterwards. So no
process waits for another while it is timed, and weights, buffers and random numbers of the training
aren't touched.
"""

from __future__ import annotations

import copy
import gc
import itertools
import math
import statistics
import time

import torch

from lockstep.data import is_stream
from lockstep.data.shares import over_ranks
from lockstep.errors import StrategyError, counted
from lockstep.job import Job
from lockstep.launch.devices import Device
from lockstep.launch.placement import alone
from lockstep.launch.world import World
from lockstep.pipelining.planner.measured_blocks import model_kept
from lockstep.strategies.single import Single
from lockstep.tensors.rows import weighted_sizes

_WARM_UP = 2
_ROUNDS = 7

_STEPS = 10
"""The mean of all shares, before they are divided by a common factor."""


def measured_shares(job: Job, world: World) -> tuple[str, str]:
    """Return shares in proportion to the speeds of all devices, and what was measured, in words.

    Args:
        job: what is trained, with its data.
        world: the ranks, all of which call this.

    Raises:
        StrategyError: this job can't be measured before its training.
    """
    if job.step is not None or is_stream(job.train_data):
        what = "a step function" if job.step is not None else "a stream, which is read only once"
        raise StrategyError(
            f"shares auto measures forward and backward of the first samples, and the job has "
            f"{what}: give numbers, as --shares 2,1"
        )

    samples = max(1, job.batch_size // job.accumulate // (len(world.devices) * world.size))
    job = job.replace(
        batch_size=samples,
        accumulate=1,
        loader_workers=0,
        shuffle=False,
        order=None,
        batches=None,
        cut_by=None,
        loss=copy.deepcopy(job.loss),
    )
    nanoseconds = [_nanoseconds_on(device, job, world) for device in world.devices]
    gc.collect()  # a step refers to itself: its memory would be kept for a while
    every = list(itertools.chain(*over_ranks(world, *nanoseconds)))
    sizes = weighted_sizes(_STEPS * len(every), [10**18 // each for each in every])
    divisor = math.gcd(*sizes)
    shares = ",".join(str(size // divisor) for size in sizes)
    times = ", ".join(f"{each / 1e6:.3g}" for each in every)
    return shares, f"forward and backward of {counted(samples, 'sample')} take {times} ms"


def _nanoseconds_on(device: Device, job: Job, world: World) -> int:
    """Return the median time of one replica, which has this device."""
    times = []
    strategy = Single()
    with alone((device,)) as own:
        step = strategy.prepare(job, own)
        loader = strategy.training_loader(job, own, job.train_data)
        batch = next(iter(loader.epoch(0)))
        loader.close()
        with model_kept(step.model):
            for _ in range(_WARM_UP + _ROUNDS):
                world.barrier()
                began = time.perf_counter_ns()
                if step.counts is not None:
                    step.counts.begin(batch)
                step.gradients(batch)
                if not device.is_slot:
                    torch.accelerator.synchronize(device.index)
                times.append(time.perf_counter_ns() - began)
    return int(statistics.median(times[_WARM_UP:]))
