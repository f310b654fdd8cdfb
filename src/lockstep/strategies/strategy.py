"""Strategy: a name, settings, how many processes it wants, and how it builds a Step."""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, ClassVar, Literal

from torch import nn

from lockstep.data import AnyLoader, job_loader
from lockstep.data.job_loaders import OF_COLLATE
from lockstep.errors import StrategyError, counted
from lockstep.job import Job
from lockstep.launch.layout import Layout
from lockstep.launch.memory import reset_peak_memory
from lockstep.launch.world import World
from lockstep.model.compile import refuse_graphs
from lockstep.model.modes import draws_dropout, is_spectral_norm
from lockstep.recipe import Recipe
from lockstep.run.events import Caveat
from lockstep.settings import described_fields
from lockstep.strategies.steps.step import Step

DRAWS = Caveat("dropout", "dropout masks differ from single-device training; they are reproducible")


@dataclass(frozen=True)
class Strategy(ABC):
    """A way to train on several devices. Its dataclass fields are its settings.

    Attributes:
        name: the one word that a person gives.
        summary: what each device holds, in a few words, for tables.
        exact: True, or the reason why its numbers are not those of one device.
        runs_functions: True, or the reason why it can't train a job with ``step``.
    """

    name: ClassVar[str]
    summary: ClassVar[str]
    good_for: ClassVar[str]
    exact: ClassVar[Literal[True] | str] = True
    runs_functions: ClassVar[Literal[True] | str] = "it doesn't define an update of several losses"

    def __post_init__(self) -> None:  # noqa: B027
        """Refuse settings that are impossible."""

    @classmethod
    def usual(cls) -> dict[str, Any]:
        """Return the usual value of each setting."""
        return {field.name: field.default for field in fields(cls)}

    @classmethod
    def choices(cls) -> set[str]:
        """Return the names of the settings that can have other values than the usual one."""
        return set(cls.usual())

    @classmethod
    def settings(cls) -> dict[str, str]:
        """Return the settings that a command line has, with what the class's docstring says of
        each.
        """
        texts = described_fields(cls)
        choices = cls.choices()
        found = {}
        for field in fields(cls):
            is_word = not re.search("Mapping|tuple", str(field.type))
            if is_word and field.name in choices:
                found[field.name] = texts.get(field.name, "")
        return found

    @abstractmethod
    def layout(self, devices: int) -> Layout:
        """Give the mesh that this strategy lays over a number of devices."""

    @property
    def devices_needed(self) -> int | None:
        """How many devices the strategy is for; None is any number."""
        return None

    @property
    def devices_per_rank(self) -> int:
        """How many devices each process drives, where there are several processes."""
        return 1

    def mesh(self, devices: Sequence[str]) -> list[str]:
        """Describe in lines who holds what, and who reads what; none where the name is enough.

        Args:
            devices: the names of all devices.
        """
        return []

    @property
    def in_one_process(self) -> bool:
        """Whether one process drives all devices, however many there are."""
        return self.layout(self.devices_needed or 2).processes == 1

    def prepare(self, job: Recipe, world: World) -> Step:
        """Lay out the devices, and build what trains on them.

        Raises:
            LockstepError: as ``build``.
        """
        self.refuse_function(job)
        world.layout = self.layout(world.size * len(world.devices))
        step = self.build(job, world)
        refuse_graphs(job, world)
        reset_peak_memory(world)
        return step

    @abstractmethod
    def build(self, job: Recipe, world: World) -> Step:
        """Build the model, the optimizer and what moves between the devices of this world.

        Raises:
            JobError: the model or the optimizer can't be built.
            StrategyError: this strategy can't keep the numbers of this job.
        """

    def planned(self, job: Job, world: World, before: Mapping[str, Any] | None = None) -> Strategy:
        """Settle what this strategy leaves open for a job on these devices, and log it.

        Args:
            job: the job, with its data.
            world: of this process.
            before: the settings that a run had which is resumed; None begins one.
        """
        return self

    def num_microbatches(self, job: Recipe) -> int:
        """Return how many micro-batches a global batch is cut into."""
        return job.accumulate

    def training_loader(self, job: Job, world: World, dataset: Any) -> AnyLoader:
        """Make the loader of a training's batches, cut into this strategy's micro-batches."""
        return job_loader(job.replace(accumulate=self.num_microbatches(job)), world, dataset)

    def refuse_function(self, job: Recipe) -> None:
        """Refuse a job with ``step``, where this strategy can't train one.

        Raises:
            StrategyError: it can't; the message has the reason.
        """
        if job.step is not None and self.runs_functions is not True:
            raise StrategyError(
                f"{self.name} can't train a job with step=: {self.runs_functions}; take single or "
                "ddp"
            )

    def refuse_other_processes(self, world: World) -> None:
        """Refuse devices in other processes than the layout has.

        Raises:
            StrategyError: they are; the message has how to start the processes.
        """
        wanted = world.layout.processes
        each = world.layout.devices_per_process
        if wanted == 1 < world.size:
            raise StrategyError(
                f"{self.name} is one process for all devices, and this is one of {world.size}: "
                "take ddp"
            )
        if wanted != world.size:
            raise StrategyError(
                f"{self.name} needs {counted(wanted, 'process', 'es')} with {counted(each, 'device')} "
                f"each, and there are {world.size} with {len(world.devices)}: start them with "
                f"lockstep.launch(..., devices={world.layout.devices}, devices_per_rank={each}) or "
                "torchrun, or use dp"
            )

    def caveats(self, job: Recipe, model: nn.Module, replicas: int) -> list[Caveat]:
        """Say where results will differ from single-device training."""
        found: list[Caveat] = []
        if self.exact is not True:
            found.append(Caveat("declared", self.exact))
        if replicas * job.accumulate == 1:
            return found

        found += _of_norms(job, model, replicas)
        if isinstance(job, Job) and job.collate is not None:
            what = "each device's local batch" if replicas > 1 else "each micro-batch"
            found.append(Caveat("collate", f"collate gets {what}, {OF_COLLATE}"))
        if any(map(draws_dropout, model.modules())):
            found.append(DRAWS)
        return found


def _of_norms(job: Recipe, model: nn.Module, replicas: int) -> Iterator[Caveat]:
    """Say what layers normalize over, where a batch is cut."""
    norms = [m for m in model.modules() if isinstance(m, nn.modules.batchnorm._BatchNorm)]
    bare = any(not norm.track_running_stats for norm in norms)
    trains = any(norm.training for norm in norms)
    if replicas > 1 and not job.sync_batchnorm and (trains or bare):
        if job.step is None:
            fix = "sync_batchnorm=True (under dp, ddp and fsdp) keeps the results"
        else:
            fix = "a step function can't synchronise it: GroupNorm, say, normalizes each sample"
        text = "BatchNorm normalizes over each replica's local batch, not over the global batch"
        yield Caveat("batchnorm", text, fix)
    elif trains and job.accumulate > 1:
        text = "BatchNorm normalizes over each micro-batch, not over the global batch"
        yield Caveat("batchnorm", text)

    has_spectral_norm = any(map(is_spectral_norm, model.modules()))
    if has_spectral_norm and job.accumulate > 1:
        text = "a spectral norm iterates once per micro-batch, not once per batch"
        yield Caveat("buffer", text, "whole batches keep the results")
