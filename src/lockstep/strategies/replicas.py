"""The replicas of ``dp``: a model, copies of it on other devices, and the sum of their gradients."""

from __future__ import annotations

import bisect
import functools
import itertools
from collections.abc import Callable, Iterable, Sequence
from typing import TypeVar

import torch
from torch import nn

from lockstep.errors import StrategyError
from lockstep.launch.devices import Device
from lockstep.model.attributes import follow_settings
from lockstep.model.build import buffers_of
from lockstep.model.hooks import structure_of
from lockstep.model.modes import NORMS
from lockstep.strategies.copied_model import copied_model
from lockstep.tensors.placing import moved_in_buckets
from lockstep.tensors.seeding import seed_on
from lockstep.threads import recompute
from lockstep.threads.random_streams import stream
from lockstep.threads.thread_pool import ThreadPool

T = TypeVar("T")


class Replicas:
    """A model on the first device, and a copy of it on each other device, each with a thread.

    On CPU devices the copies share the storage of the model's parameters, and have gradients of
    their own. On accelerators they have parameters of their own, which are copied anew before each
    update.

    Args:
        model: the model, which is on the first device.
        devices: where the replicas are.

    Attributes:
        models: the model, then its copies.
        share_storage: whether the copies share the storage of the model's parameters.
        pool: has a thread for each.
    """

    def __init__(self, model: nn.Module, devices: Sequence[Device]) -> None:
        self.share_storage = all(device.is_slot for device in devices)
        self.models = [model]
        self._devices = devices
        for device in devices[1:]:
            self.models.append(copied_model(model, device, shares=self.share_storage))
        self._modules = [list(replica.modules()) for replica in self.models]
        self._parameters = [list(replica.parameters()) for replica in self.models]
        self._buffers = [buffers_of(replica) for replica in self.models]
        self._spans = _even_spans(self._parameters[0], len(devices))
        self.note_structure()
        self.pool = ThreadPool(devices)
        self._streams: list[torch.Generator | None] = [None] * len(devices)
        if self.share_storage:
            self._streams = [torch.Generator() for _ in devices]
        recompute.install()

    def run(self, function: Callable[[int], T], numbers: Iterable[int]) -> list[T]:
        """Call a function with the number of each of these replicas, in its thread.

        Returns:
            What it returned, in order.
        """

        def call(number: int) -> T:
            with stream(self._streams[number]):
                return function(number)

        work: list[Callable[[], T] | None] = [None] * len(self.models)
        for number in numbers:
            work[number] = functools.partial(call, number)
        return [result for result in self.pool.run(work) if result is not None]

    def seed(self, number: int, key: int) -> None:
        """Begin the random stream of a replica."""
        device = self._devices[number]
        generator = self._streams[number]
        if generator is not None:
            generator.manual_seed(key)
        elif not device.is_slot:
            seed_on(device.torch, key)

    def draw_from_shared_generator(self) -> None:
        """Give up random streams on CPU devices: compiled code can't draw from them."""
        self._streams = [None] * len(self.models)

    def note_structure(self) -> None:
        """Note the modules, parameters and hooks of the model, as the copies have them."""
        self._structure = structure_of(self.models[0])

    def refuse_changes(self) -> None:
        """Refuse a model that has other modules, parameters or hooks than noted.

        Raises:
            StrategyError: the model has changed.
        """
        if structure_of(self.models[0]) != self._structure:
            raise StrategyError(
                "dp: modules, parameters or hooks of the model have changed since its replicas "
                "were made: call lockstep.parallelize again, or take ddp"
            )

    # ---- what the copies take from the model -----------------------------------------------------

    @torch.no_grad()
    def follow(self) -> None:
        """Give the copies what an update needs of the model: all but running statistics."""
        self.follow_modes()
        self._follow_parameters()

    @torch.no_grad()
    def follow_all(self) -> None:
        """Give the copies all of the model, with running statistics."""
        self._follow_attributes()
        self._follow_parameters()
        for place in range(len(self._buffers[0])):
            self._copy_buffer(place)

    @torch.no_grad()
    def follow_modes(self) -> None:
        """Give the copies the model's attributes, its mode among them, and buffers that act."""
        self._follow_attributes()
        for place, (module, _) in enumerate(self._buffers[0]):
            # Running statistics act in evaluation only, so they may differ in training.
            if not (isinstance(module, NORMS) and module.training):
                self._copy_buffer(place)

    def _follow_attributes(self) -> None:
        for modules in self._modules[1:]:
            follow_settings(modules, self._modules[0])

    def _follow_parameters(self) -> None:
        mine, *others = self._parameters
        for device, theirs in zip(self._devices[1:], others, strict=True):
            for p, q in zip(mine, theirs, strict=True):
                if q.requires_grad != p.requires_grad:
                    q.requires_grad_(p.requires_grad)
                if self.share_storage and q.data_ptr() != p.data_ptr():
                    q.data = p.data  # somebody gave the parameter other storage
            if not self.share_storage:
                for some, copies in moved_in_buckets(mine, device.torch):
                    torch._foreach_copy_([theirs[k] for k in some], copies)

    def _copy_buffer(self, place: int) -> None:
        # Always: batch norm's own kernels write without changing a buffer's version.
        module, name = self._buffers[0][place]
        value = module._buffers[name]
        assert value is not None
        for device, buffers in zip(self._devices[1:], self._buffers[1:], strict=True):
            copied, _ = buffers[place]
            target = copied._buffers[name]
            if target is not None and target.shape == value.shape:
                target.copy_(value, non_blocking=True)
            else:
                copied._buffers[name] = value.clone().to(device.torch)

    # ---- gradients -------------------------------------------------------------------------------

    def clear_gradients(self, number: int) -> None:
        """Forget the gradients of a replica."""
        for p in self._parameters[number]:
            p.grad = None

    def add_gradients(self) -> None:
        """Add the gradients of the copies, in order, to those of the model.

        On CPU devices each thread adds those of a span of the parameters.
        """
        if len(self.models) == 1:
            return
        if not self.share_storage:
            self._add_span(0, len(self._parameters[0]))
            return
        self.pool.run([functools.partial(self._add_span, *span) for span in self._spans])

    def _add_span(self, start: int, end: int) -> None:
        mine, *others = self._parameters
        for theirs in others:
            parameters = []
            grads = []
            for p, q in zip(mine[start:end], theirs[start:end], strict=True):
                if q.grad is not None:
                    parameters.append(p)
                    grads.append(q.grad)
            if self.share_storage:
                _add(parameters, grads)
                continue
            for which, copies in moved_in_buckets(grads, self._devices[0].torch):
                _add([parameters[k] for k in which], copies)


def _add(parameters: list[nn.Parameter], grads: list[torch.Tensor]) -> None:
    """Add gradients to those that parameters have."""
    sums: list[torch.Tensor] = []
    added: list[torch.Tensor] = []
    for p, grad in zip(parameters, grads, strict=True):
        if p.grad is None:
            p.grad = grad
        elif grad.is_sparse:
            p.grad = p.grad + grad
        else:
            sums.append(p.grad)
            added.append(grad)
    if sums:
        torch._foreach_add_(sums, added)


def _even_spans(parameters: list[nn.Parameter], pieces: int) -> list[tuple[int, int]]:
    """Cut the list of parameters in spans of about equal numbers of trained elements."""
    sizes = [p.numel() if p.requires_grad else 0 for p in parameters]
    done = list(itertools.accumulate(sizes, initial=0))
    cuts = [bisect.bisect_left(done, done[-1] * i / pieces) for i in range(pieces)]
    return list(itertools.pairwise([*cuts, len(parameters)]))
