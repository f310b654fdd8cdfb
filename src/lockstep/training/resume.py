"""A run that is taken up: its own strategy and devices, where a person doesn't say, and what has
changed since.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import sys
import sysconfig
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from lockstep.checkpoint.weights import load_weights
from lockstep.errors import FolderError, JobError, StrategyError, counted
from lockstep.job import Job
from lockstep.jobfile import JobFile, written
from lockstep.launch import devices as _devices
from lockstep.launch.devices import Device, Devices
from lockstep.launch.run_folder import RunFolder
from lockstep.strategies import Strategy, devices_for, kind_of, named

_FOR_DEVICES = ("device_map", "times")
"""Settings that are for one number of devices; ``Strategy.planned`` takes them up where they
fit.
"""


def as_it_went(
    config: Mapping[str, Any],
    strategy: str | Strategy | None,
    devices: Devices,
    *,
    own_devices: bool = True,
) -> tuple[str | Strategy | None, Devices]:
    """The strategy and the devices to go on with: those that a person gave, the run's own where
    none were.

    Args:
        config: of the run.
        strategy: as given; the name of the run's own means that with its settings.
        devices: as given; None leaves them open.
        own_devices: False where this process was given its devices already (torchrun).
    """
    before, names = config["strategy"], config["devices"]
    wanted = strategy.name if isinstance(strategy, Strategy) else strategy or before
    if wanted != before:
        devices = devices_for(strategy, devices)
    if (
        devices is None
        and own_devices
        and (wanted == before or (wanted != "single" and len(names) > 1))
    ):
        devices = _still_here(names)
    if isinstance(strategy, Strategy) or wanted != before or not _is_known(before):
        return strategy, devices
    if strategy is None and (
        (before == "single" and devices is not None and len(_devices.parse(devices)) > 1)
        or (not own_devices and named(before).in_one_process)
    ):
        return None, devices
    return _with_settings_of(before, config["strategy_settings"]), devices


def _is_known(strategy: str) -> bool:
    """Whether there is a strategy of that name: a run may have had one of a person's own."""
    with contextlib.suppress(StrategyError):
        return kind_of(strategy) is not None
    return False


def _with_settings_of(name: str, kept: Mapping[str, Any]) -> Strategy:
    usual = {n: value for n, value in kind_of(name).usual().items() if n not in _FOR_DEVICES}
    return named(name, **{n: v for n, v in kept.items() if n in usual and v != usual[n]})


def _still_here(names: Sequence[str]) -> tuple[Device, ...]:
    """The devices of those names; where they aren't here, as many others as there are."""
    if all(name.startswith("cpu:") for name in names):
        return _devices.slots(len(names))
    here = _devices.accelerators()
    same = tuple(device for device in here if str(device) in names)
    alike = tuple(device for device in here if names[0].startswith(f"{device.type}:"))
    if len(same) == len(names):
        return same
    return (alike or _devices.parse("auto"))[: len(names)]


def newest_of(
    parent: str | Path, job: Job | JobFile, name: str, run_id: str | None = None
) -> RunFolder | None:
    """The newest run under a folder that ``--resume auto`` takes: of this job, and not at its end;
    None where none is.

    Args:
        parent: the folder of runs.
        job: this job; of one that isn't a file only the name is known.
        name: what the job is called.
        run_id: torchrun's, where it has started the ranks again: only a run that the earlier ones
            began is taken.
    """
    found = []
    for path in Path(parent).glob("*/config.json"):
        folder = RunFolder(path.parent)
        with contextlib.suppress(FolderError, AttributeError, TypeError):
            config = folder.read_json(folder.config)
            file = str(Path(job.path).resolve()) if isinstance(job, JobFile) else None
            if (config.get("file"), config.get("job")) != (file, name) or run_id not in (
                None,
                config.get("run_id"),
            ):
                continue
            if isinstance(job, JobFile) and changed_parameters(config, job):
                continue
            if run_id is not None or (
                folder.is_resumable and not _is_at_its_end(folder, config, job)
            ):
                found.append((path.stat().st_mtime, folder))
    return max(found, key=lambda one: one[0])[1] if found else None


def changed_parameters(config: Mapping[str, Any], job: JobFile) -> dict[str, tuple[Any, Any]]:
    """The parameters of a job file (``--set``) that are others than a run's, by name: then and
    now; None is none.
    """
    before, now = config.get("set", {}), written(job.parameters)
    pairs = {name: (before.get(name), now.get(name)) for name in sorted(before.keys() | now.keys())}
    return {name: pair for name, pair in pairs.items() if str(pair[0]) != str(pair[1])}


def _is_at_its_end(folder: RunFolder, config: Mapping[str, Any], job: Job | JobFile) -> bool:
    """Whether a run was finished, and as many epochs or steps are asked for as then."""
    before = config["given"] if isinstance(job, JobFile) else config["settings"]
    alike = all(
        str(job.settings.get(name)) == str(before.get(name)) for name in ("epochs", "steps")
    )
    return folder.summary.is_file() and alike


def moved(before: Mapping[str, Any], strategy: str, devices: Sequence[str]) -> str:
    """``was pp on 2 CPU devices, resumes as single on 1 CPU device``; "" where it resumes as it
    was.

    ``before`` is the run's ``config.json``.
    """
    if (before["strategy"], len(before["devices"])) == (strategy, len(devices)):
        return ""
    return (
        f"was {before['strategy']} on {_counted(before['devices'])}, resumes as {strategy} on "
        f"{_counted(devices)}"
    )


def _counted(devices: Sequence[str]) -> str:
    return counted(
        len(devices), "CPU device" if all(name.startswith("cpu:") for name in devices) else "device"
    )


def _sum_of(file: Path) -> str:
    return hashlib.sha256(file.read_bytes()).hexdigest()


def sources(path: str) -> dict[str, str]:
    """The job file, and the modules that were imported from its folder, by their place there:
    hashes of their text.
    """
    folder = Path(path).resolve().parent
    installed = (
        sysconfig.get_path("stdlib"),
        sysconfig.get_path("purelib"),
        sysconfig.get_path("platlib"),
    )
    files = {Path(path).resolve()}
    for module in list(sys.modules.values()):
        file = getattr(module, "__file__", None)
        if file is not None and file.endswith(".py") and not file.startswith(installed):
            files.add(Path(file))
    found = {}
    for file in files:
        if file.is_relative_to(folder):
            with contextlib.suppress(OSError):
                found[str(file.relative_to(folder))] = _sum_of(file)
    return found


def refuse_another_file(run: Path, config: Mapping[str, Any]) -> None:
    """Refuse the job file that a run's folder names where it isn't the one that was trained.

    Whoever names a job file by hand trusts it. One that is found through a folder is executed too,
    and somebody else may have made that folder. No training leaves a job file in the folder, or
    names it without its whole path.

    Raises:
        FolderError: it is another one, or isn't there.
    """
    file = Path(config["file"])
    its = f"{run}: its job file {file}"
    ways = "--trust-job runs it as it is now, --job FILE gives another"
    if not os.path.isfile(file) or not os.access(file, os.R_OK):
        raise FolderError(
            f"{its} isn't there, or can't be read: --job FILE gives it from another place"
        )
    if not file.is_absolute() or file.resolve().is_relative_to(run.resolve()):
        raise FolderError(
            f"{its} lies in that folder or isn't a whole path, so no training named it: {ways}"
        )
    now, before = _sum_of(file), str(config["sources"].get(file.name, ""))
    if len(before) < 16:  # earlier versions kept that much
        if os.environ.get("RANK", "0") == "0":
            print(
                f"note: {run} doesn't say what was in its job file {file} when it was trained",
                file=sys.stderr,
            )
    elif not now.startswith(before):
        raise FolderError(
            f"{its} isn't the one that was trained (SHA-256 {now[:8]}, was {before[:8]}): {ways}"
        )


def another_file(before: Mapping[str, Any], path: str) -> str | None:
    """That ``before``, a run's config, names a job file of another place; None where it doesn't."""
    now, was = Path(path).resolve(), Path(before["file"] or path)
    if before["file"] is None or now == was:
        return None
    sums = _sum_of(now)[:8], str(before["sources"].get(was.name, "unknown"))[:8]
    return f"the job file is {now} ({sums[0]}), and was {was} ({sums[1]}) when the run was begun"


def edited_files(before: Mapping[str, str], path: str) -> str | None:
    """Which of the job's files are other than ``sources`` told before, in a line; None where
    none is.
    """
    now = sources(path)
    edited = sorted(
        name for name in before if name in now and not now[name].startswith(str(before[name]))
    )
    return f"{', '.join(edited)} has changed since the run was begun" if edited else None


_AS_ASKED_FOR = (
    "epochs",
    "steps",
    "log_every",
    "eval_every",
    "save_every",
    "keep",
    "loader_workers",
    "keep_memory",
)
"""Settings that a run may well be resumed with another value of."""


def changed_settings(
    before: Mapping[str, Any], job: Job, said: Collection[str] = ()
) -> Iterator[str]:
    """Which settings are other than in ``before``, a run's config, in lines; those were
    ``said``, or asked for now.
    """
    for name, now in job.settings.items():
        then = before["settings"].get(name, now)
        if then != now and name not in (*_AS_ASKED_FOR, *said):
            yield f"{name}: it is {now}, and was {then} when the run was begun"


def has_ended(folder: RunFolder, step: int) -> bool:
    """Whether a run has come to its end at this step, down to its last file, and that is whole."""
    if not folder.summary.is_file() or folder.read_json(folder.summary).get("steps") != step:
        return False
    try:
        load_weights(folder.model)
    except FolderError:
        return False  # it is written anew
    return True


def nothing_left(epoch: int, step: int, epochs: int | None) -> JobError:
    """The error of a run that has done all that is asked for: ``epochs``, or steps where that is
    None.
    """
    if epochs is None:
        return JobError(f"steps: the run has done {step}: ask for more, --steps {2 * step} say")
    return JobError(
        f"epochs: the run has done {epoch} ({step} steps): ask for more, --epochs "
        f"{epoch + epochs} say"
    )
