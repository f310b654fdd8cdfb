"""What only an accelerator can show. Run where there is one, and on simulated cards by test_on_cards.py.

The list of what is owed is in benchmarks/gpu-owed.md.
"""

from __future__ import annotations

import copy
import os

import pytest
import torch
from torch import nn

import lockstep
from lockstep import Job, train
from lockstep.errors import NonFiniteLoss
from lockstep.launch.devices import Device
from lockstep.parallel import DataParallel, data_parallel
from lockstep.strategies.ddp import DDP
from lockstep.verify import differences
from zoo import ZOO, drawn, labels

if "SIMULATED_CARDS" in os.environ:
    import simulated_card

    simulated_card.load()

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.accelerator.is_available(), reason="needs an accelerator"),
]
TYPE = str(torch.accelerator.current_accelerator() or "cuda")
only_cuda = pytest.mark.skipif(TYPE != "cuda", reason="PyTorch has it for CUDA alone")
KINDS = ["mlp", "ignored tokens and tied weights", "a layer unused in some steps, the last one too", "clipping"]


@pytest.mark.parametrize("strategy", ["single", "ddp"])
@pytest.mark.parametrize("kind", [*KINDS, "convolutions with sync_batchnorm"])
def test_one_gpu_ends_where_one_slot_does(kind: str, strategy: str, tmp_path) -> None:
    job = ZOO[kind].replace(precision="fp64")
    here = train(job, strategy="single", devices="1xcpu", folder=tmp_path, quiet=True)
    there = train(job, strategy=strategy, devices=f"{TYPE}:0", folder=tmp_path, quiet=True)
    assert differences(job, there, here).worst < 1e-9


@pytest.mark.parametrize("kind", KINDS)
def test_two_replicas_on_one_gpu_end_where_one_does(kind: str, tmp_path) -> None:
    job = ZOO[kind].replace(precision="fp64")
    here = train(job, strategy="single", devices=f"{TYPE}:0", folder=tmp_path, quiet=True)
    there = train(job, strategy="dp", devices=[Device(TYPE, 0)] * 2, folder=tmp_path, quiet=True)
    assert differences(job, there, here).worst < 1e-10


@pytest.mark.parametrize("way", ["mp", "pp"])
@pytest.mark.parametrize("kind", KINDS)
def test_two_stages_on_one_gpu_end_where_one_does(kind: str, way: str, tmp_path) -> None:
    job = ZOO[kind].replace(precision="fp64")
    parts = (4 if way == "pp" else 1) * job.accumulate
    here = train(job, strategy="single", devices=f"{TYPE}:0", folder=tmp_path, quiet=True, accumulate=parts)
    there = train(job, strategy=way, devices=[Device(TYPE, 0)] * 2, folder=tmp_path, quiet=True)
    assert differences(job, there, here).worst < 1e-10


@pytest.mark.skipif(torch.accelerator.device_count() < 2, reason="needs two devices")
@pytest.mark.parametrize("way", ["mp", "pp"])
@pytest.mark.parametrize("kind", KINDS)
def test_stages_on_two_gpus_end_where_one_does(kind: str, way: str, tmp_path) -> None:
    job = ZOO[kind].replace(precision="fp64")
    parts = (4 if way == "pp" else 1) * job.accumulate
    here = train(job, strategy="single", devices=f"{TYPE}:0", folder=tmp_path, quiet=True, accumulate=parts)
    there = train(job, strategy=way, devices=f"{TYPE}:0,1", folder=tmp_path, quiet=True)
    assert differences(job, there, here).worst < 1e-9


@only_cuda
def test_two_ranks_on_one_gpu_end_where_one_does(tmp_path) -> None:
    # NCCL wants a device for each rank; gloo takes CUDA tensors too.
    job = ZOO["ignored tokens and tied weights"].replace(precision="fp64")
    here = train(job, strategy="single", devices=f"{TYPE}:0", folder=tmp_path, quiet=True)
    for reduce in ("flat", "overlapped"):
        way = DDP(reduce=reduce)
        there = train(job, strategy=way, devices=[Device(TYPE, 0)] * 2, backend="gloo", folder=tmp_path, quiet=True)
        assert differences(job, there, here).worst < 1e-10


def test_a_loss_that_is_not_finite_is_named_by_its_step_some_steps_later(tmp_path) -> None:
    seen = []

    def loss(outputs: torch.Tensor, targets: torch.Tensor) -> tuple[torch.Tensor, int]:
        seen.append(1)
        total = outputs.sum()
        return (total * float("nan") if len(seen) == 7 else total), len(targets)

    data = torch.utils.data.TensorDataset(drawn(200, 6), labels(200, 3))
    job = Job(
        model=ZOO["mlp"].model, loss=loss, optimizer=ZOO["mlp"].optimizer, train_data=data, batch_size=4, epochs=3
    )
    with pytest.raises(NonFiniteLoss, match="at step 7"):
        train(job, strategy="single", devices=f"{TYPE}:0", folder=tmp_path, quiet=True)


def small_net() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 3)).double().to(TYPE)


@only_cuda
def test_data_parallel_on_one_gpu_does_what_pytorchs_does() -> None:
    net = small_net()
    theirs = nn.DataParallel(copy.deepcopy(net), device_ids=[0, 0])
    ours = DataParallel(net, device_ids=[0, 0])
    optimizers = [torch.optim.AdamW(m.parameters(), lr=0.05, fused=True) for m in (theirs, ours)]
    for size in (12, 12, 7):
        x = torch.randn(size, 6, dtype=torch.float64)
        for module, optimizer in zip((theirs, ours), optimizers, strict=True):
            optimizer.zero_grad()
            output = module(x)
            assert output.device == torch.device(TYPE, 0)
            output.square().sum().backward()
            optimizer.step()
    for (name, one), other in zip(ours.state_dict().items(), theirs.state_dict().values(), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-12, msg=name)


def test_data_parallel_on_one_gpu_has_the_gradients_of_the_plain_module() -> None:
    net = small_net()
    net.eval()
    x = torch.randn(7, 6, dtype=torch.float64, device=TYPE, requires_grad=True)
    both = []
    for call in (
        net,
        DataParallel(net, [0, 0]),
        lambda x: data_parallel(net, x, [0, 0]),
        DataParallel(net, f"{TYPE}:0"),
    ):
        slope = torch.autograd.grad(call(x).square().sum(), x, create_graph=True)[0]
        both.append(torch.autograd.grad(slope.pow(3).sum() + call(x).sum(), [x, *net.parameters()], allow_unused=True))
    for found in both[1:]:
        for one, other in zip(found, both[0], strict=True):
            torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-12)
    with torch.no_grad():
        torch.testing.assert_close(DataParallel(net, [0, 0])(x), net(x), rtol=1e-12, atol=1e-12)


def test_a_map_over_replicas_on_one_gpu_gives_rows_on_the_cpu() -> None:
    net, x = nn.Sequential(nn.Linear(6, 4), nn.Dropout(0.5)), drawn(23, 6)
    found = torch.stack(list(lockstep.map(net, x, [Device(TYPE, 0)] * 2, batch_size=4)))
    assert found.is_cpu and next(net.parameters()).is_cpu
    torch.testing.assert_close(found, net[0](x).detach(), rtol=1e-5, atol=1e-5)


def test_a_map_over_processes_on_one_gpu_computes_there_and_gives_tensors_on_the_cpu() -> None:
    def on_gpu(i: int) -> tuple[torch.Tensor, str]:
        made = torch.full((5000,), float(i), device=TYPE) + torch.rand(5000, device=TYPE)
        return made, str(made.device)

    two = list(lockstep.map(on_gpu, range(6), [Device(TYPE, 0)] * 2))
    one = list(lockstep.map(on_gpu, range(6), f"{TYPE}:0"))
    assert all(made.is_cpu and place == f"{TYPE}:0" for made, place in [*one, *two])
    assert all(torch.equal(a, b) for (a, _), (b, _) in zip(one, two, strict=True))


def test_verify_names_dropout_whose_masks_come_from_the_gpu() -> None:
    job = ZOO["mlp"].replace(model=lambda: nn.Sequential(nn.Linear(6, 8), nn.Dropout(0.5), nn.Linear(8, 3)))
    found = lockstep.verify(job, strategy="dp", devices=[Device(TYPE, 0)] * 2)
    assert [cause.kind for cause in found.causes] == ["dropout"], str(found)
