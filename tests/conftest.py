"""What all tests need: the zoo can be imported, by ranks too; a test that hangs shows where."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

sys.path.insert(0, str(Path(__file__).parent))

# Read once, when torch is imported. Two workers compute with more threads than there are cores: one
# that waits for others by spinning takes the core that they need.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")

# A suite that a shell runs in the background ignores Ctrl-C, and all that it starts would too.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--soak", type=int, default=5, help="kills in tests/training/test_soak.py")


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Of a test marked as a sweep, a quarter of the cells is fast: along the diagonals of its
    parameters.
    """
    cells: dict[str, int] = {}
    for item in items:
        if item.get_closest_marker("sweep") is None or item.get_closest_marker("slow") is not None:
            continue
        test = item.nodeid.partition("[")[0]
        number = cells[test] = cells.get(test, -1) + 1
        if (number + number // 4) % 4:
            item.add_marker(pytest.mark.slow)


@pytest.fixture
def float64() -> Iterator[None]:
    """Seeded, with float64 as the default format."""
    import torch

    torch.manual_seed(0)
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A disk of 64 KiB."""
    disk = tmp_path / "disk"
    disk.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-osize=64k", "none", disk], capture_output=True, check=False
    )
    if mounted.returncode:
        pytest.skip("no right to mount a small disk")
    yield disk
    subprocess.run(["umount", str(disk)], check=True)


@pytest.fixture(autouse=True, scope="session")
def _ranks_have_pytest() -> None:
    """Each rank imports the file of its test, and so pytest: it is there already in the process
    that forks them.
    """
    from lockstep.launch.processes import fork_server

    fork_server._PROGRAM = f"import pytest; {fork_server._PROGRAM}"


_BEFORE = 5.0
"""Seconds before a test is given up, in which what it has started is asked where it stands."""

_timers: list[threading.Timer] = []


@pytest.hookimpl(tryfirst=True)
def pytest_timeout_set_timer(item: pytest.Item, settings: Any) -> None:
    timer = threading.Timer(max(1.0, settings.timeout - _BEFORE), _abort_all)
    timer.daemon = True
    timer.start()
    _timers.append(timer)


@pytest.hookimpl(tryfirst=True)
def pytest_timeout_cancel_timer(item: pytest.Item) -> None:
    while _timers:
        _timers.pop().cancel()


def _abort_all() -> None:
    """Ranks and their loader workers have `faulthandler` on: each prints its threads' stacks, to
    where the test hears.

    Not the process that forks the ranks, which has to report their end.
    """
    here = psutil.Process()
    for process in reversed(
        here.children(recursive=True)
    ):  # the youngest first: loader workers before their rank
        with contextlib.suppress(psutil.Error):
            if process.ppid() != here.pid or not process.children():
                process.send_signal(signal.SIGABRT)
