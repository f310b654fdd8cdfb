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
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from lockstep.data import is_stream
from lockstep.job import Job
from lockstep.launch import devices as _devices
from lockstep.launch import world as _world
from lockstep.launch.devices import Device
from lockstep.launch.events import Caveat, Line
from lockstep.launch.world import World, place_of
from lockstep.strategies.single import Single
from lockstep.tensors.allocator import freed_memory_kept
from lockstep.tensors.digest import digest
from lockstep.verify.comparison import EXACT, Comparison, Experiment, Update
from lockstep.verify.layer_watch import first_apart
from lockstep.verify.measures import Rows, buffer_apart, change_apart, largest, real, rows_apart
from lockstep.verify.model_facts import (
    buffer_digests,
    has_dropout,
    hooked_parameters,
    normalises,
)
from lockstep.verify.training_run import Side


def both_sides(world: World, experiment: Experiment, job: Job) -> Comparison | None:
    """Run an experiment on this rank; every rank calls this.

    Returns:
        What was found; None on other ranks than the first.
    """
    deterministic = torch.are_deterministic_algorithms_enabled()
    with contextlib.ExitStack() as stack:
        # Each update of a large model would have its memory cleared by the kernel again.
        stack.enter_context(freed_memory_kept())
        stack.callback(torch.use_deterministic_algorithms, deterministic)
        if experiment.deterministic:
            torch.use_deterministic_algorithms(True)
        found = _PairedRun(world, experiment, job).run()
    return found if world.is_first else None


@contextlib.contextmanager
def _as_single(world: World, devices: tuple[Device, ...]) -> Iterator[None]:
    """Enter the world of ``single`` on rank 0, on the cores of all CPU devices, while the other
    ranks wait.
    """
    place = place_of(devices)
    before = _world.enter(world)
    with contextlib.ExitStack() as stack:
        stack.callback(_world.enter, before)
        if place.is_slot and hasattr(os, "sched_getaffinity"):
            stack.callback(os.sched_setaffinity, 0, os.sched_getaffinity(0))
            _devices.pin(place)
            stack.enter_context(_devices.occupied(place))
        yield


class _PairedRun:
    """An experiment on this rank; rank 0 has both sides."""

    def __init__(self, world: World, experiment: Experiment, job: Job) -> None:
        self.world = world
        self.experiment = experiment
        self.found = Comparison(still=tuple(sorted(experiment.still)))
        self.notes: list[Caveat] = []
        world.tell = self._hear
        cut = experiment.cut
        our_job = job if cut is None else job.replace(accumulate=cut)
        self.ours = Side(our_job, world, experiment)
        self.theirs: Side | None = None
        self.single = World(devices=world.devices[:1])
        self.reach = 0.0
        if not world.is_first:
            return
        # Made once: it may be large. (A stream may be one that can't be iterated by two at a time.)
        data = job.train_data if is_stream(self.ours.data) else self.ours.data
        its_job = job.replace(accumulate=experiment.parts, train_data=data)
        plain = experiment.but(strategy=Single(), shuffled=False, checked=False)
        with self._alone():
            self.theirs = Side(its_job, self.single, plain)

    def _hear(self, told: object) -> None:
        if isinstance(told, Line) and told.kind == "note":
            self.notes.append(told.as_caveat)

    def _alone(self) -> contextlib.AbstractContextManager[None]:
        return _as_single(self.single, self.experiment.devices)

    def run(self) -> Comparison:
        ours, theirs, world = self.ours, self.theirs, self.world
        start = ours.step.layout.weights()
        if theirs is not None:
            self._compare_start(theirs, start)
            its_batches = theirs.batches()
        for number, (batch, is_last) in enumerate(ours.batches(), start=1):
            if theirs is not None:
                with self._alone():
                    theirs.update(*next(its_batches))
            ours.update(batch, is_last)
            self._wait()  # nobody writes while rank 0 looks
            rows = [row for mine in world.gather_objects(ours.rows) for row in mine]
            if number == 1:
                self._compare_replicas()
            values = ours.step.layout.parameters()
            if theirs is not None:
                self._compare(theirs, rows, values)
            self._wait()
            if number == self.experiment.updates:
                break
        self._compare_ranks()
        if self.experiment.updates is None and not self.found.drifted:
            self._evaluate()
        ours.loader.close()
        if theirs is not None:
            self._describe(theirs)
        return self.found

    def _wait(self) -> None:
        if not self.ours.step.together:
            self.world.barrier()

    def _compare_start(self, theirs: Side, mine: dict[str, Any]) -> None:
        self.start = {name: p.detach().clone() for name, p in theirs.step.model.named_parameters()}
        its = _digests(theirs.step.layout.weights())
        self.found.start = _unequal(its, [_digests(mine)])

    # ---- after an update -------------------------------------------------------------------------

    def _compare(self, theirs: Side, rows: list[bytes], values: dict[str, Tensor]) -> None:
        ours = self.ours
        batch = theirs.batch
        self.reach += max(theirs.rates, default=0.0)
        gradients: dict[str, float] = {}
        ratios: dict[str, float] = {}
        if ours.step.together:
            gradients, ratios = _gradients_apart(ours.gradients, theirs.gradients)
        others = dict(ours.step.model.named_buffers())
        buffers = {
            name: buffer_apart(others[name], buffer)
            for name, buffer in theirs.step.model.named_buffers()
            if name in others
        }
        update = Update(
            number=len(self.found.updates) + 1,
            epoch=batch.epoch + 1,
            batch=batch.index + 1,
            samples=batch.size,
            loss=ours.result.loss,
            reference=theirs.result.loss,
            gradients=gradients,
            ratios=ratios,
            parameters=self._parameters_apart(theirs, values),
            buffers=buffers,
            rates=ours.rates,
            reference_rates=theirs.rates,
            rows=self._rows_apart(theirs, rows),
        )
        self.found.updates.append(update)

    def _parameters_apart(self, theirs: Side, values: dict[str, Tensor]) -> dict[str, float]:
        """Frozen ones too: a teacher may follow what it sees."""
        found = {}
        for name, p in theirs.step.model.named_parameters():
            if name not in self.start:
                text = f'parameter "{name}" was made after the optimizer, which never trains it'
                self.notes.append(Caveat("untrained", text))
            elif name in values:
                value = real(p)
                change = largest(value - real(self.start[name]))
                apart = largest(real(values[name]) - value)
                found[name] = change_apart(apart, change, self.reach)
        return found

    def _rows_apart(self, theirs: Side, rows: list[bytes]) -> Rows:
        if not theirs.rows:
            return Rows()
        samples = theirs.batch.samples
        apart = rows_apart(rows, theirs.rows, [] if samples is None else samples.tolist())
        is_single = isinstance(self.experiment.strategy, Single)
        alike = is_single and self.experiment.cut in (None, self.experiment.parts)
        if theirs.job.collate is None or alike:
            return apart
        self.found.collated |= bool(apart)  # what is padded with others is another row
        return Rows()

    def _compare_replicas(self) -> None:
        """Find buffers that each replica has its own values of after the first update."""
        here = [buffer_digests(model) for model in self.ours.step.models()]
        every = [one for mine in self.world.gather_objects(here) for one in mine]
        for name, before in self.ours.buffers.items():
            values = [one[name] for one in every]
            if len(set(values)) > 1:
                changed = tuple(i for i, value in enumerate(values) if value != before)
                self.found.own_buffers[name] = changed if before in values else ()

    # ---- at the end ------------------------------------------------------------------------------

    def _compare_ranks(self) -> None:
        """Compare what is on other ranks too: parameters, plain attributes, outputs of layers."""
        ours, theirs, found = self.ours, self.theirs, self.found
        meets = self.world.size > 1 and ours.step.together
        parameters = _digests(ours.step.layout.parameters()) if meets else {}
        mine = parameters, ours.changed_attributes(), ours.watch.sums
        of_parameters, of_attributes, sums = zip(*self.world.gather_objects(mine), strict=True)
        # All ranks need to know, since they evaluate only where there is no drift.
        found.drifted = _unequal(parameters, of_parameters)
        if theirs is None:
            return
        found.apart_attributes = _unequal(theirs.changed_attributes(), of_attributes)
        if self.experiment.watched:
            bound = 1e-8 if ours.job.precision == "fp64" else 1e-5
            found.layer = first_apart(sums, theirs.watch.sums, bound)
            found.called = theirs.watch.order

    def _evaluate(self) -> None:
        its: dict[str, float] = {}
        if self.theirs is not None:
            with self._alone():
                its = self.theirs.evaluate()
        mine = self.ours.evaluate().items()
        self.found.evaluation = {name: (value, its[name]) for name, value in mine if name in its}

    def _describe(self, theirs: Side) -> None:
        """Note facts of the model and its loss."""
        ours, found, model = self.ours, self.found, theirs.step.model
        found.drew = tuple(sorted(theirs.drew))
        found.drops = has_dropout(model)
        found.normalises = normalises(model)
        found.whole_outputs = tuple(theirs.whole_outputs)
        found.functions = tuple(sorted(theirs.functions | ours.functions))
        found.hooked = hooked_parameters(model)
        known = self.experiment.strategy.caveats(ours.job, ours.step.model, ours.step.replicas)
        notes = dict.fromkeys([*known, *self.notes])
        found.notes = tuple(note for note in notes if note.kind not in self.experiment.still)


def _digests(tensors: Mapping[str, Any]) -> dict[str, Any]:
    return {name: digest(t) for name, t in tensors.items() if isinstance(t, Tensor)}


def _unequal(its: dict[str, Any], of_ranks: Sequence[dict[str, Any]]) -> tuple[str, ...]:
    """The names whose values aren't the same on every rank."""
    names = dict.fromkeys(name for one in (its, *of_ranks) for name in one)
    return tuple(n for n in names if any(one.get(n) != its.get(n) for one in of_ranks))


def _gradients_apart(
    ours: dict[str, Tensor], theirs: dict[str, Tensor]
) -> tuple[dict[str, float], dict[str, float]]:
    """By name, how far the gradients lie apart, and how many times one is the other, where it is
    a multiple.
    """
    sizes = {name: largest(real(grad)) for name, grad in theirs.items()}
    # What is zero but for rounding (a bias before a batch norm) is compared with the others' size.
    small = 1e-3 * max(sizes.values(), default=0.0)
    found: dict[str, float] = {}
    ratios: dict[str, float] = {}
    for name, grad in {**theirs, **ours}.items():
        if name not in theirs or name not in ours:
            found[name] = math.inf if largest(real(grad)) else 0.0
            continue
        its = real(theirs[name])
        mine = real(ours[name])
        size = max(sizes[name], small) or 1.0
        found[name] = largest(mine - its) / size
        if sizes[name] > small:
            ratio = 1.0 if found[name] <= EXACT else float((mine * its).sum() / (its * its).sum())
            if largest(mine - ratio * its) <= 1e-6 * size * max(1.0, abs(ratio)):
                ratios[name] = ratio
    return found, ratios
