"""Replicas of ``parallel.DataParallel`` on one card."""

from __future__ import annotations

import threading

import pytest
import torch
from test_data_parallel import Applied, Net, gradients, pair, same
from torch import nn

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
