"""The errors of a loss that isn't additive over samples, or can't be checked for that."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Collection, Iterable, Iterator
from typing import Any

import torch

from lockstep.errors import LossError, first_line
from lockstep.launch.memory import is_out_of_memory
from lockstep.model.losses.additivity import DOUBLED, Piece, Sum, is_apart
from lockstep.model.losses.loss import Totalled
from lockstep.tensors.pytree import MAKE_SEEN, opaque_class

ADVICE = (
    "return (total, count), the sum over the items that count (not padding) and their number; or "
    "use single (or mp) "
    "without accumulate"
)

OWN_LOSS = (
    "take loss=lockstep.model_loss, which weights what the model computed itself by the "
    "labels that count"
)


def found_later(loss: Totalled, step: int) -> LossError:
    """For an update that an accelerator has found wrong."""
    kind = "sum" if loss.gives_pairs else "mean"
    return LossError(f"{loss.name} is not a {kind} over samples in step {step}", fix=_advice(loss))


def not_additive(loss: Totalled, wrong: Sum, step: int, *, is_sum: bool) -> LossError:
    """With the numbers that don't add up; ``is_sum``: those of a scalar itself, rather than its
    means, do.
    """
    if loss.reads_beside:
        return LossError(
            f"{loss.name} reads what forward computes beside the outputs (an attribute, a "
            "variable outside of the "
            "model), of which a part of a batch can't be given its own: whether it is additive "
            "can't be checked",
            fix="let forward return it, in a tuple or a dict; or use single (or mp) without "
            "accumulate",
        )
    whole, one, other = wrong
    when = f" in step {step}" if step > 1 else ""
    if loss.gives_pairs:
        totals, counts = zip(*(piece.numbers for piece in wrong), strict=True)
        what, (a, b, c) = (
            ("total", totals) if is_apart(*totals, tolerance=DOUBLED) else ("count", counts)
        )
        digits = 6 if float(f"{b:.6g}") + float(f"{c:.6g}") != float(f"{a:.6g}") else 12
        numbers = f"whole {a:.{digits}g}, its two parts {b:.{digits}g} and {c:.{digits}g}"
        return LossError(
            f"{loss.name}: the {what} is not a sum over samples{when} ({numbers})",
            fix=_advice(loss),
        )
    means = [float(piece.total) / piece.samples for piece in wrong]
    if is_sum:
        return LossError(
            f"{loss.name} is not a mean over samples but a sum, its value depends on the batch "
            "size "
            f"(whole {means[0]:.6g}, its parts add up to it)",
            fix="use reduction='mean', or return (total, count)",
        )
    together = (float(one.total) + float(other.total)) / whole.samples
    return LossError(
        f"{loss.name} is not a mean over samples{when} (whole {means[0]:.6g}, from two parts "
        f"{together:.6g})",
        fix=_advice(loss),
    )


def part_not_additive(loss: Totalled, name: str, wrong: Sum) -> str:
    """A line on a part of the loss, the same for each local batch; NaN stands for outputs that
    can't be cut.
    """
    said = f'{loss.name}: part "{name}" '
    ends = (
        "its totals and counts for parts of a batch are added up, so its value may differ from "
        "single-device training"
    )
    if any(math.isnan(total) for total, _ in wrong.of_part(name)):
        return f"{said}reads what isn't one row for each sample, or is NaN for some samples: {ends}"
    return f"{said}is not a sum over samples: {ends}"


def why_not_taken(error: Exception, nest: tuple[Any, Any], size: int, samples: int) -> str:
    """Why a loss can't be checked that fails with a part of the samples, outputs and targets."""
    said = first_line(error)
    if name := opaque_class(nest):
        return f"it reads an object of the class {name}, whose tensors are not seen ({MAKE_SEEN})"
    if "does not require grad" in said or "not have been used in the graph" in said:
        return "it differentiates outputs, of which a part has no graph"
    return f"it fails with {size} of {samples} samples ({said})"


@contextlib.contextmanager
def squeezing_explained(outputs: Any, targets: Any, samples: int) -> Iterator[None]:
    """In which a loss is called, or checked, that fails with outputs of one sample without a row
    for it.

    Raises:
        LossError: instead of what it raises.
    """
    try:
        yield
    except Exception as error:
        if (
            samples != 1
            or not isinstance(outputs, torch.Tensor)
            or not isinstance(targets, torch.Tensor)
        ):
            raise
        if outputs.shape[:1] == (1,) or targets.shape[:1] != (1,) or is_out_of_memory(error):
            raise
        raise LossError(
            f"the loss can't take outputs {tuple(outputs.shape)} and targets "
            f"{tuple(targets.shape)} of a local batch "
            "of one sample: the outputs have no row for it",
            kind="shape",
            fix="where forward calls squeeze(), name the dimension, as in squeeze(-1)",
        ) from error


def remembers(loss: Totalled, *, outside: bool) -> str:
    """Of one that has changed what it holds, or what is outside of it."""
    return (
        f"{loss.name} remembers something from call to call, and is called for each local batch, "
        "not once a batch: "
        "where its value depends on that, results differ from single-device training; single "
        "without accumulate keeps "
        f"them{'; whether it is additive over samples is not checked' * outside}"
    )


def draws(loss: Totalled) -> list[str]:
    """The line on a loss that draws other random numbers for each part of a batch.

    Raises:
        LossError: it gives a scalar.
    """
    what = f"{loss.name} draws random numbers"
    if not loss.gives_pairs:
        raise LossError(
            f"{what}, so whether it is a mean over samples can't be checked", fix=ADVICE
        )
    return [
        f"{what}, others than one device would; whether it is additive over samples isn't checked"
    ]


def parts_that_bend(
    loss: Totalled, without: Iterable[Piece], bent: Collection[str], said: set[str]
) -> list[str]:
    """A line on each part that reads outputs which can't be cut, and is no sum with those of parts
    of a batch.

    Args:
        loss: whose they are.
        without: what it makes of a batch with NaN in the place of one of such outputs each.
        bent: the names of parts that are no sums then.
        said: those that a line was given for; more come in.
    """
    pieces = {
        name: made
        for made in without
        for name, (total, _) in made.parts.items()
        if math.isnan(total)
    }
    wrong = {name: made for name, made in pieces.items() if name in bent and name not in said}
    said.update(wrong)
    return [part_not_additive(loss, name, Sum(made, made, made)) for name, made in wrong.items()]


def _advice(loss: Totalled) -> str:
    if not loss.gives_pairs:
        return ADVICE
    return (
        "return the sum over the items of the batch, and their number; or use single (or mp) "
        "without accumulate"
    )
