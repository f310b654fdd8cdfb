"""examples/own_loop.py and own_loop_gan.py: a person's own loop, on several ranks as on one
device.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType

import pytest
import torch

import lockstep


@pytest.fixture
def example(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str], ModuleType]]:
    """An example as a module that ranks can import, in float64."""
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2] / "examples"))
    torch.set_default_dtype(torch.float64)
    yield importlib.import_module
    torch.set_default_dtype(torch.float32)


def test_an_own_loop_has_the_losses_of_one_device_on_two_ranks(
    example: Callable[[str], ModuleType],
) -> None:
    train = example("own_loop").train
    first, last = (lockstep.launch(train, devices="1xcpu", args=(epochs,))[0] for epochs in (1, 3))
    assert last < first
    assert lockstep.launch(train, devices="2xcpu", args=(3,)) == pytest.approx(
        [last, last], abs=1e-10
    )


@pytest.mark.slow
def test_both_networks_of_a_gan_learn_on_two_ranks_as_on_one_device(
    example: Callable[[str], ModuleType],
) -> None:
    train = example("own_loop_gan").train
    before, reference = (
        lockstep.launch(train, devices="1xcpu", args=(epochs,))[0] for epochs in (0, 1)
    )
    for found in lockstep.launch(train, devices="2xcpu", args=(1,)):
        for network, expected, earlier in zip(found, reference, before, strict=True):
            for name, weight in expected.state_dict().items():
                assert weight.dtype == torch.float64
                assert (weight - earlier.state_dict()[name]).abs().max() > 1e-4  # it learns
                torch.testing.assert_close(
                    network.state_dict()[name], weight, rtol=0, atol=1e-10, msg=name
                )
