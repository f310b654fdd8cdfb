"""Tuning: what is tried, what is kept, what a person reads; and the trials themselves."""

from __future__ import annotations

import importlib
import json
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

import lockstep
from lockstep.cli import command as cli
from lockstep.compare.planned_rows import Setup
from lockstep.compare.timed_run import TrialResult, attempt
from lockstep.errors import OutOfMemory, StrategyError
from lockstep.jobfile import JobFile
from lockstep.launch.devices import Device
from lockstep.run.events import Caveat

tune = importlib.import_module("lockstep.compare.tune")
timed_run = importlib.import_module("lockstep.compare.timed_run")


def net() -> nn.Module:
    return nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Flatten(), nn.Linear(16, 3))


def job(**settings: Any) -> lockstep.Job:
    generator = torch.Generator().manual_seed(0)
    data = TensorDataset(
        torch.randn(12, 3, 4, 4, generator=generator), torch.randint(3, (12,), generator=generator)
    )
    settings = {"model": net, "batch_size": 5, **settings}
    return lockstep.Job(
        loss=nn.CrossEntropyLoss(),
        optimizer=lambda params: torch.optim.SGD(params, lr=0.1),
        train_data=data,
        **settings,
    )


BATCHNORM = Caveat(
    "batchnorm", "BatchNorm normalizes over each replica's local batch", "sync_batchnorm=True"
)
Rule = Callable[[Setup], float]


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[Rule], list[Setup]]]:
    """A machine whose speed is a rule: it gives the ways that were tried, in order."""
    tried: list[Setup] = []

    def obey(rule: Rule) -> list[Setup]:
        def attempted(job: Any, setup: Setup, *, seconds: float) -> TrialResult:
            tried.append(setup)
            said = (
                (BATCHNORM,)
                if setup.strategy != "single" and "sync_batchnorm" not in setup.settings
                else ()
            )
            return TrialResult(rule(setup), 0.1, (1000,), convolves=True, caveats=said)

        monkeypatch.setattr(tune, "attempt", attempted)
        monkeypatch.setattr(timed_run, "attempt", attempted)
        monkeypatch.setattr(
            importlib.import_module("lockstep.launch.devices"), "usable_cores", lambda: (0, 1, 2, 3)
        )
        return tried

    yield obey


def test_what_gains_is_kept_for_what_comes_after_it(machine: Callable[[Rule], list[Setup]]) -> None:
    def rule(setup: Setup) -> float:
        rate = {"single": 100.0, "dp": 150.0, "ddp": 160.0}[setup.strategy]
        # Only four slots gain by the layout: it must be tried on top of them.
        rate *= 1.5 if setup.devices == "4xcpu" else 1.0
        rate *= 1.2 if setup.settings.get("channels_last") and setup.devices == "4xcpu" else 1.0
        return rate * (2.0 if setup.settings.get("precision") == "bf16" else 1.0)

    machine(rule)
    found = lockstep.tune(job(), log=None)
    assert found.start == Setup("single", "1xcpu")
    assert found.kept == Setup("ddp", "4xcpu", {"channels_last": True})
    assert found.changed == found.kept.replace(precision="bf16")
    assert found.gain_kept is not None and found.gain_changed is not None
    assert found.gain_kept.median == pytest.approx(1.6 * 1.5 * 1.2)
    assert found.gain_changed.median == pytest.approx(1.6 * 1.5 * 1.2 * 2)
    assert {row.setting for row in found.rows if row.taken} == {
        "ddp on 4xcpu",
        "channels_last",
        "precision=bf16",
    }


def test_on_a_card_what_changes_rounding_is_tried_first_and_apart(
    machine: Callable[[Rule], list[Setup]],
) -> None:
    def rule(setup: Setup) -> float:
        rate = {"tf32": 150.0, "bf16": 85.0, "fp16": 0.5}.get(
            setup.settings.get("precision", ""), 100.0
        )
        rate *= {True: 1.1, "reduce-overhead": 1.3}.get(setup.settings.get("compile", False), 1.0)
        # As measured on a card: of convolutions narrow formats gain in this layout only, which by
        # itself gains none.
        return rate * (
            5.0
            if setup.settings.get("channels_last") and setup.settings.get("precision") == "bf16"
            else 1.0
        )

    machine(rule)
    found = lockstep.tune(job(), devices=[Device("cuda", 0)], log=None)
    order = [row.setting for row in found.rows]
    assert order[:3] == [
        "precision=tf32",
        "precision=bf16, channels_last",
        "precision=fp16, channels_last",
    ]
    assert order[3:6] == ["compile", "compile=reduce-overhead", "compile=max-autotune"]
    assert order[6:] == ["channels_last=false", "keep_memory"]
    assert found.changed.settings == {
        "precision": "bf16",
        "compile": "reduce-overhead",
        "channels_last": True,
    }
    assert found.kept == found.start and found.gain_kept is None, (
        "the layout by itself gains nothing"
    )
    assert found.gain_changed is not None and found.gain_changed.median == pytest.approx(4.25 * 1.3)


def test_what_is_tried_depends_on_the_type_of_device() -> None:
    assert tune.formats("cpu") == ["bf16"]
    assert tune.formats("cuda") == ["tf32", "bf16", "fp16"]
    assert tune.formats("xpu") == ["bf16", "fp16"]
    assert tune.compilations("cpu", graphs=True) == [True]
    assert tune.compilations("cuda", graphs=True) == [True, "reduce-overhead", "max-autotune"]
    assert tune.compilations("cuda", graphs=False) == [True, "max-autotune-no-cudagraphs"]
    assert tune.compilations("mps", graphs=True) == [True, "max-autotune-no-cudagraphs"]


def test_settings_that_turn_out_slower_in_the_end_are_not_recommended(
    machine: Callable[[Rule], list[Setup]], tmp_path: Path
) -> None:
    """Each stage saw a gain by chance; all settings together are measured at 0.78 of the job as
    it is.
    """
    layouts = 0

    def rule(setup: Setup) -> float:
        nonlocal layouts
        if not setup.settings.get("channels_last"):
            return 100.0
        layouts += 1
        return 150.0 if layouts <= 3 else 78.0

    file = tmp_path / "mine.py"
    file.write_text("import test_tune\n\n\ndef job():\n    return test_tune.job()\n")
    machine(rule)
    lines: list[str] = []
    found = lockstep.tune(JobFile(str(file)), strategy="single", devices="1xcpu", log=lines.append)
    assert [row.setting for row in found.rows if row.taken] == ["channels_last"]
    assert found.kept == found.changed == found.start
    assert found.gain_kept is None and found.gain_changed is None
    assert "\nall settings that keep the numbers: 0.78 (0.78, 0.78) times as fast as it is" in lines
    assert "  these settings are not recommended" in lines
    assert lines[-1] == "\nnothing that was tried is faster than the job as it is"
    assert not any("lockstep train" in line for line in lines)


def test_what_is_refused_or_fails_is_a_row_with_its_reason(
    machine: Callable[[Rule], list[Setup]],
) -> None:
    def rule(setup: Setup) -> float:
        if setup.settings.get("compile"):
            raise StrategyError("there is no compiler here")
        if setup.strategy == "dp":
            raise OutOfMemory("4xcpu: out of memory\nand more")
        return 100.0

    machine(rule)
    lines: list[str] = []
    found = lockstep.tune(job(), log=lines.append)
    reasons = {row.setting: row.remark for row in found.rows if row.samples_per_second is None}
    assert reasons == {
        "dp on 2xcpu": "4xcpu: out of memory",
        "dp on 4xcpu": "4xcpu: out of memory",
        "compile": "there is no compiler here",
    }
    assert found.changed == found.start
    assert "\nnothing that was tried is faster than the job as it is" in lines


def test_an_exception_to_the_numbers_is_reported_once(
    machine: Callable[[Rule], list[Setup]],
) -> None:
    machine(lambda setup: 200.0 if setup.strategy == "ddp" and not setup.settings else 100.0)
    lines: list[str] = []
    found = lockstep.tune(job(), devices="2xcpu", strategy="ddp", log=lines.append)
    assert found.start == Setup("ddp", "2xcpu")
    assert str(BATCHNORM) in " ".join(" ".join(lines).split())
    assert " ".join(" ".join(lines).split()).count(str(BATCHNORM)) == 1


def test_a_strategy_that_is_named_is_the_only_one_tried(
    machine: Callable[[Rule], list[Setup]],
) -> None:
    tried = machine(lambda setup: 100.0)
    lockstep.tune(job(), strategy="dp", devices="2xcpu", log=None)
    assert {setup.strategy for setup in tried} == {"dp"}


def test_the_line_to_paste_has_the_jobs_own_words(
    machine: Callable[[Rule], list[Setup]], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    machine(lambda setup: 200.0 if setup.settings.get("channels_last") else 100.0)
    file = tmp_path / "mine.py"
    file.write_text(
        "import test_tune\n\n\ndef job(size: int = 5):\n    return test_tune.job(batch_size=size)\n"
    )
    lines: list[str] = []
    lockstep.tune(JobFile(str(file), {"size": 4}, {"epochs": 3}), log=lines.append)
    assert (
        f"  lockstep train {file} --set size=4 --strategy single --devices 1xcpu --epochs 3 "
        "--channels-last" in lines
    )
    capfd.readouterr()
    assert cli.main(["tune", str(file), "--json", "--rounds", "1"]) == 0
    assert json.loads(capfd.readouterr().out)["kept"] == {
        "strategy": "single",
        "devices": "1xcpu",
        "settings": {"channels_last": True},
        "options": {},
    }


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["tune", "nowhere.py"], "there is no such file"),
        (["tune", "examples/digits.py", "--rounds", "0"], "number above 0"),
        (["tune", "examples/digits.py", "--strategy", "dddp"], 'did you mean "ddp"?'),
    ],
)
def test_bad_words_are_one_line(
    words: list[str], said: str, capfd: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(words) == 2
    error = capfd.readouterr().err.strip()
    assert said in error and "\n" not in error


@pytest.mark.parametrize(
    "setup",
    [Setup("single", "1xcpu"), Setup("dp", "2xcpu"), Setup("ddp", "2xcpu", {"accumulate": 2})],
)
def test_a_trial_times_updates_in_processes_of_its_own(setup: Setup) -> None:
    tried = attempt(job(), setup, seconds=0.05)
    assert tried.rate > 0 and tried.first > 0 and tried.peak > 1e7
    assert tried.convolves and tried.workers is None
    assert any(caveat.kind == "batchnorm" for caveat in tried.caveats) == (
        setup.strategy != "single"
    )


def test_what_an_update_makes_once_is_not_its_rate() -> None:
    class Prepared(nn.Linear):
        calls = 0

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            Prepared.calls += 1
            time.sleep(2.0 if Prepared.calls == 1 else 0.0)
            return super().forward(x.flatten(1))

    tried = attempt(job(model=lambda: Prepared(48, 3)), Setup("single", "1xcpu"), seconds=0.05)
    assert tried.first > 2.0 and tried.rate > job().batch_size


@pytest.mark.slow
def test_tuning_as_a_person_runs_it(capfd: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["tune", "examples/digits.py", "--seconds", "0.1", "--rounds", "1"]) == 0
    out = capfd.readouterr().out
    assert "precision and compile change rounding" in out and "compile" in out
    assert "nothing was changed" in out or "nothing that was tried is faster" in out
