"""Shapes: what replicas see, beside what is outside."""

import textwrap

import pytest
import torch
from torch import nn

from lockstep.parallel import DataParallel, data_parallel, trace_shapes


@pytest.mark.parametrize(
    "batch, slots, inside",
    [
        (30, 2, (15, 15)),
        (30, 3, (10, 10, 10)),
        (10, 2, (5, 5)),
        (256, 4, (64,) * 4),
        (1, 2, (1,)),
        (30, 1, (30,)),
    ],
)
def test_the_sizes_inside_and_outside_are_told(
    batch: int, slots: int, inside: tuple[int, ...]
) -> None:
    net = DataParallel(nn.Linear(5, 2), f"{slots}xcpu")
    with trace_shapes() as shapes:
        net(torch.randn(batch, 5))
    (call,) = shapes.calls
    assert call.size == batch and call.sizes == inside
    assert [row[0] for row in call.rows] == ["outside", *(f"cpu:{i}" for i in range(len(inside)))]


def test_they_are_printed_line_by_line() -> None:
    net = DataParallel(nn.Linear(5, 2), "2xcpu")
    with trace_shapes() as shapes:
        net(torch.randn(30, 5))
        data_parallel(net.module, None, "2xcpu", module_kwargs={"input": torch.randn(3, 5)})
    net(torch.randn(30, 5))
    table = """\
        call 1
        outside   float32(30, 5) -> float32(30, 2)
        cpu:0     float32(15, 5) -> float32(15, 2)
        cpu:1     float32(15, 5) -> float32(15, 2)
        call 2
        outside   input=float32(3, 5) -> float32(3, 2)
        cpu:0     input=float32(2, 5) -> float32(2, 2)
        cpu:1     input=float32(1, 5) -> float32(1, 2)"""
    assert str(shapes) == textwrap.dedent(table)


def test_without_inputs_there_is_nothing_to_cut() -> None:
    class Constant(nn.Module):
        def forward(self) -> torch.Tensor:
            return torch.ones(2)

    with trace_shapes() as shapes:
        DataParallel(Constant(), "2xcpu")()
    assert shapes.calls[0].size is None and shapes.calls[0].rows[1] == (
        "cpu:0",
        "nothing",
        "float32(2,)",
    )
    assert str(type(shapes)()) == ""
