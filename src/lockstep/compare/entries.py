"""What a comparison measures: each strategy with each setting that is swept, and what it is held against.

::

    single on one device             the "one device" of a speed-up: one slot where slots are the devices
    single on all cores              only where slots are the devices: what the machine does without any strategy
    dp, ddp, mp, pp, ...             on the devices that were asked for
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from lockstep.compare.timed_run import Way, first_of
from lockstep.errors import InputError, nearest
from lockstep.job import SETTINGS, checked_setting
from lockstep.launch import devices as _devices
from lockstep.launch.devices import Device, Devices
from lockstep.strategies import STRATEGIES, Strategy, named

Role = Literal["one device", "all cores", "strategy", "peer"]

LINE_UP = ("single", "dp", "ddp", "mp", "pp")
"""What is compared where nothing was said: those with the numbers of one device."""

Sweep = Mapping[str, Sequence[Any]]
"""Values by the name of a setting of the job, of a setting of a strategy, or ``devices``."""


@dataclass(frozen=True)
class Entry:
    """One row that is to be measured.

    Attributes:
        name: what it is called, without the devices: ``pp microbatches=4``.
        role: what it is there for.
        way: the strategy, its devices, the settings.
        devices: the devices themselves.
        one: the name of the row that is its one device.
        cores: the name of the row that is all cores of the machine, where slots are the devices.
    """

    name: str
    role: Role
    way: Way
    devices: tuple[Device, ...]
    one: str
    cores: str | None


def line_up(
    strategies: Sequence[str | Strategy] | None,
    devices: Devices,
    sweep: Sweep,
    peers: Sequence[str] = (),
    device_map: Mapping[str, int] | None = None,
) -> list[Entry]:
    """All rows, those that others are held against first.

    Raises:
        InputError: a strategy, a device or what is to be swept doesn't exist.
    """
    wanted = [_as_way(item) for item in (LINE_UP if strategies is None else strategies)]
    if not wanted:
        raise InputError("strategies: name at least one")
    sweep = _checked(sweep, [name for name, _ in wanted])
    of_job = {key: values for key, values in sweep.items() if key in SETTINGS}
    counts = sweep.get("devices", [devices])
    found: dict[str, Entry] = {}

    def add(entry: Entry) -> None:
        found.setdefault(entry.name, entry)

    sets = [(count, settings) for count in counts for settings in _products(of_job)]
    references = {}
    for i, (count, settings) in enumerate(sets):
        references[i] = one, cores = _references(_devices.parse_several(count), settings)
        add(one)
        if cores is not None:
            add(cores)
    for i, (count, settings) in enumerate(sets):
        chosen = _devices.parse_several(count)
        one, cores = references[i]
        said = {"devices": count} if "devices" in sweep else {}
        whole = None if cores is None else cores.name
        for name, options in wanted:
            if name == "single":
                continue  # it is there
            if device_map is not None and "stage" in STRATEGIES[name]().layout(2).axes:
                options = {**options, "device_map": device_map}
            swept = {key: sweep[key] for key in sweep if key not in of_job and _takes(name, key)}
            for more in _products(swept):
                way = Way(name, first_of(chosen, len(chosen)), settings, {**options, **more})
                shown = {key: value for key, value in {**options, **more}.items() if key != "device_map"}
                add(Entry(_named(name, {**shown, **settings, **said}), "strategy", way, chosen, one.name, whole))
        for peer in peers:
            way = Way(peer, first_of(chosen, len(chosen)), settings)
            add(Entry(_named(f"{peer} by hand", {**settings, **said}), "peer", way, chosen, one.name, whole))
    return list(found.values())


def _as_way(item: str | Strategy) -> tuple[str, dict[str, Any]]:
    """The name of a strategy, and its settings as far as they aren't the usual ones."""
    chosen = item if isinstance(item, Strategy) else named(item)
    fields = dataclasses.fields(chosen)
    values = {f.name: (getattr(chosen, f.name), f.default) for f in fields}
    return chosen.name, {name: value for name, (value, usual) in values.items() if value != usual}


def _references(chosen: tuple[Device, ...], settings: dict[str, Any]) -> tuple[Entry, Entry | None]:
    """``single`` on one of these devices, and where they are slots, on all cores."""
    first = chosen[0]
    if not first.is_slot:
        name = _named("single", settings)
        return Entry(name, "one device", Way("single", first_of(chosen, 1), settings), (first,), name, None), None
    every = _devices.slots(1)
    count = first.threads
    name = _named(f"single, {count} core{'s' if count > 1 else ''}", settings)
    if first.cores == every[0].cores:  # one slot has them all
        return Entry(name, "one device", Way("single", "1xcpu", settings), every, name, name), None
    whole = _named(f"single, {len(every[0].cores)} cores", settings)
    one = Entry(name, "one device", Way("single", (first,), settings), (first,), name, whole)
    return one, Entry(whole, "all cores", Way("single", "1xcpu", settings), every, name, whole)


def _named(name: str, settings: Mapping[str, Any]) -> str:
    return " ".join([name, *(f"{key}={_short(value)}" for key, value in settings.items())])


def _short(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def _products(values: Sweep) -> list[dict[str, Any]]:
    return [dict(zip(values, row, strict=True)) for row in itertools.product(*values.values())]


def _takes(strategy: str, key: str) -> bool:
    """Whether a strategy has that setting, and a choice in it: ``mp`` is ``pp`` with one micro-batch."""
    return key in STRATEGIES[strategy].choices()


def _checked(sweep: Sweep, strategies: Sequence[str]) -> dict[str, list[Any]]:
    """The same with the values in their own types."""
    found: dict[str, list[Any]] = {}
    for key, values in sweep.items():
        having = [name for name in strategies if _takes(name, key)]
        if not having and key not in SETTINGS and key != "devices":
            known = {
                f.name for name in strategies for f in dataclasses.fields(STRATEGIES[name]) if _takes(name, f.name)
            }
            every = sorted(known | set(SETTINGS) | {"devices"})
            if others := [name for name in STRATEGIES if _takes(name, key)]:
                raise InputError(f"sweep: {key} is a setting of {' and '.join(others)}, which is not compared here")
            raise InputError(
                f'sweep: "{key}" is no setting of a job or of {", ".join(strategies)} (and a knob of the job is the '
                f"same for all, by --set); {nearest(key, every)}"
            )
        if not values:
            raise InputError(f"sweep: {key} has no values; write {key}=1,2,4")
        if key in SETTINGS:
            found[key] = [checked_setting(key, value) for value in values]
        else:
            found[key] = [getattr(named(having[0], **{key: v}), key) for v in values] if having else list(values)
    return found


def devices_of(entry: Entry) -> str:
    """``2 slots of 1 core``, ``cuda:0, cuda:1``."""
    first = entry.devices[0]
    if not first.is_slot:
        return ", ".join(map(str, entry.devices))
    count, cores = len(entry.devices), first.threads
    return f"{count} slot{'s' if count > 1 else ''} of {cores} core{'s' if cores > 1 else ''}"
