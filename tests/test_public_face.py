"""The public face: every name, method and option that a person may use, as a list. What is taken
from it is missed.
"""

from __future__ import annotations

import dataclasses
import inspect
import json
from pathlib import Path
from typing import Any

import lockstep
from lockstep.cli import command as cli
from lockstep.strategies import STRATEGIES

LIST = Path(__file__).parent / "kept" / "public_face.json"


def members(thing: Any) -> list[str]:
    """The public attributes and methods of a class, but for those that it has from others'
    classes.
    """
    if not inspect.isclass(thing):
        return []
    fields = [f.name for f in dataclasses.fields(thing)] if dataclasses.is_dataclass(thing) else []
    own = {
        name
        for kind in thing.__mro__
        if kind.__module__.startswith("lockstep")
        for name in vars(kind)
    }
    return sorted({*fields, *(name for name in own if not name.startswith("_"))})


def parameters(thing: Any) -> list[str]:
    try:
        return [
            name
            for name in inspect.signature(thing).parameters
            if name not in ("self", "args", "kwargs")
        ]
    except (TypeError, ValueError):
        return []


def face() -> dict[str, Any]:
    names = {}
    for module in ("", "callbacks", "parallel", "strategies"):
        home = getattr(lockstep, module) if module else lockstep
        for name in home.__all__:
            thing = getattr(home, name)
            if not inspect.ismodule(thing):
                names[f"{module}.{name}".strip(".")] = {
                    "members": members(thing),
                    "parameters": parameters(thing),
                }
    _, commands = cli._parser()
    options = {
        name: sorted(
            option
            for action in parser._actions
            for option in (action.option_strings or [action.dest])
        )
        for name, parser in commands.items()
    }
    settings = {
        f"--{setting.replace('_', '-')}"
        for kind in STRATEGIES.values()
        for setting in kind.settings()
    }
    for name in ("train", "verify"):
        options[name] = sorted({*options[name], *settings})
    strategies = {
        name: [f.name for f in dataclasses.fields(kind)] for name, kind in STRATEGIES.items()
    }
    return {"names": names, "options": options, "strategies": strategies}


def test_nothing_that_a_person_uses_is_lost() -> None:
    """After a change that is meant: ``python tests/test_public_face.py`` writes the list anew."""
    known, now = json.loads(LIST.read_text()), face()
    for kind, its in known.items():
        for name, value in its.items():
            assert now[kind].get(name) == value, f"{kind}: {name}"
        assert sorted(now[kind]) == sorted(its), kind


if __name__ == "__main__":
    LIST.write_text(json.dumps(face(), indent=1) + "\n")
