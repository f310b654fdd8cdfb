"""A look at one forward, without running it: which modules it calls in which order, what they cost, what they keep.

The model's tensors are replaced by fake ones (PyTorch's FakeTensorMode), which have shapes and no values, so a model of
any size is looked at in a moment and without memory. A forward that asks for values (``if h.sum() > 0``) can't be
followed so; it is run.

What is seen is a list of events, in which nothing is decided yet: modules begin, operators read and write tensors.
Where the blocks are is found afterwards.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

from lockstep.tensors.pytree import call, each, tensors
from lockstep.tensors.seeding import kept_states

_RATES = {"cpu": (4e10, 8e9), "cuda": (5e13, 1.5e12)}
"""Operations and bytes in a second, roughly: only their ratio matters for a split."""


@dataclass
class Operator:
    """One operator of the forward.

    Attributes:
        flops: multiplications and additions of matrix products and convolutions.
        moved: bytes that it reads and writes.
        reads: the storages that it reads, each under a number of its own.
        writes: those that it writes, with their bytes.
    """

    flops: int
    moved: int
    reads: tuple[int, ...]
    writes: tuple[tuple[int, int], ...]


@dataclass
class Begins:
    """A module begins; whether anything that it takes depends on a parameter."""

    name: str
    has_gradient: bool


@dataclass
class Ends:
    """A module ends."""

    name: str


@dataclass
class Keeps:
    """A tensor is kept for backward: its storage, and its bytes."""

    storage: int
    size: int


Happening = Operator | Begins | Ends | Keeps


@dataclass
class Trace:
    """One forward.

    Attributes:
        events: in order.
        state: by storage the names of the parameters and buffers in it.
        given: the storages of the inputs, with their bytes.
        kind: the type of the device that it is for.
        fake: whether it was followed without running.
    """

    events: list[Happening] = field(default_factory=list)
    state: dict[int, list[str]] = field(default_factory=dict)
    given: dict[int, int] = field(default_factory=dict)
    kind: str = "cpu"
    fake: bool = True

    def seconds(self, operator: Operator) -> float:
        """An estimate: what is slower, computing or moving."""
        flops, moved = _RATES.get(self.kind, _RATES["cuda"])
        return max(operator.flops / flops, operator.moved / moved)


def trace(model: nn.Module, inputs: Any, forward: Callable[[Any], Any] | None = None, kind: str = "cpu") -> Trace:
    """Look at one forward of a model. The model is left as it is.

    Args:
        model: in the mode in which it trains.
        inputs: of a micro-batch, say.
        forward: called with the inputs instead of ``call(model, inputs)``; what it does beside the model (autocast, the
            loss) is looked at too.
        kind: the type of device that estimates are for.
    """
    forward = forward or (lambda given: call(model, given))
    try:
        return _traced(model, inputs, forward, kind, fake=True)
    except Exception:  # it asks for values, or has an operator without a fake; what is wrong with it a real run says
        return _traced(model, inputs, forward, kind, fake=False)


def _traced(model: nn.Module, inputs: Any, forward: Callable[[Any], Any], kind: str, *, fake: bool) -> Trace:
    found = Trace(kind=kind, fake=fake)
    names = [name for name, _ in model.named_modules()]
    storages = _Storages()
    with ExitStack() as stack:
        stack.enter_context(as_before(model))
        if fake:
            stack.enter_context(_without_log_of_errors())
            mode = stack.enter_context(FakeTensorMode(allow_non_fake_inputs=True))
            stack.enter_context(_faked(model, mode))
            inputs = each(mode.from_tensor, inputs)
        for name, tensor in (*_named(model, "_parameters"), *_named(model, "_buffers")):
            found.state.setdefault(storages.number(tensor), []).append(name)
        found.given = {storages.number(t): _bytes(t) for t in tensors(inputs)}

        def keep(tensor: torch.Tensor) -> torch.Tensor:
            if storages.has(tensor):
                found.events.append(Keeps(storages.number(tensor), _bytes(tensor)))
            return tensor

        def begins(module: nn.Module, args: Any, kwargs: Any, name: str) -> None:
            gradient = any(t.requires_grad for t in (*tensors(list(args)), *tensors(list(kwargs.values()))))
            found.events.append(Begins(name, gradient))

        def ends(module: nn.Module, args: Any, outputs: Any, name: str) -> None:
            found.events.append(Ends(name))

        modules = dict(model.named_modules())
        for name in names:
            stack.callback(modules[name].register_forward_pre_hook(_with(begins, name), with_kwargs=True).remove)
            stack.callback(modules[name].register_forward_hook(_with(ends, name)).remove)
        stack.enter_context(torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor))
        stack.enter_context(_Recorder(found, storages))
        stack.enter_context(torch.enable_grad())
        forward(inputs)
    return found


@contextmanager
def _without_log_of_errors() -> Iterator[None]:
    """What the person's model raises is raised again where it is run; PyTorch's fake tensors log it too."""
    log = logging.getLogger("torch._subclasses.fake_tensor")
    before, log.disabled = log.disabled, True
    try:
        yield
    finally:
        log.disabled = before


def _with(function: Callable[..., None], name: str) -> Callable[..., None]:
    return lambda *given: function(*given, name)


class _Storages:
    """Numbers for storages. They are held, so that none is used again under the same address."""

    def __init__(self) -> None:
        self._numbers: dict[int, int] = {}
        self._held: list[Any] = []

    def number(self, tensor: torch.Tensor) -> int:
        storage = tensor.untyped_storage()
        address = storage._cdata
        if address not in self._numbers:
            self._numbers[address] = len(self._numbers)
            self._held.append(storage)
        return self._numbers[address]

    @staticmethod
    def has(tensor: torch.Tensor) -> bool:
        return tensor.layout == torch.strided


class _Recorder(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Writes down every operator."""

    def __init__(self, found: Trace, storages: _Storages) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._found = found
        self._storages = storages

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        number = self._storages.number
        ins = [t for t in _flat((args, kwargs)) if self._storages.has(t)]
        outs = [t for t in _flat(out) if self._storages.has(t)]
        read = {number(t): _bytes(t) for t in ins}
        written = {number(t): _bytes(t) for t in outs}
        is_view = bool(written) and set(written) <= set(read) and not func._schema.is_mutable
        moved = 0 if is_view else sum(read.values()) + sum(written.values())
        operator = Operator(_flops(func, args, kwargs, out), moved, tuple(read), tuple(written.items()))
        self._found.events.append(operator)
        return out


def _flat(nest: Any) -> Iterator[torch.Tensor]:
    """The tensors among an operator's arguments or results: lists, tuples and dicts are all there is."""
    if isinstance(nest, torch.Tensor):
        yield nest
    elif isinstance(nest, list | tuple):
        for part in nest:
            yield from _flat(part)
    elif isinstance(nest, dict):
        yield from _flat(list(nest.values()))


def _flops(func: Any, args: Any, kwargs: Any, out: Any) -> int:
    if func._overloadpacket in flop_registry:
        return int(flop_registry[func._overloadpacket](*args, **kwargs, out_val=out))
    if "scaled_dot_product" in str(func):  # that of the CPU, which PyTorch doesn't count (torch 2.13)
        query, key, value = args[:3]
        pairs = query[..., 0].numel() * key.shape[-2]
        return int(2 * pairs * (query.shape[-1] + value.shape[-1]))
    return 0


def _bytes(tensor: torch.Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def _named(model: nn.Module, kind: str) -> Iterator[tuple[str, torch.Tensor]]:
    """Parameters or buffers under every name of them."""
    for prefix, module in model.named_modules():
        for key, tensor in getattr(module, kind).items():
            if tensor is not None:
                yield f"{prefix}.{key}".lstrip("."), tensor


@contextmanager
def _faked(model: nn.Module, mode: FakeTensorMode) -> Iterator[None]:
    """The model with fake parameters and buffers for a while; those that are shared stay shared."""
    tables: list[dict[str, Any]] = [table for m in model.modules() for table in (m._parameters, m._buffers)]
    held = [dict(table) for table in tables]
    fakes = {id(t): mode.from_tensor(t) for real in held for t in real.values() if t is not None}
    try:
        for table in tables:
            table.update({key: fakes[id(t)] for key, t in table.items() if t is not None})
        yield
    finally:
        for table, real in zip(tables, held, strict=True):
            table.clear()
            table.update(real)


@contextmanager
def as_before(model: nn.Module) -> Iterator[None]:
    """Give buffers the values, parameters the gradients, and generators the states that they have now."""
    places = [
        (m._buffers, key, b, b.clone()) for m in model.modules() for key, b in m._buffers.items() if b is not None
    ]
    gradients = [(p, p.grad) for p in model.parameters()]
    with kept_states():
        try:
            yield
        finally:
            with torch.no_grad():
                for table, key, buffer, values in places:
                    table[key] = buffer.copy_(values)
            for parameter, gradient in gradients:
                parameter.grad = gradient
