"""The strategies, one file each (``mp`` is with ``pp``). A new one is one file and one line in this
list.

Products (``ddp=2xpp=2``) have a list of their own, with a line for each strategy of a replica.
"""

from __future__ import annotations

import typing
from typing import Any

from lockstep.errors import StrategyError, nearest
from lockstep.launch import devices as _devices
from lockstep.launch import started_as_rank, started_ranks
from lockstep.launch.devices import Device, Devices
from lockstep.settings import convert
from lockstep.strategies.ddp import DDP
from lockstep.strategies.dp import DP
from lockstep.strategies.fsdp import FSDP, ReplicatedFSDP
from lockstep.strategies.hogwild import Hogwild
from lockstep.strategies.pp import MP, PP
from lockstep.strategies.product import Product, product_in
from lockstep.strategies.replicated_stages import ReplicatedPP
from lockstep.strategies.single import Single
from lockstep.strategies.strategy import Strategy

STRATEGIES: dict[str, type[Strategy]] = {
    kind.name: kind for kind in (Single, DP, DDP, FSDP, MP, PP, Hogwild)
}

PRODUCTS: dict[str, type[Product]] = {
    "pp": ReplicatedPP,
    "fsdp": ReplicatedFSDP,
}
"""What ``ddp=NxS=M`` is, by S, the strategy on the M devices of each replica."""

__all__ = [
    "DDP",
    "DP",
    "FSDP",
    "MP",
    "PP",
    "PRODUCTS",
    "STRATEGIES",
    "Hogwild",
    "Single",
    "Strategy",
    "choose",
    "devices_for",
    "kind_of",
    "named",
]


def kind_of(name: str) -> type[Strategy]:
    """Give the class of the strategy, or of the product, of that name.

    Raises:
        StrategyError: there is none (the nearest is offered).
    """
    word, _, number = str(name).partition("=")
    if word in STRATEGIES and number.isdigit():
        raise StrategyError(f'there is no strategy "{name}": take {word} on {number} devices')
    product = product_in(str(name), PRODUCTS)
    if product is not None:
        return product[0]
    if name not in STRATEGIES:
        every = [*STRATEGIES, *(f"ddp=2x{word}=2" for word in PRODUCTS)]
        raise StrategyError(f'there is no strategy "{name}": {nearest(str(name), every)}')
    return STRATEGIES[name]


def devices_for(wanted: str | Strategy | None, devices: Devices) -> Devices:
    """Give the devices that a person named; where none were, as many as a product is for.

    Under torchrun there are as many as it has started.

    Raises:
        StrategyError: a product is for another number of devices.
        DeviceError: torchrun has started processes for another number of devices.
    """
    strategy = named(wanted) if isinstance(wanted, str) else wanted
    is_rank = started_as_rank()
    if is_rank:
        each = 1 if strategy is None else strategy.devices_per_rank
        started_ranks.refuse_other_number(devices, each)
    if strategy is None or strategy.devices_needed is None:
        return devices

    is_number = str(devices).isdigit()
    if not is_number and (is_rank or devices not in (None, "auto")):
        return devices
    count = int(str(devices)) if is_number else strategy.devices_needed
    if not is_rank:
        strategy.layout(count)  # which refuses another number of devices
    return count if _devices.accelerators() else f"{count}xcpu"


def choose(wanted: str | Strategy | None, devices: tuple[Device, ...], **settings: Any) -> Strategy:
    """Give the strategy that a person named, else ``single`` on one device, ``ddp`` on several.

    Under torchrun it is ``ddp`` on one device too.

    Args:
        wanted: a name, a strategy with its settings, or None.
        devices: the devices that it will run on.
        settings: fields of the strategy to replace, where it is given by name.

    Raises:
        StrategyError: there is none of that name (the nearest is offered), or it can't use these
            devices.
    """
    if wanted is None:
        wanted = "single" if len(devices) == 1 and not started_as_rank() else "ddp"
    if not isinstance(wanted, Strategy):
        wanted = named(wanted, **settings)
    if wanted.name == "single" and len(devices) > 1:
        raise StrategyError(
            f"strategy single uses one device, not {len(devices)}: take ddp or dp, or one device"
        )
    if wanted.devices_needed is not None and not started_as_rank():
        wanted.layout(len(devices))  # which refuses another number of devices
    return wanted


def named(name: str, **settings: Any) -> Strategy:
    """Make the strategy of that name.

    Args:
        name: of the strategy or product.
        settings: values of fields, or words of a command line.

    Raises:
        StrategyError: there is none (the nearest is offered), or it has no such setting.
        JobError: a setting is of another type.
    """
    kind = kind_of(name)
    fields = [field for field in kind.usual() if field in kind.choices()]
    for setting in settings:
        if setting not in fields:
            raise StrategyError(
                f'strategy "{name}" has no setting "{setting}": {_who_has(setting, fields)}'
            )
    hints = typing.get_type_hints(kind)
    own = {setting: convert(value, hints[setting], setting) for setting, value in settings.items()}
    product = product_in(str(name), PRODUCTS)
    if product is not None:
        own["sizes"] = product[1]
    return kind(**own)


def _who_has(setting: str, fields: list[str]) -> str:
    """Say which strategies have a setting that this one hasn't, else its nearest own setting."""
    others = [name for name, kind in STRATEGIES.items() if setting in kind.choices()]
    if len(others) > 1:
        return f"{' and '.join(others)} have it"
    if others or not fields:
        return f"{others[0] if others else 'none'} has it"
    return nearest(setting, fields)
