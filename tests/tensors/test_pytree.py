"""Inputs of any nesting are cut, moved and measured leaf by leaf."""

from __future__ import annotations

import functools
from collections import OrderedDict, namedtuple
from collections.abc import Iterator, MutableMapping
from dataclasses import InitVar, dataclass
from typing import Any

import pytest
import torch

from lockstep.errors import InputError
from lockstep.tensors.pytree import call, described, to_device
from lockstep.tensors.rows import batch_size_of, cut

Point = namedtuple("Point", "x y")


@dataclass(frozen=True)
class Boxed:
    x: torch.Tensor
    name: str


class Record:
    def __init__(self, x: torch.Tensor) -> None:
        self.x, self.name = x, "n"

    @functools.cached_property
    def total(self) -> float:
        return float(self.x.sum())


@dataclass
class Totalled:
    x: torch.Tensor

    def __post_init__(self) -> None:
        self.number, self.squares = 3, self.x.square()

    @functools.cached_property
    def total(self) -> float:
        return float(self.x.sum())


def test_every_kind_of_nesting_is_cut_and_keeps_its_type() -> None:
    x = torch.arange(6).reshape(6, 1)
    tree = {
        "a": (x, Point(x, None)),
        "b": [Boxed(x, "n")],
        "c": OrderedDict(z=x),
        "d": torch.tensor(3),
    }
    found = cut(tree, 2, 3, 6)
    assert found["a"][1].x.flatten().tolist() == [2, 3, 4]
    assert isinstance(found["a"][1], Point) and isinstance(found["c"], OrderedDict)
    assert found["b"][0].x.shape == (3, 1) and found["b"][0].name == "n"
    assert found["d"].item() == 3


def test_what_a_dataclass_computes_of_its_fields_is_cut_with_them() -> None:
    """It was that of the whole batch; an error where a mask is one, a silent one where it is a
    number in a tensor.
    """
    found = cut(Totalled(torch.arange(6.0).reshape(6, 1)), 2, 3, 6)
    assert torch.equal(found.squares, found.x.square()) and found.number == 3 and found.total == 9.0


def test_a_list_with_an_item_for_each_sample_is_cut_too() -> None:
    boxes = [torch.zeros(n, 4) for n in (2, 3, 1, 5)]
    assert [len(b) for b in cut(boxes, 1, 2, 4)] == [3, 1]
    assert cut(["a", "b", "c", "d"], 2, 2, 4) == ["c", "d"]


@pytest.mark.parametrize("kind", [Totalled, Record])
def test_a_list_of_objects_has_one_for_each_sample(kind: Any) -> None:
    """Also where each has as many rows as there are samples."""
    assert len(cut([kind(torch.zeros(4, 2)) for _ in range(4)], 1, 2, 4)) == 2


def test_a_list_of_batches_is_a_nesting() -> None:
    x = torch.zeros(2, 3)
    assert [t.shape for t in cut([x, x], 0, 1, 2)] == [(1, 3), (1, 3)]


def test_the_size_is_that_of_the_first_tensor_that_has_one() -> None:
    assert batch_size_of({"n": 3, "scale": torch.tensor(2.0), "x": torch.zeros(7, 2)}) == 7
    with pytest.raises(
        InputError, match=r"inputs are dict\(n=int\), without a tensor that has a batch"
    ):
        batch_size_of({"n": 3})
    plain = Record(torch.zeros(4, 2))
    with pytest.raises(InputError, match=r"inputs are list\(Record\), without a tensor"):
        batch_size_of([plain])


def test_only_floating_tensors_change_their_format() -> None:
    x, i = to_device(
        (torch.zeros(1, 2, 3, 3), torch.zeros(1, dtype=torch.long)),
        torch.device("cpu"),
        torch.float64,
    )
    assert (x.dtype, i.dtype) == (torch.float64, torch.int64)
    image = to_device(torch.zeros(2, 3, 4, 4), torch.device("cpu"), channels_last=True)
    assert image.is_contiguous(memory_format=torch.channels_last)


def test_a_list_of_samples_that_nobody_padded_is_named_in_one_line() -> None:
    ragged = [torch.zeros(3), torch.zeros(4), torch.zeros(5)]
    with pytest.raises(
        InputError,
        match=r"Linear's forward\(input\) can't take list\(float32\(3,\), .*pad samples of different",
    ):
        call(torch.nn.Linear(8, 2), ragged)
    with pytest.raises(InputError, match=r"float32\(3,\), ... 12 in all\)"):
        call(torch.nn.Linear(8, 2), [torch.zeros(3)] * 12)
    with pytest.raises(
        InputError, match=r"can't take dict\(x=float32\(2, 8\)\): .* is passed by its names"
    ):
        call(torch.nn.Linear(8, 2), {"x": torch.zeros(2, 8)})


def test_what_a_model_raises_itself_stays_as_it_is() -> None:
    def forward(x: torch.Tensor) -> None:
        raise TypeError("of its own")

    with pytest.raises(TypeError, match="of its own"):
        call(forward, torch.zeros(2))


class Attributes(dict):
    """The idiom by which a key is an attribute, too."""

    def __init__(self, **items: Any) -> None:
        super().__init__(items)
        self.__dict__ = self


class Store(MutableMapping):
    def __init__(self, **items: Any) -> None:
        self._items = items

    def __getitem__(self, key: str) -> Any:
        return self._items[key]

    def __setitem__(self, key: str, value: Any) -> None:
        self._items[key] = value

    def __delitem__(self, key: str) -> None:
        del self._items[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self._items)

    def __len__(self) -> int:
        return len(self._items)


X = torch.arange(6.0)


@pytest.mark.parametrize("made", [lambda: Totalled(X), lambda: Attributes(x=X)])
def test_parts_of_an_object_have_nothing_that_was_computed_of_the_whole(made: Any) -> None:
    """Found by trial: a weight that was cached for the batch was that of all its parts."""
    whole = made()
    if not isinstance(whole, dict):
        assert whole.total == 15
    part = cut(whole, 1, 2, 6)
    assert part.x.tolist() == [1, 2] and whole.x is X
    assert isinstance(part, dict) or part.total == 3
    assert getattr(part, "number", 3) == 3


class Weighted(OrderedDict):
    @functools.cached_property
    def weight(self) -> float:
        return float(self["x"].sum())


def test_a_mapping_has_nothing_that_was_computed_of_the_whole() -> None:
    whole = Weighted(x=X)
    assert whole.weight == 15
    part = cut(whole, 1, 2, 6)
    assert part.weight == 3 and whole.weight == 15


@dataclass
class Scaled:
    x: torch.Tensor
    scale: InitVar[float] = 1.0

    def __post_init__(self, scale: float) -> None:
        self.scale = scale


def test_what_an_instance_has_in_place_of_its_class_is_kept() -> None:
    assert cut(Scaled(X, 0.5), 1, 2, 6).scale == 0.5


def test_a_list_is_described_by_its_class_and_its_first_items() -> None:
    assert described(torch.Size([2, 3])) == "Size(int, int)"
    assert described(torch.Size(range(9))) == "Size(int, int, int, ... 9 in all)"


def test_a_mapping_of_any_class_keeps_its_own_items() -> None:
    whole = Store(x=X)
    assert cut(whole, 1, 2, 6)["x"].tolist() == [1, 2] and whole["x"] is X


def test_objects_of_other_classes_are_left_as_they_are() -> None:
    record = Record(X)
    assert cut(record, 1, 2, 6) is record


def test_texts_in_a_tuple_are_cut() -> None:
    assert cut((X, ("a", "b", "c", "d", "e", "f")), 1, 2, 6)[1] == ("b", "c")
    assert cut((X, ("a", "b")), 1, 2, 6)[1] == ("a", "b")


class Moves:
    """It is moved in place, and takes devices only."""

    def __init__(self, values: torch.Tensor) -> None:
        self.values = values

    def to(self, device: torch.device) -> Moves:
        self.values = self.values.to(device=device)
        return self


def test_an_object_with_to_is_moved_by_it_and_stays_as_it_is_where_it_takes_no_format() -> None:
    nest = {"graphs": Moves(torch.ones(2)), "class": Moves, "text": "to"}
    moved = to_device(nest, torch.device("meta"), torch.float64)
    assert moved["graphs"].values.is_meta and moved["graphs"].values.dtype is torch.float32
    assert moved["class"] is Moves and moved["text"] == "to"


def test_packed_sequences_are_moved_to_another_format() -> None:
    """Found by trial: a recurrent network with packed inputs could not be trained in fp64."""
    packed = torch.nn.utils.rnn.pack_sequence([torch.ones(3, 2), torch.ones(1, 2)])
    moved = to_device((packed, torch.ones(2)), torch.device("cpu"), torch.float64)
    assert moved[0].data.dtype == moved[1].dtype == torch.float64
    words = torch.nn.utils.rnn.pack_sequence([torch.ones(3, dtype=torch.int64)])
    assert to_device(words, torch.device("cpu"), torch.float64).data.dtype == torch.int64
