"""Which layer writes in place to what backward needs.

Autograd finds this in backward only, and names no layer. Once it has raised, forward is computed
once more, and the tensors that autograd saves are compared with their versions after each operator.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.overrides import TorchFunctionMode

from lockstep.errors import JobError, LockstepError, own_line
from lockstep.model.layer_error import calls_in, layer_name


def inplace_error(
    error: Exception, model: nn.Module, forward: Callable[[], Any]
) -> JobError | None:
    """Explain an error of backward; None where it is another one, or forward doesn't show it.

    Args:
        error: was raised in backward.
        model: gives the layer its name.
        forward: computes the loss of the same samples.
    """
    if "modified by an inplace operation" not in str(error):
        return None
    watch = _Watch()
    try:
        with saved_tensors_hooks(watch.keep, lambda tensor: tensor), watch:
            forward()
    except _Written as written:
        calls, _ = calls_in(written)
        what = f"model: {layer_name(model, calls[-1][0])}" if calls else "the loss"
        return JobError(
            f"{what} writes in place to a tensor of shape {written} that backward needs"
            f"{own_line(written)}: write y = y + 1 for y += 1, and inplace=False"
        )
    except Exception:  # what is known is the error itself
        return None
    return None


class _Written(LockstepError):
    """A saved tensor was written to; the message is its shape."""


class _Watch(TorchFunctionMode):
    """Raises ``_Written`` after the operator that writes to a saved tensor."""

    def __init__(self) -> None:
        super().__init__()
        self._saved: list[tuple[Tensor, int]] = []

    def keep(self, tensor: Tensor) -> Tensor:
        """Note a tensor that autograd saves, as it is now."""
        self._saved.append((tensor, tensor._version))
        return tensor

    def __torch_function__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        value = function(*args, **(kwargs or {}))
        for tensor, version in self._saved:
            if tensor._version != version:
                raise _Written(f"{tuple(tensor.shape)}")
        return value
