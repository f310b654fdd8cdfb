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
from lockstep.verify.experiments import Laboratory


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


def cause_of_cut(
    laboratory: Laboratory, cut: Experiment, tried: Comparison, bounds: Bounds, found: Comparison
) -> Caveat:
    """Find why one device differs from itself where its batches are cut.

    Args:
        laboratory: where experiments run.
        cut: the experiment: one device with its batches cut against one without.
        tried: what it gave.
        bounds: those of ``tried``.
        found: the comparison that is to be explained.
    """
    first = bounds.first_apart(tried)
    if first is None:
        return cause("unknown")

    beyond = bounds.beyond(first)
    for kind, name, _ in beyond:
        if kind == "parameters" and name not in first.gradients:
            return cause("state: parameter", name=name)

    if tried.layer is not None:
        return _cause_of_layer(laboratory, cut, tried.layer, found)
    if tried.whole_outputs:
        return cause("auxiliary loss", output=_output_of(tried.whole_outputs))
    if first.losses_apart > bounds.of("loss"):
        return cause("loss")
    if all(kind == "buffers" for kind, _, _ in beyond):
        return cause("buffer", name=beyond[0][1])

    return cause("autograd function")


def _output_of(whole_outputs: tuple[str, ...]) -> str:
    """Return words for the outputs without a row for each sample."""
    names = [f'"{name}"' for name in whole_outputs if name]
    if names:
        return f"the model's output {' or '.join(names)}"
    return "an output of the model"


def _cause_of_layer(
    laboratory: Laboratory,
    cut: Experiment,
    layer: tuple[str, str],
    found: Comparison,
) -> Caveat:
    """Find why a layer gives other outputs.

    Args:
        laboratory: where experiments run.
        cut: one device with its batches cut against one without.
        layer: its name and class.
        found: the comparison that is to be explained.
    """
    for name in found.apart_attributes:
        # Another module's attribute may be a record without effect.
        if name.rpartition(".")[0] == layer[0]:
            return cause("state", name=name)

    if found.own_buffers:
        return cause("buffer", name=found.own_buffers[0])

    if cut.loaded.collate is None or _differs_uncollated(laboratory, cut):
        return cause("mixing", layer=named(*layer))
    return cause("collate", layer=named(*layer))


def _differs_uncollated(laboratory: Laboratory, cut: Experiment) -> bool:
    """Return whether layers differ where samples are stacked as they are.

    False where they can't be stacked.
    """
    uncollated = cut.but(settings={**cut.settings, "collate": None})

    try:
        stacked = laboratory.compared(uncollated)
    except Exception:  # of samples with other lengths, or of a model that wants more
        return False

    return stacked.layer is not None
