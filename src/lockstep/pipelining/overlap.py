"""Overlap: what a model's updates have shown of it: its way through the stages, and whether micro-batches may overlap.

::

    first update, in turn     micro-batch 0      shows the route
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
from lockstep.pipelining.routes import merged, whole
from lockstep.pipelining.schedule import Route
from lockstep.pipelining.state_probe import Begun, StateProbe

_LONGEST = 8
"""A route that has grown to that many visits for each stage is not made longer."""

_OFTEN = 3
"""Updates that began to change something, after which none overlaps."""


class Overlap:
    """What is known of a model.

    Args:
        model: whose micro-batches are seen.
        world: which is told why they don't overlap, and at which step.
        stages: how many there are.
        tells: whether it is.

    Attributes:
        route: the stages that micro-batches visit, in order; empty before the first one.
        in_turn: why micro-batches have to follow one another; None where they needn't, as far as is known.
    """

    def __init__(self, model: nn.Module, world: World, stages: int, *, tells: bool = True) -> None:
        self.route: Route = ()
        self.in_turn: str | None = None
        self._model, self._world, self._stages, self._tells = model, world, stages, tells
        self._begun: Begun | None = None  # there is one once a micro-batch was watched
        self._doubtful: dict[int, str] = {}  # what began to change in which update, while micro-batches overlapped
        self._drawing = Drawing()
        self._streamed = self._said_strayed = False

    @property
    def allowed(self) -> bool:
        """Whether the next update's micro-batches may."""
        return self._begun is not None and self.in_turn is None

    @property
    def draws(self) -> bool:
        """Whether micro-batches that overlap need random streams of their own."""
        return self._drawing.expected or (self._begun is not None and bool(self._begun.written))

    # ---- one after the other ----------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def alone(self, flight: Flight, count: int) -> Iterator[contextlib.AbstractContextManager[None]]:
        """Around a micro-batch that no other overlaps; gives what its forward has to run in.

        Args:
            flight: which it makes.
            count: micro-batches of the update; they come in their order.
        """
        if self.in_turn is not None:
            yield contextlib.nullcontext()
            return
        self._drawing.look()
        # (By the last one what is set once is there.)
        is_watched = self._begun is None and 0 < flight.number == count - 1
        probe = StateProbe(self._model, flight) if is_watched else None
        yield self._forward(probe)
        self._drawing.learn()
        if flight.number == 0 and not self.route:
            self.route = whole(tuple(flight.seen), self._stages)
        elif self._begun is None:
            self._learn(flight)
        if probe is not None:
            self._begun = Begun(self._model, probe.written())
            # Tensors that each micro-batch may write to are in order as they overlap.
            self._doubtful = {at: name for at, name in self._doubtful.items() if name not in self._begun.written}
            why = probe.why_in_turn() or self._drawing.why_in_turn
            if why is not None:
                self._go_in_turn(why)

    @contextlib.contextmanager
    def _forward(self, probe: StateProbe | None) -> Iterator[None]:
        with self._drawing.forward(), contextlib.nullcontext() if probe is None else probe.watching():
            yield

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
        written, changed = self._begun.written, self._begun.changed()
        if changed is not None:
            self._begun = None  # the next one is watched
            self._doubtful[self._world.step] = changed
        spoiled = self._drawing.strayed(streamed=self._streamed, seeded=seeded)
        if spoiled and (changed is not None or written):
            spoiled = False
            self._say(
                f"at step {self._world.step} the model began to draw random numbers and to write buffers or "
                "attributes: its numbers may be other ones there"
            )
        if self._drawing.why_in_turn is not None:
            self._go_in_turn(self._drawing.why_in_turn)
        elif len(self._doubtful) == _OFTEN:
            self._go_in_turn(f'"{changed}" is now and then changed in forward')
        if any(flight.strayed for flight in flights):
            for flight in flights:
                self._learn(flight)
        return spoiled

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

    def _go_in_turn(self, why: str) -> None:
        self.in_turn = why
        doubt = ""
        if self._doubtful:
            steps = ", ".join(map(str, self._doubtful))
            doubt = f"; they overlapped at step {steps}, whose numbers may not be those of one device"
        self._say(f"{why}: micro-batches follow one another, and nothing overlaps{doubt}")

    def _say(self, note: str) -> None:
        if self._tells:
            self._world.tell(Line.note(note))
