"""The batch's cut: whether micro-batches alone change the results, and why.

A strategy that cuts batches in micro-batches is compared with ``single`` in as many, which is what
it is defined as. What both do is then compared with ``single`` on whole batches::

    pp, 2 micro-batches   against   single, accumulate=2   against   single, accumulate=1

Known differences are taken out of the second comparison: random numbers (each micro-batch draws its
own) and BatchNorm (a line before training reports it). Buffers are left out: one that counts
forwards differs, and one that acts on the results shows in these.
"""

from __future__ import annotations

from dataclasses import replace

from lockstep.launch.events import Caveat
from lockstep.verify.cause_texts import cause, named, own_backward, quoted, replica_buffer
from lockstep.verify.comparison import Bounds, Comparison, Experiment
from lockstep.verify.determinism import Thing
from lockstep.verify.experiments import Laboratory


def compared_with_whole(
    laboratory: Laboratory, experiment: Experiment, found: Comparison
) -> Comparison | None:
    """Compare ``single`` in the strategy's micro-batches with ``single`` on whole batches.

    Returns:
        What was found; None where the strategy has no micro-batches, where its replicas cut the
        batch further (the comparison with the strategy shows that), or where random numbers can't
        be taken out.
    """
    if experiment.parts == 1 or experiment.shares > 1:
        return None
    still: set[Thing] = set(experiment.still)
    settings = dict(experiment.settings)
    if found.drew:
        still.add("draws")
        settings["activation_checkpointing"] = None  # it computes again where draws aren't held
    if found.normalises:
        still.add("norms")
    cut = experiment.of_single(
        parts=1,
        cut=experiment.parts,
        settings=settings,
        still=frozenset(still),
        updates=len(found.updates),
        watched=1,
    )
    tried = laboratory.compared(cut)
    if tried.drew:
        return None
    return replace(tried, updates=[replace(update, buffers={}) for update in tried.updates])


def causes_of_cut(whole: Comparison, bounds: Bounds, parts: int) -> tuple[Caveat, ...]:
    """Why ``parts`` micro-batches give other results than the whole batch."""
    why = cause_of_cut(whole, bounds, whole) or cause_of_backward(whole, bounds)
    return cause("cut", parts=parts, apart=whole.worst), why


def cause_of_cut(tried: Comparison, bounds: Bounds, found: Comparison) -> Caveat | None:
    """Why one device differs from itself where its batches are cut; None where only backward does.

    Args:
        tried: one device with its batches cut against one without.
        bounds: those of ``tried``.
        found: the comparison that is to be explained.
    """
    first = bounds.first_apart(tried)
    if first is not None:
        apart = [name for kind, name, _ in bounds.beyond(first) if kind == "parameters"]
        written = [name for name in apart if name not in first.gradients]
        if written:
            return cause("state: parameter", name=written[0])
    if tried.layer is not None:
        if found.apart_attributes and not found.mixes:  # else it may be a record without effect
            return cause("state", name=found.apart_attributes[0])
        if found.own_buffers:
            return replica_buffer(found.own_buffers)
        kind = "collate" if found.collated and not found.mixes else "mixing"
        return cause(kind, layer=named(*tried.layer))
    if found.reads:
        name = found.reads[0]
        output = f'the model\'s output "{name}"' if name else "an output of the model"
        return cause("auxiliary loss", output=output)
    if first is not None and first.losses_apart > bounds.of("loss", ""):
        return cause("loss")
    return None


def cause_of_backward(tried: Comparison, bounds: Bounds) -> Caveat:
    """Why only the backward of one device depends on where its batches are cut."""
    if tried.hooked and not tried.functions:
        return cause("hook", names=quoted(tried.hooked))
    first = bounds.first_apart(tried)
    return own_backward(tried.functions, {} if first is None else first.ratios)
