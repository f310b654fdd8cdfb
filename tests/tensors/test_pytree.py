"""Inputs of any nesting are cut, moved and measured leaf by leaf."""

from __future__ import annotations

from collections import OrderedDict, namedtuple
from dataclasses import dataclass

import pytest
import torch

from lockstep.errors import InputError
from lockstep.tensors.pytree import call, to_device
from lockstep.tensors.samples import batch_size_of, cut

Point = namedtuple("Point", "x y")


@dataclass(frozen=True)
class Boxed:
    x: torch.Tensor
    name: str


def test_every_kind_of_nesting_is_cut_and_keeps_its_type() -> None:
    x = torch.arange(6).reshape(6, 1)
    tree = {"a": (x, Point(x, None)), "b": [Boxed(x, "n")], "c": OrderedDict(z=x), "d": torch.tensor(3)}
    found = cut(tree, 2, 3, 6)
    assert found["a"][1].x.flatten().tolist() == [2, 3, 4]
    assert isinstance(found["a"][1], Point) and isinstance(found["c"], OrderedDict)
    assert found["b"][0].x.shape == (3, 1) and found["b"][0].name == "n"
    assert found["d"].item() == 3


def test_a_list_with_an_item_for_each_sample_is_cut_too() -> None:
    boxes = [torch.zeros(n, 4) for n in (2, 3, 1, 5)]
    assert [len(b) for b in cut(boxes, 1, 2, 4)] == [3, 1]
    assert cut(["a", "b", "c", "d"], 2, 2, 4) == ["c", "d"]


def test_a_list_of_batches_is_a_nesting() -> None:
    x = torch.zeros(2, 3)
    assert [t.shape for t in cut([x, x], 0, 1, 2)] == [(1, 3), (1, 3)]


def test_the_size_is_that_of_the_first_tensor_that_has_one() -> None:
    assert batch_size_of({"n": 3, "scale": torch.tensor(2.0), "x": torch.zeros(7, 2)}) == 7
    with pytest.raises(InputError, match="no tensor with a batch dimension"):
        batch_size_of({"n": 3})


def test_only_floating_tensors_change_their_format() -> None:
    x, i = to_device((torch.zeros(1, 2, 3, 3), torch.zeros(1, dtype=torch.long)), torch.device("cpu"), torch.float64)
    assert (x.dtype, i.dtype) == (torch.float64, torch.int64)
    image = to_device(torch.zeros(2, 3, 4, 4), torch.device("cpu"), channels_last=True)
    assert image.is_contiguous(memory_format=torch.channels_last)


def test_a_list_of_samples_that_nobody_padded_is_named_in_one_line() -> None:
    ragged = [torch.zeros(3), torch.zeros(4), torch.zeros(5)]
    with pytest.raises(
        InputError, match=r"Linear's forward\(input\) can't take \[float32\(3,\), .*pad samples of different"
    ):
        call(torch.nn.Linear(8, 2), ragged)
    with pytest.raises(InputError, match=r"float32\(3,\), ... 12 in all\]"):
        call(torch.nn.Linear(8, 2), [torch.zeros(3)] * 12)
    with pytest.raises(InputError, match=r"can't take {'x': float32\(2, 8\)}: .* is passed by its names"):
        call(torch.nn.Linear(8, 2), {"x": torch.zeros(2, 8)})


def test_what_a_model_raises_itself_stays_as_it_is() -> None:
    def forward(x: torch.Tensor) -> None:
        raise TypeError("of its own")

    with pytest.raises(TypeError, match="of its own"):
        call(forward, torch.zeros(2))
