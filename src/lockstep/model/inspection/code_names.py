"""Values are pickled to be hashed: functions and classes by what tells them from others, since not all can be imported.

(In ranks, those of the script itself can't.)
"""

from __future__ import annotations

import pickle
import types
from typing import Any

from lockstep.launch.processes.call import closed_over

PLAIN = (bool, int, float, complex, str, type(None))


class CodeByName(pickle.Pickler):
    """(A class within a function would hold what that closes over, a copy of the model, until garbage is collected.)"""

    def persistent_id(self, held: Any) -> Any:
        """What stands for a function or a class."""
        if isinstance(held, types.FunctionType):
            return _name_of(held)
        return (held.__module__, held.__qualname__) if isinstance(held, type) else None


def _name_of(function: types.FunctionType) -> tuple[Any, ...]:
    """What tells a function from others, the same in each process: its name, its code, numbers that it closes over."""
    code = function.__code__
    plain = [value for value in (*closed_over(function), *code.co_consts) if type(value) in PLAIN]
    return function.__module__, function.__qualname__, code.co_firstlineno, code.co_code, code.co_names, plain
