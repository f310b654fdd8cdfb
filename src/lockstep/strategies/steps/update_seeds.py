"""Draws: the random streams of the updates of one process."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from lockstep.data import mixed
from lockstep.launch.observer import observed
from lockstep.launch.world import World
from lockstep.tensors.seeding import kept_states, seed_all

_OPTIMIZER = -1
"""The number, instead of a micro-batch's, for the stream of an optimizer that draws."""


class Draws:
    """Seeds the generators of a process for each update and each micro-batch.

    Attributes:
        stream: the numbers that seeds are made of; None where the caller's generators go on.
        accelerators: the devices of this process other than CPU devices.
    """

    def __init__(self, world: World) -> None:
        self._world = world
        self._data_rank = world.data.rank
        self.observers = world.observers
        self.stream: tuple[int, ...] | None = None
        found = [device.torch for device in world.devices if not device.is_slot]
        self.accelerators = tuple(found)

    def begin(self, seed: int, number: int) -> None:
        """Begin the stream of an update, which can be repeated.

        Args:
            seed: of the job.
            number: of the update, or of a batch.
        """
        self.stream = (seed, number, self._data_rank)
        seed_all(mixed(*self.stream), self.accelerators)

    @observed(lambda observer, draws, number: observer.microbatch(number))
    def begin_part(self, number: int) -> None:
        """Give micro-batch ``number`` its stream, the same whenever it is computed."""
        if number and self.stream is not None:
            seed_all(mixed(*self.stream, number), self.accelerators)

    def begin_optimizer(self, *, alike: bool) -> None:
        """Give the optimizer its stream.

        Args:
            alike: whether it draws the same on all ranks.
        """
        if self.stream is not None:
            stream = self.stream[:2] if alike else self.stream
            seed_all(mixed(*stream, _OPTIMIZER), self.accelerators)

    @contextmanager
    def own_streams_of_parts(self, parts: int, number: int = 0) -> Iterator[None]:
        """Give each micro-batch of an update a stream, where nobody has called ``begin``.

        The streams follow from where the caller's stream stands, which stays there. So they are the
        same in whichever order a strategy computes the micro-batches.

        Args:
            parts: how many micro-batches there are.
            number: of the call in this update.
        """
        if self._world.size > 1 or parts == 1 or self.stream is not None:
            yield
            return
        with kept_states(self.accelerators):
            key = mixed(int(torch.randint(2**62, ())), self._world.step, number)
            self.stream = (key,)
            seed_all(mixed(key), self.accelerators)
            try:
                yield
            finally:
                self.stream = None
