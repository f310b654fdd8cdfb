"""Who holds which layer: device maps, and what is said of wrong ones."""

from __future__ import annotations

import pytest
from torch import nn

from lockstep.errors import StrategyError
from lockstep.pipelining.device_map import stage_of


def net() -> nn.Module:
    return nn.Sequential(
        nn.Linear(2, 3), nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3)), nn.Linear(3, 1)
    )


def test_the_longest_prefix_wins() -> None:
    found = stage_of(net(), {"": 0, "1": 1, "1.1": 2})
    assert found["0.weight"] == found["2"] == found[""] == 0
    assert found["1.0.bias"] == found["1"] == 1
    assert found["1.1.running_mean"] == 2


def test_a_container_of_several_stages_needs_no_stage() -> None:
    found = stage_of(net(), {"0": 0, "1.0": 0, "1.1": 1, "2": 1}, stages=2)
    assert "1" not in found and "" not in found


def test_tied_weights_are_found_under_both_names() -> None:
    model = net()
    model[1][0] = nn.Linear(3, 1)
    model[2].weight = model[1][0].weight
    found = stage_of(model, {"0": 0, "1": 0, "2": 1})
    assert (found["1.0.weight"], found["2.weight"]) == (0, 1)


@pytest.mark.parametrize(
    ("device_map", "stages", "says"),
    [
        ({"0": 0, "1": 1}, 2, 'leaves out 2 of 8 parameters, "2.weight" first'),
        ({"": 0, "1.2": 1}, 2, 'no "1.2": did you mean "1.'),
        ({"": 0, "1": 2}, 2, "stage 2, the last of 2 is 1: use 3 devices"),
        ({"": 0, "1": 1}, 3, "stage 2 holds no parameter, of 3 stages: use 2 devices"),
        ({"": 0, "1": 2}, None, "stage 1 holds no parameter, of 3 stages"),
        ({"": 0, "1": -1}, 2, '"1" is on stage -1'),
        ({"": 0, "1": "cuda:1"}, 2, "is on stage 'cuda:1'"),
    ],
)
def test_a_map_that_does_not_fit_is_refused(device_map, stages, says) -> None:
    with pytest.raises(StrategyError, match=says):
        stage_of(net(), device_map, stages)
