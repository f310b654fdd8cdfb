"""What a person writes for devices, and what comes of it."""

from __future__ import annotations

import os
import threading

import pytest
import torch

from lockstep.errors import DeviceError
from lockstep.launch import cores, devices
from lockstep.launch.device_table import table
from lockstep.launch.devices import Device, parse, slots

HERE = devices.usable_cores()
no_accelerator = pytest.mark.skipif(
    torch.accelerator.is_available(), reason="there is an accelerator here"
)


@no_accelerator
def test_auto_without_an_accelerator_is_one_slot_with_all_cores() -> None:
    assert parse("auto") == parse(None) == (Device("cpu", 0, HERE),)


@no_accelerator
def test_a_number_without_an_accelerator_means_slots() -> None:
    assert parse(len(HERE)) == slots(len(HERE))
    assert parse(str(len(HERE))) == slots(len(HERE))


def test_slots_divide_the_cores_and_share_them_where_there_are_too_few() -> None:
    assert [d.cores for d in slots(2, range(5))] == [(0, 1), (2, 3, 4)]
    assert [d.cores for d in slots(3, range(2))] == [(0,), (0,), (1,)]
    assert [d.threads for d in slots(2, range(8))] == [4, 4]


@no_accelerator
@pytest.mark.parametrize(
    ("words", "says"),
    [
        ("cuda", "no cuda device here"),
        ("cuda:0,2", "no cuda device here"),
        ("cudda", "no cudda device here"),
        ("gpu:0", "no gpu device here"),
        ("0", "at least one"),
        ("0xcpu", "at least one"),
        ("cpu:1", "2xcpu"),
        ("two of them", "isn't understood"),
        ("999", f"999 devices, but this machine has {len(HERE)} cores.*999xcpu"),
        ([], "empty list"),
        ([0], "device 0 doesn't exist"),
    ],
)
def test_what_does_not_exist_is_said_with_what_does(words: object, says: str) -> None:
    with pytest.raises(DeviceError, match=says):
        parse(words)  # type: ignore[arg-type]


def test_accelerators_are_taken_by_type_and_number(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(devices, "accelerators", lambda: tuple(Device("cuda", i) for i in range(4)))
    assert parse("auto") == parse(4) == parse("cuda") == tuple(Device("cuda", i) for i in range(4))
    assert parse("cuda:0,2") == (Device("cuda", 0), Device("cuda", 2))
    assert parse(2) == parse([0, 1]) == parse([torch.device("cuda", 0), "cuda:1"])
    assert parse("2xcpu") == slots(2)
    with pytest.raises(DeviceError, match=r"5 devices, but there are 4 \(cuda\)"):
        parse(5)
    with pytest.raises(DeviceError, match="cuda:7 doesn't exist: there are 4"):
        parse("cuda:1,7")
    with pytest.raises(DeviceError, match="twice"):
        parse("cuda:1,1")


def test_the_thread_limit_holds_in_the_thread_that_sets_it() -> None:
    before = torch.get_num_threads()
    seen = []

    def compute() -> None:
        cores.limit_threads(Device("cpu", 0, (HERE[0],)))
        seen.append(torch.get_num_threads())

    thread = threading.Thread(target=compute)
    thread.start()
    thread.join()
    assert seen == [1]
    assert torch.get_num_threads() == before


@pytest.mark.parametrize(
    ("given", "under_torchrun", "threads", "note"),
    [
        ("1", False, 1, "each device has 4 cores, but computes with 1, as OMP_NUM_THREADS sets"),
        ("3", False, 3, "each device has 4 cores, but computes with 3"),
        ("3", True, 3, "each device has 4 cores, but computes with 3"),
        (
            "1",
            True,
            4,
            "each rank computes with its 4 cores: OMP_NUM_THREADS=1 may be torchrun's own default",
        ),
        ("8", False, 4, None),
        ("4,2", False, 4, None),
        ("nonsense", False, 4, None),
        (None, True, 4, None),
    ],
)
def test_a_limit_of_the_environment_is_respected_and_said(
    given, under_torchrun, threads, note, monkeypatch
) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    if given is not None:
        monkeypatch.setenv("OMP_NUM_THREADS", given)
    if under_torchrun:
        monkeypatch.setenv("TORCHELASTIC_RUN_ID", "1")
    slot = Device("cpu", 0, (0, 1, 2, 3))
    before = torch.get_num_threads()
    try:
        cores.limit_threads(slot)
        assert torch.get_num_threads() == threads
    finally:
        torch.set_num_threads(before)
    said = cores.note_on_threads(slot)
    assert said is None if note is None else said is not None and said.startswith(note)


# ---- ranks with accelerators ---------------------------------------------------------------------


@pytest.mark.skipif(not hasattr(os, "sched_getaffinity"), reason="needs cores to choose from")
def test_ranks_on_cards_share_the_threads_of_openmp_out(monkeypatch: pytest.MonkeyPatch) -> None:
    def threads(ranks: int) -> int:
        torch.set_num_threads(len(HERE))
        cores.share_threads((Device("cuda", 0),), ranks)
        return torch.get_num_threads()

    before = torch.get_num_threads()
    try:
        monkeypatch.setattr(cores, "bound_by_launcher", lambda cores: False)
        assert threads(ranks=len(HERE)) == 1
        assert threads(ranks=1) == len(HERE)
        monkeypatch.setattr(cores, "bound_by_launcher", lambda cores: True)
        assert threads(ranks=4 * len(HERE)) == len(HERE), "which are its alone"
    finally:
        torch.set_num_threads(before)


def test_the_inventory_names_the_cores() -> None:
    assert f"{len(HERE)} core" in " ".join(table().split())
    assert max(map(len, table().splitlines())) <= 80
