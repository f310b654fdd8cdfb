"""``predict``: a run's model over a dataset, a row for each sample, in order, on any number of
devices.

Each rank writes the rows of its own shares where they belong (of lines of JSON, rank 0 those of all
ranks, batch by batch); no process holds them all. What is written lies in a hidden folder beside its
place and is moved there at the end, so nothing half-written is ever found under its name::

    batches of 6, three ranks     rank 0    rank 1    rank 2
    batch 0                       0 1       2 3       4 5
    batch 1                       6 7       8 9       10 11
    out.npy                       0 1 2 3 4 5 6 7 8 9 10 11

What the arrays are called and how large they are is known after the first batch.
"""

from __future__ import annotations

import functools
import os
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy

from lockstep.checkpoint.checksummed_file import write_tensors
from lockstep.data import Batch, job_loader, resolve, resolve_sets
from lockstep.data.source import inputs_of, one_of, source_of
from lockstep.errors import InputError, LockstepError, OutOfMemory, error_line
from lockstep.job import Job
from lockstep.jobfile import JobFile, the_job, with_settings
from lockstep.launch import devices as _devices
from lockstep.launch import started_as_rank, started_ranks
from lockstep.launch.devices import Devices
from lockstep.launch.memory import is_out_of_memory
from lockstep.launch.placement import on_devices
from lockstep.launch.world import World
from lockstep.model.build import trained_model
from lockstep.prediction.jsonl_file import lines_of
from lockstep.prediction.output_file import check_target, folder_beside
from lockstep.prediction.output_structure import (
    Items,
    Leaf,
    Left,
    Rows,
    filled,
    form_of,
    leaves,
    left_out,
    taken,
)
from lockstep.recipe import recipe_of
from lockstep.run.events import Line
from lockstep.run.terminal import Display
from lockstep.strategies import Strategy, choose, devices_for
from lockstep.strategies.steps.step import Step
from lockstep.tensors.array_file import (
    Array,
    arrays_in_files,
    create,
    mapped,
    write_rows,
    writing,
)
from lockstep.tensors.pytree import described
from lockstep.training.evaluation import say_what_collates
from lockstep.training.run import Run, trained_of

ENDINGS = (".npy", ".npz", ".safetensors", ".jsonl")


def predict(
    run: Run | str | Path,
    data: Any = "eval",
    out: str | Path | None = None,
    *,
    strategy: str | Strategy | None = None,
    devices: Devices = "auto",
    best: bool = False,
    weights: str | Path | None = None,
    overwrite: bool = False,
    quiet: bool = False,
    job_parameters: Mapping[str, Any] | None = None,
    job: Job | JobFile | Callable[[], Job] | str | Path | None = None,
    trust_job: bool = False,
    **settings: Any,
) -> Any:
    """Compute the outputs of a run's model for each sample of a dataset, in the dataset's order.

    The model is in evaluation mode, without gradients; the loss is never called. Samples come as in
    evaluation: one that is a tuple or list of two is ``(inputs, targets)``, anything else is
    inputs. A collate of the job is given the samples as the data have them, and gives a pair or
    inputs alone.

    Args:
        run: a Run or the path of its folder.
        data: a dataset, or a callable that gives one; ``"eval"`` or ``"train"``: those of the job;
            ``"file.py:name"``: either by its name in a file.
        out: a file to write, which ends in .npy (one array), .npz, .safetensors (arrays by name) or
            .jsonl (a line for each sample); without an ending, .npy or .npz is added. NumPy has no
            bfloat16: it becomes float32 there.
        strategy: as in ``train``; the values are the same under any.
        devices: as in ``train``.
        best: take the weights of the best evaluation.
        weights: take another safetensors file: in the run's folder (``"ema.safetensors"``), or else
            by its path.
        overwrite: replace ``out`` where it is there already.
        quiet: print nothing.
        job_parameters: keyword arguments for the function of the run's job file, over those it was
            run with.
        job: instead of the job file that the run's folder names.
        trust_job: take the job file that the run's folder names, though it isn't the one that was
            trained.
        settings: fields of the job to replace; ``batch_size`` is that of predicting.

    Returns:
        The path of the file; without ``out`` the outputs themselves, on the CPU, nested as the
        model gives them (None for what has no row for each sample).

    Raises:
        InputError: something asked for can't be done; nothing was made.
        RunError: it failed on the way; nothing is left behind.
    """
    its, file = trained_of(
        run,
        best=best,
        weights=weights,
        job_parameters=job_parameters,
        job=job,
        trust=trust_job,
    )
    if "batch_size" in settings:
        settings.setdefault("eval_batch_size", settings["batch_size"])
    its = with_settings(its, settings, predict)

    chosen = _devices.parse(devices_for(strategy, devices))
    spread = started_as_rank() and started_ranks.place().size > 1
    if out is None and spread:
        raise InputError("predict: under torchrun the outputs go to a file: name one with out")
    target = None
    if out is not None:
        target = Path(out).absolute()
        check_target(target, overwrite, ("", *ENDINGS))

    # Under torchrun rank 0 makes it, since all processes must know the one name.
    folder = None if spread else folder_beside(target)
    plan = _Plan(
        job=its,
        strategy=choose(strategy, chosen),
        weights=file.absolute(),
        data=data,
        target=target,
        folder=folder,
    )

    try:
        with Display(quiet=quiet) as display:
            made = on_devices(predict_on, plan, chosen, None, display)
            if target is None:
                assert folder is not None
                form, arrays = made
                return filled(form, mapped(folder, arrays))
            path = Path(made)
            if not spread or started_ranks.place().rank == 0:
                ending = "" if target.suffix else path.suffix
                display.line(f"predictions: {out}{ending}")
            return path
    finally:
        if folder is not None:
            shutil.rmtree(folder, ignore_errors=True)


@dataclass(frozen=True)
class _Plan:
    """What each rank needs to know of a prediction.

    Attributes:
        job: whose model and data they are.
        strategy: under which the model is laid out.
        weights: the file of the run.
        data: as ``predict`` is given it.
        target: the file to make; None keeps the outputs in memory.
        folder: where the ranks write; None where rank 0 makes it.
    """

    job: Job | JobFile
    strategy: Strategy
    weights: Path
    data: Any
    target: Path | None
    folder: Path | None


# ---- on each rank --------------------------------------------------------------------------------


def predict_on(world: World, plan: _Plan) -> Any:
    """Predict on this rank.

    Returns:
        On rank 0 the file's path, or form and arrays of what is in the plan's folder.
    """
    folder = plan.folder
    if folder is None:
        made = str(folder_beside(plan.target)) if world.is_first else ""
        folder = Path(world.broadcast_object(made))

    try:
        found = _Prediction(world, plan, folder).run()
        return found if world.is_first else None
    finally:
        if plan.folder is None:
            shutil.rmtree(folder, ignore_errors=True)


class _Prediction:
    """The state of one prediction on one rank.

    Attributes:
        form: of the outputs, after the first batch; None on a rank without a share of it.
        ending: of the file; "" where the outputs stay in memory, or as long as none is chosen.
        arrays: by name; None for lines of JSON.
    """

    def __init__(self, world: World, plan: _Plan, folder: Path) -> None:
        self.world = world
        self.plan = plan
        self.folder = folder
        job = the_job(plan.job)
        self.name, source = source_of(job, plan.data)
        if isinstance(plan.data, str) and self.name.startswith("eval_data"):
            found = one_of(resolve_sets(source, world), plan.data)
        else:
            found = resolve(source, world, self.name)

        self.dataset, collate = inputs_of(found, job.collate, self.name)
        self.rows = len(self.dataset)
        self.job = job.replace(collate=collate)
        # The model has its weights from the start, so that replicas are copies of it.
        recipe = recipe_of(job).replace(
            model=functools.partial(trained_model, job, plan.weights),
            optimizer=None,
            step=None,
            init=None,
            sync_batchnorm=False,
        )
        self.step: Step = plan.strategy.prepare(recipe, world)
        say_what_collates(job, self.step)
        self.batch_size = job.eval_batch_size or job.batch_size
        self.loader = job_loader(self.job, world, self.dataset, evaluation=True, name=self.name)
        self.form: Any = None
        self.ending = "" if plan.target is None else plan.target.suffix
        self.arrays: dict[str, Array] | None = None

    def run(self) -> Any:
        """Write all outputs; gives the file's path, or form and arrays of what is in memory."""
        try:
            with self.step.evaluating():
                self._write_all()
        finally:
            self.loader.close()

        self.world.barrier()  # all have written
        if self.plan.target is None:
            assert self.arrays is not None
            return self.form, list(self.arrays.values())
        # Under torchrun the others would begin to remove the folder.
        moved = str(self._moved()) if self.world.is_first else ""
        return self.world.broadcast_object(moved)

    def _write_all(self) -> None:
        """Write the outputs of all batches."""
        batches = self.loader.epoch(0)
        # Under the seed, for models that draw random numbers in evaluation too.
        found = self.step.evaluator.over(batches, self._outputs, self.job.seed)
        for batch, shares in found:
            if batch.index == 0:
                self._begin(shares)
            self._write(batch, shares)

    def _write(self, batch: Batch, shares: list[tuple[int, Any]]) -> None:
        """Write the outputs of this process's shares of a batch.

        Args:
            batch: of the loader.
            shares: samples and outputs of each share that isn't empty.

        Raises:
            InputError: they are of another form than those of the first batch.
            SaveError: they can't be written.
        """
        samples = batch.samples if batch.shares is not None else batch.parts[0].samples
        assert samples is not None
        first = int(samples[0]) if shares else 0

        lines = ""
        for size, outputs in shares:
            if self.arrays is None:
                lines += lines_of(self.form, outputs, size)
            else:
                self._write_arrays(self.arrays, first, size, outputs)
            first += size
        if self.arrays is not None:
            return
        every = self.world.gather_objects(lines)
        if self.world.is_first:
            whole = self.folder / "whole"
            with writing(whole), whole.open("a", encoding="utf-8") as file:
                file.writelines(every)

    def _write_arrays(self, arrays: dict[str, Array], first: int, size: int, outputs: Any) -> None:
        """Write the rows of some outputs to their arrays.

        Args:
            arrays: by name.
            first: the row to begin with.
            size: how many rows.
            outputs: of the model.

        Raises:
            InputError: they have another dtype than those of the first batch.
        """
        for leaf, rows in taken(self.form, outputs, size):
            if isinstance(leaf, Rows) and rows.dtype != leaf.dtype:
                raise InputError(
                    f'outputs: "{leaf.name}" was {leaf.dtype} in the first batch and is '
                    f"{rows.dtype} in another: return one dtype"
                )
            write_rows(self.folder, arrays[leaf.name], first, rows)

    def _outputs(self, batch: Batch) -> list[tuple[int, Any]]:
        """Return the outputs of this process's shares that aren't empty, with the samples of each.

        Raises:
            InputError: in the first batch, what the model raises: it can't take these data.
        """
        self.step.world.step = batch.index + 1  # where it is, for what fails

        try:
            return self.step.evaluator.predictions(batch)
        except InputError as error:
            raise InputError(f"{self.name}: {error}") from error
        except LockstepError:
            raise
        except Exception as error:
            if is_out_of_memory(error):
                raise OutOfMemory(
                    f"out of memory on {self.world.device} in batch {batch.index + 1} of "
                    f"{batch.size} samples: use a smaller batch_size"
                ) from error
            if batch.index:
                raise
            inputs = described(_some_inputs(batch))
            raise InputError(
                f"{self.name}: the model can't take {inputs}: {error_line(error)}"
            ) from error

    def _begin(self, shares: list[tuple[int, Any]]) -> None:
        """After the first batch, agree on what will be written, and make room for it.

        Args:
            shares: samples and outputs of this process's shares that aren't empty.

        Raises:
            InputError: there is nothing to write.
        """
        forms = [form_of(outputs, size) for size, outputs in shares]
        # Leaves are sent, since the classes of a form may be of the person's own script.
        mine = [list(leaves(form)) for form in forms]
        every: list[list[Leaf]] = []
        for theirs in self.world.gather_objects(mine):
            every += theirs
        no_rows: set[str] = set()
        for found in every:
            no_rows |= {leaf.name for leaf in found if isinstance(leaf, Left)}
        first = [left_out(leaf, no_rows) for leaf in every[0]]
        if all(isinstance(leaf, Left) for leaf in first):
            size, outputs = shares[0] if shares else (0, None)
            raise InputError(
                f"outputs: the model returned {described(outputs)} for {size} samples, without a "
                "row for each sample: nothing can be written"
            )

        if forms:
            self.form = left_out(forms[0], no_rows)
        left = [leaf.name for leaf in first if isinstance(leaf, Left) and leaf.noted]
        if left and self.world.is_first:
            names = ", ".join(left)
            self.world.emit(Line.note(f"left out, since they have no row for each sample: {names}"))
        if self.ending != ".jsonl":
            self.arrays = self._made_arrays(first)

    def _made_arrays(self, found: list[Leaf]) -> dict[str, Array]:
        """Make the files of arrays.

        Args:
            found: the leaves of the first batch's outputs.

        Raises:
            InputError: one can't be an array.
        """
        arrays: list[Array] = []
        for leaf in found:
            if isinstance(leaf, Items):
                raise InputError(
                    f'outputs: "{leaf.name}" is a list with an item for each sample, which no '
                    "array can hold: write them to a .jsonl file"
                )
            if isinstance(leaf, Rows):
                arrays.append(Array(leaf.name, leaf.dtype, (self.rows, *leaf.shape)))

        if self.plan.target is not None and not self.ending:
            self.ending = ".npy" if len(arrays) == 1 else ".npz"
        made = arrays_in_files(self.ending, arrays)
        if self.world.is_first:
            create(self.folder, made)
        self.world.barrier()
        return {array.name: array for array in made}

    def _moved(self) -> Path:
        """Put together what the ranks have written, and move it to its place.

        Raises:
            SaveError: that can't be written.
        """
        target = self.plan.target
        assert target is not None
        whole = self.folder / "whole"
        if self.arrays is not None:
            target = target.with_suffix(self.ending)
            whole = self._put_together(list(self.arrays.values()))

        with writing(whole):
            with whole.open("rb+") as file:
                os.fsync(file.fileno())
            os.replace(whole, target)

        return target

    def _put_together(self, arrays: list[Array]) -> Path:
        """Make one file of those of the arrays."""
        whole = self.folder / "whole"
        found = mapped(self.folder, arrays)
        with writing(whole, sum(array.size for array in arrays)):
            if self.ending == ".safetensors":
                write_tensors(whole, found, {"format": "pt"})
                return whole
            with whole.open("wb") as file:
                if self.ending == ".npy":
                    numpy.save(file, found[arrays[0].name].numpy())
                else:
                    named: dict[str, Any] = {name: array.numpy() for name, array in found.items()}
                    numpy.savez(file, **named)
        return whole


def _some_inputs(batch: Batch) -> Any:
    """Return the inputs of the first part of a batch that has samples here."""
    parts = batch.parts
    if batch.shares is not None:
        parts = [share[0] for share in batch.shares]
    return next(part.inputs for part in parts if part.size)
