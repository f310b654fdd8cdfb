"""The strategies, one file each (``mp`` is with ``pp``). A new one is one file and one line in this list."""

from __future__ import annotations

import dataclasses
import typing
from typing import Any

from lockstep.errors import StrategyError, nearest
from lockstep.job import convert
from lockstep.launch import started_as_rank
from lockstep.launch.devices import Device
from lockstep.strategies.ddp import DDP
from lockstep.strategies.dp import DP
from lockstep.strategies.hogwild import Hogwild
from lockstep.strategies.pp import MP, PP
from lockstep.strategies.single import Single
from lockstep.strategies.strategy import Strategy

STRATEGIES: dict[str, type[Strategy]] = {kind.name: kind for kind in (Single, DP, DDP, MP, PP, Hogwild)}

__all__ = ["DDP", "DP", "MP", "PP", "STRATEGIES", "Hogwild", "Single", "Strategy", "choose", "named"]


def choose(wanted: str | Strategy | None, devices: tuple[Device, ...], **settings: Any) -> Strategy:
    """The strategy that a person named: where none was, ``single`` on one device, else ``ddp`` (under torchrun too).

    Args:
        wanted: a name, a strategy with its settings, or None.
        devices: those it will run on.
        settings: fields of the strategy to replace, where it is given by name.

    Raises:
        StrategyError: there is none of that name (the nearest is offered), or it can't use these devices.
    """
    if wanted is None:
        wanted = "single" if len(devices) == 1 and not started_as_rank() else "ddp"
    if not isinstance(wanted, Strategy):
        wanted = named(wanted, **settings)
    if wanted.name == "single" and len(devices) > 1:
        raise StrategyError(f"strategy single uses one device, not {len(devices)}: take ddp or dp, or one device")
    return wanted


def named(name: str, **settings: Any) -> Strategy:
    """The strategy of that name, with these settings: its fields, as values or as words of a command line.

    Raises:
        StrategyError: there is none (the nearest is offered), or it has no such setting.
        JobError: a setting is of another type.
    """
    if name not in STRATEGIES:
        raise StrategyError(f'there is no strategy "{name}": {nearest(str(name), list(STRATEGIES))}')
    kind = STRATEGIES[name]
    fields = [f.name for f in dataclasses.fields(kind)]
    for setting in settings:
        if setting not in fields:
            raise StrategyError(f'strategy "{name}" has no setting "{setting}": {_who_has(setting, fields)}')
    hints = typing.get_type_hints(kind)
    return kind(**{setting: convert(value, hints[setting], setting) for setting, value in settings.items()})


def _who_has(setting: str, fields: list[str]) -> str:
    """Which strategies have a setting that this one hasn't; the nearest of its own where none has."""
    others = [name for name, kind in STRATEGIES.items() if setting in kind.choices()]
    if others or not fields:
        return f"{' and '.join(others) or 'none'} {'have' if len(others) > 1 else 'has'} it"
    return nearest(setting, fields)
