"""What the hand-written loops share: the model, the data, and how a rate is taken (the median
epoch).
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

from benchmarks.models import small_data, small_mlp

EPOCHS = 6
SHARE = 32

__all__ = ["EPOCHS", "SHARE", "report", "small_data", "small_mlp"]


def report(rank: int, one_epoch: Callable[[int], None], samples: int) -> None:
    """Run the epochs; rank 0 prints samples per second of the global batch."""
    rates = []
    for epoch in range(EPOCHS):
        start = time.perf_counter()
        one_epoch(epoch)
        rates.append(samples / (time.perf_counter() - start))
    if rank == 0:
        print(statistics.median(rates[1:]), flush=True)
