"""A look at one forward, without running it: which modules it calls in which order, what they cost,
what they keep.

The model's tensors are replaced by fake ones (PyTorch's FakeTensorMode), which have shapes and no
values, so a model of any size is looked at in a moment and without memory. A forward that asks for
values (``if h.sum() > 0``) can't be followed so; it is run.

What is seen is a list of segments, one from each module's begin to the next one's, in which nothing
is decided yet. Which of them make a block is found afterwards.
"""

from __future__ import annotations

import functools
import logging
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.utils.stateless import _reparametrize_module
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

from lockstep.model.inspection import HOOKS, OutsideVariables
from lockstep.tensors.pytree import call, each, tensors
from lockstep.tensors.seeding import kept_states

_RATES = {"cpu": (4e10, 8e9), "cuda": (5e13, 1.5e12)}
"""Operations and bytes in a second, roughly: only their ratio matters for a split."""


@dataclass
class Segment:
    """What forward does from the begin of a module to the begin of the next."""

    name: str  # of the module; "" before the first
    has_gradient: bool = False  # whether anything that the module takes depends on a parameter
    seconds: float = 0.0  # an estimate: what is slower, computing or moving bytes
    kept: int = 0  # bytes that are kept for backward, and were not before
    storages: set[int] = field(
        default_factory=set
    )  # those that are read or written, each under a number of its own


def trace(
    model: nn.Module, inputs: Any, forward: Callable[[Any], Any] | None = None, kind: str = "cpu"
) -> Trace:
    """Look at one forward of a model. The model is left as it is.

    Args:
        model: in the mode in which it trains.
        inputs: of a micro-batch, say.
        forward: called with the inputs instead of ``call(model, inputs)``; what it does beside the
            model (autocast, the loss) is looked at too.
        kind: the type of device that estimates are for.
    """
    forward = forward or functools.partial(call, model)
    try:
        return _traced(model, inputs, forward, kind, fake=True)
    # it asks for values, or has an operator without a fake; what is wrong with it a real run says
    except Exception:
        return _traced(model, inputs, forward, kind, fake=False)


def _traced(
    model: nn.Module, inputs: Any, forward: Callable[[Any], Any], kind: str, *, fake: bool
) -> Trace:
    with ExitStack() as stack:
        stack.enter_context(as_before(model))
        stack.enter_context(
            OutsideVariables.of_model(model).kept()
        )  # which a fake tensor must not get into
        if fake:
            # What the person's model raises is raised again where it is run; PyTorch's fake tensors
            # log it too.
            log = logging.getLogger("torch._subclasses.fake_tensor")
            stack.callback(setattr, log, "disabled", log.disabled)
            log.disabled = True
            mode = stack.enter_context(FakeTensorMode(allow_non_fake_inputs=True))
            state = dict((*model.named_parameters(), *model.named_buffers()))
            fakes: dict[str, torch.Tensor] = {
                name: mode.from_tensor(tensor) for name, tensor in state.items()
            }
            stack.enter_context(_reparametrize_module(model, fakes, tie_weights=True))
            inputs = each(mode.from_tensor, inputs)
        found = Trace(model, inputs, kind, fake)
        names = [name for name, _ in model.named_modules()]
        stack.enter_context(watched(model, names, found.begin, found.end))
        stack.enter_context(
            torch.autograd.graph.saved_tensors_hooks(found.keep, lambda tensor: tensor)
        )
        stack.enter_context(found)
        stack.enter_context(torch.enable_grad())
        forward(inputs)
    return found


@contextmanager
def watched(
    model: nn.Module,
    names: Iterable[str],
    before: Callable[[str, Any], None],
    after: Callable[[str, Any], None],
) -> Iterator[None]:
    """For a while each of these modules calls ``before`` with its name and inputs, ``after``
    with name and outputs.
    """
    modules = dict(model.named_modules())
    with ExitStack() as stack:
        for name in names:
            # Nested functions, so that each hook has its own name.
            def begins(module: nn.Module, args: Any, kwargs: Any, name: str = name) -> None:
                before(name, [*args, *kwargs.values()])

            def ends(module: nn.Module, args: Any, outputs: Any, name: str = name) -> None:
                after(name, outputs)

            stack.callback(modules[name].register_forward_pre_hook(begins, with_kwargs=True).remove)
            stack.callback(modules[name].register_forward_hook(ends).remove)
        yield


class Trace(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """One forward: adds what every operator does to the segment in which it comes."""

    def __init__(self, model: nn.Module, inputs: Any, kind: str, fake: bool) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._rates = _RATES.get(kind, _RATES["cuda"])
        self._held: dict[int, Any] = {}
        self._open: list[str] = []
        self.fake = fake  # whether it was followed without running
        self.seconds: dict[str, float] = {}  # by module what it takes, with all that it calls
        self.calls: Counter[str] = Counter()  # by module how often it is called
        # Bytes of the storages of the inputs, and of those that are written.
        self.sizes = {self._number(t): bytes_of([t]) for t in tensors(inputs)}
        self.segments = [Segment("", storages=set(self.sizes))]
        self.state: dict[
            int, list[str]
        ] = {}  # by storage the names of the parameters and buffers in it
        for named in (
            model.named_parameters(remove_duplicate=False),
            model.named_buffers(remove_duplicate=False),
        ):
            for name, tensor in named:
                self.state.setdefault(self._number(tensor), []).append(name)
        self._kept = set(self.state)

    def begin(self, name: str, inputs: Any) -> None:
        """A module begins."""
        self._open.append(name)
        self.calls[name] += 1
        self.seconds.setdefault(name, 0.0)
        self.segments.append(Segment(name, any(t.requires_grad for t in tensors(inputs))))

    def end(self, name: str, outputs: Any) -> None:
        """A module ends, and those inside of it that raised what somebody caught."""
        if name in self._open:
            while self._open.pop() != name:
                pass

    def keep(self, tensor: torch.Tensor) -> torch.Tensor:
        """A tensor is kept for backward; what is the model's own is there anyway."""
        if tensor.layout == torch.strided and (number := self._number(tensor)) not in self._kept:
            self._kept.add(number)
            self.segments[-1].kept += bytes_of([tensor])
        return tensor

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        read, written = self._sizes([args, kwargs]), self._sizes(out)
        is_view = bool(written) and set(written) <= set(read) and not func._schema.is_mutable
        moved = 0 if is_view else sum(read.values()) + sum(written.values())
        flops_rate, bytes_rate = self._rates
        seconds = max(_flops(func, args, kwargs, out) / flops_rate, moved / bytes_rate)
        segment = self.segments[-1]
        segment.seconds += seconds
        segment.storages.update(read, written)
        for name in set(self._open):
            self.seconds[name] += seconds
        for number, size in written.items():
            self.sizes.setdefault(number, size)
        return out

    def _sizes(self, nest: Any) -> dict[int, int]:
        """The bytes of an operator's arguments or results, by their storages."""
        return {self._number(t): bytes_of([t]) for t in tensors(nest) if t.layout == torch.strided}

    def _number(self, tensor: torch.Tensor) -> int:
        """Of the tensor's storage, which is held, so that none is used again under the same
        address.
        """
        storage = tensor.untyped_storage()
        self._held[storage._cdata] = storage
        return int(storage._cdata)


def _flops(func: Any, args: Any, kwargs: Any, out: Any) -> int:
    """Multiplications and additions of matrix products and convolutions."""
    if func._overloadpacket in flop_registry:
        return int(flop_registry[func._overloadpacket](*args, **kwargs, out_val=out))
    if "scaled_dot_product" in str(
        func
    ):  # that of the CPU, which PyTorch doesn't count (torch 2.13)
        query, key, value = args[:3]
        pairs = query[..., 0].numel() * key.shape[-2]
        return int(2 * pairs * (query.shape[-1] + value.shape[-1]))
    return 0


def bytes_of(held: Iterable[torch.Tensor]) -> int:
    """The bytes of some tensors together."""
    return sum(t.numel() * t.element_size() for t in held)


@contextmanager
def as_before(model: nn.Module) -> Iterator[None]:
    """Put attributes, hooks, values of buffers, gradients and the states of generators back to
    what they are now.
    """
    held = [(vars(m), m._buffers, *(getattr(m, kind) for kind in HOOKS)) for m in model.modules()]
    tables = [(table, dict(table)) for of in held for table in of]
    values = [(b, b.clone()) for b in model.buffers()]
    gradients = [(p, p.grad) for p in model.parameters()]
    with kept_states():
        try:
            yield
        finally:
            with torch.no_grad():
                for table, before in tables:
                    table.clear()
                    table.update(before)
                for buffer, value in values:
                    buffer.copy_(value)
            for parameter, gradient in gradients:
                parameter.grad = gradient
