"""Predicting: a row for each sample, in order, the same on any number of devices; files that are
whole or absent.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from torch.utils.data import Dataset, Subset, TensorDataset

import lockstep
from lockstep import Job, Run, predict, train
from lockstep.cli.command import main
from lockstep.errors import FolderError, InputError, JobError, SaveError
from zoo import ZOO, Conv, drawn, labels, plain_sgd, right, slow

WAYS = {
    "single": "1xcpu",
    "dp 2": "2xcpu",
    "dp 3": "3xcpu",
    "ddp 2": "2xcpu",
    "ddp 3": "3xcpu",
    "fsdp 3": "3xcpu",
}
TWO = ["dp 2", "ddp 2"]
ROWS = 25  # in batches of 8: 8, 8, 8, 1: the last leaves ranks without a sample


def on(way: str) -> dict[str, str]:
    return {"strategy": way.split()[0], "devices": WAYS[way]}


def trained(
    tmp_path: Path, model: Callable[[], nn.Module], inputs: Any = None, **settings: Any
) -> Run:
    """A run of one step, in float64, with an evaluation set of 25 samples."""
    inputs = drawn(ROWS, 6) if inputs is None else inputs
    data = TensorDataset(inputs, labels(len(inputs), 3))
    fields: dict[str, Any] = {
        "eval_data": data,
        "batch_size": 8,
        "steps": 1,
        "precision": "fp64",
        **settings,
    }
    fields = {
        "loss": lambda out, y: (next(iter(tensors_of(out))).sum(), len(y)),
        "optimizer": plain_sgd,
        **fields,
    }
    return train(
        Job(model=model, train_data=data, **fields), folder=tmp_path / "runs", devices=1, quiet=True
    )


def tensors_of(outputs: Any) -> list[torch.Tensor]:
    return list(lockstep.tensors.pytree.tensors(outputs))


class Dropping(nn.Module):
    """Convolutions with BatchNorm, and dropout: other values in training mode."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = Conv()
        self.drop = nn.Dropout(0.5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.drop(self.conv(x))


class Calling(nn.Sequential):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x)


@pytest.mark.parametrize("kind", [nn.Sequential, Calling])
def test_one_sample_for_a_batch_norm_without_statistics_is_refused_in_a_sentence(
    kind: Any, tmp_path: Path
) -> None:
    """Found by trial: a model with a forward of its own ended in PyTorch's error."""
    model = kind(nn.BatchNorm1d(6, track_running_stats=False), nn.Linear(6, 3))
    run = trained(tmp_path, lambda: model, drawn(24, 6))
    with pytest.raises(
        InputError,
        match="data: BatchNorm without running statistics was given one sample only: choose",
    ):
        predict(run, TensorDataset(drawn(1, 6)), devices=1)


@pytest.mark.sweep
@pytest.mark.parametrize("way", WAYS)
def test_predictions_are_those_of_the_model_in_order_on_any_number_of_devices(
    way: str, tmp_path: Path
) -> None:
    run = trained(
        tmp_path,
        Dropping,
        drawn(ROWS, 2, 7, 7),
        loss=nn.CrossEntropyLoss(),
        metrics={"accuracy": right},
    )
    with torch.no_grad():
        expected = run.model()(drawn(ROWS, 2, 7, 7).double())
    found = predict(run, **on(way))
    assert found.shape == (ROWS, 3) and found.dtype == torch.float64 and not found.requires_grad
    assert (found - expected).abs().max() < 1e-12
    assert not list((tmp_path / "runs").glob("*/.*")), "nothing is left behind"


@dataclass
class Answer:
    logits: torch.Tensor
    hidden: tuple[torch.Tensor, ...]
    loss: torch.Tensor
    nothing: None = None


class Nested(nn.Module):
    """An answer of several parts; one is no row for each sample."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(6, 4), nn.Linear(4, 3)

    def forward(self, x: torch.Tensor) -> Answer:
        hidden = self.one(x)
        logits = self.two(hidden)
        return Answer(logits, (x, hidden.half()), logits.mean())


def logits_mean(answer: Answer, y: torch.Tensor) -> tuple[torch.Tensor, int]:
    return answer.logits.sum(), len(y)


@pytest.mark.parametrize("way", TWO)
def test_outputs_come_back_in_the_nesting_of_the_model(way: str, tmp_path: Path, capsys) -> None:
    run = trained(tmp_path, Nested, loss=logits_mean)
    found = predict(run, **on(way))
    expected = run.model()(drawn(ROWS, 6).double())
    assert type(found) is Answer and found.loss is None and found.nothing is None
    assert torch.allclose(found.logits, expected.logits, atol=1e-12)
    assert torch.equal(found.hidden[0], expected.hidden[0])
    assert found.hidden[1].dtype == torch.float16
    assert (
        capsys.readouterr().out == "note: left out, since they have no row for each sample: loss\n"
    )


@pytest.mark.sweep
@pytest.mark.parametrize("way", TWO)
@pytest.mark.parametrize("ending", [".npz", ".safetensors", ".jsonl"])
def test_several_outputs_are_kept_under_their_names(ending: str, way: str, tmp_path: Path) -> None:
    run = trained(tmp_path, Nested, loss=logits_mean)
    out = predict(run, out=tmp_path / f"found{ending}", quiet=True, **on(way))
    expected = run.model()(drawn(ROWS, 6).double())
    if ending == ".jsonl":
        lines = [json.loads(line) for line in out.read_text().splitlines()]
        assert [set(line) for line in lines] == [{"logits", "hidden"}] * ROWS
        found = {
            "logits": [line["logits"] for line in lines],
            "hidden.0": [line["hidden"][0] for line in lines],
        }
    else:
        found = dict(np.load(out)) if ending == ".npz" else load_file(out)
        assert set(found) == {"logits", "hidden.0", "hidden.1"}
        assert str(found["hidden.1"].dtype).endswith("float16")
    assert np.abs(np.asarray(found["logits"]) - expected.logits.detach().numpy()).max() < 1e-12
    assert (np.asarray(found["hidden.0"]) == drawn(ROWS, 6).double().numpy()).all()
    assert {path.name for path in tmp_path.iterdir()} == {"runs", out.name}


def test_one_array_is_an_npy_and_several_an_npz_where_no_ending_is_given(tmp_path: Path) -> None:
    one, several = (
        trained(tmp_path, lambda: nn.Linear(6, 3)),
        trained(tmp_path, Nested, loss=logits_mean),
    )
    assert predict(one, out=tmp_path / "one", quiet=True) == tmp_path / "one.npy"
    assert predict(several, out=tmp_path / "several", quiet=True) == tmp_path / "several.npz"
    found = np.load(tmp_path / "one.npy")
    assert (found == predict(one).numpy()).all()
    with pytest.raises(
        InputError,
        match=r"a \.npy file holds one array, and the outputs have 3 \(logits, hidden\.0",
    ):
        predict(several, out=tmp_path / "several.npy", quiet=True)
    assert {path.name for path in tmp_path.iterdir()} == {"runs", "one.npy", "several.npz"}


class Formats(nn.Module):
    """An output in each of the formats that are hard to keep."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 3)

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        y = self.layer(x)
        return {
            "bf16": y.bfloat16(),
            "complex": torch.complex(y, -y).conj(),
            "class": y.argmax(dim=1),
            "flag": y[:, 0] > 0,
            "none": y[:, :0],
            "turned": y.T.contiguous().T,
            "nan": y[:, 0] * float("nan"),
        }


class Column(nn.Linear):
    def __init__(self) -> None:
        super().__init__(6, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x)[:, 0]


class WithState(nn.GRU):
    """Its state of two layers has as many rows as a local batch of two samples."""

    def __init__(self) -> None:
        super().__init__(6, 3, num_layers=2, batch_first=True)

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        outputs, state = super().forward(x[:, None])
        return {"last": outputs[:, 0], "state": state}


@pytest.mark.sweep
@pytest.mark.parametrize("way", WAYS)
def test_a_column_of_one_sample_and_a_state_of_as_many_rows_are_written(
    way: str, tmp_path: Path
) -> None:
    run = trained(tmp_path, Column)
    found = predict(run, drawn(9, 6).double(), batch_size=4, **on(way))
    assert torch.allclose(found, run.model()(drawn(9, 6).double()))
    run = trained(tmp_path, WithState)
    found = predict(run, drawn(5, 6).double(), batch_size=5, **on(way))
    assert found["last"].shape == (5, 3)
    assert found["state"] is None


def test_numbers_of_every_format_are_kept(tmp_path: Path) -> None:
    run = trained(tmp_path, Formats)
    whole = predict(run)
    arrays = np.load(predict(run, out=tmp_path / "formats.npz", quiet=True))
    lines = [
        json.loads(s)
        for s in predict(run, out=tmp_path / "f.jsonl", quiet=True).read_text().splitlines()
    ]
    assert whole["bf16"].dtype == torch.bfloat16 and arrays["bf16"].dtype == np.float32
    assert (whole["bf16"].float().numpy() == arrays["bf16"]).all()
    for name in ("complex", "class", "flag", "none", "turned"):
        assert (whole[name].resolve_conj().numpy() == arrays[name]).all() and arrays[
            name
        ].shape == whole[name].shape
    assert lines[4]["class"] == whole["class"][4].item() and lines[4]["nan"] == "NaN"
    assert lines[4]["complex"][1] == [
        whole["complex"][4, 1].real.item(),
        whole["complex"][4, 1].imag.item(),
    ]
    with pytest.raises(
        InputError, match=r'no format for "complex", which is torch.complex128: take \.jsonl'
    ):
        predict(run, out=tmp_path / "f.safetensors", quiet=True)


class Ragged(nn.Module):
    """Cuts off each batch at its largest length; and a list with an item for each sample."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 6)

    def forward(self, x: torch.Tensor) -> dict[str, Any]:
        length = int(x[:, 0].abs().max() * 2) + 1
        return {
            "cut": self.layer(x)[:, :length],
            "boxes": [{"box": row[: int(row[1] > 0) + 1]} for row in x],
        }


@pytest.mark.parametrize("way", TWO)
def test_rows_of_differing_shapes_go_to_lines_and_no_array(way: str, tmp_path: Path) -> None:
    def only_cut() -> nn.Module:
        class Cut(Ragged):
            def forward(self, x: torch.Tensor) -> torch.Tensor:
                return super().forward(x)["cut"]

        return Cut()

    inputs = drawn(ROWS, 6)
    inputs[8:, 0] = 0.1
    run = trained(tmp_path, Ragged, inputs, loss=lambda out, y: (out["cut"].sum(), len(y)))
    out = predict(run, out=tmp_path / "r.jsonl", quiet=True, **on(way))
    lines = [json.loads(line) for line in out.read_text().splitlines()]
    assert [len(line["boxes"]["box"]) for line in lines] == [
        2 if row[1] > 0 else 1 for row in inputs
    ]
    assert len(lines[0]["cut"]) > 1 and len(lines[-1]["cut"]) == 1
    with pytest.raises(
        InputError, match=r'"boxes" is a list with an item for each sample.*\.jsonl'
    ):
        predict(run, quiet=True, **on(way))
    with pytest.raises(InputError, match=r"which no array can hold: take \.jsonl"):
        predict(trained(tmp_path, only_cut, inputs), quiet=True, **on(way))


class Bare(Dataset[Any]):
    """Inputs without targets: tensors, or dicts, or tuples of three."""

    def __init__(self, kind: str, at_once: bool = False) -> None:
        self.kind = kind
        if at_once:
            self.__class__ = BareAtOnce

    def __len__(self) -> int:
        return ROWS

    def __getitem__(self, i: int) -> Any:
        x = drawn(ROWS, 6)[i]
        return {
            "tensor": x,
            "dict": {"a": x, "b": x},
            "three": (x, x, x),
            "pair": (x, "a target of no use"),
        }[self.kind]


class BareAtOnce(Bare):
    def __getitems__(self, indices: list[int]) -> list[Any]:
        return [self[i] for i in indices]


class Takes(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 3)

    def forward(
        self, a: torch.Tensor, b: torch.Tensor | None = None, c: torch.Tensor | None = None
    ) -> torch.Tensor:
        return self.layer(a) * (1 if b is None else 2) * (1 if c is None else 3)


@pytest.mark.sweep
@pytest.mark.parametrize(
    ("kind", "times", "at_once"),
    [
        ("tensor", 1, True),
        ("dict", 2, False),
        ("dict", 2, True),
        ("three", 6, False),
        ("pair", 1, True),
    ],
)
def test_samples_may_be_inputs_alone(kind: str, times: int, at_once: bool, tmp_path: Path) -> None:
    run = trained(tmp_path, Takes)
    found = predict(run, Bare(kind, at_once), **on("dp 2"), loader_workers=0)
    assert (found - times * predict(run)).abs().max() < 1e-12
    part = predict(run, Subset(Bare(kind, at_once), [3, -1, 7]), **on("ddp 2"), loader_workers=1)
    assert (part - found[[3, -1, 7]]).abs().max() < 1e-12, (
        "in batches of other sizes, which round otherwise"
    )


def test_tensors_are_data_with_and_without_targets(tmp_path: Path) -> None:
    run = trained(tmp_path, Takes)
    x = drawn(ROWS, 6)
    assert torch.equal(predict(run, TensorDataset(x)), predict(run))
    assert (
        predict(run, lambda: TensorDataset(x, x, x), **on("ddp 3")) - 6 * predict(run)
    ).abs().max() < 1e-12
    assert torch.equal(predict(run, x), predict(run)), "a tensor has rows, so it is a dataset"


def test_a_collate_is_given_the_samples_as_they_are(tmp_path: Path) -> None:
    def doubled(samples: list[Any]) -> Any:
        pairs = isinstance(samples[0], tuple)
        inputs = 2 * torch.stack([s[0] if pairs else s for s in samples])
        return (inputs, torch.stack([s[1] for s in samples])) if pairs else inputs

    run = trained(tmp_path, Takes, collate=doubled)
    expected = run.model()(2 * drawn(ROWS, 6).double())
    for data in ("eval", Bare("tensor"), drawn(ROWS, 6).double()):
        assert (predict(run, data, **on("ddp 2"), loader_workers=0) - expected).abs().max() < 1e-12


def test_the_loss_and_the_optimizer_are_never_called_and_training_data_come_in_order(
    tmp_path: Path,
) -> None:
    run = trained(tmp_path, Takes, order=lambda epoch: [3, 1, 2])

    def never(*args: Any) -> Any:
        (tmp_path / "called").touch()  # (an inspection would suppress the error)
        raise AssertionError("called")

    other = Run(run.folder, run.summary, run.job.replace(loss=never, optimizer=never))  # type: ignore[union-attr]
    for way in TWO:
        assert (predict(other, "train", **on(way)) - predict(run)).abs().max() < 1e-12
    assert not (tmp_path / "called").exists()


def test_a_model_that_draws_random_numbers_gives_the_same_each_time(tmp_path: Path) -> None:
    class Sampling(Takes):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = super().forward(x)
            return y + torch.randn_like(y)

    run = trained(tmp_path, Sampling)
    for way in ("single", *TWO):
        before = torch.get_rng_state()
        first = predict(run, **on(way))
        assert torch.equal(first, predict(run, **on(way)))
        assert torch.equal(before, torch.get_rng_state())
        assert len(first.unique(dim=0)) == ROWS


def test_the_best_weights_may_be_taken(tmp_path: Path) -> None:
    run = trained(tmp_path, Takes, steps=4, epochs=None)
    kept = lockstep.checkpoint.weights.load_weights(run.folder / "best.safetensors")
    kept["layer.bias"] += 100
    lockstep.checkpoint.weights.save_weights(run.folder / "best.safetensors", kept)
    assert predict(run, best=True).min() > 50 > predict(run).max()


def test_a_batch_size_may_be_given(tmp_path: Path) -> None:
    sizes = tmp_path / "sizes"

    class Noting(Takes):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if not self.training:
                with sizes.open("a") as file:
                    file.write(f"{len(x)} ")
            return super().forward(x)

    run = trained(tmp_path, Noting, eval_batch_size=8)
    sizes.unlink()
    predict(run, batch_size=10)
    assert sizes.read_text() == "10 10 5 "


# ---- what goes wrong -----------------------------------------------------------------------------


def refused(
    run: Run, tmp_path: Path, says: str, kind: type[Exception] = InputError, **words: Any
) -> None:
    before = {path for path in tmp_path.rglob("*") if path.name != "ranks"}
    with pytest.raises(kind, match=says):
        predict(run, **{"quiet": True, "out": tmp_path / "out.npy", **words})
    assert {path for path in tmp_path.rglob("*") if path.name != "ranks"} == before, (
        "nothing is left"
    )


class Wrong(Takes):
    how = ""

    def forward(self, x: torch.Tensor) -> Any:  # type: ignore[override]
        y = super().forward(x)
        if self.training:
            return y
        return {"mean": y.mean(), "squeezed": y[:, 0] if len(x) > 1 else y[0, 0], "text": "yes"}[
            self.how
        ]


@pytest.mark.sweep
@pytest.mark.parametrize("way", ["single", *TWO])
def test_outputs_without_a_row_for_each_sample_are_refused(way: str, tmp_path: Path) -> None:
    def wrong(how: str) -> Callable[[], nn.Module]:
        return type(how, (Wrong,), {"how": how})

    says = r"outputs: the model returned float64\(\) for \d samples, without a row for each"
    refused(
        trained(tmp_path, wrong("mean"), eval_data=None), tmp_path, says, data="train", **on(way)
    )
    run = trained(tmp_path, wrong("text"), eval_data=None)
    refused(run, tmp_path, "returned str for", data="train", **on(way))
    says = r'"outputs" has a row for each sample.* float64\(\) for 1 samples in another \(does the model squeeze\(\)'
    refused(
        trained(tmp_path, wrong("squeezed"), eval_data=None),
        tmp_path,
        says,
        data="train",
        **on(way),
    )


class TimeFirst(nn.Module):
    """Outputs with a row for each of some steps in time."""

    steps = 4

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, self.steps)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x).T


class WithASummary(TimeFirst):
    """And what is one for all samples, whose rows are as many as samples by chance, as a
    parameter is.
    """

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        return {
            "out": self.layer(x),
            "mean": self.layer(x).mean(0, keepdim=True),
            "weight": self.layer.weight,
        }


@pytest.mark.sweep
@pytest.mark.parametrize("way", ["single", *TWO, slow("fsdp 3")])
@pytest.mark.parametrize("each", [2, 4])
def test_a_mean_and_a_weight_are_not_taken_for_rows_of_samples(
    each: int, way: str, tmp_path: Path
) -> None:
    batch_size = each * int(WAYS[way][0])
    run = trained(tmp_path, type("Summary", (WithASummary,), {"steps": each}), eval_data=None)
    found = predict(run, drawn(2 * batch_size + 1, 6), batch_size=batch_size, quiet=True, **on(way))
    assert (
        found["out"].shape == (2 * batch_size + 1, each)
        and found["mean"] is None
        and found["weight"] is None
    )


@pytest.mark.parametrize("way", ["single", *TWO])
def test_data_that_the_model_can_not_take_are_refused_at_the_first_batch(
    way: str, tmp_path: Path
) -> None:
    run = trained(tmp_path, Takes)
    says = r"data: the model can't take float32\(\d, 5\): RuntimeError: mat1 and mat2"
    refused(run, tmp_path, says, data=TensorDataset(drawn(9, 5)), **on(way))
    refused(
        run, tmp_path, "data: it is empty", JobError, data=TensorDataset(drawn(0, 6)), **on(way)
    )
    refused(run, tmp_path, "data: int is no dataset", JobError, data=3, **on(way))


def test_a_file_that_is_there_is_kept_unless_told(tmp_path: Path) -> None:
    run = trained(tmp_path, Takes)
    for name, there in {"a": "a.npz", "a.jsonl": "a.jsonl", "a.npy": "a.npy"}.items():
        (tmp_path / there).write_text("precious")
        says = f"{there}: it is there already; --overwrite replaces it"
        refused(run, tmp_path, says, FolderError, out=tmp_path / name)
        assert (tmp_path / there).read_text() == "precious"
    predict(run, out=tmp_path / "a.npy", overwrite=True, quiet=True)
    assert np.load(tmp_path / "a.npy").shape == (ROWS, 3)


def test_a_file_that_can_not_be_written_is_refused(tmp_path: Path) -> None:
    run = trained(tmp_path, Takes)
    refused(run, tmp_path, r"a\.csv should end in \.npy", out=tmp_path / "a.csv")
    refused(
        run, tmp_path, "there is no such folder for out", FolderError, out=tmp_path / "no" / "a.npy"
    )
    refused(run, tmp_path, "out is a folder", FolderError, out=tmp_path / "runs")


@pytest.mark.sweep
@pytest.mark.parametrize("way", ["single", *TWO])
def test_a_full_disk_leaves_nothing_behind(way: str, tmp_path: Path, small_disk: Path) -> None:
    run = trained(tmp_path, lambda: nn.Linear(6, 3000))
    for ending in (".npy", ".jsonl", ".safetensors"):
        with pytest.raises(
            SaveError, match=r"disk: the outputs can't be written: the disk is full"
        ):
            predict(run, out=small_disk / f"out{ending}", quiet=True, **on(way))
        assert not list(small_disk.iterdir())


# ---- the command ---------------------------------------------------------------------------------

FILE = """
import time, torch, lockstep
from torch import nn
from torch.utils.data import TensorDataset

x = torch.randn(25, 6, generator=torch.Generator().manual_seed(1))
more = TensorDataset(x[:9])
number = 3
words = ["a", "b", "c"]
def flow(): yield from x
def made(): return TensorDataset(x[:5])
def broken(): raise OSError("no net")
class Slow:
    def __len__(self): return 10**6
    def __getitem__(self, i):
        time.sleep(0.01)
        return x[0]

def job(width: int = 3, eval: bool = True):
    data = TensorDataset(x, torch.arange(25) % 3)
    return lockstep.Job(model=lambda: nn.Linear(6, width), loss=nn.CrossEntropyLoss(), train_data=data, batch_size=8,
        eval_data=data if eval else None, optimizer=lambda p: torch.optim.SGD(p, lr=0.1), steps=1)
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a_job.py").write_text(textwrap.dedent(FILE))
    parameters = {"run": {"width": 4}, "blind": {"eval": False}}
    for name, values in parameters.items():
        job = lockstep.jobfile.JobFile(str(tmp_path / "a_job.py"), values)
        train(job, folder=tmp_path / "runs", devices=1, quiet=True).folder.rename(tmp_path / name)
    (tmp_path / "stopped").mkdir()
    (tmp_path / "stopped" / "config.json").write_bytes(
        (tmp_path / "run" / "config.json").read_bytes()
    )
    return tmp_path


@pytest.mark.sweep
@pytest.mark.parametrize(
    "words", ["--devices 1", "--strategy dp --devices 2xcpu", "--strategy ddp --devices 2xcpu"]
)
def test_the_command_writes_in_the_folder_of_the_run_and_says_where(
    words: str, folder: Path, capfd
) -> None:
    assert main(["predict", "run", *words.split()]) == 0
    assert capfd.readouterr().out == f"predictions: {Path('run') / 'predictions-eval.npy'}\n"
    found = np.load(folder / "run" / "predictions-eval.npy")
    assert np.abs(found - predict("run").numpy()).max() < 1e-6 and found.shape == (25, 4)
    assert main(["predict", "run", "a_job.py:more", "--best", *words.split()]) == 0
    best = folder / "run" / "predictions-more-best.npy"
    assert np.load(best).shape == (9, 4)
    assert (
        main(
            [
                "predict",
                "run",
                "a_job.py:more",
                "--weights",
                "best.safetensors",
                "--overwrite",
                *words.split(),
            ]
        )
        == 0
    )
    assert main(["predict", "run", "a_job.py:made", "--out", "made.jsonl", *words.split()]) == 0
    assert len((folder / "made.jsonl").read_text().splitlines()) == 5


@pytest.mark.sweep
@pytest.mark.parametrize(
    ("words", "says"),
    [
        ("predict", "the following arguments are required: run"),
        ("predict nowhere", "nowhere: no run is kept there"),
        (
            "predict stopped",
            "no such weights, since the run was not finished: it finished no epoch",
        ),
        ("predict blind", "eval_data: the job has none; predict on train"),
        (
            "predict blind train --best",
            r"no best weights \(the run had no evaluation set, or lost them\)",
        ),
        ("predict run evl", 'there is no dataset "evl"; did you mean "eval"'),
        ("predict run a_job.py", 'data: there is no dataset "a_job.py"'),
        ("predict run missing.py:x", "missing.py: there is no such file"),
        ("predict run a_job.py:mroe", 'a_job.py: there is no "mroe" in it; did you mean "more"'),
        (
            "predict run a_job.py:nothing",
            'no "nothing" in it; there are: x, more, number, words, flow, made, broken',
        ),
        (
            "predict run a_job.py:flow",
            "a_job.py:flow: a stream has no length, and predicting needs one: give a list",
        ),
        (
            "predict run a_job.py:words",
            "a_job.py:words: .*forward\\(.* can't take list\\(str, str, str\\)",
        ),
        ("predict run a_job.py:number", "a_job.py:number: int is no dataset"),
        ("predict run a_job.py:broken", "a_job.py:broken: calling it raised OSError: no net"),
        (
            "predict run a_job.py:x --set width=5",
            r"weights of another model: .* weight \(4, 6\), not \(5, 6\)",
        ),
        (
            "predict run --weights blind/model.safetensors",
            r"another model: .* weight \(3, 6\), not \(4, 6\)",
        ),
        (
            "predict run --weights ema.safetensors",
            "there is no file ema.safetensors, in ",
        ),
        (
            "predict run --weights best.safetensors --best",
            "weights: best.safetensors, and --best as well: give one",
        ),
        (
            "evaluate a_job.py --weights run/model.safetensors",
            "not trained: --init run.model.safetensors gives",
        ),
        ("predict run --out x.csv", "x.csv should end in"),
        ("predict run --out run/model.safetensors", "it is there already; --overwrite replaces it"),
        ("predict run --strategy dpd", 'no strategy "dpd"'),
        ("predict run --ovewrite", 'no option --ovewrite here; did you mean "--overwrite"'),
        ("predcit run", 'no command "predcit"; did you mean "predict"'),
    ],
)
def test_bad_input_gets_one_line_and_exit_code_2_and_makes_nothing(
    words: str, says: str, folder: Path, capfd
) -> None:
    before = {path for path in folder.rglob("*") if "__pycache__" not in str(path)}
    assert main(words.split()) == 2
    lines = capfd.readouterr().err.strip().splitlines()
    assert len(lines) == 1 and lines[0].startswith("lockstep: "), lines
    assert re.search(says, lines[0]), lines[0]
    assert {path for path in folder.rglob("*") if "__pycache__" not in str(path)} == before


@pytest.mark.slow
@pytest.mark.parametrize(
    ("words", "how", "code"),
    [
        ("--devices 1", signal.SIGINT, 130),
        ("--devices 1", signal.SIGTERM, 143),
        ("--strategy ddp --devices 2xcpu", signal.SIGINT, 130),
        ("--strategy ddp --devices 2xcpu", signal.SIGTERM, 143),
    ],
)
def test_a_stopped_prediction_leaves_nothing(
    how: signal.Signals, code: int, words: str, folder: Path
) -> None:
    command = [
        sys.executable,
        "-m",
        "lockstep",
        "predict",
        "run",
        "a_job.py:Slow",
        "--loader-workers",
        "0",
    ]
    process = subprocess.Popen(
        [*command, *words.split()], cwd=folder, stderr=subprocess.PIPE, text=True
    )
    end = time.monotonic() + 60
    while not list((folder / "run").glob(".*/*")):
        assert process.poll() is None and time.monotonic() < end, process.communicate()
        time.sleep(0.05)
    process.send_signal(how)
    _, err = process.communicate(timeout=20)
    assert process.returncode == code and "Traceback" not in err
    assert not list((folder / "run").glob(".*")) and not list((folder / "run").glob("predictions*"))


@pytest.mark.slow
def test_under_torchrun_the_ranks_write_one_file(folder: Path) -> None:
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node=2",
        "-m",
        "lockstep",
    ]
    surroundings = {**os.environ, "PYTHONWARNINGS": "ignore"}
    for out in ("p.npy", "p.npz", "p.jsonl"):
        done = subprocess.run(
            [*command, "predict", "run", "--out", out],
            cwd=folder,
            env=surroundings,
            capture_output=True,
            text=True,
            check=False,
            timeout=100,
        )
        assert done.returncode == 0, done.stderr
        assert done.stdout == f"predictions: {out}\n"
    expected = predict("run").numpy()
    lines = (folder / "p.jsonl").read_text().splitlines()
    with np.load("p.npz") as archive:
        for found in (
            np.load("p.npy"),
            archive["outputs"],
            np.array([json.loads(line) for line in lines]),
        ):
            assert np.abs(found - expected).max() < 1e-6
    assert not list(folder.glob(".*"))


def test_an_evaluation_set_is_named_where_there_are_several(tmp_path) -> None:
    data = ZOO["mlp"].train_data
    parts = {"some": Subset(data, [4, 2, 9]), "all": data}
    run = train(
        ZOO["mlp"].replace(eval_data=parts),
        strategy="single",
        devices="1xcpu",
        folder=tmp_path,
        quiet=True,
    )
    whole = predict(run, "eval:all", devices="1xcpu", quiet=True)
    torch.testing.assert_close(
        predict(run, "eval:some", devices="2xcpu", quiet=True), whole[[4, 2, 9]]
    )
    with pytest.raises(
        InputError, match="eval: the job's evaluation sets are eval:some, eval:all: take"
    ):
        predict(run, "eval", devices="1xcpu", quiet=True)
    with pytest.raises(
        InputError, match="eval:al: the job's evaluation sets are eval:some, eval:all"
    ):
        predict(run, "eval:al", devices="1xcpu", quiet=True)
