"""A job is checked when it is made; a job file is loaded with its parameters typed."""

from __future__ import annotations

import argparse
import dataclasses
import os
import sys
import textwrap
from pathlib import Path

import pytest
import torch
from torch import nn

import lockstep
from lockstep import Job, launch, train
from lockstep.cli import options
from lockstep.errors import JobError
from lockstep.job import SETTINGS
from lockstep.jobfile import JobFile, as_job, loaded, the_job

GOOD = {
    "model": lambda: nn.Linear(2, 1),
    "loss": nn.MSELoss(),
    "optimizer": lambda params: torch.optim.SGD(params, lr=0.1),
    "train_data": [(torch.zeros(2), torch.zeros(1))],
    "batch_size": 1,
}


@pytest.mark.parametrize(
    ("field", "value", "says"),
    [
        ("batch_size", 0, "above 0"),
        ("batch_size", 2.5, "whole number"),
        ("epochs", -1, "above 0"),
        ("steps", 0, "above 0"),
        ("accumulate", 0, "above 0"),
        ("clip_norm", float("nan"), "finite"),
        ("lr_scheduler_every", "batch", '"epoch" or "step"'),
        ("precision", "fp12", '"fp64"'),
        ("shuffle", "maybe", "true or false"),
        ("loader_workers", -1, "negative"),
        ("model", nn.Linear(1, 1), "lambda"),
        ("loss", 3, "called"),
        ("optimizer", None, "called"),
        ("train_data", None, "there is none"),
        ("metrics", [1], "dict"),
        ("metrics", {"m": 1}, "called"),
        ("on_event", 3, "list"),
        ("on_event", "stop", "list"),
        ("on_event", ["stop"], "called"),
        ("callbacks", 3, "list"),
    ],
)
def test_a_wrong_field_is_named_when_the_job_is_made(field: str, value: object, says: str) -> None:
    with pytest.raises(JobError, match=rf"^{field}: .*{says}"):
        Job(**{**GOOD, field: value})


def test_an_unknown_setting_offers_the_nearest() -> None:
    with pytest.raises(JobError, match=r'batchsize.*"batch_size"'):
        lockstep.train(Job(**GOOD), batchsize=3)


def test_the_command_line_has_every_setting_with_its_description_and_default() -> None:
    parser = argparse.ArgumentParser()
    options.add_settings(parser)
    texts = parser.format_help()
    for field in dataclasses.fields(Job):
        has_option = f"--{field.name.replace('_', '-')} " in texts
        assert has_option == (field.name in SETTINGS)
    said = {action.dest: action.help or "" for action in parser._actions}
    assert said["seed"] == "the seed of weights, order, augmentation and dropout (default: 0)"
    assert said["epochs"].endswith("(default: 1, if steps isn't given)")
    for name in SETTINGS:
        default = getattr(Job, name, None)
        assert len(said[name]) > 20
        assert default is None or said[name].endswith(f"(default: {str(default).lower()})")


def written(folder: Path, text: str) -> JobFile:
    path = folder / "my_job.py"
    path.write_text(textwrap.dedent(text))
    return JobFile(str(path))


HEAD = """
import torch, lockstep
from torch import nn
def make(lr, batch_size=4, **more):
    return lockstep.Job(
        model=lambda: nn.Linear(2, 1), loss=nn.MSELoss(), optimizer=lambda p: torch.optim.SGD(p, lr=lr),
        train_data=torch.utils.data.TensorDataset(torch.zeros(9, 2), torch.zeros(9, 1)), batch_size=batch_size, **more)
"""


def test_parameters_are_typed_by_annotation_or_default(tmp_path: Path) -> None:
    file = written(
        tmp_path,
        HEAD
        + """
def job(lr: float, size=4, name: str = "a", deep: bool = False, steps: int | None = 3):
    assert (type(lr), type(size), type(name), type(deep)) == (float, int, str, bool), (lr, size, name, deep)
    return make(lr, size, steps=steps)
""",
    )
    parameters = {"lr": "1", "size": "8", "name": "7", "deep": "yes", "steps": "none"}
    job = JobFile(file.path, parameters, {"epochs": "5"}).load()
    assert (job.batch_size, job.steps, job.epochs) == (8, None, 5)


@pytest.mark.parametrize(
    ("text", "parameters", "says"),
    [
        ("x = 1", {}, "there is no `job`"),
        ("job = 3", {}, "is a int"),
        ("def job(): return 3", {}, "returned a int"),
        ("raise ValueError('no data')", {}, r"ValueError: no data \(my_job.py, line 1\)"),
        ("def job(: pass", {}, "line 1 is not Python"),
        (HEAD + "def job(rate: float = 1.0): return make(rate)", {"rat": "1"}, '--set rat.*"rate"'),
        (
            HEAD + "def job(rate: float = 1.0): return make(rate)",
            {"rate": "fast"},
            "--set rate: 'fast' is not a number",
        ),
        (HEAD + "job = make(0.1)", {"rate": "1"}, "takes no parameters"),
        (
            HEAD + "def job(rate): return make(rate)",
            {},
            "the job function needs rate: add --set rate=...",
        ),
        (
            HEAD + "def job(batch_size): return make(1)",
            {},
            "the job function needs batch_size: add --batch-size ...",
        ),
        (
            HEAD + "def job():\n    return make(1 / 0)",
            {},
            r"job\(\) raised ZeroDivisionError.*line 9",
        ),
    ],
)
def test_what_is_wrong_in_a_job_file_is_said_in_one_line(
    tmp_path: Path, text: str, parameters: dict, says: str
) -> None:
    file = written(tmp_path, text)
    with pytest.raises(JobError, match=says) as found:
        JobFile(file.path, parameters).load()
    assert "\n" not in str(found.value)


def test_a_missing_file_is_named() -> None:
    with pytest.raises(JobError, match=r"nowhere\.py: there is no such file"):
        JobFile("nowhere.py").load()


def rate_of(job: Job) -> float:
    return job.optimizer([nn.Parameter(torch.zeros(1))]).param_groups[0]["lr"]


def test_a_setting_that_the_function_takes_by_its_name_is_given_to_it(tmp_path: Path) -> None:
    body = (
        "def job(epochs: int = 10, steps: int = 3, width: int = 4):\n    return make(epochs * "
        "1.0, epochs=epochs)"
    )
    file = written(tmp_path, HEAD + body)
    assert JobFile(file.path).load().epochs == 10
    made = JobFile(file.path, {}, {"epochs": "5"}).load()
    assert made.epochs == 5 and rate_of(made) == 5.0
    assert rate_of(JobFile(file.path, {"epochs": "7"}, {"epochs": "5"}).load()) == 5.0, (
        "the setting wins"
    )
    kept = JobFile(file.path, {}, {}, {"epochs": 5}).load()
    assert kept.epochs == 5 and rate_of(kept) == 10.0, (
        "what a run ended up with isn't what it was asked for"
    )
    with pytest.raises(JobError, match=r"^epochs: 0 is too small"):
        JobFile(file.path, {}, {"epochs": "0"}).load()


def test_parameters_from_python_are_those_of_the_command_line(tmp_path: Path) -> None:
    file = written(tmp_path, HEAD + "def job(rate: float = 1.0): return make(rate)")

    def job(rate: float = 1.0) -> Job:
        return Job(**{**GOOD, "optimizer": lambda params: torch.optim.SGD(params, lr=rate)})

    for what in (file, file.path, Path(file.path), job):
        made = as_job(what, {"rate": 0.05})
        assert rate_of(the_job(made)) == 0.05
        with pytest.raises(JobError, match=r'--set rat: .*"rate"'):
            the_job(as_job(what, {"rat": 0.05}))
    with pytest.raises(JobError, match="set: a Job takes no parameters: give a job file, or"):
        train(job(), set={"rate": 0.05}, folder=tmp_path)


def test_ranks_can_call_what_a_job_file_defines(tmp_path: Path) -> None:
    text = """
import dataclasses
from beside import SCALE
FACTOR = 3

@dataclasses.dataclass
class Found:
    value: int

def scaled(x): return x * FACTOR * SCALE
def on_a_rank(world, x): return Found(scaled(x) + world.rank)
"""
    (tmp_path / "beside.py").write_text("SCALE = 10")
    (tmp_path / "tools.py").write_text(text)
    module = loaded(str(tmp_path / "tools.py"))
    assert [found.value for found in launch(module.on_a_rank, "2xcpu", args=(2,))] == [60, 61]
    assert launch(lambda world, found: found.value, "2xcpu", args=(module.Found(4),)) == [4, 4]


def test_a_file_that_was_edited_within_a_second_is_read_anew(tmp_path: Path, monkeypatch) -> None:
    """Python's bytecode is of the second and the length of its source; both stay where
    ``lr=0.1`` becomes 0.2.
    """
    monkeypatch.setattr(sys, "dont_write_bytecode", False)
    path = tmp_path / "numbers.py"
    for number in (1, 2):
        path.write_text(f"lr = 0.{number}\n")
        os.utime(path, (1e9, 1e9))
        assert loaded(str(path)).lr == number / 10
    assert not list(tmp_path.glob("__pycache__"))
