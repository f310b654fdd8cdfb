"""What a resumed run goes on with: where nobody says otherwise, its own strategy, settings and devices."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from lockstep import Job, devices, train
from lockstep.cli import main
from lockstep.resuming import as_it_went
from lockstep.strategies.ddp import DDP
from lockstep.strategies.hogwild import Hogwild
from lockstep.strategies.pp import PP
from test_train import classify
from zoo import ZOO

JOB = Path(__file__).parents[1] / "examples" / "digits.py"
MAP = {"0": 0, "": 1}


def config(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "config.json").read_text())


def half(tmp_path: Path, strategy: Any = "pp", on: str = "2xcpu", job: Job | None = None) -> Path:
    return train(job or classify(), strategy=strategy, devices=on, folder=tmp_path, quiet=True, epochs=1).folder


def test_a_run_goes_on_as_it_went_with_its_settings_its_map_and_its_devices(tmp_path: Path, capsys) -> None:
    job = ZOO["momentum"].having(precision="fp64", epochs=2)
    folder = half(tmp_path, PP(MAP, 3, "gpipe"), job=job)
    before = config(folder)
    run = train(job, resume=folder)
    said = capsys.readouterr().out
    assert ": pp on 2 devices (cpu:0, cpu:1)" in said and "in 3 micro-batches" in said
    assert "goes on as" not in said and "stages: " not in said, "nothing is new, nothing was measured"
    assert config(folder) == {**before, "settings": {**before["settings"], "epochs": 2}, "resumed": ["pp"]}
    assert run.summary["epochs"] == 2


def test_the_command_that_is_told_nothing_goes_on_as_the_run_went(tmp_path: Path, capfd, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    pp = ["--strategy", "pp", "--devices", "2xcpu", "--microbatches", "2"]
    assert main(["train", str(JOB), *pp, "--epochs", "1"]) == 0
    (folder,) = tmp_path.glob("runs/*")
    for epochs, words in enumerate(([], [str(JOB)], ["--strategy", "pp"]), start=2):
        assert main(["train", *words, "--resume", str(folder), "--epochs", str(epochs)]) == 0
        said = capfd.readouterr().out
        assert "digits: pp on 2 devices" in said and "in 2 micro-batches" in said and "note: was" not in said
    assert main(["train", "--resume", str(folder), "--strategy", "single", "--epochs", "5"]) == 0
    assert "note: was pp on 2 slots, goes on as single on 1 slot" in capfd.readouterr().out
    assert config(folder)["resumed"] == ["pp"] * 4


def test_what_is_asked_for_is_taken(tmp_path: Path) -> None:
    folder = half(tmp_path, PP(MAP, 3))
    given = PP(microbatches=2)
    assert as_it_went(folder, given, "3xcpu") == (given, "3xcpu")
    assert as_it_went(folder, given, None) == (given, devices.parse("2xcpu"))
    assert as_it_went(folder, "dp", None) == ("dp", devices.parse("2xcpu"))
    assert as_it_went(folder, "single", None) == ("single", None)
    assert as_it_went(folder, None, 1) == (PP(microbatches=3), 1)
    assert as_it_went(folder, None, None, own_devices=False) == (None, None), (
        "torchrun starts ranks, which pp isn't for"
    )


def test_a_run_on_another_number_of_devices_has_other_stages_and_says_so(tmp_path: Path, capsys) -> None:
    folder = half(tmp_path, PP(MAP, 3))
    train(classify(epochs=2), devices="1xcpu", resume=folder)
    said = capsys.readouterr().out
    assert "note: was pp on 2 slots, goes on as pp on 1 slot" in said and "in 3 micro-batches" in said
    assert config(folder)["strategy_settings"]["device_map"] == {"": 0}
    train(classify(epochs=3), devices="2xcpu", resume=folder)
    assert "stages: " in capsys.readouterr().out
    assert set(config(folder)["strategy_settings"]["device_map"].values()) == {0, 1}


def test_one_device_becomes_several_as_it_would_without_a_run(tmp_path: Path) -> None:
    folder = half(tmp_path, "single", "1xcpu")
    assert as_it_went(folder, None, "2xcpu") == (None, "2xcpu"), "ddp, as on any several"
    assert as_it_went(folder, "ddp", None) == ("ddp", None), "auto, as without a run"


@pytest.mark.parametrize("way", [DDP(reduce="flat", bucket_mb=1.5), Hogwild()])
def test_settings_of_every_strategy_come_back(way: Any, tmp_path: Path) -> None:
    assert as_it_went(half(tmp_path, way), None, None) == (way, devices.parse("2xcpu"))


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
def test_its_devices_are_taken_as_far_as_this_machine_has_them(was, here, goes_on, tmp_path, monkeypatch) -> None:
    (tmp_path / "config.json").write_text(
        json.dumps({"strategy": "dp", "devices": was, "strategy_settings": {}, "resumed": []})
    )
    monkeypatch.setattr(devices, "accelerators", lambda: tuple(devices.Device("cuda", i) for i in range(here)))
    _, chosen = as_it_went(tmp_path, None, None)
    assert list(map(str, devices.parse(chosen))) == goes_on
