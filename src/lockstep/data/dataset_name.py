"""Data by name, as ``predict`` takes it: ``eval``, ``eval:NAME``, ``train``, ``FILE.py:NAME``."""

from __future__ import annotations

import types
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lockstep.errors import InputError, JobError, nearest
from lockstep.job import Job
from lockstep.jobfile import loaded


def check_name(data: Any) -> None:
    """Refuse words that name no data, before anything is started."""
    if not isinstance(data, str) or data in ("eval", "train") or data.startswith("eval:"):
        return
    file, colon, name = data.rpartition(":")
    if not colon and data.endswith(".py"):
        raise InputError(f"{data}: which dataset in it? write {data}:NAME")
    if not colon or not name:
        raise InputError(
            f'data: there is no dataset "{data}"; {nearest(data, ["eval", "eval:NAME", "train", "FILE.py:NAME"])}'
        )
    if not Path(file).is_file():
        raise InputError(f"{data}: there is no file {file}")


def source_of(job: Job, data: Any) -> tuple[str, Any]:
    """What the data are called in messages, and what gives them."""
    if not isinstance(data, str):
        return "data", data
    if data == "train":
        return "train_data", job.train_data
    if data == "eval" or data.startswith("eval:"):
        if job.eval_data is None:
            raise JobError("eval_data: the job has none; predict on train, or name data as file.py:NAME")
        return "eval_data", job.eval_data
    file, _, name = data.rpartition(":")
    module = vars(loaded(file))
    if name not in module:
        known = [word for word, value in module.items() if _may_be_data(word, value)] or ["nothing that could be data"]
        raise InputError(f'{file}: there is no "{name}" in it; {nearest(name, known)}')
    return data, module[name]


def one_of(sets: Mapping[str, Any], wanted: str) -> Any:
    """The evaluation set that ``eval`` or ``eval:NAME`` means."""
    name = wanted.partition(":")[2]
    if name in sets:
        return sets[name]
    names = [known for known in sets if known]
    if not names:
        raise InputError(f"{wanted}: the job has one evaluation set, without a name: say eval")
    if not name:
        raise InputError(
            f"eval: the job has {len(names)} evaluation sets: say which, {' or '.join('eval:' + n for n in names)}"
        )
    raise InputError(f'{wanted}: there is no evaluation set "{name}"; {nearest(name, names)}')


def _may_be_data(word: str, value: Any) -> bool:
    return not word.startswith("_") and word != "job" and not isinstance(value, type | types.ModuleType)
