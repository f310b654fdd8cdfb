"""What ``--help`` prints: by task, with examples that are right, at most 80 columns wide."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from lockstep.cli import command, options
from lockstep.job import SETTINGS
from lockstep.strategies import STRATEGIES

ROOT = Path(__file__).parents[2]
TOP, COMMANDS = command._parser()
OWN = {name for kind in STRATEGIES.values() for name in kind.settings()}


def examples(name: str) -> list[str]:
    """The examples at the end of a command's help, or of the list of commands."""
    text = COMMANDS.get(name, TOP).format_help().partition("\nexample")[2]
    return re.findall(r"^  (lockstep .*)$", text, re.MULTILINE)


@pytest.mark.parametrize("name", ["", *COMMANDS])
def test_help_fits_80_columns_and_ends_with_examples(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    lines = COMMANDS.get(name, TOP).format_help().splitlines()
    assert [line for line in lines if len(line) > 80] == []
    assert lines[0].startswith("usage: lockstep") and lines[1] == ""
    assert examples(name)
    for example in examples(name):
        words = shlex.split(example)[1:]
        assert not name or words[0] in (name, "train")
        found, rest = TOP.parse_known_args(words)
        left = {word.removeprefix("--").replace("-", "_") for word in rest if word[:2] == "--"}
        assert left <= OWN and bool(rest) <= hasattr(found, "of_strategy"), example


def test_the_list_of_commands_has_each_once() -> None:
    listed = re.findall(r"^  (\w+) +\w", TOP.description or "", re.MULTILINE)
    assert sorted(listed) == sorted(COMMANDS)
    assert COMMANDS["train"].format_usage() == "usage: lockstep train [options] [job]\n"


def test_each_setting_of_a_job_stands_in_one_group_of_the_help() -> None:
    grouped = " ".join(options._SETTINGS.values()).split()
    assert sorted(grouped) == sorted(SETTINGS)


def test_help_needs_no_torch() -> None:
    code = (
        "import sys; from lockstep.cli import main\n"
        "try: main(['train', '--help'])\n"
        "except SystemExit: sys.exit('torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], check=False, capture_output=True)
    assert done.returncode == 0 and b"--strategy" in done.stdout


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_the_first_examples_work(tmp_path: Path, monkeypatch, capfd) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    for example in examples(""):
        runs = [*map(str, tmp_path.glob("runs/digits-ddp-*"))]
        words = shlex.split(example.replace("runs/digits-ddp-20261121-093000", "".join(runs)))
        quickly = ["--rounds", "1", "--seconds", "0.1"] if words[1] == "compare" else []
        assert command.main([*words[1:], *quickly]) == 0, example
