"""``export``: a run's model as a file, which is loaded again and compared with the run before it
gets its name.
"""

from __future__ import annotations

import contextlib
import logging
import math
import os
import shutil
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from torch import nn

from lockstep.checkpoint.weights import take_weights
from lockstep.data import Batch, job_loader, resolve, resolve_sets
from lockstep.errors import InputError, LockstepError, NotEqual, error_line
from lockstep.export.exportable import Exportable
from lockstep.export.file_formats import ENDINGS, check_installed, read, write
from lockstep.job import Job
from lockstep.jobfile import JobFile, the_job, with_settings
from lockstep.launch.devices import slots
from lockstep.launch.placement import alone
from lockstep.launch.world import World
from lockstep.model.build import trained_model
from lockstep.prediction.output_file import check_target, folder_beside
from lockstep.run.terminal import Display
from lockstep.settings import convert
from lockstep.strategies.single import Single
from lockstep.strategies.steps.step import Step
from lockstep.tensors.pytree import named_tensors, tensors
from lockstep.training.run import Run, trained_of

_SIZES = [8, 7, 1]
"""Sizes of the batches that are compared. Dimensions that differ between them may have any size."""

_TOLERANCES = {torch.float64: 1e-9, torch.float32: 1e-4}
"""Differences that are accepted, by the format of the weights."""


@dataclass(frozen=True)
class Exported:
    """What was exported.

    Attributes:
        path: the file.
        difference: how far its outputs are from the run's, at most.
    """

    path: Path
    difference: float


def export(
    run: Run | str | Path,
    out: str | Path | None = None,
    *,
    format: str,
    dynamic: str = "batch",
    tolerance: float | None = None,
    best: bool = False,
    weights: str | Path | None = None,
    overwrite: bool = False,
    quiet: bool | Literal["notes"] = False,
    job_parameters: Mapping[str, Any] | None = None,
    job: Job | JobFile | Callable[[], Job] | str | Path | None = None,
    trust_job: bool = False,
    **settings: Any,
) -> Exported:
    """Write a run's model to a file, load that again, and compare its outputs with the run's on
    evaluation samples.

    Args:
        run: a Run or the path of its folder.
        out: the file to write; None is ``exported`` in the run's folder.
        format: ``"safetensors"``, ``"torch-export"``, ``"onnx"`` or ``"tensorrt"``.
        dynamic: ``"batch"``: batches of any size, and any size in dimensions that differ between
            batches of the job's data, as the length of texts; ``"none"``: the one shape of an
            evaluation batch (``eval_batch_size``).
        tolerance: the largest difference, relative to the largest output; None is 1e-4, 1e-9 in
            float64, 0.1 in half precision.
        quiet: as in ``lockstep.train``.
        best, weights, overwrite, job_parameters, job, trust_job, settings: as in
            ``lockstep.predict``.

    Raises:
        InputError: something asked for can't be done; nothing was made.
        NotEqual: the file doesn't compute what the run does; it isn't kept.
    """
    convert(format, Literal["safetensors", "torch-export", "onnx", "tensorrt"], "format")
    convert(dynamic, Literal["batch", "none"], "dynamic")
    check_installed(format)
    its, file = trained_of(
        run,
        best=best,
        weights=weights,
        job_parameters=job_parameters,
        job=job,
        trust=trust_job,
    )
    trained = _to_export(the_job(with_settings(its, settings, export)))
    if trained.loss is None:
        raise InputError(
            "export: the job's step function calls the parts of its model, which has no forward "
            "that could be compared: take model.safetensors of the run, or give the model a "
            "forward, and the job a loss"
        )

    if out is None:
        words = ["exported"]
        if best:
            words.append("best")
        elif weights is not None:
            words.append(file.stem)
        if format == "tensorrt":
            words.append(format)
        folder_of_run = run.folder if isinstance(run, Run) else Path(run)
        out = folder_of_run / ("-".join(words) + ENDINGS[format])
    target = Path(out)
    check_target(target, overwrite, (ENDINGS[format],))

    with (
        contextlib.ExitStack() as stack,
        Display(quiet=quiet) as display,
        alone(slots(1)) as world,
    ):
        folder = folder_beside(target)
        stack.callback(shutil.rmtree, folder, ignore_errors=True)
        world.emit = display.show
        writing = _Export(
            job=trained,
            weights=file,
            path=folder / target.name,
            format=format,
            is_fixed=dynamic == "none",
            world=world,
            display=display,
        )
        apart = writing.compared(tolerance)
        _move(folder, target, display)
        return Exported(target, apart)


def _to_export(job: Job) -> Job:
    """Return a job without what only speeds up its training.

    What was trained in half precision has weights in float32, and is compared in that.
    """
    precision = job.precision
    if precision in ("bf16", "fp16"):
        precision = "fp32"
    return job.replace(
        precision=precision,
        compile=False,
        channels_last=False,
        activation_checkpointing=None,
        init=None,
    )


@dataclass(frozen=True)
class _Export:
    """How a file is written, and compared.

    Attributes:
        job: whose model it is.
        weights: the file of the run.
        path: the file to write, in a hidden folder.
        format: of the file to write.
        is_fixed: whether the file takes the one shape of an evaluation batch.
        world: of this process.
        display: prints lines.
    """

    job: Job
    weights: Path
    path: Path
    format: str
    is_fixed: bool
    world: World
    display: Display

    def compared(self, tolerance: float | None) -> float:
        """Write the file, load it again, and compare its outputs with the run's.

        Args:
            tolerance: as ``export`` is given it.

        Returns:
            The largest difference.

        Raises:
            NotEqual: they differ by more than the tolerance.
        """
        job = self.job
        step = Single().prepare(job, self.world)
        take_weights(step.model, self.weights)
        sets = {}
        if job.eval_data is not None:
            sets = resolve_sets(job.eval_data, self.world)
        if sets:
            kind = "evaluation"
            data = next(iter(sets.values()))
        else:
            kind = "training"
            data = resolve(job.train_data, self.world)

        largest = job.eval_batch_size or job.batch_size
        wanted = [largest] if self.is_fixed else _SIZES
        batches = [self._batch(data, size) for size in wanted]
        sizes = [batch.size for batch in batches]
        expected = _outputs(step, batches, job.seed)
        what = self._exportable(step, batches)

        if tolerance is None:
            dtypes = [p.dtype for p in step.model.parameters() if p.is_floating_point()]
            tolerance = _TOLERANCES.get(dtypes[0], 0.1) if dtypes else 1e-4
        step.model = self._written(what, expected[0], max(largest, *sizes))
        found = _outputs(step, batches, job.seed)
        apart = max(map(_difference, expected, found))
        self.display.line(
            f"compared on {sizes[0]} {kind} samples: they differ by {apart:.1e} of the largest "
            "output"
        )
        if apart > tolerance:
            raise NotEqual(
                f"not equal: outputs of the file differ by {apart:.1e}, more than --tolerance "
                f"{tolerance:g}"
            )
        return apart

    def _batch(self, data: Any, size: int) -> Batch:
        """Return the first batch of a random order.

        Args:
            data: of the run.
            size: samples of the batch; fewer where the data has no more.
        """
        job = self.job.replace(
            batch_size=size,
            accumulate=1,
            shuffle=True,
            order=None,
            batches=None,
            cut_by=None,
            loader_workers=0,
        )
        loader = job_loader(job, self.world, data)
        return next(iter(loader.epoch(0)))

    def _exportable(self, step: Step, batches: list[Batch]) -> Exportable:
        """Return the model as it is to be written.

        Args:
            step: of the run, which places inputs as the job does.
            batches: to compare; sizes that differ between them may vary in the file.

        Raises:
            InputError: none of its dimensions is the size of the batch, and one has to be.
        """
        examples = [step.placed(batch.parts[0]).inputs for batch in batches]
        sizes = [batch.size for batch in batches]
        model = trained_model(self.job, self.weights)
        what = Exportable(model, examples, sizes)
        if self.format != "safetensors":
            if not self.is_fixed and "(batch" not in str(what):
                raise InputError(
                    f"no dimension of {what} is the size of the batch: add --dynamic none"
                )
            self.display.line(f"inputs: {what}")
        return what

    def _written(self, what: Exportable, outputs: Any, most: int) -> nn.Module:
        """Write the file, and load it again.

        What PyTorch and onnxruntime log meanwhile is for their makers.

        Args:
            what: the model to write.
            outputs: of the run for the example, which the file gives likewise.
            most: samples of the largest batch.

        Returns:
            A module that computes by the file.

        Raises:
            InputError: the format can't hold this model.
        """
        names = []
        for name, _ in named_tensors(outputs):
            if name.isdigit():
                name = f"output_{name}"
            names.append(name or "output")

        before = logging.root.manager.disable
        logging.disable(logging.CRITICAL)
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                write(self.format, what, self.path, names, most)
                return read(self.format, what, self.path, outputs)
        except LockstepError:
            raise
        except Exception as error:
            while isinstance(error.__cause__, Exception):
                error = error.__cause__
            raise InputError(f"{self.format}: {error_line(error)}") from error
        finally:
            logging.disable(before)


def _move(folder: Path, target: Path, display: Display) -> None:
    """Give what was made, and is right, its place.

    Args:
        folder: a hidden one, with the file and those that belong to it.
        target: where the file is to be; the other ones come beside it, before it.
        display: prints the last line.
    """
    size = 0
    for part in sorted(folder.iterdir(), key=lambda part: part.name == target.name):
        size += part.stat().st_size
        os.replace(part, target.with_name(part.name))
    display.line(f"exported: {target}, {size / 1e6:,.1f} MB")


def _outputs(step: Step, batches: list[Batch], seed: int) -> list[Any]:
    """Return the outputs of the step's model for each batch."""
    found = []
    with step.evaluating():
        for _, shares in step.evaluator.over(batches, step.evaluator.predictions, seed):
            found.append(shares[0][1])
    return found


def _difference(run: Any, file: Any) -> float:
    """Return the largest difference of outputs, each relative to the largest value in that tensor
    of the run.

    Args:
        run: the outputs of the run for a batch.
        file: those of the file for it, nested alike.
    """
    largest_apart = 0.0
    for one, other in zip(tensors(run), tensors(file), strict=True):
        if one.shape != other.shape:
            return math.inf
        ours = one.to(torch.complex128)
        theirs = other.to(torch.complex128)
        # Infinite ones are the same too, where a mask put them.
        same = (ours == theirs) | (ours.isnan() & theirs.isnan())
        if same.all():
            continue
        apart = (ours - theirs).abs()[~same].nan_to_num(math.inf)
        finite = ours.abs().nan_to_num(0.0, 0.0, 0.0)
        largest = float(finite.max()) or 1.0
        relative = float(apart.max()) / largest
        largest_apart = max(largest_apart, relative)
    return largest_apart
