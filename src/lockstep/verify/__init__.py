"""Verify: a job under ``single`` and under a strategy, from the same weights on the same batches, and why they part.

::

    course.py        which batches: two of the first epoch, its smaller last one, two of the second; an evaluation
    kinds.py         and those whose targets differ in kind
    preflight.py     in which number format, and how large a batch may be
    side.py          one side, an update at a time, with all that is looked at
    experiment.py    what is held against what
    sides.py         both at once, compared after each update
    laboratory.py    where experiments run, in processes that stay for the next
    rows.py          which samples each of them was given
    layers.py        the first layer that gave other numbers
    comparison.py    what was found, and up to where it is rounding
    noise.py         how far one device is from itself, where that has to be measured
    still.py         a model with dropout, or batch norm, taken out
    diagnosis.py     the experiments that find why they part       rates.py   how often a scheduler moved
    causes.py        the table of causes: kind, text, fix
    answer.py        all of it, in order
    verification.py  the answer, as a table and as plain values
    harness.py       the measure; whole trainings held against one another, for tests
    commands.py      the command
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lockstep.verify.answer import verify as verify
    from lockstep.verify.comparison import Comparison as Comparison
    from lockstep.verify.comparison import Update as Update
    from lockstep.verify.harness import Differences as Differences
    from lockstep.verify.harness import differences as differences
    from lockstep.verify.harness import parity as parity
    from lockstep.verify.harness import same_bits as same_bits
    from lockstep.verify.verification import Verification as Verification

_HOME = {
    "Comparison": "comparison",
    "Differences": "harness",
    "Update": "comparison",
    "Verification": "verification",
    "differences": "harness",
    "parity": "harness",
    "same_bits": "harness",
    "verify": "answer",
}

__all__ = list(_HOME)


def __getattr__(name: str) -> Any:
    """The public names, loaded when first used: the command has its options here, and must not wait for torch."""
    if name not in _HOME:
        raise AttributeError(f"module 'lockstep.verify' has no attribute {name!r}")
    return getattr(importlib.import_module(f"lockstep.verify.{_HOME[name]}"), name)
