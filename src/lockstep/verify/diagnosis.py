"""Diagnosis: why two sides part, found by experiments, each of which takes one thing out of the question.

::

    the start differs, other samples, other learning rates          seen as it is
    single against single also parts                                the job can't be repeated: operators? numbers? data?
    equal once dropout, or batch norm, is taken out                 that is it
    single, its batches cut as for the devices, parts from single   the model or its loss: a buffer, state, samples that
                                                                    act on one another, a backward of its own
    it doesn't                                                      the strategy: sums, buffers, ranks that drift

Each experiment goes no further than the update that parts, which is the first one mostly.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from lockstep.errors import LockstepError, LossError, NonFiniteLoss, RankFailed, StrategyError
from lockstep.launch.events import Caveat
from lockstep.launch.world import place_of
from lockstep.strategies.single import Single
from lockstep.verify.causes import cause, listed, named, of_refusal, quoted
from lockstep.verify.comparison import Bounds, Comparison, Experiment, Update
from lockstep.verify.determinism import Thing
from lockstep.verify.experiments import Laboratory
from lockstep.verify.rounding_noise import Noise
from lockstep.verify.training_run import moves_of


@dataclass
class Diagnosis:
    """The search for why two sides part.

    Args:
        laboratory: where experiments are made.
        experiment: the one that did.
        found: what it found.
        noise: up to where a difference is rounding.
        parts: micro-batches of a global batch.
        shares: replicas that each of these is cut for.
    """

    laboratory: Laboratory
    experiment: Experiment
    found: Comparison
    noise: Noise
    parts: int
    shares: int

    def __post_init__(self) -> None:
        self.bounds: Bounds = self.noise.bounds(self.found)
        self.first: Update | None = self.bounds.first_apart(self.found)
        # Held still in what follows: what is known to part the sides, and would hide other causes.
        self.still: frozenset[Thing] = frozenset()
        self.settings = dict(self.experiment.settings)
        self.synchronises = True
        # That something is drawn still where all draws were to be taken out.
        self.draws_on: Caveat | None = None
        # Name and class of the first layer that differs, where an experiment has shown it.
        self.layer: tuple[str, str] | None = None

    def causes(self) -> list[Caveat]:
        """All that were found, the likeliest first; one that says so where none was."""
        exact = self.experiment.strategy.exact
        if exact is not True:
            return [cause("declared", text=exact)]
        strange = bool(self.found.start or (self.first is not None and self.first.rows.others))
        causes = self._seen() or (self._of_the_job_alone() if strange else [])
        causes = causes or self._taken_out() or ([] if strange else self._of_the_job_alone())
        if not causes and self.found.drifted:
            return [cause("drift", name=self.found.drifted[0])]
        if not causes and self.draws_on:
            return [self.draws_on]
        if not causes and self.first is None:
            return self._of_the_evaluation()
        causes = causes or self._of_the_cut() or self._of_the_strategy()
        if not causes and self.found.notes:
            causes = [_announced(note) for note in self.found.notes]
        return causes or [cause("unknown")]

    # ---- what shows as it is ----------------------------------------------------------------------------------------

    def _seen(self) -> list[Caveat]:
        first = self.first
        if first is None:
            return []
        if first.rows and not first.rows.others:
            return [_sampler(first)]
        if first.rates_apart > self.bounds.least:
            moves = first.number - 1 if self._by_step() else first.epoch - 1
            return [_scheduler(first, moves_of(self.experiment, first.rates, most=16 * max(moves, 1)), moves)]
        return []

    def _by_step(self) -> bool:
        from lockstep.jobfile import the_job, with_settings

        return the_job(with_settings(self.experiment.job, self.settings)).lr_scheduler_every == "step"

    # ---- can the job be repeated at all? ----------------------------------------------------------------------------

    def _of_the_job_alone(self) -> list[Caveat]:
        again = self._single()
        if again.updates == 1:
            again = dataclasses.replace(again, updates=2)  # one draw of few values may come out alike
        twice = self._try(again)
        if not isinstance(twice, Comparison):
            return []
        if twice.start:
            return [cause("initial values", name=twice.start[0])]
        if any(update.rows for update in twice.updates):
            return [cause("unseeded data")]
        if self.noise.repeats(twice):
            return [cause("start", name=self.found.start[0])] if self.found.start else []
        strict = self._try(dataclasses.replace(self._single(), deterministic=True))
        if isinstance(strict, Comparison):
            return [cause("operators", name="")] if self.noise.hold(strict) else [cause("unseeded model")]
        said = str(strict)
        if "deterministic implementation" in said:
            return [cause("operators", name=f", {said.split(' does not have')[0].split()[-1]}")]
        if isinstance(strict, NonFiniteLoss):
            return [cause("operators", name=", torch.empty")]
        return [cause("unseeded model")]

    # ---- dropout and batch norm, taken out --------------------------------------------------------------------------

    def _taken_out(self) -> list[Caveat]:
        present: list[Thing] = []
        if self.found.drew:
            present.append("draws")
        if self.found.normalises and self.shares > 1 and not self._is_on("sync_batchnorm"):
            present.append("norms")
        if not present:
            return []
        without_all = self._without(frozenset(present))
        if "draws" in present and without_all is not None and without_all.drew:
            # Where the two agree all the same, their draws came in the same order by chance.
            self.draws_on = cause(
                "random numbers elsewhere",
                whence="from Python's or numpy's random"
                if without_all.drew_elsewhere
                else "in an operator that isn't PyTorch's own, or its optimizer does",
            )
        if self.draws_on or without_all is None or not self.noise.hold(without_all):
            self.still = frozenset(present)
            return []
        needed = []
        for thing in present:
            rest = frozenset(present) - {thing}
            kept = self._without(rest) if rest else self.found
            if kept is None or not self.noise.hold(kept):
                needed.append(thing)
        return [cause for thing in needed or present for cause in self._named(thing, without_all.worst)]

    def _named(self, thing: Thing, left: float) -> list[Caveat]:
        if thing == "norms":
            name = "batchnorm" if self.synchronises else "batchnorm of a strategy without sync_batchnorm"
            return [cause(name, left=left)]
        causes = [cause("dropout", left=left)] if self.found.drops else []
        if self.found.drew_in_backward:
            causes.append(cause("random numbers", where="backward", left=left))
        return causes or [cause("random numbers", where="forward", left=left)]

    def _is_on(self, setting: str) -> bool:
        from lockstep.jobfile import the_job, with_settings

        return bool(getattr(the_job(with_settings(self.experiment.job, self.settings)), setting))

    def _without(self, things: frozenset[Thing]) -> Comparison | None:
        settings = dict(self.settings)
        if "draws" in things:
            settings["activation_checkpointing"] = None  # which computes again where nothing is held still
        if "norms" in things and self.synchronises:
            together = {**settings, "sync_batchnorm": True}
            tried = self._try(dataclasses.replace(self._again(), settings=together, still=things - {"norms"}))
            if isinstance(tried, Comparison):
                return tried
            self.synchronises = False  # the strategy doesn't take it
        tried = self._try(dataclasses.replace(self._again(), settings=settings, still=things))
        return tried if isinstance(tried, Comparison) else None

    # ---- a model whose numbers depend on how a batch is cut ---------------------------------------------------------

    def _of_the_cut(self) -> list[Caveat]:
        if self.shares == 1:
            return []
        number = 1 if self.first is None else self.first.number
        still = self.still
        if self.found.normalises and self._is_on("sync_batchnorm"):
            still |= {"norms"}  # which see the whole batch on the devices, as they don't here
        cut = dataclasses.replace(self._single(), cut=self.parts * self.shares, still=still)
        tried = self._try(dataclasses.replace(cut, watched=number, bound=layer_bound(self.bounds)))
        if isinstance(tried, LossError):
            return [found] if (found := of_refusal(tried)) is not None else []
        if not isinstance(tried, Comparison) or self.noise.hold(tried):
            return []
        bounds = self.noise.bounds(tried)
        first = bounds.first_apart(tried)
        if not self.still:
            self.layer = layer_of(tried, bounds, first)
        if first is not None:
            apart = [name for kind, name, _ in bounds.beyond(first) if kind == "parameters"]
            if written := [name for name in apart if name not in first.gradients]:
                return [cause("parameter written in forward", name=written[0])]
        if tried.layer is not None:
            if self.found.apart_attributes and not self.found.mixes:  # else it may be a record that acts on nothing
                return [cause("state", name=self.found.apart_attributes[0])]
            if self.found.own_buffers:
                return [_buffer(self.found.own_buffers, self.found.updated_on)]
            if self.found.collated and not self.found.mixes:
                return [cause("collate", layer=named(*tried.layer))]
            return [cause("mixing", layer=named(*tried.layer))]
        if self.found.reads:
            name = self.found.reads[0]
            return [
                cause("auxiliary loss", output=f'the model\'s output "{name}"' if name else "an output of the model")
            ]
        if first is not None and first.losses_apart > bounds.of("loss", ""):
            return [cause("loss")]
        beyond = self.bounds.beyond(self.first) if self.first is not None else []
        if beyond and all(kind == "buffers" for kind, _, _ in beyond):
            return [_buffer([beyond[0][1]], {})]
        if tried.hooked and not tried.functions:
            return [_hook(tried.hooked)]
        return [_own_backward(tried.functions, first)]

    # ---- training agrees, and evaluation doesn't --------------------------------------------------------------------

    def _of_the_evaluation(self) -> list[Caveat]:
        apart = self.bounds.evaluation_apart(self.found)
        losses = [name for name in apart if name.rpartition("/")[2] == "loss"]
        if apart and not losses:
            return [cause("metric", names=quoted(apart))]
        drawing = self._without(frozenset({"draws"}))
        if drawing is not None and self.noise.hold(drawing):
            return [cause("random numbers", where="evaluation", left=drawing.worst)]
        return [cause("mixing in evaluation", loss=losses[0])] if losses else [cause("unknown")]

    # ---- a strategy that does something else ------------------------------------------------------------------------

    def _of_the_strategy(self) -> list[Caveat]:
        found, first = self.found, self.first
        if first is not None and first.rows:
            return [_sampler(first)]
        if first is not None and (ratio := self._one_ratio(first)) is not None:
            return [_scaled(ratio, len(self.experiment.devices))]
        if found.updated_on or found.own_buffers:
            return [_buffer(found.own_buffers, found.updated_on)]
        if found.apart_attributes:
            return [cause("state", name=found.apart_attributes[0])]
        beyond = () if first is None else tuple(self.bounds.beyond(first))
        if beyond and all(kind == "buffers" for kind, _, _ in beyond):
            return [_buffer([name for _, name, _ in beyond], {})]
        if first is not None and not any(kind in ("gradients", "loss") for kind, _, _ in beyond):
            return [cause("update", number=first.number)]
        return []

    def _one_ratio(self, first: Update) -> float | None:
        """How many times one device's gradient the strategy's is, where that is the same for all parameters."""
        ratios = list(first.ratios.values())
        if any(k == "gradients" and n not in first.ratios for k, n, _ in self.bounds.beyond(first)):
            return None
        if not ratios or max(ratios) - min(ratios) > 1e-6 * max(map(abs, ratios)) or abs(ratios[0] - 1) < 1e-6:
            return None
        return sum(ratios) / len(ratios)

    # ---- experiments ------------------------------------------------------------------------------------------------

    def _again(self) -> Experiment:
        """The same, no further than it parts."""
        updates = self.first.number if self.first is not None else None
        return dataclasses.replace(self.experiment, settings=self.settings, updates=updates, looked=True)

    def _single(self) -> Experiment:
        """One device against one device."""
        settings = {**self.settings, "accumulate": self.parts}
        place = (place_of(self.experiment.devices),)
        return dataclasses.replace(self._again(), strategy=Single(), devices=place, settings=settings)

    def _try(self, experiment: Experiment) -> Comparison | Exception:
        try:
            return self.laboratory.compared(experiment)
        except RankFailed as error:
            return error
        except (LockstepError, StrategyError) as error:
            return error
        except RuntimeError as error:  # an operator that isn't deterministic
            return error


def _announced(note: Caveat) -> Caveat:
    row = cause("announced", text=note.text)
    return dataclasses.replace(row, fix=note.fix) if note.fix else row


def _sampler(first: Update) -> Caveat:
    """Samples that are used twice, or not at all."""
    rows = first.rows
    faults = [
        f"repeats {listed('sample', rows.repeated)}" if rows.repeated else "",
        f"leaves out {listed('sample', rows.left_out)}" if rows.left_out else "",
        f"takes {rows.others} that are not of the batch" if rows.others else "",
    ]
    return cause("sampler", faults=" and ".join(filter(None, faults)), batch=first.batch, epoch=first.epoch)


def _scheduler(first: Update, found: int | None, moves: int) -> Caveat:
    """A scheduler that moves at another pace: ``found`` times in the place of ``moves``."""
    times = f": it has moved {found} times where {moves} is right" if found is not None else ""
    if found is not None and moves and found % moves == 0:
        times = f": it steps {found // moves} times for each one"
    return cause("scheduler", rate=first.rates[0], reference=first.reference_rates[0], update=first.number, times=times)


def _buffer(own: Sequence[str], updated_on: Mapping[str, Sequence[int]]) -> Caveat:
    """A buffer that is other on each replica."""
    if not updated_on:
        return cause("buffer", name=own[0])
    name, ranks = next(iter(updated_on.items()))
    return cause("buffer of one rank", name=name, replicas=listed("replica", ranks))


def _own_backward(functions: Sequence[str], first: Update | None) -> Caveat:
    """A backward that depends on how many samples it sees."""
    ratios = {} if first is None else {n: r for n, r in first.ratios.items() if abs(r - 1) > 1e-6}
    seen = ""
    if ratios:
        name, ratio = next(iter(ratios.items()))
        seen = f' (the gradient of "{name}" is {ratio:.4g} times as large when the batch is split)'
    which = f"autograd function {quoted(functions)}" if functions else "a backward of the model, or a hook in it,"
    return cause("autograd function", which=which, seen=seen)


def _hook(names: Sequence[str]) -> Caveat:
    """A hook on a gradient that isn't linear."""
    which = f'parameter "{names[0]}"' if len(names) == 1 else f"parameters {quoted(names[:3])}"
    return cause("hook", parameters=which + (f" and {len(names) - 3} more" if len(names) > 3 else ""))


def _scaled(ratio: float, devices: int) -> Caveat:
    """A gradient that is a multiple of the right one."""
    if abs(ratio - devices) < 1e-6 * devices:
        return cause("summed gradient", devices=devices)
    twice = abs(ratio * devices - 1) < 1e-6
    how = f"averaged over the {devices} devices once too often" if twice else "weighted otherwise than by samples"
    return cause("scaled gradient", ratio=ratio, how=how)


def layer_bound(bounds: Bounds) -> float:
    """Up to where what a layer gave for a sample is the same."""
    return 10 * max(bounds.least, 1e-9)


def layer_of(watched: Comparison, bounds: Bounds, first: Update | None) -> tuple[str, str] | None:
    """Name and class of the first layer that differs; where only backward does, the one in which it begins to."""
    if watched.layer is not None or first is None:
        return watched.layer
    apart = {name.rpartition(".")[0] for kind, name, _ in bounds.beyond(first) if kind == "gradients"}
    last = next((name for name in reversed(watched.called) if name in apart), None)
    return None if last is None else (last, "in backward")
