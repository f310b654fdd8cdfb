"""A loss as (total, count): equal to PyTorch's mean, and additive over any cut of the batch."""

from __future__ import annotations

import collections
import copy
import functools
import itertools
import pickle
import threading
from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import cloudpickle
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lockstep.errors import LossError
from lockstep.model.losses.loss import Loss, Totalled
from lockstep.model.losses.loss_check import LossCheck

N, C = 13, 5


@pytest.fixture(autouse=True)
def _float64() -> Any:
    torch.manual_seed(7)
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(before)


def weights() -> Tensor:
    return torch.tensor([0.5, 2.0, 1.0, 0.1, 3.0], dtype=torch.float64)


def logits(*shape: int) -> Tensor:
    return torch.randn(*shape)


def classes(*shape: int, ignored: int | None = None) -> Tensor:
    targets = torch.randint(0, C, shape)
    if ignored is not None:
        targets[torch.rand(shape) < 0.4] = ignored
        targets.view(-1)[0] = 1
    return targets


def log_probs(*shape: int) -> Tensor:
    return torch.randn(*shape).log_softmax(1)


def case(
    loss: Callable[[], Any], outputs: Callable[[], Tensor], targets: Callable[[], Tensor]
) -> Any:
    return loss, outputs, targets


def ce(**options: Any) -> Callable[[], nn.Module]:
    return lambda: nn.CrossEntropyLoss(**{k: v() if callable(v) else v for k, v in options.items()})


SPATIAL = (N, C, 3, 2)
CASES = {
    "ce": case(ce(), lambda: logits(N, C), lambda: classes(N)),
    "ce ignoring": case(ce(), lambda: logits(N, C), lambda: classes(N, ignored=-100)),
    "ce ignoring a class": case(ce(ignore_index=2), lambda: logits(N, C), lambda: classes(N)),
    "ce ignoring beyond the classes": case(
        ce(ignore_index=255), lambda: logits(N, C), lambda: classes(N, ignored=255)
    ),
    "ce weighted": case(ce(weight=weights), lambda: logits(N, C), lambda: classes(N)),
    "ce weighted ignoring": case(
        ce(weight=weights), lambda: logits(N, C), lambda: classes(N, ignored=-100)
    ),
    "ce weighted ignoring 255": case(
        ce(weight=weights, ignore_index=255), lambda: logits(N, C), lambda: classes(N, ignored=255)
    ),
    "ce smoothed": case(
        ce(label_smoothing=0.2), lambda: logits(N, C), lambda: classes(N, ignored=-100)
    ),
    "ce smoothed weighted": case(
        ce(label_smoothing=0.2, weight=weights),
        lambda: logits(N, C),
        lambda: classes(N, ignored=-100),
    ),
    "ce bytes": case(ce(), lambda: logits(N, C), lambda: classes(N).byte()),
    "ce spatial": case(ce(), lambda: logits(*SPATIAL), lambda: classes(N, 3, 2, ignored=-100)),
    "ce spatial weighted smoothed": case(
        ce(label_smoothing=0.1, weight=weights),
        lambda: logits(*SPATIAL),
        lambda: classes(N, 3, 2, ignored=-100),
    ),
    "ce probabilities": case(ce(), lambda: logits(N, C), lambda: logits(N, C).softmax(1)),
    "ce probabilities weighted smoothed": case(
        ce(label_smoothing=0.1, weight=weights),
        lambda: logits(*SPATIAL),
        lambda: logits(*SPATIAL).softmax(1),
    ),
    "F.cross_entropy": case(
        lambda: F.cross_entropy, lambda: logits(N, C), lambda: classes(N, ignored=-100)
    ),
    "partial cross_entropy": case(
        lambda: functools.partial(F.cross_entropy, weight=weights(), ignore_index=1),
        lambda: logits(N, C),
        lambda: classes(N),
    ),
    "nll": case(nn.NLLLoss, lambda: log_probs(N, C), lambda: classes(N, ignored=-100)),
    "nll weighted": case(
        lambda: nn.NLLLoss(weight=weights(), ignore_index=3),
        lambda: log_probs(*SPATIAL),
        lambda: classes(N, 3, 2),
    ),
    "F.nll_loss": case(
        lambda: F.nll_loss, lambda: log_probs(N, C), lambda: classes(N, ignored=-100)
    ),
    "mse": case(nn.MSELoss, lambda: logits(N, C), lambda: logits(N, C)),
    "mse flat": case(nn.MSELoss, lambda: logits(N), lambda: logits(N)),
    "F.mse_loss": case(lambda: F.mse_loss, lambda: logits(N, C), lambda: logits(N, C)),
    "l1": case(nn.L1Loss, lambda: logits(N, C), lambda: logits(N, C)),
    "smooth l1": case(
        lambda: nn.SmoothL1Loss(beta=0.3), lambda: logits(N, C), lambda: logits(N, C)
    ),
    "smooth l1 sharp": case(
        lambda: nn.SmoothL1Loss(beta=0.0), lambda: logits(N, C), lambda: logits(N, C)
    ),
    "huber": case(lambda: nn.HuberLoss(delta=0.4), lambda: logits(N, C), lambda: logits(N, C)),
    "bce": case(nn.BCELoss, lambda: torch.rand(N, C), lambda: torch.rand(N, C)),
    "bce weighted": case(
        lambda: nn.BCELoss(weight=weights()), lambda: torch.rand(N, C), lambda: torch.rand(N, C)
    ),
    "bce logits": case(nn.BCEWithLogitsLoss, lambda: logits(N), lambda: torch.rand(N)),
    "bce logits weighted": case(
        lambda: nn.BCEWithLogitsLoss(weight=weights(), pos_weight=weights().flip(0)),
        lambda: logits(N, C),
        lambda: torch.rand(N, C),
    ),
    "kl": case(nn.KLDivLoss, lambda: log_probs(N, C), lambda: logits(N, C).softmax(1)),
    "kl batchmean": case(
        lambda: nn.KLDivLoss(reduction="batchmean"),
        lambda: log_probs(*SPATIAL),
        lambda: logits(*SPATIAL).softmax(1),
    ),
    "kl log": case(
        lambda: nn.KLDivLoss(reduction="batchmean", log_target=True),
        lambda: log_probs(N, C),
        lambda: log_probs(N, C),
    ),
}

silent = pytest.mark.filterwarnings("ignore:reduction. 'mean' divides")


@silent
@pytest.mark.parametrize("name", CASES)
def test_pytorchs_means_are_total_over_count_for_any_cut(name: str) -> None:
    make, make_outputs, make_targets = CASES[name]
    loss, targets = make(), make_targets()
    outputs = make_outputs().requires_grad_()
    mean = loss(outputs, targets)
    (wanted,) = torch.autograd.grad(mean, outputs)
    summed = Totalled(loss)
    assert summed.is_known
    for _ in range(6):
        ends = sorted({0, N, *torch.randint(1, N, (3,)).tolist()})
        pieces = [summed(outputs[a:b], targets[a:b], b - a) for a, b in itertools.pairwise(ends)]
        total = sum(t for t, _ in pieces)
        count = sum(c for _, c in pieces)
        assert abs((total / count - mean).item()) < 1e-13 * max(1, abs(mean.item()))
        (got,) = torch.autograd.grad(total / count, outputs)
        assert torch.allclose(got, wanted, rtol=0, atol=1e-14)


@silent
@pytest.mark.parametrize("name", CASES)
def test_what_is_known_to_be_additive_is_accepted_as_a_function_too(name: str) -> None:
    make, make_outputs, make_targets = CASES[name]
    summed, outputs, targets = Totalled(make()), make_outputs(), make_targets()
    check(lambda o, t: summed(o, t, len(o)), outputs, targets, N)


@pytest.mark.parametrize(
    "name", ["mse", "ce probabilities", "kl batchmean", "ce bytes", "bce logits"]
)
def test_the_count_is_a_python_number_where_no_data_need_be_read(name: str) -> None:
    make, make_outputs, make_targets = CASES[name]
    _, count = Totalled(make())(make_outputs(), make_targets(), N)
    assert type(count) is int


def test_a_count_of_targets_is_exact_and_a_scalar_tensor() -> None:
    targets = torch.tensor([1, -100, 2, -100, 0])
    total, count = Totalled(nn.CrossEntropyLoss())(logits(5, C), targets, 5)
    assert (
        isinstance(count, Tensor)
        and count.shape == ()
        and not count.is_floating_point()
        and int(count) == 3
    )
    assert total.shape == ()


def test_all_targets_ignored_is_zero_over_zero() -> None:
    total, count = Totalled(nn.CrossEntropyLoss())(logits(4, C), torch.full((4,), -100), 4)
    assert float(total) == 0 and int(count) == 0


def test_a_sum_in_half_precision_neither_overflows_nor_loses_digits() -> None:
    outputs, targets = (
        torch.full((1000, 100), 20.0, dtype=torch.float16),
        torch.zeros(1000, 100, dtype=torch.float16),
    )
    total, count = Totalled(nn.MSELoss())(outputs, targets, 1000)
    assert float(total) / float(count) == 400.0
    weighted = nn.CrossEntropyLoss(weight=weights().bfloat16())
    total, count = Totalled(weighted)(logits(4, C).bfloat16(), classes(4), 4)
    assert total.dtype == torch.float32


def test_a_weight_changed_between_steps_counts() -> None:
    loss = nn.CrossEntropyLoss(weight=weights())
    summed = Totalled(loss)
    outputs, targets = logits(N, C), classes(N)
    summed(outputs, targets, N)
    loss.weight = weights().flip(0)
    loss.label_smoothing = 0.3
    total, count = summed(outputs, targets, N)
    assert abs(float(total / count - loss(outputs, targets))) < 1e-14


@pytest.mark.filterwarnings("ignore:Using a target size")
def test_broadcast_along_a_row_is_counted_as_pytorch_does() -> None:
    loss, outputs, targets = nn.MSELoss(), logits(N, C), torch.rand(N, 1)
    total, count = Totalled(loss)(outputs, targets, N)
    assert abs(float(total) / float(count) - float(loss(outputs, targets))) < 1e-14


@pytest.mark.parametrize(
    ("loss", "outputs", "targets", "shapes"),
    [
        (
            nn.MSELoss(),
            (8, 1),
            (8,),
            r"outputs float\d+\(8, 1\) and targets float\d+\(8,\): .*compare samples with other samples",
        ),
        (
            nn.BCELoss(weight=torch.rand(8)),
            (8,),
            (8,),
            r"weight \(8,\) has a value for each element of the batch",
        ),
        (nn.CrossEntropyLoss(), (8,), (8,), r"outputs \(batch, classes, \.\.\.\) are expected"),
    ],
)
def test_shapes_that_mix_samples_are_refused(
    loss: nn.Module, outputs: Any, targets: Any, shapes: str
) -> None:
    with pytest.raises(LossError, match=shapes):
        Totalled(loss.double())(torch.rand(outputs), torch.rand(targets), 8)


def test_shapes_that_the_loss_cant_take_are_both_said_on_the_first_call_only() -> None:
    summed = Totalled(nn.CrossEntropyLoss())
    with pytest.raises(
        LossError,
        match=r"^loss CrossEntropyLoss can't take outputs float\d+\(8, 10\) and targets int64\(7,\): ",
    ) as e:
        summed(logits(8, 10), classes(7), 8)
    assert "\n" not in str(e.value) and isinstance(e.value.__cause__, ValueError)
    summed(logits(8, 10), classes(8), 8)
    with pytest.raises(ValueError, match="batch_size"):
        summed(logits(8, 10), classes(7), 8)


def test_nested_outputs_are_told_by_their_shapes() -> None:
    with pytest.raises(
        LossError,
        match=r"outputs dict\(a=float\d+\(2, 3\), b=tuple\(float\d+\(4,\), None\)\) and targets int64\(2,\)",
    ):
        Totalled(nn.MSELoss())({"a": logits(2, 3), "b": (logits(4), None)}, classes(2), 2)


@pytest.mark.parametrize(
    ("loss", "outputs", "targets", "says"),
    [
        (nn.CrossEntropyLoss(), logits(4, 3), torch.ones(4), r"float32: give targets\.long\(\)"),
        (F.cross_entropy, logits(4, 3), torch.ones(4), r"float32: give targets\.long\(\)"),
        (nn.CrossEntropyLoss(), logits(4, 3), classes(4)[:, None], r"targets\.squeeze\(1\) takes"),
        (nn.CrossEntropyLoss(), logits(4, 3), classes(4, 3), r"int64: give targets\.float\(\)"),
        (nn.BCEWithLogitsLoss(), logits(4), classes(4), r"int64: give targets\.float\(\)"),
        (
            nn.CrossEntropyLoss(),
            logits(4, 3),
            classes(4) + 12,
            r"target \d+ is not one of .* ignore_index",
        ),
        (nn.CrossEntropyLoss(), None, classes(4), "forward returned None: let it return"),
        (lambda o, t: (o - t).sum(), None, logits(4), "forward returned None: let it return"),
        (
            nn.CrossEntropyLoss(),
            {"a": 1, "logits": 2},
            classes(4),
            r'return outputs\["logits"\] from',
        ),
        (nn.MSELoss(), (logits(4), None), logits(4), r"loss\(outputs\[0\], targets\)$"),
        (
            lambda o, t: F.cross_entropy(o, t),
            SimpleNamespace(mean=1),
            logits(4),
            r"return outputs\.mean",
        ),
    ],
)
def test_what_a_loss_cant_take_is_answered_with_what_to_write_in_later_calls_too(
    loss: Any, outputs: Any, targets: Any, says: str
) -> None:
    summed = Totalled(loss)
    for called in (False, True):
        summed._called = called
        with pytest.raises(LossError, match=f"can't take outputs .*: .*{says}") as error:
            summed(outputs, targets, 4)
        assert "\n" not in str(error.value) and error.value.__cause__ is not None


def test_a_loss_that_needs_no_outputs_keeps_its_own_error() -> None:
    with pytest.raises(LossError, match=r"outputs None and targets .*: 'boxes'$"):
        Totalled(lambda outputs, targets: {}["boxes"])(None, classes(4), 4)


# ---- a person's own losses -----------------------------------------------------------------------


def check(
    loss: Any,
    outputs: Any,
    targets: Any,
    samples: int,
) -> None:
    """As a step does in an update."""
    summed = Totalled(loss)
    whole = summed(outputs, targets, samples)
    LossCheck(summed, cuts=True)(outputs, targets, whole, samples, step=1)


def squared(outputs: Tensor, targets: Tensor) -> Tensor:
    return ((outputs - targets) ** 2).mean()


def test_a_mean_over_samples_passes_the_check_and_is_weighted_by_them() -> None:
    outputs, targets = logits(N, C), logits(N, C)
    check(squared, outputs, targets, N)
    total, count = Totalled(squared)(outputs, targets, N)
    assert count == N and abs(float(total) / N - float(squared(outputs, targets))) < 1e-14


def contrastive(outputs: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(outputs @ outputs.T, torch.arange(len(outputs)))


@pytest.mark.parametrize(
    "loss",
    [
        contrastive,
        lambda o, t: squared(o, t).sqrt(),
        lambda o, t: F.cross_entropy(o, t.argmax(1), weight=weights()),
        lambda o, t: F.cross_entropy(o, t.argmax(1), ignore_index=0),
        lambda o, t: (o - o.mean(0)).square().mean(),
    ],
)
def test_what_is_no_mean_over_samples_is_refused_with_both_numbers(loss: Any) -> None:
    with pytest.raises(
        LossError,
        match=r"not a mean over samples \(whole [\d.e-]+, its two parts .*return \(total, count",
    ):
        check(loss, logits(N, C), torch.rand(N, C).softmax(1), N)


@pytest.mark.parametrize(
    "loss", [nn.MSELoss(reduction="sum"), functools.partial(F.mse_loss, reduction="sum")]
)
def test_a_sum_is_refused_with_a_clear_word(loss: Any) -> None:
    with pytest.raises(LossError, match="a sum, its value depends on the batch size"):
        check(loss, logits(N, C), logits(N, C), N)


@pytest.mark.parametrize("samples", [2, 3, 4, 5, 8])
def test_the_check_works_on_the_smallest_batches(samples: int) -> None:
    check(squared, logits(samples, C), logits(samples, C), samples)
    with pytest.raises(LossError):
        check(contrastive, logits(samples, C), logits(samples, C), samples)


@pytest.mark.parametrize(
    ("dtype", "close"), [(torch.float32, True), (torch.bfloat16, True), (torch.float64, False)]
)
def test_the_tolerance_is_that_of_the_number_format(dtype: torch.dtype, close: bool) -> None:
    def almost(outputs: Tensor, targets: Tensor) -> Tensor:
        return squared(outputs, targets) * (1 + 1e-6 / len(outputs))

    outputs, targets = logits(N, C).to(dtype), logits(N, C).to(dtype)
    if close:
        check(almost, outputs, targets, N)
    else:
        with pytest.raises(LossError):
            check(almost, outputs, targets, N)


@dataclass
class Outputs:
    first: Tensor
    rest: dict[str, Any]


Pair = collections.namedtuple("Pair", "mean scale")


def test_any_nesting_of_outputs_and_targets_is_cut() -> None:
    def loss(outputs: Outputs, targets: Any) -> Tensor:
        pair = outputs.rest["pair"]
        return (
            squared(outputs.first, targets["y"][0])
            + squared(pair.mean, pair.scale)
            + (targets["k"] == "a")
        )

    outputs = Outputs(logits(N, C), {"pair": Pair(logits(N, 2), logits(N, 2)), "note": None})
    check(loss, outputs, {"y": [logits(N, C)], "k": "a"}, N)


def test_the_check_leaves_gradients_random_numbers_and_state_alone() -> None:
    class Counting(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("calls", torch.zeros(()))

        def forward(self, outputs: Tensor, targets: Tensor) -> Tensor:
            self.calls += 1
            torch.rand(3)
            return squared(outputs, targets)

    loss = Counting()
    outputs = logits(N, C).requires_grad_()
    state = torch.get_rng_state()
    whole = Loss(squared(outputs, torch.ones(N, C)) * N, N)
    check = LossCheck(Totalled(loss), cuts=True)
    check(outputs, torch.ones(N, C), whole, N, step=1)
    assert torch.equal(state, torch.get_rng_state())
    assert float(loss.calls) == 0 and outputs.grad is None


def test_a_batch_whose_loss_is_not_finite_is_left_to_the_step() -> None:
    check(squared, torch.full((4, 2), float("nan")), torch.ones(4, 2), 4)


def test_total_and_count_are_taken_as_they_are() -> None:
    def loss(outputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        return outputs.square().sum(), (targets > 0).sum()

    outputs, targets = logits(N, C), logits(N)
    check(loss, outputs, targets, N)
    total, count = Totalled(loss)(outputs, targets, N)
    assert float(total) == float(outputs.square().sum()) and int(count) == int((targets > 0).sum())


@pytest.mark.parametrize(
    ("value", "said"),
    [
        (
            torch.ones(4),
            r"shape \(4,\), not a scalar: reduction='none'\? return the sum and the count",
        ),
        (torch.ones(1), r"shape \(1,\), not a scalar"),
        (1.5, r"returned float, a scalar tensor is expected, or .*: leave out \.item\(\)"),
        ((1.5, 2), r"returned tuple\(float, int\), a scalar .*: leave out \.item\(\)"),
        (None, "returned None, a scalar tensor is expected, or"),
        ((torch.ones(()), {"log": 1}), r"\(total, count\): a scalar tensor and a number"),
        ((torch.ones(2), 2), r"\(total, count\): a scalar tensor and a number"),
        ((torch.ones(()), 2, 3), r"returned tuple\(float\d+\(\), int, int\), a scalar tensor"),
    ],
)
def test_what_a_loss_may_not_return_is_said(value: Any, said: str) -> None:
    with pytest.raises(LossError, match=said):
        Totalled(lambda o, t: value)(logits(4), logits(4), 4)


def test_reduction_none_is_refused_with_its_shape() -> None:
    with pytest.raises(LossError, match=r"loss MSELoss returned a tensor of shape \(4, 2\)"):
        Totalled(nn.MSELoss(reduction="none"))(logits(4, 2), logits(4, 2), 4)


def test_a_loss_that_learns_belongs_in_the_model() -> None:
    class Learned(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.ones(()))

    with pytest.raises(LossError, match=r"parameters that learn \(scale\): put them in the model"):
        Totalled(Learned())


@pytest.mark.parametrize(
    ("loss", "said"), [(nn.MSELoss, r"write MSELoss\(\)"), ("mse", "loss is a str")]
)
def test_what_is_no_loss_is_refused(loss: Any, said: str) -> None:
    with pytest.raises(LossError, match=said):
        Totalled(loss)


def test_a_subclass_is_not_taken_for_its_base() -> None:
    class Doubled(nn.CrossEntropyLoss):
        def forward(self, input: Tensor, target: Tensor) -> Tensor:
            return 2 * super().forward(input, target)

    assert not Totalled(Doubled()).is_known
    hooked = nn.MSELoss()
    hooked.register_forward_hook(lambda module, args, value: value * 2)
    assert not Totalled(hooked).is_known


@pytest.mark.parametrize("loss", [nn.CrossEntropyLoss(), lambda o, t: F.cross_entropy(o, t)])
def test_copies_and_pickles_give_the_same(loss: Any) -> None:
    summed = Totalled(loss)
    outputs, targets = logits(N, C), classes(N)
    for other in (copy.deepcopy(summed), pickle.loads(cloudpickle.dumps(summed))):
        assert float(other(outputs, targets, N)[0]) == float(summed(outputs, targets, N)[0])


def test_threads_may_call_it_at_once() -> None:
    summed = Totalled(nn.CrossEntropyLoss(weight=weights()))
    outputs, targets = logits(N, C), classes(N)
    wanted = float(summed(outputs, targets, N)[0])
    got: list[float] = []

    def work() -> None:
        got.extend(float(summed(outputs, targets, N)[0]) for _ in range(50))

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert got == [wanted] * 200


def test_tensors_of_a_loss_follow_the_outputs() -> None:
    class Focal(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("alpha", weights())

        def forward(self, outputs: Tensor, targets: Tensor) -> Tensor:
            return (outputs * self.alpha).mean()

    for loss in (nn.CrossEntropyLoss(weight=weights()), Focal()):
        total, count = Totalled(loss)(logits(N, C).to("meta"), classes(N).to("meta"), N)
        assert total.device.type == "meta"
        assert count.device.type == "meta" if isinstance(count, Tensor) else count == N


def test_a_count_that_depends_on_parameters_is_refused() -> None:
    """Its gradient was left out without a line."""

    def overlap(outputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        chances = outputs.sigmoid()
        return -2 * (chances * targets).sum(), (chances + targets).sum()

    loss = Totalled(overlap)
    outputs = logits(4, 2)
    with pytest.raises(
        LossError, match=r"overlap: the count depends on parameters.*count\.detach\(\)"
    ):
        loss(outputs.requires_grad_(), torch.ones(4, 2), 4)
    with torch.no_grad():
        loss(outputs, torch.ones(4, 2), 4)
