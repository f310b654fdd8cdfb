"""Scripts of other libraries and what they become, in examples/migration: the same numbers, and
few new lines.
"""

from __future__ import annotations

import difflib
import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

MIGRATION = Path(__file__).parents[2] / "examples" / "migration"
TORCHRUN = ["-m", "torch.distributed.run", "--nproc-per-node", "2"]
TRAIN = ["-m", "lockstep", "train", "--strategy", "ddp", "--devices", "2"]
SCRIPTS = {
    "plain_ddp": ("torch", TORCHRUN, []),
    "accelerate": ("accelerate", TORCHRUN, []),
    "lightning": ("lightning", [], TRAIN),
    "trainer": ("transformers", TORCHRUN, TRAIN),
}
"""The package that is left, how the script is started, and how what it becomes."""

NOT_COUNTED = re.compile(
    r'^\s*$|^"""|^\)|^def sampler|DistributedSampler|order of the Trainer|torch.randperm'
)
"""Blank lines, the first docstring, a closing bracket, and the order of the other library, which
the test needs.
"""


def numbers(way: list[str], script: str, folder: Path) -> list[float]:
    """Those with five digits or four that the script's last line has."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    command = [sys.executable, *way, str(MIGRATION / script)]
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)
    lines = [line for line in done.stdout.splitlines() if "loss" in line]
    # (Processes of other libraries have been seen to abort at their very end, in gloo's threads;
    # torch 2.13.)
    assert lines and (done.returncode == 0 or "_before" in script), done.stdout + done.stderr
    return [float(number) for number in re.findall(r"\d\.\d{4,5}\b", lines[-1])]


@pytest.mark.parametrize("name", [pytest.param(name, marks=pytest.mark.slow) for name in SCRIPTS])
def test_a_script_ends_with_the_same_numbers_after_its_migration(name: str, tmp_path: Path) -> None:
    package, before, after = SCRIPTS[name]
    if importlib.util.find_spec(package) is None:
        pytest.skip(f"{package} is not installed")
    old = numbers(before, f"{name}_before.py", tmp_path)
    new = numbers(after, f"{name}_after.py", tmp_path)
    assert len(old) >= 2 and sorted(new) == pytest.approx(sorted(old), abs=6e-5)


@pytest.mark.parametrize("name", SCRIPTS)
def test_a_migration_takes_ten_new_lines_at_most(name: str) -> None:
    before, after = (
        (MIGRATION / f"{name}_{when}.py").read_text().splitlines() for when in ("before", "after")
    )
    new = [line[2:] for line in difflib.ndiff(before, after) if line.startswith("+ ")]
    counted = [line for line in new if not NOT_COUNTED.search(line)]
    assert len(counted) <= 10, "\n".join(counted)


@pytest.mark.parametrize("name", SCRIPTS)
def test_the_page_shows_what_changes_and_counts_the_lines(name: str) -> None:
    page = (MIGRATION.parents[1] / "docs" / f"from-{name.replace('_', '-')}.md").read_text()
    texts = [(MIGRATION / f"{name}_{when}.py").read_text() for when in ("before", "after")]
    lines = [text.splitlines(keepends=True) for text in texts]
    changes = "".join([*difflib.unified_diff(*lines, n=1000)][3:])
    assert f"```diff\n{changes}```" in page
    before, after = map(len, lines)
    assert f"had {before} lines and has {after}, ten of them new" in " ".join(page.split())
