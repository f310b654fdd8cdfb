"""Files of weights beside ``best.safetensors``: of the best evaluations, or of the last ones."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from lockstep.training.callbacks.callback import TrainingContext
from lockstep.training.callbacks.stopping import OfMetric


class KeepWeights(OfMetric):
    """Keeps weights that were evaluated, as ``best-accuracy/step-120.safetensors`` or
    ``last/step-120.safetensors``.

    Under ``fsdp`` too these are files of the whole model, with its one-device names::

        callbacks = [KeepWeights(2, "accuracy", "max"), KeepWeights(3)]
        model = run.model("last/step-120.safetensors")

    Args:
        number: how many.
        metric: keep the best by it; None keeps the last.
        mode: ``"min"`` where less is better, else ``"max"``.
    """

    def __init__(
        self,
        number: int = 3,
        metric: str | None = None,
        mode: Literal["min", "max"] = "min",
    ) -> None:
        super().__init__(metric, mode)
        self._number = number
        self.output: str = "last" if metric is None else f"best-{metric.replace('/', '-')}"
        self._kept: list[tuple[float, int]] = []  # what they are sorted by, and their steps

    def _file(self, training: TrainingContext, step: int) -> Path:
        """Return the file of the weights of a step."""
        return training.folder / self.output / f"step-{step}.safetensors"

    def on_start(self, training: TrainingContext) -> None:
        """Remove files that were written after the checkpoint of a resumed run."""
        if not training.world.is_first:
            return

        kept = {self._file(training, step) for _, step in self._kept}
        for path in (training.folder / self.output).glob("step-*.safetensors"):
            if path not in kept:
                path.unlink()

    def on_evaluated(self, training: TrainingContext) -> None:
        """Write the weights if they are among the best, and remove those that no longer are."""
        step = training.step
        value = -step if self._metric is None else self.measured(training.metrics)
        before = [one for one in self._kept if one[1] != step]
        self._kept = sorted([*before, (value, step)])[: self._number]
        if (value, step) not in self._kept:
            return

        is_first = training.world.is_first
        with training.evaluating():
            path = self._file(training, step)
            if is_first:
                path.parent.mkdir(exist_ok=True)
            training._step.saved.write_weights(path)

        for one in before:
            if is_first and one not in self._kept:
                self._file(training, one[1]).unlink(missing_ok=True)

    def state_dict(self) -> dict[str, Any]:
        """Return which weights are kept."""
        return {"kept": self._kept}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take over what ``state_dict`` returned."""
        self._kept = state["kept"]
