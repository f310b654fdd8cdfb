"""A run: a training that has ended or was stopped, its numbers and its model."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import nn

from lockstep.checkpoint.folder import CheckpointFolder
from lockstep.checkpoint.index import Index
from lockstep.errors import FolderError, InputError, counted
from lockstep.job import Job
from lockstep.jobfile import HIDDEN, AnyJob, JobFile, as_job, the_job
from lockstep.model.build import trained_model
from lockstep.run.run_folder import RunFolder


@dataclass(frozen=True)
class Run:
    """A training that has ended or was stopped: its folder, and what it reached.

    Attributes:
        folder: where its files are.
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
        """Return the run that is kept in a folder.

        Args:
            folder: of the run.
            job: its job, where that was not a file, so that it can't be found again; or the path of
                its job file, where that isn't the one that the folder names.
            trust_job: take the job file that the folder names, though it isn't as it was when the
                run was trained.

        Raises:
            FolderError: no run is kept there.
        """
        run = RunFolder.existing(folder)
        summary = run.read_json(run.summary) if run.summary.is_file() else {}
        if isinstance(job, str | Path) or (job is None and trust_job):
            job = job_of(folder, job=job, trust=trust_job)
        return cls(run.path, summary, job)

    def __repr__(self) -> str:
        return f"Run({str(self.folder)!r}, metrics={self.metrics})"

    @property
    def metrics(self) -> dict[str, float]:
        """Return the last evaluation's metrics, and the loss as ``"loss"``.

        Empty where the training was stopped.
        """
        if not self.summary:
            return {}
        return {"loss": self.summary["loss"], **self.summary["metrics"]}

    @property
    def history(self) -> list[dict[str, Any]]:
        """Return the lines of ``metrics.jsonl``: a record for each epoch, and for each log and
        evaluation within one.
        """
        return RunFolder(self.folder).read_metrics()

    def model(self, weights: str | Path | None = None, *, best: bool = False) -> nn.Module:
        """Return the trained model on the CPU, in evaluation mode: the final weights, or those of
        the best evaluation.

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


def checkpoints_of(
    run: str | Path, *, verify: bool = False
) -> tuple[list[str], list[dict[str, Any]]]:
    """Return a line for each checkpoint of a run, newest first, and the same as plain values.

    Args:
        run: its folder.
        verify: read all of each, and compare the sums.

    Raises:
        FolderError: there is no such run.
    """
    folder = RunFolder.existing(run)
    checkpoints = CheckpointFolder(folder.checkpoints)
    lines = []
    found = []

    for step in checkpoints.steps():
        path = checkpoints.of_step(step)
        try:
            index = Index.read(path)
            if verify:
                index.check(path)
        except FolderError as error:
            found.append({"step": step, "damaged": str(error)})
            lines.append(f"step {step:>8}  damaged: {error}")
            continue
        epoch = index.about["epoch"]
        batch = index.about["position"]
        size = sum(size for size, _ in index.files.values())
        values = {"step": step, "epoch": epoch, "batch": batch, "bytes": size, "damaged": None}
        found.append(values)
        epochs = counted(epoch, "epoch")
        batches = counted(batch, "batch", "es")
        parts = counted(len(index.files), "part")
        line = f"step {step:>8}  after {epochs} and {batches}, {parts}, {size / 1e6:,.1f} MB"
        lines.append(f"{line}, whole" if verify else line)

    lines += [f"set aside: {path.name}" for path in sorted(folder.checkpoints.glob("*.damaged*"))]
    return lines or [f"{folder.path}: it has no checkpoint"], found


def trained_of(
    run: Run | str | Path,
    *,
    best: bool = False,
    weights: str | Path | None = None,
    job_parameters: Mapping[str, Any] | None = None,
    job: AnyJob | None = None,
    trust: bool = False,
) -> tuple[Job | JobFile, Path]:
    """Return the job of a run, and the file of its weights.

    Args:
        run: a Run or the path of its folder.
        best: the weights of the best evaluation.
        weights: another safetensors file: in the run's folder, or else by its path.
        job_parameters: keyword arguments for the function of the job file, over those of the run.
        job: a job, or as for ``job_of``.
        trust: as for ``job_of``.

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
    if job is None and isinstance(run, Run):
        job = run.job
    if job is None or isinstance(job, str | Path):
        return job_of(folder.path, job_parameters, job=job, trust=trust), file
    return as_job(job, job_parameters), file


def _weights_in(folder: Path, file: Path) -> Path:
    """Find a file: in a run's folder, or by its own path.

    Raises:
        FolderError: in neither place.
    """
    for path in (folder / file, file):
        if path.is_file():
            return path
    raise FolderError(f"weights: there is no file {file}, in {folder} or by this path")


def job_of(
    run: str | Path,
    parameters: Mapping[str, Any] | None = None,
    settings: Mapping[str, Any] | None = None,
    *,
    job: str | Path | None = None,
    trust: bool = False,
) -> JobFile:
    """Return the job of a run, as it was run, with some parameters and settings replaced.

    Args:
        run: its folder.
        parameters: that replace those of the run.
        settings: that replace those of the run.
        job: the path of another job file than the one that the folder names.
        trust: take the job file that the folder names, though it has changed.

    Raises:
        FolderError: there is no such run, its job was not a file or is another one now, or a secret
            has to be given.
    """
    folder = RunFolder.existing(run)
    config = folder.read_json(folder.config)
    if job is None:
        if config["file"] is None:
            raise FolderError(
                f"{folder.path}: its job was not a file, so it can't be built again: "
                "in Python, give it with lockstep.Run.open(folder, job)"
            )
        if not trust:
            _refuse_another_file(folder.path, config)

    parameters = parameters or {}
    for name, value in config["set"].items():
        if value == HIDDEN and name not in parameters:
            raise FolderError(
                f"{folder.path}: {name} looks like a secret and isn't kept: give it, --set "
                f"{name}=VALUE"
            )

    before = config["settings"]
    given = config["given"]
    for name in parameters:  # one with a setting's name wins over that setting of the run
        before.pop(name, None)
        given.pop(name, None)
    given |= settings or {}
    file = str(job or config["file"])
    return JobFile(file, {**config["set"], **parameters}, given, before)


def _refuse_another_file(run: Path, config: Mapping[str, Any]) -> None:
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

    now = hash_of(file)
    before = str(config["sources"].get(file.name, "unknown"))
    if now != before:
        raise FolderError(
            f"{its} isn't the one that was trained (SHA-256 {now[:8]}, was {before[:8]}): {ways}"
        )


def hash_of(file: str | Path) -> str:
    """Return the SHA-256 of a file."""
    return hashlib.sha256(Path(file).read_bytes()).hexdigest()
