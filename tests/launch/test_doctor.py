"""``lockstep doctor``: every check on this machine, and what a person reads where one fails."""

from __future__ import annotations

import json
import shutil
from collections import namedtuple
from pathlib import Path

import pytest

from lockstep.cli.command import main
from lockstep.errors import LockstepError
from lockstep.launch import doctor
from lockstep.launch.devices import slots

Usage = namedtuple("Usage", "total used free")


def test_this_machine_is_ready(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "--folder", str(tmp_path / "runs")]) == 0
    shown = capfd.readouterr().out
    assert "2 ranks start, sum 4 MiB" in shown
    assert not (tmp_path / "runs").exists()
    assert main(["doctor", "--folder", str(tmp_path / "runs"), "--json"]) == 0
    answer = json.loads(capfd.readouterr().out)
    found = {finding["name"]: finding for finding in answer["findings"]}
    assert answer["ready"]
    assert found["ranks by gloo"]["state"] == "ok"
    assert {"versions", "devices", "shared memory", "disk of the runs", "threads"} <= found.keys()
    assert all(len(line) <= 80 for line in shown.splitlines() if "disk" not in line)


def test_json_alone(tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch) -> None:
    lost = doctor.Finding("ranks by gloo", "wrong", "no address", "set GLOO_SOCKET_IFNAME=lo")
    monkeypatch.setattr(doctor, "_process_groups", lambda: iter([lost]))
    assert main(["doctor", "--folder", str(tmp_path), "--json"]) == 1
    answer = json.loads(capfd.readouterr().out)
    (found,) = [one for one in answer["findings"] if one["state"] == "wrong"]
    assert not answer["ready"]
    assert found == vars(lost)


def test_ranks_that_fail_are_named_with_what_to_do(monkeypatch) -> None:
    def fails(*args: object, **settings: object) -> None:
        raise LockstepError("no address")

    monkeypatch.setattr(doctor, "launch", fails)
    found = doctor._sum(slots(2))
    assert (found.state, found.text) == ("wrong", "no address")
    assert "GLOO_SOCKET_IFNAME" in found.advice


def test_a_sum_that_is_wrong(monkeypatch) -> None:
    monkeypatch.setattr(doctor, "launch", lambda *args, **settings: [3.0, 2.0])
    found = doctor._sum(slots(2))
    assert (found.state, found.text) == ("wrong", "a sum of 3 came out as [3.0, 2.0]")


def test_little_shared_memory(monkeypatch) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda path: Usage(64 << 20, 0, 64 << 20))
    found = doctor._shared_memory()
    assert found.state == "note"
    assert len(found.lines()) == 3 and max(map(len, found.lines())) <= 80
    assert "--shm-size" in found.advice


def test_a_folder_that_cannot_be_written(monkeypatch) -> None:
    found = doctor._disk(Path("/proc/runs"))
    assert found.state == "wrong"
    assert "/proc" in found.text
    assert "--folder" in found.advice


def test_a_slow_disk(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(doctor, "_SLOW_DISK", 1e18)
    found = doctor._disk(tmp_path)
    assert found.state == "note"
    assert "faster disk" in found.advice


def test_a_gpu_that_torch_does_not_find(monkeypatch) -> None:
    monkeypatch.setattr(doctor, "accelerators", tuple)
    monkeypatch.setattr(shutil, "which", lambda name: "/usr/bin/nvidia-smi")
    monkeypatch.setattr("torch.version.cuda", None)
    assert "built for the CPU only" in doctor._devices().advice
    monkeypatch.setattr("torch.version.cuda", "12.9")
    assert "CUDA 12.9" in doctor._devices().advice
