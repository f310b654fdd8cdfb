"""The house: its public names, and the direction of its arrows."""

from __future__ import annotations

import ast
import functools
import subprocess
import sys
from pathlib import Path

import lockstep

from pages import table_of_strategies  # isort: skip

SRC = Path(lockstep.__file__).parent
LAYERS = [
    {"errors"},
    {"tensors"},
    {"job", "report"},
    {"jobfile", "launch"},
    {"threads"},
    {"data", "checkpoint"},
    {"model"},
    {"parallel", "pipelining"},
    {"strategies"},
    {"profiling"},
    {"training", "map"},
    {"train", "parallelize", "callbacks"},
    {"prediction"},
    {"export"},
    {"compare", "verify"},
    {"cli"},
    {"__main__"},
]
"""From the ground up: a room imports only from those below it, or within its own storey without a circle."""


@functools.cache
def files_imported_by(path: Path) -> set[Path]:
    """The files of the package that a file imports, in functions too; for type checkers only left out."""
    tree = ast.parse(path.read_text())
    for node in ast.walk(tree):
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test):
            node.body = []
    found = set()
    for node in ast.walk(tree):
        names = []
        if isinstance(node, ast.ImportFrom) and node.module:
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        for name in names:
            parts = name.split(".")[1:] if name.startswith("lockstep.") else []
            for place in (parts, parts[:-1]):
                base = SRC.joinpath(*place)
                file = next((f for f in (base.with_suffix(".py"), base / "__init__.py") if place and f.is_file()), None)
                if file is not None:
                    found.add(file)
                    break
    return found - {path}


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
        for other in {room_of(file) for file in files_imported_by(path)} - {room, "__init__"}:
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
    code = "import sys, lockstep.cli, lockstep.launch.processes.fork_server; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_the_table_of_strategies_in_the_readme_is_that_of_the_list() -> None:
    readme = (Path(__file__).parents[1] / "README.md").read_text()
    assert "\n".join(table_of_strategies()) in readme


def test_no_room_is_called_after_nothing() -> None:
    for path in SRC.rglob("*.py"):
        assert path.stem not in {"utils", "helpers", "manager", "engine", "base", "common", "misc"}


def test_no_folder_has_more_than_15_files() -> None:
    for folder in {path.parent for path in SRC.rglob("*.py")}:
        assert len(list(folder.glob("*.py"))) <= 15, folder


def test_no_file_imports_itself_by_way_of_others() -> None:
    graph = {path: files_imported_by(path) for path in SRC.rglob("*.py")}
    done: set[Path] = set()

    def visit(path: Path, way: list[Path]) -> None:
        circle = [str(one.relative_to(SRC)) for one in [*way[way.index(path) :], path]] if path in way else []
        assert not circle, " imports ".join(circle)
        if path not in done:
            for other in graph[path]:
                visit(other, [*way, path])
            done.add(path)

    for path in graph:
        visit(path, [])


def test_no_room_uses_private_members_of_another() -> None:
    defined: dict[str, set[str]] = {}
    used: list[tuple[str, str, str]] = []
    for path in SRC.rglob("*.py"):
        own = defined.setdefault(room_of(path), set())
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.FunctionDef):
                own.add(node.name)
            elif isinstance(node, ast.AnnAssign | ast.Assign):
                targets = node.targets if isinstance(node, ast.Assign) else [node.target]
                own |= {target.attr for target in targets if isinstance(target, ast.Attribute)}
                own |= {target.id for target in targets if isinstance(target, ast.Name)}
            elif isinstance(node, ast.Attribute) and node.attr.startswith("_") and not node.attr.startswith("__"):
                whose = ast.unparse(node.value)
                if whose not in ("self", "cls", "super()"):
                    used.append((room_of(path), f"{path.name}: {whose}.{node.attr}", node.attr))
    elsewhere = {room: set().union(*(names for other, names in defined.items() if other != room)) for room in defined}
    wrong = [text for room, text, name in used if name not in defined[room] and name in elsewhere[room]]
    known = {
        "_buffers",
        "_parameters",
        "_modules",
        "_version",
        "_base",
    }  # PyTorch's own, which a class of ours names too
    assert [text for text in wrong if text.rpartition(".")[2] not in known] == []
