"""The plain values among a job's fields: their types, and how a word of a command line becomes
one.
"""

from __future__ import annotations

import contextlib
import dataclasses
import inspect
import math
import re
import types
import typing
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import Any, Literal

from lockstep.errors import JobError

_POSITIVE = {
    "batch_size",
    "epochs",
    "steps",
    "accumulate",
    "clip_norm",
    "eval_batch_size",
    "eval_batches",
    "keep",
}
"""Settings that are above zero; other numbers may be zero."""


def plain_fields(kind: type) -> dict[str, Any]:
    """Return the fields of a dataclass that are plain values, with their types.

    Other types have names that are not known here: a job's name torch, which need not be imported.
    """
    found = {}
    for field in dataclasses.fields(kind):
        with contextlib.suppress(NameError):
            found[field.name] = eval(str(field.type), {"Literal": Literal})
    return found


def described_fields(kind: type) -> dict[str, str]:
    """Return what the docstrings of a class, and of those that it extends, say of each field."""
    texts = [inspect.cleandoc(one.__doc__ or "") for one in reversed(kind.__mro__)]
    found = {}
    for name, text in re.findall(r"^    (\w+): (.*(?:\n {6,}.*)*)", "\n".join(texts), re.MULTILINE):
        found[name] = " ".join(text.replace("``", "").split())
    return found


def _options(hint: Any) -> tuple[Any, ...]:
    """Return the members of a union; of anything else, itself."""
    is_union = typing.get_origin(hint) in (typing.Union, types.UnionType)
    return typing.get_args(hint) if is_union else (hint,)


def checked(name: str, value: Any, hint: Any) -> Any:
    """Return the value of a setting, converted to the setting's type.

    Raises:
        JobError: it has another type, or is a number that the setting can't have.
    """
    value = convert(value, hint, name)
    if isinstance(value, bool) or not isinstance(value, int | float):
        return value
    is_unlimited = name == "clip_norm" and value == math.inf
    if not (math.isfinite(value) or is_unlimited):
        raise JobError(f"{name}: {value} is not a finite number")
    if name in _POSITIVE and value <= 0:
        raise JobError(f"{name}: {value} is too small, it must be above 0")
    if name != "seed" and value < 0:
        raise JobError(f"{name}: {value} is negative")
    return value


def convert(value: Any, hint: Any, name: str) -> Any:
    """Convert ``value``, a word of a command line or a Python value, to a type.

    Args:
        value: what was given.
        hint: int, float, bool, str, Path, a ``Literal``, or a union of them; a value of any other
            type is left as it is.
        name: for the message.

    Raises:
        JobError: it can't be converted.
    """
    options = _options(hint)
    is_none = value is None or str(value).lower() == "none"
    if is_none and type(None) in options:
        return None
    wanted = [option for option in options if option is not type(None)]
    for option in wanted:
        with contextlib.suppress(KeyError, TypeError, ValueError):
            return _converted(value, option)
    raise JobError(f"{name}: {value!r} is not {' or '.join(map(_described, wanted))}")


_WORDS = {
    "true": True,
    "yes": True,
    "on": True,
    "1": True,
    "false": False,
    "no": False,
    "off": False,
    "0": False,
}


def _converted(value: Any, option: Any) -> Any:
    """Return the value in this type.

    Raises:
        KeyError, TypeError, ValueError: it has another one.
    """
    if typing.get_origin(option) is Literal:
        return {str(choice): choice for choice in typing.get_args(option)}[str(value)]
    if option is bool:
        return _WORDS[str(value).lower()]
    if option in (str, Path) and not isinstance(value, str | Path):
        raise TypeError
    if option in (int, float) and isinstance(value, bool):
        raise TypeError
    if option is int and isinstance(value, float) and not value.is_integer():
        raise ValueError
    return option(value) if option in (str, Path, int, float) else value


def _described(option: Any) -> str:
    if typing.get_origin(option) is Literal:
        return " or ".join(f'"{choice}"' for choice in typing.get_args(option))
    names = {int: "a whole number", float: "a number", bool: "true or false", str: "text"}
    return names.get(option, str(option))


_EVERY = re.compile(r"(\d+(?:\.\d+)?)\s*(s|min|h|steps?|epochs?|)")
_SECONDS = {"s": 1, "min": 60, "h": 3600}


@dataclass(frozen=True)
class Every:
    """How often something is done: by steps, epochs or seconds; the other two are None."""

    steps: int | None = None
    epochs: Fraction | None = None
    seconds: float | None = None

    @property
    def is_within(self) -> bool:
        """Return whether it falls within epochs, not only at their ends."""
        return self.epochs is None or self.epochs.denominator > 1

    @classmethod
    def read(cls, value: int | str | None, name: str) -> Every:
        """Read ``100``, ``"2 epochs"``, ``"0.5 epochs"``, ``"90 s"``, ``"10 min"`` or ``"2 h"``;
        None is each epoch.

        Raises:
            JobError: it is none of them; ``name`` is the setting's.
        """
        if value is None or str(value).lower() == "none":
            return cls(epochs=Fraction(1))
        number = Fraction(0)
        unit = ""
        found = _EVERY.fullmatch(str(value).strip())
        if found:
            number = Fraction(found[1])
            unit = found[2]
        if number > 0 and unit in _SECONDS:
            return cls(seconds=float(number * _SECONDS[unit]))
        if number > 0 and unit.startswith("epoch"):
            return cls(epochs=number)
        if number > 0 and number.denominator == 1:
            return cls(steps=int(number))
        raise JobError(
            f"{name}: {value!r} is not valid: give a number of steps (100), epochs (2epochs) or "
            "a time (10min)"
        )


def read_best(best: str | None) -> tuple[str, bool]:
    """Return the name of ``"accuracy:max"``, and whether more is better.

    Raises:
        JobError: it doesn't say which.
    """
    name, _, mode = ("eval_loss:min" if best is None else str(best)).rpartition(":")
    if not name or mode not in ("max", "min"):
        raise JobError(
            f'best: {best!r} needs max or min after the metric: "{name or mode}:max", or ":min"'
        )
    return "eval_loss" if name == "loss" else name, mode == "max"
