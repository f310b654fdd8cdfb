"""The version: of what is installed, which is that of the newest tag of git (``version.py``)."""

from __future__ import annotations

import platform
from importlib import metadata

UNTAGGED = "0.2.0.dev0"
"""The version where there is no tag, and of a source folder that is used without installation."""


def version_of(package: str, otherwise: str) -> str:
    """Return the version of an installed package without importing the package.

    Args:
        package: its name.
        otherwise: what to return if the package is not installed.
    """
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return otherwise


__version__ = version_of("torch-lockstep", UNTAGGED)


def versions() -> str:
    """Return the versions that a report of an error needs, in one line."""
    torch = version_of("torch", "not found")
    return f"lockstep {__version__}, torch {torch}, Python {platform.python_version()}"
