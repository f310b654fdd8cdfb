"""``ddp``: a process per device, each with the whole model and a share of every batch.

Gradients that are many megabytes are averaged by PyTorch's ``DistributedDataParallel`` while
backward still runs. Small ones go in one flat all-reduce after it, which is faster: the time of a
small sum is nearly all waking up.

Ranks with an empty share call neither model nor loss. Every rank knows the size of the global
batch, so all know when that happens, and such a step is summed flat (PyTorch's reducer would wait
for the missing backward).
"""

from __future__ import annotations

import contextlib
import inspect
import os
import sys
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from lockstep.data import Batch, Part
from lockstep.errors import InputError, RunError, StrategyError
from lockstep.job import Job
from lockstep.launch.layout import Layout
from lockstep.launch.observer import phase
from lockstep.launch.world import World
from lockstep.model.build import buffers_of, build_model, differing_tensors
from lockstep.model.losses.loss import Loss, Number
from lockstep.model.optimizer import build_optimizer, is_of_pytorch, sparse_parameters
from lockstep.recipe import Recipe
from lockstep.strategies.rank_tensors import FlatGradients, FollowedBuffers, take_first
from lockstep.strategies.step_function.function_step import FunctionStep
from lockstep.strategies.steps.step import Step
from lockstep.strategies.steps.update_result import added, as_tensor, flattened, nested
from lockstep.strategies.strategy import Strategy
from lockstep.tensors.rows import share_sizes
from lockstep.threads.replica_collectives import RankExchange
from lockstep.threads.sync_batchnorm import end_forward, synchronise

_SMALL_GRADIENTS = 2 << 20
"""Bytes of gradients up to which ``reduce="auto"`` sums them flat (see benchmarks/)."""


_FORWARD_BUFFERS = (
    # torch 2.13 gave it a new name.
    "forward_sync_buffers"
    if "forward_sync_buffers" in inspect.signature(DistributedDataParallel.__init__).parameters
    else "broadcast_buffers"
)


@dataclass(frozen=True)
class DDP(Strategy):
    """Replicas in processes.

    Attributes:
        reduce: ``"flat"``: one all-reduce after backward; ``"overlapped"``: PyTorch's
            DistributedDataParallel, buckets while backward runs; ``"auto"`` takes flat for small
            gradients.
        bucket_mb: the size of an overlapped bucket, in MiB.
    """

    reduce: Literal["auto", "flat", "overlapped"] = "auto"
    bucket_mb: float = 25.0

    name: ClassVar[str] = "ddp"
    summary: ClassVar[str] = "a process per device, each with the whole model and a local batch"
    runs_functions: ClassVar[Literal[True]] = True
    good_for: ClassVar[str] = (
        "most models that fit on one device; the fastest exact strategy on several"
    )

    def layout(self, devices: int) -> Layout:
        """A local batch and a process for each device."""
        return Layout({"data": devices})

    def build(self, job: Recipe, world: World) -> Step:
        """Build the same model on every rank."""
        self.refuse_other_processes(world)
        model = build_model(job, world)
        self.refuse(model, world.size)
        exchange = synchronised(model, job, world)
        optimizer = build_optimizer(job, model)
        kind = DDPStep if job.step is None else DDPFunctionStep
        return kind(model, optimizer, job, world, exchange, self)


class DDPStep(Step):
    """One rank's replica."""

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        job: Recipe,
        world: World,
        exchange: RankExchange | None,
        strategy: DDP,
        *stages: Any,
    ) -> None:
        super().__init__(model, optimizer, job, world, *stages)
        self._exchange = exchange
        self._flat: FlatGradients | None = None
        large = _bytes(self._parameters) > _SMALL_GRADIENTS
        self._overlaps = world.size > 1 and (
            strategy.reduce == "overlapped" or (strategy.reduce == "auto" and large)
        )
        self._waits_in_backward = self._overlaps or exchange is not None
        self._bucket_mb = strategy.bucket_mb
        self._ddp: DistributedDataParallel | None = None
        self._noticed = False
        self._buffers = FollowedBuffers(model, world)

    def _follow_flags(self, name: str) -> None:
        if self.world.size > 1:
            what = "frozen" if not self._held[name].requires_grad else "trained"
            self.world.meet(f'a change of the model (parameter "{name}" is {what} now)')
        super()._follow_flags(name)
        self._flat = self._ddp = None

    def after_events(self) -> None:
        """Make sure that all ranks have the same parameters.

        Raises:
            RunError: a parameter has come to differ, since something but the optimizer wrote it.
        """
        drifted = differing_tensors(self.replicated(), self.world) if self.world.size > 1 else None
        if drifted is not None:
            raise RunError(
                f'parameter "{drifted}" is no longer the same on all ranks: not only the '
                "optimizer has written it",
                kind="drift",
                fix="don't write it in forward, in on_event, which runs on rank 0 only, or in a "
                "callback on some ranks "
                "only; don't convert or move the model (model.half(), model.cpu()), but a copy; "
                "an optimizer must not "
                "draw random numbers",
            )

    def replicated(self) -> Iterable[tuple[str, nn.Parameter]]:
        """The parameters that every rank has whole."""
        return self.model.named_parameters()

    def _overlapping(self, all_have_samples: bool) -> DistributedDataParallel | None:
        """PyTorch's DistributedDataParallel over the model, where this step is summed while
        backward runs.

        It always looks for unused parameters: without that, one that is unused in the last step
        gives wrong numbers and no error, and with large models the search costs nothing that can be
        measured.

        It is made anew after a step that was summed flat: its reducer goes on marking the
        parameters that such a step used, and fails in the next one that doesn't use them ("gradient
        which is undefined, but still allreduced", torch 2.13).
        """
        if not self._overlaps or not all_have_samples:
            self._ddp = None
            return None
        if self._ddp is None:
            self._ddp = DistributedDataParallel(
                _WithLoss(self),
                device_ids=None if self.world.device.is_slot else [self.world.device.index],
                init_sync=False,  # build_model has compared the ranks
                find_unused_parameters=True,
                # (Views would be written again by the next backward, and a person's code may keep
                # them.)
                gradient_as_bucket_view=not (self.own_loop or self.has_own_callbacks)
                and is_of_pytorch(self.optimizer),
                bucket_cap_mb=self._bucket_mb,
                # Buffers are followed here, only those that change: see FollowedBuffers.
                **{_FORWARD_BUFFERS: False},  # type: ignore[arg-type]
            )
            # It would divide by the number of ranks, and the sum is wanted.
            self._ddp.register_comm_hook(
                None, lambda _, bucket: _summed_over_ranks(bucket.buffer())
            )
        return self._ddp

    def _check_sums(self, batch: Batch) -> None:
        """Hold a batch to being the sum of its parts, outside of PyTorch's reducer."""
        if self.sums.is_due(self._updates):
            self._ddp = None  # it is made anew
        super()._check_sums(batch)

    def gradients(self, batch: Batch) -> Loss:
        """Gradients of total / size, summed over micro-batches and ranks."""
        for p in self._parameters:
            p.grad = None
        self._buffers.follow()
        world = self.world
        ddp = self._overlapping(all(part.of >= world.size for part in batch.parts))
        losses: list[Loss] = []
        for i, part in enumerate(batch.parts):
            if self._exchange is not None:
                self._exchange.begin(min(part.of, world.size))
            is_last = i == len(batch.parts) - 1
            if not part.size:
                continue
            self._begin_part(i)
            part = self.placed(part)
            self._reduces = ddp is not None and is_last
            with nullcontext() if ddp is None or is_last else ddp.no_sync():
                loss = self._forward(ddp, part, sums=is_last)
                losses.append(loss.detached())
                if self._exchange is not None and self.is_checked:
                    end_forward(self._exchange)
                self._add_gradient(loss.total, self._divisor(loss.count, batch.size))
        loss = added(losses)
        if ddp is not None:
            loss = self._summed(loss)
        elif world.size > 1:
            loss = self._summed_flat(loss)
        self._end_parts(batch)
        return loss

    def _end_parts(self, batch: Batch) -> None:
        """Give a rank that had no sample what forward wrote on the others, which a person may
        read; look for more.
        """
        if any(0 < part.of < self.world.size for part in batch.parts):
            self.share_buffers()
        elif self.is_checked:
            self._buffers.look()

    def bytes_communicated(self) -> int:
        """Its gradients, to be summed. How often they are sent for that is the backend's affair."""
        return _bytes(self._parameters) if self.world.size > 1 else 0

    def _refuse_gaps(self, here: list[bool]) -> None:
        if self._exchange is not None:
            raise InputError(
                f"sync_batchnorm: rank {here.index(False)} has no sample and a later rank has; "
                "give samples to the first ranks first, as lockstep.batches does"
            )

    @phase("communicating", "reduce")
    def _summed(self, loss: Loss) -> Loss:
        sums = self.world.all_reduce(as_tensor(self._beside(loss), self.world.device.torch))
        return self._taken(sums if self._on_accelerator else sums.tolist())

    def _beside(self, loss: Loss) -> list[Number]:
        """What is summed beside the gradients: who was asked to stop, total and count, those of
        each part.
        """
        parts = {name: loss.parts.get(name, (0.0, 0)) for name in self._names_of_parts(loss)}
        return [self.world.asked_to_stop(), *flattened([Loss(*loss, parts)])]

    def _taken(self, sums: Iterable[Number]) -> Loss:
        """What ``_beside`` gave, summed."""
        asked, *numbers = sums
        self._agree_to_stop(asked)
        return nested(iter(numbers), self._names_of_parts(Loss(0.0, 0)))

    @phase("communicating", "reduce")
    def _summed_flat(self, loss: Loss) -> Loss:
        beside = self._beside(loss)
        if self._flat is None:
            self._flat = FlatGradients(self._parameters, len(beside), sparse_parameters(self.model))
        return self._taken(self._flat.sum_over(self.world, beside))

    def _forward(self, ddp: DistributedDataParallel | None, part: Part, *, sums: bool) -> Loss:
        if ddp is None:
            return self._forward_loss(self.model, part)
        # The reducer says it once, in the first forward whose backward is summed.
        with (
            nullcontext()
            if self._noticed or not sums
            else _without_line("find_unused_parameters=True was specified")
        ):
            self._noticed = sums
            total, count = ddp(part)
            return Loss(total, count, ddp.module.parts)

    def _add_gradient(self, total: torch.Tensor, divisor: Number) -> None:
        """Add the gradient of ``total / divisor`` to every ``parameter.grad``.

        Raises:
            StrategyError: the model uses reentrant activation checkpointing, which PyTorch's
                reducer can't follow.
        """
        try:
            super()._add_gradient(total, divisor)
        except RuntimeError as error:
            if "Expected sparse gradient to be defined" in str(error):
                raise StrategyError(
                    "ddp: an embedding with sparse gradients was not used by this rank's local "
                    "batch, and PyTorch's "
                    "reducer can't sum gradients then",
                    fix="take DDP(reduce='flat')",
                ) from error
            if "mark a variable ready only once" not in str(error):
                raise
            raise StrategyError(
                "ddp: a checkpoint of activations in the model is reentrant, and gradients can't "
                "be summed while such "
                "a backward runs: call torch.utils.checkpoint with use_reentrant=False, or take "
                "DDP(reduce='flat')"
            ) from error

    def share_buffers(self) -> None:
        """Give every rank rank 0's buffers."""
        if self.world.size == 1:
            return
        self._buffers.look()
        take_first(self.world, buffers_of(self.model))


class DDPFunctionStep(FunctionStep, DDPStep):
    """A person's function of several updates, on one rank; gradients are summed flat in each of
    them.
    """

    def run_function(self, batch: Batch) -> None:
        """As on one device; buffers follow rank 0's."""
        self._buffers.follow()
        super().run_function(batch)
        if self.is_checked:
            self._buffers.look()


def synchronised(model: nn.Module, job: Recipe, world: World) -> RankExchange | None:
    """Let batch norms normalise over all ranks, where the job asks for that; what they exchange
    through.

    Raises:
        StrategyError: the model has PyTorch's ``SyncBatchNorm``, and the job doesn't ask for it.
    """
    own = next(
        (name for name, module in model.named_modules() if isinstance(module, nn.SyncBatchNorm)),
        None,
    )
    if own is not None and not job.sync_batchnorm and world.size > 1:
        raise StrategyError(
            f'"{own}" is a SyncBatchNorm of PyTorch\'s, whose ranks would wait for one that has '
            "no sample",
            fix="take sync_batchnorm=True, which has it normalise over all replicas under every "
            "strategy",
        )
    if not job.sync_batchnorm or world.size == 1:
        return None
    exchange = RankExchange(world)
    for parties in _sizes(job):
        exchange.make_group(parties)
    synchronise(model, exchange)
    return exchange


def _sizes(job: Recipe) -> list[int]:
    """Those of the micro-batches of a training, as far as its data are known."""
    if not isinstance(job, Job):
        return []
    last = len(job.train_data) % job.batch_size if hasattr(job.train_data, "__len__") else 0
    batches = [size for size in (job.batch_size, last) if size]
    return sorted(
        {size for batch in batches for size in share_sizes(batch, min(job.accumulate, batch))}
    )


def _summed_over_ranks(bucket: torch.Tensor) -> torch.futures.Future[torch.Tensor]:
    """The sum of a bucket of gradients over all ranks, to come."""
    work = torch.distributed.all_reduce(bucket, async_op=True)
    assert work is not None
    summed: torch.futures.Future[torch.Tensor] = work.get_future().then(
        lambda done: done.value()[0]
    )
    return summed


def _bytes(parameters: list[nn.Parameter]) -> int:
    return sum(p.nbytes for p in parameters)


class _WithLoss(nn.Module):
    """Model and loss as one module.

    DistributedDataParallel looks for used parameters from what its module gives. From a model's
    outputs it would find those of a head that the loss ignores too, and wait for them, and none
    behind outputs of a class of one's own.
    """

    def __init__(self, step: DDPStep) -> None:
        super().__init__()
        self.model = step.model
        self._step = step

    def forward(self, part: Part) -> tuple[torch.Tensor, Number]:
        loss = self._step._forward_loss(self.model, part)
        self.parts = loss.parts
        return loss.total, loss.count


@contextlib.contextmanager
def _without_line(words: str) -> Iterator[None]:
    """Leave out the lines with these words of what is written to standard error for a while.

    PyTorch's reducer says from C++, past Python's warnings, that no parameter was unused. That is
    no fault here.
    """
    sys.stderr.flush()
    with tempfile.TemporaryFile() as kept, contextlib.ExitStack() as stack:
        before = os.dup(2)
        stack.callback(os.close, before)
        os.dup2(kept.fileno(), 2)
        try:
            yield
        finally:
            sys.stderr.flush()
            os.dup2(before, 2)
            kept.seek(0)
            for line in kept.read().splitlines(keepends=True):
                if words.encode() not in line:
                    os.write(2, line)
