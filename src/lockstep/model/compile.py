"""``compile``: models by ``torch.compile``, in place, and what to say where that can't be done
here.
"""

from __future__ import annotations

import copy
import shutil
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn

from lockstep.errors import JobError, StrategyError, nearest
from lockstep.job import Job
from lockstep.launch.world import World
from lockstep.model.inspection import accelerators_of, acting_buffers, detached_attributes
from lockstep.tensors.digest import digest
from lockstep.tensors.pytree import call, clones
from lockstep.tensors.seeding import kept_states

MODES = ("default", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs")
"""Words of the setting that are modes of PyTorch's own backend; the others are names of
backends.
"""

GRAPHED = MODES[1:3]
"""Those that capture CUDA graphs; on other devices they leave that out."""


def refuse_graphs(job: Job, world: World) -> None:
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
            "overwrite, and "
            f'accumulate is {job.accumulate}: take "default" or "max-autotune-no-cudagraphs"'
        )
    if len(world.devices) > 1:
        raise JobError(
            f'compile: "{job.compile}" captures CUDA graphs, which threads of one process can\'t '
            "at the same time: "
            'take ddp, or "default"'
        )


def compile_models(models: Iterable[nn.Module], wanted: bool | str) -> None:
    """Compile each of the models in place, so that its modules keep their names; code is made at
    the first call.

    Args:
        models: the replicas of this process.
        wanted: a mode, or the name of a backend, or True for PyTorch's default.

    Raises:
        JobError: there is no such backend.
    """
    mode = str(wanted) if wanted in MODES else None
    name = "inductor" if wanted is True or mode else str(wanted)
    try:
        for model in models:
            # What `model.compile()` does, but for the function between: PyTorch's compiler leaves
            # out, without a word, whatever is called first in its own files, so that an
            # nn.Sequential would not be compiled (torch 2.13).
            model._compiled_call_impl = torch.compile(
                _calling(model._call_impl), backend=name, mode=mode
            )
    except RuntimeError as error:
        if type(error).__name__ != "InvalidBackend":
            raise
        raise JobError(
            f'compile: there is no backend or mode "{name}"; '
            f"{nearest(name, [*torch.compiler.list_backends(), *MODES])}"
        ) from None


def _calling(function: Callable[..., Any]) -> Callable[..., Any]:
    def compiled(*args: Any, **kwargs: Any) -> Any:
        return function(*args, **kwargs)

    # PyTorch compiles a code object for so many models only (8): further replicas would run as they
    # are.
    compiled.__code__ = compiled.__code__.replace()
    return compiled


def not_compilable(error: BaseException) -> JobError | None:
    """What to tell the person of an error that is none of the model's: no compiler is here; None
    for another.
    """
    said = str(error)
    if "InvalidCxxCompiler" in said:
        found = next((word for word in ("g++", "clang++") if shutil.which(word)), None)
        what = (
            f"set CXX={found}"
            if found
            else "install g++ or clang++ (or say where one is: CXX=/path/to/g++)"
        )
        return JobError(
            f"compile: no C++ compiler works here: {what}, take --compile aot_eager, or leave "
            "compile out"
        )
    if "TritonMissing" in said or "working triton installation" in said:
        return JobError(
            "compile: Triton isn't here: install triton, take --compile aot_eager, or leave "
            "compile out"
        )
    return None


def refuse_written_buffers(model: nn.Module, inputs: Any) -> None:
    """Refuse to compile a model that writes a buffer in forward, other than running statistics.

    What is made of the buffer may be computed again in the compiled backward, from the buffer as it
    is then (torch 2.13, https://github.com/pytorch/pytorch/pull/197039; to be deleted when the
    oldest torch supported has that).

    Raises:
        StrategyError: it writes one. (That of a model that can't be copied isn't seen.)
    """
    before = {name: digest(b) for name, b in acting_buffers(model).items()}
    if not before:
        return
    with torch.no_grad(), kept_states(accelerators_of(inputs)):
        try:
            copied = copy.deepcopy(model, detached_attributes(model))
            buffers = dict(
                copied.named_buffers()
            )  # one that is replaced, not written, does no harm
            call(copied, clones(inputs))
        except Exception:  # what is wrong with the model, its first step says
            return
    for name, was in before.items():
        if digest(buffers[name]) != was:
            raise StrategyError(
                f'compile: the model writes its buffer "{name}" in forward, and PyTorch\'s '
                "compiled backward may read "
                "it too late, for wrong gradients: leave compile out, or give the module a new "
                "tensor instead"
            )


def refuse_compiled(model: nn.Module) -> None:
    """Refuse a model that ``torch.compile`` has made: a copy would run the model it was made of.

    Raises:
        StrategyError: the model, or a part of it, is one.
    """
    for name, module in model.named_modules():
        if type(module).__name__ == "OptimizedModule":
            where = f'"{name}"' if name else "the model"
            raise StrategyError(
                f"{where} is what torch.compile gave",
                fix="give the model itself, and compile=True",
            )
