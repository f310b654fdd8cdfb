"""Evaluation: the loss and the metrics over a dataset, each sample counted once, on any number
of devices.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from typing import Any

import torch

from lockstep.data import AnyLoader, Batch
from lockstep.errors import JobError
from lockstep.job import Job
from lockstep.launch.events import Caveat
from lockstep.launch.world import World
from lockstep.model.losses.loss import Loss
from lockstep.model.snapshot import Snapshot
from lockstep.strategies.steps.step import Step
from lockstep.strategies.steps.update_result import Result, Sums, added
from lockstep.tensors.seeding import kept_states
from lockstep.training.metrics.job_metrics import JobMetrics, functions_of

_COLLATES = Caveat(
    "collate",
    "collate is given each device's local batch, so outputs that depend on how far it pads, or on "
    "the other samples, "
    "differ from those of one device",
)

_LARGEST = 2**30
"""Bytes of parameters up to which the trial evaluation keeps them: an embedding with ``max_norm``
writes its weight.
"""


def say_what_collates(job: Job, step: Step) -> None:
    """Say what a collate is given where devices evaluate, or predict, a local batch each."""
    if job.collate is not None and step.replicas > 1 and step.world.is_first:
        step.tell_once([_COLLATES])


def try_out(
    step: Step,
    loaders: Mapping[str, AnyLoader],
    metrics: Mapping[str, Any],
    world: World,
    seed: int,
) -> dict[str, float]:
    """Evaluate the first batch of each set, so that what is wrong with it isn't found an epoch
    later.

    What the model, the loss and the metrics count or keep is afterwards as it was. Gives the
    values, by the names in a record.

    Raises:
        JobError: a metric raises, or gives something other than a total and a count; a sample isn't
            a pair.
    """
    beside = [step.loss.loss, *functions_of(metrics).values()]
    size = sum(p.nbytes for p in step.model.parameters())
    # (Ranks that don't meet share their parameters, and another one may train by now.)
    keeps_parameters = size <= _LARGEST and step.together and not step.layout.keeps_shards
    snapshots = [
        Snapshot(model, beside, step.accelerators, parameters=keeps_parameters)
        for model in step.models()
    ]
    values = dict[str, float]()
    try:
        if loaders:
            values = evaluate_sets(
                step, loaders, metrics, world, seed, checks=True, most=1, prefix="eval_"
            )
    finally:
        for snapshot in snapshots:
            snapshot.put_back()
    return values


def evaluate_sets(
    step: Step,
    loaders: Mapping[str, AnyLoader],
    metrics: Mapping[str, Any],
    world: World,
    seed: int,
    *,
    checks: bool = False,
    most: int | None = None,
    prefix: str = "",
) -> dict[str, float]:
    """The loss, its parts and each metric of each set, as ``"clean/loss"``, after the first one's
    loss as ``"loss"``.

    A set whose name is "" is the only one: its loss and parts have the ``prefix`` before their
    names, its metrics have their own. The rest is as in ``evaluate``.
    """
    found = {
        name: evaluate(
            step,
            loader,
            metrics,
            world,
            seed,
            checks=checks,
            most=most,
            prefix="" if name else prefix,
        )
        for name, loader in loaders.items()
    }
    if "" in found:
        return found[""]
    values = {
        f"{name}/{metric}": value
        for name, values in found.items()
        for metric, value in values.items()
    }
    return {f"{prefix}loss": next(iter(values.values())), **values}


class Evaluations:
    """The evaluations of one training."""

    def __init__(self, job: Job, step: Step, loaders: Mapping[str, AnyLoader]) -> None:
        self._job = job
        self._step = step
        self._loaders = loaders
        self._at: int | None = None
        self._found: dict[str, float] = {}

    @property
    def is_done(self) -> bool:
        """Whether this step was evaluated."""
        return self._at == self._step.world.step

    def forget(self) -> None:
        """Of this step, evaluated or not, the weights may have changed."""
        self._at = None if self._at is None else -1

    def make(self) -> dict[str, float]:
        """The loss and the metrics of each set at this step, computed once; empty where there
        are no sets.
        """
        if self._loaders and not self.is_done:
            job, world, checks = self._job, self._step.world, self._at is None
            self._found = evaluate_sets(
                self._step,
                self._loaders,
                job.metrics,
                world,
                job.seed,
                checks=checks,
                prefix="eval_",
            )
            self._at = world.step
        return self._found


def evaluate(
    step: Step,
    loader: AnyLoader,
    metrics: Mapping[str, Any],
    world: World,
    seed: int,
    *,
    checks: bool = False,
    most: int | None = None,
    prefix: str = "",
) -> dict[str, float]:
    """The mean loss (``"loss"``), that of each of its parts by their names, and each metric over
    all samples.

    The values are the same on every rank.

    Args:
        step: the model under its strategy.
        loader: this rank's shares of the evaluation set.
        metrics: by name, functions ``(outputs, targets) -> (total, count)``, or torchmetrics
            ``Metric`` objects, which are updated on each rank and merged on all.
        world: who evaluates.
        seed: gives each batch a random stream, the same in each evaluation, for models that draw in
            evaluation too.
        checks: whether to hold the loss and the metrics of batches 1, 2, 4, ... to being the sums
            of those of their parts.
        most: batches, at most.
        prefix: before the names of the loss and its parts.

    Raises:
        JobError: a metric raises, or gives something else, or has the name of a part of the loss.
    """
    its = JobMetrics(metrics, step, checks=checks)
    losses = Sums()

    def checked() -> Iterator[Batch]:
        for batch in itertools.islice(loader.epoch(0), most):
            if checks:
                step.sums.check_evaluation(batch, its.totals)
            yield batch

    with step.evaluating(), kept_states():
        for batch, results in step.over(checked(), step.results, seed):
            world.beat()
            for outputs, targets, loss in results:
                losses.add(Result(*loss, batch.size, loss.parts))
                its.add(batch, outputs, targets)
    step.tell_of_loss()
    here = losses.read()
    mine = [(*here, float(len(here.parts))), *its.sums()]
    summed = world.all_reduce(
        torch.tensor(mine, dtype=torch.float64, device=world.exchange_device)
    ).tolist()
    parts = (
        added(world.gather_objects(here)).parts if summed[0][2] else {}
    )  # some rank has parts: all ask for them
    if both := next((name for name in parts if name in metrics), None):
        raise JobError(
            f'metrics: "{both}" is the name of a part of the loss too: give one of them another '
            "name"
        )
    return {
        **Loss(summed[0][0], summed[0][1], parts).means(prefix),
        **its.values(summed[1:], world),
    }
