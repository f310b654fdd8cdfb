"""Transfer: operands that meet on different accelerators are brought to the stage that computes.

A model's hooks move what a layer is given (see ``stage_layers``). What meets between layers
(``cat`` of a skip connection, a tied weight, a mask made on the CPU) is seen by a mode, which
PyTorch asks at each of its functions::

    left  = self.encoder(x)        on card 0
    right = self.decoder(left)     the decoder's hook brings its input to card 1
    torch.cat([left, right])       the mode brings ``left`` to card 1, where the last layer computed

A function that writes computes where the tensor is that it writes to.

PyTorch doesn't ask it of an autograd function that a person has written, so its operands have to be
on one stage.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils.weak import WeakIdKeyDictionary

from lockstep.pipelining.card_queues import CardQueues
from lockstep.tensors.pytree import each, tensors
from lockstep.tensors.seeding import kept_state_on, put_state_on, state_on

_here = threading.local()

_Copies = dict[tuple[torch.device, bool], tuple[int, Tensor]]
"""By where a copy is, and whether it has gradients: the version of the tensor, and the copy."""


def current() -> TransferMode | None:
    """Give the mode that this thread is in, or None."""
    return getattr(_here, "mode", None)


class TransferMode(TorchFunctionMode):
    """What a forward and its loss run in: it moves operands to the stage that computes.

    Args:
        places: the devices of all stages.
        place: where to begin; None is on the first.
        owner: the model whose hooks enter and leave it, if they do.
        queues: of the micro-batch, where it overlaps with others.
    """

    def __init__(
        self,
        places: Sequence[torch.device],
        place: torch.device | None = None,
        owner: nn.Module | None = None,
        queues: CardQueues | None = None,
    ) -> None:
        super().__init__()
        self.owner = owner
        self._queues = queues
        self.place = place or places[0]
        self._places = places
        # Of tensors that are still there: an evaluation would keep all activations else.
        self._copies: MutableMapping[Tensor, _Copies] = WeakIdKeyDictionary()

    def __enter__(self) -> TransferMode:
        self._before = current()
        _here.mode = self
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *error: object) -> None:
        super().__exit__(*error)  # type: ignore[no-untyped-call]
        _here.mode = self._before
        self._copies.clear()

    def moved(self, tensor: Tensor) -> Tensor:
        """Give a tensor on the stage that computes; what several layers there are given is copied
        once.

        A copy that was made without gradients is another one.
        """
        place = self.place
        if tensor.device == place or _is_number(tensor):
            return tensor
        with torch._C.DisableTorchFunction():
            if tensor.is_inference():
                return self._copied(tensor)
            has_gradient = tensor.requires_grad and torch.is_grad_enabled()
            copies = self._copies.setdefault(tensor, {})
            version, copy = copies.get((place, has_gradient), (-1, tensor))
            if version != tensor._version:
                copy = self._copied(tensor)
                copies[place, has_gradient] = tensor._version, copy
            return copy

    def _copied(self, tensor: Tensor) -> Tensor:
        """Copy a tensor to the stage that computes."""
        queues = self._queues
        if queues is None or tensor.device not in queues.places:
            return tensor.to(self.place, non_blocking=True)
        copy = queues.sent(tensor, self.place)
        if not queues.leaves:  # it is used at once
            queues.wait(self.place)
        return copy

    def nest_moved(self, nest: Any) -> Any:
        """Give what a layer is given, on the stage that computes."""
        return each(self.moved, nest, on_packed=lambda packed: packed)

    def __torch_function__(
        self,
        func: Any,
        types: Any,
        args: Any = (),
        kwargs: Any = None,
    ) -> Any:
        kwargs = kwargs or {}
        if func in _SETS_DATA:  # PyTorch's count of writes doesn't tell
            self._copies.clear()
        if func not in _ANYWHERE:
            operands = (*args, *kwargs.values())
            if _meet(operands):
                args, kwargs = self._together(func, args, kwargs)
        if self._queues is None or func.__name__ == "__get__":
            return func(*args, **kwargs)
        return self._queued(self._queues, func, args, kwargs)

    def _queued(
        self,
        queues: CardQueues,
        func: Any,
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
    ) -> Any:
        """Call a function; where it computes on another stage's device, that is behind the copies
        made there.

        Args:
            queues: of the micro-batch.
            func: the function.
            args: its arguments, which have been moved.
            kwargs: its arguments by name, which have been moved.
        """
        if func in _ANYWHERE:
            queues.wait_all()
            found = func(*args, **kwargs)
            queues.wait_all()
            return found
        self._wait_elsewhere(queues, (*args, *kwargs.values()))
        found = func(*args, **kwargs)
        self._wait_elsewhere(queues, (found,))
        return found

    def _wait_elsewhere(self, queues: CardQueues, nests: tuple[Any, ...]) -> None:
        """Wait where tensors are that aren't on the stage that computes."""
        for tensor in _operands(nests):
            if tensor.device != self.place and not tensor.is_cpu:
                queues.wait(tensor.device)

    def _together(
        self,
        func: Any,
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
    ) -> tuple[tuple[Any, ...], Mapping[str, Any]]:
        """Move arguments to one device: that of what is written to, else of the stage that
        computes.

        Args:
            func: the function that is called with them.
            args: arguments on several devices.
            kwargs: arguments by name.
        """
        stage = self.place
        written = _written(func, args, kwargs)
        if written is not None:
            self.place = written.device
        given = args, dict(kwargs)
        try:
            moved: tuple[tuple[Any, ...], Mapping[str, Any]] = self.nest_moved(given)
        finally:
            self.place = stage
        return moved


def later() -> Callable[[], contextlib.AbstractContextManager[Any]] | None:
    """Give what a checkpoint that begins now has to be computed again in: its mode, and each card's
    random numbers.

    Autograd computes it again in a thread of its own, and PyTorch keeps the generators of those
    cards only on which the checkpoint's arguments are.
    """
    mode = current()
    if mode is None:
        return None
    places = mode._places
    place = mode.place
    states = {one: state_on(one) for one in set(places)}

    @contextlib.contextmanager
    def again() -> Iterator[None]:
        with _one_at_a_time, contextlib.ExitStack() as stack:
            for one, state in states.items():
                stack.enter_context(kept_state_on(one))
                put_state_on(one, state)
            with TransferMode(places, place):
                yield

    return again


_one_at_a_time = threading.RLock()


def _written(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Tensor | None:
    """Find the tensor that a function writes to, where all else has to come to."""
    out = kwargs.get("out")
    if out is not None:
        return next(tensors(out), None)
    written: Any = None
    if func in _WRITES_STATISTICS:
        written = _argument(1, "running_mean", args, kwargs)
    elif func in _WRITES_WEIGHT:
        if _argument(3, "max_norm", args, kwargs) is not None:
            written = _argument(1, "weight", args, kwargs)
    elif _is_in_place(getattr(func, "__name__", "")):
        written = next(_operands(args), None)
    if not isinstance(written, Tensor):
        return None
    return written


def _argument(place: int, name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    """Give an argument by its name, else by its place, else None."""
    if name in kwargs:
        return kwargs[name]
    if place < len(args):
        return args[place]
    return None


def _is_in_place(name: str) -> bool:
    """Return whether a function of that name writes to its first operand: ``add_``, ``__iadd__``."""
    is_operator = name.startswith("__i") or name in ("__setitem__", "__set__")
    return is_operator or (name.endswith("_") and not name.endswith("__"))


_WRITES_STATISTICS = {F.batch_norm, F.instance_norm, torch.batch_norm, torch.instance_norm}
_WRITES_WEIGHT = {F.embedding, F.embedding_bag}
"""With ``max_norm``."""
_SETS_DATA = {Tensor.data.__set__}  # type: ignore[attr-defined]
_ANYWHERE = {
    Tensor.to,
    Tensor.copy_,
    Tensor.type_as,
    Tensor.to_dense,
    Tensor.view_as,
    Tensor.expand_as,
    Tensor.reshape_as,
    Tensor.is_set_to,
    torch.autograd.grad,
    torch.autograd.backward,
    Tensor.backward,
}
"""Functions that may have operands on two devices."""


def _meet(nests: tuple[Any, ...]) -> bool:
    """Return whether operands are on several devices; a number on the CPU may be anywhere."""
    found = list(_operands(nests))
    return any(t.device != found[0].device and not _is_number(t) for t in found[1:])


def _is_number(tensor: Tensor) -> bool:
    """Return whether it is a number on the CPU, which may be used on any device."""
    return tensor.is_cpu and not tensor.dim()


def _operands(nests: tuple[Any, ...]) -> Iterator[Tensor]:
    """List the tensors among arguments, and in lists and tuples of these."""
    for nest in nests:
        if isinstance(nest, Tensor):
            yield nest
        elif isinstance(nest, list | tuple):
            yield from tensors(nest)
