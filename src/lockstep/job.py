"""A job says what to train, and knows no device.

The model, the loss and the data once, and every setting of a training as a field with a default.
The command line has the same names and wins; there is no third place where a setting can hide.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
import re
import types
import typing
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from pathlib import Path
from typing import Any, Literal, Self

import torch
from torch import nn

from lockstep.errors import JobError, nearest

NamedParameters = list[tuple[str, nn.Parameter]]


@dataclass(frozen=True, kw_only=True)
class Job:
    """What to train.

    Attributes:
        model: builds the model, afresh wherever it is needed: ``lambda: Net()``. It is called under
            the job's seed. With ``step`` it may give a dict of modules by name, which becomes an
            ``nn.ModuleDict``.
        loss: ``loss(outputs, targets)``: one of PyTorch's losses, or a function that gives
            ``(total, count)`` or a ``lockstep.Loss``; any other scalar is taken as a mean over
            samples, and that is probed on the first batch. Not needed where ``step`` is given.
        optimizer: makes the optimizer from the list of ``(name, parameter)`` pairs of the
            parameters that are trained; with ``step``, a dict of such functions by the names of the
            model's parts.
        train_data: a dataset of ``(inputs, targets)``, or a callable that gives one. Inputs that
            are a tuple are passed as ``model(*inputs)``, a dict as ``model(**inputs)``, anything
            else (a named tuple, say) as ``model(inputs)``. One that can only be gone through (an
            ``IterableDataset``, a generator function) is a
            stream: every rank reads all of it, in its own order, and keeps its share; it must be
                the same on every
            rank, so don't cut it by rank. ``set_epoch(epoch)`` of either is called before each
            epoch, if it has one.
        batch_size: samples of the *global* batch: one update, whatever the number of devices.
        eval_data: as ``train_data``; None trains without evaluation. A dict of sets by name has
            metrics ``clean/loss``, ``clean/accuracy``, ...; the first one's loss is the one that
            chooses the best weights.
        epochs: how often the data are passed through (1 where ``steps`` isn't given either).
        steps: stop after that many updates.
        step: ``step(models, batch, update)`` makes the updates of one step, of several losses and
            optimizers: it calls ``update("generator", total, count)`` (see
                lockstep.strategies.step_function).
        lr_scheduler: makes a scheduler from the optimizer; with ``step``, a dict by the names of
            the optimizers.
        lr_scheduler_every: ``"epoch"`` or ``"step"``: when the scheduler moves on; once, on any
            number of devices.
        metrics: by name, a function ``(outputs, targets) -> (total, count)``, or a torchmetrics
            ``Metric``.
        seed: of the weights, the order, the augmentation and the dropout.
        shuffle: a new permutation for each epoch, from ``(seed, epoch)``; a stream isn't shuffled.
        order: ``order(epoch)`` gives the indices to go through, instead of a permutation: weighted,
            grouped by length, ... It draws from the global generators, which are seeded by ``(seed,
            epoch)``.
        collate: makes ``(inputs, targets)`` of a list of samples, instead of PyTorch's default.
        accumulate: cut each global batch in that many micro-batches, and update once.
        clip_norm: the largest norm of all gradients together.
        nonfinite: ``"raise"`` ends the training where the loss is NaN or infinite; ``"skip"`` skips
            each update whose loss or gradients aren't finite, on all ranks alike (what forward
            wrote into buffers stays). The host then waits for an accelerator in each update. An
            update whose loss counts no item is skipped in any case.
        nonfinite_limit: how many updates in a row may be skipped; one more ends the training.
        accept_differences: trains also where results depend on where a batch is cut, with a line;
            otherwise that is an error (see docs/verify.md).
        check_every: compares batches with parts of them in updates 1, 2, 4, 8, ..., and, if given,
            in every so many-th: total, count and gradients must not depend on where a batch is cut;
            0 compares none.
        init: weights to begin with: a safetensors file, the folder of a run, or one as Hugging
            Face's models have it (``model.safetensors``, or shards with an index). What doesn't fit
            is said. A run that is resumed goes on with its own.
        init_strict: refuse an ``init`` that hasn't all weights of the model, or has others; False
            takes what fits.
        sync_batchnorm: BatchNorm normalises over what one device would have seen, not over the
            share of a replica.
        channels_last: images and convolution weights in that memory layout.
        precision: None computes as the model was built; ``"fp64"`` and ``"fp32"`` turn model and
            inputs to that; ``"tf32"`` is fp32 with products that CUDA devices round to
            TensorFloat-32; ``"bf16"`` and ``"fp16"`` keep fp32 weights and compute what gains by it
            in half (see lockstep.model.precision).
        compile: True compiles the model by ``torch.compile``; a word is its mode
            (``"reduce-overhead"``, ``"max-autotune"``, ``"max-autotune-no-cudagraphs"``,
            ``"default"``), or the name of a backend.
        activation_checkpointing: blocks that compute their activations again in backward instead of
            keeping them: ``"auto"`` finds the model's lists of blocks, or names with commas between
            (see lockstep.model.activation_checkpointing).
        fused: the fused implementation of the optimizer; None takes it where PyTorch has one that
            is right.
        keep_memory: on CPU devices, what a step frees is kept for the next one instead of going
            back to the system: faster where activations are large, with a larger peak (see
            lockstep.tensors.allocator).
        eval_batch_size: of evaluation; None is ``batch_size``.
        log_every: within an epoch, write a record and a line of the steps since the last one: every
            so many steps (``100``) or after a time (``"10 min"``). Epochs have theirs anyway; of
            ``"10 epochs"``, each tenth.
        eval_every: when to evaluate: every so many steps (``100``) or epochs (``"2 epochs"``,
            ``"0.25 epochs"``), or after a time (``"10 min"``); None is at the end of each epoch.
            The last step is evaluated anyway.
        save_every: likewise, when to save a checkpoint. With steps or a time one is saved at the
            end of each epoch too.
        best: the evaluation whose weights are kept as the best: ``"accuracy:max"``,
            ``"clean/accuracy:max"``; None is ``"eval_loss:min"``, the lowest loss (of the first
            set).
        keep: how many checkpoints are kept, the newest ones.
        save_frozen: False leaves what is frozen when the training begins out of checkpoints and
            files of weights: it comes from ``model`` again wherever it is needed, and must be the
            same then (a SHA-256 is compared).
        loader_workers: processes that fetch samples, for each rank; None chooses by the cores and
            the dataset. A stream has at most one, which reads ahead: each further one would read
            all of it.
        tensorboard: also write events for TensorBoard, in the run's folder.
        on_event: functions called with each ``Event`` on rank 0; one that returns ``"stop"`` ends
            the training.
        callbacks: ``lockstep.Callback`` objects, whose methods are called on every rank with the
            model: early stopping, averaged weights, freezing, ... (see ``lockstep.callbacks``).

    Raises:
        JobError: a field is missing or wrong; the message begins with its name.
    """

    model: Callable[[], Any]
    loss: Callable[..., Any] = None  # type: ignore[assignment]
    optimizer: (
        Callable[[NamedParameters], torch.optim.Optimizer]
        | Mapping[str, Callable[..., torch.optim.Optimizer]]
    )
    train_data: Any
    batch_size: int
    eval_data: Any = None
    epochs: int | None = None
    steps: int | None = None
    step: Callable[..., None] | None = None
    lr_scheduler: (
        Callable[[torch.optim.Optimizer], Any] | Mapping[str, Callable[..., Any]] | None
    ) = None
    lr_scheduler_every: Literal["epoch", "step"] = "epoch"
    metrics: Mapping[str, Any] = field(default_factory=dict)
    seed: int = 0
    shuffle: bool = True
    order: Callable[[int], Sequence[int] | torch.Tensor] | None = None
    collate: Callable[[list[Any]], tuple[Any, Any]] | None = None
    accumulate: int = 1
    clip_norm: float | None = None
    nonfinite: Literal["raise", "skip"] = "raise"
    nonfinite_limit: int = 10
    accept_differences: bool = False
    check_every: int | None = None
    init: str | None = None
    init_strict: bool = True
    sync_batchnorm: bool = False
    channels_last: bool = False
    precision: Literal["fp64", "fp32", "tf32", "bf16", "fp16"] | None = None
    compile: bool | str = False
    activation_checkpointing: str | None = None
    fused: bool | None = None
    keep_memory: bool = False
    eval_batch_size: int | None = None
    log_every: int | str | None = None
    eval_every: int | str | None = None
    save_every: int | str | None = None
    best: str | None = None
    keep: int = 2
    save_frozen: bool = True
    loader_workers: int | None = None
    tensorboard: bool = False
    on_event: Sequence[Callable[[Any], str | None]] = ()
    callbacks: Sequence[Any] = ()

    def __new__(cls, *values: Any, **fields: Any) -> Self:
        """Say what is wrong with the names, in place of Python's own words."""
        if values:
            raise JobError(
                "a Job takes its fields by name (model=..., loss=...), not a "
                f"{type(values[0]).__name__}"
            )
        for name in fields:
            if name not in _FIELDS:
                raise JobError(f"{name}: a job has no such field; {nearest(name, list(_FIELDS))}")
        needed = [
            n for n, f in _FIELDS.items() if f.default is f.default_factory is dataclasses.MISSING
        ]
        needed += ["loss"] if fields.get("step") is None else []
        if fields and (missing := [name for name in needed if name not in fields]):
            raise JobError(
                f"{missing[0]}: a job needs one; Job(model=, loss=, optimizer=, train_data=, "
                "batch_size=)"
            )
        return super().__new__(cls)

    def __post_init__(self) -> None:
        if isinstance(self.optimizer, torch.optim.Optimizer):
            raise JobError(
                "optimizer: give a function that makes it: lambda params: torch.optim.SGD(params, "
                "lr=0.1)"
            )
        for name in ("model", "loss", "optimizer", "lr_scheduler", "order", "collate", "step"):
            value = getattr(self, name)
            if name in ("optimizer", "lr_scheduler") and isinstance(value, Mapping):
                value = next((each for each in value.values() if not callable(each)), len)
            if not callable(value) and (value is not None or _FIELDS[name].default is not None):
                raise JobError(f"{name}: {value!r} can't be called")
        if isinstance(self.model, nn.Module):
            raise JobError(
                "model: give a function that builds it (lambda: Net()), it is built wherever it "
                "is needed"
            )
        if self.train_data is None:
            raise JobError(
                "train_data: there is none; give a dataset of (inputs, targets), or a callable "
                "that gives one"
            )
        if not isinstance(self.metrics, Mapping):
            raise JobError(
                "metrics: a dict of functions by name is expected, not "
                f"{type(self.metrics).__name__}"
            )
        for metric, function in self.metrics.items():
            if not callable(function):
                raise JobError(f'metrics: "{metric}" is {function!r}, which can\'t be called')
        if not isinstance(self.on_event, Sequence):
            raise JobError("on_event: a list of functions is expected")
        if not isinstance(self.callbacks, Sequence):
            raise JobError("callbacks: a list of lockstep.Callback objects is expected")
        for name in ("log_every", "eval_every", "save_every"):
            Every.read(getattr(self, name), name)
        best_of(self.best)
        for name in SETTINGS:
            object.__setattr__(self, name, checked_setting(name, getattr(self, name)))
        if self.init is not None and not self.save_frozen:
            raise JobError(
                "save_frozen: false takes frozen weights from model alone: load them there, not "
                "by init"
            )
        self._check_step()

    def _check_step(self) -> None:
        """What a function of several updates needs, and what it can't have."""
        for name in ("optimizer", "lr_scheduler"):
            value = getattr(self, name)
            if value is not None and isinstance(value, Mapping) != (self.step is not None):
                raise JobError(
                    f"{name}: a dict by the names of the model's parts goes with step=, and a "
                    "function without it: "
                    'optimizer={"generator": ..., "discriminator": ...}, step=function'
                )
        if self.step is None:
            if self.loss is None:
                raise JobError("loss: None can't be called")
            return
        assert isinstance(self.optimizer, Mapping)
        if not self.optimizer:
            raise JobError(
                "optimizer: the dict is empty; give a function for each part of the model that is "
                "trained"
            )
        if isinstance(self.lr_scheduler, Mapping) and (
            others := self.lr_scheduler.keys() - self.optimizer.keys()
        ):
            raise JobError(
                f"lr_scheduler: there is no optimizer {min(others)!r}, only "
                f"{', '.join(self.optimizer)}"
            )
        refused = {
            "accumulate": "a step function makes each update on a whole batch: take a batch_size "
            "that fits",
            "compile": "compile the parts where they are made: part.compile() in the function of "
            "model=",
            "nonfinite": "a step function makes several updates, of which one can't be skipped "
            "alone",
            "sync_batchnorm": "a step function calls the parts as it likes, so replicas can't "
            "meet in them",
        }
        for name, why in refused.items():
            if getattr(self, name) != _FIELDS[name].default:
                raise JobError(f"{name}: {why}")
        if self.precision == "fp16":
            raise JobError(
                "precision: fp16 scales one loss, and a step function has several: take bf16"
            )
        if self.eval_data is not None and self.loss is None:
            raise JobError(
                "eval_data: with step=, give a loss(outputs, targets) to evaluate too, and a "
                "model with a forward"
            )

    def replace(self, **settings: Any) -> Job:
        """The same job with some settings changed.

        Raises:
            JobError: a setting doesn't exist (the nearest is offered), or its value is wrong.
        """
        return dataclasses.replace(self, **settings)

    @property
    def settings(self) -> dict[str, Any]:
        """The settings that are plain values, by name: what a run's ``config.json`` keeps."""
        return {name: getattr(self, name) for name in SETTINGS}


_FIELDS = {f.name: f for f in dataclasses.fields(Job)}

_POSITIVE = {"batch_size", "epochs", "steps", "accumulate", "clip_norm", "eval_batch_size", "keep"}
"""Settings that are above zero; other numbers may be zero."""


def _options(hint: Any) -> tuple[Any, ...]:
    """The members of a union; of anything else, itself."""
    return (
        typing.get_args(hint)
        if typing.get_origin(hint) in (typing.Union, types.UnionType)
        else (hint,)
    )


def _is_plain(option: Any) -> bool:
    return option in (int, float, bool, str, type(None)) or typing.get_origin(option) is Literal


SETTINGS: dict[str, Any] = {
    name: hint
    for name, hint in typing.get_type_hints(Job).items()
    if all(map(_is_plain, _options(hint)))
}
"""The settings that a command line can give, with their types."""


@dataclass(frozen=True)
class Every:
    """How often something is done: every so many steps or epochs, or after so many seconds; the
    others are None.
    """

    steps: int | None = None
    epochs: Fraction | None = None
    seconds: float | None = None

    @property
    def is_within(self) -> bool:
        """Whether it falls within epochs, not only at their ends."""
        return self.epochs is None or self.epochs.denominator > 1

    @classmethod
    def read(cls, value: int | str | None, name: str) -> Every:
        """That of ``100``, ``"2 epochs"``, ``"0.5 epochs"``, ``"90 s"``, ``"10 min"``, ``"2 h"``;
        None is each epoch.

        Raises:
            JobError: it is none of them; ``name`` is the setting's.
        """
        if value is None or str(value).lower() == "none":
            return cls(epochs=Fraction(1))
        found = re.fullmatch(r"(\d+(?:\.\d+)?)\s*(s|min|h|steps?|epochs?)?", str(value).strip())
        number = float(found[1]) if found else 0.0
        unit = found[2] or "steps" if found else ""
        if found is None or number <= 0 or (unit.startswith("step") and not number.is_integer()):
            raise JobError(
                f"{name}: {value!r} is neither a number of steps above 0 nor a time, as 10min, "
                "nor 2epochs"
            )
        if unit.startswith("step"):
            return cls(steps=int(number))
        if unit.startswith("epoch"):
            return cls(epochs=Fraction(found[1]))
        return cls(seconds=number * {"s": 1, "min": 60, "h": 3600}[unit])


def best_of(best: str | None) -> tuple[str, bool]:
    """The name of ``"accuracy:max"``, and whether more is better.

    Raises:
        JobError: it doesn't say which.
    """
    name, _, mode = ("eval_loss:min" if best is None else str(best)).rpartition(":")
    if not name or mode not in ("max", "min"):
        raise JobError(
            f'best: {best!r} is no metric with max or min after it: "{name or mode}:max", or ":min"'
        )
    return "eval_loss" if name == "loss" else name, mode == "max"


def checked_setting(name: str, value: Any) -> Any:
    """The value of a plain setting in its own type, or a JobError that names the setting."""
    value = convert(value, SETTINGS[name], name)
    if isinstance(value, int | float) and not isinstance(value, bool):
        if not math.isfinite(value):
            raise JobError(f"{name}: {value} is not a finite number")
        if name in _POSITIVE and value <= 0:
            raise JobError(f"{name}: {value} is too small, it must be above 0")
        if name != "seed" and value < 0:
            raise JobError(f"{name}: {value} is negative")
    return value


def convert(value: Any, hint: Any, name: str) -> Any:
    """Turn ``value`` (a word from a command line, or a Python value) into the type that ``hint``
    says.

    Args:
        value: what was given.
        hint: int, float, bool, str, Path, a ``Literal``, a union of them, or anything else (then
            left as it is).
        name: for the message.

    Raises:
        JobError: it isn't one.
    """
    options = _options(hint)
    if type(None) in options and (
        value is None or (isinstance(value, str) and value.lower() == "none")
    ):
        return None
    wanted = [option for option in options if option is not type(None)]
    for option in wanted:
        with contextlib.suppress(KeyError, TypeError, ValueError):
            return _as(value, option)
    raise JobError(f"{name}: {value!r} is not {' or '.join(map(_called, wanted))}")


_WORDS = {
    "true": True,
    "yes": True,
    "on": True,
    "1": True,
    "false": False,
    "no": False,
    "off": False,
    "0": False,
}


def _as(value: Any, option: Any) -> Any:
    """The value in this type; one of KeyError, TypeError and ValueError where it is of another."""
    if typing.get_origin(option) is Literal:
        return {str(choice): choice for choice in typing.get_args(option)}[str(value)]
    if option is bool:
        return _WORDS[str(value).lower()]
    if option in (str, Path) and not isinstance(value, str | Path):
        raise TypeError
    if option in (int, float) and isinstance(value, bool):
        raise TypeError
    if option is int and isinstance(value, float) and not value.is_integer():
        raise ValueError
    return option(value) if option in (str, Path, int, float) else value


def _called(option: Any) -> str:
    if typing.get_origin(option) is Literal:
        return " or ".join(f'"{choice}"' for choice in typing.get_args(option))
    return {int: "a whole number", float: "a number", bool: "true or false", str: "text"}.get(
        option, str(option)
    )
