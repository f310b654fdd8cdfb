"""Services that keep the numbers of trainings: Weights & Biases, MLflow. Rank 0 imports them
when a training begins.
"""

from __future__ import annotations

import importlib
import json
from collections.abc import Mapping
from typing import Any

from lockstep.errors import JobError
from lockstep.training.callbacks.callback import Callback, TrainingContext


class Tracker(Callback):
    """Sends each number once, from rank 0; for a training that fails no end is sent."""

    module = ""
    """The package of the service."""

    _log = "log"
    """Its function that takes numbers by name, and the step."""

    _end = "finish"
    """Its function that ends a run."""

    def __init__(self, **settings: Any) -> None:
        self._settings = settings
        self._service: Any = None
        self._sent: dict[str, tuple[int, float]] = {}

    def on_start(self, training: TrainingContext) -> None:
        """Begin a run of the service, or go on with it.

        Raises:
            JobError: the service's package isn't installed.
        """
        if not training.world.is_first:
            return
        try:
            self._service = importlib.import_module(self.module)
        except ImportError as error:
            raise JobError(
                f"{type(self).__name__}: {self.module} isn't installed: pip install {self.module}"
            ) from error

        config = json.loads((training.folder / "config.json").read_text())
        self._begin(training.folder.name, config)

    def _begin(self, name: str, config: dict[str, Any]) -> None:
        """Begin a run of the service.

        Args:
            name: of the run's folder.
            config: the content of ``config.json``: the job, its settings, the strategy.
        """
        settings = {"id": name, "resume": "allow", "config": config}
        self._service.init(**{**settings, **self._settings})

    def on_log(self, training: TrainingContext) -> None:
        """Send what is new."""
        if self._service is None:
            return
        step = training.step
        new = {}
        for name, value in training.metrics.items():
            if self._sent.get(name) != (step, value):
                new[name] = value
                self._sent[name] = step, value
        if new:
            getattr(self._service, self._log)(new, step=step)

    def on_evaluated(self, training: TrainingContext) -> None:
        """Send what is new."""
        self.on_log(training)

    def on_finish(self, training: TrainingContext) -> None:
        """End the run."""
        if self._service is not None:
            getattr(self._service, self._end)()


class WandB(Tracker):
    """Logs to Weights & Biases; a resumed training goes on in its run, which the folder names::

        callbacks = [WandB("digits", tags=["baseline"])]

    Args:
        project: of the run.
        settings: further arguments of ``wandb.init``.
    """

    module = "wandb"

    def __init__(self, project: str | None = None, **settings: Any) -> None:
        super().__init__(project=project, **settings)


class MLflow(Tracker):
    """Logs to MLflow; a resumed training goes on in its run::

        callbacks = [MLflow(experiment_id="1")]

    Args:
        settings: arguments of ``mlflow.start_run``, as ``experiment_id``.
    """

    module = "mlflow"
    _log = "log_metrics"
    _end = "end_run"

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        self._run: str | None = None

    def _begin(self, name: str, config: dict[str, Any]) -> None:
        if self._run is not None:
            self._service.start_run(**{**self._settings, "run_id": self._run})
            return
        run = self._service.start_run(**{"run_name": name, **self._settings})
        self._run = run.info.run_id
        self._service.log_params({"strategy": config["strategy"], **config["settings"]})

    def state_dict(self) -> dict[str, Any]:
        """Return the identifier of the run."""
        return {"run": self._run}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take over what ``state_dict`` returned."""
        self._run = state["run"]
