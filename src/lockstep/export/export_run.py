"""``export``: a run's model as a file, which is loaded again and compared with the run before it
gets its name.
"""

from __future__ import annotations

import contextlib
import dataclasses
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

from lockstep.checkpoint.weights import save_weights, take_weights
from lockstep.data import Batch, eval_loaders, job_loader, resolve, resolve_sets
from lockstep.errors import InputError, LockstepError, NotEqual, counted, error_line
from lockstep.export.exportable import Exportable, dtype_of
from lockstep.export.file_formats import (
    ENDINGS,
    check_installed,
    quantize_linear_layers,
    read,
    write,
)
from lockstep.export.weight_parts import write_parts
from lockstep.job import Job
from lockstep.jobfile import JobFile, the_job, with_settings
from lockstep.launch.devices import slots
from lockstep.launch.placement import alone
from lockstep.launch.world import World
from lockstep.model.build import trained_model
from lockstep.prediction.output_file import check_target, folder_beside
from lockstep.run.terminal import Display, number
from lockstep.settings import convert
from lockstep.strategies.single import Single
from lockstep.strategies.steps.step import Step
from lockstep.tensors.byte_size import bytes_of
from lockstep.tensors.pytree import named_tensors, tensors
from lockstep.training.evaluation import evaluate_sets
from lockstep.training.run import Run, trained_of

_SIZES = [8, 7, 1]
"""Sizes of the batches that are compared. Dimensions that differ between them may have any size."""

_TOLERANCES = {"float64": 1e-9, "float32": 1e-4, "bfloat16": 0.1, "int8": 0.1}
"""Differences that are accepted. What bfloat16 and int8 cost, metrics show; this finds files that
are wrong.
"""


@dataclass(frozen=True)
class Exported:
    """What was exported.

    Attributes:
        path: the file.
        difference: how far its outputs are from the run's, at most.
        metrics: of both, where the file computes in another format.
    """

    path: Path
    difference: float
    metrics: dict[str, dict[str, float]]


def export(
    run: Run | str | Path,
    out: str | Path | None = None,
    *,
    format: str,
    dynamic: str = "batch",
    dtype: str | None = None,
    quantize: str | None = None,
    tolerance: float | None = None,
    max_shard_size: str | None = None,
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
        dtype: ``"bfloat16"`` or ``"float32"``, what the file computes in; what it takes and gives
            is the run's.
        quantize: ``"int8"``: the weights of linear layers, in onnx.
        tolerance: the largest difference, relative to the largest output; None is 1e-4, 0.1 for
            bfloat16 and int8.
        max_shard_size: of ``safetensors``: several files of at most this size (``"5GB"``), with an
            index named after ``out``, as Hugging Face's models have them. They are copied from the
            run's file tensor by tensor, for which the model isn't built, and compared with it.
        quiet: as in ``lockstep.train``.
        best, weights, overwrite, job_parameters, job, trust_job, settings: as in
            ``lockstep.predict``.

    Raises:
        InputError: something asked for can't be done; nothing was made.
        NotEqual: the file doesn't compute what the run does; it isn't kept.
    """
    _refuse_combinations(format, dynamic, dtype, quantize, max_shard_size)
    most = None if max_shard_size is None else bytes_of(max_shard_size, "max_shard_size")
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
    if trained.loss is None and format != "safetensors":
        raise InputError(
            f"{format}: the job's step function calls the parts of its model, which has no "
            "forward that could be exported: take safetensors, or give the model a forward, and "
            "the job a loss"
        )

    which = ""
    if best:
        which = "best"
    elif weights is not None:
        which = file.stem
    if out is None:
        folder_of_run = run.folder if isinstance(run, Run) else Path(run)
        target = folder_of_run / _usual_name(format, which, quantize or dtype or "")
    else:
        target = Path(out)
    check_target(target, overwrite, (ENDINGS[format],))
    if most is not None:
        check_target(target.with_name(f"{target.name}.index.json"), overwrite, (".json",))

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
            dtype=dtype,
            quantize=quantize,
            tolerance=tolerance,
            world=world,
            display=display,
        )
        if most is not None:
            made = writing.divided(most)
        elif trained.loss is None:
            made = writing.weights_alone()
        else:
            made = writing.compared()
        return _moved(made, target.with_name(made.path.name), display)


def _usual_name(format: str, which: str, less: str) -> str:
    """Return the name of a file that nobody named.

    Args:
        format: of the file.
        which: of the run's weights; "" for the last ones.
        less: what the file computes in; "" for the run's own format.
    """
    words = ["exported"]
    if which:
        words.append(which)
    if less:
        words.append(less)
    if format == "tensorrt":
        words.append(format)
    return "-".join(words) + ENDINGS[format]


def _refuse_combinations(
    format: str,
    dynamic: str,
    dtype: str | None,
    quantize: str | None,
    max_shard_size: str | None,
) -> None:
    """Refuse settings of `export` that don't exist, or don't go together.

    Args:
        format, dynamic, dtype, quantize, max_shard_size: as `export` is given them.

    Raises:
        InputError: one of them can't be had; it names what to take.
    """
    convert(format, Literal["safetensors", "torch-export", "onnx", "tensorrt"], "format")
    convert(dynamic, Literal["batch", "none"], "dynamic")
    convert(dtype, Literal["bfloat16", "float32"] | None, "dtype")
    convert(quantize, Literal["int8"] | None, "quantize")
    if quantize is not None and (format != "onnx" or dtype is not None):
        raise InputError(
            "quantize: int8 is for onnx, without dtype (PyTorch's own for CPUs is to be removed)"
        )
    if format == "onnx" and dtype == "bfloat16":
        raise InputError(
            "dtype: onnxruntime has no bfloat16 on CPUs, so nothing could be compared: take "
            "torch-export"
        )
    if max_shard_size is not None and format != "safetensors":
        raise InputError(f"max_shard_size: {format} is one file: take safetensors, or leave it out")


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
        dtype: what the file computes in; None is the run's.
        quantize: ``"int8"``, or None.
        tolerance: as ``export`` is given it.
        world: of this process.
        display: prints lines.
    """

    job: Job
    weights: Path
    path: Path
    format: str
    is_fixed: bool
    dtype: str | None
    quantize: str | None
    tolerance: float | None
    world: World
    display: Display

    @property
    def _torch_dtype(self) -> torch.dtype | None:
        """What the file computes in; None is the run's."""
        dtype = None
        if self.dtype is not None:
            dtype = getattr(torch, self.dtype)
        return dtype

    def divided(self, most: int) -> Exported:
        """Write the weights alone, in several files; what is returned names their index.

        Args:
            most: bytes of a file, at most.
        """
        whole = self.weights
        if not self.job.save_frozen:  # the file of the run lacks what the model builds frozen
            whole = self.path.with_name("whole.safetensors")
            self._write_weights(whole, None)
        index = write_parts(whole, self.path, most, self._torch_dtype)
        if whole != self.weights:
            whole.unlink()

        files = list(self.path.parent.iterdir())
        count = len(files) - 1  # one is the index
        parts = counted(count, "part")
        self.display.line(f"weights alone, in {parts}, as they are in {self.weights}")
        return Exported(index, 0.0, {})

    def weights_alone(self) -> Exported:
        """Write the weights of a model without a forward."""
        self.display.line(
            "weights alone: a step function calls the parts of the model, so there are no "
            "outputs to compare"
        )
        self._write_weights(self.path, self._torch_dtype)
        return Exported(self.path, 0.0, {})

    def _write_weights(self, path: Path, dtype: torch.dtype | None) -> None:
        """Build the model, and write its weights to a file, which is read again.

        Args:
            path: the file.
            dtype: of its floating point numbers; None is the run's.
        """
        model = trained_model(self.job, self.weights)
        model.to(dtype)
        save_weights(path, model.state_dict())
        take_weights(model, path)  # which compares its sum

    def compared(self) -> Exported:
        """Write the file, load it again, and compare its outputs with the run's.

        Raises:
            NotEqual: they differ by more than the tolerance.
        """
        job = self.job
        step = Single().prepare(job, self.world)
        take_weights(step.model, self.weights)
        sets = {}
        kind = "training"
        if job.eval_data is not None:
            sets = resolve_sets(job.eval_data, self.world)
        if sets:
            kind = "evaluation"
            data = next(iter(sets.values()))
        else:
            data = resolve(job.train_data, self.world)

        largest = job.eval_batch_size or job.batch_size
        wanted = [largest] if self.is_fixed else _SIZES
        batches = [self._batch(data, size) for size in wanted]
        sizes = [batch.size for batch in batches]
        expected = _outputs(step, batches, job.seed)
        what = self._exportable(step, batches)

        of_run = step.model
        of_file = self._written(what, expected[0], max(largest, *sizes))
        step.model = of_file
        found = _outputs(step, batches, job.seed)
        differences = map(_difference, expected, found)
        apart = max(differences)
        self.display.line(
            f"compared on {sizes[0]} {kind} samples: they differ by {apart:.1e} of the largest "
            "output"
        )
        own = str(dtype_of(of_run)).removeprefix("torch.")
        less = self.quantize or self.dtype
        self._refuse_other_outputs(apart, less or own)
        if not less:
            return Exported(self.path, apart, {})

        metrics: dict[str, dict[str, float]] = {}
        if not sets:
            self.display.line("note: no metrics: no evaluation data", note=True)
        elif self.is_fixed:
            self.display.line("note: no metrics: it takes one shape", note=True)
        else:
            metrics[own] = self._evaluated(step, of_run, sets)
            metrics[less] = self._evaluated(step, of_file, sets)
            self._print_metrics(own, less, metrics)
        return Exported(self.path, apart, metrics)

    def _refuse_other_outputs(self, apart: float, dtype: str) -> None:
        """Refuse a file whose outputs differ.

        Args:
            apart: by how much.
            dtype: what the file computes in.

        Raises:
            NotEqual: the difference is larger than the tolerance.
        """
        bound = self.tolerance
        if bound is None:
            bound = _TOLERANCES.get(dtype, 0.1)
        if apart > bound:
            raise NotEqual(
                f"not equal: outputs of the file differ by {apart:.1e}, more than --tolerance "
                f"{bound:g}"
            )

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
        what = Exportable(model, examples, sizes, self._torch_dtype)
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
                if self.quantize is not None:
                    quantize_linear_layers(self.path)
                return read(self.format, what, self.path, outputs)
        except LockstepError:
            raise
        except Exception as error:
            while isinstance(error.__cause__, Exception):
                error = error.__cause__
            raise InputError(f"{self.format}: {error_line(error)}") from error
        finally:
            logging.disable(before)

    def _evaluated(self, step: Step, model: nn.Module, sets: dict[str, Any]) -> dict[str, float]:
        """Evaluate a model, and return its losses and metrics by name.

        Args:
            step: evaluates; it takes the model.
            model: of the run, or of the file.
            sets: the evaluation data, by name.
        """
        job = self.job
        step.model = model
        loaders = eval_loaders(job, self.world, sets)
        found = evaluate_sets(step, loaders, job)
        for loader in loaders.values():
            loader.close()
        return found

    def _print_metrics(self, own: str, less: str, metrics: dict[str, dict[str, float]]) -> None:
        """Print a table of metrics.

        Args:
            own: the format of the run.
            less: the format of the file.
            metrics: of both, by format.
        """
        self.display.line(f"{'':20}{own:>12}{less:>12}")
        for name, value in metrics[own].items():
            other = number(metrics[less][name])
            self.display.line(f"{name:20}{number(value):>12}{other:>12}")


def _moved(made: Exported, target: Path, display: Display) -> Exported:
    """Give what was made, and is right, its place.

    Args:
        made: in a hidden folder, alone with the files that belong to it.
        target: where it is to be; the other files come beside it, before it.
        display: prints the last line.
    """
    every = sorted(made.path.parent.iterdir(), key=lambda part: part == made.path)
    size = 0
    for part in every:
        size += part.stat().st_size
        os.replace(part, target.with_name(part.name))
    display.line(f"exported: {target}, {size / 1e6:,.1f} MB")
    return dataclasses.replace(made, path=target)


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
