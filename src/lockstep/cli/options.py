"""What several commands have among their options: the settings of a job, its knobs, kinds of numbers."""

from __future__ import annotations

import argparse
import math
import os
from collections.abc import Callable
from typing import Any

from lockstep.errors import FolderError, InputError

SETTINGS = {
    "batch-size": "samples of the global batch",
    "epochs": "passes through the data (default: 1, where steps isn't given)",
    "steps": "stop after that many updates",
    "lr-scheduler-every": "epoch or step: when the scheduler moves on (default: epoch)",
    "seed": "of weights, order, augmentation, dropout (default: 0)",
    "shuffle": "a new order for each epoch (default: true)",
    "accumulate": "micro-batches of each global batch (default: 1)",
    "clip-norm": "largest norm of all gradients together (default: none)",
    "sync-batchnorm": "BatchNorm over all replicas (default: false)",
    "channels-last": "images in that memory layout (default: false)",
    "precision": "fp64, fp32, bf16, fp16, or none: as the model was built (default: none)",
    "compile": "by torch.compile; a word is its backend (default: false)",
    "activation-checkpointing": "auto, or names of blocks with commas between (default: none)",
    "fused": "fused optimizer (default: where right)",
    "keep-memory": "of a step for the next one, on CPU slots (default: false)",
    "eval-batch-size": "samples of an evaluation batch (default: batch-size)",
    "loader-workers": "processes that fetch, for each rank (default: by the cores and the dataset)",
}
"""The settings of a Job, as options. A test holds this list against Job's own."""

_SWITCHES = {"shuffle", "sync-batchnorm", "channels-last", "fused", "keep-memory", "compile"}


def above_zero(kind: Callable[[str], float]) -> Callable[[str], float]:
    """The type of an option that is a finite number above 0."""

    def number(word: str) -> float:
        if not 0 < (value := kind(word)) < math.inf:
            raise ValueError
        return value

    number.__name__ = "number above 0"  # what the parser calls it
    return number


def check_writable(option: str, file: str) -> None:
    """Find out now, not after the work, that a file can't be written; nothing is left of the try.

    Raises:
        FolderError: it can't.
    """
    is_new = not os.path.exists(file)
    try:
        with open(file, "a"):
            pass
        if is_new:
            os.remove(file)
    except OSError as error:
        raise FolderError(f"{option} {file}: {error.strerror}") from error


def add_knobs(parser: argparse.ArgumentParser) -> None:
    """The job's own knobs: ``--set lr=0.1``."""
    parser.add_argument(
        "--set", action="append", default=[], metavar="KEY=VALUE", help="a knob of the job; may be repeated"
    )


def add_settings(parser: argparse.ArgumentParser) -> None:
    """The settings of a job."""
    group = parser.add_argument_group("settings of the job (these win over the file)")
    for name, what in SETTINGS.items():
        if name in _SWITCHES:
            group.add_argument(f"--{name}", nargs="?", const="true", metavar="BOOL", help=what)
        else:
            group.add_argument(f"--{name}", metavar="VALUE", help=what)


def settings_in(options: argparse.Namespace) -> dict[str, Any]:
    """Those settings that were given."""
    given = {name.replace("-", "_"): getattr(options, name.replace("-", "_")) for name in SETTINGS}
    return {name: value for name, value in given.items() if value is not None}


def knobs_in(pairs: list[str]) -> dict[str, str]:
    """Those knobs that were given.

    Raises:
        InputError: one isn't ``key=value``.
    """
    knobs = {}
    for pair in pairs:
        key, equals, value = pair.partition("=")
        if not equals or not key:
            raise InputError(f"--set {pair}: write it as --set key=value")
        knobs[key] = value
    return knobs
