"""The version of what is built here, by the tags of git. Hatchling asks for it (``pyproject.toml``)."""

from __future__ import annotations

import subprocess
from pathlib import Path

from lockstep.version import UNTAGGED

ROOT = Path(__file__).parent


def version(root: Path = ROOT) -> str:
    """Return ``X.Y.Z`` at the tag ``vX.Y.Z``, and ``X.Y.(Z+1).devN+gHASH`` for N commits after it.

    Without git, and where no tag is before this commit, it is ``UNTAGGED`` of ``lockstep.version``.
    """
    if not (root / ".git").exists():  # the folder may lie in a repository of something else
        return UNTAGGED
    describe = [
        "git",
        "describe",
        "--tags",
        "--long",
        "--match",
        "v[0-9]*",
        "--exclude",
        "v*[!0-9.]*",
    ]
    try:
        answer = subprocess.run(describe, cwd=root, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return UNTAGGED
    tag, commits, commit = answer.stdout.strip().rsplit("-", 2)
    released = tag.removeprefix("v")
    if commits == "0":
        return released
    before, _, last = released.rpartition(".")
    return f"{before}.{int(last) + 1}.dev{commits}+{commit}"
