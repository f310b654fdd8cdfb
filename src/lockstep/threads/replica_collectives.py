"""Exchange: small tensors handed round between all that work on one micro-batch, replicas on
threads or ranks.

``torch.nn.SyncBatchNorm`` refuses CPU tensors, and knows processes only. Here each party puts its
tensor into a box for each other, and takes theirs out of its own: one wait, no barrier, and the
order of the sum is always the same::

    party 0  ──t0──▶ box 0→1        takes box 1→0, box 2→0   stacks t0, t1, t2
    party 1  ──t1──▶ box 1→0 ...    takes box 0→1, box 2→1   stacks t0, t1, t2

Parties are always the first replicas: a replica with an empty share doesn't take part.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from queue import SimpleQueue
from typing import Any

import torch
import torch.distributed as dist

from lockstep.errors import StrategyError
from lockstep.launch.observer import Observer, phase
from lockstep.launch.world import World, wait_awake

_exchanging = phase("communicating", "batch norm")


class ThreadExchange:
    """Between replicas on threads of one process.

    The caller calls ``begin`` before each step, each replica's thread ``enter`` before each of its
    micro-batches. The backward of a micro-batch must run in the thread of its forward (on
    accelerators autograd has a thread for each device, which will do), and ``abort`` must be called
    where a replica raises: ``pool.on_abort.append(x.abort)``.

    Args:
        parties: how many replicas there are.
        observers: are called for each exchange.
    """

    def __init__(self, parties: int, observers: list[Observer] | None = None) -> None:
        self.size = parties
        self._observers = [] if observers is None else observers
        self._here = threading.local()
        self._rooms: list[_Room] = []
        self.begin(parties)

    def begin(self, parties: int | Sequence[int]) -> None:
        """Begin a step.

        Args:
            parties: the number of replicas that take part, the first ones; a list where the number
                differs by micro-batch.
        """
        counts = [parties] if isinstance(parties, int) else parties
        self._rooms = [_Room(count) for count in counts]

    def enter(self, replica: int, micro_batch: int = 0) -> None:
        """The calling thread computes this replica's share of this micro-batch from now on."""
        self._here.session = _Seat(self._rooms[micro_batch], replica, self._observers)

    def leave(self, replica: int, micro_batch: int = 0) -> None:
        """This replica's share of this micro-batch is done, backward too: one that still waits
        for it stops waiting.
        """
        self._rooms[micro_batch].leave(replica)

    def session(self) -> Session:
        """Give the place of the calling thread, since its last ``enter``."""
        seat: _Seat | None = getattr(self._here, "session", None)
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
            room.abort()

    def __deepcopy__(self, memo: dict[int, Any]) -> ThreadExchange:
        return self  # a copied replica is a party to the same exchange


_GONE = object()
"""Lies in a box whose sender won't come any more."""


class _Room:
    """The boxes of one micro-batch.

    Attributes:
        parties: how many replicas take part.
        boxes: ``boxes[sender][receiver]`` has what one has sent to the other, in order.
    """

    def __init__(self, parties: int) -> None:
        self.parties = parties
        self.boxes: list[list[SimpleQueue[Any]]] = []
        for _ in range(parties):
            self.boxes.append([SimpleQueue() for _ in range(parties)])

    def leave(self, party: int) -> None:
        """Tell all others that nothing more comes from this party."""
        for box in self.boxes[party]:
            box.put(_GONE)

    def abort(self) -> None:
        """Tell all that nothing more comes from anybody."""
        for party in range(self.parties):
            self.leave(party)


class _Seat:
    """One replica's place in one micro-batch.

    Attributes:
        observers: are called for each exchange.
        room: the boxes of the micro-batch.
        parties: how many replicas take part in it.
    """

    def __init__(self, room: _Room, number: int, observers: list[Observer]) -> None:
        self.observers = observers
        self.room = room
        self.parties = room.parties
        self._number = number
        self._thread = threading.get_ident()

    @_exchanging
    def gather(self, tensor: torch.Tensor) -> torch.Tensor:
        """Gather everybody's tensor, in the order of the parties: ``(parties, *tensor.shape)``.

        Raises:
            StrategyError: another party has left, or has failed.
        """
        me = self._number
        boxes = self.room.boxes
        for other in range(self.parties):
            if other != me:
                boxes[me][other].put(tensor)
        found = []
        for other in range(self.parties):
            item = tensor if other == me else boxes[other][me].get()
            if item is _GONE:
                raise StrategyError(
                    f"sync_batchnorm: replica {me} stopped waiting: another one failed, or took a "
                    "branch without this batch norm; let each forward call all of them, or leave "
                    "sync_batchnorm off"
                )
            found.append(item.to(tensor.device))
        return torch.stack(found)

    @_exchanging
    def sum(self, tensor: torch.Tensor) -> torch.Tensor:
        """Give the sum of everybody's tensors, the same bits for all.

        Raises:
            StrategyError: backward runs in another thread than forward.
        """
        is_elsewhere = tensor.is_cpu and threading.get_ident() != self._thread
        if is_elsewhere and self.parties > 1:
            raise StrategyError(
                "synchronised batch norm: backward runs in another thread than forward, where the "
                "replicas would wait for each other forever: run loss and backward of each "
                "replica inside its own thread"
            )
        return self.gather(tensor).sum(0)


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
        self._groups: dict[int, dist.ProcessGroup] = {}

    def begin(self, parties: int) -> None:
        """Begin a micro-batch. Every rank calls this with the same number, also without samples.

        The first time all ranks together make a group of the ranks that take part.

        Args:
            parties: the number of ranks that take part, the first ones.
        """
        self.parties = parties
        if 1 < parties < self._world.size and parties not in self._groups:
            group = dist.new_group(list(range(parties)))
            assert group is not None
            self._groups[parties] = group

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
        group = self._groups.get(self.parties)
        if tensor.is_cpu:
            wait_awake(dist.all_gather(found, tensor, group=group, async_op=True))
        else:
            dist.all_gather(found, tensor, group=group)
        return torch.stack(found)

    @_exchanging
    def sum(self, tensor: torch.Tensor) -> torch.Tensor:
        """Give the sum of everybody's tensors, the same bits for all."""
        if self.parties == 1:
            return tensor
        return self._world.all_reduce(tensor.clone(), group=self._groups.get(self.parties))

    def __deepcopy__(self, memo: dict[int, Any]) -> RankExchange:
        return self


Exchange = ThreadExchange | RankExchange
"""How the parties of a micro-batch find each other."""

Session = _Seat | RankExchange
"""What one party needs in one micro-batch, in forward and in backward."""
