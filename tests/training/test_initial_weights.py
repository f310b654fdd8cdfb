"""A training that begins with weights: of a file, of a run, of a folder as Hugging Face's models
have it.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import nn
from torch.utils.data import TensorDataset

from lockstep import Job, evaluate, train
from lockstep.cli.command import main
from lockstep.errors import JobError
from zoo import drawn, labels


class Net(nn.Module):
    """The body of one model, and a head of so many classes."""

    def __init__(self, classes: int = 3) -> None:
        super().__init__()
        self.body, self.norm, self.head = nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Linear(8, classes)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.norm(self.body(x).tanh()))


def a_job(**settings: Any) -> Job:
    data = TensorDataset(drawn(20, 6), labels(20, 3))
    usual: dict[str, Any] = {
        "model": Net,
        "loss": nn.CrossEntropyLoss(),
        "optimizer": lambda params: torch.optim.SGD(params, lr=0.0),
        "train_data": data,
        "eval_data": data,
        "batch_size": 10,
    }
    return Job(**{**usual, **settings})


def weights(model: nn.Module) -> dict[str, torch.Tensor]:
    torch.manual_seed(5)
    return {
        name: torch.randn(t.shape).abs() if t.is_floating_point() else torch.tensor(7)
        for name, t in model.state_dict().items()
    }


def saved(path: Path, tensors: dict[str, torch.Tensor]) -> str:
    save_file(tensors, path)
    return str(path)


def fits(found: dict[str, Any], expected: dict[str, torch.Tensor], *names: str) -> None:
    for name in names or expected:
        assert torch.equal(found[name], expected[name]), name


PARAMETERS = ("body.weight", "body.bias", "norm.weight", "head.weight", "head.bias")


@pytest.mark.parametrize(
    ("strategy", "devices"),
    [("single", "1xcpu"), ("dp", "2xcpu"), ("ddp", "2xcpu"), ("pp", "2xcpu")],
)
def test_a_training_begins_with_a_file(strategy: str, devices: str, tmp_path: Path, capsys) -> None:
    expected = weights(Net())
    file = saved(tmp_path / "w.safetensors", expected)
    run = train(a_job(init=file), strategy=strategy, devices=devices, folder=tmp_path)
    fits(run.model().state_dict(), expected, *PARAMETERS)
    said = capsys.readouterr().out.splitlines()
    assert said[2:].count(f"init: 9 of 9 weights are from {file}") == 1, (
        "after what the training is"
    )


def test_a_run_begins_with_another_and_a_resumed_one_with_its_own(tmp_path: Path) -> None:
    job = a_job(optimizer=lambda params: torch.optim.SGD(params, lr=0.3))
    first = train(job, devices="1xcpu", folder=tmp_path, quiet=True)
    second = train(a_job(), init=first.folder, devices="1xcpu", folder=tmp_path, quiet=True)
    fits(second.model().state_dict(), first.model().state_dict(), *PARAMETERS)
    (first.folder / "model.safetensors").unlink()
    again = train(a_job(init=str(first.folder)), epochs=2, resume=second.folder, quiet=True)
    assert again.summary["epochs"] == 2
    assert evaluate(again.folder, job=a_job(init=str(first.folder)), devices="1xcpu")["loss"] > 0


def test_a_job_that_was_not_trained_is_evaluated_with_its_weights(tmp_path: Path) -> None:
    file = saved(tmp_path / "w.safetensors", weights(Net()))
    ended = train(a_job(init=file), devices="1xcpu", folder=tmp_path, quiet=True, steps=1)
    fits(ended.model().state_dict(), weights(Net()), *PARAMETERS)
    plain, begun = (evaluate(a_job(init=init), devices="1xcpu")["loss"] for init in (None, file))
    assert plain != begun


def test_shards_with_an_index_are_read(tmp_path: Path) -> None:
    expected = weights(Net())
    folder = tmp_path / "hub"
    folder.mkdir()
    names = sorted(expected)
    index = {name: f"model-0000{1 + i % 2}-of-00002.safetensors" for i, name in enumerate(names)}
    for file in set(index.values()):
        saved(folder / file, {name: expected[name] for name in names if index[name] == file})
    (folder / "model.safetensors.index.json").write_text(
        json.dumps({"metadata": {}, "weight_map": index})
    )
    run = train(a_job(init=str(folder)), devices="1xcpu", folder=tmp_path, quiet=True)
    fits(run.model().state_dict(), expected, *PARAMETERS)
    index[names[0]] = "../elsewhere.safetensors"
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))
    with pytest.raises(
        JobError,
        match=r"init: .*index.json names ../elsewhere.safetensors, which isn't in that folder",
    ):
        train(a_job(init=str(folder)), devices="1xcpu", folder=tmp_path, quiet=True)


def test_what_does_not_fit_is_refused_or_said(tmp_path: Path, capsys) -> None:
    theirs = weights(Net(classes=10))
    del theirs["norm.bias"]
    file = saved(tmp_path / "w.safetensors", {**theirs, "extra": torch.zeros(1)})
    with pytest.raises(
        JobError, match=r"init: not in .*: norm.bias; of another shape in .*--init-strict false"
    ):
        train(a_job(init=file), devices="1xcpu", folder=tmp_path / "runs", quiet=True)
    assert not list((tmp_path / "runs").iterdir())
    run = train(
        a_job(init=file, init_strict=False), strategy="pp", devices="2xcpu", folder=tmp_path
    )
    said = capsys.readouterr().out.splitlines()
    for line in (
        f"init: 6 of 9 weights are from {file}",
        f"note: init: not in {file}: norm.bias",
        f"note: init: of another shape in {file}: head.bias (10,), not (3,), head.weight (10, 8), "
        "not (3, 8)",
        f"note: init: not of this model in {file}: extra",
    ):
        assert said.count(line) == 1, (line, said)
    fits(run.model().state_dict(), theirs, "body.weight", "body.bias", "norm.weight")


def test_a_weight_that_is_tied_need_not_be_there_twice(tmp_path: Path) -> None:
    class Tied(Net):
        def __init__(self) -> None:
            super().__init__()
            self.again = nn.Linear(8, 3)
            self.again.weight = self.head.weight

    expected = weights(Tied())
    del expected["again.weight"]
    file = saved(tmp_path / "w.safetensors", expected)
    found = (
        train(a_job(model=Tied, init=file), devices="1xcpu", folder=tmp_path, quiet=True)
        .model()
        .state_dict()
    )
    fits(found, expected, *PARAMETERS)
    assert torch.equal(found["again.weight"], expected["head.weight"])


def test_what_can_not_be_read_is_named(tmp_path: Path, capsys) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "text.safetensors").write_text("words")
    other = saved(tmp_path / "other.safetensors", {"layer.weight": torch.zeros(2)})
    for init, says in (
        ("nowhere.safetensors", "nowhere.safetensors: there is no such file"),
        (
            tmp_path / "empty",
            "empty: there is no model.safetensors and no model.safetensors.index.json in it",
        ),
        (tmp_path / "text.safetensors", "text.safetensors: not a safetensors file"),
        (
            other,
            'has no weight of the model: its names are "layer.weight", ..., the model\'s '
            '"body.weight", ...',
        ),
    ):
        with pytest.raises(JobError, match="init: ") as caught:
            train(
                a_job(init=str(init), init_strict=False),
                devices="1xcpu",
                folder=tmp_path / "runs",
                quiet=True,
            )
        assert says in str(caught.value) and "\n" not in str(caught.value)
    assert not list((tmp_path / "runs").iterdir())


def test_the_command_takes_them(tmp_path: Path, monkeypatch, capfd) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(Path(__file__).parent))
    (tmp_path / "own.py").write_text("from test_initial_weights import a_job\njob = a_job()\n")
    file = saved(tmp_path / "w.safetensors", {"body.weight": torch.ones(8, 6)})
    assert (
        main(["train", "own.py", "--devices", "1", "--init", file, "--init-strict", "false"]) == 0
    )
    assert f"init: 1 of 9 weights are from {file}" in capfd.readouterr().out
    assert main(["train", "own.py", "--devices", "1", "--init", file]) == 2


def test_weights_in_float64_keep_their_bits(tmp_path: Path) -> None:
    """Found by trial: they were rounded to float32 on their way."""
    expected = {
        n: t.double() / 3 if t.is_floating_point() else t for n, t in weights(Net()).items()
    }
    file = saved(tmp_path / "w.safetensors", expected)
    run = train(
        a_job(init=file, precision="fp64"),
        strategy="single",
        devices="1xcpu",
        folder=tmp_path,
        quiet=True,
    )
    fits(run.model().state_dict(), expected, *PARAMETERS)
