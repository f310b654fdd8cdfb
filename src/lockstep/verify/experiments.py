"""Laboratory: where experiments run, one after another.

What they have in common is made once: the processes, what the person's job imports there, and its data.
"""

from __future__ import annotations

from typing import Any

from lockstep.data import is_stream, resolve
from lockstep.job import Job
from lockstep.jobfile import JobFile
from lockstep.launch.devices import Device
from lockstep.launch.placement import alone, needs_one_process
from lockstep.launch.processes.local_ranks import StandingRanks
from lockstep.launch.world import World
from lockstep.strategies import Strategy
from lockstep.verify.comparison import Comparison, Experiment
from lockstep.verify.paired_run import both_sides


class Laboratory:
    """Where experiments run: in this process, or, where the strategy wants several, on ranks that stay for the next.

    Args:
        strategy: of the experiments, where they aren't of one device.
        devices: those of the ranks, which start as soon as it is entered.
    """

    def __init__(self, strategy: Strategy, devices: tuple[Device, ...]) -> None:
        self._ranks = StandingRanks(devices)
        self._wanted = not needs_one_process(strategy, devices)

    def __enter__(self) -> Laboratory:
        if self._wanted:
            self._ranks.start()
        return self

    def __exit__(self, *of_an_error: object) -> None:
        self._ranks.close()

    def compared(self, experiment: Experiment) -> Comparison:
        """Run an experiment.

        Raises:
            LockstepError: the strategy refuses the job, or a rank fails.
            Exception: what the job's own code raises in this process.
        """
        if needs_one_process(experiment.strategy, experiment.devices):
            with alone(experiment.devices) as world:
                found = _on_rank(world, experiment)
        else:
            assert experiment.devices == self._ranks.devices
            found = self._ranks.call(_on_rank, experiment)
        assert found is not None
        return found


def _on_rank(world: World, experiment: Experiment) -> Comparison | None:
    return both_sides(world, experiment, _with_data_of_before(world, experiment))


_data: tuple[Any, Any] | None = None
"""Of the last experiment on these ranks: what it was made from, and the training data."""

_OURS = ("sync_batchnorm", "activation_checkpointing")
"""Settings that experiments change, and that no data depend on."""


def _with_data_of_before(world: World, experiment: Experiment) -> Job:
    """The job with the data that an experiment before this one has made on these ranks: they may take long to make.

    A stream is made anew; and so is all in the person's own process, where data that can't be made twice are looked
    for. (A job that isn't a file comes with its data each time.)
    """
    global _data
    job = experiment.loaded
    if world.size == 1 or not isinstance(experiment.job, JobFile):
        return job
    settings = {name: value for name, value in experiment.settings.items() if name not in _OURS}
    if _data is None or _data[0] != (experiment.job, settings):
        _data = (experiment.job, settings), resolve(job.train_data, world, "train_data")
    return job if is_stream(_data[1]) else job.replace(train_data=_data[1])
