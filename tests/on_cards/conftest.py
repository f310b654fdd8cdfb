"""Tests on simulated cards: in a process of their own, since the cards are all of a process's
accelerators.

``tests/test_on_cards.py`` runs them. By hand: ``SIMULATED_CARDS=8 python -m pytest
tests/on_cards``.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

if "SIMULATED_CARDS" in os.environ:
    import simulated_card

    for room in ("parallel", "pipelining"):  # their kinds of model
        sys.path.insert(0, str(Path(__file__).parent.parent / room))
    simulated_card.load()
else:
    collect_ignore_glob = ["test_*.py"]
