"""Scatter and gather: chunk sizes, nestings, gradients, and what is refused."""

import collections
import dataclasses
import warnings
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

import pytest
import torch
from torch import nn
from torch.nn.utils.rnn import pack_padded_sequence

from lockstep.errors import DeviceError, InputError
from lockstep.launch import devices
from lockstep.parallel import gather, scatter, scatter_kwargs


class Pair(NamedTuple):
    left: Any
    right: Any


@dataclasses.dataclass
class Batch:
    images: torch.Tensor
    name: str = "train"
    derived: Any = dataclasses.field(default=None, init=False)


@dataclasses.dataclass(frozen=True, slots=True)
class Frozen:
    images: torch.Tensor
    extra: dict[str, Any]


@pytest.mark.parametrize(
    ("batch", "count", "sizes"),
    [
        (30, 2, [15, 15]),
        (30, 3, [10, 10, 10]),
        (256, 4, [64] * 4),
        (10, 2, [5, 5]),
        (10, 4, [3, 3, 3, 1]),
        (3, 8, [1, 1, 1]),
        (9, 4, [3, 3, 3]),
        (1, 2, [1]),
    ],
)
def test_chunks_are_those_of_torch_chunk(batch: int, count: int, sizes: list[int]) -> None:
    whole = torch.randn(batch, 2)
    shares = scatter(whole, f"{count}xcpu")
    assert isinstance(shares, tuple)
    assert [len(share) for share in shares] == sizes == [len(c) for c in whole.chunk(count)]
    assert torch.equal(torch.cat(shares), whole)


@pytest.mark.parametrize(
    "wanted", ["2xcpu", ["cpu", "cpu"], [torch.device("cpu")] * 2, devices.slots(2)]
)
def test_devices_may_be_named_in_any_way(wanted: Any) -> None:
    assert [len(share) for share in scatter(torch.zeros(4), wanted)] == [2, 2]


def test_devices_that_do_not_exist_are_refused() -> None:
    with pytest.raises(DeviceError):
        scatter(torch.zeros(4), ["cuda:977"])


@pytest.mark.parametrize("dim", [1, -1])
def test_any_dimension_can_be_cut(dim: int) -> None:
    assert [tuple(share.shape) for share in scatter(torch.zeros(2, 5), "2xcpu", dim)] == [
        (2, 3),
        (2, 2),
    ]


def test_shares_are_copies() -> None:
    whole = torch.zeros(4)
    scatter(whole, "2xcpu")[1].add_(1)
    assert whole.tolist() == [0] * 4


def test_nestings_keep_their_types_and_order() -> None:
    x = torch.arange(4.0)
    ordered = collections.OrderedDict(b=x, a=[x, (x, "word")])
    counted = collections.defaultdict(list, {"z": x, "n": 7})
    inputs = [Pair(x, None), ordered, counted, Batch(x), Frozen(x, {"y": x, "k": 3}), (), {}]
    shares = scatter(inputs, "2xcpu")
    assert isinstance(shares, list) and len(shares) == 2
    pair, odict, ddict, batch, frozen, nothing, empty = shares[1]
    assert isinstance(pair, Pair) and pair.left.tolist() == [2, 3] and pair.right is None
    assert type(odict) is collections.OrderedDict and list(odict) == ["b", "a"]
    assert odict["a"][1][1] == "word" and odict["a"][1][0].tolist() == [2, 3]
    assert (
        type(ddict) is collections.defaultdict and ddict.default_factory is list and ddict["n"] == 7
    )
    assert isinstance(batch, Batch) and batch.images.tolist() == [2, 3] and batch.name == "train"
    assert (
        isinstance(frozen, Frozen)
        and frozen.extra["y"].tolist() == [2, 3]
        and frozen.extra["k"] == 3
    )
    assert nothing == () and empty == {}
    assert inputs[3].images is x, "the original is left as it was"


def test_a_result_of_torch_max_is_cut_as_a_tuple() -> None:
    found = torch.max(torch.randn(4, 3), dim=1)
    assert [share.indices.shape[0] for share in scatter(found, "2xcpu")] == [2, 2]


def test_what_is_no_tensor_is_shared_and_so_is_a_tensor_of_no_dimensions() -> None:
    marker, scalar = object(), torch.tensor(3.0)
    for share in scatter((torch.zeros(4), marker, scalar), "2xcpu"):
        assert share[1] is marker and share[2] is scalar
    assert scatter([marker, 1], "3xcpu") == [[marker, 1]] * 3


def test_explicit_sizes_keep_an_entry_for_each_device() -> None:
    shares = scatter(torch.arange(5), "3xcpu", sizes=[2, 3, 0])
    assert [share.tolist() for share in shares] == [[0, 1], [2, 3, 4], []]


def test_tensors_of_different_sizes_are_refused_with_both_sizes() -> None:
    with pytest.raises(
        InputError, match=r"different sizes along dimension 0 \(shapes \(6, 2\) and \(4,\)\)"
    ):
        scatter({"x": torch.zeros(6, 2), "mask": torch.zeros(4)}, "2xcpu")
    with pytest.raises(InputError, match=r"\(6,\) and \(4,\)"):
        scatter_kwargs((torch.zeros(6),), {"mask": torch.zeros(4)}, "2xcpu")


def test_an_empty_batch_is_refused() -> None:
    with pytest.raises(InputError, match="batch of 0"):
        scatter(torch.zeros(0, 3), "2xcpu")


def test_a_dimension_that_is_not_there_is_refused() -> None:
    with pytest.raises(InputError, match=r"shape \(3,\) has no dimension 1"):
        scatter([torch.zeros(3, 2), torch.zeros(3)], "2xcpu", dim=1)


def test_a_packed_sequence_is_refused_rather_than_torn_apart() -> None:
    with pytest.raises(InputError, match="PackedSequence"):
        scatter(pack_padded_sequence(torch.zeros(3, 2, 1), [3, 2]), "2xcpu")


def test_keyword_arguments_are_cut_together_with_the_positional_ones() -> None:
    args, kwargs = scatter_kwargs((torch.arange(5), "flag"), {"y": torch.arange(5)}, "2xcpu")
    assert [a[0].tolist() for a in args] == [[0, 1, 2], [3, 4]] == [k["y"].tolist() for k in kwargs]
    assert all(a[1] == "flag" for a in args)


def test_positional_or_keyword_arguments_may_be_missing() -> None:
    assert scatter_kwargs((), {"y": torch.arange(3)}, "2xcpu")[0] == ((), ())
    assert scatter_kwargs((torch.arange(3),), None, "2xcpu")[1] == ({}, {})
    assert scatter_kwargs((), {}, "2xcpu") == ((), ())


def test_as_many_keyword_arguments_as_positional_ones_come_out_of_a_small_batch() -> None:
    args, kwargs = scatter_kwargs(("flag",), {"y": torch.arange(2)}, "4xcpu")
    assert len(args) == len(kwargs) == 2


def test_gradients_come_back_through_scatter_and_gather() -> None:
    x = torch.randn(5, 3, dtype=torch.float64, requires_grad=True)

    def there_and_back(x: torch.Tensor) -> torch.Tensor:
        shares = scatter(x, "3xcpu")
        whole = gather([share.sin() * (i + 1) for i, share in enumerate(shares)], "cpu")
        assert isinstance(whole, torch.Tensor)
        return whole

    assert torch.autograd.gradcheck(there_and_back, x)
    assert torch.autograd.gradgradcheck(there_and_back, x)


def test_a_share_that_nothing_uses_has_zero_gradients() -> None:
    x = torch.ones(4, requires_grad=True)
    scatter(x, "2xcpu")[0].sum().backward()
    assert x.grad is not None and x.grad.tolist() == [1, 1, 0, 0]


def test_a_replica_may_change_its_share_in_place() -> None:
    """Shares made by ``chunk`` refuse that, and make the backward of the other replicas fail."""
    x = torch.randn(4, 3)
    weight = torch.randn(3, 2, requires_grad=True)
    one, other = scatter(x, "2xcpu")
    loss = (one @ weight).sum()
    other.mul_(2)
    loss.backward()
    y = torch.randn(4, requires_grad=True)
    nn.functional.relu_(scatter(y * 1, "2xcpu")[0]).sum().backward()
    assert y.grad is not None and torch.equal(y.grad[:2], (y[:2] > 0).float())


def test_gather_joins_nestings_in_order() -> None:
    outputs = [
        {
            "logits": torch.full((n, 2), float(n)),
            "aux": Pair([torch.ones(n)], None),
            "kind": "seq",
            "b": Batch(torch.ones(n)),
        }
        for n in (2, 1)
    ]
    whole = gather(outputs, "cpu")
    assert list(whole) == ["logits", "aux", "kind", "b"]
    assert whole["logits"].tolist() == [[2, 2], [2, 2], [1, 1]]
    assert (
        isinstance(whole["aux"], Pair)
        and whole["aux"].left[0].shape == (3,)
        and whole["aux"].right is None
    )
    assert whole["kind"] == "seq" and whole["b"].images.shape == (3,)


@pytest.mark.parametrize("target", ["cpu", -1, torch.device("cpu"), devices.slots(2)[1]])
def test_gather_takes_any_name_of_the_cpu(target: Any) -> None:
    assert gather([torch.ones(2), torch.ones(1)], target).shape == (3,)


def test_gather_along_another_dimension() -> None:
    assert gather([torch.ones(2, 3), torch.ones(2, 1)], "cpu", dim=1).shape == (2, 4)


def test_gathered_scalars_are_a_vector_and_a_warning_says_so() -> None:
    losses = [torch.tensor(float(i), requires_grad=True) for i in range(3)]
    with pytest.warns(UserWarning, match="scalars"):
        whole = gather(losses, "cpu")
    assert whole.tolist() == [0, 1, 2]
    whole.sum().backward()
    assert all(loss.grad == 1 for loss in losses)


def test_gather_fills_dicts_by_key_not_by_order() -> None:
    whole = gather(
        [{"a": torch.zeros(1), "b": torch.ones(1)}, {"b": torch.ones(1), "a": torch.zeros(1)}],
        "cpu",
    )
    assert whole["a"].tolist() == [0, 0] and whole["b"].tolist() == [1, 1]


class Cache:
    """Made of pairs, and gone through in pairs, as the caches of transformers are."""

    def __init__(self, pairs: Iterable[tuple[torch.Tensor, torch.Tensor]] = ()) -> None:
        self.pairs = list(pairs)

    def __iter__(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        return iter(self.pairs)


def test_an_object_that_gives_its_tensors_is_made_anew_of_the_joined_ones() -> None:
    one, other = (
        Cache([(torch.full((size, 2), 1.0), torch.full((size, 3), 2.0))]) for size in (2, 1)
    )
    whole = gather([one, other], "cpu")
    assert type(whole) is Cache
    ((keys, values),) = whole.pairs
    assert torch.equal(keys, torch.full((3, 2), 1.0))
    assert torch.equal(values, torch.full((3, 3), 2.0))
    assert gather([one, one], "cpu") is one
    with pytest.raises(InputError, match=r"Caches of 1, 0 parts"):
        gather([one, Cache()], "cpu")


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ({"a": torch.zeros(2)}, {"b": torch.zeros(2)}),
        ([torch.zeros(2)], [torch.zeros(2), torch.zeros(2)]),
        ((torch.zeros(2),), [torch.zeros(2)]),
        (torch.zeros(2), None),
        (None, torch.zeros(2)),
    ],
)
def test_outputs_of_different_structure_are_refused_and_both_shown(one: Any, other: Any) -> None:
    with pytest.raises(InputError, match=r"device 0 gave .*device 1 ") as caught:
        gather([one, other], "cpu")
    assert "float32(2,)" in str(caught.value)


@pytest.mark.filterwarnings("ignore:.*nested tensors")  # PyTorch's own
def test_values_that_differ_and_shapes_that_do_not_fit_are_refused() -> None:
    with pytest.raises(InputError, match="gave 3 and device 1 4"):
        gather([3, 4], "cpu")
    with pytest.raises(InputError, match=r"\(2, 3\), \(2, 4\)"):
        gather([torch.ones(2, 3), torch.ones(2, 4)], "cpu")
    with pytest.raises(InputError, match=r"can't be joined along dimension 0; where each"):
        gather([torch.ones(2, 3), torch.ones(2)], "cpu")
    nested = torch.nested.nested_tensor([torch.ones(2)], layout=torch.jagged)
    with pytest.raises(InputError, match="nested tensors can't be joined: return padded ones"):
        gather([nested] * 2, "cpu")
    with pytest.raises(InputError, match="no outputs"):
        gather([], "cpu")


def test_what_is_the_same_everywhere_is_given_once_without_a_warning() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert gather([("seq", 3, None), ("seq", 3, None)], "cpu") == ("seq", 3, None)
