"""The heart of the suite: every strategy ends where one device would have, in float64."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrize, prune
from torch.utils.data import TensorDataset

import lockstep
from lockstep import Job, train
from lockstep.callbacks import Freeze
from lockstep.errors import InputError, LossError, RunError, StrategyError
from lockstep.strategies import named
from lockstep.strategies.ddp import DDP
from lockstep.strategies.dp import DP
from lockstep.strategies.pp import PP
from lockstep.strategies.single import Single
from lockstep.strategies.strategy import Strategy
from lockstep.tensors.seeding import seeded
from lockstep.training.run import Run

from harness import differences, parity, same_bits  # isort: skip
from batch_dependent_models import Averaging, Clamping, Jittering, Noisy, SelfWriting  # isort: skip
from zoo import ZOO, Gappy, drawn, labels, mlp, plain_sgd, sgd, slow  # isort: skip

BOUND = 1e-10
WAYS: dict[str, Strategy] = {
    "dp": DP(),
    "ddp flat": DDP(reduce="flat"),
    "ddp overlapped": DDP(reduce="overlapped"),
}


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Run]:
    return {}


def _is_fast(number: int, way: str, devices: int) -> bool:
    """Each kind once under dp and once under ddp, in turn with two and three devices, flat and
    overlapped.
    """
    if way == "dp":
        return number % 2 == devices - 2
    return number % 4 == (devices - 2) + 2 * (way == "ddp overlapped")


@pytest.mark.sweep
@pytest.mark.parametrize(
    ("kind", "way", "devices"),
    [
        pytest.param(
            kind, way, devices, marks=() if _is_fast(number, way, devices) else pytest.mark.slow
        )
        for number, kind in enumerate(ZOO)
        for way in WAYS
        for devices in (2, 3)
    ],
)
def test_a_strategy_ends_where_one_device_does(
    kind: str, way: str, devices: int, reference, tmp_path_factory
) -> None:
    job = ZOO[kind].replace(precision="fp64")
    if kind not in reference:
        reference[kind] = train(
            job,
            strategy="single",
            devices="1xcpu",
            folder=tmp_path_factory.mktemp("single"),
            quiet=True,
        )
    run = train(
        job,
        strategy=WAYS[way],
        devices=f"{devices}xcpu",
        folder=tmp_path_factory.mktemp("run"),
        quiet=True,
    )
    found = differences(job, run, reference[kind])
    assert found.within(BOUND), str(found)
    assert any(found.moved.values())
    assert found.history.get("accuracy", 0.0) == 0.0, (
        "metrics count whole samples, so they are equal to the last digit"
    )


FAST = {
    "ddp=2xpp=2": ("ignored tokens and tied weights", "clipping with accumulation"),
    "ddp=2xpp=2 whole": (
        "sparse gradients, and an empty rank",
        "an empty rank under sync_batchnorm",
    ),
}


@pytest.mark.sweep
@pytest.mark.parametrize(
    ("kind", "way"),
    [
        pytest.param(kind, way, marks=() if kind in FAST[way] else pytest.mark.slow)
        for kind in ZOO
        for way in FAST
        if not (ZOO[kind].sync_batchnorm and "whole" not in way)  # which is refused
    ],
)
def test_replicas_of_stages_end_where_one_device_does(kind: str, way: str, tmp_path) -> None:
    job = ZOO[kind].replace(precision="fp64")
    strategy = named(way.removesuffix(" whole"), microbatches=1 if "whole" in way else 2)
    accumulate = strategy.num_microbatches(job)
    if kind == "a buffer that counts and extra state" and accumulate > 1:
        says = 'forward writes "steps", which the next micro-batch may read'
        with pytest.raises(StrategyError, match=says):
            train(job, strategy=strategy, folder=tmp_path / "refused", quiet=True)
        job = job.replace(accept_differences=True)
    single = train(
        job.replace(accumulate=accumulate),
        strategy="single",
        devices="1xcpu",
        folder=tmp_path / "single",
        quiet=True,
    )
    run = train(job, strategy=strategy, folder=tmp_path, quiet=True)
    found = differences(job, run, single)
    assert found.within(BOUND), str(found)
    assert any(found.moved.values())


@pytest.mark.sweep
@pytest.mark.parametrize("way", WAYS)
def test_a_wrong_weight_of_unequal_shares_would_be_seen(way: str, tmp_path) -> None:
    """The bound means something: a mean over ranks instead of over samples differs by far more."""
    job = ZOO["ignored tokens and tied weights"].replace(precision="fp64")
    mean_of_means = dataclasses.replace(job, loss=_mean_of_halves)
    a = train(mean_of_means, strategy="single", devices="1xcpu", folder=tmp_path / "a", quiet=True)
    b = train(job, strategy=WAYS[way], devices="2xcpu", folder=tmp_path / "b", quiet=True)
    assert differences(job, b, a).worst > 1e-4


def _mean_of_halves(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    cut = (len(outputs) + 1) // 2
    halves = [
        nn.functional.cross_entropy(o, t)
        for o, t in ((outputs[:cut], targets[:cut]), (outputs[cut:], targets[cut:]))
    ]
    return sum(halves) / len(halves)


class Dropping(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(6, 32), nn.Dropout(0.5), nn.ReLU(), nn.Linear(32, 3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(nn.functional.dropout(x, 0.1, self.training))


@pytest.mark.sweep
@pytest.mark.parametrize("way", [Single(), DP(), DDP()], ids=lambda way: way.name)
def test_the_same_seed_twice_gives_the_same_bits_with_dropout(way: Strategy, tmp_path) -> None:
    job = Job(
        model=Dropping,
        loss=nn.CrossEntropyLoss(),
        optimizer=plain_sgd,
        train_data=torch.utils.data.TensorDataset(drawn(50, 6), labels(50, 3)),
        batch_size=8,
        epochs=3,
    )
    devices = "1xcpu" if way.name == "single" else "2xcpu"
    runs = [
        train(job, strategy=way, devices=devices, folder=tmp_path, quiet=True) for _ in range(2)
    ]
    other = train(job, strategy=way, devices=devices, folder=tmp_path, quiet=True, seed=1)
    assert same_bits(runs[0].model(), runs[1].model())
    assert not same_bits(runs[0].model(), other.model())


@pytest.mark.sweep
@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("single", "ddp"),
        ("ddp", "dp"),
        ("dp", "single"),
        slow("mp", "ddp"),
        slow("ddp", "mp"),
    ],
)
@pytest.mark.parametrize(
    "kind", ["adamw with groups by name", "a schedule by step", "convolutions with sync_batchnorm"]
)
def test_a_run_goes_on_under_another_strategy(kind: str, before: str, after: str, tmp_path) -> None:
    job = ZOO[kind].replace(precision="fp64", epochs=2)
    devices = {
        "single": "1xcpu",
        "dp": "3xcpu",
        "ddp": "2xcpu",
        "mp": "2xcpu",
    }
    whole = train(job, strategy="single", devices="1xcpu", folder=tmp_path, quiet=True)
    half = train(
        job, strategy=before, devices=devices[before], folder=tmp_path, quiet=True, epochs=1
    )
    resumed = train(job, strategy=after, devices=devices[after], resume=half.folder, quiet=True)
    assert resumed.folder == half.folder
    assert [record["epoch"] for record in resumed.history] == [1, 2]
    assert differences(job, resumed, whole).worst < BOUND


def test_a_run_that_stopped_within_an_epoch_goes_on_from_there(tmp_path) -> None:
    job = ZOO["momentum"].replace(precision="fp64", epochs=2)
    whole = train(job, strategy="single", devices="1xcpu", folder=tmp_path, quiet=True)
    part = train(job, strategy="ddp", devices="2xcpu", folder=tmp_path, quiet=True, steps=2)
    resumed = train(job, strategy="dp", devices="2xcpu", resume=part.folder, quiet=True)
    assert resumed.summary["steps"] == whole.summary["steps"]
    assert differences(job, resumed, whole).worst < BOUND


def test_the_harness_says_how_far_two_strategies_are_apart() -> None:
    found = parity(ZOO["mlp"], "dp", "2xcpu")
    assert found.worst < BOUND
    assert "largest difference" in str(found)


def by_a_plain_loop(job: Job, model: nn.Module) -> nn.Module:
    """Two epochs of batches of 8."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=1e-3)
    inputs, targets = job.train_data.tensors
    for _ in range(2):
        for x, y in zip(inputs.split(8), targets.split(8), strict=True):
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(x.to(next(model.parameters()).dtype)), y).backward()
            optimizer.step()
    return model


def test_a_parameter_with_gaps_is_trained_as_by_a_plain_loop(tmp_path) -> None:
    """Fused kernels go by address; float64 would hide it, since turning the model to it closes
    the gaps.
    """
    job = ZOO["mlp"].replace(shuffle=False)
    job = dataclasses.replace(job, model=Gappy, optimizer=sgd)
    run = train(job, strategy="single", devices="1xcpu", folder=tmp_path, quiet=True)
    with seeded(job.seed):
        model = Gappy()
    assert torch.allclose(run.model().gappy, by_a_plain_loop(job, model).gappy, atol=1e-5)


class Clamped(nn.Module):
    """Gradients clamped by a hook on a parameter, by one on a tensor, or by an autograd
    function.
    """

    def __init__(self, kind: str, since: int = 1) -> None:
        super().__init__()
        self.kind, self.body, self.out = kind, mlp(), nn.Linear(3, 3)
        self.since = since
        self.register_buffer("calls", torch.zeros((), dtype=torch.long))
        self.double()
        if kind == "parameter":
            self.body[0].weight.register_hook(lambda gradient: gradient.clamp(-1e-3, 1e-3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.body(x)
        self.calls += self.training
        if self.kind == "tensor" and x.requires_grad and self.calls >= self.since:
            x.register_hook(lambda gradient: gradient.clamp(-1e-3, 1e-3))
        return self.out(Clamping.apply(x) if self.kind == "function" else x)


def ignoring(model: Any, since: int = 0) -> Job:
    """A job in which every third target is ignored, from that sample on."""
    inputs, targets = ZOO["mlp"].train_data.tensors
    number = torch.arange(len(targets))
    data = TensorDataset(inputs, targets.where((number % 3 > 0) | (number < since), -100))
    job = ZOO["mlp"].replace(shuffle=False, precision="fp64")
    return dataclasses.replace(job, model=model, optimizer=sgd, train_data=data)


@pytest.mark.sweep
@pytest.mark.parametrize("kind", ["parameter", "tensor", "function", "tensor, later"])
@pytest.mark.parametrize("way", ["single", "mp"])
def test_what_clamps_in_backward_sees_gradients_of_the_mean_over_targets_that_count(
    way, kind, tmp_path
) -> None:
    kind, since = kind.removesuffix(", later"), 4 if "later" in kind else 1
    job = ignoring(lambda: Clamped(kind, since))
    run = train(
        job,
        strategy=way,
        devices="1xcpu" if way == "single" else "2xcpu",
        folder=tmp_path,
        quiet=True,
    )
    with seeded(job.seed):
        plain = by_a_plain_loop(job, Clamped(kind, since))
    for mine, its in zip(run.model().parameters(), plain.parameters(), strict=True):
        assert torch.allclose(mine, its, atol=1e-12)


CUT = {
    "dp": {"strategy": "dp", "devices": "2xcpu"},
    "ddp": {"strategy": "ddp", "devices": "2xcpu"},
    "pp": {"strategy": "pp", "devices": "2xcpu"},
    "accumulate": {"strategy": "single", "devices": "1xcpu", "accumulate": 2},
}


ACCEPTED = {"accept_differences": True}
NO_SUM = 'the gradient of "body.* is not the sum for its parts'


@pytest.mark.parametrize("way", ["ddp", "accumulate"])
def test_hooks_on_parameters_that_are_no_sums_are_said_of_jobs_and_of_own_loops(
    way, tmp_path, capsys, recwarn
) -> None:
    """Found by trial: a job had no line, weights were 2 % off."""
    job = ignoring(lambda: Clamped("parameter"))
    train(job, **CUT[way], folder=tmp_path, **ACCEPTED)
    lines = " ".join(capsys.readouterr().out.split())
    assert re.search(NO_SUM, lines)
    if way == "accumulate":  # (the other way there is one process here)
        where = {"strategy": "single", "devices": "1xcpu", "accumulate": 2}
        step = lockstep.parallelize(Clamped("parameter"), job.loss, sgd, **where, **ACCEPTED)
        step(drawn(8, 6).double(), labels(8, 3))
        assert any(re.search(NO_SUM, str(warned.message)) for warned in recwarn)


@pytest.mark.sweep
@pytest.mark.parametrize("kind", ["tensor", "function"])
@pytest.mark.parametrize("way", CUT)
def test_what_clamps_in_backward_where_batches_are_cut_is_refused(way, kind, tmp_path) -> None:
    """Found by trial: weights up to 13 % off without a line, where not all targets count."""
    job = ignoring(lambda: Clamped(kind))
    with pytest.raises(StrategyError, match=f"in update 1, .*{NO_SUM}"):
        train(job, **CUT[way], folder=tmp_path, quiet=True)
    job = dataclasses.replace(job, train_data=ZOO["mlp"].train_data)
    train(job, **CUT[way], folder=tmp_path, quiet=True)  # where all count, it may clamp


class Unfrozen(nn.Module):
    """Clamps what comes back to a body, where that is trained."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.out = nn.Linear(6, 8), nn.Linear(8, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.body(x).tanh()
        if hidden.requires_grad:
            hidden.register_hook(lambda grad: grad.clamp(-0.002, 0.002))
        out: torch.Tensor = self.out(hidden)
        return out


@pytest.mark.parametrize("later", ["ignored targets", "a trained body"])
@pytest.mark.parametrize("way", [way if way == "dp" else slow(way) for way in CUT])
def test_so_it_is_where_backward_is_not_linear_later_only(
    way: str, later: str, tmp_path: Path
) -> None:
    """Found by trial: weights were up to 16 % off without a line."""
    job = ignoring(lambda: Clamped("tensor"), 2 * ZOO["mlp"].batch_size)
    if later == "a trained body":
        job = ignoring(Unfrozen).replace(callbacks=[Freeze("body", until=2)])
    with pytest.raises(StrategyError, match=f"in update 4, .*{NO_SUM}"):
        train(job, **CUT[way], folder=tmp_path, quiet=True)


@pytest.mark.parametrize("kind", ["tensor", "function"])
def test_what_clamps_in_backward_is_given_the_same_while_gradients_are_summed(
    kind: str, tmp_path
) -> None:
    """Found by trial: it was given so many times the gradient as there are ranks."""
    job = dataclasses.replace(ignoring(lambda: Clamped(kind)), train_data=ZOO["mlp"].train_data)
    single = train(job, strategy="single", devices="1xcpu", folder=tmp_path, quiet=True)
    run = train(
        job, strategy=DDP(reduce="overlapped"), devices="2xcpu", folder=tmp_path, quiet=True
    )
    assert differences(job, run, single).worst < 1e-10


class RarelySparse(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body, self.words = mlp(), nn.Embedding(4, 3, sparse=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rare = x[:, 0] > 1.5
        outputs = self.body(x)
        return (
            outputs.index_add(0, rare.nonzero()[:, 0], self.words(rare[rare].long()))
            if rare.any()
            else outputs
        )


@pytest.mark.parametrize("way", ["ddp", DDP(reduce="overlapped")])
def test_a_sparse_embedding_that_a_rank_does_not_use_is_summed_flat(way: Any) -> None:
    job = dataclasses.replace(ZOO["mlp"], model=RarelySparse, optimizer=plain_sgd)
    assert parity(job, way, devices="2xcpu").worst < 1e-10


class Averaged(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(8, 3, sparse=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.words(x.long().abs().clamp(max=7)).mean(1)


@pytest.mark.parametrize("reduce", ["flat", "overlapped"])
def test_rows_whose_gradients_are_zero_are_rows_of_a_sparse_gradient(reduce: Any) -> None:
    """SparseAdam moves them. Found by trial: weights 5 % off without a line."""
    inputs, targets = ZOO["mlp"].train_data.tensors
    ignored = targets.where(torch.arange(len(targets)) % 3 > 0, -100)
    job = dataclasses.replace(
        ZOO["mlp"], model=Averaged, train_data=TensorDataset(3 * inputs, ignored), eval_data=None
    )
    job = job.replace(
        optimizer=lambda parameters: torch.optim.SparseAdam(list(parameters), lr=0.05)
    )
    assert parity(job, DDP(reduce=reduce), devices="2xcpu").worst < 1e-10


class Renormed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(40, 3, max_norm=1.0)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.words(x.long().abs().clamp(max=39)[:, 0])


class Rescaled(nn.Module):
    """A function rescales rows of words."""

    def __init__(self, *, bag: bool = False) -> None:
        super().__init__()
        self.words, self.bag = nn.Parameter(torch.full((40, 3), 0.1)), bag

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        words = x.long().abs().clamp(max=39)
        embedded = nn.functional.embedding_bag if self.bag else nn.functional.embedding
        return embedded(words if self.bag else words[:, 0], self.words, max_norm=0.1)


class Frequent(nn.Module):
    """An embedding of words, whose gradient is divided by how often they are in the batch."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        bag = nn.EmbeddingBag(40, 3, scale_grad_by_freq=True)
        self.words = {"embedding": nn.Embedding(40, 3, scale_grad_by_freq=True), "bag": bag}.get(
            kind, nn.Embedding(40, 3)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        words = x.long().abs().clamp(max=39)
        if self.kind == "function":
            return nn.functional.embedding(words[:, 0], self.words.weight, scale_grad_by_freq=True)
        return self.words(words if self.kind == "bag" else words[:, 0])


def hooked() -> nn.Module:
    model = mlp()
    model[0].weight.register_hook(lambda grad: grad * 0.1)
    return model


def old_weight_norm() -> nn.Module:
    model = mlp()
    with pytest.warns(FutureWarning, match="deprecated"):
        torch.nn.utils.weight_norm(model[0])
    return model


class Closing(nn.Linear):
    """Its replica computes with the weight of the model that it was copied from."""

    def __init__(self) -> None:
        super().__init__(6, 3)
        self.act = lambda x: x * self.weight.sum()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.act(super().forward(x))


@pytest.mark.sweep
@pytest.mark.parametrize(
    ("model", "ways", "says"),
    [
        (Renormed, ["dp", "ddp"], "the model writes its parameter"),
        (lambda: Frequent("embedding"), ["dp", "ddp"], 'the gradient of "words.weight"'),
        (lambda: Frequent("bag"), ["dp", "ddp"], 'the gradient of "words.weight"'),
        (hooked, ["dp"], "has a hook"),
        (old_weight_norm, ["dp"], "it can't be copied .*weight_norm.* ddp builds it afresh"),
        (old_weight_norm, ["fsdp"], "the graph of a copy"),
    ],
)
def test_what_replicas_can_not_keep_is_refused(model, ways, says, tmp_path) -> None:
    job = dataclasses.replace(ZOO["mlp"], model=model)
    train(job, strategy="single", devices="1xcpu", folder=tmp_path / "single", quiet=True)
    for way in ways:
        with pytest.raises(InputError, match=says):
            train(job, strategy=way, devices="2xcpu", folder=tmp_path / way, quiet=True)
        assert not list((tmp_path / way).iterdir())


def test_a_replica_that_computes_with_the_models_own_weight_is_refused(tmp_path) -> None:
    job = dataclasses.replace(ZOO["mlp"], model=Closing)
    with pytest.raises(StrategyError, match='something that the model holds, uses "weight"'):
        train(job, strategy="dp", devices="2xcpu", folder=tmp_path, quiet=True)


def pruned() -> nn.Module:
    model = mlp()
    prune.l1_unstructured(model[0], "weight", amount=0.5)
    return model


class Mask(nn.Module):
    def __init__(self, mask: torch.Tensor) -> None:
        super().__init__()
        self.register_buffer("mask", mask)

    def forward(self, weight: torch.Tensor) -> torch.Tensor:
        return weight * self.mask


def masked() -> nn.Module:
    """The same layer by a parametrization, as pruning is advised to be replaced."""
    model = pruned()
    mask = model[0].weight_mask
    prune.remove(model[0], "weight")
    parametrize.register_parametrization(model[0], "weight", Mask(mask))
    return model


def test_pruned_layers_are_refused_with_what_to_do(tmp_path) -> None:
    job = ZOO["mlp"].replace(model=pruned, precision="fp64", epochs=1)
    for way, says in (
        ("dp", "it can't be copied .* ddp builds it afresh"),
        ("fsdp", "weight_orig"),
    ):
        with pytest.raises(InputError, match=says):
            train(job, strategy=way, devices="2xcpu", folder=tmp_path, quiet=True)
    one = train(job, strategy="single", devices="1xcpu", folder=tmp_path, quiet=True)
    two = train(
        job.replace(model=masked), strategy="dp", devices="2xcpu", folder=tmp_path, quiet=True
    )
    assert two.history[0]["eval_loss"] == pytest.approx(one.history[0]["eval_loss"], abs=1e-12)


@pytest.mark.parametrize("kind", ["embedding", "bag", "function"])
@pytest.mark.parametrize("way", ["single", slow("pp")])
def test_frequencies_in_a_micro_batch_are_refused(kind: str, way: str, tmp_path) -> None:
    """Found by trial: 0.2 % off without a line where a function scales."""
    job = ZOO["mlp"].replace(model=lambda: nn.Sequential(Frequent(kind), nn.Linear(3, 3)))
    strategy, devices = (PP(microbatches=2), "2xcpu") if way == "pp" else (way, "1xcpu")
    accumulate = 2 if way == "single" else 1
    with pytest.raises(StrategyError, match=r'the gradient of "0.words.weight" .* not the sum'):
        train(
            job.replace(accumulate=accumulate),
            strategy=strategy,
            devices=devices,
            folder=tmp_path,
            quiet=True,
        )


@pytest.mark.sweep
@pytest.mark.parametrize(
    ("way", "samples", "settings", "says"),
    [
        (
            "dp",
            19,
            {},
            "step 3: BatchNorm was given one sample only, of a batch of 3: choose a batch_size",
        ),
        (
            "ddp",
            19,
            {},
            "step 3: BatchNorm was given one sample only, of a batch of 3: choose a batch_size",
        ),
        (
            "hogwild",
            19,
            {},
            "of a batch of 3: choose a batch_size, or fewer micro-batches, that leaves",
        ),
        (
            "dp",
            17,
            {"sync_batchnorm": True},
            "of a batch of 1: choose a batch_size, or fewer micro-batches, that leaves",
        ),
        (
            "single",
            17,
            {},
            "of a batch of 1: choose a batch_size, or fewer micro-batches, that leaves",
        ),
        ("pp", 19, {}, "of a batch of 3: choose a batch_size, or fewer micro-batches, that leaves"),
    ],
)
def test_a_share_of_one_sample_is_told_what_batch_norm_needs(
    way, samples, settings, says, tmp_path
) -> None:
    data = TensorDataset(drawn(samples, 6), labels(samples, 3))
    job = dataclasses.replace(
        ZOO["mlp"],
        model=lambda: nn.Sequential(nn.Linear(6, 4), nn.BatchNorm1d(4), nn.Linear(4, 3)),
        train_data=data,
    ).replace(**settings)
    devices = "1xcpu" if way == "single" else "2xcpu"
    with pytest.raises(RunError, match=re.escape(says)):
        train(job, strategy=way, devices=devices, folder=tmp_path, quiet=True)
    if settings.get("sync_batchnorm") or way != "dp":
        return
    train(
        job, strategy=way, devices=devices, folder=tmp_path, quiet=True, sync_batchnorm=True
    )  # as it was told


def test_ranks_whose_parameters_come_to_differ_are_stopped(tmp_path) -> None:
    job = dataclasses.replace(ZOO["mlp"], optimizer=lambda params: Jittering(params, lr=0.1))
    with pytest.raises(RunError, match=r'parameter "0\.weight" is no longer the same on all ranks'):
        train(job, strategy="ddp", devices="2xcpu", folder=tmp_path, quiet=True)


@pytest.mark.parametrize("way", ["dp", "ddp"])
def test_a_buffer_that_depends_on_the_share_is_refused_or_said(way: str, tmp_path, capsys) -> None:
    job = dataclasses.replace(ZOO["mlp"], model=Averaging, eval_data=None, metrics={})
    where: dict[str, Any] = {"strategy": way, "devices": "2xcpu", "folder": tmp_path}
    with pytest.raises(
        StrategyError, match=r"samples influence one another in the model \(Averaging"
    ):
        train(job, **where, quiet=True)
    train(job, **where, **ACCEPTED)
    said = capsys.readouterr().out
    assert 'note: "seen" is written from the local batch' in said
    assert said.count("note: results depend on where a batch is cut: in update 1") == 1


def test_a_loss_over_pairs_is_refused_where_every_share_is_one_sample(tmp_path) -> None:
    def pairs(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return nn.functional.cross_entropy(outputs @ outputs.T, torch.arange(len(outputs)))

    for way in ("dp", "ddp"):
        with pytest.raises(LossError, match="not a mean over samples"):
            train(
                ZOO["mlp"].replace(batch_size=2, loss=pairs),
                strategy=way,
                devices="2xcpu",
                folder=tmp_path,
                quiet=True,
            )


@pytest.mark.slow
def test_epochs_of_different_lengths_are_resumed_in_their_middle(tmp_path) -> None:
    lengths = [16, 29, 8, 24]
    job = ZOO["momentum"].replace(
        precision="fp64", epochs=4, order=lambda epoch: torch.arange(lengths[epoch])
    )
    whole = train(job, strategy="single", devices="1xcpu", folder=tmp_path, quiet=True)
    assert whole.summary["steps"] == 2 + 4 + 1 + 3
    for steps in (4, 7):
        part = train(job, strategy="ddp", devices="2xcpu", folder=tmp_path, quiet=True, steps=steps)
        resumed = train(job, strategy="dp", devices="2xcpu", resume=part.folder, quiet=True)
        found = differences(job, resumed, whole)
        assert found.worst < BOUND
        assert max(found.history.values()) < BOUND, (
            "the record at the end of the interrupted epoch is over all of it"
        )


@pytest.mark.parametrize(
    ("checks", "says"),
    [
        (None, "results depend on where a batch is cut: in update 1"),
        (0, "took a branch without this batch norm"),
    ],
)
def test_a_batch_norm_that_one_replica_skips_is_named_instead_of_waited_for(
    checks: int | None, says: str, tmp_path
) -> None:
    class Branching(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm, self.out = nn.BatchNorm1d(6), nn.Linear(6, 3)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.out(self.norm(x) if bool((x[:, 0] > 1.5).any()) else x)

    job = dataclasses.replace(ZOO["mlp"], model=Branching, check_every=checks)
    with pytest.raises(Exception, match=says):
        train(job, strategy="dp", devices="2xcpu", folder=tmp_path, quiet=True, sync_batchnorm=True)


@pytest.mark.sweep
@pytest.mark.parametrize(
    "model", [SelfWriting, lambda: SelfWriting(10), Rescaled, lambda: Rescaled(bag=True)]
)
@pytest.mark.parametrize("way", ["dp", "ddp", "fsdp"])
def test_a_parameter_that_forward_writes_is_refused(way: str, model: Any, tmp_path) -> None:
    job = dataclasses.replace(ZOO["mlp"], model=model)
    with pytest.raises(StrategyError, match=r'writes its parameter "\w+" in forward'):
        train(job, strategy=way, devices="2xcpu", folder=tmp_path, quiet=True)


@pytest.mark.parametrize("way", ["dp", "ddp"])
def test_a_model_that_draws_in_forward_is_said(way: str, tmp_path, capsys) -> None:
    job = dataclasses.replace(ZOO["mlp"], model=Noisy)
    train(job, strategy=way, devices="2xcpu", folder=tmp_path)
    assert capsys.readouterr().out.count("note: the model draws random numbers in forward") == 1


@pytest.mark.parametrize("accumulate", [1, 2])
def test_pytorchs_line_on_unused_parameters_is_left_out(accumulate: int, tmp_path, capfd) -> None:
    job = ZOO["mlp"].replace(accumulate=accumulate)
    train(job, strategy=DDP(reduce="overlapped"), devices="2xcpu", folder=tmp_path)
    assert "find_unused_parameters" not in "".join(capfd.readouterr())


def test_sparse_gradients_are_clipped_as_dense_ones(tmp_path) -> None:
    job = ZOO["sparse gradients that are clipped"].replace(precision="fp64")

    def dense() -> nn.Module:
        model = job.model()
        model.embedding.sparse = False
        return model

    runs = [
        train(j, strategy="single", devices="1xcpu", folder=tmp_path, quiet=True)
        for j in (job, dataclasses.replace(job, model=dense))
    ]
    assert differences(job, *runs).worst < BOUND


class Padded(nn.Module):
    """An encoder of sequences with padding, all of whose places the loss reads."""

    def __init__(self) -> None:
        super().__init__()
        self.words, layer = (
            nn.Embedding(11, 8),
            nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True),
        )
        self.encoder, self.out = nn.TransformerEncoder(layer, 1), nn.Linear(8, 3)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.out(self.encoder(self.words(tokens), src_key_padding_mask=tokens == 0).mean(1))


@pytest.mark.parametrize("way", ["dp", "mp"])
def test_padding_is_evaluated_alike(way: str) -> None:
    """Found by trial: the loss of evaluations was 16 % off without a line."""
    tokens = torch.randint(1, 11, (29, 6), generator=torch.Generator().manual_seed(3))
    tokens[torch.arange(6) >= 2 + torch.arange(29)[:, None] % 5] = 0
    data = TensorDataset(tokens, labels(29, 3))
    job = dataclasses.replace(ZOO["mlp"], model=Padded, train_data=data, eval_data=data)
    assert max(parity(job, way, "2xcpu").history.values()) < BOUND
