"""What a comparison measures: each strategy with each setting that is swept, and what it is held
against.

::

    single on one device  the "one device" of a speed-up: one CPU device where slots are the devices
    single on all cores   only where slots are the devices: what the machine does without any strategy
    dp, ddp, mp, pp, ...  on the devices that were asked for
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from lockstep.errors import InputError, counted, nearest
from lockstep.job import SETTINGS, Job, checked_setting
from lockstep.jobfile import JobFile, written
from lockstep.launch import devices as _devices
from lockstep.launch.devices import Device, Devices
from lockstep.strategies import STRATEGIES, Strategy, devices_for, kind_of, named

Role = Literal["one device", "all cores", "strategy"]

LINE_UP = ("single", "dp", "ddp", "mp", "pp")
"""What is compared where nothing was said: those with the results of single-device training."""

Sweep = Mapping[str, Sequence[Any]]
"""Values by the name of a setting of the job, of a setting of a strategy, or ``devices``."""


@dataclass(frozen=True)
class Way:
    """A way to train a job on this machine."""

    strategy: str  # by name
    devices: (
        str | tuple[Device, ...]
    )  # as a person writes them; the devices where there is no word (one slot of several)
    settings: dict[str, Any] = field(default_factory=dict)  # fields of the job that are replaced
    options: dict[str, Any] = field(default_factory=dict)  # settings of the strategy's own

    def replace(self, **settings: Any) -> Way:
        """The same with some settings changed."""
        return dataclasses.replace(self, settings={**self.settings, **settings})

    @property
    def words(self) -> list[str]:
        """``--strategy dp --devices 2xcpu --channels-last``: what to say to the command."""
        return option_words(
            {"strategy": self.strategy, "devices": self.devices, **self.options, **self.settings}
        )

    def line(self, job: Job | JobFile) -> str:
        """What to paste, to train a job so."""
        if isinstance(job, JobFile):
            words = dataclasses.replace(self, settings={**job.settings, **self.settings}).words
            return shlex.join(["lockstep", "train", *job_words(job), *words])
        strategy = f'"{self.strategy}"'
        if self.options:
            kind, options = kind_of(self.strategy), _arguments(self.options)
            strategy = (
                f"{kind.__name__}({options})"
                if kind.name == self.strategy
                else f"named({strategy}, {options})"
            )
        return (
            f"lockstep.train(job, strategy={strategy}, "
            f"{_arguments({'devices': self.devices, **self.settings})})"
        )


def job_words(job: JobFile) -> list[str]:
    """A job file and its parameters, as words of the command."""
    return [
        job.path,
        *(
            word
            for name, value in written(job.parameters).items()
            for word in ("--set", f"{name}={value}")
        ),
    ]


def option_words(values: Mapping[str, Any]) -> list[str]:
    """Settings of a job or of a strategy as words of the command: ``--batch-size 32
    --channels-last``.
    """
    words = []
    for name, value in values.items():
        words.append("--map" if name == "device_map" else f"--{name.replace('_', '-')}")
        if isinstance(value, Mapping):
            words.append(json.dumps(dict(value)))
        elif value is not True:
            words.append(_word(value))
    return words


def _word(value: Any) -> str:
    if isinstance(value, list):
        return ",".join(map(str, value))
    return str(value).lower() if value is None or isinstance(value, bool) else str(value)


def _arguments(values: Mapping[str, Any]) -> str:
    return ", ".join(f"{name}={value!r}".replace("'", '"') for name, value in values.items())


@dataclass(frozen=True)
class Entry:
    """One row that is to be measured, such as ``pp microbatches=4``."""

    name: str
    role: Role
    way: Way
    devices: tuple[Device, ...]  # the devices themselves
    one: str  # the name of the row that is its one device
    cores: (
        str | None
    )  # the name of the row that is all cores of the machine, where slots are the devices

    @property
    def where(self) -> str:
        """``2 CPU devices of 1 core``, ``4 CPU devices that share 2 cores``, ``cuda:0, cuda:1``."""
        first = self.devices[0]
        if not first.is_slot:
            return ", ".join(map(str, self.devices))
        slots = counted(len(self.devices), "CPU device")
        cores = {core for device in self.devices for core in device.cores}
        if len(cores) < sum(device.threads for device in self.devices):
            return f"{slots} that share {counted(len(cores), 'core')}"
        return f"{slots} of {counted(first.threads, 'core')}"


def line_up(
    strategies: Sequence[str | Strategy] | None,
    devices: Devices,
    sweep: Sweep,
    device_map: Mapping[str, int] | None = None,
) -> list[Entry]:
    """All rows, those that others are held against first.

    Raises:
        InputError: a strategy, a device or what is to be swept doesn't exist.
    """
    wanted = [_as_way(item) for item in (LINE_UP if strategies is None else strategies)]
    if not wanted:
        raise InputError("strategies: name at least one")
    for name, _ in wanted:
        devices = devices_for(name, devices)
    sweep = _checked(sweep, [name for name, _ in wanted])
    of_job = {key: values for key, values in sweep.items() if key in SETTINGS}
    references: list[Entry] = []
    entries: list[Entry] = []
    for count, settings in itertools.product(sweep.get("devices", [devices]), _products(of_job)):
        chosen = _devices.parse_several(count)
        where = first_of(chosen, len(chosen))
        alone = _references(chosen, settings)
        references += alone
        one, cores = alone[0].name, alone[0].cores
        said = {**settings, **({"devices": count} if "devices" in sweep else {})}
        for name, options in wanted:
            if name == "single":
                continue  # it is there
            if device_map is not None and _takes(name, "device_map"):
                options = {**options, "device_map": device_map}
            swept = {key: sweep[key] for key in sweep if key not in of_job and _takes(name, key)}
            for more in _products(swept):
                way = Way(name, where, settings, {**options, **more})
                shown = {key: value for key, value in way.options.items() if key != "device_map"}
                entries.append(
                    Entry(_named(name, {**shown, **said}), "strategy", way, chosen, one, cores)
                )
    return list({entry.name: entry for entry in [*references, *entries]}.values())


def _as_way(item: str | Strategy) -> tuple[str, dict[str, Any]]:
    """The name of a strategy, and its settings as far as they aren't the usual ones."""
    chosen = item if isinstance(item, Strategy) else named(item)
    usual = chosen.usual().items()
    return chosen.name, {
        name: getattr(chosen, name) for name, value in usual if getattr(chosen, name) != value
    }


def _references(chosen: tuple[Device, ...], settings: dict[str, Any]) -> list[Entry]:
    """``single`` on one of these devices, and where they are slots, on all cores."""
    first = chosen[0]
    if not first.is_slot:
        name = _named("single", settings)
        return [
            Entry(
                name,
                "one device",
                Way("single", first_of(chosen, 1), settings),
                (first,),
                name,
                None,
            )
        ]
    every = _devices.slots(1)
    whole_way = Way("single", "1xcpu", settings)
    name = _named(f"single, {counted(first.threads, 'core')}", settings)
    if first.cores == every[0].cores:  # one CPU device has them all
        return [Entry(name, "one device", whole_way, every, name, name)]
    whole = _named(f"single, {len(every[0].cores)} cores", settings)
    return [
        Entry(name, "one device", Way("single", (first,), settings), (first,), name, whole),
        Entry(whole, "all cores", whole_way, every, name, whole),
    ]


def first_of(chosen: Sequence[Device], count: int) -> str:
    """How a person writes the first so many of these devices."""
    if chosen[0].is_slot:
        return f"{count}xcpu"
    return f"{chosen[0].type}:{','.join(str(d.index) for d in chosen[:count])}"


def _named(name: str, settings: Mapping[str, Any]) -> str:
    return " ".join([name, *(f"{key}={_word(value)}" for key, value in settings.items())])


def _products(values: Sweep) -> list[dict[str, Any]]:
    return [dict(zip(values, row, strict=True)) for row in itertools.product(*values.values())]


def _takes(strategy: str, key: str) -> bool:
    """Whether a strategy has that setting, and a choice in it: ``mp`` is ``pp`` with one
    micro-batch.
    """
    return key in kind_of(strategy).choices()


def _checked(sweep: Sweep, strategies: Sequence[str]) -> dict[str, list[Any]]:
    """The same with the values in their own types."""
    found: dict[str, list[Any]] = {}
    for key, values in sweep.items():
        having = [name for name in strategies if _takes(name, key)]
        if not having and key not in SETTINGS and key != "devices":
            if others := [name for name in STRATEGIES if _takes(name, key)]:
                raise InputError(
                    f"sweep: {key} is a setting of {' and '.join(others)}, which is not compared "
                    "here"
                )
            every = sorted(
                {
                    "devices",
                    *SETTINGS,
                    *(key for name in strategies for key in kind_of(name).choices()),
                }
            )
            raise InputError(
                f'sweep: "{key}" is no setting of a job or of {", ".join(strategies)} (and a '
                "parameter "
                f"of the job function is the same for all, by --set); {nearest(key, every)}"
            )
        if not values:
            raise InputError(f"sweep: {key} has no values; write {key}=1,2,4")
        if key in SETTINGS:
            found[key] = [checked_setting(key, value) for value in values]
        else:
            found[key] = (
                [getattr(named(having[0], **{key: v}), key) for v in values]
                if having
                else list(values)
            )
    return found
