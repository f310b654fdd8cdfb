"""Replicas of pipelines: what a product of strategies is called, where it runs, and what of it is
refused in a line.

That it ends where one device does is in ``test_parity.py``, on accelerators in ``tests/on_cards``.
"""

from __future__ import annotations

import dataclasses
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

import lockstep
from lockstep import evaluate, predict, train
from lockstep.callbacks import Callback
from lockstep.cli.command import main
from lockstep.errors import DeviceError, InputError, RankFailed, RunError, StrategyError
from lockstep.launch.devices import Device, slots
from lockstep.launch.layout import Layout
from lockstep.run.run_folder import RunFolder
from lockstep.strategies import STRATEGIES, choose, devices_for, named
from lockstep.verify import verify

from harness import differences, same_bits  # isort: skip
from zoo import ZOO, mlp, plain_sgd  # isort: skip

BOUND = 1e-10

JOB = """
import lockstep, torch
from torch import nn
from torch.utils.data import TensorDataset

def job():
    return lockstep.Job(
        model=lambda: nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3)), loss=nn.CrossEntropyLoss(),
        optimizer=lambda p: torch.optim.SGD(p, lr=0.1), batch_size=8, epochs=1, precision="fp64",
        train_data=TensorDataset(torch.arange(80.0).view(20, 4) / 80, torch.arange(20) % 3))
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "small.py").write_text(JOB)
    return tmp_path


# ---- words ---------------------------------------------------------------------------------------


def test_a_product_has_the_settings_of_the_strategy_of_a_replica() -> None:
    inner = "pp"
    product = named(f"ddp=3x{inner}=2", device_map={"": 0})
    assert product.name == f"ddp=3x{inner}=2" and isinstance(product, STRATEGIES[inner])
    assert product.settings().keys() == {*STRATEGIES[inner].settings(), "shares"}
    assert dataclasses.replace(product, device_map=None).name == product.name
    assert product.layout(6) == Layout({"data": 3, "stage": 2}, devices_per_process=2)
    assert devices_for(product, "auto") == devices_for(product.name, None) == "6xcpu"
    assert devices_for(product, "4xcpu") == "4xcpu"
    assert devices_for(product, 6) == devices_for(product.name, "6") == "6xcpu"
    with pytest.raises(StrategyError, match=r"3 x 2 = 6 devices, not 4: take as many"):
        devices_for(product, "4")


@pytest.mark.parametrize(
    "wrong",
    [
        "ddp=2xdp=2",
        "ddp=2xddp=2",
        "ddp=2xtp=4",
        "pp=4xddp=2",
        "mp=4xddp=2",
        "ddp=0xpp=2",
        "ddp=2xmp",
        "ddp=2xpp=-2",
    ],
)
def test_a_product_that_there_is_not_is_refused_with_those_there_are(wrong: str) -> None:
    with pytest.raises(
        StrategyError,
        match=rf'there is no strategy "{wrong}": products are ddp=Nxpp=M, .*, as ddp=2xpp=2$',
    ):
        named(wrong)
    with pytest.raises(
        StrategyError, match=r'there is no strategy "ddp=2": take ddp on 2 devices$'
    ):
        named("ddp=2")


@pytest.mark.parametrize("devices", [4, 1])
def test_another_number_of_devices_is_refused(devices: int) -> None:
    says = rf"ddp=3xpp=2 is for 3 x 2 = 6 devices, not {devices}: take as many, or another product$"
    with pytest.raises(StrategyError, match=says):
        choose("ddp=3xpp=2", slots(devices))


def test_a_mesh_is_drawn_with_a_line_for_each_rank() -> None:
    names = [f"cuda:{i}" for i in range(6)]
    assert named("ddp=2xpp=3").mesh(names) == [
        "rank 0: cuda:0 stage 0, cuda:1 stage 1, cuda:2 stage 2; local batch 1 of 2",
        "rank 1: cuda:3 stage 0, cuda:4 stage 1, cuda:5 stage 2; local batch 2 of 2",
    ]
    lines = named("ddp=3xpp=2", schedule="interleaved").mesh(names)
    assert lines[2] == "rank 2: cuda:4 stage 0 and 2, cuda:5 stage 1 and 3; local batch 3 of 3"


def test_batch_norms_of_replicas_are_synchronised_in_one_micro_batch_only(tmp_path: Path) -> None:
    job = ZOO["convolutions with sync_batchnorm"]
    says = r"ddp=2xpp=2: sync_batchnorm .* or take one micro-batch \(microbatches=1, without acc"
    with pytest.raises(StrategyError, match=says):
        train(job, strategy="ddp=2xpp=2", folder=tmp_path, quiet=True)
    one = named("ddp=2xpp=2", microbatches=1)
    with pytest.raises(StrategyError, match=says):
        train(job.replace(accumulate=2), strategy=one, folder=tmp_path, quiet=True)
    norm = dataclasses.replace(
        ZOO["mlp"], model=lambda: nn.Sequential(nn.Linear(6, 3), nn.BatchNorm1d(3))
    )
    with pytest.raises(
        RunError, match="of a batch of 5: choose a batch_size, or fewer micro-batches"
    ):
        train(
            norm.replace(batch_size=5),
            strategy=named("ddp=2xpp=2", microbatches=2),
            folder=tmp_path,
            quiet=True,
        )


# ---- runs ----------------------------------------------------------------------------------------


def test_the_command_trains_says_the_mesh_and_evaluates_and_predicts(folder: Path, capfd) -> None:
    assert main(["train", "small.py", "--strategy", "ddp=2xpp=2", "--microbatches", "2"]) == 0
    lines = capfd.readouterr().out.splitlines()
    assert lines[:5] == [
        "small: ddp=2xpp=2 on 4 devices (cpu:0, cpu:1, cpu:2, cpu:3), gloo",
        "rank 0: cpu:0 stage 0, cpu:1 stage 1; local batch 1 of 2",
        "rank 1: cpu:2 stage 0, cpu:3 stage 1; local batch 2 of 2",
        "batches of 8 = 4 + 4 over the replicas, in 2 micro-batches",
        "20 samples, 3 steps an epoch",
    ]
    (run,) = folder.glob("runs/small-ddp=2xpp=2-*")
    data = TensorDataset(torch.arange(84.0).view(21, 4) / 80, torch.arange(21) % 3)
    found = predict(run, data, strategy="ddp=2xpp=2", quiet=True)
    assert torch.allclose(found, predict(run, data, quiet=True), atol=1e-12)
    ways = ("ddp=2xpp=2", "single")
    one, other = (evaluate(run, strategy=way, eval_data=data)["loss"] for way in ways)
    assert one == pytest.approx(other, abs=1e-12)


@pytest.mark.slow
def test_a_run_goes_on_to_replicas_of_stages_as_it_went_and_from_them(
    tmp_path: Path, capsys
) -> None:
    job = ZOO["adamw with groups by name"].replace(precision="fp64")
    whole = train(job, strategy="single", devices="1xcpu", folder=tmp_path, quiet=True, epochs=4)
    run = train(job, strategy="ddp", devices="2xcpu", folder=tmp_path, quiet=True, epochs=1)
    way = named("ddp=2xpp=2", microbatches=3, schedule="gpipe")
    train(job, strategy=way, resume=run.folder, quiet=True, epochs=2)
    train(job, resume=run.folder, epochs=3)
    said = capsys.readouterr().out
    assert "ddp=2xpp=2 on 4 devices" in said and "in 3 micro-batches" in said
    kept = RunFolder(run.folder)
    assert kept.read_json(kept.config)["strategy_settings"]["schedule"] == "gpipe"
    end = train(job, strategy="single", devices="1xcpu", resume=run.folder, quiet=True, epochs=4)
    assert differences(job, end, whole).worst < BOUND


class KillingOnce(Callback):
    def __init__(self, folder: Path) -> None:
        self.done = folder / "done"

    def on_step(self, training: Any) -> None:
        if training.step == 5 and training.world.rank == 1 and not self.done.exists():
            self.done.touch()
            os.kill(os.getpid(), 9)


def test_a_rank_that_is_killed_is_named_with_its_devices(tmp_path: Path) -> None:
    job = ZOO["mlp"].replace(callbacks=[KillingOnce(tmp_path)])
    with pytest.raises(RankFailed, match=r"rank 1 \(cpu:2, cpu:3\) was killed by SIGKILL"):
        train(job, strategy="ddp=2xpp=2", folder=tmp_path, quiet=True)


@pytest.mark.slow
def test_a_rank_that_is_lost_is_started_again_with_its_devices(tmp_path: Path) -> None:
    job = ZOO["momentum"].replace(precision="fp64", epochs=3, callbacks=[KillingOnce(tmp_path)])
    run = train(job, strategy="ddp=2xpp=2", folder=tmp_path, quiet=True, restarts=1)
    whole = train(
        job.replace(callbacks=[]), strategy="single", devices="1xcpu", folder=tmp_path, quiet=True
    )
    assert differences(job, run, whole).worst < BOUND


@pytest.mark.slow
def test_the_same_seed_twice_gives_the_same_bits_with_dropout(tmp_path: Path) -> None:
    job = dataclasses.replace(
        ZOO["mlp"],
        model=lambda: nn.Sequential(nn.Linear(6, 32), nn.Dropout(0.5), nn.ReLU(), nn.Linear(32, 3)),
    )
    runs = [
        train(job, strategy="ddp=2xpp=2", folder=tmp_path, quiet=True, seed=seed)
        for seed in (0, 0, 1)
    ]
    assert same_bits(runs[0].model(), runs[1].model())
    assert not same_bits(runs[0].model(), runs[2].model())


# ---- around a training ---------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("product", ["ddp=2xpp=2", "ddp=3xpp=1", "ddp=1xpp=2"])
def test_verify_finds_a_product_equal(product: str) -> None:
    found = verify(ZOO["ignored tokens and tied weights"], strategy=product)
    assert found, str(found)


@pytest.mark.slow
def test_compare_measures_a_product_beside_others(folder: Path, capfd) -> None:
    words = ["compare", "small.py", "--strategies", "single,ddp,ddp=2xpp=2", "--devices", "4xcpu"]
    assert main([*words, "--rounds", "1", "--seconds", "0.1"]) == 0
    said = capfd.readouterr().out
    assert "ddp=2xpp=2: works" in said and "differs" not in said


@pytest.mark.slow
def test_a_profile_has_a_row_for_each_device_and_tune_times_it(folder: Path, capfd) -> None:
    assert (
        main(["train", "small.py", "--strategy", "ddp=2xpp=2", "--profile", "--epochs", "4"]) == 0
    )
    said = capfd.readouterr().out.splitlines()
    rows = [line.split() for line in said]
    assert [
        row[:2] for row in rows if row[1:2] and row[1].startswith("cpu:") and row[0].isdigit()
    ] == [[str(i), f"cpu:{i}"] for i in range(4)]
    assert (
        main(["tune", "small.py", "--strategy", "ddp=2xpp=2", "--rounds", "1", "--seconds", "0.05"])
        == 0
    )
    assert "as it is: --strategy ddp=2xpp=2 --devices 4xcpu" in capfd.readouterr().out


# ---- launches by others, and own loops -----------------------------------------------------------


def torchrun(*words: str) -> subprocess.CompletedProcess[str]:
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node=2",
        *words,
    ]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=100)


@pytest.mark.slow
def test_under_torchrun_each_process_drives_the_devices_of_a_replica(folder: Path) -> None:
    done = torchrun(
        "-m", "lockstep", "train", "small.py", "--strategy", "ddp=2xpp=2", "--devices", "4xcpu"
    )
    assert done.returncode == 0, done.stderr
    assert "rank 1: cpu:2 stage 0, cpu:3 stage 1; local batch 2 of 2" in done.stdout
    assert "2 CPU devices" not in done.stdout and "epoch   1" in done.stdout


@pytest.mark.slow
@pytest.mark.parametrize(
    ("strategy", "devices", "says"),
    [
        (
            "ddp=2xpp=2",
            "6xcpu",
            "devices: 2 processes with 2 devices each were started for 6 devices here: give 4, or",
        ),
        (
            "ddp=3xpp=2",
            "auto",
            "ddp=3xpp=2 is for 3 x 2 = 6 devices, not 4: take as many, or another product",
        ),
    ],
)
def test_other_processes_than_a_product_has_are_refused_under_torchrun(
    folder, strategy, devices, says
) -> None:
    done = torchrun(
        "-m", "lockstep", "train", "small.py", "--strategy", strategy, "--devices", devices
    )
    assert done.returncode and f"lockstep: {says}" in done.stderr


def test_a_node_gives_each_process_several_accelerators(monkeypatch: pytest.MonkeyPatch) -> None:
    from lockstep.launch import started_ranks

    cards = tuple(Device("cuda", i) for i in range(5))
    for name, value in {
        "RANK": "3",
        "WORLD_SIZE": "4",
        "LOCAL_RANK": "1",
        "LOCAL_WORLD_SIZE": "2",
    }.items():
        monkeypatch.setenv(name, value)
    assert started_ranks.devices_of_this_rank(cards, 2) == cards[2:4]
    with pytest.raises(
        DeviceError,
        match=r"2 processes with 3 devices each were started for 5 devices here: start 1 ",
    ):
        started_ranks.devices_of_this_rank(cards, 3)


@pytest.mark.parametrize(
    ("devices", "each", "says"),
    [
        (
            "2xcpu",
            1,
            r"ddp=2xpp=2 needs 2 devices for each rank, and this rank has 1: .*devices_per_rank=2",
        ),
        ("5xcpu", 2, r"5 devices cannot be divided into ranks of 2"),
        (
            "4xcpu",
            4,
            r"ddp=2xpp=2 needs 2 processes with 2 devices each, and there are 1 with 4: .*devices_per_rank=2",
        ),
    ],
)
def test_a_loop_whose_ranks_have_other_devices_is_refused(
    devices: str, each: int, says: str
) -> None:
    def loop(world: Any) -> None:
        model = mlp()
        optimizer = plain_sgd(model.named_parameters())
        lockstep.parallelize(
            model, nn.CrossEntropyLoss(), optimizer, strategy="ddp=2xpp=2", devices=devices
        )

    with pytest.raises(InputError, match=says):
        lockstep.launch(loop, devices=devices, devices_per_rank=each)
