"""Both sides at once: a job under ``single`` and under a strategy, compared after each update.

::

    rank 0   update of single | update of the strategy | compare      update of single | ...
    rank 1                    | update of the strategy |                               | ...

Rank 0 has a model of its own for ``single``, so that nothing large is kept or sent: what is left of
an update are a few numbers for each parameter.
"""

from __future__ import annotations

import contextlib
import math
import os
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from lockstep.data import Batch, is_stream
from lockstep.job import Job
from lockstep.launch import devices as _devices
from lockstep.launch import world as _world
from lockstep.launch.devices import Device
from lockstep.launch.events import Caveat, Line
from lockstep.launch.world import World, place_of
from lockstep.model.hooks import hooked_parameters
from lockstep.model.modes import draws_dropout
from lockstep.strategies.single import Single
from lockstep.strategies.steps.update_result import Result
from lockstep.tensors.allocator import freed_memory_kept
from lockstep.tensors.digest import digest
from lockstep.verify.comparison import EXACT, Comparison, Experiment, Rows, Update, rows_apart
from lockstep.verify.layer_watch import first_apart
from lockstep.verify.measures import buffer_apart, change_apart, largest, real
from lockstep.verify.training_run import Side, buffer_digests


def both_sides(world: World, experiment: Experiment, job: Job) -> Comparison | None:
    """An experiment on this rank, with its job; what was found, None on other ranks than the
    first.
    """
    with contextlib.ExitStack() as stack:
        # Each update of a large model would have its memory cleared by the kernel again.
        stack.enter_context(freed_memory_kept())
        stack.callback(
            torch.use_deterministic_algorithms, torch.are_deterministic_algorithms_enabled()
        )
        if experiment.deterministic:
            torch.use_deterministic_algorithms(True)
        found = _PairedRun(world, experiment, job).run()
    return found if world.is_first else None


@contextlib.contextmanager
def _as_single(world: World, devices: tuple[Device, ...]) -> Iterator[None]:
    """On rank 0, while the other ranks wait for it: in the world of ``single``, on the cores of
    all CPU devices.
    """
    before, place = _world.enter(world), place_of(devices)
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
        self.world, self.experiment = world, experiment
        self.found = Comparison(still=tuple(sorted(experiment.still)))
        self.notes: list[Caveat] = []
        world.tell = self._hear
        self.ours = Side(
            job if experiment.cut is None else job.replace(accumulate=experiment.cut),
            world,
            experiment,
        )
        self.theirs: Side | None = None
        self.single = World(devices=world.devices[:1])
        self.reach = 0.0
        if not world.is_first:
            return
        # Made once: it may be large. (A stream may be one that can't be iterated by two at a time.)
        data = job.train_data if is_stream(self.ours.data) else self.ours.data
        with self._alone():
            job = job.replace(accumulate=experiment.parts, train_data=data)
            self.theirs = Side(job, self.single, experiment.but(strategy=Single(), shuffled=False))

    def _hear(self, told: object) -> None:
        if isinstance(told, Line) and told.kind == "note":
            self.notes.append(told.as_caveat)

    def _alone(self) -> contextlib.AbstractContextManager[None]:
        return _as_single(self.single, self.experiment.devices)

    def run(self) -> Comparison:
        ours, theirs, world, found = self.ours, self.theirs, self.world, self.found
        start = ours.step.weights()
        if theirs is not None:
            self._compare_start(theirs, start)
            its_batches = theirs.batches()
        for number, (batch, is_last) in enumerate(ours.batches(), start=1):
            if theirs is not None:
                with self._alone():
                    its_batch, _ = next(its_batches)
                    its_result = theirs.update(its_batch, is_last)
            result = ours.update(batch, is_last)
            if not ours.step.together:
                world.barrier()  # nobody writes while rank 0 looks
            rows = [row for mine in world.gather_objects(ours.rows) for row in mine]
            if number == 1:
                self._compare_replicas()
            values = ours.step.gathered_parameters()
            if theirs is not None:
                with self._alone():
                    self._compare(theirs, number, its_batch, its_result, result, rows, values)
            if not ours.step.together:
                world.barrier()
            if number == self.experiment.updates:
                break
        self._compare_ranks()
        if self.experiment.updates is None and not found.drifted:
            self._evaluate()
        ours.loader.close()
        if theirs is not None:
            self._describe(theirs)
        return found

    # ---- before the first update -----------------------------------------------------------------

    def _compare_start(self, theirs: Side, mine: dict[str, Any]) -> None:
        self.start = {name: p.detach().clone() for name, p in theirs.step.model.named_parameters()}
        its = theirs.step.weights()
        tensors = {name: tensor for name, tensor in its.items() if isinstance(tensor, torch.Tensor)}
        self.found.start = tuple(
            n
            for n, t in tensors.items()
            if n not in mine or mine[n].shape != t.shape or digest(mine[n]) != digest(t)
        )

    # ---- after an update -------------------------------------------------------------------------

    def _compare(
        self,
        theirs: Side,
        number: int,
        batch: Batch,
        its_result: Result,
        result: Result,
        rows: list[bytes],
        values: dict[str, torch.Tensor],
    ) -> None:
        ours = self.ours
        self.reach += max(theirs.rates, default=0.0)
        gradients, ratios = _gradients_apart(ours, theirs) if ours.step.together else ({}, {})
        parameters = {}
        for name, p in theirs.step.model.named_parameters():
            if name not in self.start:
                text = f'parameter "{name}" was made after the optimizer, which never trains it'
                self.notes.append(Caveat("untrained", text))
            elif name in values:  # frozen ones too: a teacher may follow what it sees
                its_value = real(p)
                change = largest(its_value - real(self.start[name]))
                parameters[name] = change_apart(
                    largest(real(values[name]) - its_value), change, self.reach
                )
        others = dict(ours.step.model.named_buffers())
        its_buffers = theirs.step.model.named_buffers()
        self.found.updates.append(
            Update(
                number=number,
                epoch=batch.epoch + 1,
                batch=batch.index + 1,
                samples=batch.size,
                loss=result.loss,
                reference=its_result.loss,
                gradients=gradients,
                ratios=ratios,
                parameters=parameters,
                buffers={
                    name: buffer_apart(others[name], b) for name, b in its_buffers if name in others
                },
                rates=ours.rates,
                reference_rates=theirs.rates,
                rows=self._rows_apart(theirs, rows, batch),
            )
        )

    def _rows_apart(self, theirs: Side, rows: list[bytes], batch: Batch) -> Rows:
        if not theirs.rows:
            return Rows()
        known = [
            part.samples.tolist() for part in batch.parts if part.size and part.samples is not None
        ]
        samples = [sample for part in known for sample in part]
        apart = rows_apart(rows, theirs.rows, samples if len(samples) == len(theirs.rows) else None)
        alike = isinstance(self.experiment.strategy, Single) and self.experiment.cut in (
            None,
            self.experiment.parts,
        )
        if (
            theirs.job.collate is not None and not alike
        ):  # what is padded with others is another row
            self.found.collated |= bool(apart)
            return Rows()
        return apart

    def _compare_replicas(self) -> None:
        """After the first update: buffers that are other ones on each replica, and which changed
        it.
        """
        here = [buffer_digests(model) for model in self.ours.step.models()]
        every = [one for mine in self.world.gather_objects(here) for one in mine]
        for name in every[0]:
            if len({values.get(name) for values in every}) > 1:
                where = tuple(
                    i
                    for i, values in enumerate(every)
                    if values.get(name) != self.ours.buffers.get(name)
                )
                self.found.own_buffers[name] = where if len(where) < len(every) else ()

    # ---- at the end ------------------------------------------------------------------------------

    def _compare_ranks(self) -> None:
        """Compare what is on other ranks too: parameters, plain attributes, and what layers
        gave.
        """
        ours, theirs, found = self.ours, self.theirs, self.found
        meets = self.world.size > 1 and ours.step.together
        parameters = (
            {name: digest(p) for name, p in ours.step.gathered_parameters().items()}
            if meets
            else {}
        )
        attributes = ours.changed_attributes()
        gathered = self.world.gather_objects((parameters, attributes, ours.watch.told))
        on_ranks, attributes_on, told_on = zip(*gathered, strict=True)
        # All ranks need to know, since they evaluate only where there is no drift.
        found.drifted = tuple(
            name
            for name in parameters
            if any(one.get(name) != parameters[name] for one in on_ranks)
        )
        if theirs is None:
            return
        its = theirs.changed_attributes()
        names = {**its, **attributes}
        found.apart_attributes = tuple(
            n for n in names if any(mine.get(n) != its.get(n) for mine in attributes_on)
        )
        if self.experiment.watched:
            bound = 1e-8 if ours.job.precision == "fp64" else 1e-5
            found.layer = first_apart(told_on, theirs.watch.told, bound)
            found.called = theirs.watch.order

    def _evaluate(self) -> None:
        its: dict[str, float] = {}
        if self.theirs is not None:
            with self._alone():
                its = self.theirs.evaluate()
        mine = self.ours.evaluate()
        self.found.evaluation = {
            name: (value, its[name]) for name, value in mine.items() if name in its
        }

    def _describe(self, theirs: Side) -> None:
        """What was seen of the model and its loss."""
        ours, found, model = self.ours, self.found, theirs.step.model
        norms = [m for m in model.modules() if isinstance(m, nn.modules.batchnorm._BatchNorm)]
        found.drew = tuple(sorted(theirs.drew))
        found.drops = any(map(draws_dropout, model.modules()))
        found.normalises = any(m.training or not m.track_running_stats for m in norms)
        found.functions = tuple(sorted(theirs.functions | ours.functions))
        found.hooked = tuple(hooked_parameters(model))
        said = self.experiment.strategy.caveats(ours.job, ours.step.model, ours.step.replicas)
        notes = dict.fromkeys([*said, *self.notes])
        found.notes = tuple(note for note in notes if note.kind not in self.experiment.still)


def _gradients_apart(ours: Side, theirs: Side) -> tuple[dict[str, float], dict[str, float]]:
    """By name, how far the gradients lie apart, and how many times one is the other, where it is
    a multiple.
    """
    its = {name: real(grad) for name, grad in theirs.gradients.items()}
    mine = {name: real(grad) for name, grad in ours.gradients.items()}
    sizes = {name: largest(grad) for name, grad in its.items()}
    # What is zero but for rounding (a bias before a batch norm) is held against the others.
    small = 1e-3 * max(sizes.values(), default=0.0)
    found, ratios = {}, {}
    for name in {**its, **mine}:
        if name not in its or name not in mine:
            found[name] = math.inf if largest({**its, **mine}[name]) else 0.0
            continue
        size = max(sizes[name], small)
        apart = largest(mine[name] - its[name])
        found[name] = apart / size if size else apart
        if sizes[name] <= small:
            continue
        flat = its[name].reshape(-1)
        ratio = (
            1.0
            if found[name] <= EXACT
            else float(mine[name].reshape(-1) @ flat) / float(flat @ flat)
        )
        if ratio == 1.0 or largest(mine[name] - ratio * its[name]) <= 1e-6 * size * max(
            1.0, abs(ratio)
        ):
            ratios[name] = ratio
    return found, ratios
