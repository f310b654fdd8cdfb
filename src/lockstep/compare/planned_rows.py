"""What a comparison measures: each strategy with each setting that is swept, and what it is held
against.

::

    single on one device  the "one device" of a speed-up: one CPU device where slots are the devices
    single on all cores   only where slots are the devices: what the machine does without any strategy
    dp, ddp, mp, pp, ...  on the devices that were asked for
"""

from __future__ import annotations

import itertools
import json
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from lockstep.errors import InputError, counted, nearest
from lockstep.job import SETTINGS, Job, checked_setting
from lockstep.jobfile import JobFile, written
from lockstep.launch import devices as _devices
from lockstep.launch.devices import Device, Devices
from lockstep.strategies import Strategy, devices_for, kind_of, named

Role = Literal["one device", "all cores", "strategy"]

LINE_UP = ("single", "dp", "ddp", "mp", "pp")
"""What is compared where no strategies are given: those with single-device results."""

Sweep = Mapping[str, Sequence[Any]]
"""Values by the name of a setting of the job, of a setting of a strategy, or ``devices``."""


@dataclass(frozen=True)
class Setup:
    """How a job is trained on this machine.

    Attributes:
        strategy: its name.
        devices: as a person writes them; the devices where there is no word (one slot of several).
        settings: fields of the job that are replaced.
        options: settings of the strategy.
    """

    strategy: str
    devices: str | tuple[Device, ...]
    settings: dict[str, Any] = field(default_factory=dict)
    options: dict[str, Any] = field(default_factory=dict)

    def replace(self, **settings: Any) -> Setup:
        """Return the same setup with some settings of the job changed."""
        return replace(self, settings={**self.settings, **settings})

    @property
    def words(self) -> list[str]:
        """``--strategy dp --devices 2xcpu --channels-last``: the options of the command."""
        every = {
            "strategy": self.strategy,
            "devices": self.devices,
            **self.options,
            **self.settings,
        }
        return option_words(every)

    def line(self, job: Job | JobFile) -> str:
        """Return the command that trains a job so.

        Args:
            job: the job. If it isn't a file, a call of ``lockstep.train`` is returned.
        """
        if not isinstance(self.devices, str):  # one slot of several has no word
            threads = self.devices[0].threads
            line = replace(self, devices="1xcpu").line(job)
            if isinstance(job, JobFile):
                return f"OMP_NUM_THREADS={threads} {line}"
            return f'os.environ["OMP_NUM_THREADS"] = "{threads}"; {line}'

        if isinstance(job, JobFile):
            setup = replace(self, settings={**job.settings, **self.settings})
            words = ["lockstep", "train", *job_words(job), *setup.words]
            return shlex.join(words)
        strategy = f'"{self.strategy}"'
        if self.options:
            strategy = f"named({strategy}, {_arguments(self.options)})"
        settings = _arguments({"devices": self.devices, **self.settings})
        return f"lockstep.train(job, strategy={strategy}, {settings})"


def job_words(job: JobFile) -> list[str]:
    """Return a job file and its parameters, as words of the command."""
    words = [job.path]
    for name, value in written(job.parameters).items():
        words += ["--set", f"{name}={value}"]
    return words


def option_words(values: Mapping[str, Any]) -> list[str]:
    """Return settings of a job or of a strategy as words of the command: ``--batch-size 32
    --channels-last``.
    """
    words = []
    for name, value in values.items():
        option = name.replace("_", "-")
        if name == "device_map":
            option = "map"
        words.append(f"--{option}")
        if isinstance(value, Mapping):
            words.append(json.dumps(dict(value)))
        elif value is not True:
            words.append(_word(value))
    return words


def _word(value: Any) -> str:
    """Return a value as the command takes it: ``1,2``, ``true``, ``none``, ``0.1``."""
    if isinstance(value, list):
        return ",".join(map(str, value))
    if value is None or isinstance(value, bool):
        return str(value).lower()
    return str(value)


def _arguments(values: Mapping[str, Any]) -> str:
    """Return keyword arguments as a person writes them: ``devices="2xcpu", batch_size=32``."""
    words = [f"{name}={value!r}" for name, value in values.items()]
    return ", ".join(words).replace("'", '"')


@dataclass(frozen=True)
class Entry:
    """One row that is to be measured, such as ``pp microbatches=4``.

    Attributes:
        name: of the row.
        role: what it is in the comparison.
        setup: how it trains.
        devices: the devices themselves.
        one: the name of the row that is its one device.
        cores: the name of the row that is all cores of the machine, where slots are the devices.
    """

    name: str
    role: Role
    setup: Setup
    devices: tuple[Device, ...]
    one: str
    cores: str | None

    @property
    def where(self) -> str:
        """``2 CPU devices of 1 core``, ``4 CPU devices that share 2 cores``, ``cuda:0, cuda:1``."""
        first = self.devices[0]
        if not first.is_slot:
            return ", ".join(map(str, self.devices))
        slots = counted(len(self.devices), "CPU device")
        cores: set[int] = set()
        threads = 0
        for device in self.devices:
            cores.update(device.cores)
            threads += device.threads
        if len(cores) < threads:
            return f"{slots} that share {counted(len(cores), 'core')}"
        return f"{slots} of {counted(first.threads, 'core')}"


def line_up(
    strategies: Sequence[str | Strategy] | None,
    devices: Devices,
    sweep: Sweep,
    device_map: Mapping[str, int] | None = None,
) -> list[Entry]:
    """Return all rows, those that others are held against first.

    Args:
        strategies: by name, or with settings of their own; None is `LINE_UP`.
        devices: for all of them, unless the sweep has devices.
        sweep: the values to try; all combinations of them are rows.
        device_map: which layer is on which device, for the strategies that take one.

    Raises:
        InputError: a strategy, a device or what is to be swept doesn't exist.
    """
    if strategies is None:
        strategies = LINE_UP
    wanted = [as_setup(item) for item in strategies]
    if not wanted:
        raise InputError("strategies: name at least one")
    for name, options in wanted:
        devices = devices_for(name, devices)
        if device_map is not None and _takes(name, "device_map"):
            options["device_map"] = device_map
    sweep = _checked(sweep, [name for name, _ in wanted])
    of_job = {key: values for key, values in sweep.items() if key in SETTINGS}
    others = {key: values for key, values in sweep.items() if key not in SETTINGS}

    references: list[Entry] = []
    entries: list[Entry] = []
    for count in sweep.get("devices", [devices]):
        chosen = _devices.parse_several(count)
        where = first_of(chosen, len(chosen))
        compared = [one for one in wanted if _has_row(one[0], len(chosen), sweep)]
        for settings in _products(of_job):
            swept = dict(settings)
            if "devices" in sweep:
                swept["devices"] = count
            alone = _references(chosen, settings)
            references += alone
            one = alone[0]
            for name, options in compared:
                for more in _products(_taken(name, others)):
                    setup = Setup(name, where, settings, {**options, **more})
                    shown = {**setup.options, **swept}
                    row = _named(name, shown)
                    entries.append(Entry(row, "strategy", setup, chosen, one.name, one.cores))
    by_name = {entry.name: entry for entry in (*references, *entries)}
    return list(by_name.values())


def _has_row(name: str, devices: int, sweep: Sweep) -> bool:
    """Return whether a strategy has a row: ``single`` is a reference, and in a sweep over devices
    stages need several of them.
    """
    is_alone = "devices" in sweep and devices == 1
    return name != "single" and not (is_alone and _takes(name, "device_map"))


def _taken(name: str, sweep: Sweep) -> Sweep:
    """Return what a strategy takes of the values to try."""
    return {key: values for key, values in sweep.items() if _takes(name, key)}


def as_setup(item: str | Strategy) -> tuple[str, dict[str, Any]]:
    """Return the name of a strategy, and its settings that aren't the usual ones."""
    chosen = item if isinstance(item, Strategy) else named(item)
    options = {}
    for name, usual in chosen.usual().items():
        value = getattr(chosen, name)
        if value != usual:
            options[name] = value
    return chosen.name, options


def _references(chosen: tuple[Device, ...], settings: dict[str, Any]) -> list[Entry]:
    """Return ``single`` on one of these devices, and where they are slots, on all cores.

    Args:
        chosen: the devices of the strategies.
        settings: fields of the job that are replaced, which the names of the rows have.
    """
    first = chosen[0]
    if not first.is_slot:
        name = _named("single", settings)
        setup = Setup("single", first_of(chosen, 1), settings)
        return [Entry(name, "one device", setup, (first,), name, None)]
    name = _named(f"single, {counted(first.threads, 'core')}", settings)
    every = _devices.slots(1)
    on_all = Setup("single", "1xcpu", settings)
    if first.cores == every[0].cores:  # one CPU device has them all
        return [Entry(name, "one device", on_all, every, name, name)]
    whole = _named(f"single, {len(every[0].cores)} cores", settings)
    on_one = Setup("single", (first,), settings)
    return [
        Entry(name, "one device", on_one, (first,), name, whole),
        Entry(whole, "all cores", on_all, every, name, whole),
    ]


def first_of(chosen: Sequence[Device], count: int) -> str:
    """Return how a person writes the first ``count`` of these devices."""
    if chosen[0].is_slot:
        return f"{count}xcpu"
    numbers = [str(device.index) for device in chosen[:count]]
    return f"{chosen[0].type}:{','.join(numbers)}"


def _named(name: str, settings: Mapping[str, Any]) -> str:
    """Return the name of a row: ``pp microbatches=4``.

    Args:
        name: of the strategy.
        settings: that the row has and others may not; the device map is too long for a name.
    """
    words = [name]
    for key, value in settings.items():
        if key != "device_map":
            words.append(f"{key}={_word(value)}")
    return " ".join(words)


def _products(values: Sweep) -> list[dict[str, Any]]:
    """Return each combination of values; an empty one where there is nothing to sweep."""
    rows = itertools.product(*values.values())
    return [dict(zip(values, row, strict=True)) for row in rows]


def _takes(strategy: str, key: str) -> bool:
    """Return whether a strategy has that setting, and a choice in it: ``mp`` is ``pp`` with one
    micro-batch.
    """
    return key in kind_of(strategy).choices()


def _checked(sweep: Sweep, strategies: Sequence[str]) -> dict[str, list[Any]]:
    """Return the same with the values in their own types.

    Args:
        sweep: as a person gave it, with values that may be text.
        strategies: the names of those that are compared.

    Raises:
        InputError: there are no values, or something isn't a setting here.
    """
    found: dict[str, list[Any]] = {}
    for key, values in sweep.items():
        if not values:
            raise InputError(f"sweep: {key} has no values; write {key}=1,2,4")
        having = [name for name in strategies if _takes(name, key)]
        if key == "devices":
            found[key] = list(values)
        elif key in SETTINGS:
            found[key] = [checked_setting(key, value) for value in values]
        elif having:
            found[key] = []
            for value in values:
                chosen = named(having[0], **{key: value})
                found[key].append(getattr(chosen, key))
        else:
            raise _unknown(key, strategies)
    return found


def _unknown(key: str, strategies: Sequence[str]) -> InputError:
    """Return the error of a sweep of something that isn't a setting here.

    Args:
        key: what was to be swept.
        strategies: the names of those that are compared.
    """
    every = {"devices", *SETTINGS}
    for name in strategies:
        every |= kind_of(name).choices()
    return InputError(
        f'sweep: "{key}" is no setting of a job or of {", ".join(strategies)} (and a parameter '
        f"of the job function is the same for all, by --set); {nearest(key, sorted(every))}"
    )
