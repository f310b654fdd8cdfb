"""Words of the command are completed in a shell."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

pytest.importorskip("argcomplete")


def completed(line: str) -> list[str]:
    """Ask for the words that may end a line, as the shell's part of argcomplete does."""
    read, write = os.pipe()
    asked = {
        "_ARGCOMPLETE": "1",
        "_ARGCOMPLETE_IFS": "\n",
        "COMP_LINE": line,
        "COMP_POINT": str(len(line)),
    }
    code = f"import os; os.dup2({write}, 8); from lockstep.__main__ import run; run()"
    subprocess.run(
        [sys.executable, "-c", code],
        env=os.environ | asked,
        pass_fds=[write],
        timeout=60,
        check=False,
    )
    os.close(write)
    with open(read) as file:
        return file.read().split()


def test_commands_and_options_are_completed() -> None:
    assert completed("lockstep tra") == ["train"]
    assert completed("lockstep train job.py --strat") == ["--strategy"]
