"""A look at one forward: which modules it calls in which order, what they cost, what they keep.

The forward is run, or followed without running: then the model's tensors are replaced by fake ones
(PyTorch's FakeTensorMode), which have shapes and no values, so a model of any size is looked at in
a moment and without memory. A forward that asks for values (``if h.sum() > 0``) can't be followed
so; it is run.

What is found is a list of segments, one from each module's begin to the next one's, in which
nothing is decided yet. Which of them make a block is found afterwards.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.utils.stateless import _reparametrize_module
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

from lockstep.model.snapshot import Snapshot
from lockstep.tensors.common_memory import tensors_of
from lockstep.tensors.pytree import each, tensors

_RATES = {"cpu": (4e10, 8e9), "cuda": (5e13, 1.5e12)}
"""Operations and bytes in a second, roughly: only their ratio matters for a split."""


@dataclass
class Segment:
    """What forward does from the begin of a module to the begin of the next.

    Attributes:
        name: of the module; "" before the first.
        has_gradient: whether anything that the module takes depends on a parameter.
        seconds: an estimate: what is slower, computing or moving bytes.
        kept: bytes that are kept for backward, and were not before.
        storages: those that are read or written, each under a number of its own.
    """

    name: str
    has_gradient: bool = False
    seconds: float = 0.0
    kept: int = 0
    storages: set[int] = field(default_factory=set)


def trace(
    model: nn.Module,
    inputs: Any,
    forward: Callable[[Any], Any],
    kind: str,
    *,
    fake: bool = True,
) -> Trace:
    """Look at one forward of a model. The model is left as it is.

    Args:
        model: in the mode in which it trains.
        inputs: of a micro-batch, say.
        forward: calls the model with the inputs; what it does beside (autocast, the loss) is looked
            at too.
        kind: the type of device that estimates are for.
        fake: follow the forward without running it, where that can be.
    """
    if fake:
        try:
            with model_kept(model), _faked(model) as mode:
                fakes = each(mode.from_tensor, inputs)
                return _traced(model, fakes, forward, kind)
        except Exception:
            pass  # it asks for values, or an operator has no fake; a real run says what is wrong
    with model_kept(model):
        return _traced(model, inputs, forward, kind)


@contextmanager
def _faked(model: nn.Module) -> Iterator[FakeTensorMode]:
    """Give a model fake tensors in the place of its own."""
    # What the person's model raises is raised again where it is run; PyTorch logs it too.
    log = logging.getLogger("torch._subclasses.fake_tensor")
    was_disabled = log.disabled
    log.disabled = True
    try:
        with FakeTensorMode(allow_non_fake_inputs=True) as mode:
            fakes: dict[str, Tensor] = {}
            for name, tensor in tensors_of(model):
                fakes[name] = mode.from_tensor(tensor)
            with _reparametrize_module(model, fakes, tie_weights=True):
                yield mode
    finally:
        log.disabled = was_disabled


def _traced(model: nn.Module, inputs: Any, forward: Callable[[Any], Any], kind: str) -> Trace:
    """Look at a forward; the arguments are those of ``trace``."""
    found = Trace(model, inputs, kind)
    names = [name for name, _ in model.named_modules()]
    saving = torch.autograd.graph.saved_tensors_hooks(found.keep, lambda tensor: tensor)
    with watched(model, names, found.begin, found.end), saving, found, torch.enable_grad():
        forward(inputs)
    return found


@contextmanager
def watched(
    model: nn.Module,
    names: Iterable[str],
    before: Callable[[str, Any], None],
    after: Callable[[str, Any], None],
) -> Iterator[None]:
    """Call functions where modules begin and end in this context.

    Args:
        model: whose modules they are.
        names: of the modules.
        before: called with the name and the inputs of a module that begins.
        after: called with the name and the outputs of a module that ends.
    """
    modules = dict(model.named_modules())
    handles = []
    for name in names:
        # Nested functions, so that each hook has its own name.
        def begins(module: nn.Module, args: Any, kwargs: Any, name: str = name) -> None:
            before(name, [*args, *kwargs.values()])

        def ends(module: nn.Module, args: Any, outputs: Any, name: str = name) -> None:
            after(name, outputs)

        module = modules[name]
        handles.append(module.register_forward_pre_hook(begins, with_kwargs=True))
        handles.append(module.register_forward_hook(ends))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


class Trace(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """One forward: adds what every operator does to the segment in which it comes.

    Args:
        model: whose parameters and buffers are known by name.
        inputs: of the forward.
        kind: the type of device that estimates are for.

    Attributes:
        segments: in the order of forward.
        seconds: by module what it takes, with all that it calls.
        calls: by module how often it is called.
        sizes: bytes of the storages of the inputs, and of those that are written.
        state: by storage the names of the parameters and buffers in it.
    """

    def __init__(self, model: nn.Module, inputs: Any, kind: str) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._rates = _RATES.get(kind, _RATES["cuda"])
        self._held: dict[int, Any] = {}
        self._open: list[str] = []
        self.seconds: dict[str, float] = {}
        self.calls: Counter[str] = Counter()
        self.sizes = self._sizes(inputs)
        self.segments = [Segment("", storages=set(self.sizes))]
        self.state: dict[int, list[str]] = {}
        for name, tensor in named_state(model):
            names = self.state.setdefault(self._number(tensor), [])
            names.append(name)
        self._kept = set(self.state)

    def begin(self, name: str, inputs: Any) -> None:
        """Note that a module begins."""
        self._open.append(name)
        self.calls[name] += 1
        self.seconds.setdefault(name, 0.0)
        has_gradient = any(tensor.requires_grad for tensor in tensors(inputs))
        self.segments.append(Segment(name, has_gradient))

    def end(self, name: str, outputs: Any) -> None:
        """Note that a module ends, and those inside of it that raised what somebody caught."""
        if name in self._open:
            while self._open.pop() != name:
                pass

    def keep(self, tensor: Tensor) -> Tensor:
        """Note that a tensor is kept for backward; what is the model's own is there anyway."""
        for number, size in self._sizes(tensor).items():
            if number not in self._kept:
                self._kept.add(number)
                self.segments[-1].kept += size
        return tensor

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        read = self._sizes([args, kwargs])
        written = self._sizes(out)
        segment = self.segments[-1]
        segment.storages.update(read, written)
        for number, size in written.items():
            self.sizes.setdefault(number, size)
        moved = sum(read.values())
        moved += sum(written.values())
        is_view = written.keys() <= read.keys() and not func._schema.is_mutable
        if written and is_view:
            moved = 0
        flops = _flops(func, args, kwargs, out)
        flops_rate, bytes_rate = self._rates
        computing = flops / flops_rate
        moving = moved / bytes_rate
        seconds = max(computing, moving)
        segment.seconds += seconds
        for name in set(self._open):
            self.seconds[name] += seconds
        return out

    def _sizes(self, nest: Any) -> dict[int, int]:
        """Count the bytes of an operator's arguments or results, by their storages."""
        found = {}
        for tensor in tensors(nest):
            if tensor.layout == torch.strided:
                number = self._number(tensor)
                found[number] = tensor.nbytes
        return found

    def _number(self, tensor: Tensor) -> int:
        """Give the number of a tensor's storage.

        The storage is held, so that none is used again under the same address.
        """
        storage = tensor.untyped_storage()
        number = int(storage._cdata)
        self._held[number] = storage
        return number


def _flops(func: Any, args: Any, kwargs: Any, out: Any) -> int:
    """Count the multiplications and additions of a matrix product or a convolution.

    Args:
        func: the operator.
        args: its arguments.
        kwargs: its arguments by name.
        out: its result.
    """
    count = flop_registry.get(func._overloadpacket)
    if count is None:
        return 0
    flops: int = count(*args, **kwargs, out_val=out)
    return flops


def bytes_of(held: Iterable[Tensor]) -> int:
    """Count the bytes of some tensors together."""
    return sum(tensor.numel() * tensor.element_size() for tensor in held)


def named_state(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield each parameter and buffer of a model, under each of its names."""
    yield from model.named_parameters(remove_duplicate=False)
    yield from model.named_buffers(remove_duplicate=False)


@contextmanager
def model_kept(model: nn.Module) -> Iterator[None]:
    """Put attributes, buffers and the states of generators back afterwards, without gradients."""
    snapshot = Snapshot(model, parameters=False)
    try:
        yield
    finally:
        snapshot.put_back()
        model.zero_grad()
