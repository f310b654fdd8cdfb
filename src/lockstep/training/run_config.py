"""``config.json``: what a run is made of."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from lockstep.job import Job
from lockstep.jobfile import JobFile, sources
from lockstep.launch.run_folder import RunFolder
from lockstep.launch.world import World
from lockstep.strategies import Strategy


def write_config(
    folder: RunFolder,
    name: str,
    file: JobFile | None,
    strategy: Strategy,
    job: Job,
    world: World,
    devices: Sequence[str],
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
    """
    before = folder.read_json(folder.config) if folder.config.is_file() else None
    folder.write_json(
        folder.config,
        {
            "job": name,
            "file": str(Path(file.path).resolve()) if file else None,
            "sources": sources(file.path) if file else {},
            "set": dict(file.knobs) if file else {},
            "given": {n: job.settings[n] for n in file.settings if n in job.settings} if file else {},
            "settings": job.settings,
            "strategy": strategy.name,
            "strategy_settings": dataclasses.asdict(strategy),
            "devices": devices,
            "world_size": world.size,
            "backend": world.backend,
            "resumed": [*before["resumed"], before["strategy"]] if before else [],
        },
    )


def edited_files(before: Mapping[str, Any], file: JobFile) -> str | None:
    """Which of the job's files were edited since, in a line; None where none was."""
    was, now = before.get("sources", {}), sources(file.path)
    edited = sorted(name for name in was if name in now and now[name] != was[name])
    return f"{', '.join(edited)} has changed since the run was begun" if edited else None
