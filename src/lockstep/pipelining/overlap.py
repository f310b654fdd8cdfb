"""Overlap: what a model's updates have shown of it: its way through the stages, and whether
micro-batches may overlap.

::

    first update, in turn  micro-batch 0      shows the route
                           the last           what is left behind for the next one (`state_probe`)
                           each               what it draws
    those that overlap     looked at from outside: has it begun with something since? Then the next one is in turn

Only a model that draws random numbers has streams of its own for its micro-batches: a stream sees
every call of a PyTorch function, 3 % of an update of small operators. A model that drew nothing in
its first update goes without. Should it begin to, its threads have drawn from one generator as they
happened to come: that update's gradients are thrown away, and it is computed once more, with
streams, which it keeps.

No stream gives what is drawn in backward (the autograd engine runs functions without a thread's
modes), by operators that aren't PyTorch's own, and from Python's or numpy's random. A model that
draws such numbers has its micro-batches one after the other, and so has one whose micro-batches
take different ways back and forth through the stages.

On accelerators one micro-batch at a time has the turn, and all generators are put where it has left
them: whatever draws, each has numbers of its own.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import torch
from torch import nn

from lockstep.launch.events import Line
from lockstep.launch.world import World
from lockstep.pipelining.microbatch import Flight
from lockstep.pipelining.schedule import Route, has_way, whole
from lockstep.pipelining.state_probe import Begun, StateProbe
from lockstep.tensors.seeding import noted_seeding, put_states, same, same_others, states
from lockstep.threads import recompute

_OFTEN = 3
"""Updates that began to change something, after which none overlaps."""

_CHANCE = ", in an order that would be left to chance"
_OTHERS = f"forward draws from Python's or numpy's random{_CHANCE}"


@dataclass(eq=False)
class Overlap:
    """What is known of a model."""

    model: nn.Module
    world: World  # which is told why micro-batches don't overlap, and at which step
    stages: int
    cards: tuple[torch.device, ...] = ()  # the accelerators that hold the stages
    route: Route = ()  # the stages that micro-batches visit, in order; empty before the first one
    in_turn: str | None = None  # why they have to follow one another, as far as is known
    _begun: Begun | None = None  # there is one once a micro-batch was watched
    _doubtful: dict[int, str] = field(
        default_factory=dict
    )  # by update what began to change while they overlapped
    _draws: bool = False
    _drawn: str | None = None  # what no stream gives
    _streamed: bool = False
    _said_strayed: bool = False

    def __post_init__(self) -> None:
        recompute.install()

    @property
    def allowed(self) -> bool:
        """Whether the next update's micro-batches may."""
        return self._begun is not None and self.in_turn is None

    @property
    def draws(self) -> bool:
        """Whether micro-batches that overlap need random streams of their own."""
        return self._draws or (self._begun is not None and bool(self._begun.written))

    # ---- one after the other ---------------------------------------------------------------------

    @contextlib.contextmanager
    def alone(
        self, flight: Flight, count: int
    ) -> Iterator[contextlib.AbstractContextManager[None]]:
        """Around a micro-batch that no other overlaps, one of ``count``; gives what its forward
        has to run in.
        """
        if self.in_turn is not None:
            yield contextlib.nullcontext()
            return
        self._look()
        # (By the last one what is set once is there.)
        is_watched = self._begun is None and 0 < flight.number == count - 1
        probe = StateProbe(self.model, flight) if is_watched else None
        seeds: list[int] = []
        turned = self._before.torch

        @contextlib.contextmanager
        def in_forward() -> Iterator[None]:
            nonlocal turned
            with (
                noted_seeding() as seen,
                contextlib.nullcontext() if probe is None else probe.watching(),
            ):
                yield
            turned = torch.get_rng_state()
            seeds.extend(seen)

        yield in_forward()
        now = states(self.cards)
        # What it draws that no stream gives; an activation checkpoint sets PyTorch's generator
        # back.
        if self.cards:
            self._draws = self._draws or not same(now, self._before)
        elif not torch.equal(now.torch, turned):
            self._drawn = f"backward draws random numbers{_CHANCE}"
        elif not same_others(now.others, self._before.others):
            self._drawn = _OTHERS
        elif seeds:
            self._drawn = "forward seeds PyTorch's generator, which is one for all micro-batches"
        self._draws = self._draws or self._moved() or self._checkpoints != recompute.checkpoints()
        if self._begun is None:
            self._learn(flight)
        if probe is not None:
            self._begun = Begun(self.model, probe.written())
            # Tensors that each micro-batch may write to are in order as they overlap.
            self._doubtful = {
                at: name for at, name in self._doubtful.items() if name not in self._begun.written
            }
            why = probe.why_in_turn() or self._drawn
            if why is not None:
                self._go_in_turn(why)

    # ---- overlapped ------------------------------------------------------------------------------

    def look(self) -> None:
        """An update whose micro-batches overlap begins."""
        assert self._begun is not None
        self._streamed = self.draws
        self._begun.look()
        self._look()

    def spoiled(self, flights: Sequence[Flight], *, seeded: bool) -> bool:
        """It is over: whether it has to be computed again, since the model began to draw as no
        stream gave it.
        """
        assert self._begun is not None
        written, changed = self._begun.written, self._begun.changed()
        if changed is not None:
            self._begun = None  # the next one is watched
            self._doubtful[self.world.step] = changed
        others = not self.cards and not same_others(states().others, self._before.others)
        if self.cards:
            drew = not self._streamed and not same(states(self.cards), self._before)
        else:  # (Streams without seeds of their own draw them from PyTorch's generator.)
            drew = (seeded or not self._streamed) and self._moved()
        self._draws = self._draws or drew or self._checkpoints != recompute.checkpoints()
        spoiled = others or drew
        if spoiled:
            put_states(self._before, self.cards)
        if spoiled and (changed is not None or written):
            spoiled = False
            self._say(
                f"at step {self.world.step} the model began to draw random numbers and to write "
                "buffers or "
                "attributes: its numbers may be other ones there"
            )
        if others:
            self._go_in_turn(_OTHERS)
        elif drew and self._streamed:
            self._go_in_turn(
                f"backward, or an operator that isn't PyTorch's own, draws random numbers{_CHANCE}"
            )
        elif len(self._doubtful) == _OFTEN:
            self._go_in_turn(f'"{changed}" is now and then changed in forward')
        for flight in flights:
            if flight.strayed:
                self._learn(flight)
        return spoiled

    # ---- both ------------------------------------------------------------------------------------

    def _look(self) -> None:
        """Something is going to be computed."""
        self._before = states(self.cards)
        self._checkpoints = recompute.checkpoints()

    def _moved(self) -> bool:
        """Whether PyTorch's generator has."""
        return not torch.equal(torch.get_rng_state(), self._before.torch)

    def _learn(self, flight: Flight) -> None:
        """The longest way is the route, which has all others in it."""
        if flight.strayed and not self._said_strayed:
            self._said_strayed = True
            self._say(
                f"at step {self.world.step} a micro-batch took another way through the stages "
                "than those before; "
                "where that happens, the order of sums, and so the last bits, may differ from run "
                "to run"
            )
        way = whole(tuple(flight.seen), self.stages)
        if has_way(way, self.route):
            self.route = way
        elif not has_way(self.route, way) and self.in_turn is None:
            self._go_in_turn("micro-batches take different ways back and forth through the stages")

    def _go_in_turn(self, why: str) -> None:
        self.in_turn = why
        doubt = ""
        if self._doubtful:
            steps = ", ".join(map(str, self._doubtful))
            doubt = (
                f"; they overlapped at step {steps}, whose numbers may not be those of one device"
            )
        self._say(f"{why}: micro-batches follow one another, and nothing overlaps{doubt}")

    def _say(self, note: str) -> None:
        self.world.tell(Line.note(note))
