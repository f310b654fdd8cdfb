"""The keyword arguments of functions that take the fields of a class, for editors and type
checkers.

``train(job, **settings: Unpack[JobFields])`` takes any field of a ``Job``. Type checkers read these
lists, which a test compares with the classes. ``inspect.signature`` shows what ``with_fields_of``
takes from the class itself.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal, TypedDict, TypeVar

if TYPE_CHECKING:
    import torch

F = TypeVar("F", bound=Callable[..., Any])


class UpdateFields(TypedDict, total=False):
    """The fields of a ``Recipe`` beside model, loss and optimizer."""

    loss_over: Literal["samples", "batch"]
    counts: Callable[[Any], Mapping[str, Any]] | None
    step: Callable[..., None] | None
    seed: int
    accumulate: int
    clip_norm: float | None
    nonfinite: Literal["raise", "skip"]
    nonfinite_limit: int
    accept_differences: bool
    check_every: int | None
    init: str | None
    init_strict: bool
    sync_batchnorm: bool
    channels_last: bool
    precision: Literal["fp64", "fp32", "tf32", "bf16", "fp16"] | None
    compile: bool | str
    activation_checkpointing: str | None
    fused: bool | None
    keep_memory: bool


class JobFields(UpdateFields, total=False):
    """The fields of a ``Job``."""

    model: Callable[[], Any]
    loss: Callable[..., Any] | None
    optimizer: Callable[..., torch.optim.Optimizer] | Mapping[str, Callable[..., Any]]
    train_data: Any
    batch_size: int
    eval_data: Any
    epochs: int | None
    steps: int | None
    lr_scheduler: Callable[..., Any] | Mapping[str, Callable[..., Any]] | None
    lr_scheduler_every: Literal["epoch", "step"]
    metrics: Mapping[str, Any]
    shuffle: bool
    order: Callable[[int], Any] | None
    batches: Callable[[int], Iterable[Any]] | None
    cut_by: Any
    collate: Callable[[list[Any]], Any] | None
    eval_batch_size: int | None
    log_every: int | str | None
    eval_every: int | str | None
    eval_at_start: bool
    eval_batches: int | None
    save_every: int | str | None
    best: str | None
    keep: int
    save_frozen: bool
    loader_workers: int | None
    tensorboard: bool
    on_event: Sequence[Callable[[Any], str | None]]
    callbacks: Sequence[Any]


class LoaderFields(TypedDict, total=False):
    """The arguments of ``AnyLoader`` beside the dataset and the batch size."""

    rank: int | None
    world_size: int
    shares: Sequence[int]
    accumulate: int
    seed: int
    shuffle: bool
    order: Callable[[int], Any] | None
    batches: Callable[[int], Iterable[Any]] | None
    cut_by: Any
    collate: Callable[[list[Any]], Any] | None
    workers: int | None
    device: torch.device | Sequence[torch.device] | None
    evaluation: bool
    name: str | None


def with_fields_of(kind: type, *, defaults: bool = True) -> Callable[[F], F]:
    """Decorate a function so that its signature names the fields of a class for ``**settings``.

    Args:
        kind: has the fields.
        defaults: whether the defaults are those of the class; else they are shown as ``...``.
    """

    def decorated(function: F) -> F:
        signature = inspect.signature(function)
        parameters = dict(signature.parameters)
        parameters.popitem()
        for name, field in inspect.signature(kind).parameters.items():
            if not defaults:
                field = field.replace(default=...)
            parameters.setdefault(name, field)
        shown = signature.replace(parameters=list(parameters.values()))
        function.__signature__ = shown  # type: ignore[attr-defined]
        return function

    return decorated
