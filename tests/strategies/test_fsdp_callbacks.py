"""What else of a person's own sees a sharded model as one device has it: callbacks of other
forms, and their state.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from lockstep import Callback, train
from lockstep.callbacks import EMA, SWA, Sampler
from lockstep.errors import LockstepError

from zoo import ZOO, drawn, labels, slow  # isort: skip

BOUND = 1e-10


def norm_of(model: nn.Module) -> float:
    return sum(float((p.detach() ** 2).sum()) for p in model.parameters()) ** 0.5


def as_text(model: nn.Module) -> str:
    return f"{norm_of(model):.9f}"


def bound(training: Any) -> None:
    with torch.no_grad():
        for p in training.model.parameters():
            p.mul_(min(1.0, (0.5 + 0.01 * training.step) / float(p.norm())))


def of_methods_of_its_own() -> Callback:
    callback = Callback()
    callback.on_step = bound  # type: ignore[method-assign]
    return callback


class KeepsNorm(Callback):
    def on_step(self, training: Any) -> None:
        self.model = training.model
        if training.step == 1 and hasattr(self, "kept"):
            raise AssertionError("a run that begins has none")

    def state_dict(self) -> dict[str, Any]:
        return {
            "norm": norm_of(self.model),
            "first": next(self.model.parameters()).flatten().tolist(),
        }

    def load_state_dict(self, state: Any) -> None:
        self.kept = state

    def on_evaluated(self, training: Any) -> None:
        training.metrics["kept"] = getattr(self, "kept", {"norm": 0.0})["norm"]


def trained(callback: Callback, where: dict[str, Any], **settings: Any) -> Any:
    job = dataclasses.replace(ZOO["mlp"], callbacks=[callback], precision="fp64", **settings)
    return train(job, quiet=True, **where)


SINGLE, FSDP = {"devices": "1xcpu"}, {"strategy": "fsdp", "devices": "3xcpu"}


def weights(run: Any) -> Tensor:
    return torch.cat([p.flatten() for p in run.model().parameters()])


@pytest.mark.slow
def test_methods_of_an_instance_are_called_as_those_of_a_class(tmp_path: Path) -> None:
    """Found by trial: ``on_step`` was not called at all, and the others saw shards."""
    one, other = (
        trained(of_methods_of_its_own(), where | {"folder": tmp_path}) for where in (SINGLE, FSDP)
    )
    assert (weights(one) - weights(other)).abs().max() < BOUND
    unbound = trained(Callback(), SINGLE | {"folder": tmp_path})
    assert (weights(one) - weights(unbound)).abs().max() > 0.01


@pytest.mark.slow
def test_a_function_of_sampler_sees_whole_parameters(tmp_path: Path) -> None:
    """Found by trial: the norm was of rank 0's shard."""
    runs = [trained(Sampler(as_text), where | {"folder": tmp_path}) for where in (SINGLE, FSDP)]
    one, other = (
        [float(f.read_text()) for f in sorted((run.folder / "samples").iterdir())] for run in runs
    )
    assert one == pytest.approx(other, abs=1e-8) and one[0] > 0


@pytest.mark.slow
def test_a_state_that_is_computed_when_it_is_kept_is_of_whole_parameters(tmp_path: Path) -> None:
    """Found by trial: the norm was of rank 0's shard, and a flat list of the weights failed."""
    kept = []
    for where in (SINGLE, FSDP):
        run = trained(KeepsNorm(), where | {"folder": tmp_path}, epochs=1)
        job = dataclasses.replace(ZOO["mlp"], callbacks=[KeepsNorm()], precision="fp64", epochs=2)
        kept.append(train(job, quiet=True, resume=run.folder, **where).history[-1]["kept"])
    assert kept[0] == pytest.approx(kept[1], abs=BOUND) and kept[0] > 0


class WritesArray(Callback):
    def on_step(self, training: Any) -> None:
        next(training.model.parameters()).detach().numpy()[...] *= 0.9


def test_an_array_of_a_parameter_may_be_written_to(tmp_path: Path) -> None:
    """Found by trial: what was written to it was lost, and later refused."""
    one, other = (trained(WritesArray(), where | {"folder": tmp_path}) for where in (SINGLE, FSDP))
    assert (weights(one) - weights(other)).abs().max() < BOUND


def convolutions() -> nn.Module:
    return nn.Sequential(
        nn.Conv1d(6, 4, 1), nn.Conv1d(4, 16, 1), nn.Conv1d(16, 1, 1), nn.Flatten(), nn.Linear(5, 3)
    )


class Convolves(Callback):
    """Calls layers, and goes backward through them."""

    def on_evaluated(self, training: Any) -> None:
        ones = torch.ones(2, 6, 5, dtype=torch.float64)
        training.metrics["layer"] = training.model[0](ones).sum().detach()
        with training.evaluating(), torch.enable_grad():
            output = training.model(ones.requires_grad_()).sum()
        training.metrics["gradient"] = torch.autograd.grad(output, ones)[0].abs().sum()


@pytest.mark.parametrize(
    ("way", "devices"), [("fsdp", "2xcpu"), slow("fsdp", "3xcpu"), slow("ddp=2xfsdp=2", "4xcpu")]
)
def test_layers_that_a_callback_calls_are_those_of_one_device(
    way: str, devices: str, tmp_path: Path
) -> None:
    """Found by trial: each rank convolved with its own rows (-55.98 for -100.06); one of one
    output aborted.
    """
    data = TensorDataset(drawn(20, 6, 5), labels(20, 3))
    callbacks = [
        Convolves(),
        Sampler(
            lambda model: f"{float(model[0](torch.ones(1, 6, 5).double()).sum().detach()):.9f}"
        ),
    ]
    job = ZOO["mlp"].replace(
        model=convolutions, train_data=data, eval_data=data, callbacks=callbacks, precision="fp64"
    )
    one, other = (
        train(job, quiet=True, folder=tmp_path, **where)
        for where in (SINGLE, {"strategy": way, "devices": devices})
    )
    for record, its in zip(one.history, other.history, strict=True):
        assert all(
            abs(its[name] - record[name]) < BOUND for name in ("layer", "gradient", "eval_loss")
        )
    samples = [
        [f.read_text() for f in sorted((run.folder / "samples").iterdir())] for run in (one, other)
    ]
    assert samples[0] == samples[1] and float(samples[0][0]) != 0


class GoesBackByName(Callback):
    """Takes the weights of the last epoch every other time."""

    def on_epoch(self, training: Any) -> None:
        if training.epoch % 2:
            self.kept = {name: value.clone() for name, value in training.model.state_dict().items()}
        else:
            training.model.load_state_dict(self.kept)


def test_a_callback_may_load_a_state_dict(tmp_path: Path) -> None:
    """Found by trial: PyTorch's own hook ended in an AttributeError."""
    one, other = (
        trained(GoesBackByName(), where | {"folder": tmp_path}) for where in (SINGLE, FSDP)
    )
    assert (weights(one) - weights(other)).abs().max() < BOUND


class OnRankZero(Callback):
    """Calls what every rank has to call on rank 0 only."""

    def __init__(self, call: str) -> None:
        self.call = call

    def on_epoch(self, training: Any) -> None:
        if not training.world.is_first:
            return
        if self.call == "weights":
            training.weights()
        else:
            with training.evaluating():
                pass


@pytest.mark.sweep
@pytest.mark.parametrize("call", ["weights", "evaluating"])
@pytest.mark.parametrize("way", ["fsdp", "ddp"])
def test_a_call_on_one_rank_only_is_named_at_once(way: str, call: str, tmp_path: Path) -> None:
    """Found by trial: the ranks of fsdp were aborted, with advice about blocks."""
    instead = "rank 1 continued without it"
    if way == "fsdp":  # ranks meet at the end of callbacks, where whole parameters are compared
        instead = "rank 1 reached the end of callbacks"
    said = rf"training\.{call}\(\) in a callback must happen on every rank, but {instead}"
    with pytest.raises(LockstepError, match=said):
        trained(OnRankZero(call), {"strategy": way, "devices": "2xcpu", "folder": tmp_path})


class Small(Callback):
    """Looks at what it is given of the model."""

    needs_model = False

    def on_step(self, training: Any) -> None:
        training.metrics["here"] = sum(
            p.numel() for group in training.optimizer.param_groups for p in group["params"]
        )

    def on_evaluated(self, training: Any) -> None:
        self.on_step(training)


@pytest.mark.slow
def test_a_callback_that_needs_no_model_leaves_it_in_shards(tmp_path: Path) -> None:
    one, other = (trained(Small(), where | {"folder": tmp_path}) for where in (SINGLE, FSDP))
    assert other.history[-1]["here"] < one.history[-1]["here"]


class Empty(Callback):
    """Bounds the largest gradient of all, of which some ranks have no element."""

    def on_step(self, training: Any) -> None:
        grads = [p.grad for p in training.model.parameters()]
        self.norm = float(nn.utils.get_total_norm(grads, norm_type=float("inf")))

    def on_evaluated(self, training: Any) -> None:
        training.metrics["largest"] = self.norm


@pytest.mark.slow
def test_the_largest_gradient_where_a_rank_has_none(tmp_path: Path) -> None:
    """Found by trial: ranks waited for one another."""
    one, other = (
        trained(Empty(), where | {"folder": tmp_path})
        for where in (SINGLE, FSDP | {"devices": "4xcpu"})
    )
    assert one.history[-1]["largest"] == pytest.approx(other.history[-1]["largest"], abs=BOUND)


class Zeroed(Callback):
    """Evaluates with weights of its own, by assigning ``data``."""

    @contextlib.contextmanager
    def evaluating(self, training: Any) -> Iterator[None]:
        parameters = list(training.model.parameters())
        kept = [p.data for p in parameters]
        for p in parameters:
            p.data = torch.full(p.shape, 0.1, dtype=p.dtype)
        yield
        for p, data in zip(parameters, kept, strict=True):
            p.data = data


@pytest.mark.sweep
@pytest.mark.parametrize("way", ["single", "ddp", "fsdp"])
def test_the_best_weights_are_those_that_were_evaluated(way: str, tmp_path: Path) -> None:
    """Found by trial: they were those that were trained, under all strategies but fsdp."""
    where = {
        "strategy": way,
        "devices": "1xcpu" if way == "single" else "2xcpu",
        "folder": tmp_path,
    }
    run = trained(Zeroed(), where)
    assert all((p == 0.1).all() for p in run.model(best=True).parameters())
    assert not any((p == 0.1).all() for p in run.model().parameters())


class EvaluatesWithin(Callback):
    """Computes with the weights that are evaluated, an average, between computations with those
    that are trained.
    """

    def on_step(self, training: Any) -> None:
        x = drawn(4, 6).double()
        row = next(training.model.parameters()).detach()[0]
        self.seen = [norm_of(training.model), float(training.model(x).detach().square().sum())]
        with training.evaluating():
            weights = training.model.state_dict()
            self.seen += [
                norm_of(training.model),
                float(training.model(x).square().sum()),
                float(row.norm()),
            ]
            self.seen += [float(value.double().norm()) for value in weights.values()]
        self.seen += [
            norm_of(training.model),
            float(training.model(x).detach().square().sum()),
            float(row.norm()),
        ]

    def on_evaluated(self, training: Any) -> None:
        training.metrics |= {f"seen {i}": number for i, number in enumerate(self.seen)}


@pytest.mark.parametrize("average", [EMA(0.7), slow(SWA())])
@pytest.mark.parametrize(
    ("way", "devices"), [("fsdp", "2xcpu"), slow("ddp", "2xcpu"), slow("ddp=2xfsdp=2", "4xcpu")]
)
def test_a_callback_may_compute_with_an_average(
    average: Callback, way: str, devices: str, tmp_path: Path
) -> None:
    """Found by trial: the size of a shard is not that of the model's parameter, said a
    RuntimeError.
    """
    job = dataclasses.replace(ZOO["mlp"], callbacks=[average, EvaluatesWithin()], precision="fp64")
    one = train(job, devices="1xcpu", folder=tmp_path, quiet=True)
    other = train(job, strategy=way, devices=devices, folder=tmp_path, quiet=True)
    for record, its in zip(one.history, other.history, strict=True):
        numbers = [name for name in record if name.startswith(("seen", "eval", "train"))]
        assert len(numbers) > 10
        assert all(abs(its[name] - record[name]) < BOUND for name in numbers)
