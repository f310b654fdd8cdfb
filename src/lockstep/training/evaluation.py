"""Evaluation: the loss and the metrics over a dataset, each sample counted once, on any number
of devices.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterator, Mapping

from lockstep.data import AnyLoader, Batch
from lockstep.errors import JobError, LockstepError
from lockstep.job import Job
from lockstep.model.losses.loss import Loss
from lockstep.model.snapshot import Snapshot
from lockstep.run.events import Caveat
from lockstep.strategies.steps.step import Step
from lockstep.strategies.steps.update_result import Result, Sums, added
from lockstep.tensors.seeding import kept_states
from lockstep.training.metrics.job_metrics import JobMetrics, functions_of

_COLLATES = Caveat(
    "collate",
    "collate gets each device's local batch, so outputs that depend on the padded length, or on "
    "other samples, differ from those of one device",
)

_LARGEST = 2**30
"""Bytes of parameters up to which the trial evaluation keeps them: an embedding with ``max_norm``
writes its weight.
"""


def say_what_collates(job: Job, step: Step) -> None:
    """Log what a collate is given where devices evaluate, or predict, a local batch each."""
    if job.collate is not None and step.replicas > 1 and step.world.is_first:
        step.log_once([_COLLATES])


def try_out(step: Step, loaders: Mapping[str, AnyLoader], job: Job) -> dict[str, float]:
    """Evaluate the first batch of each set, so that an error in it isn't found an epoch later.

    What the model, the loss and the metrics count or keep is afterwards as it was. Returns the
    values, by the names in a record.

    Raises:
        JobError: a metric raises, or gives something other than a total and a count; a sample isn't
            a pair.
    """
    if not loaders:
        return {}

    beside = [step.loss.loss, *functions_of(job.metrics).values()]
    size = sum(p.nbytes for p in step.model.parameters())
    # (Ranks that don't meet share their parameters, and another one may train by now.)
    keeps_parameters = size <= _LARGEST and step.together and not step.layout.keeps_shards
    snapshots = []
    for model in step.models():
        kept = Snapshot(model, beside, step.draws.accelerators, parameters=keeps_parameters)
        snapshots.append(kept)

    try:
        return evaluate_sets(step, loaders, job, checks=True, most=1, prefix="eval_")
    finally:
        for snapshot in snapshots:
            snapshot.put_back()


def evaluate_sets(
    step: Step,
    loaders: Mapping[str, AnyLoader],
    job: Job,
    *,
    checks: bool = False,
    most: int | None = None,
    prefix: str = "",
) -> dict[str, float]:
    """Return the loss, its parts and each metric over all samples of each evaluation set.

    They are named ``"clean/loss"``, after the first set's loss as ``"loss"``. A set whose name is
    "" is the only one: its loss and parts have the ``prefix`` before their names, its metrics have
    their own. The values are the same on every rank.

    Args:
        step: the model under its strategy.
        loaders: this rank's shares of the evaluation sets, by name.
        job: has the metrics. Those of torchmetrics are updated on each rank and merged on all. The
            job's seed gives each batch a random stream, the same in each evaluation, for models
            that draw in evaluation too.
        checks: whether to check in batches 1, 2, 4, ... that the loss and the metrics are the sums
            of those of their parts.
        most: batches, at most.
        prefix: before the names of the loss and its parts.

    Raises:
        JobError: a metric raises, or gives something else, or has the name of a part of the loss.
    """
    world = step.world
    found: dict[str, float] = {}
    for name, loader in loaders.items():
        metrics = JobMetrics(job.metrics, world.device.torch)
        field = f'eval_data["{name}"]' if name else "eval_data"
        with _named(field, is_trial=step.world.step == 0):
            loss = _summed(step, loader, metrics, job.seed, checks=checks, most=most)
        for part in loss.parts:
            if part in job.metrics:
                raise JobError(
                    f'metrics: "{part}" is the name of a part of the loss too: give one of them '
                    "another name"
                )
        if not name:
            return loss.means(prefix) | metrics.values(world)
        values = loss.means("") | metrics.values(world)
        for metric, value in values.items():
            found[f"{name}/{metric}"] = value

    if not found:
        return {}
    return {f"{prefix}loss": next(iter(found.values())), **found}


@contextlib.contextmanager
def _named(field: str, *, is_trial: bool) -> Iterator[None]:
    """Name the evaluation set in an error of its evaluation.

    Args:
        field: of the job; the messages of the set's loader begin with it.
        is_trial: whether nothing was trained yet, so that the model or the loss may be the cause.
    """
    try:
        yield
    except LockstepError as error:
        if not str(error).startswith((field, "metrics")):
            when = ", tried before the first update" if is_trial else ""
            error.args = (f"{error} (in an evaluation of {field}{when})",)
        raise
    except Exception as error:
        error.add_note(f"raised in an evaluation of {field}")
        raise


def _summed(
    step: Step,
    loader: AnyLoader,
    metrics: JobMetrics,
    seed: int,
    *,
    checks: bool,
    most: int | None,
) -> Loss:
    """Evaluate one set, and return the loss over all ranks."""
    world = step.world

    def checked() -> Iterator[Batch]:
        """Yield the batches; each is checked before it is evaluated."""
        for batch in itertools.islice(loader.epoch(0), most):
            if checks:
                step.sums.check_evaluation(batch, metrics.totals, metrics.functions)
            yield batch

    sums = Sums()

    with step.evaluating(), kept_states():
        for batch, results in step.evaluator.over(checked(), step.evaluator.results, seed):
            world.beat()
            for outputs, targets, loss in results:
                sums.add(Result(*loss, batch.size, loss.parts))
                metrics.add(batch, outputs, targets)

    step.log_loss_notes()

    return added(world.gather_objects(sums.read()))
