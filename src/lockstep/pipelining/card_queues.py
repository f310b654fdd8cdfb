"""CardQueues: what one micro-batch gives to the queues of accelerators, in its turns and between
them.

Each accelerator works off its queue (a stream) in the order in which it was given things. PyTorch's
copy from one to another waits for all that both have been given, and holds both. So a micro-batch
copies on streams of its own, behind what it has computed itself, and only its own next visit waits
for what arrives::

    card 0   F0 F1 F2 ...            behind each of them its copy, which doesn't hold F1 and F2,
               ╲  ╲  ╲
    card 1      F0 F1 ...            and before each of them a wait for its own copy

In the forward hooks and a mode see what is sent, and wait here (``stage_layers``, ``transfer``). In
the backward autograd waits, for the streams that were current when a node of its graph was made:
those of the copies.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from lockstep.tensors.seeding import States, put_states, states


class CardQueues:
    """What one micro-batch gives to the queues.

    Args:
        places: of each stage the accelerator that holds it.
        computing: by accelerator, the stream that all micro-batches compute on.
        copying: by accelerator, the stream that this one copies on.
        random: where its random numbers begin, None if they aren't its own: generators are put where it has
            left them, in each of its turns.
        shared: parameters that micro-batches have sent, by their ids; it adds those that it sends.

    Attributes:
        draws: whether its random numbers are its own.
        leaves: whether it sends what the next stage is given, in the turn of the one before.
    """

    def __init__(
        self,
        places: Sequence[torch.device],
        computing: Mapping[torch.device, torch.Stream],
        copying: Mapping[torch.device, torch.Stream],
        random: States | None,
        shared: dict[int, Tensor],
    ) -> None:
        self.places = places
        self.draws = random is not None
        self.leaves = False
        self._computing = computing
        self._copying = copying
        self._random = random
        self._shared = shared
        self._views: dict[int, Tensor] = {}  # of those
        # Where it is not: what it has computed there is done.
        self._left: dict[torch.device, torch.Event] = {}
        # From there or to there, and not waited for there.
        self._copied: dict[torch.device, list[torch.Event]] = {}
        # Gradients on their way, which autograd would add others to.
        self._held: list[Tensor] = []
        # From there, how backward takes that turn again.
        self._backs: dict[torch.device, Callable[[], None]] = {}

    @contextlib.contextmanager
    def streams(self) -> Iterator[None]:
        """Make the computing streams current in this thread."""
        with contextlib.ExitStack() as stack:
            for one in self._computing.values():
                # Only one thread can enter the object.
                same = torch.Stream(
                    stream_id=one.stream_id,
                    device_index=one.device_index,
                    device_type=one.device_type,
                )
                stack.enter_context(same)
            yield

    def begin(self) -> None:
        """Begin the first turn: what is made now comes last in backward, in the turn of the first
        stage.

        The gradient of a parameter that is sent (a tied weight) would else make the card wait for
        it that has it.
        """
        for key, parameter in self._shared.items():
            self._views[key] = parameter.view_as(parameter)

    def enter(self, stage: int) -> None:
        """Begin the turn of a stage."""
        place = self.places[stage]
        torch.accelerator.set_device_index(place.index)
        self.wait(place)
        if self._random is not None:
            put_states(self._random, tuple(self._computing))

    def leave(self, stage: int) -> None:
        """End the turn of a stage."""
        if self._random is not None:
            self._random = states(tuple(self._computing))
        place = self.places[stage]
        self._left[place] = self._computing[place].record_event()

    def wait(self, place: torch.device) -> None:
        """Compute on an accelerator from here on, in its turn or not, behind the copies that it
        has made there.
        """
        for copied in self._copied.pop(place, ()):
            self._computing[place].wait_event(copied)
        self._left.pop(place, None)

    def wait_all(self) -> None:
        """Compute on every accelerator behind the copies that it has made there."""
        for place in self._computing:
            self.wait(place)

    def close(self) -> None:
        """End: the micro-batch is through, or has failed."""
        self.wait_all()
        self._held.clear()
        self._views.clear()

    @contextlib.contextmanager
    def sending(self, stage: int, come_back: Callable[[int], None]) -> Iterator[None]:
        """Send what the next stage is given, in this context.

        Args:
            stage: from which it is sent.
            come_back: called with that stage in backward.
        """
        self.leaves = True
        self._backs = {self.places[stage]: functools.partial(come_back, stage)}
        try:
            yield
        finally:
            self.leaves = False
            self._backs = {}

    def sent(self, tensor: Tensor, place: torch.device) -> Tensor:
        """Copy an accelerator's tensor to another one, which may be used after ``wait``.

        Args:
            tensor: on an accelerator.
            place: another one.
        """
        source = tensor.device
        out = self._copying[source]
        into = self._copying[place]
        left = self._left.get(source)
        if left is None:
            left = self._computing[source].record_event()
        out.wait_event(left)
        for copied in self._copied.get(source, ()):  # it may have come from elsewhere itself
            out.wait_event(copied)
        is_graph = tensor.requires_grad and torch.is_grad_enabled()
        if is_graph and tensor.is_leaf:
            tensor = self._view_of(tensor)
        with out, into:
            if is_graph:
                back = self._backs.get(source)
                copy: Tensor = _Sent.apply(tensor, place, self, back)  # type: ignore[no-untyped-call]
            else:
                copy = tensor.to(place, non_blocking=True)
            copied = into.record_event()
        _keep_for(tensor, out)
        _keep_for(copy, self._computing[place])
        for one in (source, place):
            events = self._copied.setdefault(one, [])
            events.append(copied)
        return copy

    def _view_of(self, leaf: Tensor) -> Tensor:
        """Give a view of a leaf, whose gradient is to be accumulated on the computing stream."""
        if isinstance(leaf, nn.Parameter):
            self._shared[id(leaf)] = leaf
        view = self._views.get(id(leaf))
        if view is None:
            view = leaf.view_as(leaf)
        return view

    def sent_back(self, gradient: Tensor, place: torch.device) -> Tensor:
        """Copy a gradient, for which autograd waits, and which it has waited for.

        Args:
            gradient: of the copy that was sent.
            place: the accelerator of the original tensor.
        """
        self._held.append(gradient)
        with self._copying[place], self._copying[gradient.device]:
            copy: Tensor = gradient.to(place, non_blocking=True)
        _keep_for(copy, self._computing[place])
        return copy


def _keep_for(tensor: Tensor, stream: torch.Stream) -> None:
    """Keep a tensor's memory until a stream that it was not made on has used it."""
    if tensor.layout == torch.strided:  # for others autograd does it
        tensor.record_stream(stream)


class _Sent(torch.autograd.Function):
    """A copy on the streams that are current, forward and back."""

    @staticmethod
    def forward(
        ctx: Any,
        tensor: Tensor,
        place: torch.device,
        queues: CardQueues,
        back: Any,
    ) -> Tensor:
        ctx.source = tensor.device
        ctx.queues = queues
        ctx.back = back
        return tensor.to(place, non_blocking=True)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        sent = ctx.queues.sent_back(gradient, ctx.source)
        if ctx.back is not None:
            # takes the turn of the stage that it came from, which autograd then lets wait
            ctx.back()
        return sent, None, None, None
