"""``config.json``: what a run is made of, and what of it is other than before where the run is resumed."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from lockstep.data import changes, fingerprint
from lockstep.folder import RunFolder
from lockstep.job import Job
from lockstep.jobfile import JobFile, sources
from lockstep.strategies import Strategy
from lockstep.world import World


def write_config(
    folder: RunFolder,
    name: str,
    file: JobFile | None,
    strategy: Strategy,
    job: Job,
    world: World,
    devices: Sequence[str],
    made_of: Mapping[str, Any],
) -> None:
    """Write it.

    Args:
        folder: of the run; the strategies under which it went before are kept.
        name: of the job.
        file: where the job comes from, if from a file.
        strategy: with all that it left open settled.
        job: with its settings.
        world: of the ranks.
        devices: the names of all.
        made_of: what ``what_it_is_made_of`` gave.
    """
    before = folder.read_json(folder.config) if folder.config.is_file() else None
    folder.write_json(
        folder.config,
        {
            "job": name,
            "file": str(Path(file.path).resolve()) if file else None,
            "set": dict(file.knobs) if file else {},
            "given": {n: job.settings[n] for n in file.settings if n in job.settings} if file else {},
            "settings": job.settings,
            "strategy": strategy.name,
            "strategy_settings": dataclasses.asdict(strategy),
            "devices": devices,
            "world_size": world.size,
            "backend": world.backend,
            "resumed": [*before["resumed"], before["strategy"]] if before else [],
            **made_of,
        },
    )


def what_it_is_made_of(file: Job | JobFile, train_data: Any, job: Job) -> dict[str, Any]:
    """The files of the job, and its data, as hashes."""
    return {
        "sources": sources(file.path) if isinstance(file, JobFile) else {},
        "data": fingerprint(train_data, seed=job.seed, collate=job.collate),
    }


def changes_of(before: Mapping[str, Any], now: Mapping[str, Any]) -> Iterator[str]:
    """What is other than it was, a line each.

    Args:
        before: the run's ``config.json``.
        now: what ``what_it_is_made_of`` gives.
    """
    was, files = before.get("sources", {}), now["sources"]
    if changed := sorted(name for name in was if name in files and files[name] != was[name]):
        yield f"{', '.join(changed)} has changed since the run was begun"
    if (said := changes(before.get("data", {}), now["data"], "train_data")) is not None:
        yield said
