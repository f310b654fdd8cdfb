"""``pp``: one process; each device holds a stage, some of the model's layers, and micro-batches overlap over them.

Any module goes, without tracing: each micro-batch's forward is ordinary Python, and takes turns on the stages as its
layers are called (`lockstep.pipelining`)::

    stage 0   F0 F1 F2 F3  .  . B0  . B1  . B2 B3
    stage 1    . F0 B0 F1 B1 F2 B2 F3 B3  .  .  .

m micro-batches are by definition those of ``single`` with ``accumulate=m``, and its numbers are ours: gradients are
summed in the order of micro-batches, running statistics move in it, each micro-batch draws from its own random stream.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import torch
from torch import nn

from lockstep.build import build_model
from lockstep.data import Batch, mixed
from lockstep.errors import StrategyError, nearest
from lockstep.forward import drops
from lockstep.job import Job
from lockstep.optimizer import build_optimizer
from lockstep.parallel import recompute
from lockstep.parallel.random import Streams, stream
from lockstep.pipelining.layers import Layers
from lockstep.pipelining.runner import Runner, refuse_mixed
from lockstep.pipelining.schedule import Schedule, gpipe, one_f_one_b
from lockstep.pipelining.stages import even_split, stage_of
from lockstep.step import Number, Step
from lockstep.strategies.strategy import DRAWS, Strategy
from lockstep.world import World

SCHEDULES: dict[str, Callable[[int, int], Schedule]] = {"gpipe": gpipe, "1f1b": one_f_one_b}


@dataclass(frozen=True)
class PP(Strategy):
    """Stages of layers on the devices of one process, micro-batches overlapped.

    Attributes:
        device_map: prefixes of names and their stages (see ``lockstep.pipelining.stages``); None finds one.
        microbatches: how many each accumulation part of a global batch is cut in.
        schedule: ``"1f1b"`` or ``"gpipe"``.
    """

    name: ClassVar[str] = "pp"
    summary: ClassVar[str] = "one process, a stage of layers per device; micro-batches overlap"
    good_for: ClassVar[str] = "models too large for one device, or of few large layers"
    processes: ClassVar[Literal["one", "one per device"]] = "one"
    splits_layers: ClassVar[bool] = True

    device_map: Mapping[str, int] | None = None
    microbatches: int = 4
    schedule: str = "1f1b"

    def __post_init__(self) -> None:
        if not isinstance(self.microbatches, int) or isinstance(self.microbatches, bool) or self.microbatches < 1:
            raise StrategyError(f"{self.name}: {self.microbatches!r} micro-batches: give a whole number from 1")
        if self.schedule not in SCHEDULES:
            raise StrategyError(
                f'{self.name}: there is no schedule "{self.schedule}": {nearest(self.schedule, list(SCHEDULES))}'
            )

    def parts(self, job: Job) -> int:
        """Micro-batches of a global batch."""
        return job.accumulate * self.microbatches

    def build(self, job: Job, world: World) -> Step:
        """Build the model, and put each layer on the device of its stage.

        Raises:
            StrategyError: this process is one of several, the map doesn't fit, a setting can't be kept.
        """
        if world.size > 1:
            raise StrategyError(f"{self.name} is one process for all devices, and this is one of {world.size}")
        if (why := refuse_mixed(world.devices)) is not None:
            raise StrategyError(f"{self.name}: {why}: use slots, or accelerators of one type")
        if job.sync_batchnorm and self.parts(job) > 1:
            raise StrategyError(
                f"{self.name}: sync_batchnorm would let no micro-batch go on before all have come to it: leave it out "
                "(BatchNorm then normalises each micro-batch, as single with accumulate does), or take mp"
            )
        if job.compile:
            raise StrategyError(
                f"{self.name}: compile, and layers that take turns: leave it out, or compile layers in the model itself"
            )
        world.splits_layers = True
        model = build_model(job, world, place=False)
        stages = len(world.devices)
        found = stage_of(model, self.device_map or even_split(model, stages), stages)
        layers = Layers(model, found, world.devices)
        return PPStep(model, build_optimizer(job, model), job, world, layers, self)

    def exceptions(self, job: Job, model: nn.Module, replicas: int) -> list[str]:
        """What micro-batches change, and fewer samples than there are micro-batches."""
        parts = self.parts(job)
        said = super().exceptions(job.having(accumulate=parts), model, 1)
        if parts > 1 and any(m.training for m in model.modules() if isinstance(m, nn.modules.batchnorm._BatchNorm)):
            said.append(f"BatchNorm normalises each micro-batch by itself, as single with accumulate={parts} does")
        if job.batch_size < parts:
            said.append(f"batches of {job.batch_size} samples are {job.batch_size} micro-batches, not {parts}")
        several = len({p.device for p in model.parameters()}) > 1
        if several and any(map(drops, model.modules())):
            said.append(DRAWS)
        return said


class PPStep(Step):
    """One model over several devices, and the one optimizer over its parameters."""

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        job: Job,
        world: World,
        layers: Layers,
        way: PP,
    ) -> None:
        super().__init__(model, optimizer, job, world)
        self._accumulate = way.parts(job)
        self.cuts_batch = self._accumulate > 1
        self._layers = layers
        self._runner = Runner(model, world, SCHEDULES[way.schedule])
        if world.device.is_slot:
            recompute.install()

    def gradients(self, batch: Batch) -> tuple[Number, Number]:
        """Gradients of total / size, summed over the micro-batches by autograd itself."""
        for p in self._parameters:
            p.grad = None
        streams = Streams()
        parts = [(number, part) for number, part in enumerate(batch.parts) if part.size]

        def begin(i: int) -> None:
            self.begin_part(parts[i][0])

        def forward(i: int) -> tuple[torch.Tensor, Number]:
            number, part = parts[i]
            with self._drawing(number, streams), self._layers.moving():
                return self.forward_loss(self.model, self.placed(part))

        def backward(i: int, made: tuple[torch.Tensor, Number]) -> tuple[Number, Number]:
            self.backward(made[0], 1 / batch.size)
            return self._at_home(made[0].detach()), self._at_home(made[1])

        total: Number = 0.0
        count: Number = 0
        for part_total, part_count in self._runner.run(begin, forward, backward, len(parts)):
            total = total + part_total
            count = count + part_count
        return total, count

    def _at_home(self, value: Number) -> Number:
        """A total or a count on the first device: the targets, and so a count of them, are not where the loss is."""
        if not isinstance(value, torch.Tensor) or not self._layers.moves:
            return value
        return value.to(self.world.device.torch, non_blocking=True)

    def _drawing(self, number: int, streams: Streams) -> AbstractContextManager[Any]:
        """The random stream of a micro-batch: the one that it has under ``single``."""
        if not self._runner.overlaps:
            return nullcontext()
        if self._stream is None:
            return stream(lambda: streams.generator(number))
        key = (*self._stream, number) if number else self._stream
        return stream(torch.Generator().manual_seed(mixed(*key)))

    def _seed_all(self, key: int) -> None:
        super()._seed_all(key)
        for device in self.world.devices[1:]:
            if device.type == "cuda":
                torch.cuda.default_generators[device.index].manual_seed(key)

    def _weight(self, size: int, count: Number) -> None:
        # Gradients are on several devices, the count is on one.
        super()._weight(size, float(count) if self._layers.moves and isinstance(count, torch.Tensor) else count)

    @contextmanager
    def evaluating(self) -> Iterator[None]:
        """As every step's; what meets on different devices is moved."""
        with super().evaluating(), self._layers.moving():
            yield
