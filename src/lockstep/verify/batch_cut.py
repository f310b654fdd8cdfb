"""The batch's cut: whether micro-batches alone change the results, and why a cut does.

A strategy that cuts batches in micro-batches is compared with ``single`` in as many, which is what
it is defined as. What both do is then compared with ``single`` on whole batches::

    pp, 2 micro-batches   against   single, accumulate=2   against   single, accumulate=1

Known differences are taken out of the second comparison: random numbers (each micro-batch draws its
own) and BatchNorm (a line before training reports it). Buffers are left out: one that counts
forwards differs, and one that acts on the results shows in these.
"""

from __future__ import annotations

from dataclasses import replace

from lockstep.run.events import Caveat
from lockstep.verify.cause_texts import cause, named
from lockstep.verify.comparison import Bounds, Comparison, Experiment
from lockstep.verify.determinism import Thing


def whole_against_cut(experiment: Experiment, found: Comparison) -> Experiment | None:
    """Return ``single`` in the strategy's micro-batches against ``single`` on whole batches.

    None where the strategy has no micro-batches, or where its replicas cut the batch further: the
    comparison with the strategy shows that.
    """
    if experiment.parts == 1 or experiment.shares > 1:
        return None

    still: set[Thing] = set(experiment.still)
    if found.drew:
        still.add("draws")
    if found.normalises:
        still.add("norms")
    return experiment.of_single(
        parts=1,
        cut=experiment.parts,
        still=frozenset(still),
        updates=len(found.updates),
        watched=1,
    )


def without_buffers(comparison: Comparison) -> Comparison:
    """Return the comparison without what it found of buffers."""
    updates = [replace(update, buffers={}) for update in comparison.updates]
    return replace(comparison, updates=updates)


def cause_of_cut(tried: Comparison, bounds: Bounds) -> Caveat:
    """Return why one device differs from itself where its batches are cut.

    Args:
        tried: one device with its batches cut against one without.
        bounds: those of ``tried``.
    """
    first = bounds.first_apart(tried)
    if first is None:
        return cause("unknown")

    beyond = bounds.beyond(first)
    for kind, name, _ in beyond:
        if kind == "parameters" and name not in first.gradients:
            return cause("state", name=name)

    if tried.layer is not None:
        return cause("mixing", layer=named(*tried.layer))
    if first.losses_apart > bounds.of("loss"):
        return cause("loss")
    if all(kind == "buffers" for kind, _, _ in beyond):
        return cause("buffer", name=beyond[0][1])
    return cause("autograd function")
