"""What else of a person's own sees a sharded model as one device has it: callbacks of other forms, and their state."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lockstep import Callback, train
from lockstep.callbacks import EMA, SWA, Sampler

from zoo import ZOO, drawn, slow  # isort: skip

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
        return {"norm": norm_of(self.model), "first": next(self.model.parameters()).flatten().tolist()}

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
    one, other = (trained(of_methods_of_its_own(), where | {"folder": tmp_path}) for where in (SINGLE, FSDP))
    assert (weights(one) - weights(other)).abs().max() < BOUND
    unbound = trained(Callback(), SINGLE | {"folder": tmp_path})
    assert (weights(one) - weights(unbound)).abs().max() > 0.01


@pytest.mark.slow
def test_a_function_of_sampler_sees_whole_parameters(tmp_path: Path) -> None:
    """Found by trial: the norm was of rank 0's shard."""
    runs = [trained(Sampler(as_text), where | {"folder": tmp_path}) for where in (SINGLE, FSDP)]
    one, other = ([float(f.read_text()) for f in sorted((run.folder / "samples").iterdir())] for run in runs)
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


def test_an_array_of_a_shard_can_not_be_written_to(tmp_path: Path) -> None:
    """Found by trial: what was written to it was lost."""
    with pytest.raises(Exception, match="read-only"):
        trained(WritesArray(), FSDP | {"folder": tmp_path})


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
    one, other = (trained(Empty(), where | {"folder": tmp_path}) for where in (SINGLE, FSDP | {"devices": "4xcpu"}))
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
    where = {"strategy": way, "devices": "1xcpu" if way == "single" else "2xcpu", "folder": tmp_path}
    run = trained(Zeroed(), where)
    assert all((p == 0.1).all() for p in run.model(best=True).parameters())
    assert not any((p == 0.1).all() for p in run.model().parameters())


class EvaluatesWithin(Callback):
    """Computes with the weights that are evaluated, an average, between computations with those that are trained."""

    def on_step(self, training: Any) -> None:
        x = drawn(4, 6).double()
        row = next(training.model.parameters()).detach()[0]
        self.seen = [norm_of(training.model), float(training.model(x).detach().square().sum())]
        with training.evaluating():
            weights = training.model.state_dict()
            self.seen += [norm_of(training.model), float(training.model(x).square().sum()), float(row.norm())]
            self.seen += [float(value.double().norm()) for value in weights.values()]
        self.seen += [norm_of(training.model), float(training.model(x).detach().square().sum()), float(row.norm())]

    def on_evaluated(self, training: Any) -> None:
        training.metrics |= {f"seen {i}": number for i, number in enumerate(self.seen)}


@pytest.mark.parametrize("average", [EMA(0.7), slow(SWA())])
@pytest.mark.parametrize(("way", "devices"), [("fsdp", "2xcpu"), slow("ddp", "2xcpu"), slow("ddp=2xfsdp=2", "4xcpu")])
def test_a_callback_may_compute_with_an_average(average: Callback, way: str, devices: str, tmp_path: Path) -> None:
    """Found by trial: the size of a shard is not that of the model's parameter, said a RuntimeError."""
    job = dataclasses.replace(ZOO["mlp"], callbacks=[average, EvaluatesWithin()], precision="fp64")
    one = train(job, devices="1xcpu", folder=tmp_path, quiet=True)
    other = train(job, strategy=way, devices=devices, folder=tmp_path, quiet=True)
    for record, its in zip(one.history, other.history, strict=True):
        numbers = [name for name in record if name.startswith(("seen", "eval", "train"))]
        assert len(numbers) > 10
        assert all(abs(its[name] - record[name]) < BOUND for name in numbers)
