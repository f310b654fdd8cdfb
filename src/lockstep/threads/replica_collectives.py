"""Exchange: small tensors handed round between all that work on one micro-batch, replicas on
threads or ranks.

``torch.nn.SyncBatchNorm`` refuses CPU tensors, and knows processes only. Here the parties of a
micro-batch put their tensors into a box for each round, and take all of them out of it once it is
full; the order of a sum is always the same::

    party 0  ──t0──▶ ┌ box of round 0 ┐   takes t0, t1, t2
    party 1  ──t1──▶ │   t0  t1  t2   │   takes t0, t1, t2
    party 2  ──t2──▶ └────────────────┘   takes t0, t1, t2

Parties are always the first replicas: a replica with an empty share doesn't take part.
"""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Sequence
from typing import Any, Self

import torch
import torch.distributed as dist

from lockstep.errors import StrategyError
from lockstep.launch.observer import Observer, phase
from lockstep.launch.world import World, wait_awake

_exchanging = phase("communicating", "batch norm")


class ThreadExchange:
    """Between replicas on threads of one process.

    The caller calls ``begin`` before each step, each replica's thread ``enter`` before each of its
    micro-batches, and ``abort`` must be called where a replica raises.

    Args:
        observers: are called for each exchange.
    """

    def __init__(self, observers: Sequence[Observer] = ()) -> None:
        self._observers = observers
        self._here = threading.local()
        self._rooms: list[_Room] = []

    def begin(self, *parties: int) -> None:
        """Begin a step.

        Args:
            parties: for each micro-batch the number of replicas that take part, the first ones.
        """
        self._rooms = [_Room(count) for count in parties]

    def enter(self, replica: int, micro_batch: int = 0) -> None:
        """The calling thread computes this replica's share of this micro-batch from now on."""
        self._here.seat = _Seat(self._rooms[micro_batch], replica, self._observers)

    def leave(self, replica: int, micro_batch: int = 0) -> None:
        """This replica's share of this micro-batch is done, backward too: one that still waits
        for it stops waiting.
        """
        self._rooms[micro_batch].leave(replica)

    def session(self) -> Session:
        """Give the place of the calling thread, since its last ``enter``."""
        seat: _Seat | None = getattr(self._here, "seat", None)
        if seat is None or seat.room not in self._rooms:
            raise StrategyError(
                "synchronised batch norm was called in training mode outside of a step: call "
                "model.eval() before a forward of your own (or, with an exchange of your own, "
                "exchange.begin and exchange.enter)"
            )
        return seat

    def abort(self) -> None:
        """Free those that wait for one another: they raise ``StrategyError``."""
        for room in self._rooms:
            room.leave(*range(room.parties))

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        return self  # a copied replica is a party to the same exchange


class _Room:
    """The boxes of one micro-batch.

    Attributes:
        parties: how many replicas take part.
        boxes: by round what each replica has put in.
        left: the replicas that put nothing in any more.
        changed: is notified of what is put in, and of who leaves.
    """

    def __init__(self, parties: int) -> None:
        self.parties = parties
        self.boxes: defaultdict[int, dict[int, torch.Tensor]] = defaultdict(dict)
        self.left: set[int] = set()
        self.changed = threading.Condition()

    def leave(self, *replicas: int) -> None:
        """Tell all others that nothing more comes from these."""
        with self.changed:
            self.left.update(replicas)
            self.changed.notify_all()


class _Seat:
    """One replica's place in one micro-batch.

    Attributes:
        room: the boxes of the micro-batch.
        parties: how many replicas take part in it.
        observers: are called for each exchange.
    """

    def __init__(self, room: _Room, number: int, observers: Sequence[Observer]) -> None:
        self.room = room
        self.parties = room.parties
        self.observers = observers
        self._number = number
        self._round = 0

    @_exchanging
    def gather(self, tensor: torch.Tensor) -> torch.Tensor:
        """Gather everybody's tensor, in the order of the parties: ``(parties, *tensor.shape)``.

        Raises:
            StrategyError: another party has left, or has failed.
        """
        room = self.room
        with room.changed:
            box = room.boxes[self._round]
            self._round += 1
            box[self._number] = tensor
            room.changed.notify_all()
            room.changed.wait_for(lambda: len(box) == self.parties or room.left - box.keys())
        if len(box) < self.parties:
            raise StrategyError(
                f"sync_batchnorm: replica {self._number} stopped waiting: another one failed, or "
                "took a branch without this batch norm; let each forward call all of them, or "
                "leave sync_batchnorm off"
            )
        return torch.stack([box[other].to(tensor.device) for other in range(self.parties)])


class RankExchange:
    """Between ranks, through torch.distributed.

    Args:
        world: this process's place among them.

    Attributes:
        parties: how many ranks take part in the present micro-batch.
    """

    def __init__(self, world: World) -> None:
        self.parties = world.size
        self.observers = world.observers
        self._world = world
        self._groups: dict[int, dist.ProcessGroup | None] = {}

    def begin(self, parties: int) -> None:
        """Begin a micro-batch. Every rank calls this with the same number, also without samples.

        The first time all ranks together make a group of the ranks that take part.

        Args:
            parties: the number of ranks that take part, the first ones.
        """
        self.parties = parties
        if 1 < parties < self._world.size and parties not in self._groups:
            self._groups[parties] = dist.new_group(list(range(parties)))

    def session(self) -> Session:
        """Give the place of this rank in the present micro-batch, until the next ``begin``."""
        return self

    @_exchanging
    def gather(self, tensor: torch.Tensor) -> torch.Tensor:
        """Gather everybody's tensor, in the order of the ranks."""
        if self.parties == 1:
            return tensor[None]
        tensor = tensor.contiguous()
        found = [torch.empty_like(tensor) for _ in range(self.parties)]
        work = dist.all_gather(
            found, tensor, group=self._groups.get(self.parties), async_op=tensor.is_cpu
        )
        if work is not None:
            wait_awake(work)
        return torch.stack(found)

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        return self


Exchange = ThreadExchange | RankExchange
"""How the parties of a micro-batch find each other."""

Session = _Seat | RankExchange
"""What one party needs in one micro-batch, in forward and in backward."""
