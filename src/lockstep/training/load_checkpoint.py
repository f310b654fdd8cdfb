"""Takes up the newest checkpoint of a run that is resumed."""

from __future__ import annotations

from lockstep.checkpoint.weights import load_weights
from lockstep.errors import FolderError, JobError, counted
from lockstep.run.events import Line
from lockstep.run.run_folder import RunFolder
from lockstep.training.checkpoint_content import Saves
from lockstep.training.progress import TrainingProgress
from lockstep.training.setup import Setup
from lockstep.training.start_notes import changes


def take_up(setup: Setup, saves: Saves, progress: TrainingProgress) -> None:
    """Give model, optimizer, data and progress the states of the newest checkpoint.

    Raises:
        JobError: the run has done all that is asked for.
    """
    world = setup.world
    step = setup.step
    state = saves.load()
    progress.load_state(state)
    world.step = step.number = progress.step
    if step.together or world.is_first:
        step.skips.number = state.get("skipped", 0)

    if _has_ended(setup, progress):
        if progress.stopped:
            after = counted(progress.epoch, "epoch")
            saves.notes.append(f"{progress.stopped} stopped the run after {after}; the run resumes")
        progress.stopped = ""
        progress.ends_unevaluated = False
        _refuse_nothing_left(progress)

    if world.is_first:
        setup.notes += map(Line.note, changes(setup))
    saves.load_data()


def _has_ended(setup: Setup, progress: TrainingProgress) -> bool:
    """Return whether the run had come to its end, or beyond what is asked for now."""
    if progress.is_beyond_end:
        return True
    if setup.plan.again:  # only its last files are missing
        return False
    return setup.world.broadcast_object(_is_whole(setup.folder, progress.step))


def _is_whole(folder: RunFolder, step: int) -> bool:
    """Return whether a run was finished at this step, and its last file is whole."""
    if not folder.summary.is_file():
        return False
    if folder.read_json(folder.summary).get("steps") != step:
        return False

    try:
        load_weights(folder.model)
    except FolderError:
        return False  # it is written anew

    return True


def _refuse_nothing_left(progress: TrainingProgress) -> None:
    """Refuse a run that has done all that is asked for.

    Raises:
        JobError: with what to ask for.
    """
    step = progress.step
    if progress.is_at_last_step:
        raise JobError(f"steps: the run has reached step {step}: give more, as --steps {2 * step}")
    if progress.is_over:
        epochs = progress.epoch + (progress.last_epoch or 1)
        raise JobError(
            f"epochs: the run has reached epoch {progress.epoch} ({step} steps): give more, as "
            f"--epochs {epochs}"
        )
