"""Products of strategies: ``ddp=2xpp=2`` is two replicas, each on two devices as ``pp`` is.

::

                   stage 0   stage 1
    rank 0         cpu:0     cpu:1        local batch 1 of 2
    rank 1         cpu:2     cpu:3        local batch 2 of 2
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from lockstep.errors import StrategyError
from lockstep.strategies.strategy import Strategy

_FORM = re.compile(r"ddp=(\d+)x([a-z]+)=(\d+)")


@dataclass(frozen=True)
class Product(Strategy):
    """Replicas of several devices each. A product is also of the class of the replicas' strategy.

    Attributes:
        sizes: the number of replicas, and the devices of each.
    """

    sizes: tuple[int, int] = (1, 1)

    def __post_init__(self) -> None:
        replicas, each = self.sizes
        object.__setattr__(self, "name", f"ddp={replicas}x{type(self).name}={each}")
        super().__post_init__()

    @classmethod
    def usual(cls) -> dict[str, Any]:
        """Give the usual value of each setting but the sizes, which the name says."""
        settings = super().usual()
        del settings["sizes"]
        return settings

    @property
    def devices_needed(self) -> int:
        """Count the devices of all replicas."""
        return self.sizes[0] * self.sizes[1]

    def refuse_devices(self, devices: int) -> None:
        """Refuse another number of devices than it is for.

        Raises:
            StrategyError: there are others; the message has both numbers.
        """
        if devices == self.devices_needed:
            return
        replicas, each = self.sizes
        raise StrategyError(
            f"{self.name} is for {replicas} x {each} = {replicas * each} devices, not {devices}: "
            "take as many, or another product"
        )


def product_in(
    name: str, kinds: Mapping[str, type[Product]]
) -> tuple[type[Product], tuple[int, int]] | None:
    """Give the class of a product and its sizes; None where the name is that of no product.

    Args:
        name: ``"ddp=2xpp=2"``.
        kinds: by the strategy of a replica.

    Raises:
        StrategyError: there is no such product.
    """
    if "=" not in name:
        return None
    found = _FORM.fullmatch(name)
    if found is not None and found[2] in kinds:
        sizes = int(found[1]), int(found[3])
        if min(sizes) > 0:
            return kinds[found[2]], sizes

    every = ", ".join(f"ddp=Nx{word}=M" for word in kinds)
    raise StrategyError(
        f'there is no strategy "{name}": products are {every}, with numbers from 1, as ddp=2xpp=2'
    )
