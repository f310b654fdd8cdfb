"""``compile``: models by ``torch.compile``, in place, and what to say where that can't be done here."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn

from lockstep.errors import JobError, nearest


def compile_models(models: Iterable[nn.Module], backend: bool | str) -> None:
    """Compile each of the models in place, so that its modules keep their names; code is made at the first call.

    Args:
        models: the replicas of this process.
        backend: the name of one, or True for PyTorch's default.

    Raises:
        JobError: there is no such backend.
    """
    name = "inductor" if backend is True else str(backend)
    try:
        for model in models:
            # What `model.compile()` does, but for the function between: PyTorch's compiler leaves out, without a word,
            # whatever is called first in its own files, so that an nn.Sequential would not be compiled (torch 2.13).
            model._compiled_call_impl = torch.compile(_calling(model._call_impl), backend=name)
    except RuntimeError as error:
        if type(error).__name__ != "InvalidBackend":
            raise
        raise JobError(
            f'compile: there is no backend "{name}"; {nearest(name, torch.compiler.list_backends())}'
        ) from None


def _calling(function: Callable[..., Any]) -> Callable[..., Any]:
    def compiled(*args: Any, **kwargs: Any) -> Any:
        return function(*args, **kwargs)

    # PyTorch compiles a code object for so many models only (8): further replicas would run as they are.
    compiled.__code__ = compiled.__code__.replace()
    return compiled


def not_compilable(error: BaseException) -> JobError | None:
    """What to tell the person of an error that is none of the model's: no compiler is here; None for another."""
    said = str(error)
    if "InvalidCxxCompiler" in said:
        found = next((word for word in ("g++", "clang++") if shutil.which(word)), None)
        what = f"set CXX={found}" if found else "install g++ or clang++ (or say where one is: CXX=/path/to/g++)"
        return JobError(f"compile: no C++ compiler works here: {what}, take --compile aot_eager, or leave compile out")
    if "TritonMissing" in said or "working triton installation" in said:
        return JobError("compile: Triton isn't here: install triton, take --compile aot_eager, or leave compile out")
    return None
