"""The house: its public names, and the direction of its arrows."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import lockstep
from lockstep.strategies import STRATEGIES

SRC = Path(lockstep.__file__).parent
LAYERS = [
    {"errors", "allocator", "options"},
    {"nesting", "devices", "digest", "events", "seeding", "timeline", "stopping"},
    {"job", "means", "world", "breakdown"},
    {"jobfile", "memory", "loss", "inventory", "launch", "parallel"},
    {
        "ownloop",
        "compiling",
        "activations",
        "precision",
        "build",
        "optimizer",
        "forward",
        "loss_check",
        "nonfinite",
        "device_checks",
        "pipelining",
        "data",
        "dataname",
        "display",
        "placement",
        "folder",
        "checkpoint",
        "arrayfile",
        "outputs",
        "stopwatch",
        "report",
    },
    {"evaluator", "step", "run", "linefile", "map"},
    {"strategies", "evaluation", "firststep", "profiling", "progress", "scheduler"},
    {"parallelize", "loop", "resuming", "run_config"},
    {"train"},
    {"predict", "glance", "trial"},
    {"verify", "tune", "compare", "interrupt"},
    {"cli"},
    {"__main__"},
]
"""From the ground up: a room imports only from those below it, or within its own storey without a circle."""


def imports_of(path: Path) -> set[str]:
    """The rooms that a file imports, those that only type checkers see left out."""
    tree = ast.parse(path.read_text())
    for node in ast.walk(tree):
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test):
            node.body = []
    found = set()
    for node in ast.walk(tree):
        names = []
        if isinstance(node, ast.ImportFrom) and node.module:
            deeper = (
                [f"{node.module}.{alias.name}" for alias in node.names] if node.module == "lockstep" else [node.module]
            )
            names = deeper
        elif isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        found |= {name.split(".")[1] for name in names if name.startswith("lockstep.") and name.count(".")}
    return found


def room_of(path: Path) -> str:
    return path.relative_to(SRC).parts[0].removesuffix(".py")


def test_arrows_run_one_way() -> None:
    storey = {room: i for i, rooms in enumerate(LAYERS) for room in rooms}
    graph: dict[str, set[str]] = {}
    for path in SRC.rglob("*.py"):
        room = room_of(path)
        if room == "__init__":
            continue
        assert room in storey, f"{room} has no storey in LAYERS"
        for other in imports_of(path) - {room, "__version__"}:
            assert storey[other] <= storey[room], f"{path.name} imports {other}, which lies above {room}"
            graph.setdefault(room, set()).add(other)
    for start in graph:
        seen, todo = set(), set(graph[start])
        while todo:
            room = todo.pop()
            assert room != start, f"{start} imports itself by way of others"
            seen.add(room)
            todo |= graph.get(room, set()) - seen


def test_the_public_names_are_those_listed() -> None:
    assert lockstep.__all__ == [*sorted(set(lockstep.__all__) - {"__version__"}), "__version__"]
    for name in lockstep.__all__:
        assert getattr(lockstep, name) is not None
    assert callable(lockstep.train) and callable(lockstep.launch)


def test_importing_the_package_and_the_command_does_not_import_torch() -> None:
    code = "import sys, lockstep.cli, lockstep.launch.server; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_the_table_of_strategies_in_the_readme_is_that_of_the_list() -> None:
    lines = (Path(__file__).parents[1] / "README.md").read_text().splitlines()
    for name, kind in STRATEGIES.items():
        assert f"| `{name}` | {kind.summary} | {kind.good_for} |" in lines


def test_no_room_is_called_after_nothing() -> None:
    for path in SRC.rglob("*.py"):
        assert path.stem not in {"utils", "helpers", "manager", "engine", "base", "common", "misc"}
