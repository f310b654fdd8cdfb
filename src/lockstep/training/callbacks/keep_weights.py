"""Files of weights beside ``best.safetensors``: those of the best evaluations, or of the last
ones.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from lockstep.training.callbacks.callback import TrainingContext
from lockstep.training.callbacks.stopping import OfMetric


class KeepWeights(OfMetric):
    """Keeps weights that were evaluated, as ``best-accuracy/step-120.safetensors`` or
    ``last/step-120.safetensors``.

    ``run.model("last/step-120.safetensors")`` gives a model.

    Args:
        number: how many.
        metric: keep the best by it; None keeps the last.
        mode: ``"min"`` where less is better, else ``"max"``.
    """

    def __init__(
        self, number: int = 3, metric: str | None = None, mode: Literal["min", "max"] = "min"
    ) -> None:
        super().__init__(metric, mode)
        self._number = number
        self.output: str = "last" if metric is None else f"best-{metric.replace('/', '-')}"
        self._kept: list[tuple[float, int]] = []  # what they are sorted by, and their steps

    def _file(self, training: TrainingContext, step: int | str) -> Path:
        return training.folder / self.output / f"step-{step}.safetensors"

    def on_start(self, training: TrainingContext) -> None:
        """Remove files that were written after the checkpoint of a resumed run."""
        kept = {self._file(training, step) for _, step in self._kept}
        pattern = self._file(training, "*")
        for path in pattern.parent.glob(pattern.name) if training.world.is_first else ():
            if path not in kept:
                path.unlink()

    def on_evaluated(self, training: TrainingContext) -> None:
        """Write them, if they are among the best, and remove what is no longer."""
        step = training.step
        value = -step if self._metric is None else self.measured(training.metrics)
        before = [one for one in self._kept if one[1] != step]
        self._kept = sorted([*before, (value, step)])[: self._number]
        if (value, step) not in self._kept:
            return
        with training.evaluating():
            if training.world.is_first:
                self._file(training, step).parent.mkdir(exist_ok=True)
            training._step.write_weights(self._file(training, step))
        for _, old in set(before) - set(self._kept) if training.world.is_first else ():
            self._file(training, old).unlink(missing_ok=True)

    def state_dict(self) -> dict[str, Any]:
        """Which there are."""
        return {"kept": self._kept}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take over what ``state_dict`` gave."""
        self._kept = state["kept"]
