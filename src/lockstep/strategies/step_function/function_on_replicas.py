"""A step function under ``dp``: each replica's thread runs it, and the threads meet in each call
of ``update``.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING

import torch

from lockstep.data import Batch, Part
from lockstep.model.losses.loss import Loss
from lockstep.strategies.step_function.function_step import FunctionStep
from lockstep.strategies.steps.update_result import added
from lockstep.threads.random_streams import stream

if TYPE_CHECKING:
    from lockstep.strategies.dp import DPStep
else:  # which is put behind this one
    from lockstep.strategies.steps.step import Step as DPStep

_END = ""


class _Meeting:
    """Where the threads of some replicas wait for one another; the last one to come does what is
    to be done.
    """

    def __init__(self, parties: int, act: Callable[[dict[int, tuple[str, Loss]]], None]) -> None:
        self._said: dict[int, tuple[str, Loss]] = {}
        self._act = act
        self._error: Exception | None = None
        self._barrier = threading.Barrier(parties, self._all_are_here)
        self.abort = self._barrier.abort

    def come(self, replica: int, name: str, loss: Loss) -> None:
        """Say what this replica calls, and wait until all calls are made."""
        self._said[replica] = name, loss
        self._barrier.wait()
        if self._error is not None:  # the same one in every thread, whichever ends first
            raise self._error

    def _all_are_here(self) -> None:
        said, self._said = self._said, {}
        try:
            self._act(said)
        except Exception as error:
            self._error = error


class FunctionOnReplicas(FunctionStep, DPStep):
    """Calls the function on every replica's share. It is put before the step of ``dp``."""

    _meeting: _Meeting | None = None

    def run_function(self, batch: Batch) -> None:
        """Run it in the thread of each replica that has samples."""
        self._refresh()
        shares = [share[0] for share in self._scatter(batch)]
        here = [i for i, share in enumerate(shares) if share.size]
        self._meeting = _Meeting(len(here), functools.partial(self._all_call, samples=batch.size))
        self._team.on_abort.append(self._meeting.abort)
        try:
            self._team.run(
                [
                    functools.partial(self._run_on, i, share, batch.size) if share.size else None
                    for i, share in enumerate(shares)
                ]
            )
        finally:
            self._team.on_abort.remove(self._meeting.abort)
        self._kept = self._attributes_now()

    def _run_on(self, i: int, part: Part, samples: int) -> None:
        for p in self._trained[i]:
            p.grad = None
        assert self._meeting is not None
        with stream(self._streams[i] if self._streams else None):
            self.call_function(self._replicas[i], part, samples, i)
            self._meeting.come(i, _END, Loss(0.0, 0))

    def one_update(self, name: str, loss: Loss, samples: int, replica: int) -> None:
        """As on ranks: backward in each replica's thread; one moves the first one's parameters,
        and copies them.
        """
        assert self._meeting is not None
        self.backward_into(self.named(name), name, loss, samples, self._trained[replica])
        self._meeting.come(replica, name, loss.detached())

    @torch.no_grad()
    def _all_call(self, said: dict[int, tuple[str, Loss]], *, samples: int) -> None:
        """With what each replica calls, all being here."""
        names = {name for name, _ in said.values()}
        if len(names) > 1:
            self.refuse_different([said[i][0] if i in said else None for i in range(self.replicas)])
        (name,) = names
        if name == _END:
            return
        if 0 not in said:
            for p in self._parameters:
                p.grad = None
        self._add_span(0, len(self._parameters), [i for i in sorted(said) if i])
        self._move(name, added([said[i][1] for i in sorted(said)], self._summed), samples)
        for i in said:
            for p in self._trained[i]:
                p.grad = None
        self._share_parameters(
            self.moved(name)
        )  # no others, which a graph may still need as they are
