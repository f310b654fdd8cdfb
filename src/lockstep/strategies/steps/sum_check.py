"""The sum check: whether the loss of a batch and its gradients are the sums of those of its parts.

Whatever cuts a batch (replicas, ranks, micro-batches) adds up what the parts give. So these have to
agree, for a batch and any two parts of it::

    total(batch)     =  total(part 1)     +  total(part 2)
    count(batch)     =  count(part 1)     +  count(part 2)
    gradient(batch)  =  gradient(part 1)  +  gradient(part 2)       of each parameter

``SumCheck`` computes all three by the model itself, and puts back what that changes: weights,
buffers, attributes, gradients and random numbers. A training with checks ends on the same bits as
one without.

Parts draw the numbers that the whole has drawn for their samples. What differs in float32 is
computed again in float64 before anything is refused, since rounding may differ too.
"""

from __future__ import annotations

import collections
import contextlib
import copy
import math
import random
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from lockstep.errors import first_line
from lockstep.model.losses.loss import Loss, Totalled
from lockstep.tensors.pytree import clones, each, tensors
from lockstep.tensors.seeding import States, put_states, same_others, states

TOLERANCE = {torch.float64: 1e-9, torch.float32: 1e-4, torch.float16: 5e-2, torch.bfloat16: 5e-2}
"""How far a sum may be off, relatively, by the coarsest format that something was computed in."""

_UNDECIDED = 1e-2
"""The same where float32 shows a difference, and nothing can be computed in float64."""

_FLOOR = {torch.float64: 1e-5, torch.float32: 1e-2, torch.float16: 1e-1, torch.bfloat16: 1e-1}
"""The part of the largest gradient below which another one is rounding: that of a key's bias is
zero.
"""

_COARSER = [torch.float64, torch.float32, torch.float16, torch.bfloat16]

_BATCH_NORMS = nn.modules.batchnorm._BatchNorm
_KNOWN = (_BATCH_NORMS, nn.modules.instancenorm._InstanceNorm, nn.RReLU)
"""Layers that are known to compute otherwise in training, and are in evaluation mode meanwhile."""

Forward = Callable[[nn.Module, Any], Any]
"""Gives the outputs of a model for inputs."""


@dataclass(frozen=True)
class Piece:
    """Samples that are computed together: the whole, or a part of it, which begins with its
    sample ``start``.
    """

    inputs: Any
    targets: Any
    size: int
    start: int = 0


@dataclass
class Verdict:
    """What a check has found.

    Attributes:
        difference: what is no sum, with the numbers; "" where all is one.
        where: the first module whose outputs show it.
        unchecked: why nothing is known; "" where something is.
        communicates: whether the model or the loss communicates with other ranks.
        written: parameters that forward writes.
        drifts: those of them that a part of the batch writes otherwise than the whole does.
        kept: buffers and numbers that forward or the loss writes, and that end otherwise where the
            batch is cut.
        draws: whether random numbers are drawn, which are others for each part in a training.
        draws_elsewhere: whether some are Python's or numpy's.
        apart: how far the worst sum is off, relatively.
        precision: the coarsest format that something was computed in.
    """

    difference: str = ""
    where: str = ""
    unchecked: str = ""
    communicates: bool = False
    written: list[str] = field(default_factory=list)
    drifts: list[str] = field(default_factory=list)
    kept: list[str] = field(default_factory=list)
    draws: bool = False
    draws_elsewhere: bool = False
    apart: float = 0.0
    precision: torch.dtype = torch.float64


class SumCheck:
    """Compares a batch with two parts of it.

    Args:
        model: the model in training mode, whole.
        loss: gives total and count.
        forward: calls a model.
        in_turn: whether the parts are micro-batches of one model, each of which begins with what
            the one before has left; else they are those of replicas, which begin alike.
        accelerators: whose random numbers are put back, too.
    """

    def __init__(
        self,
        model: nn.Module,
        loss: Totalled,
        forward: Forward,
        *,
        in_turn: bool,
        accelerators: Sequence[torch.device] = (),
    ) -> None:
        self._model = model
        self._loss = loss
        self._forward = forward
        self._in_turn = in_turn
        self._accelerators = accelerators

    def __call__(self, whole: Piece, *parts: Piece) -> Verdict:
        """Compare a batch with its parts, and leave everything as it was."""
        gradients = {p: p.grad for p in self._model.parameters()}
        pieces = [whole, *parts]
        try:
            verdict = self._judged(pieces, "rows")
            if verdict.difference and verdict.draws:  # perhaps drawn in another order of samples
                for layout in ("views", "one by one"):
                    again = self._judged(pieces, layout)
                    if not again.difference and not again.unchecked:
                        return again
        finally:
            for p, gradient in gradients.items():
                p.grad = gradient
        return verdict

    def _judged(self, pieces: list[Piece], layout: str) -> Verdict:
        """Compare a batch with its parts; float64 decides whether a difference is rounding."""
        verdict = self._compared(pieces, self._loss, layout)
        if not verdict.difference or verdict.precision is torch.float64:
            return verdict
        with _in_float64(self._model):
            doubled = [
                Piece(_doubled(p.inputs), _doubled(p.targets), p.size, p.start) for p in pieces
            ]
            again = self._compared(doubled, self._loss.copied(double=True), layout)
        if not again.unchecked:
            return again
        if verdict.apart <= _UNDECIDED:
            return Verdict(unchecked=f"float64 can't decide ({again.unchecked})")
        return verdict

    def _compared(self, pieces: list[Piece], loss: Totalled, layout: str) -> Verdict:
        snapshot = _Snapshot(self._model, loss, self._accelerators)
        draws = _Draws(pieces[0].size, layout)
        comparison = _Comparison(self._model, snapshot, draws, in_turn=self._in_turn)
        compute = _Computing(self._model, loss, self._forward, draws)
        try:
            comparison.run(pieces, compute)
            verdict = comparison.verdict()
            if verdict.difference:
                verdict.where = _first_that_mixes(self._model, pieces, compute, snapshot)
            return verdict
        except Exception as error:  # a part has too few samples for the model, say
            unchecked = (
                f"a part of a batch can't be computed: {type(error).__name__}: {first_line(error)}"
            )
            return Verdict(unchecked=unchecked, communicates=draws.communicates)
        finally:
            snapshot.put_back()
            for p in self._model.parameters():
                p.grad = None


class _Computing:
    """Forward and loss of a piece, in full precision, with known layers in evaluation mode."""

    def __init__(self, model: nn.Module, loss: Totalled, forward: Forward, draws: _Draws) -> None:
        self._model = model
        self._loss = loss
        self._forward = forward
        self._draws = draws

    def __call__(self, piece: Piece, *, divisor: float) -> Loss:
        """Compute the loss of a piece, and add the gradient of its total / divisor.

        A divisor of 0 is the count, as one device has it.
        """
        with self._computing(piece):
            outputs = self._forward(self._model, clones(piece.inputs))  # which may be written to
            total, count = loss = self._loss(outputs, clones(piece.targets), piece.size)
            by = divisor or float(count)
            if total.requires_grad and by:
                (total / by).backward()
        return loss.detached()

    def outputs(self, piece: Piece) -> Any:
        """Compute the outputs of a piece alone."""
        with self._computing(piece):
            return self._forward(self._model, clones(piece.inputs))

    @contextlib.contextmanager
    def _computing(self, piece: Piece) -> Iterator[None]:
        self._draws.replay(piece.start, piece.start + piece.size)
        held = _known_in_evaluation_mode(self._model)
        with held, self._draws, _full_precision(), torch.enable_grad():
            yield


class _Comparison:
    """The whole and its parts, one after the other, and what they came to."""

    def __init__(
        self, model: nn.Module, snapshot: _Snapshot, draws: _Draws, *, in_turn: bool
    ) -> None:
        self._snapshot = snapshot
        self._draws = draws
        self._in_turn = in_turn
        self._trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
        self._sums: list[dict[str, float]] = []  # of the whole, and of each part
        self._ends: list[dict[str, Any]] = []  # what the snapshot's things came to
        self._sizes = dict.fromkeys(self._trained, 0.0)  # norms of gradients
        self._draws_elsewhere = False

    def run(self, pieces: list[Piece], compute: _Computing) -> None:
        """Compute all pieces. Afterwards gradients are those of the parts, less that of the
        whole.
        """
        whole = pieces[0]
        for p in self._trained.values():
            p.grad = None
        for piece in pieces:
            is_whole = piece is whole
            loss = compute(piece, divisor=0.0 if is_whole else whole.size)
            self._sums.append(_numbers(loss))
            self._draws_elsewhere |= self._snapshot.drew_elsewhere()
            if is_whole:
                self._negate(float(loss.count) / whole.size)
            self._ends.append(self._snapshot.values())
            if is_whole or not self._in_turn:
                self._snapshot.put_back()
            if piece is not pieces[-1]:
                self._note_sizes()

    def _negate(self, by: float) -> None:
        """Make gradients of total / count those of -total / samples."""
        for p in self._trained.values():
            p.grad = None if p.grad is None else p.grad * -by

    def _note_sizes(self) -> None:
        for name, p in self._trained.items():
            self._sizes[name] = max(self._sizes[name], _norm(p.grad))

    def verdict(self) -> Verdict:
        """Judge what the pieces came to."""
        verdict = Verdict(precision=self._draws.coarsest, communicates=self._draws.communicates)
        whole, *parts = self._ends
        other = parts[-1] if self._in_turn else parts[0]
        verdict.written = self._snapshot.written(whole)
        verdict.drifts = [name for name in verdict.written if not _same(whole[name], other[name])]
        verdict.kept = self._snapshot.ends_otherwise(whole, other)
        verdict.draws = self._draws.has_drawn or self._draws_elsewhere
        verdict.draws_elsewhere = self._draws_elsewhere
        if not all(map(math.isfinite, self._sums[0].values())):
            verdict.unchecked = "the loss is not finite"
            return verdict
        verdict.apart, difference = self._worst()
        if verdict.apart <= TOLERANCE[verdict.precision]:
            return verdict
        if self._draws.is_lost or self._draws_elsewhere:
            verdict.unchecked = "a part of a batch draws other random numbers than the whole"
            return verdict
        verdict.difference = difference
        return verdict

    def _worst(self) -> tuple[float, str]:
        """How far the worst sum is off, and what to say of it: rather of totals than of
        gradients.
        """
        tolerance = TOLERANCE[self._draws.coarsest]
        whole, *parts = self._sums
        worst, text = 0.0, ""
        for name, value in whole.items():
            of_parts = [
                part.get(name, 0.0) for part in parts
            ]  # a batch may leave out a part of the loss
            far = _apart(value, of_parts)
            if far > max(worst, tolerance) or math.isnan(far):
                added = " + ".join(f"{part:.6g}" for part in of_parts)
                worst, text = (
                    far,
                    f"{name} is {value:.6g} for the whole batch, and {added} for its parts",
                )
        if text:
            return math.inf if math.isnan(worst) else worst, text
        floor = _FLOOR[self._draws.coarsest] * max(self._sizes.values(), default=0.0) + 1e-300
        for name, p in self._trained.items():
            far = _norm(p.grad) / (self._sizes[name] + floor)
            if not far <= worst:
                worst, text = (
                    far,
                    f'the gradient of "{name}" for the whole batch is not the sum for its parts '
                    f"({far:.1e})",
                )
        return math.inf if math.isnan(worst) else worst, text


def _apart(whole: float, parts: Sequence[float]) -> float:
    largest = max(abs(value) for value in (whole, *parts))
    return abs(whole - sum(parts)) / max(1e-300, largest)


def _numbers(loss: Loss) -> dict[str, float]:
    """Totals and counts by name. The total of no item is 0, also where it is a mean of none,
    NaN, times 0.
    """
    found = {}
    named: Mapping[str, tuple[Any, Any]] = {"": (loss.total, loss.count), **loss.parts}
    for name, (total, count) in named.items():
        of = f'part "{name}" of ' if name else ""
        found[f"the total of {of}the loss"] = float(total) if count else 0.0
        found[f"the count of {of}the loss"] = float(count)
    return found


def _norm(gradient: Tensor | None) -> float:
    """(Not the largest element: rounding may flip one of many ReLUs.)"""
    if gradient is None or not gradient.numel():
        return 0.0
    dense = gradient.to_dense() if gradient.is_sparse else gradient
    return float(dense.norm())


def _same(one: Any, other: Any) -> bool:
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        return one.shape == other.shape and bool(torch.equal(one, other))
    return type(one) is type(other) and bool(one == other)


# ---- numbers that are drawn ----------------------------------------------------------------------


class _Draws(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Keeps what the whole draws, and gives each part its rows of that.

    Args:
        samples: of the whole.
        layout: how numbers belong to samples, where several do to each: "rows", those of a sample
            lie together; "views", those of a first view of all samples come first, then those of a
            second one; "one by one", samples draw in a loop, each as often.

    Attributes:
        is_lost: whether a part has drawn what the whole has not.
        coarsest: the coarsest format of floating numbers that was computed in.
        communicates: whether something was sent to other ranks.
    """

    def __init__(self, samples: int, layout: str) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._samples = samples
        self._layout = layout
        self._drawn: list[Tensor] = []
        self._records = True
        self._at = 0
        self._start, self._stop = 0, samples
        self.is_lost = False
        self.coarsest = torch.float64
        self.communicates = False

    @property
    def has_drawn(self) -> bool:
        """Whether the whole has drawn random numbers."""
        return bool(self._drawn)

    def replay(self, start: int, stop: int) -> None:
        """Begin with a piece, of these samples of the whole; the first one is the whole, which
        is recorded.
        """
        self._records = not self._drawn and (start, stop) == (0, self._samples)
        self._start, self._stop = start, stop
        self._at = 0
        if self._layout == "one by one":
            self._at = len(self._drawn) * start // self._samples

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Call an operator, and replace what it draws."""
        del types
        self.communicates |= func.namespace in ("c10d", "_c10d_functional")
        made = func(*_without_dropout(func, args), **(kwargs or {}))
        self._note_formats(made)
        name = func.overloadpacket.__name__
        if torch.Tag.nondeterministic_seeded not in func.tags:
            return made
        if name == "randperm" and not self._records and self._shape_of_next() != made.shape:
            self._at += 1  # one over samples, whose rows mean nothing
            return made
        if name == "native_dropout":
            mask = self._replaced(made[1])
            return args[0] * mask / (1 - args[1]), mask
        return self._replaced(made) if isinstance(made, Tensor) else made

    def _note_formats(self, made: Any) -> None:
        for tensor in tensors(made):
            if tensor.is_floating_point() or tensor.is_complex():
                of = tensor.dtype.to_real()
                if of in _COARSER:
                    self.coarsest = max(self.coarsest, of, key=_COARSER.index)

    def _shape_of_next(self) -> torch.Size | None:
        return self._drawn[self._at].shape if self._at < len(self._drawn) else None

    def _replaced(self, drawn: Tensor) -> Tensor:
        if self._records:
            self._drawn.append(drawn.clone())
            return drawn
        kept = self._drawn[self._at] if self._at < len(self._drawn) else torch.empty(0)
        self._at += 1
        rows = self._rows(kept, drawn)
        if rows is None:
            self.is_lost = True
            return drawn
        return drawn.copy_(rows)

    def _rows(self, kept: Tensor, drawn: Tensor) -> Tensor | None:
        """The rows of what the whole has drawn that are a part's; None where there are none."""
        for dim in range(min(kept.dim(), drawn.dim())):
            if kept.shape[dim] != drawn.shape[dim]:
                kept = self._of_part(kept, dim)
                break
        return kept if kept.shape == drawn.shape else None

    def _of_part(self, kept: Tensor, dim: int) -> Tensor:
        each_sample = kept.shape[dim] // self._samples
        size = self._stop - self._start
        if self._layout == "rows" or kept.shape[dim] != each_sample * self._samples:
            return kept.narrow(dim, each_sample * self._start, each_sample * size)
        shape = kept.shape
        views = kept.reshape(*shape[:dim], each_sample, self._samples, *shape[dim + 1 :])
        return views.narrow(dim + 1, self._start, size).flatten(dim, dim + 1)


def _without_dropout(func: Any, args: tuple[Any, ...]) -> tuple[Any, ...]:
    """Arguments of an operator without the dropout that attention draws within its kernel."""
    names = [declared.name for declared in func._schema.arguments[: len(args)]]
    if "dropout_p" not in names:
        return args
    at = names.index("dropout_p")
    return (*args[:at], 0.0, *args[at + 1 :])


# ---- what is put back ----------------------------------------------------------------------------

_DEEP = 7
"""Levels of what modules hold that are put back: attributes, what is in them, and so on."""

_LONG = 1000
"""Items of a container beyond which it holds data, say, and no state."""

_LIBRARIES = (
    "torch",
    "lockstep",
    "threading",
    "queue",
    "multiprocessing",
    "concurrent",
    "asyncio",
    "logging",
)
"""Packages whose objects are left alone: other threads may use them meanwhile."""

_OPAQUE = (type, types.FunctionType, types.ModuleType, types.BuiltinFunctionType, str, bytes)
_OF_LOSS = "the loss."


class _Snapshot:
    """All that a model and its loss hold, and random numbers, to be put back.

    Weights, buffers, attributes, and what lies in them: containers, arrays, generators, and objects
    of other classes.
    """

    def __init__(
        self, model: nn.Module, loss: Totalled, accelerators: Sequence[torch.device]
    ) -> None:
        self._model = model
        self._loss = loss.loss
        self._accelerators = accelerators
        self._copies = [(one, _copied(one)) for one in _reachable([*model.modules(), self._loss])]
        self._before = {name: _copied(value) for name, value in self._named().items()}
        self._parameters = {name for name, _ in model.named_parameters(remove_duplicate=False)}
        self._random: States = states(accelerators)

    def put_back(self) -> None:
        """Put all of it back."""
        with torch.no_grad():
            for one, copied in self._copies:
                _restore(one, copied)
        put_states(self._random, self._accelerators)

    def drew_elsewhere(self) -> bool:
        """Whether Python or numpy has drawn, whose numbers can't be replayed."""
        return not same_others(self._random.others, states().others)

    def _named(self) -> dict[str, Any]:
        """Parameters, buffers and numbers by name, and tensors of the loss: what may act later."""
        found: dict[str, Any] = {}
        for path, module in self._model.named_modules():
            way = f"{path}." if path else ""
            for owner in (module._parameters, module._buffers):
                found.update((way + key, its) for key, its in owner.items() if its is not None)
            found.update(
                (way + key, its)
                for key, its in vars(module).items()
                if isinstance(its, int | float)
            )
        for key, its in getattr(self._loss, "__dict__", {}).items():
            if isinstance(its, Tensor | int | float):
                found[_OF_LOSS + key] = its
        return found

    def values(self) -> dict[str, Any]:
        """Copies of those that have changed."""
        now = self._named()
        changed = [name for name, value in now.items() if not _same(value, self._before.get(name))]
        return {name: _copied(now[name]) for name in changed}

    def written(self, ends: Mapping[str, Any]) -> list[str]:
        """The parameters among what has changed."""
        return [name for name in ends if name in self._parameters]

    def ends_otherwise(self, one: Mapping[str, Any], other: Mapping[str, Any]) -> list[str]:
        """The others that end otherwise. (A tensor in an attribute of the model is mostly that
        of the last batch.)
        """
        names = [name for name in {**one, **other} if name not in self._parameters]
        return [name for name in names if not _same(one.get(name), other.get(name))]


def _reachable(roots: list[Any]) -> Iterator[Any]:
    """Everything that can change and is held by these, some levels deep. Of long containers only
    they themselves.
    """
    seen: set[int] = set()
    level = roots
    for _ in range(_DEEP):
        below: list[Any] = []
        for one in level:
            if id(one) in seen or _is_opaque(one):
                continue
            seen.add(id(one))
            if isinstance(one, _CHANGEABLE):
                yield one
            below += _within(one)
        level = below


def _within(one: Any) -> list[Any]:
    """What an object holds."""
    if isinstance(one, dict | list | tuple | set | collections.deque):
        items = one.values() if isinstance(one, dict) else one
        return list(items) if len(items) <= _LONG else []
    if isinstance(one, Tensor) or not hasattr(one, "__dict__"):
        return []
    return [vars(one)]


def _is_opaque(one: Any) -> bool:
    """Whether an object is left alone: no state of a model's own."""
    if isinstance(one, _OPAQUE):
        return True
    if isinstance(one, (nn.Module, *_CHANGEABLE)):
        return False
    return type(one).__module__.partition(".")[0] in _LIBRARIES


def _copied(one: Any) -> Any:
    """A copy of what an object holds itself."""
    for kinds, copied, _ in _KINDS:
        if isinstance(one, kinds):
            return copied(one)
    return one


def _restore(one: Any, copied: Any) -> None:
    """Give an object what it held."""
    for kinds, _, restore in _KINDS:
        if isinstance(one, kinds):
            restore(one, copied)
            return


def _restore_tensor(one: Tensor, copied: Tensor) -> None:
    if not _same(one, copied):
        one.detach().copy_(copied)


def _restore_dict(one: dict[Any, Any], copied: dict[Any, Any]) -> None:
    if one.keys() != copied.keys() or any(one[key] is not its for key, its in copied.items()):
        one.clear()
        one.update(copied)


def _restore_set(one: set[Any], copied: set[Any]) -> None:
    one.clear()
    one.update(copied)


def _restore_deque(one: collections.deque[Any], copied: collections.deque[Any]) -> None:
    one.clear()
    one.extend(copied)


def _restore_array(one: Any, copied: Any) -> None:
    if one.flags.writeable:
        one[...] = copied


_KINDS: list[tuple[Any, Callable[[Any], Any], Callable[[Any, Any], Any]]] = [
    (Tensor, lambda one: one.detach().clone(), _restore_tensor),
    (dict, dict.copy, _restore_dict),
    (list, list.copy, lambda one, copied: one.__setitem__(slice(None), copied)),
    (set, set.copy, _restore_set),
    (collections.deque, collections.deque.copy, _restore_deque),
    (numpy.ndarray, numpy.copy, _restore_array),
    (
        (torch.Generator, numpy.random.RandomState),
        lambda one: one.get_state(),
        lambda one, copied: one.set_state(copied),
    ),
    (
        numpy.random.Generator,
        lambda one: copy.deepcopy(one.bit_generator.state),
        lambda one, copied: setattr(one.bit_generator, "state", copied),
    ),
    (
        random.Random,
        lambda one: one.getstate(),
        lambda one, copied: one.setstate(copied),
    ),
]
"""How each kind of object is copied and put back."""

_CHANGEABLE = tuple(
    kind for kinds, _, _ in _KINDS for kind in (kinds if isinstance(kinds, tuple) else (kinds,))
)


# ---- how the model computes meanwhile ------------------------------------------------------------


@contextlib.contextmanager
def _known_in_evaluation_mode(model: nn.Module) -> Iterator[None]:
    """Batch norms take their running statistics; those that have none take a mean of 0 and a
    variance of 1.
    """
    known = [module for module in model.modules() if module.training and isinstance(module, _KNOWN)]
    bare = [
        module
        for module in known
        if isinstance(module, _BATCH_NORMS) and module.running_mean is None
    ]
    for module in known:
        module.training = False
    for norm in bare:
        like = next(model.parameters(), torch.zeros(()))
        norm.running_mean = torch.zeros(norm.num_features, dtype=like.dtype, device=like.device)
        norm.running_var = torch.ones_like(norm.running_mean)
    try:
        yield
    finally:
        for module in known:
            module.training = True
        for norm in bare:
            norm.running_mean = norm.running_var = None


@contextlib.contextmanager
def _full_precision() -> Iterator[None]:
    with torch.autocast("cpu", enabled=False), torch.compiler.set_stance("force_eager"):
        yield


@contextlib.contextmanager
def _in_float64(model: nn.Module) -> Iterator[None]:
    """The model itself in float64 for a while: parameters, buffers, and tensors in attributes."""
    parameters = [(p, p.data) for p in model.parameters()]
    owners = [owner for module in model.modules() for owner in (module._buffers, vars(module))]
    held = [
        (owner, {key: its for key, its in owner.items() if isinstance(its, Tensor)})
        for owner in owners
    ]
    try:
        for p, data in parameters:
            p.data = _wide(data)
        for owner, before in held:
            owner.update({key: _wide(tensor) for key, tensor in before.items()})
        yield
    finally:
        for p, data in parameters:
            p.data = data
        for owner, before in held:
            owner.update(before)


def _wide(tensor: Tensor) -> Tensor:
    if tensor.is_complex():
        return tensor.to(torch.complex128)
    return tensor.double() if tensor.is_floating_point() else tensor


def _doubled(nest: Any) -> Any:
    return each(_wide, nest)


# ---- where samples act on one another ------------------------------------------------------------


def _first_that_mixes(
    model: nn.Module, pieces: list[Piece], compute: _Computing, snapshot: _Snapshot
) -> str:
    """The first module whose outputs for the last part depend on the others, though its inputs
    don't.
    """
    whole, *_, last = pieces

    def differ(of_whole: Tensor, of_part: Tensor) -> bool:
        rows = of_whole.shape[:1] == (whole.size,) and of_part.shape[:1] == (last.size,)
        if not rows or of_whole.shape[1:] != of_part.shape[1:]:
            return False
        same_rows = of_whole[last.start : last.start + last.size]
        tolerance = TOLERANCE.get(of_part.dtype, 1e-4)
        return not float((same_rows - of_part).abs().max()) <= tolerance * float(
            of_part.abs().max()
        )

    calls_of_whole = _calls(model, whole, compute, snapshot)
    calls_of_part = _calls(model, last, compute, snapshot)
    for (name, *given_and_gave), (_, *of_part) in zip(calls_of_whole, calls_of_part, strict=False):
        given, gave = (
            any(differ(one, other) for one, other in zip(of_whole, of, strict=False))
            for of_whole, of in zip(given_and_gave, of_part, strict=True)
        )
        if gave and not given:
            return f"samples act on one another in {name}"
    return "it comes of the loss, or of backward"


def _calls(
    model: nn.Module, piece: Piece, compute: _Computing, snapshot: _Snapshot
) -> list[tuple[str, list[Tensor], list[Tensor]]]:
    """Each call of a module in forward: its name, and the tensors that it was given and gave."""
    calls: list[tuple[str, list[Tensor], list[Tensor]]] = []
    names = {
        module: f'"{name}" ({type(module).__name__})' for name, module in model.named_modules()
    }
    names[model] = f"the model ({type(model).__name__})"

    def note(module: nn.Module, args: Any, kwargs: Any, outputs: Any) -> None:
        calls.append((names[module], _floats((args, kwargs)), _floats(outputs)))

    snapshot.put_back()
    hooks = [module.register_forward_hook(note, with_kwargs=True) for module in names]
    try:
        compute.outputs(piece)
    finally:
        for hook in hooks:
            hook.remove()
    return calls


def _floats(nest: Any) -> list[Tensor]:
    return [tensor.detach() for tensor in tensors(nest) if tensor.is_floating_point()]
