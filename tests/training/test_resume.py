"""What a resumed run goes on with: where nobody says otherwise, its own strategy, settings and
devices.
"""

from __future__ import annotations

import json
import os
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from test_train import classify

from lockstep import Job, Run, train
from lockstep.cli.command import main
from lockstep.errors import FolderError, InputError
from lockstep.jobfile import JobFile
from lockstep.launch import devices
from lockstep.run.run_folder import RunFolder
from lockstep.strategies.ddp import DDP
from lockstep.strategies.hogwild import Hogwild
from lockstep.strategies.pp import PP
from lockstep.training.records.run_page import write_page
from lockstep.training.resume import as_it_went

from harness import same_bits  # isort: skip
from zoo import ZOO, sgd

JOB = Path(__file__).parents[2] / "examples" / "digits.py"
MAP = {"0": 0, "": 1}


def config(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "config.json").read_text())


def half(tmp_path: Path, strategy: Any = "pp", on: str = "2xcpu", job: Job | None = None) -> Path:
    return train(
        job or classify(), strategy=strategy, devices=on, folder=tmp_path, quiet=True, epochs=1
    ).folder


def test_a_run_goes_on_as_it_went_with_its_settings_its_map_and_its_devices(
    tmp_path: Path, capsys
) -> None:
    job = ZOO["momentum"].replace(precision="fp64", epochs=2)
    folder = half(tmp_path, PP(MAP, 3, "gpipe"), job=job)
    before = config(folder)
    run = train(job, resume=folder)
    said = capsys.readouterr().out
    assert ": pp on 2 devices (cpu:0, cpu:1)" in said and "in 3 micro-batches" in said
    assert "resumes as" not in said and "stages: " not in said, (
        "nothing is new, nothing was measured"
    )
    assert config(folder) == {
        **before,
        "settings": {**before["settings"], "epochs": 2},
        "resumed": ["pp"],
    }
    assert run.summary["epochs"] == 2


@pytest.mark.slow
def test_the_command_that_is_told_nothing_goes_on_as_the_run_went(
    tmp_path: Path, capfd, monkeypatch
) -> None:
    monkeypatch.chdir(tmp_path)
    pp = ["--strategy", "pp", "--devices", "2xcpu", "--microbatches", "2"]
    assert main(["train", str(JOB), *pp, "--epochs", "1"]) == 0
    (folder,) = tmp_path.glob("runs/*")
    for epochs, words in enumerate(([], [str(JOB)], ["--strategy", "pp"]), start=2):
        assert main(["train", *words, "--resume", str(folder), "--epochs", str(epochs)]) == 0
        said = capfd.readouterr().out
        assert (
            "digits: pp on 2 devices" in said
            and "in 2 micro-batches" in said
            and "note: was" not in said
        )
    assert main(["train", "--resume", str(folder), "--strategy", "single", "--epochs", "5"]) == 0
    assert "note: was pp on 2 devices, resumes as single on 1 device" in capfd.readouterr().out
    assert config(folder)["resumed"] == ["pp"] * 4


def test_what_is_asked_for_is_taken(tmp_path: Path) -> None:
    folder = half(tmp_path, PP(MAP, 3))
    given = PP(microbatches=2)
    assert as_it_went(config(folder), given, "3xcpu") == (given, "3xcpu")
    assert as_it_went(config(folder), given, None) == (given, devices.parse("2xcpu"))
    assert as_it_went(config(folder), "dp", None) == ("dp", devices.parse("2xcpu"))
    assert as_it_went(config(folder), "single", None) == ("single", None)
    assert as_it_went(config(folder), None, 1) == (PP(microbatches=3), 1)
    assert as_it_went(config(folder), None, None, own_devices=False) == (None, None), (
        "torchrun starts ranks, which pp isn't for"
    )


def test_a_run_on_another_number_of_devices_has_other_stages_and_says_so(
    tmp_path: Path, capsys
) -> None:
    folder = half(tmp_path, PP(MAP, 3))
    train(classify(epochs=2), devices="1xcpu", resume=folder)
    said = capsys.readouterr().out
    assert (
        "note: was pp on 2 devices, resumes as pp on 1 device" in said
        and "in 3 micro-batches" in said
    )
    assert config(folder)["strategy_settings"]["device_map"] == {"": 0}
    train(classify(epochs=3), devices="2xcpu", resume=folder)
    assert "stages: " in capsys.readouterr().out
    assert set(config(folder)["strategy_settings"]["device_map"].values()) == {0, 1}


def test_one_device_becomes_several_as_it_would_without_a_run(tmp_path: Path) -> None:
    folder = half(tmp_path, "single", "1xcpu")
    assert as_it_went(config(folder), None, "2xcpu") == (None, "2xcpu"), "ddp, as on any several"
    assert as_it_went(config(folder), "ddp", None) == ("ddp", None), "auto, as without a run"


@pytest.mark.parametrize("way", [DDP(reduce="flat", bucket_mb=1.5), Hogwild()])
def test_settings_of_every_strategy_come_back(way: Any, tmp_path: Path) -> None:
    assert as_it_went(config(half(tmp_path, way)), None, None) == (way, devices.parse("2xcpu"))


@pytest.mark.parametrize(
    ("was", "here", "goes_on"),
    [
        (["cuda:0", "cuda:2"], 4, ["cuda:0", "cuda:2"]),
        (["cuda:0", "cuda:2"], 2, ["cuda:0", "cuda:1"]),
        (["cuda:0", "cuda:1", "cuda:0", "cuda:1"], 2, ["cuda:0", "cuda:1"]),
        (["cuda:0", "cuda:1"], 0, ["cpu:0"]),
        (["cpu:0", "cpu:1", "cpu:2"], 2, ["cpu:0", "cpu:1", "cpu:2"]),
    ],
)
def test_its_devices_are_taken_as_far_as_this_machine_has_them(
    was, here, goes_on, tmp_path, monkeypatch
) -> None:
    (tmp_path / "config.json").write_text(
        json.dumps({"strategy": "dp", "devices": was, "strategy_settings": {}, "resumed": []})
    )
    monkeypatch.setattr(
        devices, "accelerators", lambda: tuple(devices.Device("cuda", i) for i in range(here))
    )
    _, chosen = as_it_went(config(tmp_path), None, None)
    assert list(map(str, devices.parse(chosen))) == goes_on


# ---- what is other than it was -------------------------------------------------------------------

FILE = """
import torch, lockstep
from torch import nn
from torch.utils.data import TensorDataset
from layers import WIDTH

def job(samples: int = 40, seed: int = 1):
    generator = torch.Generator().manual_seed(seed)
    inputs, targets = torch.randn(samples, 6, generator=generator), torch.randint(3, (samples,), generator=generator)
    data = TensorDataset(inputs, targets)
    return lockstep.Job(
        model=lambda: nn.Sequential(nn.Linear(6, WIDTH), nn.Tanh(), nn.Linear(WIDTH, 3)), loss=nn.CrossEntropyLoss(),
        optimizer=lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9), train_data=data, eval_data=data,
        batch_size=8, epochs=2, precision="fp64")
"""


@pytest.fixture
def own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A job file with a module beside it."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "layers", raising=False)
    (tmp_path / "own.py").write_text(FILE)
    (tmp_path / "layers.py").write_text("WIDTH = 8\n")
    return tmp_path


def notes(capsys: pytest.CaptureFixture[str]) -> list[str]:
    return [line for line in capsys.readouterr().out.splitlines() if line.startswith("note: ")]


def test_an_edited_job_file_and_other_data_are_said(
    own: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    job = JobFile("own.py")
    run = train(job, epochs=1)
    train(job, resume=run.folder, epochs=2)
    assert notes(capsys) == [], "nothing is other than it was"
    (own / "own.py").write_text(FILE.replace("lr=0.1", "lr=0.2"))
    train(job, resume=run.folder, epochs=3)
    assert notes(capsys) == [
        "note: own.py has changed since the run was started",
        "note: lr: the optimizer resumes with the saved 0.1, not 0.2",
    ]
    (own / "own.py").write_text(FILE)
    train(JobFile("own.py", {"seed": 2}), resume=run.folder, epochs=4)
    assert [line for line in notes(capsys) if ".py" not in line] == [
        "note: --set seed: it is 2, and was None when the run was started"
    ]
    train(JobFile("own.py", {"seed": 2, "samples": 48}), resume=run.folder, epochs=5)
    said, of_samples = (line for line in notes(capsys) if ".py" not in line)
    assert of_samples == "note: --set samples: it is 48, and was None when the run was started"
    assert said.startswith("note: train_data has 48 samples, and had 40 when the run was started")


def test_an_order_of_fewer_samples_is_no_change_of_the_data(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    job = ZOO["mlp"].replace(order=lambda epoch: list(range(5, 25)))
    run = train(job, folder=tmp_path, epochs=1)
    train(job, resume=run.folder, epochs=2)
    assert not [line for line in notes(capsys) if "train_data" in line]


# ---- the records of a run ------------------------------------------------------------------------


def test_the_records_of_steps_are_kept_when_a_run_goes_on(own: Path) -> None:
    job = JobFile("own.py")
    whole = train(job, quiet=True, folder="whole")
    run = train(job, quiet=True, steps=3)
    train(job, quiet=True, resume=run.folder, steps=7)
    run = train(job, quiet=True, resume=run.folder)
    assert [(r["epoch"], r["step"]) for r in run.history] == [(1, 3), (1, 5), (2, 7), (2, 10)]
    for record in whole.history:
        (mine,) = [r for r in run.history if r["step"] == record["step"]]
        assert mine["train_loss"] == pytest.approx(record["train_loss"], abs=1e-12)
        assert mine["eval_loss"] == pytest.approx(record["eval_loss"], abs=1e-12)
    text = (write_page(run.folder)).read_text()
    assert "after 2 epochs" in text


def test_a_line_that_was_cut_off_is_left_out_and_written_again(own: Path) -> None:
    job = JobFile("own.py")
    run = train(job, quiet=True, epochs=2)
    kept = run.history
    metrics = run.folder / "metrics.jsonl"
    whole = metrics.read_text()
    metrics.write_text(whole[: len(whole) - 30])  # a death in the middle of a line
    assert Run.open(run.folder).history == kept[:1]
    assert write_page(run.folder).is_file()
    run = train(job, quiet=True, resume=run.folder, epochs=3)
    assert run.history[:2] == kept and [r["epoch"] for r in run.history] == [1, 2, 3]


def test_a_record_that_was_never_written_is_in_the_state(own: Path) -> None:
    job = JobFile("own.py")
    run = train(job, quiet=True, epochs=2)
    kept = run.history
    for left in (kept[:1], []):  # a death between the state and the metrics
        (run.folder / "metrics.jsonl").write_text(
            "".join(json.dumps(record) + "\n" for record in left)
        )
        run = train(job, quiet=True, resume=run.folder, epochs=run.summary["epochs"] + 1)
    assert [r["epoch"] for r in run.history] == [3, 4]


def test_another_optimizer_is_refused(own: Path) -> None:
    """Found by trial: Adam was given the state of SGD without a line."""
    run = train(JobFile("own.py"), epochs=1)
    (own / "own.py").write_text(
        FILE.replace("torch.optim.SGD(p, lr=0.1, momentum=0.9)", "torch.optim.Adam(p)")
    )
    with pytest.raises(
        InputError, match="the saved optimizer is SGD, this one Adam: resume with that one, or"
    ):
        train(JobFile("own.py"), resume=run.folder, epochs=2)


def test_a_folder_in_which_another_process_trains_is_refused(own: Path) -> None:
    """Found by trial: two trainings wrote into one folder, and the second failed an epoch later."""
    run = train(JobFile("own.py"), epochs=1)
    says = rf"process {os.getpid()} on .* is training in this folder: wait for it"
    with RunFolder(run.folder).held(), pytest.raises(FolderError, match=says):
        train(JobFile("own.py"), resume=run.folder, epochs=2)
    train(JobFile("own.py"), resume=run.folder, epochs=2)
    assert not list(run.folder.glob(".lock"))


def test_the_lock_of_a_process_that_is_ending_is_waited_for(tmp_path: Path) -> None:
    """The soak: rank 1 was killed after the end, while rank 0 was about to end."""
    first = RunFolder(tmp_path).held()
    first.__enter__()
    ending = threading.Timer(0.2, first.__exit__, (None, None, None))
    ending.start()
    with RunFolder(tmp_path).held():
        assert not ending.is_alive()
    ending.join()
    assert not list(tmp_path.glob(".lock"))


@pytest.mark.parametrize(
    "optimizer", [sgd, lambda params: torch.optim.AdamW(params, lr=0.01)], ids=["sgd", "adamw"]
)
def test_a_model_in_channels_last_goes_on_to_the_bit(optimizer: Any, tmp_path: Path) -> None:
    """Found by trial: its momentum was loaded in another memory layout, and moved other weights
    than its own.
    """
    job = ZOO["channels_last in volumes and in images"].replace(optimizer=optimizer)
    where: dict[str, Any] = {"devices": "1xcpu", "folder": tmp_path, "quiet": True}
    half = train(job.replace(steps=6), **where)
    assert same_bits(
        train(job, resume=half.folder, quiet=True).model(), train(job, **where).model()
    )
