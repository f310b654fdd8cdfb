"""DataParallel on CPU devices: the numbers of the plain module, and the manners of
torch.nn.DataParallel.
"""

import contextlib
import copy
import gc
import io
import os
import threading
import warnings
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.autograd import forward_ad
from torch.utils.checkpoint import checkpoint

from lockstep.errors import DeviceError, InputError
from lockstep.launch import devices
from lockstep.parallel import Balanced, DataParallel, data_parallel, replicate

EXACT = {"rtol": 1e-12, "atol": 1e-12}


pytestmark = pytest.mark.usefixtures("float64")


class Net(nn.Module):
    """Layers of several kinds; BatchNorm would see its share only, so it is in eval mode."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(6, 8)
        self.norm = nn.BatchNorm1d(8).eval()
        self.second = nn.Linear(8, 3)
        self.register_buffer("scale", torch.full((3,), 0.5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(self.norm(self.first(x)).tanh()) * self.scale


class Applied(nn.Module):
    """A function as a module."""

    def __init__(self, function: Callable[..., Any], *children: nn.Module) -> None:
        super().__init__()
        self.function = function
        self.parts = nn.ModuleList(children)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.function(*self.parts, *args, **kwargs)


def gradients(module: nn.Module) -> list[torch.Tensor | None]:
    return [p.grad for p in module.parameters()]


def same(found: Any, wanted: Any) -> None:
    torch.testing.assert_close(found, wanted, **EXACT)


def pair(
    net: nn.Module, slots: Any = "2xcpu", **settings: Any
) -> tuple[nn.Module, DataParallel[Any]]:
    """The plain module, and a copy of it in parallel."""
    return net, DataParallel(copy.deepcopy(net), slots, **settings)


# The numbers


@pytest.mark.parametrize(
    "slots", ["2xcpu", "3xcpu", "5xcpu", [torch.device("cpu")] * 2, [devices.slots(1)[0]] * 2]
)
@pytest.mark.parametrize("size", [30, 7, 2, 1])
def test_outputs_and_gradients_are_those_of_the_plain_module(size: int, slots: Any) -> None:
    plain, net = pair(Net(), slots)
    x = torch.randn(size, 6, requires_grad=True)
    y = x.detach().clone().requires_grad_()
    wanted, found = plain(x), net(y)
    same(found, wanted)
    wanted.square().sum().backward()
    found.square().sum().backward()
    same(y.grad, x.grad)
    same(gradients(net.module), gradients(plain))


@pytest.mark.parametrize("optimizer", [torch.optim.SGD, torch.optim.AdamW])
@pytest.mark.parametrize("fused", [False, True])
def test_training_ends_where_the_plain_module_does_with_fused_optimizers_too(
    optimizer: Any, fused: bool
) -> None:
    plain, net = pair(Net(), "3xcpu")
    ones = [optimizer(m.parameters(), lr=0.05, fused=fused) for m in (plain, net)]
    for size in (12, 12, 7, 1):
        x = torch.randn(size, 6)
        for module, one in zip((plain, net), ones, strict=True):
            one.zero_grad()
            module(x).square().sum().backward()
            one.step()
    same(list(net.module.parameters()), list(plain.parameters()))


def test_several_forwards_may_come_before_one_backward_and_several_backwards_after_one_forward() -> (
    None
):
    plain, net = pair(Net())
    x, y = torch.randn(5, 6), torch.randn(8, 6)
    for module in (plain, net):
        one, other = module(x), module(y)
        (one.square().sum() + module(x).sum()).backward(retain_graph=True)
        (one.square().sum() * other.sum()).backward()
        module(module(x).repeat(1, 2)).sum().backward()
    same(gradients(net.module), gradients(plain))


def test_a_second_backward_through_one_graph_is_refused_as_usual() -> None:
    out = DataParallel(Net(), "2xcpu")(torch.randn(4, 6)).sum()
    out.backward()
    with pytest.raises(RuntimeError, match="second time"):
        out.backward()


def test_weights_written_between_forward_and_backward_are_noticed_as_usual() -> None:
    net = DataParallel(Net(), "2xcpu")
    out = net(torch.randn(4, 6)).sum()
    with torch.no_grad():
        net.module.second.weight.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.backward()


@pytest.mark.parametrize(
    "change",
    [
        lambda net: net.first.weight.data.mul_(2),
        lambda net: setattr(net.first.weight, "data", net.first.weight.data.clone() * 2),
        lambda net: setattr(net.first.weight, "data", net.first.weight.data.flip(0)),
        lambda net: setattr(net.first, "weight", nn.Parameter(net.first.weight.detach() * 2)),
        lambda net: setattr(net, "first", nn.Linear(6, 8)),
        lambda net: setattr(net, "second", nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 3))),
        lambda net: net.first.requires_grad_(False),
        lambda net: net.requires_grad_(False).second.requires_grad_(True),
        lambda net: setattr(net.first, "bias", None),
        lambda net: net.scale.mul_(3),
        lambda net: setattr(net, "scale", torch.full((3,), 4.0)),
        lambda net: net.norm.running_mean.data.add_(1),
        lambda net: net.register_forward_hook(lambda module, args, output: output * 2),
        lambda net: nn.utils.parametrizations.weight_norm(net.first),
        lambda net: nn.utils.vector_to_parameters(torch.randn(99), net.parameters()),
        lambda net: setattr(net.first, "forward", lambda x: x[:, :1].expand(-1, 8)),
        lambda net: net.load_state_dict({k: v + 1 for k, v in net.state_dict().items()}),
        lambda net: net.to(torch.float32).to(torch.float64),
    ],
)
def test_whatever_changes_between_forwards_is_seen(change: Callable[[Any], Any]) -> None:
    plain, net = pair(Net())
    x = torch.randn(5, 6)
    for module in (plain, net):
        module(x).sum().backward()
    for module in (plain, net.module):
        module.zero_grad()
        torch.manual_seed(3)
        change(module)
    for module in (plain, net):
        module(x).square().sum().backward()
    same(gradients(net.module), gradients(plain))
    same(net(x), plain(x))


def test_another_module_in_its_place_is_seen() -> None:
    net = DataParallel(Net(), "2xcpu")
    net(torch.randn(4, 6))
    net.module = nn.Linear(6, 2)
    assert net(torch.randn(4, 6)).shape == (4, 2)


def test_parameters_that_were_not_used_have_no_gradient_and_those_used_twice_the_sum() -> None:
    linear = nn.Linear(4, 4)
    plain, net = pair(
        Applied(lambda a, b, c, x: a(b(a(x))), linear, nn.Linear(4, 4), nn.Linear(4, 4))
    )
    plain.parts.append(linear)
    net.module.parts.append(net.module.parts[0])
    for module in (plain, net.module):
        module.function = lambda a, b, c, tied, x: tied(a(b(a(x))))
    x = torch.randn(5, 4)
    plain(x).sum().backward()
    net(x).sum().backward()
    assert gradients(net.module)[-1] is None
    same(
        [g for g in gradients(net.module) if g is not None],
        [g for g in gradients(plain) if g is not None],
    )


def test_a_parameter_that_one_replica_alone_uses_has_its_gradient() -> None:
    plain, net = pair(
        Applied(lambda a, b, x: b(x) if x.sum() > 0 else a(x), nn.Linear(2, 2), nn.Linear(2, 2))
    )
    x = torch.tensor([[1.0, 1], [2, 2], [-1, -1], [-2, -2]])
    (plain(x[:2]).sum() + plain(x[2:]).sum()).backward()
    net(x).sum().backward()
    same(gradients(net.module), gradients(plain))


def test_outputs_used_in_part_and_outputs_that_are_inputs_or_parameters() -> None:
    def function(linear: nn.Linear, x: torch.Tensor) -> Any:
        return {
            "x": x,
            "out": [linear(x), (x * 2, x.long())],
            "weight": linear.weight,
            "none": None,
        }

    plain, net = pair(Applied(function, nn.Linear(3, 3)))
    x = torch.randn(4, 3, requires_grad=True)
    y = x.detach().clone().requires_grad_()
    wanted, found = plain(x), net(y)
    wanted["out"][1][0].sum().backward()
    found["out"][1][0].sum().backward()
    same(y.grad, x.grad)
    assert gradients(net.module) == [None, None], "nothing that was used leads there"
    found = net(y)
    assert not found["out"][1][1].requires_grad and found["none"] is None
    (found["x"].sum() + found["weight"].sum()).backward()
    same(
        net.module.parts[0].weight.grad, torch.full((3, 3), 2.0)
    )  # each replica gives the weight: it is there twice
    same(y.grad, x.grad + 1)


def test_gradients_add_to_those_that_are_there_and_stay_away_from_autograd_grad() -> None:
    plain, net = pair(Net())
    x = torch.randn(5, 6)
    for module in (plain, net):
        module(x).sum().backward()
        found = torch.autograd.grad(module(x).square().sum(), list(module.parameters()))
        module.kept = found
        module(x).square().sum().backward(inputs=[next(module.parameters())])
    same(net.kept, plain.kept)
    same(gradients(net.module), gradients(plain))


def test_gradients_that_are_one_tensor_inside_stay_apart_outside() -> None:
    class Shifted(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.shift = nn.Parameter(torch.zeros(2, 3))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x + self.shift

    net, x = DataParallel(Shifted(), "3xcpu"), torch.randn(6, 3, requires_grad=True)
    for _ in range(2):
        found = torch.autograd.grad(net(x).sum(), [x, net.module.shift])
        same(found, (torch.ones(6, 3), torch.full((2, 3), 3.0)))
        x.grad = net.module.shift.grad = None
        net(x).sum().backward()
        same((x.grad, net.module.shift.grad), found)


def test_gradients_go_on_into_what_came_before_and_hooks_on_parameters_see_the_sum() -> None:
    before = nn.Linear(4, 6)
    plain, net = pair(Net())
    x = torch.randn(5, 4)
    seen: list[list[torch.Tensor]] = [[], []]
    for module, mine in zip((plain, net.module), seen, strict=True):
        module.second.weight.register_hook(lambda grad, mine=mine: mine.append(grad.clone()))
        module.second.bias.register_post_accumulate_grad_hook(
            lambda p, mine=mine: mine.append(p.grad.clone())
        )
    plain(before(x)).sum().backward()
    wanted = before.weight.grad
    before.zero_grad()
    net(before(x)).sum().backward()
    same(before.weight.grad, wanted)
    assert len(seen[0]) == 2
    same(sorted(seen[1], key=len), sorted(seen[0], key=len))


def test_gradients_can_be_differentiated() -> None:
    def penalty(module: nn.Module, x: torch.Tensor) -> torch.Tensor:
        out = module(x)
        (slope,) = torch.autograd.grad(out.square().sum(), x, create_graph=True)
        return (slope.square().sum(1) - 1).square().mean() + out.sum()

    plain, net = pair(Net(), "3xcpu")
    x = torch.randn(7, 6, requires_grad=True)
    for module in (plain, net):
        penalty(module, x).backward()
    same(gradients(net.module), gradients(plain))


def test_gradients_of_any_order_pass_the_numerical_check() -> None:
    net = DataParallel(nn.Sequential(nn.Linear(2, 3), nn.Tanh(), nn.Linear(3, 1)), "2xcpu")
    x = torch.randn(3, 2, requires_grad=True)
    weight = net.module[0].weight
    assert torch.autograd.gradcheck(lambda x, w: net(x), (x, weight))
    assert torch.autograd.gradgradcheck(lambda x, w: net(x), (x, weight))
    plain = net.module
    thirds = []
    for module in (plain, net):
        value = module(x).sum()
        for _ in range(3):
            (slope,) = torch.autograd.grad(value, x, create_graph=True)
            value = slope.pow(2).sum()
        thirds.append(torch.autograd.grad(value, [x, weight]))
    same(thirds[1], thirds[0])


def test_buffers_that_want_gradients_have_them() -> None:
    class Scaled(nn.Module):
        def __init__(self, scale: torch.Tensor) -> None:
            super().__init__()
            self.register_buffer("scale", scale)
            self.register_buffer("shift", scale.detach().clone())

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x * self.scale + self.shift

    scale = torch.randn(4, requires_grad=True)
    net, x = DataParallel(Scaled(scale), "2xcpu"), torch.randn(3, 4)
    assert torch.autograd.gradcheck(lambda _: net(x), (scale,))


def test_sparse_complex_and_channels_last_gradients_keep_their_kind() -> None:
    plain, net = pair(nn.Embedding(10, 5, sparse=True))
    tokens = torch.randint(10, (20, 5))
    for module in (plain, net):
        module(tokens).square().sum().backward()
    assert net.module.weight.grad.is_sparse
    same(net.module.weight.grad.to_dense(), plain.weight.grad.to_dense())

    plain, net = pair(nn.Linear(3, 2, dtype=torch.complex128))
    x = torch.randn(4, 3, dtype=torch.complex128)
    for module in (plain, net):
        module(x).abs().sum().backward()
    same(gradients(net.module), gradients(plain))

    plain, net = pair(nn.Conv2d(3, 4, 3).to(memory_format=torch.channels_last))
    for _ in range(2):
        for module in (plain, net):
            module(torch.ones(4, 3, 5, 5)).square().sum().backward()
    assert net.module.weight.grad.is_contiguous(memory_format=torch.channels_last)
    same(gradients(net.module), gradients(plain))


@pytest.mark.parametrize("reentrant", [False, True])
def test_activation_checkpoints_give_the_same_gradients_with_graphs_that_live_together(
    reentrant: bool,
) -> None:
    def function(one: nn.Module, other: nn.Module, x: torch.Tensor) -> Any:
        return checkpoint(
            other, checkpoint(one, x, use_reentrant=reentrant), use_reentrant=reentrant
        )

    inner = [
        nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.BatchNorm1d(4, affine=False).eval())
        for _ in range(2)
    ]
    plain, net = pair(Applied(function, *inner))
    x, y = torch.randn(5, 4, requires_grad=True), torch.randn(6, 4, requires_grad=True)
    for module in (plain, net):
        (module(x).square().sum() * module(y).sum()).backward()
    same(gradients(net.module), gradients(plain))


def test_gradients_by_another_way_than_the_outputs_arrive_too() -> None:
    plain, net = pair(Net())
    kept: list[torch.Tensor] = []
    for module in (plain, net.module):
        module.first.register_forward_hook(lambda module, args, output: kept.append(output))
    x = torch.randn(6, 6, requires_grad=True)
    y = x.detach().clone().requires_grad_()
    plain(x)
    kept.pop().square().sum().backward()
    out = net(y)
    torch.stack([features.square().sum() for features in kept]).sum().backward()
    same(y.grad, x.grad)
    same(gradients(net.module)[:2], gradients(plain)[:2])
    del out


def test_a_tensor_that_the_module_closed_over_has_its_gradient() -> None:
    factor = torch.tensor(2.0, requires_grad=True)
    net = DataParallel(Applied(lambda linear, x: linear(x) * factor, nn.Linear(2, 2)), "2xcpu")
    x = torch.randn(4, 2)
    net(x).sum().backward()
    same(factor.grad, net.module.parts[0](x).sum().detach())


def test_it_goes_where_plain_gradients_would_with_grad_and_with_graphs() -> None:
    factor = torch.tensor(2.0, requires_grad=True)
    plain, net = pair(Applied(lambda linear, x: linear(x).square() * factor, nn.Linear(2, 2)))
    x = torch.randn(4, 2, requires_grad=True)
    found = []
    for module in (plain, net):
        factor.grad = None
        torch.autograd.grad(module(x).sum(), x)
        assert factor.grad is None
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of a reference cycle
            module(x).sum().backward(create_graph=True)
        weight = next(module.parameters())
        slope = weight.grad.sum() + factor.grad
        module.zero_grad()
        factor.grad = None
        slope.backward()
        found.append([weight.grad, factor.grad])
    same(found[1], found[0])


@pytest.mark.parametrize("reentrant", [False, True])
def test_it_can_be_inside_of_a_checkpoint(reentrant: bool) -> None:
    plain, net = pair(Net())
    x = torch.randn(5, 6, requires_grad=True)
    for module in (plain, net):
        checkpoint(module, x, use_reentrant=reentrant).square().sum().backward()
    same(gradients(net.module), gradients(plain))


def test_parallel_inside_parallel_works() -> None:
    plain, inner = pair(Net())
    net = DataParallel(nn.Sequential(inner, nn.Linear(3, 2)), "2xcpu")
    plain = nn.Sequential(plain, copy.deepcopy(net.module[1]))
    x = torch.randn(9, 6)
    for module in (plain, net):
        module(x).square().sum().backward()
    same(gradients(net), gradients(plain))


def test_forwards_and_backwards_from_several_threads_do_not_meet() -> None:
    plain, net = pair(Net())
    batches = [torch.randn(4 + i, 6) for i in range(6)]
    for x in batches:
        plain(x).square().sum().backward()
    threads = [
        threading.Thread(target=lambda x=x: net(x).square().sum().backward()) for x in batches
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    torch.testing.assert_close(gradients(net.module), gradients(plain), rtol=1e-10, atol=1e-10)


def test_the_shares_of_another_threads_forward_are_not_taken_for_ones_own(
    recwarn: pytest.WarningsRecorder,
) -> None:
    class Meddled(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            nets[0].sizes = (3, 3)  # as a forward of six samples in another thread would
            return x

    nets = [DataParallel(Meddled(), "2xcpu")]
    assert nets[0](torch.randn(4, 3)).shape == (4, 3)
    assert not recwarn.list, "no share of (2, 3) seems to lie in dimension 1"


# Modes, hooks and state


def test_grad_mode_inference_mode_and_the_mode_of_the_module_are_followed() -> None:
    seen: list[Any] = []

    def function(drop: nn.Module, linear: nn.Module, x: torch.Tensor) -> torch.Tensor:
        seen.append((torch.is_grad_enabled(), torch.is_inference_mode_enabled(), drop.training))
        return linear(drop(x))

    net = DataParallel(Applied(function, nn.Dropout(0.5), nn.Linear(6, 2)), "2xcpu")
    x = torch.randn(4, 6)
    with torch.no_grad():
        assert not net(x).requires_grad
    with torch.inference_mode():
        assert net.eval()(x).is_inference()
    assert net.train()(x).requires_grad
    assert (
        seen == [(False, False, True)] * 2 + [(False, True, False)] * 2 + [(True, False, True)] * 2
    )
    same(net.eval()(x), net.module(x))
    assert not net.requires_grad_(False)(x).requires_grad


def test_autocast_is_followed_and_weights_are_cast_anew_each_time() -> None:
    net = DataParallel(nn.Linear(8, 8, dtype=torch.float32), "2xcpu")
    x = torch.randn(8, 8, dtype=torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        one = net(x)
        one.sum().backward()
        with torch.no_grad():
            net.module.weight.mul_(2)
            net.module.bias.mul_(2)
        other = net(x)
        net.module.weight.data.mul_(2)
        net.module.bias.data.mul_(2)
        third = net(x)
    net.module.weight.data.mul_(2)
    net.module.bias.data.mul_(2)
    with torch.autocast("cpu", torch.bfloat16):
        fourth = net(x)
    assert one.dtype == torch.bfloat16 and net.module.weight.grad.dtype == torch.float32
    assert (
        torch.equal(other, one * 2) and torch.equal(third, one * 4) and torch.equal(fourth, one * 8)
    )

    class Half(nn.Linear):
        @torch.autocast("cpu", torch.bfloat16)
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x)

    assert DataParallel(Half(8, 8, dtype=torch.float32), "2xcpu")(x).dtype == torch.bfloat16


def test_hooks_run_in_each_replica_and_on_the_whole_once() -> None:
    net, inner, outer, back = DataParallel(Net(), "2xcpu"), [], [], []
    net.module.register_forward_pre_hook(lambda module, args: inner.append(len(args[0])))
    net.module.first.register_full_backward_hook(
        lambda module, given, got: back.append(len(got[0]))
    )
    net.register_forward_hook(lambda module, args, output: outer.append(len(output)))
    net(torch.randn(7, 6, requires_grad=True)).sum().backward()
    assert sorted(inner) == [3, 4] and sorted(back) == [3, 4] and outer == [7]


def test_what_a_replica_sets_is_lost_and_what_the_first_writes_in_a_buffer_stays() -> None:
    class Counting(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.calls = 0
            self.norm = nn.BatchNorm1d(2)
            self.register_buffer("seen", torch.zeros(2))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            assert self.calls == 0
            self.calls += 1
            self.features = x
            self.seen += x.sum(0)
            return self.norm(x)

    net, x = DataParallel(Counting(), "2xcpu"), torch.randn(8, 2)
    for times in (1, 2):
        net(x)
        same(net.module.seen, times * x[:4].sum(0))
    plain = nn.BatchNorm1d(2)
    plain(x[:4])
    plain(x[:4])
    same(net.module.norm.running_var, plain.running_var)
    assert net.module.norm.num_batches_tracked == 2
    assert net.module.calls == 0 and not hasattr(net.module, "features")


def test_all_replicas_begin_with_the_first_ones_buffers() -> None:
    net = DataParallel(
        Applied(lambda norm, x: (norm(x), norm.running_mean[None] + 0), nn.BatchNorm1d(2)), "2xcpu"
    )
    net(torch.randn(8, 2))
    before = net.module.parts[0].running_mean.clone()
    means = net.eval()(torch.randn(8, 2))[1]
    same(means, torch.stack([before, before]))


def test_layers_with_ways_of_their_own_work() -> None:
    class Odd(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.rnn = nn.LSTM(3, 4, 2, batch_first=True, bidirectional=True)
            self.list = nn.ParameterList([torch.ones(8), torch.ones(8)])
            self.dict = nn.ParameterDict({"a": torch.ones(8)})
            self.linear = nn.utils.parametrizations.weight_norm(nn.Linear(8, 8))
            self.other = nn.utils.parametrizations.spectral_norm(nn.Linear(8, 3))
            self.forward = self.forward_impl

        def forward_impl(self, x: torch.Tensor) -> torch.Tensor:
            self.rnn.flatten_parameters()
            return self.other(
                self.linear(self.rnn(x)[0]) * self.list[1] * self.list[0] + self.dict["a"]
            )

    module = Odd()
    net = DataParallel(module, "2xcpu")
    x = torch.randn(4, 5, 3)
    net.eval()
    with torch.no_grad():
        net(x)
    for times in range(2):
        module.zero_grad()
        module(x).square().sum().backward()
        wanted = gradients(module)
        module.zero_grad()
        net(x).square().sum().backward()
        same(gradients(module), wanted)
        with torch.no_grad():
            for p in module.parameters():
                p.mul_(1 + 0.1 * times)


def test_layers_held_in_lists_are_those_of_the_replica() -> None:
    class Holding(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one, self.other = nn.BatchNorm1d(3), nn.Linear(3, 3)
            self.weight = nn.Parameter(torch.ones(3))
            self.order = [self.other, self.weight]

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            linear, weight = self.order
            assert (linear is self.other) and (weight is self.weight)
            return linear(self.one(linear(x)) * weight)

    net = DataParallel(Holding(), "2xcpu")
    twin, x = copy.deepcopy(net.module), torch.randn(8, 3)
    net(x)
    net(x)
    with torch.no_grad():
        plain = nn.BatchNorm1d(3)
        plain(twin.other(x[:4]))
        plain(twin.other(x[:4]))
    same(net.module.one.running_var, plain.running_var)
    assert net.module.one.num_batches_tracked == 2
    net.eval()
    same(net(x), net.module(x))


def test_the_state_dict_has_the_prefix_and_copies_and_files_work() -> None:
    net = DataParallel(Net(), "2xcpu")
    x = torch.randn(4, 6)
    net(x).sum().backward()
    assert all(name.startswith("module.") for name in net.state_dict())
    twin = copy.deepcopy(net)
    file = io.BytesIO()
    torch.save(net, file)
    file.seek(0)
    loaded = torch.load(file, weights_only=False)
    for other in (twin, loaded):
        same(other(x), net(x))
        other(x).sum().backward()
    assert twin.module.first.weight is not net.module.first.weight
    with torch.no_grad():
        twin.module.second.bias.add_(1)
    assert not torch.equal(twin(x), net(x))


def test_dropout_differs_by_replica_and_follows_the_seed() -> None:
    net = DataParallel(nn.Dropout(0.5), "2xcpu")
    x = torch.ones(200, 10)

    def draw() -> torch.Tensor:
        torch.manual_seed(5)
        return torch.stack([net(x), net(x)])

    first, again = draw(), draw()
    assert torch.equal(first, again)
    assert not torch.equal(first[0], first[1]) and not torch.equal(first[0][:100], first[0][100:])
    assert 0.9 < first.mean() < 1.1


def test_a_module_that_draws_nothing_leaves_the_callers_random_numbers_alone() -> None:
    net = DataParallel(Net(), "2xcpu")
    before = torch.get_rng_state()
    net(torch.randn(4, 6, generator=torch.Generator())).sum().backward()
    assert torch.equal(torch.get_rng_state(), before)


def test_dropout_in_checkpoints_and_in_nested_parallels_is_drawn_again_the_same() -> None:
    def function(linear: nn.Module, x: torch.Tensor) -> torch.Tensor:
        return checkpoint(lambda x: F.dropout(linear(x), 0.5), x, use_reentrant=False)

    net = DataParallel(
        DataParallel(Applied(function, nn.Linear(3, 3, bias=False)), "2xcpu"), "2xcpu"
    )
    x = torch.randn(12, 3)
    out = net(x)
    out.sum().backward()
    mask = (out != 0).double() * 2
    same(net.module.module.parts[0].weight.grad, mask.T @ x)


# Arguments and outputs


def test_arguments_of_any_nesting_by_position_and_by_name() -> None:
    @dataclass
    class Given:
        x: torch.Tensor
        factor: float

    def function(
        a: torch.Tensor, pair: Any, given: Given, *, named: Any = None, factor: float = 1.0
    ) -> Any:
        return (
            a + pair[1][0] * given.x * given.factor * factor + (0 if named is None else named["x"])
        )

    x = torch.randn(10, 3)
    args = (x.cos(), (x.sin(), [x]), Given(x.tan(), 2.0))
    for kwargs in ({}, {"factor": 3.0}, {"named": {"x": x, "unused": [], "also": (), "more": {}}}):
        same(DataParallel(Applied(function), "3xcpu")(*args, **kwargs), function(*args, **kwargs))
    same(DataParallel(Applied(lambda x: x + 1), "2xcpu")(x=x), x + 1)
    same(DataParallel(Applied(lambda x, s: x * s), "2xcpu")(x, torch.tensor(2.0)), x * 2)


def test_gradients_of_inputs_in_any_place_and_of_scalars_shared_by_all() -> None:
    def function(a: torch.Tensor, b: Any, *, c: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        return (a * b["b"] + c.sin()) * scale

    def run(call: Callable[..., torch.Tensor]) -> list[torch.Tensor | None]:
        torch.manual_seed(1)
        a, b, c = (torch.randn(5, 2, requires_grad=True) for _ in range(3))
        scale = torch.tensor(2.0, requires_grad=True)
        call(a, {"b": b}, c=c, scale=scale).square().sum().backward()
        return [a.grad, b.grad, c.grad, scale.grad]

    same(run(DataParallel(Applied(function), "2xcpu")), run(function))


def test_a_replica_may_change_its_share_in_place() -> None:
    plain, net = pair(Applied(lambda linear, x: linear(x.mul_(2)).add_(1), nn.Linear(3, 3)))
    x = torch.randn(6, 3, requires_grad=True)
    y = x.detach().clone().requires_grad_()
    plain(x * 1).square().sum().backward()
    net(y * 1).square().sum().backward()
    same(y.grad, x.grad)
    same(gradients(net.module), gradients(plain))


def test_a_leaf_that_replicas_give_in_inference_mode_is_gathered() -> None:
    """There it has no node of a graph, and none is needed."""
    module = Applied(lambda linear, x: (linear(x), linear.bias), nn.Linear(3, 3))
    net = DataParallel(module, "2xcpu")
    with torch.inference_mode():
        outputs, biases = net(torch.randn(4, 3))
    assert outputs.shape == (4, 3)
    same(biases, module.parts[0].bias.detach().repeat(2))


def test_what_a_replica_changes_in_its_share_stays_there() -> None:
    before = nn.Linear(3, 3)
    x = torch.randn(6, 3)
    loss = before(x).sum()
    pair(Applied(lambda linear, x: linear(x.mul_(2)), nn.Linear(3, 3)))[1](x)
    loss.backward()
    torch.testing.assert_close(before.weight.grad, x.sum(0).expand(3, 3))
    assert x._version == 0


@pytest.mark.filterwarnings("ignore")  # PyTorch's own, of CSR
@pytest.mark.parametrize("layout", [torch.sparse_coo, torch.sparse_csr])
def test_a_share_may_be_changed_in_place_beside_a_sparse_tensor_of_an_own_scatter(
    layout: torch.layout,
) -> None:
    class Scattering(DataParallel[nn.Module]):
        def scatter(self, inputs: Any, kwargs: Any, device_ids: Any) -> Any:
            x, edges = inputs
            return [(share, edges) for share in x.chunk(len(device_ids))], [{}, {}]

    module = Applied(lambda linear, x, edges: linear(x.mul_(2)), nn.Linear(3, 3))
    x = torch.randn(4, 3)
    expected = module.parts[0](2 * x)
    same(Scattering(module, "2xcpu")(x, torch.eye(4).to_sparse(layout=layout)), expected)
    assert x._version > 0


def test_outputs_of_any_nesting_keep_their_types() -> None:
    def function(x: torch.Tensor) -> Any:
        return [x, (x.sin(), [x + 1]), OrderedDict(a=x, b=[x.cos()]), None, 3, "word"]

    x = torch.randn(5, 2)
    found = DataParallel(Applied(function), "2xcpu")(x)
    same(found[:3], function(x)[:3])
    assert (
        type(found[1]) is tuple and type(found[2]) is OrderedDict and found[3:] == [None, 3, "word"]
    )


def test_modules_without_inputs_or_with_nothing_to_cut_run() -> None:
    weight = nn.Linear(2, 2)
    assert DataParallel(Applied(lambda linear: linear.weight, weight), "2xcpu")().shape == (2, 2)
    found = DataParallel(Applied(lambda linear, n: linear.weight * n, weight), "2xcpu")(3)
    assert found.shape == (4, 2), "whatever isn't a tensor is given to all"


@pytest.mark.parametrize(
    "batch, slots, shares",
    [
        (30, 2, (15, 15)),
        (30, 3, (10, 10, 10)),
        (10, 2, (5, 5)),
        (256, 4, (64,) * 4),
        (10, 4, (3, 3, 3, 1)),
        (2, 8, (1, 1)),
    ],
)
def test_shares_are_those_of_torch_chunk(batch: int, slots: int, shares: tuple[int, ...]) -> None:
    net = DataParallel(Applied(lambda x: x), f"{slots}xcpu")
    assert len(net(torch.zeros(batch, 1))) == batch
    assert net.sizes == shares


def test_another_dimension_can_be_cut() -> None:
    plain = nn.LSTM(3, 4)
    net = DataParallel(Applied(lambda rnn, x: rnn(x)[0], plain), "2xcpu", dim=1)
    x = torch.randn(5, 7, 3)
    same(net(x), plain(x)[0])
    assert net.sizes == (4, 3)


def test_scalars_become_a_vector_and_unequal_shares_are_warned_of_once() -> None:
    net = DataParallel(Applied(lambda x: x.mean()), "2xcpu")
    x = torch.randn(7, 1)
    with pytest.warns(UserWarning) as caught:
        losses = net(x)
    assert "shares of 4, 3" in str(caught[0].message) and "net.sizes" in str(caught[0].message)
    same((losses * losses.new_tensor(net.sizes)).sum() / sum(net.sizes), x.mean())
    with warnings.catch_warnings(record=True) as again:
        warnings.simplefilter("always")
        net(x)
        DataParallel(Applied(lambda x: x.mean()), "2xcpu")(x[:6])
    assert not any("mean()" in str(warning.message) for warning in again)


def test_that_scalars_became_a_vector_is_said_once() -> None:
    net = DataParallel(Applied(lambda x: (x.mean(), {"sum": x.sum()})), "2xcpu")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("default")
        for _ in range(3):
            net(torch.randn(4, 1))
    assert [str(warning.message)[:40] for warning in caught] == [
        "Was asked to gather along dimension 0, b"
    ]


def test_balanced_outputs_stay_where_they_are_and_train() -> None:
    plain, net = pair(Net(), balanced=True)
    x = torch.randn(7, 6)
    outputs = net(x)
    assert (
        isinstance(outputs, Balanced) and len(outputs) == 2 and outputs.devices == list(net.devices)
    )
    assert [len(output) for output in outputs] == [4, 3]
    sum(output.square().sum() for output in outputs).backward()
    plain(x).square().sum().backward()
    same(gradients(net.module), gradients(plain))
    assert len(DataParallel(Net(), "1xcpu", balanced=True)(x)) == 1
    with pytest.raises(InputError, match="output_device has no meaning"):
        DataParallel(Net(), "2xcpu", output_device="cpu", balanced=True)


def test_balanced_outputs_that_are_changed_in_place_are_noticed_as_usual() -> None:
    net = DataParallel(nn.Sequential(nn.Linear(2, 2), nn.Sigmoid()), "2xcpu", balanced=True)
    first, second = net(torch.randn(4, 2))
    first.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        (first.sum() + second.sum()).backward()
    net = DataParallel(nn.Linear(2, 2), "2xcpu", balanced=True)
    first, _ = net(torch.ones(4, 2))
    first.mul_(2).sum().backward()
    same(net.module.bias.grad, torch.full((2,), 4.0))


def test_scatter_and_gather_can_be_overridden() -> None:
    class Uneven(DataParallel[Any]):
        def scatter(self, inputs: Any, kwargs: Any, device_ids: Any) -> Any:
            (x,) = inputs
            return [(x[:1],), (x[1:],)], [{}, {}]

        def gather(self, outputs: Any, output_device: Any) -> Any:
            return sum(output.sum() for output in outputs)

    module = Net()
    net, x = Uneven(module, "2xcpu"), torch.randn(5, 6, requires_grad=True)
    found = net(x)
    found.backward()
    assert net.sizes == (1, 4)
    same(found, module(x).sum())
    same(x.grad, torch.autograd.grad(module(x).sum(), x)[0])


def test_replicate_and_parallel_apply_can_be_called_and_overridden() -> None:
    class Own(DataParallel[Any]):
        def forward(self, x: torch.Tensor) -> Any:
            args, named = self.scatter((x,), {}, self.devices)
            outputs = self.parallel_apply(self.replicate(self.module, self.devices), args, named)
            return self.gather(outputs, self.output_device)

    class Doubled(DataParallel[Any]):
        def parallel_apply(self, replicas: Any, inputs: Any, kwargs: Any) -> Any:
            return [output * 2 for output in super().parallel_apply(replicas, inputs, kwargs)]

    plain, x = Net(), torch.randn(5, 6)
    plain(x).sum().backward()
    for kind, times in ((Own, 1), (Doubled, 2)):
        net = kind(copy.deepcopy(plain), "2xcpu")
        net.zero_grad()
        net(x).sum().backward()
        same(gradients(net.module), [grad * times for grad in gradients(plain) if grad is not None])


def test_the_function_does_once_what_the_module_does() -> None:
    module, x = Net(), torch.randn(7, 6)
    wanted = module(x)
    for slots in ("2xcpu", "1xcpu", None, devices.slots(3)):
        module.zero_grad()
        found = data_parallel(module, x, slots, output_device=-1)
        found.sum().backward()
        same(found, wanted)
    same(data_parallel(module, (x,), "2xcpu"), wanted)
    same(data_parallel(module, None, "2xcpu", module_kwargs={"x": x}), wanted)
    same(
        data_parallel(Applied(lambda a, *, b: a + b), (x,), "2xcpu", module_kwargs={"b": x}), x * 2
    )


# The machine


def test_one_device_calls_the_module_itself() -> None:
    class Counting(nn.Linear):
        calls = 0

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.calls += 1
            return super().forward(x)

    net = DataParallel(Counting(2, 2), "1xcpu")
    net(torch.randn(4, 2))
    assert net.module.calls == 1 and net.device_ids == [0]


def test_forward_and_backward_run_on_the_cores_of_each_slot_and_the_caller_keeps_its_threads() -> (
    None
):
    seen: dict[str, set[Any]] = {"forward": set(), "backward": set()}

    def where() -> tuple[int, Any]:
        return torch.get_num_threads(), tuple(os.sched_getaffinity(0)) if hasattr(
            os, "sched_getaffinity"
        ) else ()

    class Watched(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            seen["forward"].add(where())
            return x.clone()

        @staticmethod
        def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
            seen["backward"].add(where())
            return grad

    before = where()
    net = DataParallel(
        Applied(lambda linear, x: Watched.apply(linear(x)), nn.Linear(2, 2)), "2xcpu"
    )
    net(torch.randn(4, 2)).sum().backward()
    slots = devices.slots(2)
    wanted = {(slot.threads, slot.cores if before[1] else ()) for slot in slots}
    assert seen["forward"] == seen["backward"] == wanted
    assert where() == before


def test_backwards_of_replicas_run_at_the_same_time() -> None:
    barrier = threading.Barrier(3, timeout=20)

    class Meeting(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
            barrier.wait()
            return grad

    net = DataParallel(
        Applied(lambda linear, x: Meeting.apply(linear(x)), nn.Linear(2, 2)), "3xcpu"
    )
    net(torch.randn(6, 2)).sum().backward()


def test_the_memory_of_the_replicas_is_the_modules() -> None:
    seen: list[int] = []
    net = DataParallel(Net(), "2xcpu")
    net.module.first.register_forward_hook(
        lambda module, args, output: seen.append(module.weight.data_ptr())
    )
    for _ in range(3):
        net(torch.randn(4, 6)).sum().backward()
    assert seen == [net.module.first.weight.data_ptr()] * 6


@pytest.mark.slow
def test_nothing_is_left_for_the_garbage_collector_and_graphs_end_with_their_outputs() -> None:
    net, x = DataParallel(Net(), "2xcpu"), torch.randn(4, 6)
    for _ in range(3):
        gc.collect()
        net(x)
        net(x).sum().backward()
        left = gc.collect()
    assert left == 0, "after the first times, in which others' caches may be dropped"
    outs = [net(x) for _ in range(5)]
    sum(out.sum() for out in outs).backward()
    del outs
    assert gc.collect() == 0


def test_zero_grad_inside_a_replica_is_warned_of() -> None:
    def function(linear: nn.Module, x: torch.Tensor) -> torch.Tensor:
        linear.zero_grad()
        return linear(x)

    net = DataParallel(Applied(function, nn.Linear(2, 2)), "2xcpu")
    with pytest.warns(UserWarning, match="has no effect"):
        net(torch.randn(4, 2))


def test_buffers_of_any_kind_are_those_of_the_original_in_every_replica() -> None:
    kinds = [
        torch.randn(3, 4),
        torch.arange(5),
        torch.randn(()),
        torch.zeros(0),
        torch.randn(2, 6).t(),
        torch.eye(2),
    ]
    kinds.append(torch.eye(3).to_sparse())
    module = nn.Module()
    for number, buffer in enumerate(kinds):
        module.register_buffer(f"b{number}", buffer)
    first, second = replicate(module, "2xcpu")
    for original, one, other in zip(kinds, first.buffers(), second.buffers(), strict=True):
        assert one is original and other is not original
        torch.testing.assert_close(other, original)


# What bad input gets


def test_bad_input_gets_one_clear_error_each() -> None:
    net = DataParallel(Net(), "2xcpu")
    with pytest.raises(InputError, match="a batch of 0"):
        net(torch.randn(0, 6))
    both = DataParallel(Applied(lambda a, b: a), "2xcpu")
    with pytest.raises(
        InputError, match=r"different sizes along dimension 0 \(shapes \(4, 1\) and \(5, 1\)\)"
    ):
        both(torch.randn(4, 1), torch.randn(5, 1))
    different = DataParallel(Applied(lambda x: x if x.sum() > 0 else [x]), "2xcpu")
    with pytest.raises(
        InputError, match=r"different structure.*float64\(1, 1\).*list\(float64\(1, 1\)\)"
    ):
        different(torch.tensor([[1.0], [-1.0]]))
    with pytest.raises(InputError, match="takes a module, not function"):
        DataParallel(lambda x: x, "2xcpu")  # type: ignore[type-var]
    with pytest.raises(DeviceError, match="doesn't exist"):
        DataParallel(Net(), [97, 98])
    with pytest.raises(DeviceError, match="empty list"):
        DataParallel(Net(), [])
    with pytest.raises(
        InputError, match=r'on device cpu \(device_ids\[0\]\) but "[a-z.]+" is on meta'
    ):
        DataParallel(Net().to("meta"), "2xcpu")(torch.randn(4, 6))
    with pytest.raises(
        InputError, match=r'on device cpu \(device_ids\[0\]\) but "[a-z.]+" is on meta'
    ):
        data_parallel(Net().to("meta"), torch.randn(4, 6), "2xcpu")
    with pytest.raises(InputError, match=r"LazyLinear.*can't be replicated"):
        DataParallel(nn.LazyLinear(2), "2xcpu")(torch.randn(4, 6))


@pytest.mark.filterwarnings("ignore")  # PyTorch's own, of what is in beta or going
def test_sparse_and_nested_inputs_are_refused_by_several_devices_and_given_on_by_one() -> None:
    several, one = (
        DataParallel(Applied(lambda x: 2 * x), devices) for devices in ("2xcpu", "1xcpu")
    )
    with pytest.raises(
        InputError, match=r"a tensor of torch.sparse_coo can't be cut: give its .* or to_dense"
    ):
        several(torch.eye(4).to_sparse())
    same(one(torch.eye(4).to_sparse()).to_dense(), 2 * torch.eye(4))
    for layout in (torch.strided, torch.jagged):
        nested = torch.nested.nested_tensor([torch.randn(3, 4), torch.randn(2, 4)], layout=layout)
        with pytest.raises(
            InputError, match="a nested tensor can't be cut: give its to_padded_tensor"
        ):
            several(nested)
        same(one(nested).to_padded_tensor(0.0), 2 * nested.to_padded_tensor(0.0))


@pytest.mark.filterwarnings("ignore")  # PyTorch's own, of what is in beta or going
def test_transforms_that_do_not_follow_threads_are_refused_by_several_devices_and_work_on_one() -> (
    None
):
    module, x = nn.Linear(3, 2), torch.randn(4, 3)
    several, one = (DataParallel(module, devices) for devices in ("2xcpu", "1xcpu"))

    def directional(net: Any) -> torch.Tensor:
        with forward_ad.dual_level():
            return forward_ad.unpack_dual(net(forward_ad.make_dual(x, x))).tangent

    ways: list[Callable[[Any], Any]] = [
        lambda net: torch.func.vmap(net)(x.expand(5, 4, 3)),
        lambda net: torch.func.grad(lambda y: net(y).sum())(x),
        lambda net: torch.func.jvp(net, (x,), (x,))[1],
        directional,
    ]
    for way in ways:
        with pytest.raises(
            InputError, match=r"don't follow a batch to the threads of replicas: .*net.module"
        ):
            way(several)
        same(way(one), way(module))
    with pytest.raises(InputError, match=r"torch.jit.trace and torch.export don't follow"):
        torch.jit.trace(several, x)
    weights = {f"module.{name}": 2 * p.detach() for name, p in module.named_parameters()}
    same(torch.func.functional_call(several, weights, (x,)), 2 * module(x))


def test_shares_that_were_padded_to_lengths_of_their_own_are_told_of_total_length() -> None:
    class Recurrent(nn.GRU):
        def forward(
            self, x: torch.Tensor, lengths: torch.Tensor, total: int | None
        ) -> torch.Tensor:  # type: ignore[override]
            packed = nn.utils.rnn.pack_padded_sequence(
                x, lengths, batch_first=True, enforce_sorted=False
            )
            return nn.utils.rnn.pad_packed_sequence(
                super().forward(packed)[0], True, total_length=total
            )[0]

    plain, net = pair(Recurrent(4, 5, batch_first=True))
    x, lengths = torch.randn(4, 7, 4), torch.tensor([7, 6, 5, 4])
    with pytest.raises(InputError, match=r"\(2, 7, 5\), \(2, 5, 5\).*total_length"):
        net(x, lengths, None)
    same(net(x, lengths, 7), plain(x, lengths, 7))


@pytest.mark.sweep
@pytest.mark.filterwarnings("ignore")  # PyTorch's own, of compiling
@pytest.mark.parametrize("devices", ["1xcpu", "2xcpu"])
def test_a_compiled_function_may_call_it_with_the_same_numbers(devices: str) -> None:
    plain, net = pair(Net(), devices)
    x = torch.randn(7, 6)
    given = [x.clone().requires_grad_() for _ in range(3)]

    def step(net: nn.Module, x: torch.Tensor) -> torch.Tensor:
        return net(x.sin()).square().sum()

    step(plain, given[0]).backward()
    for compiled, mine in (
        (torch.compile(lambda x: step(net, x), backend="eager"), given[1]),
        (lambda x: torch.compile(net, backend="eager")(x.sin()).square().sum(), given[2]),
    ):
        net.zero_grad()
        compiled(mine).backward()
        same([mine.grad, *gradients(net.module)], [given[0].grad, *gradients(plain)])
    torch._dynamo.reset()


def test_a_traced_module_is_replicated() -> None:
    module = torch.fx.symbolic_trace(nn.Sequential(nn.Linear(3, 3), nn.ReLU()))
    x = torch.randn(4, 3)
    same(DataParallel(module, "2xcpu")(x), module(x))


def test_a_parameter_that_replicas_write_is_refused() -> None:
    def function(linear: nn.Linear, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            linear.weight.mul_(0.5)
        return linear(x)

    net = DataParallel(Applied(function, nn.Linear(2, 2)), "2xcpu")
    for context in (contextlib.nullcontext(), torch.no_grad()):
        with context, pytest.raises(InputError, match=r'"parts.0.weight" was changed in forward'):
            net(torch.randn(4, 2))


@pytest.mark.parametrize("where", ["forward", "backward"])
def test_an_exception_keeps_its_type_names_the_replica_and_leaves_all_in_order(where: str) -> None:
    class Failing(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            ctx.fails = bool((x > 5).any())
            if ctx.fails and where == "forward":
                raise KeyError("wonderful")
            return x.clone()

        @staticmethod
        def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
            if ctx.fails and where == "backward":
                raise KeyError("wonderful")
            return grad

    plain, net = pair(Applied(lambda linear, x: linear(Failing.apply(x)), nn.Linear(1, 1)))
    bad = torch.tensor([[1.0], [9.0]], requires_grad=True)
    with pytest.raises(KeyError, match="wonderful") as caught:
        net(bad).sum().backward()
    assert "raised by replica 1 on cpu:1" in caught.value.__notes__
    net.zero_grad()
    for module in (plain, net):
        module(torch.ones(3, 1)).sum().backward()
    same(gradients(net.module), gradients(plain))
