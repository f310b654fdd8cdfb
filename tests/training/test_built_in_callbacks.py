"""Callbacks that come with Lockstep, but for averages."""

from __future__ import annotations

import sys
import time
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

import lockstep
from lockstep import Callback, Job
from lockstep.callbacks import (
    EMA,
    EarlyStopping,
    Freeze,
    LearningRateMonitor,
    MLflow,
    Sampler,
    TimeLimit,
    TrainingContext,
    WandB,
)
from lockstep.errors import JobError
from lockstep.tensors.seeding import seeded
from lockstep.training.callbacks.monitors import _write_pictures

from harness import same_bits, trained  # isort: skip
from docs_pages import ROOT, blocks
from service_stand_in import calls, service
from zoo import ZOO, drawn, sgd, slow


def job(*callbacks: Any, **settings: Any) -> Job:
    return ZOO["mlp"].replace(callbacks=callbacks, precision="fp64", optimizer=sgd, **settings)


def minus_weight(outputs: torch.Tensor, targets: torch.Tensor) -> tuple[float, int]:
    return -float(outputs.sum()), len(targets)


def rising(*callbacks: Any, **settings: Any) -> Job:
    """The weight goes from 0 towards 10, and on its way passes the 3 that the evaluation set
    wants.
    """
    fields: dict[str, Any] = {
        "model": lambda: nn.Linear(1, 1, bias=False),
        "loss": nn.MSELoss(),
        "optimizer": lambda params: torch.optim.SGD(params, lr=0.05),
        "train_data": TensorDataset(torch.ones(32, 1), torch.full((32, 1), 10.0)),
        "eval_data": TensorDataset(torch.ones(16, 1), torch.full((16, 1), 3.0)),
        "metrics": {"minus weight": minus_weight},
        "batch_size": 16,
        "epochs": 30,
    }
    return Job(**{**fields, "callbacks": callbacks, **settings})


def since_the_best(losses: list[float]) -> int:
    return len(losses) - 1 - losses.index(min(losses))


@pytest.mark.parametrize("way", ["single", slow("ddp"), slow("hogwild")])
def test_a_training_stops_when_its_loss_has_not_fallen(way: str, tmp_path: Path) -> None:
    run = trained(rising(EarlyStopping(patience=2)), tmp_path, way)
    losses = [record["eval_loss"] for record in run.history]
    assert len(losses) == run.summary["epochs"] < 30
    assert [since_the_best(losses[:end]) >= 2 for end in range(1, len(losses) + 1)].index(
        True
    ) == len(losses) - 1


def test_a_metric_that_should_rise_stops_it_and_a_resumed_run_knows_what_came_before(
    tmp_path: Path, capfd: Any
) -> None:
    stops = EarlyStopping("minus weight", "max", patience=3)
    run = lockstep.train(rising(stops), devices="1xcpu", folder=tmp_path)
    assert run.summary["epochs"] == 4, (
        "the weight rises from the first epoch on, so its negative falls"
    )
    assert "EarlyStopping: minus weight has not improved for 3 evaluations" in "".join(
        capfd.readouterr()
    )
    again = lockstep.train(rising(stops), devices="1xcpu", resume=run.folder)
    assert again.summary["epochs"] == 5, "one more that is no better is enough"
    assert "EarlyStopping stopped the run after 4 epochs; the run resumes" in "".join(
        capfd.readouterr()
    )


def test_what_is_smaller_than_min_delta_is_no_improvement(tmp_path: Path) -> None:
    run = trained(rising(EarlyStopping("train_loss", patience=1, min_delta=1e3)), tmp_path)
    assert run.summary["epochs"] == 2


def test_a_metric_that_there_is_not_is_named(tmp_path: Path) -> None:
    with pytest.raises(
        JobError, match='EarlyStopping: there is no metric "eval_los": did you mean "eval_loss"'
    ):
        trained(rising(EarlyStopping("eval_los")), tmp_path)
    with pytest.raises(
        JobError, match='EarlyStopping: there is no metric "eval_loss": the job has no evaluation'
    ):
        trained(rising(EarlyStopping("eval_loss"), eval_data=None, metrics={}), tmp_path)
    assert not list(tmp_path.iterdir()), "it is found before the first step"
    with pytest.raises(
        JobError, match='EarlyStopping: there is no metric "train_los": did you mean "train_loss"'
    ):
        trained(rising(EarlyStopping("train_los")), tmp_path)


def test_an_epoch_that_is_not_evaluated_is_no_evaluation_for_callbacks(tmp_path: Path) -> None:
    """Its end had no such metric, which ended the training."""
    its = (
        EarlyStopping("eval_loss", patience=50),
        EarlyStopping("train_loss", patience=50),
    )
    run = trained(rising(*its, eval_every=3, epochs=5), tmp_path)  # of two steps each
    evaluated = [record["step"] for record in run.history if "eval_loss" in record]
    assert evaluated == [3, 6, 9, 10]


class Moves(Callback):
    """Writes down which parameters each step has moved."""

    def on_start(self, training: TrainingContext) -> None:
        self.before = self.now(training)

    def now(self, training: TrainingContext) -> dict[str, torch.Tensor]:
        return {name: p.detach().clone() for name, p in training.model.named_parameters()}

    def on_step(self, training: TrainingContext) -> None:
        now = self.now(training)
        moved = [name for name in now if not torch.equal(now[name], self.before[name])]
        self.before = now
        with open(training.folder / "moves", "a") as file:
            file.write(" ".join(moved) + "\n")


@pytest.mark.parametrize(
    "way", ["single", slow("dp"), "ddp", slow("mp"), slow("pp"), slow("hogwild")]
)
def test_parameters_are_frozen_from_one_step_to_another_as_on_one_device(
    way: str, tmp_path: Path
) -> None:
    its = job(Freeze("0", until=3), Freeze("2.b*", start=5, until=7), Freeze(["2.weight"], start=7))
    if way == "hogwild":
        assert trained(its, tmp_path, way).summary["steps"] == 8
        return
    if way == "single":
        run = trained(its.replace(callbacks=[*its.callbacks, Moves()]), tmp_path)
        first, last = ["0.weight", "0.bias"], ["2.weight", "2.bias"]
        expected = [
            last,
            last,
            last,
            first + last,
            first + last,
            *2 * [[*first, "2.weight"]],
            [*first, "2.bias"],
        ]
        assert (run.folder / "moves").read_text().splitlines() == [
            " ".join(names) for names in expected
        ]
        half = trained(its, tmp_path, steps=6)
        assert same_bits(trained(its, tmp_path, resume=half.folder).model(), run.model())
        return
    cut = {"accumulate": 4} if way == "pp" else {}
    one, several = trained(its, tmp_path, **cut).model(), trained(its, tmp_path, way).model()
    assert all(
        torch.allclose(a, b, atol=1e-10)
        for a, b in zip(one.parameters(), several.parameters(), strict=True)
    )


@pytest.mark.parametrize(
    "freezes",
    [
        [("0", 0, 3), ("0.weight", 0, 6)],
        [("0.weight", 0, 6), ("0", 0, 3)],
        [("0", 2, 6), ("*.bias", 0, 4)],
    ],
    ids=["one until later", "in the other order", "one in the midst of another"],
)
def test_parameters_of_several_are_frozen_while_one_of_them_does_so(
    freezes: list[Any], tmp_path: Path
) -> None:
    """Found by trial: the first to end trained those of the others, which a resumed run didn't."""
    its = job(
        *(Freeze(names, start=start, until=until) for names, start, until in freezes), Moves()
    )
    run = trained(its, tmp_path)

    def is_frozen(name: str, step: int) -> bool:
        return any(
            fnmatch(name, f"{names}*") and start <= step < until for names, start, until in freezes
        )

    names = ["0.weight", "0.bias", "2.weight", "2.bias"]
    expected = [" ".join(name for name in names if not is_frozen(name, step)) for step in range(8)]
    assert (run.folder / "moves").read_text().splitlines() == expected
    for stop in range(1, 7):
        half = trained(its, tmp_path, steps=stop)
        assert same_bits(trained(its, tmp_path, resume=half.folder).model(), run.model())


def test_a_name_that_no_parameter_has_is_refused(tmp_path: Path) -> None:
    with pytest.raises(
        JobError,
        match=r'Freeze: the model has no parameter "1.weight": did you mean "2.weight"',
    ):
        trained(job(Freeze("1.weight")), tmp_path)
    assert not list(tmp_path.iterdir())


class Sleeps(Callback):
    def on_step(self, training: TrainingContext) -> None:
        time.sleep(0.02)


@pytest.mark.parametrize("way", [slow("single"), "ddp", slow("hogwild")])
def test_a_time_limit_ends_the_training_evaluated_and_saved(way: str, tmp_path: Path) -> None:
    run = trained(rising(Sleeps(), TimeLimit("0.3 s"), epochs=1000), tmp_path, way)
    assert 0 < run.summary["steps"] < 100
    assert run.history[-1]["step"] == run.summary["steps"]
    assert "eval_loss" in run.history[-1]


def test_a_time_without_a_unit_is_refused() -> None:
    with pytest.raises(JobError, match="TimeLimit: '90' is no time, as 10min"):
        TimeLimit("90")
    with pytest.raises(JobError, match='EarlyStopping: mode is "min" or "max", not \'least\''):
        EarlyStopping("loss", "least")  # type: ignore[arg-type]


def test_the_rate_of_each_group_is_a_metric(tmp_path: Path) -> None:
    def grouped(params: Any) -> torch.optim.Optimizer:
        weight, *others = params
        return torch.optim.SGD(
            [{"params": [weight], "name": "first"}, {"params": others, "lr": 0.2}], lr=0.1
        )

    halved = lambda optimizer: torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)  # noqa: E731
    its = ZOO["mlp"].replace(
        optimizer=grouped, lr_scheduler=halved, callbacks=[LearningRateMonitor()], log_every=3
    )
    run = trained(its, tmp_path)
    rates = [(record["step"], record["lr/first"], record["lr/1"]) for record in run.history]
    assert rates == [(3, 0.1, 0.2), (4, 0.1, 0.2), (6, 0.05, 0.1), (8, 0.05, 0.1)]


def text_of(model: nn.Module) -> list[str]:
    assert not model.training
    return [
        f"{value:.6f}" for value in (model(drawn(2, 6).double()).sum(1) + torch.rand(2)).tolist()
    ]


def pictures_of(model: nn.Module) -> torch.Tensor:
    return model(drawn(4, 6).double()).softmax(1).view(2, 1, 2, 3)


@pytest.mark.parametrize("way", [slow("dp"), slow("ddp"), "pp"])
def test_what_a_model_makes_is_written_at_each_evaluation_as_on_one_device(
    way: str, tmp_path: Path
) -> None:
    its = job(Sampler(text_of), Sampler(pictures_of, name="pictures"), EMA(0.5))
    cut = {"accumulate": 4} if way == "pp" else {}
    one, several = trained(its, tmp_path, **cut), trained(its, tmp_path, way)
    for file in ("samples/step-4.txt", "samples/step-8.txt", "pictures/step-8.png"):
        assert (one.folder / file).read_bytes() == (several.folder / file).read_bytes()
    with seeded(0):
        assert (
            "\n".join(text_of(one.model("ema.safetensors")))
            == (one.folder / "samples" / "step-8.txt").read_text()
        )


def test_the_parts_of_a_step_function_are_sampled_and_averaged(tmp_path: Path) -> None:
    """They have no forward to evaluate with, which the sampler refused."""

    def step(models: Any, batch: Any, update: Any) -> None:
        update("drawn", (models["drawn"](batch[0]) - batch[1]).square().sum(), len(batch[0]))

    its = Sampler(lambda model: model["drawn"](torch.ones(1, 3)).sigmoid().view(1, 2, 2)), EMA(0.5)
    data = TensorDataset(drawn(8, 3), drawn(8, 4))
    made = {"drawn": lambda params: torch.optim.SGD(params, lr=0.1)}
    job = Job(
        model=lambda: {"drawn": nn.Linear(3, 4)},
        optimizer=made,
        step=step,
        train_data=data,
        batch_size=4,
        callbacks=its,
    )
    run = trained(job, tmp_path)
    assert (run.folder / "samples" / "step-2.png").is_file() and (
        run.folder / "ema.safetensors"
    ).is_file()
    with pytest.raises(JobError, match="without a forward to evaluate or predict with"):
        lockstep.predict(run, drawn(4, 3))


@pytest.mark.parametrize("shape", [(1, 2, 3), (3, 4, 5), (2, 3, 4, 5)])
def test_a_picture_is_read_again_as_it_was(shape: tuple[int, ...], tmp_path: Path) -> None:
    matplotlib = pytest.importorskip("matplotlib.image")
    picture = torch.randint(
        256, shape, dtype=torch.uint8, generator=torch.Generator().manual_seed(0)
    )
    _write_pictures(tmp_path / "picture.png", picture)
    read = torch.from_numpy(matplotlib.imread(tmp_path / "picture.png") * 255).round().byte()
    whole = torch.cat(list(picture), dim=2) if picture.dim() == 4 else picture
    assert torch.equal(read.permute(2, 0, 1)[:3], whole.expand(3, -1, -1))


def test_what_is_no_picture_is_refused(tmp_path: Path) -> None:
    with pytest.raises(
        JobError, match=r"Sampler: pictures are \(n, 1 or 3, height, width\), not \(2, 4\)"
    ):
        _write_pictures(tmp_path / "picture.png", torch.zeros(2, 4))


@pytest.mark.parametrize("way", ["single", slow("ddp")])
def test_weights_and_biases_gets_each_number_once(
    way: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = service("wandb", tmp_path, monkeypatch)
    run = trained(job(WandB("digits", tags=["one"])), tmp_path, way)
    init, *logs, finish = calls(log)
    assert (init[0], finish) == ("init", ["finish", [], {}])
    settings = {name: value for name, value in init[2].items() if name != "config"}
    assert settings == {
        "project": "digits",
        "id": run.folder.name,
        "resume": "allow",
        "tags": ["one"],
    }
    assert init[2]["config"]["settings"]["batch_size"] == 8
    assert [named for _, _, named in logs] == [{"step": step} for step in (4, 4, 8, 8)]
    assert [sorted(values) for _, [values], _ in logs[:2]] == [
        ["train_loss"],
        sorted({*run.history[0]} - NOT_SENT),
    ]
    assert [values["eval_loss"] for _, [values], _ in logs[1::2]] == [
        record["eval_loss"] for record in run.history
    ]


NOT_SENT = {"epoch", "step", "train_loss"}


def test_mlflow_goes_on_in_its_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    log = service("mlflow", tmp_path, monkeypatch)
    run = trained(job(MLflow(experiment_id="3"), steps=4), tmp_path)
    start, params, first, second, end = calls(log)
    assert start == ["start_run", [], {"run_name": run.folder.name, "experiment_id": "3"}]
    assert (params[0], params[1][0]["strategy"], params[1][0]["batch_size"]) == (
        "log_params",
        "single",
        8,
    )
    assert [(one[0], one[2]) for one in (first, second)] == 2 * [("log_metrics", {"step": 4})]
    assert end == ["end_run", [], {}]
    trained(job(MLflow(experiment_id="3"), steps=8), tmp_path, resume=run.folder)
    assert calls(log)[5] == ["start_run", [], {"experiment_id": "3", "run_id": "run-7"}]


def test_a_service_that_is_not_installed_is_said_before_the_first_step(
    tmp_path: Path, monkeypatch: Any
) -> None:
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(JobError, match="WandB: wandb isn't installed: pip install wandb"):
        trained(job(WandB()), tmp_path)
    assert not list(tmp_path.iterdir())


PAGE = [
    block.text for block in blocks(ROOT / "docs" / "callbacks.md") if block.language == "python"
]


def test_the_page_runs_as_it_stands(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    use, own, told = PAGE
    names: dict[str, Any] = {"job": ZOO["mlp"].replace(epochs=20)}
    exec(compile(use, "docs/callbacks.md", "exec"), names)
    assert names["run"].summary["epochs"] < 20
    assert isinstance(names["model"], nn.Module)
    names["job"] = names["job"].replace(epochs=1)
    exec(compile(told, "docs/callbacks.md", "exec"), names)
    exec(compile(own, "docs/callbacks.md", "exec"), names)
    one, several = (
        trained(job(names["WeightClipping"](0.3)), tmp_path, way) for way in ("single", "ddp")
    )
    assert one.history[-1]["clipped"] == several.history[-1]["clipped"] > 0
    pairs = list(zip(one.model().parameters(), several.model().parameters(), strict=True))
    assert all(p.abs().max() <= 0.3 and torch.allclose(p, q, atol=1e-12) for p, q in pairs)


def test_the_page_lists_every_callback_with_its_settings() -> None:
    page = (ROOT / "docs" / "callbacks.md").read_text()
    for name in set(lockstep.callbacks.__all__) - {"Callback", "TrainingContext"}:
        assert f"`{name}(" in page


def test_verify_says_that_it_calls_no_callbacks() -> None:
    found = lockstep.verify(job(Freeze("0")), strategy="dp", devices="2xcpu")
    assert found
    assert any("without callbacks" in note for note in found.notes)
