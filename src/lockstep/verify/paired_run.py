"""Both sides at once: a job under ``single`` and under a strategy, compared after each update.

::

    rank 0   update of single | update of the strategy | compare      update of single | ...
    rank 1                    | update of the strategy |                               | ...

Rank 0 has a model of its own for ``single``, so that nothing large is kept or sent: what is left of an update is a few
numbers for each parameter.
"""

from __future__ import annotations

import contextlib
import math
import os
import time
from collections.abc import Iterator

import torch
from torch import nn

from lockstep.data import Batch, is_stream
from lockstep.job import Job
from lockstep.launch import devices as _devices
from lockstep.launch import world as _world
from lockstep.launch.devices import Device
from lockstep.launch.events import Caveat, Line
from lockstep.launch.placement import place_of
from lockstep.launch.world import World
from lockstep.model.build import hooked_parameters
from lockstep.model.inspection import acting_buffers, drops
from lockstep.strategies.single import Single
from lockstep.strategies.step import Result
from lockstep.tensors.allocator import freed_memory_kept
from lockstep.tensors.digest import digest
from lockstep.verify.comparison import EXACT, Comparison, Experiment, Rows, Update, rows_apart
from lockstep.verify.harness import buffer_apart, change_apart, largest, real
from lockstep.verify.layer_watch import first_apart, together
from lockstep.verify.training_run import Side


def both_sides(world: World, experiment: Experiment, job: Job) -> Comparison | None:
    """An experiment, on this rank.

    Args:
        world: this rank's place.
        experiment: what is held against what.
        job: its job, with its settings.

    Returns:
        What was found; None on other ranks than the first.
    """
    notes: list[Caveat] = []

    def tell(told: object) -> None:
        if isinstance(told, Line) and told.kind == "note":
            notes.append(told.as_caveat)

    world.tell = tell
    parts = experiment.strategy.num_microbatches(job)
    cut = parts if experiment.cut is None else experiment.cut
    # Each update of a large model would have its memory cleared by the kernel again.
    with _deterministic(experiment.deterministic), freed_memory_kept():
        ours = Side(
            job.replace(accumulate=cut) if experiment.cut is not None else job,
            world,
            experiment.strategy,
            still=experiment.still,
            watched=experiment.watched,
            shuffled=experiment.shuffled,
            more=experiment.more,
        )
        ours.step.looked = experiment.looked
        theirs = None
        if world.is_first:
            first = World(devices=world.devices[:1])
            with _in(first):
                # Made once: it may be large. (A stream may be one that can't be gone through by two at a time.)
                data = job.train_data if is_stream(ours.data) else ours.data
                theirs = Side(
                    job.replace(accumulate=parts, train_data=data),
                    first,
                    Single(),
                    still=experiment.still,
                    watched=experiment.watched,
                    more=experiment.more,
                )
        return _Run(experiment, world, ours, theirs, notes).run()


@contextlib.contextmanager
def _in(world: World) -> Iterator[None]:
    before = _world.enter(world)
    try:
        yield
    finally:
        _world.enter(before)


@contextlib.contextmanager
def _on_all_cores(devices: tuple[Device, ...]) -> Iterator[None]:
    """The cores of all slots for rank 0, while the other ranks wait for it."""
    place = place_of(devices)
    if not place.is_slot or not hasattr(os, "sched_getaffinity"):
        yield
        return
    before = os.sched_getaffinity(0)
    _devices.pin(place)
    try:
        with _devices.occupied(place):
            yield
    finally:
        os.sched_setaffinity(0, before)


@contextlib.contextmanager
def _deterministic(wanted: bool) -> Iterator[None]:
    before = torch.are_deterministic_algorithms_enabled()
    if wanted:
        torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before)


class _Run:
    """An experiment on this rank; rank 0 has both sides."""

    def __init__(
        self, experiment: Experiment, world: World, ours: Side, theirs: Side | None, notes: list[Caveat]
    ) -> None:
        self.experiment, self.world, self.ours, self.theirs, self.notes = experiment, world, ours, theirs, notes
        self.updates: list[Update] = []
        self.reach = 0.0
        self.collated = False
        self.seconds = 0.0

    def run(self) -> Comparison | None:
        ours, theirs, world = self.ours, self.theirs, self.world
        start = self._start_apart()
        if theirs is not None:
            self.start = {name: p.detach().clone() for name, p in theirs.step.model.named_parameters()}
        drew = drew_elsewhere = False
        updated_on: dict[str, tuple[int, ...]] = {}
        own_buffers: tuple[str, ...] = ()
        batches = theirs.batches() if theirs is not None else iter(())
        for number, (batch, is_last) in enumerate(ours.batches(), start=1):
            reference = None
            began = time.perf_counter()
            if theirs is not None:
                with _in(theirs.world), _on_all_cores(self.experiment.devices):
                    its_batch, _ = next(batches)
                    reference = its_batch, theirs.update(its_batch)
            result = ours.update(batch)
            self.seconds += time.perf_counter() - began
            if not ours.step.together:
                world.barrier()  # nobody writes while rank 0 looks
            rows = [row for mine in world.gather_objects(ours.rows) for row in mine]
            if number == 1:
                if theirs is not None:
                    drew, drew_elsewhere = theirs.drew, theirs.drew_elsewhere
                updated_on, own_buffers = self._buffers_over_replicas()
            if reference is not None:
                with _on_all_cores(self.experiment.devices):
                    self._compare(number, *reference, result, rows)
            if not ours.step.together:
                world.barrier()
            if is_last:
                for side in (ours, theirs):
                    if side is not None:
                        side.end_epoch()
            if number == self.experiment.updates:
                break
        layer = self._first_layer()
        drifted = self._drifted()
        evaluation: dict[str, tuple[float, float]] = {}
        if self.experiment.updates is None and not drifted:
            evaluation = self._evaluated()
        changed = ours.changed_attributes()
        every = world.gather_objects(changed)
        ours.loader.close()
        if theirs is None:
            return None
        its = theirs.changed_attributes()
        apart = [name for name in its if any(mine.get(name) != its[name] for mine in every)]
        apart += [name for name in changed if name not in its]
        strategy = self.experiment.strategy
        said = strategy.caveats(ours.job, ours.step.model, ours.step.replicas)
        return Comparison(
            start=start,
            updates=tuple(self.updates),
            evaluation=evaluation,
            drifted=drifted,
            updated_on=updated_on,
            own_buffers=own_buffers,
            attributes=tuple({**its, **changed}),
            apart_attributes=tuple(apart),
            drew=drew,
            drew_elsewhere=drew_elsewhere,
            drew_in_backward=theirs.drew_in_backward,
            drops=any(map(drops, theirs.step.model.modules())),
            normalises=any(
                m.training or not m.track_running_stats
                for m in theirs.step.model.modules()
                if isinstance(m, nn.modules.batchnorm._BatchNorm)
            ),
            mixes=ours.step.seen.mixes,
            reads=tuple(n for n in ours.step.loss_check.reads if ours.step.seen.of_output(n) is not None),
            collated=self.collated,
            layer=layer,
            called=theirs.watch.order if theirs.watch is not None else (),
            functions=tuple(sorted(theirs.functions | ours.functions)),
            hooked=tuple(hooked_parameters(theirs.step.model)),
            notes=tuple(dict.fromkeys([*said, *self.notes])),
            still=tuple(sorted(self.experiment.still)),
            seconds=self.seconds,
        )

    # ---- before the first update ------------------------------------------------------------------------------------

    def _start_apart(self) -> tuple[str, ...]:
        if self.theirs is None:
            return ()
        mine, its = (dict(side.step.model.state_dict(keep_vars=True)) for side in (self.ours, self.theirs))
        return tuple(
            name
            for name, tensor in its.items()
            if isinstance(tensor, torch.Tensor) and (name not in mine or _differ(mine[name], tensor))
        )

    # ---- after an update --------------------------------------------------------------------------------------------

    def _compare(self, number: int, batch: Batch, its: Result, mine: Result, rows: list[bytes]) -> None:
        ours, theirs = self.ours, self.theirs
        assert theirs is not None
        self.reach += max(theirs.rates, default=0.0)
        gradients, ratios = _gradients_apart(ours, theirs) if ours.step.together else ({}, {})
        parameters = {}
        values = dict(ours.step.model.named_parameters())
        for name, p in theirs.step.model.named_parameters():
            if name not in self.start:
                text = f'parameter "{name}" was made after the optimizer, which never trains it'
                self.notes.append(Caveat("untrained", text))
            elif name in values:  # frozen ones too: a teacher may follow what it sees
                its_value = real(p)
                change = largest(its_value - real(self.start[name]))
                parameters[name] = change_apart(largest(real(values[name]) - its_value), change, self.reach)
        buffers = {}
        others = dict(ours.step.model.named_buffers())
        for name, b in theirs.step.model.named_buffers():
            if name in others:
                buffers[name] = buffer_apart(others[name], b)
        self.updates.append(
            Update(
                number,
                batch.epoch + 1,
                batch.index + 1,
                batch.size,
                mine.loss,
                its.loss,
                gradients,
                ratios,
                parameters,
                buffers,
                ours.rates,
                theirs.rates,
                self._rows_apart(rows, batch),
            )
        )

    def _rows_apart(self, rows: list[bytes], batch: Batch) -> Rows:
        assert self.theirs is not None
        alike = isinstance(self.experiment.strategy, Single) and self.experiment.cut is None
        if not self.theirs.rows:
            return Rows()
        known = [part.samples.tolist() for part in batch.parts if part.size and part.samples is not None]
        samples = [sample for part in known for sample in part]
        apart = rows_apart(rows, self.theirs.rows, samples if len(samples) == len(self.theirs.rows) else None)
        if self.theirs.job.collate is not None and not alike:  # what is padded with others is another row
            self.collated = self.collated or bool(apart)
            return Rows()
        return apart

    def _buffers_over_replicas(self) -> tuple[dict[str, tuple[int, ...]], tuple[str, ...]]:
        """After the first update: buffers that only some replicas changed, and those that are other ones on each."""
        models = self.ours.step.models()
        mine = [
            (changed, {name: digest(b) for name, b in acting_buffers(model).items()})
            for changed, model in zip(self.ours.changed, models, strict=True)
        ]
        every = [one for theirs in self.world.gather_objects(mine) for one in theirs]
        names = list(every[0][1])
        where = {name: tuple(i for i, (changed, _) in enumerate(every) if name in changed) for name in names}
        partly = {name: on for name, on in where.items() if 0 < len(on) < len(every)}
        own = tuple(name for name in names if len({values.get(name) for _, values in every}) > 1)
        return partly, own

    # ---- at the end -------------------------------------------------------------------------------------------------

    def _first_layer(self) -> tuple[str, str] | None:
        if not self.experiment.watched:
            return None
        assert self.ours.watch is not None
        every = self.world.gather_objects(self.ours.watch.told)
        if self.theirs is None or self.theirs.watch is None:
            return None
        return first_apart(together(every), self.theirs.watch.told, self.experiment.bound)

    def _drifted(self) -> tuple[str, ...]:
        if self.world.size == 1 or not self.ours.step.together:
            return ()
        mine = {name: digest(p) for name, p in self.ours.step.model.named_parameters()}
        every = self.world.gather_objects(mine)
        return tuple(name for name in mine if any(theirs.get(name) != mine[name] for theirs in every))

    def _evaluated(self) -> dict[str, tuple[float, float]]:
        its: dict[str, float] = {}
        began = time.perf_counter()
        if self.theirs is not None:
            with _in(self.theirs.world), _on_all_cores(self.experiment.devices):
                its = self.theirs.evaluate()
        mine = self.ours.evaluate()
        self.seconds += time.perf_counter() - began
        return {name: (value, its[name]) for name, value in mine.items() if name in its}


def _differ(one: torch.Tensor, other: torch.Tensor) -> bool:
    if one.shape != other.shape:
        return True
    return not torch.equal(one.cpu(), other.cpu()) and digest(one) != digest(other)  # NaN isn't equal to itself


def _gradients_apart(ours: Side, theirs: Side) -> tuple[dict[str, float], dict[str, float]]:
    """By name, how far the gradients lie apart, and how many times one is the other, where it is a multiple."""
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
        ratio = 1.0 if found[name] <= EXACT else float(mine[name].reshape(-1) @ flat) / float(flat @ flat)
        if ratio == 1.0 or largest(mine[name] - ratio * its[name]) <= 1e-6 * size * max(1.0, abs(ratio)):
            ratios[name] = ratio
    return found, ratios
