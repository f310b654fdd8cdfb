"""Random: a stream of random numbers for each thread.

All threads of a process draw from one CPU generator, so which replica gets which dropout mask
depends on how their threads happened to take turns: the same seed gave four results in four runs.
``with stream(generator):`` makes what this thread draws on the CPU come from ``generator``. It
draws what PyTorch would have drawn from its own generator in that state: under ``stream`` and
without, one thread computes the same bits.

It is a ``TorchFunctionMode``, which sees every call of a PyTorch function in its thread (and only
there):

==========================================  =============================================================
functions that take a ``generator``         are given ours, unless the caller gave one
dropout of all kinds, attention, RNNs       draw inside, where no generator can be passed: their mask is drawn here
functions of torch.nn.functional that call  run as they are, with what they call seen too
others
a few rare ones                             one at a time, with our state lent to PyTorch's generator
==========================================  =============================================================

Not seen: what custom operators draw (``torch.ops``, C++ extensions), compiled code, and Python's
and NumPy's random. Accelerators have a generator per device already, and what is drawn there is
left alone.
"""

from __future__ import annotations

import contextlib
import threading
import types
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.overrides import TorchFunctionMode

from lockstep.threads import random_functions

Source = torch.Generator | Callable[[], torch.Generator]


def stream(generator: Source | None) -> contextlib.AbstractContextManager[Any]:
    """Draw random numbers on the CPU from ``generator``, in this thread, inside a ``with``.

    Args:
        generator: a CPU generator that no other thread uses meanwhile, or a function that gives
            one, called once something is drawn; None changes nothing.
    """
    return contextlib.nullcontext() if generator is None else _Stream(generator)


def current() -> torch.Generator | None:
    """The generator of the innermost ``stream`` that this thread is in, or None outside of any."""
    found = source()
    return found() if callable(found) else found


def source() -> Source | None:
    """The same, as a function where nothing has been drawn yet."""
    found: list[_Stream] = _here.__dict__.get("streams", [])
    return found[-1].resolved if found else None


class Streams:
    """Generators for several threads, seeded by one number from the stream that the caller is in.

    That number is drawn when the first of them draws: what computes without random numbers leaves
    the caller's stream as it was.
    """

    def __init__(self) -> None:
        self._caller = source() or torch.default_generator
        self._lock = threading.Lock()
        self._seed: int | None = None

    def generator(self, number: int) -> torch.Generator:
        """A new one, for thread ``number``."""
        with self._lock:
            if self._seed is None:
                caller = self._caller() if callable(self._caller) else self._caller
                with torch._C.DisableTorchFunction():
                    self._seed = int(torch.randint(2**62, (), generator=caller))
            seed = self._seed
        # Far apart, also for seeds that lie side by side.
        return torch.Generator().manual_seed((seed + number * 0x9E3779B97F4A7C15) & (2**63 - 1))


_here = threading.local()


class _Stream(TorchFunctionMode):
    """The mode; ``generator`` is where its thread draws from."""

    def __init__(self, source: Source) -> None:
        super().__init__()
        self._source = source

    @property
    def generator(self) -> torch.Generator:
        if not isinstance(self._source, torch.Generator):
            self._source = self._source()
        return self._source

    @property
    def resolved(self) -> Source:
        """The generator if it is there already, else a function that makes it."""
        return self._source if isinstance(self._source, torch.Generator) else lambda: self.generator

    def __enter__(self) -> _Stream:
        _here.__dict__.setdefault("streams", []).append(self)
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *error: object) -> None:
        super().__exit__(*error)  # type: ignore[no-untyped-call]
        _here.streams.pop()

    def __torch_function__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        route = _ROUTES.get(func)
        if route is None:
            return func(*args, **kwargs) if kwargs else func(*args)
        return route(self, func, args, kwargs or {})


_Route = Callable[[_Stream, Any, tuple[Any, ...], Mapping[str, Any]], Any]


def _with_generator(
    mode: _Stream, func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> Any:
    """The function takes a generator: give it ours, unless it has one or draws elsewhere."""
    given = kwargs.get("generator") is not None or any(
        isinstance(arg, torch.Generator) for arg in args
    )
    if given or not _on_cpu(args, kwargs):
        return func(*args, **kwargs)
    return func(*args, **{**kwargs, "generator": mode.generator})


def _on_cpu(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
    """Whether a function draws on the CPU: by its ``device``, or its first tensor, or the
    default device.
    """
    device = kwargs.get("device")
    if device is None:
        if args and isinstance(args[0], torch.Tensor):
            return args[0].is_cpu
        tensor = next(
            (item for item in (*args, *kwargs.values()) if isinstance(item, torch.Tensor)), None
        )
        device = torch.get_default_device() if tensor is None else tensor.device
    return torch.device(device).type == "cpu"


def _drawn_here(write: Callable[..., Any]) -> _Route:
    """The function draws inside: compute it in another way, with masks from our generator."""

    def route(mode: _Stream, func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        if not _on_cpu(args, kwargs):
            return func(*args, **kwargs)
        return write(mode.generator, func, *args, **kwargs)

    return route


def _seen_inside(function: Any) -> _Route:
    """The function is Python, and calls what draws: run its code, in which those calls come back to
    us.

    Inside a mode's handler the mode is off, and with it on again the function would only ask for
    its handler: so this is the same code, in which that question is always answered with no.
    """
    asked = ("has_torch_function", "has_torch_function_unary", "has_torch_function_variadic")
    names = {**function.__globals__, **dict.fromkeys(asked, lambda *args: False)}
    inner = types.FunctionType(
        function.__code__, names, function.__name__, function.__defaults__, function.__closure__
    )
    inner.__kwdefaults__ = function.__kwdefaults__

    def route(mode: _Stream, func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        TorchFunctionMode.__enter__(mode)  # type: ignore[no-untyped-call]
        try:
            return inner(*args, **kwargs)
        finally:
            TorchFunctionMode.__exit__(mode, None, None, None)  # type: ignore[no-untyped-call]

    return route


_lending = threading.Lock()


def _lent(mode: _Stream, func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    """The function draws from PyTorch's generator and can't be told otherwise: lend that one our
    state meanwhile.
    """
    if not _on_cpu(args, kwargs):
        return func(*args, **kwargs)
    generator = mode.generator  # before PyTorch's is lent: it may be seeded from that one
    with _lending:
        kept = torch.default_generator.get_state()
        torch.default_generator.set_state(generator.get_state())
        try:
            return func(*args, **kwargs)
        finally:
            generator.set_state(torch.default_generator.get_state())
            torch.default_generator.set_state(kept)


def _routes() -> dict[Any, _Route]:
    taking = [
        *(
            torch.rand,
            torch.randn,
            torch.randint,
            torch.randperm,
            torch.rand_like,
            torch.randn_like,
        ),
        *(
            torch.randint_like,
            torch.normal,
            torch.bernoulli,
            torch.multinomial,
            torch.poisson,
            torch.binomial,
        ),
        *(torch._standard_gamma, torch._sample_dirichlet, torch.rrelu, torch.rrelu_),
        *(nn.init.uniform_, nn.init.normal_, nn.init.trunc_normal_, nn.init.kaiming_uniform_),
        *(
            getattr(torch.Tensor, name)
            for name in (
                *(
                    "bernoulli",
                    "multinomial",
                    "bernoulli_",
                    "uniform_",
                    "normal_",
                    "exponential_",
                    "random_",
                ),
                *("cauchy_", "geometric_", "log_normal_"),
            )
        ),
    ]
    routes: dict[Any, _Route] = dict.fromkeys(taking, _with_generator)
    for function, write in random_functions.WRITTEN.items():
        routes[function] = _drawn_here(write)
    for function in (
        *(
            F.dropout1d,
            F.dropout2d,
            F.dropout3d,
            F.rrelu,
            F.gumbel_softmax,
            F.multi_head_attention_forward,
        ),
    ):
        routes[function] = _seen_inside(function)
    rare = [
        *(torch.native_dropout, F.alpha_dropout, torch.alpha_dropout, torch.alpha_dropout_),
        *(F.feature_alpha_dropout, torch.feature_alpha_dropout, torch.feature_alpha_dropout_),
        *(F.fractional_max_pool2d, F.fractional_max_pool2d_with_indices),
        *(F.fractional_max_pool3d, F.fractional_max_pool3d_with_indices),
    ]
    return {**routes, **dict.fromkeys(rare, _lent)}


_ROUTES = _routes()
