"""Evaluation: the loss and the metrics over a dataset, each sample counted once, on any number
of devices.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
from collections.abc import Iterator, Mapping
from typing import Any

import torch

from lockstep.data import AnyLoader, Batch
from lockstep.errors import JobError
from lockstep.job import Job
from lockstep.launch.events import Caveat
from lockstep.launch.world import World
from lockstep.model.inspection import kept_state
from lockstep.model.losses.check_interval import is_power_of_two
from lockstep.model.losses.loss import Loss
from lockstep.strategies.steps.evaluation_look import look_at_evaluation
from lockstep.strategies.steps.step import Step
from lockstep.strategies.steps.update_result import Result, Sums, added
from lockstep.tensors.seeding import kept_states
from lockstep.training.metrics.job_metrics import JobMetrics, functions_of

_LARGEST = 2**30
"""Bytes of parameters up to which they are kept for the trial evaluation."""


_COLLATES = Caveat(
    "collate",
    "collate is given each device's local batch, so outputs that depend on how far it pads, or on "
    "the other samples, "
    "differ from those of one device",
)


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
    with kept_state([*step.models(), *functions_of(metrics).values()]), step.loss.kept():
        with _kept_parameters(step):
            # The check of a loss has to know what outputs are, and threads what they can't compute
            # at once; else the first evaluation looks at the model.
            looks = not step.loss.is_known or world.data.local_batches > 1
            values = dict[str, float]()
            if loaders:
                values = evaluate_sets(
                    step, loaders, metrics, world, seed, looks=looks, most=1, prefix="eval_"
                )
        step.compare_ranks(step.eval_check)
    return values


@contextlib.contextmanager
def _kept_parameters(step: Step) -> Iterator[None]:
    """Put back afterwards what forward writes in evaluation mode, an embedding with ``max_norm``
    say.
    """
    of_models = (
        () if step.keeps_shards else (p for model in step.models() for p in model.parameters())
    )
    every = {id(p): p for p in (*step.parts().values(), *of_models)}.values()
    is_small = sum(p.nbytes for p in every) <= _LARGEST
    # (Ranks that don't meet share their parameters, and another one may train by now.)
    before = [(p, p.detach().clone()) for p in every] if is_small and step.together else []
    yield
    with torch.no_grad():
        for p, value in before:
            if not torch.equal(p, value):
                p.copy_(value)


def evaluate_sets(
    step: Step,
    loaders: Mapping[str, AnyLoader],
    metrics: Mapping[str, Any],
    world: World,
    seed: int,
    *,
    looks: bool = False,
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
            looks=looks,
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
    """The evaluations of one training.

    Attributes:
        owed: whether one is due at this step.
        judged: the loss of the last one, until the scheduler of epochs has seen it.
    """

    def __init__(self, job: Job, step: Step, loaders: Mapping[str, AnyLoader]) -> None:
        self._job = job
        self._step = step
        self._loaders = loaders
        self.owed = False
        self.judged: float | None = None
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
            job, world, looks = self._job, self._step.world, self._at is None
            self._found = evaluate_sets(
                self._step, self._loaders, job.metrics, world, job.seed, looks=looks, prefix="eval_"
            )
            self._at = world.step
        self.owed, self.judged = False, self._found.get("eval_loss")
        return self._found


def evaluate(
    step: Step,
    loader: AnyLoader,
    metrics: Mapping[str, Any],
    world: World,
    seed: int,
    *,
    looks: bool = False,
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
        looks: whether to say what the model does in evaluation that depends on the number of
            devices.
        most: batches, at most.
        prefix: before the names of the loss and its parts.

    Raises:
        JobError: a metric raises, or gives something else, or has the name of a part of the loss.
    """
    its = JobMetrics(metrics, step, looks=looks)
    losses, seen, check = Sums(), None, step.eval_check
    check.interval.follow(step.loss_check.interval)

    def looked_at() -> Iterator[Batch]:
        nonlocal seen
        for batch in itertools.islice(loader.epoch(0), most):
            if looks and is_power_of_two(batch.index + 1):
                shares = functools.partial(step.first_shares, batch)
                seen = look_at_evaluation(
                    step, shares, batch.size, step.loss.judged, again=batch.index > 0
                )
                if not batch.index:
                    check.of_batch, check.bent = (
                        (seen.of_batch, seen.bent) if seen is not None else ({}, ())
                    )
                    check.follow_first(world)
            yield batch

    with step.evaluating(), kept_states():
        for batch, results in step.over(looked_at(), step.results, seed):
            world.beat()
            if seen is not None:
                step.say_what_the_loss_reads(seen)
            for outputs, targets, loss in results:
                losses.add(Result(*loss, batch.size, loss.parts))
                its.add(batch, outputs, targets)
    check.agree(world, 0, None, meets=True)
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
