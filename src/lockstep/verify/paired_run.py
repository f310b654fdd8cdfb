"""Both sides at once: a job under ``single`` and under a strategy, compared after each update.

::

    rank 0   update of single | update of the strategy | compare      update of single | ...
    rank 1                    | update of the strategy |                               | ...

Rank 0 has a model of its own for ``single``, so that nothing large is kept or sent: an update
leaves a few numbers for each parameter.
"""

from __future__ import annotations

import contextlib
import math
import os
from collections.abc import Iterator

from torch import Tensor

from lockstep.data import is_stream
from lockstep.job import Job
from lockstep.launch import cores
from lockstep.launch import world as _world
from lockstep.launch.devices import Device
from lockstep.launch.world import World, place_of
from lockstep.model.build import differing_tensors
from lockstep.model.modes import draws_dropout, normalizes_by_batch
from lockstep.run.events import Caveat, Line
from lockstep.strategies.single import Single
from lockstep.tensors.allocator import freed_memory_kept
from lockstep.verify.comparison import Comparison, Experiment, Update
from lockstep.verify.layer_watch import first_apart
from lockstep.verify.measures import buffer_apart, change_apart, largest, real
from lockstep.verify.training_run import Side

Tensors = dict[str, Tensor]
Differences = dict[str, float]
"""By name, as in ``Update``."""


def both_sides(world: World, experiment: Experiment) -> Comparison | None:
    """Run an experiment on this rank; every rank calls this.

    Returns:
        What was found; None on other ranks than the first.
    """
    # Each update of a large model would have its memory cleared by the kernel again.
    with freed_memory_kept():
        found = _PairedRun(world, experiment).run()
    return found if world.is_first else None


@contextlib.contextmanager
def _as_single(world: World, devices: tuple[Device, ...]) -> Iterator[None]:
    """Enter the world of ``single`` on rank 0, on the cores of all CPU devices, while the other
    ranks wait.

    Args:
        world: of ``single``.
        devices: those of the strategy.
    """
    place = place_of(devices)
    before = _world.enter(world)

    with contextlib.ExitStack() as stack:
        stack.callback(_world.enter, before)
        if place.is_slot and hasattr(os, "sched_getaffinity"):
            stack.callback(os.sched_setaffinity, 0, os.sched_getaffinity(0))
            cores.pin(place)
            stack.enter_context(cores.occupied(place))
        yield


class _PairedRun:
    """An experiment on this rank; rank 0 has both sides.

    Args:
        world: of this rank, under the strategy.
        experiment: what is compared.

    Attributes:
        found: what is compared.
        ours: the strategy's side.
        theirs: the side of one device, on rank 0.
        start: the parameters that ``theirs`` began with.
        reach: the learning rates of all updates so far, added up.
    """

    def __init__(self, world: World, experiment: Experiment) -> None:
        self.world = world
        self.experiment = experiment
        self.found = Comparison(still=tuple(sorted(experiment.still)))
        self.notes: list[Caveat] = []
        world.emit = self._hear

        job = experiment.loaded
        our_job = job
        if experiment.cut is not None:
            our_job = job.replace(accumulate=experiment.cut)
        self.ours = Side(our_job, world, experiment)
        self.theirs: Side | None = None
        self.single = World(devices=world.devices[:1])
        self.start: Tensors = {}
        self.reach = 0.0
        if world.is_first:
            self._prepare_single(job)

    def _prepare_single(self, job: Job) -> None:
        """Make the side of one device."""
        # Data are made once: they may be large. (Two can't always iterate one stream.)
        data = self.ours.data
        if is_stream(data):
            data = job.train_data
        job = job.replace(accumulate=self.experiment.parts, train_data=data)
        plain = self.experiment.but(strategy=Single(), shuffled=False, checked=False)
        with self._alone():
            self.theirs = Side(job, self.single, plain)

    def _hear(self, event: object) -> None:
        """Keep the notes that are logged."""
        if isinstance(event, Line) and event.kind == "note":
            self.notes.append(event.as_caveat)

    def _alone(self) -> contextlib.AbstractContextManager[None]:
        return _as_single(self.single, self.experiment.devices)

    def run(self) -> Comparison:
        """Train both sides, an update at a time, and compare them."""
        ours = self.ours
        theirs = self.theirs
        if theirs is not None:
            for name, p in theirs.step.model.named_parameters():
                self.start[name] = p.detach().clone()
            its_batches = theirs.batches()

        for number, (batch, is_last) in enumerate(ours.batches(), start=1):
            if theirs is not None:
                with self._alone():
                    theirs.update(*next(its_batches))
            ours.update(batch, is_last)
            self._look()
            if number == self.experiment.updates:
                break

        self._compare_ranks()
        goes_to_the_end = self.experiment.updates is None
        if goes_to_the_end and not self.found.drifted:
            self._evaluate()
        ours.loader.close()
        if theirs is not None:
            self._describe(theirs)
        return self.found

    # ---- after an update -------------------------------------------------------------------------

    def _look(self) -> None:
        """Compare what both sides have after an update. Every rank calls this."""
        # Nobody writes while rank 0 looks. (Under hogwild ranks don't meet otherwise.)
        self.world.barrier()
        values = self.ours.step.layout.parameters()
        if self.theirs is not None:
            self._compare(self.theirs, values)
        self.world.barrier()

    def _compare(self, theirs: Side, values: Tensors) -> None:
        """Note how far the sides lie apart after an update.

        Args:
            theirs: the side of one device.
            values: the strategy's parameters.
        """
        ours = self.ours
        batch = theirs.batch
        self.reach += max(theirs.rates, default=0.0)

        gradients: Differences = {}
        if ours.step.together:
            gradients = _gradients_apart(ours.gradients, theirs.gradients)

        update = Update(
            number=len(self.found.updates) + 1,
            epoch=batch.epoch + 1,
            batch=batch.index + 1,
            samples=batch.size,
            loss=ours.result.loss,
            reference=theirs.result.loss,
            gradients=gradients,
            parameters=self._parameters_apart(theirs, values),
            buffers=self._buffers_apart(theirs),
        )
        self.found.updates.append(update)

    def _parameters_apart(self, theirs: Side, values: Tensors) -> Differences:
        """Compare parameters; frozen ones too, since a teacher may follow what it sees."""
        found = {}
        for name, p in theirs.step.model.named_parameters():
            if name in self.start and name in values:
                its = real(p)
                start = real(self.start[name])
                mine = real(values[name])
                change = largest(its - start)
                apart = largest(mine - its)
                found[name] = change_apart(apart, change, self.reach)

        return found

    def _buffers_apart(self, theirs: Side) -> Differences:
        """Compare the buffers that both sides have."""
        mine = dict(self.ours.step.model.named_buffers())
        found = {}
        for name, buffer in theirs.step.model.named_buffers():
            if name in mine:
                found[name] = buffer_apart(mine[name], buffer)
        return found

    # ---- at the end ------------------------------------------------------------------------------

    def _compare_ranks(self) -> None:
        """Compare what is on other ranks too: parameters, and outputs of layers."""
        step = self.ours.step
        if self.world.size > 1 and step.together:
            parameters = step.layout.parameters()
            # All ranks need to know, since they evaluate only where there is no drift.
            self.found.drifted = differing_tensors(parameters.items(), self.world)
        sums = self.world.gather_objects(self.ours.watch.sums)

        if self.theirs is not None and self.experiment.watched:
            bound = 1e-8 if self.ours.job.precision == "fp64" else 1e-5
            self.found.layer = first_apart(sums, self.theirs.watch.sums, bound)

    def _evaluate(self) -> None:
        """Evaluate both sides, and keep the values that both have."""
        its: Differences = {}
        if self.theirs is not None:
            with self._alone():
                its = self.theirs.evaluate()
        for name, value in self.ours.evaluate().items():
            if name in its:
                self.found.evaluation[name] = value, its[name]

    def _describe(self, theirs: Side) -> None:
        """Note facts of the model and its loss."""
        ours = self.ours
        found = self.found
        model = theirs.step.model
        found.drew = theirs.drew
        found.drops = any(map(draws_dropout, model.modules()))
        found.normalises = any(map(normalizes_by_batch, model.modules()))

        step = ours.step
        known = self.experiment.strategy.caveats(ours.job, step.model, step.replicas)
        notes = []
        for note in dict.fromkeys([*known, *self.notes]):
            if note.kind not in self.experiment.still:
                notes.append(note)
        found.notes = tuple(notes)


def _gradients_apart(ours: Tensors, theirs: Tensors) -> Differences:
    """Return by name how far the gradients lie apart, relative to those of one device.

    A gradient that only one side has is infinitely far apart, unless it is zero.
    """
    sizes = {name: largest(real(grad)) for name, grad in theirs.items()}
    # What is zero but for rounding (a bias before a batch norm) is compared with the others' size.
    small = 1e-3 * max(sizes.values(), default=0.0)

    found: Differences = {}
    for name, grad in {**theirs, **ours}.items():
        if name in theirs and name in ours:
            apart = largest(real(ours[name]) - real(theirs[name]))
            scale = max(sizes[name], small) or 1.0
            found[name] = apart / scale
        else:
            found[name] = math.inf if largest(real(grad)) else 0.0

    return found
