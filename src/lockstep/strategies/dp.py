"""``dp``: one process drives all devices; each has a replica of the model and a share of every
batch.

PyTorch's own DataParallel copies the model to every device at each step, gathers outputs on the
first device and leaves the loss there, and does nothing on CPU. Here replicas are kept, the loss
and backward run inside each replica's thread, and gradients are summed once, each thread adding a
part of the parameters::

    thread 0   forward  loss  backward  | adds parameters 0..k   |
    thread 1   forward  loss  backward  | adds parameters k..end |  one optimizer step
               (share 0, share 1)

On CPU slots all replicas share the storage of the parameters, with gradients of their own; on
accelerators they are refreshed once a step.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, ClassVar, TypeVar

import torch
from torch import nn

from lockstep.data import Batch, Part, mixed
from lockstep.data.own_batches import refuse_uncut
from lockstep.errors import StrategyError
from lockstep.launch.devices import Device
from lockstep.launch.layout import Layout
from lockstep.launch.observer import observed, phase
from lockstep.launch.world import World
from lockstep.model.attributes import follow_settings
from lockstep.model.build import buffers_of, build_model
from lockstep.model.hooks import hooks_of, structure_of
from lockstep.model.losses.loss import Loss, Number
from lockstep.model.modes import NORMS, draws_dropout
from lockstep.model.optimizer import build_optimizer
from lockstep.parallel import gather
from lockstep.recipe import Recipe
from lockstep.strategies.replicas import (
    add_gradients,
    even_spans,
    refuse_other_parameters,
    refuse_what_replicas_would_share,
    replica_of,
    shared_by_threads,
)
from lockstep.strategies.steps.evaluator import Evaluator
from lockstep.strategies.steps.step import Step
from lockstep.strategies.steps.update_result import added, summed
from lockstep.strategies.strategy import Strategy
from lockstep.tensors.placing import moved_in_buckets
from lockstep.tensors.pytree import to_device
from lockstep.tensors.rows import cut, share_sizes
from lockstep.tensors.seeding import seed_on
from lockstep.threads import recompute
from lockstep.threads.random_streams import stream
from lockstep.threads.replica_collectives import ThreadExchange
from lockstep.threads.sync_batchnorm import synchronise
from lockstep.threads.thread_pool import ThreadPool

T = TypeVar("T")


@dataclass(frozen=True)
class DP(Strategy):
    """Replicas on threads of one process."""

    name: ClassVar[str] = "dp"
    summary: ClassVar[str] = (
        "one process, a thread per device, each with the whole model and a local batch"
    )
    runs_functions: ClassVar[str] = "replicas on threads would each call it"
    good_for: ClassVar[str] = (
        "notebooks, and models of large operators; small layers wait for Python's interpreter lock"
    )

    def layout(self, devices: int) -> Layout:
        """Give each device a local batch, all in one process."""
        return Layout({"data": devices}, devices_per_process=devices)

    def build(self, job: Recipe, world: World) -> Step:
        """Build the model on the first device and a replica on each other."""
        self.refuse_other_processes(world)
        model = build_model(job, world)
        self.refuse(model, len(world.devices))
        if len(world.devices) > 1:
            refuse_what_replicas_would_share(model)
        exchange = None
        if job.sync_batchnorm and len(world.devices) > 1:
            shares_device = len(set(world.devices)) < len(world.devices)
            if shares_device and not world.device.is_slot:
                raise StrategyError(
                    "sync_batchnorm needs a device for each replica: on one they would wait forever"
                )
            exchange = ThreadExchange(len(world.devices), world.observers)
            synchronise(model, exchange)
        return DPStep(model, build_optimizer(job, model), job, world, exchange)


class ReplicaEvaluator(Evaluator):
    """Evaluates a model with a replica on each device, each with a share of the batch."""

    _step: DPStep

    def results(self, batch: Batch) -> list[tuple[Any, Any, Loss]]:
        """Give outputs, targets and loss of each replica, on the first device."""
        first = self._step.world.device.torch
        found = []
        for outputs, targets, loss in super().results(batch):
            found.append((to_device(outputs, first), to_device(targets, first), loss))
        return found

    def of_each(
        self, function: Callable[[nn.Module, Part], T], batch: Batch
    ) -> list[tuple[Part, T]]:
        """Call a function for each replica that has samples of a batch, in its thread."""
        parts = [share[0] for share in self._step._scatter(batch)]

        def compute(i: int) -> tuple[Part, T]:
            with stream(self._step._streams[i] if self._step._streams else None):
                return parts[i], function(self._step._replicas[i], parts[i])

        work: list[Callable[[], tuple[Part, T]] | None] = [None] * len(parts)
        for i, part in enumerate(parts):
            if part.size:
                work[i] = functools.partial(compute, i)
        return [result for result in self._step._team.run(work) if result is not None]

    def gathered(self, part: Part) -> tuple[Any, Loss]:
        """Gather outputs on the first device, and add up the losses of all replicas."""
        results = self.results(Batch([part], part.size, 0, 0, None))
        outputs = [result[0] for result in results]
        loss = added([result[2] for result in results], self._step._summed)
        if len(outputs) == 1:
            return outputs[0], loss
        return gather(outputs, self._step._devices[0]), loss


class DPStep(Step):
    """All replicas, their threads, and the one optimizer over the first replica's parameters."""

    timed = "replica"
    _evaluator_kind = ReplicaEvaluator

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        job: Recipe,
        world: World,
        exchange: ThreadExchange | None,
    ) -> None:
        super().__init__(model, optimizer, job, world)
        self._exchange = exchange
        self._waits_in_backward = exchange is not None
        self._devices = world.devices
        self._on_slots = all(device.is_slot for device in world.devices)
        self._shares_parameters = self._on_slots
        self._replicas = [model]
        for device in world.devices[1:]:
            self._replicas.append(replica_of(model, device, shares=self._on_slots))
        self._find_trained()
        self._modules = [list(replica.modules()) for replica in self._replicas]
        self._every_parameter = [list(replica.parameters()) for replica in self._replicas]
        self._structure = structure_of(model)
        self._buffers = [buffers_of(replica) for replica in self._replicas]
        self._team = ThreadPool(world.devices)
        if exchange is not None:
            self._team.on_abort.append(exchange.abort)
        self._streams = [torch.Generator() for _ in world.devices] if self._on_slots else []
        self._recomputes = job.activation_checkpointing is not None
        recompute.install()
        self._begin_streams(job.seed, world.step)
        if len(world.devices) > 1:
            self.loss.call_one_at_a_time()

    def _find_trained(self) -> None:
        super()._find_trained()
        # There are none before they are made.
        replicas: list[nn.Module] = self.__dict__.get("_replicas", [])
        self._trained: list[list[nn.Parameter]] = []
        for replica in replicas:
            named = dict(replica.named_parameters())
            for name, p in self._held.items():
                named[name].requires_grad_(p.requires_grad)
            self._trained.append([named[name] for name in self._names])
        self._spans = even_spans(self._parameters, max(1, len(replicas)))

    def bytes_communicated(self) -> int:
        """The gradients of a replica, or the parameters that the first accelerator gives."""
        if self.replicas == 1:
            return 0
        gradients = sum(p.nbytes for p in self._parameters)
        if self._on_slots:
            return gradients
        parameters = sum(p.nbytes for p in self.model.parameters())
        return max(gradients, (self.replicas - 1) * parameters)

    def seed(self, seed: int, number: int | None = None) -> None:
        """Begin a random stream for this step (or that number) on every replica."""
        super().seed(seed, number)
        self._begin_streams(seed, self.world.step if number is None else number)

    def _begin_streams(self, seed: int, number: int) -> None:
        for i in range(self.replicas):
            self._seed_replica(i, mixed(seed, number, i))

    def _seed_replica(self, i: int, key: int) -> None:
        device = self._devices[i]
        if self._streams:
            self._streams[i].manual_seed(key)
        elif not device.is_slot:
            seed_on(device.torch, key)

    def _follow_modes(self) -> None:
        """Give replicas that share the first one's parameters its mode."""
        if self._shares_parameters:
            self._follow_settings()

    def gradients(self, batch: Batch) -> Loss:
        """Sum gradients of total / size over micro-batches and replicas.

        Raises:
            StrategyError: the loss wrote to a tensor that another thread's backward needed.
        """
        self._refresh()
        shares = self._scatter(batch)
        active = [i for i, share in enumerate(shares) if any(part.size for part in share)]
        work: list[Callable[[], Loss] | None] = [None] * len(shares)
        for i in active:
            work[i] = functools.partial(self._on_replica, i, shares[i], batch.size)
        if self._exchange is not None:
            parties = []
            for parts in zip(*shares, strict=True):
                parties.append(max(1, sum(part.size > 0 for part in parts)))
            self._exchange.begin(parties)

        try:
            losses = [loss for loss in self._team.run(work) if loss is not None]
        except RuntimeError as error:
            why = shared_by_threads(error, self.loss) if self.replicas > 1 else None
            if why is None:
                raise
            raise why from error
        self._add_gradients(active)
        return added(losses, self._summed)

    def _check_sums(self, batch: Batch) -> None:
        """Hold a batch to being the sum of its parts, in updates that are checked.

        Raises:
            StrategyError: it isn't, or checkpointed blocks draw random numbers that threads share.
        """
        super()._check_sums(batch)
        if self._recomputes and self.sums.draws_elsewhere:
            raise StrategyError(
                "dp: activation_checkpointing, and the model draws from Python's or numpy's random "
                "in forward, which all threads share, so a block can't draw the same again: draw "
                "from torch, or take ddp"
            )

    def _compile_models(self) -> None:
        """Compile each replica.

        Raises:
            StrategyError: the model draws random numbers, and what compiled code draws can't be
                told apart by thread.
        """
        if self._compile and self._on_slots:
            draws = self.sums.draws or any(map(draws_dropout, self.model.modules()))
            if self.replicas > 1 and draws:
                raise StrategyError(
                    "dp: compile, and the model draws random numbers (dropout): compiled code "
                    "takes them from one generator for all threads, in an order left to chance; "
                    "take ddp, or leave compile or dropout out"
                )
            self._streams = []  # compiled code can't draw from them
        super()._compile_models()

    def placed(self, part: Part, device: Device | None = None) -> Part:
        """Give the part on a replica's device; None is that of the first replica."""
        return super().placed(part, device or self._devices[0])

    @phase("communicating", "scatter")
    def _scatter(self, batch: Batch) -> list[list[Part]]:
        """Give each replica its share of each micro-batch, on its device.

        Shares are even, so that no device waits long for another.
        """
        if batch.shares is not None:
            shares = batch.shares
        else:
            cuts = [_even_shares(part, len(self._devices)) for part in batch.parts]
            shares = [list(share) for share in zip(*cuts, strict=True)]

        placed = []
        for device, share in zip(self._devices, shares, strict=True):
            placed.append([self.placed(part, device) if part.size else part for part in share])
        return placed

    @observed(lambda observer, step, number, *args: observer.replica(number))
    def _on_replica(self, i: int, parts: list[Part], size: int) -> Loss:
        """Compute forward, loss and backward of one replica's shares, in the replica's thread."""
        for p in self._trained[i]:
            p.grad = None
        where = f"replica {i} ({self._devices[i]})"
        losses: list[Loss] = []
        with stream(self._streams[i] if self._streams else None):
            for j, part in enumerate(parts):
                if not part.size:
                    continue
                if self._exchange is not None:
                    self._exchange.enter(i, j)
                numbers = self.draws.stream
                if j and numbers is not None:
                    self._seed_replica(i, mixed(*numbers[:2], i, j))
                loss = self._forward_loss(self._replicas[i], part, where)
                if i and self.is_checked:
                    refuse_other_parameters(loss.total, self.model)
                self._add_gradient(loss.total, self._divisor(loss.count, size))
                losses.append(loss.detached())
                if self._exchange is not None:
                    self._exchange.leave(i, j)
        return added(losses)

    @phase("communicating", "reduce")
    def _add_gradients(self, active: list[int]) -> None:
        """Sum the replicas' gradients into the first one's.

        On CPU devices each thread sums a span of the parameters.
        """
        if 0 not in active:
            for p in self._parameters:
                p.grad = None
        others = [i for i in active if i > 0]
        if not others:
            return
        if not self._on_slots:
            self._add_span(0, len(self._parameters), others)
            return
        self._team.run(
            [functools.partial(self._add_span, start, end, others) for start, end in self._spans]
        )

    def _add_span(self, start: int, end: int, others: list[int]) -> None:
        theirs = [self._trained[i][start:end] for i in others]
        place = None if self._on_slots else self._devices[0].torch
        add_gradients(self._parameters[start:end], theirs, place)

    @phase("communicating", "refresh replicas")
    @torch.no_grad()
    def _refresh(self) -> None:
        """Make every replica equal to the first before a step.

        Raises:
            StrategyError: the model has other modules, parameters or hooks than when the replicas
                were made.
        """
        if self.is_checked and structure_of(self.model) != self._structure:
            if not self._have_changed_alike():
                raise StrategyError(
                    "dp: modules, parameters or hooks of the model have changed since its replicas "
                    "were made: call lockstep.parallelize again, or take ddp"
                )
            self._structure = structure_of(self.model)
        self._follow_settings()
        self._share_parameters()

    def _have_changed_alike(self) -> bool:
        """Whether forward has put the same hooks into each replica, say in its first call."""
        now = [*self.model.modules(), *self.model.parameters()]
        before = [*self._modules[0], *self._every_parameter[0]]
        if list(map(id, now)) != list(map(id, before)):
            return False
        hooks = hooks_of(self.model)
        return all(hooks_of(replica) == hooks for replica in self._replicas[1:])

    def _follow_settings(self) -> None:
        for modules in self._modules[1:]:
            follow_settings(modules, self._modules[0])
        acting = []
        for number, (module, _) in enumerate(self._buffers[0]):
            # Running statistics act in evaluation only, so they may differ in training.
            if not (isinstance(module, NORMS) and module.training):
                acting.append(number)
        self._copy_buffers(acting)

    def _share_parameters(self) -> None:
        """Give every replica the first one's parameters."""
        mine, *others = self._every_parameter
        for device, theirs in zip(self._devices[1:], others, strict=True):
            if not self._shares_parameters:
                for some, copies in moved_in_buckets(mine, device.torch):
                    torch._foreach_copy_([theirs[k] for k in some], copies)
                continue
            for p, q in zip(mine, theirs, strict=True):
                if p.data_ptr() != q.data_ptr():  # somebody gave the parameter other storage
                    q.data = p.data

    @torch.no_grad()
    def share_buffers(self) -> None:
        """Give every replica the first one's buffers, and parameters that may have changed."""
        self._follow_settings()
        self._share_parameters()
        self._copy_buffers(range(len(self._buffers[0])))

    @torch.no_grad()
    def _copy_buffers(self, which: Iterable[int]) -> None:
        # Always: batch norm's own kernels write without changing a buffer's version.
        for k in which:
            module, name = self._buffers[0][k]
            value = module._buffers[name]
            assert value is not None
            for device, theirs in zip(self._devices[1:], self._buffers[1:], strict=True):
                other, _ = theirs[k]
                target = other._buffers[name]
                if target is not None and target.shape == value.shape:
                    target.copy_(value, non_blocking=True)
                else:
                    other._buffers[name] = value.clone().to(device.torch)

    def models(self) -> list[nn.Module]:
        """Give every replica, the first one first."""
        return self._replicas

    def _summed(self, values: list[Number]) -> Number:
        """Sum numbers on the first device."""
        first = self._devices[0].torch
        moved = []
        for value in values:
            if isinstance(value, torch.Tensor):
                value = value.to(first, non_blocking=True)
            moved.append(value)
        return summed(moved)


def _even_shares(part: Part, number: int) -> list[Part]:
    """Cut a micro-batch into so many shares, which may be empty."""
    refuse_uncut(part.inputs, part.targets, part.size)
    shares = []
    start = 0
    for size in share_sizes(part.size, number):
        inputs = targets = None
        if size:
            inputs, targets = cut((part.inputs, part.targets), start, size, part.size)
        shares.append(Part(inputs, targets, size, part.of))
        start += size
    return shares
