"""Random: a stream of random numbers for each thread.

All threads of a process draw from one CPU generator, so which replica gets which dropout mask
depends on how their threads happened to take turns: the same seed gave four results in four runs.
``with stream(generator):`` makes what this thread draws on the CPU come from ``generator``. It
draws what PyTorch would have drawn from its own generator in that state: under ``stream`` and
without, one thread computes the same bits.

It is a ``TorchFunctionMode``, which sees every call of a PyTorch function in its thread (and only
there). What may draw is called inside a ``TorchDispatchMode``, which gives our generator to each
operator below it that takes one: ``F.gumbel_softmax``, say, draws by ``aten.exponential_``. All
other functions are called as they are. A dropout takes some 35 us longer for it, and an attention
some 0.4 ms.

Not seen: what custom operators draw (``torch.ops``, C++ extensions), compiled code, and Python's
and NumPy's random. Accelerators have a generator per device already, and what is drawn there is
left alone.
"""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch._ops import OpOverload
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

Source = torch.Generator | Callable[[], torch.Generator]


def stream(generator: Source | None) -> contextlib.AbstractContextManager[Any]:
    """Draw random numbers on the CPU from ``generator``, in this thread, inside a ``with``.

    Args:
        generator: a CPU generator that no other thread uses meanwhile, or a function that gives
            one, called once something is drawn; None changes nothing.
    """
    return contextlib.nullcontext() if generator is None else _Stream(generator)


def current() -> torch.Generator | None:
    """Give the generator of the innermost ``stream`` that this thread is in, or None."""
    found = source()
    return found() if callable(found) else found


def source() -> Source | None:
    """Give the generator that ``current`` gives, or a function of it if nothing was drawn yet."""
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
        """Make a new one, for thread ``number``."""
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
    """The mode of a thread.

    Args:
        source: a generator, or a function that makes it when something is drawn.
    """

    def __init__(self, source: Source) -> None:
        super().__init__()
        self._source = source

    @property
    def generator(self) -> torch.Generator:
        """Give what the thread draws from."""
        if not isinstance(self._source, torch.Generator):
            self._source = self._source()
        return self._source

    @property
    def resolved(self) -> Source:
        """Give the generator if it is there already, else a function that makes it."""
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
        args: Any = (),
        kwargs: Any = None,
    ) -> Any:
        kwargs = kwargs or {}
        is_innermost = _here.streams[-1] is self
        if not is_innermost or func not in _DRAWING:
            return func(*args, **kwargs)
        with _Draws(self):
            return func(*args, **kwargs)


class _Draws(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Gives the generator of a stream to each operator on the CPU that takes one."""

    def __init__(self, stream: _Stream) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._stream = stream

    def __torch_dispatch__(
        self,
        func: OpOverload,
        types: Any,
        args: Any = (),
        kwargs: Any = None,
    ) -> Any:
        kwargs = kwargs or {}
        if torch.is_inference_mode_enabled():  # in which composite operators arrive whole
            with self:
                found = func.decompose(*args, **kwargs)
            if found is not NotImplemented:
                return found
        drawing = _with_generator(func)
        if drawing is None or _has_generator(args, kwargs) or not _is_on_cpu(args, kwargs):
            return func(*args, **kwargs)
        return drawing(*args, **{**kwargs, "generator": self._stream.generator})


@functools.cache
def _with_generator(func: OpOverload) -> OpOverload | None:
    """Find the overload of an operator that takes a generator; None where there is none."""
    packet = func.overloadpacket
    name = func._overloadname
    for overload in (name, _GENERATOR_OVERLOADS.get(name, name)):
        if overload in packet.overloads():
            found: OpOverload = getattr(packet, overload)
            if any(argument.name == "generator" for argument in found._schema.arguments):
                return found
    return None


_GENERATOR_OVERLOADS = {
    "default": "generator",
    "low": "low_generator",
    "low_dtype": "low_generator_dtype",
    "Tensor": "Tensor_generator",
}


def _has_generator(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
    given = (*args, kwargs.get("generator"))
    return any(isinstance(argument, torch.Generator) for argument in given)


def _is_on_cpu(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
    """Return whether an operator draws on the CPU: by its ``device``, or its first tensor."""
    device = kwargs.get("device")
    if device is not None:
        return torch.device(device).type == "cpu"
    tensor = next((argument for argument in args if isinstance(argument, torch.Tensor)), None)
    return tensor is None or tensor.is_cpu


def _named(home: Any, names: str) -> list[Any]:
    return [getattr(home, name) for name in names.split()]


_DRAWING = {
    *_named(torch, "rand randn randint randperm rand_like randn_like randint_like normal"),
    *_named(torch, "bernoulli multinomial poisson binomial _standard_gamma _sample_dirichlet"),
    *_named(torch, "rrelu rrelu_ dropout dropout_ feature_dropout feature_dropout_"),
    *_named(torch, "alpha_dropout alpha_dropout_ feature_alpha_dropout feature_alpha_dropout_"),
    *_named(torch, "lstm gru rnn_tanh rnn_relu"),
    *_named(torch.Tensor, "bernoulli multinomial bernoulli_ uniform_ normal_ exponential_"),
    *_named(torch.Tensor, "random_ cauchy_ geometric_ log_normal_"),
    *_named(F, "dropout dropout1d dropout2d dropout3d alpha_dropout feature_alpha_dropout"),
    *_named(F, "rrelu gumbel_softmax scaled_dot_product_attention multi_head_attention_forward"),
    *_named(F, "fractional_max_pool2d fractional_max_pool2d_with_indices"),
    *_named(F, "fractional_max_pool3d fractional_max_pool3d_with_indices"),
    *_named(nn.init, "uniform_ normal_ trunc_normal_ kaiming_uniform_"),
}
"""The functions that may draw."""
