"""The house: its public names, and the direction of its arrows."""

from __future__ import annotations

import ast
import functools
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

import lockstep

import bars  # isort: skip
from docs_pages import table_of_strategies  # isort: skip

SRC = Path(lockstep.__file__).parent
LAYERS = [
    {"errors", "version"},
    {"tensors"},
    {"settings", "signatures"},
    {"recipe"},
    {"job", "report"},
    {"run"},
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
"""From the ground up: a room imports only from those below it, or within its own storey without
a circle.
"""


@functools.cache
def files_imported_by(path: Path) -> set[Path]:
    """The files of the package that a file imports, in functions too; for type checkers only
    left out.
    """
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
                file = next(
                    (
                        f
                        for f in (base.with_suffix(".py"), base / "__init__.py")
                        if place and f.is_file()
                    ),
                    None,
                )
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
            assert storey[other] <= storey[room], (
                f"{path.name} imports {other}, which lies above {room}"
            )
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
    code = (
        "import sys, lockstep.cli, lockstep.launch.processes.fork_server; sys.exit('torch' in "
        "sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_the_table_of_strategies_in_the_readme_is_that_of_the_list() -> None:
    readme = (Path(__file__).parents[1] / "README.md").read_text()
    assert "\n".join(table_of_strategies()) in readme


def test_the_readme_lists_every_extra() -> None:
    root = Path(__file__).parents[1]
    project = tomllib.loads((root / "pyproject.toml").read_text())["project"]
    readme = (root / "README.md").read_text()
    assert [extra for extra in project["optional-dependencies"] if f"`{extra}`" not in readme] == []


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
        circle = (
            [str(one.relative_to(SRC)) for one in [*way[way.index(path) :], path]]
            if path in way
            else []
        )
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
            elif (
                isinstance(node, ast.Attribute)
                and node.attr.startswith("_")
                and not node.attr.startswith("__")
            ):
                whose = ast.unparse(node.value)
                if whose not in ("self", "cls", "super()"):
                    used.append((room_of(path), f"{path.name}: {whose}.{node.attr}", node.attr))
    elsewhere = {
        room: set().union(*(names for other, names in defined.items() if other != room))
        for room in defined
    }
    wrong = [
        text for room, text, name in used if name not in defined[room] and name in elsewhere[room]
    ]
    known = {
        "_buffers",
        "_parameters",
        "_modules",
        "_indices",
        "_version",
        "_base",
    }  # PyTorch's own, which a class of ours names too
    assert [text for text in wrong if text.rpartition(".")[2] not in known] == []


TOTAL = 222_123
"""Code tokens of the package, at most."""

TOKENS = {
    "checkpoint": 5_615,
    "cli": 5_943,
    "compare": 11_325,
    "data": 12_105,
    "export": 3_846,
    "launch": 17_920,
    "map": 4_108,
    "model": 16_397,
    "parallel": 10_378,
    "pipelining": 17_238,
    "prediction": 3_743,
    "profiling": 3_024,
    "report": 1_850,
    "run": 3_575,
    "strategies": 47_281,
    "tensors": 7_764,
    "threads": 5_192,
    "top": 7_683,
    "training": 25_524,
    "verify": 11_612,
}
"""Code tokens of each room, at most. A bar rises only by code that lets more go elsewhere: the
whole only falls.
"""

DENSITY = 5.0
"""Code tokens a line, at most, in each room."""

CALLS = {"single": (175, 45), "dp": (2_850, 105), "pp": (2_620, 115)}
"""Python calls of the first update, and of one that isn't checked, beyond those of the bare
step, at most.
"""


counts_tokens = pytest.mark.skipif(
    sys.version_info >= (3, 12), reason="from Python 3.12 on an f-string is several tokens"
)


@counts_tokens
def test_no_room_has_more_code_than_its_bar() -> None:
    found = bars.tokens_by_room()
    assert sum(found.values()) <= TOTAL
    assert found.keys() == TOKENS.keys()
    assert {room: tokens for room, tokens in found.items() if tokens > TOKENS[room]} == {}


@counts_tokens
def test_no_room_is_packed_denser_than_its_bar() -> None:
    found = bars.density_by_room()
    assert {room: density for room, density in found.items() if density > DENSITY} == {}


def test_the_reading_path_is_no_longer_than_its_bar() -> None:
    assert bars.lines_of_the_reading_path() <= 2_384


def test_a_step_has_no_more_public_methods_than_its_bar() -> None:
    assert bars.public_methods_of_a_step() <= 22


def test_there_are_no_more_complex_functions_than_the_bar() -> None:
    assert bars.complex_functions() <= 0


@pytest.mark.parametrize("strategy", CALLS)
def test_an_update_makes_no_more_python_calls_than_its_bar(strategy: str) -> None:
    first, later = bars.calls_of_updates(strategy)
    most_in_the_first, most_later = CALLS[strategy]
    assert first <= most_in_the_first
    assert later <= most_later
