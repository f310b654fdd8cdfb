"""WithShares: replicas whose local batches have sizes in proportion to numbers, for devices of
different speeds.

All replicas wait for the slowest one in each update. A device that is half as fast as the other
gets half as many samples, and both are ready at the same time::

    even    device 0   |32 samples      |                 waits
            device 1   |32 samples                      |
    2,1     device 0   |43 samples            |
            device 1   |21 samples            |

A loss is total / count over the global batch, so results don't depend on the sizes.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Self

from lockstep.errors import StrategyError
from lockstep.job import Job
from lockstep.launch.world import World
from lockstep.run.events import Line
from lockstep.strategies.replica_speeds import measured_shares
from lockstep.strategies.strategy import Strategy

_FORM = re.compile(r"auto|(auto:)?[1-9]\d*(,[1-9]\d*)+")


@dataclass(frozen=True)
class WithShares(Strategy):
    """A strategy with a local batch for each replica.

    Attributes:
        shares: sizes of local batches in proportion, with commas between: ``3,1`` gives the first
            replica three times as many samples as the second; ``auto`` measures the speed of each
            replica when a run begins (``auto:11,9`` is what it found); None makes them even.
    """

    shares: str | Sequence[int] | None = field(default=None, kw_only=True)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.shares is None:
            return
        words = re.sub(r"[\s()\[\]]", "", str(self.shares))
        if not _FORM.fullmatch(words):
            raise StrategyError(
                f"{self.name}: shares {words} are not valid: give a whole number from 1 for each "
                "of several replicas, as 3,1, or auto"
            )
        object.__setattr__(self, "shares", words)

    @property
    def devices_needed(self) -> int | None:
        """Count the shares that were given by hand; None is any number of devices."""
        return None if self._is_measured else len(_numbers(self.shares)) or None

    @property
    def _is_measured(self) -> bool:
        return str(self.shares).startswith("auto")

    def _shares_of(self, replicas: int) -> tuple[int, ...]:
        """Return the share of each replica; none is even, also before shares are measured.

        Raises:
            StrategyError: shares for another number of replicas were given by hand.
        """
        numbers = _numbers(self.shares)
        if len(numbers) == replicas:
            return numbers
        if numbers and not self._is_measured:
            raise StrategyError(
                f"{self.name}: shares {self.shares} are for {len(numbers)} replicas, not "
                f"{replicas}: give a number for each, or auto"
            )
        return ()

    def planned(
        self,
        job: Job,
        world: World,
        before: Mapping[str, Any] | None = None,
    ) -> Self:
        """Measure the speed of each replica, where ``shares`` is ``auto``.

        A run that is resumed on as many devices has the shares that it had.

        Raises:
            StrategyError: the speeds of this job can't be measured.
        """
        if not self._is_measured:
            return self
        layout = self.layout(world.size * len(world.devices))
        if layout.shares or layout.local_batches == 1:
            return self
        earlier = str((before or {}).get("shares"))
        if earlier.startswith("auto:") and len(_numbers(earlier)) == layout.local_batches:
            return replace(self, shares=earlier)
        shares, why = measured_shares(job, world)
        world.emit(Line(f"shares {shares}: {why}", "plan"))
        return replace(self, shares=f"auto:{shares}")


def _numbers(shares: Any) -> tuple[int, ...]:
    return tuple(int(word) for word in re.findall(r"\d+", str(shares)))
