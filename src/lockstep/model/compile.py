"""``compile``: models compiled in place by ``torch.compile``, and what is refused or explained."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn

from lockstep.errors import JobError, StrategyError, nearest
from lockstep.launch.world import World
from lockstep.recipe import Recipe

MODES = ("default", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs")
"""Values of the setting that are modes of PyTorch's own backend; others are names of backends."""

_MISSING = {
    "InvalidCxxCompiler": "no C++ compiler works here: install g++ (or set CXX=/path/to/g++)",
    "TritonMissing": "Triton isn't here: install triton",
    "working triton installation": "Triton isn't here: install triton",
}
"""What to do about a missing compiler, by words of PyTorch's errors."""

GRAPHED = MODES[1:3]
"""Modes that capture CUDA graphs; on other devices PyTorch leaves the graphs out."""


def refuse_graphs(job: Recipe, world: World) -> None:
    """Refuse CUDA graphs where they are known to be wrong.

    A parameter's gradient is memory of the graph, which the backward of the next micro-batch
    overwrites before it is added (https://github.com/pytorch/pytorch/issues/169545). Graphs belong
    to a thread, and dp's threads would capture theirs at the same time.

    Raises:
        JobError: the job accumulates, or one process drives several devices.
    """
    if job.compile not in GRAPHED or world.device.type != "cuda":
        return
    if job.accumulate > 1:
        raise JobError(
            f'compile: "{job.compile}" captures CUDA graphs, whose gradients micro-batches would '
            f"overwrite, and accumulate is {job.accumulate}: "
            'take "default" or "max-autotune-no-cudagraphs"'
        )
    if len(world.devices) > 1:
        raise JobError(
            f'compile: "{job.compile}" captures CUDA graphs, which threads of one process can\'t '
            'replay at once: take ddp, or "default"'
        )


def compile_models(models: Iterable[nn.Module], wanted: bool | str) -> None:
    """Compile each of the models in place, so that its modules keep their names.

    Code is made at the first call.

    Args:
        models: the replicas of this process.
        wanted: a mode, or the name of a backend, or True for PyTorch's default.

    Raises:
        JobError: there is no such backend.
    """
    mode = str(wanted) if wanted in MODES else None
    backend = "inductor" if wanted is True or mode else str(wanted)
    try:
        for model in models:
            # `model.compile()` does the same without the function between: PyTorch's compiler
            # silently skips the frame that is called first if it is in PyTorch's own files, so an
            # nn.Sequential would not be compiled (torch 2.13).
            function = _with_own_code(model._call_impl)
            model._compiled_call_impl = torch.compile(function, backend=backend, mode=mode)
    except RuntimeError as error:
        if type(error).__name__ != "InvalidBackend":
            raise
        known = [*torch.compiler.list_backends(), *MODES]
        raise JobError(
            f'compile: there is no backend or mode "{backend}"; {nearest(backend, known)}'
        ) from None


def _with_own_code(function: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a function in a code object of its own.

    PyTorch compiles one code object for 8 models at most: further replicas would run uncompiled.
    """

    def compiled(*args: Any, **kwargs: Any) -> Any:
        return function(*args, **kwargs)

    compiled.__code__ = compiled.__code__.replace()
    return compiled


def not_compilable(error: BaseException) -> JobError | None:
    """Explain an error that PyTorch raised because a compiler is missing.

    Args:
        error: raised in an update; None is given for any other error.
    """
    for words, what in _MISSING.items():
        if words in str(error):
            return JobError(f"compile: {what}, take --compile aot_eager, or leave compile out")
    return None


def refuse_compiled(model: nn.Module) -> None:
    """Refuse a model that ``torch.compile`` has made: a copy would run the model it was made of.

    Raises:
        StrategyError: the model, or a part of it, is one.
    """
    for name, module in model.named_modules():
        if type(module).__name__ == "OptimizedModule":
            where = f'"{name}"' if name else "the model"
            raise StrategyError(
                f"{where} was given to torch.compile already",
                fix="give the model itself, and compile=True",
            )
