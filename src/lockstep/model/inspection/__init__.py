"""What a model does in forward that parts of a batch, or replicas, can't do as one device would."""

from lockstep.model.inspection.attributes import (
    acting_buffers,
    attribute_place,
    attribute_prints,
    attribute_tensors,
    detached_attributes,
    holding_on,
    holds_on_to,
    is_made_by_compile,
    is_plain,
    kept_state,
    names_in,
    prints_of,
)
from lockstep.model.inspection.backward import comes_from_within
from lockstep.model.inspection.code_names import hash_of
from lockstep.model.inspection.findings import BESIDE, Seen
from lockstep.model.inspection.forward import accelerators_of, look
from lockstep.model.inspection.no_draws import NotedDraws, drawing_nothing
from lockstep.model.inspection.nonlinear import NoticedHooks, hooked_parameters, may_be_nonlinear
from lockstep.model.inspection.outside_variables import HOOKS, OutsideVariables, functions_in
from lockstep.model.inspection.own_calls import at_own_calls
from lockstep.model.inspection.samples import is_ragged
from lockstep.model.inspection.watched import NORMS, drops, without_noise, writes_in_place

__all__ = [
    "BESIDE",
    "HOOKS",
    "NORMS",
    "NotedDraws",
    "NoticedHooks",
    "OutsideVariables",
    "Seen",
    "accelerators_of",
    "acting_buffers",
    "at_own_calls",
    "attribute_place",
    "attribute_prints",
    "attribute_tensors",
    "comes_from_within",
    "detached_attributes",
    "drawing_nothing",
    "drops",
    "functions_in",
    "hash_of",
    "holding_on",
    "holds_on_to",
    "hooked_parameters",
    "is_made_by_compile",
    "is_plain",
    "is_ragged",
    "kept_state",
    "look",
    "may_be_nonlinear",
    "names_in",
    "prints_of",
    "without_noise",
    "writes_in_place",
]
