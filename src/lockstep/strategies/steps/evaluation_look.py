"""What a model does in evaluation that replicas with a local batch each can't do as one device
would, is said.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from lockstep.data import Part
from lockstep.data.shares import mixed_share
from lockstep.launch.events import Caveat
from lockstep.model.inspection import Seen, drops, look
from lockstep.model.losses.loss import Loss

if TYPE_CHECKING:
    from lockstep.strategies.steps.step_state import StepState

Judge = Callable[[Any, Any, int], Loss]
"""What a loss makes of outputs and targets of so many samples."""

_BATCHNORM = Caveat(
    "batchnorm evaluation", "BatchNorm normalizes over the local batch in evaluation"
)


def look_at_evaluation(
    step: StepState,
    shares: Callable[[], list[Part]],
    size: int,
    judge: Judge | None = None,
    *,
    again: bool,
) -> Seen | None:
    """Inspect a model in evaluation mode, and say what was seen. Every rank calls it.

    Args:
        step: the model under its strategy.
        shares: gives the first ones of an evaluation batch.
        size: of that batch.
        judge: the loss, which is looked at too; None where nothing reads the outputs.
        again: whether this isn't the first batch.

    Returns:
        What was seen, on rank 0 where there are replicas.

    Raises:
        StrategyError: it writes its parameters.
    """
    model = step.whole_model() if step.replicas > 1 else None
    if model is None or not step.world.is_first:
        return None
    norms = [
        m for m in step.model.modules() if isinstance(m, torch.nn.modules.batchnorm._BatchNorm)
    ]
    if any(m.training or not m.track_running_stats for m in norms):
        step.tell_once([_BATCHNORM])
    part = mixed_share(shares())
    if not part.size:
        return None
    if part.targets is None:
        judge = None
    with step.looking_at(model):
        seen = look(
            model,
            part.inputs,
            part.size,
            targets=part.targets,
            judge=judge,
            of=size,
            again=again,
            trains=False,
        )
    seen.draws |= any(
        m.training and drops(m) for m in step.model.modules()
    )  # they are silent in the copy
    seen.refuse_writes()
    if step.world.data.local_batches > 1:
        seen.refuse_on_threads()
        step.tell_once(step.compute_in_turn(seen))
    step.tell_once(seen.of_evaluation())
    return seen
