"""Whether code of a person's own communicates with other ranks."""

from __future__ import annotations

from typing import Any

from torch.utils._python_dispatch import TorchDispatchMode


def communicates(operator: Any) -> bool:
    """Return whether an operator of PyTorch sends something to other ranks."""
    return operator.namespace in ("c10d", "_c10d_functional")


class NotedCommunication(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Notes whether an operator communicates, in this thread.

    Attributes:
        found: whether one did.
    """

    found = False

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: Any = (),
        kwargs: Any = None,
    ) -> Any:
        """Call an operator."""
        self.found |= communicates(func)
        return func(*args, **(kwargs or {}))
