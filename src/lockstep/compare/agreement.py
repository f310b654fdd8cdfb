"""Whether a row's results agree with those of one device, as ``lockstep verify`` finds it."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from lockstep.compare.planned_rows import Entry
from lockstep.errors import error_line
from lockstep.job import Job
from lockstep.jobfile import JobFile, the_job, with_settings
from lockstep.strategies import choose
from lockstep.verify import verify


@dataclass(frozen=True)
class Agreement:
    """Whether the numbers are those of one device.

    Attributes:
        equal: up to rounding; None where that isn't known.
        difference: the largest of any parameter or buffer, as a part of how far it went.
        reason: why it isn't known.
        micro_batches: in how many one device was given each batch, where the strategy cuts it for
            itself.
        norms_cut: whether BatchNorm normalizes over each of these micro-batches.
        without_dropout: whether dropout, whose masks differ, is left out on both sides.
    """

    equal: bool | None
    difference: float | None = None
    reason: str = ""
    micro_batches: int = 1
    norms_cut: bool = False
    without_dropout: bool = False

    @property
    def word(self) -> str:
        """``equal``, ``differs`` or ``not known``."""
        return {True: "equal", False: "differs", None: "not known"}[self.equal]

    def __str__(self) -> str:
        if self.difference is None:
            return self.word
        return f"{self.word} {self.difference:.0e}".replace(" 0e+00", " 0")


def agreement_of(job: Job | JobFile, entry: Entry) -> Agreement:
    """Verify a row.

    Args:
        job: the job, or its file.
        entry: the row.
    """
    setup = entry.setup
    job = with_settings(job, setup.settings)
    strategy = choose(setup.strategy, entry.devices, **setup.options)
    try:
        found = verify(job, strategy=strategy, devices=entry.devices)
    except Exception as error:  # the job's own code may fail in another number format
        return Agreement(None, reason=error_line(error))
    finally:
        if not entry.devices[0].is_slot:
            torch.accelerator.empty_cache()  # which the rows need
    compared = found.comparison
    if compared is None:
        return Agreement(None, reason=str(found.refused))
    cut = found.micro_batches if found.micro_batches != the_job(job).accumulate else 1
    return Agreement(
        found.equal,
        compared.worst_of("parameters", "buffers"),
        micro_batches=cut,
        norms_cut=compared.normalises and cut > 1,
        without_dropout="dropout" in compared.still and compared.drops,
    )
