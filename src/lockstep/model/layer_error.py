"""Which layer of a model raised, and what it was given: for errors inside of PyTorch's own layers.

Tracebacks of such errors have no line of the person's own code. Others are left as they are.
"""

from __future__ import annotations

from typing import Any

from torch import nn

from lockstep.errors import JobError, first_line, is_own_code
from lockstep.launch.memory import is_out_of_memory
from lockstep.tensors.pytree import call, tensors


def explained_call(model: nn.Module, inputs: Any) -> Any:
    """Compute the outputs of a model.

    Raises:
        JobError: one of PyTorch's layers can't take what it is given.
    """
    try:
        return call(model, inputs)
    except (RuntimeError, TypeError, ValueError, IndexError) as error:
        why = layer_error(model, error)
        if why is None:
            raise
        raise why from error


def layer_error(model: nn.Module, error: Exception) -> JobError | None:
    """Explain an error that ``model`` raised in forward; None where the error is clear by itself.

    The text is ``model: layer "2" (Linear), given (32, 64) torch.float64: mat1 and mat2 must have
    the same dtype``.

    Args:
        model: gives the layer its name.
        error: with its traceback.
    """
    calls, in_own_code = calls_in(error)
    if not calls:
        return None
    layer, given = calls[-1]
    if is_of_one_sample(error):
        if layer.training:
            return None  # the step explains what BatchNorm needs
        return JobError(
            "BatchNorm without running statistics was given one sample only: choose a batch size "
            "(eval_batch_size in a job) that leaves no local batch of one sample"
        )
    is_of_index = type(layer) is nn.Embedding and isinstance(error, IndexError)
    if (in_own_code and not is_of_index) or is_out_of_memory(error):
        return None
    shapes = ", ".join(f"{tuple(t.shape)} {t.dtype}" for t in tensors(given))
    dtypes = {p.dtype for p in layer.parameters()}
    advice = ""
    if is_of_index:
        advice = f"; numbers below num_embeddings={layer.num_embeddings} are expected"
    elif dtypes and dtypes.isdisjoint(t.dtype for t in tensors(given)):
        advice = f"; its parameters are {', '.join(map(str, dtypes))}"
    return JobError(
        f"model: {layer_name(model, layer)}, given {shapes}: {first_line(error)}{advice}"
    )


def layer_name(model: nn.Module, layer: nn.Module) -> str:
    """Name a layer in messages: ``layer "2" (Linear)``."""
    names = {module: name for name, module in model.named_modules()}
    name = f'layer "{names[layer]}" ' if names.get(layer) else ""
    return f"{name}({type(layer).__name__})"


def calls_in(error: Exception) -> tuple[list[tuple[nn.Module, Any]], bool]:
    """Find the calls of modules in a traceback, each with its arguments, and whether a line of the
    person's own code comes after the first.
    """
    calls = list[tuple[nn.Module, Any]]()
    in_own_code = False
    trace = error.__traceback__
    while trace is not None:
        frame = trace.tb_frame
        if calls and is_own_code(frame.f_code.co_filename):
            in_own_code = True
        module = frame.f_locals.get("self")
        if frame.f_code.co_name == "_call_impl" and isinstance(module, nn.Module):
            calls.append((module, (frame.f_locals.get("args"), frame.f_locals.get("kwargs"))))
        trace = trace.tb_next
    return calls, in_own_code


def is_of_one_sample(error: BaseException) -> bool:
    """Return whether BatchNorm raised an error, given one value per channel, which has no variance."""
    return isinstance(error, ValueError) and "more than 1 value per channel" in str(error)
