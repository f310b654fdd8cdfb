"""Verify: a job under ``single`` and under a strategy, from the same weights on the same batches, and why they differ.

::

    answer         all of it, in order                        verification    the answer, as a table and as plain values
    preflight      in which number format, how large a batch  batches         which batches, and which differ in kind
    training_run   one side, an update at a time              paired_run      both at once, compared after each update
    comparison     what is compared, and what was found       rounding_noise  how far two runs of single differ
    layer_watch    the first layer that gave other values     determinism     dropout, or batch norm, taken out
    experiments    where experiments run                      diagnosis       the experiments that find why they differ
    causes         the table of causes: kind, text, fix       harness         whole trainings compared, for tests
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
