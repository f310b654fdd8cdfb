"""Overlap: whether a model's micro-batches may overlap, and on which route.

The micro-batches of the first update follow one another, and are observed::

    micro-batch 0      shows the route through the stages
    the others         what they leave in the model, and which random numbers they draw

What is left in the model would be read by another micro-batch, so such a model is computed in turn
from then on. So is one that draws random numbers in backward, or from Python's or NumPy's
generator: of those there is one for all micro-batches.

A model that draws from PyTorch's generator in forward has a random stream for each micro-batch. A
stream sees every call of a PyTorch function, 3 % of an update of small operators, so a model
without random numbers has none.

On accelerators one micro-batch at a time has the turn, and all generators are put where it has left
them: whatever draws, each micro-batch has random numbers of its own.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Sequence

import torch
from torch import nn

from lockstep.launch.world import World
from lockstep.pipelining.microbatch import MicroBatch
from lockstep.pipelining.schedule import Route, has_way, whole
from lockstep.pipelining.state_changes import StateChanges
from lockstep.run.events import Line
from lockstep.tensors.seeding import other_states, same, states
from lockstep.threads import recompute

_SHARED = "generator, which all micro-batches share"


class Overlap:
    """What the first update has shown of a model.

    Args:
        model: whose micro-batches they are.
        world: where it is logged why micro-batches don't overlap.
        stages: how many there are.
        accelerators: those that hold the stages; none where they are on slots of the CPU.

    Attributes:
        route: the stages that a micro-batch visits, in order; empty before the first one.
        in_turn: why micro-batches have to follow one another, if they have to.
        draws: whether micro-batches that overlap need random streams of their own.
    """

    def __init__(
        self,
        model: nn.Module,
        world: World,
        stages: int,
        accelerators: Iterable[torch.device],
    ) -> None:
        recompute.install()
        self.accelerators = tuple(dict.fromkeys(accelerators))
        self.route: Route = ()
        self.in_turn: str | None = None
        self.draws = False
        self._model = model
        self._world = world
        self._stages = stages
        self._is_observed = False
        self.begin()
        if len(self.accelerators) == 1:
            self.in_turn = "one accelerator computes nothing at the same time"

    @property
    def allowed(self) -> bool:
        """Whether the next update's micro-batches may overlap."""
        return self._is_observed and self.in_turn is None

    @contextlib.contextmanager
    def observing(self, microbatch: MicroBatch, count: int) -> Iterator[None]:
        """Observe a micro-batch that is computed alone, one of ``count`` in its update."""
        if self._is_observed or self.in_turn is not None:
            yield
            return
        self.begin()
        in_forward = self._before.torch
        # What is set once is there after micro-batch 0.
        changes = StateChanges(self._model) if microbatch.number else None
        changed: str | None = None

        def crossed() -> None:
            nonlocal changed, in_forward
            if microbatch.kind == "F":
                in_forward = torch.get_rng_state()
            if changes is not None and changed is None:
                changed = changes.found()

        microbatch.crossed = crossed
        yield
        self._learn(microbatch)
        self.draws = self.draws or self._have_drawn()
        if changed is not None:
            self._compute_in_turn(f'forward changes "{changed}", which other micro-batches share')
        elif not self.accelerators and not torch.equal(torch.get_rng_state(), in_forward):
            self._compute_in_turn(f"backward draws from PyTorch's {_SHARED}")
        elif not self.accelerators and other_states() != self._before.others:
            self._compute_in_turn(f"forward draws from Python's or NumPy's {_SHARED}")
        self._is_observed = 0 < microbatch.number == count - 1

    def begin(self) -> None:
        """Note where generators stand before micro-batches are computed."""
        self._before = states(self.accelerators)
        self._checkpoints = recompute.checkpoints()

    def end(self, microbatches: Sequence[MicroBatch]) -> None:
        """Log what is new in an update whose micro-batches overlapped."""
        if not self.draws and self._have_drawn():
            self.draws = True
            self._log(
                f"at step {self._world.step} the model began to draw random numbers, and all "
                "micro-batches drew from one generator: this step's results may differ from "
                "those of one device; from the next step on each has its own random stream"
            )
        for microbatch in microbatches:
            if microbatch.strayed:
                self._learn(microbatch)

    def _have_drawn(self) -> bool:
        """Return whether anything was drawn since, or a checkpoint has begun, which sets generators
        back.

        On accelerators random streams are of all generators, else of PyTorch's.
        """
        if recompute.checkpoints() != self._checkpoints:
            return True
        if self.accelerators:
            return not same(states(self.accelerators), self._before)
        return not torch.equal(torch.get_rng_state(), self._before.torch)

    def _learn(self, microbatch: MicroBatch) -> None:
        """Take the first way as the route, which others may leave stages out of."""
        way = whole(tuple(microbatch.seen), self._stages)
        if not self.route:
            self.route = way
        if not has_way(self.route, way):
            self._compute_in_turn("micro-batches pass through the stages in different orders")

    def _compute_in_turn(self, why: str) -> None:
        if self.in_turn is None:
            self.in_turn = why
            self._log(f"{why}: micro-batches run one after another, without overlap")

    def _log(self, note: str) -> None:
        self._world.emit(Line.note(note))
