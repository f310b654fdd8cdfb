"""A recipe: what is trained and how one update is computed, without data and without a schedule."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, Self, TypeAlias

from lockstep.errors import JobError
from lockstep.settings import checked, plain_fields

if TYPE_CHECKING:  # the help of the command has the settings, and needs no torch
    import torch
    from torch import nn

NamedParameters: TypeAlias = "list[tuple[str, nn.Parameter]]"
MakesOptimizer: TypeAlias = "Callable[[NamedParameters], torch.optim.Optimizer]"

_REFUSED_WITH_STEP = {
    "accumulate": "a step function makes each update on a whole batch: take a batch_size that fits",
    "loss_over": "a step function computes its losses itself",
    "counts": "a step function gives the count of each loss itself",
    "compile": "compile the parts where they are made: part.compile() in the function of model=",
    "nonfinite": "a step function makes several updates, and skipping one alone isn't possible",
    "sync_batchnorm": "a step function calls modules in any order, so replicas can't synchronize",
}

_EXAMPLES = {
    "optimizer": "lambda parameters: torch.optim.SGD(parameters, lr=0.1)",
    "lr_scheduler": "lambda optimizer: StepLR(optimizer, step_size=10)",
    "batches": "lambda epoch: [[0, 1], [2, 3]]",
    "order": "lambda epoch: [2, 0, 1, 3]",
    "counts": 'lambda targets: {"items": len(targets)}',
}


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """The model, the loss, the optimizer, and the settings of an update.

    ``lockstep.Job`` extends it, and documents the fields. A recipe alone is what ``parallelize``
    and ``predict`` give to a strategy: they have no training set.

    Attributes:
        optimizer: as that of a job; None where nothing is updated.
        loss: as that of a job; None where it is never called.

    Raises:
        JobError: a field is wrong; the message begins with its name.
    """

    model: Callable[[], Any]
    loss: Callable[..., Any] | None = None
    loss_over: Literal["samples", "batch"] = "samples"
    counts: Callable[[Any], Mapping[str, Any]] | None = None
    optimizer: MakesOptimizer | Mapping[str, Callable[..., torch.optim.Optimizer]] | None
    step: Callable[..., None] | None = None
    seed: int = 0
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

    def __post_init__(self) -> None:
        import torch

        if isinstance(self.model, torch.nn.Module):
            raise JobError(
                "model: give a function that builds it (lambda: Net()), it is built wherever it "
                "is needed"
            )
        if not callable(self.model):
            raise JobError(f"model: {self.model!r} can't be called")
        refuse_uncallable(self, "optimizer", "step", "loss", "counts")
        for name, hint in plain_fields(type(self)).items():
            object.__setattr__(self, name, checked(name, getattr(self, name), hint))
        refuse_other_kind(self, "optimizer")
        if self.step is not None:
            self._check_step()
        elif self.loss is None and self.optimizer is not None:
            raise JobError("loss: the job has none: give a function of outputs and targets")

    def _check_step(self) -> None:
        """Refuse what can't go with a function of several updates."""
        if not self.optimizer:
            raise JobError(
                "optimizer: the dict is empty; give a function for each part of the model that is "
                "trained"
            )
        for field in dataclasses.fields(self):
            why = _REFUSED_WITH_STEP.get(field.name)
            if why is not None and getattr(self, field.name) != field.default:
                raise JobError(f"{field.name}: {why}")
        if self.precision == "fp16":
            raise JobError(
                "precision: fp16 scales one loss, and a step function has several: take bf16"
            )

    def replace(self, **settings: Any) -> Self:
        """Copy it with some settings changed.

        Raises:
            JobError: its value is wrong.
        """
        return dataclasses.replace(self, **settings)


def recipe_of(job: Recipe) -> Recipe:
    """Copy what a job trains, without the job's data and schedule."""
    return Recipe(**{field.name: getattr(job, field.name) for field in dataclasses.fields(Recipe)})


def refuse_uncallable(recipe: Recipe, *names: str) -> None:
    """Refuse fields that are neither None nor a function, nor a dict or list of functions.

    Raises:
        JobError: with the field.
    """
    for name in names:
        functions = getattr(recipe, name)
        if isinstance(functions, Mapping):
            functions = functions.values()
        elif name != "on_event":
            functions = [functions]
        for function in functions:
            if function is None or callable(function):
                continue
            if name in _EXAMPLES:
                raise JobError(
                    f"{name}: a function is expected, not {type(function).__name__}",
                    fix=f"write {_EXAMPLES[name]}",
                )
            raise JobError(f"{name}: {function!r} can't be called")


def refuse_other_kind(recipe: Recipe, name: str) -> None:
    """Refuse a dict without ``step``, a function with it, and what is for no optimizer of a dict.

    Raises:
        JobError: with which of the two fits.
    """
    value = getattr(recipe, name)
    if value is not None and isinstance(value, Mapping) != (recipe.step is not None):
        raise JobError(
            f"{name}: a dict by the names of the model's parts goes with step=, and a "
            'function without it: optimizer={"generator": ..., "discriminator": ...}, '
            "step=function"
        )
    if isinstance(value, Mapping) and isinstance(recipe.optimizer, Mapping):
        for key in sorted(value):
            if key not in recipe.optimizer:
                raise JobError(
                    f"{name}: there is no optimizer {key!r}, only {', '.join(recipe.optimizer)}"
                )
