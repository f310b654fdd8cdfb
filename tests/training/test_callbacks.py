"""Callbacks: called on every rank, saved with the run, held to acting alike on all ranks."""

from __future__ import annotations

import copy
import dataclasses
import threading
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import lockstep
from lockstep import Callback, Job
from lockstep.callbacks import EMA, TrainingContext
from lockstep.errors import JobError, LockstepError, StrategyError

from harness import trained  # isort: skip
from zoo import ZOO, drawn, labels, slow


def job(*callbacks: Any, **settings: Any) -> Job:
    return ZOO["mlp"].replace(callbacks=callbacks, precision="fp64", **settings)


class Writes(Callback):
    """Writes down when it is called, on each rank to a file of its own."""

    def _note(self, what: str, training: TrainingContext) -> None:
        with open(training.folder / f"calls-{training.world.rank}", "a") as file:
            file.write(f"{what} {training.epoch}.{training.step}\n")

    def on_start(self, training: TrainingContext) -> None:
        self._note("start", training)

    def on_step(self, training: TrainingContext) -> None:
        assert training.result is not None and training.result.size in (8, 5)
        self._note("step", training)

    def on_log(self, training: TrainingContext) -> None:
        self._note("log", training)

    def on_epoch(self, training: TrainingContext) -> None:
        assert set(training.metrics) == {"train_loss"}
        self._note("epoch", training)

    def on_evaluated(self, training: TrainingContext) -> None:
        assert {"train_loss", "eval_loss", "accuracy"} <= set(training.metrics)
        training.metrics["added"] = training.step / 4
        self._note("evaluated", training)

    def on_saved(self, training: TrainingContext) -> None:
        self._note("saved", training)

    def on_finish(self, training: TrainingContext) -> None:
        assert (training.folder / "model.safetensors").exists()
        self._note("finish", training)


@pytest.mark.parametrize("way", [slow("single"), "ddp", slow("hogwild")])
def test_each_rank_is_called_at_each_point(way: str, tmp_path: Path) -> None:
    run = trained(job(Writes()), tmp_path, way)
    epochs = [
        [*(f"step {e}.{4 * e - 4 + i}" for i in (1, 2, 3, 4)), *(f"{k} {e}.{4 * e}" for k in ENDS)]
        for e in (1, 2)
    ]
    expected = ["start 0.0", *epochs[0], *epochs[1], "finish 2.8"]
    for rank in range(1 if way == "single" else 2):
        assert (run.folder / f"calls-{rank}").read_text().splitlines() == expected
    assert [record["added"] for record in run.history] == [1, 2]


ENDS = ("log", "epoch", "evaluated", "saved")


class Measures(Callback):
    def __init__(self, value: Any) -> None:
        self.value = value

    def on_evaluated(self, training: TrainingContext) -> None:
        training.metrics["mine"] = self.value


def test_metrics_that_callbacks_add_are_numbers(tmp_path: Path) -> None:
    assert trained(job(Measures(torch.tensor(1.5))), tmp_path, "single").history[-1]["mine"] == 1.5
    with pytest.raises(TypeError, match="not 'list'"):
        trained(job(Measures([1.5])), tmp_path, "single")


def test_two_callbacks_do_not_write_one_file(tmp_path: Path) -> None:
    with pytest.raises(
        JobError, match=r"callbacks: several would write ema\.safetensors: keep one"
    ):
        trained(job(EMA(0.5), EMA(0.9)), tmp_path, "single")


class Remembers(Callback):
    """Has a state of numbers and tensors."""

    def __init__(self) -> None:
        self.steps = 0
        self.sums = torch.zeros(2)

    def on_step(self, training: TrainingContext) -> None:
        assert training.result is not None
        self.steps += 1
        self.sums += training.result.loss
        if training.step == 6:
            training.stop()

    def on_finish(self, training: TrainingContext) -> None:
        (training.folder / f"remembers-{training.world.rank}").write_text(
            f"{self.steps} {self.sums.tolist()}"
        )

    def state_dict(self) -> dict[str, Any]:
        return {"steps": self.steps, "sums": self.sums}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.steps, self.sums = state["steps"], state["sums"]


class Goes(Remembers):
    def on_step(self, training: TrainingContext) -> None:
        super().on_step(training)
        training.stopping = None


Goes.__name__ = "Remembers"  # the state goes by the name


@pytest.mark.parametrize("way", [slow("single"), "ddp", slow("hogwild")])
def test_one_that_stops_at_a_step_stops_all_there_and_its_state_goes_on(
    way: str, tmp_path: Path
) -> None:
    run = trained(job(Remembers(), epochs=3), tmp_path, way)
    assert run.summary["steps"] == 6
    assert [record["step"] for record in run.history] == [4, 6], "it was evaluated where it stopped"
    again = lockstep.train(job(Goes(), epochs=3), resume=run.folder, quiet=True)
    assert again.summary["steps"] == 12
    said = {
        (run.folder / f"remembers-{rank}").read_text()
        for rank in range(1 if way == "single" else 2)
    }
    if way != "hogwild":
        whole = trained(job(Goes(), epochs=3), tmp_path, way)
        assert said == {(whole.folder / "remembers-0").read_text()}
    assert all(text.startswith("12 ") for text in said)


class Stops(Callback):
    def __init__(self, rank: int) -> None:
        self.rank = rank

    def on_evaluated(self, training: TrainingContext) -> None:
        if training.world.rank == self.rank:
            training.stop("enough")


def test_one_rank_ends_the_training_of_all(tmp_path: Path, capfd: Any) -> None:
    run = lockstep.train(job(Stops(1), epochs=9), strategy="ddp", devices="2xcpu", folder=tmp_path)
    assert run.summary["epochs"] == 1
    assert "Stops: enough" in "".join(capfd.readouterr())


class Changes(Callback):
    """Does something on rank 1 after the second step, or in another method."""

    def __init__(self, what: str, ranks: tuple[int, ...] = (1,), at: int = 2) -> None:
        self.what, self.ranks, self.at = what, ranks, at

    def on_step(self, training: TrainingContext) -> None:
        if training.world.rank in self.ranks and training.step == self.at:
            getattr(self, self.what)(training)

    def frozen(self, training: TrainingContext) -> None:
        training.model.get_parameter("2.weight").requires_grad_(False)

    def written(self, training: TrainingContext) -> None:
        with torch.no_grad():
            training.model.get_parameter("2.weight").mul_(0.5 + training.world.rank)

    def data(self, training: TrainingContext) -> None:
        training.model.get_parameter("2.weight").data.mul_(0.5)

    def rate(self, training: TrainingContext) -> None:
        training.optimizer.param_groups[0]["lr"] = 0.01

    def attribute(self, training: TrainingContext) -> None:
        training.model.temperature = 2.0  # type: ignore[assignment]

    def end(self, training: TrainingContext) -> None:
        training.stop()


@pytest.mark.sweep
@pytest.mark.parametrize(
    ("change", "says"),
    [
        (
            Changes("frozen"),
            r'parameter "2.weight" is frozen now\) must happen on every rank, but rank 0 continued',
        ),
        (Changes("written", at=3), 'parameter "2.weight" is no longer the same on all ranks'),
        slow(
            Changes("written", (0, 1), at=3),
            'parameter "2.weight" is no longer the same on all ranks',
        ),
        slow(Changes("data"), 'parameter "2.weight" is no longer the same on all ranks'),
        (Changes("rate"), r'parameter "\d.\w+" is no longer the same on all ranks'),
        slow(Changes("end", at=3), "the end of the training by Changes must happen on every rank"),
    ],
    ids=lambda value: f"{value.what}-{len(value.ranks)}" if isinstance(value, Changes) else "",
)
def test_what_is_changed_on_one_rank_only_is_named(
    change: Changes, says: str, tmp_path: Path
) -> None:
    with pytest.raises(LockstepError, match=says):
        trained(job(change), tmp_path, "ddp")


@pytest.mark.parametrize("what", [slow("frozen"), "rate", slow("attribute")])
def test_what_is_changed_on_all_ranks_alike_acts_as_on_one_device(
    what: str, tmp_path: Path
) -> None:
    change = Changes(what, (0, 1), at=3)
    one, two = (trained(job(change), tmp_path, way).model() for way in ("single", "ddp"))
    left = trained(job(), tmp_path, "single").model()
    assert all(
        torch.allclose(a, b, atol=1e-12)
        for a, b in zip(one.parameters(), two.parameters(), strict=True)
    )
    assert (what == "attribute") is all(map(torch.equal, one.parameters(), left.parameters()))


class Noise(Callback):
    def on_step(self, training: TrainingContext) -> None:
        with torch.no_grad():
            for p in training.model.parameters():
                p.add_(torch.randn_like(p), alpha=0.01)


def test_what_callbacks_draw_is_the_same_on_any_devices_and_with_micro_batches(
    tmp_path: Path,
) -> None:
    one = trained(job(Noise()), tmp_path, "single").model()
    for its, way in ((job(Noise(), accumulate=2), "single"), (job(Noise()), "ddp")):
        other = trained(its, tmp_path, way).model()
        assert all(
            torch.allclose(a, b, atol=1e-12)
            for a, b in zip(one.parameters(), other.parameters(), strict=True)
        )


class Hooks(Callback):
    """Adds a hook on a parameter, or on a module, at the start or after a step."""

    def __init__(self, on_parameters: bool, step: int = 0) -> None:
        self.on_parameters, self.step = on_parameters, step

    def on_start(self, training: TrainingContext) -> None:
        if not self.step:
            self._add(training)

    def on_step(self, training: TrainingContext) -> None:
        if self.step == training.step:
            self._add(training)

    def _add(self, training: TrainingContext) -> None:
        if self.on_parameters:
            next(training.model.parameters()).register_hook(lambda g: g.clamp(-0.01, 0.01))
        else:
            next(iter(training.model.children())).register_forward_hook(
                lambda module, inputs, output: output / 2
            )


@pytest.mark.parametrize("step", [0, 3])
@pytest.mark.parametrize("on_parameters", [True, False])
def test_hooks_that_a_callback_adds_are_refused_for_replicas_in_one_process(
    on_parameters: bool, step: int, tmp_path: Path
) -> None:
    says = "dp: modules, parameters or hooks of the model have changed"
    if on_parameters and step:  # the sum check comes first; at the start an evaluation does
        says = 'results depend on where a batch is cut: .*the gradient of "0.weight"'
    with pytest.raises(LockstepError, match=says):
        trained(job(Hooks(on_parameters, step)), tmp_path, "dp")


def test_hooks_on_parameters_that_a_callback_adds_are_refused_where_they_see_parts(
    tmp_path: Path,
) -> None:
    trained(job(Hooks(True, 0)), tmp_path, "single")
    for step, update in ((0, 1), (3, 4)):
        with pytest.raises(StrategyError, match=rf'in update {update}, .*the gradient of "'):
            trained(job(Hooks(True, step), accumulate=2), tmp_path, "single")


class Thaws(Callback):
    def on_step(self, training: TrainingContext) -> None:
        next(iter(training.model.children())).requires_grad_(training.step >= 2)


@pytest.mark.parametrize("way", ["single", "dp", slow("ddp"), slow("fsdp"), slow("pp")])
def test_what_a_callback_trains_that_the_optimizer_was_not_given_is_said(
    way: str, tmp_path: Path, capfd: Any
) -> None:
    """Found by trial: it stayed as it was, without a line."""

    def model() -> nn.Module:
        return nn.Sequential(nn.Linear(6, 5).requires_grad_(False), nn.Linear(5, 3))

    devices = "1xcpu" if way == "single" else "2xcpu"
    lockstep.train(
        dataclasses.replace(job(Thaws()), model=model),
        strategy=way,
        devices=devices,
        folder=tmp_path,
    )
    said = 'note: "0.weight" requires gradients now, but is not in the optimizer'
    assert capfd.readouterr().out.count(said) == 1


class BeginsAnew(Callback):
    """Takes away what the optimizer has of a layer, as after a reset of its weights."""

    def on_step(self, training: TrainingContext) -> None:
        weight, bias = list(training.model.parameters())[:2]
        if training.step == 2:
            training.optimizer.state.pop(weight)
        if training.step == 4:
            training.optimizer.state[bias].clear()


@pytest.mark.parametrize("way", ["single", slow("dp"), slow("ddp"), slow("fsdp")])
def test_momentum_that_a_callback_takes_away_begins_anew(way: str, tmp_path: Path) -> None:
    """Found by trial: the fused SGD, which a person hadn't chosen, ended with a TypeError of its
    kernel.
    """

    def sgd(named: Any, **settings: Any) -> torch.optim.Optimizer:
        return torch.optim.SGD(named, lr=0.1, momentum=0.9, **settings)

    one = trained(job(BeginsAnew(), optimizer=partial(sgd, foreach=False)), tmp_path, "single")
    other = trained(job(BeginsAnew(), optimizer=sgd), tmp_path, way)
    found, wanted = other.model().state_dict(), one.model().state_dict()
    assert all((found[name] - wanted[name]).abs().max() < 1e-12 for name in wanted)


class Held(Callback):
    def __init__(self) -> None:
        self.lock = threading.Lock()


class Begins(Callback):
    def on_epoch_start(self, training: Any) -> None: ...


class Validates(Callback):
    def on_validation_end(self, training: Any) -> None: ...


@pytest.mark.parametrize(
    ("callback", "says"),
    [
        (Stops, "not the class Stops"),
        (Begins(), r'Begins.on_epoch_start would never be called; did you mean "on_start"\?'),
        (Validates(), "Validates.on_validation_end .*; there are: on_start, on_step, on_log, on_"),
        (print, "not a builtin_function_or_method"),
        (Held(), r"Held can't be copied \(TypeError: .*\): open files in on_start"),
    ],
)
def test_what_is_no_callback_is_refused_before_the_first_step(
    callback: Any, says: str, tmp_path: Path
) -> None:
    with pytest.raises(JobError, match=f"callbacks: .*{says}"):
        trained(job(callback), tmp_path, "single")
    assert not list(tmp_path.iterdir())


def test_callbacks_of_a_job_are_copied_for_each_training(tmp_path: Path) -> None:
    remembers = Remembers()
    trained(job(remembers), tmp_path, "single")
    assert remembers.steps == 0


def test_callbacks_that_a_resumed_run_has_anew_or_lost_are_said(tmp_path: Path, capfd: Any) -> None:
    run = trained(job(Remembers()), tmp_path, "single")
    lockstep.train(job(Goes(), Goes()), resume=run.folder, steps=7)
    assert "callbacks: Remembers-2 begins without a state" in "".join(capfd.readouterr())
    lockstep.train(job(), resume=run.folder, steps=8)
    assert "callbacks: the saved state of Remembers" in "".join(capfd.readouterr())


class Stretched(torch.utils.data.Dataset[Any]):
    """Its samples depend on an attribute."""

    factor = 1.0

    def __len__(self) -> int:
        return 24

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        return drawn(24, 6)[index] * self.factor, labels(24, 3)[index]


class Stretches(Callback):
    def __init__(self, data: Stretched) -> None:
        self.data = data

    def on_epoch(self, training: TrainingContext) -> None:
        self.data.factor = 3.0


def test_what_a_callback_changes_in_a_dataset_reaches_loader_workers_with_the_next_epoch(
    tmp_path: Path,
) -> None:
    """Found by trial: workers went on with the dataset as it was, and weights were 10 % off
    without a line.
    """
    found = []
    for workers in (0, 1):
        data = Stretched()
        its = job(
            Stretches(data),
            train_data=data,
            eval_data=data,
            batch_size=6,
            epochs=3,
            loader_workers=workers,
        )
        run = trained(its, tmp_path, "single")
        found.append(run.model().state_dict() | {"loss": torch.tensor(run.metrics["loss"])})
    assert all(torch.equal(value, found[1][name]) for name, value in found[0].items())


class Reweighing(Callback):
    """Changes the loss or the data that it was given."""

    def __init__(self, held: Any) -> None:
        self.held = held

    def on_epoch(self, training: TrainingContext) -> None:
        held = self.held.weight if hasattr(self.held, "weight") else self.held.tensors[0]
        held[0] *= 3


@pytest.mark.sweep
@pytest.mark.parametrize("way", ["single", "dp", slow("ddp")])
@pytest.mark.parametrize("what", ["the loss", "the data"])
def test_what_a_callback_holds_of_the_job_is_that_of_the_job(
    what: str, way: str, tmp_path: Path
) -> None:
    """Found by trial: it was given a copy, and changed nothing."""

    def made(*, changes: bool) -> Job:
        loss = torch.nn.CrossEntropyLoss(weight=torch.ones(3).double())
        data = torch.utils.data.TensorDataset(*(t.clone() for t in ZOO["mlp"].train_data.tensors))
        held: Any = {"the loss": loss, "the data": data}[what]
        callbacks = [Reweighing(held)] if changes else []
        return job(*callbacks, epochs=2, eval_data=None, metrics={}, loss=loss, train_data=data)

    with_it, without = (
        trained(made(changes=changes), tmp_path, way).history[-1] for changes in (True, False)
    )
    assert with_it["train_loss"] != without["train_loss"]


def sharing(folder: Path, way: str) -> float:
    """The loss of a training whose callback rebinds a variable that the loss reads, too."""
    scale = 1.0

    def scaled(outputs: torch.Tensor, wanted: torch.Tensor) -> torch.Tensor:
        return scale * torch.nn.functional.cross_entropy(outputs, wanted)

    class Annealing(Callback):
        def on_epoch(self, training: TrainingContext) -> None:
            nonlocal scale
            scale = 1 / (1 + training.epoch)

    its = dataclasses.replace(job(Annealing(), epochs=2, eval_data=None, metrics={}), loss=scaled)
    return trained(its, folder, way).history[-1]["train_loss"]


@pytest.mark.parametrize("way", ["dp", "ddp"])
def test_a_variable_that_a_callback_rebinds_is_that_of_the_loss(way: str, tmp_path: Path) -> None:
    """Found by trial: under ddp each of the two functions had a variable of its own."""
    assert abs(sharing(tmp_path, way) - sharing(tmp_path, "single")) < 1e-10


class Raising(Callback):
    """Raises a rate that another callback sets."""

    def __init__(self, held: dict[str, float], *, sets: bool) -> None:
        self.held, self.sets = held, sets

    def on_step(self, training: TrainingContext) -> None:
        if self.sets:
            training.optimizer.param_groups[0]["lr"] = self.held["lr"]
        else:
            self.held["lr"] += 0.01


def test_what_two_callbacks_hold_is_one(tmp_path: Path) -> None:
    """Found by trial: each had a copy of its own, also under single."""
    held = {"lr": 0.1}
    run = trained(
        job(Raising(held, sets=False), Raising(held, sets=True), epochs=1), tmp_path, "single"
    )
    assert abs(run.history[-1]["lr"] - (0.1 + 0.01 * run.history[-1]["step"])) < 1e-12


def running_mean(outputs: torch.Tensor, wanted: torch.Tensor, kept: dict[str, int]) -> torch.Tensor:
    kept["calls"] += 1
    return torch.nn.functional.cross_entropy(outputs, wanted) / kept["calls"]


def test_what_a_partial_keeps_is_of_the_updates_alone(tmp_path: Path) -> None:
    """Found by trial: the calls of checks counted, too, also under single."""
    loss = partial(running_mean, kept={"calls": 0})
    run = trained(
        dataclasses.replace(job(epochs=1, eval_data=None, metrics={}), loss=loss),
        tmp_path,
        "single",
    )
    assert loss.keywords["kept"]["calls"] == run.history[-1]["step"]


class Chain:
    """A loss of functions, one of which keeps something by a variable of its own."""

    def __init__(self, *functions: Any) -> None:
        self.functions = list(functions)

    def __call__(self, outputs: torch.Tensor, wanted: torch.Tensor) -> torch.Tensor:
        return sum(function(outputs, wanted) for function in self.functions)


def test_what_a_function_of_a_loss_keeps_is_of_the_updates_alone(tmp_path: Path) -> None:
    """Found by trial: as what a partial keeps."""
    kept = {"calls": 0}
    loss = Chain(lambda outputs, wanted: running_mean(outputs, wanted, kept))
    run = trained(
        dataclasses.replace(job(epochs=1, eval_data=None, metrics={}), loss=loss),
        tmp_path,
        "single",
    )
    assert kept["calls"] == run.history[-1]["step"]


def taught(folder: Path, way: str) -> float:
    """The loss of a training with a mean teacher, which a callback makes and moves, and the loss
    calls.
    """
    teacher: Any = None

    class Teaching(Callback):
        def on_start(self, training: TrainingContext) -> None:
            nonlocal teacher
            teacher = copy.deepcopy(training.model)

        def on_step(self, training: TrainingContext) -> None:
            with torch.no_grad():
                for mine, its in zip(
                    teacher.parameters(), training.model.parameters(), strict=True
                ):
                    mine.lerp_(its, 0.1)

    def loss(outputs: torch.Tensor, wanted: torch.Tensor) -> torch.Tensor:
        near = (
            0.0 if teacher is None else sum(p.detach().square().sum() for p in teacher.parameters())
        )
        return torch.nn.functional.cross_entropy(outputs, wanted) * (1 + float(near))

    its = dataclasses.replace(job(Teaching(), epochs=2, eval_data=None, metrics={}), loss=loss)
    return trained(its, folder, way).history[-1]["train_loss"]


@pytest.mark.parametrize("way", ["dp", "ddp"])
def test_a_teacher_that_a_callback_makes_is_that_of_the_loss(way: str, tmp_path: Path) -> None:
    """Found by trial: under ddp methods of one class had variables of their own, and each rank's
    teacher another id.
    """
    assert abs(taught(tmp_path, way) - taught(tmp_path, "single")) < 1e-10


class Pictures(Callback):
    """Writes a text and a picture for TensorBoard, on rank 0."""

    needs_model = False

    def on_start(self, training: TrainingContext) -> None:
        assert (training.writer is not None) == training.world.is_first
        if training.world.is_first:
            training.writer.add_text("about", "a training")

    def on_evaluated(self, training: TrainingContext) -> None:
        if training.world.is_first:
            training.writer.add_image("picture", torch.zeros(1, 2, 2), training.step)


def test_callbacks_write_pictures_and_texts_for_tensorboard(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    its = ZOO["mlp"].replace(callbacks=[Pictures()])
    run = trained(its.replace(tensorboard=True), tmp_path, "ddp")
    events = EventAccumulator(str(run.folder)).Reload()
    assert [event.step for event in events.Images("picture")] == [4, 8]
    assert events.Tags()["tensors"] == ["about/text_summary"]
    assert "eval_loss" in events.Tags()["scalars"]
    with pytest.raises(JobError, match=r"training.writer: .*: give tensorboard=True"):
        trained(its, tmp_path, "single")
