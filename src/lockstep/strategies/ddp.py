"""``ddp``: a process per device, each with the whole model and a share of every batch.

Gradients that are many megabytes are averaged by PyTorch's ``DistributedDataParallel`` while backward still runs. Small
ones go in one flat all-reduce after it, which is faster: the time of a small sum is nearly all waking up.

Ranks with an empty share call neither model nor loss. Every rank knows the size of the global batch, so all know when
that happens, and such a step is summed flat (PyTorch's reducer would wait for the missing backward).
"""

from __future__ import annotations

import warnings
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from lockstep.build import build_model, build_optimizer
from lockstep.data import Batch
from lockstep.errors import StrategyError
from lockstep.job import Job
from lockstep.parallel.batchnorm import synchronise
from lockstep.parallel.exchange import RankExchange
from lockstep.step import Number, Step
from lockstep.strategies.flat import FlatGradients
from lockstep.strategies.strategy import Strategy
from lockstep.world import World

_SMALL_GRADIENTS = 2 << 20
"""Bytes of gradients up to which ``reduce="auto"`` sums them flat (see benchmarks/)."""


@dataclass(frozen=True)
class DDP(Strategy):
    """Replicas in processes.

    Attributes:
        reduce: ``"flat"``: one all-reduce after backward; ``"overlapped"``: PyTorch's DistributedDataParallel, buckets
            while backward runs; ``"auto"`` takes flat for small gradients.
        bucket_mb: the size of an overlapped bucket, in MiB.
    """

    reduce: Literal["auto", "flat", "overlapped"] = "auto"
    bucket_mb: float = 25.0

    name: ClassVar[str] = "ddp"
    summary: ClassVar[str] = "a process per device: each the whole model, a share of the batch"
    good_for: ClassVar[str] = "most models that fit on one device; the fastest of the exact ones on several"
    processes: ClassVar[Literal["one", "one per device"]] = "one per device"

    def build(self, job: Job, world: World) -> Step:
        """Build the same model on every rank."""
        if world.size == 1 and len(world.devices) > 1:
            raise StrategyError(
                f"ddp wants a process for each of the {len(world.devices)} devices, and this is one process: "
                "start it with lockstep.launch(...) or torchrun, or use dp"
            )
        model = build_model(job, world)
        exchange = None
        if job.sync_batchnorm and world.size > 1:
            exchange = RankExchange(world)
            synchronise(model, exchange)
        optimizer = build_optimizer(job, model)
        step = DDPStep(model, optimizer, job, world, exchange)
        if world.size > 1 and step.overlaps(self.reduce):
            step.overlap(self.bucket_mb)
        return step


class DDPStep(Step):
    """One rank's replica."""

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        job: Job,
        world: World,
        exchange: RankExchange | None,
    ) -> None:
        super().__init__(model, optimizer, job, world)
        self.cuts_batch = world.size > 1 or job.accumulate > 1
        self._exchange = exchange
        self._flat: FlatGradients | None = None
        self._ddp: DistributedDataParallel | None = None
        self._buffers = _FollowedBuffers(model, world)

    def overlaps(self, reduce: str) -> bool:
        """Whether the gradients are large enough to be summed while backward runs, or of a kind that has to be."""
        if any(getattr(m, "sparse", False) for m in self.model.modules()):
            return True
        size = sum(p.numel() * p.element_size() for p in self._parameters)
        return reduce == "overlapped" or (reduce == "auto" and size > _SMALL_GRADIENTS)

    def overlap(self, bucket_mb: float) -> None:
        """Let PyTorch's DistributedDataParallel sum the gradients while backward runs.

        It always looks for unused parameters: without that, one that is unused in the last step gives wrong numbers and
        no error, and with large models the search costs nothing that can be measured.
        """
        self._ddp = DistributedDataParallel(
            self.model,
            device_ids=None if self.world.device.is_slot else [self.world.device.index],
            broadcast_buffers=False,  # done here, only for those that change: see _FollowedBuffers
            init_sync=False,  # build_model has compared the ranks
            find_unused_parameters=True,
            gradient_as_bucket_view=True,
            bucket_cap_mb=bucket_mb,
        )

    def gradients(self, batch: Batch) -> tuple[Number, Number]:
        """Gradients of total / size, summed over micro-batches and ranks."""
        for p in self._parameters:
            p.grad = None
        self._buffers.follow()
        parts = batch.parts
        full = self._ddp is not None and all(part.of >= self.world.size for part in parts)
        total: Number = 0.0
        count: Number = 0
        sums: torch.Tensor | None = None
        for i, part in enumerate(parts):
            if self._exchange is not None:
                self._exchange.begin(min(part.of, self.world.size))
            if not part.size:
                continue
            part = self.placed(part)
            last = full and i == len(parts) - 1
            model = self._ddp if full and self._ddp is not None else self.model
            with nullcontext() if last or not full else self._ddp.no_sync():  # type: ignore[union-attr]
                part_total, part_count = self._quietly(model, part)
                total = total + part_total.detach()
                count = count + part_count
                # DDP divides by the number of ranks; what is wanted is the sum.
                self.backward(part_total, (self.world.size if full else 1) / batch.size)
        if self.world.size == 1:
            pass
        elif full:
            sums = torch.stack(
                [torch.as_tensor(v, dtype=torch.float64, device=self.world.device.torch) for v in (total, count)]
            )
            self.world.all_reduce(sums)
            total, count = (sums[0], sums[1]) if self._on_accelerator else tuple(sums.tolist())
        else:
            if self._flat is None:
                self._flat = FlatGradients(self._parameters)
            total, count = self._flat.sum_over(self.world, total, count)
        if not self._buffers.looked:
            self._buffers.look()
        return total, count

    def _quietly(self, model: nn.Module, part: Any) -> tuple[torch.Tensor, Number]:
        if self.world.step > 1:
            return self.forward_loss(model, part)
        with warnings.catch_warnings():
            # DDP says once that no parameter was unused; that is no fault here.
            warnings.filterwarnings("ignore", message=".*find_unused_parameters=True was specified")
            return self.forward_loss(model, part)

    def share_buffers(self) -> None:
        """Give every rank rank 0's buffers."""
        self._buffers.look()
        for buffer in self.model.buffers():
            self.world.broadcast(buffer)


class _FollowedBuffers:
    """Buffers that change in training and act in it: all ranks follow rank 0, as with PyTorch's own DDP.

    BatchNorm's running statistics only act in evaluation, so they are shared then. The others are found by looking,
    after the first step and at each evaluation, which have changed on any rank; constants (masks, positions) are never
    sent. Values are compared, since a version counter misses what kernels write.
    """

    def __init__(self, model: nn.Module, world: World) -> None:
        self._world = world
        self._unchanged: dict[tuple[nn.Module, str], torch.Tensor] = {}
        if world.size > 1:
            self._unchanged = {
                (module, name): buffer.clone()
                for module in model.modules()
                if not isinstance(module, nn.modules.batchnorm._NormBase)
                for name, buffer in module._buffers.items()
                if buffer is not None
            }
        self._changing: list[tuple[nn.Module, str]] = []
        self.looked = False

    def follow(self) -> None:
        """Take rank 0's values of those that are known to change."""
        for module, name in self._changing:
            buffer = module._buffers[name]
            if buffer is not None:
                self._world.broadcast(buffer)

    def look(self) -> None:
        """Find those that have changed; every rank calls this at the same time."""
        self.looked = True
        if not self._unchanged:
            return
        changed = [not _same(module._buffers[name], before) for (module, name), before in self._unchanged.items()]
        flags = torch.tensor(changed, dtype=torch.float32, device=self._world.device.torch)
        anywhere = self._world.all_reduce(flags).tolist()
        found = [place for place, times in zip(self._unchanged, anywhere, strict=True) if times]
        for place in found:
            del self._unchanged[place]
        self._changing += found


def _same(buffer: torch.Tensor | None, before: torch.Tensor) -> bool:
    return buffer is not None and buffer.shape == before.shape and torch.equal(buffer, before)
