"""Which layer of a model raised, and what it was given: for errors inside of PyTorch's own layers.

Their tracebacks have no line of the person's own code. One that has is left as it is.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from lockstep.errors import JobError, first_line, is_own_code
from lockstep.launch.memory import is_out_of_memory
from lockstep.tensors.pytree import tensors


def layer_error(model: nn.Module, error: Exception) -> JobError | None:
    """What to raise instead of an error that ``model`` raised in forward; None where the error says
    it better.

    Its text is ``model: layer "2" (Linear), given (32, 64) torch.float64: mat1 and mat2 must have
    the same dtype``.
    """
    trace = error.__traceback__
    called: tuple[nn.Module, Any] | None = None
    inputs: Any = None  # of the whole model
    is_own = False  # whether a line of the person's own code is in the trace
    while trace is not None:
        frame = trace.tb_frame
        is_own = is_own or (called is not None and is_own_code(frame.f_code.co_filename))
        module = frame.f_locals.get("self")
        if frame.f_code.co_name == "_call_impl" and isinstance(module, nn.Module):
            called = module, (frame.f_locals.get("args", ()), frame.f_locals.get("kwargs", {}))
            inputs = called[1] if inputs is None else inputs
        trace = trace.tb_next
    if called is not None and is_of_one_sample(error) and not called[0].training:
        return JobError(
            "BatchNorm without running statistics was given one sample only: choose a batch size "
            "(eval_batch_size in "
            "a job) that leaves no local batch of one sample"
        )
    if is_own or called is None or is_out_of_memory(error) or is_of_one_sample(error):
        return None  # (the step says what BatchNorm needs)
    layer, given = called
    name = next(
        (f'layer "{name}" ' for name, module in model.named_modules() if module is layer and name),
        "",
    )
    found = list(tensors(given))
    shapes = ", ".join(f"{tuple(t.shape)} {t.dtype}" for t in found)
    advice = _advice({p.dtype for p in layer.parameters()}, _formats(given), _formats(inputs))
    return JobError(
        f"model: {name}({type(layer).__name__}), given {shapes}: {first_line(error)}{advice}"
    )


def _formats(given: Any) -> set[torch.dtype]:
    return {t.dtype for t in tensors(given) if t.is_floating_point()}


def _advice(formats: set[torch.dtype], given: set[torch.dtype], inputs: set[torch.dtype]) -> str:
    """What to do where a layer's parameters and what it was given are of different floating
    formats.

    Args:
        formats: of its parameters.
        given: of what it was given.
        inputs: of what the model was given.
    """
    others = given - formats
    if not formats or not others:
        return ""
    its = f"; its parameters are {', '.join(map(str, formats))}"
    if not others & inputs:
        no_double = (
            ' (not every model can compute in precision="fp64")' if torch.float64 in formats else ""
        )
        return f"{its}, and the model itself gives it {', '.join(map(str, others))}{no_double}"
    return f"{its}: give it such inputs" + (
        ', or choose precision="fp64"' if torch.float64 in others else ""
    )


def is_of_one_sample(error: BaseException) -> bool:
    """Whether BatchNorm raised it, given one value per channel, which has no variance."""
    return isinstance(error, ValueError) and "more than 1 value per channel" in str(error)
