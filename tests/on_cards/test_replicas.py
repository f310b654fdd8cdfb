"""Replicas of ``parallel.DataParallel`` on one card."""

from __future__ import annotations

import threading

import pytest
import torch
from test_data_parallel import Applied, Net, gradients, pair, same
from torch import nn

import lockstep
from lockstep.parallel import DataParallel

pytestmark = pytest.mark.usefixtures("float64")


def test_replicas_on_one_accelerator_follow_one_another_with_the_same_numbers() -> None:
    plain, net = pair(Net().to("card:0"), ["card:0", "card:0"])
    threads: list[int] = []
    net.module.register_forward_hook(
        lambda module, args, output: threads.append(threading.get_ident())
    )
    x = torch.randn(7, 6, device="card:0", requires_grad=True)
    for module in (plain, net):
        out = module(x).square().sum() * module(x[:3]).sum()
        (slope,) = torch.autograd.grad(out, x, create_graph=True)
        (slope.square().sum() + out).backward()
    same(gradients(net.module), gradients(plain))
    assert threads == [threading.get_ident()] * 4
    with torch.no_grad():
        same(net(x), plain(x))
    norm = DataParallel(nn.BatchNorm1d(2).to("card:0"), ["card:0", "card:0"])
    x = torch.randn(8, 2, device="card:0")
    norm(x)
    same(norm.module.running_mean, 0.1 * x[:4].mean(0))
    failing = DataParallel(Applied(lambda x: {}["wonderful"]), ["card:0", "card:0"])
    with pytest.raises(KeyError) as caught:
        failing(x)
    assert caught.value.__notes__ == ["raised by replica 0 on card:0"]


class Normed(nn.Sequential):
    """The same weights each time."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        super().__init__(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 4))


def contrast(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    features = nn.functional.normalize(outputs, dim=1)
    others = torch.arange(len(outputs), device=outputs.device).roll(1)
    return nn.functional.cross_entropy(features @ features.T, others)


@pytest.mark.timeout(120)
def test_a_loss_over_the_batch_beside_batch_norms_that_wait_for_one_another() -> None:
    """Each card has a thread of autograd: a replica's backward must not need that of another's."""
    weights = []
    for strategy, devices in (("single", "1xcpu"), ("dp", "card:0,1")):
        step = lockstep.parallelize(
            Normed(),
            contrast,
            lambda parameters: torch.optim.SGD(parameters, lr=0.1),
            strategy=strategy,
            devices=devices,
            loss_over="batch",
            sync_batchnorm=True,
        )
        draws = torch.Generator().manual_seed(0)
        for size in (8, 6):
            step(torch.randn(size, 6, generator=draws), torch.zeros(size))
        weights.append({name: w.cpu() for name, w in step.state_dict()["model"].items()})
    for name, weight in weights[0].items():
        torch.testing.assert_close(weights[1][name], weight, rtol=1e-10, atol=1e-10)
