"""Drawing nothing: about its mean in place of each random number, so that parts of a batch draw
what the whole drew.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
import torch.nn.functional as F
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from lockstep.tensors.pytree import copied_nest
from lockstep.tensors.seeding import kept_state_on, kept_states

T = TypeVar("T")

_MOST = 1000
"""Draws that are replaced, at most: a function may draw until it likes what it got."""


@contextmanager
def drawing_nothing(*, only_masks: bool = False) -> Iterator[None]:
    """Meanwhile this thread draws nothing; with ``only_masks``, no masks of dropout."""
    with _NoDropoutInAttention(), _Means(_MASKS if only_masks else _INSTEAD):
        yield


class NotedDraws(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Notes whether operators of PyTorch draw; a person's own generators stand afterwards where
    they did, if ``keeps``.

    Attributes:
        drew: whether one did.
    """

    def __init__(self, *, keeps: bool = False) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.drew = False
        self._keeps, self._before = keeps, dict[torch.Generator, torch.Tensor]()

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        generator = (kwargs or {}).get("generator")
        self.drew |= generator is not None or func.overloadpacket.__name__ in _INSTEAD
        if generator is not None and generator not in self._before:
            self._before[generator] = generator.get_state()
        return func(*args, **(kwargs or {}))

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)  # type: ignore[no-untyped-call]
        for generator, state in self._before.items() if self._keeps else ():
            generator.set_state(state)


class _NoDropoutInAttention(TorchFunctionMode):
    """On accelerators attention draws its dropout within one kernel, where nothing can be put in
    its place.
    """

    def __torch_function__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        kwargs = dict(kwargs or {})
        if func is F.scaled_dot_product_attention:
            args = (*args[:4], 0.0, *args[5:]) if len(args) > 4 else args
            kwargs.pop("dropout_p", None)
        return func(*args, **kwargs)


class _Means(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """What PyTorch's operators draw from its own generators is the same for every sample: about its
    mean.

    So dropout passes on what it gets, up to its scale. The generators stand afterwards where they
    did, so that what is drawn in another way still shows.
    """

    def __init__(self, instead: Mapping[str, Callable[..., Any]]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._instead = instead
        self._calls = 0

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        kwargs = dict(kwargs or {})
        instead = self._instead.get(func.overloadpacket.__name__)
        if instead is None or self._calls >= _MOST:
            return func(*args, **kwargs)
        self._calls += 1
        given = next((arg.device for arg in args if isinstance(arg, torch.Tensor)), None)
        with kept_state_on(kwargs.get("device") or given or torch.device("cpu")):
            made = func(*args, **kwargs)
        return instead(made, *args)


def _filled(value: float) -> Callable[..., torch.Tensor]:
    return lambda made, *args: made.fill_(value)


def _chance(made: torch.Tensor, chance: Any) -> torch.Tensor:
    return made.copy_(torch.as_tensor(chance, dtype=made.dtype))


def _lowest(made: torch.Tensor, *args: Any) -> torch.Tensor:
    """``randint`` and its like: the lowest that may come, which is given where there are two
    bounds.
    """
    bounds = [arg for arg in args if isinstance(arg, int)]
    return made.fill_(bounds[0] if len(bounds) > 1 else 0)


def _categories(made: torch.Tensor, weights: torch.Tensor, count: int, *args: Any) -> torch.Tensor:
    """The likeliest categories; where they may come again, each as often as is expected: of even
    weights all, once.
    """
    if not (args and args[0]):
        return made.copy_(weights.topk(count).indices)
    chances = (weights.double() / weights.sum(-1, keepdim=True)).cumsum(-1)
    points = (torch.arange(count, dtype=chances.dtype, device=chances.device) + 0.5) / count
    found = torch.searchsorted(chances, points.expand(*chances.shape[:-1], count).contiguous())
    return made.copy_(found.clamp(max=weights.shape[-1] - 1))


def _slope(
    made: torch.Tensor,
    inputs: torch.Tensor,
    noise: torch.Tensor,
    lower: float,
    upper: float,
    *args: Any,
) -> Any:
    """``rrelu_with_noise``, whose backward takes the slopes from ``noise``."""
    return inputs * noise.copy_(torch.where(inputs > 0, 1.0, (lower + upper) / 2))


def _kept(made: Any, inputs: torch.Tensor, p: float, *args: Any) -> Any:
    """Dropout as accelerators compute it, whose backward scales by the mask: everything is kept."""
    return made if p == 1 else (inputs / (1 - p), made[1].fill_(True))


_INSTEAD: dict[str, Callable[..., Any]] = {
    **dict.fromkeys(("rand", "rand_like"), _filled(0.5)),
    **dict.fromkeys(("randn", "randn_like", "normal", "normal_", "cauchy_"), _filled(0)),
    **dict.fromkeys(("exponential_", "geometric_", "log_normal_"), _filled(1)),
    "bernoulli": lambda made, chances, chance=None: _chance(
        made, chances if chance is None else chance
    ),
    "bernoulli_": lambda made, itself, chance=0.5: _chance(made, chance),
    **dict.fromkeys(("randint", "randint_like", "random_"), _lowest),
    "uniform_": lambda made, itself, lower=0.0, upper=1.0: made.fill_((lower + upper) / 2),
    "randperm": lambda made, *args: made.copy_(torch.arange(len(made))),
    "multinomial": _categories,
    **dict.fromkeys(("poisson", "_standard_gamma"), lambda made, mean, *args: mean.clone()),
    "_sample_dirichlet": lambda made, weights, *args: weights / weights.sum(-1, keepdim=True),
    "binomial": lambda made, counts, chances, *args: counts * chances,
    "rrelu_with_noise": _slope,
    "native_dropout": _kept,
}
"""By operator, what is given in the place of what it drew: a function of that, and of the
operator's arguments.
"""

_MASKS = {name: _INSTEAD[name] for name in ("bernoulli_", "native_dropout")}
"""The operators that draw the masks of dropout, with what is given in the place of a mask."""


def drawing_alike(
    judge: Callable[..., T], accelerators: Sequence[torch.device]
) -> Callable[..., T]:
    """A loss that draws the same numbers whenever it is called, and keeps nothing in what it is
    given.
    """

    def judged(*args: Any) -> T:
        with kept_states(accelerators):
            return judge(*map(copied_nest, args))

    return judged
