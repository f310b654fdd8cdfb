"""What metrics hold from call to call, a matrix or a list beside their values: checks leave it as it is."""

from __future__ import annotations

import types
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from lockstep.model.inspection import OutsideVariables, held_by, kept_state, prints_of


class MetricState:
    """That of some metrics.

    Args:
        functions: by name.

    Attributes:
        functions: as given.
    """

    def __init__(self, functions: Mapping[str, Any]) -> None:
        self.functions = functions
        self._outside = {name: OutsideVariables([function]) for name, function in functions.items()}
        self._by_id = {id(function): self._outside[name] for name, function in functions.items()}
        self._hold = {
            name: function
            for name, function in functions.items()
            if _own(function) or self._outside[name].values() or self._outside[name].modules
        }

    def kept(self) -> AbstractContextManager[None]:
        """In which metrics are called by checks; what they hold comes back."""
        return kept_state(list(self._hold.values()), self._by_id) if self._hold else nullcontext()

    def reached_by(self, name: str) -> dict[int, Any]:
        """The objects that a metric comes to, by their ids."""
        outside = self._outside[name]
        return held_by([self.functions[name], *outside.values(), *outside.modules])

    def of(self, name: str) -> Any:
        """What tells whether that metric's has changed."""
        if name not in self._hold:
            return None
        return prints_of([("", _own(self._hold[name]))]), self._outside[name].prints()


def _own(function: Any) -> dict[str, Any]:
    return {} if isinstance(function, types.FunctionType) else getattr(function, "__dict__", {})
