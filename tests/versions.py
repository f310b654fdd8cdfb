"""``make test-versions``: a quick part of the tests with each combination of Python and torch that
can be had on this machine. Words are the tests to run instead, in pytest's words.

Each combination has an environment in ``.versions``, which is kept for the next time. A combination
is skipped, with a line, if there is no interpreter, or no build of torch for CPUs: builds for CUDA
are not downloaded. The variable TORCH_INDEX names another index for them, or a folder of wheels.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
PYTHONS = ("3.11", "3.12", "3.13")
TORCHES = ("2.11", "2.12", "2.13")
TESTS = (
    "tests/strategies/test_parity.py",
    "tests/checkpoint",
    "tests/parallel",
    "tests/training/test_resume.py",
    "tests/launch/test_launch.py",
    "tests/test_job.py",
    "tests/test_kept_runs.py",
    "tests/test_public_face.py",
)
NEEDED = ("pytest", "pytest-timeout", "psutil", "scikit-learn", "matplotlib")
CPU_BUILDS = "https://download.pytorch.org/whl/cpu"


def succeeds(*command: str | Path) -> bool:
    """Run a command without its output, and return whether it ended well."""
    words = list(map(str, command))
    return subprocess.run(words, capture_output=True, check=False).returncode == 0


def interpreter(version: str) -> str | None:
    """Return the interpreter of a version of Python: of the path, or of pyenv."""
    pyenv = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv")) / "versions"
    found = [shutil.which(f"python{version}"), *pyenv.glob(f"{version}.*/bin/python")]
    for python in filter(None, found):
        if succeeds(python, "-c", "import ensurepip, venv"):
            return str(python)
    return None


def environment(version: str, torch: str) -> Path | str:
    """Return the interpreter of the combination's environment, or why there is none."""
    folder = ROOT / ".versions" / f"py{version}-torch{torch}"
    python = folder / "bin" / "python"
    ready = folder / "ready"
    asked = [ROOT / "pyproject.toml", ROOT / "constraints.txt", Path(__file__)]
    if ready.exists() and all(ready.stat().st_mtime > file.stat().st_mtime for file in asked):
        return python
    base = interpreter(version)
    if base is None:
        return f"no Python {version} is here"
    if not python.exists() or not succeeds(python, "-c", "import torch"):
        succeeds(base, "-m", "venv", "--clear", folder)
        builds = os.environ.get("TORCH_INDEX", CPU_BUILDS)
        source = ["--index-url"] if "://" in builds else ["--no-index", "--find-links"]
        wanted = ["--no-deps", "--only-binary=:all:", f"torch=={torch}.*"]
        if not succeeds(python, "-m", "pip", "install", "--retries=0", *source, builds, *wanted):
            return f"no build of torch {torch} for CPUs and Python {version} is to be had from {builds}"
    constraints = folder / "constraints.txt"
    pins = (ROOT / "constraints.txt").read_text().splitlines()
    constraints.write_text("\n".join(pin for pin in pins if not pin.startswith("torch==")))
    rest = ["--constraint", constraints, *NEEDED, "--editable", ROOT]
    if not succeeds(python, "-m", "pip", "install", *rest):
        return f"what the tests need cannot be installed for Python {version}"
    ready.touch()
    return python


def main(tests: list[str]) -> int:
    ran, failed = 0, []
    for torch in TORCHES:
        for version in PYTHONS:
            name = f"Python {version}, torch {torch}"
            python = environment(version, torch)
            if isinstance(python, str):
                print(f"skipped  {name}: {python}", flush=True)
                continue
            print(f"running  {name}", flush=True)
            command = [python, "-m", "pytest", "-m", "not slow", *(tests or TESTS)]
            code = subprocess.run(command, cwd=ROOT, check=False).returncode
            ran += 1
            failed += [name] * (code != 0)
            print(f"{'FAILED' if code else 'passed':7}  {name}", flush=True)
    print(f"{ran} of {len(PYTHONS) * len(TORCHES)} combinations ran, {len(failed)} failed")
    return 1 if failed or not ran else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
