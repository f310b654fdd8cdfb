"""Exporting: a file that other programs load computes what the run does, or isn't there."""

from __future__ import annotations

import dataclasses
import importlib.machinery
import importlib.util
import json
import re
import subprocess
import sys
import types
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn
from torch.utils.data import TensorDataset

import lockstep
from lockstep import Job, Run
from lockstep.cli.command import main
from lockstep.errors import InputError, NotEqual
from lockstep.export import Exported

from harness import same_bits  # isort: skip
from zoo import Tagger, drawn, labels, mlp, plain_sgd, right

SAMPLES = 21


class Pairs(torch.utils.data.Dataset[Any]):
    def __init__(self, *samples: Any) -> None:
        self.samples = samples

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, i: int) -> Any:
        return self.samples[i]


def trained(
    folder: Path, model: Callable[[], nn.Module] = mlp, data: Any = None, **settings: Any
) -> Run:
    """A run of two steps."""
    data = TensorDataset(drawn(SAMPLES, 6), labels(SAMPLES, 3)) if data is None else data
    fields: dict[str, Any] = {
        "loss": nn.CrossEntropyLoss(),
        "optimizer": plain_sgd,
        "eval_data": data,
        "batch_size": 8,
    }
    where = {name: settings.pop(name) for name in ("strategy", "devices") if name in settings}
    job = Job(
        model=model,
        train_data=data,
        **{**fields, "steps": 2, "metrics": {"accuracy": right}, **settings},
    )
    return lockstep.train(job, folder=folder / "runs", quiet=True, **{"devices": 1, **where})


def program(path: Path) -> nn.Module:
    return torch.export.load(path).module()


def session(path: Path) -> Any:
    return pytest.importorskip("onnxruntime").InferenceSession(
        str(path), providers=["CPUExecutionProvider"]
    )


def needs_onnx() -> None:
    for name in ("onnx", "onnxscript", "onnxruntime"):
        pytest.importorskip(name)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    return trained(tmp_path_factory.mktemp("run"))


# ---- what a file computes ------------------------------------------------------------------------


def test_safetensors_has_the_weights_by_one_device_names(run: Run, tmp_path: Path) -> None:
    found = lockstep.export(run, tmp_path / "a.safetensors", format="safetensors", quiet=True)
    weights, state = load_file(found.path), run.model().state_dict()
    assert found.difference == 0 and weights.keys() == state.keys()
    assert all(torch.equal(weights[name], state[name]) for name in state)


def test_other_weights_of_the_run_or_of_elsewhere_are_exported(run: Run, tmp_path: Path) -> None:
    others = {name: value + 1 for name, value in run.model().state_dict().items()}
    save_file(others, tmp_path / "other.safetensors")
    found = lockstep.export(
        run, format="safetensors", weights=tmp_path / "other.safetensors", quiet=True
    )
    weights = load_file(found.path)
    assert found.path == run.folder / "exported-other.safetensors"
    assert all(torch.equal(weights[name], others[name]) for name in others)


def test_parts_without_a_forward_are_not_exported(tmp_path: Path) -> None:
    def step(models: Any, batch: Any, update: Any) -> None:
        for name in ("one", "two"):
            update(name, models[name](batch[0]).square().sum(), len(batch[0]))

    fields = {"loss": None, "eval_data": None, "metrics": {}, "step": step}
    parts = lambda: {"one": nn.Linear(6, 2), "two": nn.Linear(6, 3)}  # noqa: E731
    run = trained(tmp_path, parts, optimizer={"one": plain_sgd, "two": plain_sgd}, **fields)  # type: ignore[arg-type]
    refused("step function calls the parts of its model", run, format="safetensors")
    weights, state = load_file(run.folder / "model.safetensors"), run.model().state_dict()
    assert {name: value.tolist() for name, value in weights.items()} == {
        n: v.tolist() for n, v in state.items()
    }


def test_tied_weights_are_in_the_file_by_each_name(tmp_path: Path) -> None:
    words = torch.randint(11, (SAMPLES, 5), generator=torch.Generator().manual_seed(1))
    run = trained(tmp_path, Tagger, TensorDataset(words, words), metrics={})
    for format in ("safetensors", "torch-export"):
        assert lockstep.export(run, format=format, quiet=True).difference == 0
    state, weights = run.model().state_dict(), load_file(run.folder / "exported.safetensors")
    assert weights.keys() == state.keys()
    del weights["out.weight"]  # as others write them
    save_file(weights, tmp_path / "one.safetensors")
    assert same_bits(run.model(tmp_path / "one.safetensors"), run.model())
    assert program(run.folder / "exported.pt2")(words[:2]).equal(run.model()(words[:2]))


def test_a_program_takes_batches_of_any_size(run: Run, capsys: pytest.CaptureFixture[str]) -> None:
    found = lockstep.export(run, format="torch-export", overwrite=True)
    assert found == Exported(run.folder / "exported.pt2", 0.0)
    module = program(found.path)
    for size in (1, 2, 33):
        assert module(drawn(size, 6)).equal(run.model()(drawn(size, 6)))
    inputs, compared, exported = capsys.readouterr().out.splitlines()
    assert inputs == "inputs: input float32(batch, 6)"
    assert (
        compared == "compared on 8 evaluation samples: they differ by 0.0e+00 of the largest output"
    )
    assert exported.startswith(f"exported: {found.path}, ")


@pytest.mark.slow
def test_a_program_runs_in_a_process_without_the_code_of_the_job(tmp_path: Path) -> None:
    (tmp_path / "job").mkdir()
    (tmp_path / "job" / "my_job.py").write_text(JOB)
    run = lockstep.train(tmp_path / "job" / "my_job.py", folder=tmp_path, devices=1, quiet=True)
    path = lockstep.export(run, tmp_path / "a.pt2", format="torch-export", quiet=True).path
    code = f"""
import sys, torch
found = torch.export.load({str(path)!r}).module()(x=torch.ones(3, 4), scale=torch.ones(3, 1))
assert not [name for name in sys.modules if name.startswith("lockstep") or "my_job" in name]
print(found["scores"].tolist(), found["hidden.0"].tolist(), list(found))
"""
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=tmp_path
    )
    outputs = run.model()(x=torch.ones(3, 4), scale=torch.ones(3, 1), mode="double")
    assert (
        done.stdout.split()
        == f"{outputs.scores.tolist()} {outputs.hidden[0].tolist()} ['scores', 'hidden.0']".split()
    )
    with zipfile.ZipFile(path) as archive:  # neither pickles, samples nor source
        assert not [name for name in archive.namelist() if name.endswith(".pkl")]
        for name in archive.namelist():
            assert archive.getinfo(name).file_size == 0 or not name.endswith(".pt")
            assert str(tmp_path).encode() not in archive.read(name)


JOB = """
import dataclasses, torch, lockstep
from torch import nn

@dataclasses.dataclass
class Outputs:
    scores: torch.Tensor
    hidden: list
    note: str = "x"

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.one, self.two = nn.Linear(4, 5), nn.Linear(5, 3)

    def forward(self, scale, x, mode="single"):
        hidden = self.one(x).relu() * (2 if mode == "double" else 1)
        return Outputs(self.two(hidden) * scale, [hidden])

def collate(samples):
    x = torch.stack(samples)
    return {"x": x, "scale": x[:, :1].exp(), "mode": "double"}, x.sum(1).long() % 3

def job(seed: int = 0):
    return lockstep.Job(
        model=Net, loss=lambda out, y: (nn.functional.cross_entropy(out.scores, y, reduction="sum"), len(y)),
        optimizer=lambda p: torch.optim.SGD(p, lr=0.1), train_data=torch.arange(80.0).view(20, 4) / 80, batch_size=8,
        collate=collate, steps=1,
    )
"""


@pytest.mark.slow
def test_onnx_is_run_by_onnxruntime(
    run: Run, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    needs_onnx()
    found = lockstep.export(run, tmp_path / "a.onnx", format="onnx")
    assert 0 < found.difference < 1e-6
    printed = capfd.readouterr()
    assert len(printed.out.splitlines()) == 3 and printed.err == ""
    ready = session(found.path)
    [given], [made] = ready.get_inputs(), ready.get_outputs()
    assert (given.name, given.shape, made.name, made.shape) == (
        "input",
        ["batch", 6],
        "output",
        ["batch", 3],
    )
    for size in (1, 2, 33):
        x = drawn(size, 6)
        torch.testing.assert_close(
            torch.from_numpy(ready.run(None, {"input": x.numpy()})[0]), run.model()(x)
        )


class Two(nn.Module):
    """Tokens (batch, time) and an image-like tensor; gives a tuple."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.out = nn.Embedding(9, 4), nn.Linear(4, 3)

    def forward(self, *both: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        means = self.words(both[0]).mean(1) + both[1]
        return self.out(means), means


def ragged(samples: list[Any]) -> Any:
    words = nn.utils.rnn.pad_sequence([sample[0] for sample in samples], batch_first=True)
    return (words, torch.stack([sample[1] for sample in samples])), torch.tensor(
        [len(s[0]) % 3 for s in samples]
    )


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> Run:
    data = Pairs(*((labels(2 + i % 7, 9, seed=i), drawn(4, seed=i)) for i in range(SAMPLES)))
    first = {"loss": lambda out, y: nn.functional.cross_entropy(out[0], y), "metrics": {}}
    return trained(
        tmp_path_factory.mktemp("two"), Two, data, collate=ragged, precision="fp64", **first
    )


def test_lengths_that_differ_in_the_data_vary_in_the_file(
    two: Run, capsys: pytest.CaptureFixture[str]
) -> None:
    found = lockstep.export(two, format="torch-export")
    assert (
        "inputs: input_0 int64(batch, input_0_1), input_1 float64(batch, 4)"
        in capsys.readouterr().out
    )
    for size, length in ((1, 1), (3, 20), (50, 2)):
        given = labels(size * length, 9).view(size, length), drawn(size, 4).double()
        for ours, theirs in zip(two.model()(*given), program(found.path)(*given), strict=True):
            torch.testing.assert_close(theirs, ours, rtol=0, atol=1e-12)


@pytest.mark.slow
def test_onnx_names_what_varies_and_each_output(two: Run) -> None:
    needs_onnx()
    found = lockstep.export(two, format="onnx", quiet=True)
    ready = session(found.path)
    assert found.difference < 1e-12
    assert [(g.name, g.shape) for g in ready.get_inputs()] == [
        ("input_0", ["batch", "input_0_1"]),
        ("input_1", ["batch", 4]),
    ]
    assert [(m.name, m.shape) for m in ready.get_outputs()] == [
        ("output_0", ["batch", 3]),
        ("output_1", ["batch", 4]),
    ]


def test_one_shape_is_that_of_an_evaluation_batch(run: Run, tmp_path: Path) -> None:
    found = lockstep.export(
        run, tmp_path / "a.pt2", format="torch-export", dynamic="none", eval_batch_size=2
    )
    assert program(found.path)(drawn(2, 6)).equal(run.model()(drawn(2, 6)))
    with pytest.raises(Exception, match="shape"):
        program(found.path)(drawn(3, 6))


def test_a_run_without_evaluation_data_is_compared_on_training_samples(
    tmp_path: Path, capsys: Any
) -> None:
    run = trained(tmp_path, eval_data=None, metrics={})
    lockstep.export(run, format="torch-export")
    assert "compared on 8 training samples" in capsys.readouterr().out


def test_weights_in_float32_of_a_run_in_mixed_precision_are_exported(tmp_path: Path) -> None:
    run = trained(tmp_path, precision="bf16", compile="eager", channels_last=True)
    assert lockstep.export(run, format="torch-export", quiet=True).difference == 0


# ---- strategies ----------------------------------------------------------------------------------


@pytest.mark.parametrize(("strategy", "devices"), [("ddp", "2xcpu"), ("pp", "2xcpu")])
def test_a_run_under_any_strategy_gives_the_same_file(
    strategy: str, devices: str, tmp_path: Path
) -> None:
    one, several = (
        trained(tmp_path / name, strategy=name, devices=on, precision="fp64", accumulate=2)
        for name, on in (("single", 1), (strategy, devices))
    )
    ours, theirs = (
        torch.export.load(lockstep.export(its, format="torch-export", quiet=True).path)
        for its in (one, several)
    )
    assert ours.graph_module.code == theirs.graph_module.code and str(ours.graph) == str(
        theirs.graph
    )
    assert list(ours.state_dict) == list(theirs.state_dict) == list(one.model().state_dict())
    for name, value in ours.state_dict.items():
        torch.testing.assert_close(theirs.state_dict[name], value, rtol=0, atol=1e-12)


# ---- what can't be -------------------------------------------------------------------------------


def refused(says: str, run: Run, error: type[Exception] = InputError, **how: Any) -> None:
    """In one line, with nothing left."""
    before = sorted(run.folder.rglob("*"))
    with pytest.raises(error, match=says) as found:
        lockstep.export(run, quiet=True, **how)
    assert "\n" not in str(found.value)
    assert sorted(run.folder.rglob("*")) == before


class Eights(nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(
            torch.cat([x.new_zeros(8 - len(x), 6), x])[-len(x) :] if len(x) != 8 else x.view(8, 6)
        )


class Deciding(nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) if x.sum() > 0 else -super().forward(x)


class Counting(nn.Linear):
    def forward(self, x: torch.Tensor, words: list[str]) -> torch.Tensor:
        return super().forward(x)


def test_a_model_for_one_size_of_batch_says_why_and_is_exported_for_that(tmp_path: Path) -> None:
    run = trained(tmp_path, lambda: Eights(6, 3))
    refused(
        r"torch.export can't take this model: .*; --dynamic none fixes all sizes",
        run,
        format="torch-export",
    )
    assert lockstep.export(run, format="torch-export", dynamic="none", quiet=True).difference == 0


def test_what_torch_export_cannot_take_is_said_in_a_line(tmp_path: Path) -> None:
    run = trained(tmp_path, lambda: Deciding(6, 3))
    says = r"torch.export can't take this model: .*data-dependent.* \(test_export.py, line \d+\)"
    for format in ("torch-export", "onnx"):
        if format == "onnx":
            needs_onnx()
        refused(says, run, format=format)
    assert lockstep.export(run, format="safetensors", quiet=True).difference == 0


def test_words_that_change_from_batch_to_batch_are_refused(tmp_path: Path) -> None:
    def collate(samples: list[Any]) -> Any:
        x, y = (torch.stack(part) for part in zip(*samples, strict=True))
        return (x, [str(int(one)) for one in y]), y

    run = trained(tmp_path, lambda: Counting(6, 3), collate=collate)
    refused(
        "inputs: more than the sizes of tensors changes from batch to batch",
        run,
        format="torch-export",
    )


class Drawing(nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.dropout(super().forward(x), 0.5, training=True)


@pytest.mark.slow
def test_a_file_that_differs_is_not_kept(run: Run, tmp_path: Path) -> None:
    needs_onnx()
    drawing = trained(tmp_path, lambda: Drawing(6, 3))
    refused(
        r"not equal: outputs of the file differ by .*, more than --tolerance 0.0001",
        drawing,
        NotEqual,
        format="onnx",
    )
    says = r"not equal: outputs of the file differ by [\d.]+e-\d\d, more than --tolerance 1e-12"
    refused(says, run, NotEqual, out=run.folder / "b.onnx", format="onnx", tolerance=1e-12)


@pytest.mark.parametrize(
    ("how", "says"),
    [
        (
            {"format": "onxx"},
            'format: \'onxx\' is not "safetensors" or "torch-export" or "onnx" or "tensorrt"',
        ),
        ({"format": "onnx", "dynamic": "all"}, 'dynamic: \'all\' is not "batch" or "none"'),
        ({"format": "onnx", "out": "a.pt2"}, "out: a.pt2 should end in .onnx"),
        (
            {"format": "safetensors", "out": "nowhere/a.safetensors"},
            "nowhere: there is no such folder",
        ),
    ],
)
def test_what_cannot_be_asked_for(how: dict[str, Any], says: str, run: Run) -> None:
    if how["format"] == "onnx":
        needs_onnx()
    refused(says, run, **how)


def test_a_file_that_is_there_already_is_kept_unless_overwritten(run: Run, tmp_path: Path) -> None:
    path = tmp_path / "a.safetensors"
    path.write_text("mine")
    refused("it is there already; --overwrite replaces it", run, out=path, format="safetensors")
    assert path.read_text() == "mine"
    lockstep.export(run, path, format="safetensors", overwrite=True, quiet=True)
    assert load_file(path).keys() == run.model().state_dict().keys()


def test_missing_packages_are_named_with_how_to_install_them(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    known = importlib.util.find_spec

    def without(name: str, *rest: Any) -> Any:
        return (
            None if name in ("onnxscript", "onnxruntime", "torch_tensorrt") else known(name, *rest)
        )

    monkeypatch.setattr(importlib.util, "find_spec", without)
    needs = r"onnx needs (onnx, )?onnxscript, onnxruntime, not installed here: pip install 'torch-lockstep\[export\]'"
    refused(needs, run, format="onnx")
    says = (
        "tensorrt needs torch_tensorrt, not installed here: pip install torch-tensorrt, beside "
        "a PyTorch for CUDA"
    )
    refused(says, run, format="tensorrt")


# ---- tensorrt, without a GPU ---------------------------------------------------------------------


@dataclasses.dataclass
class Range:
    min_shape: list[int]
    opt_shape: list[int]
    max_shape: list[int]
    dtype: torch.dtype


@pytest.fixture
def tensorrt(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Any]]:
    """A stand-in for torch_tensorrt that notes what it is called with, and saves the program as
    it is.
    """
    calls: list[Any] = []

    def compile(program: Any, *, arg_inputs: Any, kwarg_inputs: Any) -> Any:
        calls.append((arg_inputs, kwarg_inputs))
        return program

    def save(program: Any, path: str, *, arg_inputs: Any, kwarg_inputs: Any) -> None:
        torch.export.save(program, path)

    module: Any = types.ModuleType("torch_tensorrt")
    module.__spec__ = importlib.machinery.ModuleSpec("torch_tensorrt", None)
    module.Input, module.save, module.dynamo = Range, save, types.SimpleNamespace(compile=compile)
    monkeypatch.setitem(sys.modules, "torch_tensorrt", module)
    yield calls


def test_an_engine_needs_a_gpu(
    run: Run, tensorrt: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    refused(
        "tensorrt: engines are built on the GPU that is to run them, and there is no CUDA",
        run,
        format="tensorrt",
    )


def test_an_engine_is_built_for_batches_up_to_the_job_s(
    run: Run, tensorrt: list[Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.Tensor, "cuda", lambda tensor: tensor)
    monkeypatch.setattr(nn.Module, "cuda", lambda module: module)
    found = lockstep.export(run, format="tensorrt", eval_batch_size=64, quiet=True)
    assert found.path.name == "exported-tensorrt.pt2" and found.difference == 0
    assert tensorrt == [((Range([1, 6], [8, 6], [64, 6], torch.float32),), {})]


# ---- the command ---------------------------------------------------------------------------------


@pytest.fixture
def kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "my_job.py").write_text(JOB)
    return lockstep.train("my_job.py", folder="runs", devices=1, quiet=True).folder


def test_the_command_trusts_a_job_file_as_evaluate_does(
    kept: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["export", str(kept), "--format", "safetensors"]
    Path("my_job.py").write_text(JOB + "\n")
    assert main(words) == 2
    assert re.fullmatch(r"lockstep: .*my_job.py.*--trust-job.*\n", capsys.readouterr().err)
    Path("other.py").write_text(JOB)
    assert main([*words, "--job", "other.py"]) == 0
    assert main([*words, "--trust-job", "--overwrite", "--set", "seed=3"]) == 0
    assert json.loads((kept / "config.json").read_text())["file"].endswith("my_job.py")


def test_the_command_ends_with_3_where_the_file_differs(
    kept: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    before = sorted(kept.rglob("*"))
    module = sys.modules["lockstep.export.export_run"]
    monkeypatch.setattr(module, "_difference", lambda run, file: 1e-3)
    assert main(["export", str(kept), "--format", "torch-export"]) == 3
    captured = capsys.readouterr()
    assert re.fullmatch(r"lockstep: not equal: outputs of the file differ by .*\n", captured.err)
    assert "exported" not in captured.out and sorted(kept.rglob("*")) == before
