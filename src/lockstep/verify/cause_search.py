"""Cause search: why two sides part, found by experiments, each of which takes one thing out of the
question.

::

    the start differs, other samples, other learning rates         seen as it is
    single against single also parts                               the job can't be repeated: operators? numbers? data?
    equal once all draws, or batch norms, are taken out            that is it
    single, its batches cut as for the devices, parts from single  the model or its loss: a buffer, state, samples that
                                                                   act on one another, a backward of its own
    it doesn't                                                     the strategy: sums, buffers, ranks that drift

Each experiment goes no further than the update that parts, which is the first one mostly.
"""

from __future__ import annotations

from lockstep.errors import LockstepError, LossError, NonFiniteLoss
from lockstep.launch.events import Caveat
from lockstep.verify.batch_cut import cause_of_backward, cause_of_cut
from lockstep.verify.cause_texts import cause, listed, of_refusal, quoted, replica_buffer
from lockstep.verify.comparison import Bounds, Comparison, Experiment, Update
from lockstep.verify.determinism import Thing
from lockstep.verify.experiments import Laboratory, Noise

Layer = tuple[str, str]
"""Name and class."""


class Diagnosis:
    """The search for why the two sides of an experiment part; ``first`` is the first update that
    differs, if any.
    """

    def __init__(
        self, laboratory: Laboratory, experiment: Experiment, found: Comparison, noise: Noise
    ) -> None:
        self.laboratory, self.experiment, self.found, self.noise = (
            laboratory,
            experiment,
            found,
            noise,
        )
        self.bounds: Bounds = noise.bounds(found)
        self.first: Update | None = self.bounds.first_apart(found)
        updates = self.first.number if self.first is not None else None
        self._again = experiment.but(updates=updates, looked=True)
        self._beyond = self.bounds.beyond(self.first) if self.first is not None else []
        # Held still in what follows: what is known to part the sides, and would hide other causes.
        self._still: frozenset[Thing] = frozenset()
        self._synchronises = True
        # That something is drawn still where all draws were to be taken out.
        self._draws_on: Caveat | None = None
        # The first layer that differs, where an experiment has shown it.
        self._layer: Layer | None = None

    def causes(self) -> list[Caveat]:
        """All that were found, the likeliest first; one that says so where none was."""
        exact = self.experiment.strategy.exact
        if exact is not True:
            return [cause("declared", text=exact)]
        alone, out = self._of_the_job_alone, self._taken_out
        strange = self.found.start or (self.first is not None and self.first.rows.others)
        searches = [
            self._seen,
            *((alone, out) if strange else (out, alone)),
            self._of_the_ranks,
            self._of_the_evaluation,
            self._of_the_cut,
            self._of_the_strategy,
        ]
        for search in searches:
            if causes := search():
                return causes
        return [cause("announced", text=note) for note in self.found.notes] or [cause("unknown")]

    def first_layer(self) -> Layer | None:
        """The first layer that differs, where it can be told."""
        if self._layer is not None or self.first is None or self.first.rows:
            return self._layer
        if self.first.number == 1:
            return _layer_of(self.found, self.bounds, self.first)
        watched = self._try(self._again.but(watched=self.first.number))
        watched = watched if isinstance(watched, Comparison) else Comparison()
        return _layer_of(watched, self.bounds, self.first)

    # ---- what shows as it is ---------------------------------------------------------------------

    def _seen(self) -> list[Caveat]:
        first = self.first
        if first is None:
            return []
        if first.rows and not first.rows.others:
            return [_sampler(first)]
        if first.rates_apart > self.bounds.least:
            rate, reference = first.rates[0], first.reference_rates[0]
            return [cause("scheduler", rate=rate, reference=reference, update=first.number)]
        return []

    # ---- can the job be repeated at all? ---------------------------------------------------------

    def _of_the_job_alone(self) -> list[Caveat]:
        alone = self._again.of_single()
        # One draw of few values may come out alike.
        twice = self._try(alone.but(updates=2) if alone.updates == 1 else alone)
        if not isinstance(twice, Comparison):
            return []
        if twice.start:
            return [cause("unseeded model: initial values", name=twice.start[0])]
        if any(update.rows for update in twice.updates):
            return [cause("unseeded data")]
        if self.noise.repeats(twice):
            return [cause("start", name=self.found.start[0])] if self.found.start else []
        strict = self._try(alone.but(deterministic=True))
        if isinstance(strict, Comparison):
            return (
                [cause("operators", name="")]
                if self.noise.hold(strict)
                else [cause("unseeded model")]
            )
        said = str(strict)
        if "deterministic implementation" in said:
            return [cause("operators", name=f", {said.split(' does not have')[0].split()[-1]}")]
        if isinstance(strict, NonFiniteLoss):
            return [cause("operators", name=", torch.empty")]
        return [cause("unseeded model")]

    # ---- draws and batch norms, taken out --------------------------------------------------------

    def _taken_out(self) -> list[Caveat]:
        present: list[Thing] = ["draws"] if self.found.drew else []
        if (
            self.found.normalises
            and self.experiment.shares > 1
            and not self.experiment.loaded.sync_batchnorm
        ):
            present.append("norms")
        if not present:
            return []
        without_all = self._without(frozenset(present))
        if "draws" in present and without_all is not None and without_all.drew:
            # Where the two agree all the same, their draws came in the same order by chance.
            self._draws_on = cause(
                "drawing: elsewhere",
                whence="from Python's or numpy's random"
                if "elsewhere" in without_all.drew
                else "in an operator that isn't PyTorch's own, or its optimizer does",
            )
        if self._draws_on or without_all is None or not self.noise.hold(without_all):
            self._still = frozenset(present)
            return []
        needed = []
        for thing in present:
            rest = frozenset(present) - {thing}
            kept = self._without(rest) if rest else self.found
            if kept is None or not self.noise.hold(kept):
                needed.append(thing)
        return [self._named(thing, without_all.worst) for thing in needed or present]

    def _named(self, thing: Thing, left: float) -> Caveat:
        if thing == "norms":
            name = "batchnorm" if self._synchronises else "batchnorm: not synchronised"
            return cause(name, left=left)
        where = "backward" if "backward" in self.found.drew else "forward"
        return cause("drawing", where=where, left=left)

    def _without(self, things: frozenset[Thing]) -> Comparison | None:
        things |= self.experiment.still
        settings = dict(self.experiment.settings)
        if "draws" in things:
            settings["activation_checkpointing"] = (
                None  # which computes again where nothing is held still
            )
        if "norms" in things and self._synchronises:
            together = {**settings, "sync_batchnorm": True}
            tried = self._try(self._again.but(settings=together, still=things - {"norms"}))
            if isinstance(tried, Comparison):
                return tried
            self._synchronises = False  # the strategy doesn't take it
        tried = self._try(self._again.but(settings=settings, still=things))
        return tried if isinstance(tried, Comparison) else None

    # ---- what an experiment before has left ------------------------------------------------------

    def _of_the_ranks(self) -> list[Caveat]:
        if self.found.drifted:
            return [cause("drift", name=self.found.drifted[0])]
        return [self._draws_on] if self._draws_on is not None else []

    def _of_the_evaluation(self) -> list[Caveat]:
        """Training agrees, and evaluation doesn't."""
        if self.first is not None:
            return []
        apart = self.bounds.evaluation_apart(self.found)
        losses = [name for name in apart if name.rpartition("/")[2] == "loss"]
        if apart and not losses:
            return [cause("metric", names=quoted(apart))]
        drawing = self._without(frozenset({"draws"}))
        if drawing is not None and self.noise.hold(drawing):
            return [cause("drawing", where="evaluation", left=drawing.worst)]
        return [cause("mixing: in evaluation", loss=losses[0])] if losses else [cause("unknown")]

    # ---- a model whose numbers depend on how a batch is cut --------------------------------------

    def _of_the_cut(self) -> list[Caveat]:
        shares, found = self.experiment.shares, self.found
        if shares == 1 or self.first is None:
            return []
        still = self._still | self.experiment.still
        if found.normalises and self.experiment.loaded.sync_batchnorm:
            still |= {"norms"}  # which see the whole batch on the devices, as they don't here
        cut = self.experiment.parts * shares
        tried = self._try(self._again.of_single(cut=cut, still=still, watched=self.first.number))
        if isinstance(tried, LossError):
            refusal = of_refusal(tried)
            return [] if refusal is None else [refusal]
        if not isinstance(tried, Comparison) or self.noise.hold(tried):
            return []
        bounds = self.noise.bounds(tried)
        if not self._still:
            self._layer = _layer_of(tried, bounds, bounds.first_apart(tried))
        if cause_found := cause_of_cut(tried, bounds, found):
            return [cause_found]
        if self._only("buffers"):
            return [cause("buffer", name=self._beyond[0][1])]
        return [cause_of_backward(tried, bounds)]

    # ---- a strategy that does something else -----------------------------------------------------

    def _of_the_strategy(self) -> list[Caveat]:
        found, first = self.found, self.first
        assert first is not None
        if first.rows:
            return [_sampler(first)]
        devices, ratio = len(self.experiment.devices), self._one_ratio(first)
        if ratio is not None and abs(ratio - devices) < 1e-6 * devices:
            return [cause("summed gradient", devices=devices)]
        if ratio is not None:
            return [cause("scaled gradient", ratio=ratio)]
        if found.own_buffers:
            return [replica_buffer(found.own_buffers)]
        if found.apart_attributes:
            return [cause("state", name=found.apart_attributes[0])]
        if self._only("buffers"):
            return [cause("buffer", name=self._beyond[0][1])]
        if not any(kind in ("gradients", "loss") for kind, _, _ in self._beyond):
            return [cause("update", number=first.number)]
        return []

    def _only(self, wanted: str) -> bool:
        """Whether all that differs in the first update that does is of this kind."""
        return bool(self._beyond) and all(kind == wanted for kind, _, _ in self._beyond)

    def _one_ratio(self, first: Update) -> float | None:
        """How many times one device's gradient the strategy's is, where that is the same for all
        parameters.
        """
        ratios = list(first.ratios.values())
        if any(kind == "gradients" and name not in first.ratios for kind, name, _ in self._beyond):
            return None
        if (
            not ratios
            or max(ratios) - min(ratios) > 1e-6 * max(map(abs, ratios))
            or abs(ratios[0] - 1) < 1e-6
        ):
            return None
        return sum(ratios) / len(ratios)

    def _try(self, experiment: Experiment) -> Comparison | Exception:
        try:
            return self.laboratory.compared(experiment)
        except (
            LockstepError,
            RuntimeError,
        ) as error:  # the latter of an operator that isn't deterministic
            return error


def _sampler(first: Update) -> Caveat:
    """Samples that are used twice, or not at all."""
    rows = first.rows
    faults = [
        f"repeats {listed('sample', rows.repeated)}" if rows.repeated else "",
        f"leaves out {listed('sample', rows.left_out)}" if rows.left_out else "",
        f"takes {rows.others} that are not of the batch" if rows.others else "",
    ]
    return cause(
        "sampler", faults=" and ".join(filter(None, faults)), batch=first.batch, epoch=first.epoch
    )


def _layer_of(watched: Comparison, bounds: Bounds, first: Update | None) -> Layer | None:
    """The first layer that differs; where only backward does, the one in which it begins to."""
    if watched.layer is not None or first is None:
        return watched.layer
    apart = {
        name.rpartition(".")[0] for kind, name, _ in bounds.beyond(first) if kind == "gradients"
    }
    last = next((name for name in reversed(watched.called) if name in apart), None)
    return None if last is None else (last, "in backward")
