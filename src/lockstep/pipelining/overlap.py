"""Habits: what a model's updates have shown of it: its way through the stages, and whether micro-batches may overlap.

::

    first update, in turn     micro-batch 0      shows the route
                              all but the last   what is set only for a while (`stage_crossings`)
                              the last           what is left behind for the next one (`state_probe`)
                              each               what it draws (`rng_probe`)
    those that overlap        looked at from outside: has it begun with something since? Then the next one is in turn
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence

from torch import nn

from lockstep.launch.events import Line
from lockstep.launch.world import World
from lockstep.pipelining.microbatch import Flight
from lockstep.pipelining.rng_probe import Drawing
from lockstep.pipelining.routes import Route, merged, whole
from lockstep.pipelining.stage_crossings import Crossings
from lockstep.pipelining.state_probe import Begun, Remembered

_LONGEST = 8
"""A route that has grown to that many visits for each stage is not made longer."""

_OFTEN = 3
"""Updates that began to change something, after which none overlaps."""


class Habits:
    """What is known of a model.

    Args:
        model: whose updates are seen.
        world: which is told what it has to know, and at which step.
        stages: how many there are.

    Attributes:
        route: the stages that micro-batches visit, in order; empty before the first update.
        in_turn: why micro-batches have to follow one another; None where they needn't, as far as is known.
    """

    def __init__(self, model: nn.Module, world: World, stages: int) -> None:
        self.route: Route = ()
        self.in_turn: str | None = None
        self._model, self._world, self._stages = model, world, stages
        self._settled = False
        self._begun: Begun | None = None
        self._doubtful: dict[int, str] = {}  # what began to change in which update, while micro-batches overlapped
        self._drawing = Drawing()
        self._streamed = self._said_strayed = False
        self._passing: str | None = None  # what a micro-batch of this update, not its last, has set and put back

    @property
    def let_overlap(self) -> bool:
        """Whether the next update's micro-batches may."""
        return self._settled and self.in_turn is None

    @property
    def draws(self) -> bool:
        """Whether micro-batches that overlap need random streams of their own."""
        return self._drawing.expected or (self._begun is not None and self._begun.writes)

    # ---- one after the other ----------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def alone(self, flight: Flight, count: int) -> Iterator[contextlib.AbstractContextManager[None]]:
        """Around a micro-batch that no other overlaps; gives what its forward has to run in.

        Args:
            flight: which it makes.
            count: micro-batches of the update; they come in their order.
        """
        self._drawing.look()
        remembered = crossings = None
        if flight.number == 0:
            self._passing = None
        elif not self._settled:  # by now what is set once is there
            if flight.number == count - 1:
                remembered, flight.calls = Remembered(self._model), {}
                flight.crossed = remembered.crossed
            elif self._passing is None:
                crossings = Crossings(self._model)
                crossings.begin()
                flight.crossed = crossings.look
        yield self._forward(remembered)
        self._drawing.learn()
        if crossings is not None:
            self._passing = crossings.why(standing=False)
        if flight.number == 0 and not self.route:
            self.route = whole(tuple(flight.seen), self._stages)
        elif not self._settled:
            self._learn(flight)
        if remembered is not None:
            self._settle(remembered, flight)

    @contextlib.contextmanager
    def _forward(self, remembered: Remembered | None) -> Iterator[None]:
        with self._drawing.forward(), contextlib.nullcontext() if remembered is None else remembered.watching():
            yield

    def _settle(self, remembered: Remembered, flight: Flight) -> None:
        """A micro-batch has been watched as closely as can be."""
        assert flight.calls is not None
        self._settled, self._begun = True, remembered.begun()
        self.in_turn = remembered.why_in_turn(flight.calls) or self._passing or self._drawing.why_in_turn()
        if self.in_turn is not None:
            self._say_in_turn()
        else:  # what is in order as it overlaps
            expects = self._begun.expects
            self._doubtful = {at: name for at, name in self._doubtful.items() if not expects(name)}

    # ---- overlapped -------------------------------------------------------------------------------------------------

    def look(self) -> None:
        """An update whose micro-batches overlap begins."""
        assert self._begun is not None
        self._streamed = self.draws
        self._begun.look()
        self._drawing.look()

    def spoiled(self, flights: Sequence[Flight], *, seeded: bool) -> bool:
        """It is over: whether it has to be computed again, since the model began to draw as no stream gave it.

        Args:
            flights: of its micro-batches.
            seeded: random streams had seeds of their own, which they don't draw from PyTorch's generator.
        """
        assert self._begun is not None
        changed = self._begun.changed()
        self._heed(changed)
        why = self._drawing.strayed(streamed=self._streamed and seeded)
        spoiled = why is not None or (not self._streamed and self._drawing.began())
        if spoiled and (changed is not None or self._begun.writes):
            spoiled = False
            self._say(
                f"at step {self._world.step} the model began to draw random numbers and to write buffers or "
                "attributes: its numbers may be other ones there"
            )
        if why is not None:
            self._settled, self.in_turn = True, why
            self._say_in_turn()
        if any(flight.strayed for flight in flights):
            for flight in flights:
                self._learn(flight)
        return spoiled

    def _heed(self, changed: str | None) -> None:
        """What an update has begun to change: the next one is watched, and after the third time none overlaps."""
        if changed is None:
            return
        self._settled = False
        self._doubtful[self._world.step] = changed
        if len(self._doubtful) == _OFTEN:
            self._settled, self.in_turn = True, f'"{changed}" is now and then changed in forward'
            self._say_in_turn()

    # ---- both -------------------------------------------------------------------------------------------------------

    def _learn(self, flight: Flight) -> None:
        """Make the route such that it has this flight's way in it."""
        route = whole(merged(self.route, tuple(flight.seen)), self._stages)
        if route == self.route:
            return
        if flight.strayed and not self._said_strayed:
            self._said_strayed = True
            self._say(
                f"at step {self._world.step} a micro-batch took another way through the stages than those before; "
                "where that happens, the order of sums, and so the last bits, may differ from run to run"
            )
        if len(route) <= _LONGEST * self._stages:
            self.route = route

    def _say_in_turn(self) -> None:
        doubt = ""
        if self._doubtful:
            steps = ", ".join(map(str, self._doubtful))
            doubt = f"; they overlapped at step {steps}, whose numbers may not be those of one device"
        self._say(f"{self.in_turn}: micro-batches follow one another, and nothing overlaps{doubt}")

    def _say(self, note: str) -> None:
        self._world.tell(Line.note(note))
