"""What a strategy is: its name, its settings, how many processes it wants, and how it builds a Step."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields
from typing import Any, ClassVar, Literal

from torch import nn

from lockstep.build import hooked_parameters
from lockstep.errors import StrategyError
from lockstep.forward import drops
from lockstep.job import Job
from lockstep.step import Step
from lockstep.world import World

DRAWS = "dropout draws other masks than one device would; they are as random, and the same in each run"


@dataclass(frozen=True)
class Strategy(ABC):
    """A way to train on several devices. Its dataclass fields are its settings.

    Attributes:
        name: the one word that a person gives.
        summary: what each device holds, in a few words, for tables.
        processes: one that drives all devices, or one per device.
        splits_layers: each device holds a part of the model, not of the batch.
        exact: True, or the reason why its numbers are not those of one device.
    """

    name: ClassVar[str]
    summary: ClassVar[str]
    good_for: ClassVar[str]
    processes: ClassVar[Literal["one", "one per device"]]
    splits_layers: ClassVar[bool] = False
    exact: ClassVar[Literal[True] | str] = True

    @classmethod
    def choices(cls) -> set[str]:
        """The names of its settings that can have other values than the usual one."""
        return {field.name for field in fields(cls)}

    @abstractmethod
    def build(self, job: Job, world: World) -> Step:
        """Build the model, the optimizer and what moves between the devices of this world.

        Raises:
            JobError: the model or the optimizer can't be built.
            StrategyError: this strategy can't keep the numbers of this job.
        """

    def planned(self, job: Job, world: World, before: Mapping[str, Any] | None = None) -> Strategy:
        """This strategy, with what it leaves open settled for a job on these devices; told in a line.

        Args:
            job: with its data.
            world: this process's.
            before: the settings of this strategy with which a run went that is taken up; None begins one.
        """
        return self

    def parts(self, job: Job) -> int:
        """How many micro-batches a global batch is cut in."""
        return job.accumulate

    def refuse(self, model: nn.Module, replicas: int) -> None:
        """Refuse what is known to be wrong on several devices.

        Raises:
            StrategyError: with what to do instead.
        """
        if replicas == 1:
            return
        for name, module in _embeddings(model):
            if module.max_norm is not None:
                raise StrategyError(
                    f'{self.name}: "{name}" has max_norm, which rewrites weights in forward, on each device others: '
                    "use single, or normalise in a parametrization"
                )
            if module.scale_grad_by_freq:
                raise StrategyError(
                    f'{self.name}: "{name}" has scale_grad_by_freq, which divides gradients by how often a word is in '
                    "the batch, and each replica sees its local batch only: use single or mp, or leave it out"
                )

    def refuse_one_process(self, world: World) -> None:
        """Refuse several devices in one process, where each is to have its own.

        Raises:
            StrategyError: with how to start them.
        """
        if world.size == 1 and len(world.devices) > 1:
            raise StrategyError(
                f"{self.name} wants a process for each of the {len(world.devices)} devices, and this is one process: "
                "start it with lockstep.launch(...) or torchrun, or use dp"
            )

    def exceptions(self, job: Job, model: nn.Module, replicas: int) -> list[str]:
        """Where the numbers will not be those of one device, a line each, with what would keep them."""
        said: list[str] = [] if self.exact is True else [self.exact]
        parts = replicas * job.accumulate
        if parts > 1:
            norms = [m for m in model.modules() if isinstance(m, nn.modules.batchnorm._BatchNorm)]
            if any(m.training or not m.track_running_stats for m in norms) and not job.sync_batchnorm and replicas > 1:
                said.append(
                    "BatchNorm normalises over the share of each replica, not over what one device would see: "
                    "sync_batchnorm keeps the numbers"
                )
            if any(not m.track_running_stats for m in norms) and job.sync_batchnorm and replicas > 1:
                said.append("BatchNorm without running statistics normalises over the share in evaluation")
            instances = [m for m in model.modules() if isinstance(m, nn.modules.instancenorm._InstanceNorm)]
            if any(m.track_running_stats for m in instances):
                said.append("InstanceNorm's running statistics are those of the first replica's shares")
        if parts > 1 and any(module.scale_grad_by_freq for _, module in _embeddings(model)):
            said.append(
                "scale_grad_by_freq divides gradients by how often a word is in a micro-batch, not in the whole batch"
            )
        if parts > 1 and hooked_parameters(model):
            said.append("hooks on parameters see the gradient of a share, before it is summed and weighted")
        if replicas > 1 and job.collate is not None:
            said.append(
                "collate puts together the share of each device, not the whole batch: padding and mixing "
                "(and a count that includes padding) follow the share"
            )
        if replicas > 1 and any(drops(m) for m in model.modules()):
            said.append(DRAWS)
        return said


def _embeddings(model: nn.Module) -> Iterator[tuple[str, nn.Embedding | nn.EmbeddingBag]]:
    for name, module in model.named_modules():
        if isinstance(module, nn.Embedding | nn.EmbeddingBag):
            yield name, module
