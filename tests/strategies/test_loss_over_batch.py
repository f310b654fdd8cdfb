"""Losses over the whole batch (``loss_over="batch"``): the gradients of one device, however a batch is cut."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import lockstep

from harness import parity  # isort: skip
from lockstep import Job
from lockstep.errors import JobError, LockstepError

BOUND = 1e-10
SAMPLES = 26
"""Batches of 8, and one of 2: three ranks, or micro-batches, leave one without a sample."""


def two_views() -> TensorDataset:
    noise = torch.Generator().manual_seed(0)
    images = torch.randn(SAMPLES, 12, generator=noise)
    other = images + 0.3 * torch.randn(SAMPLES, 12, generator=noise)
    kinds = torch.arange(SAMPLES) % 4
    return TensorDataset(torch.stack([images, other], 1), kinds)


class Encoder(nn.Module):
    """Embeds both views, with dropout: the same numbers are drawn again."""

    def __init__(self, rate: float = 0.0) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(12, 16), nn.Tanh(), nn.Dropout(rate), nn.Linear(16, 6))

    def forward(self, views: Tensor) -> Tensor:
        return self.body(views)


class TwoTowers(nn.Module):
    """CLIP: a tower for each view, and a temperature that is learned."""

    def __init__(self) -> None:
        super().__init__()
        self.image, self.text = nn.Linear(12, 6), nn.Linear(12, 6)
        self.log_scale = nn.Parameter(torch.tensor(0.5))

    def forward(self, views: Tensor) -> dict[str, Tensor]:
        image = F.normalize(self.image(views[:, 0]), dim=-1)
        text = F.normalize(self.text(views[:, 1]), dim=-1)
        return {"image": image * self.log_scale.exp(), "text": text}


def simclr(outputs: Tensor, targets: Tensor) -> Tensor:
    first, second = F.normalize(outputs, dim=-1).unbind(1)
    both = torch.cat([first, second])
    size = len(first)
    logits = (both @ both.T / 0.5).masked_fill(torch.eye(2 * size, dtype=torch.bool), -torch.inf)
    return F.cross_entropy(logits, torch.arange(2 * size).roll(size))


def clip(outputs: dict[str, Tensor], targets: Tensor) -> Tensor:
    logits = outputs["image"] @ outputs["text"].T
    places = torch.arange(len(logits))
    return (F.cross_entropy(logits, places) + F.cross_entropy(logits.T, places)) / 2


def barlow_twins(outputs: Tensor, targets: Tensor) -> Tensor:
    first, second = ((view - view.mean(0)) / (view.std(0) + 1e-3) for view in outputs.unbind(1))
    correlation = first.T @ second / len(first)
    return (correlation - torch.eye(len(correlation))).square().sum()


def vicreg(outputs: Tensor, targets: Tensor) -> Tensor:
    first, second = outputs.unbind(1)
    loss = F.mse_loss(first, second)
    for view in (first, second):
        centred = view - view.mean(0)
        loss = loss + F.relu(1 - (centred.var(0) + 1e-4).sqrt()).mean()
        covariance = centred.T @ centred / (len(view) - 1)
        loss = loss + (covariance - covariance.diag().diag()).square().sum() / view.shape[1]
    return loss


def batch_hard_triplet(outputs: Tensor, kinds: Tensor) -> tuple[Tensor, int]:
    apart = torch.cdist(outputs[:, 0], outputs[:, 1])
    is_same = kinds[:, None] == kinds[None, :]
    furthest = apart.masked_fill(~is_same, -torch.inf).amax(1)
    nearest = apart.masked_fill(is_same, torch.inf).amin(1)
    return F.relu(furthest - nearest + 1.0).sum(), len(kinds)


def supervised_contrast(outputs: Tensor, kinds: Tensor) -> Any:
    features = F.normalize(outputs[:, 0], dim=-1)
    logits = features @ features.T / 0.5
    others = ~torch.eye(len(kinds), dtype=torch.bool)
    positives = (kinds[:, None] == kinds[None, :]) & others
    log_share = logits - logits.masked_fill(~others, -torch.inf).logsumexp(1, keepdim=True)
    pairs = positives.sum()
    total = -(log_share * positives).sum()
    return lockstep.Loss(total, pairs, parts={"pairs": (pairs, len(kinds))})


LOSSES = {
    "simclr": (Encoder, simclr),
    "clip": (TwoTowers, clip),
    "barlow twins": (Encoder, barlow_twins),
    "vicreg": (Encoder, vicreg),
    "batch-hard triplet": (Encoder, batch_hard_triplet),
    "supervised contrast": (Encoder, supervised_contrast),
}

WAYS: list[Any] = [
    ("single", "1xcpu", {"accumulate": 2}),
    pytest.param("single", "1xcpu", {"accumulate": 3}, marks=pytest.mark.slow),
    ("dp", "2xcpu", {}),
    pytest.param("dp", "3xcpu", {"accumulate": 2}, marks=pytest.mark.slow),
    ("ddp", "2xcpu", {}),
    pytest.param("ddp", "3xcpu", {}, marks=pytest.mark.slow),
    pytest.param("ddp", "2xcpu", {"accumulate": 2}, marks=pytest.mark.slow),
    pytest.param("fsdp", "2xcpu", {}, marks=pytest.mark.slow),
    pytest.param("fsdp", "3xcpu", {}, marks=pytest.mark.slow),
    ("pp", "2xcpu", {}),
    pytest.param("ddp=2xpp=2", "4xcpu", {}, marks=pytest.mark.slow),
]


def job_of(loss: str, **settings: Any) -> Job:
    model, function = LOSSES[loss]
    data = two_views()
    return Job(
        model=model,
        loss=function,
        loss_over="batch",
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.05, momentum=0.9),
        train_data=data,
        eval_data=data,
        batch_size=8,
        epochs=2,
        **settings,
    )


@pytest.mark.sweep
@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize(("strategy", "devices", "settings"), WAYS)
def test_a_loss_over_the_batch_has_the_gradients_of_one_device(
    loss: str, strategy: str, devices: str, settings: dict[str, Any]
) -> None:
    job = job_of(loss)
    found = parity(job.replace(**settings), strategy, devices, against_settings={"accumulate": 1})
    assert found.within(BOUND), str(found)


# ---- how often forward runs ----------------------------------------------------------------------


SEEN: list[Tensor] = []
"""Outputs, outside of the model: what it holds is put back between two forwards of a sample."""


class Watched(Encoder):
    """Notes its outputs; BatchNorm and dropout would show a forward that counts twice."""

    def __init__(self) -> None:
        super().__init__(rate=0.5)
        self.norm = nn.BatchNorm1d(12)

    def forward(self, views: Tensor) -> Tensor:
        outputs = super().forward(self.norm(views.transpose(1, 2)).transpose(1, 2))
        if self.training:
            SEEN.append(outputs.detach().clone())
        return outputs


def step_of(model: nn.Module, **settings: Any) -> Any:
    return lockstep.parallelize(
        model,
        simclr,
        lambda parameters: torch.optim.SGD(parameters, lr=0.1),
        loss_over="batch",
        **settings,
    )


@pytest.mark.filterwarnings("ignore:BatchNorm", "ignore:dropout")
@pytest.mark.parametrize(
    ("strategy", "accumulate", "forwards", "twice", "of_model"),
    [
        ("single", 2, 2, {1, 2, 3}, 2),
        ("dp", 1, 2, set(), 1),
        ("dp", 2, 4, {1, 2, 3}, 2),
        # The first update computes one micro-batch after the other.
        ("pp", 1, 4, {1}, 4),
        ("pp", 2, 8, {1, 2, 3}, 8),
        ("mp", 1, 1, set(), 1),
    ],
)
def test_forward_runs_again_only_where_backward_begins_before_the_last_forward(
    strategy: str, accumulate: int, forwards: int, twice: set[int], of_model: int
) -> None:
    model = Watched()
    devices = "1xcpu" if strategy == "single" else "2xcpu"
    step = step_of(model, strategy=strategy, devices=devices, accumulate=accumulate)
    views, kinds = two_views().tensors
    for update in range(1, 4):
        SEEN.clear()
        result = step(views[:16], kinds[:16])
        first, again = (
            sorted(outputs, key=lambda outputs: float(outputs.sum()))
            for outputs in (SEEN[:forwards], SEEN[forwards:])
        )
        assert len(first) == forwards and len(again) == forwards * (update in twice)
        assert all(map(torch.equal, first, again))
        assert int(model.norm.num_batches_tracked) == update * of_model
        assert result.count == 16 and result.loss > 0


def outputs_once(world: lockstep.World, strategy: str) -> tuple[list[int], float]:
    step = step_of(Watched(), strategy=strategy)
    views, kinds = two_views().tensors
    mine = slice(world.rank, 16, 2)
    forwards = []
    for _ in range(2):
        SEEN.clear()
        result = step(views[mine], kinds[mine])
        forwards.append(len(SEEN))
    return forwards, result.loss


@pytest.mark.parametrize(
    ("strategy", "devices", "each", "forwards"),
    [("ddp", "2xcpu", 1, [1, 1]), ("ddp=2xpp=2", "4xcpu", 2, [8, 4])],
)
def test_ranks_compute_forward_once(
    strategy: str, devices: str, each: int, forwards: list[int]
) -> None:
    (first, loss), (second, other) = lockstep.launch(
        outputs_once, devices=devices, devices_per_rank=each, args=(strategy,)
    )
    assert first == second == forwards and loss == other


class FailsOnZeros(Encoder):
    def forward(self, views: Tensor) -> Tensor:
        if not views.any():
            raise ValueError("these views are empty")
        return super().forward(views)


def fails_on_negative(outputs: Tensor, kinds: Tensor) -> Tensor:
    if kinds.min() < 0:
        raise ValueError("this kind is negative")
    return simclr(outputs, kinds)


@pytest.mark.parametrize("strategy", ["dp", "pp"])
def test_an_error_ends_the_waiting_of_the_others(strategy: str) -> None:
    step = lockstep.parallelize(
        FailsOnZeros(),
        fails_on_negative,
        lambda parameters: torch.optim.SGD(parameters, lr=0.1),
        strategy=strategy,
        devices="2xcpu",
        loss_over="batch",
    )
    views, kinds = two_views()[:8]
    step(views, kinds)
    for rows in (slice(4, 8), slice(0, 4)):
        wrong = views.clone()
        wrong[rows] = 0
        with pytest.raises(ValueError, match="these views are empty"):
            step(wrong, kinds)
    with pytest.raises(ValueError, match="this kind is negative"):
        step(views, kinds - 1)
    assert step(views, kinds).count == 8


@pytest.mark.parametrize("strategy", ["dp", "pp"])
def test_fp16_scales_what_is_differentiated(strategy: str) -> None:
    """Gradients of a small loss would be 0 in fp16 otherwise, or have few digits."""

    def small(outputs: Tensor, kinds: Tensor) -> Tensor:
        return simclr(outputs.float(), kinds) * 1e-6

    moved = []
    for how, precision in (("single", "fp32"), (strategy, "fp16")):
        torch.manual_seed(0)
        model = Encoder()
        before = nn.utils.parameters_to_vector(model.parameters()).detach().clone()
        step = lockstep.parallelize(
            model,
            small,
            lambda parameters: torch.optim.SGD(parameters, lr=1e4),
            strategy=how,
            devices="1xcpu" if how == "single" else "2xcpu",
            loss_over="batch",
            precision=precision,
        )
        step(*two_views()[:7])
        after = nn.utils.parameters_to_vector(model.parameters()).detach()
        moved.append(after - before)
    exact, found = moved
    assert (found - exact).norm() < 0.01 * exact.norm()


def test_what_a_loss_computes_without_autocast_is_differentiated_without() -> None:
    kept: list[Tensor] = []

    def in_fp32(outputs: Tensor, kinds: Tensor) -> Tensor:
        with torch.autocast("cpu", enabled=False):
            outputs = outputs.float()
            outputs.register_hook(kept.append)
            return simclr(outputs, kinds)

    for devices, strategy in (("1xcpu", "single"), ("2xcpu", "dp")):
        torch.manual_seed(0)
        step = lockstep.parallelize(
            Encoder(),
            in_fp32,
            lambda parameters: torch.optim.SGD(parameters, lr=0.1),
            strategy=strategy,
            devices=devices,
            loss_over="batch",
            precision="bf16",
        )
        step(*two_views()[:8])
    plain, over_replicas = kept
    torch.testing.assert_close(over_replicas, plain, rtol=1e-5, atol=1e-7)


class GoesBack(nn.Module):
    """Goes back to its first layer where a sample is large."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(6, 6), nn.Linear(6, 6)

    def forward(self, views: Tensor) -> Tensor:
        hidden = self.second(self.first(views[..., :6]).tanh()).tanh()
        return self.first(hidden).tanh() if views.max() > 50 else hidden


@pytest.mark.filterwarnings("ignore:micro-batches pass")
@pytest.mark.parametrize("large", [0, 7])
def test_a_micro_batch_that_takes_another_way_is_waited_for(large: int) -> None:
    views, kinds = (tensor.double() for tensor in two_views()[:8])
    others = views.clone()
    others[large] = 100
    weights = []
    for strategy, devices, accumulate in (("single", "1xcpu", 4), ("pp", "2xcpu", 1)):
        torch.manual_seed(0)
        settings = {"strategy": strategy, "devices": devices, "accumulate": accumulate}
        step = step_of(GoesBack().double(), **settings)
        for batch in (views, others, views):
            step(batch, kinds)
        weights.append(step.state_dict()["model"])
    for name, weight in weights[0].items():
        torch.testing.assert_close(weights[1][name], weight, rtol=BOUND, atol=BOUND)


@pytest.mark.parametrize(
    ("strategy", "devices", "accumulate"), [("dp", "2xcpu", 1), ("single", "1xcpu", 2)]
)
def test_verify_counts_each_sample_once(strategy: str, devices: str, accumulate: int) -> None:
    job = job_of("simclr", accumulate=accumulate)
    assert lockstep.verify(job, strategy=strategy, devices=devices).equal


# ---- loops of one's own --------------------------------------------------------------------------


def own_loop(world: lockstep.World | None, strategy: str) -> tuple[dict[str, Any], list[float]]:
    """Train by hand; ranks have 3, 3, 2 samples, then one has none."""
    torch.manual_seed(0)
    model = TwoTowers().double()
    where: dict[str, Any] = {} if world is not None else {"devices": "1xcpu"}
    if strategy == "dp":
        where = {"devices": "3xcpu"}
    step = lockstep.parallelize(
        model,
        clip,
        lambda parameters: torch.optim.SGD(parameters, lr=0.1),
        strategy=strategy,
        loss_over="batch",
        **where,
    )
    views, kinds = (tensor.double() for tensor in two_views().tensors)
    losses = []
    for start, end in ((0, 8), (8, 16), (16, 18)):
        rows = torch.arange(start, end)
        if world is not None:
            rows = rows.tensor_split(world.size)[world.rank]
        if len(rows):
            losses.append(step(views[rows], kinds[rows]).loss)
            _, total, count = step.evaluate(views[rows], kinds[rows])
        else:
            losses.append(step(None).loss)
            _, total, count = step.evaluate(None)
        sums = torch.tensor([float(total), float(count)], dtype=torch.float64)
        if world is not None:
            world.all_reduce(sums)
        losses.append(float(sums[0] / sums[1]))
    return step.state_dict()["model"], losses


@pytest.mark.parametrize("strategy", ["dp", "ddp"])
def test_a_loop_of_ones_own_has_the_results_of_one_device(strategy: str) -> None:
    weights, losses = own_loop(None, "single")
    if strategy == "dp":
        found, of_strategy = own_loop(None, "dp")
    else:
        found, of_strategy = lockstep.launch(own_loop, devices="3xcpu", args=("ddp",))[0]
    assert of_strategy == pytest.approx(losses, rel=BOUND)
    for name, weight in weights.items():
        torch.testing.assert_close(found[name], weight, rtol=BOUND, atol=BOUND)


def order_in_the_loss(world: lockstep.World) -> list[float]:
    seen: list[Any] = []

    def loss(outputs: Tensor, targets: Tensor) -> Tensor:
        seen.append(targets.tolist())
        return outputs.sum()

    step = lockstep.parallelize(
        nn.Linear(1, 1),
        loss,
        lambda parameters: torch.optim.SGD(parameters, lr=0.1),
        strategy="ddp",
        loss_over="batch",
        accumulate=2,
    )
    rows = torch.arange(8.0).tensor_split(world.size)[world.rank]
    step(rows[:, None], rows)
    return seen[-1]


def test_a_loss_gets_the_local_batches_of_a_loop_of_ones_own_one_after_the_other() -> None:
    """Each rank cuts its own local batch in micro-batches."""
    for found in lockstep.launch(order_in_the_loss, devices="2xcpu"):
        assert found == list(range(8))


class Spectrum(Encoder):
    """Has complex outputs beside real ones."""

    def forward(self, views: Tensor) -> Any:
        found = super().forward(views)
        return torch.fft.fft(found), found


def spectral(outputs: Any, kinds: Tensor) -> Tensor:
    spectrum, found = outputs
    rows = spectrum.flatten(1)
    likeness = (rows @ rows.conj().T).abs()
    return likeness.logsumexp(1).mean() + found.square().mean()


@pytest.mark.parametrize(("strategy", "devices"), [("dp", "2xcpu"), ("ddp", "2xcpu")])
def test_complex_outputs_have_gradients(strategy: str, devices: str) -> None:
    job = job_of("simclr").replace(model=Spectrum, loss=spectral)
    found = parity(job, strategy, devices)
    assert found.within(BOUND), str(found)


# ---- what is refused -----------------------------------------------------------------------------


def found_in_the_batch(outputs: dict[str, Tensor], targets: Tensor) -> tuple[Tensor, int]:
    """Compare a sample with the others of its local batch."""
    first, second = list(outputs.values())[:2]
    right = (first @ second.T).argmax(dim=1) == torch.arange(len(first))
    return right.sum(), len(first)


def test_a_metric_that_compares_samples_is_refused_where_several_devices_evaluate() -> None:
    job = job_of("clip").replace(metrics={"found": found_in_the_batch})
    lockstep.train(job, strategy="single", devices="1xcpu", quiet=True)
    with pytest.raises(LockstepError, match='metric "found"'):
        lockstep.train(job, strategy="dp", devices="2xcpu", quiet=True)


class Balanced(Encoder):
    def forward(self, views: Tensor) -> Any:
        outputs = super().forward(views)
        return outputs, outputs.square().mean()


def test_a_model_that_gives_no_row_for_each_sample_is_refused() -> None:
    job = job_of("simclr").replace(model=Balanced, loss=lambda outputs, kinds: outputs[1])
    message = 'loss_over="batch" needs outputs with a row for each sample, and 4 samples have'
    with pytest.raises(LockstepError, match=re.escape(message)):
        lockstep.train(job, strategy="dp", devices="2xcpu", quiet=True)


def ragged(samples: list[Any]) -> Any:
    """Pads to another length for the samples of each local batch."""
    views = torch.stack([view for view, _ in samples])
    length = 2 + int(sum(kind for _, kind in samples)) % 3
    return F.pad(views, (0, 0, 0, length - 2)), torch.stack([kind for _, kind in samples])


def test_whole_batches_of_one_device_need_no_rows() -> None:
    job = job_of("simclr").replace(model=Balanced, loss=lambda outputs, kinds: outputs[1])
    run = lockstep.train(job, strategy="single", devices="1xcpu", quiet=True)
    assert run.metrics["loss"] > 0


def test_outputs_that_differ_in_other_dimensions_are_refused() -> None:
    job = job_of("simclr").replace(collate=ragged, loss=lambda outputs, kinds: outputs.mean())
    with pytest.raises(LockstepError, match="differ in the first dimension only"):
        lockstep.train(job, strategy="ddp", devices="2xcpu", quiet=True)


def test_a_part_of_a_batch_is_refused() -> None:
    step = lockstep.parallelize(
        Encoder(),
        simclr,
        lambda parameters: torch.optim.SGD(parameters, lr=0.1),
        devices="2xcpu",
        loss_over="batch",
    )
    with pytest.raises(LockstepError, match="needs the whole batch"):
        step.backward(*two_views()[:8])


def test_hogwild_and_step_functions_are_refused() -> None:
    with pytest.raises(LockstepError, match="take ddp"):
        lockstep.train(job_of("simclr"), strategy="hogwild", devices="2xcpu", quiet=True)
    with pytest.raises(JobError, match="loss_over"):
        Job(
            model=lambda: {"encoder": Encoder()},
            step=lambda models, batch, update: None,
            optimizer={"encoder": torch.optim.SGD},
            loss_over="batch",
            train_data=two_views(),
            batch_size=8,
        )
