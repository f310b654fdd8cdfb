"""What editors and type checkers can complete: the signatures of what takes a job's settings."""

from __future__ import annotations

import dataclasses
import inspect
import pickle
from collections.abc import Callable
from typing import Any

import pytest

import lockstep
from lockstep.data import AnyLoader
from lockstep.job import SETTINGS, Job
from lockstep.recipe import Recipe
from lockstep.signatures import JobFields, LoaderFields, UpdateFields

from zoo import ZOO  # isort: skip

MADE_BY_HAND = {"model", "loss", "optimizer"}
FIELDS = {field.name: field.type for field in dataclasses.fields(Job)}
OF_RECIPE = {field.name for field in dataclasses.fields(Recipe)} - MADE_BY_HAND
OF_LOADER = set(inspect.signature(AnyLoader).parameters) - {"dataset", "batch_size"}


@pytest.mark.parametrize(
    ("function", "names"),
    [
        (lockstep.Job, set(FIELDS)),
        (lockstep.train, {"job", "strategy", "devices", *FIELDS}),
        (lockstep.parallelize, {"strategy", "devices", *MADE_BY_HAND, *OF_RECIPE}),
        (lockstep.batches, {"dataset", "batch_size", *OF_LOADER}),
    ],
)
def test_a_signature_names_what_may_be_given(function: Callable[..., Any], names: set[str]) -> None:
    parameters = inspect.signature(function).parameters
    assert names <= parameters.keys()
    kinds = {parameter.kind for parameter in parameters.values()}
    assert kinds <= {inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY}


def test_the_lists_for_type_checkers_are_those_of_the_classes() -> None:
    assert set(UpdateFields.__annotations__) == OF_RECIPE
    assert set(LoaderFields.__annotations__) == OF_LOADER
    assert set(JobFields.__annotations__) == set(FIELDS)
    for name in SETTINGS:
        assert JobFields.__annotations__[name].__forward_arg__ == FIELDS[name]


def test_a_job_is_sent_without_being_made_again() -> None:
    job = ZOO["mlp"].replace(model=dict, loss=max, optimizer=min, metrics={}, train_data=[1])
    assert pickle.loads(pickle.dumps(job)).batch_size == job.batch_size
