"""Replicate: shared memory, gradients that come back, ties, buffers, and what can't be copied."""

from typing import Any

import pytest
import torch
from torch import nn

from lockstep.errors import InputError
from lockstep.parallel import DataParallel, gather, parallel_apply, replicate, scatter


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(5, 3)
        self.head = nn.Linear(3, 5, bias=False)
        self.head.weight = self.embed.weight
        self.same = self.head
        self.missing: nn.Module | None = None
        self.register_module("nothing", None)
        self.register_parameter("bias", None)
        self.scale = 2.0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.same(self.embed(x)) * self.scale


def _net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2)).double()


def replicas_give_the_same_gradients(
    net: nn.Module, x: torch.Tensor, slots: str, bound: float
) -> None:
    net(x).square().sum().backward()
    wanted = [p.grad for p in net.parameters()]
    net.zero_grad()
    outputs = parallel_apply(replicate(net, slots), scatter(x, slots), devices=slots)
    gather(outputs, "cpu").square().sum().backward()
    for p, grad in zip(net.parameters(), wanted, strict=True):
        torch.testing.assert_close(p.grad, grad, rtol=bound, atol=bound)


def test_replicas_share_the_memory_of_the_parameters_and_their_names() -> None:
    net = _net()
    for replica in replicate(net, "3xcpu"):
        assert type(replica) is nn.Sequential and replica is not net
        named = dict(replica.named_parameters())
        assert list(named) == [name for name, _ in net.named_parameters()]
        for name, parameter in net.named_parameters():
            assert named[name].data_ptr() == parameter.data_ptr() and named[name] is not parameter
        assert list(replica.state_dict()) == list(net.state_dict())


def test_replicas_see_what_the_optimizer_writes() -> None:
    net = nn.Linear(2, 2)
    replicas = replicate(net, "2xcpu")
    with torch.no_grad():
        net.weight.fill_(7)
    assert (replicas[1].weight == 7).all()


def test_gradients_of_all_replicas_are_summed_into_the_original() -> None:
    replicas_give_the_same_gradients(
        _net().eval(), torch.randn(7, 3, dtype=torch.float64), "3xcpu", 1e-13
    )


def test_backward_through_one_replica_alone_leaves_unused_parameters_without_gradients() -> None:
    net = nn.ModuleList([nn.Linear(2, 2), nn.Linear(2, 2)])
    replicate(net, "2xcpu")[1][0](torch.ones(1, 2)).sum().backward()
    assert net[0].weight.grad is not None and net[1].weight.grad is None


def test_detached_replicas_send_nothing_back() -> None:
    net = nn.Linear(2, 2)
    for replica in replicate(net, "2xcpu", detach=True):
        assert (
            not replica.weight.requires_grad and replica.weight.data_ptr() == net.weight.data_ptr()
        )


def test_frozen_parameters_stay_frozen_and_no_grad_is_kept() -> None:
    net = nn.Linear(2, 2)
    net.weight.requires_grad_(False)
    assert [p.requires_grad for p in replicate(net, "2xcpu")[1].parameters()] == [False, True]
    with torch.no_grad():
        assert not any(p.requires_grad for p in replicate(net, "2xcpu")[0].parameters())


def test_replica_0_has_the_buffers_of_the_original_and_the_others_have_copies() -> None:
    net = nn.BatchNorm1d(3)
    first, second = replicate(net, "2xcpu")
    second(torch.randn(4, 3) + 5)
    assert net.running_mean.tolist() == [0, 0, 0] and net.num_batches_tracked == 0
    first(torch.randn(4, 3) + 5)
    assert net.running_mean.abs().min() > 0 and net.num_batches_tracked == 1


def test_ties_hold_in_the_replicas() -> None:
    net = Tied()
    for replica in replicate(net, "2xcpu"):
        assert replica.same is replica.head and replica.head.weight is replica.embed.weight
        assert replica.nothing is None and replica.bias is None and replica.scale == 2.0
        assert len(list(replica.parameters())) == 1
    replicas = replicate(net, "2xcpu")
    gather([r(torch.arange(3)) for r in replicas], "cpu").sum().backward()
    both = net.embed.weight.grad.clone()
    net.zero_grad()
    (net(torch.arange(3)).sum() * 2).backward()
    torch.testing.assert_close(both, net.embed.weight.grad)


def test_recurrent_layers_lists_of_parameters_and_parametrizations_work_in_replicas() -> None:
    class Odd(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.rnn = nn.LSTM(3, 3, 2, batch_first=True)
            self.list = nn.ParameterList([torch.ones(3), torch.ones(3)])
            self.dict = nn.ParameterDict({"a": torch.ones(3)})
            self.linear = nn.utils.parametrizations.weight_norm(nn.Linear(3, 3))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.linear(self.rnn(x)[0]) * self.list[1] * self.list[0] + self.dict["a"]

    replicas_give_the_same_gradients(
        Odd().double(), torch.randn(4, 5, 3, dtype=torch.float64), "2xcpu", 1e-12
    )


def test_methods_and_modules_kept_as_attributes_are_those_of_the_replica() -> None:
    class Bound(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(2, 2)
            self.forward = self.forward_impl  # type: ignore[method-assign]
            object.__setattr__(self, "alias", self.linear)

        def forward_impl(self, x: torch.Tensor) -> Any:
            return self, self.alias

    for replica in replicate(Bound(), "2xcpu"):
        inside, alias = replica(torch.zeros(1, 2))
        assert inside is replica and alias is replica.linear


def test_hooks_run_on_the_replica() -> None:
    net, seen = nn.Linear(2, 2), []
    net.register_forward_hook(lambda module, args, output: seen.append(module))
    replicas = replicate(net, "2xcpu")
    replicas[1](torch.zeros(1, 2))
    assert seen == [replicas[1]]


def test_a_module_without_parameters_and_one_device_work() -> None:
    assert len(replicate(nn.ReLU(), "2xcpu")) == 2
    assert replicate(nn.Linear(1, 1), "1xcpu")[0](torch.zeros(1, 1)).requires_grad


def test_lazy_modules_are_refused_by_name() -> None:
    with pytest.raises(InputError, match=r"0 .*LazyLinear"):
        replicate(nn.Sequential(nn.LazyLinear(2)), "2xcpu")


def test_compiled_modules_are_refused() -> None:
    class Compiled(nn.Module):
        """What ``torch.compile`` gives: a module that calls the one that it was made of."""

        def __init__(self, module: nn.Module) -> None:
            super().__init__()
            self._orig_mod = module

    with pytest.raises(InputError, match=r"torch\.compile"):
        replicate(Compiled(nn.Linear(1, 1)), "2xcpu")


def test_modules_compiled_in_place_are_refused_at_any_time() -> None:
    """Each replica called the original's code, and wrote into the original's buffers."""
    model = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3))
    net = DataParallel(model, "2xcpu")
    net(torch.randn(4, 3))
    model[1].compile(backend="eager")
    with pytest.raises(InputError, match=r"1 was compiled in place, by its compile\(\)"):
        net(torch.randn(4, 3))
    with pytest.raises(InputError, match=r"1 was compiled in place, by its compile\(\)"):
        replicate(model, "2xcpu")
