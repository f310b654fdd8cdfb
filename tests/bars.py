"""The bars of the house: how much code there is, how dense it is, and how many calls an update
takes.

Each bar is a number that may only fall. ``python tests/bars.py`` prints what they would be today.
"""

from __future__ import annotations

import ast
import io
import json
import subprocess
import sys
import tokenize
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import TensorDataset

import lockstep
from lockstep.launch import devices
from lockstep.launch.world import lone
from lockstep.strategies import named
from lockstep.strategies.steps.step import Step

SRC = Path(lockstep.__file__).parent
READING_PATH = (
    "job.py",
    "launch/world.py",
    "launch/layout.py",
    "strategies/steps/step.py",
    "strategies/single.py",
    "strategies/ddp.py",
    "strategies/dp.py",
    "training/loop.py",
    "train.py",
)
LAYOUT = {
    tokenize.COMMENT,
    tokenize.NL,
    tokenize.NEWLINE,
    tokenize.INDENT,
    tokenize.DEDENT,
    tokenize.ENDMARKER,
}


def room_of(path: Path) -> str:
    parts = path.relative_to(SRC).parts
    return parts[0] if len(parts) > 1 else "top"


def docstrings(tree: ast.AST) -> Iterator[tuple[int, int]]:
    """Where each statement begins that is a string alone."""
    for node in ast.walk(tree):
        body = getattr(node, "body", None)
        for statement in body if isinstance(body, list) else []:
            if not isinstance(statement, ast.Expr) or not isinstance(statement.value, ast.Constant):
                continue
            if isinstance(statement.value.value, str):
                yield statement.lineno, statement.col_offset


def code_tokens(path: Path) -> int:
    """The tokens of a file without comments, docstrings and layout."""
    text = path.read_text()
    documentation = set(docstrings(ast.parse(text)))
    count = 0
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        is_docstring = token.type == tokenize.STRING and token.start in documentation
        if token.type not in LAYOUT and not is_docstring:
            count += 1
    return count


def lines_of(path: Path) -> int:
    return len(path.read_text().splitlines())


def tokens_by_room() -> dict[str, int]:
    found: dict[str, int] = {}
    for path in sorted(SRC.rglob("*.py")):
        found[room_of(path)] = found.get(room_of(path), 0) + code_tokens(path)
    return found


def density_by_room() -> dict[str, float]:
    """Code tokens a line in each room."""
    lines: dict[str, int] = {}
    for path in sorted(SRC.rglob("*.py")):
        lines[room_of(path)] = lines.get(room_of(path), 0) + lines_of(path)
    return {room: round(tokens / lines[room], 2) for room, tokens in tokens_by_room().items()}


def lines_of_the_reading_path() -> int:
    return sum(lines_of(SRC / name) for name in READING_PATH)


def public_methods_of_a_step() -> int:
    return sum(
        1 for name in dir(Step) if not name.startswith("_") and callable(getattr(Step, name))
    )


def complex_functions() -> int:
    """How many functions are beyond McCabe 10."""
    command = [
        sys.executable,
        "-m",
        "ruff",
        "check",
        "--select",
        "C901",
        "--output-format",
        "json",
        str(SRC),
    ]
    command += ["--config", "lint.mccabe.max-complexity=10"]
    found = subprocess.run(command, capture_output=True, text=True, check=False)
    return len(json.loads(found.stdout))


# ---- calls ---------------------------------------------------------------------------------------


def calls_of(function: Callable[[], Any]) -> int:
    """How many Python functions are called in this thread."""
    calls = 0

    def note(frame: Any, event: str, argument: Any) -> None:
        nonlocal calls
        calls += event == "call"

    sys.setprofile(note)
    try:
        function()
    finally:
        sys.setprofile(None)
    return calls - 1


def net() -> nn.Module:
    return nn.Sequential(
        nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 128), nn.ReLU(), nn.Linear(128, 10)
    )


def calls_of_the_bare_step() -> int:
    model, loss = net(), nn.CrossEntropyLoss()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, fused=True)
    inputs, targets = torch.randn(64, 64), torch.randint(10, (64,))

    def update() -> None:
        optimizer.zero_grad()
        loss(model(inputs), targets).backward()
        optimizer.step()

    update()
    return calls_of(update)


def calls_of_updates(strategy: str) -> tuple[int, int]:
    """Python calls of the first update, and of one that isn't checked, beyond the bare step's;
    its batch included.
    """
    job = lockstep.Job(
        model=net,
        loss=nn.CrossEntropyLoss(),
        optimizer=lambda parameters: torch.optim.SGD(
            [p for _, p in parameters], lr=0.1, momentum=0.9
        ),
        train_data=TensorDataset(torch.randn(640, 64), torch.randint(10, (640,))),
        batch_size=64,
    )
    bare = calls_of_the_bare_step()
    with lone(devices.parse("1xcpu" if strategy == "single" else "2xcpu")) as world:
        chosen = named(strategy).planned(job, world)
        step = chosen.prepare(job, world)
        loader = chosen.training_loader(job, world, job.train_data)
        batches = iter(loader.epoch(0))

        def update() -> None:
            batch = next(batches)
            step.seed(job.seed)
            step.update(batch)

        calls = [calls_of(update) - bare for _ in range(7)]
        loader.close()
    return calls[0], calls[6]


def measured() -> dict[str, Any]:
    return {
        "tokens": tokens_by_room(),
        "density": density_by_room(),
        "reading path": lines_of_the_reading_path(),
        "public methods of a step": public_methods_of_a_step(),
        "complex functions": complex_functions(),
        "calls": {strategy: calls_of_updates(strategy) for strategy in ("single", "dp", "pp")},
    }


if __name__ == "__main__":
    print(json.dumps(measured(), indent=4))
