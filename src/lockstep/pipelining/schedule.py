"""Schedules: which stage computes which micro-batch, in which order, as data.

A schedule is a list of actions for each stage. ``2F0`` is stage 2's forward of micro-batch 0, ``2B0`` its backward. Who
writes a schedule writes computing only: what moves between the stages follows from it. Whoever runs, simulates, checks
or draws one reads the same lists.

Backwards of a stage go in the order of the micro-batches, so gradients are summed in the order in which one device that
accumulates would sum them.
"""

from __future__ import annotations

import re
from typing import Literal, NamedTuple

from lockstep.errors import StrategyError


class Action(NamedTuple):
    """One turn of a stage.

    Attributes:
        stage: from 0.
        kind: ``"F"``, the forward, or ``"B"``, the backward.
        microbatch: from 0.
    """

    stage: int
    kind: Literal["F", "B"]
    microbatch: int

    def __str__(self) -> str:
        return f"{self.stage}{self.kind}{self.microbatch}"

    @classmethod
    def parse(cls, word: str) -> Action:
        """The action that a word like ``2F0`` says.

        Raises:
            StrategyError: it isn't one.
        """
        match = re.fullmatch(r"(\d+)([FB])(\d+)", word.strip())
        if match is None:
            raise StrategyError(f'schedule: "{word}" is no action: write 2F0 for stage 2, forward, micro-batch 0')
        return cls(int(match[1]), "F" if match[2] == "F" else "B", int(match[3]))


Schedule = list[list[Action]]


def gpipe(stages: int, microbatches: int) -> Schedule:
    """Every forward, then every backward; each stage holds all micro-batches in between.

    ::

        stage 0   F0 F1 F2 F3  .  .  .  .  .  . B0 B1 B2 B3
        stage 1    . F0 F1 F2 F3  .  .  .  . B0 B1 B2 B3  .
        stage 2    .  . F0 F1 F2 F3  .  . B0 B1 B2 B3  .  .
        stage 3    .  .  . F0 F1 F2 F3 B0 B1 B2 B3  .  .  .

    Huang et al., GPipe, 2019, https://arxiv.org/abs/1811.06965
    """
    _checked(stages, microbatches)
    every = range(microbatches)
    return [[*(Action(s, "F", m) for m in every), *(Action(s, "B", m) for m in every)] for s in range(stages)]


def one_f_one_b(stages: int, microbatches: int) -> Schedule:
    """As many forwards as it takes to reach the last stage, then one backward for each forward.

    ::

        stage 0   F0 F1 F2 F3  .  .  . B0 F4 B1 F5 B2  . B3  . B4  . B5
        stage 1    . F0 F1 F2  .  . B0 F3 B1 F4 B2 F5 B3  . B4  . B5  .
        stage 2    .  . F0 F1  . B0 F2 B1 F3 B2 F4 B3 F5 B4  . B5  .  .
        stage 3    .  .  . F0 B0 F1 B1 F2 B2 F3 B3 F4 B4 F5 B5  .  .  .

    As long as GPipe's where all stages take equally long, but stage s holds at most ``stages - s`` micro-batches.
    Narayanan et al., PipeDream, 2019, https://arxiv.org/abs/1806.03377
    """
    _checked(stages, microbatches)
    schedule: Schedule = []
    for stage in range(stages):
        ahead = min(stages - stage - 1, microbatches)
        order = [Action(stage, "F", m) for m in range(ahead)]
        for m in range(microbatches):
            if ahead + m < microbatches:
                order.append(Action(stage, "F", ahead + m))
            order.append(Action(stage, "B", m))
        schedule.append(order)
    return schedule


def _checked(stages: int, microbatches: int) -> None:
    if stages < 1:
        raise StrategyError(f"schedule: {stages} stages; there is at least one")
    if microbatches < 1:
        raise StrategyError(f"schedule: {microbatches} micro-batches; there is at least one")
