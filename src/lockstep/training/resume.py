"""Which run is resumed, and with which strategy and devices where a person gives none."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from lockstep.errors import FolderError
from lockstep.job import Job
from lockstep.jobfile import JobFile, written
from lockstep.launch import devices as _devices
from lockstep.launch import started_ranks
from lockstep.launch.devices import Device, Devices
from lockstep.run.run_folder import RunFolder
from lockstep.strategies import Strategy, devices_for, kind_of, named


def as_it_went(
    config: Mapping[str, Any],
    strategy: str | Strategy | None,
    devices: Devices,
    *,
    own_devices: bool = True,
) -> tuple[str | Strategy | None, Devices]:
    """Return the strategy and the devices to resume with: those that a person gave, or else the
    run's own.

    Args:
        config: of the run.
        strategy: as given; the name of the run's own strategy means that with its settings.
        devices: as given; None leaves them open.
        own_devices: False where this process was given its devices already (torchrun).
    """
    before = config["strategy"]
    names = config["devices"]
    wanted = strategy.name if isinstance(strategy, Strategy) else strategy or before
    is_same = wanted == before
    if not is_same:
        devices = devices_for(strategy, devices)

    takes_devices_of_run = is_same or (wanted != "single" and len(names) > 1)
    if devices is None and own_devices and takes_devices_of_run:
        devices = _still_here(names)
    if isinstance(strategy, Strategy) or not is_same:
        return strategy, devices

    if strategy is None:
        if before == "single" and devices is not None and len(_devices.parse(devices)) > 1:
            return None, devices
        if not own_devices and named(before).in_one_process:
            return None, devices

    return _with_settings_of(before, config["strategy_settings"]), devices


def _with_settings_of(name: str, settings: Mapping[str, Any]) -> Strategy:
    """Return the strategy with the settings of a run that are not the usual ones."""
    others = {}
    for setting, usual in kind_of(name).usual().items():
        value = settings.get(setting, usual)
        if setting != "device_map" and value != usual:
            others[setting] = value
    return named(name, **others)


def _still_here(names: Sequence[str]) -> tuple[Device, ...]:
    """Return the devices of those names; where they aren't here, as many others as there are."""
    if all(name.startswith("cpu:") for name in names):
        return _devices.slots(len(names))

    same = []
    alike = []
    for device in _devices.accelerators():
        if str(device) in names:
            same.append(device)
        if names[0].startswith(f"{device.type}:"):
            alike.append(device)

    if len(same) == len(names):
        return tuple(same)
    others = tuple(alike) or _devices.parse("auto")
    return others[: len(names)]


class FoundRun(NamedTuple):
    """The run that is resumed.

    Attributes:
        folder: of the run; None where a new one is made.
        config: of the run; None where it begins anew in its folder.
        again: whether torchrun has started the ranks again.
    """

    folder: str | None
    config: dict[str, Any] | None
    again: bool


def run_to_resume(
    resume: str | Path | None,
    parent: str | Path,
    job: Job | JobFile,
    name: str,
) -> FoundRun:
    """Find the run to resume: the one that was given, the newest, or that of torchrun."""
    run_id = os.environ.get("TORCHELASTIC_RUN_ID") if started_ranks.restarts() else None
    again = run_id is not None
    if resume is None and not again:
        return FoundRun(None, None, again)
    if resume in (None, "auto"):
        newest = newest_of(parent, job, name, run_id)
        if newest is None:
            return FoundRun(None, None, again)
        if not newest.is_resumable:
            return FoundRun(str(newest.path), None, again)
        resume = newest.path

    run = RunFolder.existing(resume)
    return FoundRun(str(run.path), run.read_json(run.config), again)


def newest_of(
    parent: str | Path,
    job: Job | JobFile,
    name: str,
    run_id: str | None = None,
) -> RunFolder | None:
    """Return the newest run under a folder that ``--resume auto`` takes: of this job, and not at
    its end.

    None where there is none.

    Args:
        parent: the folder of runs.
        job: this job; of one that isn't a file only the name is compared.
        name: what the job is called.
        run_id: torchrun's, where it has started the ranks again: only a run that the earlier ranks
            began is taken.
    """
    newest: RunFolder | None = None
    newest_time = 0.0

    for path in filter(Path.is_file, Path(parent).glob("*/config.json")):
        folder = RunFolder(path.parent)
        with contextlib.suppress(FolderError, AttributeError, TypeError):  # no run, or damaged
            if path.stat().st_mtime > newest_time and _is_taken(folder, job, name, run_id):
                newest = folder
                newest_time = path.stat().st_mtime

    return newest


def _is_taken(
    folder: RunFolder,
    job: Job | JobFile,
    name: str,
    run_id: str | None,
) -> bool:
    """Return whether ``--resume auto`` may take the run in a folder.

    Arguments as for ``newest_of``.

    Raises:
        FolderError: the folder has no run, or a damaged one.
    """
    config = folder.read_json(folder.config)
    file = None
    if isinstance(job, JobFile):
        file = str(Path(job.path).resolve())
        if changed_parameters(config, job):
            return False
    if config.get("file") != file or config.get("job") != name:
        return False
    if run_id is not None:
        return bool(run_id == config.get("run_id"))
    return folder.is_resumable and not _is_at_its_end(folder, config, job)


def _is_at_its_end(folder: RunFolder, config: Mapping[str, Any], job: Job | JobFile) -> bool:
    """Return whether a run was finished, and no more epochs or steps are asked for."""
    if not folder.summary.is_file():
        return False
    reached = folder.read_json(folder.summary)
    given = config["given"] if isinstance(job, JobFile) else config["settings"]

    is_same = True
    for name in ("epochs", "steps"):
        asked = job.settings.get(name)
        before = given.get(name)
        if str(asked) != str(before):
            is_same = False
        if asked is None and name not in given:
            asked = config["settings"].get(name)  # the job file's own

        number = str(asked)
        if number.isdigit() and reached[name] >= int(number):
            return True

    return is_same


def changed_parameters(
    config: Mapping[str, Any], job: JobFile
) -> dict[str, tuple[Any | None, Any | None]]:
    """Return the parameters of a job file (``--set``) that differ from a run's, by name: then and
    now.

    None is the job file's own value.
    """
    before = config.get("set", {})
    now = written(job.parameters)
    found = {}
    for name in sorted(before.keys() | now.keys()):
        pair = before.get(name), now.get(name)
        if str(pair[0]) != str(pair[1]):
            found[name] = pair

    return found
