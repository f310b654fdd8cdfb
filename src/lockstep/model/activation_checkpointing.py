"""Activation checkpointing: blocks of a model keep only their inputs, and compute the rest again in
backward.

PyTorch's ``checkpoint`` (without reentrance) does it, with some things added here. Buffers, and
attributes that are numbers or tensors: in the second run they have the values that they had in the
first, and afterwards those that they had before, so that running statistics and counters move once.
A block stays the same object of the same class, only its ``forward`` is another one, so parameters
keep their names. Objects that a block is given and writes to (a cache of keys and values): its
second run has copies, as they were. Random numbers are drawn again the same, Python's and numpy's
too; in the threads of ``dp`` `lockstep.threads.recompute` sees to those of torch, and a model that
draws others is refused. A block that changes anything else in its second run (a dictionary, a
global variable) is refused.
"""

from __future__ import annotations

import contextlib
import functools
import io
import itertools
import pickle
import types
from collections import Counter
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import CheckpointError, checkpoint

from lockstep.errors import JobError, LockstepError, StrategyError, first_line, nearest
from lockstep.model.inspection.attributes import attribute_prints, plain_attributes
from lockstep.model.inspection.outside_variables import OutsideVariables
from lockstep.tensors.seeding import other_states, set_other_states

_LOOKED_AT = 8
"""So many second runs of a block are looked at, and every 16th, 32nd, 64th one and so on."""


def checkpoint_blocks(model: nn.Module, wanted: str, *, compiled: bool = False) -> list[str]:
    """Make blocks of ``model`` forget their activations; gives the blocks' names.

    Args:
        model: is changed in place.
        wanted: ``"auto"``, or names with commas between: of a block, or of a list of blocks, of
            which each is one.
        compiled: the model will be compiled. The compiler can't follow a checkpoint that puts
            buffers back: it leaves the checkpoint as it is, and compiles what is inside.

    Raises:
        JobError: there is no such module (the nearest is offered), or ``auto`` finds no list of
            blocks.
    """
    blocks = (
        found_blocks(model)
        if wanted == "auto"
        else named_blocks(model, wanted, "activation_checkpointing", JobError)
    )
    if not blocks:
        raise JobError(
            "activation_checkpointing: auto finds no list of like blocks in the model: name "
            "blocks, "
            'as "encoder.layers" or "stem,body.3"'
        )
    for name, block in blocks.items():
        if "forward" in vars(block):
            raise JobError(
                f'activation_checkpointing: "{name}" has had its forward replaced: name blocks '
                "inside of it"
            )
    for block, name in {block: name for name, block in blocks.items()}.items():
        forward = _checkpointed(name)
        if compiled:
            forward = torch.compiler.disable(forward, recursive=False)  # type: ignore[no-untyped-call]
        block.forward = types.MethodType(forward, block)
    return list(blocks)


def found_blocks(model: nn.Module) -> dict[str, nn.Module]:
    """The model's blocks: in each outermost list of modules, those of one class that are made of
    several layers.

    A list counts where it has at least two of them. So the layers of a transformer, of an encoder
    and of a decoder, the residual blocks of every stage of a ResNet.
    """
    found: dict[str, nn.Module] = {}

    def look(name: str, module: nn.Module) -> None:
        children = list(module.named_children())
        kinds = Counter(type(child) for _, child in children if _is_composite(child))
        many = {kind for kind, times in kinds.items() if times > 1}
        for child_name, child in children:
            full = f"{name}.{child_name}".lstrip(".")
            if isinstance(module, nn.ModuleList | nn.Sequential) and type(child) in many:
                found.setdefault(full, child)
            else:
                look(full, child)

    look("", model)
    return found


def _is_composite(module: nn.Module) -> bool:
    """Made of several layers, and no list of blocks itself."""
    if not _has_forward(module):
        return False
    if isinstance(module, nn.Sequential) and any(map(_is_composite, module)):
        return False
    return (
        sum(1 for m in module.modules() if next(m.parameters(recurse=False), None) is not None) > 1
    )


def _has_forward(module: nn.Module) -> bool:
    """Whether it can be called; a ``ModuleList`` or a ``ModuleDict`` can't."""
    return "forward" in vars(module) or type(module).forward is not nn.Module.forward


def named_blocks(
    model: nn.Module, wanted: str, setting: str, error: type[LockstepError]
) -> dict[str, nn.Module]:
    """The modules that a person named, with commas between; of a list or a dict of modules its
    members.

    Args:
        model: that has them.
        wanted: their names.
        setting: where they were given.
        error: what is raised for a name that the model doesn't have; the nearest is offered.
    """
    modules = dict(model.named_modules())
    blocks: dict[str, nn.Module] = {}

    def take(name: str, module: nn.Module) -> None:
        if _has_forward(module):
            blocks[name] = module
        else:
            for child, block in module.named_children():
                take(f"{name}.{child}", block)

    for name in filter(None, (word.strip() for word in wanted.split(","))):
        if name not in modules:
            known = [module_name for module_name in modules if module_name]
            raise error(f'{setting}: the model has no module "{name}"; {nearest(name, known)}')
        take(name, modules[name])
    return blocks


_ARE_OFF: ContextVar[bool] = ContextVar("blocks keep their activations", default=False)


@contextlib.contextmanager
def without_checkpoints() -> Iterator[None]:
    """In which blocks keep their activations."""
    before = _ARE_OFF.set(True)
    try:
        yield
    finally:
        _ARE_OFF.reset(before)


def not_checkpointable(error: Exception) -> StrategyError | None:
    """What an error of PyTorch's means where blocks are checkpointed; None where it may be
    another's.
    """
    words = (
        "saved tensor hooks",
        "functorch",
        "forward AD level",
        "modified by an inplace operation",
    )
    if not isinstance(error, CheckpointError) and not any(word in str(error) for word in words):
        return None
    return StrategyError(
        "activation_checkpointing: a block can't be computed a second time as backward needs it "
        "(does it call "
        f"torch.func, write its input in place, or take other branches then?): {first_line(error)}",
        fix="name other blocks, or leave activation_checkpointing out",
    )


def _checkpointed(name: str) -> Callable[..., Any]:
    """A forward with which the block of that name, and its copies, keep their inputs alone."""
    runs = itertools.count()

    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        run: Callable[..., Any] = functools.partial(type(self).forward, self)
        if not torch.is_grad_enabled() or _ARE_OFF.get():
            return run(*args, **kwargs)
        contexts = contextlib.nullcontext(), _Again(_Start(self, name, runs))
        run = _giving_copies(run, args, kwargs)
        return checkpoint(run, *args, use_reentrant=False, context_fn=lambda: contexts, **kwargs)

    return forward


def _giving_copies(
    run: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Callable[..., Any]:
    """``run``, which is given copies of objects, as they were, from its second call on."""
    objects = {
        key: value for key, value in (*enumerate(args), *kwargs.items()) if not _is_constant(value)
    }
    if not objects:
        return run
    try:
        copies = _Copies(objects)
    except Exception:  # one can't be copied
        return run
    calls = itertools.count()

    def given(*args: Any, **kwargs: Any) -> Any:
        if not next(calls):
            return run(*args, **kwargs)
        made = copies.made()
        its = {name: made.get(name, value) for name, value in kwargs.items()}
        return run(*(made.get(number, value) for number, value in enumerate(args)), **its)

    return given


def _is_constant(value: Any) -> bool:
    """Whether a block can't write to it; tensors, which it may, autograd looks after."""
    if isinstance(value, tuple):
        return all(map(_is_constant, value))
    return value is None or isinstance(value, torch.Tensor | nn.Module | int | float | str)


class _Copies:
    """Copies of an object as it is now; tensors and modules in it stay the same."""

    def __init__(self, value: Any) -> None:
        self._kept: list[Any] = []
        written = io.BytesIO()
        _Writer(written, self._kept).dump(value)
        self._written = written.getvalue()

    def made(self) -> Any:
        """A new one."""
        return _Reader(io.BytesIO(self._written), self._kept).load()


class _Writer(pickle.Pickler):
    def __init__(self, file: io.BytesIO, kept: list[Any]) -> None:
        super().__init__(file)
        self._kept = kept

    def persistent_id(self, value: Any) -> Any:
        if not isinstance(value, torch.Tensor | nn.Module):
            return None
        self._kept.append(value)
        return len(self._kept) - 1


class _Reader(pickle.Unpickler):
    def __init__(self, file: io.BytesIO, kept: list[Any]) -> None:
        super().__init__(file)
        self._kept = kept

    def persistent_load(self, number: Any) -> Any:
        return self._kept[number]


class _Start:
    """What a block began its first run with: buffers, attributes, and states of Python's and
    numpy's random numbers.
    """

    def __init__(self, block: nn.Module, name: str, runs: Iterator[int]) -> None:
        """Args:
        block: it, or a copy of it.
        name: the block's in the model.
        runs: numbers of the second runs of it and its copies.
        """
        self._block, self._name, self._runs = block, name, runs
        modules = [*block.modules(), *_bound_by_hooks(block)]
        self._attributes = [(vars(module), plain_attributes(module)) for module in modules]
        self._places = [
            (m, name) for m in modules for name, b in m._buffers.items() if b is not None
        ]
        self._then = [self._value(place).clone() for place in self._places]
        self._drawn = other_states()

    def _value(self, place: tuple[nn.Module, str]) -> torch.Tensor:
        value = place[0]._buffers[place[1]]
        assert value is not None
        return value

    @contextlib.contextmanager
    def again(self) -> Iterator[None]:
        """The block has them again for a while; what is written to them meanwhile is forgotten."""
        attributes = [
            (held, {name: held[name] for name in then if name in held})
            for held, then in self._attributes
        ]
        for held, then in self._attributes:
            held.update(then)
        now = [self._value(place) for place in self._places]
        drawn = other_states()
        set_other_states(self._drawn)
        for (module, name), value in zip(self._places, self._then, strict=True):
            module._buffers[name] = (
                value.clone()
            )  # (which is written to, and there may be another run)
        run = next(self._runs)
        others = (
            _Others(self._block, self._name) if run < _LOOKED_AT or not run & (run - 1) else None
        )
        try:
            yield
        finally:
            set_other_states(drawn)
            for held, its in attributes:
                held.update(its)
            for (module, name), value in zip(self._places, now, strict=True):
                module._buffers[name] = value
            if (
                others is not None
            ):  # (PyTorch ends the run by an exception, once it has what it wants.)
                others.refuse_changes()


class _Again(contextlib.AbstractContextManager[None]):
    """``_Start.again``, each time that backward computes a block: twice where it goes through
    the graph twice.
    """

    def __init__(self, start: _Start) -> None:
        self._start, self._entered = start, list[contextlib.AbstractContextManager[None]]()

    def __enter__(self) -> None:
        self._entered.append(self._start.again())
        self._entered[-1].__enter__()

    def __exit__(self, *raised: Any) -> bool | None:
        return self._entered.pop().__exit__(*raised)


class _Others:
    """What a block's forward may change and is not put back."""

    def __init__(self, block: nn.Module, name: str) -> None:
        self._block, self._name = block, name
        self._outside = OutsideVariables.of_model(block)
        self._before = self._prints()

    def _prints(self) -> dict[str, bytes]:
        """A hash of each."""
        plain = {
            f"{name}.{key}" if name else key
            for name, module in self._block.named_modules()
            for key in plain_attributes(module)
        }
        attributes = {
            name: its for name, its in attribute_prints(self._block).items() if name not in plain
        }
        return {
            **{f"{self._name}.{name}": its for name, its in attributes.items()},
            **self._outside.prints(),
        }

    def refuse_changes(self) -> None:
        """Refuse a block whose second run has changed something.

        Raises:
            JobError: it has.
        """
        for name, its in self._prints().items():
            if self._before.get(name, its) != its:
                raise JobError(
                    f'activation_checkpointing: "{self._name}" changes "{name}" again as backward '
                    "computes it a "
                    "second time: make that a buffer, or a number of the module's own, or name "
                    "other blocks"
                ) from None


def _bound_by_hooks(block: nn.Module) -> Iterator[nn.Module]:
    """Modules elsewhere whose methods are hooks of the block's modules."""
    within = set(block.modules())
    for module in block.modules():
        for hook in (*module._forward_hooks.values(), *module._forward_pre_hooks.values()):
            its = getattr(hook, "__self__", None)
            if isinstance(its, nn.Module) and its not in within:
                within.add(its)
                yield its
