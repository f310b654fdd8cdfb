"""Stages on accelerators, where there are none: fake devices see a tensor that was left on the wrong one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from lockstep.devices import Device
from lockstep.nesting import call, tensors
from lockstep.pipelining.layers import Layers
from lockstep.pipelining.stages import even_split, stage_of

from test_pipelining import Speaking, Twice, stack  # isort: skip

CARDS = (Device("cuda", 0), Device("cuda", 1))


def _place(model: nn.Module, found: dict[str, int]) -> None:
    """A fake parameter can't be given other data, so it is replaced."""
    made: dict[int, nn.Parameter] = {}
    for name, module in model.named_modules():
        for own, p in module._parameters.items():
            if p is not None:
                device = CARDS[found[f"{name}.{own}".lstrip(".")]].torch
                module._parameters[own] = made.setdefault(id(p), nn.Parameter(p.to(device)))


def _outputs(make: Callable[[], nn.Module], device_map: dict[str, int] | None, inputs: Any) -> tuple[nn.Module, Any]:
    with FakeTensorMode(), torch.no_grad():
        model = make()
        found = stage_of(model, device_map or even_split(model, 2), 2)
        _place(model, found)
        layers = Layers(model, found, CARDS)
        with layers.moving():
            return model, call(model, inputs())


@pytest.mark.parametrize(
    ("make", "device_map", "inputs"),
    [
        (stack, None, lambda: torch.randn(4, 6)),
        (lambda: Twice(False), {"other": 1, "": 0}, lambda: torch.randn(4, 6)),
        (Speaking, {"left": 0, "right": 1}, lambda: {"x": torch.randn(4, 6), "more": torch.randn(4)}),
    ],
)
def test_inputs_and_activations_follow_the_layers(make: Any, device_map: Any, inputs: Any) -> None:
    model, outputs = _outputs(make, device_map, inputs)
    assert {p.device.index for p in model.parameters()} == {0, 1}
    assert all(t.device.type == "cuda" for t in tensors(outputs))


def test_an_operand_written_in_place_stays_where_it_is() -> None:
    class Writing(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Linear(6, 6), nn.Linear(6, 6)

        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            one = self.first(x)
            two = self.second(one)
            one += two
            return one, two + one

    _, (one, two) = _outputs(Writing, {"first": 0, "second": 1}, lambda: torch.randn(4, 6))
    assert (one.device.index, two.device.index) == (0, 1)
