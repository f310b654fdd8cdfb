"""Run: a training that was, its numbers and its model."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import nn

from lockstep.checkpoint.folder import CheckpointFolder
from lockstep.checkpoint.index import Index
from lockstep.errors import FolderError, InputError, counted
from lockstep.job import Job
from lockstep.jobfile import HIDDEN, JobFile, as_job, the_job
from lockstep.launch.run_folder import RunFolder
from lockstep.model.build import trained_model
from lockstep.training.resume import refuse_another_file


@dataclass(frozen=True)
class Run:
    """A training that was: its folder, and what it reached.

    Attributes:
        folder: where its files are (see ``lockstep.launch.run_folder``).
        summary: the content of ``summary.json``; empty where the training was stopped before it
            wrote one.
        job: the job, where this process knows it.
    """

    folder: Path
    summary: dict[str, Any]
    job: Job | JobFile | None = None

    @classmethod
    def open(
        cls,
        folder: str | Path,
        job: Job | JobFile | str | Path | None = None,
        *,
        trust_job: bool = False,
    ) -> Run:
        """The run that is kept in a folder.

        Args:
            folder: of the run.
            job: its job, where that was not a file, so that it can't be found again; or the path of
                its job file, where that isn't the one that the folder names.
            trust_job: take the job file that the folder names, though it isn't as it was when the
                run was trained.

        Raises:
            FolderError: no run is kept there.
        """
        kept = RunFolder.existing(folder)
        summary = kept.read_json(kept.summary) if kept.summary.is_file() else {}
        if isinstance(job, str | Path) or (job is None and trust_job):
            job = job_of(folder, job=job, trust=trust_job)
        return cls(kept.path, summary, job)

    def __repr__(self) -> str:
        return f"Run({str(self.folder)!r}, metrics={self.metrics})"

    @property
    def metrics(self) -> dict[str, float]:
        """The last evaluation's metrics, and the loss as ``"loss"``; empty where the training
        was stopped.
        """
        return {"loss": self.summary["loss"], **self.summary["metrics"]} if self.summary else {}

    @property
    def history(self) -> list[dict[str, Any]]:
        """The lines of ``metrics.jsonl``: a record for each epoch, and for each log and
        evaluation within one.
        """
        return RunFolder(self.folder).read_metrics()

    def model(self, weights: str | Path | None = None, *, best: bool = False) -> nn.Module:
        """The trained model on the CPU, in evaluation mode: the final weights, or those of the best
        evaluation.

        Its outputs are those that ``predict`` gives. To go on training it by hand, call
        ``.train()``.

        Args:
            weights: another file of weights, in the run's folder or elsewhere, as
                ``"ema.safetensors"``.
            best: the weights of the best evaluation.

        Raises:
            FolderError: the weights aren't there, or the job was not a file and isn't known here.
        """
        job, file = trained_of(self, best=best, weights=weights)
        return trained_model(the_job(job), file).eval()


def checkpoints_of(run: str | Path, *, verify: bool = False) -> tuple[list[str], bool]:
    """A line for each checkpoint of a run, newest first, and whether none is damaged.

    Args:
        run: its folder.
        verify: read all of each, and compare the sums.

    Raises:
        FolderError: there is no such run.
    """
    folder = RunFolder.existing(run)
    checkpoints = CheckpointFolder(folder.checkpoints)
    lines, whole = [], True
    for step in checkpoints.steps():
        path = checkpoints.of_step(step)
        try:
            index = Index.read(path)
            if verify:
                index.check(path)
        except FolderError as error:
            whole = False
            lines.append(f"step {step:>8}  damaged: {error}")
            continue
        size = sum(size for size, _ in index.files.values())
        where = (
            f"{counted(index.about['epoch'], 'epoch')} and "
            f"{counted(index.about['position'], 'batch', 'es')}"
        )
        parts = counted(len(index.files), "part")
        lines.append(
            f"step {step:>8}  after {where}, {parts}, {size / 1e6:,.1f} "
            f"MB{', whole' if verify else ''}"
        )
    lines += [f"set aside: {path.name}" for path in sorted(folder.checkpoints.glob("*.damaged*"))]
    return lines or [f"{folder.path}: it has no checkpoint"], whole


def trained_of(
    run: Run | str | Path,
    *,
    best: bool = False,
    weights: str | Path | None = None,
    job_parameters: Mapping[str, Any] | None = None,
    job: Job | JobFile | Callable[[], Job] | str | Path | None = None,
    trust: bool = False,
) -> tuple[Job | JobFile, Path]:
    """The job of a run, and the file of its weights.

    Args:
        run: a Run or the path of its folder.
        best: the weights of the best evaluation.
        weights: another safetensors file: in the run's folder, or else by its path.
        job_parameters: keyword arguments for the function of its job file, over those it was run
            with.
        job, trust: as for ``job_of``; a job itself too.

    Raises:
        FolderError: there is no such run or file, or its job was not a file, or is another one now.
        InputError: both ``best`` and ``weights`` are given.
    """
    folder = RunFolder(run.folder) if isinstance(run, Run) else RunFolder.existing(run)
    file = folder.best if best else folder.model
    if weights is not None:
        if best:
            raise InputError(f"weights: {weights}, and --best as well: give one of them")
        file = _weights_in(folder.path, Path(weights))
    known = run.job if job is None and isinstance(run, Run) else job
    if known is None or isinstance(known, str | Path):
        return job_of(folder.path, job_parameters, job=known, trust=trust), file
    known = as_job(known)
    if isinstance(known, JobFile) and job_parameters:
        known = dataclasses.replace(known, parameters={**known.parameters, **job_parameters})
    return known, file


def _weights_in(folder: Path, file: Path) -> Path:
    """Where a file is: in a run's folder, or by its own path.

    Raises:
        FolderError: in neither.
    """
    for path in (folder / file, file):
        if path.is_file():
            return path
    every = sorted(path.relative_to(folder) for path in folder.rglob("*.safetensors"))
    its = ", ".join(str(path) for path in every if path.parts[0] != "checkpoints") or "none"
    raise FolderError(
        f"weights: there is no file {file}, in {folder} or by this path; the run has {its}"
    )


def job_of(
    run: str | Path,
    parameters: Mapping[str, Any] | None = None,
    settings: Mapping[str, Any] | None = None,
    *,
    job: str | Path | None = None,
    trust: bool = False,
) -> JobFile:
    """The job of a run, as it was run, with some parameters and settings replaced.

    ``job`` is the path of another job file than the one that the folder names; ``trust`` takes that
    one, whatever is in it.

    Raises:
        FolderError: there is no such run, its job was not a file or is another one now, or a secret
            has to be given.
    """
    folder = RunFolder.existing(run)
    config = folder.read_json(folder.config)
    if job is None and config["file"] is None:
        raise FolderError(
            f"{folder.path}: its job was not a file, so it can't be built again: "
            "in Python, give it with lockstep.Run.open(folder, job)"
        )
    if job is None and not trust:
        refuse_another_file(folder.path, config)
    parameters, settings = parameters or {}, settings or {}
    for name, value in config["set"].items():
        if value == HIDDEN and name not in parameters:
            raise FolderError(
                f"{folder.path}: {name} looks like a secret and isn't kept: give it, --set "
                f"{name}=VALUE"
            )
    # A parameter with a setting's name, given now, wins over that setting as it was.
    before, given = (
        {name: value for name, value in config[key].items() if name not in parameters}
        for key in ("settings", "given")
    )
    return JobFile(
        str(job or config["file"]), {**config["set"], **parameters}, {**given, **settings}, before
    )
