"""A job file: a Python file with a ``job``, which is a Job or a function that returns one.

The function's keyword arguments are parameters of the job, given as ``--set lr=0.05`` and typed by
their annotations. One that has the name of a setting (``epochs``) is also given what ``--epochs 5``
says, for what depends on it. Each rank loads the file from its path, so nothing in it needs to be
picklable.
"""

from __future__ import annotations

import ast
import dataclasses
import inspect
import os
import re
import sys
import typing
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any, TypeAlias

import cloudpickle
from torch import nn

from lockstep.errors import JobError, LockstepError, error_line, near_names, nearest
from lockstep.job import SETTINGS, Job, checked_setting
from lockstep.settings import convert
from lockstep.tensors.seeding import seeded


@dataclass(frozen=True)
class JobFile:
    """Where a job comes from: a file, its parameters, and settings that win over the job's own.

    Attributes:
        path: of the Python file.
        parameters: keyword arguments of its ``job`` function, as words or values.
        settings: fields of the Job to replace. A keyword argument of the function that has the name
            of one of them is given it too, before what ``parameters`` say.
        kept: fields of the Job that a run was made with; the function isn't given them.
        unfollowed: after ``load``, what the file says of those that it has otherwise.
    """

    path: str
    parameters: Mapping[str, Any] = field(default_factory=dict)
    settings: Mapping[str, Any] = field(default_factory=dict)
    kept: Mapping[str, Any] = field(default_factory=dict)
    unfollowed: dict[str, Any] = field(default_factory=dict, init=False, compare=False)

    @property
    def name(self) -> str:
        """Return the file's name without its ending: what runs are named after."""
        return Path(self.path).stem

    def load(self) -> Job:
        """Run the file and give its job.

        Raises:
            JobError: the file is missing, raises, has no ``job``, or a parameter or setting doesn't
                exist.
        """
        # Layers or data that are made outside of the functions of the job are the same on every
        # rank, and in each run.
        with seeded(0):
            return self._load()

    def _load(self) -> Job:
        found = getattr(_run(Path(self.path)), "job", None)
        if found is None:
            raise JobError(
                f"{self.path}: there is no `job` in it; write `def job(): return lockstep.Job(...)`"
            )
        if isinstance(found, Job):
            if self.parameters:
                raise JobError(
                    f"--set {next(iter(self.parameters))}: the job in {self.path} takes no "
                    "parameters; "
                    "make it a function with keyword arguments"
                )
            job = found
        elif callable(found):
            job = self._call(found)
        else:
            raise JobError(
                f"{self.path}: its `job` is a {type(found).__name__}, not a Job or a function "
                "that returns one"
            )
        for name, value in job.settings.items():
            is_given = name in self.settings
            if not is_given and value != self.kept.get(name, value):
                self.unfollowed[name] = value
        replaced = with_settings(job, {**self.kept, **self.settings})
        assert isinstance(replaced, Job)
        return replaced

    def _call(self, function: Callable[..., Any]) -> Job:
        parameters = {**_typed(function, self.parameters), **self._settings_asked_for(function)}
        for name, parameter in inspect.signature(function).parameters.items():
            alone = parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD)
            if not alone and parameter.default is parameter.empty and name not in parameters:
                option = f"{_option(name)} ..." if name in SETTINGS else f"--set {name}=..."
                raise JobError(f"{self.path}: the job function needs {name}: add {option}")
        try:
            job = function(**parameters)
        except LockstepError:
            raise
        except Exception as error:
            raise JobError(f"{self.path}: job() raised {error_line(error)}") from error
        if not isinstance(job, Job):
            raise JobError(
                f"{self.path}: job() returned a {type(job).__name__}, not a lockstep.Job"
            )
        return job

    def _settings_asked_for(self, function: Callable[..., Any]) -> dict[str, Any]:
        """Return the settings that the function takes by their names, the length of a schedule say."""
        asked: dict[str, Any] = {}
        for name in inspect.signature(function).parameters:
            if name in SETTINGS and name in self.settings:
                value = checked_setting(name, self.settings[name])
                if value is not None:
                    asked[name] = value
        return asked


AnyJob: TypeAlias = Job | JobFile | Callable[..., Job] | str | Path
"""What a person may give as a job: a Job, a function that returns one, or the path of a job file."""


def as_job(job: AnyJob, parameters: Mapping[str, Any] | None = None) -> Job | JobFile:
    """Make a job of what a person gives: a Job, a function that returns one, or a file's path.

    Args:
        job: what was given.
        parameters: keyword arguments of the job function.

    Raises:
        JobError: it is something else, or takes no such parameters.
    """
    parameters = parameters or {}
    if not isinstance(parameters, Mapping):
        raise JobError(f'set: a dict is expected, {{"lr": 0.05}}, not {parameters!r}')
    if isinstance(job, str | Path):
        return JobFile(str(job), parameters)
    if isinstance(job, JobFile):
        return dataclasses.replace(job, parameters={**job.parameters, **parameters})
    made: Any = job
    if callable(job) and not isinstance(job, nn.Module | type):
        made = job(**_typed(job, parameters))
    elif parameters:
        raise JobError(
            f"set: a {type(job).__name__} takes no parameters: give a job file, or a function that "
            "returns a Job"
        )
    if not isinstance(made, Job):
        raise JobError(
            "job: a Job, a function that returns one, or a job file is expected, not "
            f"{type(made).__name__}"
        )
    return made


def the_job(job: Job | JobFile) -> Job:
    """Return the job itself, loaded if it is in a file.

    Raises:
        JobError: as ``JobFile.load``.
    """
    return job.load() if isinstance(job, JobFile) else job


def with_settings(
    job: Job | JobFile,
    settings: Mapping[str, Any],
    function: Callable[..., Any] | None = None,
) -> Job | JobFile:
    """Return the job with some settings replaced.

    Args:
        job: whose settings they are.
        settings: fields of a Job.
        function: takes the settings beside arguments of its own, whose names may be meant.

    Raises:
        JobError: a setting doesn't exist (the nearest name is offered), or has a wrong value. The
            values for a job file are checked when the file is loaded.
    """
    if not settings:
        return job
    known = [field.name for field in dataclasses.fields(Job)]
    for name in settings:
        if name not in known:
            own = [] if function is None else list(inspect.signature(function).parameters)
            known = list(dict.fromkeys([*own, *known]))
            what = nearest(name, known)
            if "set" in known and not near_names(name, known):
                what = f'for a parameter of the job\'s function give set={{"{name}": ...}}'
            raise JobError(f"{name}: there is no such setting; {what}")
    if isinstance(job, JobFile):
        return dataclasses.replace(job, settings={**job.settings, **settings})
    return job.replace(**settings)


_SECRETS = {"password", "passwd", "passphrase", "secret", "secrets", "credential", "credentials"}
HIDDEN = "***"


def is_secret(name: str) -> bool:
    """Return whether a parameter's name is a secret's: ``api_key``, ``hfToken``, ``db_password``;
    not ``token_count``.
    """
    words = [word.lower() for word in re.findall(r"[A-Z]?[a-z]+|[A-Z]+(?![a-z])", name)]
    return not _SECRETS.isdisjoint(words) or words[-1:] in (["key"], ["apikey"], ["token"])


def written(parameters: Mapping[str, Any]) -> dict[str, Any]:
    """Return parameters as files keep them: secrets without their value."""
    return {name: HIDDEN if is_secret(name) else value for name, value in parameters.items()}


def loaded(path: str) -> ModuleType:
    """Run a person's file as a job file is run, and return the module.

    Raises:
        JobError: the file is missing, or raises.
    """
    with seeded(0):
        return _run(Path(path))


def _run(path: Path) -> ModuleType:
    if os.path.isdir(path):  # False where the name is too long
        what = "a folder"
        if (path / "config.json").is_file():
            what = "the folder of a run: --resume it, or evaluate it"
        raise JobError(f"{path}: a Python file with a `job` is expected, and this is {what}")
    if path.suffix != ".py":
        what = "" if os.path.isfile(path) else "there is no such file, and "
        raise JobError(f"{path}: {what}a job is a Python file, ending in .py")
    if not os.path.isfile(path):
        raise JobError(
            f"{path}: there is no such file (a run whose job file has moved: train FILE --resume "
            "RUN)"
        )
    name = f"lockstep_job_{path.stem}"
    module = ModuleType(name)
    module.__file__ = str(path)
    folder = str(path.resolve().parent)
    if folder not in sys.path:
        sys.path.insert(0, folder)
    # Loader workers and pickles find its classes by this name.
    sys.modules[name] = module
    # Ranks of a launch haven't loaded it: what is in it comes to them by value.
    cloudpickle.register_pickle_by_value(module)
    try:
        # Compiled each time: Python's bytecode of a file may be that of an edit in the same second.
        exec(compile(path.read_bytes(), path, "exec", dont_inherit=True), vars(module))
    except LockstepError:
        raise
    except SystemExit as error:
        raise JobError(
            f"{path}: it called sys.exit when it was imported ({error_line(error)}): put that "
            'below if __name__ == "__main__":, and read arguments as job(lr=0.1) and --set lr=0.2'
        ) from error
    except SyntaxError as error:
        raise JobError(f"{path}: line {error.lineno} is not Python: {error.msg}") from error
    except Exception as error:
        raise JobError(f"{path}: it raised {error_line(error)}") from error
    return module


def _option(name: str) -> str:
    return "--" + name.replace("_", "-")


def _typed(function: Callable[..., Any], given: Mapping[str, Any]) -> dict[str, Any]:
    """Convert what was given to the types of the function's annotations or defaults."""
    parameters = inspect.signature(function).parameters
    open_ended = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
    try:
        hints = typing.get_type_hints(function)
    except NameError:
        hints = {}
    typed: dict[str, Any] = {}
    for name, value in given.items():
        if name not in parameters and not open_ended:
            if name in SETTINGS:
                raise JobError(
                    f"--set {name}: this is a setting of every job: give {_option(name)} {value}"
                )
            there = nearest(name, list(parameters)) if parameters else "it has none"
            raise JobError(f"--set {name}: the job has no such parameter; {there}")
        hint = _hint(name, hints, parameters, value)
        typed[name] = convert(value, hint, f"--set {name}")
    return typed


def _hint(
    name: str, hints: Mapping[str, Any], parameters: Mapping[str, inspect.Parameter], value: Any
) -> Any:
    if name in hints:
        return hints[name]
    default = parameters[name].default if name in parameters else None
    if default not in (None, inspect.Parameter.empty):
        return type(default)
    # Neither annotation nor default: a number where the word is one.
    try:
        return type(ast.literal_eval(value)) if isinstance(value, str) else object
    except (ValueError, SyntaxError):
        return str
