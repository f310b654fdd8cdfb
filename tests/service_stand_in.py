"""Stands for a service's package that isn't installed: it writes down each call."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

SERVICE = """
import json, types

def __getattr__(name):
    if name.startswith("__"):
        raise AttributeError(name)

    def call(*args, **named):
        with open({log!r}, "a") as file:
            file.write(json.dumps([name, args, named]) + "\\n")
        return types.SimpleNamespace(info=types.SimpleNamespace(run_id="run-7"))

    return call
"""


def service(name: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Make a module of that name importable; gives the file that its calls go to."""
    log = folder / f"{name}.calls"
    modules = folder / "modules"
    modules.mkdir()
    (modules / f"{name}.py").write_text(SERVICE.format(log=str(log)))
    monkeypatch.syspath_prepend(str(modules))
    monkeypatch.delitem(sys.modules, name, raising=False)
    return log


def calls(log: Path) -> list[Any]:
    return [json.loads(line) for line in log.read_text().splitlines()]
