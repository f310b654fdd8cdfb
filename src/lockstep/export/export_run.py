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
from lockstep.errors import InputError, LockstepError, NotEqual, counted, told
from lockstep.export.exportable import Exportable
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
from lockstep.launch.terminal import Display, number
from lockstep.launch.world import World
from lockstep.model.build import trained_model
from lockstep.prediction.predict import check_target, folder_beside
from lockstep.settings import convert
from lockstep.strategies.single import Single
from lockstep.strategies.steps.step import Step
from lockstep.tensors.byte_size import bytes_of
from lockstep.tensors.pytree import named_tensors, tensors
from lockstep.training.evaluation import evaluate_sets
from lockstep.training.run import Run, trained_of

_SIZES = [
    8,
    7,
    1,
]  # of the batches that are compared; dimensions that differ between them may have any size
# What bfloat16 and int8 cost, the metrics say: this finds files that are wrong.
_TOLERANCES = {"float64": 1e-9, "float32": 1e-4, "bfloat16": 0.1, "int8": 0.1}


@dataclass(frozen=True)
class Exported:
    """A file, how far its outputs are from the run's at most, and metrics of both where it
    computes in less.
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
    quiet: bool = False,
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
        best, weights, overwrite, quiet, job_parameters, job, trust_job, settings: as in
            ``lockstep.predict``.

    Raises:
        InputError: something asked for can't be done; nothing was made.
        NotEqual: the file doesn't compute what the run does; it isn't kept.
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
    most = None if max_shard_size is None else bytes_of(max_shard_size, "max_shard_size")
    check_installed(format)
    its, file = trained_of(
        run, best=best, weights=weights, job_parameters=job_parameters, job=job, trust=trust_job
    )
    the = the_job(with_settings(its, settings))
    # What was trained in half precision has weights in float32, and is compared in that.
    precision = {"bf16": "fp32", "fp16": "fp32"}.get(the.precision or "", the.precision)
    the = the.replace(
        precision=precision,
        compile=False,
        channels_last=False,
        activation_checkpointing=None,
        init=None,
    )
    if (is_of_parts := the.loss is None) and format != "safetensors":
        raise InputError(
            f"{format}: the job's step function calls the parts of its model, which has no "
            "forward that could be "
            "exported: take safetensors, or give the model a forward, and the job a loss"
        )
    less, fixed = quantize or dtype or "", dynamic == "none"
    which = "best" if best else "" if weights is None else file.stem
    name = "-".join(filter(None, ["exported", which, less, format * (format == "tensorrt")]))
    folder_of_run = run.folder if isinstance(run, Run) else Path(run)
    target = folder_of_run / (name + ENDINGS[format]) if out is None else Path(out)
    check_target(target, overwrite, (ENDINGS[format],))
    if most is not None:
        check_target(target.with_name(f"{target.name}.index.json"), overwrite, (".json",))
    metrics: dict[str, dict[str, float]] = {}
    with contextlib.ExitStack() as stack, Display(quiet=quiet) as display, alone(slots(1)) as world:
        stack.callback(shutil.rmtree, folder := folder_beside(target), ignore_errors=True)
        world.tell = display.tell
        if most is not None:
            whole = file
            if not the.save_frozen:  # which lacks what the model builds frozen
                whole = _weights_alone(the, file, folder / "whole.safetensors", None).path
            index = write_parts(
                whole, folder / target.name, most, getattr(torch, dtype or "", None)
            )
            if whole != file:
                whole.unlink()
            display.line(
                f"weights alone, in {counted(len(list(folder.iterdir())) - 1, 'part')}, as they "
                f"are in {file}"
            )
            return _moved(Exported(index, 0.0, {}), target.with_name(index.name), display)
        if is_of_parts:
            display.line(
                "weights alone: a step function calls the parts of the model, so there are no "
                "outputs to compare"
            )
            return _moved(_weights_alone(the, file, folder / target.name, dtype), target, display)
        step = Single().prepare(the, world)
        take_weights(step.model, file)
        sets = {} if the.eval_data is None else resolve_sets(the.eval_data, world)
        data = next(iter(sets.values())) if sets else resolve(the.train_data, world)
        largest = the.eval_batch_size or the.batch_size
        batches = _batches(the, world, data, [largest] if fixed else _SIZES)
        sizes = [batch.size for batch in batches]
        expected = _outputs(step, batches, the.seed)
        examples = [step.placed(batch.parts[0]).inputs for batch in batches]
        what = Exportable(
            trained_model(the, file), examples, sizes, getattr(torch, dtype or "", None)
        )
        if format != "safetensors":
            if not fixed and "(batch" not in str(what):
                raise InputError(
                    f"no dimension of {what} is the size of the batch: add --dynamic none"
                )
            display.line(f"inputs: {what}")
        run_model, path = step.model, folder / target.name
        step.model = _written(
            format, what, path, expected[0], max(largest, *sizes), quantize is not None
        )
        apart = max(map(_difference, expected, _outputs(step, batches, the.seed)))
        kind = "evaluation" if sets else "training"
        display.line(
            f"compared on {sizes[0]} {kind} samples: largest difference {apart:.1e} of the "
            "largest output"
        )
        own = next(
            (str(p.dtype)[6:] for p in run_model.parameters() if p.is_floating_point()), "float32"
        )
        bound = _TOLERANCES.get(less or own, 0.1) if tolerance is None else tolerance
        if apart > bound:
            raise NotEqual(
                f"not equal: outputs of the file differ by {apart:.1e}, more than --tolerance "
                f"{bound:g}"
            )
        if less and sets and not fixed:
            for name, model in ((own, run_model), (less, step.model)):
                step.model = model
                loaders = eval_loaders(the, world, sets)
                metrics[name] = evaluate_sets(step, loaders, the.metrics, world, the.seed)
                for loader in loaders.values():
                    loader.close()
            display.line(f"{'':20}{own:>12}{less:>12}")
            for name, value in metrics[own].items():
                display.line(f"{name:20}{number(value):>12}{number(metrics[less][name]):>12}")
        elif less:
            display.line(
                f"note: no metrics: {'it takes one shape' if sets else 'no evaluation data'}",
                note=True,
            )
        return _moved(Exported(path, apart, metrics), target, display)


def _moved(made: Exported, target: Path, display: Display) -> Exported:
    """Give what was made, and is right, its place."""
    every = sorted(made.path.parent.iterdir(), key=lambda part: part == made.path)
    size = sum(part.stat().st_size for part in every)
    for part in every:
        os.replace(part, target.with_name(part.name))
    display.line(f"exported: {target}, {size / 1e6:,.1f} MB")
    return dataclasses.replace(made, path=target)


def _weights_alone(job: Job, file: Path, path: Path, dtype: str | None) -> Exported:
    """Write the weights of a model without a forward."""
    model = trained_model(job, file).to(getattr(torch, dtype or "", None))
    save_weights(path, model.state_dict())
    take_weights(model, path)  # which compares its sum
    return Exported(path, 0.0, {})


def _batches(job: Job, world: World, data: Any, sizes: list[int]) -> list[Batch]:
    """Batches of up to so many samples, the first of a random order."""
    jobs = [
        job.replace(batch_size=n, accumulate=1, shuffle=True, order=None, loader_workers=0)
        for n in sizes
    ]
    return [next(iter(job_loader(one, world, data).epoch(0))) for one in jobs]


def _outputs(step: Step, batches: list[Batch], seed: int) -> list[Any]:
    with step.evaluating():
        return [
            found[0][1]
            for _, found in step.evaluator.over(batches, step.evaluator.predictions, seed)
        ]


def _written(
    format: str, what: Exportable, path: Path, outputs: Any, most: int, quantize: bool
) -> nn.Module:
    """Write the file, and load it again; what PyTorch and onnxruntime log meanwhile is for their
    makers.
    """
    names = [
        f"output_{name}" if name.isdigit() else name or "output"
        for name, _ in named_tensors(outputs)
    ]
    before = logging.root.manager.disable
    logging.disable(logging.CRITICAL)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            write(format, what, path, names, most)
            if quantize:
                quantize_linear_layers(path)
            return read(format, what, path, outputs)
    except LockstepError:
        raise
    except Exception as error:
        while isinstance(error.__cause__, Exception):
            error = error.__cause__
        raise InputError(f"{format}: {told(error)}") from error
    finally:
        logging.disable(before)


def _difference(run: Any, file: Any) -> float:
    """The largest difference of outputs, each relative to the largest value in that tensor of
    the run.
    """
    apart = 0.0
    for ours, theirs in zip(tensors(run), tensors(file), strict=True):
        if ours.shape != theirs.shape:
            return math.inf
        ours, theirs = ours.to(torch.complex128), theirs.to(torch.complex128)
        same = (ours == theirs) | (
            ours.isnan() & theirs.isnan()
        )  # infinite ones, where a mask put them
        if not same.all():
            largest = float(ours.abs().nan_to_num(0.0, 0.0, 0.0).max()) or 1.0
            apart = max(
                apart, float((ours - theirs).abs()[~same].nan_to_num(math.inf).max()) / largest
            )
    return apart
