"""Cause search: why two sides differ, found by experiments that take one thing out each.

::

    single against single differs                                  the job can't be repeated: its numbers, or its data
    the start differs                                              shown by the comparison itself
    equal once all draws, or batch norms, are taken out            that is the cause
    single, its batches cut as for the devices, differs            the model or its loss: a buffer, samples that act on
                                                                   one another, a backward of its own
    it doesn't                                                     the strategy: sums, buffers, ranks that drift

Each experiment goes no further than the first update that differs.
"""

from __future__ import annotations

from collections.abc import Iterator

from lockstep.errors import LockstepError, LossError
from lockstep.run.events import Caveat
from lockstep.verify.batch_cut import cause_of_cut
from lockstep.verify.cause_texts import cause, of_refusal, quoted
from lockstep.verify.comparison import Comparison, Experiment
from lockstep.verify.determinism import Thing
from lockstep.verify.experiments import Noise, compared


class Diagnosis:
    """The search for why the two sides of an experiment differ.

    Args:
        experiment: the strategy against one device.
        found: what it gave.
        noise: up to where a difference is rounding.

    Attributes:
        first: the first update that differs, if any.
    """

    def __init__(self, experiment: Experiment, found: Comparison, noise: Noise) -> None:
        self.experiment = experiment
        self.found = found
        self.noise = noise
        self.bounds = noise.bounds(found)
        self.first = self.bounds.first_apart(found)

        number = None
        if self.first is not None:
            number = self.first.number
        self._again = experiment.but(updates=number)

        # Known to differ, and held still in what follows, since it would hide other causes.
        self._still = experiment.still
        # A cause to report where nothing else is found: draws that can't be taken out.
        self._draws_on: Caveat | None = None

    def causes(self) -> list[Caveat]:
        """Return all causes that were found, the likeliest first; at least one."""
        exact = self.experiment.strategy.exact
        if exact is not True:
            return [cause("declared", text=exact)]

        searches = [
            self._of_the_job_alone,
            self._of_draws_and_norms,
            self._of_the_ranks,
            self._of_the_evaluation,
            self._of_the_cut,
            self._of_the_strategy,
        ]
        for search in searches:
            causes = list(search())
            if causes:
                return causes

        return [cause("unknown")]

    # ---- can the job be repeated at all? ---------------------------------------------------------

    def _of_the_job_alone(self) -> Iterator[Caveat]:
        """Compare ``single`` with itself."""
        alone = self._again.of_single()
        if alone.updates == 1:  # one draw of few values may come out alike
            alone = alone.but(updates=2)
        twice = self._try(alone)
        if twice is None:
            return
        if not self.noise.repeats(twice):
            yield cause("unseeded model")

    # ---- draws and batch norms, taken out --------------------------------------------------------

    def _of_draws_and_norms(self) -> Iterator[Caveat]:
        """Take out random numbers and batch norms, where there are some."""
        present: set[Thing] = set()
        if self.found.drew:
            present.add("draws")
        is_cut = self.experiment.shares > 1 and not self.experiment.loaded.sync_batchnorm
        if self.found.normalises and is_cut:
            present.add("norms")
        if not present:
            return

        without = self._without(present)
        if self.found.drew and without is not None and without.drew:
            # Even if the two agree: then their draws came in the same order by chance.
            self._draws_on = cause("drawing: elsewhere")
        if self._draws_on or without is None or not self.noise.hold(without):
            self._still |= present
            return

        if "draws" in present:
            yield cause("drawing", where="training", left=without.worst)
        if "norms" in present:
            yield cause("batchnorm", left=without.worst)

    def _without(self, things: set[Thing]) -> Comparison | None:
        """Compare the sides without these things in the model; None where that can't be done."""
        still = self.experiment.still | things
        return self._try(self._again.but(still=still))

    # ---- ranks, evaluation, and the batch's cut --------------------------------------------------

    def _of_the_ranks(self) -> Iterator[Caveat]:
        """Look for parameters that differ between ranks."""
        if self.found.drifted:
            yield cause("drift", name=self.found.drifted)
        elif self._draws_on is not None:
            yield self._draws_on

    def _of_the_evaluation(self) -> Iterator[Caveat]:
        """Find why evaluations differ, where training agrees."""
        if self.first is not None:
            return

        apart = self.bounds.evaluation_apart(self.found)
        losses = [name for name in apart if name.rpartition("/")[2] == "loss"]
        if apart and not losses:
            yield cause("metric", names=quoted(apart))
            return

        without = self._without({"draws"})
        if without is not None and self.noise.hold(without):
            yield cause("drawing", where="evaluation", left=without.worst)
        elif losses:
            yield cause("mixing: in evaluation", loss=losses[0])

    def _of_the_cut(self) -> Iterator[Caveat]:
        """Find out whether the model's results depend on how a batch is cut."""
        shares = self.experiment.shares
        if shares == 1 or self.first is None:
            return

        still = self._still
        if self.found.normalises and self.experiment.loaded.sync_batchnorm:
            # Batch norms see the whole batch on the devices, and a part of it here.
            still |= {"norms"}

        parts = self.experiment.parts * shares
        cut = self._again.of_single(cut=parts, still=still, watched=self.first.number)
        try:
            tried = compared(cut)
        except LossError as error:
            refusal = of_refusal(error)
            if refusal is not None:
                yield refusal
            return
        except (LockstepError, RuntimeError):
            return
        if not self.noise.hold(tried):
            bounds = self.noise.bounds(tried)
            yield cause_of_cut(tried, bounds)

    # ---- a strategy that does something else -----------------------------------------------------

    def _of_the_strategy(self) -> Iterator[Caveat]:
        """Look at what the strategy does with buffers and the update."""
        first = self.first
        if first is None:
            return

        beyond = self.bounds.beyond(first)
        kinds = {kind for kind, _, _ in beyond}
        if kinds == {"buffers"}:
            yield cause("buffer", name=beyond[0][1])
        elif not kinds & {"gradients", "loss"}:
            yield cause("update", number=first.number)

    def _try(self, experiment: Experiment) -> Comparison | None:
        """Return what an experiment gave; None where it raised."""
        try:
            return compared(experiment)
        except (LockstepError, RuntimeError):
            return None
