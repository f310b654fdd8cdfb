"""Each file of tests/on_cards, and test_gpu.py, run by a process whose accelerators are
simulated cards.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

import simulated_card

HERE = Path(__file__).parent
FILES = [
    "test_gpu.py",
    *sorted(f"on_cards/{path.name}" for path in (HERE / "on_cards").glob("test_*.py")),
]

LONG = {
    "test_gpu.py",
    *(f"on_cards/test_{name}.py" for name in ("manual_updates", "card_draws", "host_waits")),
}
"""Not among the fast tests."""

pytestmark = [
    pytest.mark.skipif(
        simulated_card.compiler() is None,
        reason="simulated cards are compiled by g++: there is none",
    ),
    pytest.mark.timeout(600),
]


def run(names: list[str], marked: str) -> None:
    environment = {**os.environ, "SIMULATED_CARDS": "8", "OMP_NUM_THREADS": "1"}
    options = ["-p", "no:xdist", "-p", "no:cacheprovider", "--timeout", "600", "-m", marked]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", *options, *(str(HERE / name) for name in names)],
        env=environment,
        cwd=HERE.parent,
        capture_output=True,
        text=True,
    )
    assert done.returncode in (0, 5), done.stdout + done.stderr  # 5: no test has that mark


def test_on_simulated_cards() -> None:
    """In one process, since each takes seconds to begin."""
    run([name for name in FILES if name not in LONG], "not slow")


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(LONG))
def test_long_files_on_simulated_cards(name: str) -> None:
    run([name], "not slow")


@pytest.mark.slow
@pytest.mark.timeout(1800)  # (parity has hundreds of trainings)
@pytest.mark.parametrize("name", FILES)
def test_on_simulated_cards_longer(name: str) -> None:
    run([name], "slow")
