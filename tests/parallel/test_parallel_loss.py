"""A parallel loss: the numbers of the plain one, on any number of devices, in chunks of any
size.
"""

from __future__ import annotations

import copy
import functools
import gc
import warnings
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from benchmarks.live_memory import LiveBytes
from lockstep.errors import InputError, LossError
from lockstep.launch.devices import slots
from lockstep.parallel import Balanced, DataParallel, ParallelLoss

BATCH, TIME, WIDTH, WORDS = 7, 11, 6, 13
PADDING = 0


@pytest.fixture(autouse=True)
def _float64() -> Any:
    torch.set_default_dtype(torch.float64)
    torch.manual_seed(0)
    yield
    torch.set_default_dtype(torch.float32)


class Tied(nn.Module):
    """Embedding, a trunk, and an output layer that is the embedding itself."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(WORDS, WIDTH)
        self.trunk = nn.Linear(WIDTH, WIDTH)
        self.generator = nn.Linear(WIDTH, WORDS)
        self.generator.weight = self.embedding.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.trunk(self.embedding(tokens)).tanh()


def tokens(batch: int = BATCH, time: int = TIME) -> tuple[torch.Tensor, torch.Tensor]:
    """Inputs and targets, of which about a third is padding, unequally over the batch."""
    inputs = torch.randint(1, WORDS, (batch, time))
    targets = torch.randint(1, WORDS, (batch, time))
    for row in range(batch):
        targets[row, time - (row * 2) % max(1, time) :] = PADDING
    return inputs, targets


def smoothed(log_p: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """KL to a smoothed target, a sum over rows that are no padding: the criterion of the
    Annotated Transformer.
    """
    wanted = torch.full_like(log_p, 0.1 / (WORDS - 2))
    wanted.scatter_(1, targets[:, None], 0.9)
    wanted[:, PADDING] = 0
    wanted[targets == PADDING] = 0
    return F.kl_div(log_p, wanted, reduction="sum")


def kl(log_p: torch.Tensor, targets: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return smoothed(log_p, targets), (targets != PADDING).sum()


WEIGHTS = torch.linspace(0.5, 2, WORDS, dtype=torch.float64)
CRITERIA: dict[str, Callable[[], Any]] = {
    "cross-entropy": lambda: nn.CrossEntropyLoss(ignore_index=PADDING),
    "smoothed, weighted": lambda: nn.CrossEntropyLoss(
        WEIGHTS, ignore_index=PADDING, label_smoothing=0.1
    ),
    "NLL": lambda: nn.NLLLoss(ignore_index=PADDING),
    "KL": lambda: kl,
}


def is_log(name: str) -> bool:
    return name.startswith(("NLL", "KL"))


def plain(
    generator: nn.Module, criterion: Any, hidden: torch.Tensor, targets: torch.Tensor
) -> torch.Tensor:
    """The loss as one would write it."""
    logits = generator(hidden).flatten(0, 1)
    found = criterion(logits, targets.flatten())
    return found[0] / found[1] if isinstance(found, tuple) else found


def gradients(module: nn.Module) -> dict[str, torch.Tensor | None]:
    found = {name: p.grad for name, p in module.named_parameters()}
    module.zero_grad()
    return found


def same(one: dict[str, torch.Tensor | None], other: dict[str, torch.Tensor | None]) -> None:
    assert one.keys() == other.keys()
    for name, expected in other.items():
        if expected is None:
            assert one[name] is None, name
        else:
            torch.testing.assert_close(one[name], expected, rtol=1e-12, atol=1e-12, msg=name)


def both(
    model: Tied,
    generator: nn.Module,
    criterion: Any,
    loss_of: ParallelLoss,
    batch: tuple[torch.Tensor, torch.Tensor],
) -> None:
    """The plain and the parallel loss have the same value and gradients."""
    inputs, targets = batch
    expected = plain(generator, criterion, model(inputs), targets)
    expected.backward()
    theirs = gradients(model)
    found = loss_of(model(inputs), targets)
    assert found.loss.item() == pytest.approx(expected.item(), rel=1e-12)
    found.loss.backward()
    same(gradients(model), theirs)


@pytest.mark.parametrize("devices", [1, 2, 3])
@pytest.mark.parametrize("name", CRITERIA)
def test_it_has_the_value_and_the_gradients_of_the_plain_loss(name: str, devices: int) -> None:
    criterion = CRITERIA[name]()
    model = Tied()
    generator: nn.Module = (
        nn.Sequential(model.generator, nn.LogSoftmax(-1)) if is_log(name) else model.generator
    )
    for chunk_size in (1, 4, TIME, 100, None):
        both(
            model,
            generator,
            criterion,
            ParallelLoss(generator, criterion, f"{devices}xcpu", chunk_size),
            tokens(),
        )


@pytest.mark.parametrize("batch, time", [(1, TIME), (2, 1), (3, 5), (8, 2)])
def test_batches_smaller_than_the_devices_and_single_time_steps(batch: int, time: int) -> None:
    model, criterion = Tied(), nn.CrossEntropyLoss(ignore_index=PADDING)
    both(
        model,
        model.generator,
        criterion,
        ParallelLoss(model.generator, criterion, "3xcpu", 2),
        tokens(batch, time),
    )


def test_a_share_or_a_chunk_whose_tokens_are_all_ignored_counts_nothing() -> None:
    model, criterion = Tied(), nn.CrossEntropyLoss(ignore_index=PADDING)
    inputs, targets = tokens(4, 6)
    targets[:2] = PADDING  # the whole share of the first slot
    targets[:, 2:4] = PADDING  # and a chunk of the other
    targets[3, 0] = 5
    both(
        model,
        model.generator,
        criterion,
        ParallelLoss(model.generator, criterion, "2xcpu", 2),
        (inputs, targets),
    )


def test_nothing_but_ignored_tokens_is_an_error_of_the_mean_alone() -> None:
    model = Tied()
    found = ParallelLoss(model.generator, nn.CrossEntropyLoss(ignore_index=PADDING), "2xcpu", 2)(
        model(tokens()[0]), torch.full((BATCH, TIME), PADDING)
    )
    total, count = found
    assert total == 0 and count == 0
    with pytest.raises(LossError, match="count is 0"):
        _ = found.loss


def test_no_time_steps_at_all_give_zeros() -> None:
    hidden = torch.randn(4, 0, WIDTH, requires_grad=True)
    generator = nn.Linear(WIDTH, WORDS)
    found = ParallelLoss(generator, nn.CrossEntropyLoss(), "2xcpu", 2)(
        hidden, torch.zeros(4, 0, dtype=torch.long)
    )
    found.total.backward()
    assert (
        found.total == 0
        and found.count == 0
        and hidden.grad is not None
        and hidden.grad.shape == hidden.shape
    )


def test_hidden_states_without_time_are_a_classifiers() -> None:
    generator, criterion = nn.Linear(WIDTH, WORDS), nn.CrossEntropyLoss()
    hidden, targets = torch.randn(5, WIDTH, requires_grad=True), torch.randint(WORDS, (5,))
    expected = torch.autograd.grad(
        criterion(generator(hidden), targets), [hidden, *generator.parameters()]
    )
    found = torch.autograd.grad(
        ParallelLoss(generator, criterion, "2xcpu", 2)(hidden, targets).loss,
        [hidden, *generator.parameters()],
    )
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("time", [None, 1, 4])
def test_targets_and_states_without_time_beside_hidden_states_without_it_and_with(
    time: int | None,
) -> None:
    """Rows of (batch, width) are the criterion's as they are, and nothing takes a width for a
    time.
    """

    def nearest(logits: torch.Tensor, targets: dict[str, torch.Tensor]) -> tuple[torch.Tensor, int]:
        soft = F.cross_entropy(logits, targets["soft"], reduction="sum")
        return soft + (logits[:, :4] - targets["state"]).square().sum(), len(logits)

    generator = nn.Linear(WIDTH, WORDS)
    hidden = torch.randn(5, WIDTH) if time is None else torch.randn(5, time, WIDTH)
    targets = {"soft": torch.rand(5, WORDS), "state": torch.rand(5, 4)}
    loss_of = ParallelLoss(generator, nearest, "2xcpu")
    if time is not None:
        with pytest.raises(
            InputError, match=r"targets \(5, \d+\) beside outputs of 5 samples and \d time steps"
        ):
            loss_of(hidden, targets)
        return
    total, count = nearest(generator(hidden), targets)
    expected = torch.autograd.grad(total / count, list(generator.parameters()))
    found = torch.autograd.grad(loss_of(hidden, targets).loss, list(generator.parameters()))
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)


def test_targets_may_be_a_nest_of_tensors() -> None:
    def weighted(
        logits: torch.Tensor, targets: dict[str, torch.Tensor]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        each = F.cross_entropy(logits, targets["words"], reduction="none")
        return (each * targets["weights"]).sum(), targets["weights"].sum()

    model = Tied()
    inputs, words = tokens()
    weights = torch.rand(BATCH, TIME)
    each = F.cross_entropy(
        model.generator(model(inputs)).flatten(0, 1), words.flatten(), reduction="none"
    )
    ((each * weights.flatten()).sum() / weights.sum()).backward()
    expected = gradients(model)
    loss_of = ParallelLoss(model.generator, weighted, "2xcpu", 3)
    loss_of(model(inputs), {"words": words, "weights": weights}).loss.backward()
    same(gradients(model), expected)


@pytest.mark.parametrize("criterion", [nn.KLDivLoss(reduction="batchmean"), nn.CrossEntropyLoss()])
def test_targets_may_be_probabilities_of_words(criterion: nn.Module) -> None:
    model = Tied()
    generator = nn.Sequential(model.generator, nn.LogSoftmax(-1))
    inputs, soft = tokens()[0], torch.rand(BATCH, TIME, WORDS).softmax(-1)
    expected = criterion(generator(model(inputs)).flatten(0, 1), soft.flatten(0, 1))
    expected.backward()
    theirs = gradients(model)
    found = ParallelLoss(generator, criterion, "2xcpu", 3)(model(inputs), soft)
    assert (
        found.loss.item() == pytest.approx(expected.item(), rel=1e-12)
        and found.count == BATCH * TIME
    )
    found.loss.backward()
    same(gradients(model), theirs)


def test_a_criterion_that_gives_a_scalar_is_divided_by_the_count_of_the_call() -> None:
    model = Tied()
    generator = nn.Sequential(model.generator, nn.LogSoftmax(-1))
    inputs, targets = tokens()
    count = (targets != PADDING).sum()
    (smoothed(generator(model(inputs)).flatten(0, 1), targets.flatten()) / count).backward()
    expected = gradients(model)
    loss_of = ParallelLoss(generator, smoothed, "2xcpu", 3)
    found = loss_of(model(inputs), targets, count=count)
    found.loss.backward()
    same(gradients(model), expected)
    assert found.count is count
    with pytest.raises(LossError, match=r"smoothed returned a scalar.*count=tokens"):
        loss_of(model(inputs), targets)


@pytest.mark.parametrize(
    "criterion",
    [
        nn.CrossEntropyLoss(ignore_index=PADDING, reduction="sum"),
        functools.partial(F.cross_entropy, ignore_index=PADDING, reduction="sum"),
    ],
)
def test_a_sum_of_pytorch_is_divided_by_the_count_of_the_call(criterion: Any) -> None:
    model = Tied()
    inputs, targets = tokens()
    count = (targets != PADDING).sum()
    (plain(model.generator, criterion, model(inputs), targets) / count).backward()
    expected = gradients(model)
    loss_of = ParallelLoss(model.generator, criterion, "2xcpu", 3)
    loss_of(model(inputs), targets, count=count).loss.backward()
    same(gradients(model), expected)
    with pytest.raises(LossError, match=r"without the number of tokens.*count=tokens"):
        loss_of(model(inputs), targets)


def test_a_criterion_that_is_a_mean_of_its_own_is_found_out() -> None:
    def mean(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(logits, targets)

    model = Tied()
    inputs, targets = tokens()
    with pytest.raises(LossError, match="mean is not a sum over tokens"):
        ParallelLoss(model.generator, mean, "2xcpu", 3)(model(inputs), targets, count=3)


def test_several_calls_accumulate_and_the_loss_may_be_scaled() -> None:
    model, criterion = Tied(), nn.CrossEntropyLoss(ignore_index=PADDING)
    loss_of = ParallelLoss(model.generator, criterion, "2xcpu", 4)
    batches = [tokens(), tokens(3)]
    for inputs, targets in batches:
        (plain(model.generator, criterion, model(inputs), targets) * 0.5).backward()
    expected = gradients(model)
    for inputs, targets in batches:
        (loss_of(model(inputs), targets).loss * 0.5).backward()
    same(gradients(model), expected)


def test_it_is_one_part_of_a_loss_of_several() -> None:
    model, criterion = Tied(), nn.CrossEntropyLoss(ignore_index=PADDING)
    loss_of = ParallelLoss(model.generator, criterion, "2xcpu", 4)
    inputs, targets = tokens()
    hidden = model(inputs)
    (plain(model.generator, criterion, hidden, targets).exp() + hidden.square().mean()).backward()
    expected = gradients(model)
    hidden = model(inputs)
    (loss_of(hidden, targets).loss.exp() + hidden.square().mean()).backward()
    same(gradients(model), expected)


def test_a_graph_that_is_kept_gives_the_same_gradients_again() -> None:
    model = Tied()
    inputs, targets = tokens()
    loss = ParallelLoss(model.generator, nn.CrossEntropyLoss(), "2xcpu", 4)(
        model(inputs), targets
    ).loss
    loss.backward(retain_graph=True)
    first = {name: grad.clone() for name, grad in gradients(model).items() if grad is not None}
    loss.backward(retain_graph=True)
    same(gradients(model), first)  # type: ignore[arg-type]
    loss.backward()
    same(gradients(model), first)  # type: ignore[arg-type]
    with pytest.raises(RuntimeError, match="second time"):
        loss.backward()


def test_a_second_derivative_is_refused() -> None:
    hidden = torch.randn(3, 4, WIDTH, requires_grad=True)
    loss = ParallelLoss(nn.Linear(WIDTH, WORDS), nn.CrossEntropyLoss(), "2xcpu", 2)(
        hidden, torch.randint(WORDS, (3, 4))
    ).loss
    with pytest.raises(InputError, match="can't be differentiated twice"):
        torch.autograd.grad(loss, hidden, create_graph=True)


@pytest.mark.parametrize("frozen", ["generator", "bias", "weight", "trunk"])
def test_what_is_frozen_gets_no_gradient(frozen: str) -> None:
    model, criterion = Tied(), nn.CrossEntropyLoss(ignore_index=PADDING)
    model.generator.weight = nn.Parameter(torch.randn(WORDS, WIDTH))
    if frozen in ("bias", "weight"):
        getattr(model.generator, frozen).requires_grad_(False)
    elif frozen == "generator":
        model.generator.requires_grad_(False)
    else:
        model.embedding.requires_grad_(False)
        model.trunk.requires_grad_(False)
    both(
        model,
        model.generator,
        criterion,
        ParallelLoss(model.generator, criterion, "2xcpu", 4),
        tokens(),
    )


def test_without_gradients_it_only_evaluates() -> None:
    model, criterion = Tied(), nn.CrossEntropyLoss(ignore_index=PADDING)
    inputs, targets = tokens()
    loss_of = ParallelLoss(model.generator, criterion, "2xcpu", 4)
    expected = plain(model.generator, criterion, model(inputs), targets).item()
    for mode in (torch.no_grad(), torch.inference_mode()):
        with mode:
            found = loss_of(model(inputs), targets)
        assert found.loss.item() == pytest.approx(expected, rel=1e-12)
        assert not found.total.requires_grad
    model.requires_grad_(False)
    assert not loss_of(model(inputs), targets).total.requires_grad
    assert all(p.grad is None for p in model.parameters())


def test_weights_that_change_between_calls_are_seen() -> None:
    model, criterion = Tied(), nn.CrossEntropyLoss(ignore_index=PADDING)
    loss_of = ParallelLoss(model.generator, criterion, "2xcpu", 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(3):
        both(model, model.generator, criterion, loss_of, batch := tokens())
        loss_of(model(batch[0]), batch[1]).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    model.generator.weight.data.mul_(2)
    both(model, model.generator, criterion, loss_of, tokens())


def test_a_deep_generator_with_uses_of_a_weight_that_are_not_linear_layers() -> None:
    class Deep(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(WIDTH, WIDTH)
            self.norm = nn.LayerNorm(WIDTH)
            self.out = nn.Linear(WIDTH, WORDS, bias=False)
            self.unused = nn.Linear(2, 2)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = self.norm(x + self.inner(self.inner(x)).relu())
            return self.out(x) + 0.1 * (x @ self.out.weight.t()).sin()

    model, criterion = Tied(), nn.CrossEntropyLoss(ignore_index=PADDING)
    model.generator = Deep()  # type: ignore[assignment]
    both(
        model,
        model.generator,
        criterion,
        ParallelLoss(model.generator, criterion, "2xcpu", 4),
        tokens(),
    )


@pytest.mark.parametrize("reentrant", [False, True])
def test_a_generator_may_checkpoint_its_activations(reentrant: bool) -> None:
    class Checkpointed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner, self.out = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WORDS)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.out(checkpoint(lambda y: self.inner(y).relu(), x, use_reentrant=reentrant))

    model, criterion = Tied(), nn.CrossEntropyLoss(ignore_index=PADDING)
    model.generator = Checkpointed()  # type: ignore[assignment]
    both(
        model,
        model.generator,
        criterion,
        ParallelLoss(model.generator, criterion, "2xcpu", 4),
        tokens(),
    )


# ---- random numbers ------------------------------------------------------------------------------


def test_dropout_in_the_generator_has_a_stream_for_each_slot() -> None:
    generator = nn.Sequential(nn.Dropout(0.5), nn.Linear(WIDTH, WORDS))
    hidden, targets = torch.randn(BATCH, TIME, WIDTH), tokens()[1]
    loss_of = ParallelLoss(generator, nn.CrossEntropyLoss(), "3xcpu", 2)

    def once(seed: int) -> tuple[float, torch.Tensor]:
        torch.manual_seed(seed)
        loss = loss_of(hidden, targets).loss
        loss.backward()
        return loss.item(), gradients(generator)["1.weight"]

    first = once(1)
    for _ in range(3):
        again = once(1)
        assert again[0] == first[0] and torch.equal(again[1], first[1])
    assert once(2)[0] != first[0]
    same_rows = ParallelLoss(generator, nn.CrossEntropyLoss(), "2xcpu", TIME)
    twice = same_rows(hidden[:1].expand(2, -1, -1), targets[:1].expand(2, -1)).total
    halves = [
        ParallelLoss(generator, nn.CrossEntropyLoss(), "1xcpu", TIME)(hidden[:1], targets[:1]).total
    ]
    assert twice.item() != pytest.approx(2 * halves[0].item())  # each slot drew another mask


def test_on_one_slot_dropout_is_that_of_the_plain_loss() -> None:
    generator = nn.Sequential(nn.Dropout(0.5), nn.Linear(WIDTH, WORDS))
    hidden, targets = torch.randn(BATCH, TIME, WIDTH), tokens()[1]
    torch.manual_seed(3)
    expected = F.cross_entropy(generator(hidden).flatten(0, 1), targets.flatten())
    torch.manual_seed(3)
    found = ParallelLoss(generator, nn.CrossEntropyLoss(), "1xcpu", TIME)(hidden, targets)
    assert found.loss.item() == pytest.approx(expected.item(), rel=1e-12)


def test_a_generator_without_dropout_leaves_the_callers_random_numbers_alone() -> None:
    generator = nn.Linear(WIDTH, WORDS)
    hidden, targets = torch.randn(BATCH, TIME, WIDTH), tokens()[1]
    before = torch.get_rng_state()
    ParallelLoss(generator, nn.CrossEntropyLoss(), "2xcpu", 2)(hidden, targets).loss.backward()
    assert torch.equal(torch.get_rng_state(), before)


# ---- outputs that were left on their devices -----------------------------------------------------


@pytest.mark.parametrize("batch", [1, 5, 6])
def test_outputs_left_on_their_devices_are_taken_as_they_are(batch: int) -> None:
    torch.manual_seed(1)
    net, criterion = (
        nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3)),
        nn.CrossEntropyLoss(),
    )
    inputs, targets = torch.randn(batch, 4), torch.randint(3, (batch,))
    expected = criterion(net(inputs), targets)
    expected.backward()
    theirs = gradients(net)
    outputs = DataParallel(net, [*slots(2)], balanced=True)(inputs)
    assert isinstance(outputs, Balanced)
    loss = ParallelLoss(None, criterion, [*slots(2)])(outputs, targets).loss
    assert loss.item() == pytest.approx(expected.item(), rel=1e-12)
    loss.backward()
    same(gradients(net), theirs)


def test_a_generator_takes_the_hidden_states_that_replicas_left() -> None:
    model, criterion = Tied(), nn.CrossEntropyLoss(ignore_index=PADDING)
    inputs, targets = tokens()
    plain(model.generator, criterion, model(inputs), targets).backward()
    expected = gradients(model)
    trunk = DataParallel(model, [*slots(3)], balanced=True)
    ParallelLoss(model.generator, criterion, chunk_size=4)(trunk(inputs), targets).loss.backward()
    same(gradients(model), expected)


def test_outputs_of_any_nesting_go_to_a_criterion_without_a_generator() -> None:
    def loss(outputs: dict[str, torch.Tensor], targets: torch.Tensor) -> tuple[torch.Tensor, int]:
        return F.cross_entropy(outputs["logits"], targets, reduction="sum") + outputs[
            "aside"
        ].sum(), len(targets)

    logits, aside = torch.randn(5, 3, requires_grad=True), torch.randn(5, requires_grad=True)
    targets = torch.randint(3, (5,))
    total, count = loss({"logits": logits, "aside": aside}, targets)
    expected = torch.autograd.grad(total / count, [logits, aside])
    found = ParallelLoss(None, loss, "2xcpu")({"logits": logits, "aside": aside}, targets)
    torch.testing.assert_close(
        torch.autograd.grad(found.loss, [logits, aside]), expected, rtol=1e-12, atol=1e-12
    )


def test_without_a_generator_a_chunk_size_cuts_outputs_in_time() -> None:
    logits, targets = torch.randn(4, 5, 3, requires_grad=True), torch.randint(3, (4, 5))
    expected = torch.autograd.grad(F.cross_entropy(logits.flatten(0, 1), targets.flatten()), logits)
    found = ParallelLoss(None, nn.CrossEntropyLoss(), "3xcpu", chunk_size=2)(logits, targets)
    torch.testing.assert_close(
        torch.autograd.grad(found.loss, logits), expected, rtol=1e-12, atol=1e-12
    )


# ---- number formats and memory -------------------------------------------------------------------


def test_a_scaled_loss_in_reduced_precision_is_near_to_the_plain_one() -> None:
    torch.set_default_dtype(torch.float32)
    model, criterion = Tied(), nn.CrossEntropyLoss(ignore_index=PADDING)
    inputs, targets = tokens()
    loss_of = ParallelLoss(model.generator, criterion, "2xcpu", 4)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    found = []
    for kind in ("plain", "parallel"):
        with torch.autocast("cpu", torch.bfloat16):
            hidden = model(inputs)
            loss = plain(model.generator, criterion, hidden, targets) if kind == "plain" else None
            loss = loss_of(hidden, targets).loss if loss is None else loss
        scaler.scale(loss).backward()
        found.append(gradients(model))
    for name, expected in found[0].items():
        assert (
            expected is not None
            and (found[1][name] - expected).abs().max() < 0.03 * expected.abs().max()
        )


def test_the_logits_never_exist_whole_and_memory_is_level() -> None:
    batch, time, width, words = 8, 16, 8, 5000
    hidden, targets = (
        torch.randn(batch, time, width, requires_grad=True),
        torch.randint(words, (batch, time)),
    )
    generator = nn.Linear(width, words)
    criterion = nn.CrossEntropyLoss()

    def peak(loss: Callable[[], torch.Tensor]) -> LiveBytes:
        generator.zero_grad(set_to_none=True)
        hidden.grad = None
        with LiveBytes() as live:
            loss().backward()
        return live

    whole = peak(lambda: criterion(generator(hidden).flatten(0, 1), targets.flatten()))
    logits = batch * time * words * 8
    assert whole.peak() >= 3 * logits
    one = peak(lambda: ParallelLoss(generator, criterion, "1xcpu", 1)(hidden, targets).loss)
    assert one.peak() < whole.peak() / 4
    two = peak(lambda: ParallelLoss(generator, criterion, "2xcpu", 2)(hidden, targets).loss)
    on_slots = [two.peak(owner) for owner in ("cpu:0", "cpu:1")]
    assert on_slots[0] == pytest.approx(on_slots[1], rel=0.05)
    assert max(on_slots) < whole.peak() / 4


def test_nothing_of_a_batch_lives_on_after_it() -> None:
    model = Tied()
    inputs, targets = tokens()
    loss_of = ParallelLoss(model.generator, nn.CrossEntropyLoss(), "2xcpu", 4)
    hidden = model(inputs)
    gone = weakref.ref(hidden)
    gc.disable()
    try:
        loss_of(hidden, targets).loss.backward()
        del hidden
        assert gone() is None
    finally:
        gc.enable()


# ---- what bad input gets -------------------------------------------------------------------------


def test_what_it_is_made_of_is_checked() -> None:
    generator = nn.Linear(WIDTH, WORDS)
    with pytest.raises(LossError, match="write CrossEntropyLoss"):
        ParallelLoss(generator, nn.CrossEntropyLoss, "2xcpu")
    with pytest.raises(LossError, match="parameters that learn"):
        ParallelLoss(generator, nn.Linear(2, 2), "2xcpu")


@pytest.mark.parametrize(
    "hidden, targets, message",
    [
        ((0, 4, WIDTH), (0, 4), "batch of 0"),
        ((3, 4, WIDTH), (4, 4), r"targets \(4, 4\) beside outputs of 3 samples and 4 time steps"),
        ((3, 4, WIDTH), (3, 5), r"targets \(3, 5\) beside outputs of 3 samples and 4 time steps"),
        ((3, 4, WIDTH), (12,), r"targets \(12,\)"),
    ],
)
def test_shapes_that_do_not_go_together(
    hidden: tuple[int, ...], targets: tuple[int, ...], message: str
) -> None:
    loss_of = ParallelLoss(nn.Linear(WIDTH, WORDS), nn.CrossEntropyLoss(), "2xcpu", 2)
    with pytest.raises(InputError, match=message):
        loss_of(torch.randn(hidden), torch.zeros(targets, dtype=torch.long))


def test_no_outputs_at_all_are_a_batch_of_0() -> None:
    with pytest.raises(InputError, match="batch of 0"):
        ParallelLoss(None, nn.CrossEntropyLoss())(
            Balanced([], []), torch.zeros(0, dtype=torch.long)
        )


def test_a_generator_that_can_not_be_cut_in_chunks_is_refused() -> None:
    hidden, targets = torch.randn(4, 4, WIDTH), torch.zeros(4, 4, dtype=torch.long)

    def loss_of(*layers: nn.Module) -> Any:
        return ParallelLoss(nn.Sequential(*layers), nn.CrossEntropyLoss(), "2xcpu", 2)(
            hidden, targets
        )

    with pytest.raises(
        InputError, match="0 is a BatchNorm1d, which would normalize each chunk of tokens by itself"
    ):
        loss_of(nn.BatchNorm1d(4), nn.Linear(WIDTH, WORDS))
    with pytest.raises(InputError, match=r"LazyLinear.*uninitialized"):
        loss_of(nn.LazyLinear(WORDS))


def test_a_weight_that_is_computed_has_its_gradient() -> None:
    """Weight norm's weight is no leaf: the gradient must reach what it is computed of."""
    torch.manual_seed(0)
    hidden, targets = torch.randn(4, 4, WIDTH), torch.randint(WORDS, (4, 4))
    grads = []
    for parallel in (True, False):
        torch.manual_seed(1)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            layer = torch.nn.utils.weight_norm(nn.Linear(WIDTH, WORDS))
        if parallel:
            loss = ParallelLoss(layer, nn.CrossEntropyLoss(), "2xcpu", 2)(hidden, targets).loss
        else:
            loss = nn.functional.cross_entropy(layer(hidden).flatten(0, 1), targets.flatten())
        loss.backward()
        grads.append(layer.weight_v.grad)
    torch.testing.assert_close(*grads)


class _Repeated(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.cat([x] * 6)


def test_tensors_that_want_gradients_and_would_get_none_are_refused() -> None:
    other = torch.randn(WORDS, requires_grad=True)
    hidden, targets = (
        torch.randn(3, 4, WIDTH, requires_grad=True),
        torch.zeros(3, 4, dtype=torch.long),
    )

    def closed_over(logits: torch.Tensor, targets: torch.Tensor) -> tuple[torch.Tensor, int]:
        return F.cross_entropy(logits + other, targets, reduction="sum"), len(targets)

    with pytest.raises(InputError, match=r"a tensor \(13,\) that wants gradients"):
        ParallelLoss(nn.Linear(WIDTH, WORDS), closed_over, "2xcpu", 2)(hidden, targets)
    soft = torch.randn(3, 4, WORDS, requires_grad=True)
    with pytest.raises(InputError, match="detach them"):
        ParallelLoss(nn.Linear(WIDTH, WORDS), nn.CrossEntropyLoss(), "2xcpu", 2)(hidden, soft)


def test_what_a_device_raises_names_it() -> None:
    hidden = torch.randn(4, 4, WIDTH)
    targets = torch.zeros(4, 4, dtype=torch.long)
    targets[3] = WORDS + 5
    loss_of = ParallelLoss(nn.Linear(WIDTH, WORDS), nn.CrossEntropyLoss(), "2xcpu", 2)
    loss_of(hidden, targets.clamp(max=1))
    with pytest.raises(LossError, match=f"target {WORDS + 5} is not one of the classes") as raised:
        loss_of(hidden, targets)
    assert "raised by replica 1 on cpu:1" in raised.value.__notes__


def test_it_can_be_copied_with_its_model() -> None:
    model = Tied()
    loss_of = copy.deepcopy(ParallelLoss(model.generator, nn.CrossEntropyLoss(), "2xcpu", 2))
    inputs, targets = tokens()
    expected = plain(model.generator, nn.CrossEntropyLoss(), model(inputs), targets).item()
    assert loss_of(model(inputs), targets).loss.item() == pytest.approx(expected, rel=1e-12)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("devices", [[0], [0, 0]])
def test_on_one_gpu_it_has_the_numbers_of_the_plain_loss(devices: list[int]) -> None:
    model, criterion = Tied().cuda(), nn.CrossEntropyLoss(ignore_index=PADDING)
    inputs, targets = (t.cuda() for t in tokens())
    both(
        model,
        model.generator,
        criterion,
        ParallelLoss(model.generator, criterion, devices, 4),
        (inputs, targets),
    )
