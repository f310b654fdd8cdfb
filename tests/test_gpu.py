"""What only an accelerator can show. Run where there is one, and on simulated cards by
test_on_cards.py.

The list of what is owed is in benchmarks/gpu-owed.md.
"""

from __future__ import annotations

import copy
import dataclasses
import gzip
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import lockstep
from lockstep import Job, train
from lockstep.errors import NonFiniteLoss, StrategyError
from lockstep.launch.devices import Device
from lockstep.launch.memory import free_memory
from lockstep.launch.processes.modes import flags
from lockstep.launch.world import World
from lockstep.model.compile import MODES
from lockstep.parallel import DataParallel, data_parallel
from lockstep.strategies import MP, Strategy
from lockstep.strategies.ddp import DDP
from lockstep.strategies.fsdp import FSDP
from lockstep.strategies.pp import PP
from lockstep.strategies.single import Single

from harness import differences  # isort: skip
from zoo import ZOO, Residual, drawn, labels

if "SIMULATED_CARDS" in os.environ:
    import simulated_card

    simulated_card.load()

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.accelerator.is_available(), reason="needs an accelerator"),
]
TYPE = str(torch.accelerator.current_accelerator() or "cuda")
only_cuda = pytest.mark.skipif(TYPE != "cuda", reason="PyTorch has it for CUDA alone")
two_devices = pytest.mark.skipif(torch.accelerator.device_count() < 2, reason="needs two devices")
KINDS = [
    "mlp",
    "ignored tokens and tied weights",
    "a layer unused in some steps, the last one too",
    "clipping",
]


def contrast(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    features = nn.functional.normalize(outputs, dim=1)
    others = torch.arange(len(outputs), device=outputs.device).roll(1)
    return nn.functional.cross_entropy(features @ features.T, others)


def items(targets: torch.Tensor) -> dict[str, torch.Tensor]:
    return {"items": (targets > 0).sum()}


def share(
    outputs: torch.Tensor, targets: torch.Tensor, counts: dict[str, torch.Tensor]
) -> torch.Tensor:
    of_each = nn.functional.cross_entropy(outputs, targets, reduction="none")
    return (of_each * (targets > 0)).sum() / counts["items"]


OF_WHOLE_BATCH: dict[str, dict[str, Any]] = {
    "over the batch": {"loss": contrast, "loss_over": "batch"},
    "counts": {"loss": share, "counts": items},
}


@pytest.mark.parametrize("strategy", ["single", "ddp"])
@pytest.mark.parametrize("kind", [*KINDS, "convolutions with sync_batchnorm"])
def test_one_gpu_ends_where_one_slot_does(kind: str, strategy: str, tmp_path) -> None:
    job = ZOO[kind].replace(precision="fp64")
    here = train(job, strategy="single", devices="1xcpu", folder=tmp_path, quiet=True)
    there = train(job, strategy=strategy, devices=f"{TYPE}:0", folder=tmp_path, quiet=True)
    assert differences(job, there, here).worst < 1e-9


def check_two_devices(job: Job, way: Any, folder: Path) -> None:
    """A training on two devices ends where one on one device does, and evaluates alike."""
    here = train(job, strategy="single", devices=f"{TYPE}:0", folder=folder, quiet=True)
    there = train(job, strategy=way, devices=f"{TYPE}:0,1", folder=folder, quiet=True)
    found = differences(job, there, here)
    assert found.worst < 1e-9
    assert max(found.history.values()) < 1e-9, "evaluated, too"


@pytest.mark.parametrize("kind", KINDS)
def test_two_replicas_on_one_gpu_end_where_one_does(kind: str, tmp_path) -> None:
    job = ZOO[kind].replace(precision="fp64")
    here = train(job, strategy="single", devices=f"{TYPE}:0", folder=tmp_path, quiet=True)
    there = train(job, strategy="dp", devices=[Device(TYPE, 0)] * 2, folder=tmp_path, quiet=True)
    assert differences(job, there, here).worst < 1e-10


@pytest.mark.parametrize("way", ["dp", "pp"])
@pytest.mark.parametrize("kind", OF_WHOLE_BATCH)
def test_losses_of_the_whole_batch_on_one_gpu(kind: str, way: str, tmp_path) -> None:
    job = ZOO["mlp"].replace(precision="fp64", **OF_WHOLE_BATCH[kind])
    here = train(job, strategy="single", devices=f"{TYPE}:0", folder=tmp_path, quiet=True)
    there = train(job, strategy=way, devices=[Device(TYPE, 0)] * 2, folder=tmp_path, quiet=True)
    assert differences(job, there, here).worst < 1e-10


@pytest.mark.parametrize("way", ["dp", "pp"])
def test_fp16_scales_a_small_loss_over_the_batch(way: str, tmp_path) -> None:
    job = ZOO["mlp"].replace(
        loss=lambda outputs, targets: contrast(outputs.float(), targets) * 1e-6,
        loss_over="batch",
        optimizer=lambda named: torch.optim.SGD(named, lr=1e5),
        steps=3,
    )
    here, there = (
        train(
            job.replace(precision=precision),
            strategy=strategy,
            devices=[Device(TYPE, 0)] * devices,
            folder=tmp_path,
            quiet=True,
        )
        for precision, strategy, devices in (("fp32", "single", 1), ("fp16", way, 2))
    )
    assert differences(job, there, here).worst < 0.05


@pytest.mark.parametrize("way", ["mp", "pp"])
@pytest.mark.parametrize("kind", KINDS)
def test_two_stages_on_one_gpu_end_where_one_does(kind: str, way: str, tmp_path) -> None:
    job = ZOO[kind].replace(precision="fp64")
    parts = (4 if way == "pp" else 1) * job.accumulate
    here = train(
        job, strategy="single", devices=f"{TYPE}:0", folder=tmp_path, quiet=True, accumulate=parts
    )
    there = train(job, strategy=way, devices=[Device(TYPE, 0)] * 2, folder=tmp_path, quiet=True)
    assert differences(job, there, here).worst < 1e-10


@two_devices
@pytest.mark.parametrize("way", ["mp", "pp"])
@pytest.mark.parametrize("kind", KINDS)
def test_stages_on_two_gpus_end_where_one_does(kind: str, way: str, tmp_path) -> None:
    job = ZOO[kind].replace(precision="fp64")
    parts = (4 if way == "pp" else 1) * job.accumulate
    here = train(
        job, strategy="single", devices=f"{TYPE}:0", folder=tmp_path, quiet=True, accumulate=parts
    )
    there = train(job, strategy=way, devices=f"{TYPE}:0,1", folder=tmp_path, quiet=True)
    assert differences(job, there, here).worst < 1e-9


@only_cuda
def test_two_ranks_on_one_gpu_end_where_one_does(tmp_path) -> None:
    job = ZOO["ignored tokens and tied weights"].replace(precision="fp64")
    here = train(job, strategy="single", devices=f"{TYPE}:0", folder=tmp_path, quiet=True)
    twice: dict[str, Any] = {
        "devices": [Device(TYPE, 0)] * 2,
        "folder": tmp_path,
        "quiet": True,
    }
    for way in (DDP(reduce="flat"), DDP(reduce="overlapped")):
        there = train(job, strategy=way, **twice)
        assert differences(job, there, here).worst < 1e-10
    with pytest.raises(StrategyError, match="gloo can't gather shards that are on GPUs"):
        train(job, strategy="fsdp", **twice)


def test_a_loss_that_is_not_finite_is_named_by_its_step_some_steps_later(tmp_path) -> None:
    seen = []

    def loss(outputs: torch.Tensor, targets: torch.Tensor) -> tuple[torch.Tensor, int]:
        seen.append(1)
        total = outputs.sum()
        return (total * float("nan") if len(seen) == 7 else total), len(targets)

    data = torch.utils.data.TensorDataset(drawn(200, 6), labels(200, 3))
    job = Job(
        model=ZOO["mlp"].model,
        loss=loss,
        optimizer=ZOO["mlp"].optimizer,
        train_data=data,
        batch_size=4,
        epochs=3,
    )
    with pytest.raises(NonFiniteLoss, match="at step 7"):
        train(job, strategy="single", devices=f"{TYPE}:0", folder=tmp_path, quiet=True)


def small_net() -> nn.Module:
    """With two batch norms: of one, PyTorch's replicas on one GPU share the count, and both add
    to it.
    """
    net = nn.Sequential(
        nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.BatchNorm1d(8), nn.Linear(8, 3)
    )
    return net.double().to(TYPE)


@only_cuda
@pytest.mark.filterwarnings(
    "ignore:Attempting to run cuBLAS"
)  # in the threads of PyTorch's DataParallel
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
    for (name, one), other in zip(
        ours.state_dict().items(), theirs.state_dict().values(), strict=True
    ):
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
        both.append(
            torch.autograd.grad(
                slope.pow(3).sum() + call(x).sum(), [x, *net.parameters()], allow_unused=True
            )
        )
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


def test_verify_switches_off_dropout_whose_masks_come_from_the_gpu() -> None:
    job = ZOO["mlp"].replace(
        model=lambda: nn.Sequential(nn.Linear(6, 8), nn.Dropout(0.5), nn.Linear(8, 3))
    )
    found = lockstep.verify(job, strategy="dp", devices=[Device(TYPE, 0)] * 2)
    assert found, str(found)
    assert any("dropout is switched off on both sides" in note for note in found.notes)


@only_cuda
@pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype")
@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"precision": "bf16"},
        {"accumulate": 2, "clip_norm": 0.5},
        *OF_WHOLE_BATCH.values(),
    ],
    ids=lambda settings: ", ".join(settings) or "plain",
)
@pytest.mark.parametrize(
    "way", [Single(), MP({"0": 0, "": 1}), PP({"0": 0, "": 1}, microbatches=2)], ids=type
)
def test_the_host_waits_for_nothing_in_an_update(way: Strategy, settings: dict[str, Any]) -> None:
    world = World(devices=(Device(TYPE, 0),) * (1 if isinstance(way, Single) else 2))
    data = torch.utils.data.TensorDataset(drawn(400, 6), labels(400, 3))
    job = dataclasses.replace(
        ZOO["momentum"], model=dropping, train_data=data, batch_size=16, **settings
    )
    update_without_waiting(way, job, world)


def update_without_waiting(way: Strategy, job: Job, world: World) -> None:
    """An epoch; from update 17 on, the host may not wait for the device."""
    step = way.prepare(job, world)
    try:
        for number, batch in enumerate(way.training_loader(job, world, job.train_data).epoch(0), 1):
            if number == 17:
                torch.cuda.set_sync_debug_mode("error")
            step.seed(0)
            step.update(batch)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    step.check()


# ---- settings ------------------------------------------------------------------------------------


@pytest.mark.parametrize("precision", ["bf16", "fp16", pytest.param("tf32", marks=only_cuda)])
@pytest.mark.parametrize("kind", ["momentum", "accumulation", "clipping"])
def test_narrow_formats_end_near_fp32(kind: str, precision: str, tmp_path) -> None:
    wide, narrow = (
        train(ZOO[kind].replace(precision=name), devices=f"{TYPE}:0", folder=tmp_path, quiet=True)
        for name in ("fp32", precision)
    )
    assert differences(ZOO[kind], narrow, wide).worst < 0.2


@only_cuda
@pytest.mark.filterwarnings("ignore:::torch")  # of the compiler itself
@pytest.mark.parametrize("mode", [True, *MODES])
def test_each_mode_of_the_compiler_ends_where_none_does(mode: bool | str, tmp_path) -> None:
    job = ZOO["mlp"].replace(precision="fp64")
    plain, compiled = (
        train(job.replace(compile=wanted), devices=f"{TYPE}:0", folder=tmp_path, quiet=True)
        for wanted in (False, mode)
    )
    found = differences(job, compiled, plain)
    assert found.worst < 1e-9
    assert max(found.history.values()) < 1e-9, "evaluated, too"


class Judging(nn.Module):
    """Gives its own loss, as Hugging Face's models do."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 3))

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        logits = self.net(x)
        return {"loss": nn.functional.cross_entropy(logits, labels), "logits": logits}


class Labelled(torch.utils.data.Dataset[Any]):
    def __len__(self) -> int:
        return 100

    def __getitem__(self, i: int) -> Any:
        x, label = drawn(1, 6, seed=i)[0], labels(1, 3, seed=i)[0]
        return {"x": x, "labels": label}, label


@only_cuda
@pytest.mark.filterwarnings("ignore:::torch")  # of the compiler itself
@pytest.mark.parametrize("kind", ["a metric that keeps outputs", "a model's own loss"])
def test_what_a_graph_writes_over_is_kept_by_an_evaluation(kind: str, tmp_path) -> None:
    if kind == "a model's own loss":
        data: Any = Labelled()
        job = dataclasses.replace(
            ZOO["mlp"], model=Judging, loss=lockstep.model_loss, train_data=data, metrics={}
        )
    else:
        metric = pytest.importorskip("torchmetrics.classification").MulticlassAUROC(3)
        data = torch.utils.data.TensorDataset(drawn(100, 6), labels(100, 3))
        job = dataclasses.replace(ZOO["mlp"], train_data=data, metrics={"auroc": metric})
    job = job.replace(eval_data=data, batch_size=16, eval_batch_size=16, epochs=2)
    plain, graphed = (
        train(job.replace(compile=mode), devices=f"{TYPE}:0", folder=tmp_path, quiet=True)
        for mode in (False, "reduce-overhead")
    )
    found = differences(job, graphed, plain)
    assert max(found.worst, *found.history.values()) < 1e-4


@only_cuda
def test_what_tf32_sets_is_as_before_afterwards(tmp_path) -> None:
    before = flags()
    train(ZOO["mlp"].replace(precision="tf32"), devices=f"{TYPE}:0", folder=tmp_path, quiet=True)
    assert flags() == before


def test_nothing_is_noted_of_models_without_a_fault(tmp_path, capfd) -> None:
    for kind in KINDS:
        train(ZOO[kind], strategy="single", devices=f"{TYPE}:0", folder=tmp_path)
    assert "note:" not in capfd.readouterr().out


# ---- runs ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("precision", ["fp64", "fp16"])
def test_a_run_goes_on_on_the_cpu_and_back(precision: str, tmp_path) -> None:
    job = dataclasses.replace(ZOO["momentum"], precision=precision)
    whole = train(job, devices=f"{TYPE}:0", folder=tmp_path, quiet=True, epochs=3)
    run = train(job, devices=f"{TYPE}:0", folder=tmp_path, quiet=True, epochs=1)
    for epochs, devices in ((2, "1xcpu"), (3, f"{TYPE}:0")):
        run = train(job, devices=devices, resume=run.folder, quiet=True, epochs=epochs)
    assert differences(job, run, whole).worst < (1e-9 if precision == "fp64" else 0.1)


def dropping() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 8), nn.Dropout(0.5), nn.Linear(8, 3))


def test_a_resumed_run_draws_the_masks_of_one_that_was_never_stopped(tmp_path) -> None:
    job = dataclasses.replace(ZOO["momentum"], model=dropping)
    whole = train(job, devices=f"{TYPE}:0", folder=tmp_path, quiet=True, epochs=2)
    part = train(job, devices=f"{TYPE}:0", folder=tmp_path, quiet=True, epochs=1)
    resumed = train(job, devices=f"{TYPE}:0", resume=part.folder, quiet=True, epochs=2)
    assert differences(job, resumed, whole).worst == 0.0


@only_cuda
def test_a_profile_has_the_kernels(tmp_path) -> None:
    run = train(
        ZOO["mlp"], devices=f"{TYPE}:0", folder=tmp_path, quiet=True, epochs=20, profile=True
    )
    traces = list(Path(run.folder).rglob("*.json.gz"))
    assert traces and all(
        '"cat": "kernel"' in gzip.decompress(trace.read_bytes()).decode() for trace in traces
    )


def test_free_memory_is_what_tensors_may_still_take() -> None:
    before = free_memory(Device(TYPE, 0))
    held = torch.empty(1 << 24, dtype=torch.float64, device=f"{TYPE}:0")  # 128 MiB
    after = free_memory(Device(TYPE, 0))
    assert abs(before - after - (1 << 27)) <= 1 << 23, "up to what the allocator rounds"
    del held
    assert abs(free_memory(Device(TYPE, 0)) - before) <= 1 << 23


@only_cuda
def test_the_table_counts_within_the_devices_that_are_visible() -> None:
    def table(**more: str) -> list[str]:
        words = [sys.executable, "-m", "lockstep", "devices"]
        done = subprocess.run(
            words, env={**os.environ, **more}, capture_output=True, text=True, check=True
        )
        return [line for line in done.stdout.splitlines() if line.startswith("cuda")]

    last = torch.cuda.device_count() - 1
    assert len(table()) == last + 1
    (line,) = table(CUDA_VISIBLE_DEVICES=str(last))
    assert f"number 0 here, {last} of the machine" in line


# ---- two devices ---------------------------------------------------------------------------------


@two_devices
@pytest.mark.parametrize(
    "way", ["dp", DDP(reduce="flat"), DDP(reduce="overlapped")], ids=["dp", "flat", "overlapped"]
)
@pytest.mark.parametrize("kind", KINDS[1:3])
def test_replicas_on_two_gpus_end_where_one_does(kind: str, way, tmp_path) -> None:
    job = ZOO[kind].replace(precision="fp64")
    check_two_devices(job, way, tmp_path)


@two_devices
@pytest.mark.parametrize("way", ["dp", "ddp", "fsdp", "pp"])
@pytest.mark.parametrize("kind", OF_WHOLE_BATCH)
def test_losses_of_the_whole_batch_on_two_gpus(kind: str, way: str, tmp_path) -> None:
    settings = OF_WHOLE_BATCH[kind] | SHARDED["momentum"]
    job = ZOO["mlp"].replace(precision="fp64", model=Layers, **settings)
    check_two_devices(job, way, tmp_path)


@two_devices
@pytest.mark.timeout(120)
def test_batch_norms_wait_for_one_another_beside_a_loss_over_the_batch(tmp_path) -> None:
    settings = OF_WHOLE_BATCH["over the batch"]
    job = ZOO["convolutions with sync_batchnorm"].replace(precision="fp64", **settings)
    here = train(job, strategy="single", devices=f"{TYPE}:0", folder=tmp_path, quiet=True)
    for way in ("dp", "ddp"):
        there = train(job, strategy=way, devices=f"{TYPE}:0,1", folder=tmp_path, quiet=True)
        assert differences(job, there, here).worst < 1e-9


class Layers(nn.Module):
    """Layers are found as blocks. Of some parameters the second of two ranks has fewer rows, or
    none.
    """

    def __init__(self, width: int = 7, layers: int = 3) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Residual(width) for _ in range(layers))
        self.first, self.out, self.scale = (
            nn.Linear(6, width),
            nn.Linear(width, 3),
            nn.Parameter(torch.ones(1)),
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        return self.out(x) * self.scale


SHARDED: dict[str, dict[str, Any]] = {
    "uneven": {
        "optimizer": lambda named: torch.optim.AdamW(named, lr=0.01),
        "clip_norm": 0.5,
        "accumulate": 2,
    },
    "momentum": {"optimizer": lambda named: torch.optim.SGD(named, lr=0.1, momentum=0.9)},
    "checkpointed": {"activation_checkpointing": "auto"},
    "smaller than the world": {"batch_size": 1},
}


@two_devices
@pytest.mark.parametrize(
    ("way", "kind"),
    [
        *(("fsdp", kind) for kind in (*KINDS[1:3], *SHARDED)),
        *((way, "uneven") for way in ("ddp=2xfsdp=1", "ddp=1xfsdp=2")),
    ],
)
def test_shards_on_two_gpus_end_where_one_does(way: str, kind: str, tmp_path) -> None:
    job = (
        ZOO[kind]
        if kind in KINDS
        else dataclasses.replace(ZOO["mlp"], model=Layers, **SHARDED[kind])
    )
    job = job.replace(precision="fp64")
    check_two_devices(job, way, tmp_path)


@two_devices
@only_cuda
@pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype")
def test_the_host_waits_for_no_gpu_in_an_update_of_shards() -> None:
    lockstep.launch(updates_of_shards, f"{TYPE}:0,1")


def updates_of_shards(world: World) -> None:
    data = torch.utils.data.TensorDataset(drawn(800, 6), labels(800, 3))
    job = dataclasses.replace(
        ZOO["mlp"], model=Layers, train_data=data, batch_size=32, **SHARDED["uneven"]
    )
    update_without_waiting(FSDP(), job, world)


@two_devices
def test_a_run_in_shards_goes_on_on_one_gpu_and_back(tmp_path) -> None:
    job = dataclasses.replace(ZOO["mlp"], model=Layers, **SHARDED["uneven"]).replace(
        precision="fp64"
    )
    whole = train(job, devices=f"{TYPE}:0", folder=tmp_path, quiet=True, epochs=3)
    run = train(job, strategy="fsdp", devices=f"{TYPE}:0,1", folder=tmp_path, quiet=True, epochs=1)
    for epochs, way, devices in ((2, "single", "0"), (3, "fsdp", "0,1")):
        run = train(
            job,
            strategy=way,
            devices=f"{TYPE}:{devices}",
            resume=run.folder,
            quiet=True,
            epochs=epochs,
        )
    assert differences(job, run, whole).worst < 1e-9


WIDE = lambda: Layers(512, 16)  # noqa: E731


def bytes_of_shards(world: World, precision: str | None) -> dict[str, int]:
    """What a rank's device has at most while 16 MiB of parameters are cut, keeps, and has at
    most in an update.
    """
    device = world.device.torch
    torch.accelerator.reset_peak_memory_stats(device)
    before = torch.accelerator.memory_allocated(device)
    job = ZOO["mlp"].replace(
        model=WIDE, optimizer=lambda named: torch.optim.AdamW(named, lr=0.01), precision=precision
    )
    world.layout = FSDP().layout(world.size)
    step = FSDP().build(job, world)
    found = {"built": torch.accelerator.max_memory_allocated(device) - before}
    for _ in range(
        5
    ):  # before the fourth the model, which is small, was put together once more, to be inspected
        torch.accelerator.synchronize(device)
        torch.accelerator.reset_peak_memory_stats(device)
        step(drawn(4, 6), labels(4, 3))
    torch.accelerator.synchronize(device)
    found["kept"] = torch.accelerator.memory_allocated(device) - before
    return found | {"peak": torch.accelerator.max_memory_allocated(device) - before}


@two_devices
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_a_gpu_has_its_shards_and_one_block(precision: str) -> None:
    whole = sum(p.nbytes for p in WIDE().parameters())
    block = whole / 16
    for found in lockstep.launch(bytes_of_shards, f"{TYPE}:0,1", (precision,)):
        assert found["built"] <= whole / 2 + 2 * block
        assert found["kept"] <= 4 * whole / 2 + block, "weights, gradients and two moments"
        # Two blocks that are gathered, each twice, the gradients of two, and what is computed.
        assert found["peak"] <= found["kept"] + 9 * block, found


@two_devices
def test_the_hosts_of_two_ranks_wait_for_one_another_in_a_group_that_is_made_twice() -> None:
    def ranks(world: World) -> tuple[list[str], float, str]:
        if world.rank == 0:
            time.sleep(0.5)
        began = time.monotonic()
        world.barrier()
        waited = time.monotonic() - began
        total = world.all_reduce(torch.ones((), device=world.device.torch)).item()
        said = world.broadcast_object(f"from {world.rank}")
        return world.gather_objects(str(world.device)), waited if world.rank else total, said

    for _ in range(2):
        (devices, total, said), (again, waited, heard) = lockstep.launch(ranks, f"{TYPE}:0,1")
        assert devices == again == [f"{TYPE}:0", f"{TYPE}:1"]
        assert total == 2.0 and said == heard == "from 0"
        assert waited > 0.2, "a barrier that only queues would not hold the host"


@two_devices
@only_cuda
@pytest.mark.filterwarnings(
    "ignore:Attempting to run cuBLAS"
)  # in the threads of PyTorch's DataParallel
def test_data_parallel_on_two_gpus_does_what_pytorchs_does() -> None:
    net, x = small_net(), torch.randn(9, 6, dtype=torch.float64, device=TYPE)
    theirs, ours = nn.DataParallel(copy.deepcopy(net), [0, 1]), DataParallel(net, [0, 1])
    outputs = [module(x) for module in (theirs, ours)]
    torch.testing.assert_close(*outputs, rtol=1e-12, atol=1e-12)
    for output in outputs:
        output.square().sum().backward()
    for one, other in zip(theirs.parameters(), ours.parameters(), strict=True):
        torch.testing.assert_close(one.grad, other.grad, rtol=1e-12, atol=1e-12)
    for one, other in zip(theirs.buffers(), ours.buffers(), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-12)
